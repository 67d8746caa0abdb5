"""Kinds that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pydicom import Dataset, dcmread, dcmwrite
from pydicom.encaps import encapsulate

from support.balls import LATE, SHAPE, STEP
from support.dicom_kinds.base import (
    AXIAL,
    COUNT,
    MIDDLE,
    Kind,
    Maker,
    assign,
    changed,
    every,
    one_slice,
    phases,
    stack,
    values,
)
from support.dicom_kinds.chosen import PHASES, mixed
from support.dicom_kinds.enhanced import (
    a_part_twice,
    doubled_frame,
    dropped,
    enhanced,
    first_part_without_total,
    in_parts,
    last_part_lost,
    lost_frames,
    mosaic,
    nuclear,
    one_group_less,
)
from support.dicom_kinds.single import READ
from support.write_dicom import uid
from support.write_multiframe import item


def without(*lost: int) -> Maker:
    """Return a writer of a series with missing slices."""

    def make(folder: Path) -> None:
        paths = stack(folder)
        for k in lost:
            paths[k].unlink()

    return make


def halves(keyword: str, *each: Any, below: int = COUNT // 2) -> Maker:
    """Return a writer of slices of two volumes, no two at the same position."""
    return changed(lambda k, ds: assign(ds, **{keyword: each[k >= below]}), Modality="MR")


def a_phase_lacks_a_slice(folder: Path) -> None:
    values("AcquisitionNumber", 1, 2)(folder)
    for path in sorted((folder / "0").glob("*.dcm")):
        if dcmread(path, stop_before_pixels=True).InstanceNumber == 1 + MIDDLE:
            path.unlink()


def other_spacing_above(k: int, ds: Dataset) -> None:
    depth = k * STEP if k < 10 else 10 * STEP + (k - 10) * 1.6 * STEP
    x, y, z = AXIAL.position(0)
    ds.ImagePositionPatient = [f"{v:.6f}" for v in (x, y, z + depth)]


def contradicting(folder: Path) -> None:
    paths = stack(folder)
    for n, k in enumerate((8, 9, 10)):
        duplicate = dcmread(paths[k])
        duplicate.SOPInstanceUID = duplicate.file_meta.MediaStorageSOPInstanceUID = uid("other", n)
        duplicate.InstanceNumber = 90 + n
        duplicate.PixelData = bytes(len(duplicate.PixelData))
        dcmwrite(folder / f"other {n}.dcm", duplicate)


def cut(share: float) -> Maker:
    """Return a writer of a series with one truncated file."""

    def make(folder: Path) -> None:
        path = stack(folder)[MIDDLE]
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])

    return make


VIDEO = "1.2.840.10008.1.2.4.102"  # MPEG-4


def video(k: int, ds: Dataset) -> None:
    ds.PixelData = encapsulate([ds.PixelData])
    ds["PixelData"].VR, ds["PixelData"].is_undefined_length = "OB", True
    ds.file_meta.TransferSyntaxUID = VIDEO


def two_patients(k: int, ds: Dataset) -> None:
    """Assign the slices above the middle to another patient, with the same UIDs."""
    ds.PatientID = "above" if k >= MIDDLE else "below"


def two_names(k: int, ds: Dataset) -> None:
    """Assign half of the slices to another name, in another character set."""
    ds.SpecificCharacterSet = "ISO_IR 192" if k >= MIDDLE else "ISO_IR 100"
    ds.PatientID, ds.PatientName = "12", "Möller^Jörg" if k >= MIDDLE else "Müller^Jörg"


def unknown_representation(folder: Path) -> None:
    """Write names in two character sets with a value representation that DICOM does not define."""
    for path in stack(folder, edit=two_names):
        path.write_bytes(path.read_bytes().replace(b"\x10\0\x10\0PN", b"\x10\0\x10\0P1", 1))


def two_slices(folder: Path) -> None:
    for path in stack(folder)[2:]:
        path.unlink()


def sideways(k: int, ds: Dataset) -> None:
    x, y, z = map(float, ds.ImagePositionPatient)
    ds.ImagePositionPatient = [x + 0.4 * (k % 2), y, z]


def in_unit(factor: float) -> Callable[[int, Dataset], None]:
    """Return an edit that multiplies all lengths."""

    def edit(k: int, ds: Dataset) -> None:
        for keyword in ("ImagePositionPatient", "PixelSpacing"):
            assign(ds, **{keyword: [f"{factor * float(v):.6g}" for v in ds[keyword].value]})

    return edit


def comma(folder: Path) -> None:
    path = stack(folder, edit=lambda k, ds: assign(ds, ImagePositionPatient=_spoiled("3.50")))[3]
    path.write_bytes(path.read_bytes().replace(b"\\3.50", b"\\3,50"))


def _spoiled(number: str) -> list[str]:
    x, y, _ = (f"{v:.6f}" for v in AXIAL.position(MIDDLE))
    return [x, y, number]


def frames_unlike(keyword: str, inner: str, *each: Any, begin: int = COUNT // 2) -> Maker:
    """Return a writer of an enhanced object whose later frames have other attributes."""

    def edit(ds: Dataset) -> None:
        for group in ds.PerFrameFunctionalGroupsSequence:
            z = float(group.PlanePositionSequence[0].ImagePositionPatient[2])
            value = each[z >= float(AXIAL.position(begin)[2]) - 0.1]
            setattr(group, keyword, [item(**({} if value is None else {inner: value}))])

    return enhanced(edit=edit, modality="MR")


def pepolar(user: str | None) -> Maker:
    """Return a writer of a series from GE's epi_pepolar sequence."""

    def edit(k: int, ds: Dataset) -> None:
        block = ds.private_block(0x19, "GEMS_ACQU_01", create=True)
        block.add_new(0x9C, "LO", "epi_pepolar")
        if user is not None:
            block.add_new(0xB3, "DS", user)

    return changed(edit, Modality="MR")


READ["GE's epi_pepolar, forward"] = Kind(pepolar("0.000000"))


def second_item(keyword: str, attributes: dict[str, Any]) -> Callable[[Dataset], None]:
    """Return an edit that adds a second item to the shared groups, with other values."""

    def edit(ds: Dataset) -> None:
        [shared] = ds.SharedFunctionalGroupsSequence
        shared.MREchoSequence = [item(EffectiveEchoTime=4.6)]
        ds.SharedFunctionalGroupsSequence = [shared, item(**{keyword: [item(**attributes)]})]

    return edit


def in_frames_too(keyword: str, attributes: dict[str, Any]) -> Callable[[Dataset], None]:
    """Return an edit that repeats a shared functional group in each frame, with other values."""

    def edit(ds: Dataset) -> None:
        for group in ds.PerFrameFunctionalGroupsSequence:
            setattr(group, keyword, [item(**attributes)])

    return edit


def shared_slope(ds: Dataset) -> None:
    """Add a shared transformation of the values that is not that of the frames."""
    values = item(RescaleSlope="2", RescaleIntercept="0", RescaleType="HU")
    ds.SharedFunctionalGroupsSequence[0].PixelValueTransformationSequence = [values]


def one_of_two_frames(folder: Path) -> None:
    """Write a slice whose file holds a second frame, although its class has one."""
    path = stack(folder)[MIDDLE]
    ds = dcmread(path)
    ds.NumberOfFrames, ds.PixelData = 2, 2 * ds.PixelData
    dcmwrite(path, ds)


def slightly_turned(k: int, ds: Dataset) -> None:
    turn = (k % 3) * 1.5e-4
    ds.ImageOrientationPatient = ["1", f"{turn:.6f}", "0", f"{-turn:.6f}", "1", "0"]


def cut_in_the_header(folder: Path) -> None:
    path = stack(folder)[MIDDLE]
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"\x28\0\x10\0US")])


REFUSED: dict[str, Kind] = {
    "directions that nearly agree": Kind(changed(slightly_turned), "SLICE_ORIENTATION"),
    "cut before its rows": Kind(cut_in_the_header, "TRUNCATED"),
    **{
        f"enhanced, {inner} {extent}": Kind(
            frames_unlike(group, inner, *each, begin=begin), code, ()
        )
        for group, inner, *each in (
            ("MREchoSequence", "EffectiveEchoTime", 4.6, 12.0),
            ("MRDiffusionSequence", "DiffusionBValue", 0.0, 1000.0),
            ("MRModifierSequence", "InversionTimes", 50.0, 400.0),
            ("MRTimingAndRelatedParametersSequence", "FlipAngle", "5", "26"),
            ("MRImageFrameTypeSequence", "ComplexImageComponent", "MAGNITUDE", "PHASE"),
            ("MRReceiveCoilSequence", "ReceiveCoilName", "H1", "H2"),
        )
        for extent, begin, code in (
            ("of half of the frames", COUNT // 2, "MIXED_SLICES"),
            ("of two frames", COUNT - 2, "MIXED_SLICES"),
        )
    },
    "enhanced, some frames without an echo time": Kind(
        frames_unlike("MREchoSequence", "EffectiveEchoTime", 4.6, None), "MIXED_SLICES"
    ),
    **{
        f"GE's epi_pepolar, {user}": Kind(pepolar(user), "REVERSED_ROWS")
        for user in ("1", "2.000000", "3", None)
    },
    "a slice is missing": Kind(
        without(MIDDLE), "SLICE_GAP", options={"gaps": "interpolate"}, flags=("GAPS_INTERPOLATED",)
    ),
    "two slices are missing": Kind(
        without(3, MIDDLE),
        "SLICE_GAP",
        options={"gaps": "interpolate"},
        flags=("GAPS_INTERPOLATED",),
    ),
    "a phase lacks a slice": Kind(a_phase_lacks_a_slice, PHASES, (LATE,), options={"phase": 1}),
    **{
        f"half a volume each, by {keyword}": Kind(halves(keyword, *each), "MIXED_SLICES")
        for keyword, each in {
            "EchoTime": ("4.6", "30"),
            "DiffusionBValue": (0.0, 1000.0),
            "ImageType": (["ORIGINAL", "PRIMARY", "M"], ["ORIGINAL", "PRIMARY", "P"]),
        }.items()
    },
    "half of one tracer, half of another": Kind(
        changed(
            lambda k, ds: assign(
                ds,
                Modality="PT",
                RadiopharmaceuticalInformationSequence=[
                    item(Radiopharmaceutical="PSMA-11" if k >= MIDDLE else "FDG")
                ],
            )
        ),
        "MIXED_SLICES",
    ),
    "half CT, half MR": Kind(
        changed(lambda k, ds: assign(ds, Modality="MR" if k // 2 % 2 else "CT")), "MIXED_SLICES"
    ),
    "half in becquerel, half in counts": Kind(halves("Units", "BQML", "CNTS"), "MIXED_SLICES"),
    "half of it corrected for attenuation": Kind(
        halves("CorrectedImage", ["DECY", "ATTN"], ["DECY"]), "MIXED_SLICES"
    ),
    "the upper slices are PET": Kind(
        halves("Modality", "CT", "PT", below=COUNT - 3), "MIXED_SLICES"
    ),
    "a slice of another echo": Kind(
        halves("EchoTime", "4.6", "30", below=COUNT - 1), "MIXED_SLICES"
    ),
    "slice by slice": Kind(
        phases({"InstanceNumber": lambda k: 2 * k + 1}, {"InstanceNumber": lambda k: 2 * k + 2}),
        "DUPLICATE_SLICES",
    ),
    "spacing changes": Kind(changed(other_spacing_above), "SPACING_CHANGES"),
    "a modality that one file gets wrong": Kind(one_slice(0, Modality="MR"), "MIXED_SLICES"),
    "slices contradict each other": Kind(contradicting, "DUPLICATE_SLICES"),
    "a slice is cut": Kind(cut(0.7), "TRUNCATED"),
    "a slice has no pixels": Kind(one_slice(PixelData=None), "TRUNCATED"),
    "other rows": Kind(one_slice(Rows=SHAPE[1] - 6), "SLICE_SIZE"),
    "other pixel spacing": Kind(one_slice(PixelSpacing=["3", "3"]), "SLICE_SPACING"),
    "other orientation": Kind(
        one_slice(ImageOrientationPatient=["1", "0", "0", "0", "0.9396926", "0.3420201"]),
        "SLICE_ORIENTATION",
    ),
    "other frame of reference": Kind(one_slice(FrameOfReferenceUID=uid("x")), "FRAME_OF_REFERENCE"),
    "no position": Kind(every(ImagePositionPatient=None), "NO_POSITION"),
    "no position, one": Kind(one_slice(ImagePositionPatient=None), "NO_POSITION"),
    "no orientation": Kind(every(ImageOrientationPatient=None), "NO_POSITION"),
    "NaN": Kind(one_slice(ImagePositionPatient=_spoiled("NaN")), "NO_POSITION"),
    "infinite": Kind(one_slice(ImagePositionPatient=_spoiled("1e999")), "NO_POSITION"),
    "decimal comma": Kind(comma, "NO_POSITION"),
    "two numbers for three": Kind(one_slice(ImagePositionPatient=_spoiled("1")[:2]), "NO_POSITION"),
    "no pixel spacing": Kind(every(PixelSpacing=None), "BAD_GEOMETRY"),
    "two slices": Kind(two_slices, "TOO_FEW_SLICES"),
    "pixel spacing in metres": Kind(every(PixelSpacing=["0.002", "0.002"]), "BAD_GEOMETRY"),
    "all lengths in micrometres": Kind(changed(in_unit(1000)), "BAD_GEOMETRY"),
    "all lengths in metres": Kind(changed(in_unit(0.001)), "BAD_GEOMETRY"),
    "video": Kind(changed(video), "DECODER"),
    "two patients": Kind(changed(two_patients), "SEVERAL_PATIENTS"),
    "two names in two character sets": Kind(changed(two_names), "SEVERAL_PATIENTS"),
    "a name of an unknown value representation": Kind(unknown_representation, "DAMAGED"),
    "a name that changes": Kind(one_slice(PatientName="Other^One"), "SEVERAL_PATIENTS"),
    "no sign": Kind(every(PixelRepresentation=None), "DAMAGED"),
    "no intercept": Kind(every(RescaleIntercept=None), "RESCALE"),
    "no slope in one": Kind(one_slice(RescaleSlope=None), "RESCALE"),
    "no rescale in one": Kind(one_slice(RescaleSlope=None, RescaleIntercept=None), "RESCALE"),
    "a column less than there are": Kind(every(Columns=SHAPE[0] - 1), "DAMAGED"),
    "rows less than there are": Kind(every(Rows=SHAPE[1] - 6), "DAMAGED"),
    "numbers and times disagree": Kind(
        phases(
            *(
                {"InstanceNumber": mixed(n), "ContentTime": lambda k, n=n: f"1015{2 * k + n:02d}"}
                for n in (0, 1)
            )
        ),
        "DUPLICATE_SLICES",
    ),
    "slope 0": Kind(every(RescaleSlope="0"), "RESCALE"),
    **{
        f"{keyword} {value}": Kind(every(**{keyword: value}), "RESCALE")
        for keyword, value in (
            ("RescaleSlope", "1e39"),
            ("RescaleSlope", "-1e20"),
            ("RescaleSlope", "1e-320"),
            ("RescaleIntercept", "1e30"),
        )
    },
    "a slope of 1e20 where all is 0": Kind(
        every(RescaleSlope="1e20", PixelData=bytes(2 * SHAPE[0] * SHAPE[1])), "RESCALE"
    ),
    "sideways": Kind(changed(sideways), "BAD_GEOMETRY"),
    **{
        f"enhanced, two items of shared groups that differ in {group}": Kind(
            enhanced(edit=second_item(group, attribute), modality="MR"), "HEADER_CONTRADICTS"
        )
        for group, attribute in (
            ("PixelMeasuresSequence", {"PixelSpacing": ["3", "3"]}),
            ("MREchoSequence", {"EffectiveEchoTime": 30.0}),
        )
    },
    **{
        f"enhanced, frames contradict the shared {group}": Kind(
            enhanced(edit=in_frames_too(group, attributes)), "HEADER_CONTRADICTS"
        )
        for group, attributes in (
            ("PixelMeasuresSequence", {"PixelSpacing": ["3", "3"]}),
            ("PlaneOrientationSequence", {"ImageOrientationPatient": [-1, 0, 0, 0, 1, 0]}),
        )
    },
    "enhanced, a shared slope contradicts those of frames": Kind(
        enhanced(edit=shared_slope), "HEADER_CONTRADICTS"
    ),
    "a slice with two frames": Kind(one_of_two_frames, "HEADER_CONTRADICTS"),
    "enhanced, a group is missing": Kind(enhanced(edit=one_group_less), "DAMAGED"),
    "enhanced, a position is missing": Kind(
        enhanced(edit=dropped("PlanePositionSequence")), "NO_POSITION"
    ),
    "enhanced, frames contradict each other": Kind(doubled_frame(same=False), "DUPLICATE_SLICES"),
    "enhanced, frames are missing": Kind(lost_frames(5, 6), "SLICE_GAP"),
    "enhanced, one frame": Kind(lost_frames(*range(1, COUNT)), "TOO_FEW_SLICES"),
    "the last but one is missing": Kind(
        without(COUNT - 2), "SLICE_GAP", options={"gaps": "interpolate"}
    ),
    "rounded to millimetres": Kind(
        changed(
            lambda k, ds: assign(
                ds, ImagePositionPatient=[f"{float(v):.0f}" for v in ds.ImagePositionPatient]
            )
        ),
        "SPACING_CHANGES",
    ),
    "concatenation, a part is missing, another there twice": Kind(a_part_twice, "TRUNCATED"),
    "concatenation, a part is missing": Kind(in_parts(True, 1), "TRUNCATED"),
    "concatenation, the last part is missing": Kind(last_part_lost, "TRUNCATED"),
    "concatenation, the first part alone, of an unknown number": Kind(
        first_part_without_total, "TRUNCATED"
    ),
    "nuclear, no spacing": Kind(nuclear(1, SpacingBetweenSlices=None), "NO_POSITION"),
    "nuclear, slices counted from 0": Kind(
        nuclear(1, SliceVector=[int(n) for n in np.random.default_rng(1).permutation(COUNT)]),
        "NO_POSITION",
    ),
    "nuclear, no vector": Kind(nuclear(1, SliceVector=None), "NO_POSITION"),
    "mosaic, no CSA header": Kind(mosaic(AXIAL, csa=False), "MOSAIC"),
}
