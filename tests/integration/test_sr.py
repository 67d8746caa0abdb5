"""DICOM SR of whole runs, and what dciodvfy and dcmqi say of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom import dcmread, dcmwrite

from scanloom.convert.store import shipped
from scanloom.core import Flag, Layer, Outputs, Reason
from scanloom.engine.segment import iter_segment
from scanloom.io.extras import sr
from scanloom.options import SegmentOptions, segment_options
from support import case_folders
from support.commands import scanloom as scanloom_command
from support.sr_witnesses import (
    SR_NAME,
    content_of,
    dciodvfy_says,
    dsrdump_says,
    known,
    numbers_by_dcmqi,
    numbers_by_highdicom,
    read_by_dcmqi,
    read_by_highdicom,
    written,
)

NO_LABELMAP = {
    "Error - Shall not be present for Referenced SOP Class that is not segmentation - "
    "attribute <ReferencedSegmentNumber>"
}
"""dciodvfy of 2022 does not know the SOP class of LABELMAP."""


@pytest.mark.parametrize(("seg", "says"), [("binary", set()), ("labelmap", NO_LABELMAP)])
def test_dciodvfy_is_silent_but_for_our_scheme(seg: str, says: set[str], tmp_path: Path) -> None:
    scan = case_folders.dicom_scan(oblique=20.0)
    models = [case_folders.segmentation_of(scan), case_folders.overlapping(scan)]
    content = content_of(scan, *models, flags=tuple(Flag), seg=seg)
    first = replace(content.measurements[0], share=0.5, share_of="organs/spleen", entropy=0.1)
    content = replace(content, measurements=[first, *content.measurements[1:]])
    assert dciodvfy_says(written(tmp_path, content)) == says


def test_dciodvfy_is_silent_of_empty_structures_and_other_languages(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    whole = case_folders.segmentation_of(scan)
    structures = (replace(case_folders.LIVER, name="肝臓"), *case_folders.STRUCTURES[1:])
    layer = Layer(np.zeros_like(whole.layers[0].labels), structures)
    empty = replace(whole, layers=(layer,), changes="overlap 0.1")
    assert dciodvfy_says(written(tmp_path, content_of(scan, empty))) == set()


@pytest.mark.parametrize("seg", ["binary", "labelmap"])
def test_dcmqi_reads_every_number(seg: str, tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    models = [case_folders.segmentation_of(scan), case_folders.overlapping(scan)]
    content = content_of(scan, *models, seg=seg)
    report = read_by_dcmqi(written(tmp_path, content), tmp_path / "dcmqi")
    assert (report["CompletionFlag"], report["VerificationFlag"]) == ("COMPLETE", "UNVERIFIED")
    for group, measurement in zip(report["Measurements"], content.measurements, strict=True):
        assert numbers_by_dcmqi(group) == known(measurement)
        assert group["TrackingIdentifier"] == measurement.label
        algorithm = group["measurementAlgorithmIdentification"]
        assert algorithm["AlgorithmName"] == measurement.model
        [segmentation] = [s for s in models if s.model == measurement.model]
        structure = segmentation.structure(measurement.label)
        assert group["Finding"]["CodeValue"] == structure.type.value
        assert group["FindingSite"]["CodeValue"] == structure.type.value
        flags = [
            each["conceptValue"]["CodeValue"]
            for each in group["qualitativeEvaluations"]
            if each["conceptCode"]["CodeValue"] == "flag"
        ]
        assert flags == [flag.code for flag in measurement.flags]
    if seg == "binary":  # dcmqi 1.5.7 names no instance of LABELMAP
        named = {group["segmentationSOPInstanceUID"] for group in report["Measurements"]}
        paths = (tmp_path / "dicom").glob("*segmentation.dcm")
        assert named == {dcmread(path, stop_before_pixels=True).SOPInstanceUID for path in paths}


def test_dcmtk_prints_every_number(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    content = content_of(scan, case_folders.segmentation_of(scan))
    printed = dsrdump_says(written(tmp_path, content))
    assert printed.count('<contains CONTAINER:(,,"Measurement Group")') == 3
    for measurement in content.measurements:
        for value in known(measurement).values():
            assert f'="{value}" (' in printed


@pytest.mark.slow
def test_two_thousand_structures_have_a_group_each(tmp_path: Path) -> None:
    """Also those that the SEG has no frame of: it describes them all the same."""
    scan = case_folders.dicom_scan()
    labels = np.zeros(scan.volume.grid.shape, np.uint16, order="F")
    labels.reshape(-1, order="F")[:1500] = np.arange(1, 1501)
    structures = tuple(replace(case_folders.LIVER, label=f"s{n}", number=n) for n in range(1, 2001))
    whole = case_folders.segmentation_of(scan)
    content = content_of(scan, replace(whole, layers=(Layer(labels, structures),)))
    path = written(tmp_path, content)
    groups = read_by_dcmqi(path, tmp_path / "dcmqi")["Measurements"]
    assert [group["ReferencedSegment"] for group in groups] == [*range(1, 2001)]
    assert [numbers_by_dcmqi(g) for g in groups] == [known(m) for m in content.measurements]


def options_of(folder: Path) -> SegmentOptions:
    key = folder / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    outputs = Outputs(also=("sr",))
    return segment_options(
        models=("ct_tissue",), out=folder / "out", key=key, device="cpu", outputs=outputs
    )


@pytest.mark.thorough
def test_a_run_publishes_it_and_verify_knows_it(tmp_path: Path) -> None:
    options = options_of(tmp_path)
    [(_, record)] = iter_segment([shipped("data") / "torso_ct"], options)
    assert record.reason is None, record.detail
    assert record.flags == ()
    path = record.folder / SR_NAME
    rows = json.loads((record.folder / "measurements.json").read_text())["measurements"]
    groups = read_by_highdicom(path)
    assert [group.tracking_identifier for group in groups] == [row["label"] for row in rows]
    for group, row in zip(groups, rows, strict=True):
        assert numbers_by_highdicom(group) == {n: row[n] for n in numbers_by_highdicom(group)}
    assert SR_NAME in (record.folder / "SHA256SUMS").read_text()
    assert dciodvfy_says(path) == set()
    assert scanloom_command("verify", options.out).code == 0
    path.write_bytes(path.read_bytes()[:-2] + b"  ")
    assert scanloom_command("verify", options.out).code == 1


@pytest.mark.thorough
def test_a_report_that_was_altered_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = sr.save_object

    def save_and_alter(path: Path, *content: Any) -> None:
        save(path, *content)
        report = dcmread(path)
        [number] = report.ContentSequence[-1].ContentSequence[2].ContentSequence[-3:-2]
        number.MeasuredValueSequence[0].NumericValue = 7
        dcmwrite(path, report)

    monkeypatch.setattr(sr, "save_object", save_and_alter)
    options = options_of(tmp_path)
    [(_, record)] = iter_segment([shipped("data") / "torso_ct"], options)
    assert record.reason is Reason.WRITE_MISMATCH
    assert "the SR has a different" in record.detail
    assert not [*options.out.rglob("*.dcm")]
