"""Slices into a stack: order, spacing and place are decided from positions, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Flag, Reason, ScanError
from scanloom.core.grid import ORTHOGONAL
from scanloom.io.dicom.kinds import refusal
from scanloom.io.dicom.slices import Slice

MIN_SLICES = 3
"""Two slices have one distance: nothing would tell that it is regular."""
SAME_PLACE_MM = 0.01
"""Slices nearer than this are at one place; scanners write two decimals or more."""
JITTER_MM = 0.05
"""How far a slice may lie off its regular place: rounding to one decimal, table movement."""
JITTER_STEPS = 0.1
"""The same as a share of the distance between slices, for very thin ones."""
SAME_COSINE = 1e-4
"""Largest difference of a direction cosine between slices: 0.03 mm at the edge of 300 mm."""
COSINE_ROUNDING = 1e-3
"""Directions this near to orthonormal were rounded to three decimals; others are damaged."""
SAME_SPACING = 1e-4
"""Largest relative difference of PixelSpacing between slices: 0.05 mm over 512 pixels."""

LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


@dataclass(frozen=True, eq=False)
class Stack:
    """Slices in their order, and where they lie.

    Parameters
    ----------
    slices : tuple of Slice
        One for each k, ascending along row x column direction.
    twins : tuple of (int, Slice)
        Further slices at the place of slice k, to be dropped if they hold the same.
    affine : (4, 4) array
        Index (column, row, slice) to RAS mm.
    flags : tuple of Flag
    """

    slices: tuple[Slice, ...]
    twins: tuple[tuple[int, Slice], ...]
    affine: NDArray[np.float64]
    flags: tuple[Flag, ...]


def stack_slices(slices: Sequence[Slice]) -> Stack:
    """Put the slices of a series in order by ImagePositionPatient along the slice normal.

    The place of a slice is its position along the normal of ImageOrientationPatient, nothing
    else: InstanceNumber, SliceLocation, SliceThickness, GantryDetectorTilt and names may all lie
    (DICOM PS3.3 C.7.6.2.1.1).

    Raises
    ------
    ScanError
        By its own code for all that is no regular, complete, unsheared stack.
    """
    _check_alike(slices)
    row, column, rounded = _directions(slices)
    normal = np.cross(row, column)
    positions = np.array([_position(s) for s in slices])
    depth = positions @ normal
    order = np.argsort(depth, kind="stable")
    kept, twins = _split_twins(slices, depth, order)
    if len(kept) < MIN_SLICES:
        raise ScanError(Reason.TOO_FEW_SLICES, f"{len(kept)} at different places")
    _check_steps(depth[kept])
    step, straightened = _step(positions[kept], normal)
    between_rows, between_columns = slices[0].spacing or (0.0, 0.0)
    affine = np.eye(4)
    affine[:3, 0] = row * between_columns
    affine[:3, 1] = column * between_rows
    affine[:3, 2] = step
    affine[:3, 3] = positions[kept[0]]
    return Stack(
        slices=tuple(slices[n] for n in kept),
        twins=tuple((k, slices[n]) for k, n in twins),
        affine=LPS_TO_RAS @ affine,
        flags=(Flag.AFFINE_ROUNDED,) if rounded or straightened else (),
    )


def _check_alike(slices: Sequence[Slice]) -> None:
    """Refuse what differs between slices and must not, or is missing."""
    for one in slices:
        reason = refusal(one.header)
        if reason is not None:
            detail = "tiles" if reason is Reason.MOSAIC else "frames"
            raise ScanError(reason, f"its files hold several slices each, as {detail}")
    _same(slices, lambda s: (s.header.rows, s.header.columns), Reason.SLICE_SIZE, "sizes")
    cut = sum(s.header.pixels is None for s in slices)
    if cut:
        raise ScanError(Reason.TRUNCATED, f"{cut} of {len(slices)} files have no pixels")
    _same(
        slices,
        lambda s: s.header.frame_of_reference,
        Reason.FRAME_OF_REFERENCE,
        "frames of reference",
    )
    lost = sum(not _is_placed(s) for s in slices)
    if lost:
        detail = f"{lost} of {len(slices)} slices have no valid position or orientation"
        raise ScanError(Reason.NO_POSITION, detail)
    spacing = np.array([s.spacing or (np.nan, np.nan) for s in slices])
    if not (np.isfinite(spacing).all() and spacing.min() > 0):
        raise ScanError(Reason.BAD_GEOMETRY, "the pixel spacing is missing or not positive")
    if (np.abs(spacing / spacing[0] - 1) > SAME_SPACING).any():
        raise ScanError(Reason.SLICE_SPACING, "slices differ in pixel spacing")
    orientation = np.array([s.orientation for s in slices])
    if (np.abs(orientation - orientation[0]) > SAME_COSINE).any():
        raise ScanError(Reason.SLICE_ORIENTATION, "slices differ in orientation")


def _same(
    slices: Sequence[Slice], what: Callable[[Slice], object], reason: Reason, name: str
) -> None:
    kinds = {what(s) for s in slices}
    if len(kinds) > 1:
        raise ScanError(reason, f"{len(slices)} slices have {len(kinds)} {name}")


def _is_placed(one: Slice) -> bool:
    numbers = (*(one.position or ()), *(one.orientation or ()))
    return len(numbers) == 9 and bool(np.isfinite(numbers).all())


def _position(one: Slice) -> tuple[float, ...]:
    return one.position or ()


def _directions(
    slices: Sequence[Slice],
) -> tuple[NDArray[np.float64], NDArray[np.float64], bool]:
    """Return the unit vectors along a row and down a column, and whether they were rounded."""
    both = np.array(slices[0].orientation).reshape(2, 3)
    product = both @ both.T
    error = float(np.abs(product - np.eye(2)).max())
    if error > COSINE_ROUNDING:
        raise ScanError(Reason.BAD_GEOMETRY, "its direction cosines are not at right angles")
    if error <= ORTHOGONAL:
        return both[0], both[1], False
    row, column = both / np.linalg.norm(both, axis=1, keepdims=True)
    half = (row @ column) / 2  # each turns by half the error
    row, column = row - half * column, column - half * row
    return row / np.linalg.norm(row), column / np.linalg.norm(column), True


def _split_twins(
    slices: Sequence[Slice], depth: NDArray[np.float64], order: NDArray[np.intp]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return one slice for each place, and (k, slice) of those that share a place with it."""
    kept: list[int] = []
    twins: list[tuple[int, int]] = []
    for n in map(int, order):
        if kept and depth[n] - depth[kept[-1]] <= SAME_PLACE_MM:
            twins.append((len(kept) - 1, n))
        else:
            kept.append(n)
    for k, n in twins:
        if slices[n].phase[:7] != slices[kept[k]].phase[:7]:  # times and numbers change anyway
            detail = f"{len(slices)} slices at {len(kept)} places, from several acquisitions"
            raise ScanError(Reason.PHASES, detail)
    return kept, twins


def contradiction(stack: Stack) -> ScanError:
    """Return the error for slices at one place that hold different pixels."""
    places = len(stack.slices)
    total = places + len(stack.twins)
    if total % places == 0 and len({k for k, _ in stack.twins}) == places:
        return ScanError(Reason.PHASES, f"{total // places} slices at each of {places} places")
    detail = f"{len({k for k, _ in stack.twins})} places have several slices that differ"
    return ScanError(Reason.DUPLICATE_SLICES, detail)


def _check_steps(depth: NDArray[np.float64]) -> None:
    """Refuse slices that are not equally spaced.

    Parameters
    ----------
    depth : (K,) array
        Places along the normal in mm, ascending.
    """
    steps = np.diff(depth)
    regular = np.linspace(depth[0], depth[-1], len(depth))
    usual = float(np.median(steps))
    allowed = min(JITTER_MM, JITTER_STEPS * usual)
    if np.abs(depth - regular).max() <= allowed:
        return
    seen = f"distances between slices go from {steps.min():.3f} to {steps.max():.3f} mm"
    multiples = np.rint(steps / usual)
    whole = np.abs(steps - multiples * usual) <= allowed * np.maximum(multiples, 1)
    if whole.all() and multiples.min() >= 1:
        missing = int((multiples - 1).sum())
        raise ScanError(Reason.SLICE_GAP, f"{missing} missing slices: {seen}")
    raise ScanError(Reason.SPACING_CHANGES, seen)


def _step(
    positions: NDArray[np.float64], normal: NDArray[np.float64]
) -> tuple[NDArray[np.float64], bool]:
    """Return the step from slice to slice, and whether rounding was taken out of it.

    Parameters
    ----------
    positions : (K, 3) array
        Of the slices in order, LPS mm.
    normal : (3,) array
        Unit normal of the slices.

    Raises
    ------
    ScanError
        TILTED if the slices step sideways; BAD_GEOMETRY if they do so irregularly.
    """
    count = len(positions)
    step = (positions[-1] - positions[0]) / (count - 1)
    off = positions - positions[0] - np.outer(np.arange(count), step)
    sideways = step - (step @ normal) * normal
    length = float(np.linalg.norm(step))
    drift = float(np.linalg.norm(sideways)) * (count - 1)
    if np.linalg.norm(off, axis=1).max() > 2 * JITTER_MM:
        raise ScanError(Reason.BAD_GEOMETRY, "the slices are shifted sideways irregularly")
    if float(np.linalg.norm(sideways)) <= ORTHOGONAL * length:
        return step, False
    if drift <= JITTER_MM:
        return (step @ normal) * normal, True
    degrees = float(np.degrees(np.arcsin(drift / (count - 1) / length)))
    raise ScanError(Reason.TILTED, f"the slices lean by {degrees:.1f} degrees")
