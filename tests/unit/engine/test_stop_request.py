"""A run that is ended by force kills its processes before it releases its lock."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
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
        with suppress(OSError):  # it is gone
            state = Path(f"/proc/{number}/stat").read_text()
            assert state.rpartition(")")[2].split()[0] == "Z"
    assert not any((out / ".work").iterdir())
    with hold_run_lock(out):
        pass


TWICE = """
import multiprocessing, os, threading
from scanloom.engine.stop_request import StopRequest

if __name__ == "__main__":
    stop, ends = StopRequest(), []
    lock = multiprocessing.get_context("spawn").Lock()
    threads = [threading.Thread(target=stop.give_up, args=[30.0]) for _ in range(8)]
    with stop.handing_back(lambda: ends.append(1)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(len(ends), flush=True)
    lock = None  # its name is gone, which Python would print
    os._exit(0)
"""


def test_signals_at_the_same_moment_end_a_run_once(tmp_path: Path) -> None:
    """As of timeout(1), which sends SIGTERM to the command and then to its process group."""
    program = tmp_path / "program.py"
    program.write_text(TWICE)

    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)

    assert ended.stdout == "1\n"
    assert ended.stderr == ""
