"""One ball in DICOM series of every kind: the same place in label maps and in both SEGs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK
from pydicom import Dataset, dcmread
from scipy.spatial import KDTree

from scanloom.core import Case, Flag, Layer, Outputs, ReadOptions, Segmentation, StepTimer, Volume
from scanloom.engine import steps
from scanloom.engine.case.types import SegmentedCase
from scanloom.engine.prepare import estimate_case
from scanloom.inference.engines.selection import torch_choice
from scanloom.io.index.series import find_series
from support.balls import BALL, LATE, SHAPE, STEP, TO_RAS, Ball, around, drawn
from support.case_folders import RIGHT_HANDED, directions
from support.dicom_kinds.base import plain, tilt
from support.dicom_kinds.chosen import CHOSEN
from support.dicom_kinds.enhanced import enhanced, mosaic
from support.dicom_kinds.once_refused import KINDS as REFUSED_ONCE
from support.dicom_kinds.refused import REFUSED
from support.dicom_kinds.single import READ
from support.model_cards import card, structures
from support.seg_witnesses import complaints, dcmqi_points, highdicom_frame_points, sorted_points
from support.selections import one_in
from support.write_dicom import Geometry, Words, write_series

NEAR, SHARE = 0.5, 0.03  # mm; share of the ball's volume: the edge is cut at half
NEAR_RECTANGULAR = 0.9  # mm: a slice moves by half a voxel at most


class Threshold:
    """Labels voxels that are nearer to a ball's inside as the one structure."""

    device_name, precision_name, changes = "cpu", "float32", ""
    engine = torch_choice("the test's own formula")

    def __init__(self, weights: Path) -> None:
        self.card = card(weights, structures=structures(1))

    def predict(self, volume: Volume, clock: StepTimer | None = None, **_: object) -> Segmentation:
        half = (float(volume.array.min()) + float(volume.array.max())) / 2
        labels = np.asfortranarray((volume.array > half).astype(np.uint8))
        return Segmentation(self.card.name, (Layer(labels, self.card.structures),), volume.grid)


@pytest.fixture(scope="module")
def threshold(tmp_path_factory: pytest.TempPathFactory) -> Threshold:
    weights = tmp_path_factory.mktemp("model") / "weights"
    weights.write_bytes(b"none")
    return Threshold(weights)


def segmented(source: Path, folder: Path, threshold: Threshold, **options: Any) -> SegmentedCase:
    """Take a series through load, segment, write and read-back."""
    [series] = find_series(source)
    seg, phase = options.pop("seg", "binary"), options.pop("phase", None)
    outputs = Outputs(seg=seg, also=options.pop("also", ()))
    case = Case("a" * 26, series, outputs, "h", "r", ReadOptions(**options), phase)
    loaded = steps.load(case)
    result = steps.segment(loaded, [threshold])
    volume = loaded.scan.volume
    folder.mkdir()
    steps.write(result, folder, estimate_case(volume.grid, volume.array.dtype, [threshold.card]))
    return result


def of_nifti(path: Path) -> np.ndarray:
    """Return the RAS mm of all labelled voxels by nibabel."""
    image = nibabel.load(path)
    return sorted_points(np.asarray(image.dataobj) > 0, image.affine)


def of_frames(path: Path) -> np.ndarray:
    """Return the same of a DICOM SEG, by pydicom and each frame's own position."""
    ds = dcmread(path)
    shared = ds.SharedFunctionalGroupsSequence[0]
    cosines = np.array(shared.PlaneOrientationSequence[0].ImageOrientationPatient, float)
    between = np.array(shared.PixelMeasuresSequence[0].PixelSpacing, float)
    frames = ds.pixel_array.reshape(ds.NumberOfFrames, ds.Rows, ds.Columns)
    points = []
    for group, frame in zip(ds.PerFrameFunctionalGroupsSequence, frames, strict=True):
        rows, columns = np.nonzero(frame)
        position = np.array(group.PlanePositionSequence[0].ImagePositionPatient, float)
        plane = np.outer(columns * between[1], cosines[:3]) + np.outer(
            rows * between[0], cosines[3:]
        )
        points.append((position + plane) * TO_RAS)
    stacked = np.concatenate(points)
    return stacked[np.lexsort(np.round(stacked, 2).T)]


def check_ball(points: np.ndarray, voxel: float, ball: Ball = BALL, near: float = NEAR) -> None:
    centre = np.array(ball.centre) * TO_RAS
    assert np.linalg.norm(points.mean(axis=0) - centre) < near
    assert len(points) * voxel == pytest.approx(ball.volume, rel=SHARE)


def check_references(path: Path, source: Path) -> None:
    """Each frame lies where the image that it names does, by the source's own headers."""
    headers = {}
    for file in source.rglob("*.dcm"):
        header = dcmread(file, stop_before_pixels=True)
        headers[header.SOPInstanceUID] = header
    for group in dcmread(path).PerFrameFunctionalGroupsSequence:
        [image] = group.DerivationImageSequence[0].SourceImageSequence
        header = headers[image.ReferencedSOPInstanceUID]
        assert image.ReferencedSOPClassUID == header.SOPClassUID
        plane = header
        if "PerFrameFunctionalGroupsSequence" in header:
            frame = header.PerFrameFunctionalGroupsSequence[image.ReferencedFrameNumber - 1]
            plane = frame.PlanePositionSequence[0]
        else:
            assert "ReferencedFrameNumber" not in image
        ours = group.PlanePositionSequence[0].ImagePositionPatient
        np.testing.assert_allclose(ours, plane.ImagePositionPatient, atol=1e-4)


def check_case(
    result: SegmentedCase,
    folder: Path,
    source: Path,
    ball: Ball = BALL,
    beside: float = 2e-3,
) -> None:
    """Compare label map, SEG and source with each other and with the ball.

    `beside` is how far images may lie beside the grid, mm.
    """
    voxel = result.loaded.scan.volume.grid.voxel_volume
    ours, frames = of_nifti(folder / "segmentation.nii.gz"), folder / "dicom" / "segmentation.dcm"
    check_ball(ours, voxel, ball)
    [theirs] = highdicom_frame_points(frames).values()
    for points in (of_frames(frames), theirs):
        assert len(points) == len(ours)
        assert KDTree(ours).query(points)[0].max() < beside
        assert KDTree(points).query(ours)[0].max() < beside
    check_references(frames, source)


def geometry_of(codes: str) -> Geometry:
    """Return slices whose axes point along these, in the order of their normal."""
    axes = directions(codes) * TO_RAS[:, None]
    across, down = (tuple(map(float, axes[:, n])) for n in (0, 1))
    flat = replace(around(), across=across, down=down)
    half = (np.array(SHAPE) - 1) / 2
    middle = around().position(half[2]) + half[0] * np.array(around().across) * flat.spacing[1]
    middle = middle + half[1] * np.array(around().down) * flat.spacing[0]
    corner = flat.position(half[2]) - np.array(flat.origin)
    corner = corner + half[0] * np.array(across) * flat.spacing[1]
    corner = corner + half[1] * np.array(down) * flat.spacing[0]
    return replace(flat, origin=tuple(middle - corner))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("codes", "upwards"), one_in(3, itertools.product(RIGHT_HANDED, (True, False)))
)
def test_a_ball_keeps_its_position_in_every_axis_order(tmp_path, threshold, codes, upwards):
    """24 axis orders, each numbered along the normal and against it."""
    geometry = geometry_of(codes)
    samples = np.rint(drawn(geometry) + 1024).astype(np.int16)

    def number(k: int, ds: Dataset) -> None:
        ds.InstanceNumber = k + 1 if upwards else SHAPE[2] - k

    write_series(tmp_path / "scan", samples, geometry, edit=number)
    result = segmented(tmp_path / "scan", tmp_path / "case", threshold)
    assert result.loaded.scan.volume.grid.axis_codes == codes
    check_case(result, tmp_path / "case", tmp_path / "scan")


TILTED: dict[str, Callable[[Path], None]] = {
    "tilt +15": plain(around(tilt=tilt(15))),
    "tilt -22": plain(around(tilt=tilt(-22))),
    "tilt across": plain(around(tilt_across=tilt(12))),
    "tilt both ways, sagittal": plain(around("sagittal", tilt=tilt(9), tilt_across=tilt(-7))),
    "tilt, doubly oblique": plain(around("doubly oblique", tilt=tilt(13))),
    "tilt of 0.1": plain(around(tilt=tilt(0.1))),
    "tilt, enhanced": enhanced(around(tilt=tilt(15))),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TILTED)
@pytest.mark.parametrize("seg", ["binary", "labelmap"])
def test_a_tilted_scan_goes_through_to_the_source_slices_and_the_rectangular_pair(
    tmp_path, threshold, name, seg
):
    TILTED[name](tmp_path / "scan")
    case = tmp_path / "case"
    result = segmented(tmp_path / "scan", case, threshold, seg=seg)
    assert Flag.SHEARED in result.flags
    check_case(result, case, tmp_path / "scan")

    voxel = result.loaded.scan.volume.grid.voxel_volume
    check_ball(_by_simpleitk(case / "segmentation_rect.nii.gz"), voxel, near=NEAR_RECTANGULAR)
    rectangular = case / "dicom" / "segmentation_rect.dcm"
    if seg == "binary":  # dcmqi knows no other
        [points] = dcmqi_points(rectangular, tmp_path / "dcmqi").values()
        check_ball(points, voxel, near=NEAR_RECTANGULAR)
    check_ball(of_frames(rectangular), voxel, near=NEAR_RECTANGULAR)


def _by_simpleitk(path: Path) -> np.ndarray:
    image = SimpleITK.ReadImage(path)
    labels = SimpleITK.GetArrayViewFromImage(image).T
    return (
        np.array(
            [
                image.TransformIndexToPhysicalPoint([int(n) for n in index])
                for index in np.argwhere(labels)
            ]
        )
        * TO_RAS
    )


@pytest.mark.parametrize(
    "name", ["enhanced", "enhanced, several objects", "concatenation", "legacy converted"]
)
@pytest.mark.parametrize("seg", ["binary", "labelmap"])
def test_frames_of_a_multi_frame_scan_are_named(tmp_path, threshold, name, seg):
    READ[name].make(tmp_path / "scan")
    result = segmented(tmp_path / "scan", tmp_path / "case", threshold, seg=seg)
    check_case(result, tmp_path / "case", tmp_path / "scan")


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
@pytest.mark.parametrize(
    "name",
    [
        "each slice in its own frame of reference",
        "tilted, each slice in its own frame of reference",
        "rounded to 0.1 mm",
        "doubly oblique, rounded to 0.1 mm",
    ],
)
def test_slices_that_are_odd_in_their_headers_alone_go_through(tmp_path, threshold, name, seg):
    """The SEG lies in the frame of reference of the first slice, each frame where its image does.

    Rounded images lie up to 0.09 mm beside the grid.
    """
    kind = REFUSED_ONCE[name]
    kind.make(tmp_path / "scan")
    result = segmented(tmp_path / "scan", tmp_path / "case", threshold, seg=seg)
    assert set(kind.flags) <= {flag.code for flag in result.flags}
    beside = 0.1 if "POSITIONS_ROUNDED" in kind.flags else 2e-3
    check_case(result, tmp_path / "case", tmp_path / "scan", beside=beside)
    source = result.loaded.scan.source.slices[0].sop_instance
    frames = {
        ds.SOPInstanceUID: ds.FrameOfReferenceUID
        for ds in map(dcmread, (tmp_path / "scan").rglob("*.dcm"))
    }
    seg_file = dcmread(tmp_path / "case" / "dicom" / "segmentation.dcm")
    assert seg_file.FrameOfReferenceUID == frames[source]
    if seg == "binary":
        assert complaints(tmp_path / "case" / "dicom" / "segmentation.dcm") == []


@pytest.mark.parametrize("name", ["by AcquisitionNumber", "enhanced, two times"])
def test_a_chosen_phase_refers_to_its_own_images(tmp_path, threshold, name):
    CHOSEN[name].make(tmp_path / "scan")
    result = segmented(tmp_path / "scan", tmp_path / "case", threshold, phase=1)
    check_case(result, tmp_path / "case", tmp_path / "scan", LATE)


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
def test_a_filled_gap_is_told_and_has_no_frame(tmp_path, threshold, seg):
    """Label map and measurements hold the slice; the SEG has frames of real slices only."""
    REFUSED["a slice is missing"].make(tmp_path / "scan")
    case = tmp_path / "case"
    result = segmented(tmp_path / "scan", case, threshold, seg=seg, gaps="interpolate")
    assert Flag.GAPS_INTERPOLATED in result.flags
    ours = of_nifti(case / "segmentation.nii.gz")
    check_ball(ours, result.loaded.scan.volume.grid.voxel_volume)
    frames = of_frames(case / "dicom" / "segmentation.dcm")
    [lost] = [
        k for k, source_slice in enumerate(result.loaded.scan.source.slices) if source_slice is None
    ]
    depth = result.loaded.scan.volume.grid.world((0, 0, lost))[2]
    real = ours[np.abs(ours[:, 2] - depth) > STEP / 2]
    assert 0 < len(real) < len(ours)
    np.testing.assert_allclose(frames, real, atol=2e-3)
    check_references(case / "dicom" / "segmentation.dcm", tmp_path / "scan")


@pytest.mark.parametrize("name", ["tilt +15", "empty UIDs"])
def test_a_scan_without_an_rtstruct_has_a_flag_if_it_was_requested(tmp_path, threshold, name):
    {**TILTED, "empty UIDs": READ["empty UIDs"].make}[name](tmp_path / "scan")
    result = segmented(tmp_path / "scan", tmp_path / "case", threshold, also=("rtstruct",))
    assert Flag.RTSTRUCT_NOT_POSSIBLE in result.flags
    assert not [*(tmp_path / "case").rglob("*rtstruct*")]
    usual = segmented(tmp_path / "scan", tmp_path / "usual", threshold)
    assert Flag.RTSTRUCT_NOT_POSSIBLE not in usual.flags


def test_a_scan_without_a_report_has_a_flag_if_it_was_requested(tmp_path, threshold):
    READ["empty UIDs"].make(tmp_path / "scan")
    result = segmented(tmp_path / "scan", tmp_path / "case", threshold, also=("sr",))
    assert Flag.SR_NOT_POSSIBLE in result.flags
    assert not (tmp_path / "case" / "dicom").exists()


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("empty UIDs", "StudyInstanceUID, SeriesInstanceUID, FrameOfReferenceUID"),
        ("one SOP UID for all", "SOPInstanceUID"),
        ("mosaic", "SOPInstanceUID"),
    ],
)
def test_a_source_without_references_has_a_label_map_and_a_flag(
    tmp_path, threshold, name, missing, caplog
):
    caplog.set_level("INFO", "scanloom")
    make = mosaic(around(), words=Words("CT")) if name == "mosaic" else READ[name].make
    make(tmp_path / "scan")
    result = segmented(tmp_path / "scan", tmp_path / "case", threshold)
    assert Flag.SEG_NOT_POSSIBLE in result.flags
    assert f"lacks a valid {missing}" in caplog.text
    assert not (tmp_path / "case" / "dicom").exists()
    voxel = result.loaded.scan.volume.grid.voxel_volume
    check_ball(of_nifti(tmp_path / "case" / "segmentation.nii.gz"), voxel)
