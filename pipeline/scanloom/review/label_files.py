"""Label maps that other programs wrote, read onto the grid of a case.

NIfTI, NRRD and MetaImage hold numbers; `.seg.nrrd` of 3D Slicer and DICOM SEG name their segments.
Axes may be in another order or direction if the voxels are those of the case.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.check import LONGEST_MM
from scanloom.core import Grid, Reason, ScanError, Volume
from scanloom.core.grid import LPS_TO_RAS_AFFINE
from scanloom.core.text import is_utf8
from scanloom.io.readback.nifti import path_for_itk

TOLERANCE = 0.02
"""Largest distance between voxel centres, in voxels."""
_AS_LABELS = {
    Reason.FOUR_D: (Reason.GRID_DIFFERS, "the file has several volumes, the case has one"),
    Reason.ORIENTATION_UNKNOWN: (
        Reason.GRID_DIFFERS,
        "the file does not state where its voxels are (it has neither sform nor qform)",
    ),
    Reason.PIXEL_TYPE: (Reason.LABELS_UNKNOWN, "values of the file are not whole numbers"),
}
"""Errors of images whose advice does not fit labels: the reason and the detail instead."""
_SEGMENT = re.compile(r"Segment(\d+)_(Name|LabelValue|Layer|ID)")


@dataclass(frozen=True, eq=False)
class LabelFile:
    """Labels from a file, on the grid of a case.

    Parameters
    ----------
    layers : tuple of (I, J, K) arrays
        Label maps; segments that overlap are in different ones.
    names : mapping or None
        Segments (layer, value) by their name; None of a file that holds numbers only.
    grid : Grid
        The grid of the label maps.
    series : frozenset of str
        SeriesInstanceUIDs that the file refers to.
    """

    layers: tuple[NDArray[Any], ...]
    names: Mapping[str, tuple[int, int]] | None
    grid: Grid
    series: frozenset[str] = frozenset()


def read_label_file(path: Path, grid: Grid | None) -> LabelFile:
    """Read labels onto a grid.

    Parameters
    ----------
    path : Path
        The file.
    grid : Grid or None
        Grid of the case; None for that of the file, which may leave out slices of the scan if it
        is one of segments.

    Raises
    ------
    ScanError
        GRID_DIFFERS if the voxels are not those of the grid; LABELS_UNKNOWN if a value is not a
        whole number; NOT_FOUND; DAMAGED or what the reader of the format raises.
    """
    try:
        return _read(path, grid)
    except ScanError as exc:
        raise ScanError(exc.reason, exc.detail, exc.private or str(path)) from exc


def _read(path: Path, grid: Grid | None) -> LabelFile:
    if not path.is_file():
        detail = "a folder is no file of labels" if path.is_dir() else "there is no such file"
        raise ScanError(Reason.NOT_FOUND, detail)
    is_slicer = path.name.lower().endswith(".seg.nrrd")
    # by content: files of DICOM have any suffix, or none
    with path.open("rb") as file:
        is_dicom = file.read(132)[128:] == b"DICM"
    if is_slicer or is_dicom:
        return _slicer(path, grid) if is_slicer else _dicom_seg(path, grid)
    volume = _volume(path)
    grid = volume.grid if grid is None else grid
    return LabelFile((_whole(on_grid(volume.array, volume.grid.affine, grid)),), None, grid)


def _volume(path: Path) -> Volume:
    """Read a volume; errors about images become errors about labels, as of `read_label_file`."""
    from scanloom.io.read import load_volume

    try:
        return load_volume(path)
    except ScanError as exc:
        if exc.reason not in _AS_LABELS:
            raise
        raise ScanError(*_AS_LABELS[exc.reason]) from exc


def on_grid(
    array: NDArray[Any], affine: NDArray[np.float64], grid: Grid, *, partial: bool = False
) -> NDArray[Any]:
    """Return an array on the axes of a grid.

    Parameters
    ----------
    array : (A, B, C) array
    affine : (4, 4) array
        Its voxel index to RAS mm.
    partial : bool
        Whether it may cover a part of the grid: the rest is 0.

    Raises
    ------
    ScanError
        GRID_DIFFERS.
    """
    # index in the file to index in the case: a permutation with signs where voxels are the same
    to_grid = np.linalg.inv(grid.affine) @ affine
    steps = np.rint(to_grid[:3, :3])
    # a small error of a direction grows with the distance from the first voxel
    drift = np.abs(to_grid[:3, :3] - steps) @ (np.array(array.shape) - 1)
    low = to_grid[:3, 3] + np.minimum(steps @ np.diag(np.array(array.shape) - 1), 0).sum(axis=1)
    is_turned = (np.abs(steps).sum(axis=0) == 1).all() and (np.abs(steps).sum(axis=1) == 1).all()
    if not is_turned or drift.max() > TOLERANCE or np.abs(low - np.rint(low)).max() > TOLERANCE:
        raise ScanError(Reason.GRID_DIFFERS, _difference(array.shape, affine, grid))
    order = [int(np.flatnonzero(steps[n])[0]) for n in range(3)]
    flips = tuple(slice(None, None, int(steps[n, order[n]])) for n in range(3))
    turned = array.transpose(order)[flips]
    begin = np.rint(low).astype(int)
    end = begin + turned.shape
    inside = (begin >= 0).all() and (end <= grid.shape).all()
    if inside and turned.shape == grid.shape:
        return turned
    if not partial or not inside:
        raise ScanError(Reason.GRID_DIFFERS, _difference(array.shape, affine, grid))
    whole = np.zeros(grid.shape, turned.dtype, order="F")
    whole[tuple(slice(a, b) for a, b in zip(begin, end, strict=True))] = turned
    return whole


def grid_of_both(first: Grid, second: Grid) -> Grid:
    """Return the grid with the axes of the first one that holds the voxels of both.

    Raises
    ------
    ScanError
        GRID_DIFFERS if voxels of the second one lie between those of the first, or too far away to
        be of one body.
    """
    corners = np.array(list(itertools.product(*((0, n - 1) for n in second.shape))))
    exact = first.index(second.world(corners))
    index = np.rint(exact)
    low = np.minimum(index.min(axis=0), 0)
    shape = np.maximum(index.max(axis=0) + 1, first.shape) - low
    if np.abs(exact - index).max() > TOLERANCE or (shape * first.spacing).max() > LONGEST_MM:
        raise ScanError(Reason.GRID_DIFFERS, _difference(second.shape, second.affine, first))
    affine = first.affine.copy()
    affine[:3, 3] = first.world(low)
    return Grid(tuple(shape.astype(int)), affine)


def _difference(shape: tuple[int, ...], affine: NDArray[np.float64], grid: Grid) -> str:
    """Return in which way a grid is another one."""
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    own = " x ".join(str(n) for n in shape) + " of " + " x ".join(f"{s:.4g}" for s in spacing)
    case = " x ".join(str(n) for n in grid.shape)
    case += " of " + " x ".join(f"{s:.4g}" for s in grid.spacing)
    if own != case:
        return f"the file has {own} mm, the case {case} mm"
    apart = np.linalg.norm(affine[:3, 3] - grid.affine[:3, 3])
    if apart < TOLERANCE * min(grid.spacing):
        return (
            "the file has the size of the case, but its axes have other directions or are sheared"
        )
    return f"the file has the size of the case, but its first voxel is {apart:.4g} mm away"


def _whole(array: NDArray[Any]) -> NDArray[np.uint16]:
    """Return labels as whole numbers; LABELS_UNKNOWN if they are not, or too large."""
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or (array != np.rint(array)).any():
            raise ScanError(Reason.LABELS_UNKNOWN, "values of the file are not whole numbers")
        array = np.rint(array)
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    if low < 0 or high > np.iinfo(np.uint16).max:
        raise ScanError(Reason.LABELS_UNKNOWN, f"the file has values from {low} to {high}")
    return array.astype(np.uint16)


def _slicer(path: Path, grid: Grid | None) -> LabelFile:
    """Read a segmentation of 3D Slicer: layers of label maps, and their segments."""
    import SimpleITK as sitk  # noqa: N813 - the library's own documentation imports it so

    if not is_utf8(path.name):
        raise ScanError(Reason.UNREADABLE, "its name is not UTF-8: rename it")
    try:
        with path_for_itk(path) as plain:
            image = sitk.ReadImage(plain)
    except RuntimeError as exc:
        raise ScanError(Reason.DAMAGED, "the file is no NRRD that can be read") from exc
    if image.GetDimension() != 3:
        detail = f"the file has {image.GetDimension()} dimensions, the case 3"
        raise ScanError(Reason.GRID_DIFFERS, detail)
    lps = np.eye(4)
    lps[:3, :3] = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
    lps[:3, 3] = image.GetOrigin()
    affine = LPS_TO_RAS_AFFINE @ lps
    array = sitk.GetArrayViewFromImage(image)
    stack = array if image.GetNumberOfComponentsPerPixel() > 1 else array[..., None]
    layers, grid = _layers(stack.transpose(2, 1, 0, 3), affine, grid)
    names = _by_name(_slicer_segments(image))
    for n, layer in enumerate(layers):
        values = {value for index, value in names.values() if index == n}
        if foreign := sorted(set(np.unique(layer).tolist()) - values - {0}):
            raise ScanError(Reason.LABELS_UNKNOWN, f"no segment has the value {foreign[0]}")
    if any(not 0 <= index < len(layers) or value < 1 for index, value in names.values()):
        raise ScanError(Reason.LABELS_UNKNOWN, "a segment has a layer or value that can't be")
    return LabelFile(layers, names, grid)


def _slicer_segments(image: Any) -> list[tuple[str, tuple[int, int]]]:
    """Return the name of each segment of 3D Slicer, with its layer and value."""
    fields: dict[str, dict[str, str]] = {}
    for key in image.GetMetaDataKeys():
        if match := _SEGMENT.fullmatch(key):
            fields.setdefault(match[1], {})[match[2]] = image.GetMetaData(key)
    try:
        return [
            (each["Name"], (int(each.get("Layer", 0)), int(each["LabelValue"])))
            for each in fields.values()
        ]
    except (LookupError, ValueError) as exc:
        raise ScanError(Reason.LABELS_UNKNOWN, "a segment has no name or value") from exc


def _by_name(segments: Sequence[tuple[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """Return segments by their name; LABELS_UNKNOWN if two have one."""
    names = dict(segments)
    if len(names) < len(segments):
        raise ScanError(Reason.LABELS_UNKNOWN, "two segments have one name")
    return names


def _dicom_seg(path: Path, grid: Grid | None) -> LabelFile:
    """Read a DICOM SEG; slices without a segment may be missing in it."""
    try:
        dataset = _open_seg(path, grid)
        described = [dataset.get_segment_description(n) for n in dataset.segment_numbers]
        try:  # one label map: a layer for each of a hundred segments needs gigabytes
            volume = dataset.get_volume(combine_segments=True, relabel=True)
            stack, places = volume.array[..., None], [(0, n + 1) for n in range(len(described))]
        except (RuntimeError, ValueError):  # segments overlap, or are fractions
            volume = _open_seg(path, grid).get_volume()  # the failure left tables in the first one
            stack, places = volume.array, [(n, 1) for n in range(len(described))]
    except Exception as exc:  # a damaged file makes the readers fail in many ways
        detail = f"the file is no DICOM SEG that can be read ({type(exc).__name__})"
        raise ScanError(Reason.DAMAGED, detail) from exc
    layers, grid = _layers(stack, LPS_TO_RAS_AFFINE @ volume.affine, grid)
    labels = [str(each.segment_label) for each in described]
    references = dataset.get("ReferencedSeriesSequence", ())
    series = frozenset(str(each.SeriesInstanceUID) for each in references)
    return LabelFile(layers, _by_name([*zip(labels, places, strict=True)]), grid, series)


def _open_seg(path: Path, grid: Grid | None) -> Any:
    import highdicom as hd
    from pydicom import dcmread

    dataset = dcmread(path)
    # it has other attributes, has them by frame, or without a value
    with suppress(AttributeError, LookupError, TypeError, ValueError):
        _state_slice_spacing(dataset, grid)
    return hd.seg.Segmentation.from_dataset(dataset, copy=False)


def _state_slice_spacing(dataset: Any, grid: Grid | None) -> None:
    """State the spacing of slices in a DICOM SEG that does not.

    Positions do not tell it, since slices without a segment may be missing: it is that of the grid,
    or else the thickness, if all positions fit.
    """
    shared = dataset.SharedFunctionalGroupsSequence[0]
    measures = shared.PixelMeasuresSequence[0]
    if "SpacingBetweenSlices" in measures:
        return
    orientation = shared.PlaneOrientationSequence[0].ImageOrientationPatient
    normal = np.cross(*np.array(orientation, float).reshape(2, 3))
    if grid is None:
        spacing = float(measures.SliceThickness)
    else:
        spacing = float(np.abs(LPS_TO_RAS_AFFINE[:3, :3] @ normal @ grid.affine[:3, :3]).max())
    positions = [
        float(np.dot(frame.PlanePositionSequence[0].ImagePositionPatient, normal))
        for frame in dataset.PerFrameFunctionalGroupsSequence
    ]
    if _are_multiples(positions, spacing):
        measures.SpacingBetweenSlices = f"{spacing:.10g}"


def _are_multiples(positions: Sequence[float], step: float) -> bool:
    """Return whether positions are apart by multiples of a step, within a hundredth of it."""
    if step <= 0:
        return False
    steps = (np.array(positions) - positions[0]) / step
    return bool(np.abs(steps - np.rint(steps)).max() < 0.01)


def _layers(
    stack: NDArray[Any], affine: NDArray[np.float64], grid: Grid | None
) -> tuple[tuple[NDArray[np.uint16], ...], Grid]:
    """Return label maps (A, B, C, layers) of segments on a grid, of which they may be a part.

    The grid is their own if it is None.
    """
    grid = Grid(stack.shape[:3], affine) if grid is None else grid
    layers = [on_grid(stack[..., n], affine, grid, partial=True) for n in range(stack.shape[3])]
    return tuple(map(_whole, layers)), grid
