"""Labels that other programs wrote come back voxel for voxel, or are refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from scanloom.core import Grid, Reason, ScanError
from scanloom.review.label_files import grid_of_both, on_grid, read_label_file
from support.case_folders import ORDERS
from support.review_cases import SHAPE, affine_of, scan_array

LPS = np.diag((-1.0, -1.0, 1.0, 1.0))


def labels() -> np.ndarray:
    return np.digitize(scan_array(), (300, 600, 900)).astype(np.uint8)


def grid_of(affine: np.ndarray) -> Grid:
    return Grid(SHAPE, affine)


def save_itk(path: Path, array: np.ndarray, affine: np.ndarray) -> Path:
    image = sitk.GetImageFromArray(array.transpose(2, 1, 0))
    lps = LPS @ affine
    spacing = np.linalg.norm(lps[:3, :3], axis=0)
    image.SetSpacing(spacing.tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    image.SetDirection((lps[:3, :3] / spacing).ravel().tolist())
    sitk.WriteImage(image, str(path))
    return path


def save_nibabel(path: Path, array: np.ndarray, affine: np.ndarray) -> Path:
    nib.save(nib.Nifti1Image(array, affine), path)
    return path


def turned(array: np.ndarray, affine: np.ndarray, codes: str) -> tuple[np.ndarray, np.ndarray]:
    image = nib.Nifti1Image(array, affine)
    change = nib.orientations.ornt_transform(
        nib.io_orientation(affine), nib.orientations.axcodes2ornt(codes)
    )
    after = image.as_reoriented(change)
    return np.asarray(after.dataobj), after.affine


@pytest.mark.parametrize("codes", ORDERS)
def test_any_order_of_axes_is_read_back(codes: str) -> None:
    for affine in (affine_of(), affine_of("LPS", 20.0), affine_of("PIR", shear=0.7)):
        grid = grid_of(affine)
        np.testing.assert_array_equal(on_grid(*turned(labels(), affine, codes), grid), labels())


@pytest.mark.parametrize("name", ["a.nii.gz", "a.nii", "a.nrrd", "a.mha"])
@pytest.mark.parametrize("oblique", [0.0, 20.0])
def test_label_maps_of_itk_and_nibabel(tmp_path: Path, name: str, oblique: float) -> None:
    affine = affine_of("LAS", oblique)
    saves = [save_itk, save_nibabel] if ".nii" in name else [save_itk]
    for save in saves:
        read = read_label_file(save(tmp_path / name, labels(), affine), grid_of(affine))
        assert read.names is None
        np.testing.assert_array_equal(read.layers[0], labels())


def test_labels_stored_as_floats_are_read(tmp_path: Path) -> None:
    path = save_nibabel(tmp_path / "a.nii.gz", labels().astype(np.float32), affine_of())
    read = read_label_file(path, grid_of(affine_of()))
    np.testing.assert_array_equal(read.layers[0], labels())


def test_segmentations_of_slicer_at_paths_that_are_not_utf8(tmp_path: Path) -> None:
    """SimpleITK ends the process at such a path."""
    odd = os.fsdecode(b"M\xfcller")
    path = save_slicer(tmp_path / "a.seg.nrrd", labels(), ("a", 0, 1), ("b", 0, 2), ("c", 0, 3))
    (tmp_path / odd).mkdir()
    moved = path.rename(tmp_path / odd / path.name)
    assert read_label_file(moved, grid_of(affine_of())).layers
    with pytest.raises(ScanError, match="rename it"):
        read_label_file(moved.rename(tmp_path / f"{odd}.seg.nrrd"), grid_of(affine_of()))


def test_segmentations_of_slicer(tmp_path: Path) -> None:
    slicerio = pytest.importorskip("slicerio")
    affine = affine_of("LPS")
    array = np.zeros((2, *SHAPE), np.uint8)
    array[0, 2:6, 2:6, 2:5], array[0, 8:, 8:, 3:] = 1, 2
    array[1, 4:9, 4:9, 2:6] = 1  # overlaps both
    segments = [
        {"name": "Part 1", "labelValue": 1, "layer": 0},
        {"name": "part-2", "labelValue": 2, "layer": 0},
        {"name": "PART_3", "labelValue": 1, "layer": 1},
    ]
    path = tmp_path / "a.seg.nrrd"
    segmentation = {"voxels": array, "ijkToLPS": LPS @ affine, "segments": segments}
    slicerio.write_segmentation(str(path), segmentation)

    read = read_label_file(path, grid_of(affine))

    assert read.names == {"Part 1": (0, 1), "part-2": (0, 2), "PART_3": (1, 1)}
    for layer, expected in zip(read.layers, array, strict=True):
        np.testing.assert_array_equal(layer, expected)


def save_slicer(path: Path, array: np.ndarray, *segments: tuple[str, int, int]) -> Path:
    """Write segments (name, layer, value) of an array."""
    slicerio = pytest.importorskip("slicerio")
    listed = [{"name": name, "layer": n, "labelValue": value} for name, n, value in segments]
    content = {"voxels": array, "ijkToLPS": LPS @ affine_of(), "segments": listed}
    slicerio.write_segmentation(str(path), content)
    return path


SEGMENTS: dict[str, tuple[tuple[tuple[str, int, int], ...], str]] = {
    "one name twice": ((("a", 0, 1), ("a", 0, 2), ("b", 0, 3)), "two segments have one name"),
    "a value without a segment": ((("a", 0, 1), ("b", 0, 3)), "no segment has the value 2"),
    "a layer that is not there": (
        (("a", 0, 1), ("b", 0, 2), ("c", 0, 3), ("d", 4, 1)),
        "layer or value that can't be",
    ),
    "a segment of the background": (
        (("a", 0, 1), ("b", 0, 2), ("c", 0, 3), ("d", 0, 0)),
        "layer or value that can't be",
    ),
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_that_are_not_clear_are_refused(tmp_path: Path, name: str) -> None:
    segments, message = SEGMENTS[name]
    path = save_slicer(tmp_path / "a.seg.nrrd", labels(), *segments)
    with pytest.raises(ScanError, match=message) as caught:
        read_label_file(path, grid_of(affine_of()))
    assert caught.value.reason is Reason.LABELS_UNKNOWN


@pytest.mark.parametrize("size", [(5, 5), (5, 5, 5, 2)])
def test_segmentations_of_other_dimensions_are_refused(
    tmp_path: Path, size: tuple[int, ...]
) -> None:
    sitk.WriteImage(sitk.Image(size, sitk.sitkUInt8), str(tmp_path / "a.seg.nrrd"))
    with pytest.raises(ScanError, match=f"{len(size)} dimensions") as caught:
        read_label_file(tmp_path / "a.seg.nrrd", grid_of(affine_of()))
    assert caught.value.reason is Reason.GRID_DIFFERS


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz", ".nrrd", ".seg.nrrd"])
def test_damaged_files_are_refused_by_name(tmp_path: Path, suffix: str) -> None:
    grid, rng = grid_of(affine_of()), np.random.default_rng(0)
    if suffix == ".seg.nrrd":
        whole = save_slicer(
            tmp_path / "a.seg.nrrd", labels(), *(("abc"[n], 0, n + 1) for n in range(3))
        )
    else:
        whole = save_itk(tmp_path / f"a{suffix}", labels(), affine_of())
    content = whole.read_bytes()
    refused = 0
    for n in range(20):
        damaged = bytearray(content)
        if n % 2:
            del damaged[rng.integers(len(damaged)) :]
        else:
            damaged[rng.integers(min(400, len(damaged)))] ^= 1 << rng.integers(8)
        path = tmp_path / f"b{suffix}"
        path.write_bytes(damaged)
        try:
            read_label_file(path, grid)
        except ScanError:
            refused += 1
    assert refused >= 10


def moved(by: float) -> np.ndarray:
    affine = affine_of()
    affine[0, 3] += by
    return affine


def scaled(by: float) -> np.ndarray:
    affine = affine_of()
    affine[:3, 2] *= by
    return affine


GRIDS: dict[str, tuple[Callable[[], np.ndarray], np.ndarray, str]] = {
    "shifted by a voxel": (labels, moved(1.25), "1.25 mm away"),
    "shifted by a third of one": (labels, moved(0.4), "0.4 mm away"),
    "flipped": (labels, affine_of("LAS"), "other directions"),
    "a shear dropped": (labels, affine_of(shear=0.01), "are sheared"),
    "other spacing": (labels, scaled(1.1), "x 2.75 mm, the case"),
    "a slice less": (lambda: labels()[:, :, 1:], affine_of(), "14 x 11 x 8 of"),
    "turned by a degree": (labels, affine_of(oblique=1.0), "other directions"),
}


@pytest.mark.parametrize("name", GRIDS)
def test_other_grids_are_refused(tmp_path: Path, name: str) -> None:
    make, affine, message = GRIDS[name]
    path = save_nibabel(tmp_path / "a.nii.gz", make(), affine)
    with pytest.raises(ScanError, match=message) as caught:
        read_label_file(path, grid_of(affine_of()))
    assert caught.value.reason is Reason.GRID_DIFFERS


@pytest.mark.parametrize("away", [4e3, 1e7, 1e30])
def test_grids_that_no_body_reaches_are_not_united(away: float) -> None:
    """Their voxels would not fit into the memory."""
    affine = np.eye(4)
    affine[2, 3] = away
    with pytest.raises(ScanError, match="GRID_DIFFERS"):
        grid_of_both(Grid((3, 4, 5), np.eye(4)), Grid((3, 4, 5), affine))


def test_fractions_and_foreign_files_are_refused(tmp_path: Path) -> None:
    grid = grid_of(affine_of())
    path = save_nibabel(tmp_path / "a.nii.gz", labels() * np.float32(0.5), affine_of())
    with pytest.raises(ScanError, match="not whole numbers") as caught:
        read_label_file(path, grid)
    assert caught.value.reason is Reason.LABELS_UNKNOWN
    negative = save_nibabel(tmp_path / "b.nii.gz", -labels().astype(np.int16), affine_of())
    with pytest.raises(ScanError, match="values from -3 to 0"):
        read_label_file(negative, grid)
    for name in ("c.seg.nrrd", "d.nii.gz", "e.dcm"):
        (tmp_path / name).write_bytes(bytes(128) + b"DICM" + bytes(40))
        with pytest.raises(ScanError):
            read_label_file(tmp_path / name, grid)
    with pytest.raises(ScanError) as caught:
        read_label_file(tmp_path / "missing.nii.gz", grid)
    assert caught.value.reason is Reason.NOT_FOUND


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("several volumes", Reason.GRID_DIFFERS),
        ("no orientation", Reason.GRID_DIFFERS),
        ("not a number", Reason.LABELS_UNKNOWN),
        ("no NRRD", Reason.DAMAGED),
        ("no DICOM", Reason.DAMAGED),
        ("folder", Reason.NOT_FOUND),
    ],
)
def test_mistakes_are_said_in_terms_of_labels(tmp_path: Path, kind: str, reason: Reason) -> None:
    array, affine, path = labels(), affine_of(), tmp_path / "labels.nii.gz"
    if kind == "several volumes":
        save_nibabel(path, np.stack([array, array], axis=3), affine)
    elif kind == "no orientation":
        save_nibabel(path, array, None)  # type: ignore[arg-type]  # both form codes are 0
    elif kind == "not a number":
        save_nibabel(path, np.where(array == 1, np.nan, array).astype(np.float32), affine)
    elif kind == "no NRRD":
        path = tmp_path / "labels.seg.nrrd"
        path.write_text("hello")
    elif kind == "no DICOM":
        path = tmp_path / "labels.dcm"
        path.write_bytes(bytes(128) + b"DICM" + b"hello")
    else:
        path = tmp_path

    with pytest.raises(ScanError) as caught:
        read_label_file(path, grid_of(affine))

    assert caught.value.reason is reason
    assert "segment --" not in str(caught.value)
    assert (caught.value.private, str(tmp_path) in str(caught.value)) == (str(path), False)
