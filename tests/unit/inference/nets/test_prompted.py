"""Networks that stand in for MONAI's with fixed prompts equal them, with the same state dict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from scanloom.inference.nets.unest import UNesT
from scanloom.inference.nets.variants import DiNTS, DynUNetWithoutClicks, Vista3d

nets: Any = pytest.importorskip("monai.networks.nets")


def test_clicks_are_channels_of_zeros() -> None:
    torch.manual_seed(1)
    args = {
        "spatial_dims": 3,
        "in_channels": 3,
        "out_channels": 2,
        "kernel_size": [3, 3, 3],
        "strides": [1, 2, 2],
        "upsample_kernel_size": [2, 2],
        "norm_name": "instance",
    }
    theirs = nets.DynUNet(**args).eval()
    ours = DynUNetWithoutClicks(**args).eval()
    ours.load_state_dict(theirs.state_dict())
    scan = torch.randn(2, 1, 16, 16, 16)

    with torch.inference_mode():
        expected = theirs(torch.cat((scan, torch.zeros(2, 2, 16, 16, 16)), dim=1))
        assert torch.equal(ours(scan), expected)


@pytest.mark.thorough
def test_prompts_are_those_of_monais_network() -> None:
    """Channel 0 is the background, of score 0; each further one is a prompt's."""
    torch.manual_seed(1)
    width = 16
    encoder = nets.SegResNetDS2(
        in_channels=1,
        blocks_down=(1, 2, 2, 4, 4),
        norm="instance",
        out_channels=width,
        init_filters=width,
        dsdepth=1,
    )
    from monai.networks.nets import vista3d as module

    theirs = module.VISTA3D(
        image_encoder=encoder,
        class_head=module.ClassMappingClassify(512, width, use_mlp=True),
        point_head=module.PointMappingSAM(width, n_classes=512, last_supported=132),
    ).eval()
    ours = Vista3d([3, 1, 40], encoder_embed_dim=width).eval()
    ours.load_state_dict(theirs.state_dict())
    windows = torch.randn(2, 1, 32, 32, 32)

    with torch.inference_mode():
        prompts = torch.tensor([[3], [1], [40]])
        expected = theirs(windows[:1], class_vector=prompts, transpose=True)
        scores = ours(windows)

    assert scores.shape == (2, 4, 32, 32, 32)
    assert torch.equal(scores[:1, 1:], expected)
    assert not scores[:, 0].any()


def test_searched_network_is_monais() -> None:
    torch.manual_seed(1)
    rng = np.random.default_rng(2)
    paths = (rng.random((2, 4)) < 0.5).astype(float)
    paths[:, ::3] = 1
    codes = [paths, rng.integers(0, 5, (2, 4))]
    nodes = torch.ones(3, 2)
    space = {"num_blocks": 2, "num_depths": 2, "use_downsample": True}
    theirs = nets.DiNTS(
        nets.TopologyInstance(arch_code=codes, **space), 1, 2, use_downsample=True, node_a=nodes
    ).eval()
    plain = [code.tolist() for code in codes]
    ours = DiNTS({"arch_code": plain, **space}, nodes.tolist(), in_channels=1, num_classes=2).eval()
    ours.load_state_dict(theirs.state_dict())
    scan = torch.randn(1, 1, 32, 32, 32)

    with torch.inference_mode():
        assert torch.equal(ours(scan), theirs(scan))


def test_unest_has_the_names_of_the_bundles_state_dicts() -> None:
    """Names and shapes as the Model Zoo's files have them; values: `zoo_parity.py`."""
    with torch.device("meta"):
        network = UNesT(4)
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}

    assert shapes["nestViT.levels.0.pos_embed"] == (1, 64, 216, 128)
    assert shapes["nestViT.levels.2.transformer_encoder.7.attn.qkv.weight"] == (1536, 512)
    assert shapes["nestViT.levels.1.pool.conv.weight"] == (256, 128, 3, 3, 3)
    assert shapes["encoder2.blocks.0.conv.weight"] == (64, 64, 1, 1, 1)
    assert shapes["encoder10.conv.weight"] == (1024, 512, 3, 3, 3)
    assert shapes["out.conv.conv.weight"] == (4, 32, 1, 1, 1)
    assert sum(value.numel() for value in network.state_dict().values()) == 87_200_901
