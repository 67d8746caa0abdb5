"""Grids of every size and turn: a written result is published, and lies there for all readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydicom.valuerep import format_number_as_ds
from scipy.spatial.transform import Rotation

from scanloom.core import Flag, Grid
from scanloom.io.dicom.geometry.slices import Slice
from scanloom.io.dicom.geometry.stack import stack_slices
from scanloom.io.dicom.series import _split_slices, _usable_headers
from scanloom.io.readback.nifti import check_geometry
from scanloom.io.scan import GridOnlySource, NiftiSource, Source
from scanloom.io.volumes.nifti import MAX_DISPLACEMENT_MM, _affine, _forms, _read_header
from scanloom.io.write.nifti import _header
from support import case_folders
from support.write_dicom import write_series

FLOAT32 = 1e-3
"""mm by which float32 may move a corner of the largest grid here, in addition to a qform's."""


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Axis orders, spacings of 0.2 to 8 mm, up to 1,024 voxels, turns of 1e-7 to 1 rad, shears."""
    codes = draw(st.sampled_from(case_folders.ORDERS))
    spacing = np.array(draw(st.tuples(*[st.floats(0.2, 8)] * 3)))
    i, j, k = draw(st.tuples(*[st.integers(8, 1024)] * 3))
    vector = np.array(draw(st.tuples(*[st.sampled_from((0.0, 1.0, -0.6, 0.3))] * 3)))
    angle = draw(st.one_of(st.just(0.0), st.floats(-7, 0).map(lambda n: 10.0**n)))
    turn = Rotation.from_rotvec(vector / max(np.linalg.norm(vector), 0.1) * angle)
    shear = draw(st.sampled_from((0.0, 0.0, 0.0, 0.4, -0.02, 3e-4)))
    affine = np.eye(4)
    affine[:3, :3] = turn.as_matrix() @ case_folders.directions(codes) * spacing
    affine[:3, 2] += shear * spacing[2] * affine[:3, 1] / spacing[1]
    affine[:3, 3] = draw(st.tuples(*[st.floats(-2000, 2000)] * 3))
    return Grid((i, j, k), affine)


def check(grid: Grid, source: Source, scan: np.ndarray, path: Path) -> nib.Nifti1Header:
    """Write a header, read it back, and compare every corner by two readers with the scan's."""
    block = _header(np.empty(1, np.uint8), grid, source, 1.0)
    path = case_folders.header_file(path, block)
    check_geometry(path, grid, source)
    header = nib.Nifti1Header(block[:348])
    assert header["sform_code"] + header["qform_code"] > 0
    if header["sform_code"]:
        assert (
            case_folders.farthest(header.get_best_affine(), scan, grid.shape) <= MAX_DISPLACEMENT_MM
        )
        reads_sform = header["sform_code"] == 1 or header["qform_code"] == 0
        if reads_sform and not grid.sheared:
            assert (
                case_folders.farthest(case_folders.by_itk(path), scan, grid.shape)
                <= MAX_DISPLACEMENT_MM
            )
    return header


def of_dicom(grid: Grid, slice_: Slice) -> tuple[Grid, np.ndarray]:
    """Return the grid of a stack as it is read, and the scan's affine by PS3.3 C.7.6.2.1.1.

    `one` is a slice of a file, to be put where the slices are: its numbers, as decimal strings
    of 16 characters say them.
    """
    columns, rows, count = grid.shape
    axes = case_folders.LPS[:, None] * grid.affine[:3, :3] / grid.spacing
    step = axes[:, 2] * grid.spacing[2]
    if np.cross(axes[:, 0], axes[:, 1]) @ step < 0:
        step = -step  # slices ascend along row x column
    orientation, spacing = (
        as_written(axes[:, :2].T.ravel()),
        as_written((grid.spacing[1], grid.spacing[0])),
    )
    places = [as_written(grid.affine[:3, 3] * case_folders.LPS + k * step) for k in range(count)]
    header = copy(slice_.header)
    header.rows, header.columns = rows, columns
    slice_ = replace(slice_, header=header, orientation=orientation, spacing=spacing)
    stack = stack_slices([replace(slice_, position=position) for position in places])
    scan = np.eye(4)
    scan[:3, 0] = np.array(orientation[:3]) * spacing[1]
    scan[:3, 1] = np.array(orientation[3:]) * spacing[0]
    scan[:3, 2] = (np.array(places[-1]) - places[0]) / (count - 1)
    scan[:3, 3] = places[0]
    rounded = Flag.AFFINE_ROUNDED in stack.flags  # a drift that is no tilt was taken out
    return Grid(grid.shape, stack.affine), stack.affine if rounded else np.diag(
        (*case_folders.LPS, 1)
    ) @ scan


def as_written(numbers: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(format_number_as_ds(float(v))) for v in numbers)


@cache
def a_slice(folder: Path) -> Slice:
    return _split_slices(_usable_headers(write_series(folder, np.zeros((3, 3, 3), np.int16))))[0]


def of_nifti(grid: Grid, forms: str, path: Path) -> tuple[Grid, NiftiSource]:
    """Return the grid that is read from a NIfTI with these forms, as nibabel writes them."""
    header = case_folders.header_with(grid.shape)
    header.set_zooms(grid.spacing)
    if forms != "qform":
        header.set_sform(grid.affine, 2 if forms == "aligned" else 1)
    if forms != "sform":
        header.set_qform(grid.affine, 1)
    header = _read_header(case_folders.header_file(path, header))
    source, broken = _forms(header)
    assert not broken
    affine, _ = _affine(header, source, grid.shape, None)
    return Grid(grid.shape, affine), source


def place_of_dicom(grid: Grid, folder: Path) -> None:
    read, scan = of_dicom(grid, a_slice(folder / "series"))
    header = check(read, GridOnlySource(), scan, folder / "x.nii.gz")
    assert header["sform_code"] == 1
    if header["qform_code"]:
        assert not read.sheared
        assert (
            case_folders.farthest(header.get_qform(), scan, grid.shape)
            <= MAX_DISPLACEMENT_MM + FLOAT32
        )


def place_of_nifti(forms: str) -> Callable[[Grid, Path], None]:
    def write_nifti_and_compare(grid: Grid, folder: Path) -> None:
        assume(not (grid.sheared and forms == "qform"))
        read, source = of_nifti(grid, forms, folder / "x.nii")
        scan = source.sform if source.sform is not None else read.affine
        header = check(read, source, scan, folder / "y.nii.gz")
        theirs = nib.Nifti1Header((folder / "x.nii").read_bytes()[:348])
        for name in ("sform_code", "qform_code", *(f"quatern_{x}" for x in "bcd")):
            assert header[name] == theirs[name]
        assert header["pixdim"][0] == theirs["pixdim"][0]

    return write_nifti_and_compare


def test_axes_that_itk_would_refuse_are_straightened(tmp_path: Path) -> None:
    """No pair leans by a shear, but together they lean by more than ITK takes."""
    lean = np.array([[0, 9.9e-5, 6.5e-5], [9.9e-5, 0, 6.5e-5], [6.5e-5, 6.5e-5, 0]])
    axes = np.linalg.eigh(lean)[1][:, ::-1].T @ np.linalg.cholesky(np.eye(3) + lean).T
    affine = np.eye(4)
    affine[:3, :3] = axes / np.linalg.norm(axes, axis=0) * (0.7, 0.7, 2.5)
    grid = Grid((512, 512, 300), affine)
    assert not grid.sheared
    path = case_folders.header_file(
        tmp_path / "x.nii", _header(np.empty(1, np.uint8), grid, GridOnlySource(), 1.0)
    )
    with pytest.raises(RuntimeError, match="orthonormal"):
        case_folders.by_itk(path)

    read, _ = of_dicom(grid, a_slice(tmp_path / "series"))

    check(read, GridOnlySource(), read.affine, tmp_path / "y.nii.gz")
    order = np.diag([1, 1, np.sign(np.linalg.det(affine) * np.linalg.det(read.affine)), 1])
    assert case_folders.farthest(read.affine @ order, affine, grid.shape) < 0.1


PLACES: dict[str, Callable[[Grid, Path], None]] = {
    "dicom": place_of_dicom,
    **{f"nifti {forms}": place_of_nifti(forms) for forms in ("sform", "both", "aligned", "qform")},
}


@pytest.mark.parametrize("kind", PLACES)
@settings(max_examples=60)
@given(grid=grids())
def test_a_grid_is_published_where_it_is(
    kind: str, grid: Grid, tmp_path_factory: pytest.TempPathFactory
) -> None:
    PLACES[kind](grid, tmp_path_factory.getbasetemp())


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLACES)
@settings(max_examples=2000)
@given(grid=grids())
def test_two_thousand_grids_of_each_kind(
    kind: str, grid: Grid, tmp_path_factory: pytest.TempPathFactory
) -> None:
    PLACES[kind](grid, tmp_path_factory.getbasetemp())
