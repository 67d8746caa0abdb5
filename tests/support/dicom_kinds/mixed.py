"""Series that mix slices of two meanings; the voxel values mark the kind of their slice.

Attribute by attribute, in one slice, two slices or half of them; stacked, interleaved, or with
the attribute missing. No volume may hold slices of both kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydicom import Dataset
from pydicom.tag import Tag

from support.write_dicom import MR, Coding, Geometry, Words, uid, write_series

COUNT = 12
OURS, THEIRS = 1000, 2000
"""Voxel values of the two kinds of slices."""
RAW = Coding(intercept="0")

Value = Any
ATTRIBUTES: dict[str, tuple[str | int, str, Value, Value]] = {
    "Modality": ("Modality", "CS", "MR", "CT"),
    "ImageType": ("ImageType", "CS", ["ORIGINAL", "PRIMARY", "M"], ["ORIGINAL", "PRIMARY", "P"]),
    "Dixon": ("ImageType", "CS", ["DERIVED", "PRIMARY", "DIXON", "WATER"], ["X", "Y", "FAT_SUP"]),
    "Dixon, Philips": (0x20051011, "CS", "W", "F"),
    "Dixon, Siemens": (0x00511016, "LO", "p2 W/ND/NORM", "p2 F/ND/NORM"),
    "component, GE": (0x0043102F, "SS", 0, 1),
    "ComplexImageComponent": ("ComplexImageComponent", "CS", "MAGNITUDE", "PHASE"),
    "AcquisitionContrast": ("AcquisitionContrast", "CS", "T1", "T2"),
    "Units": ("Units", "CS", "BQML", "CNTS"),
    "SUVType": ("SUVType", "CS", "BW", "LBM"),
    "DecayCorrection": ("DecayCorrection", "CS", "START", "NONE"),
    "CorrectedImage": ("CorrectedImage", "CS", ["DECY", "ATTN"], ["DECY"]),
    "EchoTime": ("EchoTime", "DS", "4.6", "9.2"),
    "EchoNumbers": ("EchoNumbers", "IS", "1", "2"),
    "DiffusionBValue": ("DiffusionBValue", "FD", 0.0, 1000.0),
    "b-value, Siemens": (0x0019100C, "IS", "50", "1000"),
    "b-value, GE": (0x00431039, "IS", ["0", "8"], ["1000", "8"]),
    "b-value, Philips": (0x20011003, "FL", 100.0, 800.0),
    "DiffusionGradientOrientation": (
        "DiffusionGradientOrientation",
        "FD",
        [1.0, 0.0, 0.0],
        [0.0, 0.0, 1.0],
    ),
    "InversionTimes": ("InversionTimes", "FD", 150.0, 900.0),
    "InversionTime": ("InversionTime", "DS", "150", "900"),
    "FlipAngle": ("FlipAngle", "DS", "5", "26"),
    "KVP": ("KVP", "DS", "80", "140"),
    "ReceiveCoilName": ("ReceiveCoilName", "SH", "H1", "H2"),
    "ContrastBolusAgent": ("ContrastBolusAgent", "LO", "NONIONIC", "NONE"),
    "TemporalPositionIdentifier": ("TemporalPositionIdentifier", "IS", "1", "2"),
    "EffectiveEchoTime": ("EffectiveEchoTime", "FD", 4.6, 9.2),
    "b-value, UIH": (0x00651009, "FD", 0.0, 800.0),
    "b-value, in the name of the sequence": ("SequenceName", "SH", "*ep_b50t", "*ep_b800t"),
    "direction, Siemens": (0x0019100E, "FD", [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]),
    "direction, GE, x": (0x001910BB, "DS", "0.5", "-0.7"),
    "direction, GE, y": (0x001910BC, "DS", "0.5", "-0.7"),
    "direction, GE, z": (0x001910BD, "DS", "0.5", "-0.7"),
    "direction, Philips, right to left": (0x200510B0, "FL", 0.5, -0.7),
    "direction, Philips, front to back": (0x200510B1, "FL", 0.5, -0.7),
    "coil element, Siemens": (0x0051100F, "LO", "H1", "H2"),
    "phase of the heart": ("NominalPercentageOfCardiacPhase", "FD", 30.0, 70.0),
    "label and control": ("ImageType", "CS", ["X", "Y", "ASL", "LABEL"], ["X", "Y", "CONTROL"]),
    "inversions": ("ImageType", "CS", ["X", "Y", "INV1"], ["X", "Y", "UNI"]),
    "energies": ("ImageType", "CS", ["X", "Y", "MONO_E40"], ["X", "Y", "MONO_E140"]),
    "Manufacturer": ("Manufacturer", "LO", "One", "Another"),
    "PatientSex": ("PatientSex", "CS", "F", "M"),
    "PatientPosition": ("PatientPosition", "CS", "HFS", "FFS"),
    "PhotometricInterpretation": (
        "PhotometricInterpretation",
        "CS",
        "MONOCHROME2",
        "MONOCHROME1",
    ),
    "kernel": ("ConvolutionKernel", "SH", "B30f", "B70f"),
    "thickness": ("SliceThickness", "DS", "3", "5"),
    "voltage, the nearest": ("KVP", "DS", "100", "120"),
    "ScanningSequence": ("ScanningSequence", "CS", "SE", "GR"),
    "SequenceVariant": ("SequenceVariant", "CS", ["SK", "MTC"], "SK"),
    "ScanOptions": ("ScanOptions", "CS", ["FS", "PFF"], "PFF"),
    "SequenceName": ("SequenceName", "SH", "*tse2d1_5", "*tir2d1_5"),
    "RepetitionTime": ("RepetitionTime", "DS", "500", "3000"),
    "FilterType": ("FilterType", "SH", "BOWTIE", "WEDGE"),
    "ReconstructionMethod": ("ReconstructionMethod", "LO", "OSEM 3i21s", "FBP"),
    "ProtocolName": ("ProtocolName", "LO", "bone", "lung"),
    "SeriesNumber": ("SeriesNumber", "IS", "2", "11"),
    "SeriesDescription": ("SeriesDescription", "LO", "CT 0 %", "CT 50 %"),
    "DerivationDescription": ("DerivationDescription", "ST", "water", "fat"),
    "ImageComments": ("ImageComments", "LT", "0 %", "50 %"),
    "FrameComments": ("FrameComments", "LT", "0 %", "50 %"),
    "MagnetizationTransfer": ("MagnetizationTransfer", "CS", "OFF_RESONANCE", "ON_RESONANCE"),
    "SpectrallySelectedSuppression": ("SpectrallySelectedSuppression", "CS", "FAT", "WATER"),
    "ASLContext": ("ASLContext", "CS", "LABEL", "CONTROL"),
    "AttenuationCorrectionMethod": ("AttenuationCorrectionMethod", "LO", "measured", "NONE"),
    "ScatterCorrectionMethod": ("ScatterCorrectionMethod", "LO", "Model-based", "NONE"),
    "RandomsCorrectionMethod": ("RandomsCorrectionMethod", "CS", "DLYD", "SING"),
    "Radiopharmaceutical": ("Radiopharmaceutical", "LO", "FDG", "PSMA"),
    "procedure step": ("PerformedProcedureStepID", "SH", "A1", "A2"),
    "soft tissue and bone": ("ImageType", "CS", ["X", "Y", "SOFT_TISSUE"], ["X", "Y", "BONE"]),
    "StudyDate": ("StudyDate", "DA", "20190401", "20210401"),
    "AcquisitionDate": ("AcquisitionDate", "DA", "20190401", "20190403"),
    "AcquisitionDateTime": ("AcquisitionDateTime", "DT", "20190401120000", "20190403120000"),
    "SeriesDate": ("SeriesDate", "DA", "20190401", "20210401"),
    "ContentDate": ("ContentDate", "DA", "20190401", "20210401"),
}
"""Keyword or tag, VR, and two different values."""
CREATORS = {
    "Dixon, Philips": "Philips MR Imaging DD 001",
    "Dixon, Siemens": "SIEMENS MR HEADER",
    "component, GE": "GEMS_PARM_01",
    "b-value, Siemens": "SIEMENS MR HEADER",
    "b-value, GE": "GEMS_PARM_01",
    "b-value, Philips": "PHILIPS IMAGING DD 001",
    "b-value, UIH": "Image Private Header",
    "direction, Siemens": "SIEMENS MR HEADER",
    "direction, GE, x": "GEMS_ACQU_01",
    "direction, GE, y": "GEMS_ACQU_01",
    "direction, GE, z": "GEMS_ACQU_01",
    "direction, Philips, right to left": "Philips MR Imaging DD 001",
    "direction, Philips, front to back": "Philips MR Imaging DD 001",
    "coil element, Siemens": "SIEMENS MR HEADER",
}
"""Who reserves the block of a private attribute, as in pydicom's dictionary and in real files."""
MAY_LACK = (
    *("FlipAngle", "KVP", "ReceiveCoilName", "b-value, in the name of the sequence"),
    *("direction, Siemens", "direction, GE, x", "direction, GE, y", "direction, GE, z"),
    *("direction, Philips, right to left", "direction, Philips, front to back"),
    "coil element, Siemens",
    *("phase of the heart", "Manufacturer", "PatientSex", "PatientPosition"),
    "PhotometricInterpretation",
    *("Dixon, Philips", "Dixon, Siemens", "component, GE", "EchoNumbers"),
    *("TemporalPositionIdentifier", "StudyDate", "AcquisitionDate", "SeriesDate", "ContentDate"),
    "AcquisitionDateTime",
    *("kernel", "thickness", "voltage, the nearest", "ScanningSequence", "SequenceVariant"),
    *("SequenceName", "RepetitionTime", "FilterType", "ReconstructionMethod"),
    *("ProtocolName", "SeriesNumber", "SeriesDescription", "Radiopharmaceutical"),
    *("procedure step", "ImageComments", "FrameComments"),
)
"""Attributes that slices of one volume may lack."""
INSTEAD_OF = {"AcquisitionDateTime": "AcquisitionDate"}
"""Attributes that are compared only if another one is missing."""

WHICH: dict[str, Callable[[int], bool]] = {
    "the first": lambda k: k == 0,
    "one inside": lambda k: k == 5,
    "the last two": lambda k: k >= COUNT - 2,
    "two inside": lambda k: k in (3, 8),
    "the upper half": lambda k: k >= COUNT // 2,
    "each second": lambda k: k % 2 == 1,
    "each third": lambda k: k % 3 == 2,
    "in pairs": lambda k: k // 2 % 2 == 1,
}
"""Predicates by name: whether slice k is of the other kind."""


@dataclass(frozen=True)
class Mixture:
    """A series with two kinds of slices.

    Parameters
    ----------
    attribute : str
        Key of `ATTRIBUTES`.
    which : str
        Key of `WHICH`.
    lacking : bool
        Whether the other kind lacks the attribute, rather than having another value.
    """

    attribute: str
    which: str
    lacking: bool

    @property
    def codes(self) -> tuple[str, ...]:
        """Allowed reason codes; adjacent pieces are never volumes."""
        if self.which not in ("each second", "each third", "in pairs"):
            return ("MIXED_SLICES",)
        return ("MIXED_SLICES", "PHASES")

    def write(self, folder: Path) -> list[Path]:
        """Write the series."""
        where, vr, ours, theirs = ATTRIBUTES[self.attribute]
        tag = Tag(where)
        has_second_value = WHICH[self.which]

        def edit(k: int, ds: Dataset) -> None:
            ds.pop(tag, None)
            ds.pop(INSTEAD_OF.get(self.attribute, tag), None)
            if not has_second_value(k):
                ds.add_new(tag, vr, ours)
            elif not self.lacking:
                ds.add_new(tag, vr, theirs)

        return two_kinds(folder, has_second_value, edit)


def write_private(folder: Path, attribute: str, creators: dict[int, str], block: int) -> None:
    """Write slices that alternate in a private attribute, in a block of any creator."""
    tag, vr, *each = ATTRIBUTES[attribute]
    group = Tag(tag) & 0xFFFF0000

    def edit(k: int, ds: Dataset) -> None:
        for reserved, creator in creators.items():
            ds.add_new(group | reserved, "LO", creator)
        ds.add_new(Tag(tag) & 0xFFFF00FF | block << 8, vr, each[k % 2])

    two_kinds(folder, lambda k: k % 2 == 1, edit)


def two_kinds(
    folder: Path,
    of_second_kind: Callable[[int], bool],
    edit: Callable[[int, Dataset], None],
    name: str = "mixed",
) -> list[Path]:
    """Write a series in which the voxels of each slice mark its kind."""
    stored = np.full((8, 6, COUNT), OURS)
    stored[:, :, [k for k in range(COUNT) if of_second_kind(k)]] = THEIRS

    def named(k: int, ds: Dataset) -> None:
        ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = uid(name, k)
        edit(k, ds)

    more = {"SOPClassUID": MR}
    return write_series(folder, stored, Geometry(), RAW, Words("MR", more=more), named)


def mixtures() -> Iterator[Mixture]:
    """Yield all mixtures that must be refused."""
    for attribute in ATTRIBUTES:
        for which in WHICH:
            yield Mixture(attribute, which, lacking=False)
            if attribute not in MAY_LACK:
                yield Mixture(attribute, which, lacking=True)
