"""Volumes that share one series: phases, time points, echoes, stacks, told apart or refused.

Their order, from which `phase=` counts, is that of the first attribute in `TELLING` that tells
them apart, ascending; within equal ones that of the next. Stacks that differ in direction, size,
pixel spacing or frame of reference come in the order of their number of slices, the largest first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import methodcaller

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.dicom.meaning import mean_the_same
from scanloom.io.dicom.parts import (
    Part,
    nearly_same_places,
    same_places,
    short_stacks,
    whole_stacks,
)
from scanloom.io.dicom.places import places_of
from scanloom.io.dicom.slices import Slice, one_of_each
from scanloom.io.dicom.stack import (
    MIN_SLICES,
    SAME_SPACING,
    all_placed,
    directions,
)
from scanloom.io.dicom.telling import interlocked, split_by_the_rest

TELLING = (
    "StackID",
    "TemporalPositionIdentifier",
    "TemporalPositionTimeOffset",
    "EchoNumbers",
    "EchoTime",
    "DiffusionBValue",
    "DiffusionGradientOrientation",
    "AcquisitionNumber",
    "ImageType",
    "EnergyWindowVector",
    "DetectorVector",
    "PhaseVector",
    "RRIntervalVector",
    "TimeSlotVector",
    "TimeSliceVector",
    "DimensionIndexValues",
)
"""Attributes whose purpose it is to tell volumes of a series apart."""
FEW_SLICES = 5
"""As many localisers may cross a stack, if it has four times as many slices."""
MOST_KINDS = 64
"""Directions, sizes, spacings and frames of reference in one series; more make no volumes."""
CUT_SHARE = 0.25
"""Share of the slices of another volume that one may lack for a file that was lost; of more, it was
scanned so."""
NEARLY_PARALLEL = 0.01
"""Largest difference of a direction cosine within a stack. Slices that differ by less, and do not
agree, are refused: they are no volumes of their own."""
CROSSING = 0.5
"""Cosine of the angle between the normals of a stack and of what crosses it, at most."""


@dataclass(frozen=True, eq=False)
class Volumes:
    """The volumes of a series.

    Parameters
    ----------
    groups : tuple of tuples of Slice
        One for each volume, in the order that `phase=` counts.
    told_by : tuple of str
        What tells them apart, in words of ours.
    crossing : int
        How many slices were set aside since they cross the others, as localisers do.
    cut : tuple of int
        How many slices each volume lacks at its ends that another one has; empty for none.
    """

    groups: tuple[tuple[Slice, ...], ...]
    told_by: tuple[str, ...] = ()
    crossing: int = 0
    cut: tuple[int, ...] = ()

    def choose(self, phase: int | None) -> tuple[tuple[Slice, ...], int]:
        """Return the slices of the volume that is meant, and how many it lacks at its ends.

        Raises
        ------
        ScanError
            PHASES where there are several and none was chosen, or not that one.
        """
        count = len(self.groups)
        if phase is not None and 0 <= phase < count:
            return self.groups[phase], self.cut[phase] if self.cut else 0
        if phase is None and count == 1:
            return self.groups[0], 0
        if count == 1:
            raise ScanError(Reason.FOUR_D, f"there is one volume, number {phase} was asked for")
        sizes = sorted({len(group) for group in self.groups})
        slices = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        detail = f"{count} volumes of {slices} slices, told apart by {' and '.join(self.told_by)}"
        raise ScanError(Reason.PHASES, f"{detail}: type --phase 0 to --phase {count - 1}")


def split_volumes(slices: Sequence[Slice]) -> Volumes:
    """Tell the volumes of a series apart.

    What can't be told apart, or what is damaged, stays one volume: `stack_slices` refuses it by
    its code.
    """
    if not slices or not all_placed(slices) or not all(map(_is_spaced, one_of_each(slices))):
        return Volumes((tuple(slices),))
    parts = _unlike(slices)
    crossing = 0
    if len(parts) > 1:
        kept = _without_localisers(parts)
        crossing = sum(map(len, parts)) - sum(map(len, kept))
        parts = kept
    if len(parts) > 1 and min(len(part) for part in parts) < MIN_SLICES:
        return Volumes((tuple(slices),))
    found = [_alike_volumes(part) for part in parts]
    told = ["direction, size or frame of reference"] if len(parts) > 1 else []
    told += [name for one in found for name in one.told_by]
    groups = tuple(group for one in found for group in one.groups)
    cut = tuple(count for one in found for count in one.cut or (0,) * len(one.groups))
    return Volumes(groups, tuple(dict.fromkeys(told)), crossing, cut)


def _is_spaced(one: Slice) -> bool:
    spacing = one.spacing
    return spacing is not None and all(map(math.isfinite, spacing)) and min(spacing) > 0


# --- slices that can't be in one stack -----------------------------------------------------------


def _unlike(slices: Sequence[Slice]) -> list[tuple[Slice, ...]]:
    """Group slices by size, frame of reference, direction and pixel spacing, the largest first."""
    kinds: list[tuple[Slice, list[Slice]]] = []
    for one in slices:
        if len(kinds) > MOST_KINDS:
            return [tuple(slices)]
        for first, members in reversed(kinds):
            if _fits(one, first):
                members.append(one)
                break
        else:
            kinds.append((one, [one]))
    parts = [tuple(members) for _, members in kinds]
    if len(parts) == 1:
        return parts
    return sorted(parts, key=lambda part: (-len(part), min(_corner(one) for one in part)))


def _corner(one: Slice) -> tuple[tuple[float, ...], tuple[float, ...], tuple[int, int]]:
    return one.position or (), one.orientation or (), (one.rows, one.columns)


def _fits(one: Slice, other: Slice) -> bool:
    if one.shared is other.shared and one.shared is not None:
        return True  # as nearly always
    sizes, theirs = ((s.rows, s.columns) for s in (one, other))
    frames = {s.header.frame_of_reference for s in (one, other)} - {""}
    if len(frames) > 1:
        return False
    if sizes == theirs and (one.orientation, one.spacing) == (other.orientation, other.spacing):
        return True
    turn = np.subtract(one.orientation or (), other.orientation or ())
    spacing = np.divide(one.spacing or (), other.spacing or ()) - 1
    return bool(
        sizes == theirs
        and np.abs(turn).max() <= NEARLY_PARALLEL
        and np.abs(spacing).max() <= SAME_SPACING
    )


def _without_localisers(parts: Sequence[tuple[Slice, ...]]) -> list[tuple[Slice, ...]]:
    """Return the parts but for the few slices that cross the largest one."""
    main = parts[0]
    normal = _normal(main[0])
    return [
        main,
        *(
            part
            for part in parts[1:]
            if len(part) > FEW_SLICES
            or 4 * len(part) > len(main)
            or abs(float(_normal(part[0]) @ normal)) > CROSSING
        ),
    ]


def _normal(one: Slice) -> NDArray[np.float64]:
    row, column = np.array(one.orientation).reshape(2, 3)
    normal = np.cross(row, column)
    return np.asarray(normal / max(float(np.linalg.norm(normal)), 1e-9))


# --- slices that could be in one stack -----------------------------------------------------------


def _alike_volumes(slices: Sequence[Slice]) -> Volumes:
    try:
        row, column, _ = directions(slices)
    except ScanError:
        return Volumes((tuple(slices),))
    whole = Part(tuple(slices), places_of(slices, np.cross(row, column)))
    parts, told = _refine(whole, TELLING)
    volumes: list[Part] = []
    for part in parts:
        finer, by = split_by_the_rest(part)
        told += by
        volumes += finer
    cut = tuple(_cut_off(one, volumes) for one in volumes)
    groups = tuple(one.slices for one in volumes)
    return Volumes(groups, tuple(dict.fromkeys(told)), cut=cut)


def _cut_off(one: Part, volumes: Sequence[Part]) -> int:
    """Return how many slices a volume lacks at its ends, if it is another one but for a few."""
    lost = 0
    for other in volumes:
        missing = other.ids - one.ids
        if missing and one.ids < other.ids and len(missing) <= CUT_SHARE * len(other.ids):
            lost = max(lost, sum(not min(one.ids) < place < max(one.ids) for place in missing))
    return lost


def _refine(part: Part, names: Sequence[str]) -> tuple[list[Part], tuple[str, ...]]:
    """Split by each attribute that tells volumes apart; return them and the attributes."""
    phases = part.phases
    unlike = [name for name in names if len({phase.get(name) for phase in phases}) > 1]
    if not part.repeats:
        unlike = [name for name in unlike if not mean_the_same(name, part.slices)]
    telling = {name: part.split(methodcaller("said", name)) for name in unlike}
    for accept in (same_places, whole_stacks, short_stacks, nearly_same_places):
        for name, found in telling.items():
            if not accept(part, found):
                continue
            n = names.index(name)
            parts, told = [], [name]
            for one in found.values():
                finer, by = _refine(one, names[n + 1 :] if accept is same_places else names)
                parts += finer
                told += by
            return parts, tuple(dict.fromkeys(told))
    parts, told_by = interlocked(part)
    return parts or [part], told_by
