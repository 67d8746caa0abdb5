"""An append-only file of JSON lines, each with its number and its SHA-256.

A line is synced to the disk before `append` returns. A process that dies while it writes leaves at
most half a line at the end, which the next one cuts off.

Numbers and sums find damage: a bit that flipped, a line that an editor changed, lost or moved. They
have no key, and nothing says how many lines there were: somebody who can write the file can change
any line and its sum, and can cut lines off at the end, without being noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scanloom.io.system.atomic_write import fsync_path
from scanloom.io.system.regular_files import open_link_free

_SUM = re.compile(rb',"sha256":"([0-9a-f]{64})"\}')
_SUM_BYTES = len(',"sha256":""}') + 64


class LineError(ValueError):
    """A line is damaged, missing, doubled or moved; the text says which."""


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each whole line.

    Half a line at the end is left out. There are no lines without the file.

    Raises
    ------
    LineError
        If a line was changed, or is not in its place.
    OSError
        If the file can't be read, or is a link.
    """
    try:
        content = _read(path)
    except FileNotFoundError:
        return
    *lines, last = content.split(b"\n")
    number = 0
    for number, line in enumerate(lines, 1):
        yield _read_line(line, number)
    if not _is_half(last, number + 1):
        yield _read_line(last, number + 1)


class JsonLines:
    """A file to which one process appends lines.

    Parameters
    ----------
    path : Path
        The file; it is created with the first line.
    mode : int
        Mode of a new file.

    Raises
    ------
    LineError, OSError
        As of `read_lines`.
    """

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        self.path, self.mode = path, mode
        self.lines = list(read_lines(path))
        self._size = _end_with_a_line(path, len(self.lines)) if os.path.lexists(path) else 0

    def append(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Append a line, and return its JSON object once it is on the disk.

        Parameters
        ----------
        content : mapping
            A JSON object; "number" and "sha256" are set.

        Raises
        ------
        OSError
            If it can't be written: then the file is as before.
        LineError
            If another program changed the file since.
        """
        plain = {"number": len(self.lines) + 1} | dict(content)
        plain["number"] = len(self.lines) + 1
        plain.pop("sha256", None)
        text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
        body = text.encode("utf-8", "replace")
        plain["sha256"] = hashlib.sha256(body).hexdigest()
        line = body[:-1] + f',"sha256":"{plain["sha256"]}"}}\n'.encode()
        self._write(line)
        if not self._size:
            fsync_path(self.path.parent)
        self._size += len(line)
        self.lines.append(plain)
        return plain

    def _write(self, line: bytes) -> None:
        descriptor = open_link_free(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, self.mode)
        try:
            if os.fstat(descriptor).st_size != self._size:
                raise LineError("another program changed the file")
            try:
                view = memoryview(line)
                while view:
                    view = view[os.write(descriptor, view) :]
                os.fsync(descriptor)
            except BaseException:
                os.ftruncate(descriptor, self._size)
                raise
        finally:
            os.close(descriptor)


def _read(path: Path) -> bytes:
    with os.fdopen(open_link_free(path, os.O_RDONLY), "rb") as file:
        return file.read()


def _is_half(rest: bytes, number: int) -> bool:
    """Return whether what follows the last line feed is half of the line with a number.

    That it begins as this line does matters: it is cut off, and a file that is not a log must not
    be emptied. NULs are what some file systems leave of a write when the power failed. A whole
    line whose line feed is missing is no half: an editor saved it so.
    """
    begin = f'{{"number":{number},'.encode()
    is_begun = begin.startswith(rest) or rest.startswith(begin)
    return not rest.strip(b"\0") or (is_begun and _SUM.fullmatch(rest[-_SUM_BYTES:]) is None)


def _end_with_a_line(path: Path, count: int) -> int:
    """Cut off half a line at the end, or add a missing line feed; return the size of the file."""
    descriptor = open_link_free(path, os.O_RDWR | os.O_APPEND)
    with os.fdopen(descriptor, "r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole == len(content):
            return whole
        if content.count(b"\n") < count:
            file.write(b"\n")
            whole = len(content) + 1
        else:
            file.truncate(whole)
        file.flush()
        os.fsync(descriptor)
    return whole


def _read_line(line: bytes, number: int) -> dict[str, Any]:
    """Return the JSON object of a line, at its place in the file.

    Raises
    ------
    LineError
    """
    checksum = _SUM.fullmatch(line[-_SUM_BYTES:])
    body = line[:-_SUM_BYTES] + b"}"
    if checksum is None or checksum[1].decode() != hashlib.sha256(body).hexdigest():
        raise LineError(f"line {number} was changed")
    try:
        plain = dict(json.loads(line))
        own = plain["number"]
    except (ValueError, LookupError, TypeError, RecursionError) as exc:
        raise LineError(f"line {number} is damaged") from exc
    if own != number:
        raise LineError(f"line {number} is missing: line {own} is in its place")
    return plain
