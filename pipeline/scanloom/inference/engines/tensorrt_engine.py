"""NVIDIA's TensorRT, which ONNX Runtime calls."""

from __future__ import annotations

from typing import ClassVar

import torch

from scanloom.inference.engines.onnxruntime_engine import TENSORRT, OnnxRuntime, first_version

_DISTRIBUTIONS = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")


class TensorRt(OnnxRuntime):
    """NVIDIA's TensorRT, through ONNX Runtime."""

    name: ClassVar[str] = "tensorrt"
    package: ClassVar[str] = "onnxruntime-gpu tensorrt onnx onnxscript"

    def version(self) -> str | None:
        """Return the versions of ONNX Runtime and TensorRT; None if a library is missing."""
        runtime, own = super().version(), first_version(_DISTRIBUTIONS, "tensorrt")
        return None if runtime is None or own is None else f"{own} ({runtime})"

    def provider(self, device: torch.device) -> str | None:
        """Return the provider of TensorRT for CUDA devices."""
        return TENSORRT if device.type == "cuda" and not torch.version.hip else None


ENGINE = TensorRt()
