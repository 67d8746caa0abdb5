"""Read the structures of a MeshNet: names and colours of its classes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from pydantic import BaseModel, Field

from scanloom.cards.codes import coding
from scanloom.core import Reason, ScanError, Structure, printable, slug

_AS_CODED: Final = {"ventricle": "brain ventricle"}
"""Names that mean a part of the brain here, by the name under which codes are looked up."""


class LabelFields(BaseModel, frozen=True):
    """An entry of `labels.json`."""

    number: int = Field(ge=0)
    name: str = Field(min_length=1, max_length=64)
    color: tuple[int, int, int]


class Colormap(BaseModel, frozen=True):
    """`colormap.json` of brainchop: a colour and a name for each class, in their order."""

    red: list[int] = Field(alias="R")
    green: list[int] = Field(alias="G")
    blue: list[int] = Field(alias="B")
    labels: list[str]

    def fields(self) -> list[LabelFields]:
        """Return the entries of the classes."""
        rows = zip(self.labels, self.red, self.green, self.blue, strict=True)
        return [
            LabelFields(number=n, name=name, color=(red, green, blue))
            for n, (name, red, green, blue) in enumerate(rows)
        ]


def make_structures(labels: Sequence[LabelFields], classes: int) -> tuple[Structure, ...]:
    """Return the structures of classes 1 and above; class 0 is the background.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if there is not one name for each class, or a name or colour is invalid.
    """
    ordered = sorted(labels, key=lambda label: label.number)
    if [label.number for label in ordered] != list(range(classes)) or classes < 2:
        detail = f"the labels do not name the network's {classes} classes"
        raise ScanError(Reason.MODEL_DAMAGED, detail)
    structures = tuple(_structure(label) for label in ordered[1:])
    if len({structure.label for structure in structures}) < len(structures):
        raise ScanError(Reason.MODEL_DAMAGED, "two structures have the same name")
    return structures


def _structure(label: LabelFields) -> Structure:
    codes = coding(_AS_CODED.get(label.name.lower(), label.name))
    text = re.sub(r"[_\s*]+", " ", label.name).strip()
    try:
        return Structure(
            label=slug(label.name),
            number=label.number,
            name=text[:1].upper() + text[1:],
            category=codes.category,
            type=codes.type,
            color=label.color,
            laterality=codes.laterality,
        )
    except ValueError as exc:
        detail = f"the structure {printable(label.name)!r} has an invalid name or colour"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc
