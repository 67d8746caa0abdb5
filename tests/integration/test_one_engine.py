"""All cases of an output folder are made by one engine, whatever each machine finds faster."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from scanloom.inference.engines.openvino_engine import OpenVino
from scanloom.io.output.engines import OutputEngines
from support.commands import scanloom, write_tiny_bundle
from support.model_cards import smooth_scan
from support.processes import next_line

Segment = Callable[..., str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bundle(tmp_path_factory.mktemp("model") / "bundles")


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, files = tmp_path_factory.mktemp("scans"), []
    for n in range(2):
        files.append(folder / f"{n}.nii.gz")
        image = nib.Nifti1Image(smooth_scan((40, 36, 20), n), np.diag((1.5, 1.5, 2.0, 1.0)))
        nib.save(image, files[-1])
    return files


@pytest.fixture(scope="module")
def segment(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Segment:
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)

    def run(cache: Path, out: Path, *arguments: str | Path, code: int = 0) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(cache))
            patch.setenv("SCANLOOM_KEY", str(key))
            if arguments[0] != "run":
                arguments = (
                    "segment",
                    *arguments,
                    "--model",
                    model,
                    "--modality",
                    "CT",
                    "--device",
                    "cpu",
                )
            ended = scanloom(*arguments, "-o", out)
        assert ended.code == code, ended.err
        return ended.err

    return run


@pytest.fixture(scope="module")
def caches(
    segment: Segment, scans: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Return the caches of two machines: on one OpenVINO was faster, on the other torch."""
    folder, caches = tmp_path_factory.mktemp("caches"), {}
    segment(folder / "first", folder / "out", scans[0], "--engine", "openvino")
    for engine, seconds in (("openvino", 0.1), ("torch", 10.0)):
        cache = caches[engine] = folder / engine
        shutil.copytree(folder / "first", cache)
        (verdict,) = cache.rglob("verdicts/*.json")
        measured = json.loads(verdict.read_text())
        assert measured["equal"] > 0.9999
        verdict.write_text(json.dumps({**measured, "torch_s": 1.0, "engine_s": seconds}))
    return caches


def engines(out: Path) -> set[str]:
    documents = [json.loads(path.read_text()) for path in out.glob("cases/*/case.json")]
    return {case["models"][0]["engine"]["name"] for case in documents}


def flags(out: Path) -> set[str]:
    documents = [json.loads(path.read_text()) for path in out.glob("cases/*/case.json")]
    return {flag["code"] for case in documents for flag in case["flags"]}


def published(out: Path, *below: str) -> dict[str, bytes]:
    """Return the content of all published files but `timing.json`."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for name in below
        for path in sorted((out / name).rglob("*"))
        if path.is_file() and path.name != "timing.json"
    }


RESULTS = ("cases", "engines")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", ["openvino", "torch"])
def test_later_cases_keep_the_engine_of_the_first(
    segment: Segment, scans: list[Path], caches: dict[str, Path], tmp_path: Path, first: str
) -> None:
    """Two machines whose stopwatches disagree make equal bytes in one folder."""
    second, out = ({"openvino", "torch"} - {first}).pop(), tmp_path / "out"
    segment(caches[first], out, scans[0])
    segment(caches[second], out, scans[1])
    assert engines(out) == {first}
    assert "OTHER_ENGINE" not in flags(out)

    before = published(out, *RESULTS)
    assert b"times as fast" not in b"".join(before.values())
    shutil.rmtree(out / "cases")
    segment(caches[second], out, *scans)
    assert published(out, *RESULTS) == before
    (timing,) = {path.read_bytes().count(b"times as fast") for path in out.rglob("timing.json")}
    assert timing == (first == "openvino")


@pytest.mark.thorough
def test_fresh_runs_give_equal_bytes(segment: Segment, scans: list[Path], tmp_path: Path) -> None:
    """Measured times are in `timing.json` only: caches are empty, folders are new."""
    for n in range(2):
        segment(tmp_path / f"cache-{n}", tmp_path / f"out-{n}", *scans)
    assert published(tmp_path / "out-0", *RESULTS) == published(tmp_path / "out-1", *RESULTS)


@pytest.mark.thorough
def test_an_engine_that_is_missing_later_is_flagged(
    segment: Segment,
    scans: list[Path],
    caches: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    segment(caches["openvino"], out, scans[0])
    assert flags(out) <= {"HU_IMPLAUSIBLE", "SPACING_IMPLAUSIBLE", "FOV_IMPLAUSIBLE"}
    monkeypatch.setattr(OpenVino, "version", lambda _: None)
    segment(caches["openvino"], out, scans[1])
    assert engines(out) == {"openvino", "torch"}
    assert "OTHER_ENGINE" in flags(out)
    whys = {
        json.loads(path.read_text())["models"][0]["engine"]["why"]
        for path in out.glob("cases/*/case.json")
    }
    assert "instead of openvino: it is not installed here" in whys


@pytest.mark.thorough
def test_a_run_keeps_the_engine_and_another_request_says_what_it_was(
    segment: Segment, scans: list[Path], caches: dict[str, Path], model: Path, tmp_path: Path
) -> None:
    """Worker processes find the record of the command before them."""
    out = tmp_path / "out"
    segment(caches["openvino"], out, scans[0])
    workflow = tmp_path / "workflow.yaml"
    workflow.write_text(
        f"name: w\nmodels: [{model}]\npolicy: {{modality: CT}}\nexecution: {{device: cpu}}\n"
    )
    segment(caches["torch"], out, "run", workflow, scans[0].parent, "--cluster", "none")
    assert len(list(out.glob("cases/*/case.json"))) == 2
    assert engines(out) == {"openvino"}

    messages = segment(caches["torch"], out, scans[0], "--engine", "torch", code=65)
    assert "engine was auto (openvino), and is torch now" in messages


DECIDE = """
import sys
from pathlib import Path
from scanloom.core.engines import EngineRecord
from scanloom.io.output.engines import OutputEngines
engines, decision = OutputEngines(Path(sys.argv[1])), EngineRecord(sys.argv[2], "float32")
print("ready", flush=True)
sys.stdin.readline()
print(" ".join(engines.record(f"net-{n}", decision).engine for n in range(50)))
"""


def test_the_first_of_several_deciding_workers_chooses_the_engine(tmp_path: Path) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", DECIDE, str(tmp_path), f"engine{n}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(4)
    ]
    assert {next_line(worker) for worker in workers} == {"ready\n"}
    for worker in workers:
        assert worker.stdin
        worker.stdin.write("go\n")
        worker.stdin.flush()
    (answer,) = {worker.communicate(timeout=300)[0] for worker in workers}
    kept = [OutputEngines(tmp_path).recorded(f"net-{n}") for n in range(50)]
    assert [record and record.engine for record in kept] == answer.split()
    assert not list((tmp_path / ".work").glob("*"))


def test_a_damaged_record_is_an_error_and_not_another_choice(
    segment: Segment, scans: list[Path], caches: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    segment(caches["openvino"], out, scans[0])
    (record,) = out.glob("engines/*/engine.json")
    record.write_text("{}")
    messages = segment(caches["openvino"], out, scans[1], code=65)
    assert "RESULT_DAMAGED" in messages
