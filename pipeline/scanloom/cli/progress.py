"""Progress on stderr: a status line on a terminal, plain lines otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scanloom.cli.console import console, say

OnStep = Callable[[Path, str], None]

DOING = {
    "find": "looking for scans",
    "load": "reading",
    "resample": "resampling",
    "network": "running the network",
    "restore": "restoring labels to the scan's grid",
    "clean": "cleaning",
    "measure": "measuring",
    "write": "writing",
    "readback": "reading back and comparing",
}


@contextmanager
def progress(paths: Sequence[Path]) -> Iterator[OnStep]:
    """Yield a callback for the steps of each path."""
    from scanloom.core import printable

    numbers = {path: n for n, path in enumerate(paths, 1)}

    def text(path: Path, step: str) -> str:
        position = f"[{numbers[path]}/{len(paths)}] " if len(paths) > 1 else ""
        name = printable(path.name or str(path))
        return f"{position}{name}: {DOING.get(step, step)}"

    screen = console(stderr=True)
    if not screen.is_terminal:
        yield _plain_lines(text)
        return
    from rich.text import Text

    with screen.status("starting") as status:
        # Text, not str: [brackets] in a name must not be taken as markup
        yield lambda path, step: status.update(Text(text(path, step)))


def silence(path: Path, step: str) -> None:
    """Report nothing."""


def _plain_lines(text: Callable[[Path, str], str]) -> OnStep:
    printed: set[str] = set()

    def report(path: Path, step: str) -> None:
        line = text(path, step)
        if line not in printed:  # network and restore alternate
            printed.add(line)
            say(line, err=True)

    return report
