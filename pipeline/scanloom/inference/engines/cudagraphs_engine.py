"""CUDA graphs: all kernels of a network are launched at once."""

from __future__ import annotations

from typing import ClassVar

import torch

from scanloom.inference.device import is_out_of_memory
from scanloom.inference.engines.protocol import EngineUnfitError, NetworkRequest, Run

_WARM_UPS = 3
"""Passes before a CUDA graph is captured: libraries choose and load kernels in the first."""
_CLOSE = 0.02
"""Largest difference of a replay from an eager pass, in standard deviations of the scores. Their
kernels may be others: half precision differs by some 0.002."""


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

    def prepare(self, request: NetworkRequest) -> Run:
        """Capture a network's kernels for batches of the request's shape.

        Batches of another shape, as the last of a scan, are run by torch.
        """
        network, device = request.torch_network(), request.device
        windows = request.zeros()
        windows.copy_(torch.randn(windows.shape, generator=torch.Generator().manual_seed(0)))
        try:
            # Captured on a stream of its own, after passes there, as PyTorch's notes on CUDA say.
            # torch's own stream for captures belongs to the device of the first graph
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
            with torch.cuda.device(device):
                stream.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(stream):
                    for _ in range(_WARM_UPS):
                        network(windows)
                torch.cuda.current_stream(device).wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    scores = network(windows)
                graph.replay()
                expected = network(windows)
        except RuntimeError as exc:
            if is_out_of_memory(exc):
                raise
            raise EngineUnfitError("its kernels can't be captured as a CUDA graph") from exc
        # A graph without the network's kernels, or with those of other addresses, runs too
        if not torch.allclose(scores, expected, atol=_CLOSE * float(expected.std()), rtol=0):
            raise EngineUnfitError("a replayed CUDA graph computes other scores")

        def run(batch: torch.Tensor) -> torch.Tensor:
            # A graph has fixed shapes and addresses
            if batch.shape != windows.shape:
                scores_of_rest: torch.Tensor = network(batch)
                return scores_of_rest
            windows.copy_(batch)
            with torch.cuda.device(device):
                graph.replay()
            copy_of_scores: torch.Tensor = scores.clone()
            return copy_of_scores

        return run


ENGINE = CudaGraphs()
