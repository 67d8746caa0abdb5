"""Which device, which precision, how many windows at once: each choice comes with its why."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from scanloom.core import Reason, ScanError, lacks_memory

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# Before oneDNN is asked for anything. Its kernels for AMX (3.12, of torch 2.13) use tiles that were
# not configured, after others released them: bfloat16 convolutions end the process (SIGILL)

MOST_WINDOWS = 8
"""Beyond that many windows of 96^3 at once a large GPU gains nothing."""
ASKED_FOR = "asked for"
"""Why a device was taken that is not to be exchanged for another."""
VALUES_PER_VOXEL = 256
"""Feature values that a large network holds at once for a voxel of its window."""


@dataclass(frozen=True)
class DeviceChoice:
    """A device and why it was taken."""

    device: torch.device
    why: str


@dataclass(frozen=True)
class PrecisionChoice:
    """The type in which the network calculates, and why. Sums are float32 always."""

    dtype: torch.dtype
    why: str

    @property
    def name(self) -> str:
        """As cards say it: "float32", "float16" or "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")


def set_thread_count(count: int) -> None:
    """Let torch use so many threads of this process: the same number gives the same bytes."""
    torch.set_num_threads(count)


def choose_device(wanted: str = "auto") -> DeviceChoice:
    """Return the device to work on.

    Parameters
    ----------
    wanted : str
        "auto", "cpu", "cuda" or "cuda:N".

    Raises
    ------
    ScanError
        DEVICE_UNAVAILABLE if there is no such device here.
    """
    if wanted == "cpu":
        return DeviceChoice(torch.device("cpu"), ASKED_FOR)
    if wanted == "auto":
        if torch.cuda.is_available():
            return DeviceChoice(torch.device("cuda", 0), "the first CUDA device")
        built = "no CUDA device was found" if torch.version.cuda else "this torch has no CUDA"
        return DeviceChoice(torch.device("cpu"), built)
    kind, _, number = wanted.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()):
        raise ScanError(Reason.DEVICE_UNAVAILABLE, 'a device is "auto", "cpu", "cuda" or "cuda:N"')
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(number or 0) >= count:
        raise ScanError(
            Reason.DEVICE_UNAVAILABLE, f"{wanted} was asked for, {count} CUDA devices are here"
        )
    return DeviceChoice(torch.device("cuda", int(number or 0)), ASKED_FOR)


def choose_precision(
    wanted: str, device: torch.device, validated: Collection[str] = ()
) -> PrecisionChoice:
    """Return the type in which the network calculates.

    Parameters
    ----------
    wanted : "auto", "float32" or "half"
        "auto" takes half on CUDA; on a CPU bfloat16 where it gains something and was validated,
        else float32. "half" takes what is half as wide in any case.
    device : torch.device
        Where.
    validated : collection of str
        Precisions that the card lists: labels were compared with float32's.

    Raises
    ------
    ScanError
        DEVICE_UNAVAILABLE for half on a CPU that gains nothing by it, or another word.
    """
    if wanted == "float32":
        return PrecisionChoice(torch.float32, "asked for; TF32 is off")
    if wanted not in ("auto", "half"):
        raise ScanError(Reason.DEVICE_UNAVAILABLE, 'a precision is "auto", "float32" or "half"')
    if device.type == "cuda":
        why = "asked for" if wanted == "half" else "half the memory and the time on CUDA"
        return PrecisionChoice(torch.float16, why)
    units = bfloat16_units()
    if wanted == "half":
        if units is None:
            raise ScanError(Reason.DEVICE_UNAVAILABLE, "half precision needs CUDA or AVX512-BF16")
        return PrecisionChoice(torch.bfloat16, "asked for")
    if units is None:
        return PrecisionChoice(torch.float32, "the CPU has no AVX512-BF16")
    if "bfloat16" not in validated:
        return PrecisionChoice(torch.float32, "bfloat16 was not validated for this model")
    return PrecisionChoice(torch.bfloat16, f"the CPU has {units}, and the model's card allows it")


@functools.cache
def bfloat16_units(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return what multiplies bfloat16 on this CPU, or None where that gains nothing.

    Read from Linux: torch's own questions have other names from version to version.
    """
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    flags = set(next(found, []))
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return "AVX512-BF16" if "avx512_bf16" in flags else None


def choose_batch(window: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> int:
    """Return how many windows go through the network at once.

    It depends on the device's size, never on what happens to be free: the size of a batch may
    change the last bits of a result, and the same device must give the same bytes.
    """
    if device.type != "cuda":
        return 1  # one window fills all cores of a CPU
    total = int(torch.cuda.get_device_properties(device).total_memory)
    x, y, z = window
    one = x * y * z * VALUES_PER_VOXEL * dtype.itemsize
    return max(1, min(MOST_WINDOWS, total // 4 // one))


@contextmanager
def deterministic() -> Iterator[None]:
    """Calculate so that equal runs give equal bytes, and float32 means float32 (no TF32)."""
    before = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn
    with cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch means that there was no memory, on whatever device.

    A CPU allocation that fails is a plain RuntimeError, oneDNN's too; only its words tell.
    """
    if isinstance(error, ScanError):
        return error.reason is Reason.OUT_OF_MEMORY
    return isinstance(error, torch.OutOfMemoryError) or lacks_memory(error)
