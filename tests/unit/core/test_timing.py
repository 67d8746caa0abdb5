from __future__ import annotations

import pytest

from scanloom.core import CpuWall, StepTimer


def test_seconds_add_up_by_step():
    """A step that comes twice has the seconds of both, in the order in which steps came."""
    begun: list[str] = []
    clock = StepTimer(begun.append)

    for name in ("load", "network", "load"):
        with clock.step(name):
            sum(range(1000))

    assert begun == ["load", "network", "load"]
    assert list(clock.steps) == ["load", "network"]
    assert all(s.wall > 0 and s.cpu >= 0 for s in clock.steps.values())
    assert CpuWall(1, 2) + CpuWall(3, 4) == CpuWall(4, 6)


def test_a_step_that_fails_has_taken_time_too():
    """The error goes on its way; the seconds stay."""
    clock = StepTimer()

    with pytest.raises(KeyError), clock.step("load"):
        raise KeyError

    assert "load" in clock.steps
