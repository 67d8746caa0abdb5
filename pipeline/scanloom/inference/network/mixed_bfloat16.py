"""A network in bfloat16 that stays exact at its ends: where the image comes in, scores go out.

bfloat16 keeps 8 bits. Of Hounsfield units that is a step of several, of scores a difference that
decides labels; in between, each value is a mean of many. What takes the image takes it in two
parts, of 8 bits each. From the last convolution that mixes voxels on, all is float32, and so are
narrow layers at the image's own resolution, where few channels even out what rounding does. Which
layers these are is found by following the network's way on the meta device.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scanloom.inference.geometry import Shape
from scanloom.inference.network.meta_shapes import meta_dispatch

HALF = torch.bfloat16
NARROW = 16
"""Channels of a layer that averages over few values, so that rounding shows in labels."""
Convolution = (nn.Conv3d, nn.ConvTranspose3d)


class MixedBfloat16(nn.Module):
    """A network that calculates in bfloat16 but for its ends: float32 in, float32 out.

    Parameters
    ----------
    network : Module
        With its weights in float32, on the CPU or the meta device. It is changed.
    channels : int
        Of the image.
    size : (x, y, z)
        Of a window.
    """

    def __init__(self, network: nn.Module, channels: int, size: Shape) -> None:
        super().__init__()
        way = _follow(network, torch.empty((1, channels, *size), device="meta"))
        for name, module in network.named_modules():
            if name in way.exact:
                module.register_forward_pre_hook(_take_float32)
                continue
            if name in way.first and isinstance(module, nn.Conv3d) and module.groups == 1:
                _take_in_parts(module)
            elif _is_layer(module) and len(list(module.parameters())):
                module.register_forward_pre_hook(_take_half)
            _halve(module)
        self._network = network

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """Return the scores of a window, both float32."""
        scores: torch.Tensor = self._network(window)
        return scores.to(torch.float32)


@dataclass(frozen=True)
class _Way:
    """Layers by name: those that are given the image itself, and those that are kept exact."""

    first: frozenset[str] = frozenset()
    exact: frozenset[str] = frozenset()


def _follow(network: nn.Module, image: torch.Tensor) -> _Way:
    """Return the ends of a network; none for one that can't run without numbers."""
    shadow = _shadow(network)
    layers = {name: one for name, one in shadow.named_modules() if _is_layer(one)}
    seen: list[_Passed] = []
    for name, layer in layers.items():
        layer.register_forward_hook(
            lambda _, given, out, name=name: seen.append(_passed(name, given[0], out, image))
        )
    try:
        with torch.inference_mode(), meta_dispatch():
            shadow(image)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return _Way()  # it can't run without numbers: bfloat16 from end to end
    names = [one.name for one in seen]
    mixing = [n for n, name in enumerate(names) if _mixes(layers[name])]
    start = mixing[-1] if mixing else 0
    first = frozenset(one.name for one in seen if one.takes_image)
    narrow = frozenset(one.name for one in seen if one.narrow) - first
    wide = frozenset(one.name for one in seen if not one.narrow)
    last = frozenset(names[start:]) - frozenset(names[:start])
    return _Way(first, last | (narrow - wide))


@dataclass(frozen=True)
class _Passed:
    """A layer on a network's way: whether it took the image, whether it is narrow and as fine."""

    name: str
    takes_image: bool
    narrow: bool


def _passed(name: str, given: Any, out: Any, image: torch.Tensor) -> _Passed:
    both = [one for one in (given, out) if isinstance(one, torch.Tensor)]
    narrow = all(one.shape[2:] == image.shape[2:] and one.shape[1] <= NARROW for one in both)
    return _Passed(name, given is image, narrow)


def _shadow(network: nn.Module) -> nn.Module:
    """Return a network of the same shapes on the meta device; weights are not copied."""
    values = (*network.parameters(), *network.buffers())
    return copy.deepcopy(network, {id(value): value.detach().to("meta") for value in values})


def _is_layer(module: nn.Module) -> bool:
    """Whether a module has no others inside."""
    return next(module.children(), None) is None


def _mixes(layer: nn.Module) -> bool:
    """Whether a layer is a convolution of more than a voxel."""
    return isinstance(layer, Convolution) and any(n > 1 for n in layer.kernel_size)


def _halve(module: nn.Module) -> None:
    """Make a module's own weights bfloat16; channels side by side, as its units want them."""
    for value in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if value.is_floating_point():
            value.data = value.data.to(HALF)
        if value.ndim == 5:
            value.data = value.data.contiguous(memory_format=torch.channels_last_3d)


def _take_in_parts(layer: nn.Conv3d) -> None:
    """Let a convolution take what bfloat16 leaves of image and weights as further channels."""
    weight = layer.weight.data
    upper, lower = _parts(weight)
    layer.weight.data = torch.cat([upper, upper, lower], dim=1).to(weight.dtype)
    layer.in_channels *= 3
    layer.register_forward_pre_hook(_part)


def _parts(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values in bfloat16, and what is left of them."""
    upper = values.to(HALF)
    return upper, (values - upper.to(values.dtype)).to(HALF)


def _part(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    upper, lower = _parts(given[0])
    return torch.cat([upper, lower, upper], dim=1), *given[1:]


def _take_half(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_cast(value, HALF) for value in given)


def _take_float32(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_cast(value, torch.float32) for value in given)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floating else value
