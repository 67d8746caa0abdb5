"""DICOM SR: the report as highdicom makes and reads it, its segments, and its read-back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydicom import Dataset, dcmread, dcmwrite

from scanloom.core import Code, Flag, Layer, Measurement, ScanError, Segmentation, Structure
from scanloom.io.extras.sr import SR
from scanloom.io.output.case_folder import CaseContent
from scanloom.io.scan import DicomSource, Scan
from support import case_folders
from support.sr_witnesses import (
    SR_NAME,
    content_of,
    element_texts,
    group_by_highdicom,
    items_of,
    known,
    numbers_by_highdicom,
    read_by_highdicom,
    written,
)


def groups_of(path: Path) -> list[Dataset]:
    """Return the measurement groups of a report."""
    root = dcmread(path).ContentSequence
    [container] = [i for i in root if i.ConceptNameCodeSequence[0].CodeValue == "126010"]
    return list(container.ContentSequence)


def item_of(group: Dataset, name: str, nth: int = 0) -> Dataset:
    """Return a content item of a group by the value of its name."""
    items = group.ContentSequence
    same = [i for i in items if i.ConceptNameCodeSequence[0].CodeValue == name]
    found: Dataset = same[nth]
    return found


def reference_of(group: Dataset) -> Dataset:
    [reference] = item_of(group, "121191").ReferencedSOPSequence
    assert isinstance(reference, Dataset)
    return reference


def with_structures(scan: Scan, *structures: Structure) -> Segmentation:
    """Return the segmentation of a scan with other structures of the same numbers."""
    whole = case_folders.segmentation_of(scan)
    return replace(whole, layers=(Layer(whole.layers[0].labels, structures),))


# --- content --------------------------------------------------------------------------------------


def test_groups_are_those_of_highdicom(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    content = content_of(scan, case_folders.segmentation_of(scan), flags=(Flag.HU_IMPLAUSIBLE,))
    groups = groups_of(written(tmp_path, content))
    for ours, measurement in zip(groups, content.measurements, strict=True):
        uid = item_of(ours, "112040").UID
        theirs = group_by_highdicom(content, measurement, reference_of(ours), uid)
        assert items_of(ours) == items_of(theirs)
        assert element_texts(ours) == element_texts(theirs)


@pytest.mark.parametrize(
    ("modality", "unit", "name", "code"),
    [
        ("CT", "HU", "112031", "[hnsf'U]"),
        ("CT", "a.u.", "intensity", "[arb'U]"),
        ("MR", "a.u.", "110852", "[arb'U]"),
        ("PT", "a.u.", "intensity", "[arb'U]"),
        (None, "unknown", "intensity", "1"),
    ],
)
def test_highdicom_reads_every_number(
    modality: str | None, unit: str, name: str, code: str, tmp_path: Path
) -> None:
    scan = case_folders.dicom_scan()
    scan = replace(scan, volume=replace(scan.volume, modality=modality, unit=unit))
    content = content_of(scan, case_folders.segmentation_of(scan))
    groups = read_by_highdicom(written(tmp_path, content))
    for group, measurement in zip(groups, content.measurements, strict=True):
        assert len(known(measurement)) == 10
        assert numbers_by_highdicom(group) == known(measurement)
        of_intensities = [m for m in group.get_measurements() if m.derivation is not None]
        assert {m.name.value for m in of_intensities} == {name}
        assert {m.unit.value for m in of_intensities} == {code}
        flags = [
            e.value.value for e in group.get_qualitative_evaluations() if e.name.value == "flag"
        ]
        assert flags == [flag.code for flag in measurement.flags]


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
@pytest.mark.parametrize(
    "make",
    [
        lambda scan: [case_folders.segmentation_of(scan)],
        lambda scan: [case_folders.overlapping(scan)],
        lambda scan: [case_folders.segmentation_of(scan), case_folders.overlapping(scan)],
        lambda scan: [
            case_folders.subset_of(case_folders.segmentation_of(scan), "liver", "spleen")
        ],
    ],
    ids=["layer", "layers", "models", "subset"],
)
def test_each_structure_refers_to_its_segment(
    make: Callable[[Scan], list[Segmentation]], seg: str, tmp_path: Path
) -> None:
    """Two models have one report; a LABELMAP has a file for each layer."""
    scan = case_folders.dicom_scan()
    content = content_of(scan, *make(scan), seg=seg)
    report = dcmread(written(tmp_path, content))
    segs = {}
    for path in (tmp_path / "dicom").glob("*segmentation*.dcm"):
        dataset = dcmread(path, stop_before_pixels=True)
        segs[dataset.SOPInstanceUID] = dataset
    for group, measurement in zip(groups_of(tmp_path / SR_NAME), content.measurements, strict=True):
        reference = reference_of(group)
        found = segs[reference.ReferencedSOPInstanceUID]
        assert reference.ReferencedSOPClassUID == found.SOPClassUID
        [segment] = [
            s for s in found.SegmentSequence if s.SegmentNumber == reference.ReferencedSegmentNumber
        ]
        assert (found.ContentDescription, segment.SegmentLabel) == (
            measurement.model,
            measurement.label,
        )
        assert segment.TrackingUID == item_of(group, "112040").UID
        assert item_of(group, "111001").TextValue == measurement.model
    [study] = report.CurrentRequestedProcedureEvidenceSequence
    listed = {
        i.ReferencedSOPInstanceUID for s in study.ReferencedSeriesSequence for i in s[0x81199]
    }
    assert listed == {*segs, *(i.sop_instance for i in scan.source.slices)}


def test_it_shares_patient_study_and_dates_with_the_seg(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    ours = dcmread(written(tmp_path, content_of(scan, case_folders.segmentation_of(scan))))
    seg = dcmread(tmp_path / "dicom" / "segmentation.dcm")
    for keyword in ("PatientName", "PatientID", "StudyInstanceUID", "ContentDate", "ContentTime"):
        assert ours[keyword].value == seg[keyword].value
    assert ours.ContentDate == "20240102"
    assert (ours.Modality, ours.SeriesNumber) == ("SR", 700)
    series = {ours.SeriesInstanceUID, seg.SeriesInstanceUID, scan.source.first.SeriesInstanceUID}
    assert len(series) == 3
    assert "FrameOfReferenceUID" not in ours


def test_dates_now_apply(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    content = content_of(scan, case_folders.segmentation_of(scan), dates="now")
    assert dcmread(written(tmp_path, content)).ContentDate > "20240102"


def test_equal_content_has_equal_bytes_and_other_content_other_uids(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    paths = [
        written(tmp_path / name, content_of(scan, case_folders.segmentation_of(scan, seed=seed)))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    first, _, other = map(dcmread, paths)
    assert first.SOPInstanceUID != other.SOPInstanceUID
    assert first.SeriesInstanceUID != other.SeriesInstanceUID


def test_a_sheared_scan_refers_to_the_slices_that_were_measured(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan(tilt=17.0)
    path = written(tmp_path, content_of(scan, case_folders.segmentation_of(scan)))
    seg = dcmread(tmp_path / "dicom" / "segmentation.dcm")
    assert (tmp_path / "dicom" / "segmentation_rect.dcm").exists()
    assert {reference_of(g).ReferencedSOPInstanceUID for g in groups_of(path)} == {
        seg.SOPInstanceUID
    }


# --- what may be missing, long or of another language ---------------------------------------------


def test_an_empty_structure_has_a_volume_of_0_and_no_intensities(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    whole = case_folders.segmentation_of(scan)
    for name, numbers in (("one", {1, 3}), ("none", set())):
        labels = np.where(np.isin(whole.layers[0].labels, [*numbers]), whole.layers[0].labels, 0)
        layer = Layer(np.asfortranarray(labels, np.uint8), whole.layers[0].structures)
        content = content_of(scan, replace(whole, layers=(layer,)))
        group = read_by_highdicom(written(tmp_path / name, content))[1]
        assert numbers_by_highdicom(group) == {"volume_ml": 0, "voxels": 0, "components": 0}
        values = [e.value.value for e in group.get_qualitative_evaluations()]
        assert "EMPTY" in values


def test_shares_uncertainty_and_changes_are_in_it(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    segmentation = replace(case_folders.segmentation_of(scan), changes="not mirrored")
    content = content_of(scan, segmentation)
    extra = {"share": 0.25, "share_of": "organs/liver + organs/spleen", "entropy": 0.125}
    first = replace(content.measurements[0], **extra, disagreement=0.0)
    content = replace(content, measurements=[first, *content.measurements[1:]])
    path = written(tmp_path, content)
    group = read_by_highdicom(path)[0]
    assert numbers_by_highdicom(group) == known(first)
    assert len(known(first)) == 13
    share = item_of(groups_of(path)[0], "113288")
    assert share.ContentSequence[0].TextValue == "organs/liver + organs/spleen"
    assert item_of(groups_of(path)[0], "111002").TextValue == "changes=not mirrored"


@pytest.mark.parametrize("value", [1e-300, -1.2345678901e-7, 1.23456789e17, -9.999999999e300, 0.0])
def test_numbers_of_any_size_fit(value: float, tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    content = content_of(scan, case_folders.segmentation_of(scan))
    first = replace(content.measurements[0], mean=value, volume_ml=abs(value), voxels=2**40)
    content = replace(content, measurements=[first, *content.measurements[1:]])
    path = written(tmp_path, content)
    assert numbers_by_highdicom(read_by_highdicom(path)[0]) == known(first)
    [measured] = item_of(groups_of(path)[0], "118565006").MeasuredValueSequence
    assert len(str(measured.NumericValue)) <= 16


def test_names_of_other_languages_and_long_codes_are_kept(tmp_path: Path) -> None:
    """Meanings have 64 characters at most (LO); values of more than 16 are long codes."""
    scan = case_folders.dicom_scan()
    meaning = "печень" * 12
    liver = replace(
        case_folders.LIVER, name="肝臓", type=Code("1" * 18, "SCT", meaning), laterality=None
    )
    segmentation = with_structures(scan, liver, case_folders.KIDNEY, case_folders.SPLEEN)
    segmentation = replace(segmentation, version="1.0 é")
    path = written(
        tmp_path, content_of(scan, segmentation, flags=(Flag.OTHER_ENGINE, Flag.SEG_NOT_POSSIBLE))
    )
    group = groups_of(path)[0]
    [kind] = item_of(group, "121071").ConceptCodeSequence
    assert (kind.LongCodeValue, kind.CodeMeaning) == ("1" * 18, meaning[:64])
    assert "CodeValue" not in kind
    assert item_of(group, "111003").TextValue == "1.0 é"
    assert dcmread(path).SpecificCharacterSet == "ISO_IR 192"
    seg = dcmread(tmp_path / "dicom" / "segmentation.dcm")
    assert seg.SegmentSequence[0].SegmentDescription == "肝臓"
    assert seg.SegmentSequence[0].SegmentedPropertyTypeCodeSequence[0].CodeMeaning == meaning[:64]


@pytest.mark.parametrize("version", ["1." + "0" * 80, "1\\2", " 1.0 ", "\\"])
def test_versions_and_meanings_are_those_of_the_seg(version: str, tmp_path: Path) -> None:
    """A long string has 64 characters, of which the last may not be a space, and no backslash."""
    scan = case_folders.dicom_scan()
    kind = Code("10200004", "SCT", "x" * 63 + " y")
    liver = replace(case_folders.LIVER, type=kind, laterality=None)
    segmentation = with_structures(scan, liver, case_folders.KIDNEY, case_folders.SPLEEN)
    segmentation = replace(segmentation, version=version)
    path = written(tmp_path, content_of(scan, segmentation))
    expected = version.strip().replace("\\", "/")[:64]
    assert item_of(groups_of(path)[0], "111003").TextValue == expected
    assert item_of(groups_of(path)[0], "121071").ConceptCodeSequence[0].CodeMeaning == "x" * 63


def test_laterality_is_that_of_the_site(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    fat = replace(case_folders.SPLEEN, category=Code("85756007", "SCT", "Tissue"))
    segmentation = with_structures(scan, case_folders.LIVER, case_folders.KIDNEY, fat)
    groups = read_by_highdicom(written(tmp_path, content_of(scan, segmentation)))
    sides = [
        [site.laterality and site.laterality.value for site in g.finding_sites] for g in groups
    ]
    assert sides == [[None], ["7771000"], []]


def test_an_interpolated_slice_is_no_evidence(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    source = scan.source
    assert isinstance(source, DicomSource)
    slices = (*source.slices[:4], None, *source.slices[5:])
    scan = replace(scan, source=replace(source, slices=slices))
    written(tmp_path, content_of(scan, case_folders.segmentation_of(scan)))


def test_an_object_of_many_frames_is_listed_once(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    source = scan.source
    assert isinstance(source, DicomSource)
    frames = tuple(
        replace(image, sop_instance="1.2.826.0.1.9", frame=n)
        for n, image in enumerate(source.slices, 1)
        if image is not None
    )
    scan = replace(scan, source=replace(source, slices=frames))
    report = dcmread(written(tmp_path, content_of(scan, case_folders.segmentation_of(scan))))
    [study] = report.CurrentRequestedProcedureEvidenceSequence
    assert [len(s.ReferencedSOPSequence) for s in study.ReferencedSeriesSequence] == [1, 1]


def test_scans_that_dicom_cannot_refer_to_get_none() -> None:
    nameless = case_folders.with_slices(case_folders.dicom_scan(), sop_instance="")
    for scan in (nameless, case_folders.nifti_scan(nameless.volume.grid)):
        assert SR.expected(content_of(scan, case_folders.segmentation_of(scan))) == set()


# --- faults that the read-back finds --------------------------------------------------------------


def first_group(report: Dataset) -> Dataset:
    group: Dataset = report.ContentSequence[-1].ContentSequence[1]
    return group


def other_value(report: Dataset) -> None:
    [measured] = item_of(first_group(report), "112031", 3).MeasuredValueSequence
    measured.NumericValue = float(measured.NumericValue) + 1


def last_digit(report: Dataset) -> None:
    [measured] = item_of(first_group(report), "118565006").MeasuredValueSequence
    measured.NumericValue = f"{float(measured.NumericValue) * (1 + 2e-6):.7g}"


def other_unit(report: Dataset) -> None:
    [measured] = item_of(first_group(report), "112031").MeasuredValueSequence
    measured.MeasurementUnitsCodeSequence[0].CodeValue = "[arb'U]"


def other_derivation(report: Dataset) -> None:
    [derivation] = item_of(first_group(report), "112031", 2).ContentSequence
    derivation.ConceptCodeSequence[0].CodeValue = "371889001"


def one_missing(report: Dataset) -> None:
    items = first_group(report).ContentSequence
    items.remove(item_of(first_group(report), "components"))


def one_twice(report: Dataset) -> None:
    first_group(report).ContentSequence.append(item_of(first_group(report), "voxels"))


def group_missing(report: Dataset) -> None:
    del report.ContentSequence[-1].ContentSequence[1]


def groups_exchanged(report: Dataset) -> None:
    groups = report.ContentSequence[-1].ContentSequence
    groups.append(groups.pop(0))


def other_segment(report: Dataset) -> None:
    reference_of(first_group(report)).ReferencedSegmentNumber = 1


def other_seg(report: Dataset) -> None:
    reference_of(first_group(report)).ReferencedSOPInstanceUID += "1"


def other_class(report: Dataset) -> None:
    reference_of(first_group(report)).ReferencedSOPClassUID += "1"


def other_series(report: Dataset) -> None:
    item_of(first_group(report), "121232").UID += "1"


def other_tracking(report: Dataset) -> None:
    item_of(first_group(report), "112040").UID += "1"


def other_finding(report: Dataset) -> None:
    item_of(first_group(report), "121071").ConceptCodeSequence[0].CodeValue = "1"


def other_meaning(report: Dataset) -> None:
    for name in ("121071", "363698007"):
        item_of(first_group(report), name).ConceptCodeSequence[0].CodeMeaning = "Liver"


def other_site(report: Dataset) -> None:
    item_of(first_group(report), "363698007").ConceptCodeSequence[0].CodeValue = "1"


def other_side(report: Dataset) -> None:
    [side] = item_of(first_group(report), "363698007").ContentSequence
    side.ConceptCodeSequence[0].CodeValue = "24028007"


def other_model(report: Dataset) -> None:
    item_of(first_group(report), "111003").TextValue = "1.2.1"


def other_flag(report: Dataset) -> None:
    item_of(first_group(report), "flag").ConceptCodeSequence[0].CodeValue = "EMPTY"


def flag_missing(report: Dataset) -> None:
    items = first_group(report).ContentSequence
    items.remove(item_of(first_group(report), "flag"))


def image_missing(report: Dataset) -> None:
    [study] = report.CurrentRequestedProcedureEvidenceSequence
    del study.ReferencedSeriesSequence[0].ReferencedSOPSequence[0]


def other_study(report: Dataset) -> None:
    report.StudyInstanceUID += "1"


@pytest.mark.parametrize(
    "fault",
    [
        other_value,
        last_digit,
        other_unit,
        other_derivation,
        one_missing,
        one_twice,
        group_missing,
        groups_exchanged,
        other_segment,
        other_seg,
        other_class,
        other_series,
        other_tracking,
        other_finding,
        other_meaning,
        other_site,
        other_side,
        other_model,
        other_flag,
        flag_missing,
        image_missing,
        other_study,
    ],
)
def test_a_fault_is_found(fault: Callable[[Dataset], None], tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    content = content_of(scan, case_folders.segmentation_of(scan), flags=(Flag.HU_IMPLAUSIBLE,))
    path = written(tmp_path, content)
    rewrite(path, lambda _: None)
    SR.read_back(tmp_path, content)
    rewrite(path, fault)
    assert_caught(tmp_path, content)


def rewrite(path: Path, change: Callable[[Dataset], None]) -> None:
    dataset = dcmread(path)
    change(dataset)
    dcmwrite(path, dataset)


def assert_caught(folder: Path, content: CaseContent) -> None:
    with pytest.raises(ScanError, match="WRITE_MISMATCH"):
        SR.read_back(folder, content)


def test_a_share_of_another_whole_is_found(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    content = content_of(scan, case_folders.segmentation_of(scan))
    shares = [with_share(m, "organs/liver") for m in content.measurements]
    written(tmp_path, replace(content, measurements=shares))
    others = [with_share(m, "organs/spleen") for m in content.measurements]
    assert_caught(tmp_path, replace(content, measurements=others))


def with_share(measurement: Measurement, whole: str) -> Measurement:
    return replace(measurement, share=0.5, share_of=whole)


def test_a_seg_that_was_written_again_is_found(tmp_path: Path) -> None:
    """The report refers to the SEG that is there, not to one that could have been written."""
    scan = case_folders.dicom_scan()
    content = content_of(scan, case_folders.segmentation_of(scan))
    report = written(tmp_path, content).read_bytes()
    other = case_folders.segmentation_of(scan, seed=1)
    written(tmp_path, content_of(scan, other))
    (tmp_path / SR_NAME).write_bytes(report)
    assert_caught(tmp_path, content)


def test_a_truncated_file_is_found(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    content = content_of(scan, case_folders.segmentation_of(scan))
    path = written(tmp_path, content)
    whole = path.read_bytes()
    for length in (0, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert_caught(tmp_path, content)
