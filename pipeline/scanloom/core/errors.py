"""The error type that users see."""

from __future__ import annotations

import re
from typing import Any

from scanloom.core.reasons import Reason
from scanloom.options import walk_options

KEYWORDS = frozenset({"model", *(option.name for _, option, _ in walk_options())} - {"models"})
"""Options of the commands that are keywords of `scanloom.segment` or `scanloom.load_volume`."""
_WITH_VALUE = re.compile(r"`(?:segment )?--([a-z-]+) (\w+)`")
_OPTION = re.compile(r"`(?!segment )\w[^`]*`|(`?)(?:(?<=`)segment )?--([a-z][a-z-]*)\1")
"""An option of `segment`; or, without the group, a command of another kind, which is kept."""


def in_python(message: str) -> str:
    """Return a message with the keywords of Python functions instead of a command's options."""

    def keyword(text: str, option: str, value: str = "") -> str:
        name = option.replace("-", "_")
        quoted = value if value.isdecimal() or not value else f'"{value}"'
        return f"`{name}={quoted}`" if name in KEYWORDS else text

    message = _WITH_VALUE.sub(lambda m: keyword(m[0], m[1], m[2]), message)
    return _OPTION.sub(lambda m: keyword(m[0], m[2] or ""), message)


class ScanError(Exception):
    """A scan, model or archive can't be used, for a reason from the closed list.

    Its text names options as keywords of Python functions; commands print detail and advice.

    Parameters
    ----------
    reason : Reason
        Carries code, outcome and advice.
    detail : str
        The finding in scanloom's own text and numbers: foreign text may name a patient.
    private : str
        Paths and descriptions of series that the finding is about, in one or several lines. They
        may name a patient: for the terminal and `OUT/private` only, and no part of the message.
    """

    def __init__(self, reason: Reason, detail: str, private: str = "") -> None:
        listed = " The list is in the error's `private`." if "\n" in private else ""
        end = "" if detail.endswith("?") else "."
        super().__init__(in_python(f"{reason.code}: {detail}{end} {reason.advice}.{listed}"))
        self.reason = reason
        self.detail = detail
        self.private = private

    @property
    def code(self) -> str:
        """The code of the reason."""
        return self.reason.code

    def about(self, private: str) -> ScanError:
        """Return the same error with the path or series that it is about, unless it has one."""
        return self if self.private else ScanError(self.reason, self.detail, private)

    def __reduce__(self) -> tuple[type[ScanError], tuple[Any, ...]]:
        """Support pickling, so that a worker process can return the error."""
        return type(self), (self.reason, self.detail, self.private)


class WorkflowError(ScanError):
    """A mistake at a key of a workflow: WORKFLOW.

    Parameters
    ----------
    keys : tuple of str or int
        The key, after those that it is in; for an entry of a list, its position.
    problem : str
        What is wrong there, in scanloom's own text.
    """

    def __init__(self, keys: tuple[str | int, ...], problem: str) -> None:
        names = ".".join(key for key in keys if isinstance(key, str))
        super().__init__(Reason.WORKFLOW, f"{names}: {problem}")
        self.keys = keys
        self.problem = problem

    def __reduce__(self) -> tuple[type[ScanError], tuple[Any, ...]]:
        """Support pickling."""
        return type(self), (self.keys, self.problem)


def check_type(value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Refuse an argument of another type; callers in notebooks are not checked by mypy.

    Raises
    ------
    TypeError
        Which begins with what is `expected`.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{expected}, not {type(value).__name__}")
