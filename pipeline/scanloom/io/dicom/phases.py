"""Volumes that share one series: phases, time points, echoes, stacks, told apart or refused.

Their order, from which `phase=` counts, is that of the first attribute in `TELLING` that tells
them apart, ascending; within equal ones that of the next. Stacks that differ in direction, size or
frame of reference come in the order of their number of slices, the largest first.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.dicom.headers import MADE_BY
from scanloom.io.dicom.places import Places, places_of, steps_off
from scanloom.io.dicom.slices import Slice, as_text, keyword, one_of_each
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
TIMES = ("TriggerTime", "AcquisitionTime", "ContentTime", "InstanceNumber")
"""Attributes that differ between slices of one volume too: they count only where places repeat."""
_DATES = {"AcquisitionTime": (0x00080022, 0x0008002A), "ContentTime": (0x00080023,)}
"""The days of times: of those that pass midnight too."""
_CHANGING = re.compile(
    "private|Time|Date|Number|Index|Position|Comments|Label|UID|Duration|Identifier"
)
"""Names of what differs between slices of one volume too, that were made in several passes."""
_HALF_A_DAY = 12 * 3600.0
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
    def even(self) -> bool:
        """Whether each of its places has equally many slices."""
        counts = np.bincount(self.places.ids)
        return len(set(counts[counts > 0].tolist())) == 1

    @property
    def most(self) -> int:
        """How many slices lie at one place, at most."""
        return int(np.bincount(self.places.ids).max())

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


def _rank(value: str) -> tuple[bool, tuple[float, ...], str]:
    """Order values as numbers where they are numbers, else as text; what is missing first."""
    try:
        return False, tuple(map(float, value.split("\\"))), ""
    except ValueError:
        return bool(value), (), value


def _alike_volumes(slices: Sequence[Slice]) -> Volumes:
    try:
        row, column, _ = directions(slices)
    except ScanError:
        return Volumes((tuple(slices),))
    whole = _Part(tuple(slices), places_of(slices, np.cross(row, column)))
    parts, told = _refine(whole, TELLING)
    groups: list[tuple[Slice, ...]] = []
    for part in parts:
        finer, by = _by_the_rest(part)
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
    parts, told_by = _interlocked(part)
    return parts or [part], told_by


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
    whole_parts = "" not in parts and not any(part.repeats for part in parts.values())
    return whole.repeats and whole_parts and len(parts) == whole.most


def _by_the_rest(part: _Part) -> tuple[list[_Part], tuple[str, ...]]:
    """Split slices of which each place has equally many, by what the other attributes say."""
    if not part.repeats or not part.even or len(part.ids) < MIN_SLICES:
        return [part], ()
    for way in (_by_making, _by_times, _by_passes, _by_anything, _by_turns):
        parts, told = way(part)
        if parts:
            finer = [_by_the_rest(one) for one in parts]
            told = (*told, *(by for _, more in finer for by in more))
            return [one for some, _ in finer for one in some], tuple(dict.fromkeys(told))
    return [part], ()


_Split = tuple[list[_Part], tuple[str, ...]]
_NONE: _Split = ([], ())


def _by_making(part: _Part) -> _Split:
    """Split by how slices were made; without it times would be asked, which may be in any order."""
    if len(one_of_each(part.slices)) < 2:
        return _NONE
    for name, tags in MADE_BY.items():
        found = part.split(lambda one, tags=tags: _made_by(one, tags))  # type: ignore[misc]
        if len(found) > 1 and _same_places(part, found):
            return list(found.values()), (name,)
    return _NONE


def _interlocked(part: _Part) -> _Split:
    """Split stacks that lie one within the other, no slice at the place of another's."""
    if part.repeats or len(one_of_each(part.slices)) < 2:
        return _NONE
    for name, tags in MADE_BY.items():
        found = part.split(lambda one, tags=tags: _made_by(one, tags))  # type: ignore[misc]
        if len(found) > 1 and _whole_stacks(part, found):
            return list(found.values()), (name,)
    return _NONE if part.slices[0].group is None else _interlocked_frames(part)


def _interlocked_frames(part: _Part) -> _Split:
    """Do the same by all that functional groups say, but for what changes in a volume too."""
    little = part.slices[0].header.elements.little
    for at, values in _columns(part).items():
        name = keyword(at[-1])
        if not 1 < len(set(values)) <= len(values) // MIN_SLICES or _CHANGING.search(name):
            continue
        texts = {
            one: as_text(value, little=little)
            for one, value in zip(part.slices, values, strict=True)
        }
        found = part.split(texts.__getitem__)
        if _whole_stacks(part, found):
            return list(found.values()), (name,)
    return _NONE


def _made_by(one: Slice, tags: Sequence[int]) -> str:
    little = one.header.elements.little
    for tag in tags:
        raw = one.header.elements.raw(tag)
        if one.group is not None:
            raw = next((v for at, v in one.attributes.items() if at[-1] == tag and v), raw)
        if raw:
            return as_text(raw, little=little)
    return ""


def _by_times(part: _Part) -> _Split:
    """Split by a time that all slices of a volume have."""
    for name in TIMES:
        found = part.split(lambda one, name=name: one.phase.get(name, ""))  # type: ignore[misc]
        if len(found) == part.most and _same_places(part, found):
            return list(found.values()), (name,)
    return _NONE


def _by_passes(part: _Part) -> _Split:
    """Split by a time or number that is later in all of one volume than in all of another."""
    for name in TIMES:
        order = _Order.of(part, name)
        if order is not None and order.in_passes:
            return order.parts(), (name,)
    return _NONE


def _by_anything(part: _Part) -> _Split:
    """Split by all attributes of which each value has every place equally often.

    None of them may contradict another: then nothing is known.
    """
    little = part.slices[0].header.elements.little
    telling = {}
    for at, values in _columns(part).items():
        if 1 < len(set(values)) <= part.most and _are_volumes(part, _members(values)):
            telling[at] = [as_text(value, little=little) for value in values]
    names, keys, groups = [], [()] * len(part.slices), 1
    for at, texts in telling.items():
        finer = [(*key, *_rank(text)) for key, text in zip(keys, texts, strict=True)]
        if len(set(finer)) > groups:
            names.append(keyword(at[-1]))
            keys, groups = finer, len(set(finer))  # type: ignore[assignment]
    members = _members(keys)
    if groups < 2 or not _are_volumes(part, members):
        return _NONE
    return [part.pick(members[key]) for key in sorted(members)], tuple(dict.fromkeys(names))


def _columns(part: _Part) -> dict[tuple[int, ...], list[bytes]]:
    """Return the values of each attribute that any slice has."""
    places = sorted({at for one in part.slices for at in one.attributes})
    return {at: [one.attributes.get(at, b"") for one in part.slices] for at in places}


def _members(keys: Sequence[Hashable]) -> dict[Any, list[int]]:
    members: dict[Any, list[int]] = defaultdict(list)
    for n, key in enumerate(keys):
        members[key].append(n)
    return members


def _are_volumes(part: _Part, members: Mapping[Any, Sequence[int]]) -> bool:
    """Whether each of the groups has every place equally often."""
    found = [part.pick(some) for some in members.values()]
    return all(one.even and one.ids == part.ids for one in found)


def _by_turns(part: _Part) -> _Split:
    """Split by what comes first, second, third at each place, if nothing says otherwise."""
    orders = {name: order for name in TIMES if (order := _Order.of(part, name)) is not None}
    if len({order.ranks for order in orders.values()}) != 1:
        return _NONE
    name, order = next(iter(orders.items()))
    return order.parts(), (name,)


@dataclass(frozen=True, eq=False)
class _Order:
    """Which slice of its place each is, by a time or number; and that itself, to be compared."""

    part: _Part
    ranks: tuple[int, ...]
    when: tuple[Any, ...]

    @classmethod
    def of(cls, part: _Part, name: str) -> _Order | None:
        """Return the order; None where the attribute does not tell."""
        when = _when(part.slices, name)
        if when is None:
            return None
        ranks = [0] * len(when)
        for members in _members([int(n) for n in part.places.ids]).values():
            if len({when[n] for n in members}) < len(members):
                return None
            for rank, n in enumerate(sorted(members, key=lambda n: when[n])):
                ranks[n] = rank
        return cls(part, tuple(ranks), tuple(when))

    @property
    def in_passes(self) -> bool:
        """Whether all firsts come before all seconds, and so on."""
        members = _members(self.ranks)
        times = [[self.when[n] for n in members[rank]] for rank in sorted(members)]
        return all(max(one) < min(other) for one, other in itertools.pairwise(times))

    def parts(self) -> list[_Part]:
        """Return the slices by their turns."""
        members = _members(self.ranks)
        return [self.part.pick(members[rank]) for rank in sorted(members)]


def _when(slices: Sequence[Slice], name: str) -> list[Any] | None:
    """Return what can be compared; None where it lacks, or where days are not known."""
    values = [one.phase.get(name, "") for one in slices]
    if not all(values):
        return None
    dates = [_date(one, name) for one in slices]
    times = [_rank(value) for value in values]
    clock = [_seconds(value) for value in values] if name in _DATES else []
    if len(set(dates)) == 1 and clock and max(clock) - min(clock) > _HALF_A_DAY:
        return None  # it passed midnight, or seems so
    return list(zip(dates, times, strict=True))


def _date(one: Slice, name: str) -> str:
    if one.multiframe:
        return ""  # FrameAcquisitionDateTime has it
    texts = (one.header.elements.text(tag)[:8] for tag in _DATES.get(name, ()))
    return next((text for text in texts if text), "")


def _seconds(value: str) -> float:
    """Return the seconds of a day that a time is, 0 for what is none."""
    text = value[8:] if len(value.split(".")[0]) > 8 else value
    if not text[:6].isdigit():
        return 0.0
    return int(text[:2]) * 3600.0 + int(text[2:4] or 0) * 60 + int(text[4:6] or 0)
