"""Fallback rules for splitting a series into volumes.

They apply if the attributes whose purpose it is do not distinguish the volumes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import numpy as np

from scanloom.io.dicom import tags
from scanloom.io.dicom.geometry.slices import (
    Slice,
    attribute_name,
    unique_by_shared,
    untyped_as_text,
)
from scanloom.io.dicom.geometry.stack import MIN_SLICES
from scanloom.io.dicom.slice_attributes import (
    SLICE_ATTRIBUTES,
    Rule,
    attributes_that_separate,
    attributes_with,
    seconds_of,
)
from scanloom.io.dicom.splitting.agreement import differing
from scanloom.io.dicom.splitting.slice_group import (
    SliceGroup,
    are_incomplete_volumes,
    are_interleaved_stacks,
    have_same_positions,
    indices_by_key,
    value_sort_key,
)

_TRIGGER = "TriggerTime"
_TIMES = tuple(attribute.name for attribute in attributes_that_separate("as a time"))
_NUMBER = "InstanceNumber"
_ACQUISITION, _MEANING = attributes_that_separate("then"), attributes_with(Rule.MEANING)
_DATES = {
    "AcquisitionTime": (tags.ACQUISITION_DATE, tags.ACQUISITION_DATE_TIME),
    "ContentTime": (tags.CONTENT_DATE,),
}
"""Tags of the date for each time, for acquisitions that pass midnight."""
_NOISE = 1e-4
"""Largest difference of numbers within a volume, as a share of the largest number."""
_HALF_A_DAY_S = 12 * 3600.0

Split = tuple[list[SliceGroup], tuple[str, ...]]
"""The groups, and the attributes that distinguish them; both empty if none does."""
_NO_SPLIT: Split = ([], ())


def split_by_other_attributes(group: SliceGroup) -> Split:
    """Split slices of which several share a position, by all other attributes.

    If the numbers of slices per position differ, slices are missing: then only values that all
    slices of a volume share are used. The result is one group if no attribute distinguishes
    volumes, or attributes contradict each other.
    """
    if not group.repeats or len(group.ids) < MIN_SLICES:
        return [group], ()
    for rule in _RULES_IF_BALANCED if group.even else _RULES_IF_SLICES_MISSING:
        subgroups, names = rule(group)
        if len(subgroups) == 1:
            break
        if subgroups:
            splits = [split_by_other_attributes(subgroup) for subgroup in subgroups]
            names = (*names, *(name for _, finer_names in splits for name in finer_names))
            volumes = [volume for finer, _ in splits for volume in finer]
            return volumes, tuple(dict.fromkeys(names))
    return [group], ()


def _by_acquisition(group: SliceGroup) -> Split:
    """Split by acquisition attributes. This precedes times, whose order may be arbitrary."""
    if len(unique_by_shared(group.slices)) < 2:
        return _NO_SPLIT
    for attribute in _ACQUISITION:
        subgroups = group.split_by(attribute, exact=True)
        if len(subgroups) > 1 and have_same_positions(group, subgroups):
            return list(subgroups.values()), (attribute.name,)
    return _NO_SPLIT


def split_interleaved(group: SliceGroup) -> Split:
    """Split interleaved stacks, in which no two slices share a position.

    Evenly spaced slices are one volume, however it was acquired, as in two passes: only an
    attribute that changes the meaning of a value separates them. If the spacing is uneven, the
    slices are no volume, and any attribute may tell the stacks of which they consist.
    """
    if group.repeats or len(group.ids) < 2 * MIN_SLICES:
        return _NO_SPLIT
    split = _interleaved_by_meaning(group)
    if split[0] or group.regular:
        return split
    for attribute in SLICE_ATTRIBUTES:
        subgroups = group.split_by(attribute, exact=True)
        if len(subgroups) > 1 and are_interleaved_stacks(group, subgroups):
            return list(subgroups.values()), (attribute.name,)
    return _interleaved_frames(group) if group.slices[0].group is not None else _NO_SPLIT


def _interleaved_by_meaning(group: SliceGroup) -> Split:
    for attribute in differing(group.slices, _MEANING):
        subgroups = group.split_by(attribute)
        if len(subgroups) > 1 and are_interleaved_stacks(group, subgroups):
            volumes: list[SliceGroup] = []
            names = [attribute.name]
            for subgroup in subgroups.values():
                finer, finer_names = _interleaved_by_meaning(subgroup)
                volumes += finer or [subgroup]
                names += finer_names
            return volumes, tuple(dict.fromkeys(names))
    return _NO_SPLIT


def _interleaved_frames(group: SliceGroup) -> Split:
    """Split unevenly interleaved stacks of frames by any functional group."""
    little = group.slices[0].header.elements.little
    for path, values in _columns(group).items():
        if not 1 < len(set(values)) <= len(values) // MIN_SLICES:
            continue
        texts = {
            slice_: untyped_as_text(value, little=little)
            for slice_, value in zip(group.slices, values, strict=True)
        }
        subgroups = group.split(texts.__getitem__)
        if are_interleaved_stacks(group, subgroups) and not _is_noise(list(subgroups)):
            return list(subgroups.values()), (attribute_name(path[-1]),)
    return _NO_SPLIT


def _is_noise(values: Sequence[str]) -> bool:
    """Return whether values are numbers that differ only in their last digits."""
    vectors = [numbers for _, numbers, _ in map(value_sort_key, values)]
    if not all(vectors) or len(set(map(len, vectors))) != 1:
        return False
    table = np.array(vectors)
    return bool(np.ptp(table, axis=0).max() <= _NOISE * np.abs(table).max())


def _by_times(group: SliceGroup) -> Split:
    """Split by a time or number that the slices of a volume share, or by successive passes.

    The result is the group itself if times contradict each other. A time that slices of a volume
    share is a single witness for many slices: the order by number must not contradict it either.
    """
    shared = [split for name in _TIMES if (split := _by_shared_time(group, name))[0]]
    passes = [split for name in _TIMES if (split := _by_passes(group, name))[0]]
    partitions = {_partition(volumes) for volumes, _ in (*shared, *passes)}
    by_number = _OrderAtPositions.of(group, _NUMBER) if shared else None
    if by_number is not None:
        partitions.add(_partition(by_number.split()))
    if len(partitions) > 1:
        return [group], ()
    return next(iter((*shared, *passes)), _NO_SPLIT)


def _partition(groups: Sequence[SliceGroup]) -> frozenset[frozenset[int]]:
    """Return a value that is equal for the same slices in the same groups."""
    return frozenset(frozenset(map(id, group.slices)) for group in groups)


def _by_shared_time(group: SliceGroup, name: str) -> Split:
    subgroups = group.split(methodcaller("said", name))
    if len(subgroups) == group.most and have_same_positions(group, subgroups):
        return list(subgroups.values()), (name,)
    return _NO_SPLIT


def _by_passes(group: SliceGroup, name: str) -> Split:
    order = _OrderAtPositions.of(group, name)
    return (order.split(), (name,)) if order is not None and order.in_passes else _NO_SPLIT


def _incomplete_by_meaning(group: SliceGroup) -> Split:
    """Split volumes with missing slices by the meaning of their values."""
    for attribute in differing(group.slices, _MEANING):
        subgroups = group.split_by(attribute)
        if _lack_few(group, subgroups):
            return list(subgroups.values()), (attribute.name,)
    return _NO_SPLIT


def _incomplete_by_times(group: SliceGroup) -> Split:
    """Split volumes with missing slices by a time that the slices of a volume share."""
    for name in _TIMES:
        subgroups = group.split(methodcaller("said", name))
        if _lack_few(group, subgroups):
            return list(subgroups.values()), (name,)
    return _NO_SPLIT


def _lack_few(whole: SliceGroup, groups: dict[str, SliceGroup]) -> bool:
    """Return whether the groups are volumes that lack less than half of their slices."""
    fewest = min(len(group.ids) for group in groups.values())
    return 2 * fewest > len(whole.ids) and are_incomplete_volumes(whole, groups)


def _by_any_attribute(group: SliceGroup) -> Split:
    """Split by all attributes whose values each have every position equally often.

    If two of them contradict each other, the group is not split.
    """
    little = group.slices[0].header.elements.little
    distinguishing = {}
    for path, values in _columns(group).items():
        if 1 < len(set(values)) <= group.most and _are_volumes(group, indices_by_key(values)):
            distinguishing[path] = [untyped_as_text(value, little=little) for value in values]
    keys: list[tuple[Any, ...]] = [()] * len(group.slices)
    names, count = [], 1
    for path, texts in distinguishing.items():
        finer = [(*key, *value_sort_key(text)) for key, text in zip(keys, texts, strict=True)]
        if len(set(finer)) > count:
            names.append(attribute_name(path[-1]))
            keys, count = finer, len(set(finer))
    members = indices_by_key(keys)
    if count < 2 or not _are_volumes(group, members):
        return _NO_SPLIT
    return [group.pick(members[key]) for key in sorted(members)], tuple(dict.fromkeys(names))


def _columns(group: SliceGroup) -> dict[tuple[int, ...], list[bytes]]:
    """Return the values of all slices for each attribute that any slice has.

    The key is the path of tags from the outermost sequence; a missing value is empty.
    """
    paths = sorted({path for slice_ in group.slices for path in slice_.attributes})
    return {path: [slice_.attributes.get(path, b"") for slice_ in group.slices] for path in paths}


def _are_volumes(group: SliceGroup, members: Mapping[Any, Sequence[int]]) -> bool:
    """Return whether each set of slices has every position equally often."""
    subgroups = [group.pick(indices) for indices in members.values()]
    return all(subgroup.even and subgroup.ids == group.ids for subgroup in subgroups)


def _by_rank_at_position(group: SliceGroup) -> Split:
    """Split by the rank of the trigger time at each position, as a share of its heart beats.

    Other ranks at a position do not distinguish volumes: their order may alternate from position to
    position. But other times and numbers must not contradict the trigger times.
    """
    orders = {}
    for name in _TIMES:
        order = _OrderAtPositions.of(group, name)
        if order is not None:
            orders[name] = order
    by_trigger = orders.get(_TRIGGER)
    same_ranks = len({order.ranks for order in orders.values()}) == 1
    if by_trigger is None or not same_ranks or not by_trigger.in_beats:
        return _NO_SPLIT
    return by_trigger.split(), (_TRIGGER,)


@dataclass(frozen=True, eq=False)
class _OrderAtPositions:
    """Order of the slices at each position by a time or number.

    Parameters
    ----------
    group : SliceGroup
        The slices.
    ranks : tuple of int
        Rank of each slice among those at its position, from 0.
    times : tuple
        Time or number of each slice, as `_sortable_times` returns it.
    """

    group: SliceGroup
    ranks: tuple[int, ...]
    times: tuple[Any, ...]

    @classmethod
    def of(cls, group: SliceGroup, name: str) -> _OrderAtPositions | None:
        """Return the order; None if the attribute is missing or equal for slices at a position."""
        times = _sortable_times(group.slices, name)
        if times is None:
            return None
        ranks = [0] * len(times)
        for members in indices_by_key([int(n) for n in group.places.ids]).values():
            if len({times[n] for n in members}) < len(members):
                return None
            for turn, n in enumerate(sorted(members, key=lambda n: times[n])):
                ranks[n] = turn
        return cls(group, tuple(ranks), tuple(times))

    @property
    def in_passes(self) -> bool:
        """Whether all slices of a rank precede all those of the next rank."""
        members = indices_by_key(self.ranks)
        times = [[self.times[n] for n in members[turn]] for turn in sorted(members)]
        return all(max(earlier) < min(later) for earlier, later in itertools.pairwise(times))

    @property
    def in_beats(self) -> bool:
        """Whether times at each position count from the start of a beat, in equal shares of it."""
        members = indices_by_key([int(n) for n in self.group.places.ids])
        beats = [sorted(self.times[n][1][1] for n in indices) for indices in members.values()]
        if not all(time for beat in beats for time in beat):
            return False  # not numbers
        times = np.array([[time[0] for time in beat] for beat in beats])
        first, last = times[:, 0], times[:, -1]
        if first.min() < 0 or np.any(first * (times.shape[1] - 1) > last - first):
            return False
        shares = times / last[:, None]
        return bool(np.all(shares[:, :-1].max(axis=0) < shares[:, 1:].min(axis=0)))

    def split(self) -> list[SliceGroup]:
        """Return the slices of each rank."""
        members = indices_by_key(self.ranks)
        return [self.group.pick(members[turn]) for turn in sorted(members)]


def _sortable_times(slices: Sequence[Slice], name: str) -> list[Any] | None:
    """Return date and time (or number) of each slice, as keys to sort by.

    None if a value is missing, or if times seem to pass midnight without different dates.
    """
    values = [slice_.said(name) for slice_ in slices]
    if not all(values):
        return None
    dates = [_date(slice_, name) for slice_ in slices]
    times = [value_sort_key(value) for value in values]
    seconds = [seconds_of(value) for value in values] if name in _DATES else []
    if len(set(dates)) == 1 and seconds and max(seconds) - min(seconds) > _HALF_A_DAY_S:
        return None
    return list(zip(dates, times, strict=True))


def _date(slice_: Slice, name: str) -> str:
    if slice_.multiframe:
        return ""  # part of FrameAcquisitionDateTime
    texts = (slice_.header.elements.text(tag)[:8] for tag in _DATES.get(name, ()))
    return next((text for text in texts if text), "")


_RULES_IF_BALANCED = (_by_acquisition, _by_times, _by_any_attribute, _by_rank_at_position)
_RULES_IF_SLICES_MISSING = (_incomplete_by_meaning, _incomplete_by_times)
