"""Every way to write a result wrong is noticed before it is published."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pydicom
import pytest
from pydicom.uid import ExplicitVRLittleEndian

from scanloom.core import Flag
from scanloom.io.output.measurements import write_measurements
from scanloom.io.scan import Scan
from scanloom.io.write import dicom_seg, nifti
from support import case_folders as wc
from support.case_folders import Written, measured

SCANS: dict[str, Callable[[], Scan]] = {
    "dicom": wc.dicom_scan,
    "dicom oblique": lambda: wc.dicom_scan("PSL", 20.0),
    "dicom tilted": lambda: wc.dicom_scan("LPS", 0.0, 18.5),
    "dicom tilted oblique": lambda: wc.dicom_scan("LIP", 30.0, -9.0),
    "nifti": lambda: wc.nifti_scan(wc.grid_of(wc.directions("RAS"))),
    "nifti left-handed": lambda: wc.nifti_scan(wc.grid_of(wc.directions("LAS")), 1, 1),
    "nifti sheared": lambda: wc.nifti_scan(wc.grid_of(wc.directions("RAS"), 10.0)),
    "nifti given": lambda: wc.nifti_scan(wc.grid_of(wc.directions("PIR")), 0, 0),
    "itk": lambda: wc.itk_scan(wc.grid_of(wc.turned(wc.directions("LPS")))),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seg", ["binary", "labelmap"])
@pytest.mark.parametrize("source", SCANS)
def test_right_results_pass(source: str, seg: str, tmp_path: Path) -> None:
    """One and two models, overlap, subset, image and masks, from every kind of source."""
    scan = SCANS[source]()
    whole, overlap = wc.segmentation_of(scan), wc.overlapping(scan)
    for n, group in enumerate(
        [[whole], [overlap], [whole, overlap], [wc.subset_of(whole, "spleen", "liver")]]
    ):
        folder = tmp_path / str(n)
        folder.mkdir()
        Written(folder, scan, *group, seg=seg, also=("image", "masks")).read_back()


def test_odd_frame_sizes_start_within_a_byte(tmp_path: Path) -> None:
    """19 x 14 pixels are no whole number of bytes: frames are unpacked bit by bit."""
    assert (wc.SHAPE[0] * wc.SHAPE[1]) % 8
    Written(tmp_path, wc.dicom_scan(), wc.segmentation_of(wc.dicom_scan())).read_back()


def test_values_that_are_not_finite_pass(tmp_path: Path) -> None:
    scan = SCANS["nifti"]()
    array = np.array(scan.volume.array, np.float32, order="F")
    array[0, 0, :2] = np.nan, np.inf
    scan = Scan(wc.replace(scan.volume, array=array), scan.source)
    Written(tmp_path, scan, wc.segmentation_of(scan), also=("image",)).read_back()


# --- NIfTI --------------------------------------------------------------------------------------


def moved(affine: np.ndarray, index: Sequence[float]) -> np.ndarray:
    new = np.array(affine)
    new[:3, 3] = affine[:3] @ (*index, 1)
    return new


def swapped(labels: np.ndarray) -> np.ndarray:
    return np.array([0, 2, 1, 3], labels.dtype)[labels]


NIFTI_FAULTS: dict[str, Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
    "mirrored voxels": lambda x, a: (x[::-1], a),
    "mirrored rows": lambda x, a: (x[:, ::-1], a),
    "slices in reverse": lambda x, a: (x[..., ::-1], a),
    "mirrored affine": lambda x, a: (x, a @ np.diag((-1, 1, 1, 1))),
    "both mirrored about zero": lambda x, a: (x[::-1], a @ np.diag((-1, 1, 1, 1))),
    "LPS taken for RAS": lambda x, a: (x, np.diag((-1, -1, 1, 1)) @ a),
    "shifted by one voxel": lambda x, a: (np.roll(x, 1, 1), a),
    "shifted affine": lambda x, a: (x, moved(a, (0, 0, 1))),
    "half a voxel off": lambda x, a: (x, moved(a, (0.5, 0.5, 0.5))),
    "swapped structures": lambda x, a: (swapped(x), a),
    "one voxel lost": lambda x, a: (np.where(np.cumsum(x > 0).reshape(x.shape) == 1, 0, x), a),
    "wrong spacing": lambda x, a: (x, a @ np.diag((1, 1, 1.01, 1))),
    "another shape": lambda x, a: (x[:-1], a),
}


@pytest.mark.parametrize("fault", NIFTI_FAULTS)
@pytest.mark.parametrize("source", ["dicom oblique", "nifti", "itk", "nifti sheared"])
def test_wrong_label_map_is_caught(fault: str, source: str, tmp_path: Path) -> None:
    scan = SCANS[source]()
    written = Written(tmp_path, scan, wc.segmentation_of(scan))
    written.read_back()
    path = tmp_path / "segmentation.nii.gz"
    image = nib.load(path)
    array, affine = NIFTI_FAULTS[fault](np.asarray(image.dataobj), image.affine)
    wrong = nib.Nifti1Image(array.astype(np.uint8), affine)
    wrong.header.set_xyzt_units("mm")
    codes = [int(image.header[f"{form}_code"]) for form in ("sform", "qform")]
    wrong.set_sform(affine, codes[0])
    wrong.set_qform(affine if codes[1] else None, codes[1])
    wrong.to_filename(path)
    assert written.is_caught()


def test_rewritten_right_it_passes(tmp_path: Path) -> None:
    """The faults above are caught, not nibabel's way of writing."""
    scan = SCANS["dicom oblique"]()
    written = Written(tmp_path, scan, wc.segmentation_of(scan))
    path = tmp_path / "segmentation.nii.gz"
    image = nib.load(path)
    same = nib.Nifti1Image(np.asarray(image.dataobj), image.affine)
    same.header.set_xyzt_units("mm")
    same.set_sform(image.affine, 1)
    same.set_qform(image.affine, 1)
    same.to_filename(path)
    written.read_back()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sform_code", 2),
        ("qform_code", 0),
        ("scl_slope", 2.0),
        ("xyzt_units", 3),
        ("descrip", b"Doe^John"),
        ("quatern_b", 0.3),
        ("srow_x", 5.0),
    ],
)
def test_wrong_header_is_caught(field: str, value: Any, tmp_path: Path) -> None:
    scan = wc.dicom_scan()
    written = Written(tmp_path, scan, wc.segmentation_of(scan))
    image = nib.load(tmp_path / "segmentation.nii.gz")
    voxels = np.asarray(image.dataobj)
    header = image.header.copy()
    header["scl_slope"], header["scl_inter"] = 1, 0
    header[field] = value
    raw = header.binaryblock + bytes(4) + voxels.tobytes(order="F")
    (tmp_path / "segmentation.nii.gz").write_bytes(gzip.compress(raw))
    assert written.is_caught()


@pytest.mark.parametrize("name", ["split/liver.nii.gz", "image.nii.gz", "segmentation_rect.nii.gz"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_mirrored_companions_are_caught(name: str, axis: int, tmp_path: Path) -> None:
    """Masks, the image and the rectangular copy are compared as well."""
    scan = wc.dicom_scan(tilt=18.0)
    written = Written(tmp_path, scan, wc.segmentation_of(scan), also=("image", "masks"))
    written.read_back()
    image = nib.load(tmp_path / name)
    raw = np.flip(np.asarray(image.dataobj), axis)
    wrong = nib.Nifti1Image(raw, None, image.header)
    wrong.to_filename(tmp_path / name)
    assert written.is_caught()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_mirroring_nifti_writer_is_caught(
    axis: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = nifti.write_nifti
    monkeypatch.setattr(
        nifti,
        "write_nifti",
        lambda array, *rest, **options: right(np.flip(array, axis), *rest, **options),
    )
    scan = wc.dicom_scan()
    assert Written(tmp_path, scan, wc.segmentation_of(scan)).is_caught()


# --- DICOM SEG ----------------------------------------------------------------------------------


def edited(path: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Replace the frames (frames, rows, columns) of a DICOM SEG."""
    dataset = pydicom.dcmread(path)
    frames = np.ascontiguousarray(change(np.atleast_3d(dataset.pixel_array)))
    dataset.Rows, dataset.Columns = frames.shape[1:]
    if dataset.BitsAllocated == 1:
        data = np.packbits(frames.ravel(), bitorder="little").tobytes()
    else:
        data = frames.tobytes()
    dataset.PixelData = data + bytes(len(data) % 2)
    dataset["PixelData"].VR = "OB"
    dataset["PixelData"].is_undefined_length = False
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.save_as(path)


FRAME_FAULTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mirrored columns": lambda x: x[:, :, ::-1],
    "mirrored rows": lambda x: x[:, ::-1],
    "rows and columns swapped": lambda x: x.transpose(0, 2, 1),
    "turned by 180 degrees": lambda x: x[:, ::-1, ::-1],
    "frames permuted": lambda x: np.roll(x, 1, 0),
    "frames in reverse": lambda x: x[::-1],
    "shifted by a pixel": lambda x: np.roll(x, 1, 2),
    "a pixel more": lambda x: np.maximum(x, (np.indices(x.shape) == 0).all(axis=0)),
}


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
@pytest.mark.parametrize("fault", [*FRAME_FAULTS, None])
def test_wrong_frames_are_caught(fault: str | None, seg: str, tmp_path: Path) -> None:
    """Pixels that stand elsewhere than the frame's position says; None: the edit alone passes."""
    scan = wc.dicom_scan("PSL", 20.0)
    written = Written(tmp_path, scan, wc.segmentation_of(scan), seg=seg)
    edited(tmp_path / "dicom" / "segmentation.dcm", FRAME_FAULTS[fault] if fault else lambda x: x)
    if fault:
        assert written.is_caught()
    else:
        written.read_back()


@pytest.mark.parametrize("change", [b"", b"\0\0", None])
def test_files_that_do_not_end_with_their_frames_are_caught(
    change: bytes | None, tmp_path: Path
) -> None:
    """Nothing, bytes behind the frames, and the last two bytes left out."""
    scan = wc.dicom_scan("PSL", 20.0)
    written = Written(tmp_path, scan, wc.segmentation_of(scan))
    path = tmp_path / "dicom" / "segmentation.dcm"
    data = path.read_bytes()
    path.write_bytes(data[:-2] if change is None else data + change)
    if change == b"":
        written.read_back()
    else:
        assert written.is_caught()


def test_bytes_between_header_and_pixels_are_caught(tmp_path: Path) -> None:
    """pydicom would find no PixelData in such a file."""
    scan = wc.dicom_scan("PSL", 20.0)
    written = Written(tmp_path, scan, wc.segmentation_of(scan))
    path = tmp_path / "dicom" / "segmentation.dcm"
    header, pixels = path.read_bytes().rsplit(b"\xe0\x7f\x10\x00OB", 1)
    path.write_bytes(header + b"junk" * 3 + b"\xe0\x7f\x10\x00OB" + pixels)
    assert written.is_caught()


@pytest.mark.filterwarnings("ignore")
def test_a_labelmap_whose_fragments_cannot_be_parsed_is_caught(tmp_path: Path) -> None:
    """Each bit of the last fragment's tag and length, and of the delimiter behind it."""
    scan = wc.dicom_scan("PSL", 20.0)
    written = Written(tmp_path, scan, wc.segmentation_of(scan), seg="labelmap")
    path = tmp_path / "dicom" / "segmentation.dcm"
    data = path.read_bytes()
    item = data.rindex(b"\xfe\xff\x00\xe0")
    for offset in (*range(item, item + 8), len(data) - 8, len(data) - 6):
        for bit in range(0, 8, 3):
            damaged = bytearray(data)
            damaged[offset] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                pydicom.dcmread(path).pixel_array  # noqa: B018
            except Exception:  # noqa: BLE001 -- of any kind: pydicom cannot read it
                assert written.is_caught(), (offset - len(data), bit)


def move(dataset: pydicom.Dataset, along: int, by: float) -> None:
    """Move all frames by pixels along rows (0) or columns (1)."""
    shared = dataset.SharedFunctionalGroupsSequence[0]
    cosines = np.array(shared.PlaneOrientationSequence[0].ImageOrientationPatient, float)
    step = cosines[3 * along : 3 * along + 3] * wc.SPACING[along] * by
    for group in dataset.PerFrameFunctionalGroupsSequence:
        plane = group.PlanePositionSequence[0]
        plane.ImagePositionPatient = [
            f"{p + s:.9f}" for p, s in zip(plane.ImagePositionPatient, step, strict=True)
        ]


def half_a_pixel(dataset: pydicom.Dataset) -> None:
    move(dataset, 0, 0.5)


def a_pixel_down(dataset: pydicom.Dataset) -> None:
    move(dataset, 1, 1.0)


def slightly_beside_the_source(dataset: pydicom.Dataset) -> None:
    move(dataset, 0, 0.03)


def directions_negated(dataset: pydicom.Dataset) -> None:
    plane = dataset.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence[0]
    plane.ImageOrientationPatient = [-v for v in plane.ImageOrientationPatient]


def directions_swapped(dataset: pydicom.Dataset) -> None:
    plane = dataset.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence[0]
    plane.ImageOrientationPatient = [
        *plane.ImageOrientationPatient[3:],
        *plane.ImageOrientationPatient[:3],
    ]


def spacing_swapped(dataset: pydicom.Dataset) -> None:
    measures = dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    measures.PixelSpacing = measures.PixelSpacing[::-1]


def positions_reversed(dataset: pydicom.Dataset) -> None:
    groups = dataset.PerFrameFunctionalGroupsSequence
    positions = [g.PlanePositionSequence for g in groups]
    for group, position in zip(groups, reversed(positions), strict=True):
        group.PlanePositionSequence = position


def labels_swapped(dataset: pydicom.Dataset) -> None:
    first, second = [s for s in dataset.SegmentSequence if s.SegmentNumber > 0][:2]
    for name in ("SegmentLabel", "SegmentedPropertyTypeCodeSequence"):
        first_value, second_value = first[name].value, second[name].value
        setattr(first, name, second_value)
        setattr(second, name, first_value)


def code_of_another(dataset: pydicom.Dataset) -> None:
    dataset.SegmentSequence[-1].SegmentedPropertyTypeCodeSequence[0].CodeValue = "10200004"


def side_lost(dataset: pydicom.Dataset) -> None:
    for segment in dataset.SegmentSequence:
        kind = segment.SegmentedPropertyTypeCodeSequence[0]
        if "SegmentedPropertyTypeModifierCodeSequence" in kind:
            del kind.SegmentedPropertyTypeModifierCodeSequence


def segment_undescribed(dataset: pydicom.Dataset) -> None:
    dataset.SegmentSequence = dataset.SegmentSequence[:-1]


def refers_to_another_image(dataset: pydicom.Dataset) -> None:
    images = dataset.PerFrameFunctionalGroupsSequence[0].DerivationImageSequence[0]
    images.SourceImageSequence[0].ReferencedSOPInstanceUID = "1.2.3"


def another_frame_of_reference(dataset: pydicom.Dataset) -> None:
    dataset.FrameOfReferenceUID = "1.2.3"


def another_study(dataset: pydicom.Dataset) -> None:
    dataset.StudyInstanceUID = "1.2.3"


def refers_to_another_series(dataset: pydicom.Dataset) -> None:
    dataset.ReferencedSeriesSequence[0].SeriesInstanceUID = "1.2.3"


def refers_to_fewer_images(dataset: pydicom.Dataset) -> None:
    dataset.ReferencedSeriesSequence[0].ReferencedInstanceSequence.pop()


def thickness_of_the_source(dataset: pydicom.Dataset) -> None:
    dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].SliceThickness = 3.0


def slices_further_apart(dataset: pydicom.Dataset) -> None:
    dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].SpacingBetweenSlices = 2.6


HEADER_FAULTS = [
    half_a_pixel,
    a_pixel_down,
    slightly_beside_the_source,
    directions_negated,
    directions_swapped,
    spacing_swapped,
    positions_reversed,
    labels_swapped,
    code_of_another,
    side_lost,
    segment_undescribed,
    refers_to_another_image,
    another_frame_of_reference,
    another_study,
    refers_to_another_series,
    refers_to_fewer_images,
    thickness_of_the_source,
    slices_further_apart,
]


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
@pytest.mark.parametrize("fault", HEADER_FAULTS)
@pytest.mark.parametrize("tilt", [0.0, 15.0])
def test_wrong_places_and_names_are_caught(
    fault: Callable[[pydicom.Dataset], None], seg: str, tilt: float, tmp_path: Path
) -> None:
    scan = wc.dicom_scan("LPS", 20.0, tilt)
    written = Written(tmp_path, scan, wc.segmentation_of(scan), seg=seg)
    path = tmp_path / "dicom" / "segmentation.dcm"
    dataset = pydicom.dcmread(path)
    fault(dataset)
    dataset.save_as(path)
    assert written.is_caught()


def segments_swapped(dataset: pydicom.Dataset) -> None:
    for group in dataset.PerFrameFunctionalGroupsSequence:
        identity = group.SegmentIdentificationSequence[0]
        identity.ReferencedSegmentNumber = {1: 2, 2: 1, 3: 3}[identity.ReferencedSegmentNumber]


def without_last_frame(dataset: pydicom.Dataset) -> None:
    keep = dataset.NumberOfFrames - 1
    bits = np.unpackbits(np.frombuffer(dataset.PixelData, np.uint8), bitorder="little")
    data = np.packbits(bits[: keep * dataset.Rows * dataset.Columns], bitorder="little").tobytes()
    dataset.PixelData = data + bytes(len(data) % 2)
    dataset.PerFrameFunctionalGroupsSequence = dataset.PerFrameFunctionalGroupsSequence[:-1]
    dataset.NumberOfFrames = keep


def without_pixels(dataset: pydicom.Dataset) -> None:
    dataset.PixelData = dataset.PixelData[:10]


@pytest.mark.parametrize("fault", [segments_swapped, without_last_frame, without_pixels])
def test_wrong_segments_are_caught(
    fault: Callable[[pydicom.Dataset], None], tmp_path: Path
) -> None:
    scan = wc.dicom_scan()
    written = Written(tmp_path, scan, wc.segmentation_of(scan))
    path = tmp_path / "dicom" / "segmentation.dcm"
    dataset = pydicom.dcmread(path)
    fault(dataset)
    dataset.save_as(path)
    assert written.is_caught()


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
def test_tilted_copy_off_by_a_pixel_is_caught(seg: str, tmp_path: Path) -> None:
    """The rectangular copy may be off by the half pixel of nearest neighbour, not by more."""
    scan = wc.dicom_scan(tilt=15.0)
    written = Written(tmp_path, scan, wc.segmentation_of(scan), seg=seg)
    edited(tmp_path / "dicom" / "segmentation_rect.dcm", lambda x: np.roll(x, 1, 1))
    assert written.is_caught()


MIRRORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "columns": lambda planes: planes[:, :, ::-1],
    "rows": lambda planes: planes[:, ::-1],
    "slices": lambda planes: planes[::-1],
}


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
@pytest.mark.parametrize("mirror", MIRRORS)
def test_mirroring_seg_writer_is_caught(
    mirror: str, seg: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that mirrors, the fault that a widely used tool has, publishes nothing here."""
    right = dicom_seg._planes
    monkeypatch.setattr(dicom_seg, "_planes", lambda labels: MIRRORS[mirror](right(labels)))
    scan = wc.dicom_scan("PIR", 0.0)
    assert Written(tmp_path, scan, wc.segmentation_of(scan), seg=seg).is_caught()


# --- the rest -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["segmentation.nii.gz", "dicom/segmentation.dcm", "split/liver.nii.gz"]
)
@pytest.mark.parametrize("how", ["missing", "cut", "cut by a byte", "rubbish"])
def test_missing_or_damaged_files_are_caught(name: str, how: str, tmp_path: Path) -> None:
    scan = wc.dicom_scan()
    written = Written(tmp_path, scan, wc.segmentation_of(scan), also=("masks",))
    path = tmp_path / name
    match how:
        case "missing":
            path.unlink()
        case "cut":
            path.write_bytes(path.read_bytes()[:-40])
        case "cut by a byte":
            path.write_bytes(path.read_bytes()[:-1])
        case "rubbish":
            path.write_bytes(b"no such format" * 100)
    assert written.is_caught()


def test_a_file_too_many_is_caught(tmp_path: Path) -> None:
    scan = wc.dicom_scan()
    written = Written(tmp_path, scan, wc.segmentation_of(scan))
    (tmp_path / "segmentation-2.nii.gz").write_bytes(b"")
    assert written.is_caught()


def test_wrong_legend_is_caught(tmp_path: Path) -> None:
    scan = wc.dicom_scan()
    written = Written(tmp_path, scan, wc.segmentation_of(scan))
    path = tmp_path / "segments.json"
    legend = json.loads(path.read_text())
    first, second, _ = legend["files"][0]["structures"]
    first["number"], second["number"] = second["number"], first["number"]
    path.write_text(json.dumps(legend))
    assert written.is_caught()


@pytest.mark.parametrize(("column", "factor"), [("volume_ml", 1.001), ("voxels", 2)])
def test_wrong_measurement_is_caught(column: str, factor: float, tmp_path: Path) -> None:
    scan = wc.dicom_scan()
    written = Written(tmp_path, scan, wc.segmentation_of(scan))
    path = tmp_path / "measurements.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows[0][column] = str(type(factor)(float(rows[0][column]) * factor))
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    assert written.is_caught()


def test_lost_measurement_is_caught(tmp_path: Path) -> None:
    scan = wc.dicom_scan()
    written = Written(tmp_path, scan, wc.segmentation_of(scan))
    write_measurements(tmp_path, measured(written.segmentations)[:-1])
    assert written.is_caught()


def test_source_without_uids_has_no_seg_and_passes(tmp_path: Path) -> None:
    """No DICOM SEG where the source can't be referred to; one that is there is a fault."""
    scan = wc.dicom_scan()
    scan = wc.with_slices(scan, sop_instance="")
    segmentation = wc.segmentation_of(scan)
    wc.write_results(tmp_path, [segmentation], scan, wc.case_with(), (Flag.SEG_NOT_POSSIBLE,))
    write_measurements(tmp_path, measured([segmentation]))
    assert not (tmp_path / "dicom").exists()
    wc.read_back(tmp_path, [segmentation], scan, wc.case_with())
