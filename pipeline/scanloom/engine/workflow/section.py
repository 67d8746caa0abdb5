"""`Section` of a workflow, and types of fields that several sections have."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from scanloom.options import take

T = TypeVar("T")


def listed(value: object) -> object:
    """Return a single string as a list of one; other values are kept as they are."""
    return (value,) if isinstance(value, str) else value


def comma_separated(value: object) -> object:
    """Return a text as the names between its commas, as on the command line; refuse an empty one.

    Raises
    ------
    ValueError
        If it has no name.
    """
    if not isinstance(value, str):
        return value
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    if not names:
        raise ValueError("at least one name; leave the key out for all")
    return names


WordList = Annotated[tuple[str, ...], BeforeValidator(listed)]


class Section(BaseModel, frozen=True):
    """A part of a workflow: unknown keys are errors, and instances are immutable.

    A section that inherits from an options class of `scanloom.options` has its fields, with
    their defaults and descriptions; a field that is defined again differs only in its type.
    """

    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for base in filter(is_dataclass, cls.__bases__):
            hints = get_type_hints(base, include_extras=True)
            for option in fields(base):
                cls.__annotations__.setdefault(option.name, hints[option.name])
                known = {"description": option.metadata["description"], **option.metadata["schema"]}
                setattr(cls, option.name, Field(default=option.default, **known))

    def options(self, kind: type[T]) -> T:
        """Return the fields of an options class that this section inherits from."""
        return take(kind, dict(self))
