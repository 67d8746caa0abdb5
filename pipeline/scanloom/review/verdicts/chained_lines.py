"""An append-only file of JSON lines, each with its own SHA-256 and that of the line before.

A line is synced to the disk before `append` returns. A process that dies while it writes leaves at
most half a line at the end, which the next one cuts off. Number and SHA-256 of the last line are
also kept in a file beside it, `.last`, so that lines missing at the end are noticed. That file is
written after the line: it may be behind, never ahead.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from scanloom.io.system.atomic_write import fsync_path

_SUM = re.compile(rb',"sha256":"([0-9a-f]{64})"\}')
_SUM_BYTES = len(',"sha256":""}') + 64
_LAST = re.compile(rb"(\d{12}) ([0-9a-f]{64})\n")
_LINK_FREE = getattr(os, "O_NOFOLLOW", 0)


class ChainError(ValueError):
    """A line is damaged, missing, repeated or not in its place; the text says which."""


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each whole line.

    A half line at the end is left out. There are no lines without the file.

    Raises
    ------
    ChainError
        If a line was changed, is not the one that followed the line before, or is missing.
    OSError
        If the file can't be read.
    """
    known, known_sum = _read_last(path)  # before the lines, of which there may soon be more
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    previous, number = "", 0
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        plain = _read_line(line, number, previous)
        previous = plain["sha256"]
        if number == known and previous != known_sum:
            raise ChainError(f"line {number} is not the line that was written")
        yield plain
    if number < known:
        missing = f"lines {number + 1} to {known} are" if known > number + 1 else f"line {known} is"
        raise ChainError(f"{missing} missing at the end")


def _read_line(line: bytes, number: int, previous: str) -> dict[str, Any]:
    """Return the JSON object of a line, at its place in the file.

    Raises
    ------
    ChainError
    """
    checksum = _SUM.fullmatch(line[-_SUM_BYTES:])
    if checksum is None or checksum[1].decode() != _sum(line[:-_SUM_BYTES] + b"}"):
        raise ChainError(f"line {number} was changed")
    try:
        plain = dict(json.loads(line))
        own, before = plain["number"], plain["previous"]
    except (ValueError, LookupError, TypeError, RecursionError) as exc:
        raise ChainError(f"line {number} is damaged") from exc
    if own != number:
        raise ChainError(f"line {number} is missing: line {own} is in its place")
    if before != previous:
        raise ChainError(f"line {number} does not follow the line before")
    return plain


class ChainedLines:
    """A file to which one process appends lines.

    Parameters
    ----------
    path : Path
        The file; it is created with the first line.
    mode : int
        Mode of new files.

    Raises
    ------
    ChainError, OSError
        As of `read_lines`.
    """

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        self.path, self.mode = path, mode
        self.lines = list(read_lines(path))
        self._size = _cut_half_line(path) if path.exists() else 0
        if self.lines:
            self._keep_last()

    def append(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Append a line, and return its JSON object once it is on the disk.

        Parameters
        ----------
        content : mapping
            A JSON object; "number", "previous" and "sha256" are set.

        Raises
        ------
        OSError
            If it can't be written: then the file is as before.
        ChainError
            If another program changed the file since.
        """
        previous = self.lines[-1]["sha256"] if self.lines else ""
        plain = {**content, "number": len(self.lines) + 1, "previous": previous}
        plain.pop("sha256", None)
        text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
        body = text.encode("utf-8", "replace")
        plain["sha256"] = _sum(body)
        line = body[:-1] + f',"sha256":"{plain["sha256"]}"}}\n'.encode()
        self._write(line)
        if not self._size:
            fsync_path(self.path.parent)
        self._size += len(line)
        self.lines.append(plain)
        self._keep_last()
        return plain

    def _write(self, line: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | _LINK_FREE
        descriptor = os.open(self.path, flags, self.mode)
        try:
            if os.fstat(descriptor).st_size != self._size:
                raise ChainError("another program changed the file")
            try:
                _write_all(descriptor, line)
                os.fsync(descriptor)
            except BaseException:
                os.ftruncate(descriptor, self._size)
                raise
        finally:
            os.close(descriptor)

    def _keep_last(self) -> None:
        """Keep number and SHA-256 of the last line, as far as the disk allows."""
        last = self.lines[-1]
        flags = os.O_WRONLY | os.O_CREAT | _LINK_FREE
        with suppress(OSError):
            descriptor = os.open(_path_of_last(self.path), flags, self.mode)
            try:
                os.write(descriptor, f"{last['number']:012d} {last['sha256']}\n".encode())
            finally:
                os.close(descriptor)


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _path_of_last(path: Path) -> Path:
    return path.with_suffix(".last")


def _read_last(path: Path) -> tuple[int, str]:
    """Return number and SHA-256 of the last line that is known; 0 if none is.

    Raises
    ------
    ChainError
        If the file was changed.
    """
    try:
        content = _path_of_last(path).read_bytes()
    except FileNotFoundError:
        return 0, ""
    if not content.strip(b"\0"):  # the machine stopped before it was on the disk
        return 0, ""
    match = _LAST.fullmatch(content)
    if match is None:
        raise ChainError(f"{_path_of_last(path).name} beside it is damaged")
    return int(match[1]), match[2].decode()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _cut_half_line(path: Path) -> int:
    """Cut off what follows the last line feed; return the size of the file."""
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
            os.fsync(file.fileno())
    return whole
