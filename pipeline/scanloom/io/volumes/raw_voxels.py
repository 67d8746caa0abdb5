"""Read the voxels of a volume file, raw, compressed or as text, and no more than it declares."""

from __future__ import annotations

import io
import math
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Flag, Grid, ReadOptions, Reason, ScanError, Volume, counted, format_bytes
from scanloom.core.volume import default_unit
from scanloom.io.scan import GridOnlySource, Scan, Source
from scanloom.io.system.compressed_streams import (
    Compression,
    decompression_errors,
    open_decompressed,
)
from scanloom.io.system.messages import register
from scanloom.io.system.regular_files import open_regular_file
from scanloom.io.system.sandbox import (
    SandboxLimits,
    report_progress,
    run_sandboxed,
    shared_empty,
    start_sandbox,
)
from scanloom.io.voxel_values import replace_nan, rounding_flags, voxel_limit

Coding = Literal["raw", "text"] | Compression

FILE_LIMIT_VOLUMES = 8
"""Largest size of a compressed file of several volumes, in multiples of the limit of one volume:
to reach the last volume, all before it are inflated."""
SKIP_LIMIT_BYTES = 1 << 30
"""Largest offset of the first voxel: header extensions are a few kB."""
MAX_DEFLATE_RATIO = 1032
"""Largest compression ratio of Deflate: a file that would need more is truncated or damaged."""
SPARE_BYTES = 256 << 20
"""Memory for decoding in addition to the values."""
STALL_TIMEOUT_S = 20.0
"""Longest time without decoded data."""
MIN_BYTES_PER_S = 10 << 20
"""Lowest decoding rate: bzip2 on a busy machine; gzip is 50 times as fast."""

_OFFSETS_WITHOUT_EXTENSIONS = (0, 352, 544)  # NRRD and MetaImage; NIfTI-1; NIfTI-2
_CHUNK_BYTES = 1 << 20
_PROGRESS_BYTES = 1 << 24  # between two reports of progress
_TOO_MUCH = "the file holds more data than its header declares"


@dataclass(frozen=True)
class RawLayout:
    """Position and encoding of the voxels of one volume in a file.

    Parameters
    ----------
    path : Path
    coding : Coding
        Encoding of the data from byte `start` on.
    start : int
        Byte offset of the data in the file.
    skip : int
        Bytes between `start` and the first voxel, after decompression.
    shape : (I, J, K)
    dtype : dtype
        Type as stored, with its byte order.
    volumes, volume : int
        Number of volumes in the file, and index of the requested one, from 0.
    interleaved_voxels : int or None
        Length of a run of voxels of one volume, if volumes are interleaved; None if each volume is
        contiguous.
    compressed_bytes : int or None
        Length of the compressed data; None if they end with the file.
    further_files : tuple of (path, start)
        Files with the rest of the data, and the byte offset in each. They have the same size,
        coding and `skip` as `path`, and are never text.
    trailing_bytes : int
        Bytes that may follow the voxels, after decompression.
    slope, intercept : float
        Rescale from stored numbers to values; 1 and 0 leave them as they are.
    """

    path: Path
    coding: Coding
    start: int
    skip: int
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    volumes: int = 1
    volume: int = 0
    interleaved_voxels: int | None = None
    compressed_bytes: int | None = None
    further_files: tuple[tuple[Path, int], ...] = ()
    trailing_bytes: int = 0
    slope: float = 1.0
    intercept: float = 0.0

    @property
    def voxel_count(self) -> int:
        """Number of voxels in one volume."""
        return math.prod(self.shape)

    @property
    def files(self) -> tuple[tuple[Path, int], ...]:
        """All data files, each with the byte offset of its data."""
        return ((self.path, self.start), *self.further_files)

    @property
    def file_bytes(self) -> int:
        """Size of the content of each data file from `start` on, after decompression."""
        data = self.voxel_count * self.volumes * self.dtype.itemsize
        return self.skip + data // len(self.files)

    @property
    def total_bytes(self) -> int:
        """Size of the content of all data files, after decompression."""
        return self.file_bytes * len(self.files)

    @property
    def allowed_zeros(self) -> int:
        """Number of zero bytes that may follow the voxels, fewer than a wrong dimension leaves.

        It is 0 unless the voxels directly follow the header, since the offset may be wrong.
        """
        if self.further_files or self.skip not in _OFFSETS_WITHOUT_EXTENSIONS:
            return 0
        return self.voxel_count // max(self.shape) * self.dtype.itemsize - 1

    @property
    def value_dtype(self) -> np.dtype[Any]:
        """Type of the values after rescale."""
        if (self.slope, self.intercept) == (1, 0):
            return self.dtype.newbyteorder("=")
        return np.dtype(np.float32)


# Child processes decode by layouts; a data type travels as text
register(
    RawLayout,
    lambda layout: [v.str if isinstance(v, np.dtype) else v for v in vars(layout).values()],
    lambda *values: replace(layout := RawLayout(*values), dtype=np.dtype(layout.dtype)),
)


def regular_file_size(path: Path) -> int:
    """Return the size of a file in bytes.

    Raises
    ------
    ScanError
        UNREADABLE if it is a pipe or device, from which a read may never return.
    OSError
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ScanError(Reason.UNREADABLE, "the path is not a regular file")
    return status.st_size


def check_layout(layout: RawLayout, limit: int) -> None:
    """Refuse, before memory is allocated, a volume that is not in the file or exceeds the limit.

    Raises
    ------
    ScanError
        TRUNCATED, DAMAGED, TOO_LARGE or UNREADABLE.
    OSError
    """
    # Before the limit: a small file whose header promises too much is truncated, not too large
    for path, start in layout.files:
        available = regular_file_size(path) - start
        if available < _min_bytes(layout):
            raise ScanError(Reason.TRUNCATED, "the file ends before its last voxel")
        if layout.coding == "raw" and available > layout.file_bytes:
            with path.open("rb") as file:
                file.seek(start + layout.file_bytes)
                _check_trailer(file, layout)
    if layout.skip > SKIP_LIMIT_BYTES:
        raise ScanError(Reason.DAMAGED, "the byte offset of the voxels is implausible")
    size = layout.voxel_count * max(layout.value_dtype.itemsize, layout.dtype.itemsize)
    if layout.interleaved_voxels is not None:
        size = max(size, layout.interleaved_voxels * layout.volumes * layout.dtype.itemsize)
    if layout.coding == "text":
        size = max(size, layout.total_bytes)
    if size > limit or (layout.coding != "raw" and layout.total_bytes > FILE_LIMIT_VOLUMES * limit):
        detail = f"{format_bytes(size)} of voxels, the limit is {format_bytes(limit)}"
        raise ScanError(Reason.TOO_LARGE, detail)


def _min_bytes(layout: RawLayout) -> int:
    """Return the smallest size in bytes of each data file from `start` on."""
    if layout.coding == "raw":
        return layout.file_bytes
    if layout.coding == "text":
        return layout.skip + 2 * layout.voxel_count * layout.volumes - 1  # a digit and a space each
    if layout.compressed_bytes is not None:
        return layout.compressed_bytes
    deflated = layout.coding in ("gzip", "zlib")
    return -(-layout.file_bytes // MAX_DEFLATE_RATIO) if deflated else 0


def read_voxels(layout: RawLayout) -> NDArray[Any]:
    """Read one volume; compressed data and text are decoded in a child process.

    The layout passed `check_layout`.

    Returns
    -------
    (I, J, K) array
        Fortran order (I fastest), native byte order, type `layout.value_dtype`.

    Raises
    ------
    ScanError
        TRUNCATED or DAMAGED if the file holds less or more than its header declares; UNREADABLE,
        OUT_OF_MEMORY; DECODE_TIMEOUT if it takes too long.
    """
    with foreign_errors("the file"):
        if layout.coding == "raw":
            values = np.empty(layout.voxel_count, layout.value_dtype)
            decode_voxels(layout, values)
        else:
            values = shared_empty((layout.voxel_count,), layout.value_dtype)
            run_sandboxed(decode_voxels, layout, values, limits=_limits(layout))
    return values.reshape(layout.shape[::-1]).T


def _limits(layout: RawLayout) -> SandboxLimits:
    """Return the limits of memory and time for decoding."""
    row = (layout.interleaved_voxels or 0) * layout.volumes * layout.dtype.itemsize
    text = 3 * layout.total_bytes if layout.coding == "text" else 0
    return SandboxLimits(
        SPARE_BYTES + 2 * row + text,
        STALL_TIMEOUT_S,
        2 * STALL_TIMEOUT_S + layout.total_bytes / MIN_BYTES_PER_S,
    )


def decode_voxels(layout: RawLayout, values: NDArray[Any]) -> None:
    """Fill an array (I * J * K,) of type `layout.value_dtype`; errors as for `read_voxels`."""
    with foreign_errors("the file"), _open(layout) as file:
        if not layout.further_files:
            _skip(file, layout.skip, layout)
        if layout.coding == "text":
            _from_text(file, layout, values)
        elif layout.interleaved_voxels is None:
            _from_block(file, layout, values)
        else:
            _from_interleaved(file, layout, values)
        _check_trailer(file, layout)  # gzip verifies its checksum only at the end of the stream


def _check_trailer(file: BinaryIO, layout: RawLayout) -> None:
    """Refuse data after the voxels, unless the format allows them or they are a few zeros."""
    count, limit = 0, max(layout.trailing_bytes, layout.allowed_zeros)
    while chunk := file.read(min(limit - count + 1, _CHUNK_BYTES)):
        count += len(chunk)
        if count > limit or (not layout.trailing_bytes and chunk.strip(b"\0")):
            raise ScanError(Reason.DAMAGED, _TOO_MUCH)


def _from_block(file: BinaryIO, layout: RawLayout, values: NDArray[Any]) -> None:
    """Read a volume that is contiguous."""
    size = layout.voxel_count * layout.dtype.itemsize
    _skip(file, size * layout.volume, layout)
    if (layout.slope, layout.intercept) == (1, 0):
        _read_into(file, values)
        if not layout.dtype.isnative:
            values.byteswap(inplace=True)
    else:
        for begin in range(0, layout.voxel_count, _CHUNK_BYTES):
            stored = np.empty(min(_CHUNK_BYTES, layout.voxel_count - begin), layout.dtype)
            _read_into(file, stored)
            with np.errstate(over="ignore", invalid="ignore"):  # infinite values are refused later
                values[begin : begin + stored.size] = stored * layout.slope + layout.intercept
    _skip(file, size * (layout.volumes - 1 - layout.volume), layout)


def _from_interleaved(file: BinaryIO, layout: RawLayout, values: NDArray[Any]) -> None:
    """Read a volume that is interleaved with others."""
    length = layout.interleaved_voxels or 1
    runs = values.reshape(-1, length)
    step = max(1, _CHUNK_BYTES // (length * layout.volumes * layout.dtype.itemsize))
    for begin in range(0, len(runs), step):
        stored = np.empty((min(step, len(runs) - begin), layout.volumes, length), layout.dtype)
        _read_into(file, stored)
        runs[begin : begin + step] = stored[:, layout.volume]


def _from_text(file: BinaryIO, layout: RawLayout, values: NDArray[Any]) -> None:
    """Read a volume that is stored as text."""
    numbers = np.empty(layout.voxel_count * layout.volumes, layout.dtype)
    done = 0
    for tokens in read_tokens(file):
        if done + len(tokens) > numbers.size:
            raise ScanError(Reason.DAMAGED, _TOO_MUCH)
        numbers[done : done + len(tokens)] = parse_numbers(tokens, layout.dtype)
        done += len(tokens)
        report_progress()
    if done < numbers.size:
        raise ScanError(Reason.TRUNCATED, "the file ends before its last voxel")
    runs = numbers.reshape(-1, layout.volumes, layout.interleaved_voxels or layout.voxel_count)
    values.reshape(-1, runs.shape[2])[:] = runs[:, layout.volume]


@contextmanager
def _open(layout: RawLayout) -> Iterator[BinaryIO]:
    """Open the decompressed data for sequential reading; several files are concatenated."""
    if layout.further_files:
        with closing(_ConcatenatedFiles(layout)) as files:
            yield cast(BinaryIO, io.BufferedReader(files, _CHUNK_BYTES))
    else:
        with _open_file(layout, layout.path, layout.start) as file:
            yield file


@contextmanager
def _open_file(layout: RawLayout, path: Path, start: int) -> Iterator[BinaryIO]:
    with open_regular_file(path) as file:
        file.seek(start)
        if layout.coding == "raw" or layout.coding == "text":
            yield cast(BinaryIO, file)
            return
        with open_decompressed(
            cast(BinaryIO, file), layout.coding, layout.compressed_bytes
        ) as stream:
            yield stream


class _ConcatenatedFiles(io.RawIOBase):
    """The concatenated data of several files, each of which must hold exactly its share."""

    def __init__(self, layout: RawLayout) -> None:
        self._layout, self._pending = layout, list(layout.files)
        self._stack = ExitStack()
        self._file: BinaryIO | None = None
        self._remaining_bytes = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into `buffer` and return the number of bytes, 0 after the last file."""
        while not self._remaining_bytes:
            if self._file is not None:
                _check_trailer(self._file, self._layout)
                self._stack.close()
                self._file = None
            if not self._pending:
                return 0
            path, start = self._pending.pop(0)
            self._file = self._stack.enter_context(_open_file(self._layout, path, start))
            _skip(self._file, self._layout.skip, self._layout)
            self._remaining_bytes = self._layout.file_bytes - self._layout.skip
        chunk = self._file.read(min(len(buffer), self._remaining_bytes)) if self._file else b""
        if not chunk:
            raise EOFError
        buffer[: len(chunk)] = chunk
        self._remaining_bytes -= len(chunk)
        return len(chunk)

    def close(self) -> None:
        """Close the open file."""
        self._stack.close()
        super().close()


def _read_into(file: BinaryIO, values: NDArray[Any]) -> None:
    """Fill an array with bytes of the file."""
    view = memoryview(values.reshape(-1).view(np.uint8))
    done = 0
    while done < len(view):
        # the type of binary files lacks the method
        count = file.readinto(view[done : done + _PROGRESS_BYTES])  # type: ignore[attr-defined]
        if not count:
            raise ScanError(Reason.TRUNCATED, "the file ends before its last voxel")
        done += count
        report_progress()


def _skip(file: BinaryIO, count: int, layout: RawLayout) -> None:
    """Move forward by `count` bytes; only an uncompressed file can seek."""
    if layout.coding == "raw" and file.seekable():
        file.seek(count, io.SEEK_CUR)
        return
    while count > 0:
        chunk = file.read(min(count, _CHUNK_BYTES))
        if not chunk:
            raise ScanError(Reason.TRUNCATED, "the file ends before its voxels")
        count -= len(chunk)
        report_progress()


# --- voxels as text -------------------------------------------------------------------------------
# Numbers separated by white space.

_TOKEN_LIMIT = 64  # characters of a number


def read_tokens(file: BinaryIO) -> Iterator[list[bytes]]:
    """Yield the tokens of a file, as a list for each chunk that is read; no token is split."""
    incomplete = b""
    while chunk := file.read(_CHUNK_BYTES):
        tokens = (incomplete + chunk).split()
        ends_in_space = chunk[-1:].isspace()
        incomplete = b"" if ends_in_space or not tokens else tokens.pop()
        if len(incomplete) > _TOKEN_LIMIT:
            break
        if tokens:
            yield tokens
    if incomplete:
        yield [incomplete]


def parse_numbers(tokens: list[bytes], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return tokens as an array (N,) of numbers of a type.

    Raises
    ------
    ScanError
        DAMAGED if a token is not a number, or does not fit the type.
    """
    if max(map(len, tokens)) > _TOKEN_LIMIT:
        raise ScanError(Reason.DAMAGED, "a voxel stored as text is not a number")
    # In 64 bits first: a number beyond the type is damage, and must not wrap
    wide = np.dtype({"i": np.int64, "u": np.uint64, "f": np.float64}[dtype.kind])
    try:
        numbers = np.array(tokens).astype(wide)
    except (ValueError, OverflowError) as exc:
        raise ScanError(Reason.DAMAGED, "a voxel stored as text is not a number") from exc
    if dtype.kind != "f":
        limits = np.iinfo(dtype)
        if numbers.min() < limits.min or numbers.max() > limits.max:
            raise ScanError(Reason.DAMAGED, "a voxel exceeds the range of the header's data type")
    with np.errstate(over="ignore"):
        return numbers.astype(dtype)


# --- errors of readers ----------------------------------------------------------------------------


@contextmanager
def foreign_errors(subject: str) -> Iterator[None]:
    """Convert errors of libraries and the system to ScanError; `subject` begins its detail.

    Raises
    ------
    ScanError
        TRUNCATED, DAMAGED, UNREADABLE or OUT_OF_MEMORY.
    """
    try:
        yield
    except EOFError as exc:
        raise ScanError(Reason.TRUNCATED, f"{subject} ends too early") from exc
    except decompression_errors() as exc:
        detail = f"{subject} cannot be decompressed ({type(exc).__name__})"
        raise ScanError(Reason.DAMAGED, detail) from exc
    except OSError as exc:  # BadGzipFile is one, without a number
        reason = Reason.UNREADABLE if exc.errno else Reason.DAMAGED
        raise ScanError(reason, f"{subject} cannot be read ({type(exc).__name__})") from exc
    except MemoryError as exc:
        raise ScanError(Reason.OUT_OF_MEMORY, f"{subject} does not fit into memory") from exc


# --- one volume of a file -------------------------------------------------------------------------
# A reader parses its header into a `RawVolume`; the rest is the same for all formats.

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True, eq=False)
class RawVolume:
    """One volume of a file, as the file's header describes it.

    Parameters
    ----------
    layout : RawLayout
        Position and type of the voxels, checked by `scanloom.io.volumes.raw_voxels.check_layout`.
    grid : Grid
    flags : tuple of Flag
        Findings about the header.
    source : Source
    """

    layout: RawLayout
    grid: Grid
    flags: tuple[Flag, ...] = ()
    source: Source = field(default_factory=GridOnlySource)


ParseHeader = Callable[[Sequence[Path], int | None, str | None, int], RawVolume]
"""Parser of a volume file's header; it allocates nothing of the size of a volume.

Its arguments are the files, the header first; the index of the volume in a file of several, from 0,
or None; axis codes such as "RAS" or None, used only if the header has no orientation; and the
largest size of the decoded voxels, in bytes. ScanError if the file can't be read as a volume."""


def select_volume(volumes: int, phase: int | None) -> int:
    """Return the index of the requested volume in a file with this number of volumes.

    Raises
    ------
    ScanError
        FOUR_D if `phase` is required and missing, or out of range.
    """
    if phase is None and volumes > 1:
        raise ScanError(Reason.FOUR_D, f"the file has {volumes} volumes, numbered from 0")
    if not 0 <= (phase or 0) < volumes:
        raise ScanError(
            Reason.FOUR_D, f"the file has {counted(volumes, 'volume')} from 0, not volume {phase}"
        )
    return phase or 0


def read_raw_volume(
    parse: ParseHeader, files: Sequence[Path], phase: int | None, options: ReadOptions
) -> Scan:
    """Read one volume; parameters and errors are those of `ParseHeader` and `load_volume`."""
    if files[-1].suffix in _COMPRESSED:
        start_sandbox()  # starts the process that decompresses while the header is parsed
    raw = parse(files, phase, options.orientation, voxel_limit(options))
    layout, modality = raw.layout, options.modality
    array, flags = read_voxels(layout), raw.flags
    if array.dtype != layout.dtype.newbyteorder("="):
        flags += rounding_flags(array, layout.dtype, layout.slope, layout.intercept)
    volume = Volume(array, raw.grid, default_unit(modality), modality, flags=flags)
    return Scan(replace_nan(volume, options.nan), raw.source)
