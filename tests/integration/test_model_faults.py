"""Faulty models at the command line: a reason code and no result."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from scanloom.inference.device import bfloat16_units
from support import engine_models, model_cards
from support.commands import Ended, scanloom, write_tiny_bundle
from support.formula_run import formula_environment
from support.write_dicom import write_series

STEERING = "\x1b]0;owned\x07\x9b31m\u202e"


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scan") / "series"
    write_series(folder, (model_cards.smooth_scan((24, 20, 6)) + 1024).clip(0, 2047))
    return folder


@pytest.fixture(autouse=True)
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_tiny_bundle(tmp_path / "Jane Doe's models", "tiny")


def weights_of(bundle: Path) -> Path:
    return bundle / "models" / "model.pt"


def accept_any_scale(bundle: Path) -> None:
    path = bundle / "configs" / "metadata.json"
    metadata = json.loads(path.read_text())
    metadata.setdefault("scanloom", {}).setdefault("checks", {})["hounsfield"] = False
    path.write_text(json.dumps(metadata))


def segment(series: Path, bundle: Path, *options: str) -> Ended:
    out = bundle.parent.parent / "out"
    return scanloom("segment", series, "--model", bundle, "--out", out, "--json", *options)


def workflow_of(bundle: Path, more: str = "") -> Path:
    path = bundle.parent.parent / "workflow.yaml"
    path.write_text(f"name: test\nmodels: [{json.dumps(str(bundle))}]\n{more}")
    return path


def failed(ended: Ended) -> dict[str, str]:
    """Return the reason of a missing result, from the model's error or the only case."""
    assert ended.code == 65
    reported: dict[str, str] = ended.document.get("error")
    if reported is None:
        (case,) = ended.document["cases"]
        reported = case["reason"]
    return reported


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_one_bias_that_is_no_number_gives_no_result(
    series: Path, bundle: Path, wrong: float
) -> None:
    state = torch.load(weights_of(bundle), weights_only=True)
    state["model.2.conv.bias"][1] = wrong
    torch.save(state, weights_of(bundle))

    assert failed(segment(series, bundle))["code"] == "NOT_FINITE"


def test_scores_that_overflow_give_no_result(series: Path, bundle: Path) -> None:
    state = torch.load(weights_of(bundle), weights_only=True)
    state["model.1.submodule.adn.N.weight"] *= 1e4
    state["model.2.conv.weight"] *= 3e38
    torch.save(state, weights_of(bundle))

    assert failed(segment(series, bundle))["code"] == "NOT_FINITE"


@pytest.mark.skipif(bfloat16_units() is None, reason="half precision on a CPU needs AVX512-BF16")
def test_half_precision_that_overflowed_stands_in_the_result(series: Path, bundle: Path) -> None:
    loud = model_cards.loud_weights(bundle, weights_of(bundle), (2.0**127, 1.998))
    loud.replace(weights_of(bundle))

    ended = segment(series, bundle, "--precision", "half")

    assert ended.code == 0
    folder = next((bundle.parent.parent / "out" / "cases").iterdir())
    reported = json.loads((folder / "case.json").read_text())
    assert "HALF_OVERFLOWED" in [flag["code"] for flag in reported["flags"]]
    assert [model["precision"] for model in reported["models"]] == ["float32"]


def test_text_as_weights_is_damage(series: Path, bundle: Path) -> None:
    weights_of(bundle).write_text("these are no weights")

    assert failed(segment(series, bundle))["code"] == "MODEL_DAMAGED"


def test_a_network_that_can_not_be_built_is_named(series: Path, bundle: Path) -> None:
    config = json.loads((bundle / "configs" / "inference.json").read_text())
    config["network_def"]["kernel_size"] = 0
    (bundle / "configs" / "inference.json").write_text(json.dumps(config))

    assert failed(segment(series, bundle))["code"] in ("MODEL_NETWORK", "MODEL_WEIGHTS")


@pytest.mark.parametrize("command", [("show",), ("list",), ("show", "--json"), ("list", "--json")])
def test_no_bundle_steers_the_terminal(
    bundle: Path, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = bundle / "configs" / "metadata.json"
    metadata = json.loads(file.read_text())
    for name in ("name", "version", "description", "license", "authors", "intended_use"):
        metadata[name] = f"said {STEERING}"
    metadata["network_data_format"]["outputs"]["pred"]["channel_def"]["1"] = f"spleen {STEERING}"
    file.write_text(json.dumps(metadata))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    (tmp_path / "scanloom" / "models").mkdir(parents=True)
    bundle.rename(tmp_path / "scanloom" / "models" / "tiny")
    verb, *options = command

    ended = scanloom("models", verb, *(["tiny"] if verb == "show" else []), *options)

    assert ended.code == 0
    assert "tiny" in ended.out
    assert [line for line in (ended.out + ended.err).splitlines() if not line.isprintable()] == []


@pytest.mark.slow
def test_a_run_says_no_path_of_its_model(
    series: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only files below `private/` contain the path; the report does not."""
    out = bundle.parent.parent / "out"
    for name, value in formula_environment(tmp_path / "notes").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("scanloom.engine.run.model_loader", engine_models.formula_loader)
    site = "execution: {cluster: {python: /home/jane/python, ssh_options: [-i /home/jane/id]}}\n"

    ended = scanloom("run", workflow_of(bundle, site), series, "--out", out, "--cluster", "none")

    assert ended.code == 0, ended.err
    (run,) = [p for p in (out / "runs").iterdir() if p.is_dir()]
    reported = json.loads((run / "workflow.json").read_text())
    assert reported["models"] == ["tiny"]
    assert len(json.loads((run / "versions.json").read_text())["models"]["tiny"]) == 64
    kept = json.loads((out / "private" / "runs" / run.name / "workflow.json").read_text())
    assert kept["models"] == [str(bundle)]
    files = [p for p in out.rglob("*") if p.is_file() and "private" not in p.parts]
    names = (b"Jane Doe", b"jane")
    assert len(files) > 10
    assert [p for p in files if any(name in p.read_bytes() for name in names)] == []


def test_the_workflow_of_a_run_is_one(series: Path, bundle: Path, tmp_path: Path) -> None:
    """The workflow in a run's folder can be given to `plan` and `run` again."""
    from scanloom.engine.run_files import publishable_workflow
    from scanloom.engine.workflow.schema import parse_workflow, read_workflow

    workflow = read_workflow(workflow_of(bundle, "policy: {gaps: interpolate}\n"))

    again = parse_workflow(json.dumps(publishable_workflow(workflow, ["tiny"])))

    assert again == workflow.model_copy(update={"models": ("tiny",)})


def test_a_scan_that_overflows_is_at_fault(bundle: Path, tmp_path: Path) -> None:
    import nibabel as nib

    config = json.loads((bundle / "configs" / "inference.json").read_text())
    steps = config["preprocessing"]["transforms"]
    steps[4] = {"_target_": "NormalizeIntensityd", "keys": "image"}
    (bundle / "configs" / "inference.json").write_text(json.dumps(config))
    accept_any_scale(bundle)
    values = model_cards.smooth_scan((24, 20, 16)).astype(np.float32) * np.float32(1e35)
    nib.save(nib.Nifti1Image(values, np.eye(4)), tmp_path / "scan.nii.gz")

    error = failed(segment(tmp_path / "scan.nii.gz", bundle, "--modality", "CT"))

    assert error["code"] == "NOT_FINITE"
    assert "the scan's intensities" in error["detail"]
