"""Less work than a card says, and the words for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scanloom.cards.card import FastPreset, ModelCard, Window
from scanloom.cards.requested import describe_changes, requested_card
from scanloom.core import ComputeOptions
from support import model_cards

WINDOW = Window((8, 8, 8), overlap=0.5, mirror=(0, 1, 2))


@pytest.fixture
def card(tmp_path: Path) -> ModelCard:
    weights = model_cards.small_weights(tmp_path)
    card = model_cards.card(weights, window=WINDOW)
    return replace(card, folds=(card.weights,) * 4)


OPTIONS: dict[str, tuple[ComputeOptions, Window, int, str]] = {
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


@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_window_and_folds(card: ModelCard, name: str) -> None:
    compute, window, folds, description = OPTIONS[name]

    requested = requested_card(card, compute)

    assert requested.window == window
    assert len(requested.folds) == folds
    assert describe_changes(card, requested) == description


def test_a_smaller_overlap_of_the_model_is_kept(card: ModelCard) -> None:
    small = replace(card, window=replace(WINDOW, overlap=0.1))
    assert requested_card(small, ComputeOptions(fast=True)).window.overlap == 0.1


def test_a_window_of_the_whole_scan_has_no_overlap(card: ModelCard) -> None:
    whole = replace(card, window=Window(None, overlap=0.5), folds=())
    requested = requested_card(whole, ComputeOptions(fast=True))
    assert describe_changes(whole, requested) == ""


def test_the_preset_of_a_card_takes_the_place_of_the_general_one(card: ModelCard) -> None:
    preset = FastPreset(0.4, (2,), folds=2, spacing=(3.0, 3.0, 3.0), precisions=("bfloat16",))
    own = replace(card, fast=preset)

    requested = requested_card(own, ComputeOptions(fast=True))

    assert requested.window == replace(WINDOW, overlap=0.4, mirror=(2,))
    assert (len(requested.folds), requested.grid.spacing) == (1, (3.0, 3.0, 3.0))
    assert requested.precisions == ("float32", "bfloat16")
    assert describe_changes(own, requested) == (
        "3 x 3 x 3 mm, 2 of 5 folds, mirrored along 1 axis, overlap 0.4 instead of 0.5, "
        "bfloat16 allowed"
    )
    assert requested_card(requested, ComputeOptions(fast=True)) == requested
    assert requested_card(own, ComputeOptions()) is own
    beside = requested_card(own, ComputeOptions(fast=True, mirror="no", overlap=0.1))
    assert beside.window == replace(WINDOW, overlap=0.1, mirror=())


def test_a_coarser_model_runs_instead(card: ModelCard, tmp_path: Path) -> None:
    """The coarser model is named in the card; results keep the name of the requested model."""
    (tmp_path / "coarser").mkdir()
    coarser = replace(
        model_cards.card(model_cards.small_weights(tmp_path / "coarser", seed=1), window=WINDOW),
        name="coarser",
    )
    own = replace(card, fast=FastPreset(card=coarser))

    requested = requested_card(own, ComputeOptions(fast=True))

    assert (requested.name, requested.weights) == (card.name, coarser.weights)
    assert requested.window == WINDOW
    assert describe_changes(own, requested) == "coarser instead"
    assert requested_card(requested, ComputeOptions(fast=True)) == requested


def test_a_coarser_model_has_the_same_structures(card: ModelCard) -> None:
    fewer = replace(card, structures=card.structures[:1])
    with pytest.raises(ValueError, match="same structures"):
        replace(card, fast=FastPreset(card=fewer))


def test_parts_are_run_by_the_preset_of_the_whole(card: ModelCard) -> None:
    whole = replace(card, parts=(card, card), fast=FastPreset(overlap=0.1))

    requested = requested_card(whole, ComputeOptions(fast=True))

    assert [submodel.window for submodel in requested.parts] == [replace(WINDOW, overlap=0.1)] * 2
    assert describe_changes(whole, requested) == "overlap 0.1 instead of 0.5"
