"""The engines, by name."""

from __future__ import annotations

from scanloom.core import Reason, ScanError
from scanloom.inference.engines.onnxruntime_engine import OnnxRuntime, TensorRt
from scanloom.inference.engines.openvino_engine import OpenVino
from scanloom.inference.engines.protocol import Engine
from scanloom.inference.engines.torch_engines import CudaGraphs, TorchCompile

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (OpenVino(), TensorRt(), OnnxRuntime(), TorchCompile(), CudaGraphs())
}
"""All engines but torch itself, in the order in which "auto" measures them."""
AUTOMATIC = ("openvino", "tensorrt", "onnxruntime", "cudagraphs")
"""Engines that "auto" measures, if they are installed. Compiling takes minutes: on request only."""


def find_engine(name: str) -> Engine:
    """Return an engine that is installed.

    Raises
    ------
    ScanError
        DEVICE_UNAVAILABLE if its library is not installed.
    """
    engine = ENGINES[name]
    if engine.version() is None:
        detail = f"the engine {name} is not installed: pip install {engine.package}"
        raise ScanError(Reason.DEVICE_UNAVAILABLE, detail)
    return engine
