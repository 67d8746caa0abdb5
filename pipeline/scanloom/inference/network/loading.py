"""Loads a model card's network with its trained weights, in the type in which it calculates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from scanloom.cards.card import ModelCard
from scanloom.inference.network.architectures import build_network, find_class
from scanloom.inference.network.final_layer import PROBE, FinalLayer, detach_final_layer
from scanloom.inference.network.mixed_bfloat16 import MixedBfloat16
from scanloom.inference.network.weights import largest, load_weights, read_weights


@dataclass(frozen=True, eq=False)
class LoadedNetwork:
    """A network, and its final layer if detached.

    Parameters
    ----------
    network : Module
        In evaluation mode. Input of type `takes`; output are scores, or features for `head`.
    head : FinalLayer or None
        The final layer, if it is applied after windows are summed.
    dtype : torch.dtype
        Type in which the network calculates.
    """

    network: nn.Module
    head: FinalLayer | None
    dtype: torch.dtype

    @property
    def takes(self) -> torch.dtype:
        """Type of the input: float32 for bfloat16 too, since the first layers are exact."""
        return torch.float32 if self.dtype is torch.bfloat16 else self.dtype


def load_network(card: ModelCard, dtype: torch.dtype) -> LoadedNetwork:
    """Build a card's network on the CPU and load its weights.

    Parameters
    ----------
    card : ModelCard
        The model.
    dtype : torch.dtype
        Type in which the network calculates; float32 is used instead if its weights overflow it.

    Raises
    ------
    ScanError
        As `read_weights`, `build_network` and `load_weights`.
    """
    find_class(card.network)  # importing MONAI registers its tensor classes for torch.load
    state = read_weights(card.weights)
    network = build_network(card.network, sum(values.numel() for values in state.values()))
    load_weights(network, state)
    del state
    if dtype is not torch.float32 and not largest(network) <= torch.finfo(dtype).max:
        dtype = torch.float32
    head = detach_final_layer(network, card.network, card.window.size)
    if dtype is torch.bfloat16:
        network = MixedBfloat16(network, len(card.channels), card.window.size or PROBE)
    else:
        network = network.to(dtype)
    return LoadedNetwork(network, head, dtype)
