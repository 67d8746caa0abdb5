"""`Part`: parallel slices of one size that may be one volume or several, and how they are split."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scanloom.io.dicom.places import Places, steps_off
from scanloom.io.dicom.rounding import is_rounded_stack
from scanloom.io.dicom.slices import Slice
from scanloom.io.dicom.stack import MIN_SLICES


@dataclass(frozen=True, eq=False)
class Part:
    """Parallel slices of one size, with their places.

    Parameters
    ----------
    slices : tuple of Slice
    places : Places
        `ids` has one for each of them; the positions may be more than those that they have.
    """

    slices: tuple[Slice, ...]
    places: Places

    @property
    def ids(self) -> frozenset[int]:
        """The places at which it has slices."""
        return frozenset(self.places.ids.tolist())

    @property
    def phases(self) -> Sequence[Mapping[str, str]]:
        """What its slices say of their phases, the same object but once."""
        return tuple({id(one.phase): one.phase for one in self.slices}.values())

    @property
    def repeats(self) -> bool:
        """Whether it has several slices at a place."""
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
        ids = sorted(self.ids)
        off, allowed = steps_off(self.places.depth[ids])
        return off <= allowed or is_rounded_stack(self.places.positions[ids])

    @property
    def reach(self) -> tuple[float, float]:
        """Where it begins and ends along the normal, mm."""
        depth = self.places.depth[list(self.ids)]
        return float(depth.min()), float(depth.max())

    def split(self, key: Callable[[Slice], str]) -> dict[str, Part]:
        """Return the parts with one value each, in the order of values."""
        members = members_of([key(one) for one in self.slices])
        ordered = sorted(members.items(), key=lambda item: rank(item[0]))
        return {value: self.pick(indices) for value, indices in ordered}

    def pick(self, indices: Sequence[int]) -> Part:
        """Return some of its slices, by their numbers."""
        ids = self.places.ids[list(indices)]
        places = Places(ids, self.places.positions, self.places.depth)
        return Part(tuple(self.slices[n] for n in indices), places)


def rank(value: str) -> tuple[bool, tuple[float, ...], str]:
    """Order values as numbers where they are numbers, else as text; what is missing first."""
    try:
        return False, tuple(map(float, value.split("\\"))), ""
    except ValueError:
        return bool(value), (), value


def members_of(keys: Sequence[Hashable]) -> dict[Any, list[int]]:
    """Return the numbers of the items that have each key."""
    members: dict[Any, list[int]] = defaultdict(list)
    for n, key in enumerate(keys):
        members[key].append(n)
    return members


def same_places(whole: Part, parts: dict[str, Part]) -> bool:
    """Whether each part has every place, so that it may be a volume, or several."""
    return len(whole.ids) >= MIN_SLICES and all(p.ids == whole.ids for p in parts.values())


def whole_stacks(whole: Part, parts: dict[str, Part]) -> bool:
    """Whether the parts are volumes though their places differ.

    None of them repeats a place or lacks the attribute. Either the places repeat between them, or
    they are regular stacks one within the other; one beside the other they are one scan, made step
    by step.
    """
    if "" in parts or any(part.repeats for part in parts.values()):
        return False
    if min(len(part.ids) for part in parts.values()) < MIN_SLICES:
        return False
    if whole.repeats:
        return True
    if not all(part.regular for part in parts.values()):
        return False
    reaches = sorted(part.reach for part in parts.values())
    return all(low < end for (_, end), (low, _) in itertools.pairwise(reaches))


def short_stacks(whole: Part, parts: dict[str, Part]) -> bool:
    """Whether the parts are volumes of which slices are missing: as many as lie at one place."""
    whole_parts = "" not in parts and not any(part.repeats for part in parts.values())
    return whole.repeats and whole_parts and len(parts) == whole.most


def nearly_same_places(whole: Part, parts: dict[str, Part]) -> bool:
    """Whether each part has more than half of the places, so that it may be volumes with gaps."""
    fewest = min(len(part.ids) for part in parts.values())
    if fewest < MIN_SLICES or "" in parts:
        return False
    return whole.repeats and 2 * fewest > len(whole.ids)
