"""Compare slices by `SLICE_ATTRIBUTES`: whether they agree on the meaning of their values."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from scanloom.io.dicom.geometry.slices import Slice
from scanloom.io.dicom.header.elements import PER_SLICE_TAGS
from scanloom.io.dicom.slice_attributes import (
    SLICE_ATTRIBUTES,
    Rule,
    SliceAttribute,
    attributes_with,
)

_MEANING, _RECORDED = attributes_with(Rule.MEANING), attributes_with(Rule.RECORDED)


def kinds_of(
    attribute: SliceAttribute, slices: Sequence[Slice], *, exact: bool = False
) -> dict[str, str]:
    """Return the kind of each value that slices have; see `SliceAttribute.kinds_of`."""
    values = {slice_.value_of(attribute) for slice_ in slices}
    return attribute.kinds_of(values, len(slices), exact=exact)


def first_disagreement(
    slices: Sequence[Slice], may_differ: Collection[SliceAttribute] = ()
) -> SliceAttribute | None:
    """Return the first attribute that changes the meaning of a value and differs between slices.

    None if slices agree on all of them but `may_differ`.
    """
    return next((a for a in differing(slices, _MEANING) if a not in may_differ), None)


def differ_in_records(slices: Sequence[Slice]) -> bool:
    """Return whether slices differ in an attribute that may matter, or some lack one.

    Such a difference does not prevent reading, but the user must know of it.
    """
    if differing(slices, _RECORDED):
        return True
    flagged = [attribute for attribute in _MEANING if attribute.absent == "flagged"]
    distinct = distinct_by(slices, flagged)
    return len(distinct) > 1 and any(
        len({slice_.value_of(attribute) == "" for slice_ in distinct}) > 1 for attribute in flagged
    )


def differing(
    slices: Sequence[Slice], attributes: Sequence[SliceAttribute] = SLICE_ATTRIBUTES
) -> list[SliceAttribute]:
    """Return the attributes of which slices have several kinds of values."""
    distinct = distinct_by(slices, attributes)
    if len(distinct) < 2:
        return []
    return [
        attribute
        for attribute in attributes
        if len(set(kinds_of(attribute, slices if attribute.counts else distinct).values())) > 1
    ]


def distinct_by(slices: Sequence[Slice], attributes: Sequence[SliceAttribute]) -> tuple[Slice, ...]:
    """Return a slice for each combination of values of attributes.

    Values that files of a series usually share are compared by the object that holds them all.
    """
    own = sorted(PER_SLICE_TAGS.intersection(tag for a in attributes for tag in a.tags))
    names = tuple(attribute.name for attribute in attributes)
    distinct: dict[object, Slice] = {}
    for slice_ in slices:
        header = slice_.header
        key: tuple[object, ...] = (id(header.shared), *map(header.elements.own.get, own))
        if slice_.multiframe:
            key = (*key, *map(slice_.phase.get, names))
        distinct.setdefault(key, slice_)
    return tuple(distinct.values())
