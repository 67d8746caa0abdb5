"""A killed run has the results of an undisturbed one: `tests/stress/kill_runs.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "stress" / "kill_runs.py"


def kill(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), "--folder", str(folder), "--studies", "120"]
    command += ["--only", "none", "--repeat", "1", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_killed_runs_give_the_same_bytes_and_a_broken_writer_is_noticed(tmp_path: Path) -> None:
    """Six kills, one at each stage; many more: `python tests/stress/kill_runs.py`."""
    done = kill(tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("no fault\n0 faults\n")

    broken = kill(tmp_path, "--broken-writer")

    assert broken.returncode == 0, broken.stdout + broken.stderr
    assert "no fault" not in broken.stdout
