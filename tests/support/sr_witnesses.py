"""DICOM SR of a case, and what other programs make and read of it."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import highdicom.sr as hd
from pydicom import Dataset

from scanloom.core import Code, Measurement, Segmentation
from scanloom.engine.case.writers import write_files, writers_of
from scanloom.io.extras.sr import SCHEME, SR
from scanloom.io.output.case_folder import CaseContent
from scanloom.io.output.measurements import measurement_to_json
from scanloom.io.scan import Scan
from scanloom.ops.measure import measure
from support import case_folders
from support.seg_witnesses import program

SR_NAME = "dicom/measurements.dcm"
STATISTICS = {
    ("373098007", "SCT"): "mean",
    ("386136009", "SCT"): "sd",
    ("371888009", "SCT"): "p05",
    ("p25", SCHEME): "p25",
    ("373099004", "SCT"): "median",
    ("p75", SCHEME): "p75",
    ("371889001", "SCT"): "p95",
}
"""Derivations of intensities: SNOMED CT's qualifiers, and our own."""
OTHERS = {
    ("118565006", "SCT"): "volume_ml",
    ("voxels", SCHEME): "voxels",
    ("components", SCHEME): "components",
    ("entropy", SCHEME): "entropy",
    ("disagreement", SCHEME): "disagreement",
    ("113288", "DCM"): "share",
}
NUMBERS = (*OTHERS.values(), *STATISTICS.values())
"""Fields of a measurement that a report has."""


def content_of(
    scan: Scan,
    *segmentations: Segmentation,
    flags: tuple[Any, ...] = (),
    measurements: list[Measurement] | None = None,
    **outputs: object,
) -> CaseContent:
    """Return a case with a report, whose measurements are those of the scan unless given."""
    if measurements is None:
        measurements = [m for s in segmentations for m in measure(s, scan.volume, flags)]
    case = case_folders.case_with(also=("sr",), **outputs)
    return CaseContent(case, scan, segmentations, measurements, flags)


def written(folder: Path, content: CaseContent) -> Path:
    """Write the DICOM SEG and the report of a case, and read the report back."""
    folder.mkdir(exist_ok=True)
    writers = [w for w in writers_of(content.case.outputs) if w.name in ("dicom_seg", "sr")]
    write_files(folder, content, writers)
    SR.read_back(folder, content)
    return folder / SR_NAME


def known(measurement: Measurement) -> dict[str, float]:
    """Return the numbers of a structure that are known, as `measurements.json` has them."""
    row = measurement_to_json(measurement)
    return {name: row[name] for name in NUMBERS if row[name] is not None}


# --- readers --------------------------------------------------------------------------------------


def read_by_highdicom(path: Path) -> list[hd.VolumetricROIMeasurementsAndQualitativeEvaluations]:
    """Return the measurement groups of a report, as highdicom reads them."""
    groups: list[hd.VolumetricROIMeasurementsAndQualitativeEvaluations] = hd.srread(
        path
    ).content.get_volumetric_roi_measurement_groups()
    return groups


def numbers_by_highdicom(
    group: hd.VolumetricROIMeasurementsAndQualitativeEvaluations,
) -> dict[str, float]:
    numbers = {}
    for each in group.get_measurements():
        derivation = each.derivation
        numbers[_field(each.name, derivation)] = each.value
    assert len(numbers) == len(group.get_measurements())
    return numbers


def _field(name: Any, derivation: Any) -> str:
    if derivation is not None:
        return STATISTICS[derivation.value, derivation.scheme_designator]
    return OTHERS[name.value, name.scheme_designator]


def read_by_dcmqi(path: Path, folder: Path) -> dict[str, Any]:
    """Return what dcmqi's tid1500reader reads of a report."""
    folder.mkdir(exist_ok=True)
    command = [program("tid1500reader"), "--inputDICOM", path]
    command += ["--outputMetadata", folder / "report.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "Warning" not in done.stdout + done.stderr
    document: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return document


def numbers_by_dcmqi(group: dict[str, Any]) -> dict[str, float]:
    numbers = {}
    for item in group["measurementItems"]:
        code = item.get("derivationModifier") or item["quantity"]
        table = STATISTICS if "derivationModifier" in item else OTHERS
        field = table[code["CodeValue"], code["CodingSchemeDesignator"]]
        numbers[field] = float(item["value"])
    assert len(numbers) == len(group["measurementItems"])
    return numbers


def dsrdump_says(path: Path) -> str:
    """Return the content of a report as DCMTK's dsrdump prints it, without a warning."""
    command = [program("dsrdump"), path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    return done.stdout


def dciodvfy_says(path: Path) -> set[str]:
    """Return the messages of dciodvfy about a report, but the one that our scheme is its own."""
    done = subprocess.run([program("dciodvfy"), path], capture_output=True, text=True, timeout=120)
    lines = {line.strip() for line in (done.stdout + done.stderr).splitlines()}
    own = f"Warning - Unrecognized defined term <{SCHEME}> for value 1 of attribute "
    return lines - {"", "EnhancedSR", f"{own}<Coding Scheme Designator>"}


# --- highdicom's own report -----------------------------------------------------------------------


def concept(code: Code) -> hd.CodedConcept:
    return hd.CodedConcept(code.value, code.scheme, code.meaning)


def group_by_highdicom(
    content: CaseContent, measurement: Measurement, reference: Dataset, tracking_uid: str
) -> Dataset:
    """Return the group that highdicom makes for a structure without share or changes."""
    [segmentation] = [s for s in content.segmentations if s.model == measurement.model]
    structure = segmentation.structure(measurement.label)
    hounsfield = hd.CodedConcept("[hnsf'U]", "UCUM", "Hounsfield unit")
    attenuation = hd.CodedConcept("112031", "DCM", "Attenuation Coefficient")
    meanings = {
        "mean": "Mean",
        "sd": "Standard Deviation",
        "p05": "5th Percentile",
        "p25": "25th Percentile",
        "median": "Median",
        "p75": "75th Percentile",
        "p95": "95th Percentile",
        "volume_ml": "Volume",
        "voxels": "Number of voxels",
        "components": "Number of connected components",
    }
    numbers = known(measurement)
    items = []
    for (value, scheme), field in (*OTHERS.items(), *STATISTICS.items()):
        if field not in numbers:
            continue
        code = hd.CodedConcept(value, scheme, meanings[field])
        number = numbers[field]
        if field in STATISTICS.values():
            items.append(hd.Measurement(attenuation, number, hounsfield, derivation=code))
        elif field == "volume_ml":
            unit = hd.CodedConcept("cm3", "UCUM", "cubic centimeter")
            items.append(hd.Measurement(code, number, unit))
        else:
            unit = hd.CodedConcept("1", "UCUM", "no units")
            items.append(hd.Measurement(code, number, unit))
    side = structure.laterality and concept(structure.laterality)
    [group] = hd.VolumetricROIMeasurementsAndQualitativeEvaluations(
        tracking_identifier=hd.TrackingIdentifier(tracking_uid, measurement.label),
        referenced_segment=hd.ReferencedSegment(
            reference.ReferencedSOPClassUID,
            reference.ReferencedSOPInstanceUID,
            reference.ReferencedSegmentNumber,
            source_series=hd.SourceSeriesForSegmentation(
                content.scan.source.first.SeriesInstanceUID
            ),
        ),
        finding_category=concept(structure.category),
        finding_type=concept(structure.type),
        finding_sites=[hd.FindingSite(concept(structure.type), side)],
        algorithm_id=hd.AlgorithmIdentification(
            segmentation.model,
            segmentation.version,
            family=hd.CodedConcept("123110", "DCM", "Artificial Intelligence"),
        ),
        measurements=items,
        qualitative_evaluations=[
            hd.QualitativeEvaluation(
                hd.CodedConcept("flag", SCHEME, "Flag"),
                hd.CodedConcept(flag.code, SCHEME, flag.code.replace("_", " ")),
            )
            for flag in measurement.flags
        ],
    )
    for item in group.ContentSequence:
        if item.ValueType == "NUM":
            [measured] = item.MeasuredValueSequence
            del measured[0x0040A161:0x0040A162]  # FloatingPointValue, the same number again
            if item.name.value in ("voxels", "components"):
                measured.NumericValue = str(int(measured.NumericValue))  # "69.0" is no count
    return group


def items_of(group: Dataset) -> Counter[str]:
    """Return the content items of a group in any order: highdicom's is not the template's."""
    return Counter(map(str, group.ContentSequence))


def element_texts(group: Dataset) -> set[str]:
    """Return the other elements of a group."""
    return {str(element) for element in group if element.keyword != "ContentSequence"}
