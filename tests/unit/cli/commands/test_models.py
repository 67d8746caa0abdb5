"""`scanloom models` adds, shows, verifies and removes models."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from scanloom.convert import store
from scanloom.convert.store import find_model
from scanloom.inference.engines.cache import EngineTrial, exports_folder, save_measurement
from support.commands import scanloom, write_tiny_bundle


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the user two models: a good one, and one whose weights are missing."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    for name in ("SCANLOOM_MODELS", "SCANLOOM_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "scanloom" / "models"
    write_tiny_bundle(folder, "mine")
    broken = write_tiny_bundle(tmp_path / "made", "broken").rename(folder / "broken")
    (broken / "models" / "model.pt").unlink()
    assert store.user_models() == folder
    return folder


def test_list_shows_own_models_and_their_errors(own_models: Path) -> None:
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


def test_show_prints_hash_spacing_licence_and_codes(own_models: Path) -> None:
    digest = hashlib.sha256((own_models / "mine/models/model.pt").read_bytes()).hexdigest()
    ended = scanloom("models", "show", "mine")

    assert ended.code == 0
    reported = " ".join(ended.out.split())
    for text in (digest, "1.5 x 1.5 x 2 mm", "RAS", "UNet", "float32", "Tests only", "SCT"):
        assert text in reported
    assert "never run on ROCm, MPS, XPU" in reported


def test_show_tells_the_trials_of_an_engine_apart() -> None:
    """By where they were made; those of other weights tell nothing of the model."""
    weights = find_model("ct_tissue").weights.sha256
    measured = EngineTrial(
        *("ct_tissue", "openvino", "1.0", "float32", 2),
        equal=1.0,
        torch_s=1.0,
        engine_s=0.5,
        weights=weights,
        place="a processor, 2 threads",
    )
    trials = [
        measured,
        replace(measured, place="a processor, 8 threads", engine_s=0.25),
        replace(measured, place="another", weights="0" * 64),
    ]
    for n, trial in enumerate(trials):
        save_measurement(exports_folder() / "verdicts" / f"{n}.json", asdict(trial))

    shown = scanloom("models", "show", "ct_tissue").out
    document = scanloom("models", "show", "ct_tissue", "--json").document

    rows = [" ".join(line.split()) for line in shown.splitlines() if line.startswith("engine")]
    assert [row.rpartition("; on ")[2] for row in rows] == [each.place for each in trials[:2]]
    assert "2.00 times as fast" in rows[0]
    assert "4.00 times as fast" in rows[1]
    assert [each["place"] for each in document["model"]["engines"]] == [t.place for t in trials[:2]]


def test_show_says_that_a_model_also_looks_at_the_mirrored_scan() -> None:
    shown = " ".join(scanloom("models", "show", "brain_anatomy").out.split())

    mean = "mirrored scores are the mean with those of the mirrored scan, where left and right"
    assert f"{mean} change places, unless --mirror no" in shown
    assert "mirrored" not in scanloom("models", "show", "ct_tissue").out


def test_show_as_json(own_models: Path) -> None:
    model = scanloom("models", "show", str(own_models / "mine"), "--json").document["model"]

    assert model["spacing_mm"] == [1.5, 1.5, 2.0]
    assert [s["number"] for s in model["structures"]] == [1, 2]
    assert model["structures"][0]["type"]["scheme"] == "SCT"
    assert model["channels"] == [{"name": "image", "modality": "CT"}]
    assert "ROCm" in model["never_run_on"]
    (network,) = model["networks"]
    assert network["weights_sha256"] == [model["weights_sha256"]]


def test_show_of_an_unknown_model_names_the_nearest(own_models: Path) -> None:
    ended = scanloom("models", "show", "mien")

    assert ended.code == 65
    assert "did you mean mine?" in ended.err


def test_models_are_added_verified_and_removed(own_models: Path) -> None:
    added = scanloom("models", "add", own_models / "mine", "--name", "twin")
    shown = scanloom("models", "show", "twin")
    again = scanloom("models", "add", own_models / "mine", "--name", "twin")
    removed = scanloom("models", "remove", "twin")

    assert [ended.code for ended in (added, shown, again, removed)] == [0, 0, 0, 0]
    text = "Added twin (MONAI bundle). Use it with --model twin.\n"
    assert (added.out, added.err) == (text, "")
    for text in ("folder mine", "MONAI bundle", "recorded when it was added; unchanged", "own"):
        assert text in " ".join(shown.out.split())
    assert "already" in again.out
    assert scanloom("models", "show", "twin").code == 65


def test_json_of_an_added_model(own_models: Path) -> None:
    document = scanloom("models", "add", own_models / "mine", "--name", "twin", "--json").document

    model = document["model"]
    assert (document["already"], model["name"], model["section"]) == (False, "twin", "own")
    assert model["provenance"]["source"] == "folder mine"
    assert model["provenance"]["files"] == 5  # with the card, and its weights
    removed = scanloom("models", "remove", "twin", "--json").document
    assert removed == {"schema": 1, "removed": "twin"}


def test_models_are_carried_in_a_file(
    own_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanloom("models", "add", own_models / "mine", "--name", "twin")
    file = tmp_path / "models.zip"
    written = scanloom("models", "bundle", "mine", "twin", "-o", file)
    shown = scanloom("models", "bundle", "mine", "twin", "-o", file, "--json").document
    unknown = scanloom("models", "bundle", "total_fast", "-o", tmp_path / "none.zip")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "closed"))
    added = scanloom("models", "add", file, "--offline")
    again = scanloom("models", "add", file, "--offline", "--json")
    named = scanloom("models", "add", file, "--name", "other")

    assert written.code == 0, written.err
    assert f"Wrote mine, twin into {file}" in written.out
    assert "scanloom models add models.zip" in written.out
    assert (shown["models"], shown["bytes"]) == (["mine", "twin"], file.stat().st_size)
    assert unknown.code == 65
    assert "`scanloom models add totalsegmentator/total_fast` gets it" in unknown.err
    assert not (tmp_path / "none.zip").exists()
    assert added.code == 0, added.err
    assert "Added mine (scanloom card). Use it with --model mine." in added.out
    assert [each["already"] for each in again.document["models"]] == [True, True]
    assert "model archive models.zip" in scanloom("models", "show", "twin").out
    assert named.code == 65
    assert "the archive holds 2" in named.err


def test_verify_names_the_file_that_changed(own_models: Path) -> None:
    scanloom("models", "add", own_models / "mine", "--name", "twin")
    before = scanloom("models", "verify", "twin")
    (own_models / "twin" / "configs" / "metadata.json").write_text("{}")

    single = scanloom("models", "verify", "twin")
    every = scanloom("models", "verify", "--json")
    chosen = scanloom("models", "verify", "mine:dataset_dir=here")
    unknown = scanloom("models", "verify", "mine:highres=no")

    assert (before.code, before.out) == (0, "twin: unchanged\n")
    assert (chosen.code, chosen.out) == (0, "mine: readable; no record of hashes\n")
    assert unknown.code == 65
    assert single.code == 65
    assert "configs/metadata.json" in single.out
    assert every.code == 1
    results = {m["name"]: m for m in every.document["models"]}
    assert results["twin"]["error"]["code"] == "MODEL_HASH"
    assert results["broken"]["error"]["code"] == "MODEL_DAMAGED"
    assert (results["mine"]["recorded"], results["mine"]["error"]) == (False, None)


def test_a_licence_is_not_accepted_without_a_terminal(own_models: Path) -> None:
    (own_models / "mine" / "LICENSE").write_text("For non-commercial use.")

    refused = scanloom("models", "add", own_models / "mine", "--name", "twin")
    accepted = scanloom("models", "add", own_models / "mine", "--name", "twin", "--accept-licence")

    assert refused.code == 65
    assert "--accept-licence" in refused.err
    assert accepted.code == 0
    assert "(accepted)" in scanloom("models", "show", "twin").out


def test_nothing_is_downloaded_offline(own_models: Path) -> None:
    ended = scanloom("models", "add", "spleen_ct_segmentation", "--offline")

    assert ended.code == 65
    assert "OFFLINE" in ended.err


def test_foreign_code_cannot_be_trusted() -> None:
    assert scanloom("models", "trust", "mine").code == 2
