"""CUDA graphs: all kernels of a network are launched at once."""

from __future__ import annotations

import time
from typing import ClassVar

import torch

from scanloom.inference.engines.protocol import EngineUnfitError, NetworkRequest, PreparedNetwork

_WARM_UPS = 3
"""Passes before a CUDA graph is captured: libraries choose and load kernels in the first."""


class CudaGraphs:
    """torch's CUDA graphs."""

    name: ClassVar[str] = "cudagraphs"
    package: ClassVar[str] = "torch"
    automatic: ClassVar[bool] = True

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
        network = request.torch_network()
        windows = request.zeros()
        try:
            # Captured on a stream of its own, after passes there, as PyTorch's notes on CUDA say
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
            # A graph has fixed shapes and addresses
            if batch.shape != windows.shape:
                scores_of_rest: torch.Tensor = network(batch)
                return scores_of_rest
            windows.copy_(batch)
            graph.replay()
            copy_of_scores: torch.Tensor = scores.clone()
            return copy_of_scores

        return PreparedNetwork(run, time.perf_counter() - began)


ENGINE = CudaGraphs()
