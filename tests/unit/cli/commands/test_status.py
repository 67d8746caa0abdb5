"""The table of a run's status."""

from __future__ import annotations

import pytest

from scanloom.cli.commands.status import status_table
from scanloom.cli.console import console
from scanloom.engine.monitor import Status


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("indexing", "2 cases ended; recorded with the whole index"),
        ("stopped", "2 cases ended; the next run takes their results"),
        ("died", "2 cases ended; the next run takes their results"),
    ],
)
def test_early_cases_of_a_run_that_is_over_wait_for_the_next(
    capsys: pytest.CaptureFixture[str], state: str, text: str
) -> None:
    console().print(status_table(Status("r", state, early=2)))
    assert text in capsys.readouterr().out


def test_what_a_gpu_does_not_tell_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """As how busy it is in MIG mode."""
    gpu = {"device": 0, "memory_used": 1 << 30, "memory_total": 1 << 31}
    silent = {**gpu, "busy_percent": None, "celsius": 40, "watts": None}
    console().print(status_table(Status("r", "running", devices=[silent])))
    assert "GPU 0  1 GiB of 2 GiB, 40 °C\n" in capsys.readouterr().out
