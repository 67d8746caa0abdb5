"""Detaches a network's final layer, which is then applied after windows are summed.

If the final layer is a convolution of single voxels, a voxel's scores are a matrix times its
features. A window has one weight for all channels, so the mean of the scores is the matrix times
the mean of the features, up to rounding. With 118 classes and 16 features, sums and network output
then take a seventh of the memory. The matrix is applied once per voxel, not once per window that
covers it. Scores that are summed in half precision are rounded themselves: then the layer is not
detached.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn

from scanloom.cards.card import NetworkSpec
from scanloom.inference.network.architectures import build_network
from scanloom.inference.network.meta_shapes import meta_dispatch


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
        """Return the layer on a device."""
        return replace(self, weight=self.weight.to(device), bias=self.bias.to(device))

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Return the scores (N, C, ., .) of features (N, F, ., .), both float32."""
        count, _, *plane = features.shape
        scores = features.new_empty((count, len(self.weight), *plane))
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
            features: int = network.get_submodule(layer).in_channels  # type: ignore[assignment]
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
