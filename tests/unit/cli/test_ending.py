"""The quick end of a process: exit code, output and exit functions are those of Python's own."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys
from scanloom.cli.ending import quick_end

class Late:
    def __del__(self):
        print("taken apart")

late = Late()
with quick_end():
    atexit.register(print, "exit function")
    print("written", end=" and ")
    {end}
"""


def ended(end: str) -> tuple[int, str]:
    """Return the exit code and the output of a process with that end."""
    program = [sys.executable, "-c", SCRIPT.format(end=end)]
    done = subprocess.run(program, capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize("code", [0, 1, 74])
def test_exit_functions_run_and_output_is_written_before_the_end(code: int) -> None:
    assert ended(f"sys.exit({code})") == (code, "written and exit function\n")


@pytest.mark.parametrize(
    ("end", "code"), [("pass", 0), ("sys.exit('why')", 1), ("raise ValueError", 1)]
)
def test_other_ends_are_left_to_python(end: str, code: int) -> None:
    assert ended(end) == (code, "written and exit function\ntaken apart\n")
