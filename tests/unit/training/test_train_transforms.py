"""Transforms of training bundles: patches, mirroring, seeds."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.transforms import (
    Compose,
    NormalizeIntensityd,
    RandAdjustContrastd,
    RandGaussianNoised,
    Spacingd,
)
from scipy import ndimage

from scanloom.training import transforms
from scanloom.training.transforms import (
    LoadVolumed,
    RandAcquisitiond,
    RandBiasd,
    RandDeformedPatchd,
    RandDrawnPatchd,
    RandFieldOfViewd,
    RandGammad,
    RandMirrord,
    SeededDataset,
    ZScored,
    blur,
    box_grid,
    covering_box,
    look_up,
    sample,
)

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


def test_a_label_map_with_a_rounded_header_has_the_voxels_of_its_image(tmp_path: Path) -> None:
    """Resampled on its own, it would be a voxel longer."""
    array = np.zeros((54, 4, 4), np.uint8)
    for key, spacing in (("image", 1.5), ("label", 1.5015)):
        nib.save(nib.Nifti1Image(array, np.diag([spacing, 1, 1, 1])), tmp_path / f"{key}.nii")
    keys = ["image", "label"]
    steps = [LoadVolumed(keys, "MR"), Spacingd(keys, (1, 1, 1), mode=("bilinear", "nearest"))]
    drawn = Compose(steps)({key: tmp_path / f"{key}.nii" for key in keys})
    assert drawn["image"].shape == drawn["label"].shape


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
    for box in (np.s_[0:9, 0:8, 0:7], exact_box(positions, (9, 8, 7))):
        cut = image[(slice(None), *box)]
        assert np.allclose(
            sample(cut, box_grid(positions, box), "bilinear")[0], expected, atol=1e-5
        )
    # positions outside are 0, wherever the box of voxels is cut
    box = covering_box(np.full(3, 20.0), np.full(3, 29.0), (9, 8, 7))
    outside = sample(image[(slice(None), *box)], box_grid(positions + 20, box), "bilinear")
    assert outside.numel() > 0
    assert (outside == 0).all()


def exact_box(positions: torch.Tensor, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the box of voxels between which positions (..., 3) lie."""
    low, high = (
        each.floor().int().tolist() for each in torch.aminmax(positions.flatten(0, 2), dim=0)
    )
    first = [min(max(0, n), length - 1) for n, length in zip(low, shape, strict=True)]
    return tuple(
        slice(a, max(min(b + 2, length), a + 1))
        for a, b, length in zip(first, high, shape, strict=True)
    )


def test_the_box_found_without_positions_holds_them_and_changes_no_value() -> None:
    generator = torch.Generator().manual_seed(5)
    image = torch.rand(1, 30, 26, 34, generator=generator)
    label = torch.randint(0, 9, image.shape, generator=generator, dtype=torch.uint8)
    shape = image.shape[1:]
    deform = RandDeformedPatchd(
        ["image", "label"],
        ["bilinear", "nearest"],
        (12, 10, 8),
        (1.5, 2.0, 1.0),
        prob=0.9,
        rotate=30,
        scale=0.2,
        elastic=2.0,
        scan_spacing=(1, 1, 1.25),
    ).set_random_state(seed=1)
    smaller, ties = 0, 0
    for _ in range(200):
        # off the scan too, so that the box is clipped
        centre = deform.R.uniform(-4, np.array(shape) + 4)
        positions, box = deform._positions(centre, shape, torch.device("cpu"))
        exact = exact_box(positions, shape)
        assert all(a.start <= b.start and b.stop <= a.stop for a, b in zip(box, exact, strict=True))
        grids = [(box_grid(positions, each), (slice(None), *each)) for each in (box, exact)]
        values = [sample(image[cut], grid, "bilinear") for grid, cut in grids]
        assert torch.allclose(*values, rtol=0, atol=1e-5)
        labels = [sample(label[cut], grid, "nearest") for grid, cut in grids]
        middle = ((positions - positions.floor() - 0.5).abs() < 1e-4).any(-1)
        assert not ((labels[0] != labels[1])[0] & ~middle).any()
        ties += int(middle.sum())
        smaller += np.prod([each.stop - each.start for each in box]) < image.numel() / 2
    assert ties < 0.1 * 200 * 12 * 10 * 8
    assert smaller > 50


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


def test_sides_change_as_by_masks() -> None:
    """A table of all numbers, whatever pairs and types, is the assignment of each pair."""
    pairs = [[1, 9], [2, 14], [255, 7], [4, 4]]
    mirror = RandMirrord(["label"], [0], pairs=pairs)
    label = torch.randint(
        0, 256, (1, 9, 20, 8), generator=torch.Generator().manual_seed(2), dtype=torch.uint8
    )
    for seed in range(20):
        mirrored = mirror.set_random_state(seed=seed)({"label": label})["label"]
        if torch.equal(mirrored, label):
            continue
        flipped = torch.flip(label, [1])
        expected = flipped.clone()
        for left, right in pairs:
            expected[flipped == left], expected[flipped == right] = right, left
        assert mirrored.dtype == label.dtype
        assert torch.equal(mirrored, expected)
        return
    raise AssertionError("never mirrored")


def test_a_power_is_that_of_monai() -> None:
    image = torch.rand(1, 9, 8, 7, generator=torch.Generator().manual_seed(2)) * 3 - 1
    ours = RandGammad("image", prob=0.5, gamma=[0.6, 1.6])
    theirs = RandAdjustContrastd("image", prob=0.5, gamma=[0.6, 1.6])
    changed = 0
    for seed in range(20):
        for data in ({"image": image}, {"image": torch.full_like(image, 0.3)}):
            own, expected = (t.set_random_state(seed=seed)(data)["image"] for t in (ours, theirs))
            assert torch.allclose(own, torch.as_tensor(expected), rtol=0, atol=1e-6)
        changed += not torch.equal(
            ours.set_random_state(seed=seed)({"image": image})["image"], image
        )
    assert 4 < changed < 16


def test_a_z_score_is_that_of_monai() -> None:
    image = torch.rand(1, 9, 8, 7, generator=torch.Generator().manual_seed(2)) * 3 + 5
    for each in (image, torch.full_like(image, 0.25), (image * 40).byte()):
        own, expected = (
            t("image")({"image": each})["image"] for t in (ZScored, NormalizeIntensityd)
        )
        assert own.dtype == torch.float32
        assert torch.allclose(own, torch.as_tensor(expected), rtol=0, atol=1e-6)


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


STRUCTURES = [0, 1, 2, 0]
CLASSES = [0, 1, 1, 2]


def head(shape: tuple[int, int, int] = (40, 44, 36)) -> torch.Tensor:
    """Return numbers of a head: 1 left and 2 right in 3, in air."""
    numbers = torch.zeros(1, *shape, dtype=torch.uint8)
    numbers[0, 4:-4, 4:-4, 4:-4] = 3
    numbers[0, 8:20, 10:34, 8:28] = 1
    numbers[0, 20:32, 10:34, 8:28] = 2
    return numbers


def draw(
    count: int, seed: int = 1, numbers: torch.Tensor | None = None, **changes: object
) -> list[dict[str, torch.Tensor]]:
    """Return patches as large as the head."""
    geometry = {"size": (40, 44, 36), "spacing": (1, 1, 1), **PLAIN}
    arguments = {"structures": STRUCTURES, "classes": CLASSES, "tissues": [-1, -1, -1]}
    transform = RandDrawnPatchd("label", **{**arguments, "strip": 0.0, **geometry, **changes})
    transform.set_random_state(seed=seed)
    numbers = head() if numbers is None else numbers
    return [transform({"label": numbers}) for _ in range(count)]


def inner(case: dict[str, torch.Tensor], number: int) -> torch.Tensor:
    """Return the image in a number of the head, without the voxels at its border."""
    mask = ndimage.binary_erosion(head()[0].numpy() == number)
    return case["image"][0][torch.from_numpy(mask)]


def test_a_drawn_image_has_means_and_deviations_of_its_classes() -> None:
    cases = draw(60)
    means = {n: [float(inner(case, n).mean()) for case in cases] for n in (1, 2, 3)}
    deviations = [float(inner(case, 3).std()) for case in cases]
    assert np.allclose(means[1], means[2], atol=0.01)  # one class: only their noise differs
    assert max(abs(a - b) for a, b in zip(means[1], means[3], strict=True)) > 0.5
    for values in (means[1], means[3]):  # uniform from 0.1 to 0.9
        assert 0.09 < min(values) < 0.2
        assert 0.8 < max(values) < 0.91
    assert 0.01 < min(deviations) < 0.02
    assert 0.07 < max(deviations) < 0.09
    assert all(
        torch.equal(case["label"], look_up(torch.tensor(STRUCTURES), head()).byte())
        for case in cases
    )


@pytest.mark.thorough
def test_tissues_are_alike_in_half_of_the_images() -> None:
    cases = draw(200, tissues=[-1, 0, 0])
    far = [abs(float(inner(case, 1).mean() - inner(case, 3).mean())) > 0.2 for case in cases]
    # of two uniform means, 56 % are farther apart; of near ones, 2 %
    assert 0.2 < np.mean(far) < 0.4


def test_air_is_dark_and_surrounds_the_map() -> None:
    cases = draw(50, size=(60, 60, 60))
    dark = [float(case["image"][0, :4].mean()) < 0.1 for case in cases]
    assert 0.8 < np.mean(dark) < 1.0
    for case in cases:  # outside the map as in its own air
        outside, air = case["image"][0, :8], case["image"][0, 11:13, 10:-10, 14:-14]
        assert abs(float(outside.mean() - air.mean())) < 0.01
        assert not case["label"][0, :8].any()


def test_what_is_no_structure_can_be_stripped() -> None:
    for case in draw(8, strip=1.0):
        air = case["image"][0, :3].mean()
        assert abs(float(inner(case, 3).mean() - air)) < 0.01
        assert set(case["label"].unique().tolist()) == {0, 1, 2}


def test_a_border_between_two_values_is_a_mixture_and_a_label_is_none() -> None:
    changes = {"prob": 1.0, "rotate": 20.0, "scale": 0.1, "elastic": 1.0}
    for case in draw(6, **changes):
        assert set(case["label"].unique().tolist()) <= {0, 1, 2}
        assert case["label"].dtype == torch.uint8
        assert case["image"].dtype == torch.float32


def test_a_map_is_drawn_at_the_patch_spacing() -> None:
    (case,) = draw(1, size=(20, 22, 18), spacing=(2, 2, 2), scan_spacing=(1, 1, 1))
    expected = look_up(torch.tensor(STRUCTURES), head()).byte()
    # a voxel of the patch lies between eight of the map, whose borders are even
    assert torch.equal(case["label"], expected[:, ::2, ::2, ::2])
    assert abs(float(case["image"].mean() - draw(1)[0]["image"].mean())) < 0.02


def test_drawing_depends_on_the_seed_alone() -> None:
    first, again, other = (draw(1, seed)[0]["image"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_look_up_is_that_of_numpy() -> None:
    table = np.array([3.0, 1.0, 2.0, 9.0], np.float32)
    expected = table[head().numpy()]
    assert np.array_equal(look_up(torch.from_numpy(table), head()).numpy(), expected)


def test_a_bias_field_is_smooth_and_positive() -> None:
    image = torch.ones(1, 32, 40, 24)
    transform = RandBiasd("image", largest=0.5).set_random_state(seed=1)
    fields = [transform({"image": image})["image"] for _ in range(20)]
    assert all((field > 0).all() for field in fields)
    logs = torch.stack(fields).log()
    assert 0.1 < float(logs.std()) < 0.5
    # a third of an axis, over which a field changes, is 8 voxels at least
    assert float(logs.diff(dim=-1).abs().max()) < 4 * 0.5 * 2 / 8


def test_a_blur_is_that_of_scipy() -> None:
    image = torch.rand(1, 20, 18, 16, generator=torch.Generator().manual_seed(2))
    sigmas = (1.5, 0.0, 0.7)
    expected = ndimage.gaussian_filter(image[0].numpy(), sigmas, mode="nearest", radius=[4, 0, 2])
    assert np.allclose(blur(image, sigmas)[0], expected, atol=1e-5)


def test_acquisitions_have_fine_coarse_or_thick_voxels() -> None:
    transform = RandAcquisitiond("image", (1, 1, 1), 4.0, 8.0, 0.0).set_random_state(seed=3)
    noise = torch.rand(1, 48, 48, 48, generator=torch.Generator().manual_seed(4))
    kinds, axes = [], set()
    for _ in range(60):
        image = transform({"image": noise})["image"]
        assert image.shape == noise.shape
        changes = [float(image.diff(dim=axis).abs().mean()) for axis in (1, 2, 3)]
        thick = min(changes) < 0.6 * max(changes)
        kinds.append("fine" if torch.equal(image, noise) else "thick" if thick else "coarse")
        axes |= {int(np.argmin(changes))} if thick else set()
    assert min(kinds.count(kind) for kind in ("fine", "thick", "coarse")) > 10
    assert axes == {0, 1, 2}


def test_noise_is_that_of_the_acquisition() -> None:
    transform = RandAcquisitiond("image", (1, 1, 1), 1.0, 1.0, 0.2).set_random_state(seed=1)
    flat = torch.full((1, 24, 24, 24), 0.5)
    deviations = [float(transform({"image": flat})["image"].std()) for _ in range(40)]
    assert 0 < min(deviations) < 0.03
    assert 0.17 < max(deviations) < 0.21


def test_a_field_of_view_is_a_box_outside_which_all_is_zero() -> None:
    transform = RandFieldOfViewd(["image", "label"], prob=1.0, smallest=0.5)
    transform.set_random_state(seed=1)
    image, label = torch.ones(1, 20, 24, 16), torch.ones(1, 20, 24, 16, dtype=torch.uint8)
    sizes = []
    for _ in range(20):
        cut = transform({"image": image, "label": label})
        assert torch.equal(cut["image"].byte(), cut["label"])
        found = ndimage.find_objects(cut["label"][0].numpy())[0]
        assert cut["label"][0][found].all()
        assert int(cut["label"].sum()) == cut["label"][0][found].numel()
        sizes.append([each.stop - each.start for each in found])
    assert (np.min(sizes, 0) >= [10, 12, 8]).all()
    never = RandFieldOfViewd(["image"], prob=0.0, smallest=0.5)({"image": image})
    assert torch.equal(never["image"], image)


@pytest.mark.parametrize(
    ("precision", "device", "units", "cudnn", "expected"),
    [
        ("auto", "cpu", "AVX512-BF16", None, torch.bfloat16),
        ("auto", "cpu", None, None, torch.float32),
        ("bfloat16", "cpu", None, None, torch.bfloat16),
        ("float32", "cpu", "AVX512-BF16", None, torch.float32),
        ("auto", "mps", "AVX512-BF16", None, torch.float32),
        ("auto", "cuda", "tensor cores", 91600, torch.bfloat16),
        ("auto", "cuda", None, 91600, torch.float32),
        ("bfloat16", "cuda", "tensor cores", 91002, torch.float32),
    ],
)
def test_half_precision_is_trained_in_where_it_is_right_and_not_emulated(
    precision: str,
    device: str,
    units: str | None,
    cudnn: int | None,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transforms, "bfloat16_units", lambda: units)
    monkeypatch.setattr(transforms, "cudnn_version", lambda: cudnn)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: units is not None)

    assert transforms.network_type.__wrapped__(precision, device) is expected
