"""Models of several networks: which parts are needed, and how their labels are numbered."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.card import ModelCard


def needed_parts(card: ModelCard, labels: Collection[str] = ()) -> ModelCard:
    """Return a card with only the parts that have a requested structure; all if none is requested.

    The card's own structures remain. A `subset` of the card crops the scan to the requested
    structures that its rough model finds.
    """
    requested = set(labels)
    parts = tuple(p for p in card.parts if requested & {s.label for s in p.structures})
    if not requested or not parts:
        return card
    if card.subset is None or card.subset.stage is None:
        return replace(card, parts=parts)
    stage = card.subset.stage
    found = tuple(s.label for s in stage.card.structures if s.label in requested)
    return replace(card.subset, parts=parts, stage=replace(stage, labels=found))


def networks(card: ModelCard) -> Iterator[ModelCard]:
    """Yield the cards of all networks of a model in the order in which they run."""
    if card.stage is not None:
        yield from networks(card.stage.card)
    if not card.parts:
        yield card
    for part in card.parts:
        yield from networks(part)


def numbers_in(card: ModelCard, part: ModelCard) -> NDArray[np.uint16]:
    """Return a table from a part's numbers to the whole model's; 0 for labels that it lacks."""
    whole = {s.label: s.number for s in card.structures}
    table = np.zeros(max(s.number for s in part.structures) + 1, np.uint16)
    for structure in part.structures:
        table[structure.number] = whole.get(structure.label, 0)
    return table
