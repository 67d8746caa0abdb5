"""Layers of a network that are computed otherwise than as they are written.

The final layer is detached, and applied after windows are summed. If it is a convolution of single
voxels, a voxel's scores are a matrix times its features. A window has one weight for all channels,
so the mean of the scores is the matrix times the mean of the features, up to rounding. With 118
classes and 16 features, sums and network output then take a seventh of the memory. The matrix is
applied once per voxel, not once per window that covers it. Scores that are summed in half precision
are rounded themselves: then the layer is not detached.

Some layers stay exact when a network runs in bfloat16, which has a precision of 8 bits: steps of
several Hounsfield units, and differences of scores that decide labels. Rounding matters less in
between, where each value is a mean of many. Layers that take the image take it as a sum of two
bfloat16 values, 16 bits in all, or in float32. Layers from the last convolution that mixes voxels
on are float32. So are narrow layers at the image's resolution, whose few channels do not average
rounding out. A forward pass on the meta device finds these layers.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Final

import torch
from torch import nn

from scanloom.cards.card import NetworkSpec, Window
from scanloom.inference.device import to_device
from scanloom.inference.network.architectures import build_network, meta_dispatch

_NARROW_CHANNELS = 16
"""Maximum number of channels of a narrow layer: it averages too few values to hide rounding."""
_PLANES = 16
"""Planes to which the final layer is applied at once on a GPU: they are copied for it."""
CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PROBE: Final = 64
"""Length of the input, in voxels, for a forward pass on the meta device if the card has no window
size."""


@dataclass(frozen=True, eq=False)
class FinalLayer:
    """The final layer of a network, as a matrix.

    Parameters
    ----------
    weight : (C, F) float32 tensor
        Weight of each feature for each class.
    bias : (C, 1) float32 tensor
        Bias of each class.
    """

    weight: torch.Tensor
    bias: torch.Tensor

    def to(self, device: torch.device) -> FinalLayer:
        """Return the layer, which is on the CPU, on a device."""
        weight, bias = (to_device(each.numpy(), device) for each in (self.weight, self.bias))
        return replace(self, weight=weight, bias=bias)

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Return the scores (N, C, ., .) of features (N, F, ., .), both float32."""
        count, _, *plane = features.shape
        scores = features.new_empty((count, len(self.weight), *plane))
        if not features.is_cpu:  # hundreds of planes one by one would keep a GPU waiting
            chunks = (torch.split(values, _PLANES) for values in (features, scores))
            for values, out in zip(*chunks, strict=True):
                torch.matmul(self.weight, values.flatten(2), out=out.flatten(2))
                out.add_(self.bias[:, :, None])
            return scores
        for values, out in zip(features, scores, strict=True):
            flat = values.reshape(len(values), -1)
            torch.addmm(self.bias, self.weight, flat, out=out.view(len(out), -1))
        return scores


def detach_final_layer(
    network: nn.Module, spec: NetworkSpec, size: tuple[int, ...]
) -> FinalLayer | None:
    """Detach the final layer of a network if that makes the network's output smaller.

    Parameters
    ----------
    network : Module
        Network with float32 weights. Its output are features afterwards; not changed if None is
        returned.
    spec : NetworkSpec
        Specification from which the network was built, to build it again on the meta device.
    size : (x, y, z) or (x, y)
        Size of the network's input.

    Returns
    -------
    FinalLayer or None
        None if the final layer is not a convolution of single voxels, or has no more classes than
        features.
    """
    last = last_layer(spec, size)
    if last is None:
        return None
    name, _ = last
    state = network.get_submodule(name).state_dict()
    weight = state["weight"].flatten(1).clone()
    bias = state.get("bias", weight.new_zeros(len(weight))).clone()
    replace_with_identity(network, name)
    return FinalLayer(weight, bias[:, None])


def last_layer(spec: NetworkSpec, size: tuple[int, ...]) -> tuple[str, int] | None:
    """Return name and features of the layer that `detach_final_layer` detaches, or None."""
    return _last_layer(spec.name, json.dumps(dict(spec.args), sort_keys=True), size)


@lru_cache(maxsize=64)
def _last_layer(name: str, arguments: str, size: tuple[int, ...]) -> tuple[str, int] | None:
    """Find the layer; test that the network without it outputs the layer's input."""
    spec = NetworkSpec(name, json.loads(arguments))
    window = torch.empty((1, int(spec.args.get("in_channels", 1)), *size), device="meta")
    try:
        with torch.device("meta"), torch.inference_mode(), meta_dispatch():
            network = build_network(spec)
            layer = _find_output_layer(network, window)
            if layer is None:
                return None
            features: int = network.get_submodule(layer).in_channels  # type: ignore[assignment]  # of a convolution
            replace_with_identity(network, layer)
            shape = tuple(network(window).shape)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AttributeError):
        return None  # the network can't run on the meta device
    return (layer, features) if shape == (1, features, *size) else None


def _find_output_layer(network: nn.Module, window: torch.Tensor) -> str | None:
    """Return the name of the detachable layer whose output is the network's output, or None."""
    outputs: dict[str, torch.Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out}))
        for name, module in network.named_modules()
        if _is_detachable(module)
    ]
    if not hooks:
        return None  # saves the forward pass
    result = network(window)
    for hook in hooks:
        hook.remove()
    # The very same tensor: an activation after the layer would make another
    return next((name for name, out in outputs.items() if out is result), None)


def _is_detachable(module: nn.Module) -> bool:
    """Return whether a layer is a convolution of single voxels, with more classes than features."""
    if not isinstance(module, nn.Conv2d | nn.Conv3d) or type(module) not in (nn.Conv2d, nn.Conv3d):
        return False
    return (
        {*module.kernel_size, *module.stride} == {1}
        and (module.padding in ("valid", "same") or not any(module.padding))
        and module.groups == 1
        and module.out_channels > module.in_channels
    )


def replace_with_identity(network: nn.Module, name: str) -> None:
    """Replace a layer by the identity."""
    parent, _, leaf = name.rpartition(".")
    setattr(network.get_submodule(parent), leaf, nn.Identity())


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
    values = (*network.parameters(), *network.buffers())  # whose memory is not copied
    memo = {id(value): value.detach().to("meta") for value in values}
    on_meta = copy.deepcopy(network, memo)
    layers = {name: module for name, module in on_meta.named_modules() if is_layer(module)}
    names: list[str] = []
    first, narrow, wide = set[str](), set[str](), set[str]()

    def record(name: str, value: Any, out: Any) -> None:
        """Note a layer's call, with its first input and its output."""
        names.append(name)
        if value is image:
            first.add(name)
        is_narrow = all(
            tensor.shape[2:] == image.shape[2:] and tensor.shape[1] <= _NARROW_CHANNELS
            for tensor in (value, out)
            if isinstance(tensor, torch.Tensor)
        )
        (narrow if is_narrow else wide).add(name)

    for name, layer in layers.items():
        layer.register_forward_hook(lambda _, inputs, out, name=name: record(name, inputs[0], out))
    try:
        with torch.inference_mode(), meta_dispatch():
            on_meta(image)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return ExactLayers()  # the whole network runs in bfloat16
    # After the last layer that mixes voxels, rounding is not averaged out any more
    mixing = [
        n
        for n, name in enumerate(names)
        if isinstance(layer := layers[name], CONVOLUTIONS) and any(k > 1 for k in layer.kernel_size)
    ]
    start = mixing[-1] if mixing else 0
    last = {*names[start:]} - {*names[:start]}
    # A layer that is called several times counts as narrow if all its calls are
    return ExactLayers(frozenset(first), frozenset(last | (narrow - first - wide)))


def is_layer(module: nn.Module) -> bool:
    """Return whether a module has no submodules."""
    return next(module.children(), None) is None


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
                module.register_forward_pre_hook(partial(_cast_inputs, torch.float32))
                continue
            plain = isinstance(module, nn.Conv2d | nn.Conv3d) and module.groups == 1
            if name in layers.first and plain:
                _split_operands(module)
            elif isinstance(module, nn.AvgPool3d):  # torch has none in bfloat16 on CPUs
                module.register_forward_pre_hook(partial(_cast_inputs, torch.float32))
                module.register_forward_hook(_output_to_bfloat16)
            elif is_layer(module) and len(list(module.parameters())):
                module.register_forward_pre_hook(partial(_cast_inputs, torch.bfloat16))
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


def _split_operands(layer: nn.Conv2d | nn.Conv3d) -> None:
    """Make a convolution also take the rounding errors of image and weights, as channels.

    The product of both errors is left out.
    """
    weight = layer.weight.data
    # (a + da)(w + dw) = aw + da w + a dw, and da dw is below bfloat16's digits
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


def _cast_inputs(dtype: torch.dtype, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a layer's inputs, floating-point tensors in another type."""
    return tuple(
        value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for value in inputs
    )


def _output_to_bfloat16(_: nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Return a layer's output as bfloat16."""
    return output.to(torch.bfloat16)


class PlaneNetwork(nn.Module):
    """A two-dimensional network that takes windows of one plane (MONAI SliceInferer).

    Parameters
    ----------
    network : Module
        Maps (N, channels, ., .) to scores (N, C, ., .).
    axis : 0, 1 or 2
        Axis across the planes, along which windows have 1 voxel.
    """

    def __init__(self, network: nn.Module, axis: int) -> None:
        super().__init__()
        self.network, self.dim = network, axis + 2

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the scores (N, C, x, y, z) of windows (N, channels, x, y, z)."""
        scores: torch.Tensor = self.network(windows.squeeze(self.dim))
        return scores.unsqueeze(self.dim)


def input_size(window: Window) -> tuple[int, ...]:
    """Return the size of the network's input: two numbers for a two-dimensional network.

    It is 64 voxels along each axis if the card gives no window size.
    """
    if window.size is None:
        return (_PROBE, _PROBE, _PROBE)
    return tuple(n for axis, n in enumerate(window.size) if axis != window.plane)
