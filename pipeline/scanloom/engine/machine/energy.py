"""Energy that processors and GPUs used, in joules, if they report it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from scanloom.engine.machine.nvml import nvml_handles

RAPL_FOLDER = Path("/sys/class/powercap")
"""Running Average Power Limit counters of Intel and AMD processors (Linux powercap)."""


class EnergyMeter:
    """Measures the energy of processor packages (RAPL) and NVIDIA devices (NVML) since creation.

    The counters cover the whole machine, including other work on it.
    """

    def __init__(self) -> None:
        self._packages = _packages()
        self._start = {zone: _read(zone / "energy_uj") for zone in self._packages}
        self._gpus = _gpu_millijoules()

    def joules(self) -> dict[str, float] | None:
        """Return joules by kind of device since the start; None if nothing can be measured."""
        spent: dict[str, float] = {}
        for zone, start in self._start.items():
            now = _read(zone / "energy_uj")
            if start is not None and now is not None:
                range_uj = (
                    _read(zone / "max_energy_range_uj") or 0
                )  # the counter wraps at this value
                used = now - start if now >= start else now - start + range_uj
                spent["cpu"] = spent.get("cpu", 0.0) + used / 1e6
        for before, after in zip(self._gpus, _gpu_millijoules(), strict=False):
            spent["gpu"] = spent.get("gpu", 0.0) + (after - before) / 1e3
        return {kind: round(joules, 3) for kind, joules in spent.items()} or None


def _packages() -> tuple[Path, ...]:
    try:
        return tuple(sorted(RAPL_FOLDER.glob("intel-rapl:[0-9]*")))
    except OSError:
        return ()


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _gpu_millijoules() -> list[int]:
    """Return the energy counters of all NVIDIA devices; none without a driver."""
    import pynvml

    counters = []
    with nvml_handles() as handles:
        for handle in handles or ():
            with contextlib.suppress(pynvml.NVMLError):  # older devices do not count
                counters.append(int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)))
    return counters
