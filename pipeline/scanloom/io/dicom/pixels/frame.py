"""Frames of a file: references to them, their bytes, native or encapsulated, and their samples."""

from __future__ import annotations

import itertools
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import uids
from scanloom.io.dicom.geometry.slices import Slice, Tile
from scanloom.io.dicom.header.header import Header, PixelFormat, parsing
from scanloom.io.dicom.header.parser import (
    META_START_BYTES,
    data_set_offset,
    inflate,
    pixel_location,
    read_dataset,
    unreadable_error,
)

NATIVE_TRANSFER_SYNTAXES = (
    uids.IMPLICIT_VR_LITTLE_ENDIAN,
    uids.EXPLICIT_VR_LITTLE_ENDIAN,
    uids.EXPLICIT_VR_BIG_ENDIAN,
)
"""Transfer syntaxes with native pixel data: samples are stored uncompressed."""


@dataclass(frozen=True)
class FrameRef:
    """Reference to one frame of a file, or to a tile of it, that a child process can decode.

    Except for its path, it holds nothing that identifies a person.

    Parameters
    ----------
    path : Path
    syntax : str
        Transfer syntax UID.
    offset, length : int, int or None
        Position of the value of PixelData in the file, in bytes; no `length` for encapsulated
        pixel data.
    frames, frame : int
        Number of frames in the file, and number of this frame, from 0.
    rows, columns : int
        Size of the frame.
    format : PixelFormat
    slope, intercept : float
        Rescale from stored sample to value.
    tile : Tile or None
        None for the whole frame.
    """

    path: Path
    syntax: str
    offset: int
    length: int | None
    frames: int
    frame: int
    rows: int
    columns: int
    format: PixelFormat
    slope: float = 1.0
    intercept: float = 0.0
    tile: Tile | None = None

    @property
    def count(self) -> int:
        """Number of samples in the frame."""
        return self.rows * self.columns

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the tile, or of the frame."""
        plane = self.tile or self
        return plane.rows, plane.columns

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the stored samples."""
        return stored_dtype(self.format)

    @property
    def is_plain(self) -> bool:
        """Whether the pixel data are native: read without a decoder, at their stored size."""
        return self.syntax in NATIVE_TRANSFER_SYNTAXES


def frame_ref(header: Header, frame: int = 0) -> FrameRef:
    """Return the reference to a frame of a file, counted from 0.

    Raises
    ------
    ScanError
        TRUNCATED if the file has no pixels, DAMAGED if it has no such frame.
    """
    if header.pixels is None:
        raise ScanError(Reason.TRUNCATED, "a file has no pixels")
    frame_count = max(1, header.frames)
    if frame >= frame_count:
        raise ScanError(Reason.DAMAGED, "a file has fewer frames than its header describes")
    return FrameRef(
        path=header.path,
        syntax=header.syntax,
        offset=header.pixels.offset,
        length=header.pixels.length,
        frames=frame_count,
        frame=frame,
        rows=header.rows,
        columns=header.columns,
        format=header.format,
    )


def slice_frame_ref(slice_: Slice) -> FrameRef:
    """Return the reference to the frame or tile of a slice; errors as for `frame_ref`."""
    slope, intercept = float(slice_.slope), float(slice_.intercept)
    frame = frame_ref(slice_.header, slice_.frame)
    return replace(frame, slope=slope, intercept=intercept, tile=slice_.tile)


def stored_dtype(pixel_format: PixelFormat) -> np.dtype[Any]:
    """Return the dtype of stored samples: the smallest integer that holds the allocated bits.

    Raises
    ------
    ScanError
        PIXEL_TYPE for more than 32 bits; DAMAGED if the bits contradict each other.
    """
    if not 1 <= pixel_format.allocated <= 32:
        raise ScanError(Reason.PIXEL_TYPE, f"samples of {pixel_format.allocated} bits")
    if not 1 <= pixel_format.stored <= pixel_format.high_bit + 1 <= pixel_format.allocated:
        raise ScanError(Reason.DAMAGED, "BitsAllocated, BitsStored and HighBit are inconsistent")
    if pixel_format.representation not in (0, 1):
        raise ScanError(Reason.DAMAGED, "PixelRepresentation is missing or invalid")
    if pixel_format.signed and pixel_format.stored == 1:
        raise ScanError(Reason.DAMAGED, "samples of one bit can't be signed")
    itemsize = next(n for n in (1, 2, 4) if pixel_format.allocated <= 8 * n)
    return np.dtype(f"<{'i' if pixel_format.signed else 'u'}{itemsize}")


def sample_range(bits: int, *, signed: bool) -> tuple[int, int]:
    """Return the lowest and the highest sample of so many bits."""
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


# --- native pixel data ----------------------------------------------------------------------------
# Whole bytes or packed bits, of either byte order (PS3.5 8.1.1, 8.2).

_BLOCK = 1 << 17
"""Packed samples that are unpacked at a time (one byte a bit); bytes that are checked at a time."""


def read_native(frame: FrameRef, source: BinaryIO, out: NDArray[Any]) -> None:
    """Read the samples of a frame, as located in `source`, into a contiguous (rows, columns) array.

    Raises
    ------
    ScanError
        TRUNCATED or DAMAGED.
    """
    bits = frame.format.allocated
    if exceeds_header(frame) and frame.frame == 0:
        check_excess(frame, source)
    if -(-(frame.frame + 1) * frame.count * bits // 8) > (frame.length or 0):
        raise _truncated_error()
    if bits == 8 * out.itemsize and not _has_swapped_bytes(frame, source):
        source.seek(frame.offset + frame.frame * out.nbytes)
        # Buffered files fill the array but for the end of the file, however little a read gives;
        # the type of binary files lacks the method
        if source.readinto(memoryview(out).cast("B")) < out.nbytes:  # type: ignore[attr-defined]
            raise _truncated_error()
        if frame.syntax == uids.EXPLICIT_VR_BIG_ENDIAN and out.itemsize > 1:
            out.byteswap(inplace=True)
        return
    _read_packed(frame, source, out.reshape(-1))


def exceeds_header(frame: FrameRef) -> bool:
    """Return whether at least a row or column follows the pixels that the header describes.

    Raises
    ------
    ScanError
        DAMAGED if the length is unknown, or twice that of the pixels: the size is wrong.
    """
    if frame.length is None:
        raise ScanError(Reason.DAMAGED, "uncompressed pixels have no length")
    total_bytes = _total_bytes(frame)
    if frame.length >= 2 * max(total_bytes, 1):
        raise _excess_error()
    excess_bits = 8 * (frame.length - total_bytes)
    return excess_bits >= min(frame.rows, frame.columns) * frame.format.allocated


def check_excess(frame: FrameRef, source: BinaryIO) -> None:
    """Refuse data other than 0 after the pixels: the size is wrong."""
    end = frame.length or 0
    for start in range(_total_bytes(frame), end, _BLOCK):
        if _read_at(source, frame.offset + start, min(_BLOCK, end - start)).strip(b"\0"):
            raise _excess_error()


def _total_bytes(frame: FrameRef) -> int:
    return -(-frame.frames * frame.count * frame.format.allocated // 8)


def _read_packed(frame: FrameRef, source: BinaryIO, out: NDArray[Any]) -> None:
    """Read samples that share bytes: lowest bits first, without gaps between frames."""
    bits = frame.format.allocated
    weights = (1 << np.arange(bits, dtype=np.uint64)).astype(np.uint32)
    first_sample = frame.frame * frame.count
    for done in range(0, frame.count, _BLOCK):
        count = min(_BLOCK, frame.count - done)
        start = (first_sample + done) * bits
        packed = _bytes(frame, source, start // 8, -(-(start + count * bits) // 8))
        unpacked_bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        first_bit = start % 8
        samples = unpacked_bits[first_bit : first_bit + count * bits].reshape(count, bits) @ weights
        out[done : done + count] = samples.astype(out.dtype)


def _bytes(frame: FrameRef, source: BinaryIO, start: int, stop: int) -> bytes:
    """Return a byte range of the pixel data in little endian order."""
    aligned_start, aligned_stop = start & ~1, stop + (stop & 1)  # to whole words
    data = _read_at(source, frame.offset + aligned_start, aligned_stop - aligned_start)
    if len(data) < stop - aligned_start:
        raise _truncated_error()
    if _has_swapped_bytes(frame, source):
        data = np.frombuffer(data[: len(data) & ~1], ">u2").astype("<u2").tobytes()
    return data[start - aligned_start : stop - aligned_start]


def _has_swapped_bytes(frame: FrameRef, source: BinaryIO) -> bool:
    """Whether samples that are not whole words are stored in big endian words (OW)."""
    if frame.syntax != uids.EXPLICIT_VR_BIG_ENDIAN or frame.format.allocated in (16, 32):
        return False
    return _read_at(source, frame.offset - 8, 2) == b"OW"


def _truncated_error() -> ScanError:
    return ScanError(Reason.TRUNCATED, "a slice ends in the middle of its pixels")


def _excess_error() -> ScanError:
    return ScanError(Reason.DAMAGED, "the file holds more pixels than its header describes")


# --- encapsulated pixel data (DICOM PS3.5 A.4) ----------------------------------------------------

MAX_OVERHEAD_BYTES = 1 << 20
"""Bytes by which a compressed frame may exceed twice the size of its samples."""

_ITEM_TAG = b"\xfe\xff\x00\xe0"
_START_MARKERS = (b"\xff\xd8", b"\xff\x4f\xff\x51")
"""First marker of JPEG and JPEG-LS, and first two markers of JPEG 2000."""
_END_MARKER = b"\xff\xd9"
"""Last marker of all three, without which an image is truncated; a zero byte may pad it."""


@dataclass(frozen=True)
class Fragment:
    """A fragment of encapsulated pixel data: its position in the file, in bytes."""

    start: int
    length: int


FrameTable = tuple[tuple[Fragment, ...], ...]


def locate_frames(frame: FrameRef, source: BinaryIO) -> FrameTable:
    """Return the fragments of every frame of a file.

    With one fragment per frame, as an extended offset table requires, each fragment is a frame.
    Otherwise the starts of the frames come from the basic offset table, else from JPEG's first
    marker. A file with several images, but one frame by its header, is refused.

    Raises
    ------
    ScanError
        TRUNCATED or DAMAGED.
    """
    table, fragments = _fragments(frame, source)
    if not fragments:
        raise ScanError(Reason.DAMAGED, "a slice has no pixels")
    if frame.frames == 1:
        if _has_second_image(source, fragments):
            raise _excess_error()
        return (tuple(fragments),)
    if len(fragments) == frame.frames:
        return tuple((fragment,) for fragment in fragments)
    if len(fragments) < frame.frames:
        raise ScanError(Reason.TRUNCATED, "a file has fewer frames than its header describes")
    # The table first: it states where frames start, while a marker may occur within a frame
    for starts in (_starts_by_table(table, fragments), _starts_by_marker(source, fragments)):
        if len(starts) == frame.frames and starts[0] == 0:
            ends = [*starts[1:], len(fragments)]
            return tuple(tuple(fragments[a:b]) for a, b in zip(starts, ends, strict=True))
    raise ScanError(Reason.DAMAGED, "the frames of a file can't be distinguished")


def join_fragments(frame: FrameRef, source: BinaryIO, fragments: Sequence[Fragment]) -> bytes:
    """Return the bytes of one compressed frame, from its joined fragments.

    Raises
    ------
    ScanError
        TRUNCATED or DAMAGED.
    """
    size = sum(fragment.length for fragment in fragments)
    if size > 2 * frame.count * frame.dtype.itemsize + MAX_OVERHEAD_BYTES:
        raise ScanError(Reason.DAMAGED, "a compressed slice is implausibly large")
    encoded = b"".join(_read_at(source, fragment.start, fragment.length) for fragment in fragments)
    if len(encoded) < size:
        raise _truncated_error()
    return encoded


def _fragments(frame: FrameRef, source: BinaryIO) -> tuple[bytes, list[Fragment]]:
    """Return the basic offset table, possibly empty, and the fragments after it."""
    if frame.length is not None:
        raise ScanError(Reason.DAMAGED, "compressed pixels are not encapsulated")
    items: list[Fragment] = []
    position, size = frame.offset, source.seek(0, SEEK_END)
    while (item_header := _read_at(source, position, 8))[:4] == _ITEM_TAG and len(item_header) == 8:
        (length,) = struct.unpack("<I", item_header[4:])
        position += 8 + length
        if position > size:
            raise _truncated_error()
        items.append(Fragment(position - length, length))
    if not items:
        reason = Reason.TRUNCATED if len(item_header) < 8 else Reason.DAMAGED
        raise ScanError(reason, "the pixel data have no fragments")
    table = _read_at(source, items[0].start, items[0].length)
    if table and (len(table) % 4 or any(table[:4])):  # some writers omit the item of the table
        return b"", items
    return table, [fragment for fragment in items[1:] if fragment.length]


def _starts_by_table(table: bytes, fragments: Sequence[Fragment]) -> list[int]:
    """Return each frame's first fragment by the basic offset table; empty if that is wrong."""
    origin = fragments[0].start
    numbers = {fragment.start - origin: n for n, fragment in enumerate(fragments)}
    offsets = np.frombuffer(table[: len(table) & ~3], "<u4").tolist()
    starts = [numbers.get(offset, -1) for offset in offsets]
    rising = all(a < b for a, b in itertools.pairwise(starts))
    return starts if rising and -1 not in starts else []


def _starts_by_marker(source: BinaryIO, fragments: Sequence[Fragment]) -> list[int]:
    markers = [_read_at(source, fragment.start, 4) for fragment in fragments]
    return [n for n, marker in enumerate(markers) if marker.startswith(_START_MARKERS)]


def _has_second_image(source: BinaryIO, fragments: Sequence[Fragment]) -> bool:
    """Whether an image ends with a fragment and a second image begins with the next."""
    for fragment, following in itertools.pairwise(fragments):
        end = _read_at(source, fragment.start + max(0, fragment.length - 3), 3).rstrip(b"\0")
        start = _read_at(source, following.start, 4)
        if end.endswith(_END_MARKER) and start.startswith(_START_MARKERS):
            return True
    return False


# --- sizes in compressed frames -------------------------------------------------------------------
# Checked before a decoder trusts them: a damaged size makes it allocate gigabytes or loop for hours

_J2K_START = b"\xff\x4f\xff\x51"  # SOC, and SIZ which must follow (ISO 15444-1 A.5.1)
_SIZ_STRUCT = struct.Struct(">2x2x8IH")
_SOF_STRUCT = struct.Struct(">xHHB")
"""Lines, samples per line and components, after the precision (ISO 10918-1 B.2.2)."""
_MAX_TILES = 65535
_MARKERS_WITHOUT_LENGTH = (0x01, *range(0xD0, 0xD9))  # ISO 10918-1 B.1.1.3
_SOF_MARKERS = {0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF, 0xF7}
"""Start of frame (SOF) markers; 0xF7 is the one of JPEG-LS."""


def has_size_mismatch(frame: bytes, rows: int, columns: int) -> bool:
    """Whether a JPEG, JPEG-LS or JPEG 2000 frame has another size, or several components.

    A frame whose size can't be parsed is left to its decoder.
    """
    start = frame.find(_J2K_START, 0, 1 << 12)  # a JP2 container may precede it
    try:
        if start >= 0:
            return _j2k_contradicts(frame, start + len(_J2K_START), rows, columns)
        if frame[:2] == b"\xff\xd8":
            return _jpeg_contradicts(frame, rows, columns)
    except (struct.error, IndexError):  # truncated: the decoder will report it
        pass
    return False


def _j2k_contradicts(frame: bytes, position: int, rows: int, columns: int) -> bool:
    x_end, y_end, x_start, y_start, tile_width, tile_height, tile_x, tile_y, components = (
        _SIZ_STRUCT.unpack_from(frame, position)
    )
    if (y_end - y_start, x_end - x_start, components) != (rows, columns, 1):
        return True
    if not (tile_width and tile_height) or tile_x > x_start or tile_y > y_start:
        return True
    tiles = -(-(x_end - tile_x) // tile_width) * -(-(y_end - tile_y) // tile_height)
    return bool(tiles > _MAX_TILES)


def _jpeg_contradicts(frame: bytes, rows: int, columns: int) -> bool:
    position = 2
    while True:
        if frame[position] != 0xFF:
            return False
        marker = frame[position + 1]
        if marker == 0xFF:  # fill byte
            position += 1
        elif marker in _MARKERS_WITHOUT_LENGTH:
            position += 2
        elif marker in _SOF_MARKERS:
            lines, samples, components = _SOF_STRUCT.unpack_from(frame, position + 4)
            return samples != columns or lines not in (rows, 0) or components != 1
        else:
            position += 2 + struct.unpack_from(">H", frame, position + 2)[0]


# --- the file of a frame --------------------------------------------------------------------------
# The file itself, or its inflated bytes in memory up to a limit.

_MAX_HEADER_BYTES = 1 << 26
"""Largest size of everything except the pixels in a deflated file, once inflated: 64 MiB."""


@contextmanager
def open_pixels(frame: FrameRef) -> Iterator[tuple[FrameRef, BinaryIO]]:
    """Open the file of a frame, inflating it if it is deflated.

    Yields
    ------
    (FrameRef, BinaryIO)
        The bytes, and the frame as located in them: native if the file was deflated.

    Raises
    ------
    ScanError
        UNREADABLE if the file can't be read, in the block either; TRUNCATED, DAMAGED or TOO_LARGE
        if a deflated file can't be inflated.
    """
    try:
        with _open(frame.path) as file:
            is_deflated = frame.syntax == uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN
            yield _inflated(frame, file) if is_deflated else (frame, file)
    except OSError as exc:
        raise unreadable_error(exc) from exc


def _open(path: Path) -> BinaryIO:
    """Open a file without waiting: a pipe may be in its place."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def _read_at(source: BinaryIO, position: int, count: int) -> bytes:
    """Return `count` bytes from `position`, fewer at the end."""
    source.seek(position)
    return source.read(count)


def inflation_bytes(frame: FrameRef) -> int:
    """Return the most memory, in bytes, that `open_pixels` needs; 0 if the file is not deflated."""
    is_deflated = frame.syntax == uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN
    return 2 * _max_inflated_bytes(frame) if is_deflated else 0


def _max_inflated_bytes(frame: FrameRef) -> int:
    """Return the largest size, in bytes, of an inflated file of such frames."""
    return frame.frames * frame.count * frame.dtype.itemsize + _MAX_HEADER_BYTES


def _inflated(frame: FrameRef, file: BinaryIO) -> tuple[FrameRef, BinaryIO]:
    """Locate a frame in the inflated data set of its file."""
    state = os.fstat(file.fileno())
    limit = _max_inflated_bytes(frame)
    data, offset, length = _inflated_data_set(
        frame.path, limit, state.st_size, state.st_mtime_ns, state.st_ino
    )
    native = uids.EXPLICIT_VR_LITTLE_ENDIAN
    return replace(frame, syntax=native, offset=offset, length=length), BytesIO(data)


@lru_cache(1)  # the last: a file of many frames is not inflated for each of them
def _inflated_data_set(path: Path, limit: int, *_state: int) -> tuple[bytes, int, int]:
    """Inflate a deflated data set (PS3.5 A.5); return it with offset and length of its pixels."""
    from pydicom import dcmread

    _inflated_data_set.cache_clear()  # `inflation_bytes` are those of one file, not of two
    with _open(path) as file:
        start = file.read(META_START_BYTES)
        if start[128:132] != b"DICM" or len(start) < META_START_BYTES:
            raise ScanError(Reason.DAMAGED, "a deflated file has no file meta information")
        file.seek(data_set_offset(start))
        try:
            data, is_whole = inflate(file, limit + 1)
        except zlib.error as exc:
            raise ScanError(Reason.DAMAGED, "a deflated file can't be inflated") from exc
    if len(data) > limit:
        raise ScanError(Reason.TOO_LARGE, "a deflated file is larger than its header describes")
    if not is_whole:
        raise ScanError(Reason.TRUNCATED, "a deflated file is truncated")
    stream = BytesIO(data)
    with parsing("a deflated file"):
        pixels, _ = pixel_location(stream, dcmread(stream, stop_before_pixels=True, force=True))
    if pixels is None or pixels.length is None:
        raise ScanError(Reason.DAMAGED, "a deflated file has no pixels")
    return data, pixels.offset, pixels.length


# --- stored samples in any supported transfer syntax ----------------------------------------------

_RLE_HEAD = struct.Struct("<16I")  # number of segments and their 15 offsets
_CODECS = {
    uids.JPEG_BASELINE_8_BIT: "jpeg8_decode",
    uids.JPEG_EXTENDED_12_BIT: "jpeg8_decode",
    uids.JPEG_SPECTRAL_SELECTION_NON_HIERARCHICAL_6_8: "jpeg8_decode",
    uids.JPEG_FULL_PROGRESSION_NON_HIERARCHICAL_10_12: "jpeg8_decode",
    uids.JPEG_LOSSLESS: "jpegsof3_decode",
    uids.JPEG_LOSSLESS_SV1: "jpegsof3_decode",
    uids.JPEG_LS_LOSSLESS: "jpegls_decode",
    uids.JPEG_LS_NEAR_LOSSLESS: "jpegls_decode",
    uids.JPEG_2000_LOSSLESS: "jpeg2k_decode",
    uids.JPEG_2000: "jpeg2k_decode",
    uids.HTJ2K_LOSSLESS: "htj2k_decode",
    uids.HTJ2K_LOSSLESS_RPCL: "htj2k_decode",
    uids.HTJ2K: "htj2k_decode",
}
"""Decoders of imagecodecs by transfer syntax; they release the GIL."""
_LOSSY = frozenset(
    (
        uids.JPEG_BASELINE_8_BIT,
        uids.JPEG_EXTENDED_12_BIT,
        uids.JPEG_SPECTRAL_SELECTION_NON_HIERARCHICAL_6_8,
        uids.JPEG_FULL_PROGRESSION_NON_HIERARCHICAL_10_12,
        uids.JPEG_LS_NEAR_LOSSLESS,
        uids.JPEG_2000,
        uids.HTJ2K,
    )
)
"""Transfer syntaxes that may change values."""
_DECODER_ERRORS = (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError)


_OWN_DECODERS = frozenset(
    (
        *NATIVE_TRANSFER_SYNTAXES,
        uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN,
        uids.ENCAPSULATED_UNCOMPRESSED_EXPLICIT_VR_LITTLE_ENDIAN,
        uids.DEFLATED_IMAGE_FRAME_COMPRESSION,
        uids.RLE_LOSSLESS,
    )
)
"""Transfer syntaxes that are decoded here."""


def is_decodable(syntax: str) -> bool:
    """Return whether there is a decoder for a transfer syntax."""
    return syntax in _OWN_DECODERS or syntax in _CODECS


def check_native_length(frame: FrameRef) -> None:
    """Refuse native pixel data of another length than the header describes; none if encoded.

    Raises
    ------
    ScanError
        DAMAGED; UNREADABLE if the bytes after the pixels can't be read.
    """
    if frame.is_plain and exceeds_header(frame):
        with open_pixels(frame) as (located, source):
            check_excess(located, source)


_WITHOUT_TABLE = (*NATIVE_TRANSFER_SYNTAXES, uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN)


def find_frame_tables(frames: list[FrameRef]) -> dict[Path, FrameTable]:
    """Return the frame table of each file with several encapsulated frames, by path."""
    tables: dict[Path, FrameTable] = {}
    for frame in frames:
        is_encapsulated = frame.syntax not in _WITHOUT_TABLE
        if frame.frames > 1 and is_encapsulated and frame.path not in tables:
            with open_pixels(frame) as (located, source):
                tables[frame.path] = locate_frames(located, source)
    return tables


def read_stored_samples(
    frame: FrameRef, out: NDArray[Any], tables: Mapping[Path, FrameTable]
) -> None:
    """Read the stored samples of a frame into a contiguous array (rows, columns).

    Each is at the low end of its element. A tile is ignored. Decoders run in this process.

    Raises
    ------
    ScanError
        TRUNCATED, DAMAGED, DECODER, TOO_LARGE or UNREADABLE.
    """
    with open_pixels(frame) as (located, source):
        if located.syntax in NATIVE_TRANSFER_SYNTAXES:
            read_native(located, source, out)
        else:
            table = tables.get(frame.path) or locate_frames(located, source)
            fragments = table[frame.frame]
            _decode_into(located, join_fragments(located, source, fragments), out)
        _keep_stored_bits(out, frame)


def _decode_into(frame: FrameRef, encoded: bytes, out: NDArray[Any]) -> None:
    data = _uncompressed(frame, encoded)
    if data is not None:
        native = uids.EXPLICIT_VR_LITTLE_ENDIAN
        in_memory = replace(frame, syntax=native, offset=0, length=len(data), frames=1, frame=0)
        read_native(in_memory, BytesIO(data), out)
        return
    pixels = _decode(frame, encoded)
    if pixels.shape != out.shape:
        raise ScanError(Reason.DAMAGED, f"decoded to {pixels.shape}, the header says {out.shape}")
    signed = frame.format.signed
    if pixels.dtype.kind == "i" and not signed and pixels.min() < 0:
        raise ScanError(Reason.DAMAGED, "header and pixels disagree about the sign")
    if frame.syntax != uids.RLE_LOSSLESS:
        pixels = _within_bits(pixels, frame)
    np.copyto(out, pixels, casting="unsafe")


def _within_bits(pixels: NDArray[Any], frame: FrameRef) -> NDArray[Any]:
    """Return decoded samples that fit the bits up to HighBit (PS3.5 8.2.1); refuse larger ones.

    Cutting higher bits off would change values. The sign may be extended into them or not, since
    JPEG and JPEG-LS have no sign. Lossy coding may slightly exceed the range: such samples are
    clipped.
    """
    pixel_format = frame.format
    bits = pixel_format.high_bit + 1
    if bits == 8 * pixels.itemsize and (pixel_format.signed or pixels.dtype.kind == "u"):
        return pixels
    if pixel_format.signed and pixels.dtype.kind == "u" and pixels.max() >> bits:
        pixels = pixels.view(f"i{pixels.itemsize}")
    low, high = sample_range(bits, signed=pixel_format.signed and pixels.dtype.kind == "i")
    smallest, largest = int(pixels.min()), int(pixels.max())
    if low <= smallest and largest <= high:
        return pixels
    # A sixteenth of the range: what ringing at an edge may add, and far from a wrong BitsStored
    slack = (1 << bits) >> 4 if frame.syntax in _LOSSY else 0
    if smallest < low - slack or largest > high + slack:
        raise ScanError(Reason.DAMAGED, "the pixels have more bits than the header says")
    return pixels.clip(low, high)


def _decode(frame: FrameRef, encoded: bytes) -> NDArray[Any]:
    """Return the (rows, columns) samples of a frame as decoded."""
    import imagecodecs

    if frame.syntax == uids.RLE_LOSSLESS:
        samples = _decode_rle(encoded, frame.count, frame.dtype.itemsize)
        return samples.reshape(frame.rows, frame.columns)
    if frame.syntax not in _CODECS:
        raise ScanError(Reason.DECODER, "the transfer syntax is not supported")
    if _END_MARKER not in encoded[-64:]:
        raise _truncated_error()
    if has_size_mismatch(encoded, frame.rows, frame.columns):
        raise ScanError(Reason.DAMAGED, "header and pixels disagree about the size")
    try:
        decode: Callable[[bytes], NDArray[Any]] = getattr(imagecodecs, _CODECS[frame.syntax])
        return np.asarray(decode(encoded))
    except ImportError as exc:
        raise ScanError(Reason.DECODER, "the decoder is not installed") from exc
    except _DECODER_ERRORS as exc:
        raise _decode_error(exc) from exc


def _uncompressed(frame: FrameRef, encoded: bytes) -> bytes | None:
    """Return the native bytes of a frame; None if its decoder returns samples."""
    if frame.syntax == uids.ENCAPSULATED_UNCOMPRESSED_EXPLICIT_VR_LITTLE_ENDIAN:
        return encoded
    if frame.syntax == uids.DEFLATED_IMAGE_FRAME_COMPRESSION:
        return _inflate_frame(frame, encoded)
    if frame.syntax == uids.RLE_LOSSLESS and frame.format.allocated == 1:
        return _decode_rle(encoded, -(-frame.count // 8), 1).tobytes()
    return None


def _decode_rle(encoded: bytes, count: int, itemsize: int) -> NDArray[Any]:
    """Return (count,) samples of `itemsize` bytes, one RLE segment per byte (PS3.5 G).

    Segments are decoded one by one: imagecodecs would not report a single short segment.
    """
    import imagecodecs

    if len(encoded) < _RLE_HEAD.size:
        raise _truncated_error()
    segment_count, *offsets = _RLE_HEAD.unpack_from(encoded)
    ends = [*offsets[1:segment_count], len(encoded)]
    rising = all(a < b for a, b in zip(offsets, ends, strict=False))
    if segment_count != itemsize or offsets[0] < _RLE_HEAD.size or not rising:
        raise ScanError(Reason.DAMAGED, "the RLE segments of a slice do not match its sample size")
    single = _RLE_HEAD.pack(1, _RLE_HEAD.size, *[0] * 14)
    samples = np.empty((count, itemsize), np.uint8)
    for n, (start, end) in enumerate(zip(offsets, ends, strict=False)):
        try:
            decoded = imagecodecs.dicomrle_decode(single + encoded[start:end], np.dtype(np.uint8))
        except _DECODER_ERRORS as exc:
            raise _decode_error(exc) from exc
        if len(decoded) < count:
            raise _truncated_error()
        # The most significant byte comes first
        samples[:, itemsize - 1 - n] = np.frombuffer(decoded, np.uint8, count)
    if len(decoded) >= 2 * count:  # a second frame follows
        raise _excess_error()
    return samples.view(f"<u{itemsize}").reshape(count)


def _decode_error(exc: Exception) -> ScanError:
    detail = f"the pixels of a slice can't be decoded ({type(exc).__name__})"
    return ScanError(Reason.DAMAGED, detail)


def _inflate_frame(frame: FrameRef, encoded: bytes) -> bytes:
    """Inflate a frame, up to the size that its header implies."""
    max_bytes = -(-frame.count * frame.format.allocated // 8) + 1  # padded to an even length
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(encoded, max_bytes)
    except zlib.error as exc:
        raise ScanError(Reason.DAMAGED, "a frame can't be inflated") from exc


def _keep_stored_bits(out: NDArray[Any], frame: FrameRef) -> None:
    """Move the stored bits of each sample to the low end, sign-extended.

    BitsStored and HighBit may be wrong, and then a shift or a mask changes values: samples of 12
    bits at the low end lose 4 of them where HighBit is 15. So the bits that the header calls unused
    have to be empty, copies of the sign, or overlays that the header describes (PS3.5 8.1.1,
    retired PS3.3 C.9.2); else the pixels are DAMAGED.
    """
    stored, high_bit = frame.format.stored, frame.format.high_bit
    signed, bits = frame.format.signed, 8 * out.itemsize
    if stored == bits:
        return
    if high_bit + 1 == stored:  # as nearly always; most samples need no change
        low, high = sample_range(stored, signed=signed)
        if low <= out.min() and out.max() <= high:
            return
    raw = out.view(f"<u{out.itemsize}")
    sample = ((1 << stored) - 1) << (high_bit + 1 - stored)
    unused = ((1 << bits) - 1) & ~sample
    if not _are_empty(raw, unused, frame.format):
        unused &= ~_overlay_bits(frame.path)
        if not _are_empty(raw, unused, frame.format):
            detail = "samples occupy bits that BitsStored and HighBit call unused"
            raise ScanError(Reason.DAMAGED, detail)
    np.left_shift(out, bits - 1 - high_bit, out=out)
    np.right_shift(out, bits - stored, out=out)  # arithmetic where signed


def _are_empty(raw: NDArray[Any], unused: int, pixel_format: PixelFormat) -> bool:
    """Return whether the bits of `unused` are 0 in all samples, or copies of the sign in all."""
    bits = raw & raw.dtype.type(unused)
    if not bits.any():
        return True
    if not pixel_format.signed:
        return False
    above = raw.dtype.type(unused >> pixel_format.high_bit << pixel_format.high_bit)
    negative = raw >> raw.dtype.type(pixel_format.high_bit) & raw.dtype.type(1)
    return bool((bits == negative * above).all())


def _overlay_bits(path: Path) -> int:
    """Return the bits of the pixel data in which a file's header places overlays (60xx,0102)."""
    with parsing("an overlay of a header"):
        dataset = read_dataset(path)
        positions = (
            int(dataset[group << 16 | 0x0102].value)
            for group in range(0x6000, 0x6020, 2)
            if group << 16 | 0x0102 in dataset and group << 16 | 0x3000 not in dataset
        )
        return sum({1 << position for position in positions if 0 <= position < 32})
