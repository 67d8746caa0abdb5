"""Kill -9 of all processes of a run, of a shard, of a machine: OUT ends as if undisturbed."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scanloom.io.output import ledger
from support.commands import scanloom, write_tiny_bundle
from support.fork_server import ForkedProcess
from support.killed_runs import DEADLINE_S, KILLED, SMALL, KilledRuns
from support.machines import KILLED as KILLED_THERE
from support.mixed_archive import draw_mixed_archive
from support.output_state import left_over, output_state

KEY = bytes(range(32))

EARLY = """
1 mkdir */private/index/.*
3 rename */index/lock.*
2 rename */private/index/*.parquet
1 rename */.work/*.early
2 rename */.work/*.early
1 rename */index/merge.claim
3 rename */index/sorted.*
1 rename */private/index.parquet
2 rename */.work/*.new
2 open ledger.jsonl
2 rename */out/cases/*
2 open */log.jsonl
"""
"""Moments of runs whose cases begin while the archive is indexed: from `private/index.parquet` on,
their results are confirmed or removed."""
AFTER_INDEX = """
2 rename */index/*.claim
1 open */cases.jsonl
1 rename */failed/*
1 rename */out/cases/*
1 open audit.jsonl
1 remove */private/crosswalk.jsonl
1 rename */private/ledger.parquet
1 remove */private/ledger.jsonl
1 rename */manifest.parquet
1 rename */measurements.parquet
1 rename */private/tabled.parquet
1 rename */totals.json
1 rename */report/index.html
"""
"""Moments of runs that index first."""
THREE = """
2 rename */private/index/*.parquet
1 rename */out/cases/*
1 rename */manifest.parquet
"""
DEATHS = (
    "1 rename */private/index/*.parquet",
    "1 rename */early/.work/*.early",
    "2 open ledger.jsonl",
    "1 rename */manifest.parquet",
)
"""Moments at which the machine of a shard dies."""
NAMESPACES = ("unshare", "--user", "--map-root-user", "--mount", "--uts", "--pid", "--fork")
SOME_FAILED, LOCKED = 1, 65


def write_workflow(folder: Path, name: str, choose: str) -> Path:
    path = folder / f"{name}.yaml"
    if not (folder / "bundles").exists():
        write_tiny_bundle(folder / "bundles")
    select = f"{{modality: CT, choose: {choose}}}"
    path.write_text(
        f"name: {name}\nmodels: [{folder / 'bundles' / 'tiny'}]\nselect: {select}\n"
        "policy: {modality: CT}\n"
    )
    return path


def prepare(folder: Path, scans: int) -> Path:
    """Make an archive, two workflows, and a key."""
    draw_mixed_archive(folder / "archive", scans)
    write_workflow(folder, "early", "all")
    write_workflow(folder, "first", "best")
    (folder / "key").write_bytes(KEY)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("killed"), 36)


def runs(folder: Path, name: str, workflow: str, out: Path, machine: str = "") -> KilledRuns:
    paths = folder / name, folder / "archive", folder / f"{workflow}.yaml", folder / "key"
    return KilledRuns(*paths, out, machine)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Callable[[str], Path]:
    """Return a function that gives the output folder of an undisturbed run of a workflow."""

    @functools.cache
    def run(workflow: str) -> Path:
        out = folder / f"whole {workflow}" / "out"
        assert runs(folder, out.parent.name, workflow, out)() == SOME_FAILED
        return out

    return run


def check_equal(out: Path, undisturbed: Path) -> None:
    expected, found = output_state(undisturbed, KEY), output_state(out, KEY)
    for subject, rows in expected.items():
        assert found[subject] == rows, subject
    counts = dict(expected["counts"])
    assert counts.pop("found") == sum(counts.values())
    assert scanloom("verify", out).code == 0


def check_killed_runs(folder: Path, workflow: str, moments: str, undisturbed: Path) -> None:
    repeated = runs(folder, f"killed {workflow}", workflow, folder / f"killed {workflow}" / "out")
    for moment in moments.strip().splitlines():
        assert repeated(kill=moment) == KILLED, moment

    assert repeated() == SOME_FAILED

    check_equal(repeated.out, undisturbed)
    assert not left_over(repeated.out, repeated.temporary)


@pytest.mark.slow
@pytest.mark.parametrize(("workflow", "moments"), [("early", EARLY), ("first", AFTER_INDEX)])
def test_killed_runs_leave_what_an_undisturbed_one_does(
    folder: Path,
    workflow: str,
    moments: str,
    undisturbed: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SCANLOOM_KEY", str(folder / "key"))
    check_killed_runs(folder, workflow, moments, undisturbed(workflow))


@pytest.mark.thorough
def test_three_kills_leave_what_an_undisturbed_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a part is stored, a case published, and a table written."""
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    undisturbed = runs(prepare(tmp_path, 12), "whole", "early", tmp_path / "whole" / "out")
    assert undisturbed() == SOME_FAILED
    check_killed_runs(tmp_path, "early", THREE, undisturbed.out)


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a folder on a tmpfs that several machines see."""
    if not Path("/dev/shm").is_dir() or shutil.which("unshare") is None:
        pytest.skip("there is no tmpfs, or there are no namespaces")
    if subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode:
        pytest.skip("there are no namespaces")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.mark.slow
def test_two_runs_of_four_shards_outlive_a_machine(
    folder: Path,
    shared: Path,
    undisturbed: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All machines refuse link(2). One dies again and again, with a claim, a case, a table."""
    monkeypatch.setenv("SCANLOOM_KEY", str(folder / "key"))
    outs = {workflow: shared / workflow for workflow in ("early", "first")}
    doomed = ("early", 2)

    def on(machine: str, workflow: str, shard: int, *options: str, kill: str = "") -> ForkedProcess:
        place = runs(folder, f"{workflow} {shard} {machine}", workflow, outs[workflow], machine)
        return place.begin("--shard", f"{shard}/4", *options, kill=kill)

    first, *deaths = DEATHS
    assert on("dead-0", *doomed, kill=first).wait(DEADLINE_S) == KILLED_THERE
    all_shards = itertools.product(outs, range(1, 5))
    others = [on(f"host-{shard}", w, shard) for w, shard in all_shards if (w, shard) != doomed]
    for number, moment in enumerate(deaths, 1):
        process = on(f"dead-{number}", *doomed, "--take-over", kill=moment)
        assert process.wait(DEADLINE_S) == KILLED_THERE, moment
    assert {process.wait(DEADLINE_S) for process in others} <= {0, SOME_FAILED}

    assert on("refused", *doomed).wait(DEADLINE_S) == LOCKED
    assert on("last", *doomed, "--take-over").wait(DEADLINE_S) in (0, SOME_FAILED)

    monkeypatch.setattr(ledger, "CHECKED", SMALL)
    for workflow, out in outs.items():
        whole = undisturbed(workflow)
        assert scanloom("report", out).code == scanloom("report", whole).code
        check_equal(out, whole)
    # What a machine left in `.work` may be in work there: it goes after a day; its progress does
    # when its heartbeat is old

    def left_behind() -> list[str]:
        paths = left_over(outs["early"], folder / "none")
        return [path for path in paths if Path(path).name != "progress"]

    left = left_behind()
    assert all(Path(path).parent.name == ".work" for path in left), left
    for path in left:
        os.utime(path, (0, 0))
    assert on("host-1", "early", 1).wait(DEADLINE_S) in (0, SOME_FAILED)
    assert not left_behind()
    assert scanloom("report", outs["early"]).code == scanloom("report", undisturbed("early")).code
    check_equal(outs["early"], undisturbed("early"))
