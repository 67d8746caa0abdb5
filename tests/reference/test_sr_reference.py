"""DICOM SR of real scans: dcmqi and highdicom read each number, which is that of its segment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydicom import Dataset, dcmread
from scipy.ndimage import gaussian_filter

from scanloom.convert.store import shipped
from scanloom.core import Layer, Segmentation
from scanloom.io.index.series import find_series
from scanloom.io.read import read_scan
from scanloom.io.scan import Scan
from support import case_folders
from support.real_scans import scans
from support.sr_witnesses import (
    content_of,
    known,
    numbers_by_dcmqi,
    numbers_by_highdicom,
    read_by_dcmqi,
    read_by_highdicom,
    written,
)

pytestmark = pytest.mark.reference
REAL = [
    "ct/crlm1004_abdomen_dicom",
    "ct/sts002_thigh",
    "mr/sts002_thigh_t1",
]


def read(relative: str) -> Scan:
    folder = shipped("data") / "torso_ct" if relative == "sample" else scans(relative)
    series = next(s for s in find_series(folder) if s.modality in ("CT", "MR"))
    return read_scan(series)


def bands_of(scan: Scan) -> Segmentation:
    """Return bands of smoothed intensity as structures."""
    array = gaussian_filter(scan.volume.array.astype(np.float32), (2, 2, 0))
    bounds = np.quantile(array[array > array.min()], (0.5, 0.8, 0.95))
    labels = np.asfortranarray(np.digitize(array, bounds).astype(np.uint8))
    layer = Layer(labels, case_folders.STRUCTURES)
    return Segmentation("bands", (layer,), scan.volume.grid, "1.0")


def voxels_of(seg: Dataset, number: int) -> int:
    """Return the voxels of a segment in the pixels of a DICOM SEG."""
    frames = np.reshape(seg.pixel_array, (-1, seg.Rows, seg.Columns))
    if seg.SegmentationType == "LABELMAP":
        return int((frames == number).sum())
    of_frames = [
        group.SegmentIdentificationSequence[0].ReferencedSegmentNumber
        for group in seg.PerFrameFunctionalGroupsSequence
    ]
    return int(frames[np.equal(of_frames, number)].sum())


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
@pytest.mark.parametrize("relative", ["sample", *REAL])
def test_each_number_is_read_and_is_of_its_segment(relative: str, seg: str, tmp_path: Path) -> None:
    scan = read(relative)
    content = content_of(scan, bands_of(scan), seg=seg)
    path = written(tmp_path / "case", content)
    dcmqi = read_by_dcmqi(path, tmp_path / "dcmqi")["Measurements"]
    highdicom = read_by_highdicom(path)
    segs = {
        dataset.SOPInstanceUID: dataset for dataset in map(dcmread, path.parent.glob("seg*.dcm"))
    }
    for parsed, group, measurement in zip(dcmqi, highdicom, content.measurements, strict=True):
        assert numbers_by_dcmqi(parsed) == numbers_by_highdicom(group) == known(measurement)
        reference = group.referenced_segment[0].ReferencedSOPSequence[0]
        found = segs[reference.ReferencedSOPInstanceUID]
        assert reference.ReferencedSegmentNumber == parsed["ReferencedSegment"]
        assert voxels_of(found, parsed["ReferencedSegment"]) == numbers_by_dcmqi(parsed)["voxels"]
