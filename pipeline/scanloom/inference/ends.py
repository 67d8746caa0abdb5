"""A network in bfloat16 whose ends calculate in float32: where the image comes in, scores go out.

bfloat16 keeps 8 bits. Of Hounsfield units that is a step of several, of scores a difference that
decides labels; in between, each value is a mean of many. The ends are found as the network runs:
convolutions that are given the very tensor it was given, and the one whose result is its own.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from scanloom.cards.card import NetworkSpec

Exact = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By the id of a tensor in bfloat16: that tensor, and what it was in float32."""


class Ends(nn.Module):
    """A network that calculates in bfloat16 but for its ends: float32 in, float32 out.

    Parameters
    ----------
    network : Module
        With its weights in float32, on the CPU. It is changed: cast, and some layers wrapped.
    spec : NetworkSpec
        Of which it was built: it says how many channels image and scores have.
    """

    def __init__(self, network: nn.Module, spec: NetworkSpec) -> None:
        super().__init__()
        self._exact: Exact = {}
        image, scores = spec.args.get("in_channels"), spec.args.get("out_channels")
        ends = {
            name: _End(copy.deepcopy(layer), self._exact)
            for name, layer in network.named_modules()
            if isinstance(layer, nn.Conv3d)
            and (layer.in_channels == image or layer.out_channels == scores)
        }
        network.to(torch.bfloat16)
        for values in network.parameters():
            if values.ndim == 5:  # channels side by side, as units for bfloat16 want them
                values.data = values.data.contiguous(memory_format=torch.channels_last_3d)
        for name, end in ends.items():
            parent, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(parent), leaf, end)
        self._network = network

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """Return the scores of a window, both float32."""
        image = window.to(torch.bfloat16)
        self._exact[id(image)] = image, window
        try:
            scores: torch.Tensor = self._network(image)
            return _exact(scores, self._exact)
        finally:
            self._exact.clear()


class _End(nn.Module):
    """A convolution in float32 among layers in bfloat16."""

    def __init__(self, layer: nn.Module, exact: Exact) -> None:
        super().__init__()
        self._layer, self._exact = layer, exact

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return its result in bfloat16, and remember what it was."""
        result = self._layer(_exact(image, self._exact))
        rounded: torch.Tensor = result.to(torch.bfloat16)
        self._exact[id(rounded)] = rounded, result
        return rounded


def _exact(values: torch.Tensor, exact: Exact) -> torch.Tensor:
    """Return what a tensor was before it became bfloat16, or else as float32 what it is."""
    known, before = exact.get(id(values), (None, None))
    if known is not values or before is None:
        return values.to(torch.float32)
    if values.is_meta or torch.equal(values, before.to(torch.bfloat16)):
        return before  # equal: it was not changed in place since
    return values.to(torch.float32)
