"""Runs of one output folder agree on the recipe of its results."""

from __future__ import annotations

import itertools
import json
import os
import resource
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from scanloom.core import ScanError
from scanloom.engine.monitor import StatusWriter
from scanloom.engine.run_files import (
    CASES_FILE,
    RUNS,
    check_other_runs,
    create_run_folder,
    hold_run_lock,
    run_folders,
)
from scanloom.engine.workflow.schema import Workflow
from support.listeners import wait_for

Shard = tuple[int, int] | None


class Out:
    """An output folder with runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.workflow = folder, Workflow(name="test", models=["ct_tissue"])

    def begin(self, recipe: str, shard: Shard = None) -> StatusWriter:
        """Begin a run as `run` does."""
        name = create_run_folder(self.folder, self.workflow, [], recipe, shard)
        assert max(path.name for path in (self.folder / RUNS).iterdir()) == name
        return StatusWriter(name, self.folder / RUNS / name, period=0.005)

    def end(self, recipe: str, shard: Shard, state: str = "done") -> None:
        self.begin(recipe, shard).close(state)

    def refused(self, recipe: str, shard: Shard = None) -> str:
        """Return why a run is refused; empty if it isn't."""
        with suppress(ScanError):
            check_other_runs(self.folder, recipe, shard)
            return ""
        with pytest.raises(ScanError, match="STALE") as caught:
            check_other_runs(self.folder, recipe, shard)
        return caught.value.detail


@pytest.fixture
def out(tmp_path: Path) -> Out:
    return Out(tmp_path / "out")


@pytest.mark.parametrize("shard", [None, (1, 2)])
def test_a_run_at_work_forbids_another_recipe(out: Out, shard: Shard) -> None:
    with closing(out.begin("a", shard)) as status:
        wait_for(lambda: next(out.folder.glob("runs/*/status.json"), None))
        assert "indexing" in out.refused("b")
        assert "indexing" in out.refused("b", (2, 2))
        assert not out.refused("a", (2, 2))
        status.close("stopped")
    assert not out.refused("b")


def test_shards_that_left_work_forbid_another_recipe(out: Out) -> None:
    out.end("a", (1, 2), "stopped")
    assert "shard 1 of 2" in out.refused("b", (2, 2))
    assert "shard 1 of 2" in out.refused("b", (1, 2))  # else the second one could have neither
    assert not out.refused("b", (2, 3))

    out.end("a", (1, 2))
    assert "shard 1 of 2" in out.refused("b", (2, 2))  # the second one has yet to come
    out.end("a", (2, 2))
    assert not out.refused("b", (2, 2))


def test_once_all_shards_have_ended_all_may_have_another_recipe(out: Out) -> None:
    for number in (1, 2, 3):
        out.end("a", (number, 3))
    out.end("b", (1, 3))

    assert not out.refused("b", (2, 3))
    assert "shard 1 of 3" in out.refused("a", (2, 3))
    (out.folder / RUNS / "4").mkdir()  # of a run that died before it wrote anything
    assert not out.refused("b", (3, 3))


def test_runs_are_in_their_order_though_a_clock_is_set_back(
    out: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the last night of October; and beside ids in local time."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    night = 1792890000.0  # 2026-10-25 01:00 UTC: the second of two hours of that name begins
    moments = itertools.chain([night - 1, night, night + 1, night - 3600], itertools.repeat(night))
    monkeypatch.setattr(time, "time", lambda: next(moments))
    try:
        (out.folder / RUNS / "20261025T020000-000000").mkdir(parents=True)
        names = [create_run_folder(out.folder, out.workflow, [], "a") for _ in range(6)]
    finally:
        monkeypatch.undo()
        time.tzset()

    assert [folder.name for folder in run_folders(out.folder)][1:] == names
    assert names[0].startswith("20261025T020001-")


def test_a_run_that_finds_no_room_leaves_no_folder(out: Out) -> None:
    """`verify` could not read what it left; a limit of sizes stands for the full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            create_run_folder(out.folder, out.workflow, [], "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert not run_folders(out.folder)


@pytest.mark.parametrize(("ahead_s", "set_back_s"), [(600, 0), (0, 300)])
def test_the_end_of_a_run_leaves_what_others_are_writing(
    out: Out, ahead_s: int, set_back_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another shard, on a host with another clock, or while a clock is set back."""
    now, begin_s = time.time(), time.monotonic()
    folders = [out.folder / f".manifest.csv.{n:08x}" for n in (1, 2)]
    monkeypatch.setattr(time, "time", lambda: now + ahead_s)

    with hold_run_lock(out.folder, shard="1-of-2"):
        for folder, age in zip(folders, (7200, set_back_s), strict=True):
            folder.mkdir()
            (folder / f"{1:016x}").touch()
            for path in (folder / f"{1:016x}", folder):
                os.utime(path, (now + 1 - age, now + 1 - age))
        monkeypatch.setattr(time, "monotonic", lambda: begin_s + 2 * set_back_s)

    assert [folder.exists() for folder in folders] == [False, True]


def test_lists_of_cases_are_removed_once_no_worker_reads_them(out: Out) -> None:
    """The path of each file of an archive stands in one: 27 GB for a million CTs."""

    def write_list(run: str) -> Path:
        file = out.folder / "private" / RUNS / run / CASES_FILE
        file.parent.mkdir(parents=True)
        file.touch()
        return file

    def begin(**changed: object) -> Path:
        """Begin a run that dies: its status is that of a process which is gone."""
        with closing(out.begin("a")) as status:
            name = status.now().run
        file = out.folder / RUNS / name / "status.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "state": "running", **changed}))
        return write_list(name)

    with hold_run_lock(out.folder):
        ours = out.begin("a")
        files = [
            write_list(ours.now().run),
            begin(process=1 << 30),
            begin(process=1 << 30, moment=1.0),
            begin(),
        ]
        ours.close("done")

    assert [file.exists() for file in files] == [False, True, False, True]
