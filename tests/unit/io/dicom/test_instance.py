"""UIDs of received files, and whether they are whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydicom import Dataset, dcmread
from pydicom.uid import ImplicitVRLittleEndian, RLELossless

from scanloom.core import Reason, ScanError
from scanloom.io.dicom.instance import read_instance, same_object
from support.write_dicom import Coding, Edit, noise, write_series


def write(tmp_path: Path, edit: Edit | None = None, **coding: str) -> Path:
    files = write_series(tmp_path / "s", noise((16, 12, 3)), coding=Coding(**coding), edit=edit)
    return files[0]


@pytest.mark.parametrize("syntax", ["1.2.840.10008.1.2.1", ImplicitVRLittleEndian, RLELossless])
def test_uids_are_those_that_pydicom_reads(syntax: str, tmp_path: Path) -> None:
    path = write(tmp_path, syntax=syntax)
    ds = dcmread(path)

    found = read_instance(path)

    assert (found.sop_class, found.uid) == (ds.SOPClassUID, ds.SOPInstanceUID)
    assert (found.study, found.series) == (ds.StudyInstanceUID, ds.SeriesInstanceUID)


@pytest.mark.parametrize("syntax", ["1.2.840.10008.1.2.1", ImplicitVRLittleEndian, RLELossless])
@pytest.mark.parametrize("lost", [1, 9, 40, 200])
def test_a_file_that_lost_its_end_is_refused(syntax: str, lost: int, tmp_path: Path) -> None:
    path = write(tmp_path, syntax=syntax)
    path.write_bytes(path.read_bytes()[:-lost])

    with pytest.raises(ScanError) as refused:
        read_instance(path)
    assert refused.value.reason is Reason.TRUNCATED


@pytest.mark.parametrize("keyword", ["SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID"])
@pytest.mark.parametrize("value", ["../../x", "", "1.2\\3", None])
@pytest.mark.filterwarnings("ignore:Invalid value for VR UI")
def test_a_uid_that_is_none_is_refused(keyword: str, value: str | None, tmp_path: Path) -> None:
    def edit(k: int, ds: Dataset) -> None:
        if value is None:
            del ds[keyword]
        else:
            setattr(ds, keyword, value)

    with pytest.raises(ScanError) as refused:
        read_instance(write(tmp_path, edit))
    assert refused.value.reason is Reason.DAMAGED
    assert "x" not in refused.value.detail.replace("a UID is missing or malformed", "")


def test_an_object_is_the_same_whoever_sent_it(tmp_path: Path) -> None:
    path, other = write(tmp_path), tmp_path / "other.dcm"
    ds = dcmread(path)
    ds.file_meta.SendingApplicationEntityTitle = "ANOTHER"
    ds.save_as(other)
    assert path.read_bytes() != other.read_bytes()
    assert same_object(path, other)

    ds.PatientName = "Corrected"
    ds.save_as(other)
    assert not same_object(path, other)
    content = path.read_bytes()
    other.write_bytes(content.replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.9\0"))
    assert not same_object(path, other)  # the same bytes mean something else
    other.write_bytes(content + b"\0\0")
    assert not same_object(path, other)
