"""RTSTRUCT: outlines as scikit-image fills them, the file as pydicom reads it, its read-back."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydicom import Dataset, dcmread, dcmwrite
from skimage.measure import grid_points_in_poly

from scanloom.core import Code, Layer, ScanError, Segmentation
from scanloom.core.grid import LPS_TO_RAS
from scanloom.io.extras.rtstruct import (
    RTSTRUCT,
    _decimals,
    _point_texts,
    _sequence,
    outlines,
)
from scanloom.io.output.case_folder import CaseContent
from scanloom.io.scan import DicomSource, Scan
from support import case_folders

# --- outlines -------------------------------------------------------------------------------------


def drawn(*rows: str) -> np.ndarray:
    """Return a mask (J, I) that is drawn with `#`."""
    return np.array([[c == "#" for c in row] for row in rows])


DRAWN = {
    "voxel": drawn("...", ".#.", "..."),
    "only voxel": drawn("#"),
    "line along a row": drawn(".....", ".###.", "....."),
    "line along a column": drawn("#", "#", "#"),
    "diagonal": drawn("#...", ".#..", "..#.", "...#"),
    "all": drawn("####", "####"),
    "hole": drawn("#####", "#...#", "#.#.#", "#...#", "#####"),
    "holes beside each other": drawn("#######", "#.#.#.#", "#######", "##.#.##", "#######"),
    "island in a hole in an island": drawn(
        "#########",
        "#.......#",
        "#.#####.#",
        "#.#...#.#",
        "#.#.#.#.#",
        "#.#...#.#",
        "#.#####.#",
        "#.......#",
        "#########",
    ),
    "corners at the border": drawn("#..#", "....", "#..#"),
    "checkerboard": np.indices((9, 8)).sum(axis=0) % 2 == 0,
}


def filled(points: np.ndarray, sizes: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return how many outlines each voxel centre is inside of, by scikit-image."""
    count = np.zeros(shape, int)
    for outline in np.split(points, np.cumsum(sizes)[:-1]):
        count += grid_points_in_poly(shape, outline[:, ::-1] / 4)
    return count


@pytest.mark.parametrize("name", DRAWN)
def test_outlines_contain_exactly_the_drawn_voxels(name: str) -> None:
    mask = DRAWN[name]
    for turned in (mask, mask.T, mask[::-1], mask[:, ::-1]):
        points, sizes = outlines(turned)
        np.testing.assert_array_equal(filled(points, sizes, turned.shape), turned)


@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.8, 0.98])
def test_outlines_of_noise_contain_exactly_its_voxels(share: float) -> None:
    rng = np.random.default_rng(5)
    for _ in range(8):
        mask = rng.random((23, 31)) < share
        mask[11, 7] = True
        points, sizes = outlines(mask)
        np.testing.assert_array_equal(filled(points, sizes, mask.shape), mask)


def test_channels_lie_off_the_rows_of_centres() -> None:
    points, sizes = outlines(DRAWN["hole"])
    assert sizes.tolist() == [20, 4]  # 8 corners outside and inside, the ends of the channel twice
    outline = points[: sizes[0]]
    level = np.flatnonzero(outline[:, 1] == np.roll(outline[:, 1], -1))
    channel = [y for y in outline[level, 1] if y % 2]
    assert len(channel) == 2
    assert all(y % 4 == 1 for y in channel)


def test_collinear_points_are_dropped() -> None:
    points, sizes = outlines(np.ones((200, 300), bool))
    assert sizes.tolist() == [8]
    assert points.min(axis=0).tolist() == [-2, -2]
    assert points.max(axis=0).tolist() == [1198, 798]


@pytest.mark.parametrize("decimals", [4, 6])
def test_points_are_written_as_python_formats_them(decimals: int) -> None:
    points = np.random.default_rng(1).uniform(-1.5, 1.5, (200, 3)) * 10.0 ** np.arange(-3, 3)[:3]
    points[:3] = [[0, -0.5, 999.99999999], [-0.00000001, 9.5, -10], [1234.5, -1000, 0.1]]
    text, ends = _point_texts(points, decimals)
    expected = [
        "".join(f"{value + 0.0:.{decimals}f}\\" for value in np.round(point, decimals))
        for point in points
    ]
    assert text.decode() == "".join(expected)
    assert ends.tolist() == np.cumsum([len(each) for each in expected]).tolist()


@pytest.mark.parametrize("decimals", [4, 6])
def test_decimal_strings_are_read_as_python_reads_them(decimals: int) -> None:
    values = np.random.default_rng(2).uniform(-1200, 1200, 300)
    texts = [f"{value:.{decimals}f}" for value in [*values, 0.0, -0.0, -0.5]]
    read = _decimals("\\".join(texts).encode() + b" ")
    np.testing.assert_array_equal(read, [float(text) for text in texts])


@pytest.mark.parametrize("text", [b"1.25\\0.5", b"1.25\\125", b"1.25\\1.2.5\\1", b"1.25\\.1.25"])
def test_coordinates_with_other_decimals_are_refused(text: bytes) -> None:
    with pytest.raises(ScanError, match="WRITE_MISMATCH"):
        _decimals(text)


# --- the file -------------------------------------------------------------------------------------


def written(
    folder: Path, scan: Scan, *segmentations: Segmentation, **outputs: object
) -> CaseContent:
    case = case_folders.case_with(also=("rtstruct",), **outputs)
    content = CaseContent(case, scan, segmentations)
    RTSTRUCT.write(folder, content)
    return content


def noisy(scan: Scan) -> Segmentation:
    """Return two structures of noise, up to the border of every slice."""
    rng = np.random.default_rng(2)
    labels = np.asfortranarray(rng.integers(0, 3, scan.volume.grid.shape).astype(np.uint8))
    layer = Layer(labels, case_folders.STRUCTURES[:2])
    return Segmentation("organs", (layer,), scan.volume.grid, "1.2.0")


@pytest.mark.parametrize(
    ("codes", "oblique"), [("LPS", 0.0), ("LIP", 0.0), ("PIR", 0.0), ("LPS", 20.0), ("PIR", 50.0)]
)
@pytest.mark.parametrize("make", [case_folders.segmentation_of, case_folders.overlapping, noisy])
def test_the_file_lies_on_the_scan(
    make: Callable[[Scan], Segmentation], codes: str, oblique: float, tmp_path: Path
) -> None:
    """Contours as pydicom reads them, filled by scikit-image, are the label map."""
    scan = case_folders.dicom_scan(codes, oblique)
    segmentation = make(scan)
    content = written(tmp_path, scan, segmentation)
    RTSTRUCT.read_back(tmp_path, content)
    dataset = dcmread(tmp_path / "dicom" / "rtstruct.dcm")
    source = scan.source
    assert isinstance(source, DicomSource)
    instances = [image.sop_instance for image in source.slices if image]
    labels_of = {s.number: x.labels for x in segmentation.layers for s in x.structures}
    assert [r.ReferencedROINumber for r in dataset.ROIContourSequence] == [*labels_of]
    for region in dataset.ROIContourSequence:
        count = np.zeros(scan.volume.grid.shape, int)
        for contour in region.ContourSequence:
            points = np.reshape(contour.ContourData, (-1, 3)).astype(float)
            assert len(points) == contour.NumberOfContourPoints
            index = scan.volume.grid.index(points * LPS_TO_RAS)
            k = instances.index(contour.ContourImageSequence[0].ReferencedSOPInstanceUID)
            np.testing.assert_allclose(index[:, 2], k, atol=1e-3)
            count[..., k] += grid_points_in_poly(count.shape[:2], index[:, :2])
        number = region.ReferencedROINumber
        np.testing.assert_array_equal(count, labels_of[number] == number)


def test_structures_are_described_as_in_seg(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    segmentation = case_folders.segmentation_of(scan)
    content = written(tmp_path, scan, segmentation)
    case_folders.write_results(tmp_path, [segmentation], scan, content.case)
    ours = dcmread(tmp_path / "dicom" / "rtstruct.dcm")
    seg = dcmread(tmp_path / "dicom" / "segmentation.dcm")
    for keyword in ("PatientName", "PatientID", "StudyInstanceUID", "FrameOfReferenceUID"):
        assert ours[keyword].value == seg[keyword].value
    assert ours.SeriesInstanceUID not in (
        seg.SeriesInstanceUID,
        scan.source.first.SeriesInstanceUID,
    )
    assert ours.StructureSetDate == seg.ContentDate == "20240102"
    for region, observation, segment, structure in zip(
        ours.StructureSetROISequence,
        ours.RTROIObservationsSequence,
        seg.SegmentSequence,
        case_folders.STRUCTURES,
        strict=True,
    ):
        assert region.ROIName == segment.SegmentLabel
        assert region.ROIDescription == segment.SegmentDescription
        assert region.ROIGenerationAlgorithm == segment.SegmentAlgorithmType
        kind = observation.RTROIIdentificationCodeSequence
        assert kind == segment.SegmentedPropertyTypeCodeSequence
        category = observation.SegmentedPropertyCategoryCodeSequence
        assert category == segment.SegmentedPropertyCategoryCodeSequence
        assert observation.RTROIInterpretedType == "ORGAN"
        algorithm = region.ROIDerivationAlgorithmIdentificationSequence
        assert algorithm == segment.SegmentationAlgorithmIdentificationSequence
        [drawn_as] = [
            r for r in ours.ROIContourSequence if r.ReferencedROINumber == region.ROINumber
        ]
        assert tuple(drawn_as.ROIDisplayColor) == structure.color


def test_names_of_other_languages_and_long_codes_are_kept(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    kind = Code("1" * 18, "SCT", "печень" * 10 + "123 5")
    anatomy = Code("91723000", "SCT", "Anatomical Structure")
    liver = replace(case_folders.LIVER, name="肝臓", category=anatomy, type=kind)
    whole = case_folders.segmentation_of(scan)
    layer = Layer(whole.layers[0].labels, (liver, *case_folders.STRUCTURES[1:]))
    content = written(tmp_path, scan, replace(whole, layers=(layer,)))
    RTSTRUCT.read_back(tmp_path, content)
    dataset = dcmread(tmp_path / "dicom" / "rtstruct.dcm")
    assert dataset.StructureSetROISequence[0].ROIDescription == "肝臓"
    [observation, *_] = dataset.RTROIObservationsSequence
    assert observation.RTROIInterpretedType == "ORGAN"
    [code] = observation.RTROIIdentificationCodeSequence
    assert code.CodeMeaning == "печень" * 10 + "123"


def test_equal_content_has_equal_bytes_and_other_content_other_uids(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    files = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        written(tmp_path / name, scan, case_folders.segmentation_of(scan, seed=seed))
        files.append(tmp_path / name / "dicom" / "rtstruct.dcm")
    assert files[0].read_bytes() == files[1].read_bytes()
    first, _, other = map(dcmread, files)
    assert first.SOPInstanceUID != other.SOPInstanceUID
    assert first.SeriesInstanceUID != other.SeriesInstanceUID


def test_outlines_of_more_than_4_gib_are_refused() -> None:
    with mmap.mmap(-1, 2**30) as gibibyte:  # never touched: it takes no memory
        contour = memoryview(gibibyte)
        with pytest.raises(ScanError, match="TOO_LARGE"):
            _sequence(0x3006, 0x0040, [contour] * 4)
        contour.release()


def test_two_models_have_a_file_each(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    models = [case_folders.segmentation_of(scan), case_folders.overlapping(scan)]
    content = written(tmp_path, scan, *models)
    expected = {"dicom/organs-rtstruct.dcm", "dicom/regions-rtstruct.dcm"}
    assert RTSTRUCT.expected(content) == expected
    RTSTRUCT.read_back(tmp_path, content)
    numbers = [dcmread(tmp_path / name).SeriesNumber for name in sorted(expected)]
    assert numbers == [800, 801]


def test_an_empty_structure_has_no_contour(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    whole = case_folders.segmentation_of(scan)
    labels = np.where(whole.layers[0].labels == 2, 0, whole.layers[0].labels)
    layer = Layer(np.asfortranarray(labels), whole.layers[0].structures)
    content = written(tmp_path, scan, replace(whole, layers=(layer,)))
    RTSTRUCT.read_back(tmp_path, content)
    regions = dcmread(tmp_path / "dicom" / "rtstruct.dcm").ROIContourSequence
    assert ["ContourSequence" in region for region in regions] == [True, False, True]


def test_an_interpolated_slice_has_no_contour(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    source = scan.source
    assert isinstance(source, DicomSource)
    slices = (*source.slices[:4], None, *source.slices[5:])
    scan = replace(scan, source=replace(source, slices=slices))
    RTSTRUCT.read_back(tmp_path, written(tmp_path, scan, case_folders.segmentation_of(scan)))


def test_sheared_and_foreign_scans_get_none() -> None:
    grid = case_folders.dicom_scan().volume.grid
    sheared, nameless = case_folders.dicom_scan(tilt=17.0), case_folders.dicom_scan()
    nameless = case_folders.with_slices(nameless, sop_instance="")
    for scan in (sheared, nameless, case_folders.nifti_scan(grid)):
        content = CaseContent(
            case_folders.case_with(also=("rtstruct",)), scan, [case_folders.segmentation_of(scan)]
        )
        assert RTSTRUCT.expected(content) == set()


# --- faults that the read-back finds --------------------------------------------------------------


def contour_of(dataset: Dataset) -> Dataset:
    """Return a contour of the liver."""
    contour: Dataset = dataset.ROIContourSequence[0].ContourSequence[0]
    return contour


def moved(dataset: Dataset, axis: int, distance: float) -> None:
    contour = contour_of(dataset)
    points = np.reshape(contour.ContourData, (-1, 3)).astype(float)
    points[:, axis] += distance
    contour.ContourData = [f"{v:.4f}" for v in points.ravel()]


def one_missing(dataset: Dataset) -> None:
    del dataset.ROIContourSequence[0].ContourSequence[0]


def one_twice(dataset: Dataset) -> None:
    sequence = dataset.ROIContourSequence[0].ContourSequence
    sequence.append(sequence[0])


def point_missing(dataset: Dataset) -> None:
    contour = contour_of(dataset)
    contour.ContourData = contour.ContourData[:-3]


def other_image(dataset: Dataset) -> None:
    contour_of(dataset).ContourImageSequence[0].ReferencedSOPInstanceUID += "1"


def other_code(dataset: Dataset) -> None:
    observation = dataset.RTROIObservationsSequence[0]
    observation.RTROIIdentificationCodeSequence[0].CodeValue = "1"


def other_label(dataset: Dataset) -> None:
    dataset.StructureSetROISequence[0].ROIName = "lung"


def other_color(dataset: Dataset) -> None:
    dataset.ROIContourSequence[0].ROIDisplayColor = [1, 2, 3]


def other_frame(dataset: Dataset) -> None:
    dataset.FrameOfReferenceUID += "1"


def series_of(dataset: Dataset) -> Dataset:
    [referenced] = dataset.ReferencedFrameOfReferenceSequence
    return referenced.RTReferencedStudySequence[0].RTReferencedSeriesSequence[0]


def other_series(dataset: Dataset) -> None:
    series_of(dataset).SeriesInstanceUID += "1"


def other_image_of_the_series(dataset: Dataset) -> None:
    series_of(dataset).ContourImageSequence[2].ReferencedSOPInstanceUID += "1"


def image_missing(dataset: Dataset) -> None:
    del series_of(dataset).ContourImageSequence[2]


def other_frame_of_a_structure(dataset: Dataset) -> None:
    dataset.StructureSetROISequence[1].ReferencedFrameOfReferenceUID += "1"


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda d: moved(d, 0, case_folders.SPACING[0]), id="column"),
        pytest.param(lambda d: moved(d, 1, -case_folders.SPACING[1]), id="row"),
        pytest.param(lambda d: moved(d, 2, case_folders.SPACING[2]), id="slice"),
        pytest.param(lambda d: moved(d, 2, 0.1), id="off the slice"),
        pytest.param(lambda d: moved(d, 0, 1000), id="outside"),
        one_missing,
        one_twice,
        point_missing,
        other_image,
        other_code,
        other_label,
        other_color,
        other_frame,
        other_series,
        other_image_of_the_series,
        image_missing,
        other_frame_of_a_structure,
    ],
)
def test_a_fault_is_found(fault: Callable[[Dataset], None], tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    content = written(tmp_path, scan, case_folders.segmentation_of(scan))
    path = tmp_path / "dicom" / "rtstruct.dcm"
    rewrite(path, lambda _: None)
    RTSTRUCT.read_back(tmp_path, content)
    rewrite(path, fault)
    with pytest.raises(ScanError, match="WRITE_MISMATCH"):
        RTSTRUCT.read_back(tmp_path, content)


def rewrite(path: Path, change: Callable[[Dataset], None]) -> None:
    dataset = dcmread(path)
    change(dataset)
    dcmwrite(path, dataset)


def test_a_hole_as_a_contour_of_its_own_is_found(tmp_path: Path) -> None:
    """Even-odd over all contours would accept it; most readers fill it."""
    scan = case_folders.dicom_scan()
    labels = np.zeros(scan.volume.grid.shape, np.uint8, order="F")
    labels[2:9, 2:9, 3] = 1
    hole = labels.copy(order="F")
    hole[4:7, 4:7, 3] = 0
    maps = [
        Segmentation("organs", (Layer(x, case_folders.STRUCTURES[:1]),), scan.volume.grid)
        for x in (labels, labels - hole, hole)
    ]
    path = tmp_path / "dicom" / "rtstruct.dcm"
    written(tmp_path, scan, maps[1])
    inner = contour_of(dcmread(path))
    content = written(tmp_path, scan, maps[2])
    RTSTRUCT.read_back(tmp_path, content)
    written(tmp_path, scan, maps[0])
    rewrite(path, lambda d: d.ROIContourSequence[0].ContourSequence.append(inner))
    with pytest.raises(ScanError, match="WRITE_MISMATCH"):
        RTSTRUCT.read_back(tmp_path, content)
