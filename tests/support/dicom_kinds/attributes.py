"""Series whose slices differ in one attribute, with the meaning of each difference.

The values are drawn anew by a seed. The voxels of a slice mark which of the two values it has, so
that a volume of both is seen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset

from support.write_dicom import MR, PLANES, Coding, Geometry, Words, plane, uid, write_series
from support.write_multiframe import Frame, write_enhanced

OURS, THEIRS = 1000, 2000
"""Voxel values of the slices with either value."""
MEANING, RECORDED, VARIES = "never mixed", "flagged", "ignored"


MULTI_ENERGY = (
    *("VMI", "MAT_SPECIFIC", "MAT_REMOVED", "MAT_FRACTIONAL", "MAT_VALUE_BASED", "MAT_MODIFIED"),
    *("ELECTRON_DENSITY", "EFF_ATOMIC_NUM"),
)
"""Words for the results of several X-ray energies (PS3.3 C.8.15.3.1.1)."""


@dataclass(frozen=True)
class Truth:
    """The meaning of a difference in an attribute.

    Parameters
    ----------
    rule : str
        `MEANING`, `RECORDED` or `VARIES`.
    tag : str or int
        Keyword or tag.
    vr : str
    unlike : tuple
        Values that mean different things, each to each.
    alike : tuple
        Values that mean the same; empty if there is a single notation.
    """

    rule: str
    tag: str | int
    vr: str
    unlike: tuple[Any, ...]
    alike: tuple[Any, ...] = ()


def _image(*values: str) -> list[str]:
    return ["ORIGINAL", "PRIMARY", *values]


def _texts(keyword: str, *each: str, vr: str = "LO") -> Truth:
    alike = (each[0], each[0].lower(), each[0].upper() + " ")
    return Truth(MEANING, keyword, vr, each, alike)


def _codes(keyword: str, *each: str) -> Truth:
    return Truth(MEANING, keyword, "CS", each, (each[0], each[0] + " "))


def _decimals(keyword: str, *each: str, alike: tuple[str, ...] = ()) -> Truth:
    return Truth(MEANING, keyword, "DS", each, (each[0], f"{float(each[0]):.3f}", *alike))


def _doubles(keyword: str | int, *each: Any, vr: str = "FD") -> Truth:
    return Truth(MEANING, keyword, vr, each)


def _natural(keyword: str, vr: str, *each: Any) -> Truth:
    return Truth(VARIES, keyword, vr, each)


DIRECTIONS = ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.6, 0.8])
DAYS = ("20190401", "20190601", "20240229", "20211231")
YEARS = ("20150401", "20190601", "20240229")
TRUTHS: dict[str, Truth] = {
    "TemporalPositionIdentifier": Truth(
        MEANING, "TemporalPositionIdentifier", "IS", ("1", "2", "10"), ("1", "01")
    ),
    "EchoNumbers": Truth(MEANING, "EchoNumbers", "IS", ("1", "2", "3")),
    "EchoTime": _decimals("EchoTime", "4.6", "9.2", "30", "110", alike=("4.61", "4.65")),
    "DiffusionBValue": _doubles("DiffusionBValue", 0.0, 50.0, 400.0, 1000.0),
    "DiffusionGradientOrientation": _doubles("DiffusionGradientOrientation", *DIRECTIONS),
    "AcquisitionNumber": _natural("AcquisitionNumber", "IS", "1", "2", "7"),
    "ImageType": Truth(
        MEANING,
        "ImageType",
        "CS",
        tuple(
            _image(*type_values)
            for type_values in (("M", "ND"), ("P", "ND"), ("ADC",), ("WATER",), ("FAT",), ("MPR",))
        ),
        (_image("AXIAL", "M", "NORM"), _image("AXIAL", "NORM", "M"), _image("NORM", "M")),
    ),
    "KVP": _decimals("KVP", "80", "100", "120", "140", alike=("80.4",)),
    "ConvolutionKernel": Truth(
        MEANING,
        "ConvolutionKernel",
        "SH",
        ("B30f", "B70f", "SOFT TISSUE", "BONE", ["Br40d", "3"]),
        ("SOFT TISSUE", "SOFT_TISSUE", "soft tissue"),
    ),
    "SliceThickness": _decimals("SliceThickness", "0.62", "1", "3", "5", alike=("0.63", "0.6")),
    "InversionTime": _decimals("InversionTime", "50", "150", "900", "2500", alike=("50.5",)),
    "FlipAngle": _decimals("FlipAngle", "5", "15", "26", "90", alike=("5.1",)),
    "private b-value": Truth(MEANING, 0x0019100C, "IS", ("50", "400", "1000")),
    "ScanningSequence": Truth(
        MEANING,
        "ScanningSequence",
        "CS",
        ("SE", "GR", "EP", ["SE", "IR"]),
        (["SE", "IR"], ["IR", "SE"]),
    ),
    "SequenceVariant": Truth(
        MEANING, "SequenceVariant", "CS", ("SK", ["SK", "MTC"], "SS"), (["SK", "SP"], ["SP", "SK"])
    ),
    "ScanOptions": Truth(
        MEANING,
        "ScanOptions",
        "CS",
        ("FS", "PFP", ["FS", "PFP"], "WATER", None),
        (["FS", "PFP"], ["PFP", "FS"]),
    ),
    "SequenceName": Truth(
        MEANING,
        "SequenceName",
        "SH",
        ("*tse2d1_5", "*tir2d1_5", "*ep_b50t", "*ep_b800t"),
        ("*tse2d1_5", "*tse2d1_7", "*TSE2D1_5"),
    ),
    "RepetitionTime": _decimals("RepetitionTime", "500", "1500", "3000", alike=("510", "560")),
    "FilterType": _texts("FilterType", "BODY FILTER", "WEDGE", "FLAT", vr="SH"),
    "Units": _codes("Units", "BQML", "CNTS", "GML"),
    "CorrectedImage": Truth(
        MEANING,
        "CorrectedImage",
        "CS",
        ("DECY", ["DECY", "ATTN"], ["DECY", "ATTN", "SCAT"]),
        (["DECY", "ATTN"], ["ATTN", "DECY"]),
    ),
    "ReconstructionMethod": _texts("ReconstructionMethod", "OSEM 3i21s", "FBP", "PSF+TOF 2i21s"),
    "ProtocolName": _texts("ProtocolName", "bone", "lung", "Abdomen 5.0"),
    "SeriesNumber": Truth(MEANING, "SeriesNumber", "IS", ("2", "3", "11"), ("2", "02")),
    "SeriesDescription": _texts("SeriesDescription", "CT 0 %", "CT 50 %", "lung"),
    "ContrastBolusAgent": Truth(
        MEANING, "ContrastBolusAgent", "LO", ("NONIONIC", "NONE"), ("Omnipaque 350", "OMNIPAQUE")
    ),
    "TriggerTime": _natural("TriggerTime", "DS", "12", "350", "700"),
    "AcquisitionTime": Truth(
        RECORDED,
        "AcquisitionTime",
        "TM",
        ("090000", "101500", "153000.5"),
        ("101500", "101512.25", "101745"),
    ),
    "ContentTime": _natural("ContentTime", "TM", "090000", "101500", "153000.5"),
    "InstanceNumber": _natural("InstanceNumber", "IS", "1", "2", "700"),
    "Modality": _codes("Modality", "MR", "CT", "PT"),
    "Manufacturer": _texts("Manufacturer", "One", "Another", "A third"),
    "PatientSex": _codes("PatientSex", "F", "M"),
    "PatientPosition": _codes("PatientPosition", "HFS", "FFS", "HFP"),
    "PhotometricInterpretation": _codes("PhotometricInterpretation", "MONOCHROME2", "MONOCHROME1"),
    "private image type": Truth(
        MEANING,
        0x00511016,
        "LO",
        ("p2 W/ND/NORM", "p2 F/ND/NORM", "p2 M/ND/NORM"),
        ("p2 W/ND/NORM", "p3 NORM/W/ND"),
    ),
    "private image component": Truth(MEANING, 0x0043102F, "SS", (0, 1, 2, 3)),
    "ComplexImageComponent": _codes("ComplexImageComponent", "MAGNITUDE", "PHASE", "REAL"),
    "AcquisitionContrast": _codes("AcquisitionContrast", "T1", "T2", "DIFFUSION"),
    "DerivationDescription": Truth(
        MEANING,
        "DerivationDescription",
        "ST",
        ("water", "fat", "ADC of b 50, 400, 800", None),
        (
            "Lossless JPEG compression, ratio 2.05",
            "Lossless JPEG compression, ratio 2.13",
            "JPEG 2000 lossy 10:1",
            None,
        ),
    ),
    "MagnetizationTransfer": Truth(
        MEANING,
        "MagnetizationTransfer",
        "CS",
        ("NONE", "ON_RESONANCE", "OFF_RESONANCE"),
        ("NONE", None),
    ),
    "SpectrallySelectedSuppression": Truth(
        MEANING,
        "SpectrallySelectedSuppression",
        "CS",
        ("NONE", "FAT", "WATER", "FAT_AND_WATER"),
        ("NONE", None),
    ),
    "ASLContext": _codes("ASLContext", "LABEL", "CONTROL", "M_ZERO_SCAN"),
    "SUVType": _codes("SUVType", "BW", "LBM", "BSA"),
    "DecayCorrection": _codes("DecayCorrection", "START", "NONE", "ADMIN"),
    "AttenuationCorrectionMethod": _texts("AttenuationCorrectionMethod", "CT-derived", "none"),
    "ScatterCorrectionMethod": _texts("ScatterCorrectionMethod", "Model-based", "none"),
    "RandomsCorrectionMethod": _codes("RandomsCorrectionMethod", "DLYD", "SING", "NONE"),
    "Radiopharmaceutical": _texts("Radiopharmaceutical", "FDG", "PSMA-11", "DOTATOC"),
    "private diffusion direction (Siemens)": _doubles(0x0019100E, *DIRECTIONS),
    **{
        f"private diffusion direction (GE, {which})": Truth(
            MEANING, tag, "DS", ("0.5", "-0.7", "0"), ("0.5", "0.5000")
        )
        for which, tag in (("first", 0x001910BB), ("second", 0x001910BC), ("third", 0x001910BD))
    },
    **{
        f"private diffusion direction (Philips, {axis})": _doubles(tag, 0.5, -0.7, 0.25, vr="FL")
        for axis, tag in (("RL", 0x200510B0), ("AP", 0x200510B1))
    },
    "ReceiveCoilName": _texts("ReceiveCoilName", "H1", "H2", "Body", vr="SH"),
    "private coil element": Truth(MEANING, 0x0051100F, "LO", ("H1", "H2", "T:HEA;HEP")),
    "NominalPercentageOfCardiacPhase": _doubles(
        "NominalPercentageOfCardiacPhase", 30.0, 70.0, 45.0
    ),
    "PerformedProcedureStepID": _texts("PerformedProcedureStepID", "A1", "A2", "77", vr="SH"),
    "StudyDate": Truth(MEANING, "StudyDate", "DA", DAYS, ("20190401", "20190402")),
    "AcquisitionDate": Truth(MEANING, "AcquisitionDate", "DA", DAYS, ("20190401", "20190402")),
    "SeriesDate": Truth(MEANING, "SeriesDate", "DA", YEARS, ("20190401", "20190701")),
    "ContentDate": Truth(MEANING, "ContentDate", "DA", YEARS, ("20190401", "20190701")),
    "ImageType, other words": Truth(
        RECORDED,
        "ImageType",
        "CS",
        (
            _image("M", "ND"),
            _image("M", "DIS2D"),
            ["DERIVED", "PRIMARY", "M", "ND"],
            _image("M", "ND", "X17"),
        ),
        (_image("M", "ND", "X17"), _image("X17", "M", "ND"), _image("AXIAL", "ND", "M", "X17")),
    ),
    "ImageComments": _texts("ImageComments", "0 %", "50 %", "pre", vr="LT"),
    "ReconstructionDiameter": Truth(
        RECORDED, "ReconstructionDiameter", "DS", ("250", "350", "500"), ("250", "250.00", "251")
    ),
    "PixelPaddingValue": Truth(RECORDED, "PixelPaddingValue", "SS", (0, 63, 5000)),
    "PixelPaddingRangeLimit": Truth(RECORDED, "PixelPaddingRangeLimit", "SS", (0, 63, 5000)),
    "PixelRepresentation": Truth(RECORDED, "PixelRepresentation", "US", (0, 1)),
    "SliceLocation": _natural("SliceLocation", "DS", "-20", "7.5", "300"),
    "TableHeight": _natural("TableHeight", "DS", "150", "151.5"),
    "RescaleSlope": _natural("RescaleSlope", "DS", "1", "1"),
    "RescaleIntercept": _natural("RescaleIntercept", "DS", "0", "0"),
    "WindowCenter": _natural("WindowCenter", "DS", "40", "60.5", "300"),
    "WindowWidth": _natural("WindowWidth", "DS", "400", "401", "2000"),
    "XRayTubeCurrent": _natural("XRayTubeCurrent", "IS", "100", "245", "400"),
    "Exposure": _natural("Exposure", "IS", "50", "125", "400"),
    "ExposureTime": _natural("ExposureTime", "IS", "500", "600", "1000"),
    "BodyPartExamined": _natural("BodyPartExamined", "CS", "CHEST", "ABDOMEN", "NECK"),
    "NominalInterval": _natural("NominalInterval", "IS", "800", "910"),
    "HeartRate": _natural("HeartRate", "IS", "60", "75"),
    "FrameReferenceTime": _natural("FrameReferenceTime", "DS", "0", "120000"),
    "ActualFrameDuration": _natural("ActualFrameDuration", "IS", "120000", "180000"),
    "DecayFactor": _natural("DecayFactor", "DS", "1.01", "1.17"),
}
"""Truth by the table's name of an attribute, in files of one frame."""
IN_FRAMES: dict[str, tuple[str, str, tuple[Any, ...], str]] = {
    "EchoTime": ("MREchoSequence", "EffectiveEchoTime", (4.6, 9.2, 30.0), MEANING),
    "DiffusionBValue": ("MRDiffusionSequence", "DiffusionBValue", (0.0, 50.0, 1000.0), MEANING),
    "InversionTime": ("MRModifierSequence", "InversionTimes", (50.0, 150.0, 900.0), MEANING),
    "SpectrallySelectedSuppression": (
        "MRModifierSequence",
        "SpectrallySelectedSuppression",
        ("NONE", "FAT", "WATER"),
        MEANING,
    ),
    "MagnetizationTransfer": (
        "MRImagingModifierSequence",
        "MagnetizationTransfer",
        ("NONE", "ON_RESONANCE", "OFF_RESONANCE"),
        MEANING,
    ),
    "FlipAngle": ("MRTimingAndRelatedParametersSequence", "FlipAngle", ("5", "26"), MEANING),
    "RepetitionTime": (
        "MRTimingAndRelatedParametersSequence",
        "RepetitionTime",
        ("500", "3000"),
        MEANING,
    ),
    "ASLContext": ("MRArterialSpinLabelingSequence", "ASLContext", ("LABEL", "CONTROL"), MEANING),
    "ComplexImageComponent": (
        "MRImageFrameTypeSequence",
        "ComplexImageComponent",
        ("MAGNITUDE", "PHASE", "REAL"),
        MEANING,
    ),
    "ImageType": (
        "MRImageFrameTypeSequence",
        "FrameType",
        (
            *(_image("VOLUME", flavor) for flavor in ("ADC", "NONE", "T2_STAR")),
            *(["DERIVED", "PRIMARY", "VOLUME", flavor] for flavor in MULTI_ENERGY),
        ),
        MEANING,
    ),
    "ImageType, other words": (
        "MRImageFrameTypeSequence",
        "FrameType",
        (_image("VOLUME", "X17"), ["DERIVED", "PRIMARY", "VOLUME", "X17"]),
        RECORDED,
    ),
    "VolumeBasedCalculationTechnique": (
        "MRImageFrameTypeSequence",
        "VolumeBasedCalculationTechnique",
        ("NONE", "MPR"),
        MEANING,
    ),
    "ContrastBolusAgentAdministered": (
        "ContrastBolusUsageSequence",
        "ContrastBolusAgentAdministered",
        ("YES", "NO"),
        MEANING,
    ),
    "ReceiveCoilName": ("MRReceiveCoilSequence", "ReceiveCoilName", ("H1", "H2"), MEANING),
    "KVP": ("CTXRayDetailsSequence", "KVP", (100.0, 120.0, 140.0), MEANING),
    "FilterType": ("CTXRayDetailsSequence", "FilterType", ("WEDGE", "FLAT"), MEANING),
    "ConvolutionKernel": (
        "CTReconstructionSequence",
        "ConvolutionKernel",
        ("B30f", "B70f", "BONE"),
        MEANING,
    ),
    "ReconstructionDiameter": (
        "CTReconstructionSequence",
        "ReconstructionDiameter",
        ("250", "500"),
        RECORDED,
    ),
    "NominalPercentageOfCardiacPhase": (
        "CardiacSynchronizationSequence",
        "NominalPercentageOfCardiacPhase",
        (30.0, 70.0),
        MEANING,
    ),
    "TemporalPositionTimeOffset": (
        "TemporalPositionSequence",
        "TemporalPositionTimeOffset",
        (0.0, 12.5),
        VARIES,
    ),
    "TemporalPositionIdentifier": ("", "TemporalPositionIndex", (1, 2, 3), MEANING),
    "StackID": ("", "StackID", ("1", "2"), RECORDED),
    "AcquisitionNumber": ("", "FrameAcquisitionNumber", (1, 2, 7), VARIES),
    "AcquisitionTime": (
        "",
        "FrameAcquisitionDateTime",
        ("20250102090000", "20250102101500", "20250102153000"),
        RECORDED,
    ),
    "ImageComments": ("", "FrameComments", ("0 %", "50 %"), MEANING),
    "DimensionIndexValues": ("", "DimensionIndexValues", ([1], [2]), VARIES),
}
"""For enhanced objects: functional group (the content group if empty), keyword, values and rule."""
PATTERNS = ("halves", "alternating", "one slice", "harmless")


@dataclass(frozen=True, eq=False)
class Drawing:
    """A series of which some slices have another value of an attribute."""

    seed: int
    pattern: str

    @property
    def random(self) -> random.Random:
        """Random numbers that depend on the seed and the pattern only."""
        return random.Random(f"{self.seed} {self.pattern}")

    @property
    def geometry(self) -> Geometry:
        """Plane and slice distance."""
        dice = self.random
        name = dice.choice(sorted(PLANES))
        return plane(name, spacing=(0.8, 0.7), step=round(dice.uniform(0.7, 6), 2))

    def differing(self) -> list[bool]:
        """Whether each slice has the other value."""
        dice = self.random
        count = 2 * dice.randint(6, 12)
        if self.pattern == "halves":
            begin = dice.randint(count // 3, 2 * count // 3)
            return [k >= begin for k in range(count)]
        if self.pattern == "one slice":
            single = dice.randrange(count)
            return [k == single for k in range(count)]
        return [k % 2 == 1 for k in range(count)]

    def stored(self) -> NDArray[np.int64]:
        """Samples (I, J, K) that mark the value of each slice."""
        differing = np.array(self.differing())
        return np.where(differing, THEIRS, OURS) * np.ones((8, 6, 1), np.int64)

    def pair(self, truth: Truth) -> tuple[Any, Any]:
        """Return the two values."""
        pool = truth.alike if self.pattern == "harmless" else truth.unlike
        first, second = self.random.sample(range(len(pool)), 2)
        return pool[first], pool[second]

    def write(self, folder: Path, truth: Truth) -> None:
        """Write files of one frame each."""
        differing, pair = self.differing(), self.pair(truth)

        def edit(k: int, ds: Dataset) -> None:
            ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = uid(self.seed, k)
            ds.pop(truth.tag, None)
            value = pair[differing[k]]
            if value is not None:
                ds.add_new(truth.tag, truth.vr, value)

        attributes = Words("MR", more={"SOPClassUID": MR, "ImageType": _image("M")})
        write_series(folder, self.stored(), self.geometry, Coding(intercept="0"), attributes, edit)

    def write_frames(self, folder: Path, location: tuple[str, str, tuple[Any, ...], str]) -> None:
        """Write one enhanced object."""
        group, keyword, values, _ = location
        pair = self.random.sample(values, 2)
        samples = self.stored()
        frames = []
        for k, differs in enumerate(self.differing()):
            own = {keyword: pair[differs]}
            content, groups = (own, {}) if not group else ({}, {group: own})
            frames.append(Frame(samples[:, :, k], self.geometry, k, content, groups, intercept="0"))
        self.random.shuffle(frames)
        write_enhanced(folder / "object.dcm", frames, Words("MR"), _dimensions, shared=False)


def _dimensions(ds: Dataset) -> None:
    """Declare the first dimension, which is not of space."""
    pointer = Dataset()
    pointer.DimensionIndexPointer = 0x00209128
    ds.DimensionIndexSequence = [pointer]
