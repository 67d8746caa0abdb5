"""Faults that all cases share fail no case: they end a command, or the cases are tried again."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from support.commands import Ended, scanloom, write_tiny_bundle

NOBODY = ["unshare", "--user", "--map-user=54321", "env", "-u", "HOME", "-u", "USER", "-u"]
NOBODY += ["LOGNAME"]


def write_archive(folder: Path) -> Path:
    folder.mkdir()
    for n in range(3):
        array = np.full((12, 11, 10), -900, np.int16)
        array[4:8, 4:8, 4:8] = 100 + n
        image = nib.Nifti1Image(array, np.diag((2.0, 2.0, 2.0, 1.0)))
        nib.save(image, folder / f"{n}.nii.gz")
    return folder


def write_workflow(path: Path, model: Path) -> Path:
    path.write_text(
        f"name: test\nmodels: [{model}]\npolicy: {{modality: CT}}\nexecution: {{device: cpu}}\n"
    )
    return path


def text_as_weights(bundle: Path) -> str:
    (bundle / "models" / "model.pt").write_text("this is no model\n")
    return "MODEL_DAMAGED"


def network_that_cannot_be_built(bundle: Path) -> str:
    path = bundle / "configs" / "inference.json"
    config = json.loads(path.read_text())
    config["network_def"]["num_res_units"] = "x"
    path.write_text(json.dumps(config))
    return "MODEL_NETWORK"


def network_of_no_size(bundle: Path) -> str:
    path = bundle / "configs" / "inference.json"
    config = json.loads(path.read_text())
    config["network_def"]["channels"] = [-4, 8]
    path.write_text(json.dumps(config))
    return "MODEL_NETWORK"


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    return tmp_path / "key"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "spoil", [text_as_weights, network_that_cannot_be_built, network_of_no_size]
)
@pytest.mark.usefixtures("key")
def test_a_file_that_is_no_model_fails_no_case(
    tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    bundle = write_tiny_bundle(tmp_path / "bundles")
    archive, out = write_archive(tmp_path / "archive"), tmp_path / "out"
    workflow = write_workflow(tmp_path / "workflow.yaml", bundle)
    reason = spoil(bundle)
    scans = sorted(archive.iterdir())

    planned = scanloom("plan", workflow, archive, "--out", out)
    single = scanloom("segment", *scans, "--model", bundle, "--modality", "CT", "--out", out)
    assert not out.exists()
    ran = scanloom("run", workflow, archive, "--out", out, "--cluster", "none")

    for ended in (planned, single, ran):
        assert ended.code == 65
        assert ended.err.count(reason) == 1  # once, not of each scan
    assert not (out / "failed").exists()
    if spoil is text_as_weights:  # found when the model is converted: no run is begun
        assert not (out / "runs").exists()
        return
    [folder] = (out / "runs").iterdir()
    assert not (folder / "log.jsonl").exists()  # no case was begun
    status = scanloom("status", out, "--json").document["status"]
    assert (status["state"], status["reason"]) == ("failed", reason)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.usefixtures("key")
@pytest.mark.parametrize("cluster", ["none", "local"])
@pytest.mark.parametrize("limit", [800, 1500])
def test_cases_that_a_limit_of_address_space_stopped_are_tried_again(
    tmp_path: Path, cluster: str, limit: int
) -> None:
    """`ulimit -v`: at 800 MB libraries can't be loaded, at 1500 threads can't be started."""
    model = write_tiny_bundle(tmp_path / "bundles")
    out, archive = tmp_path / "out", write_archive(tmp_path / "archive")
    workflow = write_workflow(tmp_path / "workflow.yaml", model)
    command = [workflow, archive, "--out", out, "--cluster", cluster]

    def tight() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit << 20, limit << 20))

    short = program("run", *command, prepare=tight)
    failed = [json.loads(p.read_text()) for p in (out / "failed").glob("*.json")]
    again = program("run", *command)

    assert short.code != 0
    assert all(failure["retry"] for failure in failed), failed
    assert again.code == 0, again.err
    assert len(list((out / "cases").iterdir())) == 3
    assert not list((out / "failed").glob("*.json"))


@pytest.mark.usefixtures("key")
@pytest.mark.parametrize("command", ["segment", pytest.param("run", marks=pytest.mark.slow)])
def test_a_user_without_name_and_home_gets_results(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container can be started with a number for its user."""
    nobody = [*NOBODY, sys.executable, "-c", "import os; os.getuid() == 54321 or exit(1)"]
    if (
        shutil.which("unshare") is None
        or subprocess.run(nobody, capture_output=True, check=False).returncode
    ):
        pytest.skip("unshare can't give another user here")
    model = write_tiny_bundle(tmp_path / "bundles")
    out, archive = tmp_path / "out", write_archive(tmp_path / "archive")
    workflow = write_workflow(tmp_path / "workflow.yaml", model)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))

    if command == "run":
        arguments = ["run", workflow, archive, "--cluster", "none"]
    else:
        arguments = ["segment", archive / "0.nii.gz", "--model", model, "--modality", "CT"]
    ended = program(*arguments, "--out", out, within=NOBODY)

    assert ended.code == 0, ended.err
    assert len(list((out / "cases").iterdir())) == (3 if command == "run" else 1)
    assert not list((tmp_path / "temporary").glob("scanloom-caches-*"))


def test_without_a_home_the_key_has_to_be_named(tmp_path: Path) -> None:
    scan = write_archive(tmp_path / "archive") / "0.nii.gz"
    nowhere = ["env", "-u", "SCANLOOM_KEY", "-u", "XDG_CONFIG_HOME", "HOME=/proc/nowhere"]

    ended = program("index", scan, within=nowhere)

    assert ended.code == 65
    assert "SCANLOOM_KEY" in ended.err


def program(
    *arguments: str | Path,
    within: list[str] | None = None,
    prepare: Callable[[], None] | None = None,
) -> Ended:
    command = [*(within or ()), sys.executable, "-m", "scanloom", *map(str, arguments)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=prepare,
    )
    return Ended(done.returncode, done.stdout, done.stderr)
