"""A network that was exported as an ONNX graph, by whatever framework trained it.

A graph is data: OpenVINO reads it and runs it on the CPU, ONNX Runtime on others. Its bytes are the
weights of the module, so that they are stored, hashed and loaded as those of any other network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from scanloom.cards.networks import Layout


class OnnxGraph(nn.Module):
    """An ONNX graph with one input and one output.

    Parameters
    ----------
    nbytes : int
        Size of the graph as a file.
    in_channels : int
        Number of channels of the image.
    layout : "channels_first" or "channels_last"
        Whether input and output have their channels after the batch (PyTorch), or at the end
        (TensorFlow, JAX).
    spatial_dims : 2 or 3
        Number of spatial axes.

    Attributes
    ----------
    model : (nbytes,) uint8 tensor
        The file.
    """

    model: torch.Tensor

    def __init__(
        self,
        nbytes: int,
        in_channels: int = 1,
        layout: Layout = "channels_first",
        spatial_dims: int = 3,
    ) -> None:
        super().__init__()
        self.in_channels, self.layout, self.spatial_dims = in_channels, layout, spatial_dims
        self.register_buffer("model", torch.zeros(nbytes, dtype=torch.uint8))
        self._runs: dict[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies, without what OpenVINO compiled."""
        return {**self.__dict__, "_runs": {}}

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the scores (N, C, ...) of windows (N, channels, ...), one window after another."""
        if windows.is_meta:
            raise NotImplementedError("an ONNX graph runs on numbers only")
        shape = (1, self.in_channels, *windows.shape[2:])
        if shape not in self._runs:  # windows of a scan have one size
            from scanloom.inference.engines.openvino_engine import compile_onnx

            self._runs = {shape: compile_onnx(self.content(), shape, self.layout)}
        run = self._runs[shape]
        on_host = windows.to("cpu", torch.float32)
        return torch.cat([run(window[None]) for window in on_host]).to(windows.device)

    def content(self) -> bytes:
        """Return the ONNX file."""
        return self.model.cpu().numpy().tobytes()
