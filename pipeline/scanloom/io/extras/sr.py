"""DICOM SR on request: the measurements of all models in one report, beside the DICOM SEG.

The report is TID 1500 of PS3.16 in an Enhanced SR: a measurement group (TID 1411) for each
structure. Each group refers to a segment of the DICOM SEG of the same case, which is written
before it: the UIDs of a SEG follow from all of its frames. Of a sheared stack it is the SEG on the
scan's own slices, whose voxels were measured, not the rectangular copy.

Numbers have the digits of `measurements.json`. Unknown values have no item: a number without a
value is an error to many readers. What the standard has no code for has one of scanloom's own
coding scheme.

Content items are encoded directly: highdicom's and pydicom's objects for each item take several
times longer than the DICOM SEG.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from scanloom.cards.card import ModelCard
from scanloom.core import Code, Grid, Measurement, Outputs, Segmentation, Structure
from scanloom.io.dataset_text import decimal_strings, valid_uid
from scanloom.io.dicom.uids import EXPLICIT_VR_LITTLE_ENDIAN
from scanloom.io.output import file_names
from scanloom.io.output.case_folder import CaseContent, Writer
from scanloom.io.output.measurements import measurement_to_json
from scanloom.io.readback.mismatch import decoding, mismatch_error
from scanloom.io.scan import DicomSource, Scan
from scanloom.io.write.derived_dicom import (
    ANATOMY,
    FAMILY,
    algorithm_version,
    code_item,
    encode_dataset,
    encode_element,
    encode_sequence,
    hashed_uid,
    long_string,
    make_item,
    new_object,
    reference_item,
    save_object,
    set_dates,
    written_datetime,
)
from scanloom.ops.measure import Name

if TYPE_CHECKING:
    from pydicom import Dataset

SERIES_NUMBER = 700
"""SeriesNumber of the report."""
SCHEME = "99SCANLOOM"
"""Designator of our own coding scheme: what PS3.16 has no code for."""

_ENHANCED_SR = "1.2.840.10008.5.1.4.1.1.88.22"
_MAX_VALUE = 16
"""Characters of a code's value (SH); longer ones have an element of their own."""
_BYTES_PER_STRUCTURE = 128 * 1024
"""Content items of a group as pydicom holds them when they are read back."""


def can_write(scan: Scan) -> bool:
    """Return whether a scan can have a report: DICOM that can be referred to."""
    return isinstance(scan.source, DicomSource) and scan.source.can_refer


# --- codes ----------------------------------------------------------------------------------------

_NO_UNIT = Code("1", "UCUM", "no units")
_UNITS = {
    "HU": Code("[hnsf'U]", "UCUM", "Hounsfield unit"),
    "a.u.": Code("[arb'U]", "UCUM", "arbitrary unit"),
    "unknown": _NO_UNIT,
}
"""Units of intensities (CID 7181)."""

_MEASUREMENTS = Code("126010", "DCM", "Imaging Measurements")
_GROUP = Code("125007", "DCM", "Measurement Group")
_VOLUME = Code("118565006", "SCT", "Volume")
_CUBIC_CENTIMETRES = Code("cm3", "UCUM", "cubic centimeter")
_ATTENUATION = Code("112031", "DCM", "Attenuation Coefficient")
_MR_SIGNAL = Code("110852", "DCM", "MR signal intensity")
_INTENSITY = Code("intensity", SCHEME, "Intensity")
_SHARE = Code("113288", "DCM", "Volume Ratio")
_RATIO = Code("{ratio}", "UCUM", "ratio")
_SHARE_OF = Code("share_of", SCHEME, "Share of")
_FLAG = Code("flag", SCHEME, "Flag")

_STATISTICS = {
    "mean": Code("373098007", "SCT", "Mean"),
    "sd": Code("386136009", "SCT", "Standard Deviation"),
    "p05": Code("371888009", "SCT", "5th Percentile"),
    "p25": Code("p25", SCHEME, "25th Percentile"),
    "median": Code("373099004", "SCT", "Median"),
    "p75": Code("p75", SCHEME, "75th Percentile"),
    "p95": Code("371889001", "SCT", "95th Percentile"),
}
"""Derivations of intensities, by field of a measurement (CID 7464, CID 226)."""

_UNITLESS = {
    "voxels": Code("voxels", SCHEME, "Number of voxels"),
    "components": Code("components", SCHEME, "Number of connected components"),
    "entropy": Code("entropy", SCHEME, "Mean entropy of labels"),
    "disagreement": Code("disagreement", SCHEME, "Mean disagreement of networks"),
}
"""Numbers without a unit, by field of a measurement."""

_PROCEDURES = {
    "CT": Code("25045-6", "LN", "CT unspecified body region"),
    "MR": Code("25056-3", "LN", "MRI unspecified body region"),
    "PT": Code("44136-0", "LN", "PET unspecified body region"),
    "NM": Code("49118-3", "LN", "NM unspecified body region"),
}
_ANY_PROCEDURE = Code("363679005", "SCT", "Imaging procedure")
"""Procedures by modality (CID 100)."""


def _intensity_code(measurement: Measurement, modality: str | None) -> Code:
    if measurement.unit == "HU":
        return _ATTENUATION
    return _MR_SIGNAL if modality == "MR" else _INTENSITY


# --- the file -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Segment:
    """A segment of a written DICOM SEG."""

    sop_class: str
    sop_instance: str
    series: str
    number: int
    tracking_uid: str


def write_sr(folder: Path, content: CaseContent) -> None:
    """Write the report of a case, of a scan that `can_write` accepts.

    Parameters
    ----------
    folder : Path
        The case folder, which has the DICOM SEG already; the file is written to its subfolder
        `dicom/`.
    content : CaseContent
        With a measurement for each structure.
    """
    source, case = content.scan.source, content.case
    if not isinstance(source, DicomSource):
        raise TypeError("SR of a scan that is not DICOM")
    segments = _written_segments(folder, content)
    tail = _report(content, segments, valid_uid(source.first, "SeriesInstanceUID"))
    head = _head(content, source, list(segments.values()))
    set_dates(head, "Content", written_datetime(source, case))
    digest = hashlib.sha256(encode_dataset(head) + tail).hexdigest()
    save_object(folder / file_names.MEASUREMENTS_SR, head, [tail], case.recipe, digest)


def _seg_names(segmentation: Segmentation, content: CaseContent) -> list[str]:
    """Return the names of a model's DICOM SEG on the scan's own grid."""
    files = len(segmentation.layers) if content.case.outputs.seg == "labelmap" else 1
    model, models = segmentation.model, content.models
    return [file_names.seg_name("segmentation", model, models, n) for n in range(files)]


def _written_segments(folder: Path, content: CaseContent) -> dict[Name, _Segment]:
    """Return the segments of the written DICOM SEG by model and label."""
    from pydicom import dcmread

    keywords = ["SOPClassUID", "SOPInstanceUID", "SeriesInstanceUID", "SegmentSequence"]
    segments = {}
    for segmentation in content.segmentations:
        for name in _seg_names(segmentation, content):
            seg = dcmread(folder / name, stop_before_pixels=True, specific_tags=keywords)
            uids = seg.SOPClassUID, seg.SOPInstanceUID, seg.SeriesInstanceUID
            for item in seg.SegmentSequence:
                if "TrackingUID" in item:  # not the background
                    number, tracking = int(item.SegmentNumber), item.TrackingUID
                    segments[segmentation.model, item.SegmentLabel] = _Segment(
                        *uids, number, tracking
                    )
    return segments


def _head(content: CaseContent, source: DicomSource, segments: Sequence[_Segment]) -> Dataset:
    """Return all elements but dates, UIDs and the last, ContentSequence (PS3.3 A.35.2)."""
    head = new_object(
        source,
        content.segmentations,
        _ENHANCED_SR,
        EXPLICIT_VR_LITTLE_ENDIAN,
        "SR",
        "scanloom measurements",
    )
    del head.FrameOfReferenceUID, head.PositionReferenceIndicator
    head.SeriesNumber, head.InstanceNumber = SERIES_NUMBER, 1
    head.ReferencedPerformedProcedureStepSequence = []
    head.CompletionFlag, head.VerificationFlag = "COMPLETE", "UNVERIFIED"
    head.PerformedProcedureCodeSequence = []
    scheme = make_item(CodingSchemeDesignator=SCHEME, CodingSchemeName="scanloom")
    head.CodingSchemeIdentificationSequence = [scheme]
    head.ValueType, head.ContinuityOfContent = "CONTAINER", "CONTINUOUS"
    title = Code("126000", "DCM", "Imaging Measurement Report")
    head.ConceptNameCodeSequence = [code_item(title)]
    template = make_item(MappingResource="DCMR", TemplateIdentifier="1500")
    head.ContentTemplateSequence = [template]
    images = {i.sop_instance: i.sop_class for i in source.slices if i is not None}
    series = {valid_uid(source.first, "SeriesInstanceUID"): images}
    for segment in segments:
        series.setdefault(segment.series, {})[segment.sop_instance] = segment.sop_class
    referenced = []
    for uid, instances in series.items():
        item = make_item(SeriesInstanceUID=uid)
        item.ReferencedSOPSequence = [reference_item(c, i) for i, c in instances.items()]
        referenced.append(item)
    study = valid_uid(source.first, "StudyInstanceUID")
    evidence = make_item(ReferencedSeriesSequence=referenced, StudyInstanceUID=study)
    head.CurrentRequestedProcedureEvidenceSequence = [evidence]
    return head


def _report(content: CaseContent, segments: Mapping[Name, _Segment], series: str) -> bytes:
    """Return the encoded items below the root of the content tree (TID 1500)."""
    modality = content.scan.volume.modality
    by_model = {s.model: s for s in content.segmentations}
    structures = {(s.model, x.label): x for s in content.segmentations for x in s.structures}
    groups = []
    for measurement in content.measurements:
        name = measurement.model, measurement.label
        segmentation = by_model[measurement.model]
        described = _described(segmentation, structures[name], segments[name], series)
        items = [*described, *_numbers(measurement, modality)]
        flags = (Code(f.code, SCHEME, f.code.replace("_", " ")) for f in measurement.flags)
        items += [_coded(_CONTAINS, _FLAG, flag) for flag in flags]
        groups.append(_container(_GROUP, items, template="1411"))
    procedure = _PROCEDURES.get(modality or "", _ANY_PROCEDURE)
    language = Code("121049", "DCM", "Language of Content Item and Descendants")
    device = Code("121007", "DCM", "Device")
    root = [
        _coded(_MODIFIES, language, Code("en", "RFC5646", "English")),
        _coded(_OBSERVED, Code("121005", "DCM", "Observer Type"), device),
        _uid(_OBSERVED, Code("121012", "DCM", "Device Observer UID"), hashed_uid("device")),
        _text(_OBSERVED, Code("121013", "DCM", "Device Observer Name"), "scanloom"),
        _text(_OBSERVED, Code("121014", "DCM", "Device Observer Manufacturer"), "scanloom"),
        _text(_OBSERVED, Code("121015", "DCM", "Device Observer Model Name"), "scanloom"),
        _coded(_MODIFIES, Code("121058", "DCM", "Procedure reported"), procedure),
        _container(_MEASUREMENTS, groups),
    ]
    return encode_sequence(0x0040, 0xA730, *root)


def _described(
    segmentation: Segmentation, structure: Structure, segment: _Segment, series: str
) -> Iterator[bytes]:
    """Yield identity, finding, segment, site and algorithm (TID 4019) of a structure."""
    kind, side = structure.type, structure.laterality
    tracking_uid = Code("112040", "DCM", "Tracking Unique Identifier")
    yield _text(_OBSERVED, Code("112039", "DCM", "Tracking Identifier"), structure.label)
    yield _uid(_OBSERVED, tracking_uid, segment.tracking_uid)
    yield _coded(_CONTAINS, Code("276214006", "SCT", "Finding category"), structure.category)
    yield _coded(_CONTAINS, Code("121071", "DCM", "Finding"), kind)
    yield _segment_item(segment)
    yield _uid(_CONTAINS, Code("121232", "DCM", "Source Series for Segmentation"), series)
    if structure.category.value in ANATOMY or side is not None:
        laterality = Code("272741003", "SCT", "Laterality")
        sides = [] if side is None else [_coded(_MODIFIES, laterality, side)]
        yield _coded(_MODIFIES, Code("363698007", "SCT", "Finding Site"), kind, sides)
    yield _text(_MODIFIES, Code("111001", "DCM", "Algorithm Name"), segmentation.model)
    version = algorithm_version(segmentation)
    yield _text(_MODIFIES, Code("111003", "DCM", "Algorithm Version"), version)
    if segmentation.changes:
        changes = f"changes={segmentation.changes}"
        yield _text(_MODIFIES, Code("111002", "DCM", "Algorithm Parameters"), changes)
    yield _coded(_MODIFIES, Code("111000", "DCM", "Algorithm Family"), FAMILY)


def _numbers(measurement: Measurement, modality: str | None) -> Iterator[bytes]:
    """Yield the numbers that are known (TID 1419), as `measurements.json` has them."""
    row = measurement_to_json(measurement)
    yield _number(_VOLUME, row["volume_ml"], _CUBIC_CENTIMETRES)
    intensity, unit = _intensity_code(measurement, modality), _UNITS[measurement.unit]
    for field, statistic in _STATISTICS.items():
        if row[field] is not None:
            derivation = _coded(_MODIFIES, Code("121401", "DCM", "Derivation"), statistic)
            yield _number(intensity, row[field], unit, [derivation])
    for field, code in _UNITLESS.items():
        if row[field] is not None:
            yield _number(code, row[field], _NO_UNIT)
    if row["share"] is not None:
        whole = _text(_MODIFIES, _SHARE_OF, row["share_of"])
        yield _number(_SHARE, row["share"], _RATIO, [whole])


# --- content items --------------------------------------------------------------------------------
# Encoded in explicit VR, little endian, their elements in the order of tags (PS3.3 C.17.3, C.18).

_CONTAINS, _MODIFIES, _OBSERVED = "CONTAINS", "HAS CONCEPT MOD", "HAS OBS CONTEXT"
"""Relationships to the parent."""


def _item(
    relationship: str, kind: str, name: Code, value: bytes = b"", children: Sequence[bytes] = ()
) -> bytes:
    """Return a content item of an encoded value."""
    return b"".join(
        (
            encode_element(0x0040, 0xA010, "CS", relationship),
            encode_element(0x0040, 0xA040, "CS", kind),
            _code(0x0040, 0xA043, name),
            value,
            encode_sequence(0x0040, 0xA730, *children) if children else b"",
        )
    )


def _container(name: Code, children: Sequence[bytes], template: str = "") -> bytes:
    value = encode_element(0x0040, 0xA050, "CS", "CONTINUOUS")
    if template:
        resource = encode_element(0x0008, 0x0105, "CS", "DCMR")
        identifier = encode_element(0x0040, 0xDB00, "CS", template)
        value += encode_sequence(0x0040, 0xA504, resource + identifier)
    return _item(_CONTAINS, "CONTAINER", name, value, children)


def _coded(relationship: str, name: Code, code: Code, children: Sequence[bytes] = ()) -> bytes:
    return _item(relationship, "CODE", name, _code(0x0040, 0xA168, code), children)


def _text(relationship: str, name: Code, text: str) -> bytes:
    return _item(relationship, "TEXT", name, encode_element(0x0040, 0xA160, "UT", text))


def _uid(relationship: str, name: Code, uid: str) -> bytes:
    return _item(relationship, "UIDREF", name, encode_element(0x0040, 0xA124, "UI", uid))


def _segment_item(segment: _Segment) -> bytes:
    """Return the reference to a segment, which its tag puts before the relationship."""
    reference = b"".join(
        (
            encode_element(0x0008, 0x1150, "UI", segment.sop_class),
            encode_element(0x0008, 0x1155, "UI", segment.sop_instance),
            struct.pack("<HH2sHH", 0x0062, 0x000B, b"US", 2, segment.number),
        )
    )
    name = Code("121191", "DCM", "Referenced Segment")
    return encode_sequence(0x0008, 0x1199, reference) + _item(_CONTAINS, "IMAGE", name)


def _number(name: Code, value: float, unit: Code, children: Sequence[bytes] = ()) -> bytes:
    """Return a number of at most seven digits, which a decimal string holds."""
    [text] = decimal_strings([value])
    measured = _code(0x0040, 0x08EA, unit) + encode_element(0x0040, 0xA30A, "DS", text)
    return _item(_CONTAINS, "NUM", name, encode_sequence(0x0040, 0xA300, measured), children)


@cache
def _code(group: int, element: int, code: Code) -> bytes:
    """Return a code sequence (PS3.3 8.1), as `code_item`."""
    short = len(code.value) <= _MAX_VALUE
    elements = (
        encode_element(0x0008, 0x0100, "SH", code.value) if short else b"",
        encode_element(0x0008, 0x0102, "SH", code.scheme),
        encode_element(0x0008, 0x0104, "LO", long_string(code.meaning)),
        b"" if short else encode_element(0x0008, 0x0119, "UC", code.value),
    )
    return encode_sequence(group, element, b"".join(elements))


# --- read-back ------------------------------------------------------------------------------------
# By pydicom alone: the tree is walked, and each group compared with the measurement and with the
# segment of the written DICOM SEG that it refers to. Codes are looked up in tables of their own.

_FIELDS = {
    "118565006": ("volume_ml", "cm3"),
    "voxels": ("voxels", "1"),
    "components": ("components", "1"),
    "113288": ("share", "{ratio}"),
    "entropy": ("entropy", "1"),
    "disagreement": ("disagreement", "1"),
}
"""Fields of a measurement and their units, by the value of a number's name."""
_FIELDS_BY_DERIVATION = {
    "373098007": "mean",
    "386136009": "sd",
    "371888009": "p05",
    "p25": "p25",
    "373099004": "median",
    "p75": "p75",
    "371889001": "p95",
}
_UNITS_OF_INTENSITIES = {"HU": "[hnsf'U]", "a.u.": "[arb'U]", "unknown": "1"}
_ROUNDING = 5e-7
"""Largest relative error of seven digits."""

_Coded = tuple[str, str, str]
"""Value, scheme and meaning of a code."""
_Items = dict[str, list["Dataset"]]
"""Content items by the value of their name."""


def check_sr(folder: Path, content: CaseContent, source: DicomSource) -> None:
    """Compare the report with the measurements and with the written DICOM SEG.

    Raises
    ------
    ScanError
        WRITE_MISMATCH.
    """
    import pydicom

    path = folder / file_names.MEASUREMENTS_SR
    report = pydicom.dcmread(path)
    last = report.get_item("ContentSequence")
    if last.value_tell + last.length != path.stat().st_size:
        raise mismatch_error("the SR does not end with its content")
    for name, value in (
        ("SOPClassUID", _ENHANCED_SR),
        ("StudyInstanceUID", source.first.StudyInstanceUID),
    ):
        if report[name].value != value:
            raise mismatch_error(f"the SR has a different {name}")
    segs: dict[str, tuple[str, Dataset, dict[int, Dataset]]] = {}
    for segmentation in content.segmentations:
        for name in _seg_names(segmentation, content):
            seg = pydicom.dcmread(folder / name, stop_before_pixels=True)
            segments = {int(item.SegmentNumber): item for item in seg.SegmentSequence}
            segs[seg.SOPInstanceUID] = segmentation.model, seg, segments
    _check_evidence(report, [seg for _, seg, _ in segs.values()], source)
    reader = _Reader()
    [container] = reader.by_name(report)["126010"]
    groups = container.ContentSequence
    if len(groups) != len(content.measurements):
        raise mismatch_error("the SR has a different number of structures")
    for group, measurement in zip(groups, content.measurements, strict=True):
        items = reader.by_name(group)
        [reference] = reader.only(items, "121191").ReferencedSOPSequence
        model, seg, segments = segs[reference.ReferencedSOPInstanceUID]
        segment = segments[reference.ReferencedSegmentNumber]
        if (model, segment.SegmentLabel) != (measurement.model, measurement.label):
            raise mismatch_error(f"the SR has another segment for {measurement.label}")
        if reference.ReferencedSOPClassUID != seg.SOPClassUID:
            raise mismatch_error("the SR has a different class of the DICOM SEG")
        series = reader.only(items, "121232").UID
        if series != source.first.SeriesInstanceUID:
            raise mismatch_error("the SR refers to another series")
        if reader.described(items) != reader.segment_described(segment):
            raise mismatch_error(f"the SR describes {measurement.label} differently")
        flags = [reader.code(item, "ConceptCodeSequence")[0] for item in items.pop("flag", [])]
        if flags != [flag.code for flag in measurement.flags]:
            raise mismatch_error(f"the SR has different flags of {measurement.label}")
        reader.check_numbers([item for same in items.values() for item in same], measurement)


def _check_evidence(report: Dataset, segs: Sequence[Dataset], source: DicomSource) -> None:
    """Compare the instances that the report is based on with the SEG and the source images."""
    images = [(i.sop_class, i.sop_instance) for i in source.slices if i is not None]
    expected = {(source.first.SeriesInstanceUID, *image) for image in images}
    expected |= {(seg.SeriesInstanceUID, seg.SOPClassUID, seg.SOPInstanceUID) for seg in segs}
    [study] = report.CurrentRequestedProcedureEvidenceSequence
    written = [
        (series.SeriesInstanceUID, item.ReferencedSOPClassUID, item.ReferencedSOPInstanceUID)
        for series in study.ReferencedSeriesSequence
        for item in series.ReferencedSOPSequence
    ]
    same = set(written) == expected and len(written) == len(expected)
    if study.StudyInstanceUID != source.first.StudyInstanceUID or not same:
        raise mismatch_error("the SR is based on other instances")


class _Reader:
    """Reads content items and codes; equal codes are decoded once."""

    def __init__(self) -> None:
        self._codes: dict[bytes, _Coded] = {}

    def code(self, item: Dataset, keyword: str) -> _Coded:
        """Return the only code of a sequence."""
        encoded = item.get_item(keyword).value
        if not isinstance(encoded, bytes):  # decoded before
            return _coded_as(encoded)
        if encoded not in self._codes:
            self._codes[encoded] = _coded_as(item[keyword].value)
        return self._codes[encoded]

    def by_name(self, item: Dataset) -> _Items:
        """Return the content items below one."""
        items: _Items = {}
        for child in item.get("ContentSequence", []):
            name, _, _ = self.code(child, "ConceptNameCodeSequence")
            items.setdefault(name, []).append(child)
        return items

    def only(self, items: _Items, name: str) -> Dataset:
        """Return and remove the only item of a name."""
        [item] = items.pop(name)
        return item

    def value(self, items: _Items, name: str) -> _Coded:
        """Return the code that the only item of a name has, and remove it."""
        return self.code(self.only(items, name), "ConceptCodeSequence")

    def described(self, items: _Items) -> tuple[object, ...]:
        """Return identity, codes and algorithm of a group, and remove their items."""
        category, kind = (self.value(items, name) for name in ("276214006", "121071"))
        side = None
        if "363698007" in items:
            site = self.only(items, "363698007")
            if self.code(site, "ConceptCodeSequence") != kind:
                raise mismatch_error("the SR has a site that is not the structure")
            modifiers = self.by_name(site)
            side = self.value(modifiers, "272741003") if modifiers else None
        parameters = [item.TextValue for item in items.pop("111002", [])]
        return (
            self.only(items, "112039").TextValue,
            self.only(items, "112040").UID,
            category,
            kind,
            side,
            self.only(items, "111001").TextValue,
            self.only(items, "111003").TextValue,
            "".join(parameters),
            self.value(items, "111000"),
        )

    def segment_described(self, segment: Dataset) -> tuple[object, ...]:
        """Return the same of a segment of a DICOM SEG."""
        [kind] = segment.SegmentedPropertyTypeCodeSequence
        [algorithm] = segment.SegmentationAlgorithmIdentificationSequence
        modifier = "SegmentedPropertyTypeModifierCodeSequence"
        return (
            segment.TrackingID,
            segment.TrackingUID,
            self.code(segment, "SegmentedPropertyCategoryCodeSequence"),
            _coded_as(segment.SegmentedPropertyTypeCodeSequence),
            _coded_as(kind[modifier].value) if modifier in kind else None,
            algorithm.AlgorithmName,
            algorithm.AlgorithmVersion,
            algorithm.get("AlgorithmParameters", ""),
            self.code(algorithm, "AlgorithmFamilyCodeSequence"),
        )

    def check_numbers(self, items: Sequence[Dataset], measurement: Measurement) -> None:
        """Compare all numbers of a group, and that it has no others."""
        label, written = measurement.label, {}
        for item in items:
            modifiers = self.by_name(item)
            name, _, _ = self.code(item, "ConceptNameCodeSequence")
            if name in _FIELDS:
                field, unit = _FIELDS[name]
            else:
                field = _FIELDS_BY_DERIVATION[self.value(modifiers, "121401")[0]]
                unit = _UNITS_OF_INTENSITIES[measurement.unit]
            if field in written:
                raise mismatch_error(f"the SR has {field} of {label} twice")
            [measured] = item.MeasuredValueSequence
            written[field] = float(measured.NumericValue)
            if self.code(measured, "MeasurementUnitsCodeSequence")[0] != unit:
                raise mismatch_error(f"the SR has a different unit for {field} of {label}")
            whole = self.only(modifiers, "share_of").TextValue if field == "share" else None
            if modifiers or (whole and whole != measurement.share_of):
                raise mismatch_error(f"the SR qualifies {field} of {label} differently")
        fields = (*(field for field, _ in _FIELDS.values()), *_FIELDS_BY_DERIVATION.values())
        known = {name: getattr(measurement, name) for name in fields}
        known = {name: value for name, value in known.items() if value is not None}
        if written.keys() != known.keys():
            raise mismatch_error(f"the SR has other numbers of {label}")
        for field, value in known.items():
            if not math.isclose(written[field], value, rel_tol=_ROUNDING):
                raise mismatch_error(f"the SR has a different {field} of {label}")


def _coded_as(sequence: Sequence[Dataset]) -> _Coded:
    [code] = sequence
    value = code.get("CodeValue") or code.LongCodeValue
    return value, code.CodingSchemeDesignator, code.CodeMeaning


# --- the writer -----------------------------------------------------------------------------------


def _files(content: CaseContent) -> set[str]:
    return {file_names.MEASUREMENTS_SR} if can_write(content.scan) else set()


def _read_back(folder: Path, content: CaseContent) -> None:
    if isinstance(content.scan.source, DicomSource):
        with decoding("SR"):
            check_sr(folder, content, content.scan.source)


def _memory(grid: Grid, cards: Sequence[ModelCard], outputs: Outputs) -> int:
    return sum(len(card.structures) for card in cards) * _BYTES_PER_STRUCTURE


SR = Writer("sr", _files, write_sr, _read_back, _memory, after="dicom_seg")
