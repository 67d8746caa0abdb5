"""Features of structures: the values of the IBSI, mirp by hand, and structures without features."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import nibabel as nib
import numpy as np
import pytest

from scanloom.core import Code, Grid, Layer, Segmentation, Structure, Volume
from scanloom.ops import radiomics
from scanloom.ops.radiomics import (
    Features,
    compute_features,
    effective_settings,
    estimate_features,
    settings_hash,
)
from scanloom.options import FeatureFamily, Radiomics
from support import ibsi_phantom

mirp = pytest.importorskip("mirp")

ALL: tuple[FeatureFamily, ...] = get_args(FeatureFamily)
QUICK = Radiomics(families=("statistics",), spacing=1.0)
SHAPE, SPACING = (44, 36, 20), (0.8, 0.7, 2.1)
CODE = Code("1", "SCT", "one")


def structure(number: int = 1, **more: Any) -> Structure:
    return Structure(f"s{number}", number, f"S {number}", CODE, CODE, (1, 2, 3), **more)


def segmentation(labels: np.ndarray, grid: Grid, *structures: Structure) -> Segmentation:
    layer = Layer(np.asfortranarray(labels, np.uint8), structures or (structure(),))
    return Segmentation("model", (layer,), grid)


def volume(array: np.ndarray, affine: np.ndarray | None = None, modality: str = "CT") -> Volume:
    affine = np.diag((*SPACING, 1.0)) if affine is None else affine
    grid = Grid(array.shape, affine)
    unit = "HU" if modality == "CT" else "a.u."
    return Volume(np.asfortranarray(array), grid, unit, modality)


def tissue(seed: int = 0, shape: tuple[int, int, int] = SHAPE) -> np.ndarray:
    from scipy.ndimage import gaussian_filter

    noise = np.random.default_rng(seed).normal(size=shape)
    return (gaussian_filter(noise, 1.2) * 1500 + 40).astype(np.int16)


def ellipsoid(
    centre: tuple[float, float, float] = (17, 21, 9), shape: tuple[int, int, int] = SHAPE
) -> np.ndarray:
    distance = [
        ((index - c) * s / r) ** 2
        for index, c, s, r in zip(np.indices(shape), centre, SPACING, (7, 6, 9), strict=True)
    ]
    return np.add.reduce(distance) < 1


def features(array: np.ndarray, mask: np.ndarray, settings: Radiomics = QUICK) -> Features:
    """Return the features of a mask in a CT."""
    scan = volume(array)
    [found] = compute_features([segmentation(mask, scan.grid)], scan, settings)
    return found


def by_hand(folder: Path, scan: Volume, mask: np.ndarray, **settings: object) -> Mapping[str, Any]:
    """Return what mirp computes of NIfTI files."""
    for name, voxels in (("image", scan.array), ("mask", mask)):
        kind = np.float32 if name == "image" else np.uint8
        nib.save(nib.Nifti1Image(voxels.astype(kind), scan.grid.affine), folder / f"{name}.nii.gz")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        [table] = mirp.extract_features(
            image=str(folder / "image.nii.gz"),
            mask=str(folder / "mask.nii.gz"),
            image_modality=scan.modality,
            base_feature_families="all",
            **settings,
        )
    return table.iloc[0]


def assert_same(found: Features, expected: Mapping[str, Any], rtol: float) -> None:
    assert not found.reason
    assert len(found.values) == 175
    for name, value in found.values.items():
        assert value == pytest.approx(float(expected[name]), rel=rtol, abs=1e-9), name


def test_the_phantom_has_the_published_values() -> None:
    phantom = ibsi_phantom.PHANTOM
    scan = volume(phantom.astype(np.int16), np.diag((2.0, 2.0, 2.0, 1.0)), "MR")
    settings = Radiomics(families=ALL, spacing=None, bins=6, normalise=False, min_voxels=8)

    [found] = compute_features([segmentation(phantom > 0, scan.grid)], scan, settings)

    values = ibsi_phantom.published()
    assert len(values) == 162
    wrong = {
        name: (found.values[name], value)
        for name, (value, tolerance) in values.items()
        if not abs((found.values[name] or 0.0) - value) <= tolerance
    }
    assert not wrong


@pytest.mark.parametrize("spacing", [1.9, None, pytest.param(0.9, marks=pytest.mark.thorough)])
def test_a_box_has_the_features_of_the_whole_scan(
    spacing: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (112, 113, 80)
    settings = Radiomics(families=("statistics", "glszm"), spacing=spacing)
    for modality in ("CT", "MR"):
        scan = volume(tissue(2, shape), modality=modality)
        labels = segmentation(ellipsoid((57, 53, 41), shape), scan.grid)
        [part] = compute_features([labels], scan, settings)
        with monkeypatch.context() as patch:
            whole = tuple(slice(0, n) for n in shape)
            patch.setattr(radiomics._Computer, "_outer", lambda *_, whole=whole: whole)
            [expected] = compute_features([labels], scan, settings)
        assert part.values == pytest.approx(expected.values, rel=1e-9)


@pytest.mark.thorough  # mirp loads ITK for files: 20 s
@pytest.mark.parametrize("modality", ["CT", "MR"])
def test_a_box_has_the_features_that_mirp_computes_from_files_of_the_whole_scan(
    tmp_path: Path, modality: str
) -> None:
    shape = (112, 113, 80)  # the box with its margin is a part of it
    affine = np.diag((-SPACING[0], -SPACING[1], SPACING[2], 1.0))
    affine[:3, 3] = (31.7, -12.2, 5.5)
    scan = volume(tissue(1, shape), affine, modality)
    mask = ellipsoid((57, 53, 41), shape)
    settings = Radiomics(families=ALL, spacing=1.9)
    binned: dict[str, Any] = {
        "CT": {
            "base_discretisation_method": "fixed_bin_size",
            "base_discretisation_bin_width": 25.0,
        },
        "MR": {
            "base_discretisation_method": "fixed_bin_number",
            "base_discretisation_n_bins": 32,
            "intensity_normalisation": "standardisation",
        },
    }
    expected = by_hand(tmp_path, scan, mask, new_spacing=1.9, **binned[modality])

    computer = radiomics._Computer(scan, settings)
    [(_, box)] = radiomics._boxes(segmentation(mask, scan.grid).layers[0])
    assert box is not None
    outer = computer._outer(box)
    assert all(part.start > 0 and part.stop < n for part, n in zip(outer, shape, strict=True))
    [found] = compute_features([segmentation(mask, scan.grid)], scan, settings)

    # a CT is rounded to whole HU; files of an MR are normalised in float32
    assert_same(found, expected, 1e-9 if modality == "CT" else 2e-4)


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0), (1, 0, 2)])
def test_axes_and_directions_do_not_matter(order: tuple[int, int, int]) -> None:
    """The same tissue, stored along other axes and backwards, in an oblique and mirrored scan."""
    array, mask = tissue(), ellipsoid()
    families: tuple[FeatureFamily, ...] = ("morphology", "statistics", "glcm", "glszm", "ngtdm")
    settings = Radiomics(families=families, spacing=1.5)
    first = features(array, mask, settings)
    turn = np.array([[0.8, 0.6, 0], [-0.6, 0.8, 0], [0, 0, 1]])
    affine = np.eye(4)
    affine[:3, :3] = (turn * SPACING)[:, order]
    turned = array.transpose(order)[::-1], mask.transpose(order)[::-1]
    affine[:3, 0] *= -1
    scan = volume(turned[0], affine)

    [second] = compute_features([segmentation(turned[1], scan.grid)], scan, settings)

    assert second.voxels == first.voxels
    assert first.values["morph_volume"] == pytest.approx(4 / 3 * np.pi * 7 * 6 * 9, rel=0.05)
    assert second.values.keys() == first.values.keys()
    for name, value in first.values.items():
        assert second.values[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name


def test_last_bits_of_a_header_do_not_matter() -> None:
    """A spacing of 0.8 mm in float32 would give 21 voxels of 1.6 mm in place of 20."""
    shape = (40, 40, 20)
    exact = np.diag((0.8, 0.8, 1.6, 1.0))
    mask = ellipsoid((20, 20, 10), shape)
    found = []
    for affine in (exact, exact.astype(np.float32).astype(np.float64)):
        scan = volume(tissue(3, shape), affine)
        settings = replace(QUICK, spacing=1.6)
        found += compute_features([segmentation(mask, scan.grid)], scan, settings)
    assert found[0].values == found[1].values


def test_spacing_is_that_of_each_axis() -> None:
    """A bar is as long and as thick as it is in mm, along each axis."""
    settings = Radiomics(families=("morphology",), spacing=None)
    for axis, length in enumerate((30, 24, 14)):
        mask = np.zeros(SHAPE, bool)
        part = [slice(4, 12), slice(4, 12), slice(4, 12)]
        part[axis] = slice(3, 3 + length)
        mask[tuple(part)] = True
        extents = [length if n == axis else 8 for n in range(3)]
        found = features(tissue(), mask, settings).values
        # mirp's hull has its corners on the faces of the outermost voxels
        diameter = np.linalg.norm(np.multiply(extents, SPACING))
        assert found["morph_diam"] == pytest.approx(diameter, rel=0.05)
        assert found["morph_vol_approx"] == pytest.approx(np.prod(np.multiply(extents, SPACING)))


def test_what_has_no_features_has_a_reason() -> None:
    array = tissue()
    box = np.zeros(SHAPE, bool)
    box[10:20, 10:20, 5:12] = True

    def reason(mask: np.ndarray, **settings: Any) -> str:
        found = features(array, mask, replace(QUICK, **settings))
        assert not found.reason or not found.values
        return found.reason

    assert reason(box) == ""
    assert reason(np.zeros(SHAPE, bool)) == "no voxels"
    one = np.zeros(SHAPE, bool)
    one[20, 20, 10] = True
    assert reason(one) == "smaller than 64 voxels of 1 mm"
    assert reason(one, spacing=None) == "smaller than 64 voxels"
    assert reason(one, spacing=None, min_voxels=1) == "one voxel thick"
    thin = box.copy()
    thin[:, :, 6:] = False
    assert reason(thin) == "one voxel thick"
    assert reason(box, max_voxels=1000) == "larger than a box of 1000 voxels of 1 mm"
    assert reason(box, spacing=20.0) == "smaller than 64 voxels of 20 mm"
    edge = np.zeros(SHAPE, bool)
    edge[:8, -8:, :7] = True
    assert reason(edge) == ""
    assert reason(np.ones(SHAPE, bool)) == ""


def test_padding_belongs_to_no_structure() -> None:
    array = tissue()
    mask = ellipsoid()
    scan = volume(array)
    outside = ~ellipsoid((17, 21, 9)) & (np.indices(SHAPE)[0] < 12)
    padded = np.where(outside, -2000, array).astype(np.int16)
    everything = np.ones(SHAPE, bool)

    def found(values: np.ndarray, labels: np.ndarray) -> Features:
        padded_scan = replace(volume(values), padding=-2000.0)
        whole = segmentation(labels, scan.grid)
        return compute_features([whole], padded_scan, replace(QUICK, spacing=None))[0]

    assert found(padded, everything).voxels == mask.size
    assert found(padded, everything).values == found(padded, ~outside).values
    assert found(np.full(SHAPE, -2000, np.int16), mask).reason == "only padding"
    nan = np.where(outside, np.nan, array).astype(np.float32)
    assert found(nan, everything).values == found(padded, everything).values
    for modality in ("MR", "CT"):
        empty = volume(np.full(SHAPE, np.nan, np.float32), modality=modality)
        [none] = compute_features([segmentation(mask, scan.grid)], empty, QUICK)
        assert none.reason == "only padding"


def test_equal_intensities_have_what_is_defined() -> None:
    for modality in ("CT", "MR"):
        scan = volume(np.full(SHAPE, 30, np.int16), modality=modality)
        settings = Radiomics(spacing=2.0)
        [found] = compute_features([segmentation(ellipsoid(), scan.grid)], scan, settings)
        assert found.reason == ""
        assert found.values["stat_mean"] == pytest.approx(30 if modality == "CT" else 0)
        assert found.values["stat_var"] == 0
        assert all(value is None or np.isfinite(value) for value in found.values.values())


def test_experimental_structures_on_request_alone() -> None:
    array, mask = tissue(), ellipsoid()
    scan = volume(array)
    unsure = segmentation(mask, scan.grid, structure(experimental=True))
    assert compute_features([unsure], scan, QUICK)[0].reason == "experimental"
    [found] = compute_features([unsure], scan, replace(QUICK, experimental=True))
    assert found.values == features(array, mask).values


def test_sheared_scans_have_none() -> None:
    affine = np.diag((*SPACING, 1.0))
    affine[1, 2] = 0.4
    for modality in ("CT", "MR"):
        scan = volume(tissue(), affine, modality)
        [found] = compute_features([segmentation(ellipsoid(), scan.grid)], scan, QUICK)
        assert found.reason == "sheared scan"


def test_layers_that_overlap_are_structures_of_their_own() -> None:
    array = tissue()
    scan = volume(array)
    masks = ellipsoid(), ellipsoid((20, 19, 9))
    layers = tuple(
        Layer(np.asfortranarray(mask * np.uint8(n)), (structure(n),))
        for n, mask in enumerate(masks, 1)
    )
    found = compute_features([Segmentation("model", layers, scan.grid)], scan, QUICK)
    assert [each.values for each in found] == [features(array, mask).values for mask in masks]
    assert [each.voxels for each in found] == [int(mask.sum()) for mask in masks]


def test_a_fault_in_one_structure_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scan = volume(tissue())
    labels = ellipsoid().astype(np.uint8)
    labels[labels > 0] = 1 + (np.indices(SHAPE)[0] > 17)[labels > 0]
    both = segmentation(labels, scan.grid, structure(1), structure(2))
    inner, calls = radiomics._values, []

    def failing(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise ValueError("/secret/path")
        return inner(*arguments)

    monkeypatch.setattr(radiomics, "_values", failing)
    first, second = compute_features([both], scan, QUICK)
    assert first.reason == "mirp can't compute them (ValueError)"
    assert second.reason == ""

    def without(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(radiomics, "_values", without)
    with pytest.raises(MemoryError):
        compute_features([both], scan, QUICK)


def test_mirp_is_silent_and_leaves_logging_and_warnings(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, filters = root.handlers[:], warnings.filters[:]
    root.handlers.clear()
    try:
        assert features(tissue(), ellipsoid()).reason == ""
        assert root.handlers == []
    finally:
        root.handlers[:] = handlers
    assert warnings.filters == filters
    assert capfd.readouterr() == ("", "")


def test_settings_of_one_hash_are_comparable() -> None:
    ct, mr = volume(tissue()), volume(tissue(), modality="MR")
    plain = effective_settings(Radiomics(), ct)
    assert plain["mirp"] == metadata.version("mirp")
    assert effective_settings(Radiomics(bins=8, min_voxels=9, experimental=True), ct) == plain
    others = [
        effective_settings(Radiomics(), mr),
        effective_settings(Radiomics(bin_width=10), ct),
        effective_settings(Radiomics(spacing=1), ct),
        effective_settings(Radiomics(spacing=None), ct),
        effective_settings(Radiomics(families=("glcm",)), ct),
        effective_settings(Radiomics(normalise=False), mr),
        {**plain, "mirp": "3.0.0"},
    ]
    assert len({settings_hash(each) for each in (plain, *others)}) == 8
    text = b'{"a":[2.0],"b":1}'
    assert settings_hash({"b": 1, "a": [2.0]}) == hashlib.sha256(text).hexdigest()


def test_the_estimate_is_that_of_the_largest_box() -> None:
    small, large = Grid((100, 100, 50), np.diag((1.0, 1, 2, 1))), Grid((512,) * 3, np.eye(4))
    settings = Radiomics(spacing=1.0, max_voxels=2_000_000)
    assert estimate_features(small, settings, hounsfield=True) == 10**6 * 220
    assert estimate_features(large, settings, hounsfield=True) == 2 * 10**6 * 220
    assert estimate_features(large, settings, hounsfield=False) == 512**3 * 4
