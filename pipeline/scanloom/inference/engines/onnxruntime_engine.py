"""ONNX Runtime: runs a network in float32 on CPUs, and with its providers on GPUs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import time
import warnings
from pathlib import Path
from typing import ClassVar

import torch

from scanloom.inference.engines.export_cache import cached_export, export_key
from scanloom.inference.engines.protocol import (
    EngineUnfitError,
    NetworkRequest,
    PreparedNetwork,
    Run,
)

_FORM = 1
"""Version of this module's exports: to be raised when they change."""
_GRAPH = "network.onnx"
_DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu")
_EXPORTERS = ("onnx", "onnxscript")
"""Libraries with which torch writes ONNX files."""


class OnnxRuntime:
    """ONNX Runtime, in float32."""

    name: ClassVar[str] = "onnxruntime"
    package: ClassVar[str] = "onnxruntime onnx onnxscript"

    def version(self) -> str | None:
        """Return the version of ONNX Runtime; None if it or a library to export is missing."""
        if not all(importlib.util.find_spec(name) for name in (*_EXPORTERS, "onnxruntime")):
            return None
        for name in _DISTRIBUTIONS:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether the device is a CPU and the type float32."""
        return device.type == "cpu" and dtype is torch.float32

    def prepare(self, request: NetworkRequest) -> PreparedNetwork:
        """Prepare a network: read it from the cache or export it, and load it."""
        began = time.perf_counter()
        subject = {
            "engine": [self.name, self.version(), _FORM],
            "torch": torch.__version__,
            "network": list(request.identity),
            "shape": list(request.shape),
        }
        try:
            with cached_export(export_key(subject), lambda f: _export(request, f)) as (folder, old):
                run = _load(folder / _GRAPH, request)
        except Exception as exc:
            raise EngineUnfitError(f"{type(exc).__name__} while the network was prepared") from exc
        return PreparedNetwork(run, time.perf_counter() - began, cached=old)


def _export(request: NetworkRequest, folder: Path) -> None:
    """Write a network as an ONNX file."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            request.build(),
            (torch.zeros(request.shape),),
            folder / _GRAPH,
            dynamo=True,
            verbose=False,
            external_data=True,  # a file of more than 2 GB can't be read
        )


def _load(graph: Path, request: NetworkRequest) -> Run:
    """Return a function that runs an exported network."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = request.threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(windows: torch.Tensor) -> torch.Tensor:
        (scores,) = session.run(None, {name: windows.contiguous().numpy()})
        return torch.from_numpy(scores)

    return run
