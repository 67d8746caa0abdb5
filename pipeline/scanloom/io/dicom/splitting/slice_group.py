"""`SliceGroup`: parallel slices of one size, of one volume or several, and how to split them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scanloom.io.dicom.geometry.positions import SlicePositions, spacing_deviation
from scanloom.io.dicom.geometry.rounded_positions import is_rounded_stack
from scanloom.io.dicom.geometry.slices import Slice
from scanloom.io.dicom.geometry.stack import MIN_SLICES
from scanloom.io.dicom.slice_attributes import SliceAttribute
from scanloom.io.dicom.splitting.agreement import kinds_of


@dataclass(frozen=True, eq=False)
class SliceGroup:
    """Parallel slices of one size, with their positions along the normal.

    Parameters
    ----------
    slices : tuple of Slice
        The slices, in any order.
    places : SlicePositions
        `ids` has one entry for each slice. There may be more positions than these slices have.
    """

    slices: tuple[Slice, ...]
    places: SlicePositions

    @property
    def ids(self) -> frozenset[int]:
        """Numbers of the positions that have slices."""
        return frozenset(self.places.ids.tolist())

    @property
    def phases(self) -> Sequence[Mapping[str, str]]:
        """Phase attributes of the slices; an object that slices share is listed once."""
        return tuple({id(slice_.phase): slice_.phase for slice_ in self.slices}.values())

    @property
    def repeats(self) -> bool:
        """Whether any position has several slices."""
        return len(self.slices) > len(self.ids)

    @property
    def even(self) -> bool:
        """Whether all positions have equally many slices."""
        counts = np.bincount(self.places.ids)
        return len(set(counts[counts > 0].tolist())) == 1

    @property
    def most(self) -> int:
        """Largest number of slices at one position."""
        return int(np.bincount(self.places.ids).max())

    @property
    def regular(self) -> bool:
        """Whether the positions that have slices are equally spaced."""
        ids = sorted(self.ids)
        off, allowed = spacing_deviation(self.places.depth[ids])
        return off <= allowed or is_rounded_stack(self.places.positions[ids])

    @property
    def reach(self) -> tuple[float, float]:
        """First and last position along the normal, mm."""
        depth = self.places.depth[list(self.ids)]
        return float(depth.min()), float(depth.max())

    def split(self, key: Callable[[Slice], str]) -> dict[str, SliceGroup]:
        """Return the slices of each value of `key`, in the order of values."""
        members = indices_by_key([key(slice_) for slice_ in self.slices])
        ordered = sorted(members.items(), key=lambda item: value_sort_key(item[0]))
        return {value: self.pick(indices) for value, indices in ordered}

    def split_by(self, attribute: SliceAttribute, *, exact: bool = False) -> dict[str, SliceGroup]:
        """Return the slices of each kind of values of an attribute, in the order of values."""
        kinds = kinds_of(attribute, self.slices, exact=exact)
        if len(set(kinds.values())) < 2:
            return {next(iter(kinds.values())): self}
        return self.split(lambda slice_: kinds[slice_.value_of(attribute)])

    def pick(self, indices: Sequence[int]) -> SliceGroup:
        """Return the slices with these indices."""
        ids = self.places.ids[list(indices)]
        places = SlicePositions(ids, self.places.positions, self.places.depth)
        return SliceGroup(tuple(self.slices[n] for n in indices), places)


def value_sort_key(value: str) -> tuple[bool, tuple[float, ...], str]:
    """Return a sort key: absent values first, then numbers by value, then text."""
    try:
        return False, tuple(map(float, value.split("\\"))), ""
    except ValueError:
        return bool(value), (), value


def indices_by_key(keys: Sequence[Hashable]) -> dict[Any, list[int]]:
    """Return the indices of each distinct key."""
    members: dict[Any, list[int]] = defaultdict(list)
    for n, key in enumerate(keys):
        members[key].append(n)
    return members


def have_same_positions(whole: SliceGroup, groups: dict[str, SliceGroup]) -> bool:
    """Return whether each group has every position, so that it may be one or more volumes."""
    return len(whole.ids) >= MIN_SLICES and all(g.ids == whole.ids for g in groups.values())


def are_interleaved_stacks(whole: SliceGroup, groups: dict[str, SliceGroup]) -> bool:
    """Return whether groups with different positions are volumes.

    No group may repeat a position or lack the attribute. Either positions repeat between groups, or
    the groups are interleaved regular stacks. Adjacent stacks are one scan, acquired in steps.
    """
    if "" in groups or any(group.repeats for group in groups.values()):
        return False
    if min(len(group.ids) for group in groups.values()) < MIN_SLICES:
        return False
    if whole.repeats:
        return True
    if not all(group.regular for group in groups.values()):
        return False
    extents = sorted(group.reach for group in groups.values())
    return all(start < end for (_, end), (start, _) in itertools.pairwise(extents))


def are_incomplete_volumes(whole: SliceGroup, groups: dict[str, SliceGroup]) -> bool:
    """Return whether the groups are volumes with missing slices.

    There have to be as many groups as slices at any one position.
    """
    are_unique = "" not in groups and not any(group.repeats for group in groups.values())
    return whole.repeats and are_unique and len(groups) == whole.most


def have_nearly_same_positions(whole: SliceGroup, groups: dict[str, SliceGroup]) -> bool:
    """Return whether each group has over half of the positions: it may be volumes with gaps."""
    fewest = min(len(group.ids) for group in groups.values())
    if fewest < MIN_SLICES or "" in groups:
        return False
    return whole.repeats and 2 * fewest > len(whole.ids)
