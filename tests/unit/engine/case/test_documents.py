"""The hashes of all weights that a model used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scanloom.cards.card import Stage, Weights
from scanloom.engine.case.documents import weights_of_networks
from support import model_cards


def test_weights_of_all_networks_are_listed(tmp_path: Path) -> None:
    card = model_cards.card(model_cards.small_weights(tmp_path))
    assert weights_of_networks(card) == {}
    fold = Weights(tmp_path / "fold", "f" * 64)
    first = replace(card, name="rough")
    whole = replace(card, folds=(fold,), stage=Stage(first, "channels"))
    assert weights_of_networks(whole) == {
        "networks": [
            {"name": "rough", "weights_sha256": [card.weights.sha256]},
            {"name": "by-hand", "weights_sha256": [card.weights.sha256, "f" * 64]},
        ]
    }
