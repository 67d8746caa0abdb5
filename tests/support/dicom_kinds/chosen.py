"""Kinds of which a volume has to be chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from pydicom import Dataset

from support.balls import BALL, LATE, LATER, around
from support.dicom_kinds.base import AXIAL, Kind, Maker, assign, phases, stack, stored, values
from support.dicom_kinds.enhanced import shuffled
from support.write_dicom import Words, uid, write_series
from support.write_multiframe import Frame, frames_of, write_enhanced, write_mosaic


def many(folder: Path) -> None:
    """Write three time points of two echoes each."""
    each = [
        {"TemporalPositionIdentifier": t, "EchoTime": e} for t in (1, 2, 10) for e in ("9", "30")
    ]
    phases(*each, balls=(BALL, LATE, LATER, BALL, LATE, LATER))(folder)


def unlike(*stacks: tuple[str, dict[str, Any]]) -> Maker:
    """Return a writer of stacks in several planes in one series."""

    def make(folder: Path) -> None:
        for n, ((name, attributes), ball) in enumerate(zip(stacks, (BALL, LATE), strict=True)):
            geometry = around(name)

            def edit(
                k: int, ds: Dataset, n: int = n, attributes: dict[str, Any] = attributes
            ) -> None:
                assign(ds, SOPInstanceUID=uid("stack", n, k), **attributes)

            paths = stack(folder / str(n), geometry, ball, edit)
            if n:  # stacks are ordered by size
                paths[0].unlink()

    return make


def enhanced_phases(
    contents: Sequence[dict[str, Any]],
    groups: Sequence[dict[str, dict[str, Any]]] = ({}, {}),
    names: Sequence[str] = ("axial", "axial"),
    files: bool = False,
    shift: float = 0,
) -> Maker:
    """Return a writer of two volumes in one enhanced object, or in one object each.

    The second is shifted by the fraction `shift` of the slice spacing.
    """

    def make(folder: Path) -> None:
        frames: list[Frame] = []
        for n, ball in enumerate((BALL, LATE)):
            geometry = around(names[n])
            geometry = replace(geometry, origin=tuple(geometry.position(n * shift)))
            samples = stored(geometry, ball)
            drop = n if names[0] != names[1] else 0  # stacks are ordered by size
            phase_frames = frames_of(samples, geometry, content=contents[n], groups=groups[n])[
                drop:
            ]
            if files:
                write_enhanced(folder / f"{n}.dcm", shuffled(phase_frames), number=n, shared=False)
            frames += phase_frames
        if not files:
            write_enhanced(folder / "object.dcm", shuffled(frames), shared=False)

    return make


def two_mosaics(folder: Path) -> None:
    for n, ball in enumerate((BALL, LATE), 1):
        write_mosaic(folder / f"{n}.dcm", stored(AXIAL, ball), AXIAL, number=n)


def in_series(folder: Path) -> None:
    for name, ball in (("one", BALL), ("two", LATE)):
        write_series(folder / name, stored(AXIAL, ball), AXIAL, words=Words(name=name))


def night(begin: int) -> dict[str, Any]:
    """Return the times of a pass, one slice per second; the first begins 30 s before 12:00."""

    def moment(k: int) -> datetime:
        return datetime(2025, 1, 2, 23, 59, 30) + timedelta(seconds=begin + k)

    return {
        "AcquisitionDate": lambda k: f"{moment(k):%Y%m%d}",
        "AcquisitionTime": lambda k: f"{moment(k):%H%M%S}",
        "InstanceNumber": lambda k: mixed(begin // 20)(k),
    }


def mixed(n: int) -> Callable[[int], int]:
    """Return slice numbers by which either phase may come first."""
    return lambda k: 2 * k + 1 + (n if k * k % 3 else 1 - n)


def private(group: int, creator: str, element: int, vr: str, *each: Any) -> Maker:
    """Return a writer of volumes that only a private element distinguishes."""

    def make(folder: Path) -> None:
        for n, (value, ball) in enumerate(zip(each, (BALL, LATE), strict=True)):

            def edit(k: int, ds: Dataset, n: int = n, value: Any = value) -> None:
                ds.private_block(group, creator, create=True).add_new(element, vr, value)
                ds.InstanceNumber = mixed(n)(k)
                assign(ds, SOPInstanceUID=uid("private", n, k))
                ds.file_meta.MediaStorageSOPInstanceUID = ds.SOPInstanceUID

            stack(folder / str(n), AXIAL, ball, edit)

    return make


B0: dict[str, Any] = {"DiffusionBValue": 0.0}
_TWO = (BALL, LATE)
PHASES = "PHASES"
CHOSEN: dict[str, Kind] = {
    "two series": Kind(in_series, "SERIES_AMBIGUOUS", _TWO),
    "all that tells two phases": Kind(
        phases(
            *(
                {
                    "AcquisitionNumber": n,
                    "TemporalPositionIdentifier": n,
                    "AcquisitionTime": f"10150{n * 3}",
                    "ContentTime": f"10150{n * 3}",
                }
                for n in (1, 2)
            )
        ),
        PHASES,
        _TWO,
    ),
    **{
        f"by {keyword}": Kind(values(keyword, *each), PHASES, _TWO)
        for keyword, each in {
            "AcquisitionNumber": (2, 10),
            "TemporalPositionIdentifier": (1, 2),
            "EchoNumbers": (1, 2),
            "EchoTime": ("4.6", "12"),
            "DiffusionBValue": (0.0, 1000.0),
            "DiffusionGradientOrientation": ([0.0, 0.6, 0.8], [1.0, 0.0, 0.0]),
            "TriggerTime": ("40", "300"),
            "AcquisitionTime": ("095900", "101500"),
            "ContentTime": ("095900.5", "095900.75"),
            "InstanceNumber": (lambda k: 1 + k, lambda k: 101 + k),
            "ImageType": (["ORIGINAL", "PRIMARY", "M"], ["ORIGINAL", "PRIMARY", "P"]),
        }.items()
    },
    **{
        f"by {keyword}, numbers in any order": Kind(
            phases(*({keyword: each[n], "InstanceNumber": mixed(n)} for n in (0, 1))),
            PHASES,
            _TWO,
        )
        for keyword, each in {
            "KVP": ("80", "140"),
            "ConvolutionKernel": ("B30f", "B70f"),
            "SliceThickness": ("3", "5"),
            "InversionTime": ("50", "400"),
            "FlipAngle": ("5", "26"),
            "SeriesNumber": (2, 11),
            "SeriesDescription": ("CT 0 %", "CT 50 %"),
            "ImageComments": ("0 %", "50 %"),
            "SequenceName": ("ep_b0", "ep_b1000"),
            "NominalPercentageOfCardiacPhase": (30.0, 70.0),
        }.items()
    },
    **{
        f"one within the other, by {keyword}": Kind(values(keyword, *each, shift=0.5), PHASES, _TWO)
        for keyword, each in {
            "ScanOptions": ("FAT", "WATER"),
            "SequenceName": ("ep_b0", "ep_b1000"),
            "RepetitionTime": ("500", "3000"),
            "ProtocolName": ("bone", "lung"),
            "FilterType": ("BOWTIE", "WEDGE"),
            "ConvolutionKernel": ("B30f", "B70f"),
            "KVP": ("80", "140"),
            "SeriesNumber": (2, 11),
            "SeriesDescription": ("CT 0 %", "CT 50 %"),
            "MagnetizationTransfer": (None, "OFF_RESONANCE"),
            "ImageComments": ("0 %", "50 %"),
            "DerivationDescription": ("fat", "water"),
            "PerformedProcedureStepID": ("1", "2"),
            "ImageType": (["DERIVED", "PRIMARY", "BONE"], ["DERIVED", "PRIMARY", "SOFT_TISSUE"]),
        }.items()
    },
    "passes over midnight": Kind(phases(*map(night, (0, 20))), PHASES, _TWO),
    **{
        f"enhanced, {way} by {keyword}": Kind(
            enhanced_phases([{}, {}], [{group: {keyword: value}} for value in each], shift=shift),
            PHASES,
            _TWO,
        )
        for way, shift in (("both", 0.0), ("one within the other", 0.5))
        for group, keyword, *each in (
            ("CTReconstructionSequence", "ConvolutionKernel", "B30f", "B70f"),
            ("CTXRayDetailsSequence", "KVP", 80.0, 140.0),
            ("CardiacSynchronizationSequence", "NominalPercentageOfCardiacPhase", 30.0, 70.0),
            ("MRArterialSpinLabelingSequence", "ASLContext", "CONTROL", "LABEL"),
        )
    },
    **{
        f"by the b-value of {name}": Kind(private(*private_element), PHASES, _TWO)
        for name, private_element in {
            "Siemens": (0x19, "SIEMENS MR HEADER", 0x0C, "IS", "50", "1000"),
            "GE": (0x43, "GEMS_PARM_01", 0x39, "IS", ["50", "8"], ["1000", "8"]),
            "Philips": (0x2001, "Philips Imaging DD 001", 0x03, "FL", 0.0, 800.0),
        }.items()
    },
    "kernels and times": Kind(
        phases(
            *(
                {"ConvolutionKernel": kernel, "ContentTime": time}
                for kernel in ("B30f", "B70f")
                for time in ("101500", "101600")
            ),
            balls=(BALL, LATE, LATER, BALL),
        ),
        PHASES,
        (BALL, LATE, LATER, BALL),
    ),
    "by times that no two slices share": Kind(
        phases(
            {"ContentTime": lambda k: f"1015{k:02d}", "InstanceNumber": 1},
            {"ContentTime": lambda k: f"1016{k:02d}", "InstanceNumber": 1},
        ),
        PHASES,
        _TWO,
    ),
    **{
        f"one unevenly within the other, by {keyword}": Kind(
            values(keyword, *each, shift=0.4), PHASES, _TWO
        )
        for keyword, each in {
            "AcquisitionNumber": (1, 2),
            "AcquisitionTime": ("101500", "101512"),
            "ImageComments": ("0 %", "50 %"),
            "MagnetizationTransfer": ("NONE", "OFF_RESONANCE"),
        }.items()
    },
    "echoes one within the other": Kind(values("EchoTime", "4", "9", shift=0.5), PHASES, _TWO),
    "three within each other": Kind(
        values("AcquisitionNumber", 1, 2, 3, balls=(BALL, LATE, LATER), shift=0.1),
        PHASES,
        (BALL, LATE, LATER),
    ),
    "phases that cover other parts": Kind(values("AcquisitionNumber", 1, 2, shift=2), PHASES, _TWO),
    "times and echoes": Kind(many, PHASES, (BALL, LATE, LATER, BALL, LATE, LATER)),
    "time point missing in half": Kind(
        phases(
            {"TemporalPositionIdentifier": lambda k: 1 if k % 2 else None},
            {"TemporalPositionIdentifier": lambda k: None if k % 2 else 2},
        ),
        PHASES,
        _TWO,
    ),
    "time point missing in one phase": Kind(
        values("TemporalPositionIdentifier", None, 2), PHASES, _TWO
    ),
    "two frames of reference": Kind(
        unlike(("axial", {}), ("axial", {"FrameOfReferenceUID": uid("another")})), PHASES, _TWO
    ),
    "two stacks": Kind(unlike(("axial", {}), ("coronal", {})), PHASES, _TWO),
    "two stacks, slightly turned": Kind(unlike(("axial", {}), ("oblique", {})), PHASES, _TWO),
    "enhanced, two times": Kind(
        enhanced_phases([{"TemporalPositionIndex": n} for n in (1, 2)]), PHASES, _TWO
    ),
    "enhanced, two times in two objects": Kind(
        enhanced_phases([{"TemporalPositionIndex": n} for n in (1, 2)], files=True), PHASES, _TWO
    ),
    "enhanced, two objects and no word": Kind(enhanced_phases([{}, {}], files=True), PHASES, _TWO),
    "enhanced, two stacks": Kind(
        enhanced_phases([{}, {}], names=("axial", "sagittal")), PHASES, _TWO
    ),
    "enhanced, two echoes": Kind(
        enhanced_phases(
            [{}, {}], [{"MREchoSequence": {"EffectiveEchoTime": t}} for t in (4.6, 12.0)]
        ),
        PHASES,
        _TWO,
    ),
    "enhanced, two b-values": Kind(
        enhanced_phases(
            [{}, {}], [{"MRDiffusionSequence": {"DiffusionBValue": b}} for b in (0.0, 1000.0)]
        ),
        PHASES,
        _TWO,
    ),
    "mosaics": Kind(two_mosaics, PHASES, _TWO),
}
