"""Patches of the training are padded as the bundle pads; contrast agent goes where it can."""

from __future__ import annotations

import numpy as np
import pytest

from ct_tissue_training.contrast import add_contrast
from ct_tissue_training.data import Example
from ct_tissue_training.patches import cut_box, draw_patch, scale
from ct_tissue_training.phases import Phase
from ct_tissue_training.rules import BONE, FAT, OUTSIDE, SOFT_TISSUE


def phase(**changes: float) -> Phase:
    return Phase(seed=0, steps=1, patch=48, rate=1e-3, dice=0.1, **changes)


@pytest.mark.parametrize("cut", [0.0, 1.0])
def test_beyond_the_ends_of_a_scan_its_border_is_repeated(cut: float) -> None:
    hu = np.full((60, 60, 8), 40, np.float32)  # soft tissue up to all borders
    example = Example(hu, np.full(hu.shape, SOFT_TISSUE, np.uint8), 1.0)
    rng = np.random.default_rng(0)
    for _ in range(4):
        image, labels = draw_patch(example, phase(cut=cut), rng)
        assert image.shape == (48, 48, 48)
        assert (labels == SOFT_TISSUE).all()  # far beyond the 8 slices too
        assert abs(image.mean() - scale(np.float32(40))) < 0.2


def test_a_cut_scan_ends_where_it_is_cut() -> None:
    hu = np.repeat(np.arange(100, dtype=np.float32) * 10 - 500, 60 * 60).reshape(100, 60, 60)
    hu = np.ascontiguousarray(np.moveaxis(hu, 0, 2))  # brighter with each slice
    rng = np.random.default_rng(1)
    for _ in range(20):
        low, high = cut_box(hu.shape, np.array([30.0, 30.0, 50.0]), rng)
        assert 10 <= high[2] - low[2] < 64
        assert low[2] <= 50 < high[2] + 1
        assert (low >= 0).all()
        assert (high <= hu.shape).all()


def test_contrast_agent_brightens_soft_tissue_away_from_bone_only() -> None:
    labels = np.full((40, 40, 40), SOFT_TISSUE, np.uint8)
    labels[:10], labels[10:14], labels[14:18] = OUTSIDE, FAT, BONE
    image = np.choose(labels, [-1000, -860, -990, -104, 40, 600]).astype(np.float32)
    rng = np.random.default_rng(2)
    added = [add_contrast(image, labels, rng) - image for _ in range(6)]
    assert min(change.max() for change in added) > 30
    assert max(change.max() for change in added) > 100
    assert max(np.abs(change[:17]).max() for change in added) < 1


def test_contrast_agent_needs_soft_tissue() -> None:
    image, labels = np.full((8, 8, 8), -1000, np.float32), np.zeros((8, 8, 8), np.uint8)
    np.testing.assert_array_equal(add_contrast(image, labels, np.random.default_rng(0)), image)
