"""Stack slices into a volume: order, spacing and origin come from the slice positions alone."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Flag, Gaps, Reason, ScanError, counted
from scanloom.core.grid import LPS_TO_RAS_AFFINE, ORTHOGONAL
from scanloom.io.affines import check_plausible_size, orthogonalize
from scanloom.io.dicom import tags
from scanloom.io.dicom.geometry.slices import (
    Slice,
    finite_number,
    first_disagreement,
    kinds_of,
    unique_by_shared,
)
from scanloom.io.dicom.header.header import Header
from scanloom.io.dicom.slice_attributes import SliceAttribute

SAME_POSITION_MM = 0.01
"""Slices closer than this share a position; scanners write at least two decimals."""
MAX_JITTER_MM = 0.05
"""Largest deviation of a slice from even spacing: rounding to one decimal, table movement."""
_MAX_COPLANAR = 32
"""Number of recent positions searched for a match; a proper volume has one position per plane."""
_JITTER_FRACTION = 0.1
"""Jitter as a fraction of the slice spacing, for very thin slices."""


@dataclass(frozen=True, eq=False)
class SlicePositions:
    """Distinct positions of parallel slices.

    Parameters
    ----------
    ids : (N,) array of int
        Number of each slice's position, counted along the normal; slices may share one.
    positions : (P, 3) array
        Position of the first slice at each, LPS mm.
    depth : (P,) array
        The positions projected on the normal, mm, ascending.
    """

    ids: NDArray[np.intp]
    positions: NDArray[np.float64]
    depth: NDArray[np.float64]


def locate_slices(slices: Sequence[Slice], normal: NDArray[np.float64]) -> SlicePositions:
    """Return the distinct positions of slices that all have ImagePositionPatient.

    Two slices share a position if they differ by no more than the jitter tolerance, which is well
    below the slice spacing. Slices side by side in one plane have different positions. `normal`
    (3,) is the unit normal of the slices, LPS.
    """
    positions = np.array([s.position for s in slices], dtype=np.float64)
    depth = positions @ normal
    order = np.argsort(depth, kind="stable")
    tolerance = _depth_tolerance(depth[order])
    ids = np.empty(len(slices), np.intp)
    if np.all(np.diff(depth[order]) > tolerance):  # the usual case: no duplicates
        ids[order] = np.arange(len(slices))
        return SlicePositions(ids, positions[order], depth[order])
    firsts: list[int] = []  # the first slice at each position
    for index in map(int, order):
        position_id = _known_position(firsts, positions, depth, index, tolerance)
        if position_id is None:
            position_id = len(firsts)
            firsts.append(index)
        ids[index] = position_id
    return SlicePositions(ids, positions[firsts], depth[firsts])


def _known_position(
    firsts: Sequence[int],
    positions: NDArray[np.float64],
    depth: NDArray[np.float64],
    index: int,
    tolerance: float,
) -> int | None:
    """Return the number of the known position that a slice shares; None if it has a new one.

    `firsts` has the index of the first slice at each known position, ascending in `depth` (N,), mm
    along the normal; `positions` (N, 3) are LPS mm, and `tolerance` the largest difference in
    depth.
    """
    for position_id in range(len(firsts) - 1, max(-1, len(firsts) - 1 - _MAX_COPLANAR), -1):
        first = firsts[position_id]
        if depth[index] - depth[first] > tolerance:
            return None
        if np.abs(positions[index] - positions[first]).max() <= 2 * MAX_JITTER_MM:
            return position_id
    return None


def spacing_deviation(depth: NDArray[np.float64]) -> tuple[float, float]:
    """Return the largest deviation of depths from even spacing, and the allowed one, mm."""
    spacing = float(np.median(np.diff(depth)))
    regular = np.linspace(depth[0], depth[-1], len(depth))
    return float(np.abs(depth - regular).max()), min(MAX_JITTER_MM, _JITTER_FRACTION * spacing)


def _depth_tolerance(depth: NDArray[np.float64]) -> float:
    """Return the largest depth difference of slices that share a position, mm."""
    steps = np.diff(depth)
    gaps = steps[steps > max(SAME_POSITION_MM, 0.1 * steps.max(initial=0.0))]
    if not len(gaps):
        return SAME_POSITION_MM
    return max(SAME_POSITION_MM, min(MAX_JITTER_MM, _JITTER_FRACTION * float(np.median(gaps))))


# --- rounded positions ----------------------------------------------------------------------------
# Regular stacks whose positions were rounded in the headers, fitted by bounded least squares.
#
# Every slice is rounded, the first and the last too, so that the line through these two is no more
# accurate than the others. Many slices average their roundings out. The least-squares line of a
# regular stack that was rounded to tenths of a millimetre comes within one such step of each of its
# positions, in every coordinate, for any distance and number of slices. What is further off is
# irregular.

ROUNDING_STEP_MM = 0.1
"""Coarsest step to which scanners and converters round a coordinate, or a multiple of it to which
they add a constant."""
MAX_ROUNDING_SHARE = 0.2
"""Largest shift of a slice by rounding, as a share of the slice distance: with a quarter, a missing
slice could not be detected."""
_FIT_ERROR_MM = 1e-6

Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RegularStack:
    """A regular stack: slice k is at origin + k * step, LPS mm."""

    origin: Numbers
    step: Numbers


def fit_line(positions: Numbers, index: NDArray[np.intp]) -> RegularStack | None:
    """Return the regular stack in any direction that has these positions, or None.

    Parameters
    ----------
    positions : (P, 3) array
        Positions of the slices in order, LPS mm.
    index : (P,) array
        Number k of each slice in the stack, from 0.
    """
    step, centre = _least_squares(positions, index)
    return _bounded(positions, index, step, centre)


def fit_line_along(
    positions: Numbers, index: NDArray[np.intp], normal: Numbers
) -> RegularStack | None:
    """Return the regular stack along a unit normal that has these positions, or None.

    Parameters are those of `fit_line`. Direction cosines are rounded too, so the slices may drift
    sideways by as much as still counts as orthogonal.
    """
    slope, centre = _least_squares(positions, index)
    step = float(slope @ normal) * normal
    sideways = np.sqrt(np.clip(1 - normal**2, 0, None))
    drift = ORTHOGONAL / 2 * abs(float((positions[-1] - positions[0]) @ normal)) * sideways
    return _bounded(positions, index, step, centre, drift)


def is_rounded_stack(positions: Numbers) -> bool:
    """Return whether (P, 3) positions in their order are those of a regular stack, rounded."""
    return fit_line(positions, np.arange(len(positions))) is not None


def rounding_shift(normal: Numbers) -> float:
    """Return the largest shift of a slice by rounding, along a unit vector in mm."""
    return ROUNDING_STEP_MM / 2 * float(np.abs(normal).sum())


def _least_squares(positions: Numbers, index: NDArray[np.intp]) -> tuple[Numbers, Numbers]:
    """Return the step of the best fit, and its position in the middle of the stack."""
    centred = index - index.mean()
    return centred @ positions / (centred @ centred), positions.mean(axis=0)


def _bounded(
    positions: Numbers,
    index: NDArray[np.intp],
    step: Numbers,
    centre: Numbers,
    drift: Numbers | float = 0.0,
) -> RegularStack | None:
    """Return the line if no position is off by more than a rounding step and the drift, each axis.

    For thin slices the rounding step shrinks: rounding may not conceal a missing one.
    """
    distance = float(np.linalg.norm(step))
    if not distance > 0:
        return None
    share = rounding_shift(step / distance) / (MAX_ROUNDING_SHARE * distance)
    allowed = ROUNDING_STEP_MM / max(1.0, share) + drift + _FIT_ERROR_MM
    origin = centre - index.mean() * step
    off = np.abs(positions - origin - np.outer(index, step))
    return RegularStack(origin, step) if (off <= allowed).all() else None


# --- stacks ---------------------------------------------------------------------------------------

MIN_SLICES = 3
"""Two slices have a single distance, which cannot be checked for regularity."""
_SAME_COSINE = 1e-4
"""Largest difference of a direction cosine between slices: 0.03 mm over 300 mm."""
_COSINE_ROUNDING = 1e-3
"""Largest deviation from orthonormal that counts as rounding to three decimals, not damage."""
SPACING_TOLERANCE = 1e-4
"""Largest relative difference of PixelSpacing between slices: 0.05 mm over 512 pixels."""
_ITK_ORTHOGONAL = 9e-5
"""ITK's tolerance for each element of R R^T: 1e-4, computed in float32."""
_MAX_GAP_FRACTION = 1 / 3
"""Fraction of the steps between slices that may be gaps; with more, the spacing changes."""
_MAX_ASPECT_RATIO = 300
"""Largest slice spacing over pixel spacing; beyond it, PixelSpacing is not in mm."""
_FLOAT_ERROR_MM = 1e-9
"""Float64 error, in mm, of the same sum taken in another order."""


@dataclass(frozen=True, eq=False)
class Stack:
    """Ordered slices of one volume and their affine.

    Parameters
    ----------
    slices : tuple of Slice or None
        The slice at each index k, ascending along row x column direction; None if it is missing.
    twins : tuple of (Slice, Slice)
        Slices, and duplicates at their positions, which are dropped if their content is the same.
    affine : (4, 4) array
        Index (column, row, slice) to RAS mm. The third axis is the step between slices, which is
        oblique to the others if the gantry was tilted.
    flags : tuple of Flag
    """

    slices: tuple[Slice | None, ...]
    twins: tuple[tuple[Slice, Slice], ...]
    affine: NDArray[np.float64]
    flags: tuple[Flag, ...]

    def with_flag(self, flag: Flag) -> Stack:
        """Return a copy with a flag added."""
        return replace(self, flags=(*self.flags, flag))

    @property
    def real(self) -> tuple[Slice, ...]:
        """The slices that are present, in order."""
        return tuple(s for s in self.slices if s is not None)


def stack_slices(
    slices: Sequence[Slice], gaps: Gaps = "refuse", may_differ: Collection[SliceAttribute] = ()
) -> Stack:
    """Sort the slices of one volume by ImagePositionPatient along the slice normal.

    Slices are ordered only by their position along the normal of ImageOrientationPatient.
    InstanceNumber, SliceLocation, SliceThickness, GantryDetectorTilt and file names may all be
    wrong (DICOM PS3.3 C.7.6.2.1.1).

    Parameters
    ----------
    slices : sequence of Slice
        In any order.
    gaps : "refuse" or "interpolate"
        Whether slices of an otherwise regular stack may be missing.
    may_differ : collection of SliceAttribute
        Attributes on which the slices need not agree.

    Raises
    ------
    ScanError
        With a reason code for each way in which slices fail to form a regular, complete stack.
    """
    # Size and orientation first, since positions along a normal need one normal. Positions next: a
    # missing slice or a changed spacing is the cause that a user can repair, and attributes often
    # differ because of it. The affine last: it is rounded only if the stack is regular
    _check_consistent(slices)
    row, column, rounded = direction_cosines(slices)
    normal = np.cross(row, column)
    positions = locate_slices(slices, normal)
    if len(positions.depth) < MIN_SLICES:
        detail = f"{counted(len(slices), 'slice')} at {counted(len(positions.depth), 'position')}"
        raise ScanError(Reason.TOO_FEW_SLICES, detail)
    try:
        index = _slice_indices(positions, normal, gaps)
    except ScanError as error:
        # Slices of several volumes leave gaps; but a scan whose spacing changes on the way may
        # change its thickness and kernel with it, and the spacing is what cannot be read
        if error.reason is not Reason.SPACING_CHANGES:
            _check_meaning(slices, may_differ)
        raise
    _check_meaning(slices, may_differ)
    line, flag = _slice_line(positions.positions, index, normal)
    step = line.step
    between_rows, between_columns = slices[0].spacing or (0.0, 0.0)
    if np.linalg.norm(step) > _MAX_ASPECT_RATIO * min(between_rows, between_columns):
        raise ScanError(Reason.BAD_GEOMETRY, "the pixel spacing is far below the slice spacing")
    affine = np.eye(4)
    affine[:3, 0] = row * between_columns
    affine[:3, 1] = column * between_rows
    affine[:3, 2] = step
    affine[:3, 3] = line.origin
    kept, duplicates = _split_duplicates(slices, positions, index)
    shape = (slices[0].columns, slices[0].rows, len(kept))
    check_plausible_size(affine, shape)
    affine, orthogonalized = _orthogonal_for_itk(LPS_TO_RAS_AFFINE @ affine, shape)
    flags = [Flag.AFFINE_ROUNDED] if rounded or orthogonalized else []
    flags += [flag] if flag and flag not in flags else []
    flags += [Flag.GAPS_INTERPOLATED] if None in kept else []
    flags += (
        [Flag.ATTRIBUTES_CONTRADICT] if header_disagrees(slices[0].header, step, normal) else []
    )
    return Stack(kept, duplicates, affine, tuple(flags))


def _orthogonal_for_itk(
    affine: NDArray[np.float64], shape: tuple[int, int, int]
) -> tuple[NDArray[np.float64], bool]:
    """Return an affine that ITK accepts, and whether it had to be changed.

    Axes whose angles are too close to 90 degrees to count as a shear may still fail ITK's test,
    which sums the deviations.
    """
    axes = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    if np.abs(axes @ axes.T - np.eye(3)).max() <= _ITK_ORTHOGONAL:
        return affine, False
    affine, flags = orthogonalize(affine, shape)
    return affine, bool(flags)


def _check_consistent(slices: Sequence[Slice]) -> None:
    """Refuse slices that differ in, or lack, an attribute that a volume's slices must share."""
    distinct, count = unique_by_shared(slices), len(slices)
    truncated = sum(s.header.pixels is None for s in slices)
    if truncated:
        raise ScanError(Reason.TRUNCATED, f"{truncated} of {count} files have no pixels")
    sizes = {(s.rows, s.columns) for s in distinct}
    if len(sizes) > 1:
        raise ScanError(Reason.SLICE_SIZE, f"{count} slices have {len(sizes)} sizes")
    frames = {s.header.frame_of_reference for s in distinct} - {""}
    if len(frames) > 1:
        detail = f"{count} slices have {len(frames)} frames of reference"
        raise ScanError(Reason.FRAME_OF_REFERENCE, detail)
    if not all_have_geometry(slices):
        unplaced = sum(not _has_geometry(s) for s in slices)
        detail = f"{unplaced} of {count} slices have no valid position or orientation"
        raise ScanError(Reason.NO_POSITION, detail)
    spacing = np.array([s.spacing or (np.nan, np.nan) for s in distinct])
    if not (np.isfinite(spacing).all() and spacing.min() > 0):
        raise ScanError(Reason.BAD_GEOMETRY, "the pixel spacing is missing or not positive")
    if (np.abs(spacing / spacing[0] - 1) > SPACING_TOLERANCE).any():
        raise ScanError(Reason.SLICE_SPACING, "slices differ in pixel spacing")
    orientation = np.array([s.orientation for s in distinct])
    if (np.abs(orientation - orientation[0]) > _SAME_COSINE).any():
        raise ScanError(Reason.SLICE_ORIENTATION, "slices differ in orientation")


def _check_meaning(slices: Sequence[Slice], may_differ: Collection[SliceAttribute]) -> None:
    """Refuse slices that disagree on the meaning of their values: MIXED_SLICES."""
    attribute = first_disagreement(slices, may_differ)
    if attribute is None:
        return
    kinds = kinds_of(attribute, slices)
    counts = Counter(kinds[s.value_of(attribute)] for s in slices)
    count = len(slices)
    missing = f"is missing in {counts['']} of {count} slices" if "" in counts else ""
    detail = missing or f"differs in {count - max(counts.values())} of {count} slices"
    raise ScanError(Reason.MIXED_SLICES, f"{attribute.name} {detail}")


def all_have_geometry(slices: Sequence[Slice]) -> bool:
    """Whether all slices have a valid position and orientation; checks shared ones only once."""
    positions = [s.position for s in slices]
    if None in positions or not np.isfinite(np.array(positions)).all():
        return False
    return all(map(_has_geometry, unique_by_shared(slices)))


def _has_geometry(slice_: Slice) -> bool:
    """Whether a slice has a valid position and orientation."""
    if slice_.position is None or slice_.orientation is None:
        return False
    return all(map(math.isfinite, (*slice_.position, *slice_.orientation)))


def direction_cosines(
    slices: Sequence[Slice],
) -> tuple[NDArray[np.float64], NDArray[np.float64], bool]:
    """Return unit vectors (LPS) along a row and down a column, and whether they were rounded.

    Raises
    ------
    ScanError
        BAD_GEOMETRY if the direction cosines are not orthonormal.
    """
    cosines = np.array(slices[0].orientation).reshape(2, 3)
    gram = cosines @ cosines.T
    error = float(np.abs(gram - np.eye(2)).max())
    if error > _COSINE_ROUNDING:
        raise ScanError(Reason.BAD_GEOMETRY, "the direction cosines are not orthonormal")
    if error <= ORTHOGONAL:
        return cosines[0], cosines[1], False
    row, column = cosines / np.linalg.norm(cosines, axis=1, keepdims=True)
    correction = (row @ column) / 2  # each vector turns by half the error
    row, column = row - correction * column, column - correction * row
    return row / np.linalg.norm(row), column / np.linalg.norm(column), True


def _split_duplicates(
    slices: Sequence[Slice], positions: SlicePositions, index: NDArray[np.intp]
) -> tuple[tuple[Slice | None, ...], tuple[tuple[Slice, Slice], ...]]:
    """Return the slice at each index k, and `Stack.twins`."""
    kept: list[Slice | None] = [None] * (int(index[-1]) + 1)
    duplicates: list[tuple[Slice, Slice]] = []
    for slice_, k in zip(slices, index[positions.ids].tolist(), strict=True):
        first = kept[k]
        if first is None:
            kept[k] = slice_
        else:
            duplicates.append((first, slice_))
    return tuple(kept), tuple(duplicates)


def _slice_indices(
    positions: SlicePositions, normal: NDArray[np.float64], gaps: Gaps
) -> NDArray[np.intp]:
    """Return the slice index k of each position; missing slices leave out numbers.

    SLICE_GAP or SPACING_CHANGES if the positions are not evenly spaced; BAD_GEOMETRY if several
    slices lie in one plane.
    """
    depth = positions.depth
    deviation, tolerance = spacing_deviation(depth)
    if deviation <= tolerance:
        return np.arange(len(depth))
    steps = np.diff(depth)
    if steps.min() <= SAME_POSITION_MM:
        raise ScanError(Reason.BAD_GEOMETRY, "several slices lie side by side in one plane")
    if is_rounded_stack(positions.positions):
        return np.arange(len(depth))
    step_range = f"distances between slices range from {steps.min():.3f} to {steps.max():.3f} mm"
    # The median first: most steps are single ones. The shortest, where most steps have gaps
    multiples = _multiples(steps, tolerance, (float(np.median(steps)), float(steps.min())))
    if multiples is None:
        multiples = _rounded_multiples(steps, rounding_shift(normal))
    if multiples is None:
        raise ScanError(Reason.SPACING_CHANGES, step_range)
    index = np.concatenate([[0], np.cumsum(multiples)]).astype(np.intp)
    missing = int(index[-1]) + 1 - len(depth)
    even = depth[0] + index * (depth[-1] - depth[0]) / index[-1]
    on_line = np.abs(depth - even).max() <= tolerance or fit_line(positions.positions, index)
    # Only a gap in a regular stack may be interpolated: the advice of SLICE_GAP says so
    if not (missing and on_line):
        raise ScanError(Reason.SPACING_CHANGES, step_range)
    gap = f"{counted(missing, 'slice')} missing: {step_range}"
    # With more slices missing than present, most of the volume would be invented
    if missing >= len(depth):
        raise ScanError(Reason.SPACING_CHANGES, f"{gap}; too many to interpolate them")
    if gaps == "refuse":
        raise ScanError(Reason.SLICE_GAP, gap)
    return index


def _multiples(
    steps: NDArray[np.float64], tolerance: float, candidates: Sequence[float]
) -> NDArray[np.float64] | None:
    """Return each step as a multiple of the regular step; None if they are not whole numbers.

    None as well if more than a few steps are long: then the spacing changes.
    """
    for spacing in candidates:
        multiples = np.rint(steps / spacing)
        is_whole = np.abs(steps - multiples * spacing) <= tolerance * np.maximum(multiples, 1)
        if is_whole.all() and multiples.min() >= 1:
            are_few = np.count_nonzero(multiples > 1) <= max(1.0, _MAX_GAP_FRACTION * len(steps))
            return multiples if are_few else None
    return None


def _rounded_multiples(steps: NDArray[np.float64], reach: float) -> NDArray[np.float64] | None:
    """Return `_multiples` of steps between slices that rounding moved by up to `reach` mm."""
    single = steps[steps <= steps.min() + 4 * reach + _FLOAT_ERROR_MM]
    spacing = float(single.mean())  # rounding errors average out
    if not 0 < reach <= MAX_ROUNDING_SHARE * spacing:
        return None
    multiples = _multiples(steps, 4 * reach, (spacing,))
    return None if multiples is None or multiples.max() == 1 else multiples


def _slice_line(
    positions: NDArray[np.float64], index: NDArray[np.intp], normal: NDArray[np.float64]
) -> tuple[RegularStack, Flag | None]:
    """Return the line through slice positions (P, 3), LPS mm, and a flag if it was corrected.

    An oblique step is kept: it comes from a tilted gantry or from slices cut at a slant. A sideways
    shift that rounding alone explains is removed; an irregular one is BAD_GEOMETRY. `index` (P,)
    has the slice index k of each position, `normal` is the unit normal of the slices.
    """
    count = int(index[-1])
    ends = RegularStack(positions[0], (positions[-1] - positions[0]) / count)
    along = (ends.step @ normal) * normal
    sideways = float(np.linalg.norm(ends.step - along))
    on_line = _is_on_line(positions, index, ends, normal)
    if on_line and sideways <= ORTHOGONAL * float(np.linalg.norm(ends.step)):
        return ends, None
    if on_line and sideways * count <= MAX_JITTER_MM:
        return RegularStack(ends.origin, along), Flag.AFFINE_ROUNDED
    # Slices exactly on a slanted line were not rounded: their slant is real, however small
    scatter = np.abs(positions - ends.origin - np.outer(index, ends.step)).max()
    line = None if scatter <= SAME_POSITION_MM else fit_line_along(positions, index, normal)
    if line is None and on_line:
        return ends, None
    line = line or fit_line(positions, index)
    if line is None:
        raise ScanError(Reason.BAD_GEOMETRY, "the slices are shifted sideways irregularly")
    return line, Flag.POSITIONS_ROUNDED


def _is_on_line(
    positions: NDArray[np.float64],
    index: NDArray[np.intp],
    line: RegularStack,
    normal: NDArray[np.float64],
) -> bool:
    """Whether the slices lie on the line through the first and the last, within the jitter."""
    residual = positions - line.origin - np.outer(index, line.step)
    _, tolerance = spacing_deviation(positions @ normal)
    along = float(np.abs(residual @ normal).max())
    return (
        along <= tolerance + _FLOAT_ERROR_MM
        and float(np.linalg.norm(residual, axis=1).max()) <= 2 * MAX_JITTER_MM
    )


def duplicate_position_error(stack: Stack) -> ScanError:
    """Return the error for slices that share a position but differ in their pixels."""
    position_count = len(stack.real)
    counts = Counter((*stack.real, *(kept for kept, _ in stack.twins)))
    most = max(counts.values())
    complete = sum(count == most for count in counts.values())
    if complete == position_count:
        detail = f"{most} indistinguishable slices at each of {position_count} positions"
        return ScanError(Reason.DUPLICATE_SLICES, detail)
    if complete > position_count / 2:
        missing = sum(most - count for count in counts.values())
        short = f"{position_count - complete} of {position_count} positions have fewer than {most}"
        return ScanError(Reason.SLICE_GAP, f"{counted(missing, 'slice')} missing: {short}")
    conflicting = len({kept for kept, _ in stack.twins})
    return ScanError(
        Reason.DUPLICATE_SLICES, f"{counted(conflicting, 'position')} with slices that differ"
    )


# --- tilt and spacing of the header ---------------------------------------------------------------

MAX_TILT_DIFFERENCE_DEG = 1.0
"""Larger differences of GantryDetectorTilt and the lean of the slices are not due to rounding."""
MAX_SPACING_DIFFERENCE = 0.02
"""The same for SpacingBetweenSlices, as a share of the slice distance."""


def header_disagrees(
    header: Header, step: NDArray[np.float64], normal: NDArray[np.float64]
) -> bool:
    """Return whether tilt or spacing in a header contradict the positions of slices.

    SliceThickness is not compared: slices may overlap, or leave gaps. `step` leads from one slice
    to the next, LPS mm; `normal` is the unit normal of the slices.
    """
    along, length = abs(float(step @ normal)), float(np.linalg.norm(step))
    lean = float(np.degrees(np.arccos(min(along / length, 1.0))))
    tilt = finite_number(header, tags.GANTRY_DETECTOR_TILT)
    spacing = finite_number(header, tags.SPACING_BETWEEN_SLICES)
    if tilt is not None and abs(abs(tilt) - lean) > MAX_TILT_DIFFERENCE_DEG:
        return True
    if spacing is None or spacing == 0:
        return False
    # Some scanners measure it along the normal, some along the table
    distances = (along, length)
    return min(abs(abs(spacing) - d) / d for d in distances) > MAX_SPACING_DIFFERENCE


# --- missing slices -------------------------------------------------------------------------------


def fill_gaps(
    values: NDArray[Any],
    slices: Sequence[Slice | None],
    padding: float | None,
    padding_limit: float | None,
) -> None:
    """Interpolate missing slices linearly between the nearest present ones, in place.

    Parameters
    ----------
    values : (I, J, K) array
        Changed in place; integers are rounded.
    slices : sequence of Slice or None
        The slice at each index k, None if it is missing; the first and the last are present.
    padding, padding_limit : float or None
        Value of pixels without a measurement, and the other end of the range if that is a range. A
        pixel that is padding in either neighbour becomes `padding`.
    """
    present = [k for k, slice_ in enumerate(slices) if slice_ is not None]
    for lower, upper in itertools.pairwise(present):
        before, after = values[:, :, lower], values[:, :, upper]
        for k in range(lower + 1, upper):
            weight = (k - lower) / (upper - lower)
            interpolated = before * (1 - weight) + after * weight
            if values.dtype.kind in "iu":
                interpolated = np.rint(interpolated)
            if padding is not None:  # a mixture of padding and tissue would look like a measurement
                ends = padding, padding if padding_limit is None else padding_limit
                for slice_values in (before, after):
                    is_padding = (slice_values >= min(ends)) & (slice_values <= max(ends))
                    interpolated[is_padding] = padding
            values[:, :, k] = interpolated
