"""A run whose process is ended while it stops tells that it was stopped, and leaves no lock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scanloom.engine.monitor import Status, StatusWriter, final_status
from scanloom.io.output.folder_lock import read_lock

ENDED = """
import sys
from pathlib import Path
from scanloom.core import process
from scanloom.engine.monitor import StatusWriter, final_status
from scanloom.engine.run_files import hold_run_lock
process._LAST_ACTS_S = 60.0
out = Path(sys.argv[1])
with hold_run_lock(out), final_status(StatusWriter("1", out / "runs" / "1")):
    with process.last_act(lambda: 1 / 0):
        process.end_process(130)
"""


def test_the_status_is_stopped_and_the_lock_gone(tmp_path: Path) -> None:
    (tmp_path / "runs" / "1").mkdir(parents=True)

    ended = subprocess.run([sys.executable, "-c", ENDED, tmp_path], timeout=300, check=False)

    assert ended.returncode == 130
    assert Status.read(tmp_path / "runs" / "1").as_observed().state == "stopped"
    assert read_lock(tmp_path / ".work" / "run.lock") is None


def test_an_end_does_not_wait_for_a_file_system_that_hangs(tmp_path: Path) -> None:
    hangs = """
import threading
from scanloom.core import process
process._LAST_ACTS_S = 0.1
with process.last_act(threading.Event().wait):
    process.end_process(130)
"""
    ended = subprocess.run([sys.executable, "-c", hangs], timeout=300, check=False)

    assert ended.returncode == 130


def test_an_interrupted_run_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    with pytest.raises(KeyboardInterrupt), final_status(StatusWriter("1", tmp_path / "1")):
        raise KeyboardInterrupt

    assert Status.read(tmp_path / "1").state == "stopped"
