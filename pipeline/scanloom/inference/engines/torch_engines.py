"""Engines that torch brings itself: its compiler, and CUDA graphs."""

from __future__ import annotations

import copy
import time
from typing import ClassVar

import torch

from scanloom.inference.engines.protocol import (
    EngineUnfitError,
    NetworkRequest,
    PreparedNetwork,
    Run,
)
from scanloom.inference.network.layers import MixedBfloat16, PlaneNetwork

_WARM_UPS = 3
"""Passes before a CUDA graph is captured: libraries choose and load kernels in the first."""


class TorchCompile:
    """torch.compile: torch generates and compiles kernels, which needs a C++ compiler on CPUs."""

    name: ClassVar[str] = "compile"
    package: ClassVar[str] = "torch"

    def version(self) -> str | None:
        """Return the version of torch."""
        return torch.__version__

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether the device is a CPU or a CUDA device."""
        return device.type in ("cpu", "cuda")

    def prepare(self, request: NetworkRequest) -> PreparedNetwork:
        """Compile a network, by a pass over zeros."""
        began = time.perf_counter()
        network = _in_type(request)
        try:
            compiled: Run = torch.compile(network, dynamic=False)
            compiled(_zeros(request))
        except Exception as exc:
            raise EngineUnfitError(f"{type(exc).__name__} while the network was compiled") from exc
        return PreparedNetwork(compiled, time.perf_counter() - began)


class CudaGraphs:
    """CUDA graphs: all kernels of a network are launched at once."""

    name: ClassVar[str] = "cudagraphs"
    package: ClassVar[str] = "torch"

    def version(self) -> str | None:
        """Return the version of torch."""
        return torch.__version__

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether the device is a CUDA device."""
        return device.type == "cuda"

    def prepare(self, request: NetworkRequest) -> PreparedNetwork:
        """Capture a network's kernels for batches of the request's shape.

        Batches of another shape, as the last of a scan, are run by torch.
        """
        began = time.perf_counter()
        network = _in_type(request)
        windows = _zeros(request)
        try:
            stream = torch.cuda.Stream(request.device)  # type: ignore[no-untyped-call]  # torch
            stream.wait_stream(torch.cuda.current_stream(request.device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    network(windows)
            torch.cuda.current_stream(request.device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                scores = network(windows)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as exc:
            raise EngineUnfitError("its kernels can't be captured as a CUDA graph") from exc

        def run(batch: torch.Tensor) -> torch.Tensor:
            if batch.shape != windows.shape:
                other: torch.Tensor = network(batch)
                return other
            windows.copy_(batch)
            graph.replay()
            copy_of_scores: torch.Tensor = scores.clone()
            return copy_of_scores

        return PreparedNetwork(run, time.perf_counter() - began)


def _in_type(request: NetworkRequest) -> torch.nn.Module:
    """Return the network on its device, in the type in which it calculates."""
    network = copy.deepcopy(request.build())
    if request.dtype is not torch.bfloat16:
        return network.to(request.device, request.dtype)
    channels, size = request.shape[1], request.shape[2:]
    if isinstance(network, PlaneNetwork):
        axis = network.dim - 2
        inner = MixedBfloat16(network.network, channels, size[:axis] + size[axis + 1 :])
        return PlaneNetwork(inner, axis)
    return MixedBfloat16(network, channels, size)


def _zeros(request: NetworkRequest) -> torch.Tensor:
    """Return a batch of zeros, of the type that the network takes."""
    dtype = torch.float32 if request.dtype is torch.bfloat16 else request.dtype
    return torch.zeros(request.shape, dtype=dtype, device=request.device)
