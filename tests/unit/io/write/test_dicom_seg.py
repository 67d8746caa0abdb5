"""Attributes of a DICOM SEG besides its voxels: UIDs, dates, text, references."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from datetime import datetime
from io import BytesIO
from pathlib import Path

import highdicom as hd
import numpy as np
import pydicom
import pytest
from pydicom import Dataset
from pydicom.dataelem import RawDataElement
from pydicom.tag import Tag
from pydicom.uid import UID

from scanloom.core import Case, Code, Layer, Segmentation
from scanloom.io.dicom.header.parser import read_dataset
from scanloom.io.readback.dicom_seg import check_segs
from scanloom.io.scan import DicomSource, Scan
from scanloom.io.write.derived_dicom import content_datetime
from scanloom.io.write.dicom_seg import write_segs
from scanloom.version import __version__
from support import case_folders

ENHANCED_CT = "1.2.840.10008.5.1.4.1.1.2.1"


def write(
    folder: Path,
    scan: Scan,
    segmentation: Segmentation | None = None,
    case: Case | None = None,
) -> Dataset:
    folder.mkdir(exist_ok=True)
    segmentation = segmentation or case_folders.segmentation_of(scan)
    case = case or case_folders.case_with()
    write_segs(folder, segmentation, scan.source, case, [segmentation.model])
    return pydicom.dcmread(folder / "dicom" / "segmentation.dcm")


def put(header: Dataset, name: str, value: object) -> None:
    """Set a value that is not valid, as a file may hold it."""
    with pydicom.config.disable_value_validation():
        header.pop(name, None)  # an element remembers how its first value was checked
        setattr(header, name, value)


def own_uids(dataset: Dataset, source: Scan) -> set[str]:
    """Return all UIDs in a file that are neither the standard's nor the source's."""
    assert isinstance(source.source, DicomSource)
    theirs = {str(element.value) for element in source.source.first if element.VR == "UI"}
    theirs |= {image.sop_instance for image in source.source.slices if image}
    uids = set()
    for element in dataset.iterall():
        if element.VR == "UI":
            values = element.value if element.VM > 1 else [element.value]
            uids |= {str(v) for v in values if not str(v).startswith("1.2.840.10008.")}
    return uids - theirs


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
@pytest.mark.parametrize("tilt", [0.0, 15.0])
def test_same_content_same_bytes(seg: str, tilt: float, tmp_path: Path) -> None:
    digests = []
    for n in range(2):
        scan = case_folders.dicom_scan(tilt=tilt)
        write(tmp_path / str(n), scan, case=case_folders.case_with(seg=seg))
        files = sorted((tmp_path / str(n) / "dicom").iterdir())
        digests.append([hashlib.sha256(p.read_bytes()).hexdigest() for p in files])
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == (2 if tilt else 1)


def another_voxel(scan: Scan) -> tuple[Scan, Segmentation, Case]:
    segmentation = case_folders.segmentation_of(scan)
    labels = np.array(segmentation.layers[0].labels, order="F")
    labels[5, 5, 4] = 3 - labels[5, 5, 4] % 3
    layer = case_folders.Layer(labels, case_folders.STRUCTURES)
    return scan, case_folders.replace(segmentation, layers=(layer,)), case_folders.case_with()


def another_recipe(scan: Scan) -> tuple[Scan, Segmentation, Case]:
    return (
        scan,
        case_folders.segmentation_of(scan),
        case_folders.replace(case_folders.case_with(), recipe="s" * 64),
    )


def another_type(scan: Scan) -> tuple[Scan, Segmentation, Case]:
    return scan, case_folders.segmentation_of(scan), case_folders.case_with(seg="labelmap")


def another_source(scan: Scan) -> tuple[Scan, Segmentation, Case]:
    source = scan.source
    assert isinstance(source, DicomSource)
    slices = [
        replace(image, sop_instance=image.sop_instance + "1") for image in source.slices if image
    ]
    scan = replace(scan, source=replace(source, slices=tuple(slices)))
    return scan, case_folders.segmentation_of(scan), case_folders.case_with()


def another_name(scan: Scan) -> tuple[Scan, Segmentation, Case]:
    return (
        scan,
        case_folders.replace(case_folders.segmentation_of(scan), model="other"),
        case_folders.case_with(),
    )


def another_version(scan: Scan) -> tuple[Scan, Segmentation, Case]:
    return (
        scan,
        case_folders.replace(case_folders.segmentation_of(scan), version="2"),
        case_folders.case_with(),
    )


def another_place(scan: Scan) -> tuple[Scan, Segmentation, Case]:
    source = scan.source
    assert isinstance(source, DicomSource)
    slices = []
    for image in source.slices:
        assert image is not None
        x, *yz = image.position
        slices.append(replace(image, position=(str(float(x) + 1), *yz)))
    scan = replace(scan, source=replace(source, slices=tuple(slices)))
    return scan, case_folders.segmentation_of(scan), case_folders.case_with()


@pytest.mark.parametrize(
    "change",
    [
        another_voxel,
        another_recipe,
        another_type,
        another_source,
        another_name,
        another_version,
        another_place,
    ],
)
def test_other_content_has_other_uids(
    change: Callable[[Scan], tuple[Scan, Segmentation, Case]], tmp_path: Path
) -> None:
    """An archive that has the one never takes the other for it."""
    scan = case_folders.dicom_scan()
    first = write(tmp_path / "first", scan)
    scan, segmentation, case = change(case_folders.dicom_scan())
    second = write(tmp_path / "second", scan, segmentation, case)
    for name in ("SOPInstanceUID", "SeriesInstanceUID"):
        assert first[name].value != second[name].value
    dimensions = [
        d.DimensionOrganizationSequence[0].DimensionOrganizationUID for d in (first, second)
    ]
    assert dimensions[0] != dimensions[1]


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
def test_every_own_uid_is_a_hash(seg: str, tmp_path: Path) -> None:
    """2.25 and 128 bits, none of them made by chance in a library."""
    scan = case_folders.dicom_scan()
    dataset = write(tmp_path, scan, case=case_folders.case_with(seg=seg))
    uids = own_uids(dataset, scan)
    assert len(uids) == 3 + len(case_folders.STRUCTURES)  # instance, series, dimensions; tracking
    for uid in uids:
        assert UID(uid).is_valid
        assert uid.startswith("2.25.")
        assert int(uid.removeprefix("2.25.")) < 2**128
    assert dataset.file_meta.MediaStorageSOPInstanceUID == dataset.SOPInstanceUID


def test_files_of_one_model_share_their_series(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan(tilt=12.0)
    write(tmp_path, scan, case_folders.overlapping(scan), case_folders.case_with(seg="labelmap"))
    datasets = {p.stem: pydicom.dcmread(p) for p in (tmp_path / "dicom").iterdir()}
    assert len({d.SOPInstanceUID for d in datasets.values()}) == 6
    plain = [d for name, d in datasets.items() if "rect" not in name]
    assert len({d.SeriesInstanceUID for d in plain}) == 1
    assert sorted(d.InstanceNumber for d in plain) == [1, 2, 3]
    assert len({d.SeriesInstanceUID for d in datasets.values()}) == 2


def test_dates_are_the_source_s(tmp_path: Path) -> None:
    """No clock enters a file, in no attribute."""
    dataset = write(tmp_path, case_folders.dicom_scan())
    for kind in ("Content", "Series", "InstanceCreation"):
        assert dataset[f"{kind}Date"].value == "20240102"
        assert dataset[f"{kind}Time"].value == "101114"
    assert dataset.StudyTime == "101112"
    moments = [e.value for e in dataset.iterall() if e.VR == "DT"]
    assert set(moments) <= {"20240102101114"}


def test_dates_now_are_today_s(tmp_path: Path) -> None:
    before = datetime.now().strftime("%Y%m%d%H%M%S")
    first = write(
        tmp_path / "a", case_folders.dicom_scan(), case=case_folders.case_with(dates="now")
    )
    after = datetime.now().strftime("%Y%m%d%H%M%S")
    assert before <= (first.ContentDate + first.ContentTime)[:14] <= after
    assert first.StudyDate == "20240102"
    second = write(
        tmp_path / "b", case_folders.dicom_scan(), case=case_folders.case_with(dates="now")
    )
    assert first.SOPInstanceUID != second.SOPInstanceUID  # other bytes, another instance


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ({"ContentDate": "20200101", "ContentTime": "1230"}, ("20200101", "1230")),
        ({"AcquisitionDate": "20200102"}, ("20200102", "000000")),
        ({"ContentDate": "unknown", "StudyDate": "20200103"}, ("20200103", "000000")),
        ({"SeriesDate": "20200104", "SeriesTime": "99"}, ("20200104", "000000")),
        ({}, ("19700101", "000000")),
    ],
)
def test_moment_of_a_source(kept: dict[str, str], expected: tuple[str, str]) -> None:
    header = Dataset()
    for name, value in kept.items():
        put(header, name, value)
    assert content_datetime(DicomSource(header, (), (), ())) == expected


@pytest.mark.parametrize("name", ["StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID"])
@pytest.mark.parametrize("value", ["", None, "not a uid"])
def test_source_without_uids_can_t_be_referred_to(name: str, value: str | None) -> None:
    source = case_folders.dicom_scan().source
    assert isinstance(source, DicomSource)
    assert source.can_refer
    header = source.first
    if value is None:
        delattr(header, name)
    else:
        put(header, name, value)
    assert (source.can_refer, source.missing_uids) == (False, [name])


@pytest.mark.parametrize(
    ("name", "keyword"), [("sop_class", "SOPClassUID"), ("sop_instance", "SOPInstanceUID")]
)
@pytest.mark.parametrize("value", ["", "not a uid"])
def test_images_without_uids_can_t_be_referred_to(name: str, keyword: str, value: str) -> None:
    source = case_folders.dicom_scan().source
    assert isinstance(source, DicomSource)
    image = source.slices[3]
    assert image is not None
    changed = replace(image, **{name: value})
    source = replace(source, slices=(*source.slices[:3], changed, *source.slices[4:]))
    assert (source.can_refer, source.missing_uids) == (False, [keyword])


def test_images_with_one_uid_can_t_be_referred_to_unless_they_are_frames_of_it() -> None:
    source = case_folders.with_slices(case_folders.dicom_scan(), sop_instance="1.2.3").source
    assert isinstance(source, DicomSource)
    assert (source.can_refer, source.missing_uids) == (False, ["SOPInstanceUID"])
    slices = tuple(replace(image, frame=k + 1) for k, image in enumerate(source.slices) if image)
    assert replace(source, slices=slices).can_refer


def frames_of(scan: Scan, gap: int | None = None) -> Scan:
    """Return the scan as if it came from one multi-frame object, its frames in reverse order."""
    source = scan.source
    assert isinstance(source, DicomSource)
    count = len(source.slices)
    slices = [
        replace(image, sop_class=ENHANCED_CT, sop_instance="1.2.826.0.1.9", frame=count - k)
        if image and k != gap
        else None
        for k, image in enumerate(source.slices)
    ]
    return replace(scan, source=replace(source, slices=tuple(slices)))


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
@pytest.mark.parametrize("tilt", [0.0, 12.0])
def test_frames_refer_to_frames(seg: str, tilt: float, tmp_path: Path) -> None:
    """Each frame names object and frame number; the object is listed once."""
    scan = frames_of(case_folders.dicom_scan("LIP", tilt=tilt))
    dataset = write(tmp_path, scan, case=case_folders.case_with(seg=seg))
    for group in dataset.PerFrameFunctionalGroupsSequence:
        [image] = group.DerivationImageSequence[0].SourceImageSequence
        k = len(scan.source.slices) - image.ReferencedFrameNumber
        position = scan.source.slices[k].position
        assert tuple(map(str, group.PlanePositionSequence[0].ImagePositionPatient)) == position
        assert image.ReferencedSOPClassUID == ENHANCED_CT
    for images in (
        dataset.SourceImageSequence,
        dataset.ReferencedSeriesSequence[0].ReferencedInstanceSequence,
    ):
        assert [i.ReferencedSOPInstanceUID for i in images] == ["1.2.826.0.1.9"]
    assert "UI: 2.25.1\n" not in str(dataset)


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
@pytest.mark.parametrize("multiframe", [False, True])
def test_an_interpolated_slice_has_no_frame(seg: str, multiframe: bool, tmp_path: Path) -> None:
    scan = frames_of(case_folders.dicom_scan(), gap=4)
    if not multiframe:
        scan = case_folders.dicom_scan()
        slices = list(scan.source.slices)
        slices[4] = None
        scan = replace(scan, source=replace(scan.source, slices=tuple(slices)))
    segmentation, case = case_folders.segmentation_of(scan), case_folders.case_with(seg=seg)
    dataset = write(tmp_path, scan, segmentation, case)
    depths = {
        float(group.PlanePositionSequence[0].ImagePositionPatient[2])
        for group in dataset.PerFrameFunctionalGroupsSequence
    }
    labels = segmentation.layers[0].labels
    grid = segmentation.grid
    filled = [k for k in range(grid.shape[2]) if labels[..., k].any() and k != 4]
    assert labels[..., 4].any()
    expected = sorted(float(grid.world((0, 0, k))[2]) for k in filled)
    np.testing.assert_allclose(sorted(depths), expected, atol=1e-4)
    check_segs(tmp_path, segmentation, scan.source, case, [segmentation.model])


def test_text_of_any_alphabet_comes_over(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    for header in [scan.source.first]:
        header.SpecificCharacterSet = "ISO_IR 100"
        header.PatientName = "Müller^Jürgen"
    dataset = write(tmp_path, scan)
    assert dataset.SpecificCharacterSet == "ISO_IR 192"
    assert dataset.PatientName == "Müller^Jürgen"


@pytest.mark.parametrize(
    ("characters", "stored", "name"),
    [
        (b"\\ISO 2022 IR 87", b"\x1b$B;3ED\x1b(B^\x1b$BB@O:\x1b(B ", "山田^太郎"),
        (b"\\ISO 2022 IR 149", b"\x1b$)C\xfb\xf3^\x1b$)C\xd1\xce\xd4\xd7 ", "洪^吉洞"),
        (b"\\ISO 2022 IR 58 ", b"\x1b$)A\xd5\xc5^\x1b$)A\xd0\xa1\xb6\xab ", "张^小东"),
        (b"GB18030 ", "王^小东 ".encode("gb18030"), "王^小东"),
    ],
    ids=["Japanese", "Korean", "Chinese", "GB18030"],
)
def test_names_of_east_asia_come_over(
    characters: bytes, stored: bytes, name: str, tmp_path: Path
) -> None:
    scan = case_folders.dicom_scan()
    header = scan.source.first
    for number, vr, value in (
        (0x00080005, "CS", characters),
        (0x00100010, "PN", stored),
        (0x00081030, "LO", stored),
        (0x00200010, "SH", b"1\n2 "),
    ):
        header[number] = RawDataElement(Tag(number), vr, len(value), value, 0, False, True)
    path = tmp_path / "x.dcm"
    pydicom.dcmwrite(path, header, implicit_vr=False, little_endian=True, force_encoding=True)
    source = replace(scan.source, first=read_dataset(path))

    written = write(tmp_path, replace(scan, source=source))

    assert written.SpecificCharacterSet == "ISO_IR 192"
    assert (written.PatientName, written.StudyDescription) == (name, name)
    assert written.StudyID == ""  # a control character makes it invalid


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
def test_structures_of_any_alphabet_come_over(seg: str, tmp_path: Path) -> None:
    """Also of a patient whose name is ASCII; long codes are whole, meanings have 64 characters."""
    scan = case_folders.dicom_scan()
    kind = Code("1" * 18, "SCT", "печень" * 10 + "123 5")
    liver = replace(case_folders.LIVER, name="肝臓", type=kind)
    whole = case_folders.segmentation_of(scan)
    layer = Layer(whole.layers[0].labels, (liver, *case_folders.STRUCTURES[1:]))
    segmentation, case = replace(whole, layers=(layer,)), case_folders.case_with(seg=seg)
    [segment] = [
        s
        for s in write(tmp_path, scan, segmentation, case).SegmentSequence
        if s.SegmentLabel == "liver"
    ]
    assert segment.SegmentDescription == "肝臓"
    [written] = segment.SegmentedPropertyTypeCodeSequence
    assert (written.LongCodeValue, written.CodeMeaning) == (kind.value, kind.meaning[:63])
    check_segs(tmp_path, segmentation, scan.source, case, ["organs"])


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
@pytest.mark.parametrize("name", ["Doe^Jane", "Müller^Jörg"])
def test_pydicom_encodes_all_elements_alike(seg: str, name: str, tmp_path: Path) -> None:
    """References, positions and file are put together from parts, in the source's characters."""
    scan = case_folders.dicom_scan(oblique=12)
    put(scan.source.first, "SpecificCharacterSet", "ISO_IR 100")
    put(scan.source.first, "PatientName", name)
    written = write(tmp_path, scan, case=case_folders.case_with(seg=seg))

    decoded = [element.value for element in written.iterall()]  # else bytes would be copied
    again = BytesIO()
    written.save_as(again, enforce_file_format=True)

    assert name in map(str, decoded)
    assert again.getvalue() == (tmp_path / "dicom" / "segmentation.dcm").read_bytes()


@pytest.mark.parametrize("text", ["Thorax\\Abdomen", "Übersicht\\Bauch", "Bauch\n"])
def test_a_text_that_is_not_one_value_is_left_out(text: str, tmp_path: Path) -> None:
    """But for the patient's ID, which is that of the source whatever it is."""
    scan = case_folders.dicom_scan()
    for keyword in ("StudyDescription", "ReferringPhysicianName", "PatientID"):
        put(scan.source.first, keyword, text)
    written = write(tmp_path, scan)
    assert "StudyDescription" not in written
    assert written.ReferringPhysicianName == ""
    values = written.PatientID if written["PatientID"].VM > 1 else [written.PatientID]
    assert "\\".join(values) == text


def test_faulty_headers_do_not_reach_the_result(tmp_path: Path) -> None:
    """Values that are missing or not valid in the source are empty, and no reason to fail."""
    scan = case_folders.dicom_scan()
    faults = {
        "PatientBirthDate": "unknown",
        "StudyDate": "2024",
        "StudyTime": "x",
        "PatientSex": "MALE",
        "SliceThickness": None,
        "InstitutionName": "Clinic",
        "IssuerOfPatientID": "x" * 65,
        "StudyDescription": "y" * 65,
        "PixelSpacing": ["1.50000000000000000001", "1.25"],
    }
    for header in [scan.source.first]:
        for name in ("PatientID", "StudyID", "AccessionNumber", "ReferringPhysicianName"):
            delattr(header, name)
        for name, value in faults.items():
            put(header, name, value)
    dataset = write(tmp_path, scan)
    for name in ("PatientID", "PatientBirthDate", "PatientSex", "StudyDate", "StudyTime"):
        assert not dataset[name].value
    for name in ("InstitutionName", "IssuerOfPatientID", "StudyDescription"):
        assert name not in dataset


@pytest.mark.parametrize("name", ["Doe", "", "Doe^Jane=ドウ^ジェーン", "a^b^c^d^e^f"])
def test_no_name_is_shown(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A name of any form comes over, and no library warns with it (warnings are errors here)."""
    scan = case_folders.dicom_scan()
    for header in [scan.source.first]:
        put(header, "PatientName", name)
    assert write(tmp_path, scan).PatientName == name
    assert not caplog.records


def test_values_that_are_read_from_a_file_are_not_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not valid, not converted, not in any warning."""
    scan = case_folders.dicom_scan()
    header = scan.source.first
    for keyword, value in (("StudyDate", "Doe"), ("StudyTime", "Doe"), ("StudyInstanceUID", "Doe")):
        put(header, keyword, value)
    put(header, "LossyImageCompression", "DOE^JANE=")
    path = tmp_path / "x.dcm"
    with pydicom.config.disable_value_validation():
        pydicom.dcmwrite(path, header, implicit_vr=True, little_endian=True, force_encoding=True)
    caplog.clear()
    source = replace(scan.source, first=pydicom.dcmread(path, force=True))
    assert not source.can_refer
    assert content_datetime(source) == ("20240102", "101114")
    assert not write(tmp_path, replace(scan, source=source)).StudyDate
    assert not caplog.records


def test_lossy_source_stays_lossy(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    assert isinstance(scan.source, DicomSource)
    header = scan.source.first
    header.LossyImageCompression = "01"
    header.LossyImageCompressionRatio = ["10.5", "2"]
    header.LossyImageCompressionMethod = "ISO_10918_1"
    first = write(tmp_path, scan)
    assert first.LossyImageCompression == "01"
    assert [float(r) for r in first.LossyImageCompressionRatio] == [10.5, 2.0]
    assert first.LossyImageCompressionMethod == "ISO_10918_1"


@pytest.mark.parametrize(
    ("syntax", "said", "written"),
    [
        ("JPEGBaseline8Bit", None, ("01", "ISO_10918_1")),
        ("JPEGExtended12Bit", "00", ("01", "ISO_10918_1")),
        ("JPEGLSNearLossless", None, ("01", "ISO_14495_1")),
        ("JPEG2000", None, ("01", "ISO_15444_1")),
        ("HTJ2K", "", ("01", "ISO_15444_15")),
        ("JPEG2000", "00", ("00", None)),  # which may have lost nothing
        ("JPEG2000Lossless", None, ("00", None)),
        ("ExplicitVRLittleEndian", None, ("00", None)),
    ],
)
def test_a_source_that_does_not_say_is_lossy_by_its_transfer_syntax(
    syntax: str, said: str | None, written: tuple[str, str | None], tmp_path: Path
) -> None:
    scan = case_folders.dicom_scan()
    assert isinstance(scan.source, DicomSource)
    header = scan.source.first
    header.file_meta = pydicom.dataset.FileMetaDataset()
    header.file_meta.TransferSyntaxUID = getattr(pydicom.uid, syntax)
    if said is not None:
        header.LossyImageCompression = said
    first = write(tmp_path, scan)
    assert (first.LossyImageCompression, first.get("LossyImageCompressionMethod")) == written


@pytest.mark.parametrize(
    ("ratio", "method", "written"),
    [
        (b"10:1 ", b"jpeg, quality 90, of 2001 ", (None, None)),
        (b"10.12345678901234567 ", b"ISO_10918_1 ", ("10.1234567890123", "ISO_10918_1")),
    ],
)
def test_a_faulty_compression_of_the_source_is_left_out(
    ratio: bytes, method: bytes, written: tuple[str | None, str | None], tmp_path: Path
) -> None:
    scan = case_folders.dicom_scan()
    assert isinstance(scan.source, DicomSource)
    header = scan.source.first
    header.LossyImageCompression = "01"
    for number, vr, value in ((0x00282112, "DS", ratio), (0x00282114, "CS", method)):
        header[number] = RawDataElement(Tag(number), vr, len(value), value, 0, False, True)
    first = write(tmp_path, scan)
    names = ("LossyImageCompressionRatio", "LossyImageCompressionMethod")
    assert first.LossyImageCompression == "01"
    assert tuple(str(first[n].value) if n in first else None for n in names) == written


def test_dates_that_do_not_exist_are_left_empty(tmp_path: Path) -> None:
    """As programs write them that remove names."""
    scan = case_folders.dicom_scan()
    header = scan.source.first  # type: ignore[union-attr]  # of DICOM
    for name in ("PatientBirthDate", "StudyDate", "ContentDate"):
        put(header, name, "00000000")
    first = write(tmp_path, scan)
    assert not first.PatientBirthDate
    assert not first.StudyDate
    assert first.ContentDate != "00000000"


@pytest.mark.parametrize(
    ("removed", "method", "reported", "how"),
    [
        ("YES", ["one", "two"], "YES", ["one", "two"]),
        ("YES", "one", "YES", ["one"]),
        ("YES", None, None, []),  # the standard wants to know how: half of it is not taken over
        ("NO", None, "NO", []),
    ],
)
def test_how_identity_was_removed_is_taken_over(
    removed: str,
    method: str | list[str] | None,
    reported: str | None,
    how: list[str],
    tmp_path: Path,
) -> None:
    scan = case_folders.dicom_scan()
    assert isinstance(scan.source, DicomSource)
    scan.source.first.PatientIdentityRemoved = removed
    if method is not None:
        scan.source.first.DeidentificationMethod = method
    first = write(tmp_path, scan)
    methods = first.get("DeidentificationMethod", [])
    assert first.get("PatientIdentityRemoved") == reported
    assert ([methods] if isinstance(methods, str) else list(methods)) == how


def test_empty_segments_need_no_frames(tmp_path: Path) -> None:
    """A structure that was not found is described; slices without anything are left out."""
    scan = case_folders.dicom_scan()
    segmentation = case_folders.segmentation_of(scan)
    labels = np.array(segmentation.layers[0].labels, order="F")
    labels[labels == 2] = 0
    layer = case_folders.Layer(labels, case_folders.STRUCTURES)
    dataset = write(tmp_path, scan, case_folders.replace(segmentation, layers=(layer,)))
    assert [s.SegmentLabel for s in dataset.SegmentSequence] == ["liver", "kidney_left", "spleen"]
    full = sum(int((labels == n).any(axis=(0, 1)).sum()) for n in (1, 3))
    assert dataset.NumberOfFrames == full


def test_overlap_that_does_not_happen_needs_no_masks(tmp_path: Path) -> None:
    """Layers that share no voxel give the same file as one layer."""
    scan = case_folders.dicom_scan()
    whole = case_folders.segmentation_of(scan)
    layers = tuple(
        case_folders.subset_of(whole, s.label).layers[0]
        for s in (case_folders.SPLEEN, case_folders.LIVER, case_folders.KIDNEY)
    )
    first = write(tmp_path / "a", scan, whole)
    second = write(tmp_path / "b", scan, case_folders.replace(whole, layers=layers))
    assert first.SegmentsOverlap == second.SegmentsOverlap == "NO"
    assert first.PixelData == second.PixelData
    assert first.SOPInstanceUID == second.SOPInstanceUID
    overlapping = write(tmp_path / "c", scan, case_folders.overlapping(scan))
    assert overlapping.SegmentsOverlap == "YES"


def test_numbers_above_255(tmp_path: Path) -> None:
    """A Label Map keeps them in 16 bits; a BINARY counts anew and keeps the labels."""
    scan = case_folders.dicom_scan()
    labels = np.zeros(scan.volume.grid.shape, np.uint16, order="F")
    labels[3:6, 2:7, 2:4], labels[8:9, 2:7, 2:4] = 7, 3000
    layer = case_folders.Layer(
        labels,
        (
            case_folders.replace(case_folders.SPLEEN, number=3000),
            case_folders.replace(case_folders.LIVER, number=7),
        ),
    )
    segmentation = Segmentation("organs", (layer,), scan.volume.grid)
    labelmap = write(tmp_path / "a", scan, segmentation, case_folders.case_with(seg="labelmap"))
    assert [s.SegmentNumber for s in labelmap.SegmentSequence] == [0, 7, 3000]
    assert set(np.unique(labelmap.pixel_array)) == {0, 7, 3000}
    binary = write(tmp_path / "b", scan, segmentation)
    assert [(s.SegmentNumber, s.SegmentLabel) for s in binary.SegmentSequence] == [
        (1, "liver"),
        (2, "spleen"),
    ]


def test_both_grids_state_how_a_segmentation_was_made(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan(tilt=12.0)
    segmentation = case_folders.segmentation_of(scan)
    write(tmp_path, scan, replace(segmentation, corrected=True, changes="not mirrored"))
    for path in (tmp_path / "dicom").iterdir():
        for segment in pydicom.dcmread(path).SegmentSequence:
            [algorithm] = segment.SegmentationAlgorithmIdentificationSequence
            assert segment.SegmentAlgorithmType == "SEMIAUTOMATIC"
            assert algorithm.AlgorithmParameters == "changes=not mirrored"


def test_labels_of_16_bits_with_small_numbers_are_readable(tmp_path: Path) -> None:
    """A subset of many structures keeps the type of its label map."""
    scan = case_folders.dicom_scan()
    segmentation = case_folders.segmentation_of(scan)
    [layer] = segmentation.layers
    wide = case_folders.Layer(layer.labels.astype(np.uint16), layer.structures)
    segmentation = replace(segmentation, layers=(wide,))
    dataset = write(tmp_path, scan, segmentation, case_folders.case_with(seg="labelmap"))
    assert dataset.BitsAllocated == 16
    assert set(np.unique(dataset.pixel_array)) == {0, 1, 2, 3}


def single_images(scan: Scan) -> list[Dataset]:
    """Return the header of each source image, with the distance of slices as their thickness."""
    source = scan.source
    assert isinstance(source, DicomSource)
    headers = []
    for image in source.slices:
        assert image is not None
        header = deepcopy(source.first)
        header.SOPClassUID, header.SOPInstanceUID = image.sop_class, image.sop_instance
        header.ImagePositionPatient = list(image.position)
        header.ImageOrientationPatient = list(source.orientation)
        header.PixelSpacing = list(source.spacing)
        header.SliceThickness = header.SpacingBetweenSlices = "2.5"
        headers.append(header)
    return headers


@pytest.mark.parametrize("overlap", [False, True])
def test_frames_stand_as_highdicom_puts_them(overlap: bool, tmp_path: Path) -> None:
    """All elements but UIDs, dates and equipment equal those of highdicom for whole masks."""
    scan = case_folders.dicom_scan("PIR")
    segmentation = case_folders.overlapping(scan) if overlap else case_folders.segmentation_of(scan)
    ours = write(tmp_path, scan, segmentation)
    headers = single_images(scan)
    theirs = hd.seg.Segmentation(
        source_images=headers,
        pixel_array=np.stack(
            [
                (layer.labels == s.number).transpose(2, 1, 0)
                for layer in segmentation.layers
                for s in layer.structures
            ],
            axis=-1,
        ),
        segmentation_type="BINARY",
        segment_descriptions=[
            hd.seg.SegmentDescription.from_dataset(d) for d in ours.SegmentSequence
        ],
        series_instance_uid="1.2.3",
        series_number=900,
        sop_instance_uid="1.2.4",
        instance_number=1,
        manufacturer="scanloom",
        manufacturer_model_name="scanloom",
        software_versions=__version__,
        device_serial_number="0",
        content_label="SEGMENTATION",
        content_description=segmentation.model,
        content_creator_name="",
        series_description=f"scanloom {segmentation.model}",
    )
    additional = {element.keyword for element in ours} - {element.keyword for element in theirs}
    assert additional == {"SeriesDate", "SeriesTime"}
    for element in theirs:
        if element.VR not in ("DA", "TM", "UI") and element.keyword not in (
            "ContributingEquipmentSequence",
            "DimensionOrganizationSequence",  # holds a new UID
            "DimensionIndexSequence",
            "PixelData",
        ):
            assert ours[element.tag].to_json_dict(None, 0) == element.to_json_dict(None, 0)
    np.testing.assert_array_equal(ours.pixel_array, theirs.pixel_array)
