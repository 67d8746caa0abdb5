"""UNesT, a U-Net whose encoder is a nested transformer (arXiv 2105.12723).

Names of modules are those of the Model Zoo's bundles, so that their state dicts load.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from monai.networks.blocks.convolutions import Convolution
from monai.networks.blocks.dynunet_block import UnetOutBlock, UnetResBlock, get_conv_layer
from torch import nn

_IMAGE_VOXELS = 96
"""Edge of the windows: position embeddings have a fixed number of blocks."""
_EPSILON = 1e-6
"""Smallest variance of the layer norms."""
_norm = partial(nn.LayerNorm, eps=_EPSILON)


class UNesT(nn.Module):
    """UNesT of the Model Zoo's bundles, for windows of 96 voxels.

    Parameters
    ----------
    out_channels : int
        Number of classes.
    in_channels : 1
        The network takes one channel.
    patch_size : int
        Edge of the patches of which the transformer sees one token each.
    depths, embed_dim, num_heads : sequence of int
        Layers, channels and heads of each level of the transformer.
    feature_size : int
        Channels of the decoder at full resolution, halved.
    """

    def __init__(
        self,
        out_channels: int,
        in_channels: int = 1,
        *,
        patch_size: int = 4,
        depths: Sequence[int] = (2, 2, 8),
        embed_dim: Sequence[int] = (128, 256, 512),
        num_heads: Sequence[int] = (4, 8, 16),
        feature_size: int = 16,
    ) -> None:
        super().__init__()
        if in_channels != 1:
            raise ValueError(f"UNesT takes one channel, got {in_channels}")
        size, first, second, last = feature_size, *embed_dim
        self.nestViT = _NestedTransformer(patch_size, embed_dim, depths, num_heads)
        self.encoder1 = _Encoder(1, 2 * size)
        self.encoder2 = _Upsampling(first, 4 * size)
        self.encoder3 = _Encoder(first, 8 * size)
        self.encoder4 = _Encoder(second, 16 * size)
        self.decoder5 = _Decoder(2 * last, 32 * size)
        self.decoder4 = _Decoder(last, 16 * size)
        self.decoder3 = _Decoder(16 * size, 8 * size)
        self.decoder2 = _Decoder(8 * size, 4 * size)
        self.decoder1 = _Decoder(4 * size, 2 * size)
        self.encoder10 = Convolution(
            3, 32 * size, 64 * size, strides=2, adn_ordering="ADN", dropout=0.0
        )
        self.out = UnetOutBlock(3, 2 * size, out_channels)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the scores (N, classes, 96, 96, 96) of windows (N, 1, 96, 96, 96)."""
        patches, first, second, third, deepest = self.nestViT(windows)
        features = self.encoder10(deepest)
        features = self.decoder5(features, third)
        features = self.decoder4(features, self.encoder4(second))
        features = self.decoder3(features, self.encoder3(first))
        features = self.decoder2(features, self.encoder2(patches))
        features = self.decoder1(features, self.encoder1(windows))
        scores: torch.Tensor = self.out(features)
        return scores


class _Encoder(nn.Module):
    """Residual block on a skip connection."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = _residual(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y


class _Upsampling(nn.Module):
    """Two transposed convolutions, of which the first doubles the resolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.transp_conv_init = _transposed(inputs, outputs, 2)
        self.blocks = nn.ModuleList([_transposed(outputs, outputs, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.blocks[0](self.transp_conv_init(x))
        return y


class _Decoder(nn.Module):
    """Doubles the resolution and merges a skip connection."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.transp_conv = _transposed(inputs, outputs, 2)
        self.conv_block = _residual(2 * outputs, outputs)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv_block(torch.cat((self.transp_conv(x), skip), dim=1))
        return y


def _residual(inputs: int, outputs: int) -> nn.Module:
    block: nn.Module = UnetResBlock(
        3, inputs, outputs, kernel_size=3, stride=1, norm_name="instance"
    )
    return block


def _transposed(inputs: int, outputs: int, size: int) -> nn.Module:
    layer: nn.Module = get_conv_layer(
        3, inputs, outputs, kernel_size=size, stride=size, conv_only=True, is_transposed=True
    )
    return layer


class _NestedTransformer(nn.Module):
    """Transformer of three levels: attention within blocks, which double from level to level."""

    def __init__(
        self,
        patch_size: int,
        embed_dim: Sequence[int],
        depths: Sequence[int],
        num_heads: Sequence[int],
    ) -> None:
        super().__init__()
        levels = len(embed_dim)
        # Each level has half as many blocks along an edge
        if _IMAGE_VOXELS % (patch_size << (levels - 1)):
            raise ValueError(f"patches of {patch_size} voxels don't divide the blocks")
        edge = _IMAGE_VOXELS // patch_size >> (levels - 1)  # of a block, in tokens
        self.patch_embed = _PatchEmbedding(patch_size, embed_dim[0])
        self.levels = nn.ModuleList(
            _Level(
                (2 ** (levels - 1 - n), edge),
                (embed_dim[n - 1] if n else None, embed_dim[n]),
                depths[n],
                num_heads[n],
            )
            for n in range(levels)
        )
        self.norm = _norm(embed_dim[-1])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the embedded patches, the result of each level, and the last one normalised."""
        features = [self.patch_embed(x)]
        for level in self.levels:
            features.append(level(features[-1]))
        return [*features, _normalise(self.norm, features[-1])]


class _PatchEmbedding(nn.Module):
    """Token of each patch."""

    def __init__(self, size: int, outputs: int) -> None:
        super().__init__()
        self.proj = nn.Conv3d(1, outputs, kernel_size=size, stride=size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.proj(x)
        return y


class _Level(nn.Module):
    """Level of the transformer.

    Parameters
    ----------
    blocks : (int, int)
        Number of blocks along an edge, and edge of a block in tokens.
    channels : (int or None, int)
        Channels of the level before, if there is one, and of this level.
    depth, heads : int
        Number of layers, and of their heads.
    """

    def __init__(
        self, blocks: tuple[int, int], channels: tuple[int | None, int], depth: int, heads: int
    ) -> None:
        super().__init__()
        self._count, self._edge = blocks
        before, width = channels
        self.pos_embed = nn.Parameter(torch.zeros(1, self._count**3, self._edge**3, width))
        self.pool = nn.Identity() if before is None else _Pooling(before, width)
        self.transformer_encoder = nn.Sequential(
            *(_TransformerLayer(width, heads) for _ in range(depth))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(x)
        n, channels, count, edge = x.shape[0], x.shape[1], self._count, self._edge
        # Tokens are grouped by block: attention sees one block only
        tokens = x.view(n, channels, *(count, edge) * 3).permute(0, 2, 4, 6, 3, 5, 7, 1)
        tokens = tokens.reshape(n, count**3, edge**3, channels) + self.pos_embed
        encoded: torch.Tensor = self.transformer_encoder(tokens)
        tokens = encoded.view(n, *(count,) * 3, *(edge,) * 3, channels)
        return tokens.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(n, channels, *(count * edge,) * 3)


class _Pooling(nn.Module):
    """Halves the resolution between two levels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(inputs, outputs, kernel_size=3, padding=1)
        self.norm = _norm(outputs)
        self.pool = nn.MaxPool3d(kernel_size=3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.pool(_normalise(self.norm, self.conv(x)))
        return y


def _normalise(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return (N, C, x, y, z) after a norm over channels."""
    y: torch.Tensor = norm(x.movedim(1, -1)).movedim(-1, 1)
    return y


class _TransformerLayer(nn.Module):
    """Attention and perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = _norm(width)
        self.attn = _Attention(width, heads)
        self.norm2 = _norm(width)
        self.mlp = _Perceptron(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        y: torch.Tensor = x + self.mlp(self.norm2(x))
        return y


class _Attention(nn.Module):
    """Attention among the tokens of a block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (N, blocks, tokens, channels), as the input."""
        n, blocks, tokens, width = x.shape
        projected = self.qkv(x).view(n, blocks, tokens, 3, self._heads, width // self._heads)
        query, key, value = projected.permute(3, 0, 1, 4, 2, 5).unbind(0)
        weights = (query @ key.transpose(-2, -1) * (width // self._heads) ** -0.5).softmax(dim=-1)
        # channels of the heads are interleaved, as the bundles' weights expect
        mixed = (weights @ value).permute(0, 1, 3, 4, 2).reshape(n, blocks, tokens, width)
        y: torch.Tensor = self.proj(mixed)
        return y


class _Perceptron(nn.Module):
    """Two linear layers with four times the width between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc2(nn.functional.gelu(self.fc1(x)))
        return y
