"""What is being done right now, on stderr: one living line on a terminal, plain lines otherwise."""

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
    "restore": "bringing labels back",
    "clean": "cleaning",
    "measure": "measuring",
    "write": "writing",
    "readback": "reading back and comparing",
}


@contextmanager
def progress(paths: Sequence[Path]) -> Iterator[OnStep]:
    """Give a function that is told of each step."""
    from scanloom.core import printable

    numbers = {path: n for n, path in enumerate(paths, 1)}

    def text(path: Path, step: str) -> str:
        place = f"[{numbers[path]}/{len(paths)}] " if len(paths) > 1 else ""
        name = printable(path.name or str(path))
        return f"{place}{name}: {DOING.get(step, step)}"

    screen = console(stderr=True)
    if not screen.is_terminal:
        yield _plain_lines(text)
        return
    from rich.text import Text

    with screen.status("starting") as status:
        # Text, not str: a name with [brackets] is no markup.
        yield lambda path, step: status.update(Text(text(path, step)))


def silence(path: Path, step: str) -> None:
    """Say nothing."""


def _plain_lines(text: Callable[[Path, str], str]) -> OnStep:
    said: set[str] = set()

    def tell(path: Path, step: str) -> None:
        line = text(path, step)
        if line not in said:  # network and restore take turns
            said.add(line)
            say(line, err=True)

    return tell
