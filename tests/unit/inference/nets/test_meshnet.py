"""A MeshNet that works slab by slab in place equals a forward pass of whole layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from scanloom.cards.card import NetworkSpec
from scanloom.inference.memory import network_bytes
from scanloom.inference.nets.meshnet import MeshNet

SHAPE = (37, 20, 23)
DILATIONS = (1, 2, 4, 8, 16, 8, 1)
ACTIVATIONS = {
    "elu": functional.elu,
    "relu": functional.relu,
    "gelu": lambda values: functional.gelu(values, approximate="tanh"),
}


def network(**changes: Any) -> MeshNet:
    """Return a network of random weights."""
    torch.manual_seed(0)
    arguments = {"in_channels": 1, "channels": 6, "classes": 4, "dilations": DILATIONS}
    net = MeshNet(**{**arguments, **changes}).eval()
    for name, values in net.named_parameters():
        scale = 0.1 if name.startswith("layers") else 1.0
        values.data = scale * torch.randn_like(values)
    return net


def whole_layers(net: MeshNet, image: torch.Tensor, changes: dict[str, Any]) -> torch.Tensor:
    """Return the scores of a plain forward pass."""
    values = image
    for n, dilation in enumerate(DILATIONS):
        layer: Any = net.layers[n]
        weights = layer.weight, layer.bias
        values = functional.conv3d(values, *weights, padding=dilation, dilation=dilation)
        if changes.get("norm"):
            norm: Any = net.norms[n] if changes.get("affine") else None
            values = torch.nn.functional.group_norm(
                values, 6, norm and norm.weight, norm and norm.bias, eps=1e-5
            )
        values = ACTIVATIONS[changes.get("activation", "elu")](values)
    return functional.conv3d(values, net.classifier.weight, net.classifier.bias)


@pytest.mark.parametrize("slab_values", [1, 6 * 20 * 23 * 3, 6 * 20 * 23 * 20, 1 << 24])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "relu", "classes": 9},
        {"activation": "gelu", "norm": "instance", "bias": False, "classifier_bias": False},
        {"norm": "instance", "affine": True},
        {"in_channels": 6},
    ],
)
def test_slabs_equal_whole_layers(slab_values: int, changes: dict[str, Any]) -> None:
    net = network(**changes)
    net.slab_values = slab_values
    image = torch.rand(1, changes.get("in_channels", 1), *SHAPE)
    with torch.inference_mode():
        expected = whole_layers(net, image, changes)
        scores = net(image.clone())

    assert scores.shape == expected.shape
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_an_image_of_another_number_of_channels_is_not_overwritten() -> None:
    image = torch.rand(1, 1, *SHAPE)
    before = image.clone()
    with torch.inference_mode():
        network()(image)

    assert torch.equal(image, before)


def test_memory_is_that_of_one_layer_and_slabs() -> None:
    """Whole layers would need two activations and the scores."""
    arguments = {"in_channels": 1, "channels": 30, "classes": 18, "dilations": [1, 2, 4, 8, 16, 1]}
    shape = (256, 256, 256)
    activation = 4 * 30 * 256**3

    assert activation < network_bytes(NetworkSpec("MeshNet", arguments), shape) < 2 * activation
