"""A writer that puts a result elsewhere is caught, by a hair, whatever the turn of the grid."""

from __future__ import annotations

import gzip
import math
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from scanloom.core import Grid
from scanloom.io.scan import NiftiSource, Scan
from support import case_folders

Fault = Callable[[np.ndarray], np.ndarray]


def grid_of(codes: str, angle: float = 0.0, shear: float = 0.0) -> Grid:
    turn = Rotation.from_rotvec(np.array((0.2, -0.5, 0.84)) * angle).as_matrix()
    affine = np.eye(4)
    affine[:3, :3] = turn @ case_folders.directions(codes) * case_folders.SPACING
    affine[:3, 2] += shear * affine[:3, 1]
    affine[:3, 3] = (-31.5, 112.25, -840.75)
    return Grid(case_folders.SHAPE, affine)


GRIDS = {
    "half a turn": lambda: grid_of("LPS"),
    "half a turn about a diagonal": lambda: grid_of("LSA"),
    "a hair off half a turn": lambda: grid_of("LPS", 1e-3),
    "a tilted head": lambda: grid_of("LPS", 0.2),
    "left-handed": lambda: grid_of("RPS", 0.01),
    "sheared": lambda: grid_of("LPS", 0.1, 0.4),
}

SOURCES: dict[str, Callable[[Grid], Scan]] = {
    "itk": case_folders.itk_scan,
    "nifti sform": lambda grid: case_folders.nifti_scan(grid, 1, 0),
    "nifti both": lambda grid: case_folders.nifti_scan(grid, 2, 1),
    "nifti qform": lambda grid: case_folders.nifti_scan(grid, 0, 1),
}


def shifted(*voxels: float) -> Fault:
    def fault(affine: np.ndarray) -> np.ndarray:
        moved = affine.copy()
        moved[:3, 3] = affine[:3] @ (*voxels, 1)
        return moved

    return fault


def mirrored(axis: int) -> Fault:
    """The voxels' order along an axis is turned round, and nobody said so."""
    last = case_folders.SHAPE[axis] - 1
    flip = np.diag([-1.0 if n == axis else 1.0 for n in range(4)])
    flip[axis, 3] = last
    return lambda affine: affine @ flip


def turned(angle: float) -> Fault:
    turn = np.eye(4)
    turn[:3, :3] = Rotation.from_rotvec((0, 0, angle)).as_matrix()
    return lambda affine: np.hstack([(turn @ affine)[:, :3], affine[:, 3:]])


FAULTS: dict[str, Fault] = {
    **{f"mirrored along {axis}": mirrored(axis) for axis in range(3)},
    "RAS for LPS": lambda affine: np.diag((-1.0, -1.0, 1.0, 1.0)) @ affine,
    "mirrored about zero": lambda affine: affine @ np.diag((1.0, 1.0, -1.0, 1.0)),
    "shifted by a voxel": shifted(0, 0, 1),
    "shifted by half a voxel": shifted(0.5, 0.5, 0.5),
    "shifted by a tenth": shifted(0, 0.1, 0),
    "axes swapped": lambda affine: affine[:, [1, 0, 2, 3]],
    "spacing off by a thousandth": lambda affine: affine @ np.diag((1.0, 1.0, 1.001, 1.0)),
    "turned by two milliradians": turned(2e-3),
}


def patch(path: Path, edit: Callable[[bytearray], None]) -> None:
    """Change the bytes of a header on disk, after the writer."""
    raw = bytearray(gzip.decompress(path.read_bytes()))
    edit(raw)
    path.write_bytes(gzip.compress(bytes(raw), 1))


def with_sform(fault: Fault) -> Callable[[bytearray], None]:
    def edit(raw: bytearray) -> None:
        affine = np.eye(4)
        affine[:3] = np.reshape(struct.unpack_from("<12f", raw, 280), (3, 4))
        struct.pack_into("<12f", raw, 280, *fault(affine)[:3].ravel())

    return edit


def with_qform(fault: Fault) -> Callable[[bytearray], None]:
    def edit(raw: bytearray) -> None:
        header = case_folders.nib.Nifti1Header(bytes(raw[:348]))
        header.set_qform(fault(header.get_qform()), int(header["qform_code"]))
        raw[:348] = header.binaryblock

    return edit


def written(grid: Grid, source: str, folder: Path) -> tuple[case_folders.Written, Path]:
    scan = SOURCES[source](grid)
    result = case_folders.Written(folder, scan, case_folders.segmentation_of(scan))
    result.read_back()
    return result, folder / "segmentation.nii.gz"


def code(path: Path, form: str) -> int:
    return int(case_folders.nib.load(path).header[f"{form}_code"])


CASES = [
    (name, source)
    for name in GRIDS
    for source in SOURCES
    if name != "sheared" or source not in ("nifti both", "nifti qform")  # which can't say it
]


@pytest.mark.parametrize(("name", "source"), CASES)
def test_each_form_that_lies_elsewhere_is_caught(name: str, source: str, tmp_path: Path) -> None:
    result, path = written(GRIDS[name](), source, tmp_path)
    right = path.read_bytes()
    forms = {"sform": with_sform, "qform": with_qform}
    present = [form for form in forms if code(path, form)]
    assert present
    for fault in FAULTS.values():
        for form in present:
            path.write_bytes(right)
            patch(path, forms[form](fault))
            assert result.is_caught()
        path.write_bytes(right)
        for form in present:  # a writer that is wrong throughout
            patch(path, forms[form](fault))
        assert result.is_caught()


FIELDS: dict[str, tuple[str, int, float]] = {
    "qfac": ("<f", 76, -1.0),
    "spacing": ("<f", 80, 1.001),
    "quaternion b": ("<f", 256, 0.9),
    "quaternion d": ("<f", 264, 0.999),
    "offset": ("<f", 268, 1.001),
    "sform": ("<f", 280, 1 + 1e-6),
    "sform offset": ("<f", 292, 1 + 1e-6),
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("codes", ["LPS", "ASR", "RPS"])
def test_a_field_that_is_off_is_caught(field: str, codes: str, tmp_path: Path) -> None:
    result, path = written(grid_of(codes, 0.3), "itk", tmp_path)
    kind, offset, factor = FIELDS[field]

    def edit(raw: bytearray) -> None:
        value = struct.unpack_from(kind, raw, offset)[0]
        struct.pack_into(kind, raw, offset, value * factor)

    patch(path, edit)
    assert result.is_caught()


@pytest.mark.parametrize("codes", [(0, 0), (1, 0), (0, 1), (2, 1), (1, 2)])
def test_other_codes_are_caught(codes: tuple[int, int], tmp_path: Path) -> None:
    result, path = written(grid_of("LPS", 0.3), "itk", tmp_path)
    patch(path, lambda raw: struct.pack_into("<2h", raw, 252, codes[1], codes[0]))
    assert result.is_caught()


def test_a_qform_where_float32_has_none_is_caught(tmp_path: Path) -> None:
    """nibabel would have written a qform 0.4 mm off at 512 pixels for readers that prefer it."""
    grid = Grid((512, 512, 3), grid_of("LPS", 1e-3).affine)
    result, path = written(grid, "itk", tmp_path)
    assert code(path, "qform") == 0

    def edit(raw: bytearray) -> None:
        header = case_folders.nib.Nifti1Header(bytes(raw[:348]))
        header.set_qform(grid.affine, 1)
        raw[:348] = header.binaryblock

    patch(path, edit)
    assert result.is_caught()


def test_a_qform_without_its_own_quaternion_is_said_by_the_sform(tmp_path: Path) -> None:
    """NIfTI-2 has it in float64; where float32 can't say it, the sform does, with its code."""
    grid = Grid((512, 512, 3), grid_of("LPS", 1e-3).affine)
    source = NiftiSource(None, 0, grid.affine, 4)
    scan = Scan(case_folders.volume_of(grid), source)
    case_folders.Written(tmp_path, scan, case_folders.segmentation_of(scan)).read_back()
    path = tmp_path / "segmentation.nii.gz"
    assert (code(path, "sform"), code(path, "qform")) == (4, 0)
    assert case_folders.farthest(case_folders.nib.load(path).affine, grid.affine, grid.shape) < 1e-3
    assert not math.isnan(case_folders.by_itk(path).sum())
