"""Transforms of training bundles: patches, mirroring, seeds."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from monai.transforms import Compose, RandGaussianNoised
from scipy import ndimage

from scanloom.training.transforms import RandDeformedPatchd, RandMirrord, SeededDataset, sample

PLAIN = {"prob": 0.0, "rotate": 0.0, "scale": 0.0, "elastic": 0.0}


def case(shape: tuple[int, int, int] = (12, 14, 10)) -> dict[str, torch.Tensor]:
    """Return an image whose value is that of its label, in a blob off the centre."""
    label = torch.zeros(1, *shape, dtype=torch.uint8)
    label[0, 3:8, 4:11, 3:8] = 1
    label[0, 4:6, 5:8, 4:6] = 2
    return {"image": label.float() * 10, "label": label}


def patches(transform: RandDeformedPatchd, count: int, **data: object) -> list[dict[str, object]]:
    transform.set_random_state(seed=1)
    return [transform({**case(), **data}) for _ in range(count)]


def test_a_patch_without_deformation_holds_the_voxels_of_the_scan() -> None:
    cut = RandDeformedPatchd(["image"], ["bilinear"], (5, 6, 4), (1, 1, 1), **PLAIN)
    image = torch.arange(12 * 14 * 10, dtype=torch.float32).reshape(1, 12, 14, 10)
    for drawn in patches(cut, 8, image=image):
        patch = drawn["image"][0]
        i, j, k = np.unravel_index(round(float(patch[0, 0, 0])), (12, 14, 10))
        expected = image[0, i : i + 5, j : j + 6, k : k + 4]
        assert torch.allclose(patch, expected, atol=1e-2)


def test_a_scan_smaller_than_the_patch_is_centred_in_zeros() -> None:
    cut = RandDeformedPatchd(["image"], ["bilinear"], (16, 18, 14), (1, 1, 1), **PLAIN)
    image = torch.ones(1, 12, 14, 10)
    patch = patches(cut, 1, image=image)[0]["image"]
    assert torch.allclose(patch[0, 2:14, 2:16, 2:12], image[0], atol=1e-5)
    assert float(patch.sum()) == pytest.approx(float(image.sum()), rel=1e-5)


def test_interpolation_is_that_of_scipy() -> None:
    generator = torch.Generator().manual_seed(3)
    image = torch.rand(1, 9, 8, 7, generator=generator)
    positions = torch.rand(4, 5, 6, 3, generator=generator) * torch.tensor([8.0, 7.0, 6.0])
    points = positions.reshape(-1, 3).T.numpy()
    expected = ndimage.map_coordinates(image[0].numpy(), points, order=1).reshape(4, 5, 6)
    assert np.allclose(sample(image, positions, "bilinear")[0], expected, atol=1e-5)
    # positions outside are 0, wherever the box of voxels is cut
    assert (sample(image, positions + 20, "bilinear") == 0).all()


def test_image_and_label_map_are_deformed_alike() -> None:
    deform = RandDeformedPatchd(
        ["image", "label"],
        ["bilinear", "nearest"],
        (12, 14, 10),
        (1, 1, 1),
        prob=1.0,
        rotate=20,
        scale=0.2,
        elastic=0.7,
    )
    for drawn in patches(deform, 6):
        label = drawn["label"]
        assert label.dtype == torch.uint8
        assert set(label.unique().tolist()) <= {0, 1, 2}
        inside = torch.from_numpy(ndimage.binary_erosion(label[0].numpy() == 1))
        outside = torch.from_numpy(ndimage.binary_erosion(label[0].numpy() == 0))
        assert (drawn["image"][0][inside] >= 8).all()
        assert (drawn["image"][0][outside] <= 6).all()


def test_a_rotation_keeps_volumes_in_mm_on_voxels_of_unequal_sides() -> None:
    """A rotation in voxels, not in mm, would shear the scan and change distances."""
    turn = RandDeformedPatchd(
        ["image"], ["bilinear"], (41, 41, 21), (1, 1, 2), **{**PLAIN, "prob": 1.0, "rotate": 90}
    )
    i, j, k = np.indices((41, 41, 21)) - np.array([20, 20, 10])[:, None, None, None]
    ball = torch.from_numpy((i**2 + j**2 + (2 * k) ** 2 <= 12**2).astype(np.float32))[None]
    for drawn in patches(turn, 4, image=ball):
        overlap = (drawn["image"] > 0.5) & (ball > 0.5)
        union = (drawn["image"] > 0.5) | (ball > 0.5)
        assert overlap.sum() / union.sum() > 0.93


def test_every_second_patch_contains_a_class_that_is_drawn_first() -> None:
    cut = RandDeformedPatchd(
        ["label"], ["nearest"], (4, 4, 4), (1, 1, 1), **PLAIN, centre_key="voxels"
    )
    label = torch.zeros(1, 40, 40, 40, dtype=torch.uint8)
    label[0, 30, 31, 32] = 2
    voxels = [torch.empty(0, dtype=torch.long), torch.nonzero(label.flatten() == 2)[:, 0]]
    drawn = patches(cut, 60, label=label, voxels=voxels)
    hits = sum(bool((each["label"] == 2).any()) for each in drawn)
    assert 20 <= hits <= 42
    assert "voxels" not in drawn[0]


def test_mirroring_left_and_right_swaps_sides_and_other_axes_do_not() -> None:
    data = case()
    for axes, values in (([0], {1: 2, 2: 1}), ([1], {1: 1, 2: 2})):
        mirror = RandMirrord(["image", "label"], axes, pairs=[[1, 2]])
        mirror.set_random_state(seed=0)
        results = [mirror(data) for _ in range(20)]
        turned = [r for r in results if not torch.equal(r["image"], data["image"])]
        assert 5 <= len(turned) <= 15
        flipped = torch.flip(data["label"], [axes[0] + 1])
        expected = flipped.clone()
        for before, after in values.items():
            expected[flipped == before] = after
        assert torch.equal(turned[0]["label"], expected)
        assert torch.equal(turned[0]["image"], torch.flip(data["image"], [axes[0] + 1]))
    assert data["label"].max() == 2  # the cached case is unchanged


def dataset(patches: int, seed: int = 5) -> SeededDataset:
    cases = [{"image": torch.full((1, 2), float(n)), "n": n} for n in range(7)]
    noise = Compose([RandGaussianNoised("image", prob=1.0, std=0.1)])
    return SeededDataset(cases, noise, seed, patches, progress=False, copy_cache=False)


def test_a_patch_depends_on_seed_epoch_and_index_only() -> None:
    first, second = dataset(10), dataset(10)
    first.epoch = second.epoch = 3
    forward = [first[n]["image"] for n in range(10)]
    backward = [second[n]["image"] for n in reversed(range(10))][::-1]
    assert all(map(torch.equal, forward, backward))
    second.epoch = 4
    assert not torch.equal(second[0]["image"], forward[0])
    other = dataset(10, seed=6)
    other.epoch = 3
    assert not torch.equal(other[0]["image"], forward[0])


def test_all_cases_come_once_in_a_pass_wherever_epochs_end() -> None:
    data = dataset(10)
    drawn = []
    for data.epoch in range(1, 8):
        drawn += [data[n]["n"] for n in range(10)]
    passes = [drawn[n : n + 7] for n in range(0, 70, 7)]
    assert all(sorted(each) == list(range(7)) for each in passes)
    assert len(set(map(tuple, passes))) > 5
    assert len(list(chain(*passes))) == 70
