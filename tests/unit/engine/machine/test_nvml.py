"""NVML is shut down again whatever fails, and a failure gives no GPUs."""

from __future__ import annotations

from typing import Never

import pynvml
import pytest

from scanloom.engine.machine.devices import nvml_handles


def fail(*_: object) -> Never:
    raise pynvml.NVMLError_Unknown


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the calls so far to a library that has two GPUs."""
    calls: list[str] = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: calls.append("init"))
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda number: f"GPU {number}")
    return calls


def test_each_device_has_a_handle(calls: list[str]) -> None:
    with nvml_handles() as handles:
        assert handles == ["GPU 0", "GPU 1"]
        assert calls == ["init"]
    assert calls == ["init", "shutdown"]


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ("nvmlInit", []),
        ("nvmlDeviceGetCount", ["init", "shutdown"]),
        ("nvmlDeviceGetHandleByIndex", ["init", "shutdown"]),
    ],
)
def test_without_a_working_driver_there_are_no_handles(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, failing: str, expected: list[str]
) -> None:
    monkeypatch.setattr(pynvml, failing, fail)
    with nvml_handles() as handles:
        assert handles is None
    assert calls == expected


def test_an_error_of_the_library_ends_the_block_quietly(calls: list[str]) -> None:
    with nvml_handles():
        fail()
    assert calls == ["init", "shutdown"]


def test_other_errors_are_raised(calls: list[str]) -> None:
    with pytest.raises(KeyError), nvml_handles():
        raise KeyError
    assert calls == ["init", "shutdown"]
