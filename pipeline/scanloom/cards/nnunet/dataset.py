"""Reads nnU-Net's `dataset.json`: channels and labels."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from scanloom.cards.card import SIGMOID_ABOVE_HALF, Argmax, Decision, Paint
from scanloom.cards.codes import coding, color
from scanloom.cards.monai.config import truncate
from scanloom.cards.monai.files import read_json
from scanloom.cards.monai.metadata import Text
from scanloom.cards.nnunet.plans import Fields, parse
from scanloom.core import Reason, ScanError, Structure, slug

_MODALITIES: Final = {
    "CT": ("ct", "cta", "cbct", "hu"),
    "PT": ("pt", "pet", "suv", "fdg"),
    "NM": ("nm", "spect"),
    "MR": (
        *("mr", "mri", "t1", "t1w", "t1c", "t1ce", "t1gd", "t1n", "t1wce", "t2", "t2w", "t2f"),
        *("t2s", "flair", "dwi", "adc", "swi", "tof", "mra", "dce", "dixon", "pdw", "dti", "bold"),
    ),
}
"""Words in the names of channels that state a modality."""

MAX_LABELS: Final = 1000
"""Most labels of a model; TotalSegmentator's largest has 118."""
Label = Annotated[int, Field(ge=0, le=65535)]


class _Dataset(Fields):
    """`dataset.json`; `modality` is the former name of `channel_names`."""

    channel_names: dict[str, Text] = Field(default_factory=dict)
    modality: dict[str, Text] = Field(default_factory=dict)
    labels: dict[str, Label | tuple[Label, ...]] = Field(max_length=MAX_LABELS)
    regions_class_order: tuple[Label, ...] | None = None
    name: Text = ""
    description: Text = ""
    reference: Text = ""
    licence: Text = ""
    license: Text = ""
    release: Text = ""


@dataclass(frozen=True)
class Dataset:
    """Channels and labels of a model.

    Parameters
    ----------
    channels : tuple of str
        Names of the input channels.
    structures : tuple of Structure
        By number.
    decision : Argmax or Paint
        How labels follow from the scores.
    outputs : int
        Channels of the network's output.
    foreground : tuple of int
        Numbers of all labels except background and `ignore`.
    name, description, attribution, license, version : str
        As stated; empty if not.
    """

    channels: tuple[str, ...]
    structures: tuple[Structure, ...]
    decision: Decision
    outputs: int
    foreground: tuple[int, ...]
    name: str
    description: str
    attribution: str
    license: str
    version: str


def read_dataset(folder: Path) -> Dataset:
    """Read `dataset.json` of a model.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if it is missing, an entry is missing or invalid, labels skip numbers, or
        regions have no order.
    """
    content = parse(_Dataset, read_json(folder, "dataset.json"), "dataset.json")
    labels = {
        name: (value,) if isinstance(value, int) else value
        for name, value in content.labels.items()
        if name != "ignore"
    }
    foreground = _foreground(content, labels)
    classes = {name: values for name, values in labels.items() if set(values) != {0}}
    if any(len(values) > 1 for values in labels.values()):
        structures, decision = _regions(classes, content.regions_class_order)
        outputs = len(classes)
    else:
        numbers = [values[0] for values in classes.values()]
        structures, decision = name_structures(list(classes), numbers), Argmax()
        outputs = len(foreground) + 1
    return Dataset(
        channels=_channels(content.channel_names or content.modality),
        structures=structures,
        decision=decision,
        outputs=outputs,
        foreground=foreground,
        name=content.name,
        description=content.description,
        attribution=content.reference,
        license=content.licence or content.license,
        version=content.release,
    )


def modality_of(name: str) -> str | None:
    """Return the modality that a channel's name states, None if it states none."""
    terms = set(re.findall(r"[a-z0-9]+", name.lower()))
    return next((m for m, known in _MODALITIES.items() if terms & set(known)), None)


def _channels(names: dict[str, str]) -> tuple[str, ...]:
    """Return the names of the channels in the order of their indices."""
    if sorted(names) != sorted(str(n) for n in range(len(names))) or not names:
        raise ScanError(Reason.MODEL_DAMAGED, "dataset.json: channel_names skip numbers")
    return tuple(names[str(n)].strip() or f"channel {n}" for n in range(len(names)))


def _foreground(content: _Dataset, labels: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the numbers of all labels but the background; refuse an invalid set of labels."""
    if labels.get("background") != (0,):
        raise ScanError(Reason.MODEL_DAMAGED, "dataset.json: label 0 is not the background")
    empty = [name for name, values in labels.items() if not values]
    if empty:
        detail = f"dataset.json: the region {truncate(empty[0])!r} is empty"
        raise ScanError(Reason.MODEL_DAMAGED, detail)
    numbers = sorted({number for values in labels.values() for number in values})
    if numbers != list(range(len(numbers))):
        raise ScanError(Reason.MODEL_DAMAGED, "dataset.json: labels skip numbers")
    if len(numbers) < 2:
        raise ScanError(Reason.MODEL_DAMAGED, "dataset.json: there is no label but the background")
    ignored = content.labels.get("ignore")
    if ignored is not None and ignored != len(numbers):
        raise ScanError(Reason.MODEL_DAMAGED, "dataset.json: `ignore` is not the last label")
    return tuple(numbers[1:])


def _regions(
    classes: dict[str, tuple[int, ...]], order: tuple[int, ...] | None
) -> tuple[tuple[Structure, ...], Decision]:
    """Return structures of regions: one number each, painted over those of regions before it.

    A structure of which later regions cover a part is named as the remainder.
    """
    if order is None or len(order) != len(classes):
        detail = "dataset.json: regions_class_order does not have a number for each region"
        raise ScanError(Reason.MODEL_DAMAGED, detail)
    if len(set(order)) != len(order) or not all(order):
        detail = "dataset.json: regions_class_order has a number twice, or the background"
        raise ScanError(Reason.MODEL_DAMAGED, detail)
    names, values = list(classes), list(classes.values())
    covered = [any(set(v) & set(later) for later in values[n + 1 :]) for n, v in enumerate(values)]
    shown = [
        f"{name} (remainder)" if under else name for name, under in zip(names, covered, strict=True)
    ]
    paint = Paint(tuple(enumerate(order)), SIGMOID_ABOVE_HALF, inclusive=False)
    return name_structures(shown, list(order)), paint


def name_structures(names: list[str], numbers: list[int]) -> tuple[Structure, ...]:
    """Return structures with codes and colours by name, ordered by number.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if two have the same number.
    """
    if len(set(numbers)) != len(numbers):
        raise ScanError(Reason.MODEL_DAMAGED, "dataset.json: two labels have the same number")
    labels = [slug(name) or f"label_{n}" for name, n in zip(names, numbers, strict=True)]
    if len(set(labels)) != len(labels):
        labels = [f"{label[:58]}_{n}" for label, n in zip(labels, numbers, strict=True)]
    structures = []
    for name, label, number in zip(names, labels, numbers, strict=True):
        codes, text = coding(name), truncate(re.sub(r"[_\s]+", " ", name).strip(), 60)
        structures.append(
            Structure(
                label=label,
                number=number,
                name=text[:1].upper() + text[1:] or label,
                category=codes.category,
                type=codes.type,
                color=color(number),
                laterality=codes.laterality,
            )
        )
    return tuple(sorted(structures, key=lambda structure: structure.number))
