"""GPUs of this machine, their distribution among its workers, and the energy that devices used."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

from scanloom.core import counted
from scanloom.core.process import SHARED_DEVICES, core_count, worker_count

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


NEVER_RUN = ("ROCm", "MPS", "XPU")
"""Kinds of devices, but for the CPU, on which no release of scanloom was run. Their code was tested
without a device."""

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
    """Refuse a missing device; torch is imported only if the driver reports too few.

    Raises
    ------
    ScanError
        DEVICE_UNAVAILABLE if there is no such device.
    """
    kind, _, number = name.partition(":")
    if kind in ("mps", "xpu") or (kind == "cuda" and int(number or 0) >= len(visible_gpus())):
        from scanloom.inference.device import choose_device

        choose_device(name)


AMD = "hip:"
"""Prefix of the number of an AMD GPU, by which HIP selects it."""


def worker_environment(device: str, devices: Sequence[str]) -> dict[str, str]:
    """Return the environment variables of a worker: its GPU, and its share of the cores.

    Variables set by the user are kept, except for CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES.
    `device` is one of `devices`, those of all workers of this machine (`local_devices`).
    """
    share = str(max(1, core_count() // len(devices)))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), share)
    environment = {name: os.environ.get(name, value) for name, value in threads.items()}
    if len(devices) > 1:
        environment[SHARED_DEVICES] = f"cpu:{len(devices)} gpu:{devices.count(device)}"
    if device.startswith(AMD):
        environment["HIP_VISIBLE_DEVICES"] = device.removeprefix(AMD)
    elif device:
        environment["CUDA_VISIBLE_DEVICES"] = device
    return environment


def visible_gpus() -> list[str]:
    """Return the GPUs and MIG slices of this process, as UUIDs or as the user lists them.

    AMD's GPUs, which NVML does not know, are numbered as by HIP.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return _listed_devices(named)
    uuids: list[str] = []
    with nvml_handles() as handles:
        uuids += [uuid for handle in handles or () for uuid in _uuids(handle)]
    return uuids or [f"{AMD}{number}" for number in _amd_numbers()]


KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
"""Processors and GPUs that AMD's driver for computing has, a folder each (Linux)."""


def amd_gpu_count() -> int:
    """Return the number of AMD GPUs that this process may use."""
    count = 0
    for file in KFD_NODES.glob("*/gpu_id"):
        with suppress(OSError, ValueError):  # a GPU that the container may not use
            count += int(file.read_text()) != 0  # a processor has the id 0
    return count


def _amd_numbers() -> list[str]:
    """Return the numbers of AMD's GPUs, or those that the user lists for HIP."""
    count, listed = amd_gpu_count(), os.environ.get("HIP_VISIBLE_DEVICES")
    if count and (below := os.environ.get("ROCR_VISIBLE_DEVICES")):
        count = min(count, len(_listed_devices(below)))  # HIP numbers the rest from 0
    numbers = [str(number) for number in range(count)]
    return numbers if listed is None or not count else _listed_devices(listed)


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

    The counters cover the processors of the whole machine, and the GPUs that this process sees,
    including other work on them.
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
        for uuid, after in _gpu_millijoules().items():
            # the counter moves a few times a second: what was shorter is not known, not 0
            if uuid in self._gpus and after > self._gpus[uuid]:
                spent["gpu"] = spent.get("gpu", 0.0) + (after - self._gpus[uuid]) / 1e3
        return {kind: round(joules, 3) for kind, joules in spent.items()} or None


class CaseEnergyMeter(EnergyMeter):
    """Measures the energy of a case, unless another case ran at the time.

    Counters do not tell whose work they counted. So kinds of devices that other workers use too
    are left out, and all if this process had another case before `joules` was called.
    """

    _open: ClassVar[WeakSet[CaseEnergyMeter]] = WeakSet()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        with self._lock:
            self._alone = not self._open
            for meter in self._open:
                meter._alone = False
            self._open.add(self)

    def joules(self) -> dict[str, float] | None:
        """Return the joules of the case by kind of device, once; None if they are not known."""
        with self._lock:
            self._open.discard(self)
        spent = (super().joules() or {}) if self._alone else {}
        return {kind: joules for kind, joules in spent.items() if worker_count(kind) == 1} or None


def describe_energy() -> str:
    """Return which counters of energy this process can read."""
    packages = [_counter_value(zone / "energy_uj") for zone in _rapl_packages()]
    readable = sum(value is not None for value in packages)
    gpus = len(_gpu_millijoules())
    if not readable and not gpus:
        hidden = "RAPL's counters are not readable" if packages else "no RAPL counters"
        return f"not measured: {hidden}, and no NVIDIA device counts (NVML)"
    return f"measured for {counted(readable, 'processor package')} and {counted(gpus, 'GPU')}"


def _rapl_packages() -> tuple[Path, ...]:
    """Return the counters of processor packages.

    Beside them are those of their parts, and on laptops one of the whole machine (psys).
    """
    try:
        zones = sorted(RAPL_FOLDER.glob("intel-rapl:*"))
        return tuple(z for z in zones if (z / "name").read_text().startswith("package"))
    except OSError:
        return ()


def _counter_value(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _gpu_millijoules() -> dict[str, int]:
    """Return the energy counters of the NVIDIA devices that this process sees, by UUID.

    None of a MIG slice, since only the whole GPU counts; none of GPUs that are known by CUDA's
    numbers, which NVML does not know, unless there is only one.
    """
    import pynvml

    counters, devices = {}, 0
    with nvml_handles() as handles:
        for handle in handles or ():
            devices += 1
            with suppress(pynvml.NVMLError):  # older devices do not count
                uuid = str(pynvml.nvmlDeviceGetUUID(handle))
                counters[uuid] = int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = _listed_devices(named or "")
    if named is None or (seen == ["0"] and devices == 1):
        return counters
    # CUDA takes the beginning of a UUID too
    return {
        uuid: count
        for uuid, count in counters.items()
        if any(device.startswith("GPU-") and uuid.startswith(device) for device in seen)
    }
