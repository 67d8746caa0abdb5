"""Progress on stderr: plain lines in a pipe, one living line on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import sys
from pathlib import Path

import pytest

from scanloom.cli.commands.segment import progress
from scanloom.core.timing import WindowCount


def test_plain_lines_once_each(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [Path("a/one.nii"), Path("b/two.nii")]
    with progress(paths) as shown:
        for step in ("network", "restore", "network", "restore"):
            shown.on_step(paths[0], step)
        for done in range(1, 9):
            shown.on_windows(paths[0], WindowCount("tiny", done, 8, "cpu", "float32"))
        shown.on_step(paths[1], "network")

    assert capsys.readouterr().err.splitlines() == [
        "[1/2] one.nii: running the network",
        "[1/2] one.nii: 1 of 8 windows, tiny on cpu, float32",
        "[2/2] two.nii: running the network",
    ]


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
    assert b"2/640 windows" in shown
    assert b"left; tiny on cuda:0, float16" in shown
    assert shown.count(b"\n") <= 2
