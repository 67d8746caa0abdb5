"""Split a series into its volumes: phases, time points, echoes, stacks.

`phase=` counts volumes in ascending order of the first attribute of `SLICE_ATTRIBUTES` that
distinguishes them; volumes with equal values are ordered by the next. Stacks that differ in
direction, size, pixel spacing or frame of reference are ordered by their number of slices, the
largest first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError, counted
from scanloom.io.dicom.geometry.positions import locate_slices
from scanloom.io.dicom.geometry.slices import Slice, unique_by_shared
from scanloom.io.dicom.geometry.stack import (
    MIN_SLICES,
    SPACING_TOLERANCE,
    all_have_geometry,
    direction_cosines,
)
from scanloom.io.dicom.slice_attributes import SliceAttribute, attributes_that_separate
from scanloom.io.dicom.splitting.attributes import split_by_other_attributes, split_interleaved
from scanloom.io.dicom.splitting.slice_group import (
    SliceGroup,
    are_incomplete_volumes,
    are_interleaved_stacks,
    have_nearly_same_positions,
    have_same_positions,
)

_BY_PURPOSE = attributes_that_separate("first")
MAX_LOCALISERS = 5
"""Localisers that may cross a stack, if it has at least four times as many slices."""
MAX_GEOMETRIES = 64
"""Combinations of direction, size, spacing and frame of reference in one series. If there are more,
the series is not split."""
MAX_CUT_SHARE = 0.25
"""Share of the slices of another volume that may be missing because files were lost; a volume that
lacks more was acquired so."""
MAX_COSINE_DIFFERENCE = 0.01
"""Largest difference of a direction cosine within a stack. Slices that differ by less but are not
equal are refused later, rather than made a separate volume."""
MAX_CROSSING_COSINE = 0.5
"""Cosine of the angle between the normals of a stack and of localisers that cross it, at most."""


@dataclass(frozen=True, eq=False)
class Volumes:
    """The volumes of a series.

    Parameters
    ----------
    groups : tuple of tuples of Slice
        Slices of each volume, in the order in which `phase=` counts.
    told_by : tuple of str
        Names of the attributes that distinguish the volumes.
    crossing : int
        Number of slices that were set aside because they cross the others, as localisers do.
    cut : tuple of int
        Number of slices that each volume lacks at its ends and another has; empty if none does.
    """

    groups: tuple[tuple[Slice, ...], ...]
    told_by: tuple[str, ...] = ()
    crossing: int = 0
    cut: tuple[int, ...] = ()

    def choose(self, phase: int | None) -> tuple[tuple[Slice, ...], int]:
        """Return the slices of the selected volume, and how many it lacks at its ends.

        Parameters
        ----------
        phase : int or None
            Number of the volume, from 0; None for the only one.

        Raises
        ------
        ScanError
            PHASES if there are several and `phase` is not one of their numbers; FOUR_D if there is
            one and `phase` is not 0.
        """
        count = len(self.groups)
        if phase is not None and 0 <= phase < count:
            return self.groups[phase], self.cut[phase] if self.cut else 0
        if phase is None and count == 1:
            return self.groups[0], 0
        if count == 1:
            raise ScanError(Reason.FOUR_D, f"there is one volume, but number {phase} was requested")
        sizes = sorted({len(group) for group in self.groups})
        slices = (
            counted(sizes[0], "slice") if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} slices"
        )
        names = " and ".join(self.told_by)
        detail = f"{count} volumes of {slices}, distinguished by {names}"
        raise ScanError(Reason.PHASES, f"{detail}, numbered from 0 to {count - 1}")


def split_volumes(slices: Sequence[Slice]) -> Volumes:
    """Split a series into its volumes.

    Slices that cannot be distinguished, or are damaged, stay one volume: `stack_slices` reports
    the reason.
    """
    if (
        not slices
        or not all_have_geometry(slices)
        or not all(map(_has_spacing, unique_by_shared(slices)))
    ):
        return Volumes((tuple(slices),))
    stacks = _group_by_geometry(slices)
    crossing = 0
    if len(stacks) > 1:
        kept = _without_localisers(stacks)
        crossing = sum(map(len, stacks)) - sum(map(len, kept))
        stacks = kept
    if len(stacks) > 1 and min(len(stack) for stack in stacks) < MIN_SLICES:
        return Volumes((tuple(slices),))
    split = [_split_stack(stack) for stack in stacks]
    names = ["direction, size or frame of reference"] if len(stacks) > 1 else []
    names += [name for volumes in split for name in volumes.told_by]
    groups = tuple(group for volumes in split for group in volumes.groups)
    cut = tuple(n for volumes in split for n in volumes.cut or (0,) * len(volumes.groups))
    return Volumes(groups, tuple(dict.fromkeys(names)), crossing, cut)


def _has_spacing(slice_: Slice) -> bool:
    spacing = slice_.spacing
    return spacing is not None and all(map(math.isfinite, spacing)) and min(spacing) > 0


# --- slices that cannot be in one stack ----------------------------------------------------------


def _group_by_geometry(slices: Sequence[Slice]) -> list[tuple[Slice, ...]]:
    """Group slices by size, frame of reference, direction and pixel spacing, the largest first."""
    groups: list[tuple[Slice, list[Slice]]] = []
    for slice_ in slices:
        if len(groups) > MAX_GEOMETRIES:
            return [tuple(slices)]
        for first, members in reversed(groups):
            if _has_same_geometry(slice_, first):
                members.append(slice_)
                break
        else:
            groups.append((slice_, [slice_]))
    stacks = [tuple(members) for _, members in groups]
    if len(stacks) == 1:
        return stacks
    return sorted(stacks, key=lambda stack: (-len(stack), min(map(_geometry_key, stack))))


def _geometry_key(slice_: Slice) -> tuple[tuple[float, ...], tuple[float, ...], tuple[int, int]]:
    return slice_.position or (), slice_.orientation or (), (slice_.rows, slice_.columns)


def _has_same_geometry(slice_: Slice, first: Slice) -> bool:
    if slice_.shared is first.shared and slice_.shared is not None:
        return True  # as nearly always
    frames = {s.header.frame_of_reference for s in (slice_, first)} - {""}
    if len(frames) > 1 or (slice_.rows, slice_.columns) != (first.rows, first.columns):
        return False
    if (slice_.orientation, slice_.spacing) == (first.orientation, first.spacing):
        return True
    cosines = np.subtract(slice_.orientation or (), first.orientation or ())
    spacing = np.divide(slice_.spacing or (), first.spacing or ()) - 1
    return bool(
        np.abs(cosines).max() <= MAX_COSINE_DIFFERENCE
        and np.abs(spacing).max() <= SPACING_TOLERANCE
    )


def _without_localisers(stacks: Sequence[tuple[Slice, ...]]) -> list[tuple[Slice, ...]]:
    """Return the stacks without the few slices that cross the largest one."""
    largest = stacks[0]
    normal = _normal(largest[0])
    return [
        largest,
        *(
            stack
            for stack in stacks[1:]
            if len(stack) > MAX_LOCALISERS
            or 4 * len(stack) > len(largest)
            or abs(float(_normal(stack[0]) @ normal)) > MAX_CROSSING_COSINE
        ),
    ]


def _normal(slice_: Slice) -> NDArray[np.float64]:
    row, column = np.array(slice_.orientation).reshape(2, 3)
    normal = np.cross(row, column)
    return np.asarray(normal / max(float(np.linalg.norm(normal)), 1e-9))


# --- slices that could be in one stack -----------------------------------------------------------


def _split_stack(slices: Sequence[Slice]) -> Volumes:
    """Split slices of one geometry."""
    try:
        row, column, _ = direction_cosines(slices)
    except ScanError:
        return Volumes((tuple(slices),))
    whole = SliceGroup(tuple(slices), locate_slices(slices, np.cross(row, column)))
    groups, names = _split_by_attributes(whole, _BY_PURPOSE)
    volumes: list[SliceGroup] = []
    for group in groups:
        subgroups, further_names = split_by_other_attributes(group)
        names += further_names
        volumes += subgroups
    cut = tuple(_count_cut(volume, volumes) for volume in volumes)
    slices_of_volumes = tuple(volume.slices for volume in volumes)
    return Volumes(slices_of_volumes, tuple(dict.fromkeys(names)), cut=cut)


def _count_cut(volume: SliceGroup, volumes: Sequence[SliceGroup]) -> int:
    """Return the number of slices at its ends that a volume lacks of another, nearly equal one."""
    ids, count = volume.ids, 0
    for reference in volumes:
        missing = reference.ids - ids
        if missing and ids < reference.ids and len(missing) <= MAX_CUT_SHARE * len(reference.ids):
            count = max(count, sum(not min(ids) < n < max(ids) for n in missing))
    return count


def _split_by_attributes(
    group: SliceGroup, attributes: Sequence[SliceAttribute]
) -> tuple[list[SliceGroup], tuple[str, ...]]:
    """Split by each attribute that distinguishes volumes.

    Parameters
    ----------
    group : SliceGroup
        Slices of one geometry.
    attributes : sequence of SliceAttribute
        Attributes to try, in this order.

    Returns
    -------
    list of SliceGroup, tuple of str
        The volumes, and the names of the attributes that distinguish them.
    """
    if not group.repeats:
        volumes, names = split_interleaved(group)
        return volumes or [group], names
    phases = group.phases
    varying = [a for a in attributes if len({phase.get(a.name) for phase in phases}) > 1]
    splits = {a: group.split_by(a, exact=True) for a in varying}
    for accept in (
        have_same_positions,
        are_interleaved_stacks,
        are_incomplete_volumes,
        have_nearly_same_positions,
    ):
        for attribute, subgroups in splits.items():
            if len(subgroups) < 2 or not accept(group, subgroups):
                continue
            further = attributes
            if accept is have_same_positions:
                further = attributes[attributes.index(attribute) + 1 :]
            volumes, used_names = [], [attribute.name]
            for subgroup in subgroups.values():
                finer, finer_names = _split_by_attributes(subgroup, further)
                volumes += finer
                used_names += finer_names
            return volumes, tuple(dict.fromkeys(used_names))
    return [group], ()
