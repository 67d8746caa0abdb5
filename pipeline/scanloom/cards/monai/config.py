"""Read a MONAI bundle's config as data: references are followed, nothing is imported or run.

MONAI's own parser evaluates every ``$expression`` in Python and calls any ``_target_``. Here, a
small interpreter evaluates a closed list of expression forms, and a ``_target_`` is only a name.
Only requested entries are read: ``imports``, ``initialize``, ``run`` and ``handlers`` never are.
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
"""Longest expression that is parsed; MONAI's model zoo needs 104 characters."""
MAX_DEPTH: Final = 50
"""Deepest nesting of values, references and expressions combined; MONAI's model zoo needs 12."""
MAX_STEPS: Final = 50_000
"""Largest number of values evaluated for one bundle; MONAI's model zoo needs under 400."""
MAX_LENGTH: Final = 10_000
"""Longest list or string that an expression may build."""
MAX_WHOLE: Final = 2**63 - 1
"""Largest integer."""

_REFERENCE = re.compile(r"@([A-Za-z_]\w*(?:(?:#|::)\w+)*)")
_MARK: Final = "_reference_"
_KEYWORDS: Final = ("_target_", "_disabled_", "_desc_", "_mode_", "_requires_")


@dataclass(frozen=True)
class Name:
    """A Python object that is not plain data, such as a dtype or a device, by its name."""

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
        As parsed from JSON or YAML.
    judge : callable
        Called with each ``_target_`` before its arguments are read. Raises ScanError if the target
        is not on a list; returns whether its arguments matter.
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
        """Return an entry as parsed from the file, None if it is missing."""
        return self._entries.get(key)

    def get(self, path: str) -> Any:
        """Return the value of an entry or of a nested entry (``"inferer#roi_size"``).

        Returns
        -------
        None, bool, int, float, str, list, dict, Name or Component
            The same object each time.

        Raises
        ------
        ScanError
            MODEL_DAMAGED if it refers to a missing entry or to itself; MODEL_UNSAFE if code would
            have to run; MODEL_UNSUPPORTED if the interpreter does not cover it.
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
        """Return the value of raw file content; errors as `get`."""
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
        entry: Any = self._entries
        for key in path.split("#"):
            if isinstance(entry, Mapping) and key in entry:
                entry = entry[key]
            elif isinstance(entry, list) and key.isdecimal() and int(key) < len(entry):
                entry = entry[int(key)]
            else:
                raise ScanError(Reason.MODEL_DAMAGED, f"the config has no entry @{truncate(path)}")
        return entry

    def _text(self, text: str) -> Any:
        if text.startswith("$"):
            return self._expression(text[1:].strip())
        if text.startswith("@"):
            reference = _REFERENCE.fullmatch(text)
            if reference is None:
                raise _refusal(text)
            return self.get(reference[1])
        if text.startswith("%"):
            raise ScanError(
                Reason.MODEL_UNSUPPORTED, f"the macro {truncate(text)} is not supported"
            )
        return text

    def _component(self, raw: Mapping[Any, Any]) -> Component:
        target = raw["_target_"]
        if not isinstance(target, str):
            raise ScanError(Reason.MODEL_DAMAGED, "a _target_ is not a string")
        for key in ("_requires_", "_mode_"):
            if raw.get(key) not in (None, "default"):
                raise ScanError(Reason.MODEL_UNSUPPORTED, f"{truncate(target)} has {key}")
        if not self._judge(target):
            return Component(target, {})
        args = self._items({key: item for key, item in raw.items() if key not in _KEYWORDS})
        return Component(target, args)

    def _expression(self, text: str) -> Any:
        if len(text) > MAX_CHARS:
            detail = f"an expression exceeds {MAX_CHARS} characters: {truncate(text)}"
            raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
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
        """Count a value and a nesting level, and refuse configs that exceed the limits."""
        self._depth += 1
        self._steps += 1
        try:
            if self._depth > MAX_DEPTH:
                detail = f"the config is nested deeper than {MAX_DEPTH}"
                raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
            if self._steps > MAX_STEPS:
                detail = f"the config has more than {MAX_STEPS} values"
                raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
            yield
        finally:
            self._depth -= 1


@dataclass(frozen=True)
class _Expression:
    """An expression; `references` maps the placeholders in its text to entries of the config."""

    config: Config
    text: str
    references: Mapping[str, str]

    def evaluate(self, marked: str) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # SyntaxWarning about foreign text
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
            case ast.BinOp(left=lhs, op=op, right=rhs) if type(op) in _ARITHMETIC:
                return self._arithmetic(type(op), self._value(lhs), self._value(rhs))
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
        values_by_key = {}
        for key, value in zip(keys, values, strict=True):
            name = None if key is None else self._value(key)
            if not isinstance(name, str | int):
                raise _refusal(self.text)
            values_by_key[name] = self._value(value)
        return values_by_key

    def _arithmetic(self, op: type[ast.operator], lhs: Any, rhs: Any) -> Any:
        match lhs, rhs:
            case (str(), str()) | (list(), list()) if op is ast.Add:
                if len(lhs) + len(rhs) > MAX_LENGTH:
                    raise _refusal(self.text)
                return lhs + rhs
        return _bounded(_ARITHMETIC[op](_number(lhs), _number(rhs)))

    def _choice(self, test: Any, body: Any, orelse: Any) -> Any:
        if isinstance(test, Name):  # depends on the machine, such as torch.cuda.is_available()
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
        """Return the network of ``@network_def.to(@device)``: scanloom chooses the device."""
        if not isinstance(value, Component) or not isinstance(device, Name | str):
            raise _refusal(self.text, Reason.MODEL_UNSAFE)
        return value


def _bounded(value: Any) -> Any:
    """Refuse integers beyond 64 bits, on which some operations never end."""
    if isinstance(value, int) and abs(value) > MAX_WHOLE:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"a number is larger than {MAX_WHOLE}")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("not a number")
    return value


def _dotted(node: ast.expr) -> str | None:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else None


def _disabled(item: Any) -> bool:
    if not isinstance(item, Mapping) or "_target_" not in item:
        return False
    flag = item.get("_disabled_", False)
    return flag.strip().lower() == "true" if isinstance(flag, str) else bool(flag)


def truncate(text: str, limit: int = 120) -> str:
    """Return a bundle's text for quoting: one line of at most `limit` characters."""
    line = printable(text[: limit + 1])
    return line if len(line) <= limit else line[:limit] + "..."


def _refusal(text: str, reason: Reason = Reason.MODEL_UNSUPPORTED) -> ScanError:
    problem = "would run code" if reason is Reason.MODEL_UNSAFE else "is not supported"
    return ScanError(reason, f"the expression ${truncate(text)} {problem}")
