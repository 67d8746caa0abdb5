"""The stored samples of one DICOM file, whatever its transfer syntax."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.dicom.headers import Header, PixelFormat

NATIVE = ("1.2.840.10008.1.2", "1.2.840.10008.1.2.1")
"""Implicit and explicit little endian: the samples stand in the file as they are."""
END_OF_IMAGE = b"\xff\xd9"
"""Last marker of JPEG, JPEG-LS and JPEG 2000; without it the image was cut off."""

_ITEM = b"\xfe\xff\x00\xe0"
_RLE = "1.2.840.10008.1.2.5"
_JPEG = "1.2.840.10008.1.2.4."
_CODECS = {
    _JPEG + "50": "jpeg8_decode",
    _JPEG + "51": "jpeg8_decode",
    _JPEG + "55": "jpeg8_decode",
    _JPEG + "57": "jpegsof3_decode",
    _JPEG + "70": "jpegsof3_decode",
    _JPEG + "80": "jpegls_decode",
    _JPEG + "81": "jpegls_decode",
    _JPEG + "90": "jpeg2k_decode",
    _JPEG + "91": "jpeg2k_decode",
    _JPEG + "201": "htj2k_decode",
    _JPEG + "202": "htj2k_decode",
}
"""Decoders of imagecodecs that let other threads run; pydicom decodes the rest."""


def stored_dtype(form: PixelFormat) -> np.dtype[Any]:
    """Return the type that holds the stored samples.

    Raises
    ------
    ScanError
        PIXEL_TYPE for other than 8, 16 or 32 bits; DAMAGED if the bits contradict each other.
    """
    if form.allocated not in (8, 16, 32):
        raise ScanError(Reason.PIXEL_TYPE, f"{form.allocated} bits for a sample")
    if not 1 <= form.stored <= form.high_bit + 1 <= form.allocated:
        raise ScanError(Reason.DAMAGED, "the numbers of bits contradict each other")
    return np.dtype(f"<{'i' if form.signed else 'u'}{form.allocated // 8}")


def read_into(header: Header, out: NDArray[Any], frame: int = 0) -> None:
    """Read the stored samples of a file into `out`, unused high bits cleared.

    Parameters
    ----------
    out : (rows, columns) array of the stored type
        Contiguous.
    frame : int
        Which one; files that hold several are not read yet.

    Raises
    ------
    ScanError
        TRUNCATED, DAMAGED, DECODER or UNREADABLE.
    """
    try:
        with header.path.open("rb", buffering=0) as file:
            if header.syntax in NATIVE:
                _read_native(header, file, out)
            elif header.syntax == _RLE or header.syntax in _CODECS:
                out[...] = _decode(header, _encapsulated(header, file)).astype(out.dtype)
            else:
                out[...] = _decode_by_pydicom(header).astype(out.dtype)
    except OSError as exc:
        detail = f"a file can't be read ({type(exc).__name__})"
        raise ScanError(Reason.UNREADABLE, detail) from exc
    _clear_unused_bits(out, header.format)


def _read_native(header: Header, file: BinaryIO, out: NDArray[Any]) -> None:
    place = header.pixels
    if place is None or place.length is None:
        raise ScanError(Reason.DAMAGED, "uncompressed pixels have no length")
    if place.length >= 2 * out.nbytes:
        raise ScanError(Reason.DAMAGED, "the file holds more pixels than its header says")
    view = memoryview(out).cast("B")
    file.seek(place.offset)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]  # a raw file has it
        if not count:
            break
        done += count
    if min(done, place.length) < out.nbytes:
        raise ScanError(Reason.TRUNCATED, "a slice ends in the middle of its pixels")


def _clear_unused_bits(out: NDArray[Any], form: PixelFormat) -> None:
    """Keep the stored bits, with their sign: overlays may stand in the others (PS3.5 8.1.1)."""
    left = form.allocated - 1 - form.high_bit
    right = form.allocated - form.stored
    if right == 0:
        return
    if left == right and not form.signed:
        np.bitwise_and(out, out.dtype.type((1 << form.stored) - 1), out=out)
        return
    np.left_shift(out, left, out=out)
    np.right_shift(out, right, out=out)  # arithmetic where signed


def _encapsulated(header: Header, file: BinaryIO) -> bytes:
    """Return the one frame of encapsulated pixel data, its fragments joined (PS3.5 A.4)."""
    if header.pixels is None or header.pixels.length is not None:
        raise ScanError(Reason.DAMAGED, "compressed pixels are not encapsulated")
    file.seek(header.pixels.offset)
    data = memoryview(file.read())
    fragments: list[memoryview] = []
    at = 0
    while data[at : at + 4] == _ITEM and at + 8 <= len(data):
        (length,) = struct.unpack("<I", data[at + 4 : at + 8])
        fragments.append(data[at + 8 : at + 8 + length])
        at += 8 + length
        if at > len(data):
            raise ScanError(Reason.TRUNCATED, "a slice ends in the middle of its pixels")
    if len(fragments) < 2:  # the first is the offset table
        cut = at >= len(data)
        raise ScanError(Reason.TRUNCATED if cut else Reason.DAMAGED, "a slice has no pixels")
    return b"".join(fragments[1:])


def _decode(header: Header, frame: bytes) -> NDArray[Any]:
    import imagecodecs

    shape = (header.rows, header.columns)
    if header.syntax != _RLE and END_OF_IMAGE not in frame[-64:]:
        raise ScanError(Reason.TRUNCATED, "a slice ends in the middle of its pixels")
    try:
        if header.syntax == _RLE:
            kind = np.dtype(f"<u{header.format.allocated // 8}")
            samples = np.frombuffer(imagecodecs.dicomrle_decode(frame, kind), kind)
            pixels = samples.reshape(shape)
        else:
            decode: Callable[[bytes], NDArray[Any]] = getattr(imagecodecs, _CODECS[header.syntax])
            pixels = np.asarray(decode(frame))
    except ImportError as exc:
        raise ScanError(Reason.DECODER, f"transfer syntax {header.syntax}") from exc
    except (RuntimeError, ValueError) as exc:
        detail = f"the pixels of a slice can't be decoded ({type(exc).__name__})"
        raise ScanError(Reason.DAMAGED, detail) from exc
    if pixels.shape != shape:
        raise ScanError(Reason.DAMAGED, f"decoded to {pixels.shape}, the header says {shape}")
    if pixels.dtype.kind == "i" and not header.format.signed and pixels.min() < 0:
        raise ScanError(Reason.DAMAGED, "header and pixels contradict each other about the sign")
    return pixels


def _decode_by_pydicom(header: Header) -> NDArray[Any]:
    from pydicom import dcmread
    from pydicom.pixels import get_decoder, pixel_array
    from pydicom.uid import UID

    syntax = UID(header.syntax)
    try:
        available = get_decoder(syntax).is_available
    except NotImplementedError as exc:
        raise ScanError(Reason.DECODER, f"transfer syntax {header.syntax}") from exc
    if not available:
        raise ScanError(Reason.DECODER, f"transfer syntax {header.syntax}")
    try:
        pixels = np.asarray(pixel_array(dcmread(header.path, force=True), raw=True))
    except (
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        RuntimeError,
        ValueError,
    ) as exc:
        detail = f"the pixels of a slice can't be decoded ({type(exc).__name__})"
        raise ScanError(Reason.DAMAGED, detail) from exc
    if pixels.shape != (header.rows, header.columns):
        raise ScanError(Reason.DAMAGED, f"decoded to {pixels.shape}")
    return pixels
