"""Writers beside each other: all end, and the error of a failed one is raised."""

from __future__ import annotations

import threading

import pytest

from scanloom.io.system.parallel import run_parallel


def test_tasks_run_at_the_same_time() -> None:
    """Each waits for the other: one after the other, neither would end."""
    both = threading.Barrier(2, timeout=20)
    run_parallel(both.wait, both.wait)


def test_an_error_comes_out_when_all_have_ended() -> None:
    written: list[int] = []
    failed = threading.Event()

    def full() -> None:
        failed.set()
        raise OSError(28, "no space")

    def slow() -> None:
        failed.wait(20)
        written.append(1)

    with pytest.raises(OSError, match="no space"):
        run_parallel(full, slow)
    assert written == [1]
