"""Runs among trouble: crashes, hangs, full memory and disks, signals. Nothing is lost or half."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from support import engine_models as em
from support.commands import scanloom
from support.formula_run import PROGRAM, formula_environment, processes, start

pytestmark = pytest.mark.slow

GOOD = 3000
"""The brightest voxel of the first good scan; the next one has one more."""
LIMIT = 60.0
"""Seconds that a case may take; the good ones need one."""
IN_FLIGHT = 3


@dataclass
class Runs:
    """Runs by formula over one archive of NIfTI files."""

    folder: Path
    model: Path

    def __post_init__(self) -> None:
        self.out, self.notes = self.folder / "out", self.folder / "notes"
        self.archive, self.log = self.folder / "archive", self.folder / "log"
        self.archive.mkdir()

    def write(self, tasks: list[int], execution: str = "") -> None:
        """Write scans, the workflow, and shuffle the troublesome among the good ones."""
        for n in np.random.default_rng(0).permutation(len(tasks)):
            array = np.full((12, 11, 10), -900, np.int16)
            array[4:8, 4:8, 4:8] = tasks[n]
            array[0, 0, 0] = -(n + 1)  # no two files are the same scan
            image = nib.Nifti1Image(array, np.diag((2.0, 2.0, 2.0, 1.0)))
            nib.save(image, self.archive / f"{n:03d}.nii.gz")
        text = f"name: test\nmodels: [{self.model}]\npolicy: {{modality: CT}}\n"
        (self.folder / "workflow.yaml").write_text(f"{text}execution: {{{execution}}}\n")

    def begin(self, cluster: str, seconds: float = 0.0) -> subprocess.Popen[bytes]:
        command = ["run", self.folder / "workflow.yaml", self.archive, "--out", self.out]
        environment = formula_environment(self.notes, seconds)
        return start([*command, "--cluster", cluster], environment, self.log)

    def ends(self, process: subprocess.Popen[bytes], seconds: float = 300) -> int:
        """Return its exit code; all its processes are gone soon after."""
        code = process.wait(seconds)
        until = time.monotonic() + 60
        while processes(self.notes):
            assert time.monotonic() < until, processes(self.notes)
            time.sleep(0.1)
        return code

    @property
    def started(self) -> Counter[int]:
        """The number of starts of each scan, by its brightest voxel."""
        path = self.notes / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(int(line.split()[0]) for line in lines)

    def lines(self) -> list[dict[str, Any]]:
        """Return the log of all runs."""
        logs = sorted(self.out.glob("runs/*/log.jsonl"))
        return [json.loads(line) for log in logs for line in log.read_text().splitlines()]

    def hung(self) -> list[float]:
        """Return the seconds from the last start of each scan that hung until it was given up."""
        lines = (self.notes / "starts").read_text().splitlines()
        starts = [
            float(line.split()[2]) for line in lines if line.startswith(f"{em.HANG_WITH_GIL} ")
        ]
        ends = [
            datetime.strptime(line["at"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
            for line in self.lines()
            if line["reason"] == "CASE_TIMEOUT"
        ]
        return [end - max(s for s in starts if s < end) for end in ends]

    def check_whole(self, cases: int) -> None:
        """Check that so many cases are published, each as its sums say, and nothing else is."""
        assert len(list((self.out / "cases").iterdir())) == cases
        verify = [sys.executable, "-m", "scanloom", "verify", str(self.out)]
        assert subprocess.run(verify, capture_output=True, check=False).returncode == 0
        assert not list((self.out / ".work").iterdir())


@pytest.fixture
def runs(tmp_path: Path, model: Path) -> Iterator[Runs]:
    formula_runs = Runs(tmp_path, model)
    yield formula_runs
    for process in processes(formula_runs.notes):  # of a test that failed
        os.kill(process, signal.SIGKILL)


def wait_for_starts(runs: Runs, count: int) -> None:
    until = time.monotonic() + 120
    while runs.started.total() < count:
        assert time.monotonic() < until, runs.log.read_text()
        time.sleep(0.02)


@pytest.mark.parametrize("workers", [1, 2])
def test_only_faulty_cases_fail_and_others_are_published_once(runs: Runs, workers: int) -> None:
    guilty = [em.ABORT] * 3 + [em.HANG_WITH_GIL] * 2 + [em.TAKE_ALL_MEMORY]
    execution = f"time_limit: {LIMIT:g} s, memory_limit: 3 GiB, workers: {workers}, device: cpu"
    runs.write([*range(GOOD, GOOD + 40), *guilty], f"{execution}, in_flight: {IN_FLIGHT}")

    code = runs.ends(runs.begin("none" if workers == 1 else "local"), 900)

    assert code == 1, runs.log.read_text()
    runs.check_whole(40)
    failed = [json.loads(p.read_text()) for p in (runs.out / "failed").iterdir()]
    assert Counter(f["reason"] for f in failed) == {
        "CRASHED": 3,
        "CASE_TIMEOUT": 2,
        "OUT_OF_MEMORY": 1,
    }
    reported = {line["case"]: line for line in runs.lines()}
    assert len(reported) == len(runs.lines()) == 46
    tries = [t for line in reported.values() if line["reason"] for t in line["tries"]]
    deaths = sum(t["end"].startswith(("died", "late")) for t in tries)
    good = {task: n for task, n in runs.started.items() if task >= GOOD}
    assert len(good) == 40
    assert sum(good.values()) <= 40 + deaths * IN_FLIGHT
    assert max(runs.hung()) < LIMIT + 60


@pytest.mark.parametrize("cluster", ["none", "local"])
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_cases_in_work_finish(
    runs: Runs, cluster: str, signal_number: signal.Signals
) -> None:
    runs.write(list(range(GOOD, GOOD + 12)), "device: cpu, in_flight: 2")
    process = runs.begin(cluster, 1.0)
    wait_for_starts(runs, 1)

    process.send_signal(signal_number)

    assert runs.ends(process) == 130
    published = len(list((runs.out / "cases").iterdir()))
    assert 1 <= published < 12
    assert runs.ends(runs.begin(cluster)) == 0, runs.log.read_text()
    runs.check_whole(12)
    assert runs.started.total() <= 12 + 2


@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize("cluster", ["none", "local"])
def test_a_run_that_hangs_is_ended_by_force_and_stopped(
    runs: Runs, cluster: str, signals: int
) -> None:
    runs.write([em.SLEEP_FOREVER] * 2, "device: cpu, in_flight: 2")
    process = runs.begin(cluster)
    wait_for_starts(runs, 1)  # the other one waits for the device
    process.send_signal(signal.SIGINT)
    if signals == 2:
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
    began = time.monotonic()

    assert runs.ends(process) == 130
    assert signals == 1 or time.monotonic() - began < 9  # else 10 s, and the end
    assert not list((runs.out / ".work").glob("*.lock"))
    reported = scanloom("status", runs.out, "--json")
    assert (reported.code, reported.document["status"]["state"]) == (0, "stopped")
    *_, resume, command = runs.log.read_text().splitlines()
    assert resume == "To resume:"
    assert " run " in command


@pytest.mark.parametrize("cluster", ["none", "local"])
def test_a_parent_that_dies_leaves_no_orphan(runs: Runs, cluster: str) -> None:
    """Processes end even if native code hangs with the lock of the interpreter."""
    runs.write([GOOD, em.HANG_WITH_GIL], "device: cpu, in_flight: 2")
    process = runs.begin(cluster)
    wait_for_starts(runs, 1)
    while em.HANG_WITH_GIL not in runs.started:  # it may be the second
        wait_for_starts(runs, 2)
    assert len(processes(runs.notes)) >= 2

    process.kill()

    assert runs.ends(process) == -signal.SIGKILL
    reported = scanloom("status", runs.out, "--json")
    assert (reported.code, reported.document["status"]["state"]) == (1, "died")
    assert "last heartbeat" in scanloom("status", runs.out).out


def test_a_device_that_is_full_is_tried_in_a_fresh_process(runs: Runs) -> None:
    runs.write([GOOD, em.FILL_DEVICE_ONCE, GOOD + 1], "device: cpu")

    assert runs.ends(runs.begin("none")) == 0, runs.log.read_text()

    runs.check_whole(3)
    [line] = [line for line in runs.lines() if len(line["tries"]) > 1]
    assert [(t["end"], t["alone"]) for t in line["tries"]] == [
        ("OUT_OF_MEMORY", False),
        ("done", True),
    ]
    starts = [line.split() for line in (runs.notes / "starts").read_text().splitlines()]
    first, second = (pid for task, pid, _ in starts if int(task) == em.FILL_DEVICE_ONCE)
    assert first != second


FILL = """
set -u
disk=$1; shift
mount -t tmpfs -o size=400k none "$disk"
"$@"; echo full $?
ls "$disk"/out/.work "$disk"/out/cases
mount -o remount,size=64m "$disk"
"$@"; echo room $?
cp -r "$disk"/out "$disk".copy
"""


def test_a_full_disk_is_74_and_the_run_goes_on_when_there_is_room(runs: Runs) -> None:
    disk = runs.folder / "disk"
    disk.mkdir()
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    probe = [*inside, 'mount -t tmpfs none "$0"', str(disk)]
    if (
        shutil.which("unshare") is None
        or subprocess.run(probe, capture_output=True, check=False).returncode
    ):
        pytest.skip("unshare can't mount a small disk here")
    runs.write(list(range(GOOD, GOOD + 12)), "device: cpu")
    command = [sys.executable, str(PROGRAM), "run", str(runs.folder / "workflow.yaml")]
    command += [str(runs.archive), "--out", str(disk / "out"), "--cluster", "none"]

    done = subprocess.run(
        [*inside, FILL, "sh", str(disk), *command],
        capture_output=True,
        text=True,
        env=formula_environment(runs.notes),
        check=False,
    )

    assert "full 74" in done.stdout, done.stdout + done.stderr
    assert "DISK_FULL" in done.stderr
    assert "room 0" in done.stdout, done.stdout + done.stderr
    runs.out = runs.folder / "disk.copy"
    runs.check_whole(12)
