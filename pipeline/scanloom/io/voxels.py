"""Voxels out of a volume file: raw, compressed or as text, never more than its header says."""

from __future__ import annotations

import bz2
import io
import math
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError, byte_words
from scanloom.io.sandbox import Limits, progress, run_limited, shared_empty

Coding = Literal["raw", "gzip", "zlib", "bzip2", "text"]

VOXEL_LIMIT = 4 << 30
"""Bytes of decoded voxels that a volume may have, unless the caller says otherwise."""

DEFLATE_LIMIT = 1032
"""Deflate makes nothing smaller than by this: a header that says more was cut or damaged."""

FILE_LIMIT = 8
"""A compressed file of several volumes may hold this many times the limit of one: to reach the
last volume, all before it are inflated."""

SKIP_LIMIT = 1 << 30
"""Bytes before the first voxel: extensions of headers are a few kB."""

SPARE = 256 << 20
"""Bytes that decoding may take beside the values."""

PATIENCE = 20.0
"""Seconds in which something must come out of a file."""

SLOWEST = 10 << 20
"""Bytes that come out in a second, of bzip2 on a busy machine; of gzip it is 50 times that."""

_PLAIN_SKIPS = (0, 352, 544)  # NRRD and MetaImage; NIfTI-1 and NIfTI-2 without extensions
_PIECE = 1 << 20
_MOST = 1 << 24  # bytes between two words of progress
_TOKEN = 64  # characters of one number in a text


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
    slope: float = 1.0
    intercept: float = 0.0

    @property
    def count(self) -> int:
        """Voxels of one volume."""
        return math.prod(self.shape)

    @property
    def total(self) -> int:
        """Bytes of all volumes and what is before them, unpacked."""
        return self.skip + self.count * self.volumes * self.dtype.itemsize

    @property
    def spare(self) -> int:
        """Zeros that may stand behind the voxels: fewer than a dimension that is wrong leaves.

        None where the voxels do not begin right behind the header: that might be what is wrong.
        """
        if self.skip not in _PLAIN_SKIPS:
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
    from isal import isal_zlib

    isal_error = cast(type[Exception], isal_zlib.error)  # its stub calls it a value
    try:
        yield
    except EOFError as exc:
        raise ScanError(Reason.TRUNCATED, f"{what} ends too early") from exc
    except (zlib.error, isal_error) as exc:
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


def is_gzip(path: Path, start: int = 0) -> bool:
    """Whether gzip's magic number stands at byte `start`."""
    size_of(path)  # opening a pipe would wait for ever
    with path.open("rb") as file:
        file.seek(start)
        return file.read(2) == b"\x1f\x8b"


def check_layout(layout: Layout, limit: int = VOXEL_LIMIT) -> None:
    """Refuse, before memory is asked for, what the file can't hold or the limit does not allow.

    Raises
    ------
    ScanError
        TRUNCATED, DAMAGED, TOO_LARGE or UNREADABLE.
    OSError
    """
    held = size_of(layout.path) - layout.start
    if held < _least(layout):
        raise ScanError(Reason.TRUNCATED, "the file ends before its last voxel")
    if layout.coding == "raw" and held > layout.total:
        with layout.path.open("rb") as file:
            file.seek(layout.start + layout.total)
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
    """Return the bytes that a file with such voxels must have."""
    if layout.coding == "raw":
        return layout.total
    if layout.coding == "text":
        return layout.skip + 2 * layout.count * layout.volumes - 1  # a digit and a space each
    if layout.packed is not None:
        return layout.packed
    return 0 if layout.coding == "bzip2" else -(-layout.total // DEFLATE_LIMIT)


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
        OUT_OF_MEMORY; STUCK if it takes too long.
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
    return {**words, "dtype": layout.dtype.str}


def decode_words(words: dict[str, Any], values: NDArray[Any]) -> None:
    """Do `decode` for a layout that was sent to a child process."""
    dtype = np.dtype(words["dtype"])
    decode(Layout(**{**words, "shape": tuple(words["shape"]), "dtype": dtype}), values)


def _limits(layout: Layout) -> Limits:
    """Return what decoding may take: pieces, or one row of volumes that are mixed, or a text."""
    row = (layout.run or 0) * layout.volumes * layout.dtype.itemsize
    text = 3 * layout.total if layout.coding == "text" else 0
    return Limits(SPARE + 2 * row + text, PATIENCE, 2 * PATIENCE + layout.total / SLOWEST)


def decode(layout: Layout, values: NDArray[Any]) -> None:
    """Fill an array (I * J * K,) of type `layout.result` with a volume; errors as `read_voxels`."""
    with foreign_errors("the file"), _open(layout) as file:
        _skip(file, layout.skip, layout)
        if layout.coding == "text":
            _from_text(file, layout, values)
        elif layout.run is None:
            _from_block(file, layout, values)
        else:
            _from_runs(file, layout, values)
        _check_rest(file, layout)  # the last step of gzip: only there it checks what it inflated


def _check_rest(file: BinaryIO, layout: Layout) -> None:
    """Refuse what stands behind the voxels, but for some zeros."""
    count = 0
    while piece := file.read(_PIECE):
        count += len(piece)
        if count > layout.spare or piece.strip(b"\0"):
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
    for tokens in _tokens(file):
        if done + len(tokens) > numbers.size:
            raise ScanError(Reason.DAMAGED, "the file holds more than its header says")
        numbers[done : done + len(tokens)] = _parsed(tokens, layout.dtype)
        done += len(tokens)
        progress()
    if done < numbers.size:
        raise ScanError(Reason.TRUNCATED, "the file ends before its last voxel")
    mixed = numbers.reshape(-1, layout.volumes, layout.run or layout.count)
    values.reshape(-1, mixed.shape[2])[:] = mixed[:, layout.volume]


def _tokens(file: BinaryIO) -> Iterator[list[bytes]]:
    """Yield words, piece by piece; one that a piece cuts goes with the next."""
    rest = b""
    while piece := file.read(_PIECE):
        words = (rest + piece).split()
        whole = (piece[-1:]).isspace()
        rest = b"" if whole or not words else words.pop()
        if len(rest) > _TOKEN:
            break
        if words:
            yield words
    if rest:
        yield [rest]


def _parsed(tokens: list[bytes], dtype: np.dtype[Any]) -> NDArray[Any]:
    if max(map(len, tokens)) > _TOKEN:
        raise ScanError(Reason.DAMAGED, "its voxels are no numbers")
    wide = np.dtype({"i": np.int64, "u": np.uint64, "f": np.float64}[dtype.kind])
    try:
        numbers = np.array(tokens).astype(wide)
    except (ValueError, OverflowError) as exc:
        raise ScanError(Reason.DAMAGED, "its voxels are no numbers") from exc
    if dtype.kind != "f":
        ends = np.iinfo(dtype)
        if numbers.min() < ends.min or numbers.max() > ends.max:
            raise ScanError(Reason.DAMAGED, "its voxels do not fit the type that it names")
    with np.errstate(over="ignore"):
        return numbers.astype(dtype)


@contextmanager
def _open(layout: Layout) -> Iterator[BinaryIO]:
    """Open the data for reading forward, unpacked; gzip is inflated in a thread."""
    with layout.path.open("rb") as file:
        file.seek(layout.start)
        if layout.coding == "gzip":
            from isal import igzip_threaded

            with igzip_threaded.open(file, "rb", threads=1, block_size=_PIECE) as stream:
                yield cast(BinaryIO, stream)
        elif layout.coding == "zlib":
            yield cast(BinaryIO, io.BufferedReader(_Inflated(file, layout.packed), _PIECE))
        elif layout.coding == "bzip2":
            with bz2.open(file, "rb") as unpacked:
                yield cast(BinaryIO, unpacked)
        else:
            yield file


class _Inflated(io.RawIOBase):
    """A zlib stream, which the gzip libraries do not open."""

    def __init__(self, file: BinaryIO, length: int | None) -> None:
        from isal import igzip_lib

        self._file, self._left = file, length
        self._state = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_ZLIB)

    def readable(self) -> bool:
        """Whether it can be read: yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Inflate into `buffer`; 0 at the end of the stream."""
        while not self._state.eof:
            piece = self._next() if self._state.needs_input else b""
            unpacked = self._state.decompress(piece, len(buffer))
            if unpacked:
                buffer[: len(unpacked)] = unpacked
                return len(unpacked)
        return 0

    def _next(self) -> bytes:
        piece = self._file.read(_PIECE if self._left is None else min(_PIECE, self._left))
        if not piece:
            raise EOFError
        if self._left is not None:
            self._left -= len(piece)
        return piece


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
    if layout.coding == "raw":
        file.seek(count, io.SEEK_CUR)
        return
    while count > 0:
        piece = file.read(min(count, _PIECE))
        if not piece:
            raise ScanError(Reason.TRUNCATED, "the file ends before its voxels")
        count -= len(piece)
        progress()
