"""The list `OUT/runs/<run id>/early.jsonl`: cases that began before the index was complete.

A case is listed before it begins, and its line goes when it was compared with the whole index.
Until then its result is provisional: it may be withdrawn. The list of a run that was killed stays
for the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from scanloom.io.output.growing_table import append_lines, format_line, read_lines
from scanloom.io.system.atomic_write import atomic_write
from scanloom.io.system.regular_files import open_regular_file

EARLY = "early.jsonl"


class EarlyCase(NamedTuple):
    """A line of the list: a case, its folder's name, what it is made from, and of which series."""

    case: str
    folder: str
    recipe: str
    stamp: str
    series: str


def early_lists(out: Path) -> list[Path]:
    """Return the lists of all runs in an output folder."""
    return sorted(out.glob(f"runs/*/{EARLY}"))


def count_early(out: Path) -> int:
    """Return the number of lines in all lists of an output folder."""
    lines = 0
    for path in early_lists(out):
        with suppress(FileNotFoundError), open_regular_file(path) as file:
            lines += sum(1 for _ in file)
    return lines


def read_early(path: Path) -> Iterator[EarlyCase]:
    """Yield the lines of a list; none of one that is gone or damaged."""
    with suppress(FileNotFoundError, ValueError, TypeError), open_regular_file(path) as file:
        for row in read_lines(file):
            yield EarlyCase(**row)


def add_early(path: Path, line: EarlyCase) -> None:
    """Append a line to a list, readable by everyone who may read the results.

    Raises
    ------
    OSError
        If it can't be written.
    """
    append_lines(path, [line._asdict()], 0o666)


def keep_early(path: Path, lines: Sequence[EarlyCase]) -> None:
    """Leave these lines in a list; remove one without any.

    Raises
    ------
    OSError
        If it can't be written.
    """
    text = "".join(format_line(line._asdict()) for line in lines)
    if text:
        atomic_write(path, lambda draft: draft.write_text(text, encoding="utf-8"))
    else:
        path.unlink(missing_ok=True)
