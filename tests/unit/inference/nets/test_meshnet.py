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


def test_weights_of_other_names_and_one_array_are_converted() -> None:
    """brainchop's checkpoints, MONAI's mindmap, and the array of TensorFlow.js."""
    plain, affine = network(), network(norm="instance", affine=True, bias=False)
    state = plain.state_dict()
    count = len(DILATIONS)
    nested = {
        f"model.{n}.0.{leaf}": state[f"layers.{n}.{leaf}"]
        for n in range(count)
        for leaf in ("weight", "bias")
    }
    nested |= {f"model.{count}.{leaf}": state[f"classifier.{leaf}"] for leaf in ("weight", "bias")}
    flat = torch.cat(
        [v.permute(2, 3, 4, 1, 0).flatten() if v.ndim == 5 else v for v in state.values()]
    )
    for foreign in (nested, {"values": flat}, state):
        converted = plain.convert_state(foreign)
        assert converted.keys() == state.keys()
        assert all(torch.equal(converted[name], state[name]) for name in state)

    expected = affine.state_dict()
    sequence = {}
    for n in range(count):
        sequence[f"model.{3 * n}.weight"] = expected[f"layers.{n}.weight"]
        for leaf in ("weight", "bias"):
            sequence[f"model.{3 * n + 1}.{leaf}"] = expected[f"norms.{n}.{leaf}"]
    for leaf in ("weight", "bias"):
        sequence[f"model.{3 * count}.{leaf}"] = expected[f"classifier.{leaf}"]
    converted = affine.convert_state(sequence)
    assert converted.keys() == expected.keys()
    assert all(torch.equal(converted[name], expected[name]) for name in expected)


def test_a_bias_that_is_not_applied_is_dropped() -> None:
    net = network(classifier_bias=False)
    state = {**net.state_dict(), "classifier.bias": torch.ones(4)}
    flat = torch.cat(
        [v.permute(2, 3, 4, 1, 0).flatten() if v.ndim == 5 else v for v in state.values()]
    )

    assert net.convert_state(state).keys() == net.state_dict().keys()
    assert net.convert_state({"values": flat}).keys() == net.state_dict().keys()
    assert net.convert_state({"values": flat[1:]}).keys() == {"values"}  # refused on loading
