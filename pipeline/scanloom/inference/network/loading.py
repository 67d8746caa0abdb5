"""Loads a model card's networks with their trained weights, in the type in which they calculate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from scanloom.cards.card import ModelCard, NetworkSpec, Weights
from scanloom.inference.nets.meshnet import MeshNet
from scanloom.inference.network.architectures import build_network, check_dimensions, find_class
from scanloom.inference.network.final_layer import FinalLayer, detach_final_layer
from scanloom.inference.network.mixed_bfloat16 import MixedBfloat16
from scanloom.inference.network.planes import PlaneNetwork, input_size
from scanloom.inference.network.weights import largest, load_weights, read_weights

SHARE_OF_NETWORKS = 8
"""Networks of several folds that need more than this fraction (1/8) of a device's memory are moved
there one at a time."""


@dataclass(frozen=True, eq=False)
class LoadedNetwork:
    """A network, and its final layer if detached.

    Parameters
    ----------
    network : Module
        In evaluation mode. Maps windows (N, channels, x, y, z) of type `takes` to scores, or to
        features for `head`.
    head : FinalLayer or None
        The final layer, if it is applied after windows are summed.
    dtype : torch.dtype
        Type in which the network calculates.
    folds : tuple of LoadedNetwork
        Networks with the card's further weights, of the same type.
    """

    network: nn.Module
    head: FinalLayer | None
    dtype: torch.dtype
    folds: tuple[LoadedNetwork, ...] = ()

    @property
    def takes(self) -> torch.dtype:
        """Type of the input: float32 for bfloat16 too, since the first layers are exact."""
        return torch.float32 if self.dtype is torch.bfloat16 else self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of this network, without `folds`."""
        return sum(v.nbytes for v in (*self.network.parameters(), *self.network.buffers()))


def load_network(card: ModelCard, dtype: torch.dtype) -> LoadedNetwork:
    """Build a card's network, and those of its further weights, on the CPU and load the weights.

    Parameters
    ----------
    card : ModelCard
        The model.
    dtype : torch.dtype
        Type in which the network calculates; float32 is used instead if weights overflow it.

    Raises
    ------
    ScanError
        As `read_weights`, `build_network` and `load_weights`; MODEL_UNSUPPORTED if the network has
        other dimensions than the card's windows.
    """
    find_class(card.network)  # importing MONAI registers its tensor classes for torch.load
    check_dimensions(card)
    networks = [_trained(card.network, weights) for weights in (card.weights, *card.folds)]
    if dtype is not torch.float32:
        most = max(largest(network) for network in networks)
        dtype = dtype if most <= torch.finfo(dtype).max else torch.float32
    first, *folds = (_converted(network, card, dtype) for network in networks)
    return replace(first, folds=tuple(folds))


def _trained(spec: NetworkSpec, weights: Weights) -> nn.Module:
    """Return a network with its weights, in float32."""
    state = read_weights(weights)
    network = build_network(spec, sum(values.numel() for values in state.values()))
    if isinstance(network, MeshNet):
        state = network.convert_state(state)
    load_weights(network, state)
    return network


def _converted(network: nn.Module, card: ModelCard, dtype: torch.dtype) -> LoadedNetwork:
    """Return a network in the type in which it calculates, its final layer detached if possible."""
    size, head = input_size(card.window), None
    if card.window.sums == "float32":
        head = detach_final_layer(network, card.network, size)
    if dtype is torch.bfloat16:
        network = MixedBfloat16(network, card.n_inputs, size)
    else:
        network = network.to(dtype)
    if card.window.plane is not None:
        network = PlaneNetwork(network, card.window.plane)
    return LoadedNetwork(network, head, dtype)


class TrainedNetworks:
    """A model's networks in each type in which they calculate, loaded at the first use and kept.

    They are loaded from the card's files: weights rounded to half precision cannot be restored.

    Parameters
    ----------
    card : ModelCard
        The model.
    first : LoadedNetwork
        Its networks in the type that is used first.
    """

    def __init__(self, card: ModelCard, first: LoadedNetwork) -> None:
        self._card, self._kept = card, {first.dtype: first}
        self._without_weights: dict[torch.dtype, LoadedNetwork] = {}

    def load(self, dtype: torch.dtype) -> LoadedNetwork:
        """Return the networks that calculate in a type, with their weights."""
        if dtype not in self._kept:
            self._kept[dtype] = load_network(self._card, dtype)
        return self._kept[dtype]

    def describe(self, dtype: torch.dtype) -> LoadedNetwork:
        """Return the networks that calculate in a type; their modules may have no weights."""
        return self._without_weights.get(dtype) or self.load(dtype)

    def release(self, dtype: torch.dtype) -> None:
        """Free the weights, since an engine runs the networks; only final layers are kept."""
        loaded = self._kept.pop(dtype, None)
        if loaded is not None:
            folds = tuple(replace(fold, network=nn.Identity()) for fold in loaded.folds)
            self._without_weights[dtype] = replace(loaded, network=nn.Identity(), folds=folds)


def take_turns(networks: Sequence[LoadedNetwork], device: torch.device) -> bool:
    """Return whether networks are on a device one at a time.

    It depends on the device's total memory, never on its free memory.
    """
    if device.type != "cuda" or len(networks) == 1:
        return False
    total = int(torch.cuda.get_device_properties(device).total_memory)
    return sum(network.nbytes for network in networks) > total // SHARE_OF_NETWORKS


class TakingTurns:
    """Keeps only one of several networks in a device's memory; the others wait on the host.

    Parameters
    ----------
    device : torch.device
        Device on which the networks run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._present: nn.Module | None = None

    def wrap(self, network: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that moves a network to the device if necessary, and runs it."""

        def run(windows: torch.Tensor) -> torch.Tensor:
            if self._present is not network:
                if self._present is not None:
                    self._present.to("cpu")
                network.to(self._device)
                self._present = network
            scores: torch.Tensor = network(windows)
            return scores

        return run
