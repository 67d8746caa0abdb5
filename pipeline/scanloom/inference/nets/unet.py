"""nnU-Net's U-Nets, in two or three dimensions.

State dicts have the names of `PlainConvUNet` and `ResidualEncoderUNet` of the package
dynamic_network_architectures. There, some modules are registered under several names: a block's
layers also as a sequence, and the encoder also as a part of the decoder. The modules here are
registered under the same names, so that state dicts load strictly. Dropout has no effect in
evaluation and is left out, but keeps its position in the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Final, Literal

import torch
from torch import nn

Sizes = Sequence[int]

Layer = Callable[..., nn.Module]
_CONVOLUTIONS: Final[Mapping[int, Layer]] = {2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED: Final[Mapping[int, Layer]] = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_POOLS: Final[Mapping[int, Layer]] = {2: nn.AvgPool2d, 3: nn.AvgPool3d}
_NORMS: Final[Mapping[tuple[str, int], Layer]] = {
    ("instance", 2): nn.InstanceNorm2d,
    ("instance", 3): nn.InstanceNorm3d,
    ("batch", 2): nn.BatchNorm2d,
    ("batch", 3): nn.BatchNorm3d,
}


@dataclass(frozen=True)
class Layers:
    """The kinds of layers of a network.

    Parameters
    ----------
    dimensions : 2 or 3
        Spatial dimensions.
    bias : bool
        Whether convolutions have a bias.
    norm : "instance", "batch" or None
        Normalisation after each convolution.
    norm_args : mapping
        Its arguments: `eps`, `affine`.
    slope : float or None
        Negative slope of the leaky ReLU; None for no activation.
    dropout : bool
        Whether dropout lies between convolution and normalisation.
    activation_first : bool
        Whether the activation comes before the normalisation.
    """

    dimensions: Literal[2, 3]
    bias: bool
    norm: Literal["instance", "batch"] | None
    norm_args: dict[str, Any]
    slope: float | None
    dropout: bool = False
    activation_first: bool = False

    def convolution(self, inputs: int, outputs: int, kernel: Sizes, stride: Sizes) -> nn.Module:
        """Return a convolution that keeps the size, up to its stride."""
        padding = tuple((size - 1) // 2 for size in kernel)
        layer = _CONVOLUTIONS[self.dimensions]
        return layer(inputs, outputs, tuple(kernel), tuple(stride), padding, bias=self.bias)

    def normalization(self, channels: int) -> nn.Module | None:
        """Return the normalisation of a number of channels."""
        if self.norm is None:
            return None
        return _NORMS[self.norm, self.dimensions](channels, **self.norm_args)

    def activation(self) -> nn.Module | None:
        """Return the activation, which works in place."""
        return None if self.slope is None else nn.LeakyReLU(self.slope, inplace=True)


class Block(nn.Module):
    """Convolution, normalisation and activation."""

    def __init__(
        self, layers: Layers, inputs: int, outputs: int, kernel: Sizes, stride: Sizes
    ) -> None:
        super().__init__()
        self.conv = layers.convolution(inputs, outputs, kernel, stride)
        # Registered by name and in the sequence: state dicts hold both names
        modules = [self.conv]
        if layers.dropout:
            self.dropout = nn.Identity()
            modules.append(self.dropout)
        norm, activation = layers.normalization(outputs), layers.activation()
        if norm is not None:
            self.norm = norm
            modules.append(norm)
        if activation is not None:
            self.nonlin = activation
            modules.append(activation)
        # `nonlin_first` of dynamic_network_architectures
        if layers.activation_first and norm is not None and activation is not None:
            modules[-2:] = activation, norm
        self.all_modules = nn.Sequential(*modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of `x`."""
        features: torch.Tensor = self.all_modules(x)
        return features


class ResidualBlock(nn.Module):
    """Two blocks and a shortcut (ResNet-D: mean pooling, then a 1 x 1 convolution)."""

    def __init__(
        self, layers: Layers, inputs: int, outputs: int, kernel: Sizes, stride: Sizes
    ) -> None:
        super().__init__()
        ones = (1,) * layers.dimensions
        # The activation follows the sum with the shortcut
        linear = replace(layers, slope=None, dropout=False)
        self.conv1 = Block(layers, inputs, outputs, kernel, stride)
        self.conv2 = Block(linear, outputs, outputs, kernel, ones)
        self.nonlin2 = layers.activation() or nn.Identity()
        shortcut: list[nn.Module] = []
        if any(n != 1 for n in stride):
            shortcut.append(_POOLS[layers.dimensions](tuple(stride), tuple(stride)))
        if inputs != outputs:
            shortcut.append(Block(replace(linear, bias=False), inputs, outputs, ones, ones))
        self.skip = nn.Sequential(*shortcut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of `x`."""
        features = self.conv2(self.conv1(x))
        features += self.skip(x)
        out: torch.Tensor = self.nonlin2(features)
        return out


class Blocks(nn.Module):
    """Blocks in sequence, of which only the first may have a stride."""

    block: ClassVar[type[Block | ResidualBlock]] = Block
    sequence: ClassVar[str] = "convs"
    """Name of the sequence in nnU-Net's state dicts."""

    def __init__(
        self, layers: Layers, count: int, inputs: int, outputs: int, kernel: Sizes, stride: Sizes
    ) -> None:
        super().__init__()
        ones = (1,) * layers.dimensions
        first = self.block(layers, inputs, outputs, kernel, stride)
        following = (self.block(layers, outputs, outputs, kernel, ones) for _ in range(count - 1))
        self.add_module(self.sequence, nn.Sequential(first, *following))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of `x`."""
        features: torch.Tensor = self.get_submodule(self.sequence)(x)
        return features


class ResidualBlocks(Blocks):
    """Residual blocks in sequence."""

    block = ResidualBlock
    sequence = "blocks"


class Encoder(nn.Module):
    """Stages of decreasing resolution, after an optional stem."""

    def __init__(self, stem: nn.Module | None, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stem = stem
        self.stages = nn.Sequential(*stages)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the features of each stage."""
        features = []
        if self.stem is not None:
            x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return features


class Decoder(nn.Module):
    """Stages of increasing resolution, each joined with the encoder's stage of that resolution.

    Each stage has a layer that gives scores, for training; only the last one is used.
    """

    def __init__(self, layers: Layers, encoder: Encoder, plan: UNetStages, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        ones = (1,) * layers.dimensions
        transposed = _TRANSPOSED[layers.dimensions]
        stages, upsamplings, scores = [], [], []
        # From the coarsest stage, as nnU-Net numbers the decoder's stages
        levels = list(zip(plan.features, plan.kernels, plan.strides, strict=True))[::-1]
        for (below, upper), count in zip(pairwise(levels), plan.decoder, strict=True):
            channels, kernel, _ = upper
            stride = tuple(below[2])
            upsamplings.append(transposed(below[0], channels, stride, stride, bias=layers.bias))
            stages.append(Blocks(layers, count, 2 * channels, channels, kernel, ones))
            scores.append(_CONVOLUTIONS[layers.dimensions](channels, classes, 1))
        self.stages = nn.ModuleList(stages)
        self.transpconvs = nn.ModuleList(upsamplings)
        self.seg_layers = nn.ModuleList(scores)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        """Return the scores of the features of each stage of the encoder."""
        x = features.pop()
        for upsample, stage in zip(self.transpconvs, self.stages, strict=True):
            x = stage(torch.cat((upsample(x), features.pop()), 1))
        scores: torch.Tensor = self.seg_layers[-1](x)
        return scores


@dataclass(frozen=True)
class UNetStages:
    """Stages of a U-Net, from the finest: channels, kernels, strides, and numbers of blocks.

    `decoder` has one number less, and begins at the coarsest stage.
    """

    features: Sizes
    kernels: Sequence[Sizes]
    strides: Sequence[Sizes]
    encoder: Sizes
    decoder: Sizes

    def __post_init__(self) -> None:
        lengths = {len(self.features), len(self.kernels), len(self.strides), len(self.encoder)}
        if lengths != {len(self.decoder) + 1} or len(self.features) < 2:
            raise ValueError("each stage must have channels, a kernel, a stride and blocks")
        if min((*self.features, *self.encoder, *self.decoder)) < 1:
            raise ValueError("each stage must have channels and blocks")

    @property
    def stages(self) -> list[tuple[int, int, Sizes, Sizes]]:
        """Number of blocks, channels, kernel and stride of each stage of the encoder."""
        return list(zip(self.encoder, self.features, self.kernels, self.strides, strict=True))


class PlainConvUNet(nn.Module):
    """U-Net of convolutions.

    Parameters
    ----------
    in_channels, out_channels : int
        Input channels and classes.
    plan : mapping
        Fields of `UNetStages`.
    layers : mapping
        Fields of `Layers`, without `dimensions`.
    spatial_dims : 2 or 3
        Spatial dimensions.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        out_channels: int,
        plan: dict[str, Any],
        layers: dict[str, Any],
        spatial_dims: Literal[2, 3] = 3,
    ) -> None:
        super().__init__()
        stages, kinds = UNetStages(**plan), Layers(dimensions=spatial_dims, **layers)
        inputs = [in_channels, *stages.features]
        encoder = [
            nn.Sequential(Blocks(kinds, count, before, after, kernel, stride))
            for before, (count, after, kernel, stride) in zip(inputs, stages.stages, strict=False)
        ]
        self.encoder = Encoder(None, encoder)
        self.decoder = Decoder(kinds, self.encoder, stages, out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores (N, C, ...) of `x`."""
        scores: torch.Tensor = self.decoder(self.encoder(x))
        return scores


class ResidualEncoderUNet(nn.Module):
    """U-Net with residual blocks in its encoder; arguments as `PlainConvUNet`.

    `stem` is the number of channels of the first block; None for those of the first stage.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        out_channels: int,
        plan: dict[str, Any],
        layers: dict[str, Any],
        spatial_dims: Literal[2, 3] = 3,
        stem: int | None = None,
    ) -> None:
        super().__init__()
        stages, kinds = UNetStages(**plan), Layers(dimensions=spatial_dims, **layers)
        width, ones = stem or stages.features[0], (1,) * spatial_dims
        inputs = [width, *stages.features]
        encoder = [
            ResidualBlocks(kinds, count, before, after, kernel, stride)
            for before, (count, after, kernel, stride) in zip(inputs, stages.stages, strict=False)
        ]
        first = Blocks(kinds, 1, in_channels, width, stages.kernels[0], ones)
        self.encoder = Encoder(first, encoder)
        self.decoder = Decoder(kinds, self.encoder, stages, out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores (N, C, ...) of `x`."""
        scores: torch.Tensor = self.decoder(self.encoder(x))
        return scores
