"""Error messages for workflow files: line, key, expected value, nearest valid word."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from scanloom.core import did_you_mean

_EXPECTED = (
    ("int_", "a whole number"),
    ("float_", "a number"),
    ("bool_", "yes or no"),
    ("string_type", "text, in quotes where YAML sees yes, no or a number"),
    ("tuple_type", "a word, or a list of them, in quotes where YAML sees yes, no or a number"),
    ("model_type", "keys and values"),
    ("dict_type", "keys and values"),
)
"""Expected values by the prefix of pydantic's error types."""


def duplicate_keys(node: yaml.Node | None) -> list[str]:
    """Return a message for each duplicate key: YAML would silently take the last one."""
    if isinstance(node, yaml.SequenceNode):
        return [text for item in node.value for text in duplicate_keys(item)]
    if not isinstance(node, yaml.MappingNode):
        return []
    seen: set[str] = set()
    messages = []
    for key, value in node.value:
        if key.value in seen:
            messages.append(f"line {key.start_mark.line + 1}: {key.value} is given twice")
        seen.add(key.value)
        messages += duplicate_keys(value)
    return messages


def explain_error(model: type[BaseModel], root: yaml.Node | None, error: Mapping[str, Any]) -> str:
    """Return a message with line, key, expected value, and the nearest valid word.

    Parameters
    ----------
    model : type
        The model that the document is validated with.
    root : yaml.Node or None
        Root of the file's YAML; None without a file.
    error : mapping
        One of pydantic's errors.
    """
    loc = tuple(error["loc"])
    names = [str(entry) for entry in loc if isinstance(entry, str) and _is_key(entry)]
    key = ".".join(names) or "the workflow"
    where = key if root is None else f"line {_line(root, loc)}: {key}"
    section = _section(model, names[:-1])
    if error["type"] == "extra_forbidden" and section is not None:
        known = sorted(section.model_fields)
        return f"{where} is not a key here; {did_you_mean(names[-1], known)}"
    if error["type"] == "missing":
        return f"{where} is missing"
    field = _field(model, names)
    allowed = _choices(field.annotation if field else None)
    value = error.get("input")
    if allowed and error["type"] == "tuple_type":
        return f"{where}: expected one or several of {', '.join(allowed)}"
    if allowed and isinstance(value, str):
        return f"{where}: {did_you_mean(value, allowed)}"
    return f"{where}: expected {_expected(error, field)}"


def _expected(error: Mapping[str, Any], field: FieldInfo | None) -> str:
    kind = str(error["type"])
    if kind == "string_pattern_mismatch" and field is not None and field.description:
        expected = f"{field.description[:1].lower()}{field.description[1:]}"
        return f"{expected}, such as {field.examples[0]}" if field.examples else expected
    if kind == "too_short":
        return f"at least {error['ctx']['min_length']} of them"
    for start, expected in _EXPECTED:
        if kind.startswith(start):
            return expected
    expected = str(error["msg"]).removeprefix("Value error, ")
    return f"{expected[:1].lower()}{expected[1:]}".removeprefix("input should be ")


def _is_key(name: str) -> bool:
    """Return whether an entry of pydantic's location is a key, not the name of a validator."""
    if name in ("int", "float", "str", "tuple") or "[" in name:
        return False
    return not name.startswith(("function-", "constrained-"))


def _line(node: yaml.Node | None, loc: tuple[object, ...]) -> int:
    """Return the line, from 1, of the innermost key of `loc` that the file has."""
    line = 1
    for key_or_index in loc:
        if isinstance(node, yaml.MappingNode):
            pairs = {key.value: (key, value) for key, value in node.value}
            if key_or_index not in pairs:
                break
            key, node = pairs[str(key_or_index)]
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(key_or_index, int):
            if key_or_index >= len(node.value):
                break
            node = node.value[key_or_index]
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
        if typing.get_origin(kind) is tuple:  # a list of sections
            kind = typing.get_args(kind)[0]
    return kind if _is_section(kind) else None


def _is_section(kind: object) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _field(model: type[BaseModel], names: Sequence[str]) -> FieldInfo | None:
    section = _section(model, names[:-1])
    return section.model_fields.get(names[-1]) if section and names else None


def _choices(annotation: object) -> list[str]:
    """Return the words of all Literals in an annotation."""
    if typing.get_origin(annotation) is Literal:
        return [str(choice) for choice in typing.get_args(annotation)]
    arguments = typing.get_args(annotation)
    if annotation is None or isinstance(annotation, types.NoneType):
        return []
    return [choice for argument in arguments for choice in _choices(argument)]
