"""`Plane`: one frame of a file, with all that decoding it takes and nothing else."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import uids
from scanloom.io.dicom.headers import Header, PixelFormat
from scanloom.io.dicom.slices import Slice

NATIVE = (
    uids.IMPLICIT_VR_LITTLE_ENDIAN,
    uids.EXPLICIT_VR_LITTLE_ENDIAN,
    uids.EXPLICIT_VR_BIG_ENDIAN,
)
"""The samples stand in the file as they are."""


@dataclass(frozen=True)
class Plane:
    """One frame of a file. It holds no identity but its path, and can be sent to a child process.

    Parameters
    ----------
    path : Path
    syntax : str
        Transfer syntax UID.
    offset, length
        Where the value of PixelData lies; `length` is None where it is encapsulated.
    frames, frame : int
        How many frames the file holds, and which of them is meant, from 0.
    rows, columns : int
    format : PixelFormat
    slope, intercept : float
        Stored sample to value.
    tile : tuple of int or None
        First row and column, rows and columns of the part that is meant; None for all of it.
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
        """Samples of the frame."""
        return self.rows * self.columns

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of what is meant."""
        return (self.tile[2], self.tile[3]) if self.tile else (self.rows, self.columns)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type that holds its stored samples."""
        return stored_dtype(self.format)

    @property
    def is_plain(self) -> bool:
        """Whether reading it is copying bytes: no decoder, nothing that can grow."""
        return self.syntax in NATIVE


def frame_of(header: Header, frame: int = 0) -> Plane:
    """Return one frame of a file.

    Raises
    ------
    ScanError
        TRUNCATED if the file has no pixels, DAMAGED if it has no such frame.
    """
    if header.pixels is None:
        raise ScanError(Reason.TRUNCATED, "a file has no pixels")
    frames = max(1, header.frames)
    if frame >= frames:
        raise ScanError(Reason.DAMAGED, "a file has fewer frames than it describes")
    return Plane(
        path=header.path,
        syntax=header.syntax,
        offset=header.pixels.offset,
        length=header.pixels.length,
        frames=frames,
        frame=frame,
        rows=header.rows,
        columns=header.columns,
        format=header.format,
    )


def plane_of(one: Slice) -> Plane:
    """Return what a slice is made of; errors as of `frame_of`."""
    tile = one.tile
    return replace(
        frame_of(one.header, one.frame),
        slope=float(one.slope),
        intercept=float(one.intercept),
        tile=(tile.top, tile.left, tile.rows, tile.columns) if tile else None,
    )


def as_words(plane: Plane) -> list[Any]:
    """Return a plane as what can be sent to a child process."""
    return [getattr(plane, name) for name in _PLAIN] + list(astuple(plane.format))


def from_words(words: list[Any]) -> Plane:
    """Return the plane that was sent."""
    count = len(_PLAIN)
    return Plane(**dict(zip(_PLAIN, words, strict=False)), format=PixelFormat(*words[count:]))


_PLAIN = (
    *("path", "syntax", "offset", "length", "frames", "frame"),
    *("rows", "columns", "slope", "intercept", "tile"),
)


def stored_dtype(form: PixelFormat) -> np.dtype[Any]:
    """Return the type that holds the stored samples: the next one where their bits are packed.

    Raises
    ------
    ScanError
        PIXEL_TYPE for more than 32 bits; DAMAGED if the bits contradict each other.
    """
    if not 1 <= form.allocated <= 32:
        raise ScanError(Reason.PIXEL_TYPE, f"{form.allocated} bits for a sample")
    if not 1 <= form.stored <= form.high_bit + 1 <= form.allocated:
        raise ScanError(Reason.DAMAGED, "the numbers of bits contradict each other")
    if form.representation not in (0, 1):
        raise ScanError(Reason.DAMAGED, "whether samples have a sign is not said")
    if form.signed and form.stored == 1:
        raise ScanError(Reason.DAMAGED, "one bit can't have a sign")
    size = next(n for n in (1, 2, 4) if form.allocated <= 8 * n)
    return np.dtype(f"<{'i' if form.signed else 'u'}{size}")
