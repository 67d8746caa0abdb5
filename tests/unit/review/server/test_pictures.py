"""Slices are those that SimpleITK has at the same places, right way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from scanloom.core import Grid, Volume
from scanloom.review.preview.content import choose_content
from scanloom.review.preview.slicing import View, find_body
from scanloom.review.server.cases import (
    PLANES,
    OpenedCase,
    _windows,
    as_image,
    describe,
    open_case,
    slices,
)
from support.case_folders import ORDERS
from support.review_cases import affine_of, publish, scan_array

LPS = np.diag((-1.0, -1.0, 1.0, 1.0))
TOWARDS = {"axial": ((1, 0, 0), (0, 1, 0)), "coronal": ((1, 0, 0), (0, 0, -1))}
TOWARDS["sagittal"] = ((0, 1, 0), (0, 0, -1))
"""LPS directions of columns and rows: to the left or back, and to the back or feet."""


def stored_labels(path: Path) -> np.ndarray:
    """Return a label map as SimpleITK reads it; nibabel if its slices are sheared."""
    try:
        return sitk.GetArrayFromImage(sitk.ReadImage(str(path))).transpose(2, 1, 0)
    except RuntimeError:
        return np.asarray(nib.load(path).dataobj)


def drawn(case: OpenedCase, array: Any, plane: str, index: int) -> np.ndarray:
    about = describe(case)["planes"][plane]
    pixels = np.frombuffer(slices(array, PLANES[plane], index, index), array.dtype)
    return pixels.reshape(about["height"], about["width"])


GEOMETRIES = ((0.0, 0.0), (20.0, 0.0), (0.0, 0.8))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("codes", "oblique", "shear"),
    [(codes, *GEOMETRIES[n % 3]) for n, codes in enumerate(ORDERS[::2])],
)
def test_pixels_are_those_of_simpleitk(
    tmp_path: Path, codes: str, oblique: float, shear: float
) -> None:
    """Each pixel is looked up in the file, by its place in mm that the page shows."""
    array, affine = scan_array(), affine_of(codes, oblique, shear)
    folder = publish(tmp_path, array, affine, also=("image",), first=300 if shear else 1)
    case = open_case(tmp_path / "out", folder.name, tmp_path / "key")
    about = describe(case)
    to_lps = np.array(about["affine"])
    stored_affine = LPS @ affine  # of the stored array; SimpleITK can't hold sheared ones
    files = {"image": (array, case.image.array if case.image else None)}
    files["labels"] = stored_labels(folder / case.layers[0].file), case.layers[0].labels
    for stored, shown in files.values():
        for plane, at in about["planes"].items():
            index = at["count"] // 2
            pixels = drawn(case, shown, plane, index)
            rows, columns = np.indices(pixels.shape)
            voxel = np.zeros((*pixels.shape, 3))
            voxel[..., at["normal"]] = index
            voxel[..., at["across"]], voxel[..., at["down"]] = columns, rows
            mm = voxel @ to_lps[:3, :3].T + to_lps[:3, 3]
            source = (mm - stored_affine[:3, 3]) @ np.linalg.inv(stored_affine[:3, :3]).T
            nearest = np.rint(source).astype(int)
            assert np.abs(source - nearest).max() < 1e-3
            np.testing.assert_array_equal(pixels, stored[tuple(np.moveaxis(nearest, -1, 0))])


@pytest.mark.parametrize("codes", ORDERS[::5])
def test_the_patients_right_is_on_the_left(codes: str) -> None:
    view = View(Grid((4, 5, 6), affine_of(codes, 10.0)))
    to_lps = np.diag((1, 1, -1, 1)) @ view.to_lpi
    for name, plane in PLANES.items():
        for axis, towards in zip((plane.across, plane.down), TOWARDS[name], strict=True):
            direction = to_lps[:3, axis] / np.linalg.norm(to_lps[:3, axis])
            assert direction @ towards > 0.9


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        (-1000, 3000, np.int16),
        (0, 60000, np.uint16),
        (-5, 60000, np.float32),
        (-40000, 20000, np.int32),
        (0, 1, np.float32),
        (-1e9, 1e9, np.float64),
        (3e38, 3.2e38, np.float32),
        (7, 7, np.int16),
    ],
)
def test_values_of_pixels_are_those_of_the_scan(low: float, high: float, dtype: Any) -> None:
    array = np.linspace(low, high, 60, dtype=np.float64).reshape(3, 4, 5).astype(dtype)
    array = np.rint(array) if high - low > 100 and np.dtype(dtype).kind == "f" else array
    image = as_image(
        Volume(array, Grid((3, 4, 5), affine_of()), "a.u.", "MR"),
        View(Grid((3, 4, 5), affine_of("LPI"))),
    )

    values = image.array.astype(np.float64) * image.slope + image.intercept

    tolerance = 0 if image.exact else image.slope / 2 * 1.001
    np.testing.assert_allclose(values, array.astype(np.float64), rtol=0, atol=tolerance)
    assert image.exact == ((high - low < 65536 and low != 0) or (high > 1 and high < 1e5))


def test_what_is_not_a_number_is_lowest() -> None:
    array = np.full((3, 3, 3), 5.0, np.float32)
    array[0], array[1, 1, 1], array[2, 2, 2] = np.nan, np.inf, -2
    grid = Grid((3, 3, 3), affine_of("LPI"))

    image = as_image(Volume(array, grid, "a.u.", "MR"), View(grid))

    values = image.array * image.slope + image.intercept
    assert values[0, 0, 0] == values[1, 1, 1] == -2
    assert values[1, 0, 0] == 5


def test_a_scan_of_one_fraction_has_its_value() -> None:
    grid = Grid((3, 3, 3), affine_of())
    image = as_image(Volume(np.full((3, 3, 3), 0.5, np.float32), grid, "a.u.", "MR"), View(grid))
    assert np.unique(image.array * image.slope + image.intercept).tolist() == [0.5]


def test_a_scan_of_mr_has_the_window_of_its_preview() -> None:
    """Noise of the air around the body does not widen it."""
    array = np.random.default_rng(0).integers(0, 30, (40, 36, 30)).astype(np.int16)
    array[8:32, 8:28, 6:24] = 400 + np.arange(24)[:, None, None] * 20
    volume = Volume(array, Grid(array.shape, affine_of()), "a.u.", "MR")
    body = find_body(volume, View(volume.grid), hounsfield=False)

    windows = _windows(volume, body)

    assert windows == (("usual", choose_content(volume, (), ()).window),)
