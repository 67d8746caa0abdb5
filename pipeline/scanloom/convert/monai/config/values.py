"""Values of a config that are not plain data, and the refusal of expressions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from scanloom.core import Reason, ScanError, printable

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
    target : str
        As the config has it.
    args : mapping
        Arguments by name.
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


def bounded(value: Any) -> Any:
    """Refuse integers beyond 64 bits, on which some operations never end."""
    if isinstance(value, int) and abs(value) > MAX_WHOLE:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"a number is larger than {MAX_WHOLE}")
    return value


def truncate(text: str, limit: int = 120) -> str:
    """Return a bundle's text for quoting: one line of at most `limit` characters."""
    line = printable(text[: limit + 1])
    return line if len(line) <= limit else line[:limit] + "..."


def refusal(text: str, reason: Reason = Reason.MODEL_UNSUPPORTED) -> ScanError:
    """Return the error for an expression that is not on the list of forms."""
    problem = "would run code" if reason is Reason.MODEL_UNSAFE else "is not supported"
    return ScanError(reason, f"the expression ${truncate(text)} {problem}")
