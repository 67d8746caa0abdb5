"""`scanloom models` tells what a bundle says."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from scanloom.cards import store
from support.commands import scanloom, write_tiny_bundle


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the user two models: a good one, and one whose weights are missing."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    folder = tmp_path / "scanloom" / "models"
    write_tiny_bundle(folder, "mine")
    broken = write_tiny_bundle(tmp_path / "made", "broken").rename(folder / "broken")
    (broken / "models" / "model.pt").unlink()
    assert store.user_models() == folder
    return folder


def test_list_shows_own_models_and_what_is_wrong_with_them(own_models: Path) -> None:
    ended = scanloom("models", "list")

    lines = {line.split()[0]: line for line in ended.out.splitlines() if line.strip()}
    assert ended.code == 0
    assert "CT" in lines["mine"]
    assert "can't be used" in lines["broken"]


def test_list_as_json(own_models: Path) -> None:
    models = {m["name"]: m for m in scanloom("models", "list", "--json").document["models"]}

    assert models["mine"]["structures"] == ["spleen", "liver"]
    assert models["mine"]["error"] is None
    assert models["broken"]["error"]["code"].startswith("MODEL_")


def test_show_tells_what_a_person_must_know(own_models: Path) -> None:
    digest = hashlib.sha256((own_models / "mine/models/model.pt").read_bytes()).hexdigest()
    ended = scanloom("models", "show", "mine")

    assert ended.code == 0
    reported = " ".join(ended.out.split())
    for word in (digest, "1.5 x 1.5 x 2 mm", "RAS", "UNet", "float32", "Tests only", "SCT"):
        assert word in reported


def test_show_as_json(own_models: Path) -> None:
    model = scanloom("models", "show", str(own_models / "mine"), "--json").document["model"]

    assert model["spacing_mm"] == [1.5, 1.5, 2.0]
    assert [s["number"] for s in model["structures"]] == [1, 2]
    assert model["structures"][0]["type"]["scheme"] == "SCT"
    assert model["channels"] == [{"name": "image", "modality": "CT"}]


def test_show_of_nothing_says_the_nearest(own_models: Path) -> None:
    ended = scanloom("models", "show", "mien")

    assert ended.code == 65
    assert "did you mean mine?" in ended.err
