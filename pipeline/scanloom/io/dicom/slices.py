"""`Slice`: one plane of a scan, whether it has a file of its own or is a frame among others."""

from __future__ import annotations

from dataclasses import dataclass

from scanloom.io.dicom.headers import Header


@dataclass(frozen=True, eq=False)
class Slice:
    """One plane, and what its file or its functional groups say of it.

    Parameters
    ----------
    header : Header
        Of the file that it lies in: size, format and compression are those of all its frames.
    frame : int
        Which frame of the file, from 0.
    position, orientation, spacing : tuple of float or None
        As in `Header`, but of this plane.
    slope, intercept : float
        Stored sample to value.
    phase : tuple of bytes
        What tells volumes of one series apart.
    """

    header: Header
    frame: int
    position: tuple[float, ...] | None
    orientation: tuple[float, ...] | None
    spacing: tuple[float, ...] | None
    slope: float
    intercept: float
    phase: tuple[bytes, ...]


def single_slice(header: Header) -> Slice:
    """Return the one slice of a file that holds one."""
    return Slice(
        header=header,
        frame=0,
        position=header.position,
        orientation=header.orientation,
        spacing=header.spacing,
        slope=header.slope,
        intercept=header.intercept,
        phase=header.phase,
    )
