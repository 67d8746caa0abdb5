"""MeshNet (Fedorov et al., doi:10.1109/IJCNN.2017.7966333), run layer by layer in place.

A MeshNet does not reduce the resolution: all layers have as many voxels as the image. A layer of 30
channels of 256 x 256 x 256 voxels takes 2 GB, and windows are no way out, since an instance norm
measures the whole image. So a layer is computed slab by slab, and overwrites its input; the planes
that the next slab still needs are kept apart. The result is that of a forward pass of whole layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, cast

import torch
from torch import nn
from torch.nn import functional

SLAB_VALUES: Final = 1 << 24
"""Values of a slab of a layer, all channels: 64 MiB in float32. Smaller slabs take longer."""
_EPSILON: Final = 1e-5
_ACTIVATIONS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "elu": lambda values: functional.elu(values, inplace=True),
    "relu": lambda values: functional.relu(values, inplace=True),
    "gelu": lambda values: functional.gelu(values, approximate="tanh"),
}


class MeshNet(nn.Module):
    """Dilated convolutions of one image resolution, then a convolution of single voxels.

    Parameters
    ----------
    in_channels, channels, classes : int
        Channels of the image, of the layers, and number of scores.
    dilations : sequence of int
        Dilation of each layer's 3 x 3 x 3 kernel.
    activation : "elu", "relu" or "gelu"
        "gelu" is the approximation by tanh.
    norm : "instance" or None
        Norm between convolution and activation.
    affine : bool
        Whether the norm has weights.
    bias, classifier_bias : bool
        Whether the layers, and the final convolution, have a bias.

    Attributes
    ----------
    slab_values : int
        Values of a slab of a layer.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        classes: int,
        dilations: Sequence[int],
        activation: Literal["elu", "relu", "gelu"] = "elu",
        norm: Literal["instance"] | None = None,
        affine: bool = False,
        bias: bool = True,
        classifier_bias: bool = True,
    ) -> None:
        super().__init__()
        self._activation = _ACTIVATIONS[activation]
        self._has_norm, self._narrow = norm is not None, classes <= channels
        self.slab_values = SLAB_VALUES
        self.layers = nn.ModuleList(
            nn.Conv3d(
                channels if n else in_channels,
                channels,
                3,
                padding=(0, dilation, dilation),  # along x, planes of other slabs take its place
                dilation=dilation,
                bias=bias,
            )
            for n, dilation in enumerate(dilations)
        )
        self.norms = nn.ModuleList(
            nn.InstanceNorm3d(channels, _EPSILON, affine=True) for _ in dilations if norm and affine
        )
        self.classifier = nn.Conv3d(channels, classes, 1, bias=classifier_bias)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the scores (N, classes, x, y, z) of images (N, channels, x, y, z)."""
        values = image
        for n, layer in enumerate(self.layers):
            values = self._convolve(values, cast(nn.Conv3d, layer))
            if self._has_norm:
                self._normalize(values, n)
        # Scores fit into the memory of the last layer
        if self._narrow:
            return self._classify(values)
        scores: torch.Tensor = self.classifier(values)
        return scores

    def _convolve(self, values: torch.Tensor, layer: nn.Conv3d) -> torch.Tensor:
        """Return a layer's output, in the memory of its input if it has as many channels."""
        count, channels, planes = *values.shape[:2], values.shape[2]
        halo, step = layer.dilation[0], self._planes_at_once(values, layer.out_channels)
        out: torch.Tensor | None = values if channels == layer.out_channels else None
        before = values.new_zeros((count, channels, halo, *values.shape[3:]))
        for first in range(0, planes, step):
            last = min(first + step, planes)
            inside = values[:, :, first : min(last + halo, planes)]
            missing = last + halo - planes
            after = [torch.zeros_like(before[:, :, :missing])] if missing > 0 else []
            block = torch.cat([before, inside, *after], dim=2)
            # Kept apart, since the slab overwrites the planes that the next one still reads
            before = block[:, :, last - first : last - first + halo].clone()
            result = layer(block)
            del block, inside, after
            if not self._has_norm:
                result = self._activation(result)
            if out is None:
                out = result.new_empty((count, result.shape[1], *values.shape[2:]))
            out[:, :, first:last] = result
            del result
        return values if out is None else out

    def _normalize(self, values: torch.Tensor, layer: int) -> None:
        """Apply norm and activation in place, channel by channel."""
        norm = cast(nn.InstanceNorm3d, self.norms[layer]) if len(self.norms) else None
        # One channel at a time: a copy of all would take as much memory as the layer
        for n in range(values.shape[1]):
            channel = values[:, n : n + 1]
            if norm is None:
                normal = functional.instance_norm(channel, eps=_EPSILON)
            else:
                weight, bias = norm.weight[n : n + 1], norm.bias[n : n + 1]
                normal = functional.instance_norm(channel, weight=weight, bias=bias, eps=_EPSILON)
            channel.copy_(self._activation(normal))

    def _classify(self, values: torch.Tensor) -> torch.Tensor:
        """Return the scores, in the memory of the last layer."""
        step = self._planes_at_once(values, values.shape[1])
        for first in range(0, values.shape[2], step):
            scores = self.classifier(values[:, :, first : first + step])
            values[:, : scores.shape[1], first : first + step] = scores
        return values[:, : scores.shape[1]]

    def _planes_at_once(self, values: torch.Tensor, channels: int) -> int:
        """Return the number of planes of a slab with so many channels."""
        return max(1, self.slab_values // max(1, channels * values[:, 0, 0].numel()))
