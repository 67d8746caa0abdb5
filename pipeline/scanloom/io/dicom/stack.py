"""Slices into a stack: order, spacing and place are decided from positions, or refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Flag, Gaps, Reason, ScanError
from scanloom.core.grid import ORTHOGONAL
from scanloom.core.world import LPS_TO_RAS_AFFINE
from scanloom.io.dicom.agreement import contradicts
from scanloom.io.dicom.meaning import Attribute, differing
from scanloom.io.dicom.places import JITTER_MM, SAME_PLACE_MM, Places, places_of, steps_off
from scanloom.io.dicom.rounding import (
    MOST_OF_STEP,
    Line,
    is_rounded_stack,
    leaning_line,
    reach_of,
    straight_line,
)
from scanloom.io.dicom.slices import Slice, one_of_each
from scanloom.io.plain import straighten

MIN_SLICES = 3
"""Two slices have one distance: nothing would tell that it is regular."""
SAME_COSINE = 1e-4
"""Largest difference of a direction cosine between slices: 0.03 mm at the edge of 300 mm."""
COSINE_ROUNDING = 1e-3
"""Directions this near to orthonormal were rounded to three decimals; others are damaged."""
SAME_SPACING = 1e-4
"""Largest relative difference of PixelSpacing between slices: 0.05 mm over 512 pixels."""
ITK_ORTHOGONAL = 9e-5
"""What ITK takes for right angles, in every element of R R^T: 1e-4, worked out in float32."""
GAPS_SHARE = 1 / 3
"""Share of the steps from slice to slice that may be gaps; of more, the spacing changes."""
MOST_STRETCHED = 300
"""Distance of slices over that of pixels: more is PixelSpacing in another unit than mm."""
_FLOAT = 1e-9
"""mm that float64 may leave of the same sum in another order."""


@dataclass(frozen=True, eq=False)
class Stack:
    """Slices in their order, and where they lie.

    Parameters
    ----------
    slices : tuple of Slice or None
        One for each k, ascending along row x column direction; None where one is missing.
    twins : tuple of (int, Slice)
        Further slices at the place of slice k, to be dropped if they hold the same.
    affine : (4, 4) array
        Index (column, row, slice) to RAS mm. Its third axis is the step from slice to slice, which
        leans on the others where the gantry was tilted.
    flags : tuple of Flag
    """

    slices: tuple[Slice | None, ...]
    twins: tuple[tuple[int, Slice], ...]
    affine: NDArray[np.float64]
    flags: tuple[Flag, ...]

    def with_flag(self, flag: Flag) -> Stack:
        """Return the same with one more flag."""
        return replace(self, flags=(*self.flags, flag))

    @property
    def real(self) -> tuple[Slice, ...]:
        """The slices that are there."""
        return tuple(one for one in self.slices if one is not None)


def stack_slices(slices: Sequence[Slice], gaps: Gaps = "refuse") -> Stack:
    """Put the slices of one volume in order by ImagePositionPatient along the slice normal.

    The place of a slice is its position along the normal of ImageOrientationPatient, nothing
    else: InstanceNumber, SliceLocation, SliceThickness, GantryDetectorTilt and names may all lie
    (DICOM PS3.3 C.7.6.2.1.1).

    Parameters
    ----------
    slices : sequence of Slice
        In any order.
    gaps : "refuse" or "interpolate"
        Whether slices of an otherwise regular stack may be missing.

    Raises
    ------
    ScanError
        By its own code for all that is no regular, complete stack.
    """
    check_alike(slices)
    row, column, rounded = directions(slices)
    normal = np.cross(row, column)
    places = places_of(slices, normal)
    if len(places.depth) < MIN_SLICES:
        raise ScanError(Reason.TOO_FEW_SLICES, f"{len(places.depth)} at different places")
    index = _indices(places, normal, gaps)
    line, flag = _line(places.positions, index, normal)
    step = line.step
    between_rows, between_columns = slices[0].spacing or (0.0, 0.0)
    if np.linalg.norm(step) > MOST_STRETCHED * min(between_rows, between_columns):
        raise ScanError(Reason.BAD_GEOMETRY, "pixels lie far nearer to each other than slices")
    affine = np.eye(4)
    affine[:3, 0] = row * between_columns
    affine[:3, 1] = column * between_rows
    affine[:3, 2] = step
    affine[:3, 3] = line.origin
    kept, twins = _split_twins(slices, places, index)
    shape = (slices[0].columns, slices[0].rows, len(kept))
    affine, upright = _upright(LPS_TO_RAS_AFFINE @ affine, shape)
    flags = [Flag.AFFINE_ROUNDED] if rounded or upright else []
    flags += [flag] if flag and flag not in flags else []
    flags += [Flag.GAPS_INTERPOLATED] if None in kept else []
    flags += [Flag.ATTRIBUTES_CONTRADICT] if contradicts(slices[0].header, step, normal) else []
    return Stack(kept, twins, affine, tuple(flags))


def _upright(
    affine: NDArray[np.float64], shape: tuple[int, int, int]
) -> tuple[NDArray[np.float64], bool]:
    """Return an affine that ITK can take, and whether that made it another one.

    Axes that lean on each other by less than a shear may still not be at right angles for ITK,
    which adds up what leans on what.
    """
    axes = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    if np.abs(axes @ axes.T - np.eye(3)).max() <= ITK_ORTHOGONAL:
        return affine, False
    affine, flags = straighten(affine, shape)
    return affine, bool(flags)


def check_alike(slices: Sequence[Slice]) -> None:
    """Refuse what differs between slices and must not, or is missing.

    Raises
    ------
    ScanError
        By the code of the first thing that is wrong.
    """
    some, count = one_of_each(slices), len(slices)
    cut = sum(s.header.pixels is None for s in slices)
    if cut:
        raise ScanError(Reason.TRUNCATED, f"{cut} of {count} files have no pixels")
    _same(some, count, lambda s: (s.rows, s.columns), Reason.SLICE_SIZE, "sizes")
    said = zip(*(s.header.patient for s in some), strict=True)
    patients = max(len({value for value in values if value}) for values in said)
    if patients > 1:
        raise ScanError(Reason.DUPLICATE_SLICES, f"{count} slices are of {patients} patients")
    attribute = differing(slices)
    if attribute is not None:
        raise _mixed(slices, attribute)
    frame = Reason.FRAME_OF_REFERENCE
    framed = [s for s in some if s.header.frame_of_reference]
    _same(framed, count, lambda s: s.header.frame_of_reference, frame, "frames of reference")
    if not all_placed(slices):
        lost = sum(not is_placed(s) for s in slices)
        detail = f"{lost} of {count} slices have no valid position or orientation"
        raise ScanError(Reason.NO_POSITION, detail)
    spacing = np.array([s.spacing or (np.nan, np.nan) for s in some])
    if not (np.isfinite(spacing).all() and spacing.min() > 0):
        raise ScanError(Reason.BAD_GEOMETRY, "the pixel spacing is missing or not positive")
    if (np.abs(spacing / spacing[0] - 1) > SAME_SPACING).any():
        raise ScanError(Reason.SLICE_SPACING, "slices differ in pixel spacing")
    orientation = np.array([s.orientation for s in some])
    if (np.abs(orientation - orientation[0]) > SAME_COSINE).any():
        raise ScanError(Reason.SLICE_ORIENTATION, "slices differ in orientation")


def _mixed(slices: Sequence[Slice], attribute: Attribute) -> ScanError:
    """Return the error for slices that disagree on an attribute."""
    kinds = attribute.kinds_of(slices)
    said = Counter(kinds[attribute.of(one)] for one in slices)
    few, count = len(slices) - max(said.values()), len(slices)
    without = f"missing in {said['']} of {count} slices" if "" in said else ""
    detail = without or f"another in {few} of {count} slices"
    return ScanError(Reason.MIXED_SLICES, f"{attribute.name} is {detail}")


def _same(
    slices: Sequence[Slice],
    count: int,
    what: Callable[[Slice], object],
    reason: Reason,
    name: str,
) -> None:
    kinds = {what(s) for s in slices}
    if len(kinds) > 1:
        raise ScanError(reason, f"{count} slices have {len(kinds)} {name}")


def all_placed(slices: Sequence[Slice]) -> bool:
    """Whether all slices are placed; the same as `is_placed` of each, but faster."""
    positions = [one.position for one in slices]
    if None in positions or not np.isfinite(np.array(positions)).all():
        return False
    return all(map(is_placed, one_of_each(slices)))


def is_placed(one: Slice) -> bool:
    """Whether a slice says where it lies and how it is turned."""
    position, orientation = one.position or (), one.orientation or ()
    if len(position) != 3 or len(orientation) != 6:
        return False
    return all(map(math.isfinite, position)) and all(map(math.isfinite, orientation))


def directions(
    slices: Sequence[Slice],
) -> tuple[NDArray[np.float64], NDArray[np.float64], bool]:
    """Return the unit vectors along a row and down a column, and whether they were rounded.

    Raises
    ------
    ScanError
        BAD_GEOMETRY if they are not at right angles.
    """
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
    slices: Sequence[Slice], places: Places, index: NDArray[np.intp]
) -> tuple[tuple[Slice | None, ...], tuple[tuple[int, Slice], ...]]:
    """Return one slice for each k, and (k, slice) of those that share a place with it."""
    kept: list[Slice | None] = [None] * (int(index[-1]) + 1)
    twins: list[tuple[int, Slice]] = []
    for one, place in zip(slices, places.ids, strict=True):
        k = int(index[place])
        if kept[k] is None:
            kept[k] = one
        else:
            twins.append((k, one))
    return tuple(kept), tuple(twins)


def _indices(places: Places, normal: NDArray[np.float64], gaps: Gaps) -> NDArray[np.intp]:
    """Return which k each place is; not every number is there where slices are missing.

    Raises
    ------
    ScanError
        SLICE_GAP or SPACING_CHANGES if the places are not equally spaced; BAD_GEOMETRY if slices
        lie side by side.
    """
    depth = places.depth
    off, allowed = steps_off(depth)
    if off <= allowed:
        return np.arange(len(depth))
    steps = np.diff(depth)
    if steps.min() <= SAME_PLACE_MM:
        raise ScanError(Reason.BAD_GEOMETRY, "slices lie side by side in one plane")
    if is_rounded_stack(places.positions):
        return np.arange(len(depth))
    seen = f"distances between slices go from {steps.min():.3f} to {steps.max():.3f} mm"
    multiples = _multiples(steps, allowed, (float(np.median(steps)), float(steps.min())))
    if multiples is None:
        multiples = _rounded_multiples(steps, reach_of(places.positions, normal))
    if multiples is None:
        raise ScanError(Reason.SPACING_CHANGES, seen)
    index = np.concatenate([[0], np.cumsum(multiples)]).astype(np.intp)
    missing = int(index[-1]) + 1 - len(depth)
    even = depth[0] + index * (depth[-1] - depth[0]) / index[-1]
    on_line = np.abs(depth - even).max() <= allowed or leaning_line(places.positions, index)
    # More missing than there are would be made up, not filled in
    if gaps == "refuse" or missing >= len(depth) or not on_line:
        raise ScanError(Reason.SLICE_GAP, f"{missing} missing slices: {seen}")
    return index


def _multiples(
    steps: NDArray[np.float64], allowed: float, usuals: Sequence[float]
) -> NDArray[np.float64] | None:
    """Return how many regular steps each step is, None where they are no whole numbers.

    Long steps are the exception, or the spacing changes.
    """
    for usual in usuals:
        multiples = np.rint(steps / usual)
        whole = np.abs(steps - multiples * usual) <= allowed * np.maximum(multiples, 1)
        if whole.all() and multiples.min() >= 1:
            few = np.count_nonzero(multiples > 1) <= max(1.0, GAPS_SHARE * len(steps))
            return multiples if few else None
    return None


def _rounded_multiples(steps: NDArray[np.float64], reach: float) -> NDArray[np.float64] | None:
    """Return the same where rounding moves each slice by up to `reach` mm."""
    single = steps[steps <= steps.min() + 4 * reach + _FLOAT]
    usual = float(single.mean())  # single roundings level out
    if not 0 < reach <= MOST_OF_STEP * usual:
        return None
    multiples = _multiples(steps, 4 * reach, (usual,))
    return None if multiples is None or multiples.max() == 1 else multiples


def _line(
    positions: NDArray[np.float64], index: NDArray[np.intp], normal: NDArray[np.float64]
) -> tuple[Line, Flag | None]:
    """Return where the slices lie, and the flag of what was taken out of it.

    The step is kept as it is, also where it leans: that is a tilted gantry, or slices cut at a
    slant. A lean that rounding alone may have made is none.

    Parameters
    ----------
    positions : (P, 3) array
        Of the slices in order, LPS mm.
    index : (P,) array
        Which k each is.
    normal : (3,) array
        Unit normal of the slices.

    Raises
    ------
    ScanError
        BAD_GEOMETRY if the slices step sideways irregularly.
    """
    count = int(index[-1])
    ends = Line(positions[0], (positions[-1] - positions[0]) / count)
    along = (ends.step @ normal) * normal
    sideways = float(np.linalg.norm(ends.step - along))
    on_line = _is_on_line(positions, index, ends, normal)
    if on_line and sideways <= ORTHOGONAL * float(np.linalg.norm(ends.step)):
        return ends, None
    if on_line and sideways * count <= JITTER_MM:
        return Line(ends.origin, along), Flag.AFFINE_ROUNDED
    rounded = straight_line(positions, index, normal)
    if rounded is None and on_line:
        return ends, None
    rounded = rounded or leaning_line(positions, index)
    if rounded is None:
        raise ScanError(Reason.BAD_GEOMETRY, "the slices are shifted sideways irregularly")
    return rounded, Flag.POSITIONS_ROUNDED


def _is_on_line(
    positions: NDArray[np.float64],
    index: NDArray[np.intp],
    line: Line,
    normal: NDArray[np.float64],
) -> bool:
    """Whether the slices lie on the line through the first and the last, but for jitter."""
    off = positions - line.origin - np.outer(index, line.step)
    _, allowed = steps_off(positions @ normal)
    along = float(np.abs(off @ normal).max())
    return along <= allowed + _FLOAT and float(np.linalg.norm(off, axis=1).max()) <= 2 * JITTER_MM


def contradiction(stack: Stack) -> ScanError:
    """Return the error for slices at one place that hold different pixels."""
    places = len(stack.real)
    counts = Counter({k: 1 for k, one in enumerate(stack.slices) if one is not None})
    counts.update(k for k, _ in stack.twins)
    most = max(counts.values())
    full = sum(count == most for count in counts.values())
    if full == places:
        detail = f"{most} slices at each of {places} places, and nothing tells them apart"
        return ScanError(Reason.DUPLICATE_SLICES, detail)
    if full > places / 2:
        lost = sum(most - count for count in counts.values())
        detail = (
            f"{lost} slices are missing: {places - full} of {places} places have fewer than {most}"
        )
        return ScanError(Reason.SLICE_GAP, detail)
    doubled = len({k for k, _ in stack.twins})
    return ScanError(Reason.DUPLICATE_SLICES, f"{doubled} places have slices that differ")
