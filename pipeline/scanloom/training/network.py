"""A training's network: its first weights, and faster gradients on processors without AVX-512."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from torch import Tensor, nn

_TRIPLE = ([1, 1, 1], [1, 1, 1], [1, 1, 1])
_PAIR = ([1, 1], [1, 1], [1, 1])
"""Stride, padding and dilation."""


def prepare_network(
    network: nn.Module, device: torch.device, start: str | None = None
) -> nn.Module:
    """Return the network of a training on its device.

    Parameters
    ----------
    network : Module
        The network with random weights.
    device : torch.device
        Its device. On a CPU without AVX-512 its convolutions become `SlicedConv3d`.
    start : str or None
        File of weights to start from, as `load_start`; so are errors.
    """
    if start is not None:
        load_start(network, Path(start))
    if device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2":
        for module in network.modules():
            if isinstance(module, nn.Conv3d) and SlicedConv3d.fits(module):
                module.__class__ = SlicedConv3d  # same parameters, same state
    return network.to(device)


def load_start(network: nn.Module, path: Path) -> None:
    """Give a network the weights of a file, in any precision.

    Layers that are stored once and listed twice, as DynUNet's, may be missing once.

    Raises
    ------
    ValueError
        If the file holds no weights, or a weight is missing, unknown or of another shape.
    """
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
        result = network.load_state_dict(weights, strict=False)
    except (RuntimeError, UnpicklingError, EOFError, TypeError, AttributeError) as exc:
        raise ValueError("the weights to start from are damaged or of another network") from exc
    shared = {id(p) for name, p in network.named_parameters() if name in weights}
    listed = dict(network.named_parameters(remove_duplicate=False))
    missing = [name for name in result.missing_keys if id(listed.get(name)) not in shared]
    if missing or result.unexpected_keys:
        raise ValueError("the weights to start from are damaged or of another network")


class SlicedConv3d(nn.Conv3d):
    """A 3 x 3 x 3 convolution whose weights get their gradient slice by slice.

    For 3D, oneDNN has no other kernel for it without AVX-512 than a product of matrices with few
    rows, three times as slow as the other two passes. Its 2D kernel takes half as long: a slice is
    a sample, and the result is the sum of the same products in another order.
    """

    @staticmethod
    def fits(module: nn.Conv3d) -> bool:
        """Return whether a convolution is of the kind that this class computes."""
        return (
            module.kernel_size == (3, 3, 3)
            and module.stride == module.padding == module.dilation == (1, 1, 1)
            and module.groups == 1
            and module.bias is None
            and module.padding_mode == "zeros"
            and module.in_channels >= 8  # with fewer, 3D is as fast
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the convolution of a batch (n, channel, i, j, k), float32 or under autocast."""
        if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return super().forward(inputs)
        return cast(Tensor, _Sliced.apply(inputs, self.weight))  # type: ignore[no-untyped-call]  # torch


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return nn.functional.conv3d(inputs, weight, padding=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        (gradient,) = gradients
        back = torch.ops.aten.convolution_backward
        to_inputs = to_weight = None
        if ctx.needs_input_grad[0]:
            kinds = [True, False, False]
            to_inputs = back(gradient, inputs, weight, None, *_TRIPLE, False, [0, 0, 0], 1, kinds)[
                0
            ]
        if ctx.needs_input_grad[1]:
            # (n, channel, i, j, k) as n x i samples; each plane of the kernel sees another slice
            length = inputs.shape[2]
            planes = []
            for plane in range(3):
                low, high = max(0, 1 - plane), min(length, length + 1 - plane)
                seen = inputs[:, :, low + plane - 1 : high + plane - 1]
                of = gradient[:, :, low:high]
                slices = [each.transpose(1, 2).flatten(0, 1) for each in (of, seen)]
                kinds = [False, True, False]
                part = back(*slices, weight[:, :, plane], None, *_PAIR, False, [0, 0], 1, kinds)[1]
                planes.append(part)
            to_weight = torch.stack(planes, 2)
        return to_inputs, to_weight
