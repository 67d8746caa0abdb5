"""Voxels out of a volume file: raw, compressed or as text, never more than its header says."""

from __future__ import annotations

import io
import math
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError, byte_words
from scanloom.io.limits import DEFLATE_LIMIT, FILE_LIMIT, SKIP_LIMIT, VOXEL_LIMIT
from scanloom.io.numbers import parse_numbers, read_words
from scanloom.io.packing import Packing, opened_packed, unpacking_errors
from scanloom.io.regular import open_regular
from scanloom.io.sandbox import Limits, progress, run_limited, shared_empty

Coding = Literal["raw", "text"] | Packing

SPARE = 256 << 20
"""Bytes that decoding may take beside the values."""

PATIENCE = 20.0
"""Seconds in which something must come out of a file."""

SLOWEST = 10 << 20
"""Bytes that come out in a second, of bzip2 on a busy machine; of gzip it is 50 times that."""

_PLAIN_SKIPS = (0, 352, 544)  # NRRD and MetaImage; NIfTI-1 and NIfTI-2 without extensions
_PIECE = 1 << 20
_MOST = 1 << 24  # bytes between two words of progress


@dataclass(frozen=True)
class Layout:
    """Where the voxels of one volume stand in a file.

    Parameters
    ----------
    path : Path
    coding : Coding
        How the file holds them, from byte `start` on.
    start, skip : int
        Bytes before the data, as the file holds them; bytes after that, once they are unpacked.
    shape : (I, J, K)
    dtype : dtype
        As stored, with its byte order.
    volumes, volume : int
        How many volumes the file holds, and which of them is meant, from 0.
    run : int or None
        Voxels of one volume that stand together before the next volume's do; None: all of them.
    packed : int or None
        Length of the compressed data; None: to the end of the file.
    parts : tuple of (path, start)
        Further files with the data that follow, and where these begin; each holds as much as
        `path` does, and is packed, and skipped into, as that is. No text.
    rest : int
        Bytes that may follow the voxels, unpacked.
    slope, intercept : float
        What makes values of stored numbers; 1 and 0 leave them as they are.
    """

    path: Path
    coding: Coding
    start: int
    skip: int
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    volumes: int = 1
    volume: int = 0
    run: int | None = None
    packed: int | None = None
    parts: tuple[tuple[Path, int], ...] = ()
    rest: int = 0
    slope: float = 1.0
    intercept: float = 0.0

    @property
    def count(self) -> int:
        """Voxels of one volume."""
        return math.prod(self.shape)

    @property
    def files(self) -> tuple[tuple[Path, int], ...]:
        """All files with data, and where these begin."""
        return ((self.path, self.start), *self.parts)

    @property
    def share(self) -> int:
        """Bytes of what one of the files holds, with what is skipped in it, unpacked."""
        data = self.count * self.volumes * self.dtype.itemsize
        return self.skip + data // len(self.files)

    @property
    def total(self) -> int:
        """Bytes of all volumes and what is before them, unpacked."""
        return self.share * len(self.files)

    @property
    def spare(self) -> int:
        """Zeros that may stand behind the voxels: fewer than a dimension that is wrong leaves.

        None where the voxels do not begin right behind the header: that might be what is wrong.
        """
        if self.parts or self.skip not in _PLAIN_SKIPS:
            return 0
        return self.count // max(self.shape) * self.dtype.itemsize - 1

    @property
    def result(self) -> np.dtype[Any]:
        """Return the type of the values."""
        if (self.slope, self.intercept) == (1, 0):
            return self.dtype.newbyteorder("=")
        return np.dtype(np.float32)


@contextmanager
def foreign_errors(what: str) -> Iterator[None]:
    """Turn what libraries and the system raise into ScanError.

    Raises
    ------
    ScanError
        TRUNCATED, DAMAGED, UNREADABLE or OUT_OF_MEMORY.
    """
    try:
        yield
    except EOFError as exc:
        raise ScanError(Reason.TRUNCATED, f"{what} ends too early") from exc
    except unpacking_errors() as exc:
        detail = f"{what} can't be decompressed ({type(exc).__name__})"
        raise ScanError(Reason.DAMAGED, detail) from exc
    except OSError as exc:  # BadGzipFile is one, without a number
        reason = Reason.UNREADABLE if exc.errno else Reason.DAMAGED
        raise ScanError(reason, f"{what} can't be read ({type(exc).__name__})") from exc
    except MemoryError as exc:
        raise ScanError(Reason.OUT_OF_MEMORY, f"{what} does not fit into memory") from exc


def size_of(path: Path) -> int:
    """Return the bytes of a file.

    Raises
    ------
    ScanError
        UNREADABLE if it is a pipe or device, whose reading might never end.
    OSError
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ScanError(Reason.UNREADABLE, "it is no regular file")
    return found.st_size


def check_layout(layout: Layout, limit: int = VOXEL_LIMIT) -> None:
    """Refuse, before memory is asked for, what the file can't hold or the limit does not allow.

    Raises
    ------
    ScanError
        TRUNCATED, DAMAGED, TOO_LARGE or UNREADABLE.
    OSError
    """
    for path, start in layout.files:
        held = size_of(path) - start
        if held < _least(layout):
            raise ScanError(Reason.TRUNCATED, "the file ends before its last voxel")
        if layout.coding == "raw" and held > layout.share:
            with path.open("rb") as file:
                file.seek(start + layout.share)
                _check_rest(file, layout)
    if layout.skip > SKIP_LIMIT:
        raise ScanError(Reason.DAMAGED, "its header says that the voxels begin far behind it")
    most = layout.count * max(layout.result.itemsize, layout.dtype.itemsize)
    if layout.run is not None:
        most = max(most, layout.run * layout.volumes * layout.dtype.itemsize)
    if layout.coding == "text":
        most = max(most, layout.total)
    if most > limit or (layout.coding != "raw" and layout.total > FILE_LIMIT * limit):
        detail = f"{byte_words(most)} of voxels, the limit is {byte_words(limit)}"
        raise ScanError(Reason.TOO_LARGE, detail)


def _least(layout: Layout) -> int:
    """Return the bytes that each file with such voxels must have."""
    if layout.coding == "raw":
        return layout.share
    if layout.coding == "text":
        return layout.skip + 2 * layout.count * layout.volumes - 1  # a digit and a space each
    if layout.packed is not None:
        return layout.packed
    deflated = layout.coding in ("gzip", "zlib")
    return -(-layout.share // DEFLATE_LIMIT) if deflated else 0


def read_voxels(layout: Layout) -> NDArray[Any]:
    """Read one volume; what is packed or text is decoded in a child process.

    Parameters
    ----------
    layout : Layout
        One that `check_layout` let pass.

    Returns
    -------
    (I, J, K) array
        I fastest in memory, in the machine's byte order, of type `layout.result`.

    Raises
    ------
    ScanError
        TRUNCATED or DAMAGED if the file holds less or more than its header says; UNREADABLE,
        OUT_OF_MEMORY; DECODE_TIMEOUT if it takes too long.
    """
    with foreign_errors("the file"):
        if layout.coding == "raw":
            values = np.empty(layout.count, layout.result)
            decode(layout, values)
        else:
            values = shared_empty((layout.count,), layout.result)
            run_limited(decode_words, _words(layout), values, limits=_limits(layout))
    return values.reshape(layout.shape[::-1]).T


def _words(layout: Layout) -> dict[str, Any]:
    """Return a layout as what can be sent to another process."""
    words = {name.name: getattr(layout, name.name) for name in fields(layout)}
    return {**words, "dtype": layout.dtype.str, "parts": [list(part) for part in layout.parts]}


def decode_words(words: dict[str, Any], values: NDArray[Any]) -> None:
    """Do `decode` for a layout that was sent to a child process."""
    shape, dtype = tuple(words["shape"]), np.dtype(words["dtype"])
    parts = tuple((path, start) for path, start in words["parts"])
    decode(Layout(**{**words, "shape": shape, "dtype": dtype, "parts": parts}), values)


def _limits(layout: Layout) -> Limits:
    """Return what decoding may take: pieces, or one row of volumes that are mixed, or a text."""
    row = (layout.run or 0) * layout.volumes * layout.dtype.itemsize
    text = 3 * layout.total if layout.coding == "text" else 0
    return Limits(SPARE + 2 * row + text, PATIENCE, 2 * PATIENCE + layout.total / SLOWEST)


def decode(layout: Layout, values: NDArray[Any]) -> None:
    """Fill an array (I * J * K,) of type `layout.result` with a volume; errors as `read_voxels`."""
    with foreign_errors("the file"), _open(layout) as file:
        if not layout.parts:
            _skip(file, layout.skip, layout)
        if layout.coding == "text":
            _from_text(file, layout, values)
        elif layout.run is None:
            _from_block(file, layout, values)
        else:
            _from_runs(file, layout, values)
        _check_rest(file, layout)  # the last step of gzip: only there it checks what it inflated


def _check_rest(file: BinaryIO, layout: Layout) -> None:
    """Refuse what stands behind the voxels, but for what the format allows, or some zeros."""
    count, most = 0, max(layout.rest, layout.spare)
    while piece := file.read(min(most - count + 1, _PIECE)):
        count += len(piece)
        if count > most or (not layout.rest and piece.strip(b"\0")):
            raise ScanError(Reason.DAMAGED, "the file holds more than its header says")


def _from_block(file: BinaryIO, layout: Layout, values: NDArray[Any]) -> None:
    """Read a volume whose voxels stand together."""
    size = layout.count * layout.dtype.itemsize
    _skip(file, size * layout.volume, layout)
    if (layout.slope, layout.intercept) == (1, 0):
        _read_into(file, values)
        if not layout.dtype.isnative:
            values.byteswap(inplace=True)
    else:
        for begin in range(0, layout.count, _PIECE):
            stored = np.empty(min(_PIECE, layout.count - begin), layout.dtype)
            _read_into(file, stored)
            with np.errstate(over="ignore", invalid="ignore"):  # infinite values are judged later
                values[begin : begin + stored.size] = stored * layout.slope + layout.intercept
    _skip(file, size * (layout.volumes - 1 - layout.volume), layout)


def _from_runs(file: BinaryIO, layout: Layout, values: NDArray[Any]) -> None:
    """Read a volume whose voxels stand between those of others."""
    run = layout.run or 1
    lines = values.reshape(-1, run)
    rows = max(1, _PIECE // (run * layout.volumes * layout.dtype.itemsize))
    for begin in range(0, len(lines), rows):
        mixed = np.empty((min(rows, len(lines) - begin), layout.volumes, run), layout.dtype)
        _read_into(file, mixed)
        lines[begin : begin + rows] = mixed[:, layout.volume]


def _from_text(file: BinaryIO, layout: Layout, values: NDArray[Any]) -> None:
    """Read numbers with space between them."""
    numbers = np.empty(layout.count * layout.volumes, layout.dtype)
    done = 0
    for tokens in read_words(file):
        if done + len(tokens) > numbers.size:
            raise ScanError(Reason.DAMAGED, "the file holds more than its header says")
        numbers[done : done + len(tokens)] = parse_numbers(tokens, layout.dtype)
        done += len(tokens)
        progress()
    if done < numbers.size:
        raise ScanError(Reason.TRUNCATED, "the file ends before its last voxel")
    mixed = numbers.reshape(-1, layout.volumes, layout.run or layout.count)
    values.reshape(-1, mixed.shape[2])[:] = mixed[:, layout.volume]


@contextmanager
def _open(layout: Layout) -> Iterator[BinaryIO]:
    """Open the data for reading forward, unpacked; of several files, one behind the other."""
    if layout.parts:
        with closing(_Joined(layout)) as joined:
            yield cast(BinaryIO, io.BufferedReader(joined, _PIECE))
    else:
        with _opened(layout, layout.path, layout.start) as file:
            yield file


@contextmanager
def _opened(layout: Layout, path: Path, start: int) -> Iterator[BinaryIO]:
    with open_regular(path) as file:
        file.seek(start)
        if layout.coding == "raw" or layout.coding == "text":
            yield cast(BinaryIO, file)
            return
        with opened_packed(cast(BinaryIO, file), layout.coding, layout.packed) as stream:
            yield stream


class _Joined(io.RawIOBase):
    """The data of several files, each of which must hold its share, no less and no more."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._coming = layout, list(layout.files)
        self._open = ExitStack()
        self._file: BinaryIO | None = None
        self._left = 0

    def readable(self) -> bool:
        """Whether it can be read: yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into `buffer`; 0 behind the last file."""
        while not self._left:
            if self._file is not None:
                _check_rest(self._file, self._layout)
                self._open.close()
                self._file = None
            if not self._coming:
                return 0
            path, start = self._coming.pop(0)
            self._file = self._open.enter_context(_opened(self._layout, path, start))
            _skip(self._file, self._layout.skip, self._layout)
            self._left = self._layout.share - self._layout.skip
        piece = self._file.read(min(len(buffer), self._left)) if self._file else b""
        if not piece:
            raise EOFError
        buffer[: len(piece)] = piece
        self._left -= len(piece)
        return len(piece)

    def close(self) -> None:
        """Close the file that is open."""
        self._open.close()
        super().close()


def _read_into(file: BinaryIO, values: NDArray[Any]) -> None:
    """Fill an array."""
    view = memoryview(values.reshape(-1).view(np.uint8))
    done = 0
    while done < len(view):
        count = file.readinto(view[done : done + _MOST])  # type: ignore[attr-defined]
        if not count:
            raise ScanError(Reason.TRUNCATED, "the file ends before its last voxel")
        done += count
        progress()


def _skip(file: BinaryIO, count: int, layout: Layout) -> None:
    """Move forward; only a plain file can seek."""
    if layout.coding == "raw" and file.seekable():
        file.seek(count, io.SEEK_CUR)
        return
    while count > 0:
        piece = file.read(min(count, _PIECE))
        if not piece:
            raise ScanError(Reason.TRUNCATED, "the file ends before its voxels")
        count -= len(piece)
        progress()
