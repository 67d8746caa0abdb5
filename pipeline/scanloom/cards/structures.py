"""The structures that a bundle's metadata name, with codes and colours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from scanloom.cards.card import Argmax, Decision
from scanloom.cards.codes import coding, color
from scanloom.cards.config import short
from scanloom.cards.metadata import CodeFields, StructureFields, TensorFormat
from scanloom.core import Code, Reason, ScanError, Structure

_BACKGROUND: Final = frozenset(
    {"background", "bg", "other", "others", "everything else", "none", "unlabeled", "unlabelled"}
)


def read_structures(
    output: TensorFormat, decision: Decision, said: Mapping[str, StructureFields]
) -> tuple[Structure, ...]:
    """Return the structures in the order of their numbers.

    Parameters
    ----------
    output : TensorFormat
        Names each channel in `channel_def`, or each label in `label_def`.
    decision : Argmax or Threshold
        Argmax: channel n is structure n, and channel 0 must be the background. Threshold:
        channel n is structure n + 1, and a background channel is none.
    said : mapping
        What the entry "scanloom" says of structures, by their labels.

    Raises
    ------
    ScanError
        MODEL_DAMAGED where a channel has no name, two have the same, or `said` names none of
        them; MODEL_UNSUPPORTED where argmax has no background.
    """
    names = output.channel_def or output.label_def
    missing = [n for n in range(output.num_channels) if not names.get(str(n), "").strip()]
    if missing:
        raise ScanError(
            Reason.MODEL_DAMAGED, f"the metadata name no channel {missing[0]} in channel_def"
        )
    first = 0 if isinstance(decision, Argmax) else 1
    if first == 0 and names["0"].strip().lower() not in _BACKGROUND:
        raise ScanError(
            Reason.MODEL_UNSUPPORTED, f"channel 0 is {short(names['0'])!r}, not the background"
        )
    found = [
        _structure(names[str(n)].strip(), n + first, said)
        for n in range(output.num_channels)
        if names[str(n)].strip().lower() not in _BACKGROUND
    ]
    labels = [structure.label for structure in found]
    wrong = [label for label in labels if labels.count(label) > 1] or [*set(said) - set(labels)]
    if wrong or not found:
        raise ScanError(
            Reason.MODEL_DAMAGED,
            f"there is not one structure {short(sorted(wrong)[0])!r}" if wrong else "no structure",
        )
    return tuple(found)


def _structure(name: str, number: int, said: Mapping[str, StructureFields]) -> Structure:
    label = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:64].strip("_")
    if not label:
        raise ScanError(Reason.MODEL_DAMAGED, f"the name {short(name)!r} has no letter")
    fields = said.get(label, StructureFields())
    found = coding(name)
    rgb = fields.color or color(number)
    if not all(0 <= part <= 255 for part in rgb):
        raise ScanError(Reason.MODEL_DAMAGED, f"scanloom.structures.{label}.color is no colour")
    words = re.sub(r"[_\s]+", " ", name)
    return Structure(
        label=label,
        number=number,
        name=fields.name or words[:1].upper() + words[1:64],
        category=_code(fields.category) or found.category,
        type=_code(fields.type) or found.type,
        color=rgb,
        laterality=_code(fields.laterality) or (None if fields.type else found.laterality),
        experimental=fields.experimental,
    )


def _code(fields: CodeFields | None) -> Code | None:
    return None if fields is None else Code(fields.value, fields.scheme, fields.meaning)
