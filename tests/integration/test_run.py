"""`scanloom run` end to end: each file accounted for, nothing done twice, mistakes told."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import socket
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from scanloom.io.output.layout import fan_out
from scanloom.io.output.work_folder import HOLDER
from scanloom.io.system.scratch_folders import pid_namespace, process_start_ticks
from support import engine_models as em
from support.commands import scanloom, scanloom_process
from support.formula_run import processes
from support.layouts import both_layouts, case_folders, fan_by_hand
from support.make_run import GOOD, SLICES, THORAX, WRONG, Runs, write_study


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four good CTs, one whose model fails, one with a gap, an MR, and a text file."""
    folder = tmp_path_factory.mktemp("archive")
    for brightest in GOOD:
        write_study(folder, f"good {brightest}", brightest)
    write_study(folder, "wrong", WRONG)
    write_study(folder, "mr", 3900, "MR")
    write_study(folder, "gap", 3901)[1].unlink()
    (folder / "notes.txt").write_text("no image")
    return folder


@pytest.fixture
def runs(
    tmp_path: Path,
    archive: Path,
    model: Path,
    warm_workers: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> Runs:
    formula_runs = Runs(tmp_path, archive, model)
    if layout == "fanned":
        fan_out(formula_runs.out)
    by_formula(monkeypatch, formula_runs, warm_workers)
    return formula_runs


@pytest.fixture(scope="module")
def thorax(
    tmp_path_factory: pytest.TempPathFactory,
    archive: Path,
    model: Path,
    warm_workers: SimpleNamespace,
) -> Path:
    """The folder of a run over the good ones alone."""
    formula_runs = Runs(tmp_path_factory.mktemp("thorax"), archive, model)
    formula_runs.write(THORAX)
    with pytest.MonkeyPatch.context() as patch:
        by_formula(patch, formula_runs, warm_workers)
        ended = formula_runs()
    assert ended.code == 0, ended.out + ended.err
    return formula_runs.folder


def by_formula(patch: pytest.MonkeyPatch, runs: Runs, workers: SimpleNamespace) -> None:
    for name in ("FORMULA", "FORMULA_SECONDS", "SCANLOOM_KEY"):
        patch.setenv(name, runs.environment[name])
    patch.setattr("scanloom.engine.worker.supervisor.subprocess", workers)
    patch.setattr("scanloom.engine.run.model_loader", em.formula_loader)


@pytest.fixture
def done(runs: Runs, thorax: Path, layout: str) -> Runs:
    """A copy of that run."""
    shutil.copytree(thorax, runs.folder, dirs_exist_ok=True)
    if layout == "fanned":
        fan_by_hand(runs.out)
    return runs


@pytest.mark.thorough
def test_equal_volume_files_are_one_case(runs, tmp_path):
    values = np.full((12, 10, SLICES), -1000, np.int16)
    values[3:6, 3:6, 1:3] = GOOD[0]
    runs.archive = tmp_path / "copies"
    for name in ("one", "two"):
        (runs.archive / name).mkdir(parents=True)
        nib.save(nib.Nifti1Image(values, np.eye(4)), runs.archive / name / f"{name}.nii")
    runs.write(more="policy: {modality: CT}\n")
    where = ("--out", runs.out, "--json")

    planned = scanloom("plan", runs.workflow, runs.archive, *where)
    ended = runs()

    assert json.loads(planned.out)["plan"]["todo"] == 1
    assert ended.code == 0, ended.err
    assert runs.started == {GOOD[0]: 1}
    rows = runs.rows("manifest")
    assert [row["outcome"] for row in rows] == ["used", "used"]
    assert {row["case"] for row in rows} == set(runs.cases())


@pytest.mark.thorough
def test_series_that_wait_for_a_choice_did_not_fail(runs, tmp_path):
    """They are an outcome of their own in all accounts, and the run ends well."""
    runs.archive = tmp_path / "mixed"
    write_study(runs.archive, "good", GOOD[0])
    values = np.zeros((12, 10, SLICES, 2), np.int16)
    nib.save(nib.Nifti1Image(values, np.eye(4)), runs.archive / "time.nii")
    runs.write(more="policy: {modality: CT}\n")

    ended = runs()

    assert ended.code == 0, ended.err
    document = ended.document
    counted = {"used": SLICES, "skipped": 0, "ambiguous": 1, "failed": 0, "open": 0}
    assert document["files"] == {"found": SLICES + 1, **counted}
    reported = document["status"]
    assert (reported["done"], reported["ambiguous"], reported["failed"]) == (1, 1, 0)
    assert document["totals"]["cases"]["ambiguous"] == 1
    rows = [row for row in runs.rows("manifest") if row["outcome"] == "ambiguous"]
    assert [row["reason"] for row in rows] == ["FOUR_D"]
    [noted] = (runs.out / "failed").iterdir()
    assert json.loads(noted.read_text())["outcome"] == "ambiguous"
    assert "1 ambiguous, 0 failed" in scanloom("status", runs.out).out
    page = (runs.out / "report" / "index.html").read_text()
    assert '<dt>ambiguous</dt><dd><a href="#status=ambiguous">1</a></dd>' in page
    assert "<dt>failed</dt><dd>0</dd>" in page
    joined = scanloom("status", runs.out, "--json").document
    assert joined["status"]["ambiguous"] == 1


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it does not come"
        time.sleep(0.02)


def check_whole_archive(runs: Runs, archive: Path) -> None:
    """Check the accounts of the archive's first run."""
    rows = runs.rows("manifest")
    files = [path for path in archive.rglob("*") if path.is_file()]
    assert len(rows) == len({row["file"] for row in rows}) == len(files)
    assert Counter((row["outcome"], row["reason"]) for row in rows) == {
        ("used", ""): 4 * SLICES,
        ("failed", "INTERNAL"): SLICES,
        ("failed", "SLICE_GAP"): SLICES - 1,
        ("skipped", "NOT_SELECTED"): SLICES,
        ("skipped", "NOT_AN_IMAGE"): 1,
    }
    assert len(runs.cases()) == 4
    assert {row["case"] for row in runs.rows("measurements")} == set(runs.cases())
    failed = [json.loads(path.read_text()) for path in (runs.out / "failed").iterdir()]
    assert {record["reason"] for record in failed} == {"INTERNAL", "SLICE_GAP"}
    assert {record["case"] for record in failed} == {
        row["case"] for row in rows if row["outcome"] == "failed"
    }
    assert (runs.out / "report" / "index.html").is_file()
    assert runs.started == dict.fromkeys((*GOOD, WRONG), 1)


@both_layouts
def test_each_file_is_in_the_manifest_once(runs: Runs, archive: Path) -> None:
    ended = runs()

    assert ended.code == 1, ended.err  # some failed
    check_whole_archive(runs, archive)
    files = ended.document["files"]
    assert files == {"found": 24, "used": 16, "skipped": 5, "failed": 7, "open": 0, **files}


@pytest.mark.thorough
def test_every_row_of_the_manifest_is_brought_back_to_its_source(runs: Runs, archive: Path) -> None:
    """The sources include series that were excluded by their headers, and files of no series."""
    runs()
    joined = scanloom("join", runs.out / "manifest.csv", "--out", runs.out)
    rows = list(csv.DictReader(io.StringIO(joined.out)))

    assert joined.code == 0, joined.err
    places = {row["source_path"]: row["reason"] for row in rows if row["case"]}
    assert places.pop(str(archive / "gap")) == "SLICE_GAP"
    assert places.pop(str(archive / "mr")) == "NOT_SELECTED"
    assert len(places) == 5
    [text] = [row for row in rows if not row["case"]]
    assert Path(text["source_path"]).is_file()

    joined = scanloom("join", runs.out / "manifest.csv", "--column", "file", "--out", runs.out)
    rows = list(csv.DictReader(io.StringIO(joined.out)))
    files = sorted(str(path) for path in archive.rglob("*") if path.is_file())
    assert sorted(row["source_path"] for row in rows) == files
    document = scanloom("where", text["file"], "--out", runs.out, "--json").document
    assert [source["path"] for source in document["sources"]] == [text["source_path"]]


@pytest.mark.slow
@both_layouts
def test_dask_gives_the_same_results(runs: Runs, archive: Path) -> None:
    ended = runs.begin("--cluster", "local").wait(120)

    assert ended == 1, (runs.folder / "log").read_text()
    check_whole_archive(runs, archive)
    wait_for(lambda: not processes(runs.notes))


@both_layouts
def test_a_repeated_run_processes_no_case_again(runs: Runs) -> None:
    runs()
    before, started = runs.cases(), runs.started
    # As if a run had died after it published what had failed before
    failed = runs.out / "failed"
    published = case_folders(runs.out)[0].name
    [crashed] = (path for path in failed.iterdir() if "INTERNAL" in path.read_text())
    shutil.copy(crashed, failed / f"{published}.json")

    again = runs()

    assert again.code == 0 or again.code == 1, again.err
    assert runs.cases() == before
    assert not (failed / f"{published}.json").exists()
    assert runs.started == {**started, WRONG: 2}  # a fault of scanloom: another try can help
    assert Counter(row["outcome"] for row in runs.rows("manifest"))["failed"] == 2 * SLICES - 1
    assert again.document["status"]["before"] == 4


@both_layouts
def test_a_complete_run_is_0_and_verify_agrees(done: Runs) -> None:
    ended = done()

    assert (ended.code, ended.document["files"]["used"]) == (0, 16), ended.err
    assert scanloom("verify", done.out).code == 0


def test_the_manifest_is_written_again_only_if_it_would_differ(done: Runs) -> None:
    """A copy of it that was changed or lost, or is older than its text, is made anew."""
    table, text = (done.out / f"manifest.{kind}" for kind in ("parquet", "csv"))
    written = [path.read_bytes() for path in (table, text)]

    def is_kept() -> bool:
        before = [path.stat().st_ino for path in (table, text) if path.exists()]
        ended = done()
        assert ended.code == 0, ended.err
        assert json.loads(ended.out)["files"]["used"] == len(GOOD) * SLICES
        assert [path.read_bytes() for path in (table, text)] == written
        return [path.stat().st_ino for path in (table, text)] == before

    os.utime(text)
    os.utime(table)
    assert is_kept()
    os.utime(text)
    assert not is_kept()
    text.write_text(text.read_text() + "\n")
    os.utime(table)
    assert not is_kept()
    table.unlink()
    assert not is_kept()

    done.write()
    done()
    assert Counter(row["outcome"] for row in done.rows("manifest"))["used"] == len(GOOD) * SLICES
    assert table.read_bytes() != written[0]


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_derivative_is_rebuilt_only_if_results_changed(done: Runs, *, is_kept: bool) -> None:
    bids = done.out / "bids" / "dataset_description.json"
    assert done("--bids").code == 0
    inode = bids.stat().st_ino
    if not is_kept:
        (done.out / "failed").mkdir(exist_ok=True)

    assert done("--bids").code == 0

    assert (bids.stat().st_ino == inode) == is_kept


@both_layouts
def test_verify_names_a_flipped_byte_a_missing_and_an_extra_file(done: Runs) -> None:
    first, two, three, _ = case_folders(done.out)
    seg = first / "dicom" / "segmentation.dcm"
    content = bytearray(seg.read_bytes())
    content[len(content) // 2] ^= 1
    seg.write_bytes(content)
    (two / "segments.json").unlink()
    (three / "more").touch()

    ended = scanloom("verify", done.out, "--json")

    assert ended.code == 1
    assert [(f["fault"], f["file"]) for f in ended.document["findings"]] == [
        ("changed", str(seg.relative_to(done.out))),
        ("missing", str((two / "segments.json").relative_to(done.out))),
        ("extra", str((three / "more").relative_to(done.out))),
    ]


@pytest.mark.thorough
@both_layouts
def test_results_of_another_recipe_are_kept_until_replace(done: Runs) -> None:
    before = done.cases()
    done.write(THORAX, "outputs: {also: masks}\n")

    stale = done()

    assert stale.code == 1
    assert done.cases() == before
    assert stale.document["status"]["reasons"] == {"STALE": 4}

    replaced = done("--replace")

    assert replaced.code == 0, replaced.err
    assert done.cases().keys() == before.keys()
    assert len(list(done.out.glob("cases/**/split/*"))) == 4
    assert scanloom("verify", done.out).code == 0
    assert not list((done.out / ".work").iterdir())


def test_a_run_of_many_cases_goes_on_in_subfolders(
    done: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases that are there stay in their place; all commands read both."""
    first, second, *kept = case_folders(done.out)
    for folder in (first, second):
        shutil.rmtree(folder)
    monkeypatch.setattr("scanloom.io.output.layout.FANNED_ABOVE", 3)

    ended, again = done(), done()

    assert (ended.code, again.code) == (0, 0), ended.err
    assert ended.document["status"]["done"] == 2
    assert again.document["status"]["before"] == 4
    moved = [f.parent / f"_{f.name[-2:]}" / f.name for f in (first, second)]
    assert {*case_folders(done.out)} == {*moved, *kept}
    assert {row["case"] for row in done.rows("measurements")} == {*done.cases()}
    assert scanloom("verify", done.out).code == 0
    assert scanloom("report", done.out).code == 0


def test_one_run_at_a_time(done: Runs) -> None:
    lock = done.out / ".work" / "run.lock"

    def write_lock(holder: dict[str, object]) -> None:
        lock.mkdir(parents=True, exist_ok=True)
        (lock / HOLDER).write_text(json.dumps(holder))

    pid = os.getpid()
    mine = {
        "host": socket.gethostname(),
        "space": pid_namespace(),
        "process": pid,
        "start": process_start_ticks(pid),
        "since": "x",
    }

    write_lock(mine)
    held = done()
    write_lock({**mine, "host": "elsewhere"})
    elsewhere, taken = done(), done("--take-over")
    write_lock({**mine, "start": "1"})
    dead = done()

    assert (held.code, elsewhere.code, taken.code, dead.code) == (65, 65, 0, 0)
    assert "LOCKED" in held.out
    assert str(pid) in held.out
    assert "elsewhere" in elsewhere.out
    assert "--take-over" in elsewhere.out
    assert not lock.exists()


@both_layouts
def test_shards_together_do_each_case_once(runs: Runs) -> None:
    runs.write(THORAX)
    ended = [runs("--shard", f"{number}/2") for number in (1, 2)]

    assert [e.code for e in ended] == [0, 0]
    assert runs.started == dict.fromkeys(GOOD, 1)
    assert len(runs.cases()) == 4
    assert sum(e.document["status"]["cases"] for e in ended) == 4


def test_a_shard_of_another_recipe_is_refused_by_name(runs: Runs) -> None:
    runs.write(THORAX)
    assert runs("--shard", "1/2").code == 0
    published = runs.cases()
    runs.write(THORAX, "outputs: {also: [image]}\n")

    refused = runs("--shard", "2/2")

    assert (refused.code, refused.document["error"]["code"]) == (65, "STALE")
    assert "shard 1 of 2" in refused.document["error"]["detail"]
    assert runs.cases() == published
    assert len(list((runs.out / "runs").iterdir())) == 1
    assert runs("--shard", "2/2", "--replace").code == 0


def test_shards_are_checked(runs: Runs) -> None:
    assert [runs("--shard", wrong).code for wrong in ("0/2", "3/2", "a/b", "1")] == [2] * 4


@pytest.mark.slow
@both_layouts
def test_ctrl_c_is_130_and_the_run_goes_on_later(runs: Runs) -> None:
    """Cases in work are finished; meanwhile `status` of another process reports the run."""
    runs.write(THORAX, "execution: {in_flight: 1}\n")
    process = runs.begin("--cluster", "none", seconds=4.0)  # `status` takes less than three
    wait_for((runs.notes / "starts").exists)
    reported = scanloom_process("status", runs.out, "--json", environment=runs.environment)
    wait_for(lambda: list(runs.out.glob("cases/**/case.json")))
    process.send_signal(signal.SIGINT)
    code = process.wait(60)

    assert reported.document["status"]["state"] == "running"
    assert reported.document["status"]["cases"] == 4
    log = (runs.folder / "log").read_text()
    assert code == 130, log
    assert log.splitlines()[-1].endswith("--cluster none")
    assert "To resume:" in log
    done = runs.cases()
    assert 1 <= len(done) < 4
    assert Counter(row["outcome"] for row in runs.rows("manifest"))["open"] == 16 - 4 * len(done)
    assert scanloom("status", runs.out, "--json").document["status"]["state"] == "stopped"

    assert runs().code == 0
    assert runs.started == dict.fromkeys(GOOD, 1)
    assert runs.cases().items() >= done.items()


def test_an_output_folder_that_cannot_be_is_74(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    runs.out = tmp_path / "file" / "out"

    assert runs().code == 74


def test_a_mistake_in_a_workflow_is_told_with_line_key_and_nearest_word(runs: Runs) -> None:
    runs.write("modality: CT, kernl: B30", "execution:\n  devize: cpu\n  precision: halb\n")

    ended = runs()

    assert ended.code == 65
    for message in (
        "line 3: select.kernl is not a key here; did you mean kernel?",
        "line 5: execution.devize is not a key here; did you mean device?",
        "line 6: execution.precision: did you mean half?",
    ):
        assert message in ended.out, ended.out
    assert not runs.out.exists()


def test_a_missing_path_is_refused(runs: Runs, tmp_path: Path) -> None:
    """No model, no archive, no workflow, no cluster: told before anything is made."""
    runs.workflow.write_text("name: test\nmodels: [no_such_model]\n")
    unknown = runs()
    runs.write()
    nowhere = scanloom("run", runs.workflow, tmp_path / "none", "--out", runs.out)
    nothing = scanloom("run", tmp_path / "none.yaml", runs.archive, "--out", runs.out)
    cluster = runs("--cluster", "nope")

    assert [e.code for e in (unknown, nowhere, nothing, cluster)] == [65, 65, 65, 65]
    assert not runs.out.exists()
    assert "CLUSTER" in cluster.out
    assert "MODEL_UNKNOWN" in unknown.out
    assert "NOT_FOUND" in nowhere.err
    assert "WORKFLOW_UNKNOWN" in nothing.err
    for name in ("ct_tisue", str(tmp_path)):
        ended = scanloom("plan", name, runs.archive, "--out", runs.out)
        assert "WORKFLOW_UNKNOWN" in ended.err
        assert "expected one of brain, ct_tissue, ct_tissue_research" in ended.err
        assert ("did you mean ct_tissue?" in ended.err) == (name == "ct_tisue")
