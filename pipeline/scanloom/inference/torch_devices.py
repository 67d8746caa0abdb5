"""Reports the version of torch and the devices that it, and other libraries, can use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch

from scanloom.cards.card_file import read_card
from scanloom.core import ScanError
from scanloom.core.paths import shipped
from scanloom.inference.device import choose_precision, device_count, old_torch
from scanloom.inference.network.loading import load_network, wrong_half

SHIPPED_MODEL = "ct_tissue"
_TOLERANCE = 1e-3
"""Relative difference between devices for a small float32 convolution without TF32."""


@dataclass(frozen=True)
class CudaDevice:
    """A CUDA device as torch reports it.

    `memory` is in bytes. `fault` is the reason why the device can't be used; "" if it works.
    `half_fault` is the reason why float32 is used where models would take half precision; else "".
    """

    name: str
    capability: str
    memory: int
    fault: str
    half_fault: str = ""


@dataclass(frozen=True)
class FurtherDevice:
    """A device that is only used if its name is requested, or by no engine.

    `name` is that of `--device`, or "" without one; `fault` is as of `CudaDevice`.
    """

    name: str
    hardware: str
    fault: str = ""


@dataclass(frozen=True)
class TorchInventory:
    """The build of torch and its devices.

    Parameters
    ----------
    cuda, hip : str or None
        Version of CUDA, or of AMD's ROCm, that the build is for; None for another build.
    threads : int
        Number of threads on the CPU.
    cpu_capability : str
        Instruction set that torch selected: "AVX512", "AVX2" ...
    devices : tuple of CudaDevice
        AMD's too, which torch calls CUDA. Empty if the driver is missing or too old for the build.
    further : tuple of FurtherDevice
        Apple's and Intel's GPUs.
    """

    version: str
    cuda: str | None
    hip: str | None
    threads: int
    cpu_capability: str
    devices: tuple[CudaDevice, ...]
    further: tuple[FurtherDevice, ...]


def take_inventory() -> TorchInventory:
    """Return the installed build of torch; each CUDA device is tested with a small convolution."""
    devices = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties, device = torch.cuda.get_device_properties(number), torch.device("cuda", number)
        fault = _fault(device)
        capability = f"{properties.major}.{properties.minor}"
        memory = int(properties.total_memory)
        half = "" if fault else half_fault(device)
        devices.append(CudaDevice(properties.name, capability, memory, fault, half))
    return TorchInventory(
        version=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        threads=torch.get_num_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        devices=tuple(devices),
        further=(*_requested_only(), *_openvino_gpus()),
    )


def _requested_only() -> Iterator[FurtherDevice]:
    """Yield the devices that "auto" does not choose, each tested with a small convolution."""
    for kind in ("mps", "xpu"):
        for number in range(device_count(kind)):
            device = torch.device(kind, number)
            hardware = "Apple" if kind == "mps" else torch.xpu.get_device_name(device)
            name = kind if kind == "mps" else f"{kind}:{number}"
            yield FurtherDevice(name, hardware, _fault(device))


def _openvino_gpus() -> Iterator[FurtherDevice]:
    """Yield the GPUs of OpenVINO's plug-in, on which scanloom runs no network."""
    with suppress(ImportError, RuntimeError):  # RuntimeError: a driver that does not work
        import openvino

        core = openvino.Core()
        for name in core.available_devices:
            if name.startswith("GPU"):
                hardware = str(core.get_property(name, "FULL_DEVICE_NAME"))
                yield FurtherDevice("", f"{hardware}, by OpenVINO")


def onnxruntime_cuda() -> str | None:
    """Return the version of CUDA that ONNX Runtime is built for; None without it."""
    try:
        from onnxruntime.capi import version_info
    except ImportError:  # not installed, or a build for CPUs
        return None
    version = getattr(version_info, "cuda_version", None)
    return str(version) if version else None


def _fault(device: torch.device) -> str:
    """Return why a small convolution fails or differs from the CPU's; "" if it is correct.

    It fails on a device for which this build has no code.
    """
    # Before any computation: an old cuDNN computes without an error
    if device.type == "cuda" and (too_old := old_torch(torch.__version__)):
        return too_old
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


def half_fault(device: torch.device) -> str:
    """Return why half precision is not used on a device, though models choose it; else "".

    By the version of cuDNN, and by a window of the model that ships in half precision and float32.
    """
    precision = choose_precision("auto", device)
    if precision.dtype is torch.float32:
        return precision.why if precision.wrong else ""
    try:
        card = read_card(shipped("models") / SHIPPED_MODEL)
        loaded = load_network(card, precision.dtype)
        return wrong_half(card, loaded, device)
    except (ScanError, RuntimeError) as exc:  # torch's errors for devices are subclasses
        return f"a window in half precision fails ({type(exc).__name__})"
