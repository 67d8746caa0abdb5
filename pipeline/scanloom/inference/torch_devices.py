"""The version of torch, and the devices that it can use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TOLERANCE = 1e-3
"""Relative difference between devices of a small float32 convolution with TF32 off."""


@dataclass(frozen=True)
class CudaDevice:
    """One CUDA device as torch sees it; `fault` says why it can't calculate, "" where it can."""

    name: str
    capability: str
    memory: int
    fault: str


@dataclass(frozen=True)
class TorchInventory:
    """The build of torch and its devices.

    Parameters
    ----------
    version : str
        Of torch.
    cuda : str or None
        CUDA version it was built with; None for a CPU build (or one for other devices).
    threads : int
        Threads it uses on the CPU.
    cpu_capability : str
        The instruction set it chose: "AVX512", "AVX2" ...
    devices : tuple of CudaDevice
        None where the driver is missing or too old for the build.
    """

    version: str
    cuda: str | None
    threads: int
    cpu_capability: str
    devices: tuple[CudaDevice, ...]


def take_inventory() -> TorchInventory:
    """Return what torch is here; each CUDA device has to calculate once."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return TorchInventory(
        version=torch.__version__,
        cuda=torch.version.cuda,
        threads=torch.get_num_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        devices=tuple(_cuda_device(n) for n in range(count)),
    )


def _cuda_device(number: int) -> CudaDevice:
    properties = torch.cuda.get_device_properties(number)
    return CudaDevice(
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        memory=int(properties.total_memory),
        fault=_fault(torch.device("cuda", number)),
    )


def _fault(device: torch.device) -> str:
    """Compare a small convolution with the CPU's: a build without this device's code shows here."""
    source = torch.Generator().manual_seed(0)
    image = torch.randn(1, 2, 8, 8, 8, generator=source)
    kernel = torch.randn(2, 2, 3, 3, 3, generator=source)
    expected = torch.nn.functional.conv3d(image, kernel)
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            found = torch.nn.functional.conv3d(image.to(device), kernel.to(device)).cpu()
    except RuntimeError as exc:  # torch's errors for devices are all of this kind
        return f"it can't calculate ({type(exc).__name__})"
    off = float((found - expected).abs().max() / expected.abs().max())
    return "" if off < TOLERANCE else f"it calculates wrong, {off:.1e} off"
