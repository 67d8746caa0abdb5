"""Chooses the device, the precision and the batch size, each with its reason.

Also the memory that is given back to the operating system (on Linux; else nothing), and a test for
NaN and infinity in one pass.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from scanloom.cards.card import ModelCard
from scanloom.core import Reason, ScanError, lacks_memory
from scanloom.core.process import core_count, cpu_flags, worker_count
from scanloom.options import DEVICES

logger = logging.getLogger(__name__)

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# Set before oneDNN is used. Its AMX kernels (oneDNN 3.12, in torch 2.13) use tiles that another
# kernel has released: bfloat16 convolutions then kill the process (SIGILL)

# Set before CUDA is used. TensorRT has no option of its own against TF32 in float32
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the option's older name
    # Scans of many shapes would leave gaps between blocks of fixed size, which fit no later scan
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

MOST_WINDOWS = 16
"""Maximum batch size: with more, a large GPU is hardly faster (see `_BATCH_WINDOWS`)."""
MOST_PLANES = 64
"""Maximum batch size of windows of one plane."""
OLDEST_TORCH_FOR_CUDA = (2, 10)
ASKED_FOR = "requested"
"""The reason for a requested device, for which no other device is substituted."""
VALUES_PER_VOXEL = 256
"""Feature values that a large network holds at once per voxel of its window."""

CONTEXT_BYTES = 768 * 1024**2
"""Memory of a GPU that CUDA and its libraries take in each process; torch does not count it."""

_AUTOCAST = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices for which a caller may have turned autocast on."""
_MADV_DONTNEED = 4
"""Advice of Linux's madvise: pages are dropped, and read from their file if used again."""


@dataclass(frozen=True)
class DeviceChoice:
    """A device and the reason for its choice."""

    device: torch.device
    why: str


@dataclass(frozen=True)
class PrecisionChoice:
    """The type in which the network calculates, and the reason. Sums are always float32.

    `wrong` tells that half precision would have been used, but is computed wrong on this machine.
    """

    dtype: torch.dtype
    why: str
    wrong: bool = False

    @property
    def name(self) -> str:
        """Its `dtype_name`."""
        return dtype_name(self.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type as in model cards: "float32", "float16" or "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def set_thread_count(count: int | Literal["auto"]) -> None:
    """Set torch's number of CPU threads: results are identical only for the same number.

    "auto" is torch's own, the physical cores or OMP_NUM_THREADS, within a container's limit.
    """
    if count != "auto":
        torch.set_num_threads(count)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), core_count()))


def choose_device(requested: str = "auto") -> DeviceChoice:
    """Return the device of the network.

    Parameters
    ----------
    requested : str
        "auto", "cpu", "cuda", "cuda:N", "mps", "xpu" or "xpu:N". "auto" is the first CUDA device,
        which may be AMD's (ROCm), or the CPU: no model was run on the other kinds yet.

    Raises
    ------
    ScanError
        DEVICE_UNAVAILABLE if this machine has no such device.
    """
    if requested == "cpu":
        return DeviceChoice(torch.device("cpu"), ASKED_FOR)
    too_old = old_torch(torch.__version__)
    if requested == "auto":
        # Refused rather than slow or wrong: see `old_torch`
        if torch.cuda.is_available() and too_old:
            logger.warning("the CPU is used: %s", too_old)
            return DeviceChoice(torch.device("cpu"), too_old)
        if torch.cuda.is_available():
            return DeviceChoice(torch.device("cuda", 0), "the first CUDA device")
        no_device = "no CUDA device was found"
        why = no_device if torch.version.cuda else "torch was built without CUDA"
        return DeviceChoice(torch.device("cpu"), why)
    if re.fullmatch(DEVICES, requested) is None:
        detail = 'the device must be "auto", "cpu", "cuda", "cuda:N", "mps", "xpu" or "xpu:N"'
        raise ScanError(Reason.DEVICE_UNAVAILABLE, detail)
    kind, _, number = requested.partition(":")
    count = device_count(kind)
    if int(number or 0) >= count:
        devices = f"{kind.upper()} devices"
        detail = f"{requested} was requested, but the number of {devices} is {count}"
        raise ScanError(Reason.DEVICE_UNAVAILABLE, detail)
    if kind == "cuda" and too_old:
        raise ScanError(Reason.DEVICE_UNAVAILABLE, too_old)
    if kind != "cuda":
        logger.warning("no model was run on %s yet: compare the labels with those of a CPU", kind)
    return DeviceChoice(torch.device(kind, int(number or 0)), ASKED_FOR)


def device_count(kind: str) -> int:
    """Return the number of devices of a kind, "cuda", "mps" or "xpu", that torch can use."""
    if kind == "mps":  # a machine of Apple's has one
        return int(torch.backends.mps.is_available())
    module = torch.cuda if kind == "cuda" else torch.xpu
    return int(module.device_count()) if module.is_available() else 0


def float64_device(device: torch.device) -> torch.device:
    """Return a device, or the CPU in the place of one that has no float64.

    On it scans are resampled.
    """
    lacks = device.type == "mps" or (
        device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64
    )
    return torch.device("cpu") if lacks else device


def old_torch(version: str) -> str:
    """Return why a version of torch is not used with CUDA; empty if it is.

    Versions before 2.10 bring, or work round, a cuDNN that computes half precision wrong: see
    `wrong_cudnn`. The work-around of 2.9 takes 17 times the memory.
    """
    numbers = [int(digits) for digits in re.findall(r"\d+", version)[:2]]
    if numbers >= [*OLDEST_TORCH_FOR_CUDA]:
        return ""
    oldest = ".".join(map(str, OLDEST_TORCH_FOR_CUDA))
    return f"CUDA needs torch {oldest} or later, this is {version.partition('+')[0]}"


def cudnn_version() -> int | None:
    """Return the version of cuDNN: 91002 for 9.10.2; None without it."""
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch
    return version


def wrong_cudnn(version: int | None) -> str:
    """Return why half precision is not used with a version of cuDNN; empty if it may be.

    cuDNN 9.8 to 9.14 compute `conv3d` in float16 and bfloat16 wrong without an error (PyTorch
    #163539, #166480). A newer torch may be installed with an older cuDNN.

    Parameters
    ----------
    version : int or None
        As `cudnn_version` returns it.
    """
    if version is None or not 90800 <= version < 91500:
        return ""
    major, minor, patch = version // 10000, version // 100 % 100, version % 100
    return f"cuDNN {major}.{minor}.{patch} computes convolutions in half precision wrong"


def choose_precision(
    requested: str, device: torch.device, validated: Collection[str] = ()
) -> PrecisionChoice:
    """Return the type in which the network calculates.

    Parameters
    ----------
    requested : "auto", "float32" or "half"
        "auto" is half precision on CUDA; on a CPU, bfloat16 if it is faster there and validated,
        else float32. "half" is float16 on CUDA and bfloat16 on a CPU. Both are float32 with a cuDNN
        that is known to compute half precision wrong. Other devices run float32 only.
    validated : collection of str
        Precisions that the card lists, whose labels were compared with those of float32.

    Raises
    ------
    ScanError
        DEVICE_UNAVAILABLE for "half" on a CPU without bfloat16 units, or an invalid `requested`.
    """
    if requested == "float32":
        return PrecisionChoice(torch.float32, f"{ASKED_FOR}; TF32 is off")
    if requested not in ("auto", "half"):
        detail = 'the precision must be "auto", "float32" or "half"'
        raise ScanError(Reason.DEVICE_UNAVAILABLE, detail)
    if device.type == "cuda":
        wrong = "" if torch.version.hip else wrong_cudnn(cudnn_version())  # ROCm has MIOpen's
        if wrong:
            return PrecisionChoice(torch.float32, wrong, wrong=True)
        why = ASKED_FOR if requested == "half" else "half the memory and time of float32 on CUDA"
        return PrecisionChoice(torch.float16, why)
    if device.type != "cpu":
        if requested == "half":
            detail = f"half precision was never compared with float32 on {device.type}"
            raise ScanError(Reason.DEVICE_UNAVAILABLE, detail)
        return PrecisionChoice(torch.float32, "half precision was not compared on such a device")
    # Without these units bfloat16 is not faster than float32
    units = bfloat16_units()
    if requested == "half":
        if units is None:
            detail = "half precision requires CUDA or AVX512-BF16"
            raise ScanError(Reason.DEVICE_UNAVAILABLE, detail)
        return PrecisionChoice(torch.bfloat16, ASKED_FOR)
    if units is None:
        return PrecisionChoice(torch.float32, "the CPU has no AVX512-BF16")
    if "bfloat16" not in validated:
        return PrecisionChoice(torch.float32, "bfloat16 was not validated for this model")
    return PrecisionChoice(torch.bfloat16, f"the CPU has {units}, and the model's card allows it")


@functools.cache
def bfloat16_units(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the name of this CPU's bfloat16 units; None if bfloat16 is not faster here.

    Read from Linux: the names of torch's own functions for it differ between versions.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch
        return None
    return "AVX512-BF16" if "avx512_bf16" in cpu_flags(cpuinfo) else None


def choose_batch(window: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> int:
    """Return the number of windows in a batch.

    It depends on the device's total memory, never on its free memory: the batch size may change the
    last bits of a result, and the same device must give the same bytes.
    """
    if device.type != "cuda":
        return 1  # one window fills all cores of a CPU
    # A quarter of the memory: scores, sums and the scan need the rest
    window_bytes = math.prod(window) * VALUES_PER_VOXEL * dtype.itemsize
    most = MOST_PLANES if 1 in window else MOST_WINDOWS
    return max(1, min(most, device_memory(device) // 4 // window_bytes))


def share_memory(device: torch.device) -> None:
    """Limit this process to its share of a GPU, if other workers of the run use it too.

    Otherwise each would plan with all of the memory, and the last to allocate would fail.
    """
    workers = worker_count("gpu")
    if device.type != "cuda" or workers == 1:
        return
    total = int(torch.cuda.get_device_properties(device).total_memory)
    # On a GPU of 8 GB, CUDA's own memory of eight processes would leave nothing
    fraction = max(1 / workers - CONTEXT_BYTES / total, 0.5 / workers)
    torch.cuda.set_per_process_memory_fraction(fraction, device)


def device_memory(device: torch.device) -> int:
    """Return the bytes of a CUDA device that this process may allocate: see `share_memory`."""
    total = int(torch.cuda.get_device_properties(device).total_memory)
    return int(total * torch.cuda.get_per_process_memory_fraction(device))


_settings_lock = threading.Lock()
_settings_users = 0
_callers_settings = ExitStack()


@contextmanager
def own_settings() -> Iterator[None]:
    """Run torch with our settings within the block, whatever a caller's are.

    Deterministic, float32 not rounded to TF32, new tensors in float32 on the CPU, no autocast.
    """
    global _settings_users  # the settings are the process's: the last of several threads restores
    with _settings_lock:
        if not _settings_users:
            _set_for_process(_callers_settings)
        _settings_users += 1
    try:
        with ExitStack() as thread:
            if torch.get_default_device().type != "cpu":
                thread.enter_context(torch.device("cpu"))
            for kind in filter(torch.is_autocast_enabled, _AUTOCAST):
                thread.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        with _settings_lock:
            _settings_users -= 1
            if not _settings_users:
                _callers_settings.close()


def _set_for_process(stack: ExitStack) -> None:
    """Change the settings that hold for all threads, until the stack is closed."""
    backends: Any = torch.backends  # whose types lack what torch adds to them
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    # Also after `disable_global_flags()`, as by torch.testing; left last: flags are put back
    stack.enter_context(backends.__allow_nonbracketed_mutation())
    # Benchmarking would choose kernels by a stopwatch: other bits at each start
    for name, value in (("enabled", True), ("benchmark", False), ("deterministic", True)):
        _set(stack, cudnn, name, value)
    try:
        precision, allowed = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # the caller set `fp32_precision`, beside which torch forbids these
        for backend in (cudnn.conv, cudnn.rnn, backends.cuda.matmul, mkldnn.matmul):
            _set(stack, backend, "fp32_precision", "ieee")
    else:
        if precision != "highest":  # "highest" anew would state `fp32_precision`, for good
            stack.callback(torch.set_float32_matmul_precision, precision)
            torch.set_float32_matmul_precision("highest")
        stack.callback(setattr, cudnn, "allow_tf32", allowed)
        cudnn.allow_tf32 = False
    if getattr(getattr(mkldnn, "conv", None), "fp32_precision", "none") != "none":
        _set(stack, mkldnn.conv, "fp32_precision", "ieee")
    if torch.get_default_dtype() is not torch.float32:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)


def _set(stack: ExitStack, owner: object, name: str, value: object) -> None:
    """Change an attribute until the stack is closed."""
    before = getattr(owner, name)
    if before != value:
        stack.callback(setattr, owner, name, before)
        setattr(owner, name, value)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on any device.

    For a CPU, torch and oneDNN raise a plain RuntimeError, recognised by its message only.
    """
    if isinstance(error, ScanError):
        return error.reason is Reason.OUT_OF_MEMORY
    return isinstance(error, torch.OutOfMemoryError) or lacks_memory(error)


class PlacedModel:
    """A model on a device, with its names.

    Attributes
    ----------
    device : DeviceChoice
        The device, and the reason for its choice.
    precision : PrecisionChoice
        The numeric type of its first network, and the reason.
    """

    card: ModelCard
    device: DeviceChoice
    precision: PrecisionChoice

    def __repr__(self) -> str:
        model = f"{self.name} {self.card.version}"
        return f"{type(self).__name__}({model}, {self.device_name}, {self.precision_name})"

    @property
    def name(self) -> str:
        """The model's name."""
        return self.card.name

    @property
    def device_name(self) -> str:
        """The device's name: "cpu", "cuda:0"."""
        return str(self.device.device)

    @property
    def precision_name(self) -> str:
        """The numeric type of the network: "float32", "float16"."""
        return self.precision.name


def return_free_memory() -> None:
    """Return freed memory that the C library (glibc) keeps for later allocations."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def drop_file_pages(file: Path) -> None:
    """Drop the pages of a file that this process has mapped for reading only."""
    with suppress(AttributeError, OSError, ValueError):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        identity = file.stat()
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            addresses, access, _, device, inode, *_ = line.split()
            major, minor = (int(number, 16) for number in device.split(":"))
            same = (os.makedev(major, minor), int(inode)) == (identity.st_dev, identity.st_ino)
            if same and "w" not in access:
                first, last = (int(address, 16) for address in addresses.split("-"))
                madvise(first, last - first, _MADV_DONTNEED)


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array of the host on a device. On a CPU both share their memory.

    On CUDA the array passes through page-locked memory, which torch keeps for later copies: from
    other memory a copy is several times slower, and the host waits for it.
    """
    if device.type != "cuda":
        return torch.from_numpy(array).to(device)
    native = torch.from_numpy(np.empty(0, array.dtype.newbyteorder("=")))
    staged = native.new_empty(array.shape, pin_memory=True)
    staged.numpy()[...] = array
    return staged.to(device, non_blocking=True)


def all_finite(values: torch.Tensor) -> bool:
    """Return whether no value is NaN or infinite.

    A sum with such a value is not finite. A sum of finite values may overflow: then the maximum and
    the minimum are tested, which takes twice as long. Waits for the device.
    """
    if math.isfinite(float(values.sum())):
        return True
    return math.isfinite(float(values.amax())) and math.isfinite(float(values.amin()))
