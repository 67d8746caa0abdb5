"""Kinds of DICOM series, each drawn as a ball of known position and values.

Drawn from the standard (DICOM PS3.3). A kind defines the expected result: the right ball, one
ball per selectable volume, or the reason code of a refusal.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom import DataElement, Dataset, config, dcmread, dcmwrite
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ImplicitVRLittleEndian,
)

from balls import BALL, LATE, LATER, SHAPE, STEP, Ball, around, drawn
from dicom_maker import PLANES, Coding, Edit, Geometry, Words, uid, write_series
from multiframe_maker import (
    LEGACY_CT,
    Frame,
    frames_of,
    item,
    write_enhanced,
    write_mosaic,
    write_nuclear,
)

Maker = Callable[[Path], None]
PLAIN = Coding()
AXIAL = around()
COUNT = SHAPE[2]
MIDDLE = 9
SC, DX = "1.2.840.10008.5.1.4.1.1.7", "1.2.840.10008.5.1.4.1.1.1.1"
SR, SEG = "1.2.840.10008.5.1.4.1.1.88.11", "1.2.840.10008.5.1.4.1.1.66.4"


@dataclass(frozen=True)
class Kind:
    """One kind of series.

    Parameters
    ----------
    make : function of folder
        Writes the series.
    code : str
        Reason code of the refusal without options; empty if the series is read.
    balls : tuple of Ball
        Expected balls: one per phase, in order, if `code` is PHASES; one per series if it is
        SERIES_AMBIGUOUS; else a single one.
    options : dict
        Options with which `load_volume` reads the series.
    flags : tuple of str
        Flags that the volume must have.
    """

    make: Maker
    code: str = ""
    balls: tuple[Ball, ...] = (BALL,)
    options: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


@cache
def picture(geometry: Geometry, ball: Ball = BALL) -> NDArray[np.float64]:
    """Return the values of a stack of slices."""
    return drawn(geometry, SHAPE, ball)


def stored(geometry: Geometry, ball: Ball = BALL, coding: Coding = PLAIN) -> NDArray[Any]:
    """Return the stored samples of a stack."""
    samples = (picture(geometry, ball) - float(coding.intercept)) / float(coding.slope)
    return np.rint(samples).astype(np.int64)


def stack(
    folder: Path,
    geometry: Geometry = AXIAL,
    ball: Ball = BALL,
    edit: Edit | None = None,
    coding: Coding = PLAIN,
    **more: Any,
) -> list[Path]:
    """Write a series of the ball; `more` are attributes of every slice."""
    samples = stored(geometry, ball, coding)
    return write_series(folder, samples, geometry, coding, Words(more=more), edit)


def plain(*args: Any, **kwargs: Any) -> Maker:
    """Return a function that writes one series."""
    return lambda folder: void(stack(folder, *args, **kwargs))


def void(_: object) -> None:
    """Do nothing with a value."""


def changed(change: Callable[[int, Dataset], None], *args: Any, **kwargs: Any) -> Maker:
    """Return a function that writes a series with every slice edited."""
    return plain(*args, edit=change, **kwargs)


def one(k: int = MIDDLE, **attributes: Any) -> Maker:
    """Return a writer of a series in which one slice has other attributes; None removes one."""
    return changed(lambda n, ds: assign(ds, **attributes) if n == k else None)


def every(**attributes: Any) -> Maker:
    """Return a writer of a series in which all slices have other attributes; None removes one."""
    return changed(lambda n, ds: assign(ds, **attributes))


def assign(ds: Dataset, **attributes: Any) -> None:
    """Set attributes, also to invalid values; None removes one."""
    for keyword, value in attributes.items():
        ds.pop(keyword, None)
        if value is not None:
            vr = {"I": "DS", "R": "DS", "P": "DS"}.get(keyword[0]) if keyword in _DECIMALS else None
            if vr:
                ds.add(DataElement(keyword, vr, value, validation_mode=config.IGNORE))
            else:
                setattr(ds, keyword, value)
        elif keyword == "SOPInstanceUID":
            ds.file_meta.MediaStorageSOPInstanceUID = uid("none")


_DECIMALS = ("ImagePositionPatient", "RescaleSlope", "PixelSpacing", "ImageOrientationPatient")


def tilt(degrees: float, step: float = STEP) -> float:
    """Return the shift in mm between tilted slices."""
    return float(np.tan(np.radians(degrees))) * step


def rewritten(make: Maker, syntax: UID) -> Maker:
    """Return a writer of the same files in another native transfer syntax."""

    def again(folder: Path) -> None:
        make(folder)
        for path in sorted(folder.glob("*.dcm")):
            ds = dcmread(path)
            if syntax == ExplicitVRBigEndian:
                ds.PixelData = np.frombuffer(ds.PixelData, "<u2").byteswap().tobytes()
            ds["PixelData"].VR = "OW"
            ds.file_meta.TransferSyntaxUID = syntax
            implicit, little = syntax == ImplicitVRLittleEndian, syntax != ExplicitVRBigEndian
            dcmwrite(path, ds, implicit_vr=implicit, little_endian=little, force_encoding=True)

    return again


def phases(*each: dict[str, Any], balls: Sequence[Ball] = (BALL, LATE), shift: float = 0) -> Maker:
    """Return a writer of several volumes in one series, each with its own attributes.

    Each volume is shifted by the fraction `shift` of the slice spacing from the previous one.
    """

    def make(folder: Path) -> None:
        for n, (attributes, ball) in enumerate(zip(each, balls, strict=True)):
            geometry = replace(AXIAL, origin=tuple(AXIAL.position(n * shift)))

            def edit(
                k: int, ds: Dataset, n: int = n, attributes: dict[str, Any] = attributes
            ) -> None:
                ds.InstanceNumber = 1 + n * COUNT + k
                ds.SOPInstanceUID = uid("phase", n, k)
                ds.file_meta.MediaStorageSOPInstanceUID = ds.SOPInstanceUID
                for keyword, value in attributes.items():
                    assign(ds, **{keyword: value(k) if callable(value) else value})

            stack(folder / str(n), geometry, ball, edit)

    return make


def values(keyword: str, *each: Any, **kwargs: Any) -> Maker:
    """Return a writer of volumes that one attribute distinguishes."""
    return phases(*({keyword: value} for value in each), **kwargs)


# --- read -----------------------------------------------------------------------------------------


def sent_again(folder: Path) -> None:
    paths = stack(folder)
    shutil.copy(paths[9], folder / "copy.dcm")
    again = dcmread(paths[13])
    again.SOPInstanceUID = again.file_meta.MediaStorageSOPInstanceUID = uid("again")
    again.InstanceNumber, again.ContentTime = 77, "235900"
    dcmwrite(folder / "again.dcm", again)


def all_sent_again(folder: Path) -> None:
    phases({"ContentTime": "101500"}, {"ContentTime": "111500"}, balls=(BALL, BALL))(folder)


def scouts(word: str | None, count: int = 1) -> Maker:
    """Return a writer of a stack with localisers of the same series UID."""

    def make(folder: Path) -> None:
        stack(folder)
        for n, name in enumerate(("coronal", "sagittal")[:count]):
            geometry = around(name, (50, 60, 1), step=100.0)
            kind = ["ORIGINAL", "PRIMARY", word] if word else ["ORIGINAL", "PRIMARY"]
            words = Words(more={"ImageType": kind})

            def edit(k: int, ds: Dataset, n: int = n) -> None:
                assign(ds, SOPInstanceUID=uid("scout", n))

            flat = np.full((50, 60, 1), 900)
            write_series(folder / f"scout {n}", flat, geometry, words=words, edit=edit)

    return make


def jitter(k: int, ds: Dataset) -> None:
    shift = np.random.default_rng(k).uniform(-0.01, 0.01, 3)
    ds.ImagePositionPatient = [f"{v:.4f}" for v in np.array(ds.ImagePositionPatient, float) + shift]


def exponents(k: int, ds: Dataset) -> None:
    position = [f"{float(v):+.6E}"[:16] for v in ds.ImagePositionPatient]
    assign(ds, ImagePositionPatient=[f" {v} " if len(v) < 15 else v for v in position])


def own_slope(k: int, ds: Dataset) -> None:
    samples = picture(AXIAL)[:, :, k].T
    slope = 0.05 + 0.004 * k
    ds.RescaleSlope, ds.RescaleIntercept = f"{slope:.4f}", "0"
    ds.PixelData = np.rint(samples / float(ds.RescaleSlope)).astype("<i2").tobytes()
    ds["PixelData"].VR = "OW"


def own_intercept(k: int, ds: Dataset) -> None:
    ds.RescaleIntercept = str(-1024 - 13 * k)
    ds.PixelData = np.rint(picture(AXIAL)[:, :, k].T + 1024 + 13 * k).astype("<i2").tobytes()
    ds["PixelData"].VR = "OW"


def negative_slope(k: int, ds: Dataset) -> None:
    ds.RescaleSlope, ds.RescaleIntercept = "-1", "500"
    ds.PixelData = np.rint(500 - picture(AXIAL)[:, :, k].T).astype("<i2").tobytes()
    ds["PixelData"].VR = "OW"


def other_sign(k: int, ds: Dataset) -> None:
    if k % 2:
        ds.PixelRepresentation, ds.RescaleIntercept = 0, "-2000"
        ds.PixelData = np.rint(picture(AXIAL)[:, :, k].T + 2000).astype("<u2").tobytes()
        ds["PixelData"].VR = "OW"


def without_uids(k: int, ds: Dataset) -> None:
    names = ("StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID", "SOPInstanceUID")
    assign(ds, **dict.fromkeys(names, ""))


def step_and_shoot(k: int, ds: Dataset) -> None:
    ds.AcquisitionNumber, ds.AcquisitionTime = 1 + k // 4, f"1015{k // 4:02d}"


def called_implicit(folder: Path) -> None:
    """Write a series in which each meta header names another transfer syntax than the data's."""
    for path in stack(folder):
        data = path.read_bytes()
        named, other = (f"{uid}".encode() for uid in ("1.2.840.10008.1.2.1\0", "1.2.840.10008.1.2"))
        path.write_bytes(data.replace(named, other.ljust(len(named), b"\0"), 1))


def odd_and_even_times(k: int, ds: Dataset) -> None:
    ds.AcquisitionTime = f"1015{k % 2:02d}"


def stations(folder: Path) -> None:
    """Write two table stations that share the slice between them."""
    paths = stack(folder, edit=lambda k, ds: assign(ds, AcquisitionNumber=1 + (k >= MIDDLE)))
    seam = dcmread(paths[MIDDLE])
    seam.SOPInstanceUID = seam.file_meta.MediaStorageSOPInstanceUID = uid("seam")
    seam.AcquisitionNumber = 1
    dcmwrite(folder / "seam.dcm", seam)


READ: dict[str, Kind] = {
    "stations that share a slice": Kind(stations, flags=("DUPLICATES_DROPPED",)),
    "no frame of reference in some": Kind(
        changed(lambda k, ds: assign(ds, FrameOfReferenceUID=None) if k in (0, 7) else None)
    ),
    "no date of birth in some": Kind(one(0, PatientBirthDate=None), flags=()),
    "regular": Kind(plain()),
    "PET images": Kind(every(Modality="PT", SeriesType=["STATIC", "IMAGE"])),
    "instance numbers reversed": Kind(changed(lambda k, ds: assign(ds, InstanceNumber=99 - k))),
    "instance numbers equal": Kind(every(InstanceNumber=1)),
    "no instance numbers": Kind(every(InstanceNumber=None)),
    "two slices sent again": Kind(sent_again, flags=("DUPLICATES_DROPPED",)),
    "all slices sent again": Kind(all_sent_again, flags=("DUPLICATES_DROPPED",)),
    "localiser inside": Kind(scouts("LOCALIZER")),
    "untagged localiser inside": Kind(scouts(None), flags=("SLICES_SET_ASIDE",)),
    "two untagged localisers inside": Kind(scouts(None, 2), flags=("SLICES_SET_ASIDE",)),
    "axial, untold localiser": Kind(scouts("AXIAL"), flags=("SLICES_SET_ASIDE",)),
    **{
        f"tilt {degrees:+g}, {words}": Kind(
            plain(
                around(tilt=tilt(degrees)),
                **({} if tag is None else {"GantryDetectorTilt": f"{tag * degrees:g}"}),
            ),
            flags=() if tag is None or abs(degrees) < 1 or tag else ("ATTRIBUTES_CONTRADICT",),
        )
        for degrees in (15, -15, 22, 0.1, -0.1)
        for words, tag in (("tagged", 1), ("untagged", None), ("lying", 0), ("other sign", -1))
    },
    "tilt across": Kind(plain(around(tilt_across=tilt(12)))),
    "tilt across, negative": Kind(plain(around(tilt_across=tilt(-12)))),
    "tilt both ways": Kind(plain(around(tilt=tilt(9), tilt_across=tilt(-7)))),
    **{
        f"tilted {name}": Kind(plain(around(name, tilt=tilt(13))))
        for name in ("sagittal", "coronal, rows negated", "doubly oblique")
    },
    "tilt with jitter": Kind(changed(jitter, around(tilt=tilt(15)))),
    "tilt that is none": Kind(plain(GantryDetectorTilt="15"), flags=("ATTRIBUTES_CONTRADICT",)),
    **{name: Kind(plain(around(name))) for name in PLANES if name != "axial"},
    "overlapping": Kind(plain(SliceThickness="6")),
    "gaps between slices": Kind(plain(SliceThickness="1")),
    "spacing that lies": Kind(plain(SpacingBetweenSlices="9"), flags=("ATTRIBUTES_CONTRADICT",)),
    "negative spacing": Kind(plain(SpacingBetweenSlices=f"-{STEP}")),
    "location that lies": Kind(changed(lambda k, ds: assign(ds, SliceLocation=str(-7 * k)))),
    "jitter": Kind(changed(jitter)),
    "positions with exponents": Kind(changed(exponents)),
    "slope of its own": Kind(changed(own_slope)),
    "intercept of its own": Kind(changed(own_intercept)),
    "no rescale": Kind(
        plain(coding=Coding(intercept="0"), RescaleSlope=None, RescaleIntercept=None)
    ),
    "a rescale type in one only": Kind(
        changed(lambda k, ds: assign(ds, RescaleType="HU" if k == MIDDLE else None))
    ),
    "MONOCHROME1": Kind(every(PhotometricInterpretation="MONOCHROME1")),
    "8 bit": Kind(plain(coding=Coding(8, 8, False, "2", "-200"))),
    "12 bit": Kind(plain(coding=Coding(16, 12, False))),
    "32 bit": Kind(plain(coding=Coding(32, 32, False, "0.001", "-1024"))),
    "16 bit unsigned": Kind(plain(coding=Coding(16, 16, False, "0.01", "-400"))),
    "implicit": Kind(plain(coding=Coding(syntax=ImplicitVRLittleEndian))),
    "big endian": Kind(rewritten(plain(), ExplicitVRBigEndian)),
    "explicit, called implicit": Kind(called_implicit),
    "deflated": Kind(rewritten(plain(), DeflatedExplicitVRLittleEndian)),
    "empty UIDs": Kind(changed(without_uids)),
    "one SOP UID for all": Kind(every(SOPInstanceUID=uid("one"))),
    "no frame of reference": Kind(every(FrameOfReferenceUID=None)),
    "derived, but no reformat": Kind(every(ImageType=["DERIVED", "PRIMARY", "AXIAL"])),
    "no image type": Kind(every(ImageType=None)),
    "negative slope": Kind(changed(negative_slope)),
    "signed and unsigned": Kind(changed(other_sign)),
    "step and shoot": Kind(changed(step_and_shoot)),
    "an acquisition a slice": Kind(
        changed(lambda k, ds: assign(ds, AcquisitionNumber=k, AcquisitionTime=f"10{k:02d}00"))
    ),
    "echo times that are rounded": Kind(
        changed(lambda k, ds: assign(ds, EchoTime=f"4.6{k * k % 7}"), Modality="MR")
    ),
    "image types of one kind": Kind(
        changed(lambda k, ds: assign(ds, ImageType=["ORIGINAL", "PRIMARY", "M", f"X{k // 10}"]))
    ),
    "MR in two passes": Kind(changed(odd_and_even_times, Modality="MR")),
    "trigger time a slice": Kind(
        changed(lambda k, ds: assign(ds, TriggerTime=str(7 * (k % 5))), Modality="MR")
    ),
}


# --- multi-frame objects --------------------------------------------------------------------------


def enhanced(
    geometry: Geometry = AXIAL,
    edit: Callable[[Dataset], None] | None = None,
    shared: bool = True,
    modality: str = "CT",
) -> Maker:
    """Return a writer of one enhanced object with shuffled frames."""

    def make(folder: Path) -> None:
        frames = shuffled(frames_of(stored(geometry), geometry))
        write_enhanced(folder / "object.dcm", frames, Words(modality), edit, shared)

    return make


def of_class(tail: str, modality: str) -> Callable[[Dataset], None]:
    """Change the SOP class of an enhanced object."""

    def edit(ds: Dataset) -> None:
        ds.SOPClassUID = ds.file_meta.MediaStorageSOPClassUID = f"1.2.840.10008.5.1.4.1.1.{tail}"
        ds.Modality = modality

    return edit


def shuffled(frames: Sequence[Frame]) -> list[Frame]:
    """Return frames in a shuffled order."""
    return [frames[n] for n in np.random.default_rng(len(frames)).permutation(len(frames))]


def own_rescale(folder: Path) -> None:
    frames = []
    for k in range(COUNT):
        slope, intercept = f"{0.05 + 0.004 * k:.4f}", str(-13 * k)
        pixels = np.rint((picture(AXIAL)[:, :, k] - float(intercept)) / float(slope))
        frames.append(Frame(pixels, AXIAL, k, slope=slope, intercept=intercept))
    write_enhanced(folder / "object.dcm", shuffled(frames))


def in_parts(uid_of_all: bool, lost: int | None = None, total: int = 3) -> Maker:
    """Return a writer of several objects that each hold some of the slices."""

    def make(folder: Path) -> None:
        frames = shuffled(frames_of(stored(AXIAL), AXIAL))
        for n in range(total):

            def edit(ds: Dataset, n: int = n) -> None:
                if uid_of_all:
                    ds.ConcatenationUID, ds.InConcatenationNumber = uid("all"), n + 1
                    ds.InConcatenationTotalNumber = total

            if n != lost:
                write_enhanced(folder / f"{n}.dcm", frames[n::total], edit=edit, number=n)

    return make


def a_part_twice(folder: Path) -> None:
    in_parts(True, 1)(folder)
    shutil.copy(min(folder.iterdir()), folder / "again.dcm")


def last_part_lost(folder: Path) -> None:
    """Leave a regular stack, so that only the frame count shows the loss."""
    frames = frames_of(stored(AXIAL), AXIAL)
    for n in range(2):

        def edit(ds: Dataset, n: int = n) -> None:
            ds.ConcatenationUID, ds.InConcatenationNumber = uid("all"), n + 1
            ds.InConcatenationTotalNumber = 3

        write_enhanced(folder / f"{n}.dcm", frames[n * 7 : n * 7 + 7], edit=edit, number=n)


def file_a_slice(folder: Path) -> None:
    for n, frame in enumerate(shuffled(frames_of(stored(AXIAL), AXIAL))):
        write_enhanced(folder / f"{n}.dcm", [frame], number=n)


def with_localiser(folder: Path) -> None:
    geometry = around("coronal")
    word = {"FrameType": ["ORIGINAL", "PRIMARY", "LOCALIZER", "NONE"]}
    scout = Frame(np.full(SHAPE[:2], 900), geometry, 3, groups={"CTImageFrameTypeSequence": word})
    write_enhanced(folder / "object.dcm", [scout, *frames_of(stored(AXIAL), AXIAL)], shared=False)


def with_a_projection(technique: str) -> Maker:
    """Return a writer of an object with an overview image after its slices."""
    kind = {"FrameType": ["DERIVED", "PRIMARY", "VOLUME", "MAXIMUM"]}
    kind["VolumeBasedCalculationTechnique"] = technique

    def make(folder: Path) -> None:
        samples = stored(AXIAL)
        groups = {"CTImageFrameTypeSequence": kind}
        whole = Frame(samples.max(axis=2), AXIAL, COUNT, groups=groups)
        write_enhanced(folder / "object.dcm", [whole, *frames_of(samples, AXIAL)])

    return make


def every_frame(**attributes: str) -> Callable[[Dataset], None]:
    """Return an edit that adds attributes to each frame type."""

    def edit(ds: Dataset) -> None:
        for group in ds.PerFrameFunctionalGroupsSequence:
            kind = ["DERIVED", "PRIMARY", "VOLUME", "NONE"]
            group.CTImageFrameTypeSequence = [item(FrameType=kind, **attributes)]

    return edit


def doubled_frame(*, same: bool) -> Maker:
    """Return a writer of an object with a repeated frame, or two frames at one position."""

    def make(folder: Path) -> None:
        frames = frames_of(stored(AXIAL), AXIAL)
        pixels = frames[7].pixels if same else np.zeros_like(frames[7].pixels)
        write_enhanced(folder / "object.dcm", shuffled([*frames, Frame(pixels, AXIAL, 7)]))

    return make


def lost_frames(*lost: int) -> Maker:
    """Return a writer of an object with missing frames."""

    def make(folder: Path) -> None:
        frames = [f for n, f in enumerate(frames_of(stored(AXIAL), AXIAL)) if n not in lost]
        write_enhanced(folder / "object.dcm", shuffled(frames))

    return make


def legacy(ds: Dataset) -> None:
    ds.SOPClassUID = ds.file_meta.MediaStorageSOPClassUID = LEGACY_CT
    for n, group in enumerate(ds.PerFrameFunctionalGroupsSequence):
        group.UnassignedPerFrameConvertedAttributesSequence = [item(InstanceNumber=n)]


def nuclear(sign: int, **changes: Any) -> Maker:
    """Return a writer of reconstructed nuclear slices, stacked along or against the normal."""

    def make(folder: Path) -> None:
        geometry = AXIAL
        samples = stored(AXIAL)
        if sign < 0:
            geometry = replace(AXIAL, origin=tuple(AXIAL.position(COUNT - 1)))
            samples = samples[:, :, ::-1]
        order = [int(n) + 1 for n in np.random.default_rng(1).permutation(COUNT)]
        write_nuclear(folder / "nm.dcm", samples, geometry, order, f"{sign * STEP:g}")
        path = folder / "nm.dcm"
        ds = dcmread(path)
        assign(ds, **changes)
        dcmwrite(path, ds)

    return make


def mosaic(geometry: Geometry, **options: Any) -> Maker:
    """Return a writer of one Siemens mosaic."""
    return lambda folder: write_mosaic(folder / "m.dcm", stored(geometry), geometry, **options)


def dropped(keyword: str, n: int = 4) -> Callable[[Dataset], None]:
    """Return an edit that removes a functional group from one frame."""
    return lambda ds: delattr(ds.PerFrameFunctionalGroupsSequence[n], keyword)


def one_group_less(ds: Dataset) -> None:
    ds.PerFrameFunctionalGroupsSequence = ds.PerFrameFunctionalGroupsSequence[:-1]


def noisy_directions(folder: Path) -> None:
    """Write frames with a direction noise in the sixth digit, each with its own index."""

    def edit(ds: Dataset) -> None:
        ds.DimensionIndexSequence = [
            item(DimensionIndexPointer=0x00209116),
            item(DimensionIndexPointer=0x00200032),
        ]
        for group in ds.PerFrameFunctionalGroupsSequence:
            z = float(group.PlanePositionSequence[0].ImagePositionPatient[2])
            n = round((z - AXIAL.origin[2]) / STEP)
            orientation = group.PlaneOrientationSequence[0]
            noise = (n % 3) * 1e-6
            orientation.ImageOrientationPatient = [1, f"{noise:.7f}", 0, 0, 1, f"{noise:.7f}"]
            group.FrameContentSequence[0].DimensionIndexValues = [1 + n % 3, 1 + n]

    enhanced(edit=edit, shared=False)(folder)


READ |= {
    "enhanced": Kind(enhanced()),
    "enhanced, directions with noise": Kind(noisy_directions),
    "enhanced, nothing shared": Kind(enhanced(shared=False)),
    "enhanced MR": Kind(enhanced(modality="MR")),
    "enhanced PET": Kind(enhanced(modality="PT")),
    "3D angiography": Kind(enhanced(edit=of_class("13.1.1", "XA"))),
    "craniofacial X-ray volume": Kind(enhanced(edit=of_class("13.1.2", "DX"))),
    "enhanced, rescale a frame": Kind(own_rescale),
    "enhanced, tilted": Kind(enhanced(around(tilt=tilt(-15)))),
    "enhanced, sagittal": Kind(enhanced(around("sagittal"))),
    "enhanced, tilted doubly oblique": Kind(enhanced(around("doubly oblique", tilt=tilt(15)))),
    "enhanced, implicit": Kind(rewritten(enhanced(), ImplicitVRLittleEndian)),
    "enhanced, big endian": Kind(rewritten(enhanced(), ExplicitVRBigEndian)),
    "enhanced, a frame sent again": Kind(doubled_frame(same=True), flags=("DUPLICATES_DROPPED",)),
    "enhanced, several objects": Kind(in_parts(False)),
    "enhanced, an object a slice": Kind(file_a_slice),
    "enhanced, a localiser among the frames": Kind(with_localiser),
    **{
        f"enhanced, {technique} among the frames": Kind(with_a_projection(technique))
        for technique in ("MAX_IP", "MIN_IP", "VOLUME_RENDER", "SURFACE_RENDER", "CURVED_MPR")
    },
    "enhanced, called distorted, as Siemens calls its EPI": Kind(
        enhanced(edit=every_frame(VolumetricProperties="DISTORTED"))
    ),
    "enhanced, reformatted": Kind(
        enhanced(edit=every_frame(VolumeBasedCalculationTechnique="MPR"))
    ),
    "concatenation": Kind(in_parts(True)),
    "legacy converted": Kind(enhanced(edit=legacy)),
    "nuclear": Kind(nuclear(1)),
    "nuclear, against the normal": Kind(nuclear(-1)),
    "mosaic": Kind(mosaic(AXIAL)),
    "mosaic, downwards": Kind(mosaic(AXIAL, downwards=True)),
    "mosaic, sagittal": Kind(mosaic(around("sagittal"))),
    "mosaic, doubly oblique": Kind(mosaic(around("doubly oblique"), downwards=True)),
}


# --- to be chosen ---------------------------------------------------------------------------------


def many(folder: Path) -> None:
    """Write three time points of two echoes each."""
    each = [
        {"TemporalPositionIdentifier": t, "EchoTime": e} for t in (1, 2, 10) for e in ("9", "30")
    ]
    phases(*each, balls=(BALL, LATE, LATER, BALL, LATE, LATER))(folder)


def unlike(*parts: tuple[str, dict[str, Any]]) -> Maker:
    """Return a writer of stacks in several planes in one series."""

    def make(folder: Path) -> None:
        for n, ((name, attributes), ball) in enumerate(zip(parts, (BALL, LATE), strict=True)):
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
            some = frames_of(samples, geometry, content=contents[n], groups=groups[n])[drop:]
            if files:
                write_enhanced(folder / f"{n}.dcm", shuffled(some), number=n, shared=False)
            frames += some
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
        f"by the b-value of {name}": Kind(private(*words), PHASES, _TWO)
        for name, words in {
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
    "acquisitions one within the other": Kind(
        values("AcquisitionNumber", 1, 2, shift=0.5), PHASES, _TWO
    ),
    "echoes one within the other": Kind(values("EchoTime", "4", "9", shift=0.5), PHASES, _TWO),
    "three within each other": Kind(
        values("AcquisitionNumber", 1, 2, 3, balls=(BALL, LATE, LATER), shift=1 / 3),
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


# --- refused --------------------------------------------------------------------------------------


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
        other = dcmread(paths[k])
        other.SOPInstanceUID = other.file_meta.MediaStorageSOPInstanceUID = uid("other", n)
        other.InstanceNumber = 90 + n
        other.PixelData = bytes(len(other.PixelData))
        dcmwrite(folder / f"other {n}.dcm", other)


def cut(share: float) -> Maker:
    """Return a writer of a series with one truncated file."""

    def make(folder: Path) -> None:
        path = stack(folder)[MIDDLE]
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])

    return make


def two_patients(k: int, ds: Dataset) -> None:
    """Assign the slices above the middle to another patient, with the same UIDs."""
    ds.PatientID = "above" if k >= MIDDLE else "below"


def two_slices(folder: Path) -> None:
    for path in stack(folder)[2:]:
        path.unlink()


def sideways(k: int, ds: Dataset) -> None:
    x, y, z = map(float, ds.ImagePositionPatient)
    ds.ImagePositionPatient = [x + 0.4 * (k % 2), y, z]


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
        f"enhanced, {inner} {words}": Kind(
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
        for words, begin, code in (
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
    "half CT, half MR": Kind(
        changed(lambda k, ds: assign(ds, Modality="MR" if k % 2 else "CT")), "MIXED_SLICES"
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
    "a modality that one file gets wrong": Kind(one(0, Modality="MR"), "MIXED_SLICES"),
    "slices contradict each other": Kind(contradicting, "DUPLICATE_SLICES"),
    "a slice is cut": Kind(cut(0.7), "TRUNCATED"),
    "a slice has no pixels": Kind(one(PixelData=None), "TRUNCATED"),
    "other rows": Kind(one(Rows=SHAPE[1] - 6), "SLICE_SIZE"),
    "other pixel spacing": Kind(one(PixelSpacing=["3", "3"]), "SLICE_SPACING"),
    "other orientation": Kind(
        one(ImageOrientationPatient=["1", "0", "0", "0", "0.9396926", "0.3420201"]),
        "SLICE_ORIENTATION",
    ),
    "other frame of reference": Kind(one(FrameOfReferenceUID=uid("x")), "FRAME_OF_REFERENCE"),
    "no position": Kind(every(ImagePositionPatient=None), "NO_POSITION"),
    "no position, one": Kind(one(ImagePositionPatient=None), "NO_POSITION"),
    "no orientation": Kind(every(ImageOrientationPatient=None), "NO_POSITION"),
    "NaN": Kind(one(ImagePositionPatient=_spoiled("NaN")), "NO_POSITION"),
    "infinite": Kind(one(ImagePositionPatient=_spoiled("1e999")), "NO_POSITION"),
    "decimal comma": Kind(comma, "NO_POSITION"),
    "two numbers for three": Kind(one(ImagePositionPatient=_spoiled("1")[:2]), "NO_POSITION"),
    "no pixel spacing": Kind(every(PixelSpacing=None), "BAD_GEOMETRY"),
    "two slices": Kind(two_slices, "TOO_FEW_SLICES"),
    "pixel spacing in metres": Kind(every(PixelSpacing=["0.002", "0.002"]), "BAD_GEOMETRY"),
    "two patients": Kind(changed(two_patients), "DUPLICATE_SLICES"),
    "a name that changes": Kind(one(PatientName="Other^One"), "DUPLICATE_SLICES"),
    "no sign": Kind(every(PixelRepresentation=None), "DAMAGED"),
    "no intercept": Kind(every(RescaleIntercept=None), "RESCALE"),
    "no slope in one": Kind(one(RescaleSlope=None), "RESCALE"),
    "no rescale in one": Kind(one(RescaleSlope=None, RescaleIntercept=None), "RESCALE"),
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
    "nuclear, no spacing": Kind(nuclear(1, SpacingBetweenSlices=None), "NO_POSITION"),
    "nuclear, slices counted from 0": Kind(
        nuclear(1, SliceVector=[int(n) for n in np.random.default_rng(1).permutation(COUNT)]),
        "NO_POSITION",
    ),
    "nuclear, no vector": Kind(nuclear(1, SliceVector=None), "NO_POSITION"),
    "mosaic, no CSA header": Kind(mosaic(AXIAL, csa=False), "MOSAIC"),
}


# --- skipped --------------------------------------------------------------------------------------


def colour(k: int, ds: Dataset) -> None:
    ds.SamplesPerPixel, ds.PhotometricInterpretation, ds.PlanarConfiguration = 3, "RGB", 0
    ds.BitsAllocated = ds.BitsStored = 8
    ds.HighBit, ds.PixelRepresentation = 7, 0
    ds.PixelData = bytes(ds.Rows * ds.Columns * 3)


def report(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = stack(folder)[0]
    ds = dcmread(path)
    shutil.rmtree(folder)
    folder.mkdir()
    del ds.PixelData
    ds.SOPClassUID = ds.file_meta.MediaStorageSOPClassUID = SR
    dcmwrite(folder / "sr.dcm", ds)


SKIPPED: dict[str, Kind] = {
    "reprojections of a PET scan": Kind(
        every(Modality="PT", SeriesType=["STATIC", "REPROJECTION"]), "PROJECTION"
    ),
    "localisers": Kind(every(ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"]), "LOCALIZER"),
    "captures": Kind(every(SOPClassUID=SC, ImagePositionPatient=None), "SECONDARY_CAPTURE"),
    "colour": Kind(changed(colour), "COLOR"),
    "tomosynthesis": Kind(enhanced(edit=of_class("13.1.3", "MG")), "PROJECTION"),
    "X-rays": Kind(every(SOPClassUID=DX, ImagePositionPatient=None), "PROJECTION"),
    "report": Kind(report, "NOT_AN_IMAGE"),
    "reformats": Kind(
        every(ImageType=["DERIVED", "SECONDARY", "MPR"]), "DERIVED", options={"series": "1"}
    ),
    "reformats by a scanner": Kind(
        every(ImageType=["DERIVED", "PRIMARY", "AXIAL", "REFORMATTED"]),
        "DERIVED",
        options={"series": "1"},
    ),
    "segmentation": Kind(every(SOPClassUID=SEG), "NOT_AN_IMAGE"),
    "projections": Kind(every(ImageType=["DERIVED", "SECONDARY", "AXIAL", "MIP"]), "PROJECTION"),
    "rendered": Kind(
        every(ImageType=["DERIVED", "SECONDARY", "PROJECTION IMAGE"], Modality="MR"), "PROJECTION"
    ),
    "scintigrams": Kind(nuclear(1, ImageType=["ORIGINAL", "PRIMARY", "STATIC"]), "PROJECTION"),
    "enhanced, localisers": Kind(
        enhanced(
            edit=lambda ds: assign(ds, ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER", "NONE"])
        ),
        "LOCALIZER",
    ),
}

SKIPPED |= {
    "enhanced, projections": Kind(
        enhanced(edit=every_frame(VolumeBasedCalculationTechnique="MAX_IP")), "PROJECTION"
    ),
    "enhanced, projections by the object": Kind(
        enhanced(edit=lambda ds: assign(ds, VolumeBasedCalculationTechnique="MAX_IP")), "PROJECTION"
    ),
    "enhanced, curved": Kind(
        enhanced(edit=every_frame(VolumeBasedCalculationTechnique="CURVED_MPR")), "DERIVED"
    ),
}

KINDS = READ | CHOSEN | REFUSED | SKIPPED
