"""Slices of a scan and its labels as raw pixels, in the orientation in which they are drawn.

All indices are those of a `View`: they increase towards the patient's left, back and feet, so that
axial and coronal slices show the patient's right on the left, and sagittal ones the front.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Volume
from scanloom.review.preview.slicing import AXIAL, CORONAL, LETTERS, SAGITTAL, Direction, View

PLANES: dict[str, Direction] = {"axial": AXIAL, "coronal": CORONAL, "sagittal": SAGITTAL}
MAX_CHUNK_BYTES = 16 << 20
"""Largest answer with slices."""
_LOWEST, _HIGHEST = -32768, 32767


@dataclass(frozen=True, eq=False)
class Image:
    """A scan as int16, and the factors of its values: `slope` * pixel + `intercept`.

    Parameters
    ----------
    array : (X, Y, Z) int16 array
        Pixels, in a view.
    slope, intercept : float
    exact : bool
        Whether the values are those of the scan, not rounded to `slope` / 2.
    """

    array: NDArray[np.int16]
    slope: float
    intercept: float
    exact: bool


def as_image(volume: Volume, view: View) -> Image:
    """Return a scan as an image. Voxels that are not numbers get the lowest value."""
    array = volume.array
    if array.dtype.kind == "f":
        array = np.where(np.isfinite(array), array, np.nanmin(array[np.isfinite(array)], initial=0))
    low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    whole = array.dtype.kind in "iu" or bool((array == np.rint(array)).all())
    if whole and low >= _LOWEST and high <= _HIGHEST:
        return Image(view.of(_as_int16(array)), 1.0, 0.0, exact=True)
    if whole and high - low <= _HIGHEST - _LOWEST:
        shifted = np.asarray(array.astype(np.float64) - low + _LOWEST)
        return Image(view.of(_as_int16(shifted)), 1.0, low - _LOWEST, exact=True)
    slope = (high - low) / (_HIGHEST - _LOWEST)
    pixels = np.rint((array.astype(np.float64) - low) / slope + _LOWEST)
    return Image(view.of(_as_int16(pixels)), slope, low - slope * _LOWEST, exact=False)


def _as_int16(array: NDArray[Any]) -> NDArray[np.int16]:
    return np.asfortranarray(array.astype(np.int16, copy=False))


def plane_shape(shape: tuple[int, ...], plane: Direction) -> tuple[int, int, int]:
    """Return the number of slices, rows and columns of a plane through a view."""
    return shape[plane.normal], shape[plane.down], shape[plane.across]


def slices(array: NDArray[Any], plane: Direction, first: int, last: int) -> bytes:
    """Return slices as little-endian pixels, row by row.

    Parameters
    ----------
    array : (X, Y, Z) array
        In a view.
    plane : Direction
    first, last : int
        Indices of the first and the last slice.

    Raises
    ------
    IndexError
        If there are no such slices, or they exceed `MAX_CHUNK_BYTES`.
    """
    count, rows, columns = plane_shape(array.shape, plane)
    if not 0 <= first <= last < count:
        raise IndexError(f"slices {first} to {last} of {count}")
    if (last - first + 1) * rows * columns * array.itemsize > MAX_CHUNK_BYTES:
        raise IndexError(f"slices {first} to {last} exceed {MAX_CHUNK_BYTES >> 20} MiB")
    chosen = np.moveaxis(array, plane.normal, 0)[first : last + 1]
    pixels = chosen.copy(order="K")  # in one pass: sagittal slices are interleaved in memory
    if plane.across < plane.down:  # rows run along the second axis
        pixels = pixels.transpose(0, 2, 1)
    rows_in_order = np.ascontiguousarray(pixels, pixels.dtype.newbyteorder("<"))  # without the GIL
    return rows_in_order.tobytes()


def describe_plane(view: View, plane: Direction) -> dict[str, Any]:
    """Return what a page needs to draw a plane: axes, sizes in mm, and side letters."""
    spacing = [view.source.spacing[n] for n in view.order]
    across, down = LETTERS[plane.across], LETTERS[plane.down]
    return {
        "normal": plane.normal,
        "across": plane.across,
        "down": plane.down,
        "count": view.shape[plane.normal],
        "width": view.shape[plane.across],
        "height": view.shape[plane.down],
        "pixel_mm": [spacing[plane.across], spacing[plane.down]],
        "letters": {"left": across[0], "right": across[1], "top": down[0], "bottom": down[1]},
    }
