"""Resampling by area equals PyTorch's, and orientation after resampling MONAI's, on all axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from scanloom.cards.card import Argmax, NetworkGrid
from scanloom.inference.geometry import plan_grid
from scanloom.inference.resampling.resample import to_network
from scanloom.inference.restore.restorers import AreaRestorer, LabelRestorer
from scanloom.inference.sliding_window import ScorePlanes
from support import model_cards

CPU = torch.device("cpu")
CODES = ["RAS", "LPS", "SPL", "PIL"]


def in_planes(scores: torch.Tensor, axis: int) -> torch.Tensor:
    """Return scores (C, x, y, z) as planes (N, C, ., .) across an axis."""
    return scores.movedim(axis + 1, 0)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("shape", [(20, 24, 9), (7, 12, 16)])
def test_area_is_pytorchs(codes: str, shape: tuple[int, int, int]) -> None:
    """Enlarged and reduced axes, flipped and swapped; the way there and back."""
    grid = model_cards.grid(shape, (1.0, 1.2, 2.5), codes)
    network_grid = NetworkGrid("RAS", None, "area", alignment="edges", shape=(12, 16, 8))
    plan = plan_grid(grid, network_grid)
    array = np.asfortranarray(np.random.default_rng(3).normal(size=shape).astype(np.float32))
    turned = array[
        tuple(slice(None, None, -1 if plan.flipped[plan.network_axis(a)] else 1) for a in range(3))
    ]
    oriented = torch.from_numpy(turned.transpose(plan.follows).copy())

    image = to_network(array, plan, CPU)
    expected = functional.interpolate(oriented[None, None], size=(12, 16, 8), mode="area")[0, 0]
    torch.testing.assert_close(image, expected, atol=1e-6, rtol=1e-5)

    scores = torch.randn(3, 12, 16, 8, generator=torch.Generator().manual_seed(5))
    restorer = AreaRestorer(plan, Argmax(), 3)
    planes = in_planes(scores, plan.network_axis(plan.lead))
    restorer.add(ScorePlanes(0, planes[:5]))
    restorer.add(ScorePlanes(5, planes[5:]))
    back = functional.interpolate(scores[None], size=tuple(oriented.shape), mode="area")[0]
    labels = back.argmax(0).numpy()
    for x in range(3):
        labels = np.flip(labels, x) if plan.flipped[x] else labels
    labels = labels.transpose([plan.network_axis(axis) for axis in range(3)])
    np.testing.assert_array_equal(restorer.finish()[0], labels)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("turn", [0, 4])
@pytest.mark.parametrize("spacing", [(0.7, 0.8, 2.2), (0.75, 0.75, 3.0)])
def test_orientation_after_resampling_is_monais(
    codes: str, spacing: tuple[float, float, float], turn: float
) -> None:
    """VISTA3D resamples along the scan's own axes; ties at ratios of 2 are decided there too.

    On turned axes MONAI decides ties by rounding errors, which differ between processors.
    """
    transforms: Any = pytest.importorskip("monai.transforms")
    data: Any = pytest.importorskip("monai.data")
    grid = model_cards.grid((23, 26, 12), spacing, codes, turn=turn)
    array = np.asfortranarray(np.random.default_rng(3).normal(size=grid.shape).astype(np.float32))
    chain = transforms.Compose(
        [
            transforms.Spacingd("image", pixdim=(1.5, 1.5, 1.5), mode="bilinear"),
            transforms.Orientationd("image", axcodes="RAS", labels=None),
        ]
    )
    entries = chain({"image": data.MetaTensor(array[None], affine=torch.tensor(grid.affine))})
    plan = plan_grid(grid, NetworkGrid("RAS", (1.5, 1.5, 1.5), orient="after"))

    image = to_network(array, plan, CPU)
    torch.testing.assert_close(image, entries["image"].as_tensor()[0].float(), atol=1e-4, rtol=1e-4)

    scores = torch.randn(4, *image.shape, generator=torch.Generator().manual_seed(5))
    entries["pred"] = data.MetaTensor(
        scores.argmax(0, keepdim=True).float(),
        affine=entries["image"].affine,
        applied_operations=entries["image"].applied_operations,
    )
    back = transforms.Invertd("pred", transform=chain, orig_keys="image", nearest_interp=True)(
        entries
    )
    restorer = LabelRestorer(plan, Argmax(), 4)
    restorer.add(ScorePlanes(0, in_planes(scores, plan.network_axis(plan.lead))))
    (labels,) = restorer.finish(lambda decided: decided)

    voxels = np.argwhere(labels != back["pred"].numpy()[0])
    if turn:
        inverse = np.linalg.inv(plan.network.affine) @ grid.affine
        position = voxels @ inverse[:3, :3].T + inverse[:3, 3]
        between = np.abs(position - np.floor(position) - 0.5) < 1e-3
        voxels = voxels[~between.any(axis=1)]  # others lie in the middle of two network voxels
    assert len(voxels) == 0
