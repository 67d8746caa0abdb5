"""What is wrong with a file that a person wrote: line, key, what was expected, the nearest word."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from scanloom.core import nearest

_EXPECTED = (
    ("int_", "a whole number"),
    ("float_", "a number"),
    ("bool_", "yes or no"),
    ("string_type", "text, in quotes where YAML sees yes, no or a number"),
    ("tuple_type", "a word, or a list of them, in quotes where YAML sees yes, no or a number"),
    ("model_type", "keys and values"),
    ("dict_type", "keys and values"),
)
"""What is said for pydantic's kinds of mistakes, by their beginning."""
_RENAMED = {
    "body_box": "skip_air",
    "fused_restore": "compiled_restore",
    "image": "`also: [image]`",
    "split": "`also: [masks]`",
}
"""Former keys, and what stands for them now."""


def repeated(node: yaml.Node | None) -> list[str]:
    """Return what to say of keys that stand twice: YAML would silently take the last."""
    if isinstance(node, yaml.SequenceNode):
        return [text for item in node.value for text in repeated(item)]
    if not isinstance(node, yaml.MappingNode):
        return []
    seen: set[str] = set()
    said = []
    for key, value in node.value:
        if key.value in seen:
            said.append(f"line {key.start_mark.line + 1}: {key.value} stands there twice")
        seen.add(key.value)
        said += repeated(value)
    return said


def mistake(model: type[BaseModel], root: yaml.Node | None, error: Mapping[str, Any]) -> str:
    """Return line, key, what was expected, and the nearest right word.

    Parameters
    ----------
    model : type
        What was to be read.
    root : yaml.Node or None
        Of the file; None where there is none.
    error : mapping
        One of pydantic's.
    """
    loc = tuple(error["loc"])
    names = [str(part) for part in loc if isinstance(part, str) and _is_key(part)]
    key = ".".join(names) or "the workflow"
    where = key if root is None else f"line {_line(root, loc)}: {key}"
    section = _section(model, names[:-1])
    if error["type"] == "extra_forbidden" and section is not None:
        if names[-1] in _RENAMED:
            return f"{where} is now {_RENAMED[names[-1]]}"
        known = sorted(section.model_fields)
        return f"{where} is no key here; {nearest(names[-1], known)}"
    if error["type"] == "missing":
        return f"{where} is missing"
    field = _field(model, names)
    allowed = _words(field.annotation if field else None)
    value = error.get("input")
    if allowed and error["type"] == "tuple_type":
        return f"{where}: expected one or several of {', '.join(allowed)}"
    if allowed and isinstance(value, str):
        return f"{where}: {nearest(value, allowed)}"
    return f"{where}: expected {_expected(error, field)}"


def _expected(error: Mapping[str, Any], field: FieldInfo | None) -> str:
    kind = str(error["type"])
    if kind == "string_pattern_mismatch" and field is not None and field.description:
        words = f"{field.description[:1].lower()}{field.description[1:]}"
        return f"{words}, such as {field.examples[0]}" if field.examples else words
    for start, words in _EXPECTED:
        if kind.startswith(start):
            return words
    words = str(error["msg"]).removeprefix("Value error, ")
    return f"{words[:1].lower()}{words[1:]}".removeprefix("input should be ")


def _is_key(part: str) -> bool:
    """Whether a part of pydantic's location is a key of ours, not the name of a validator."""
    if part in ("int", "float", "str", "tuple") or "[" in part:
        return False
    return not part.startswith(("function-", "constrained-"))


def _line(node: yaml.Node | None, loc: tuple[object, ...]) -> int:
    """Return the line of the innermost key of `loc` that stands in the file, from 1."""
    line = 1
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            pairs = {key.value: (key, value) for key, value in node.value}
            if part not in pairs:
                break
            key, node = pairs[str(part)]
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            if part >= len(node.value):
                break
            node = node.value[part]
            line = node.start_mark.line + 1
    return line


def _section(model: type[BaseModel], names: Sequence[str]) -> type[BaseModel] | None:
    kind: object = model
    for name in names:
        if typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
        elif _is_section(kind) and name in kind.model_fields:
            kind = kind.model_fields[name].annotation
        else:
            return None
    return kind if _is_section(kind) else None


def _is_section(kind: object) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _field(model: type[BaseModel], names: Sequence[str]) -> FieldInfo | None:
    section = _section(model, names[:-1])
    return section.model_fields.get(names[-1]) if section and names else None


def _words(annotation: object) -> list[str]:
    """Return the words that an annotation allows, wherever they stand in it."""
    if typing.get_origin(annotation) is Literal:
        return [str(word) for word in typing.get_args(annotation)]
    parts = typing.get_args(annotation)
    if annotation is None or isinstance(annotation, types.NoneType):
        return []
    return [word for part in parts for word in _words(part)]
