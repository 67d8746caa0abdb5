"""Shapes by the short way are those that torch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._ops import OpOverload

from scanloom.inference.network.architectures import meta_dispatch

LAYERS: list[tuple[type[nn.Module], dict[str, Any]]] = [
    (nn.Conv3d, {"kernel_size": 3, "padding": 1}),
    (nn.Conv3d, {"kernel_size": (3, 5, 1), "stride": (2, 1, 3), "padding": (0, 2, 1)}),
    (nn.Conv3d, {"kernel_size": 3, "dilation": 2, "groups": 2, "bias": False}),
    (nn.Conv3d, {"kernel_size": 3, "padding": "same"}),
    (nn.ConvTranspose3d, {"kernel_size": 2, "stride": 2}),
    (
        nn.ConvTranspose3d,
        {"kernel_size": 3, "stride": (2, 3, 1), "padding": 1, "output_padding": (1, 2, 0)},
    ),
    (nn.ConvTranspose3d, {"kernel_size": 3, "dilation": (1, 2, 3), "groups": 2}),
    (nn.Conv2d, {"kernel_size": (3, 5), "stride": (2, 1), "padding": 1}),
    (nn.Conv2d, {"kernel_size": 1, "bias": False}),
    (nn.ConvTranspose2d, {"kernel_size": 2, "stride": 2}),
]


@pytest.mark.parametrize(("layer", "how"), LAYERS)
def test_a_convolution_gives_what_torch_says(layer: type[nn.Module], how: dict[str, Any]) -> None:
    real = layer(4, 6, **how)
    image = torch.zeros(2, 4, 9, 10, 11)[(..., 0) if real.weight.ndim == 4 else ...]
    with torch.inference_mode():
        expected = real(image)
        with meta_dispatch():
            output = real.to("meta")(image.to("meta"))

    assert (output.shape, output.dtype) == (expected.shape, expected.dtype)
    assert output.is_meta


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool3d(2),
        nn.MaxPool3d(3, stride=(2, 1, 2), padding=1),
        nn.MaxPool3d(2, dilation=2),
        nn.MaxPool3d(2, ceil_mode=True),
        nn.MaxPool2d((2, 3), stride=2),
    ],
)
def test_pooling_gives_what_torch_says(pool: nn.Module) -> None:
    image = torch.zeros(2, 4, 9, 10, 11)[(..., 0) if isinstance(pool, nn.MaxPool2d) else ...]
    with torch.inference_mode(), meta_dispatch():
        output = pool(image.to("meta"))
    assert output.shape == pool(image).shape


@pytest.mark.parametrize("mode", ["constant", "replicate"])
@pytest.mark.parametrize("widths", [(0,) * 6, (1, 2, 0, 3, 4, 0), (1, 0)])
def test_padding_gives_what_torch_says(mode: str, widths: tuple[int, ...]) -> None:
    image = torch.zeros(2, 4, 9, 10, 11)[(..., 0) if len(widths) == 2 else ...]
    image = image[..., 0] if len(widths) == 2 else image
    with torch.inference_mode(), meta_dispatch():
        output = nn.functional.pad(image.to("meta"), widths, mode)
    assert output.shape == nn.functional.pad(image, widths, mode).shape


@pytest.mark.parametrize("image", [torch.zeros(1, 3, 9, 9, 9), torch.zeros(1, 4, 2, 9, 9)])
def test_mismatched_shapes_are_refused_as_by_torch(image: torch.Tensor) -> None:
    layer = nn.Conv3d(4, 6, kernel_size=3).to("meta")
    with torch.inference_mode(), meta_dispatch(), pytest.raises(RuntimeError):
        layer(image.to("meta"))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layer", [nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.Mish, nn.Hardswish])
def test_torch_is_not_asked_for_the_shape_of_an_activation(
    layer: Callable[..., nn.Module], inplace: bool
) -> None:
    """Some versions import their compiler to answer."""
    image = torch.zeros(2, 4, 9, device="meta")
    with torch.inference_mode(), meta_dispatch(), patch.object(OpOverload, "__call__") as asked:
        output = layer(inplace=inplace)(image)

    asked.assert_not_called()
    assert output.shape == image.shape
    assert (output is image) is inplace


def test_tensors_with_values_keep_them() -> None:
    """DiNTS chooses its layers by the numbers of its architecture, which are on the CPU."""
    paths = torch.tensor([[0.0, 1.0], [1.0, 0.0]])

    with meta_dispatch():
        doubled, joined = paths * 2, torch.cat([paths, paths])

    torch.testing.assert_close(doubled, torch.tensor([[0.0, 2.0], [2.0, 0.0]]))
    torch.testing.assert_close(joined[2:], paths)
