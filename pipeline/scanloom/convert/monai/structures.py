"""Read the structures in a bundle's metadata, with codes and colours."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from scanloom.cards.card import Argmax, Decision, Paint
from scanloom.cards.codes import coding, color
from scanloom.convert.monai.config.values import truncate
from scanloom.convert.monai.metadata import CodeFields, StructureFields, TensorFormat
from scanloom.core import Code, Reason, ScanError, Structure

_BACKGROUND: Final = frozenset(
    {"background", "bg", "other", "others", "everything else", "none", "unlabeled", "unlabelled"}
)
REST: Final = " (rest)"
"""Ending of the name of a region without the regions in it."""


def read_structures(
    output: TensorFormat,
    decision: Decision,
    fields_by_label: Mapping[str, StructureFields],
    rests: Collection[int] = (),
) -> tuple[Structure, ...]:
    """Return the structures, ordered by number.

    Parameters
    ----------
    output : TensorFormat
        Names each channel in `channel_def`, or each label in `label_def`.
    decision : Argmax, Threshold or Paint
        Argmax: channel n is structure n, and channel 0 must be the background. Threshold: channel
        n is structure n + 1; background channels are dropped. Paint: each region has a number.
    fields_by_label : mapping
        Structures of the entry "scanloom", by label.
    rests : collection of int
        Numbers of structures that are only the part of their region without the regions in it, and
        are named so.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if a channel has no name, two have the same, or `fields_by_label` has an
        unknown label; MODEL_UNSUPPORTED if argmax has no background.
    """
    names = output.channel_def or output.label_def
    missing = [n for n in range(output.num_channels) if not names.get(str(n), "").strip()]
    if missing:
        raise ScanError(Reason.MODEL_DAMAGED, f"channel {missing[0]} has no name in channel_def")
    first = 0 if isinstance(decision, Argmax) else 1
    if first == 0 and names["0"].strip().lower() not in _BACKGROUND:
        raise ScanError(
            Reason.MODEL_UNSUPPORTED, f"channel 0 is {truncate(names['0'])!r}, not the background"
        )
    numbers = {n: n + first for n in range(output.num_channels)}
    if isinstance(decision, Paint):
        numbers = dict(sorted(decision.regions, key=lambda region: region[1]))
    structures = [
        _structure(names[str(n)].strip() + REST * (number in rests), number, fields_by_label)
        for n, number in numbers.items()
        if names[str(n)].strip().lower() not in _BACKGROUND
    ]
    labels = [structure.label for structure in structures]
    invalid = [label for label in labels if labels.count(label) > 1] or [
        *set(fields_by_label) - set(labels)
    ]
    if invalid or not structures:
        raise ScanError(
            Reason.MODEL_DAMAGED,
            f"structure {truncate(sorted(invalid)[0])!r} is missing or defined twice"
            if invalid
            else "the metadata name no structures",
        )
    return tuple(structures)


def _structure(name: str, number: int, fields_by_label: Mapping[str, StructureFields]) -> Structure:
    label = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:64].strip("_")
    if not label:
        raise ScanError(
            Reason.MODEL_DAMAGED, f"the name {truncate(name)!r} has neither a letter nor a digit"
        )
    fields = fields_by_label.get(label, StructureFields())
    codes = coding(name.removesuffix(REST))
    rgb = fields.color or color(number)
    if not all(0 <= value <= 255 for value in rgb):
        raise ScanError(
            Reason.MODEL_DAMAGED, f"scanloom.structures.{label}.color is not an RGB colour"
        )
    text = re.sub(r"[_\s]+", " ", name)
    return Structure(
        label=label,
        number=number,
        name=fields.name or text[:1].upper() + text[1:64],
        category=_code(fields.category) or codes.category,
        type=_code(fields.type) or codes.type,
        color=rgb,
        laterality=_code(fields.laterality) or (None if fields.type else codes.laterality),
        experimental=fields.experimental,
    )


def _code(fields: CodeFields | None) -> Code | None:
    return None if fields is None else Code(fields.value, fields.scheme, fields.meaning)
