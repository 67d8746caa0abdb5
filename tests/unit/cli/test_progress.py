"""Progress on stderr: plain lines in a pipe, one living line on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import sys
from pathlib import Path

import pytest

from scanloom.cli.progress import progress


def test_plain_lines_once_each(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [Path("a/one.nii"), Path("b/two.nii")]
    with progress(paths) as on_step:
        for step in ("network", "restore", "network", "restore"):
            on_step(paths[0], step)
        on_step(paths[1], "network")

    assert capsys.readouterr().err.splitlines() == [
        "[1/2] one.nii: running the network",
        "[1/2] one.nii: restoring labels to the scan's grid",
        "[2/2] two.nii: running the network",
    ]


def test_a_living_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with brackets is shown as it is, not taken for markup."""
    monkeypatch.setenv("TERM", "xterm")
    screen, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        path = Path("scan[bold].nii")
        with progress([path]) as on_step:
            on_step(path, "network")
    shown = b""
    with contextlib.suppress(OSError):  # how Linux ends a terminal whose other side is closed
        while chunk := os.read(screen, 1 << 16):
            shown += chunk
    os.close(screen)

    assert b"scan[bold].nii: running the network" in shown
    assert shown.count(b"\n") <= 2
