"""What tells volumes apart where the attributes that are meant for it don't."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np

from scanloom.io.dicom import tags
from scanloom.io.dicom.headers import MADE_BY
from scanloom.io.dicom.meaning import MEANING, mean_the_same
from scanloom.io.dicom.parts import (
    Part,
    members_of,
    rank,
    same_places,
    short_stacks,
    whole_stacks,
)
from scanloom.io.dicom.slices import Slice, as_text, keyword, one_of_each
from scanloom.io.dicom.stack import MIN_SLICES

_TRIGGER = "TriggerTime"
TIMES = (_TRIGGER, "AcquisitionTime", "ContentTime", "InstanceNumber")
"""Attributes that differ between slices of one volume too: they count only where places repeat."""
_DATES = {
    "AcquisitionTime": (tags.ACQUISITION_DATE, tags.ACQUISITION_DATE_TIME),
    "ContentTime": (tags.CONTENT_DATE,),
}
"""The days of times: of those that pass midnight too."""
_CHANGING = re.compile(
    "private|Time|Date|Number|Index|Position|Comments|Label|UID|Duration|Identifier"
)
"""Names of what differs between slices of one volume too, that were made in several passes."""
_NOISE = 1e-4
"""Share of the largest number by which those of a volume may differ."""
_HALF_A_DAY = 12 * 3600.0

Split = tuple[list[Part], tuple[str, ...]]
"""Parts, and what tells them apart; none where nothing does."""
_NONE: Split = ([], ())


def split_by_the_rest(part: Part) -> Split:
    """Split slices of which places have several, by what the other attributes say.

    Where places have unequally many, slices are missing: only what is there in all of a volume
    tells then. One part where nothing tells, or what tells contradicts itself.
    """
    if not part.repeats or len(part.ids) < MIN_SLICES:
        return [part], ()
    for way in _EVEN_WAYS if part.even else _UNEVEN_WAYS:
        parts, told = way(part)
        if len(parts) == 1:
            break
        if parts:
            finer = [split_by_the_rest(one) for one in parts]
            told = (*told, *(by for _, more in finer for by in more))
            return [one for some, _ in finer for one in some], tuple(dict.fromkeys(told))
    return [part], ()


def _by_making(part: Part) -> Split:
    """Split by how slices were made; without it times would be asked, which may be in any order."""
    return _made_apart(part, same_places)


def interlocked(part: Part) -> Split:
    """Split stacks that lie one within the other, no slice at the place of another's."""
    if part.repeats:
        return _NONE
    found = _made_apart(part, whole_stacks)
    if found[0] or part.slices[0].group is None:
        return found
    return _interlocked_frames(part)


def _made_apart(part: Part, accept: Callable[[Part, dict[str, Part]], bool]) -> Split:
    if len(one_of_each(part.slices)) < 2:
        return _NONE
    for name, candidates in MADE_BY.items():
        found = part.split(partial(_made_by, candidates=candidates))
        if len(found) < 2 or not accept(part, found):
            continue
        if part.repeats or not mean_the_same(name, part.slices):
            return list(found.values()), (name,)
    return _NONE


def _interlocked_frames(part: Part) -> Split:
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
        if whole_stacks(part, found) and not _is_noise(list(found)):
            return list(found.values()), (name,)
    return _NONE


def _is_noise(values: Sequence[str]) -> bool:
    """Whether values are numbers that differ in late digits alone."""
    numbers = [numbers for _, numbers, _ in map(rank, values)]
    if not all(numbers) or len(set(map(len, numbers))) != 1:
        return False
    table = np.array(numbers)
    return bool(np.ptp(table, axis=0).max() <= _NOISE * np.abs(table).max())


def _made_by(one: Slice, candidates: Sequence[int]) -> str:
    little = one.header.elements.little
    for tag in candidates:
        raw = one.header.elements.raw(tag)
        if one.group is not None:
            raw = next((v for at, v in one.attributes.items() if at[-1] == tag and v), raw)
        if raw:
            return as_text(raw, little=little)
    return ""


def _by_times(part: Part) -> Split:
    """Split by a time or number that all slices of a volume have, or that is later in all of one.

    The part itself where they contradict each other. A time that slices share is one word for
    many: there, what comes first and second by number must not contradict it either.
    """
    shared = [split for name in TIMES if (split := _by_one_time(part, name))[0]]
    passes = [split for name in TIMES if (split := _by_passes(part, name))[0]]
    volumes = {_members(parts) for parts, _ in (*shared, *passes)}
    numbers = _Order.of(part, TIMES[-1]) if shared else None
    if numbers is not None:
        volumes.add(_members(numbers.parts()))
    if len(volumes) > 1:
        return [part], ()
    return next(iter((*shared, *passes)), _NONE)


def _members(parts: Sequence[Part]) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(map(id, part.slices)) for part in parts)


def _by_one_time(part: Part, name: str) -> Split:
    found = part.split(methodcaller("said", name))
    if len(found) == part.most and same_places(part, found):
        return list(found.values()), (name,)
    return _NONE


def _by_passes(part: Part, name: str) -> Split:
    order = _Order.of(part, name)
    return (order.parts(), (name,)) if order is not None and order.in_passes else _NONE


def _short_by_meaning(part: Part) -> Split:
    """Split volumes that lack slices by what their values mean."""
    for attribute in MEANING:
        kinds = attribute.kinds_of(part.slices)
        if len(set(kinds.values())) > 1:
            found = part.split(lambda one, a=attribute, k=kinds: k[a.of(one)])  # type: ignore[misc]
            if _lack_few(part, found):
                return list(found.values()), (attribute.name,)
    return _NONE


def _short_by_times(part: Part) -> Split:
    """Split volumes that lack slices by a time that all slices of each have."""
    for name in TIMES:
        found = part.split(methodcaller("said", name))
        if _lack_few(part, found):
            return list(found.values()), (name,)
    return _NONE


def _lack_few(whole: Part, parts: dict[str, Part]) -> bool:
    """Whether the parts are volumes that lack less than half of their slices."""
    fewest = min(len(part.ids) for part in parts.values())
    return 2 * fewest > len(whole.ids) and short_stacks(whole, parts)


def _by_anything(part: Part) -> Split:
    """Split by all attributes of which each value has every place equally often.

    None of them may contradict another: then nothing is known.
    """
    little = part.slices[0].header.elements.little
    telling = {}
    for at, values in _columns(part).items():
        if 1 < len(set(values)) <= part.most and _are_volumes(part, members_of(values)):
            telling[at] = [as_text(value, little=little) for value in values]
    keys: list[tuple[Any, ...]] = [()] * len(part.slices)
    names, groups = [], 1
    for at, texts in telling.items():
        finer = [(*key, *rank(text)) for key, text in zip(keys, texts, strict=True)]
        if len(set(finer)) > groups:
            names.append(keyword(at[-1]))
            keys, groups = finer, len(set(finer))
    members = members_of(keys)
    if groups < 2 or not _are_volumes(part, members):
        return _NONE
    return [part.pick(members[key]) for key in sorted(members)], tuple(dict.fromkeys(names))


def _columns(part: Part) -> dict[tuple[int, ...], list[bytes]]:
    """Return the values of each attribute that any slice has."""
    places = sorted({at for one in part.slices for at in one.attributes})
    return {at: [one.attributes.get(at, b"") for one in part.slices] for at in places}


def _are_volumes(part: Part, members: Mapping[Any, Sequence[int]]) -> bool:
    """Whether each of the groups has every place equally often."""
    found = [part.pick(some) for some in members.values()]
    return all(one.even and one.ids == part.ids for one in found)


def _by_turns(part: Part) -> Split:
    """Split by the trigger times at each place, as shares of its heart beats.

    Nothing else that comes first, second, third at each place tells volumes apart: their order may
    alternate from place to place. Other times and numbers must not contradict it.
    """
    orders = {name: order for name in TIMES if (order := _Order.of(part, name)) is not None}
    order = orders.get(_TRIGGER)
    if order is None or len({one.ranks for one in orders.values()}) != 1 or not order.in_beats:
        return _NONE
    return order.parts(), (_TRIGGER,)


@dataclass(frozen=True, eq=False)
class _Order:
    """Which slice of its place each is, by a time or number; and that itself, to be compared."""

    part: Part
    ranks: tuple[int, ...]
    when: tuple[Any, ...]

    @classmethod
    def of(cls, part: Part, name: str) -> _Order | None:
        """Return the order; None where the attribute does not tell."""
        when = _when(part.slices, name)
        if when is None:
            return None
        ranks = [0] * len(when)
        for members in members_of([int(n) for n in part.places.ids]).values():
            if len({when[n] for n in members}) < len(members):
                return None
            for turn, n in enumerate(sorted(members, key=lambda n: when[n])):
                ranks[n] = turn
        return cls(part, tuple(ranks), tuple(when))

    @property
    def in_passes(self) -> bool:
        """Whether all firsts come before all seconds, and so on."""
        members = members_of(self.ranks)
        times = [[self.when[n] for n in members[turn]] for turn in sorted(members)]
        return all(max(one) < min(other) for one, other in itertools.pairwise(times))

    @property
    def in_beats(self) -> bool:
        """Whether at each place they count from the beginning of a beat, in equal shares of it."""
        members = members_of([int(n) for n in self.part.places.ids])
        beats = [sorted(self.when[n][1][1] for n in some) for some in members.values()]
        if not all(time for beat in beats for time in beat):
            return False  # no numbers
        times = np.array([[time[0] for time in beat] for beat in beats])
        first, last = times[:, 0], times[:, -1]
        if first.min() < 0 or np.any(first * (times.shape[1] - 1) > last - first):
            return False
        shares = times / last[:, None]
        return bool(np.all(shares[:, :-1].max(axis=0) < shares[:, 1:].min(axis=0)))

    def parts(self) -> list[Part]:
        """Return the slices by their turns."""
        members = members_of(self.ranks)
        return [self.part.pick(members[turn]) for turn in sorted(members)]


def _when(slices: Sequence[Slice], name: str) -> list[Any] | None:
    """Return what can be compared; None where it lacks, or where days are not known."""
    values = [one.said(name) for one in slices]
    if not all(values):
        return None
    dates = [_date(one, name) for one in slices]
    times = [rank(value) for value in values]
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


_EVEN_WAYS = (_by_making, _by_times, _by_anything, _by_turns)
_UNEVEN_WAYS = (_short_by_meaning, _short_by_times)
