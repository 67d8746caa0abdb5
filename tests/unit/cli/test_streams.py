"""Stdout and stderr that can't take letters, bytes or anything at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")


def ended(command: str, encoding: str = "utf-8", folder: Path | None = None) -> tuple[int, bytes]:
    """Run a line of shell that calls `scanloom`; return its exit code and output."""
    program = command.replace("scanloom", f"{sys.executable} -m scanloom")
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        program, shell=True, env=env, cwd=folder, capture_output=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
@pytest.mark.parametrize("command", ["--help", "models list", "models show nope --json"])
@pytest.mark.parametrize("stdout", [f">{FULL}", ">&-"])
def test_a_stdout_that_cannot_be_written_is_74_and_one_line(command: str, stdout: str) -> None:
    code, output = ended(f"scanloom {command} {stdout}")

    assert code == 74
    assert output.count(b"\n") == 1
    assert b"can't be written to stdout" in output


@pytest.mark.parametrize("closed", ["<&-", "<&- >&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_become_no_other_file(closed: str, tmp_path: Path) -> None:
    """As a service may start it: else the next opened file is what a library prints to."""
    code, _ = ended(f"scanloom segment {tmp_path} -m total_fast {closed}")
    lines = (
        "import os, subprocess, sys",
        "from scanloom.cli.console import steady_streams",
        "with steady_streams():",
        "    assert os.open('.', os.O_RDONLY) > 2",
        "    assert not sys.stdin.isatty()",
        "    subprocess.run([sys.executable, '-c', 'import os; os.fstat(0)'], check=True)",
    )
    (tmp_path / "opens.py").write_text("\n".join(lines))
    opened = subprocess.run(
        f"{sys.executable} opens.py {closed}", shell=True, cwd=tmp_path, check=False
    )

    assert code == 65
    assert opened.returncode == 0


def test_a_current_folder_that_was_removed_is_told(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code, output = ended(f"rmdir {gone}; scanloom models show ct_tissue --json", folder=gone)

    assert code == 1
    error = json.loads(output)["error"]
    assert error["code"] == "ENVIRONMENT"
    assert "current folder" in error["detail"]


def test_a_closed_pipe_is_no_error_message() -> None:
    _, output = ended("(sleep 1; scanloom models list --json) | true")

    assert output == b""


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_help_is_there_in_any_encoding(encoding: str) -> None:
    code, output = ended("scanloom segment --help", encoding)

    assert code == 0
    assert b"--model" in output


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_json_is_utf8_whatever_a_path_holds(encoding: str, tmp_path: Path) -> None:
    name = r"$(printf 'lat\351in-\303\244-\360\237\230\200')"
    command = f'scanloom segment "{name}" --model ct_tissue --json 2>/dev/null'
    code, output = ended(command, encoding, tmp_path)

    [case] = json.loads(output.decode("utf-8"))["cases"]
    assert code == 65
    assert os.fsencode(case["path"]) == b"lat\xe9in-\xc3\xa4-\xf0\x9f\x98\x80"
