"""A last layer that comes after the sums gives the scores that it gives in the network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from scanloom.cards.card import NetworkSpec, Window
from scanloom.inference.network.architectures import build_network, meta_dispatch
from scanloom.inference.network.layers import FinalLayer, detach_final_layer
from scanloom.inference.sliding_window import Fold, SlidingWindow

SIZE = (16, 16, 16)
SEGRESNET = {"spatial_dims": 3, "in_channels": 1, "init_filters": 8, "norm": "batch"}
DYNUNET = {
    "spatial_dims": 3,
    "in_channels": 1,
    "kernel_size": [3, 3, 3],
    "strides": [1, 2, 2],
    "upsample_kernel_size": [2, 2],
    "filters": [4, 8, 8],
    "norm_name": "instance",
}
BASIC = {"spatial_dims": 3, "in_channels": 1, "features": [4, 4, 8, 8, 8, 4], "norm": "batch"}
MANY: Mapping[str, NetworkSpec] = {
    "SegResNet": NetworkSpec("SegResNet", {**SEGRESNET, "blocks_down": [1, 1], "blocks_up": [1]}),
    "DynUNet": NetworkSpec("DynUNet", {**DYNUNET, "deep_supervision": False}),
    "DynUNet, deep": NetworkSpec("DynUNet", {**DYNUNET, "deep_supervision": True}),
    "BasicUNet": NetworkSpec("BasicUNet", BASIC),
}


def of_classes(spec: NetworkSpec, count: int) -> NetworkSpec:
    """Return the network with so many classes."""
    return NetworkSpec(spec.name, {**spec.args, "out_channels": count})


def built(spec: NetworkSpec, seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return build_network(spec)


def split(spec: NetworkSpec) -> tuple[Any, FinalLayer]:
    network = built(spec)
    head = detach_final_layer(network, spec, SIZE)
    assert head is not None
    return network, head


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("activation", [None, "softmax"])
def test_scores_equal_those_of_the_whole_network_in_monais_inferer(
    name: str, activation: str | None
) -> None:
    from monai.inferers import sliding_window_inference

    spec = of_classes(MANY[name], 21)
    whole, (network, head) = built(spec), split(spec)
    image = torch.randn(30, 16, 41)
    slider = SlidingWindow(
        [Fold(network, head)], Window(SIZE, 0.5, "gaussian"), activation=activation, slab=1
    )
    with torch.inference_mode():
        blocks = [b.scores.clone() for b in slider.slide(image[None], 2)]
        theirs = sliding_window_inference(
            image[None, None], SIZE, 1, whole, 0.5, "gaussian", 0.125, "constant", 0.0
        )[0]
    theirs = theirs.softmax(0) if activation else theirs

    assert len(blocks) == 41  # no more scores at once than were allowed: one plane
    torch.testing.assert_close(torch.cat(blocks).movedim(0, 3), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MANY)
def test_a_network_without_its_final_layer_gives_features(name: str) -> None:
    network, head = split(of_classes(MANY[name], 21))
    with torch.inference_mode():
        assert network(torch.zeros(2, 1, *SIZE)).shape == (2, head.weight.shape[1], *SIZE)


@pytest.mark.parametrize(
    "spec",
    [
        of_classes(MANY["BasicUNet"], 4),  # as many classes as features
        NetworkSpec(
            "UNet",
            {
                "spatial_dims": 3,
                "in_channels": 1,
                "channels": [4, 8],
                "strides": [2],
                "out_channels": 9,
            },
        ),
    ],
)
def test_another_last_layer_stays_where_it_is(spec: NetworkSpec) -> None:
    network = torch.nn.Identity()
    assert detach_final_layer(network, spec, SIZE) is None
    assert not list(network.children())


def test_voxels_without_a_window_are_background_for_any_head() -> None:
    network, head = split(of_classes(MANY["BasicUNet"], 9))
    loud = FinalLayer(head.weight, head.bias + torch.arange(9.0)[:, None] * 100)
    image = torch.zeros(16, 16, 48)
    image[3:9, 3:9, 40:44] = 1
    slider = SlidingWindow([Fold(network, loud)], Window(SIZE, 0.0))
    with torch.inference_mode():
        scores = torch.cat([b.scores.clone() for b in slider.slide(image[None], 2, image > 0)])

    assert slider.passed.skipped == 1
    assert (scores[16:32].argmax(dim=1) == 0).all()
    assert (scores[32:].argmax(dim=1) == 8).all()


def test_network_that_computes_with_numbers_is_built_without_memory() -> None:
    """SwinUNETR takes the rates of its layers from a tensor."""
    args = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "feature_size": 12}

    with torch.device("meta"), meta_dispatch():
        network = build_network(NetworkSpec("SwinUNETR", args))

    assert all(value.is_meta for value in network.parameters())
    assert detach_final_layer(network, NetworkSpec("SwinUNETR", args), (64, 64, 64)) is None
