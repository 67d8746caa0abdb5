"""Input and output of a network stay float32, whatever network is in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from scanloom.cards.card import NetworkSpec
from scanloom.inference.network.architectures import build_network
from scanloom.inference.network.layers import MixedBfloat16

SPECS: Mapping[str, Mapping[str, Any]] = {
    "BasicUNet": {"features": [4, 4, 8, 8, 8, 4]},
    "SegResNet": {"init_filters": 8, "blocks_down": [1, 1], "blocks_up": [1]},
    "UNet": {"channels": [4, 8], "strides": [2], "num_res_units": 2, "norm": "batch"},
    "AttentionUnet": {"channels": [4, 8], "strides": [2]},
    "DynUNet": {
        "kernel_size": [3, 3, 3],
        "strides": [1, 2, 2],
        "upsample_kernel_size": [2, 2],
        "filters": [4, 8, 16],
    },
    "SwinUNETR": {"feature_size": 12},
    "UNETR": {
        "img_size": [64, 32, 32],
        "feature_size": 4,
        "hidden_size": 24,
        "mlp_dim": 48,
        "num_heads": 2,
    },
    "VNet": {},
}


def spec(name: str) -> NetworkSpec:
    args = {"spatial_dims": 3, "in_channels": 1, "out_channels": 3, **SPECS[name]}
    return NetworkSpec(name, args)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SPECS)
def test_scores_come_nearer_to_those_of_float32(name: str) -> None:
    """They are nearer than those of the same network in bfloat16 from end to end."""
    torch.manual_seed(4)
    window = torch.randn(1, 1, 64, 32, 32)
    full = build_network(spec(name))
    half, mixed = build_network(spec(name)), build_network(spec(name))
    for network in (half, mixed):
        network.load_state_dict(full.state_dict())
    half.to(torch.bfloat16)

    with torch.inference_mode():
        expected = full(window)
        plain = half(window.to(torch.bfloat16)).float()
        scores = MixedBfloat16(mixed, 1, (64, 32, 32))(window)

    assert scores.dtype == torch.float32
    off, before = ((values - expected).abs().mean() for values in (scores, plain))
    print(f"{name}: {float(off / before):.2f} of bfloat16's difference is left")
    assert float(off) < float(before)


def test_a_result_changed_in_place_is_seen() -> None:
    """A remembered result of the last layer is no longer the network's result then."""
    torch.manual_seed(4)
    network = nn.Sequential(nn.Conv3d(1, 2, 1), nn.ReLU(inplace=True))

    with torch.inference_mode():
        scores = MixedBfloat16(network, 1, (8, 8, 8))(torch.randn(1, 1, 8, 8, 8))

    assert float(scores.min()) == 0.0


@pytest.mark.parametrize(("width", "exact"), [(8, True), (32, False)])
def test_narrow_layers_at_full_resolution_stay_exact(width: int, exact: bool) -> None:
    """Wide ones, and those at a coarser resolution, are where the time goes."""
    features = [width, width, 16, 16, 16, width]
    args = {"spatial_dims": 3, "in_channels": 1, "out_channels": 3, "features": features}
    network = build_network(NetworkSpec("BasicUNet", args))

    MixedBfloat16(network, 1, (32, 32, 32))

    kept = {name for name, value in network.named_parameters() if value.dtype == torch.float32}
    assert ("conv_0.conv_1.conv.weight" in kept) == exact
    assert ("upcat_1.convs.conv_0.conv.weight" in kept) == exact
    assert "final_conv.weight" in kept
    assert "down_2.convs.conv_0.conv.weight" not in kept


def test_average_pooling() -> None:
    """torch has no average pooling of volumes in bfloat16 on CPUs; nnU-Net's encoders have it."""
    torch.manual_seed(4)
    args = {
        "in_channels": 1,
        "out_channels": 3,
        "plan": {
            "features": [4, 8, 8],
            "kernels": [[3, 3, 3]] * 3,
            "strides": [[1, 1, 1], [2, 2, 2], [2, 2, 2]],
            "encoder": [1, 1, 1],
            "decoder": [1, 1],
        },
        "layers": {"bias": True, "norm": "instance", "norm_args": {"affine": True}, "slope": 0.01},
    }
    network = build_network(NetworkSpec("ResidualEncoderUNet", args))
    window = torch.randn(1, 1, 16, 16, 16)
    with torch.inference_mode():
        expected = network(window)
        scores = MixedBfloat16(network, 1, (16, 16, 16))(window)

    assert scores.dtype == torch.float32
    assert (scores - expected).abs().mean() < 0.02 * expected.abs().mean()
