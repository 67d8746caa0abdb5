"""A network's last layer taken off: it may come after windows are summed, and not before.

Where the last layer is a convolution of a single voxel, a voxel's scores are a matrix times its
features. A window weighs all channels alike, so the mean of the scores is the matrix times the
mean of the features, but for rounding. With 118 classes and 16 features the sums then take a
seventh of the memory, as does what the network gives, and the matrix is applied once a voxel, not
once for each window that covers it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn

from scanloom.cards.card import NetworkSpec
from scanloom.inference.geometry import Shape
from scanloom.inference.network.architectures import build_network
from scanloom.inference.network.meta_shapes import meta_dispatch

PROBE = (64, 64, 64)
"""Voxels of the window by which a network's way is followed where the card names none."""


@dataclass(frozen=True, eq=False)
class FinalLayer:
    """The last layer of a network.

    Parameters
    ----------
    weight : (C, F) float32 tensor
        Of each class for each feature.
    bias : (C, 1) float32 tensor
        Of each class.
    """

    weight: torch.Tensor
    bias: torch.Tensor

    def to(self, device: torch.device) -> FinalLayer:
        """Return the same on a device."""
        return replace(self, weight=self.weight.to(device), bias=self.bias.to(device))

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Return the scores (N, C, ., .) of features (N, F, ., .), both float32."""
        count, _, *plane = features.shape
        scores = features.new_empty((count, len(self.weight), *plane))
        for given, taken in zip(features, scores, strict=True):
            flat = given.reshape(len(given), -1)
            torch.addmm(self.bias, self.weight, flat, out=taken.view(len(taken), -1))
        return scores


def detach_final_layer(
    network: nn.Module, spec: NetworkSpec, size: Shape | None = None
) -> FinalLayer | None:
    """Take the last layer off a network where that makes what it gives smaller.

    Parameters
    ----------
    network : Module
        With its weights, in float32. Changed: it gives features afterwards. Left as it is where
        None is returned.
    spec : NetworkSpec
        Of which it was built; its way is followed on the meta device, which knows shapes only.
    size : (x, y, z), optional
        Of a window.

    Returns
    -------
    Head or None
        None where the last layer is another one, or has no more classes than features.
    """
    last = last_layer(spec, size or PROBE)
    if last is None:
        return None
    name, _ = last
    numbers = network.get_submodule(name).state_dict()
    weight = numbers["weight"].flatten(1).clone()
    bias = numbers.get("bias", weight.new_zeros(len(weight))).clone()
    replace_with_identity(network, name)
    return FinalLayer(weight, bias[:, None])


def last_layer(spec: NetworkSpec, size: Shape) -> tuple[str, int] | None:
    """Return name and features of the layer that `detach_final_layer` detaches, or None."""
    return _last_layer(spec.name, json.dumps(dict(spec.args), sort_keys=True), size)


@lru_cache(maxsize=64)
def _last_layer(name: str, arguments: str, size: Shape) -> tuple[str, int] | None:
    """Find the layer, once a network without it gave its features."""
    spec = NetworkSpec(name, json.loads(arguments))
    window = torch.empty((1, int(spec.args.get("in_channels", 1)), *size), device="meta")
    try:
        with torch.device("meta"), torch.inference_mode(), meta_dispatch():
            network = build_network(spec)
            found = _gives_result(network, window)
            if found is None:
                return None
            features: int = network.get_submodule(found).in_channels  # type: ignore[assignment]
            replace_with_identity(network, found)
            shape = tuple(network(window).shape)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AttributeError):
        return None  # it can't run without numbers
    return (found, features) if shape == (1, features, *size) else None


def _gives_result(network: nn.Module, window: torch.Tensor) -> str | None:
    """Return which layer that can be taken off gave the very tensor that the network gave."""
    given: dict[str, torch.Tensor] = {}
    watched = [
        module.register_forward_hook(lambda _, __, out, name=name: given.update({name: out}))
        for name, module in network.named_modules()
        if _is_matrix(module)
    ]
    if not watched:
        return None  # and the network need not be followed
    result = network(window)
    for hook in watched:
        hook.remove()
    return next((name for name, out in given.items() if out is result), None)


def _is_matrix(module: nn.Module) -> bool:
    """Whether a layer is a matrix at each voxel, with more classes than features."""
    return (
        type(module) is nn.Conv3d
        and module.kernel_size == module.stride == (1, 1, 1)
        and module.padding in ((0, 0, 0), "valid", "same")
        and module.groups == 1
        and module.out_channels > module.in_channels
    )


def replace_with_identity(network: nn.Module, name: str) -> None:
    """Put a layer that changes nothing in the place of another."""
    parent, _, leaf = name.rpartition(".")
    setattr(network.get_submodule(parent), leaf, nn.Identity())
