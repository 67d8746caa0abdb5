"""Read the stored samples of one frame in any supported transfer syntax."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import uids
from scanloom.io.dicom.header.fallback import PARSE_ERRORS, read_dataset
from scanloom.io.dicom.header.header import PixelFormat, pydicom_muted
from scanloom.io.dicom.pixels.frame import (
    NATIVE_TRANSFER_SYNTAXES,
    FrameRef,
    FrameTable,
    check_excess,
    exceeds_header,
    has_size_mismatch,
    join_fragments,
    locate_frames,
    open_pixels,
    read_native,
    sample_range,
)

_END_OF_IMAGE = b"\xff\xd9"
"""Last marker of JPEG, JPEG-LS and JPEG 2000; without it the image is truncated."""

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


def find_frame_tables(frames: list[FrameRef]) -> dict[Path, FrameTable]:
    """Return the frame table of each file with several encapsulated frames, by path."""
    tables: dict[Path, FrameTable] = {}
    for frame in frames:
        if frame.frames > 1 and not frame.is_plain and frame.path not in tables:
            with open_pixels(frame) as (located, source):
                if located.syntax not in NATIVE_TRANSFER_SYNTAXES:
                    tables[frame.path] = locate_frames(located, source)
    return tables


def read_stored_samples(
    frame: FrameRef, out: NDArray[Any], tables: Mapping[Path, FrameTable]
) -> None:
    """Read the stored samples of a frame into `out`, each at the low end of its element.

    Decoders run in the calling process.

    Parameters
    ----------
    frame : FrameRef
        Frame to read; a tile is ignored.
    out : (rows, columns) array of the stored type
        Contiguous.
    tables : mapping of Path to FrameTable
        Result of `find_frame_tables`.

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
    if _END_OF_IMAGE not in encoded[-64:]:
        raise ScanError(Reason.TRUNCATED, "a slice ends in the middle of its pixels")
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
        return _inflate(frame, encoded)
    if frame.syntax == uids.RLE_LOSSLESS and frame.format.allocated == 1:
        return _decode_rle(encoded, -(-frame.count // 8), 1).tobytes()
    return None


def _decode_rle(encoded: bytes, count: int, itemsize: int) -> NDArray[Any]:
    """Return (count,) samples of `itemsize` bytes, one RLE segment per byte (PS3.5 G).

    Segments are decoded one by one: imagecodecs would not report a single short segment.
    """
    import imagecodecs

    if len(encoded) < _RLE_HEAD.size:
        raise ScanError(Reason.TRUNCATED, "a slice ends in the middle of its pixels")
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
            raise ScanError(Reason.TRUNCATED, "a slice ends in the middle of its pixels")
        # The most significant byte comes first
        samples[:, itemsize - 1 - n] = np.frombuffer(decoded, np.uint8, count)
    if len(decoded) >= 2 * count:  # a second frame follows
        raise ScanError(Reason.DAMAGED, "the file holds more pixels than its header describes")
    return samples.view(f"<u{itemsize}").reshape(count)


def _decode_error(exc: Exception) -> ScanError:
    detail = f"the pixels of a slice can't be decoded ({type(exc).__name__})"
    return ScanError(Reason.DAMAGED, detail)


def _inflate(frame: FrameRef, encoded: bytes) -> bytes:
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
    try:
        with pydicom_muted():
            dataset = read_dataset(path)
            positions = (
                int(dataset[group << 16 | 0x0102].value)
                for group in range(0x6000, 0x6020, 2)
                if group << 16 | 0x0102 in dataset and group << 16 | 0x3000 not in dataset
            )
            return sum({1 << position for position in positions if 0 <= position < 32})
    except PARSE_ERRORS as exc:
        raise ScanError(Reason.DAMAGED, "the overlays of a header can't be parsed") from exc
