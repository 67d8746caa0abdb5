"""Which GPUs there are, and what each of a machine's workers sees of them."""

from __future__ import annotations

import os
from contextlib import suppress

from scanloom.engine.workflow import Execution

ORDINARY = ("auto", "cuda")
"""Devices of which a worker gets one to itself; a numbered one is taken as it is."""


def local_devices(execution: Execution) -> list[str]:
    """Return one entry a worker: the GPU that it sees, or "" for what the machine shows it."""
    gpus = visible_gpus() if execution.device in ORDINARY else []
    if not gpus:
        return [""] * (1 if execution.workers == "auto" else execution.workers)
    count = len(gpus) if execution.workers == "auto" else execution.workers
    return [gpus[n % len(gpus)] for n in range(count)]


def check_device(name: str) -> None:
    """Refuse a CUDA device that is not here; torch is asked only where the driver shows too few.

    Raises
    ------
    ScanError
        DEVICE_UNAVAILABLE.
    """
    kind, _, number = name.partition(":")
    if kind == "cuda" and int(number or 0) >= len(visible_gpus()):
        from scanloom.inference.device import choose_device

        choose_device(name)


def worker_environment(device: str, workers: int) -> dict[str, str]:
    """Return the variables of one of `workers` on this machine: its GPU, its share of the cores.

    A variable that the user has set is left as it is, but for CUDA_VISIBLE_DEVICES.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = str(max(1, (cores or 1) // workers))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), share)
    set_here = {name: os.environ.get(name, value) for name, value in threads.items()}
    return {**set_here, "CUDA_VISIBLE_DEVICES": device} if device else set_here


def visible_gpus() -> list[str]:
    """Return the GPUs and MIG slices that this process may use: UUIDs, or as the user said it."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return _said(named)
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [uuid for n in range(pynvml.nvmlDeviceGetCount()) for uuid in _uuids(n)]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _said(named: str) -> list[str]:
    """Return what CUDA takes of a list: all up to the first number below zero."""
    parts = [part.strip() for part in named.split(",") if part.strip()]
    ends = [n for n, part in enumerate(parts) if part.startswith("-") or part == "NoDevFiles"]
    return parts[: ends[0]] if ends else parts


def _uuids(number: int) -> list[str]:
    """Return the UUID of a GPU, or those of the slices that it is cut into."""
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    slices: list[str] = []
    cut = 0
    with suppress(pynvml.NVMLError):  # a GPU that can't be cut
        cut, _ = pynvml.nvmlDeviceGetMigMode(handle)
    if not cut:
        return [str(pynvml.nvmlDeviceGetUUID(handle))]
    with suppress(pynvml.NVMLError):  # the slices found so far are those there are
        for n in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with suppress(pynvml.NVMLError):  # a place for a slice that is empty
                part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, n)
                slices.append(str(pynvml.nvmlDeviceGetUUID(part)))
    return slices  # a GPU in MIG mode without a slice can't be used at all
