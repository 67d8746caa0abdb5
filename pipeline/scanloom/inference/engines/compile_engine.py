"""torch.compile: torch generates and compiles kernels, which needs a C++ compiler on CPUs."""

from __future__ import annotations

from typing import ClassVar

import torch

from scanloom.inference.device import is_out_of_memory
from scanloom.inference.engines.protocol import EngineUnfitError, NetworkRequest, Run


class TorchCompile:
    """torch's compiler."""

    name: ClassVar[str] = "compile"
    package: ClassVar[str] = "torch"
    automatic: ClassVar[bool] = False  # compiling takes minutes

    def version(self) -> str | None:
        """Return the version of torch."""
        return torch.__version__

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether the device is a CPU or a CUDA device."""
        return device.type in ("cpu", "cuda")

    def prepare(self, request: NetworkRequest) -> Run:
        """Compile a network, by a pass over zeros."""
        try:
            compiled: Run = torch.compile(request.torch_network(), dynamic=False)
            compiled(request.zeros())
        except Exception as exc:
            if is_out_of_memory(exc):
                raise
            raise EngineUnfitError(f"{type(exc).__name__} while the network was compiled") from exc
        return compiled


ENGINE = TorchCompile()
