"""GPUs of this machine, and their distribution among its workers."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from scanloom.core.process import core_count
from scanloom.engine.machine.nvml import nvml_handles
from scanloom.engine.workflow.schema import Execution

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
