"""Split a series into its volumes: phases, time points, echoes, stacks.

`phase=` counts volumes in ascending order of the first attribute of `SLICE_ATTRIBUTES` that
distinguishes them; volumes with equal values are ordered by the next. Stacks that differ in
direction, size, pixel spacing or frame of reference are ordered by their number of slices, the
largest first.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import methodcaller
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError, counted
from scanloom.io.dicom import tags
from scanloom.io.dicom.geometry.slices import (
    Slice,
    attribute_name,
    differing,
    kinds_of,
    unique_by_shared,
    untyped_as_text,
)
from scanloom.io.dicom.geometry.stack import (
    MIN_SLICES,
    SPACING_TOLERANCE,
    SlicePositions,
    all_have_geometry,
    direction_cosines,
    is_rounded_stack,
    locate_slices,
    spacing_deviation,
)
from scanloom.io.dicom.slice_attributes import (
    SLICE_ATTRIBUTES,
    Rule,
    SliceAttribute,
    attributes_that_separate,
    attributes_with,
    seconds_of,
)

_BY_PURPOSE = attributes_that_separate("first")
_GEOMETRY = "direction, size or frame of reference"
_PLANES = ("sagittal", "coronal", "axial")
_NAMED = {attribute.name: attribute for attribute in SLICE_ATTRIBUTES}
MAX_VALUES = 8
"""Number of volumes whose values are named where one has to be chosen, besides the last."""
_NUMBERS = frozenset(
    (
        *("TemporalPositionIdentifier", "EchoNumbers", "EchoTime", "DiffusionBValue"),
        *("private b-value", "InversionTime", "FlipAngle", "RepetitionTime", "KVP"),
        *("SliceThickness", "AcquisitionNumber", "TriggerTime", "InstanceNumber"),
        "NominalPercentageOfCardiacPhase",
    )
)
"""Attributes with numbers that say which volume is which, and nothing about the patient."""
_IMAGE_WORDS = frozenset(
    (
        *("M", "P", "R", "I", "MAGNITUDE", "PHASE", "REAL", "IMAGINARY", "PHASE MAP"),
        *("W", "F", "IP", "OP", "WATER", "FAT", "IN_PHASE", "OUT_PHASE", "OPP_PHASE"),
        *("ADC", "TRACEW", "FA", "T1 MAP", "T2 MAP", "NORM", "SUB", "SWI"),
    )
)
"""Words of ImageType that are named."""
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
        Number of slices that each volume lacks at its ends and another has.
    """

    groups: tuple[tuple[Slice, ...], ...]
    told_by: tuple[str, ...] = ()
    crossing: int = 0
    cut: tuple[int, ...] = (0,)

    def choose(self, phase: int | None) -> tuple[tuple[Slice, ...], int]:
        """Return the slices of volume `phase`, or of the only one, and how many its ends lack.

        Raises
        ------
        ScanError
            PHASES if there are several and `phase` is not one of their numbers; FOUR_D if there is
            one and `phase` is not 0.
        """
        count = len(self.groups)
        if phase is not None and 0 <= phase < count:
            return self.groups[phase], self.cut[phase]
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
        detail = f"{detail}, numbered from 0 to {count - 1}{self._values()}"
        if phase is not None:
            detail = f"there is no volume {phase}: {detail}"
        raise ScanError(Reason.PHASES, detail)

    def _values(self) -> str:
        """Return what the first volumes and the last one have of `told_by`, in parentheses.

        Empty if they do not differ in what is shown: numbers and words of lists, since other text
        of a header may name the patient.
        """
        last = len(self.groups) - 1
        numbers = [n for n in range(last + 1) if n < MAX_VALUES or n == last]
        values = {
            n: ", ".join(_values_of(self.groups[n], name) for name in self.told_by) for n in numbers
        }
        if len(set(values.values())) < len(values):
            return ""
        texts = [f"{n}: {text}" for n, text in values.items()]
        if last > MAX_VALUES:
            texts.insert(-1, "...")
        return f" ({'; '.join(texts)})"


def _values_of(slices: Sequence[Slice], name: str) -> str:
    """Return what the slices of a volume have of an attribute, as text to be shown."""
    if name == _GEOMETRY:
        plane = _PLANES[int(np.abs(_normal(slices[0])).argmax())]
        return f"{plane} {slices[0].columns} x {slices[0].rows}"
    if name == "ImageType":
        words = {word for s in slices for word in s.value_of(_NAMED[name]).upper().split("\\")}
        return f"{name} {' '.join(sorted(words & _IMAGE_WORDS)) or 'other'}"
    if name not in _NUMBERS:
        return f"another {name}"
    texts = {s.value_of(_NAMED[name]) or s.phase_text(name) for s in slices} - {""}
    try:
        numbers = sorted(float(text.split("\\")[0]) for text in texts) or [math.nan]
    except ValueError:
        return f"another {name}"
    low, high = (f"{n:.6g}" if math.isfinite(n) else "none" for n in (numbers[0], numbers[-1]))
    return f"{name} {low}" if low == high else f"{name} {low} to {high}"


def split_volumes(slices: Sequence[Slice]) -> Volumes:
    """Split a series into its volumes.

    Slices that cannot be distinguished, or are damaged, stay one volume: `stack_slices` reports
    the reason.
    """
    whole = Volumes((tuple(slices),))
    if (
        not slices
        or not all_have_geometry(slices)
        or not all(map(_has_spacing, unique_by_shared(slices)))
    ):
        return whole
    # Localisers are set aside first: with fewer than three of them, the series would not be split
    stacks = _without_localisers(_group_by_geometry(slices))
    crossing = len(slices) - sum(map(len, stacks))
    if len(stacks) > 1 and min(map(len, stacks)) < MIN_SLICES:
        return whole
    split = [_split_stack(stack) for stack in stacks]
    names = [_GEOMETRY] if len(stacks) > 1 else []
    names += [name for volumes in split for name in volumes.told_by]
    groups = tuple(group for volumes in split for group in volumes.groups)
    cut = tuple(n for volumes in split for n in volumes.cut)
    return Volumes(groups, tuple(dict.fromkeys(names)), crossing, cut)


def _has_spacing(slice_: Slice) -> bool:
    spacing = slice_.spacing
    return spacing is not None and all(map(math.isfinite, spacing)) and min(spacing) > 0


# --- slices that cannot be in one stack ----------------------------------------------------------


def _group_by_geometry(slices: Sequence[Slice]) -> list[tuple[Slice, ...]]:
    """Group slices by size, frame of reference, direction and pixel spacing, the largest first."""
    stacks: list[list[Slice]] = []
    for slice_ in slices:
        if len(stacks) > MAX_GEOMETRIES:
            return [tuple(slices)]
        # The latest first: slices are sorted by UID, so that the next often is of the same stack
        same = (stack for stack in reversed(stacks) if _has_same_geometry(slice_, stack[0]))
        stack = next(same, None)
        if stack is None:
            stacks.append([slice_])
        else:
            stack.append(slice_)

    def key(stack: Sequence[Slice]) -> tuple[Any, ...]:
        geometry = ((s.position or (), s.orientation or (), (s.rows, s.columns)) for s in stack)
        return -len(stack), min(geometry)

    return [tuple(stack) for stack in sorted(stacks, key=key)]


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


def _split_stack(slices: tuple[Slice, ...]) -> Volumes:
    """Split slices of one geometry."""
    try:
        row, column, _ = direction_cosines(slices)
    except ScanError:
        return Volumes((slices,))
    whole = SliceGroup(slices, locate_slices(slices, np.cross(row, column)))
    groups, names = _split_by_attributes(whole, _BY_PURPOSE)
    volumes, names = _split_further(groups, names, split_by_other_attributes)
    positions = {volume.ids for volume in volumes}  # the same in most of hundreds of time points
    cuts = {ids: _count_cut(ids, positions) for ids in positions}
    cut = tuple(cuts[volume.ids] for volume in volumes)
    return Volumes(tuple(volume.slices for volume in volumes), names, cut=cut)


def _count_cut(ids: frozenset[int], others: Collection[frozenset[int]]) -> int:
    """Return the number of positions at its ends that a volume lacks of another, nearly equal one.

    `ids` are the numbers of its positions, `others` those of each volume.
    """
    count = 0
    for reference in others:
        missing = reference - ids
        if ids < reference and len(missing) <= MAX_CUT_SHARE * len(reference):
            # Slices that are missing inside are gaps, which `stack_slices` reports
            count = max(count, sum(not min(ids) < n < max(ids) for n in missing))
    return count


def _split_by_attributes(group: SliceGroup, attributes: Sequence[SliceAttribute]) -> Split:
    """Split by each attribute, in this order, that distinguishes volumes."""
    if not group.repeats:
        return split_interleaved(group)
    # An object that slices share is looked at once
    phases = {id(slice_.phase): slice_.phase for slice_ in group.slices}.values()
    varying = [a for a in attributes if len({phase.get(a.name) for phase in phases}) > 1]
    splits = {a: group.split_by(a, exact=True) for a in varying}
    # From the strictest test to the weakest, each for all attributes before the next: an attribute
    # that gives complete volumes is a better witness than an earlier one that gives volumes with
    # missing or shifted slices, which a wrong attribute may give by chance
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
            if accept is have_same_positions:  # earlier attributes gave no complete volumes
                further = attributes[attributes.index(attribute) + 1 :]
            split = partial(_split_by_attributes, attributes=further)
            return _split_further(subgroups.values(), (attribute.name,), split)
    return [group], ()


def _split_further(
    groups: Iterable[SliceGroup], names: tuple[str, ...], split: Callable[[SliceGroup], Split]
) -> Split:
    """Split each group, and add the names of the attributes by which it was split."""
    splits = [split(group) for group in groups]
    finer_names = (name for _, names_of_group in splits for name in names_of_group)
    volumes = [volume for volumes_of_group, _ in splits for volume in volumes_of_group]
    return volumes, tuple(dict.fromkeys((*names, *finer_names)))


# --- groups of slices -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SliceGroup:
    """Parallel slices of one size, with their positions along the normal.

    Parameters
    ----------
    slices : tuple of Slice
        The slices, in any order.
    positions : SlicePositions
        `ids` has one entry for each slice. There may be more positions than these slices have.
    """

    slices: tuple[Slice, ...]
    positions: SlicePositions

    @cached_property
    def ids(self) -> frozenset[int]:
        """Numbers of the positions that have slices."""
        return frozenset(self.positions.ids.tolist())

    @property
    def repeats(self) -> bool:
        """Whether any position has several slices."""
        return len(self.slices) > len(self.ids)

    @property
    def even(self) -> bool:
        """Whether all positions have equally many slices."""
        counts = np.bincount(self.positions.ids)
        return len(set(counts[counts > 0].tolist())) == 1

    @property
    def most(self) -> int:
        """Largest number of slices at one position."""
        return int(np.bincount(self.positions.ids).max())

    @property
    def regular(self) -> bool:
        """Whether the positions that have slices are equally spaced."""
        ids = sorted(self.ids)
        off, allowed = spacing_deviation(self.positions.depth[ids])
        return off <= allowed or is_rounded_stack(self.positions.positions[ids])

    def split(self, key: Callable[[Slice], str]) -> dict[str, SliceGroup]:
        """Return the slices of each value of `key`, in the order of values."""
        members = indices_by_key([key(slice_) for slice_ in self.slices])
        ordered = sorted(members.items(), key=lambda item: value_sort_key(item[0]))
        return {value: self.pick(indices) for value, indices in ordered}

    def split_by(self, attribute: SliceAttribute, *, exact: bool) -> dict[str, SliceGroup]:
        """Return the slices of each kind of values of an attribute, in the order of values."""
        kinds = kinds_of(attribute, self.slices, exact=exact)
        if len(set(kinds.values())) < 2:
            return {next(iter(kinds.values())): self}
        return self.split(lambda slice_: kinds[slice_.value_of(attribute)])

    def pick(self, indices: Sequence[int]) -> SliceGroup:
        """Return the slices with these indices."""
        ids = self.positions.ids[list(indices)]
        return SliceGroup(tuple(self.slices[n] for n in indices), replace(self.positions, ids=ids))


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


Split = tuple[list[SliceGroup], tuple[str, ...]]
"""The groups, and the attributes that distinguish them; both empty if none does."""


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
    depth = whole.positions.depth
    extents = sorted((depth[min(group.ids)], depth[max(group.ids)]) for group in groups.values())
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


# --- fallback rules -------------------------------------------------------------------------------
# If the attributes whose purpose it is do not distinguish the volumes.

_TIMES = tuple(attribute.name for attribute in attributes_that_separate("as a time"))
_ACQUISITION, _MEANING = attributes_that_separate("then"), attributes_with(Rule.MEANING)
_DATES = {
    "AcquisitionTime": (tags.ACQUISITION_DATE, tags.ACQUISITION_DATE_TIME),
    "ContentTime": (tags.CONTENT_DATE,),
}
"""Tags of the date for each time, for acquisitions that pass midnight."""
_NOISE = 1e-4
"""Largest difference of numbers within a volume, as a share of the largest number."""
_HALF_A_DAY_S = 12 * 3600.0
"""No scan takes so long: larger differences of times without different dates pass midnight."""

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
        if len(subgroups) == 1:  # a contradiction, which a weaker rule must not decide
            break
        if subgroups:
            return _split_further(subgroups, names, split_by_other_attributes)
    return [group], ()


def _first_split(
    group: SliceGroup,
    attributes: Iterable[SliceAttribute],
    accept: Callable[[SliceGroup, dict[str, SliceGroup]], bool],
    *,
    exact: bool = False,
) -> Split:
    """Split by the first attribute whose values give several groups that are accepted."""
    for attribute in attributes:
        subgroups = group.split_by(attribute, exact=exact)
        if len(subgroups) > 1 and accept(group, subgroups):
            return list(subgroups.values()), (attribute.name,)
    return _NO_SPLIT


def _by_acquisition(group: SliceGroup) -> Split:
    """Split by acquisition attributes. This precedes times, whose order may be arbitrary."""
    if len(unique_by_shared(group.slices)) < 2:
        return _NO_SPLIT
    return _first_split(group, _ACQUISITION, have_same_positions, exact=True)


def split_interleaved(group: SliceGroup) -> Split:
    """Split interleaved stacks, in which no two slices share a position.

    Evenly spaced slices are one volume, however it was acquired, as in two passes: only an
    attribute that changes the meaning of a value separates them. If the spacing is uneven, the
    slices are no volume, and any attribute may tell the stacks of which they consist.
    """
    if len(group.ids) < 2 * MIN_SLICES:
        return [group], ()
    volumes, names = _interleaved_by_meaning(group)
    if len(volumes) > 1 or group.regular:
        return volumes, names
    volumes, names = _first_split(group, SLICE_ATTRIBUTES, are_interleaved_stacks, exact=True)
    if not volumes and group.slices[0].group is not None:
        volumes, names = _interleaved_frames(group)
    return volumes or [group], names


def _interleaved_by_meaning(group: SliceGroup) -> Split:
    subgroups, names = _first_split(
        group, differing(group.slices, _MEANING), are_interleaved_stacks
    )
    if not subgroups:
        return [group], ()
    return _split_further(subgroups, names, _interleaved_by_meaning)


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
    shared: list[Split] = []
    passes: list[Split] = []
    for name in _TIMES:
        subgroups = group.split(methodcaller("phase_text", name))
        if len(subgroups) == group.most and have_same_positions(group, subgroups):
            shared.append((list(subgroups.values()), (name,)))
        order = _OrderAtPositions.of(group, name)
        if order is not None and order.in_passes:
            passes.append((order.split(), (name,)))
    partitions = {_partition(volumes) for volumes, _ in (*shared, *passes)}
    by_number = _OrderAtPositions.of(group, "InstanceNumber") if shared else None
    if by_number is not None:
        partitions.add(_partition(by_number.split()))
    if len(partitions) > 1:
        return [group], ()
    return next(iter((*shared, *passes)), _NO_SPLIT)


def _partition(groups: Sequence[SliceGroup]) -> frozenset[frozenset[int]]:
    """Return a value that is equal for the same slices in the same groups."""
    return frozenset(frozenset(map(id, group.slices)) for group in groups)


def _incomplete_by_meaning(group: SliceGroup) -> Split:
    """Split volumes with missing slices by the meaning of their values."""
    return _first_split(group, differing(group.slices, _MEANING), _lack_few)


def _incomplete_by_times(group: SliceGroup) -> Split:
    """Split volumes with missing slices by a time that the slices of a volume share."""
    for name in _TIMES:
        subgroups = group.split(methodcaller("phase_text", name))
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
    orders = {name: _OrderAtPositions.of(group, name) for name in _TIMES}
    by_trigger = orders["TriggerTime"]
    same_ranks = len({order.ranks for order in orders.values() if order is not None}) == 1
    if by_trigger is None or not same_ranks or not by_trigger.in_beats:
        return _NO_SPLIT
    return by_trigger.split(), ("TriggerTime",)


@dataclass(frozen=True, eq=False)
class _OrderAtPositions:
    """Order of the slices at each position by a time or number.

    `ranks` has the rank of each slice among those at its position, from 0; `times` are those of
    `_sortable_times`.
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
        for members in indices_by_key([int(n) for n in group.positions.ids]).values():
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
        members = indices_by_key([int(n) for n in self.group.positions.ids])
        beats = [sorted(self.times[n][1][1] for n in indices) for indices in members.values()]
        if not all(time for beat in beats for time in beat):
            return False  # not numbers
        times = np.array([[time[0] for time in beat] for beat in beats])
        first, last = times[:, 0], times[:, -1]
        # The first time is within one share of the beat's start, or counting began elsewhere
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
    values = [slice_.phase_text(name) for slice_ in slices]
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


# Attributes of the acquisition name volumes; times only order them, perhaps arbitrarily. Any other
# attribute may differ by chance. Ranks at a position are no property of a volume at all
_RULES_IF_BALANCED = (_by_acquisition, _by_times, _by_any_attribute, _by_rank_at_position)
# Only values that all slices of a volume share: ranks would shift where a slice is missing
_RULES_IF_SLICES_MISSING = (_incomplete_by_meaning, _incomplete_by_times)
