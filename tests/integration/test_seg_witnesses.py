"""DICOM SEG as foreign programs see it: the same voxels at the same places as the NIfTI.

Witnesses: dciodvfy (dicom3tools), segimage2itkimage (dcmqi), highdicom's reader, SimpleITK and
nibabel.
"""

from __future__ import annotations

import json
from pathlib import Path

import highdicom as hd
import nibabel as nib
import numpy as np
import pytest
from pydicom import dcmread

from scanloom.core import Segmentation
from scanloom.io.scan import DicomSource, Scan
from scanloom.io.write.dicom_seg import write_segs
from support import case_folders
from support.seg_witnesses import (
    LABELMAP_ERRORS,
    Points,
    assert_same_places,
    complaints,
    dcmqi_points,
    highdicom_frame_points,
    highdicom_points,
    nifti_points,
)

ORIENTATIONS = [(codes, 0.0) for codes in case_folders.RIGHT_HANDED] + [
    ("LPS", 20.0),
    ("PIR", 50.0),
]


def written(
    folder: Path, scan: Scan, *segmentations: Segmentation, seg: str = "binary", **outputs: object
) -> Path:
    case_folders.write_results(
        folder, segmentations, scan, case_folders.case_with(seg=seg, **outputs), ()
    )
    return folder


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seg", ["binary", "labelmap"])
@pytest.mark.parametrize(("codes", "oblique"), ORIENTATIONS)
def test_every_orientation_lies_on_the_scan(
    codes: str, oblique: float, seg: str, tmp_path: Path
) -> None:
    """Axial, sagittal, coronal, oblique, all negated: four readers see the same places."""
    scan = case_folders.dicom_scan(codes, oblique)
    segmentation = case_folders.segmentation_of(scan)
    folder = written(tmp_path, scan, segmentation, seg=seg)
    ours = nifti_points(folder, segmentation)
    path = folder / "dicom" / "segmentation.dcm"
    assert_same_places(ours, highdicom_points(path))
    assert_same_places(ours, dcmqi_points(path, tmp_path / "dcmqi"))
    np.testing.assert_allclose(
        nib.load(folder / "segmentation.nii.gz").affine, scan.volume.grid.affine, atol=1e-4
    )


def test_all_orders_are_there() -> None:
    assert len(set(case_folders.RIGHT_HANDED)) == 24


@pytest.mark.parametrize("oblique", [0.0, 20.0])
@pytest.mark.parametrize(
    "make", [case_folders.segmentation_of, case_folders.overlapping], ids=["one", "overlap"]
)
def test_binary_is_clean_for_dciodvfy(make, oblique: float, tmp_path: Path) -> None:
    """A clean source gives no error, also tilted, empty, or with a subset of structures."""
    for n, scan in enumerate(
        [case_folders.dicom_scan("LPS", oblique), case_folders.dicom_scan("LPS", oblique, 17.0)]
    ):
        whole = make(scan)
        for m, segmentation in enumerate(
            [whole, case_folders.subset_of(whole, "spleen", "kidney_left")]
        ):
            folder = tmp_path / f"{n}{m}"
            folder.mkdir()
            written(folder, scan, segmentation)
            for path in (folder / "dicom").iterdir():
                assert complaints(path) == []


def test_empty_binary_is_clean_and_readable(tmp_path: Path) -> None:
    """A SEG without frames is a valid file too, with the segments described."""
    scan = case_folders.dicom_scan()
    whole = case_folders.segmentation_of(scan)
    empty = case_folders.subset_of(whole, "liver", "spleen")
    layer = case_folders.Layer(np.zeros_like(whole.layers[0].labels), empty.layers[0].structures)
    empty = case_folders.replace(empty, layers=(layer,))
    for seg in ("binary", "labelmap"):
        folder = tmp_path / seg
        folder.mkdir()
        path = written(folder, scan, empty, seg=seg) / "dicom" / "segmentation.dcm"
        assert complaints(path) == ([] if seg == "binary" else LABELMAP_ERRORS)
        read = hd.seg.segread(path)
        labels = {read.get_segment_description(n).segment_label for n in read.segment_numbers if n}
        assert labels == {"liver", "spleen"}
        assert not read.pixel_array.any()


def test_labelmap_has_the_two_known_complaints(tmp_path: Path) -> None:
    """dciodvfy knows no Label Map; anything beyond these two would be ours."""
    scan = case_folders.dicom_scan("LPS", 20.0)
    folder = written(tmp_path, scan, case_folders.overlapping(scan), seg="labelmap")
    assert len(list((folder / "dicom").iterdir())) == 3
    for path in (folder / "dicom").iterdir():
        assert complaints(path) == LABELMAP_ERRORS


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
def test_overlapping_structures_and_two_models(seg: str, tmp_path: Path) -> None:
    """Structures that share voxels, beside a second model, each in files of its own."""
    scan = case_folders.dicom_scan("PSL", 20.0)
    organs, regions = case_folders.segmentation_of(scan), case_folders.overlapping(scan)
    folder = written(tmp_path, scan, organs, regions, seg=seg)
    for segmentation in (organs, regions):
        model = segmentation.model
        ours = nifti_points(folder, segmentation, f"{model}-")
        theirs: Points = {}
        foreign: Points = {}
        for n, path in enumerate(sorted((folder / "dicom").glob(f"{model}-*.dcm"))):
            theirs |= highdicom_points(path)
            foreign |= dcmqi_points(path, tmp_path / f"{model}{n}")
        assert_same_places(ours, theirs)
        assert_same_places(ours, foreign)


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
def test_subset_keeps_label_and_code(seg: str, tmp_path: Path) -> None:
    """Asking for the left kidney gives the left kidney: label, code, side, colour and place."""
    scan = case_folders.dicom_scan()
    segmentation = case_folders.subset_of(case_folders.segmentation_of(scan), "kidney_left")
    folder = written(tmp_path, scan, segmentation, seg=seg)
    path = folder / "dicom" / "segmentation.dcm"
    assert_same_places(nifti_points(folder, segmentation), dcmqi_points(path, tmp_path / "q"))
    assert_same_places(nifti_points(folder, segmentation), highdicom_points(path))
    (segment,) = json.loads((tmp_path / "q" / "x-meta.json").read_text())["segmentAttributes"][0]
    assert segment["labelID"] == (1 if seg == "binary" else 2)
    kind = segment["SegmentedPropertyTypeCodeSequence"]
    assert (kind["CodeValue"], kind["CodingSchemeDesignator"]) == ("64033007", "SCT")
    assert segment["SegmentedPropertyTypeModifierCodeSequence"]["CodeMeaning"] == "Left"
    assert segment["SegmentDescription"] == "Left kidney"
    np.testing.assert_allclose(segment["recommendedDisplayRGBValue"], (30, 90, 200), atol=1)


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
@pytest.mark.parametrize(("codes", "oblique", "tilt"), [("LPS", 0.0, 18.5), ("PSL", 20.0, -12.0)])
def test_tilted_stack(codes: str, oblique: float, tilt: float, seg: str, tmp_path: Path) -> None:
    """Each frame stands on its own slice; the rectangular copy is right for tools without shear."""
    scan = case_folders.dicom_scan(codes, oblique, tilt)
    segmentation = case_folders.segmentation_of(scan)
    folder = written(tmp_path, scan, segmentation, seg=seg)
    sheared = highdicom_frame_points(folder / "dicom" / "segmentation.dcm")
    assert_same_places(nifti_points(folder, segmentation), sheared)
    upright = nifti_points(folder, segmentation, rect="_rect")
    path = folder / "dicom" / "segmentation_rect.dcm"
    assert_same_places(upright, dcmqi_points(path, tmp_path / "q"))
    assert_same_places(upright, highdicom_points(path))
    half = 0.5 * np.linalg.norm(case_folders.SPACING[:2]) + 1e-3
    for label, points in sheared.items():
        away = np.linalg.norm(points[:, None] - upright[label][None], axis=2)
        assert away.min(axis=1).max() <= half


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
def test_positions_are_those_of_the_source(seg: str, tmp_path: Path) -> None:
    """Frames take over position and orientation as they were written, to the last digit."""
    scan = case_folders.dicom_scan("LIP", 20.0, 10.0)
    written(tmp_path, scan, case_folders.segmentation_of(scan), seg=seg)
    dataset = dcmread(tmp_path / "dicom" / "segmentation.dcm")
    source = scan.source
    assert isinstance(source, DicomSource)
    images = {image.sop_instance: image for image in source.slices if image}
    shared = dataset.SharedFunctionalGroupsSequence[0]
    for group in dataset.PerFrameFunctionalGroupsSequence:
        image = group.DerivationImageSequence[0].SourceImageSequence[0]
        position = images[image.ReferencedSOPInstanceUID].position
        assert tuple(map(str, group.PlanePositionSequence[0].ImagePositionPatient)) == position
        orientation = shared.PlaneOrientationSequence[0].ImageOrientationPatient
        assert tuple(map(str, orientation)) == source.orientation


def test_write_segs_names_its_files(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan(tilt=10.0)
    write_segs(
        tmp_path,
        case_folders.segmentation_of(scan),
        scan.source,
        case_folders.case_with(),
        ["organs", "other"],
    )
    written = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert [path.relative_to(tmp_path).as_posix() for path in written] == [
        "dicom/organs-segmentation.dcm",
        "dicom/organs-segmentation_rect.dcm",
    ]
