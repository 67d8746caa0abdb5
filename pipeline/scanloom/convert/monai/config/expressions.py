"""Evaluate a closed list of expression forms from their syntax trees; nothing is run."""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from scanloom.convert.monai.config.lambdas import decode_lambda
from scanloom.convert.monai.config.values import (
    MAX_LENGTH,
    Component,
    Name,
    Priorities,
    Unchanged,
    bounded,
    refusal,
)
from scanloom.core import Reason

if TYPE_CHECKING:
    from scanloom.convert.monai.config.parser import Config

MARK: Final = "_reference_"
"""Prefix of the placeholders of references in an expression's text."""


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
    for prefix in ("ForwardMode", "monai.utils.ForwardMode", "monai.utils.enums.ForwardMode"):
        names |= {f"{prefix}.EVAL": "eval", f"{prefix}.TRAIN": "train"}
    for module, function in (
        ("monai.engines", "default_prepare_batch"),
        ("monai.engines.utils", "default_prepare_batch"),
        ("monai.data", "list_data_collate"),
        ("monai.data.utils", "list_data_collate"),
    ):
        names[f"{module}.{function}"] = Name(function)
    return names


_NAMES: Final = _names()
_FUNCTIONS: Final = frozenset(
    {
        "copy.deepcopy",
        "len",
        "list",
        "os.path.exists",
        "os.path.isfile",
        "range",
        "torch.cuda.is_available",
        "torch.device",
        "torch.from_numpy",
        "torch.load",
    }
)
_ARITHMETIC: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def parse(text: str, marked: str) -> ast.expr:
    """Return the syntax tree of an expression whose references are placeholders in `marked`.

    Raises
    ------
    ScanError
        MODEL_UNSUPPORTED, quoting `text`, if it is not Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarning about foreign text
            return ast.parse(marked, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as exc:
        raise refusal(text) from exc


@dataclass(frozen=True)
class Expression:
    """An expression; `references` maps the placeholders in its tree to entries of the config."""

    config: Config
    text: str
    references: Mapping[str, str]
    tree: ast.expr

    @property
    def value(self) -> Any:
        """The value of the expression; errors as `Config.get`."""
        return self.value_of(self.tree)

    def value_of(self, node: ast.expr) -> Any:
        """Return the value of a part of the expression."""
        try:
            return self._value(node)
        except (ArithmeticError, TypeError, LookupError, ValueError) as exc:
            raise refusal(self.text) from exc

    def truth(self, node: ast.expr) -> bool:
        """Return whether a part of the expression is true; refused if it has no value here."""
        return self._truth(self.value_of(node))

    def _value(self, node: ast.expr) -> Any:
        with self.config.deeper():
            return self._judged(node)

    def _judged(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=None | bool() | int() | float() as value):
                return bounded(value)
            case ast.Constant(value=str() as value) if MARK not in value:
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
            case ast.Lambda():
                return self._function(node)
            case ast.Call(func=func, args=[], keywords=[_, *_] as keywords):
                return self._constructed(func, keywords)
            case ast.Call(func=func, args=[path], keywords=[ast.keyword(arg="map_location")]):
                return self._call(func, [path])
            case ast.Name() | ast.Call() | ast.JoinedStr() | ast.NamedExpr():
                raise refusal(self.text, Reason.MODEL_UNSAFE)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                raise refusal(self.text, Reason.MODEL_UNSAFE)
        raise refusal(self.text)

    def _dict(self, keys: list[ast.expr | None], values: list[ast.expr]) -> dict[Any, Any]:
        values_by_key = {}
        for key, value in zip(keys, values, strict=True):
            name = None if key is None else self._value(key)
            if not isinstance(name, str | int):
                raise refusal(self.text)
            values_by_key[name] = self._value(value)
        return values_by_key

    def _arithmetic(self, op: type[ast.operator], lhs: Any, rhs: Any) -> Any:
        match lhs, rhs:
            case (str(), str()) | (list(), list()) if op is ast.Add:
                if len(lhs) + len(rhs) > MAX_LENGTH:
                    raise refusal(self.text)
                return lhs + rhs
        return bounded(_ARITHMETIC[op](_number(lhs), _number(rhs)))

    def _choice(self, test: Any, body: Any, orelse: Any) -> Any:
        if isinstance(test, Name):  # depends on the machine, such as torch.cuda.is_available()
            return Name(f"by {test.text}")
        return body if self._truth(test) else orelse

    def _truth(self, value: Any) -> bool:
        if isinstance(value, Name | Component):
            raise refusal(self.text)
        return bool(value)

    def _item(self, value: Any, key: Any) -> Any:
        match value, key:
            case (list(), int()) | (dict(), str() | int()):
                return value[key]
        raise refusal(self.text)

    def _attribute(self, node: ast.Attribute) -> Any:
        name = dotted(node)
        if name not in _NAMES:
            raise refusal(self.text, Reason.MODEL_UNSAFE)
        return _NAMES[name]

    def _function(self, node: ast.Lambda) -> Priorities | Unchanged:
        function = decode_lambda(node)
        if function is None:
            raise refusal(self.text, Reason.MODEL_UNSAFE)
        return function

    def _constructed(self, func: ast.expr, keywords: list[ast.keyword]) -> Component:
        """Return the component of ``monai.networks.nets.Name(argument=value)``."""
        target = dotted(func)
        if target is None or not target.startswith("monai.networks.nets."):
            raise refusal(self.text, Reason.MODEL_UNSAFE)
        args = {keyword.arg: keyword.value for keyword in keywords if keyword.arg is not None}
        if len(args) < len(keywords):
            raise refusal(self.text)
        return self.config.constructed(
            target, lambda: {name: self._value(value) for name, value in args.items()}
        )

    def _call(self, func: ast.expr, args: list[ast.expr]) -> Any:
        if isinstance(func, ast.Attribute) and func.attr == "to" and len(args) == 1:
            return self._moved(self._value(func.value), self._value(args[0]))
        name = dotted(func)
        if name not in _FUNCTIONS:
            raise refusal(self.text, Reason.MODEL_UNSAFE)
        values = [self._value(arg) for arg in args]
        match name, values:
            case "torch.device", [str() | int() | Name(), *_]:
                return Name("device")
            case "torch.cuda.is_available", []:
                return Name("cuda")
            case "torch.load", [str() as path]:
                return self.config.load(path)
            case "os.path.exists" | "os.path.isfile", [str() as path]:
                return self.config.exists(path)
            case "torch.from_numpy", [list() as value]:
                return value
            case "copy.deepcopy", [Component() as value]:
                # weights are loaded into one network, and not into its copy
                return replace(value) if value.kind == "network" else value
            case "len", [str() | list() | dict() as value]:
                return len(value)
            case "list", [list() as value]:
                return list(value)
            case "range", [int(), *_]:
                steps = range(*values)
                if len(steps) <= MAX_LENGTH:
                    return list(steps)
        raise refusal(self.text)

    def _moved(self, value: Any, device: Any) -> Component:
        """Return the network of ``@network_def.to(@device)``: scanloom chooses the device."""
        if not isinstance(value, Component) or not isinstance(device, Name | str):
            raise refusal(self.text, Reason.MODEL_UNSAFE)
        return value


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("not a number")
    return value


def dotted(node: ast.expr) -> str | None:
    """Return the name of a function, such as "torch.load", None for another form."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else None
