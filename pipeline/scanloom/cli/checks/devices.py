"""Check processors, memory, GPUs, and torch's build against the driver."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scanloom.cli.checks.finding import Finding
from scanloom.core import counted, format_bytes
from scanloom.core.process import core_count
from scanloom.engine.machine.devices import nvml_handles

TOPIC = "devices"
GIB = 1 << 30
LITTLE_MEMORY = 6 * GIB
"""Enough for a CT of 512x512x600 and a network of 25 classes."""


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver; `cuda` is the newest CUDA (major, minor) that it can run."""

    version: str
    cuda: tuple[int, int]
    gpus: tuple[str, ...]


def check_devices() -> Iterator[Finding]:
    """Check processor, memory, torch, driver and GPUs."""
    yield _processor()
    yield _memory()
    driver = find_driver()
    try:
        from scanloom.inference.torch_devices import take_inventory  # torch comes in here

        inventory = take_inventory()
    except Exception as exc:  # noqa: BLE001 - any failure to load torch is a finding
        advice = "pip install --force-reinstall torch"
        yield Finding(TOPIC, "torch", "bad", f"does not load ({type(exc).__name__})", advice)
        return
    yield _engines()
    yield judge_torch(inventory.version, inventory.cuda, driver, len(inventory.devices))
    seen = f"{inventory.threads} threads, {inventory.cpu_capability}"
    yield Finding(TOPIC, "torch on the CPU", "ok", seen)
    for number, device in enumerate(inventory.devices):
        seen = f"{device.name}, {format_bytes(device.memory)}, capability {device.capability}"
        name = f"cuda:{number}"
        if device.fault:
            advice = (
                "install a torch built for this GPU (pytorch.org), or use `segment --device cpu`"
            )
            yield Finding(TOPIC, name, "bad", f"{seen}: {device.fault}", advice)
        elif device.half_fault:
            advice = "float32 is used, which takes longer: install a newer torch with its own cuDNN"
            yield Finding(TOPIC, name, "warn", f"{seen}: {device.half_fault}", advice)
        else:
            yield Finding(TOPIC, name, "ok", f"{seen}: computes correctly")


def _engines() -> Finding:
    """Return a finding on the engines that are installed, and those that "auto" uses here."""
    from scanloom.core import counted
    from scanloom.inference.engines.registry import ENGINES
    from scanloom.inference.engines.verdicts import all_verdicts

    versions = {name: engine.version() for name, engine in ENGINES.items()}
    present = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    verdicts = all_verdicts()
    used = sum(verdict.used for verdict in verdicts)
    measured = f"measured {counted(len(verdicts), 'time')} here, faster and alike in {used}"
    return Finding(TOPIC, "engines", "ok", f"{present}; {measured}")


def judge_torch(version: str, cuda: str | None, driver: Driver | None, usable: int) -> Finding:
    """Return a finding on torch's build and the driver.

    Parameters
    ----------
    version, cuda : str, str or None
        Version of torch and of the CUDA that it was built for; None for a build without CUDA.
    driver : Driver or None
        The NVIDIA driver, if there is one.
    usable : int
        Number of CUDA devices that torch sees.
    """
    built = f"{version}, built for CUDA {cuda}" if cuda else f"{version}, built without CUDA"
    if driver is None:
        seen = f"{built}; no NVIDIA driver, the CPU is used"
        if cuda is None:
            return Finding(TOPIC, "torch", "ok", seen)
        advice = "no action without an NVIDIA GPU; otherwise install its driver"
        return Finding(TOPIC, "torch", "warn", seen, advice)
    known = f"driver {driver.version} for CUDA up to {driver.cuda[0]}.{driver.cuda[1]}"
    seen = f"{built}; {known}, {counted(len(driver.gpus), 'GPU')}"
    if cuda is None and driver.gpus:
        advice = "the GPU stays idle: install a torch built with CUDA (pytorch.org)"
        return Finding(TOPIC, "torch", "warn", seen, advice)
    if cuda is not None and driver.gpus and usable == 0:
        old = int(cuda.split(".")[0]) > driver.cuda[0]
        problem = "the driver is too old for this torch" if old else "torch sees no GPU"
        advice = "update the driver, or install a torch for an older CUDA (pytorch.org)"
        if not old:
            advice = "check CUDA_VISIBLE_DEVICES and the container's access to the GPU"
        return Finding(TOPIC, "torch", "bad", f"{seen}; {problem}", advice)
    return Finding(TOPIC, "torch", "ok", seen)


def find_driver() -> Driver | None:
    """Return the NVIDIA driver, as NVML reports it; None without a driver."""
    import pynvml

    driver = None
    with nvml_handles() as handles:
        if handles is not None:
            number = pynvml.nvmlSystemGetCudaDriverVersion_v2()  # 12080 is 12.8
            driver = Driver(
                version=_text(pynvml.nvmlSystemGetDriverVersion()),
                cuda=(number // 1000, number % 1000 // 10),
                gpus=tuple(_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles),
            )
    return driver


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _processor() -> Finding:
    sets = cpu_flags()
    wide = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in sets]
    seen = f"{platform.machine()}, {core_count()} cores, {' '.join(wide) or 'no wide instructions'}"
    return Finding(TOPIC, "processor", "ok", seen)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the processor's instruction sets by Linux's names; empty if unknown."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), ":")
    return frozenset(flags.partition(":")[2].split())


def _memory() -> Finding:
    available = available_memory()
    if available is None:
        return Finding(TOPIC, "memory", "warn", "not known", "a large CT needs about 6 GiB")
    seen = f"{format_bytes(available)} available"
    if available < LITTLE_MEMORY:
        return Finding(TOPIC, "memory", "warn", seen, "a large CT needs about 6 GiB")
    return Finding(TOPIC, "memory", "ok", seen)


def available_memory(root: Path = Path("/")) -> int | None:
    """Return available memory in bytes: the machine's, or less if a cgroup limits it."""
    amounts = [_meminfo(root / "proc/meminfo"), _cgroup(root / "sys/fs/cgroup")]
    known = [amount for amount in amounts if amount is not None]
    return min(known) if known else None


def _meminfo(file: Path) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in file.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _cgroup(folder: Path) -> int | None:
    """Return the memory left under a container's limit (cgroup v2), None without a limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = (folder / "memory.current").read_text().strip()
        return max(int(limit) - int(used), 0)
    except (OSError, ValueError):  # ValueError: "max" means no limit
        return None
