"""The stored samples of one frame, whatever its transfer syntax."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import uids
from scanloom.io.dicom.codestream import says_other_size
from scanloom.io.dicom.encapsulated import Frames, find_frames, read_frame
from scanloom.io.dicom.headers import PixelFormat
from scanloom.io.dicom.native import read_native
from scanloom.io.dicom.planes import NATIVE, Plane
from scanloom.io.dicom.sources import Memory, opened

END_OF_IMAGE = b"\xff\xd9"
"""Last marker of JPEG, JPEG-LS and JPEG 2000; without it the image was cut off."""

_RLE_HEAD = struct.Struct("<16I")  # number of segments, and where they begin
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
"""Decoders of imagecodecs; they let other threads run."""
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
"""Those that may give other values than went in."""
_ERRORS = (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError)


def tables_of(planes: list[Plane]) -> dict[Path, Frames]:
    """Return where frames lie, for files that hold several; each is searched once."""
    tables: dict[Path, Frames] = {}
    for plane in planes:
        if plane.frames > 1 and not plane.is_plain and plane.path not in tables:
            with opened(plane) as (found, source):
                if found.syntax not in NATIVE:
                    tables[plane.path] = find_frames(found, source)
    return tables


def read_plane(plane: Plane, out: NDArray[Any], tables: Mapping[Path, Frames]) -> None:
    """Read the stored samples of a frame into `out`, unused high bits cleared.

    Decoders run here, in this process.

    Parameters
    ----------
    out : (rows, columns) array of the stored type
        Contiguous.
    tables : mapping
        As `tables_of` gives it.

    Raises
    ------
    ScanError
        TRUNCATED, DAMAGED, DECODER, TOO_LARGE or UNREADABLE.
    """
    try:
        with opened(plane) as (found, source):
            if found.syntax in NATIVE:
                read_native(found, source, out)
            else:
                fragments = (tables.get(plane.path) or find_frames(found, source))[plane.frame]
                _decode_into(found, read_frame(found, source, fragments), out)
    except OSError as exc:
        detail = f"a file can't be read ({type(exc).__name__})"
        raise ScanError(Reason.UNREADABLE, detail) from exc
    _clear_unused_bits(out, plane.format)


def _decode_into(plane: Plane, frame: bytes, out: NDArray[Any]) -> None:
    data = _unpacked(plane, frame)
    if data is not None:
        alone = replace(
            plane,
            syntax=uids.EXPLICIT_VR_LITTLE_ENDIAN,
            offset=0,
            length=len(data),
            frames=1,
            frame=0,
        )
        read_native(alone, Memory(data), out)
        return
    pixels = _decoded(plane, frame)
    if pixels.shape != out.shape:
        raise ScanError(Reason.DAMAGED, f"decoded to {pixels.shape}, the header says {out.shape}")
    signed = plane.format.signed
    if pixels.dtype.kind == "i" and not signed and pixels.min() < 0:
        raise ScanError(Reason.DAMAGED, "header and pixels contradict each other about the sign")
    if plane.syntax != uids.RLE_LOSSLESS:
        pixels = _within_bits(pixels, plane)
    np.copyto(out, pixels, casting="unsafe")


def _within_bits(pixels: NDArray[Any], plane: Plane) -> NDArray[Any]:
    """Return decoded samples, which keep to the bits that are said to be stored (PS3.5 8.2.1).

    Nothing can stand above those: cutting it off would change values. A sign may, or not, fill
    what is above, since JPEG and JPEG-LS know none. What lossy coding makes of the largest values
    may be larger: these are made the largest again.
    """
    form = plane.format
    bits = form.high_bit + 1
    if bits == 8 * pixels.itemsize and (form.signed or pixels.dtype.kind == "u"):
        return pixels
    if form.signed and pixels.dtype.kind == "u" and pixels.max() >> bits:
        pixels = pixels.view(f"i{pixels.itemsize}")
    signed = form.signed and pixels.dtype.kind == "i"
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    least, most = int(pixels.min()), int(pixels.max())
    if low <= least and most <= high:
        return pixels
    slack = (1 << bits) >> 4 if plane.syntax in _LOSSY else 0
    if least < low - slack or most > high + slack:
        raise ScanError(Reason.DAMAGED, "the pixels have more bits than the header says")
    return pixels.clip(low, high)


def _decoded(plane: Plane, frame: bytes) -> NDArray[Any]:
    """Return a frame as its decoder gives it."""
    import imagecodecs

    if plane.syntax == uids.RLE_LOSSLESS:
        return _run_lengths(frame, plane.count, plane.dtype.itemsize).reshape(
            plane.rows, plane.columns
        )
    if plane.syntax not in _CODECS:
        raise ScanError(Reason.DECODER, "its transfer syntax is not one that can be decoded")
    if END_OF_IMAGE not in frame[-64:]:
        raise ScanError(Reason.TRUNCATED, "a slice ends in the middle of its pixels")
    if says_other_size(frame, plane.rows, plane.columns):
        raise ScanError(Reason.DAMAGED, "header and pixels contradict each other about the size")
    try:
        decode: Callable[[bytes], NDArray[Any]] = getattr(imagecodecs, _CODECS[plane.syntax])
        return np.asarray(decode(frame))
    except ImportError as exc:
        raise ScanError(Reason.DECODER, "its decoder is not installed") from exc
    except _ERRORS as exc:
        raise _undecodable(exc) from exc


def _unpacked(plane: Plane, frame: bytes) -> bytes | None:
    """Return the uncompressed bytes of a frame; None where its decoder gives samples."""
    if plane.syntax == uids.ENCAPSULATED_UNCOMPRESSED_EXPLICIT_VR_LITTLE_ENDIAN:
        return frame
    if plane.syntax == uids.DEFLATED_IMAGE_FRAME_COMPRESSION:
        return _inflated(plane, frame)
    if plane.syntax == uids.RLE_LOSSLESS and plane.format.allocated == 1:
        return _run_lengths(frame, -(-plane.count // 8), 1).tobytes()
    return None


def _run_lengths(frame: bytes, count: int, size: int) -> NDArray[Any]:
    """Return samples of `size` bytes, each byte from a segment of its own (PS3.5 G).

    Segments are decoded one by one, since a short one among long ones would go unseen.
    """
    import imagecodecs

    if len(frame) < _RLE_HEAD.size:
        raise ScanError(Reason.TRUNCATED, "a slice ends in the middle of its pixels")
    segments, *offsets = _RLE_HEAD.unpack_from(frame)
    ends = [*offsets[1:segments], len(frame)]
    rising = all(a < b for a, b in zip(offsets, ends, strict=False))
    if segments != size or offsets[0] < _RLE_HEAD.size or not rising:
        raise ScanError(Reason.DAMAGED, "a slice has other segments than it has bytes")
    alone = _RLE_HEAD.pack(1, _RLE_HEAD.size, *[0] * 14)
    samples = np.empty((count, size), np.uint8)
    for n, (start, end) in enumerate(zip(offsets, ends, strict=False)):
        try:
            decoded = imagecodecs.dicomrle_decode(alone + frame[start:end], np.dtype(np.uint8))
        except _ERRORS as exc:
            raise _undecodable(exc) from exc
        if len(decoded) < count:
            raise ScanError(Reason.TRUNCATED, "a slice ends in the middle of its pixels")
        samples[:, size - 1 - n] = np.frombuffer(decoded, np.uint8, count)  # the highest is first
    if len(decoded) >= 2 * count:  # another frame stands behind it
        raise ScanError(Reason.DAMAGED, "the file holds more pixels than its header says")
    return samples.view(f"<u{size}").reshape(count)


def _undecodable(exc: Exception) -> ScanError:
    detail = f"the pixels of a slice can't be decoded ({type(exc).__name__})"
    return ScanError(Reason.DAMAGED, detail)


def _inflated(plane: Plane, frame: bytes) -> bytes:
    """Inflate a frame, to no more than it can be."""
    most = -(-plane.count * plane.format.allocated // 8) + 1  # padded to an even length
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(frame, most)
    except zlib.error as exc:
        raise ScanError(Reason.DAMAGED, "a frame can't be inflated") from exc


def _clear_unused_bits(out: NDArray[Any], form: PixelFormat) -> None:
    """Keep the stored bits, with their sign: overlays may stand in the others (PS3.5 8.1.1)."""
    bits = 8 * out.itemsize
    left, right = bits - 1 - form.high_bit, bits - form.stored
    if right == 0:
        return
    if left == right and not form.signed:
        np.bitwise_and(out, out.dtype.type((1 << form.stored) - 1), out=out)
        return
    np.left_shift(out, left, out=out)
    np.right_shift(out, right, out=out)  # arithmetic where signed
