"""Volumes that share one series: phases, time points, echoes, stacks, told apart or refused.

Their order, from which `phase=` counts, is that of the first attribute in `TELLING` that tells
them apart, ascending; within equal ones that of the next. Stacks that differ in direction, size,
pixel spacing or frame of reference come in the order of their number of slices, the largest first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.dicom.parts import Part, same_places, whole_stacks
from scanloom.io.dicom.places import places_of
from scanloom.io.dicom.slices import Slice, one_of_each
from scanloom.io.dicom.stack import (
    MIN_SLICES,
    SAME_COSINE,
    SAME_SPACING,
    all_placed,
    directions,
)
from scanloom.io.dicom.telling import Split, interlocked, split_by_the_rest

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
CONTRAST = ("EchoTime", "DiffusionBValue", "ImageType")
"""Those of them that never change within a volume: what a voxel shows is another thing then."""
CONTRAST_SHARE = 0.1
"""Share of the largest by which numbers of `CONTRAST` may differ in a volume."""
COMPONENTS = frozenset(
    (
        *("M", "P", "R", "I", "MAGNITUDE", "PHASE", "PHASE MAP", "REAL", "IMAGINARY"),
        *("W", "F", "IP", "OP", "WATER", "FAT", "IN_PHASE", "OUT_PHASE", "OPP_PHASE"),
        *("ADC", "FA", "TRACEW"),
    )
)
"""Words of ImageType that slices of a volume share: part of a complex image, water or fat, map."""
MEANING = {"Modality": 0x00080060, "Units": 0x00541001, "CorrectedImage": 0x00280051}
"""What says of which kind values are: of a PET scan its units, and what it was corrected for."""
FEW_SLICES = 5
"""As many localisers may cross a stack, if it has four times as many slices."""
MOST_KINDS = 64
"""Directions, sizes, spacings and frames of reference in one series; more make no volumes."""
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
    """

    groups: tuple[tuple[Slice, ...], ...]
    told_by: tuple[str, ...] = ()
    crossing: int = 0

    def choose(self, phase: int | None) -> tuple[Slice, ...]:
        """Return the slices of the volume that is meant.

        Raises
        ------
        ScanError
            PHASES where there are several and none was chosen, or not that one.
        """
        count = len(self.groups)
        if phase is not None and 0 <= phase < count:
            return self.groups[phase]
        if phase is None and count == 1:
            return self.groups[0]
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
    return Volumes(groups, tuple(dict.fromkeys(told)), crossing)


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
    sizes, theirs = ((s.rows, s.columns, s.header.frame_of_reference) for s in (one, other))
    if sizes == theirs and (one.orientation, one.spacing) == (other.orientation, other.spacing):
        return True
    turn = np.subtract(one.orientation or (), other.orientation or ())
    spacing = np.divide(one.spacing or (), other.spacing or ()) - 1
    return bool(
        sizes == theirs
        and np.abs(turn).max() <= SAME_COSINE
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
    groups: list[tuple[Slice, ...]] = []
    for part in parts:
        finer, by = split_by_the_rest(part)
        told += by
        groups += [one.slices for one in finer]
    return Volumes(tuple(groups), tuple(dict.fromkeys(told)))


def _refine(part: Part, names: Sequence[str]) -> tuple[list[Part], tuple[str, ...]]:
    """Split by each attribute that tells volumes apart; return them and the attributes."""
    phases = part.phases
    differing = [name for name in names if len({phase.get(name) for phase in phases}) > 1]
    telling = {name: part.split(methodcaller("said", name)) for name in differing}
    for accept in (same_places, whole_stacks, _short_stacks):
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
    if not parts:
        parts, told_by = _by_contrast(part, telling)
    return parts or [part], told_by


def _by_contrast(part: Part, telling: Mapping[str, dict[str, Part]]) -> Split:
    """Split slices, each at a place of its own, of which the values mean different things.

    They are what is left of several volumes, and would look like one.
    """
    if part.repeats:
        return [], ()
    some = one_of_each(part.slices)
    for name, tag in MEANING.items():
        if len({_text_of(one, tag) for one in some}) > 1:
            found = part.split(partial(_text_of, tag=tag))
            if "" not in found and min(len(one.slices) for one in found.values()) >= MIN_SLICES:
                return list(found.values()), (name,)  # of fewer, their files may be wrong
    for name in CONTRAST:
        found = telling.get(name, {})
        if len(found) > 1 and "" not in found and _mean_others(name, list(found)):
            return list(found.values()), (name,)
    return [], ()


def _text_of(one: Slice, tag: int) -> str:
    return one.header.elements.text(tag)


def _mean_others(name: str, values: Sequence[str]) -> bool:
    """Whether values of an attribute of `CONTRAST` differ by more than a scanner's rounding."""
    if name == "ImageType":
        return len({COMPONENTS.intersection(value.split("\\")) for value in values}) > 1
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return False
    return max(numbers) - min(numbers) > CONTRAST_SHARE * max(map(abs, numbers))


def _short_stacks(whole: Part, parts: dict[str, Part]) -> bool:
    """Whether the parts are volumes of which slices are missing: as many as lie at one place."""
    whole_parts = "" not in parts and not any(part.repeats for part in parts.values())
    return whole.repeats and whole_parts and len(parts) == whole.most
