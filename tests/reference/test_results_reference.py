"""Results on real scans, as foreign programs see them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scanloom.core import Flag
from scanloom.io.index.series import find_series
from scanloom.io.read import read_scan
from scanloom.io.scan import DicomSource, Scan
from support import case_folders
from support.real_scans import scans
from support.seg_witnesses import (
    LABELMAP_ERRORS,
    assert_same_places,
    complaints,
    dcmqi_points,
    highdicom_points,
    nifti_points,
)

pytestmark = pytest.mark.reference


def read(relative: str) -> Scan:
    (series,) = (s for s in find_series(scans(relative)) if s.modality in ("CT", "MR"))
    return read_scan(series)


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
@pytest.mark.parametrize(
    "relative", ["ct/crlm1004_abdomen_dicom", "ct/sts002_thigh", "mr/sts002_thigh_t1"]
)
def test_seg_lies_on_a_real_scan(
    relative: str, seg: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Valid although the source is not (a StudyID too long), and no warning names the patient."""
    scan = read(relative)
    segmentation = case_folders.segmentation_of(scan)
    recwarn.clear()
    case_folders.write_results(tmp_path, [segmentation], scan, case_folders.case_with(seg=seg), ())
    assert not recwarn
    path = tmp_path / "dicom" / "segmentation.dcm"
    assert complaints(path) == ([] if seg == "binary" else LABELMAP_ERRORS)
    ours = nifti_points(tmp_path, segmentation)
    assert_same_places(ours, highdicom_points(path))
    assert_same_places(ours, dcmqi_points(path, tmp_path / "dcmqi"))


@pytest.mark.parametrize("relative", ["ct/totalseg_example_dicom", "mr/d2n_philips"])
def test_source_without_uids_has_all_but_a_seg(relative: str, tmp_path: Path) -> None:
    scan = read(relative)
    assert isinstance(scan.source, DicomSource)
    assert not scan.source.can_refer
    segmentation = case_folders.segmentation_of(scan)
    case_folders.write_results(
        tmp_path, [segmentation], scan, case_folders.case_with(), (Flag.SEG_NOT_POSSIBLE,)
    )
    assert not (tmp_path / "dicom").exists()
    assert nifti_points(tmp_path, segmentation)
