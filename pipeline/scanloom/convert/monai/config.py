"""A bundle's config, read as data: references, expressions of a closed grammar, and components."""

from __future__ import annotations

import ast
import copy
import json
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import yaml

from scanloom.convert.files import (
    damaged,
    find_file,
    read_json,
    read_text,
    truncate,
    unsafe,
    unsupported,
)
from scanloom.core import Reason, ScanError, did_you_mean, format_bytes

MAX_LENGTH: Final = 10_000
"""Longest list or string that an expression may build."""
MAX_WHOLE: Final = 2**63 - 1
"""Largest integer."""


Kind = Literal[
    "network",
    "part",
    "transform",
    "inferer",
    "evaluator",
    "loader",
    "dataset",
    "checkpoint",
    "postprocessing",
    "saver",
    "ignored",
]
"""Kinds of components; a part is an argument of a network, "checkpoint" loads weights into one,
"postprocessing" is a handler, "saver" writes the result, and the arguments of "ignored" ones are
never read."""
PARTLY_READ: Final = frozenset({"evaluator", "loader", "dataset", "checkpoint", "saver"})
"""Kinds with arguments that decide no label, such as lists of files, and need no value."""


@dataclass(frozen=True)
class Name:
    """A Python object that is not plain data, such as a dtype or a device, by its name."""

    text: str


@dataclass(frozen=True, eq=False)
class Component:
    """A ``_target_`` with its arguments: a description, never an object of that class.

    Parameters
    ----------
    kind, name : str
        Kind of the target, and its name on the allow-list.
    """

    target: str
    args: Mapping[str, Any]
    kind: Kind
    name: str


@dataclass(frozen=True)
class Unread:
    """Argument that can't be read; its error counts once the argument is needed."""

    error: ScanError


@dataclass(frozen=True)
class Priorities:
    """Function that labels each voxel by the first of its channels that is above 0.

    Parameters
    ----------
    regions : tuple of (channel, number)
        In the order in which they are tested.
    """

    regions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Unchanged:
    """Function that returns finite numbers unchanged."""


@dataclass(frozen=True)
class Above:
    """Function that returns which numbers are above a threshold."""

    threshold: float


def bounded(value: Any) -> Any:
    """Refuse integers beyond 64 bits, on which some operations never end."""
    if isinstance(value, int) and abs(value) > MAX_WHOLE:
        raise unsupported(f"a number is larger than {MAX_WHOLE}")
    return value


def refusal(text: str, reason: Reason = Reason.MODEL_UNSUPPORTED) -> ScanError:
    """Return the error for an expression that is not on the list of forms."""
    problem = "would run code" if reason is Reason.MODEL_UNSAFE else "is not supported"
    return ScanError(reason, f"the expression ${truncate(text)} {problem}")


MIRRORED_MEAN: Final = (
    "(lambda slide, channels: lambda scan, network: slide(scan, lambda x: "
    "(network(x) + network(x.flip(2)).flip(2)[:, channels]) / 2))"
)
"""Function of an inferer and of an order of channels: the inferer that takes the mean of the scores
of a window and of the window mirrored along its first axis, whose channels are in that order."""


def decode_lambda(node: ast.Lambda) -> Priorities | Unchanged | Above | None:
    """Return the meaning of a function of one argument, None if it is not of a known form.

    Known forms are ``torch.where(x[[c]] > 0, n, ...)``, nested in the last argument and with 0 in
    the innermost, ``torch.nan_to_num(x, nan=...)``, as labels are never NaN, and ``x > 0``
    with any number.
    """
    head, _, body = ast.unparse(node).partition(": ")  # which has one way to write an expression
    variable = head.removeprefix("lambda ")
    if not variable.isidentifier():
        return None
    if re.fullmatch(rf"torch\.nan_to_num\({variable}, nan=(?:None|[\d.e+-]+)\)", body):
        return Unchanged()
    if above := re.fullmatch(rf"{variable} > (-?\d{{1,9}}(?:\.\d{{1,9}})?)", body, re.ASCII):
        return Above(float(above[1]))
    where = re.compile(
        rf"torch\.where\({variable}\[\[(\d+)\]\] > 0(?:\.0)?, ([1-9]\d*), ", re.ASCII
    )
    regions = []
    while match := where.match(body):
        regions.append((int(match[1]), int(match[2])))
        body = body[match.end() :]
    is_known = regions and body == "0" + ")" * len(regions)
    return Priorities(tuple(regions)) if is_known else None


T = TypeVar("T")


class Arguments:
    """Arguments of a component, by name.

    MONAI's dictionary transforms take a value for each key: with a single key, a list of one value
    means that value. The strings "True" and "true" occur in real bundles and mean True.

    Raises
    ------
    ScanError
        MODEL_UNSUPPORTED, naming component and argument, if a value has an unexpected type.
    """

    def __init__(self, component: Component) -> None:
        self.name = component.target.rsplit(".", 1)[-1]
        self._remaining = dict(component.args)

    def take(self, name: str, default: Any = None) -> Any:
        """Return an argument unchanged; raises the error of one that could not be read."""
        value = self._remaining.pop(name, default)
        if isinstance(value, Unread):
            raise value.error
        return value

    def __contains__(self, name: str) -> bool:
        return name in self._remaining

    def ignore(self, *names: str) -> None:
        """Discard arguments that can't change a label."""
        for name in names:
            self._remaining.pop(name, None)

    def only(self, name: str, *allowed: Any) -> None:
        """Accept an argument only with an allowed value: a card can't express others."""
        if name in self._remaining:
            value = unwrapped(self.take(name))
            if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
                raise self.refused(name, value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = unwrapped(self.take(name, default))
        if value in ("True", "true"):
            return True
        if not isinstance(value, bool):
            raise self.refused(name, value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number; required if it has no default."""
        return self.number_of(name, unwrapped(self.take(name, default)))

    def number_or_none(self, name: str) -> float | None:
        """Return a finite number, or None if the argument is missing."""
        value = unwrapped(self.take(name))
        return None if value is None else self.number_of(name, value)

    def whole_or_none(self, name: str) -> int | None:
        """Return an integer of at least 1, or None if the argument is missing."""
        value = unwrapped(self.take(name))
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise self.refused(name, value)
        return None if value is None else int(value)

    def number_of(self, name: str, value: Any) -> float:
        """Return `value` as a number."""
        if not is_number(value):
            raise self.refused(name, value)
        return float(value)

    def same(self, name: str, default: float) -> float:
        """Return a number; a list of equal numbers, one for each axis, is accepted too."""
        value = self.take(name, default)
        values = value if isinstance(value, list) else [value]
        if not values or not all(is_number(v) and v == values[0] for v in values):
            raise self.refused(name, value)
        return float(values[0])

    def choice(self, name: str, choices: Mapping[str, T], default: str) -> T:
        """Return the value that `choices` has for a string."""
        value = unwrapped(self.take(name, default))
        if not isinstance(value, str) or value not in choices:
            raise self.refused(name, value)
        return choices[value]

    def one_of(self, name: str, default: T, *others: T) -> T:
        """Return a string, which is one of some."""
        return self.choice(name, {str(each): each for each in (default, *others)}, str(default))

    def floating(self, name: str) -> None:
        """Accept a floating-point dtype of at least 32 bits, or none: the network gets float32."""
        value = unwrapped(self.take(name))
        text = value.text if isinstance(value, Name) else value
        if text not in (None, "float", "float32", "float64", "double"):
            raise self.refused(name, value)

    def done(self) -> None:
        """Refuse arguments that were not consumed: they might change a label."""
        for name, value in self._remaining.items():
            raise value.error if isinstance(value, Unread) else self.refused(name, value)

    def refused(self, name: str, value: Any) -> ScanError:
        """Return the error for a value that a card can't express."""
        return unsupported(f"{truncate(self.name)}({truncate(str(name))}={describe(value)})")


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    """Return whether `value` is an integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def describe(value: Any) -> str:
    """Return a short text for a bundle's value, for messages."""
    if isinstance(value, Name):
        return truncate(value.text)
    if isinstance(value, Component):
        return truncate(value.target)
    if isinstance(value, list):
        shown = ", ".join(describe(v) for v in value[:6] if not isinstance(v, list | dict))
        return f"[{shown}{', ...' if len(value) > 6 else ''}]"
    if isinstance(value, dict):
        return "{...}"
    return truncate(repr(value), 60)


def unwrapped(value: Any) -> Any:
    """Return the value of a list of one, any other value unchanged."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


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

    def value_of(self, node: ast.expr) -> Any:
        """Return the value of a part of the expression; errors as `Config.get`."""
        try:
            return self._value(node)
        except (ArithmeticError, TypeError, LookupError, ValueError) as exc:
            raise refusal(self.text) from exc

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
                return not self.truth(self._value(operand))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                # both are read, since which of them counts may depend on the machine
                chosen, first, second = map(self._value, (test, body, orelse))
                if isinstance(chosen, Name):  # such as torch.cuda.is_available()
                    return Name(f"by {chosen.text}")
                return first if self.truth(chosen) else second
            case ast.Subscript(value=value, slice=key) if not isinstance(key, ast.Slice):
                return self._item(self._value(value), self._value(key))
            case ast.Attribute() if dotted(node) in _NAMES:
                return _NAMES[str(dotted(node))]
            case ast.Call(func=ast.Lambda() as func, args=[slide, channels], keywords=[]) if (
                f"({ast.unparse(func)})" == MIRRORED_MEAN
            ):
                args = {"inferer": self._value(slide), "channels": self._value(channels)}
                return Component("the mean with the mirrored scan", args, "inferer", "MirroredMean")
            case ast.Call(func=func, args=args, keywords=[]):
                return self._call(func, args)
            case ast.Lambda() if (function := decode_lambda(node)) is not None:
                return function
            case ast.Call(func=func, args=[], keywords=[_, *_] as keywords):
                return self._constructed(func, keywords)
            case ast.Call(func=func, args=[path], keywords=[ast.keyword(arg="map_location")]):
                return self._call(func, [path])
            # to these, other objects than data could be given, or functions
            case ast.Name() | ast.Attribute() | ast.Call() | ast.Lambda() | ast.JoinedStr():
                raise refusal(self.text, Reason.MODEL_UNSAFE)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                raise refusal(self.text, Reason.MODEL_UNSAFE)
            case ast.NamedExpr():
                raise refusal(self.text, Reason.MODEL_UNSAFE)
        raise refusal(self.text)

    def _dict(self, keys: list[ast.expr | None], values: list[ast.expr]) -> dict[Any, Any]:
        # as Python: of equal keys, the last value counts
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
                # a chain of doublings would need all memory
                if len(lhs) + len(rhs) > MAX_LENGTH:
                    raise refusal(self.text)
                return lhs + rhs
        return bounded(_ARITHMETIC[op](_number(lhs), _number(rhs)))

    def truth(self, value: Any) -> bool:
        """Return whether a value is true; refused if it has no value here."""
        if isinstance(value, Name | Component):
            raise refusal(self.text)
        return bool(value)

    def _item(self, value: Any, key: Any) -> Any:
        match value, key:
            case (list(), int()) | (dict(), str() | int()):
                return value[key]
        raise refusal(self.text)

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
            value, device = self._value(func.value), self._value(args[0])
            if not isinstance(value, Component) or not isinstance(device, Name | str):
                raise refusal(self.text, Reason.MODEL_UNSAFE)
            return value  # scanloom chooses the device
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
                return self.config.find(path) is not None
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


_MAX_YAML: Final = 1 << 17
"""Largest config in YAML, which Python parses slowly; the largest in the model zoo has 10 kB."""
_CONFIGS: Final = ("inference.json", "inference.yaml", "inference.yml")
_MAX_DIGITS: Final = 40
_CHOICES: Final = "displayable_configs"
"""Entry of a config that holds its author's choices for users."""


def read_entries(folder: Path) -> dict[str, Any]:
    """Return the raw entries of a bundle's inference config.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if the file is missing or neither JSON nor YAML; MODEL_UNSUPPORTED for forms
        of YAML that expand when loaded, for several files that differ, and for keys that change
        other entries; MODEL_UNSAFE for a link out of the bundle.
    """
    names = [f"configs/{name}" for name in _CONFIGS]
    names = [name for name in names if find_file(folder, name) is not None]
    if not names:
        raise damaged(f"configs/{' or '.join(_CONFIGS)} is missing")
    first, *further = (read_file(folder, name) for name in names)
    # MONAI is told which file to read: here nobody is
    if any(config != first for config in further):
        raise unsupported(f"{' and '.join(names)} differ")
    for key in first:
        if "#" in key or "::" in key or key.startswith("+"):
            # MONAI changes another entry by it, when it loads the file
            raise unsupported(f"the config changes an entry by {truncate(key)!r}")
    return first


def read_file(folder: Path, name: str, *, unique: bool = False) -> dict[str, Any]:
    """Return the entries of a file, JSON or YAML; errors as `read_entries`.

    With `unique`, a key of a YAML file that is given twice is an error (MODEL_DAMAGED). Otherwise
    the last one counts, as for MONAI.
    """
    if name.endswith(".json"):
        entries = read_json(folder, name)
    else:
        text = read_text(folder, name)
        if len(text) > _MAX_YAML:
            raise unsupported(f"{name} is larger than {format_bytes(_MAX_YAML)}")
        try:
            loader = _UniqueLoader if unique else _Loader
            entries = yaml.load(text, Loader=loader)  # noqa: S506 a SafeLoader
        except (yaml.YAMLError, RecursionError, ValueError) as exc:
            raise damaged(f"{name} is not valid YAML") from exc
    if not isinstance(entries, dict):
        raise damaged(f"{name} is not a mapping")
    return {str(key): value for key, value in entries.items()}


def set_entries(entries: Mapping[str, Any], options: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries with the values that a user sets.

    Parameters
    ----------
    options : mapping
        Text of a value by the name of a top-level entry or of an entry of `displayable_configs`.
        Only truth values, numbers and plain texts can be set, by values of the same type.

    Raises
    ------
    ScanError
        MODEL_UNKNOWN if there is no such entry, or it takes no such value.
    """
    try:
        changed = copy.deepcopy(dict(entries))
    except RecursionError as exc:
        raise damaged("the config is nested too deeply") from exc
    choices = changed.get(_CHOICES)
    # a choice of the author decides the entry that refers to it, so that it comes first
    mappings = [choices, changed] if isinstance(choices, dict) else [changed]
    for key, text in options.items():
        mapping = next((mapping for mapping in mappings if _is_plain(mapping.get(key))), None)
        if mapping is None:
            known = sorted({k for mapping in mappings for k, v in mapping.items() if _is_plain(v)})
            hint = did_you_mean(key, [str(k) for k in known])
            raise ScanError(Reason.MODEL_UNKNOWN, f"there is no option {truncate(key)!r}; {hint}")
        mapping[key] = _parse(key, text, mapping[key])
    return changed


def _is_plain(value: Any) -> bool:
    """Return whether a value is a truth value, a number or a text that refers to nothing."""
    if isinstance(value, str):
        return not value.startswith(("$", "@", "%"))
    return isinstance(value, bool | int | float)


def _parse(key: str, text: str, present: Any) -> Any:
    """Return the value of a text, which must have the type of the present value."""
    value: Any = text
    if not isinstance(present, str):
        try:
            value = json.loads(text.lower())
        except ValueError:
            value = None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    matches = is_number if type(present) in (int, float) else type(value) is type(present)
    if not matches or not _is_plain(value) or len(text) > _MAX_DIGITS:
        detail = f"the option {truncate(key)} is {truncate(text)!r}, and by default {present!r}"
        raise ScanError(Reason.MODEL_UNKNOWN, detail)
    return value


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without merge keys and long numbers, which expand when loaded."""

    def construct_scalar(self, node: Any) -> Any:
        """Refuse numbers with many digits, which are slow to convert."""
        number = node.tag.rpartition(":")[2] in ("int", "float")
        if number and len(node.value) > _MAX_DIGITS:
            raise unsupported(f"a number of {len(node.value)} digits")
        return super().construct_scalar(node)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Refuse merge keys."""
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise unsupported("the config uses YAML merge keys (<<)")
        super().flatten_mapping(node)


class _UniqueLoader(_Loader):
    """`_Loader` that refuses a key that is given twice, and aliases, which expand when read."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node; refuse an alias."""
        if self.check_event(yaml.AliasEvent):
            raise unsafe("card.yaml has an alias (*): write the value again")
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping, none of whose keys is given twice."""
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            line = node.start_mark.line + 1
            raise damaged(f"a key of the mapping in line {line} is given twice")
        return mapping


MAX_CHARS: Final = 500
"""Longest expression that is parsed; MONAI's model zoo needs 104 characters."""
MAX_DEPTH: Final = 50
"""Deepest nesting of values, references and expressions combined; MONAI's model zoo needs 12."""
MAX_STEPS: Final = 50_000
"""Largest number of values evaluated for one bundle; MONAI's model zoo needs under 400."""

_SEPARATOR: Final = "::"
"""Separator of the keys of a path; MONAI replaces its old one, "#", in every text of a config."""
_REFERENCE = re.compile(r"@([A-Za-z_]\w*(?:(?:#|::)\w+)*)")
_KEYWORDS: Final = ("_target_", "_disabled_", "_desc_", "_mode_", "_requires_")


class Config:
    """The config of one bundle.

    Parameters
    ----------
    entries : mapping
        As parsed from JSON or YAML.
    judge : callable
        Called with each ``_target_`` before its arguments are read. Raises ScanError if the target
        is not on a list; returns its kind and name. Arguments of kind "ignored" are not read.
    load : callable
        Returns the arrays of a file as nested lists by name, by its path in the bundle.
    find : callable
        Returns a file of the bundle by its path, None if it is missing.

    Attributes
    ----------
    refused : list of ScanError
        Errors of components in lists, such as transforms, which are left out of their lists: the
        caller reports all of them.
    """

    def __init__(
        self,
        entries: Mapping[str, Any],
        judge: Callable[[str], tuple[Kind, str]],
        load: Callable[[str], Any],
        find: Callable[[str], Path | None],
    ) -> None:
        self.refused: list[ScanError] = []
        self._entries = entries
        self._judge = judge
        self.load, self.find = load, find
        self._known: dict[str, Any] = {}
        self._open: list[str] = []
        self._depth = 0
        self._steps = 0

    def raw(self, path: str) -> Any:
        """Return an entry or nested entry as parsed from the file, None if it is missing."""
        try:
            return self._find(_normalized(path))
        except ScanError:
            return None

    def get(self, path: str) -> Any:
        """Return the value of an entry or of a nested entry (``"inferer#roi_size"``).

        Returns
        -------
        None, bool, int, float, str, list, dict, Name or Component
            The same object each time, also where the entry is part of another one: like MONAI, a
            component stands for one object. None for a disabled component.

        Raises
        ------
        ScanError
            MODEL_DAMAGED if it refers to a missing entry or to itself; MODEL_UNSAFE if code would
            have to run; MODEL_UNSUPPORTED if the interpreter does not cover it.
        """
        path = _normalized(path)
        if path not in self._known:
            if path in self._open:
                raise damaged(f"@{path} refers to itself")
            self._open.append(path)
            try:
                self._value(self._find(path), path)
            finally:
                self._open.pop()
        return self._known[path]

    def _value(self, raw: Any, path: str) -> Any:
        """Return the value of raw file content at a path; errors as `get`."""
        if path not in self._known:
            with self.deeper():
                self._known[path] = self._read(raw, path)
        return self._known[path]

    def _read(self, raw: Any, path: str) -> Any:
        if isinstance(raw, str):
            return self._text(_normalized(raw))
        if isinstance(raw, Mapping):
            return self._component(raw, path) if "_target_" in raw else self._items(raw, path)
        if isinstance(raw, Sequence) and not isinstance(raw, bytes):
            return self._list(raw, path)
        if raw is None or isinstance(raw, bool | int | float):
            return bounded(raw)
        raise unsupported(f"a config value is a {type(raw).__name__}")

    def _list(self, raw: Sequence[Any], path: str) -> list[Any]:
        values = []
        for number, item in enumerate(raw):
            is_component = isinstance(item, Mapping) and "_target_" in item
            try:
                value = self._value(item, f"{path}{_SEPARATOR}{number}")
            except ScanError as exc:
                if not is_component:
                    raise
                self.refused.append(exc)
                continue
            if value is not None or not is_component:  # disabled components are left out
                values.append(value)
        return values

    def _items(self, raw: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        values = {key: self._value(item, f"{path}{_SEPARATOR}{key}") for key, item in raw.items()}
        return {
            key: value
            for key, value in values.items()
            if value is not None or not isinstance(raw[key], Mapping) or "_target_" not in raw[key]
        }

    def _find(self, path: str) -> Any:
        entry: Any = self._entries
        for key in path.split(_SEPARATOR):
            if isinstance(entry, Mapping) and key in entry:
                entry = entry[key]
            elif isinstance(entry, list) and key.isdecimal() and int(key) < len(entry):
                entry = entry[int(key)]
            else:
                raise damaged(f"the config has no entry @{truncate(path)}")
        return entry

    def _text(self, text: str) -> Any:
        if text.startswith("$"):
            expression = self.parsed(text[1:].strip())
            return expression.value_of(expression.tree)
        if text.startswith("@"):
            reference = _REFERENCE.fullmatch(text)
            if reference is None:
                raise refusal(text)
            return self.get(reference[1])
        if text.startswith("%"):
            raise unsupported(f"the macro {truncate(text)} is not supported")
        return text

    def _component(self, raw: Mapping[Any, Any], path: str) -> Component | None:
        target = raw["_target_"]
        if not isinstance(target, str):
            raise damaged("a _target_ is not a string")
        if self._disabled(raw, path):
            return None
        for key in ("_requires_", "_mode_"):
            if raw.get(key) not in (None, "default"):
                raise unsupported(f"{truncate(target)} has {key}")
        arguments = {key: item for key, item in raw.items() if key not in _KEYWORDS}
        kind, name = self._judge(target)
        if kind == "ignored":
            return Component(target, {}, kind, name)
        if kind not in PARTLY_READ:
            return Component(target, self._items(arguments, path), kind, name)
        args: dict[str, Any] = {}
        for key, item in arguments.items():
            try:
                args |= self._items({key: item}, path)
            except ScanError as exc:
                args[key] = Unread(exc)
        return Component(target, args, kind, name)

    def _disabled(self, raw: Mapping[Any, Any], path: str) -> bool:
        """Return whether a component is disabled, by a value or by an expression."""
        flag = self._value(raw.get("_disabled_", False), f"{path}{_SEPARATOR}_disabled_")
        if isinstance(flag, str):
            return flag.strip().lower() == "true"
        if flag is None or isinstance(flag, bool | int | float):
            return bool(flag)
        raise unsupported(f"{truncate(raw['_target_'])} has _disabled_, whose value is not known")

    def constructed(self, target: str, arguments: Callable[[], Mapping[str, Any]]) -> Component:
        """Return the component of a call; its arguments are evaluated after its target."""
        kind, name = self._judge(target)
        return Component(target, {} if kind == "ignored" else arguments(), kind, name)

    def parsed(self, text: str) -> Expression:
        """Return the syntax tree of an expression, without its "$"; nothing is evaluated yet.

        Raises
        ------
        ScanError
            MODEL_UNSAFE for an import; MODEL_UNSUPPORTED if it is too long or not Python.
        """
        text = _normalized(text)
        if len(text) > MAX_CHARS:
            raise unsupported(f"an expression exceeds {MAX_CHARS} characters: {truncate(text)}")
        if re.match(r"(import|from)\b", text):
            raise refusal(text, Reason.MODEL_UNSAFE)
        references: dict[str, str] = {}

        def mark(match: re.Match[str]) -> str:
            references[name := f"{MARK}{len(references)}"] = match[1]
            return name

        if MARK in text:
            raise refusal(text)
        return Expression(self, text, references, parse(text, _REFERENCE.sub(mark, text)))

    @contextmanager
    def deeper(self) -> Iterator[None]:
        """Count a value and a nesting level, and refuse configs that exceed the limits."""
        self._depth += 1
        self._steps += 1
        try:
            if self._depth > MAX_DEPTH:
                raise unsupported(f"the config is nested deeper than {MAX_DEPTH}")
            if self._steps > MAX_STEPS:
                raise unsupported(f"the config has more than {MAX_STEPS} values")
            yield
        finally:
            self._depth -= 1


def references(text: str) -> list[str]:
    """Return the paths to which a text of a config refers."""
    text = _normalized(text)
    if text.startswith("$"):
        return _REFERENCE.findall(text)
    reference = _REFERENCE.fullmatch(text)
    return [] if reference is None else [reference[1]]


def _normalized(text: str) -> str:
    return text.replace("#", _SEPARATOR)
