"""GPUs of this machine, their distribution among its workers, and the energy that devices used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scanloom.core.process import core_count

if TYPE_CHECKING:
    from scanloom.engine.workflow.schema import Execution


@contextmanager
def nvml_handles() -> Iterator[list[Any] | None]:
    """Initialise NVML for a block; an NVMLError raised in the block ends it quietly.

    Yields
    ------
    list or None
        A handle per NVIDIA device, in NVML's order; None without a working driver.
    """
    import pynvml

    with ExitStack() as stack:
        handles = None
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            stack.callback(pynvml.nvmlShutdown)
            count = pynvml.nvmlDeviceGetCount()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
        with suppress(pynvml.NVMLError):
            yield handles


UNNUMBERED_DEVICES = ("auto", "cuda")
"""Device options for which each worker gets a GPU of its own; a numbered one is kept as it is."""


def local_devices(execution: Execution) -> list[str]:
    """Return the GPU of each worker; "" for a worker that sees all GPUs of the machine, or none."""
    gpus = visible_gpus() if execution.device in UNNUMBERED_DEVICES else []
    if not gpus:
        return [""] * (1 if execution.workers == "auto" else execution.workers)
    count = len(gpus) if execution.workers == "auto" else execution.workers
    return [gpus[n % len(gpus)] for n in range(count)]


def check_device(name: str) -> None:
    """Refuse a missing CUDA device; torch is imported only if the driver reports too few.

    Raises
    ------
    ScanError
        DEVICE_UNAVAILABLE if there is no such device.
    """
    kind, _, number = name.partition(":")
    if kind == "cuda" and int(number or 0) >= len(visible_gpus()):
        from scanloom.inference.device import choose_device

        choose_device(name)


def worker_environment(device: str, workers: int) -> dict[str, str]:
    """Return the environment variables of one of `workers` on this machine: GPU and core share.

    Variables set by the user are kept, except for CUDA_VISIBLE_DEVICES.
    """
    share = str(max(1, core_count() // workers))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), share)
    kept = {name: os.environ.get(name, value) for name, value in threads.items()}
    return {**kept, "CUDA_VISIBLE_DEVICES": device} if device else kept


def visible_gpus() -> list[str]:
    """Return the GPUs and MIG slices of this process, as UUIDs or as the user lists them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return _listed_devices(named)
    uuids: list[str] = []
    with nvml_handles() as handles:
        uuids += [uuid for handle in handles or () for uuid in _uuids(handle)]
    return uuids


def _listed_devices(named: str) -> list[str]:
    """Return the devices that CUDA takes from a list: all before the first negative number."""
    devices = [device.strip() for device in named.split(",") if device.strip()]
    ends = [
        n for n, device in enumerate(devices) if device.startswith("-") or device == "NoDevFiles"
    ]
    return devices[: ends[0]] if ends else devices


def _uuids(handle: Any) -> list[str]:
    """Return the UUID of a GPU, or the UUIDs of its MIG slices."""
    import pynvml

    slices: list[str] = []
    mig_enabled = 0
    with suppress(pynvml.NVMLError):  # a GPU without MIG
        mig_enabled, _ = pynvml.nvmlDeviceGetMigMode(handle)
    if not mig_enabled:
        return [str(pynvml.nvmlDeviceGetUUID(handle))]
    with suppress(pynvml.NVMLError):  # an older driver
        for n in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with suppress(pynvml.NVMLError):  # an empty position
                device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, n)
                slices.append(str(pynvml.nvmlDeviceGetUUID(device)))
    return slices  # a GPU in MIG mode without a slice cannot be used


RAPL_FOLDER = Path("/sys/class/powercap")
"""Running Average Power Limit counters of Intel and AMD processors (Linux powercap)."""


class EnergyMeter:
    """Measures the energy of processor packages (RAPL) and NVIDIA devices (NVML) since creation.

    The counters cover the whole machine, including other work on it.
    """

    def __init__(self) -> None:
        self._packages = _rapl_packages()
        self._start = {zone: _counter_value(zone / "energy_uj") for zone in self._packages}
        self._gpus = _gpu_millijoules()

    def joules(self) -> dict[str, float] | None:
        """Return joules by kind of device since the start; None if nothing can be measured."""
        spent: dict[str, float] = {}
        for zone, start in self._start.items():
            now = _counter_value(zone / "energy_uj")
            if start is not None and now is not None:
                range_uj = _counter_value(zone / "max_energy_range_uj") or 0  # wraps there
                used = now - start if now >= start else now - start + range_uj
                spent["cpu"] = spent.get("cpu", 0.0) + used / 1e6
        for before, after in zip(self._gpus, _gpu_millijoules(), strict=False):
            spent["gpu"] = spent.get("gpu", 0.0) + (after - before) / 1e3
        return {kind: round(joules, 3) for kind, joules in spent.items()} or None


def _rapl_packages() -> tuple[Path, ...]:
    try:
        return tuple(sorted(RAPL_FOLDER.glob("intel-rapl:[0-9]*")))
    except OSError:
        return ()


def _counter_value(path: Path) -> int | None:
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
