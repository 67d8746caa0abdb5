"""`card.json` gives the card that was written, and nothing that is not one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scanloom.cards import card as cards
from scanloom.cards.card import ModelCard, Weights
from scanloom.cards.card_file import card_digest, is_card, read_card, weights_file, write_card
from scanloom.convert.conversion import convert_job
from scanloom.convert.store import shipped_models
from scanloom.core import Flag, Reason, ScanError
from support.model_cards import card, small_weights


@pytest.fixture
def full(tmp_path: Path) -> ModelCard:
    """Return a card that has a value of each kind, its weights where its file expects them."""
    weights = card(small_weights(tmp_path)).weights
    (tmp_path / "weights").mkdir()
    weights.file.rename(weights_file(tmp_path, weights.sha256))
    weights = Weights(weights_file(tmp_path, weights.sha256), weights.sha256, "a" * 64)
    plain: dict[str, Any] = {
        "before": (cards.ScaleRange(-57.0, 164.0, None, 1.0, clip=True), cards.Round()),
        "after": (cards.Normalize(nonzero=True), cards.Truncate()),
        "decision": cards.Paint(((0, 2), (1, 1)), cards.SIGMOID_ABOVE_HALF, inclusive=False),
        "cleaning": (
            cards.KeepLargest((1, 2), when="before"),
            cards.RemoveSmall(),
            cards.RemoveSmallObjects(9.5, "mm3", together=True),
            cards.FillHoles((1,), 6),
        ),
        "checks": cards.Checks(low=cards.Range(-1100, 0), refuse=("spacing",)),
        "grid": cards.NetworkGrid(
            None,
            (None, 1.0, 2.0),
            order=(2, 1, 0),
            crop=cards.Crop("nonzero"),
            fits=(cards.Fit((None, 8, 9), crops=True, padding="reflect"),),
        ),
        "folds": (weights,),
        "flags": (Flag.CHECKPOINT_BEST,),
    }
    first = replace(card(weights.file, **plain), weights=weights)
    return replace(
        first,
        stage=cards.Stage(first, "crop", ("part-1",), 20.0, (cards.Truncate(),)),
        parts=(first, first),
        subset=cards.Stage(first, "crop", margin=10.0),
        fast=cards.FastPreset(0.25, mirror=(), card=first),
    )


def test_a_card_is_read_as_it_was_written(full: ModelCard, tmp_path: Path) -> None:
    write_card(full, tmp_path)

    assert is_card(tmp_path)
    assert read_card(tmp_path) == full
    assert card_digest(read_card(tmp_path)) == card_digest(full)


def test_a_model_may_be_moved(full: ModelCard, tmp_path: Path) -> None:
    write_card(full, tmp_path)
    shutil.copytree(tmp_path, tmp_path / "elsewhere")

    moved = read_card(tmp_path / "elsewhere")

    assert moved.weights.file.is_file()
    assert moved.weights.file.is_relative_to(tmp_path / "elsewhere")
    assert card_digest(moved) == card_digest(full)


def changed(**entries: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda document: document.update(entries)


SPAN = {"low": 1, "high": 2}
USUAL = {"structure": "part_1", "quantity": "volume_ml", "range": SPAN, "source": ""}
LIES = {"start": ["part-1"], "end": ["part-2"], "direction": [0, 0, 1], "within": 30, "source": ""}
FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "unknown entry": (changed(colour="red"), "colour is unknown"),
    "unknown entry within": (lambda d: d["grid"].update(colour=1), "grid.colour is unknown"),
    "unknown entry of a step": (lambda d: d["after"][0].update(colour=1), "colour is unknown"),
    "missing entry": (lambda d: d.pop("window"), "window is missing"),
    "another type": (changed(channels="CT"), "channels is not a list, but 'CT'"),
    "another choice": (lambda d: d["grid"].update(mode="best"), "grid.mode is not 'linear',"),
    "impossible value": (lambda d: d["window"].update(overlap=2.0), "overlap must be from 0"),
    "window without voxels": (lambda d: d["window"].update(size=[0, 8, 8]), "window: "),
    "no spacing": (lambda d: d["grid"].update(spacing=[1, 1, 0]), "must be positive"),
    "axes that are none": (lambda d: d["grid"].update(orientation="RRR"), "must be axis codes"),
    "an axis twice": (lambda d: d["grid"].update(order=[0, 0, 1]), "grid: "),
    "a structure twice": (lambda d: d["structures"].append(d["structures"][0]), "ModelCard: "),
    "a region below the first": (
        changed(decision={"class": "Paint", "regions": [[-1, 1]]}),
        "Paint: ",
    ),
    "a region of no structure": (
        changed(decision={"class": "Paint", "regions": [[0, 999]]}),
        "ModelCard: ",
    ),
    "a range of no structure": (changed(reference_ranges=[USUAL]), "value is of 'part_1', which"),
    "a direction to no structure": (changed(reference_directions=[{**LIES, "end": ["x"]}]), "'x'"),
    "a direction from nothing": (
        changed(reference_directions=[{**LIES, "start": []}]),
        "reference_directions.0: a reference direction must have structures at both ends",
    ),
    "no direction": (
        changed(reference_directions=[{**LIES, "direction": [0, 0, 0]}]),
        "reference_directions.0: a reference direction must not be 0",
    ),
    "an error of no structure": (
        changed(limitations=[{"text": "Misses it.", "where": "part_1"}]),
        "limitation or usual value is of 'part_1'",
    ),
    "control characters": (changed(title="\x1b]0;owned\x07"), "title has control characters"),
    "a code of two values": (
        lambda d: d["structures"][0]["type"].update(value="1\\2"),
        "structures.0.type: a code has no text that DICOM alters",
    ),
    "control characters in a list": (changed(limitations=["a\nb"]), "limitations has control"),
    "name with a path": (changed(name="../x"), "ModelCard: "),
    "unknown class": (lambda d: d["after"][0].update({"class": "Popen"}), "no class 'Popen'"),
    "unknown flag": (changed(flags=[{"class": "Flag", "name": "X"}]), "KeyError"),
    "path for a hash": (lambda d: d["weights"].update(sha256="../../etc/passwd"), "ValueError"),
    "file for a hash": (lambda d: d["weights"].update({"class": None}), "weights.file is missing"),
    "step in another place": (lambda d: d.update(decision=d["after"][0]), "decision"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_is_no_card_is_refused(fault: str, full: ModelCard, tmp_path: Path) -> None:
    change, expected = FAULTS[fault]
    write_card(full, tmp_path)
    document = json.loads((tmp_path / "card.json").read_text())
    change(document)
    (tmp_path / "card.json").write_text(json.dumps(document))

    with pytest.raises(ScanError) as caught:
        read_card(tmp_path)

    assert caught.value.reason is Reason.MODEL_DAMAGED
    assert expected in caught.value.detail


@pytest.mark.parametrize("text", ["", "[]", "{", "3", '{"name": "x"}', "[" * 100_000, "\udcff"])
def test_text_that_is_no_card_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text(text, errors="surrogateescape")

    with pytest.raises(ScanError) as caught:
        read_card(tmp_path)
    assert caught.value.reason is Reason.MODEL_DAMAGED


def test_a_later_schema_is_told(full: ModelCard, tmp_path: Path) -> None:
    write_card(full, tmp_path)
    text = (tmp_path / "card.json").read_text()
    (tmp_path / "card.json").write_text(text.replace('"schema": 1', '"schema": 2'))

    with pytest.raises(ScanError) as caught:
        read_card(tmp_path)
    assert caught.value.reason is Reason.NEWER_VERSION


def test_models_that_ship_are_those_of_their_bundles(tmp_path: Path) -> None:
    """`card.json` and weights next to a bundle equal those of a new conversion."""
    for folder in (path for path in shipped_models().iterdir() if is_card(path)):
        out = tmp_path / folder.name
        out.mkdir()
        convert_job(folder, {}, out)

        files = sorted(file.relative_to(out) for file in out.rglob("*") if file.is_file())
        assert len(files) == 2
        for file in files:
            assert (folder / file).read_bytes() == (out / file).read_bytes()
