"""Less work than a card says, and the words for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scanloom.cards.card import ModelCard, Window
from scanloom.cards.requested import describe_changes, requested_card
from scanloom.core import ComputeOptions
from support import model_cards

WINDOW = Window((8, 8, 8), overlap=0.5, mirror=(0, 1, 2))


@pytest.fixture
def card(tmp_path: Path) -> ModelCard:
    weights = model_cards.small_weights(tmp_path)
    card = model_cards.card(weights, window=WINDOW)
    return replace(card, folds=(card.weights,) * 4)


ASKED: dict[str, tuple[ComputeOptions, Window, int, str]] = {
    "nothing": (ComputeOptions(), WINDOW, 4, ""),
    "fast": (
        ComputeOptions(fast=True),
        replace(WINDOW, overlap=0.25, mirror=()),
        0,
        "1 of 5 folds, not mirrored, overlap 0.25 instead of 0.5",
    ),
    "fast, but": (
        ComputeOptions(fast=True, overlap=0.5),
        replace(WINDOW, mirror=()),
        0,
        "1 of 5 folds, not mirrored",
    ),
    "overlap": (
        ComputeOptions(overlap=0.75),
        replace(WINDOW, overlap=0.75),
        4,
        "overlap 0.75 instead of 0.5",
    ),
    "mirror": (ComputeOptions(mirror="no"), replace(WINDOW, mirror=()), 4, "not mirrored"),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_options_change(card: ModelCard, name: str) -> None:
    compute, window, folds, words = ASKED[name]

    requested = requested_card(card, compute)

    assert requested.window == window
    assert len(requested.folds) == folds
    assert describe_changes(card, requested) == words


def test_a_smaller_overlap_of_the_model_is_kept(card: ModelCard) -> None:
    small = replace(card, window=replace(WINDOW, overlap=0.1))
    assert requested_card(small, ComputeOptions(fast=True)).window.overlap == 0.1


def test_a_window_of_the_whole_scan_has_no_overlap(card: ModelCard) -> None:
    whole = replace(card, window=Window(None, overlap=0.5), folds=())
    requested = requested_card(whole, ComputeOptions(fast=True))
    assert describe_changes(whole, requested) == ""
