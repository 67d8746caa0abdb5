"""Runs a network in bfloat16, except for the first and last layers, where rounding shows in labels.

bfloat16 has a precision of 8 bits: steps of several Hounsfield units, and differences of scores
that decide labels. Rounding matters less in between, where each value is a mean of many. Layers
that take the image take it as a sum of two bfloat16 values, 16 bits in all. `exact_layers` finds
the layers that are float32.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import nn

from scanloom.inference.network.exact_layers import find_exact_layers, is_layer


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
        layers = find_exact_layers(network, (1, channels, *size))
        for name, module in network.named_modules():
            if name in layers.exact:
                module.register_forward_pre_hook(_inputs_to_float32)
                continue
            if name in layers.first and _is_plain_convolution(module):
                _split_operands(module)
            elif isinstance(module, nn.AvgPool3d):  # torch has none in bfloat16 on CPUs
                module.register_forward_pre_hook(_inputs_to_float32)
                module.register_forward_hook(_output_to_bfloat16)
            elif is_layer(module) and len(list(module.parameters())):
                module.register_forward_pre_hook(_inputs_to_bfloat16)
            _to_bfloat16(module)
        self._network = network

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """Return the scores (N, C, ...) of windows (N, channels, ...), both float32."""
        scores: torch.Tensor = self._network(window)
        return scores.to(torch.float32)


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


def _output_to_bfloat16(_: nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Return a layer's output as bfloat16."""
    return output.to(torch.bfloat16)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a floating-point tensor in another type, any other value unchanged."""
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floating else value
