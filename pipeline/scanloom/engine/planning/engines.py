"""What is known of engines for the models of a plan on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scanloom.cards.card import ModelCard
from scanloom.cards.parts import networks


def engine_notes(cards: Sequence[ModelCard]) -> Iterator[str]:
    """Yield a line for each engine that was measured with a network of the models."""
    from scanloom.inference.engines.verdicts import all_verdicts

    names = {network.name for card in cards for network in networks(card)}
    for verdict in all_verdicts():
        if verdict.model in names:
            yield f"{verdict.model} with {verdict}"
