"""Kinds of DICOM series, each drawn as a ball of known position and values.

Drawn from the standard (DICOM PS3.3). A kind defines the expected result: the right ball, one
ball per selectable volume, or the reason code of a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom import DataElement, Dataset, config, dcmread, dcmwrite
from pydicom.uid import (
    UID,
    ExplicitVRBigEndian,
    ImplicitVRLittleEndian,
)

from support.balls import BALL, LATE, SHAPE, STEP, Ball, around, drawn
from support.write_dicom import Coding, Edit, Geometry, Words, uid, write_series

Maker = Callable[[Path], None]
PLAIN = Coding()
AXIAL = around()
COUNT = SHAPE[2]
MIDDLE = 9
SC, DX = "1.2.840.10008.5.1.4.1.1.7", "1.2.840.10008.5.1.4.1.1.1.1"
SR, SEG = "1.2.840.10008.5.1.4.1.1.88.11", "1.2.840.10008.5.1.4.1.1.66.4"


@dataclass(frozen=True)
class Kind:
    """One kind of series.

    Parameters
    ----------
    make : function of folder
        Writes the series.
    code : str
        Reason code of the refusal without options; empty if the series is read.
    balls : tuple of Ball
        Expected balls: one per phase, in order, if `code` is PHASES; one per series if it is
        SERIES_AMBIGUOUS; else a single one.
    options : dict
        Options with which `load_volume` reads the series.
    flags : tuple of str
        Flags that the volume must have.
    """

    make: Maker
    code: str = ""
    balls: tuple[Ball, ...] = (BALL,)
    options: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


@cache
def picture(geometry: Geometry, ball: Ball = BALL) -> NDArray[np.float64]:
    """Return the values of a stack of slices."""
    return drawn(geometry, SHAPE, ball)


def stored(geometry: Geometry, ball: Ball = BALL, coding: Coding = PLAIN) -> NDArray[Any]:
    """Return the stored samples of a stack."""
    samples = (picture(geometry, ball) - float(coding.intercept)) / float(coding.slope)
    return np.rint(samples).astype(np.int64)


def stack(
    folder: Path,
    geometry: Geometry = AXIAL,
    ball: Ball = BALL,
    edit: Edit | None = None,
    coding: Coding = PLAIN,
    **more: Any,
) -> list[Path]:
    """Write a series of the ball; `more` are attributes of every slice."""
    samples = stored(geometry, ball, coding)
    return write_series(folder, samples, geometry, coding, Words(more=more), edit)


def plain(*args: Any, **kwargs: Any) -> Maker:
    """Return a function that writes one series."""
    return lambda folder: void(stack(folder, *args, **kwargs))


def void(_: object) -> None:
    """Do nothing with a value."""


def changed(change: Callable[[int, Dataset], None], *args: Any, **kwargs: Any) -> Maker:
    """Return a function that writes a series with every slice edited."""
    return plain(*args, edit=change, **kwargs)


def one_slice(k: int = MIDDLE, **attributes: Any) -> Maker:
    """Return a writer of a series in which one slice has other attributes; None removes one."""
    return changed(lambda n, ds: assign(ds, **attributes) if n == k else None)


def every(**attributes: Any) -> Maker:
    """Return a writer of a series in which all slices have other attributes; None removes one."""
    return changed(lambda n, ds: assign(ds, **attributes))


def assign(ds: Dataset, **attributes: Any) -> None:
    """Set attributes, also to invalid values; None removes one."""
    for keyword, value in attributes.items():
        ds.pop(keyword, None)
        if value is not None:
            vr = {"I": "DS", "R": "DS", "P": "DS"}.get(keyword[0]) if keyword in _DECIMALS else None
            if vr:
                ds.add(DataElement(keyword, vr, value, validation_mode=config.IGNORE))
            else:
                setattr(ds, keyword, value)
        elif keyword == "SOPInstanceUID":
            ds.file_meta.MediaStorageSOPInstanceUID = uid("none")


_DECIMALS = ("ImagePositionPatient", "RescaleSlope", "PixelSpacing", "ImageOrientationPatient")


def tilt(degrees: float, step: float = STEP) -> float:
    """Return the shift in mm between tilted slices."""
    return float(np.tan(np.radians(degrees))) * step


def rewritten(make: Maker, syntax: UID) -> Maker:
    """Return a writer of the same files in another native transfer syntax."""

    def again(folder: Path) -> None:
        make(folder)
        for path in sorted(folder.glob("*.dcm")):
            ds = dcmread(path)
            if syntax == ExplicitVRBigEndian:
                ds.PixelData = np.frombuffer(ds.PixelData, "<u2").byteswap().tobytes()
            ds["PixelData"].VR = "OW"
            ds.file_meta.TransferSyntaxUID = syntax
            implicit, little = syntax == ImplicitVRLittleEndian, syntax != ExplicitVRBigEndian
            dcmwrite(path, ds, implicit_vr=implicit, little_endian=little, force_encoding=True)

    return again


def phases(*each: dict[str, Any], balls: Sequence[Ball] = (BALL, LATE), shift: float = 0) -> Maker:
    """Return a writer of several volumes in one series, each with its own attributes.

    Each volume is shifted by the fraction `shift` of the slice spacing from the previous one.
    """

    def make(folder: Path) -> None:
        for n, (attributes, ball) in enumerate(zip(each, balls, strict=True)):
            geometry = replace(AXIAL, origin=tuple(AXIAL.position(n * shift)))

            def edit(
                k: int, ds: Dataset, n: int = n, attributes: dict[str, Any] = attributes
            ) -> None:
                ds.InstanceNumber = 1 + n * COUNT + k
                ds.SOPInstanceUID = uid("phase", n, k)
                ds.file_meta.MediaStorageSOPInstanceUID = ds.SOPInstanceUID
                for keyword, value in attributes.items():
                    assign(ds, **{keyword: value(k) if callable(value) else value})

            stack(folder / str(n), geometry, ball, edit)

    return make


def values(keyword: str, *each: Any, **kwargs: Any) -> Maker:
    """Return a writer of volumes that one attribute distinguishes."""
    return phases(*({keyword: value} for value in each), **kwargs)
