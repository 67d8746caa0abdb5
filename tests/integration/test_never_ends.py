"""Pipes, devices, locks and workers that would be waited for for ever: every command ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
from pyarrow import parquet

from scanloom import load_volume
from scanloom.core import Flag, ScanError
from scanloom.engine.run_files import hold_run_lock
from scanloom.io.output.work_folder import HOLDER
from support.commands import scanloom
from support.faults import QuickRun, run_with_deadline
from support.write_dicom import noise, write_series

ZERO = Path("/dev/zero")


def write_endless(root: Path) -> set[str]:
    """Write series and volumes among which files are pipes or devices; return their names."""
    root.mkdir()
    write_series(root / "slices", noise((16, 15, 8)))
    for name in ("0009.dcm", "0010.dcm"):  # where two more slices should be
        os.mkfifo(root / "slices" / name)
    pair = nibabel.Nifti1Pair(np.ones((5, 6, 7), np.int16), np.eye(4))
    nibabel.save(pair, root / "pair.hdr")
    (root / "pair.img").unlink()
    for name in ("pair.img", "a.nii", "a.nii.gz", "a.nrrd", "a.mha", "a.zip", "DICOMDIR", "pipe"):
        os.mkfifo(root / name)
    for name in ("zero.dcm", "zero.nii", "zero.nrrd", "b"):
        (root / name).symlink_to(ZERO)
    (root / "linked.dcm").symlink_to("pipe")
    return {path.name for path in root.rglob("*") if path.exists() and not path.is_file()} - {
        "slices"
    }


def test_pipes_and_devices_among_scans_are_counted_and_never_opened(tmp_path: Path) -> None:
    root = tmp_path / "scans"
    endless = write_endless(root)

    ended = run_with_deadline("index", root, "--json")

    assert ended.code == 65, ended.err  # the only series may lack the slices of the pair
    files = ended.document["files"]
    assert files["found"] == 8 + 1 + len(endless)
    assert ended.document["reasons"]["NOT_AN_IMAGE"] == len(endless) - 1
    assert ended.document["reasons"]["SLICES_UNREADABLE"] == 8
    assert ended.document["reasons"]["UNREADABLE"] == 2  # the pair


@pytest.mark.parametrize("kept", [132, 400, 700])
def test_slices_whose_rest_is_a_gigabyte_of_zeros_are_cut_off(tmp_path: Path, kept: int) -> None:
    """A copy that reserved its space, and was interrupted."""
    last = write_series(tmp_path / "scan", noise((16, 15, 8)))[-1]
    os.truncate(last, kept)
    os.truncate(last, 1 << 30)

    ended = run_with_deadline("index", tmp_path / "scan", "--json")

    assert ended.code == 65, ended.err
    assert ended.document["reasons"] == {"SLICES_UNREADABLE": 7, "TRUNCATED": 1}


def test_slices_that_are_pipes_are_missed(tmp_path: Path) -> None:
    write_endless(tmp_path / "scans")
    with pytest.raises(ScanError) as caught:
        load_volume(tmp_path / "scans" / "slices")
    assert caught.value.code == "SLICES_UNREADABLE"
    volume = load_volume(tmp_path / "scans" / "slices", gaps="interpolate")
    assert Flag.FILES_LOST in volume.flags


@pytest.mark.thorough
def test_a_run_over_pipes_and_devices_ends_with_a_row_for_each(tmp_path: Path) -> None:
    quick = QuickRun(tmp_path / "quick")
    endless = write_endless(quick.scans / "endless")
    ended = run_with_deadline(*quick.command())
    assert ended.code == 65, ended.err
    rows = parquet.read_table(quick.out / "manifest.parquet").to_pylist()
    assert len(rows) == 2 + 8 + 1 + len(endless)


@pytest.mark.parametrize("name", ["pipe", "a.nii", "a.zip", "DICOMDIR", "zero.nii", "b"])
def test_a_pipe_or_device_that_is_named_is_no_scan(name: str, tmp_path: Path) -> None:
    write_endless(tmp_path / "scans")
    ended = run_with_deadline("index", tmp_path / "scans" / name, "--json")
    assert ended.code == 65, ended.err
    assert ended.document["reasons"] == {"NOT_AN_IMAGE": 1}


@pytest.mark.parametrize("endless", ["pipe", "zero"])
def test_a_workflow_key_table_or_out_that_never_ends_is_refused(
    endless: str, tmp_path: Path
) -> None:
    quick, endless_file = QuickRun(tmp_path / "quick"), ZERO
    if endless == "pipe":
        endless_file = tmp_path / "pipe"
        os.mkfifo(endless_file)
    run, _, scans, *rest = quick.command()

    workflow = run_with_deadline(run, endless_file, scans, *rest)
    key = run_with_deadline(*quick.command(), "--key", endless_file)
    out = run_with_deadline(*quick.command(endless_file))
    join = run_with_deadline("join", endless_file, "--out", quick.out)

    assert (workflow.code, key.code, out.code, join.code) == (65, 65, 74, 65)
    assert "(WORKFLOW)" in workflow.err
    assert "(UNREADABLE)" in key.err
    assert "(OUTPUT_UNWRITABLE)" in out.err


# --- locks ---------------------------------------------------------------------------------------


def put(kind: str, path: Path) -> None:
    """Put something where a file belongs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "link to nothing":
        path.symlink_to("/nonexistent/lock")
    elif kind == "folder":
        (path / "inside").mkdir(parents=True)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        contents = {"empty": b"", "text": TEXT, "list": b"[]"}
        path.write_bytes(contents[kind])


TEXT = b"\xff\0{no"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["link to nothing", "folder", "pipe"])
def test_a_lock_that_no_run_made_is_named_and_taken_over_when_asked(
    kind: str, tmp_path: Path
) -> None:
    quick = QuickRun(tmp_path / "quick")
    put(kind, quick.out / ".work" / "run.lock")

    ended = run_with_deadline(*quick.command())
    taken_over = run_with_deadline(*quick.command(), "--take-over")

    assert ended.code == 65, ended.err
    assert ".work/run.lock does not name its run: use --take-over" in ended.err
    assert "(LOCKED)" in ended.err
    assert taken_over.code == 65, taken_over.err


@pytest.mark.parametrize("kind", ["empty", "text", "list"])
def test_a_lock_of_other_words_is_named(kind: str, tmp_path: Path) -> None:
    lock = tmp_path / "out" / ".work" / "run.lock"
    put(kind, lock)
    with pytest.raises(ScanError, match="does not name its run") as caught:
        hold_run_lock(tmp_path / "out").__enter__()
    assert caught.value.code == "LOCKED"
    with hold_run_lock(tmp_path / "out", take_over=True):
        assert "process" in (lock / HOLDER).read_text()
    assert not lock.exists()


def test_a_private_lock_that_links_to_nothing_is_refused(tmp_path: Path) -> None:
    quick = QuickRun(tmp_path / "quick")
    put("link to nothing", quick.out / "private" / ".lock")
    assert run_with_deadline("index", quick.scans, "--out", quick.out).code == 74


NO_HARD_LINKS = """
import errno, os
def refuse(*arguments, **more):
    raise OSError(errno.EPERM, "no hard links on this share")
os.link = refuse
from scanloom.cli.main import main
main()
"""


@pytest.mark.thorough
def test_a_run_on_a_share_without_hard_links(tmp_path: Path) -> None:
    quick = QuickRun(tmp_path / "quick")
    key = {"SCANLOOM_KEY": str(tmp_path / "key")}  # made there, too
    command = [sys.executable, "-c", NO_HARD_LINKS, *quick.command(), "--bids"]

    ended = subprocess.run(command, capture_output=True, check=False, env=os.environ | key)

    assert ended.returncode == 65, ended.stderr  # it selects none of the scans, and says so
    assert (quick.last / "totals.json").is_file()
    assert not [path for path in (quick.out / ".work").iterdir() if "lock" in path.name]


# --- workers -------------------------------------------------------------------------------------

HANGS = """
import os, sys, time
if "spawn_main" in " ".join(sys.orig_argv) and os.environ.get("HANG"):
    time.sleep(3600)
"""
IMPATIENT = """
import sys
if __name__ == "__main__":
    from scanloom.engine.clusters import connect
    connect.START_TIMEOUT_S = 2.0
    from scanloom.cli.main import main
    main()
"""


@pytest.mark.slow
def test_workers_that_never_start_are_given_up_and_ended(tmp_path: Path) -> None:
    quick = QuickRun(tmp_path / "quick")
    quick.workflow.write_text(quick.workflow.read_text().replace("modality: MR", "modality: CT"))
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    command = [argument for argument in quick.command() if argument not in ("--cluster", "none")]

    done = subprocess.run(
        [sys.executable, str(tmp_path / "impatient.py"), *command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "HANG": str(tmp_path)},
        timeout=120,
        check=False,
    )

    assert done.returncode == 65, done.stderr
    assert "did not start (CLUSTER)" in done.stderr
    status = json.loads((quick.last / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("failed", "CLUSTER")
    mark = f"HANG={tmp_path}".encode()
    survivors = [p for p in Path("/proc").glob("[0-9]*/environ") if mark in read_environment(p)]
    assert survivors == []


def read_environment(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


# --- damage --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_before(tmp_path_factory: pytest.TempPathFactory) -> QuickRun:
    quick = QuickRun(tmp_path_factory.mktemp("before") / "quick")
    assert scanloom(*quick.command()).code == 65
    return quick


DAMAGE = [
    ("runs/*-*/totals.json", "report", 0, "totals.json is damaged and was ignored: delete it"),
    ("runs/*-*/status.json", "status", 74, "status.json is damaged: delete it"),
    ("runs/*-*/workflow.json", "report", 0, ""),
    ("runs/plan.json", "run", 65, ""),
    ("manifest.csv", "report", 74, "manifest.csv is damaged: delete it"),
    ("private/crosswalk.parquet", "run", 74, "move it aside, and the next run makes a new one"),
    ("private/key.fingerprint", "run", 74, "key.fingerprint is damaged: if you are sure"),
    ("private/index.parquet", "run", 65, ""),
]


def damaged(before: QuickRun, out: Path, name: str, kind: str) -> Path:
    shutil.copytree(before.out, out)
    path = next(iter(sorted(out.glob(name))), out / name)
    put(kind, path)
    return path


@pytest.mark.parametrize(("name", "command", "code", "reported"), DAMAGE)
def test_a_damaged_file_is_named_with_the_way_out(
    run_before: QuickRun, name: str, command: str, code: int, reported: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    path = damaged(run_before, out, name, "text")

    ended = scanloom(*(run_before.command(out) if command == "run" else [command, out]))

    assert ended.code == code, ended.err
    assert reported in ended.err
    if command == "run" and reported:
        assert path.read_bytes() == TEXT  # it is never written over
        path.rename(tmp_path / "aside")
        assert scanloom(*run_before.command(out)).code == 65


@pytest.mark.parametrize(("name", "command", "code", "reported"), DAMAGE)
def test_a_pipe_in_the_place_of_a_file_of_ours_is_never_waited_for(
    run_before: QuickRun, name: str, command: str, code: int, reported: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    damaged(run_before, out, name, "pipe")
    ended = run_with_deadline(*(run_before.command(out) if command == "run" else [command, out]))
    assert ended.code == code, ended.err
    assert reported in ended.err


@pytest.mark.parametrize("reported", ["[]", '{"a": 1}', '{"run": "x", "state": "done"}'])
def test_totals_of_another_form_are_left_out_of_the_report(
    run_before: QuickRun, reported: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    damaged(run_before, out, "runs/*-*/totals.json", "empty").write_text(reported)
    ended = scanloom("report", out)
    assert ended.code == 0, ended.err
    assert "totals.json is damaged and was ignored" in ended.err


def test_a_shard_whose_manifest_is_damaged_is_named(run_before: QuickRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(run_before.out, out)
    [run] = [path for path in (out / "runs").iterdir() if path.is_dir()]
    (run / "manifest.parquet").write_bytes(b"PAR1" + TEXT)
    ended = scanloom("report", out)
    assert ended.code == 74, ended.err
    assert "manifest.parquet is damaged: delete it, and run that shard again" in ended.err
