"""An append-only file of JSON lines, each with the SHA-256 of the line before.

A line is synced to the disk before `append` returns. A process that dies while it writes leaves at
most half a line at the end, which the next one cuts off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scanloom.io.system.atomic_write import fsync_path

MAX_LINE_BYTES = 1 << 20


class ChainError(ValueError):
    """A line is damaged, missing, repeated or not in its place; the text says which."""


def read_lines(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the JSON object of each whole line, and the line's SHA-256.

    A half line at the end is left out. There are no lines without the file.

    Raises
    ------
    ChainError
        If a line is not the one that followed the line before.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    previous = ""
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            plain = json.loads(line)
            follows = plain["previous"] == previous and plain["number"] == number
        except (ValueError, LookupError, TypeError) as exc:
            raise ChainError(f"line {number} is damaged") from exc
        if not follows:
            raise ChainError(f"line {number} does not follow the line before")
        previous = hashlib.sha256(line).hexdigest()
        yield plain, previous


class ChainedLines:
    """A file to which one process appends lines.

    Parameters
    ----------
    path : Path
        The file; it is created with the first line.
    mode : int
        Mode of a new file.

    Raises
    ------
    ChainError
        As of `read_lines`.
    """

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        self.path, self.mode = path, mode
        self.lines = [plain for plain, self.last in read_lines(path)]
        if not self.lines:
            self.last = ""
        if path.exists():
            _cut_half_line(path)

    def append(self, make: Callable[[int, str], dict[str, Any]]) -> dict[str, Any]:
        """Append a line, and return its JSON object once it is on the disk.

        Parameters
        ----------
        make : callable
            Maps the number of the line, and the SHA-256 of the line before, to a JSON object with
            both as "number" and "previous".

        Raises
        ------
        OSError
            If it can't be written: then the file is as before.
        """
        plain = make(len(self.lines) + 1, self.last)
        line = json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()
        new = not self.path.exists()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(self.path, flags, self.mode)
        try:
            size = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, line + b"\n")
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        if new:
            fsync_path(self.path.parent)
        self.lines.append(plain)
        self.last = hashlib.sha256(line).hexdigest()
        return plain


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _cut_half_line(path: Path) -> None:
    """Cut off what follows the last line feed."""
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
            os.fsync(file.fileno())
