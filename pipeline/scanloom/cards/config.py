"""A MONAI bundle's config read as data: references are followed, nothing is imported or run.

MONAI's own parser hands every ``$expression`` to Python and calls whatever a ``_target_`` names.
Here an expression is parsed and worked out by a small interpreter that knows a closed list of
forms; a ``_target_`` is only a name. Only what is asked for is read: what stands in ``imports``,
``initialize``, ``run`` or ``handlers`` is never looked at.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from scanloom.core import Reason, ScanError, printable

MAX_CHARS: Final = 500
"""Longest expression that is parsed; the longest needed one of MONAI's model zoo has 104."""
MAX_DEPTH: Final = 50
"""Deepest nesting of values, references and expressions together; MONAI's model zoo needs 12."""
MAX_STEPS: Final = 50_000
"""Values that are worked out for one bundle; MONAI's model zoo needs under 400."""
MAX_LENGTH: Final = 10_000
"""Longest list or text that an expression may build."""
MAX_WHOLE: Final = 2**63 - 1
"""Largest whole number."""

_REFERENCE = re.compile(r"@([A-Za-z_]\w*(?:(?:#|::)\w+)*)")
_MARK: Final = "_reference_"
_KEYWORDS: Final = ("_target_", "_disabled_", "_desc_", "_mode_", "_requires_")


@dataclass(frozen=True)
class Name:
    """Something that Python would know and that is no plain value, such as a dtype or a device."""

    text: str


@dataclass(frozen=True, eq=False)
class Component:
    """A ``_target_`` with its arguments: a description, never an object of that class."""

    target: str
    args: Mapping[str, Any]


def _names() -> dict[str, Any]:
    floats = ("float", "float16", "float32", "float64", "half", "double")
    whole = ("int8", "int16", "int32", "int64", "long", "uint8")
    names: dict[str, Any] = {
        f"{module}.{dtype}": Name(dtype)
        for module in ("torch", "numpy", "np")
        for dtype in floats + whole
    }
    for prefix in ("CommonKeys", "monai.utils.CommonKeys", "monai.utils.enums.CommonKeys"):
        names |= {f"{prefix}.{key.upper()}": key for key in ("image", "label", "pred")}
    return names


_NAMES: Final = _names()
_ARITHMETIC: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class Config:
    """The config of one bundle.

    Parameters
    ----------
    entries : mapping
        As JSON or YAML gave it.
    judge : callable
        Told each ``_target_`` before its arguments are read; raises ScanError where it is not on
        a list, and says whether its arguments matter.
    """

    def __init__(self, entries: Mapping[str, Any], judge: Callable[[str], bool]) -> None:
        self._entries = entries
        self._judge = judge
        self._known: dict[str, Any] = {}
        self._open: list[str] = []
        self._depth = 0
        self._steps = 0

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def raw(self, key: str) -> Any:
        """Return an entry as it stands in the file, None where there is none."""
        return self._entries.get(key)

    def get(self, path: str) -> Any:
        """Return the value of an entry, or of a part of it (``"inferer#roi_size"``).

        Returns
        -------
        None, bool, int, float, str, list, dict, Name or Component
            The same object each time.

        Raises
        ------
        ScanError
            MODEL_DAMAGED where it refers to what is not there, or to itself; MODEL_UNSAFE where
            code would have to run; MODEL_UNSUPPORTED where it is beyond the interpreter.
        """
        path = path.replace("::", "#")
        if path not in self._known:
            if path in self._open:
                raise ScanError(Reason.MODEL_DAMAGED, f"@{path} refers to itself")
            self._open.append(path)
            try:
                self._known[path] = self.value(self._find(path))
            finally:
                self._open.pop()
        return self._known[path]

    def value(self, raw: Any) -> Any:
        """Return what a piece of the file means; errors as `get`."""
        with self._deeper():
            if isinstance(raw, str):
                return self._text(raw)
            if isinstance(raw, Mapping):
                return self._component(raw) if "_target_" in raw else self._items(raw)
            if isinstance(raw, Sequence) and not isinstance(raw, bytes):
                return [self.value(item) for item in raw if not _disabled(item)]
            if raw is None or isinstance(raw, bool | int | float):
                return _bounded(raw)
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"a config value is a {type(raw).__name__}")

    def _items(self, raw: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: self.value(item) for key, item in raw.items() if not _disabled(item)}

    def _find(self, path: str) -> Any:
        found: Any = self._entries
        for key in path.split("#"):
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise ScanError(Reason.MODEL_DAMAGED, f"the config has no entry @{short(path)}")
        return found

    def _text(self, text: str) -> Any:
        if text.startswith("$"):
            return self._expression(text[1:].strip())
        if text.startswith("@"):
            reference = _REFERENCE.fullmatch(text)
            if reference is None:
                raise _refusal(text)
            return self.get(reference[1])
        if text.startswith("%"):
            raise ScanError(Reason.MODEL_UNSUPPORTED, f"the macro {short(text)} is not read")
        return text

    def _component(self, raw: Mapping[Any, Any]) -> Component:
        target = raw["_target_"]
        if not isinstance(target, str):
            raise ScanError(Reason.MODEL_DAMAGED, "a _target_ is no text")
        for key in ("_requires_", "_mode_"):
            if raw.get(key) not in (None, "default"):
                raise ScanError(Reason.MODEL_UNSUPPORTED, f"{short(target)} has {key}")
        if not self._judge(target):
            return Component(target, {})
        args = self._items({key: item for key, item in raw.items() if key not in _KEYWORDS})
        return Component(target, args)

    def _expression(self, text: str) -> Any:
        if len(text) > MAX_CHARS:
            raise ScanError(
                Reason.MODEL_UNSUPPORTED,
                f"an expression has {len(text)} characters, more than {MAX_CHARS}: {short(text)}",
            )
        if re.match(r"(import|from)\b", text):
            raise _refusal(text, Reason.MODEL_UNSAFE)
        references: dict[str, str] = {}

        def mark(match: re.Match[str]) -> str:
            references[name := f"{_MARK}{len(references)}"] = match[1]
            return name

        if _MARK in text:
            raise _refusal(text)
        return _Expression(self, text, references).evaluate(_REFERENCE.sub(mark, text))

    @contextmanager
    def _deeper(self) -> Iterator[None]:
        """Count one more value and one more level; refuse what has too many."""
        self._depth += 1
        self._steps += 1
        try:
            if self._depth > MAX_DEPTH:
                raise ScanError(Reason.MODEL_UNSUPPORTED, f"it nests deeper than {MAX_DEPTH}")
            if self._steps > MAX_STEPS:
                raise ScanError(Reason.MODEL_UNSUPPORTED, f"it has more than {MAX_STEPS} values")
            yield
        finally:
            self._depth -= 1


@dataclass(frozen=True)
class _Expression:
    """One expression; `references` are the config's entries by the names put in their place."""

    config: Config
    text: str
    references: Mapping[str, str]

    def evaluate(self, marked: str) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python's opinion on a foreign text
                tree = ast.parse(marked, mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError) as exc:
            raise _refusal(self.text) from exc
        try:
            return self._value(tree.body)
        except (ArithmeticError, TypeError, LookupError, ValueError) as exc:
            raise _refusal(self.text) from exc

    def _value(self, node: ast.expr) -> Any:
        with self.config._deeper():
            return self._judged(node)

    def _judged(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=None | bool() | int() | float() as value):
                return value
            case ast.Constant(value=str() as value) if _MARK not in value:
                return value
            case ast.Name(id=name) if name in self.references:
                return self.config.get(self.references[name])
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._value(item) for item in items]
            case ast.Dict(keys=keys, values=values):
                return self._dict(keys, values)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return self._arithmetic(type(op), self._value(left), self._value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -_number(self._value(operand))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._truth(self._value(operand))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._choice(self._value(test), self._value(body), self._value(orelse))
            case ast.Subscript(value=value, slice=key) if not isinstance(key, ast.Slice):
                return self._item(self._value(value), self._value(key))
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call(func=func, args=args, keywords=[]):
                return self._call(func, args)
            case ast.Name() | ast.Call() | ast.Lambda() | ast.JoinedStr() | ast.NamedExpr():
                raise _refusal(self.text, Reason.MODEL_UNSAFE)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                raise _refusal(self.text, Reason.MODEL_UNSAFE)
        raise _refusal(self.text)

    def _dict(self, keys: list[ast.expr | None], values: list[ast.expr]) -> dict[Any, Any]:
        found = {}
        for key, value in zip(keys, values, strict=True):
            name = None if key is None else self._value(key)
            if not isinstance(name, str | int):
                raise _refusal(self.text)
            found[name] = self._value(value)
        return found

    def _arithmetic(self, op: type[ast.operator], left: Any, right: Any) -> Any:
        match left, right:
            case (str(), str()) | (list(), list()) if op is ast.Add:
                if len(left) + len(right) > MAX_LENGTH:
                    raise _refusal(self.text)
                return left + right
        return _bounded(_ARITHMETIC[op](_number(left), _number(right)))

    def _choice(self, test: Any, body: Any, orelse: Any) -> Any:
        if isinstance(test, Name):  # the machine would decide: no value to go by
            return Name(f"by {test.text}")
        return body if self._truth(test) else orelse

    def _truth(self, value: Any) -> bool:
        if isinstance(value, Name | Component):
            raise _refusal(self.text)
        return bool(value)

    def _item(self, value: Any, key: Any) -> Any:
        match value, key:
            case (list(), int()) | (dict(), str() | int()):
                return value[key]
        raise _refusal(self.text)

    def _attribute(self, node: ast.Attribute) -> Any:
        name = _dotted(node)
        if name not in _NAMES:
            raise _refusal(self.text, Reason.MODEL_UNSAFE)
        return _NAMES[name]

    def _call(self, func: ast.expr, args: list[ast.expr]) -> Any:
        if isinstance(func, ast.Attribute) and func.attr == "to" and len(args) == 1:
            return self._moved(self._value(func.value), self._value(args[0]))
        name = _dotted(func)
        if name not in ("len", "list", "range", "torch.device", "torch.cuda.is_available"):
            raise _refusal(self.text, Reason.MODEL_UNSAFE)
        values = [self._value(arg) for arg in args]
        match name, values:
            case "torch.device", [str() | int() | Name(), *_]:
                return Name("device")
            case "torch.cuda.is_available", []:
                return Name("cuda")
            case "len", [str() | list() | dict() as value]:
                return len(value)
            case "list", [list() as value]:
                return list(value)
            case "range", [int(), *_]:
                steps = range(*values)
                if len(steps) <= MAX_LENGTH:
                    return list(steps)
        raise _refusal(self.text)

    def _moved(self, value: Any, device: Any) -> Component:
        """Return the network of ``@network_def.to(@device)``: the device is not a model's say."""
        if not isinstance(value, Component) or not isinstance(device, Name | str):
            raise _refusal(self.text, Reason.MODEL_UNSAFE)
        return value


def _bounded(value: Any) -> Any:
    """Refuse whole numbers beyond 64 bits: nothing counts so far, and some operations never end."""
    if isinstance(value, int) and abs(value) > MAX_WHOLE:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"a number is larger than {MAX_WHOLE}")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("not a number")
    return value


def _dotted(node: ast.expr) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def _disabled(item: Any) -> bool:
    if not isinstance(item, Mapping) or "_target_" not in item:
        return False
    flag = item.get("_disabled_", False)
    return flag.strip().lower() == "true" if isinstance(flag, str) else bool(flag)


def short(text: str, limit: int = 120) -> str:
    """Return a bundle's text for quoting: one line, no more than `limit` characters."""
    line = printable(text[: limit + 1])
    return line if len(line) <= limit else line[:limit] + "..."


def _refusal(text: str, reason: Reason = Reason.MODEL_UNSUPPORTED) -> ScanError:
    why = "would run code" if reason is Reason.MODEL_UNSAFE else "is not a form that is read"
    return ScanError(reason, f"the expression ${short(text)} {why}")
