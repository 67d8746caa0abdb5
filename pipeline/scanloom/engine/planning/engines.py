"""A plan's statements on its models: engines that were measured, and work that is left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scanloom.cards.card import ModelCard
from scanloom.cards.parts import networks
from scanloom.cards.requested import describe_changes


def engine_notes(cards: Sequence[ModelCard]) -> Iterator[str]:
    """Yield a line for each engine that was measured with a network of the models."""
    from scanloom.inference.engines.verdicts import all_verdicts

    names = {network.name for card in cards for network in networks(card)}
    for verdict in all_verdicts():
        if verdict.model in names:
            yield f"{verdict.model} with {verdict}"


def change_notes(cards: Sequence[ModelCard], requested: Sequence[ModelCard]) -> Iterator[str]:
    """Yield a line for each model that options ask to run otherwise than its card says."""
    for card, changed in zip(cards, requested, strict=True):
        if changes := describe_changes(card, changed):
            yield f"{card.name}: {changes}"
