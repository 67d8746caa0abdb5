"""The series that `segment` takes at a path, in its output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from scanloom.cli.console import format_error, say

if TYPE_CHECKING:
    from scanloom.core import Reason, SeriesChoice


def choice_lines(choice: SeriesChoice | None) -> list[str]:
    """Return a line that names the series, and a line for each remark on the choice."""
    if choice is None:
        return []
    return [str(choice), *(f"! {remark}." for remark in (*choice.notes, *choice.unused))]


def choice_document(choice: SeriesChoice | None) -> dict[str, Any] | None:
    """Return the JSON object of a choice, without text of headers and paths."""
    if choice is None:
        return None
    remarks = [*choice.notes, *choice.unused]
    return {"number": choice.number, "of": choice.of, "remarks": remarks}


def show_failure(
    path: Path, reason: Reason, detail: str, private: str, choice: SeriesChoice | None
) -> None:
    """Print on stderr why a scan gave no result, and which of several series it is."""
    from scanloom.core import printable

    message = format_error(reason, detail, private)
    names_it = private and "\n" not in private
    say(message if names_it else f"{printable(str(path))}: {message}", err=True)
    if choice is not None and (choice.of > 1 or choice.unused):
        for line in choice_lines(choice):
            say(f"  {line}", err=True)
