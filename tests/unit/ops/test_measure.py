from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import SimpleITK as sitk
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from scanloom.core import (
    Code,
    Flag,
    Grid,
    Layer,
    Measurement,
    Relations,
    ScanError,
    Segmentation,
    Structure,
    Volume,
)
from scanloom.core.relations import Asymmetry, Share
from scanloom.ops import measure as module
from scanloom.ops.measure import QUANTILES, add_ratios, centroids, measure, resolve_asymmetries
from scanloom.ops.run_length import iter_slabs

CODE = Code("85756007", "SCT", "Tissue")
SPACING = (0.7, 1.1, 2.3)


def structures(*numbers: int) -> tuple[Structure, ...]:
    return tuple(Structure(f"s{n}", n, f"S {n}", CODE, CODE, (9, 99, n % 256)) for n in numbers)


def segmentation(*layers: tuple[np.ndarray, tuple[int, ...]]) -> Segmentation:
    layer_tuple = tuple(Layer(labels, structures(*numbers)) for labels, numbers in layers)
    return Segmentation("model", layer_tuple, Grid(layers[0][0].shape, np.diag([*SPACING, 1])))


def volume(array: np.ndarray, padding: float | None = None) -> Volume:
    return Volume(array, Grid(array.shape, np.diag([*SPACING, 1])), "HU", "CT", padding)


def labels_of(shape=(23, 17, 9), numbers=(1, 2, 5), dtype=np.uint8, seed=0) -> np.ndarray:
    field = ndimage.uniform_filter(np.random.default_rng(seed).random((4, *shape)), (0, 5, 5, 3))
    return np.array([0, *numbers], dtype)[field.argmax(0)]


def intensities(dtype, shape=(23, 17, 9), seed=1) -> np.ndarray:
    values = np.random.default_rng(seed).normal(300, 2000, shape)
    if np.dtype(dtype).kind == "u":
        values = np.abs(values)
    return values.clip(0 if np.dtype(dtype) == np.uint8 else None, None).astype(dtype)


@pytest.fixture(params=[100, 1 << 20], ids=["a slice a slab", "one slab"])
def _slabs(request, monkeypatch):
    monkeypatch.setattr(module, "SLAB_VOXELS", request.param)


@pytest.mark.usefixtures("_slabs")
@pytest.mark.parametrize("padding", [None, 0.0])
@pytest.mark.parametrize(
    ("dtype", "far"),
    [(t, 0) for t in ["int16", "uint16", "int32", "int64", "float32", "float64", "uint8"]]
    + [(t, 2**30) for t in ["int32", "int64", "float32", "float64"]],
)
def test_equals_numpy_on_each_mask(dtype, padding, far):
    """Every number agrees with NumPy on the structure's voxels without padding."""
    labels, array = labels_of(), intensities(dtype)
    array[labels == 0] += array.dtype.type(far)
    array[::3, 4] = 0

    measured = measure(segmentation((labels, (1, 2, 5))), volume(array, padding))

    for m, n in zip(measured, (1, 2, 5), strict=True):
        mask = labels == n
        values = array[mask & (array != padding) if padding is not None else mask]
        exact = values.astype(np.float64)
        voxels = np.argwhere(mask)
        assert (m.model, m.label, m.number, m.unit) == ("model", f"s{n}", n, "HU")
        assert m.voxels == np.count_nonzero(mask) > values.size - (padding is None)
        assert m.volume_ml == pytest.approx(m.voxels * np.prod(SPACING) / 1000, rel=1e-12)
        assert m.mean == pytest.approx(exact.mean(), rel=1e-9)
        assert m.sd == pytest.approx(exact.std(), rel=1e-9)
        np.testing.assert_allclose(
            [m.p05, m.p25, m.median, m.p75, m.p95], np.quantile(exact, QUANTILES), rtol=1e-12
        )
        assert m.box == (tuple(voxels.min(0)), tuple(voxels.max(0)))
        assert m.components == ndimage.label(mask, np.ones((3, 3, 3)))[1]


@pytest.mark.usefixtures("_slabs")
@pytest.mark.parametrize("padding", [None, 300])
@pytest.mark.parametrize("dtype", ["int16", "float32"])
def test_labels_that_are_noise_equal_scipy(dtype, padding):
    """Nearly every voxel is labelled; structures have hundreds of parts, and numbers have gaps."""
    labels = np.random.default_rng(4).integers(0, 26, (23, 17, 9)).astype(np.uint16) * 11
    numbers, array = tuple(range(22, 11 * 26, 11)), intensities(dtype).round()

    measured = measure(segmentation((labels, numbers)), volume(array, padding))

    valid = np.where(array == padding, 0, labels)
    np.testing.assert_allclose([m.mean for m in measured], ndimage.mean(array, valid, numbers))
    medians = ndimage.median(array, valid, numbers)
    np.testing.assert_allclose([m.median for m in measured], medians)
    boxes = ndimage.find_objects(labels.astype(int))
    for m in measured:
        box = tuple((at.start, at.stop - 1) for at in boxes[m.number - 1])
        assert tuple(zip(*m.box, strict=True)) == box
        assert m.voxels == np.count_nonzero(labels == m.number)
        assert m.components == ndimage.label(labels == m.number, np.ones((3, 3, 3)))[1] > 10


def test_agrees_with_simpleitk():
    """ITK computes the same size, box, mean and standard deviation."""
    labels, array = labels_of(), intensities(np.int16)

    measured = measure(segmentation((labels, (1, 2, 5))), volume(array))

    image, mask = (sitk.GetImageFromArray(np.ascontiguousarray(a.T)) for a in (array, labels))
    image.SetSpacing(SPACING)
    mask.SetSpacing(SPACING)
    theirs = sitk.LabelIntensityStatisticsImageFilter()
    theirs.Execute(mask, image)
    for m in measured:
        first, size = np.split(np.array(theirs.GetBoundingBox(m.number)), 2)
        sample = m.voxels / (m.voxels - 1)  # ITK returns the sample variance
        assert m.voxels == theirs.GetNumberOfPixels(m.number)
        assert m.volume_ml * 1000 == pytest.approx(theirs.GetPhysicalSize(m.number))
        assert m.box == (tuple(first), tuple(first + size - 1))
        assert m.mean == pytest.approx(theirs.GetMean(m.number))
        assert m.sd * sample**0.5 == pytest.approx(theirs.GetStandardDeviation(m.number))


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
@settings(max_examples=60)
def test_quantiles_are_exact_for_any_values(values):
    """Coarse bins lose nothing, however uneven the distribution of values."""
    array = np.array(values, np.float32).reshape(1, 1, -1)

    (m,) = measure(segmentation((np.ones(array.shape, np.uint8), (1,))), volume(array))

    exact = array.astype(np.float64)
    np.testing.assert_allclose(
        [m.p05, m.p25, m.median, m.p75, m.p95],
        np.quantile(exact, QUANTILES),
        rtol=1e-9,
        atol=1e-9 * np.abs(exact).max(),
    )
    assert m.sd == pytest.approx(exact.std(), rel=1e-6, abs=1e-9 * np.abs(exact).max())


@pytest.mark.parametrize(
    ("voxel", "touches"),
    [
        (np.s_[0, 3, 3], True),
        (np.s_[8, 3, 3], True),
        (np.s_[3, 0, 3], True),
        (np.s_[3, 6, 3], True),
        (np.s_[3, 3, 0], True),
        (np.s_[3, 3, 4], True),
        (np.s_[1:8, 1:6, 1:4], False),
    ],
)
def test_border_voxels_are_flagged(voxel, touches):
    """A structure at the first or last index of any axis is flagged, one next to it is not."""
    labels = np.zeros((9, 7, 5), np.uint8)
    labels[voxel] = 1

    (m,) = measure(segmentation((labels, (1,))), volume(labels.astype(np.int16)))

    assert m.flags == ((Flag.TOUCHES_BORDER,) if touches else ())


def test_flags_of_the_case_follow_the_structures_own():
    """Every measurement has the flags of the case."""
    labels = np.zeros((5, 5, 5), np.uint8)

    (m,) = measure(segmentation((labels, (1,))), volume(labels.astype(np.int16)), [Flag.SHEARED])

    assert m.flags == (Flag.EMPTY, Flag.SHEARED)


@pytest.mark.parametrize("dtype", [np.int16, np.float32])
def test_an_empty_structure_has_no_intensities(dtype):
    """An empty structure has 0 voxels, and None where 0 would be wrong."""
    labels = np.zeros((5, 5, 5), np.uint8)
    labels[2, 2, 2] = 1

    _, m = measure(segmentation((labels, (1, 2))), volume(labels.astype(dtype)))

    assert (m.voxels, m.volume_ml, m.components, m.box) == (0, 0.0, 0, None)
    assert {m.mean, m.sd, m.p05, m.p25, m.median, m.p75, m.p95} == {None}
    assert m.flags == (Flag.EMPTY,)


@pytest.mark.parametrize(("dtype", "odd"), [(np.int16, -2000), (np.float32, np.nan)])
def test_a_structure_of_padding_alone_has_a_size_but_no_intensities(dtype, odd):
    """Padding and NaN count as voxels, not as intensities; other structures keep theirs."""
    labels = np.zeros((5, 5, 5), np.uint8)
    labels[1], labels[3] = 1, 2
    array = np.full(labels.shape, 7, dtype)
    array[1] = odd

    inside, two = measure(segmentation((labels, (1, 2))), volume(array, -2000))

    assert (inside.voxels, inside.mean, inside.sd, inside.median) == (25, None, None, None)
    assert (two.voxels, two.mean, two.sd, two.median) == (25, 7.0, 0.0, 7.0)


def test_layers_are_measured_separately():
    """Overlapping structures in two layers both count shared voxels; the layers' order is kept."""
    first, second = np.zeros((2, 6, 6, 6), np.uint16)
    first[1:5, 1:5, 1:5], second[2:4, 2:4, 2:4] = 300, 7
    array = np.arange(216, dtype=np.int16).reshape(6, 6, 6)

    measured = measure(segmentation((first, (300, 301)), (second, (7,))), volume(array))

    assert [(m.number, m.voxels) for m in measured] == [(300, 64), (301, 0), (7, 8)]
    assert measured[2].mean == array[2:4, 2:4, 2:4].mean()


@pytest.mark.parametrize("slab", [1, 1 << 21])
def test_centroids_are_means_of_positions(slab, monkeypatch):
    monkeypatch.setattr(module, "iter_slabs", lambda shape: iter_slabs(shape, slab))
    affine = np.array([[0.0, -1.5, 0.2, 9], [0.8, 0, 0.4, -20], [0, 0, 3, 5], [0, 0, 0, 1]])
    first, second = labels_of(), labels_of(numbers=(3, 4, 6), seed=3)
    layers = ((first, (1, 2, 5, 7)), (second, (3, 4, 6)))
    found = centroids(replace(segmentation(*layers), grid=Grid(first.shape, affine)))

    masks = {f"s{n}": labels == n for labels, numbers in layers for n in numbers}
    assert found.keys() == {label for label, mask in masks.items() if mask.any()}
    assert len(found) == 6
    for label, (ml, point) in found.items():
        index = np.argwhere(masks[label])
        assert ml == pytest.approx(len(index) * 3.6 / 1000)
        assert point == pytest.approx((index @ affine[:3, :3].T + affine[:3, 3]).mean(axis=0))


def test_other_shapes_are_refused():
    """A segmentation on another grid is an error of the caller."""
    labels = np.ones((5, 5, 5), np.uint8)

    with pytest.raises(ValueError, match="does not fit"):
        measure(segmentation((labels, (1,))), volume(np.zeros((5, 5, 6), np.int16)))


def test_memory_does_not_grow_with_the_scan():
    """Measuring 19 million voxels takes a fraction of the memory of a mask and its values."""
    import tracemalloc

    labels = np.zeros((400, 400, 120), np.uint8, order="F")
    labels[50:350, 50:350] = 1
    array = np.zeros(labels.shape, np.int16, order="F")
    array[::2] = 100
    segmented = segmentation((labels, (1, 2)))
    tracemalloc.start()

    measure(segmented, volume(array))

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20


def of_volumes(flag: Flag | None = None, **voxels: int) -> list[Measurement]:
    """Return measurements of structures of a model `m`, by label; `flag` is that of the last."""
    rows = [
        Measurement("m", label, n, count, count / 1000, "a.u.", *[None] * 7, None, 1)
        for n, (label, count) in enumerate(voxels.items(), 1)
    ]
    return [*rows[:-1], replace(rows[-1], flags=() if flag is None else (flag,))]


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [(3300, 2700, 20.0), (2700, 3300, -20.0), (50, 50, 0.0), (50, 0, 200.0), (0, 0, None)],
)
def test_the_asymmetry_index(left: int, right: int, expected: float | None) -> None:
    """(L - R) over the mean of both, in percent; nothing if there is nothing."""
    relations = Relations(asymmetries=(Asymmetry(("a", "b"), ("m/c",)),))
    rows = add_ratios(of_volumes(a=left, b=0, other=7, c=right), relations)
    assert [row.asymmetry for row in rows] == [expected, expected, None, expected]
    assert [row.asymmetry_of for row in rows] == [
        None if row.label == "other" else "m/a + m/b : m/c" for row in rows
    ]


def test_what_was_not_searched_has_no_asymmetry_and_no_share() -> None:
    """Nor has another structure a share in it."""
    relations = Relations(shares=(Share(("b", "c")),), asymmetries=(Asymmetry(("a",), ("c",)),))
    rows = add_ratios(of_volumes(Flag.CROP_EMPTY, a=3000, b=1000, c=0), relations)
    assert [row.asymmetry for row in rows] == [None, None, None]
    assert [row.share for row in rows] == [None, None, None]
    relations = Relations(shares=(Share(("b",), ("a", "c")),))
    rows = add_ratios(of_volumes(Flag.CROP_EMPTY, a=3000, b=1000, c=0), relations)
    assert [row.share for row in rows] == [3.0, None, None]


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ("x", "c", "asymmetries.left: expected one of a, b, c"),
        ("a", "a", "asymmetries: m/a is named twice"),
    ],
)
def test_mistakes_in_asymmetries(left: str, right: str, message: str) -> None:
    known = [("m", label) for label in ("a", "b", "c")]
    with pytest.raises(ScanError) as error:
        resolve_asymmetries([Asymmetry((left,), (right,))], known)
    assert error.value.detail.startswith(message)


def test_what_a_model_calls_experimental_is_flagged() -> None:
    """In tables, too: who reads the volume of thousands of cases looks at no preview."""
    labels = np.zeros((5, 5, 5), np.uint8)
    labels[2, 2, 2] = 1
    near, lost = (replace(each, experimental=True) for each in structures(1, 2))
    found = replace(segmentation((labels, (1,))), layers=(Layer(labels, (near, lost)),))

    flags = [m.flags for m in measure(found, volume(np.zeros((5, 5, 5))))]

    assert flags == [(Flag.EXPERIMENTAL,), (Flag.EMPTY, Flag.EXPERIMENTAL)]
