"""A run that is ended by force kills its processes before it releases its lock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scanloom.engine.run_files import hold_run_lock

PROGRAM = """
import multiprocessing, os, subprocess, sys
from pathlib import Path
from scanloom.engine.run_files import hold_run_lock
from scanloom.engine.stop_request import StopRequest

if __name__ == "__main__":
    lock = multiprocessing.get_context("spawn").Lock()  # Python starts a process for it
    child = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); input()"
    begun = subprocess.Popen([sys.executable, "-c", child], stdin=-1, stdout=-1)
    grandchild, stop = int(begun.stdout.readline()), StopRequest()
    with hold_run_lock(Path(sys.argv[1])) as release:
        with stop.handing_back(release):
            stop.give_up(30.0)
        print(begun.pid, grandchild, flush=True)
        os._exit(0)
"""


def test_all_processes_are_dead_when_the_lock_is_free(tmp_path: Path) -> None:
    out, program = tmp_path / "out", tmp_path / "program.py"
    program.write_text(PROGRAM)

    command = [sys.executable, str(program), str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)

    for number in map(int, ended.stdout.split()):
        state = Path(f"/proc/{number}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    assert not any((out / ".work").iterdir())
    with hold_run_lock(out):
        pass
