from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from scanloom.cards.card import FillHoles, KeepLargest, RemoveSmall, RemoveSmallObjects
from scanloom.ops import components, run_length
from scanloom.ops.components import (
    count_components,
    fill_holes,
    keep_largest,
    remove_small,
    remove_small_objects,
)


def blobs(seed: int, shape=(17, 13, 11), n_labels=3, fill=0.4, dtype=np.uint8):
    """Draw a random label map of small clumps."""
    rng = np.random.default_rng(seed)
    field = ndimage.uniform_filter(rng.random((n_labels + 1, *shape)), (0, 3, 3, 3))
    field[0] += fill * field.std()
    labels = field.argmax(0).astype(dtype)
    return np.asfortranarray(np.where(rng.random(shape) < 0.05, 0, labels).astype(dtype))


def scipy_structure(connectivity: int):
    return ndimage.generate_binary_structure(3, {6: 1, 18: 2, 26: 3}[connectivity])


@pytest.fixture(params=[1, 300, 1 << 21], ids=["a slice a slab", "two slices a slab", "one slab"])
def _slabs(request, monkeypatch):
    """Run a test with the volume cut in different ways."""
    monkeypatch.setattr(run_length.iter_slabs, "__defaults__", (request.param,))


@pytest.mark.usefixtures("_slabs")
@pytest.mark.parametrize("connectivity", [6, 18, 26])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("seed", range(4))
def test_counts_agree_with_scipy(connectivity, dtype, seed):
    """Each structure has as many components as SciPy finds in its mask."""
    labels = blobs(seed, dtype=dtype)

    counts = count_components(labels, (1, 2, 3, 9), connectivity)

    structure = scipy_structure(connectivity)
    expected = {n: ndimage.label(labels == n, structure)[1] for n in (1, 2, 3)}
    assert sum(expected.values()) > 3
    assert counts == {**expected, 9: 0}


@pytest.mark.usefixtures("_slabs")
@pytest.mark.parametrize("kept_count", [1, 2, 5])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("numbers", [(), (1, 3), (2,), (7,)])
def test_keeps_the_largest_components(kept_count, together, numbers):
    """The requested number of components is kept, and no dropped one is larger than a kept one."""
    labels = blobs(5)

    result = keep_largest(labels, KeepLargest(numbers, together, kept_count, 6))

    assert result.dtype == labels.dtype
    concerned = np.isin(labels, numbers) if numbers else labels > 0
    np.testing.assert_array_equal(result[~concerned], labels[~concerned])
    for mask in [concerned] if together else [labels == n for n in numbers or (1, 2, 3)]:
        numbered, n = ndimage.label(mask, scipy_structure(6))
        sizes = np.bincount(numbered.ravel(), minlength=n + 1)[1:]
        remaining_sizes = np.bincount(numbered[result > 0].ravel(), minlength=n + 1)[1:]
        assert set(np.unique(remaining_sizes / sizes)) <= {
            0.0,
            1.0,
        }  # a component is kept or dropped as a whole
        assert np.count_nonzero(remaining_sizes) == min(kept_count, n)
        assert sorted(remaining_sizes[remaining_sizes > 0]) == sorted(sizes)[-kept_count:]


def tied(labels, rule: KeepLargest) -> bool:
    """Whether the choice depends on a tie: NumPy's sort, and so MONAI's choice, vary by CPU."""
    kept_numbers = rule.numbers or (1, 2, 3)
    for mask in (
        [np.isin(labels, kept_numbers)] if rule.together else [labels == n for n in kept_numbers]
    ):
        numbered, n = ndimage.label(mask, scipy_structure(rule.connectivity))
        sizes = np.sort(np.bincount(numbered.ravel())[1:])
        if n > rule.parts and sizes[-rule.parts] == sizes[-rule.parts - 1]:
            return True
    return False


@pytest.mark.parametrize("connectivity", [6, 18, 26])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kept_count", [1, 3])
@pytest.mark.parametrize("numbers", [(), (1, 3), (2,)])
def test_same_voxels_as_monai(connectivity, together, kept_count, numbers):
    """MONAI's own transform keeps the same voxels."""
    pytest.importorskip("skimage", reason="MONAI's components need scikit-image")
    from monai.transforms import KeepLargestConnectedComponent

    rule = KeepLargest(numbers, together, kept_count, connectivity)
    maps = [blobs(seed, (29, 23, 19), fill=3) for seed in range(15)]
    maps = [labels for labels in maps if not tied(labels, rule)]
    theirs = KeepLargestConnectedComponent(
        applied_labels=numbers or None,
        is_onehot=False,
        independent=not together,
        connectivity={6: 1, 18: 2, 26: 3}[connectivity],
        num_components=kept_count,
    )

    assert maps
    for labels in maps:
        expected = np.asarray(theirs(labels[None].copy()))[0]
        np.testing.assert_array_equal(keep_largest(labels, rule), expected)


@pytest.mark.usefixtures("_slabs")
@pytest.mark.parametrize("kept_count", [1, 2])
def test_of_equal_components_the_last_in_c_order_is_kept(kept_count):
    """A tie is broken by position, independent of memory order and of the sort algorithm."""
    labels = np.zeros((6, 7, 8), np.uint8, order="F")
    for corner in [(0, 5, 0), (2, 0, 7), (4, 3, 4)]:
        labels[corner] = 1

    result = keep_largest(labels, KeepLargest(parts=kept_count))

    kept = [tuple(int(n) for n in corner) for corner in np.argwhere(result)]
    assert kept == [(2, 0, 7), (4, 3, 4)][-kept_count:]


def test_nnunet_keeps_all_components_of_the_largest_size():
    """As remove_all_but_largest_component of acvl_utils: all whose size is the maximum."""
    labels = np.zeros((12, 8, 6), np.uint8, order="F")
    labels[1:3, 1:3, 1] = 1
    labels[6:8, 1:3, 1] = 2
    labels[6:8, 5:7, 4] = 1
    labels[10, 1, 1] = 1
    numbered, _ = ndimage.label(labels > 0, np.ones((3, 3, 3)))
    sizes = np.bincount(numbered.ravel())[1:]
    kept = np.isin(numbered, np.flatnonzero(sizes == sizes.max()) + 1)
    result = keep_largest(labels, KeepLargest((1, 2), together=True, ties="all"))
    np.testing.assert_array_equal(result, np.where(kept, labels, 0))
    assert kept.sum() == 12


@pytest.mark.usefixtures("_slabs")
@given(st.integers(0, 2**32 - 1), st.sampled_from([6, 18, 26]), st.booleans())
@settings(max_examples=25)
def test_keeping_the_largest_is_idempotent(seed, connectivity, together):
    """A second pass drops no voxel, and the only new value is 0."""
    labels = blobs(seed, (7, 6, 5))
    rule = KeepLargest(together=together, connectivity=connectivity)

    once = keep_largest(labels, rule)

    np.testing.assert_array_equal(keep_largest(once, rule), once)
    np.testing.assert_array_equal(once[once > 0], labels[once > 0])


def test_an_unchanged_label_map_is_returned_itself():
    """An unchanged label map is not copied, even if it is read-only."""
    labels = np.zeros((5, 6, 7), np.uint8, order="F")
    labels[1:3, 1:3, 1:3] = 4
    labels.flags.writeable = False

    assert keep_largest(labels, KeepLargest()) is labels


def test_memory_order_makes_no_difference():
    """C order, Fortran order and other strides give the same components."""
    labels = blobs(3)
    padded = np.zeros((34, 13, 11), np.uint8)
    padded[::2] = labels
    rule = KeepLargest(connectivity=6)

    expected = keep_largest(labels, rule)

    for same in (np.ascontiguousarray(labels), padded[::2]):
        np.testing.assert_array_equal(keep_largest(same, rule), expected)
        assert count_components(same, (1, 2, 3)) == count_components(labels, (1, 2, 3))


def test_values_and_sizes_of_components():
    """Values and sizes of all components add up to the label map, whatever the slabs."""
    labels = blobs(8)

    sizes_of_components = components.find_components(labels, 26)

    for n in (1, 2, 3):
        assert sizes_of_components.voxels[sizes_of_components.value == n].sum() == np.count_nonzero(
            labels == n
        )
    assert sizes_of_components.voxels[0] == 0


@pytest.mark.usefixtures("_slabs")
@pytest.mark.parametrize("numbers", [(), (1, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_removes_small_components(numbers, seed):
    """Components of at most the volume are removed, as TotalSegmentator counts them by SciPy."""
    labels, spacing = blobs(seed), (1.5, 1.5, 2.0)

    result = remove_small(labels, RemoveSmall(numbers, 36.0), math.prod(spacing))

    expected = labels.copy()
    for number in numbers or (1, 2, 3):
        numbered, count = ndimage.label(labels == number)
        sizes = np.bincount(numbered.ravel(), minlength=count + 1)
        expected[(labels == number) & (sizes <= 36.0 / np.prod(spacing))[numbered]] = 0
    np.testing.assert_array_equal(result, expected)
    assert (result != labels).any()
    assert result.dtype == labels.dtype


@pytest.mark.usefixtures("_slabs")
@pytest.mark.parametrize(("hops", "connectivity"), [(1, 6), (2, 18), (None, 26)])
@pytest.mark.parametrize("numbers", [(), (1, 3), (2,), (9,)])
@pytest.mark.parametrize("seed", range(2))
def test_fills_the_holes_that_monai_fills(seed, numbers, hops, connectivity):
    """Of one structure after the other, smaller ones within them too."""
    transforms = pytest.importorskip("monai.transforms")
    labels = blobs(seed, fill=-1.0)
    labels[2:10, 2:10, 1:10] = 3  # a shell around others, of which one has a hole itself
    labels[3:9, 3:9, 2:9] = blobs(seed + 9)[3:9, 3:9, 2:9]
    for structure, first in ((2, (4, 4, 3)), (1, (11, 3, 4)), (2, (12, 9, 4))):
        i, j, k = first
        labels[i : i + 4, j : j + 4, k : k + 4] = structure
        labels[i + 1 : i + 3, j + 1 : j + 3, k + 1 : k + 3] = np.eye(2)[:, :, None] * 3

    result = fill_holes(labels, FillHoles(numbers, connectivity))

    expected = transforms.FillHoles(numbers or None, hops)(labels[None].astype(np.float32))[0]
    np.testing.assert_array_equal(result, expected.numpy())
    assert (result != labels).any() == (9 not in numbers)
    assert result.dtype == labels.dtype


def test_a_label_map_without_holes_is_returned_itself():
    labels = np.zeros((5, 6, 7), np.uint8, order="F")
    labels[:, 2:4, 2:4] = 2

    assert fill_holes(labels, FillHoles()) is labels


@pytest.mark.usefixtures("_slabs")
@pytest.mark.parametrize("kind", ["one structure", "three structures", "one value"])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("size", "unit"), [(4, "voxels"), (700, "voxels"), (31.5, "mm3")])
@pytest.mark.parametrize("connectivity", [6, 18, 26])
@pytest.mark.filterwarnings("ignore:Parameter `min_size` is deprecated")
def test_removes_the_objects_that_monai_removes(kind, together, size, unit, connectivity):
    """MONAI counts a structure as one object as soon as a number above 1 occurs."""
    transforms = pytest.importorskip("monai.transforms")
    data = pytest.importorskip("monai.data")
    labels, spacing = blobs(2, n_labels=3), (1.5, 1.5, 2.0)
    labels = {"one structure": (labels == 1).astype(np.uint8), "one value": labels * 0 + 1}.get(
        kind, labels
    )

    rule = RemoveSmallObjects(size, unit, together, connectivity)
    result = remove_small_objects(labels, rule, math.prod(spacing))

    removal = transforms.RemoveSmallObjects(
        size, {6: 1, 18: 2, 26: 3}[connectivity], not together, by_measure=unit == "mm3"
    )
    image = data.MetaTensor(labels[None].astype(np.float32), affine=np.diag([*spacing, 1.0]))
    np.testing.assert_array_equal(result, removal(image)[0].numpy())
    assert result.dtype == labels.dtype
