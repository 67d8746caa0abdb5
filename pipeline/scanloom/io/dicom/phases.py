"""Volumes that share one series: phases, time points, echoes, stacks, told apart or refused.

Their order, from which `phase=` counts, is that of the first attribute in `TELLING` that tells
them apart, ascending; within equal ones that of the next. Stacks that differ in direction, size or
frame of reference come in the order of their number of slices, the largest first.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.dicom.places import Places, places_of, steps_off
from scanloom.io.dicom.slices import Slice, plain_text
from scanloom.io.dicom.stack import (
    MIN_SLICES,
    SAME_COSINE,
    SAME_SPACING,
    directions,
    is_placed,
)

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
MADE_BY = {
    "KVP": (0x00180060,),
    "ConvolutionKernel": (0x00181210,),
    "SliceThickness": (0x00180050,),
    "InversionTime": (0x00180082,),
    "FlipAngle": (0x00181314,),
    "the makers' b-values": (0x0019100C, 0x00431039, 0x20011003),
    "SeriesNumber": (0x00200011,),
}
"""Attributes that slices of one volume share, of single-frame files: they count only where each
value has every place. Without them times and numbers would be asked, which may be in any order."""
TIMES = ("TriggerTime", "AcquisitionTime", "ContentTime", "InstanceNumber")
"""Attributes that differ between slices of one volume too: they count only where places repeat."""
_PHILIPS_B = 0x20011003
FEW_SLICES = 5
"""As many localisers may cross a stack, if it has four times as many slices."""
MOST_KINDS = 64
"""Directions, sizes and frames of reference in one series; more of them make no volumes."""
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
    if not slices or not all(is_placed(one) and _is_spaced(one) for one in slices):
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


@dataclass(frozen=True, eq=False)
class _Part:
    """Parallel slices of one size, with their places."""

    slices: tuple[Slice, ...]
    places: Places

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(map(int, self.places.ids))

    @property
    def repeats(self) -> bool:
        return len(self.slices) > len(self.ids)

    @property
    def regular(self) -> bool:
        """Whether the places of this part, of all that `places` has, are equally spaced."""
        depth = self.places.depth[sorted(self.ids)]
        off, allowed = steps_off(depth)
        return off <= allowed

    @property
    def reach(self) -> tuple[float, float]:
        depth = self.places.depth[list(self.ids)]
        return float(depth.min()), float(depth.max())

    def split(self, key: Callable[[Slice], str]) -> dict[str, _Part]:
        """Return the parts with one value each, in the order of values."""
        members: dict[str, list[int]] = defaultdict(list)
        for n, one in enumerate(self.slices):
            members[key(one)].append(n)
        ordered = sorted(members.items(), key=lambda item: _rank(item[0]))
        return {value: self.pick(indices) for value, indices in ordered}

    def pick(self, indices: Sequence[int]) -> _Part:
        ids = self.places.ids[list(indices)]
        places = Places(ids, self.places.positions, self.places.depth)
        return _Part(tuple(self.slices[n] for n in indices), places)


def _rank(value: str) -> tuple[bool, list[float], str]:
    """Order values as numbers where they are numbers, else as text; what is missing first."""
    try:
        return False, [float(part) for part in value.split("\\")], ""
    except ValueError:
        return bool(value), [], value


def _alike_volumes(slices: Sequence[Slice]) -> Volumes:
    try:
        row, column, _ = directions(slices)
    except ScanError:
        return Volumes((tuple(slices),))
    whole = _Part(tuple(slices), places_of(slices, np.cross(row, column)))
    parts, told = _refine(whole, TELLING)
    groups: list[tuple[Slice, ...]] = []
    for part in parts:
        finer, by = _by_time(part)
        told += by
        groups += [one.slices for one in finer]
    return Volumes(tuple(groups), tuple(dict.fromkeys(told)))


def _told_by(part: _Part, name: str) -> dict[str, _Part]:
    """Return the parts with one value of an attribute each; none where all have the same."""
    if len({one.phase.get(name, "") for one in part.slices}) < 2:
        return {}
    return part.split(lambda one: one.phase.get(name, ""))


def _refine(part: _Part, names: Sequence[str]) -> tuple[list[_Part], tuple[str, ...]]:
    """Split by each attribute that tells volumes apart; return them and the attributes."""
    telling = {name: found for name in names if (found := _told_by(part, name))}
    for accept in (_same_places, _whole_stacks, _short_stacks):
        for name, found in telling.items():
            if not accept(part, found):
                continue
            n = names.index(name)
            parts, told = [], [name]
            for one in found.values():
                finer, by = _refine(one, names[n + 1 :] if accept is _same_places else names)
                parts += finer
                told += by
            return parts, tuple(dict.fromkeys(told))
    return [part], ()


def _same_places(whole: _Part, parts: dict[str, _Part]) -> bool:
    """Whether each part has every place, so that it may be a volume, or several."""
    return len(whole.ids) >= MIN_SLICES and all(p.ids == whole.ids for p in parts.values())


def _whole_stacks(whole: _Part, parts: dict[str, _Part]) -> bool:
    """Whether the parts are volumes though their places differ.

    None of them repeats a place or lacks the attribute. Either the places repeat between them, or
    they are regular stacks one within the other; one beside the other they are one scan, made step
    by step.
    """
    if "" in parts or any(part.repeats for part in parts.values()):
        return False
    if whole.repeats:
        return min(len(part.ids) for part in parts.values()) >= MIN_SLICES
    if min(len(part.ids) for part in parts.values()) < MIN_SLICES:
        return False
    if not all(part.regular for part in parts.values()):
        return False
    reaches = sorted(part.reach for part in parts.values())
    return all(low < end for (_, end), (low, _) in itertools.pairwise(reaches))


def _short_stacks(whole: _Part, parts: dict[str, _Part]) -> bool:
    """Whether the parts are volumes of which slices are missing: as many as lie at one place."""
    most = int(np.bincount(whole.places.ids).max())
    whole_parts = "" not in parts and not any(part.repeats for part in parts.values())
    return whole.repeats and whole_parts and len(parts) == most


def _by_time(part: _Part) -> tuple[list[_Part], tuple[str, ...]]:
    """Split slices of which each place has equally many: by how they were made, or else when."""
    counts = np.bincount(part.places.ids, minlength=len(part.places.depth))
    counts = counts[counts > 0]
    if not part.repeats or len(set(counts.tolist())) > 1 or len(counts) < MIN_SLICES:
        return [part], ()
    for name, tags in MADE_BY.items():
        found = part.split(lambda one, tags=tags: _made_by(one, tags))  # type: ignore[misc]
        if len(found) > 1 and _same_places(part, found):
            finer = [_by_time(one) for one in found.values()]
            told = (name, *(by for _, more in finer for by in more))
            return [one for some, _ in finer for one in some], tuple(dict.fromkeys(told))
    for name in TIMES:
        found = part.split(lambda one, name=name: one.phase.get(name, ""))  # type: ignore[misc]
        if len(found) == counts[0] and _same_places(part, found):
            return list(found.values()), (name,)
    for name in TIMES:
        found_ranks = _ranks(part, name)
        if found_ranks is not None:
            ranks = np.array(found_ranks)
            picked = [np.flatnonzero(ranks == rank) for rank in range(int(counts[0]))]
            return [part.pick(one.tolist()) for one in picked], (name,)
    return [part], ()


def _made_by(one: Slice, tags: Sequence[int]) -> str:
    """Return a value as text, also of FL that nobody names so: Philips' b-value."""
    for tag in tags:
        raw = one.header.elements.raw(tag)
        if tag == _PHILIPS_B and len(raw) == 4:
            order = "<" if one.header.elements.little else ">"
            return f"{struct.unpack(f'{order}f', raw)[0]:g}"
        if raw:
            return plain_text(raw)
    return ""


def _ranks(part: _Part, name: str) -> list[int] | None:
    """Return which slice of its place each is, None where the attribute does not tell."""
    at: dict[int, list[int]] = defaultdict(list)
    for n, place in enumerate(map(int, part.places.ids)):
        at[place].append(n)
    ranks = [0] * len(part.slices)
    for members in at.values():
        values = {n: (part.slices[n].phase.get(name, ""), part.slices[n].frame) for n in members}
        if len(set(values.values())) < len(members) or not all(v for v, _ in values.values()):
            return None
        for rank, n in enumerate(
            sorted(members, key=lambda n: (_rank(values[n][0]), values[n][1]))
        ):
            ranks[n] = rank
    return ranks
