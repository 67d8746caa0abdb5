"""The work of a network is the voxels that it processes, with each fold and each flip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scanloom.cards.card import NetworkGrid, Window
from scanloom.inference.memory import window_values
from support import model_cards


def test_voxels_of_all_windows_flips_and_folds(tmp_path: Path) -> None:
    card = model_cards.card(
        model_cards.small_weights(tmp_path), grid=NetworkGrid(), window=Window((16, 16, 16), 0.5)
    )
    grid = model_cards.grid((32, 24, 10))  # 3, 2 and 1 windows
    mirrored = replace(card, window=replace(card.window, mirror=(0, 2)))

    assert window_values(card, grid) == 6 * 16**3
    assert window_values(mirrored, grid) == 4 * 6 * 16**3
    assert window_values(replace(mirrored, folds=(card.weights,)), grid) == 2 * 4 * 6 * 16**3


def test_voxels_of_planes(tmp_path: Path) -> None:
    card = model_cards.card(
        model_cards.small_weights(tmp_path),
        grid=NetworkGrid(),
        window=Window((32, 24, 1), 0.5, starts="even", plane=2),
    )

    assert window_values(card, model_cards.grid((33, 24, 10))) == 10 * 2 * 32 * 24
