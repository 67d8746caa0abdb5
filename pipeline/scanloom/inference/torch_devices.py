"""Reports the version of torch and the devices that it can use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_TOLERANCE = 1e-3
"""Relative difference between devices for a small float32 convolution without TF32."""


@dataclass(frozen=True)
class CudaDevice:
    """A CUDA device as torch reports it.

    `memory` is in bytes. `fault` is the reason why the device can't be used; "" if it works.
    """

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
        Version of torch.
    cuda : str or None
        CUDA version of the build; None for a build without CUDA.
    threads : int
        Number of threads on the CPU.
    cpu_capability : str
        Instruction set that torch selected: "AVX512", "AVX2" ...
    devices : tuple of CudaDevice
        Empty if the driver is missing or too old for the build.
    """

    version: str
    cuda: str | None
    threads: int
    cpu_capability: str
    devices: tuple[CudaDevice, ...]


def take_inventory() -> TorchInventory:
    """Return the installed build of torch; each CUDA device is tested with a small convolution."""
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
    """Return why a small convolution fails or differs from the CPU's; "" if it is correct.

    It fails on a device for which this build has no code.
    """
    source = torch.Generator().manual_seed(0)
    image = torch.randn(1, 2, 8, 8, 8, generator=source)
    kernel = torch.randn(2, 2, 3, 3, 3, generator=source)
    expected = torch.nn.functional.conv3d(image, kernel)
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            result = torch.nn.functional.conv3d(image.to(device), kernel.to(device)).cpu()
    except RuntimeError as exc:  # torch's errors for devices are subclasses
        return f"a test convolution fails ({type(exc).__name__})"
    error = float((result - expected).abs().max() / expected.abs().max())
    return "" if error < _TOLERANCE else f"a test convolution is wrong by {error:.1e}"
