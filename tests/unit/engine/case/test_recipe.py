"""A recipe contains everything that can change a result, and nothing else."""

from __future__ import annotations

from dataclasses import field, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from scanloom.cards import card as cards
from scanloom.cards.card import Checks, Limitation, ModelCard
from scanloom.cards.card_file import card_digest
from scanloom.core import Code, ComputeOptions, Outputs, ReadOptions
from scanloom.core.measurement import Range, ReferenceRange
from scanloom.engine.case.recipe import (
    recipe_document,
    recipe_hash,
)
from scanloom.options import Radiomics
from support.model_cards import card

OPTIONS = (ReadOptions(), ComputeOptions())


@pytest.fixture
def full(tmp_path: Path) -> ModelCard:
    """Return a card that has a value of each class."""
    weights = tmp_path / "model.pt"
    weights.write_bytes(b"weights")
    steps = (cards.ScaleRange(-57.0, 164.0, 0.0, 1.0, clip=True), cards.ScaleMinMax())
    left_side = Code("7771000", "SCT", "Left")
    base = card(
        weights,
        before=steps,
        after=(cards.Normalize(nonzero=True),),
        decision=cards.Threshold(0.25),
        cleaning=(cards.KeepLargest((1, 2), when="before"),),
        checks=Checks(low=Range(-1100, 0), refuse=("spacing",)),
        air_below=-500.0,
    )
    first, *remaining = base.structures
    return replace(base, structures=(replace(first, laterality=left_side), *remaining))


def later(value: Any, **new: Any) -> Any:
    """Return the value as of a later version, whose class has new fields with defaults."""
    kind = type(value)
    defaults = [(name, Any, field(default=None)) for name in new]
    later_kind = make_dataclass(kind.__name__, defaults, bases=(kind,), frozen=True)
    return later_kind(**{f: getattr(value, f) for f in kind.__dataclass_fields__}, **new)


@pytest.mark.parametrize("name", ["grid", "window", "weights", "network", "checks", "decision"])
def test_a_new_field_counts_if_it_differs_from_its_default(full: ModelCard, name: str) -> None:
    before = card_digest(full)
    value = getattr(full, name)
    assert card_digest(replace(full, **{name: later(value, new=None)})) == before
    assert card_digest(replace(full, **{name: later(value, new=1)})) != before


@pytest.mark.parametrize("name", ["before", "after", "cleaning", "channels", "structures"])
def test_the_same_holds_in_sequences(full: ModelCard, name: str) -> None:
    before = card_digest(full)
    first, *remaining = getattr(full, name)
    assert card_digest(replace(full, **{name: (later(first, new=None), *remaining)})) == before
    assert card_digest(replace(full, **{name: (later(first, new=1), *remaining)})) != before


def test_the_same_holds_of_cards_and_outputs(full: ModelCard) -> None:
    assert card_digest(later(full, new=None)) == card_digest(full)
    assert card_digest(later(full, new=1)) != card_digest(full)
    outputs = Outputs()
    before = recipe_hash([full], OPTIONS, outputs)
    assert recipe_hash([full], OPTIONS, later(outputs, new=None)) == before
    assert recipe_hash([full], OPTIONS, later(outputs, new=1)) != before


def test_a_field_counts_if_it_has_no_default_or_another_value() -> None:
    kind = make_dataclass("Later", [("a", int), ("b", int, field(default=2))], frozen=True)
    assert recipe_document(kind(1)) == {"a": 1}
    assert recipe_document(kind(1, 3)) == {"a": 1, "b": 3}


def test_settings_of_features_count_if_they_are_written() -> None:
    def document(*also: str, **settings: Any) -> dict[str, Any]:
        return recipe_document(Outputs(also=also, radiomics=Radiomics(**settings)))

    assert document("radiomics") == {"also": ["radiomics"]}
    assert document("radiomics", spacing=2) == document("radiomics")
    assert document("radiomics", bins=16) != document("radiomics")
    assert document("radiomics", bins=16)["radiomics"] == {"class": "Radiomics", "bins": 16}
    assert document(bins=16) == {}


def test_limitations_do_not_count(full: ModelCard) -> None:
    assert card_digest(
        replace(full, limitations=(Limitation("Misses ribs.", "head"),))
    ) == card_digest(full)


def test_reference_ranges_do_not_count(full: ModelCard) -> None:
    usual = ReferenceRange(full.structures[0].label, "mean_hu", Range(0.0, 9.0), "A page.")
    assert card_digest(replace(full, reference_ranges=(usual,))) == card_digest(full)


def test_reference_directions_do_not_count(full: ModelCard) -> None:
    label = full.structures[0].label
    usual = cards.ReferenceDirection((label,), (label,), (0.0, 0.0, 1.0), 30.0, "A page.")
    assert card_digest(replace(full, reference_directions=(usual,))) == card_digest(full)


def test_a_preset_counts_only_if_it_is_requested(full: ModelCard) -> None:
    own = replace(full, fast=cards.FastPreset(overlap=0.1))
    assert card_digest(own) == card_digest(full)
    assert recipe_hash([own], OPTIONS, Outputs()) == recipe_hash([full], OPTIONS, Outputs())
    fast = (ReadOptions(), ComputeOptions(fast=True))
    assert recipe_hash([own], fast, Outputs()) != recipe_hash([full], fast, Outputs())


def test_the_place_of_the_weights_does_not_count(full: ModelCard, tmp_path: Path) -> None:
    moved = replace(full.weights, file=tmp_path / "elsewhere.pt")
    assert card_digest(replace(full, weights=moved)) == card_digest(full)
