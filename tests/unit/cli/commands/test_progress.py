"""Progress on stderr: plain lines in a pipe, one living line on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scanloom.cli.commands.run import status_line
from scanloom.cli.commands.segment import progress
from scanloom.core.timing import WindowCount
from scanloom.engine.monitor import Status


def test_plain_lines_once_each(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [Path("a/one.nii"), Path("b/two.nii")]
    with progress(paths) as shown:
        for step in ("network", "restore", "network", "restore"):
            shown.on_step(paths[0], step)
        for done in range(1, 9):
            shown.on_windows(paths[0], WindowCount("tiny", done, 8, "cpu", "float32"))
        shown.on_windows(paths[0], WindowCount("next", 0, 1, "cpu", "float32", 2, 3))
        shown.on_step(paths[1], "network")

    assert capsys.readouterr().err.splitlines() == [
        "[1/2] one.nii: running the network",
        "[1/2] one.nii: 1 of 8 windows, tiny on cpu, float32",
        "[1/2] one.nii: 0 of 1 window, network 2 of 3, next on cpu, float32",
        "[2/2] two.nii: running the network",
    ]


def test_a_line_a_minute_says_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a network of 100 windows that takes 3 s for each, the first one 20 s."""
    seconds = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: seconds[0])
    path = Path("one.nii")
    with progress([path]) as shown:
        for done in range(101):
            shown.on_windows(path, WindowCount("tiny", done, 100, "cpu", "float32"))
            seconds[0] += 3 if done else 20

    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1].split(", tiny")[0] for line in lines] == [
        "0 of 100 windows",
        "15 of 100 windows, 4 min left",
        "35 of 100 windows, 3 min left",
        "55 of 100 windows, 2 min left",
        "75 of 100 windows, 75 s left",
        "95 of 100 windows, 15 s left",
    ]


def test_a_line_of_a_run_counts_only_what_it_works_on() -> None:
    """Not the series that were refused by their headers, or wait for a choice."""
    told = {"step": "network", "model": "tiny", "network": 2, "networks": 3, "done": 4, "total": 9}
    now = Status(
        "run",
        "running",
        cases=54,
        work=9,
        worked=2,
        done=1,
        ambiguous=11,
        failed=35,
        left_s=600.0,
        in_flight={"abcdefghijkl": 9.0, "b": 8.0},
        progress={"abcdefghijkl": {**told, "left_s": 61.0}},
    )
    assert status_line(now) == (
        "running: 2 of 9 cases; 1 without result; 10 min left; "
        "abcdefgh…, tiny: 4 of 9 windows, network 2 of 3, 61 s left of it; 1 more in progress"
    )
    assert status_line(replace(now, progress={})).endswith("left; 2 in progress")
    assert status_line(Status("run", "indexing")) == ""


def test_a_terminal_shows_one_updated_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with brackets is shown as it is, not taken for markup."""
    monkeypatch.setenv("TERM", "xterm")
    screen, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setenv("COLUMNS", "160")
        path = Path("scan[bold].nii")
        with progress([path]) as bar:
            bar.on_step(path, "network")
            for done in (1, 2):
                bar.on_windows(path, WindowCount("tiny", done, 640, "cuda:0", "float16"))
    shown = b""
    with contextlib.suppress(OSError):  # how Linux ends a terminal whose other side is closed
        while chunk := os.read(screen, 1 << 16):
            shown += chunk
    os.close(screen)

    assert b"scan[bold].nii: running the network" in shown
    assert b"2 of 640 windows" in shown
    assert b"left; tiny on cuda:0, float16" in shown
    assert shown.count(b"\n") <= 2
