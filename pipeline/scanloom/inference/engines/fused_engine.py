"""torch's own network, with instance norms and the activations after them in two Triton kernels.

torch computes an instance norm in half precision by one block of threads a channel, which leaves
most of a GPU idle. The bias of a convolution right before an instance norm is left out: the norm
subtracts it again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import ClassVar, TypeGuard

import torch
from torch import nn

from scanloom.inference.device import is_out_of_memory
from scanloom.inference.engines.protocol import EngineUnfitError, NetworkRequest, Run
from scanloom.inference.network.layers import CONVOLUTIONS

KERNELS = 1
"""Version of the kernels and of what is fused: trials of another one do not count."""
BLOCK = 4096
"""Voxels that a program handles at once."""
MAX_PARTS = 128
"""Parts of a row at most; each is a program's. A power of two."""
_PROGRAMS = 2048
"""Programs that keep a device busy: fewer rows are cut into parts."""
_DYNUNET = "monai.networks.blocks.dynunet_block"
"""Module of MONAI's blocks that call their layers by name."""

_NORMS = (nn.InstanceNorm2d, nn.InstanceNorm3d)
_DROPOUTS = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Layers without effect in evaluation mode."""

LayerPosition = tuple[nn.Sequential, int, nn.Module]
"""A layer: the sequence that holds it, its index there, and the layer."""


def normalise(
    values: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    slope: float,
    out: torch.Tensor,
) -> None:
    """Normalise channels of windows, and multiply negative values by `slope`.

    Parameters
    ----------
    values, out : (N, C, ...) tensors
        Contiguous, of the same shape, type and device; they may be the same tensor.
    weight, bias : (C,) tensors
        Scale and shift of normalised channels.

    Raises
    ------
    ValueError
        If shapes don't match, or values are not contiguous.
    """
    channels = values.shape[1]
    # Kernels do not check bounds
    if values.shape != out.shape or not (values.is_contiguous() and out.is_contiguous()):
        raise ValueError("values and out must be contiguous and of the same shape")
    if weight.shape != (channels,) or bias.shape != (channels,):
        raise ValueError(f"weight and bias must be ({channels},)")
    if values.numel() == 0:
        return
    from scanloom.inference.engines import norm_kernels as kernels

    rows, size = len(values) * channels, values[0, 0].numel()
    most = max(1, min(MAX_PARTS, _PROGRAMS // rows))
    blocks = 1 << (-(-size // (most * BLOCK)) - 1).bit_length()
    parts = -(-size // (blocks * BLOCK))
    moments = torch.empty((2, rows, parts), dtype=torch.float32, device=values.device)
    constants = {"BLOCKS": blocks, "BLOCK": BLOCK, "num_warps": 8}
    with torch.cuda.device(values.get_device()):  # Triton launches on the current one
        kernels.take_moments[rows, parts](values, moments, size, parts, **constants)
        kernels.normalise[rows, parts](
            values,
            out,
            moments,
            weight,
            bias,
            size,
            parts,
            channels,
            slope,
            eps,
            PARTS=MAX_PARTS,
            **constants,
        )


class FusedNorm(nn.Module):
    """An instance norm and the activation after it.

    Parameters
    ----------
    norm : InstanceNorm2d or InstanceNorm3d
        Without running statistics.
    slope : float
        Slope of the activation for negative values; 1 without activation.
    in_place : bool
        Whether the input is overwritten.
    """

    def __init__(
        self, norm: nn.InstanceNorm2d | nn.InstanceNorm3d, slope: float, *, in_place: bool
    ) -> None:
        super().__init__()
        self._dim = 5 if isinstance(norm, nn.InstanceNorm3d) else 4
        self.eps, self.slope, self.in_place = norm.eps, slope, in_place
        self.weight, self.bias = norm.weight, norm.bias
        if not norm.affine:
            self.weight = nn.Parameter(torch.ones(norm.num_features))
            self.bias = nn.Parameter(torch.zeros(norm.num_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of `x` (N, C, ...)."""
        if x.ndim != self._dim:
            raise ValueError(f"features must have {self._dim} dimensions, got {x.ndim}")
        values = x.contiguous()
        out = values if self.in_place or values is not x else torch.empty_like(values)
        normalise(values, self.weight, self.bias, self.eps, self.slope, out)
        return out


def fuse(network: nn.Module) -> None:
    """Replace all instance norms of a network in evaluation mode, with the activations after them.

    The network is changed in place. A norm right after a convolution overwrites its output, and the
    bias of that convolution is left out.
    """
    for module in list(network.modules()):
        if _is_sequence(module):
            _fuse_sequence(module)
        elif type(module).__module__ == _DYNUNET:
            _fuse_block(module)
    for name, norm in list(network.named_modules(remove_duplicate=False)):
        if _is_norm(norm):
            parent, _, leaf = name.rpartition(".")
            fused = FusedNorm(norm, 1.0, in_place=False)
            setattr(network.get_submodule(parent), leaf, fused)


def _fuse_sequence(sequence: nn.Sequential) -> None:
    """Fuse the instance norms of a sequence."""
    end: LayerPosition = (sequence, 0, nn.Identity())
    layers = [end, *_layers(sequence), end]
    for (_, _, before), (parent, index, norm), (holder, next_index, after) in zip(
        layers, layers[1:], layers[2:], strict=False
    ):
        if not _is_norm(norm):
            continue
        convolved = isinstance(before, CONVOLUTIONS)
        if convolved:
            before.register_parameter("bias", None)
        slope = _slope(after)
        if slope is not None:
            holder[next_index] = nn.Identity()
        parent[index] = FusedNorm(norm, 1.0 if slope is None else slope, in_place=convolved)


def _layers(sequence: nn.Sequential) -> Iterator[LayerPosition]:
    """Yield the layers of a sequence, and of the sequences in it, that have an effect."""
    for index, layer in enumerate(sequence):
        if _is_sequence(layer):
            yield from _layers(layer)
        elif not isinstance(layer, _DROPOUTS):
            yield sequence, index, layer


def _fuse_block(block: nn.Module) -> None:
    """Fuse the instance norms of a block of DynUNet, each of which follows a convolution."""
    names = [name for name, child in block.named_children() if name.startswith("norm")]
    norms = [getattr(block, name) for name in names]
    if not norms or not all(map(_is_norm, norms)):
        return
    # A residual block's activation follows a sum, too
    slope = _slope(block.lrelu) if type(block).__name__ == "UnetBasicBlock" else None
    if slope is not None:
        block.lrelu = nn.Identity()
    for name, norm in zip(names, norms, strict=True):
        setattr(block, name, FusedNorm(norm, 1.0 if slope is None else slope, in_place=True))


def _is_sequence(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Return whether a module calls its children one after another, and nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _is_norm(module: nn.Module) -> TypeGuard[nn.InstanceNorm2d | nn.InstanceNorm3d]:
    """Return whether a module is an instance norm by the moments of its input."""
    return isinstance(module, _NORMS) and module.running_mean is None


def _slope(activation: object) -> float | None:
    """Return the slope of an activation for negative values; None for any other layer."""
    if type(activation) is nn.LeakyReLU:
        return activation.negative_slope
    return 0.0 if type(activation) is nn.ReLU else None


class Fused:
    """Instance norms and activations in Triton kernels."""

    name: ClassVar[str] = "fused"
    package: ClassVar[str] = "triton"
    automatic: ClassVar[bool] = True

    def version(self) -> str | None:
        """Return the versions of torch and the kernels; None if Triton is not installed."""
        # torch's packages for CPUs come without it
        if importlib.util.find_spec("triton") is None:
            return None
        return f"{torch.__version__}, kernels {KERNELS}"

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether the device is a CUDA device, and the type not bfloat16."""
        return device.type == "cuda" and dtype is not torch.bfloat16

    def prepare(self, request: NetworkRequest) -> Run:
        """Fuse a copy of the network, and compile the kernels by a pass over zeros."""
        network = request.torch_network()
        fuse(network)
        if not any(isinstance(module, FusedNorm) for module in network.modules()):
            raise EngineUnfitError("it has no instance norm that can be fused")
        network.to(request.device)
        try:
            with torch.inference_mode():
                windows = request.zeros()
                while len(windows):  # as many windows as the last batch of a scan may have
                    network(windows)
                    windows = windows[: len(windows) // 2]
        except Exception as exc:  # a compiler fails in its own ways
            if is_out_of_memory(exc):
                raise
            raise EngineUnfitError(f"{type(exc).__name__} in the fused network") from exc
        return network


ENGINE = Fused()
