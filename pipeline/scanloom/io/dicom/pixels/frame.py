"""`FrameRef`: reference to one frame of a file, with just the fields that decoding needs."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import uids
from scanloom.io.dicom.geometry.slices import Slice
from scanloom.io.dicom.header.header import Header, PixelFormat

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
    tile : tuple of int or None
        First row, first column, rows and columns of the tile; None for the whole frame.
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
    tile: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """Number of samples in the frame."""
        return self.rows * self.columns

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the tile, or of the frame."""
        return (self.tile[2], self.tile[3]) if self.tile else (self.rows, self.columns)

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
    tile = slice_.tile
    return replace(
        frame_ref(slice_.header, slice_.frame),
        slope=float(slice_.slope),
        intercept=float(slice_.intercept),
        tile=(tile.top, tile.left, tile.rows, tile.columns) if tile else None,
    )


def as_words(frame: FrameRef) -> list[Any]:
    """Return a frame reference as a list of plain values, to be sent to a child process."""
    return [getattr(frame, name) for name in _MESSAGE_FIELDS] + list(astuple(frame.format))


def from_words(message: list[Any]) -> FrameRef:
    """Return the frame reference that `as_words` encoded."""
    field_count = len(_MESSAGE_FIELDS)
    return FrameRef(
        **dict(zip(_MESSAGE_FIELDS, message, strict=False)),
        format=PixelFormat(*message[field_count:]),
    )


_MESSAGE_FIELDS = (
    *("path", "syntax", "offset", "length", "frames", "frame"),
    *("rows", "columns", "slope", "intercept", "tile"),
)


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
