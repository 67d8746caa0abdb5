"""Runs a network in bfloat16, except for the first and last layers, where rounding shows in labels.

bfloat16 has a precision of 8 bits: steps of several Hounsfield units, and differences of scores
that decide labels. Rounding matters less in between, where each value is a mean of many. Layers
that take the image take it as a sum of two bfloat16 values, 16 bits in all. Layers from the last
convolution that mixes voxels on are float32. So are narrow layers at the image's resolution, whose
few channels do not average rounding out. A forward pass on the meta device finds these layers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

from scanloom.inference.network.meta_shapes import meta_dispatch

_NARROW_CHANNELS = 16
"""Maximum number of channels of a narrow layer: it averages too few values to hide rounding."""
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class MixedBfloat16(nn.Module):
    """A network in bfloat16 with exact first and last layers; input and output are float32.

    Parameters
    ----------
    network : Module
        Network with float32 weights, on the CPU or the meta device; changed in place.
    channels : int
        Number of channels of the image.
    size : (x, y, z) or (x, y)
        Size of the network's input.
    """

    def __init__(self, network: nn.Module, channels: int, size: tuple[int, ...]) -> None:
        super().__init__()
        layers = _find_exact_layers(network, torch.empty((1, channels, *size), device="meta"))
        for name, module in network.named_modules():
            if name in layers.exact:
                module.register_forward_pre_hook(_inputs_to_float32)
                continue
            if name in layers.first and _is_plain_convolution(module):
                _split_operands(module)
            elif _is_layer(module) and len(list(module.parameters())):
                module.register_forward_pre_hook(_inputs_to_bfloat16)
            _to_bfloat16(module)
        self._network = network

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """Return the scores (N, C, ...) of windows (N, channels, ...), both float32."""
        scores: torch.Tensor = self._network(window)
        return scores.to(torch.float32)


@dataclass(frozen=True)
class _ExactLayers:
    """Names of the layers that take the image itself, and of those that stay float32."""

    first: frozenset[str] = frozenset()
    exact: frozenset[str] = frozenset()


def _find_exact_layers(network: nn.Module, image: torch.Tensor) -> _ExactLayers:
    """Return the layers to keep exact; none if the network can't run on the meta device."""
    on_meta = _copy_to_meta(network)
    layers = {name: module for name, module in on_meta.named_modules() if _is_layer(module)}
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
        return _ExactLayers()  # the whole network runs in bfloat16
    names = [call.name for call in calls]
    mixing = [n for n, name in enumerate(names) if _mixes_voxels(layers[name])]
    start = mixing[-1] if mixing else 0
    first = frozenset(call.name for call in calls if call.takes_image)
    narrow = frozenset(call.name for call in calls if call.narrow) - first
    wide = frozenset(call.name for call in calls if not call.narrow)
    last = frozenset(names[start:]) - frozenset(names[:start])
    return _ExactLayers(first, last | (narrow - wide))


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


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module has no submodules."""
    return next(module.children(), None) is None


def _mixes_voxels(layer: nn.Module) -> bool:
    """Return whether a layer is a convolution with a kernel larger than one voxel."""
    return isinstance(layer, _CONVOLUTIONS) and any(n > 1 for n in layer.kernel_size)


def _to_bfloat16(module: nn.Module) -> None:
    """Convert a module's own weights to bfloat16, channels last, as bfloat16 units expect them."""
    for value in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if value.is_floating_point():
            value.data = value.data.to(torch.bfloat16)
        if value.ndim == 5:
            value.data = value.data.contiguous(memory_format=torch.channels_last_3d)
        elif value.ndim == 4 and isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            value.data = value.data.contiguous(memory_format=torch.channels_last)


def _is_plain_convolution(layer: nn.Module) -> TypeGuard[nn.Conv2d | nn.Conv3d]:
    """Return whether a layer is a convolution of all channels, neither grouped nor transposed."""
    return isinstance(layer, nn.Conv2d | nn.Conv3d) and layer.groups == 1


def _split_operands(layer: nn.Conv2d | nn.Conv3d) -> None:
    """Make a convolution also take the rounding errors of image and weights, as channels.

    The product of both errors is left out.
    """
    weight = layer.weight.data
    upper, lower = _split(weight)
    layer.weight.data = torch.cat([upper, upper, lower], dim=1).to(weight.dtype)
    layer.in_channels *= 3
    layer.register_forward_pre_hook(_split_image)


def _split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values rounded to bfloat16, and the rounding errors in bfloat16."""
    upper = values.to(torch.bfloat16)
    return upper, (values - upper.to(values.dtype)).to(torch.bfloat16)


def _split_image(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a layer's inputs with the image split into channels, as `_split_operands` expects."""
    upper, lower = _split(inputs[0])
    return torch.cat([upper, lower, upper], dim=1), *inputs[1:]


def _inputs_to_bfloat16(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a layer's inputs, floating-point tensors as bfloat16."""
    return tuple(_cast(value, torch.bfloat16) for value in inputs)


def _inputs_to_float32(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a layer's inputs, floating-point tensors as float32."""
    return tuple(_cast(value, torch.float32) for value in inputs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a floating-point tensor in another type, any other value unchanged."""
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floating else value
