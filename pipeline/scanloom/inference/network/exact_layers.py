"""Finds the layers that stay exact when a network runs in bfloat16.

Layers that take the image take it with 16 bits, or in float32. Layers from the last convolution
that mixes voxels on are float32. So are narrow layers at the image's resolution, whose few channels
do not average rounding out. A forward pass on the meta device finds these layers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scanloom.inference.network.meta_shapes import meta_dispatch

_NARROW_CHANNELS = 16
"""Maximum number of channels of a narrow layer: it averages too few values to hide rounding."""
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class ExactLayers:
    """Names of the layers that take the image itself, and of those that stay float32."""

    first: frozenset[str] = frozenset()
    exact: frozenset[str] = frozenset()


def find_exact_layers(network: nn.Module, shape: tuple[int, ...]) -> ExactLayers:
    """Return the layers to keep exact; none if the network can't run on the meta device.

    Parameters
    ----------
    network : Module
        Network with weights of any type; not changed.
    shape : (N, channels, ...)
        Shape of the network's input.
    """
    image = torch.empty(shape, device="meta")
    on_meta = _copy_to_meta(network)
    layers = {name: module for name, module in on_meta.named_modules() if is_layer(module)}
    calls: list[_LayerCall] = []
    for name, layer in layers.items():
        layer.register_forward_hook(
            lambda _, inputs, out, name=name: calls.append(
                _record_call(name, inputs[0], out, image)
            )
        )
    try:
        with torch.inference_mode(), meta_dispatch():
            on_meta(image)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return ExactLayers()  # the whole network runs in bfloat16
    names = [call.name for call in calls]
    mixing = [n for n, name in enumerate(names) if _mixes_voxels(layers[name])]
    start = mixing[-1] if mixing else 0
    first = frozenset(call.name for call in calls if call.takes_image)
    narrow = frozenset(call.name for call in calls if call.narrow) - first
    wide = frozenset(call.name for call in calls if not call.narrow)
    last = frozenset(names[start:]) - frozenset(names[:start])
    return ExactLayers(first, last | (narrow - wide))


@dataclass(frozen=True)
class _LayerCall:
    """A call of a layer.

    `takes_image`: the input is the network's image. `narrow`: input and output have few channels,
    at the image's resolution.
    """

    name: str
    takes_image: bool
    narrow: bool


def _record_call(name: str, value: Any, out: Any, image: torch.Tensor) -> _LayerCall:
    """Return a record of a layer's call with its first input and its output."""
    tensors = [tensor for tensor in (value, out) if isinstance(tensor, torch.Tensor)]
    narrow = all(
        tensor.shape[2:] == image.shape[2:] and tensor.shape[1] <= _NARROW_CHANNELS
        for tensor in tensors
    )
    return _LayerCall(name, value is image, narrow)


def _copy_to_meta(network: nn.Module) -> nn.Module:
    """Return a copy of a network on the meta device; the memory of weights is not copied."""
    values = (*network.parameters(), *network.buffers())
    return copy.deepcopy(network, {id(value): value.detach().to("meta") for value in values})


def is_layer(module: nn.Module) -> bool:
    """Return whether a module has no submodules."""
    return next(module.children(), None) is None


def _mixes_voxels(layer: nn.Module) -> bool:
    """Return whether a layer is a convolution with a kernel larger than one voxel."""
    return isinstance(layer, _CONVOLUTIONS) and any(n > 1 for n in layer.kernel_size)
