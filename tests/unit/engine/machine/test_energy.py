"""Joules are those of the worker's own devices, and of a case only if no other case ran."""

from __future__ import annotations

from pathlib import Path
from weakref import WeakSet

import pynvml
import pytest

from scanloom.core.process import SHARED_DEVICES
from scanloom.engine.machine import devices
from scanloom.engine.machine.devices import (
    CaseEnergyMeter,
    EnergyMeter,
    describe_energy,
    worker_environment,
)

GPUS = ("GPU-aa11", "GPU-bb22")


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return the counters (mJ) of two GPUs, beside those of a processor (uJ).

    As Linux lists them: the package, its cores and memory, and the whole machine.
    """
    counted = dict.fromkeys(GPUS, 1000)
    zones = {"0": "package-0", "0:0": "core", "0:1": "dram", "1": "psys"}
    for number, name in zones.items():
        zone = tmp_path / f"intel-rapl:{number}"
        zone.mkdir()
        (zone / "name").write_text(f"{name}\n")
        (zone / "energy_uj").write_text("0")
    monkeypatch.setattr(devices, "RAPL_FOLDER", tmp_path)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(GPUS))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", GPUS.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", counted.__getitem__)
    for name in ("CUDA_VISIBLE_DEVICES", SHARED_DEVICES):
        monkeypatch.delenv(name, raising=False)
    # cases that other tests of this process still hold
    monkeypatch.setattr(devices.CaseEnergyMeter, "_open", WeakSet())
    return counted


def spend(tmp_path: Path, counters: dict[str, int]) -> None:
    """Count 2 J of the processor, 3 J of the first GPU, 50 J of the second."""
    for zone in tmp_path.glob("intel-rapl:*"):
        (zone / "energy_uj").write_text("2000000")
    counters[GPUS[0]] += 3000
    counters[GPUS[1]] += 50000


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 53.0),
        ("GPU-aa11", 3.0),
        ("GPU-bb", 50.0),  # the beginning of a UUID
        ("GPU-aa11,GPU-bb22", 53.0),
        ("0", None),  # CUDA's numbers are not NVML's
        ("MIG-1", None),  # its GPU is shared
        ("", None),
    ],
)
def test_gpus_of_other_workers_are_left_out(
    visible: str | None,
    expected: float | None,
    counters: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    meter = EnergyMeter()
    spend(tmp_path, counters)

    joules = meter.joules() or {}
    assert joules["cpu"] == 2.0
    assert joules.get("gpu") == expected


def test_a_case_that_was_alone_has_joules_and_two_at_a_time_have_none(
    counters: dict[str, int], tmp_path: Path
) -> None:
    first = CaseEnergyMeter()
    spend(tmp_path, counters)
    assert first.joules() == {"cpu": 2.0, "gpu": 53.0}

    second, third = CaseEnergyMeter(), CaseEnergyMeter()
    assert second.joules() is None
    assert third.joules() is None
    assert CaseEnergyMeter().joules() == {"cpu": 0.0}  # a GPU's counter moves now and then only


def test_a_case_that_failed_does_not_count_as_running(counters: dict[str, int]) -> None:
    CaseEnergyMeter()  # nobody asks for its joules

    assert CaseEnergyMeter().joules() is not None


@pytest.mark.parametrize(
    ("device", "workers", "expected"),
    [
        ("GPU-aa11", ["GPU-aa11"], {"cpu", "gpu"}),
        ("GPU-aa11", ["GPU-aa11", "GPU-bb22"], {"gpu"}),
        ("GPU-aa11", ["GPU-aa11", "GPU-aa11"], set()),
    ],
)
def test_devices_that_workers_share_are_left_out_of_a_case(
    device: str,
    workers: list[str],
    expected: set[str],
    counters: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in worker_environment(device, workers).items():
        monkeypatch.setenv(name, value)
    meter = CaseEnergyMeter()
    spend(tmp_path, counters)

    assert set(meter.joules() or {}) == expected


def test_the_counters_are_described(
    counters: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert describe_energy() == "measured for 1 processor package and 2 GPUs"
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 0)
    assert describe_energy().startswith("not measured: RAPL's counters are not readable")
