"""Kinds of series of single-frame files that are read."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from pydicom import Dataset, dcmread, dcmwrite
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRBigEndian, ImplicitVRLittleEndian

from support.balls import BALL, STEP, around
from support.dicom_kinds.base import (
    AXIAL,
    MIDDLE,
    Kind,
    Maker,
    assign,
    changed,
    every,
    one_slice,
    phases,
    picture,
    plain,
    rewritten,
    stack,
    tilt,
)
from support.write_dicom import PLANES, Coding, Words, uid, write_series


def in_two_character_sets(k: int, ds: Dataset) -> None:
    """Write the same name in Latin-1 and in UTF-8, as an archive that converts some files."""
    ds.SpecificCharacterSet = "ISO_IR 192" if k % 2 else "ISO_IR 100"
    ds.PatientID, ds.PatientName = "12", "Müller^Jörg" if k % 3 else "MÜLLER^JÖRG"


def sent_again(folder: Path) -> None:
    paths = stack(folder)
    shutil.copy(paths[9], folder / "copy.dcm")
    again = dcmread(paths[13])
    again.SOPInstanceUID = again.file_meta.MediaStorageSOPInstanceUID = uid("again")
    again.InstanceNumber, again.ContentTime = 77, "235900"
    dcmwrite(folder / "again.dcm", again)


def all_sent_again(folder: Path) -> None:
    phases({"ContentTime": "101500"}, {"ContentTime": "111500"}, balls=(BALL, BALL))(folder)


def scouts(image_flavor: str | None, count: int = 1) -> Maker:
    """Return a writer of a stack with localisers of the same series UID."""

    def make(folder: Path) -> None:
        stack(folder)
        for n, name in enumerate(("coronal", "sagittal")[:count]):
            geometry = around(name, (50, 60, 1), step=100.0)
            kind = (
                ["ORIGINAL", "PRIMARY", image_flavor] if image_flavor else ["ORIGINAL", "PRIMARY"]
            )
            attributes = Words(more={"ImageType": kind})

            def edit(k: int, ds: Dataset, n: int = n) -> None:
                assign(ds, SOPInstanceUID=uid("scout", n))

            flat = np.full((50, 60, 1), 900)
            write_series(folder / f"scout {n}", flat, geometry, words=attributes, edit=edit)

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
        named, implicit = (
            f"{uid}".encode() for uid in ("1.2.840.10008.1.2.1\0", "1.2.840.10008.1.2")
        )
        path.write_bytes(data.replace(named, implicit.ljust(len(named), b"\0"), 1))


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
    "no date of birth in some": Kind(one_slice(0, PatientBirthDate=None), flags=()),
    "regular": Kind(plain()),
    "a name in two character sets": Kind(changed(in_two_character_sets)),
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
        f"tilt {degrees:+g}, {name}": Kind(
            plain(
                around(tilt=tilt(degrees)),
                **({} if tag is None else {"GantryDetectorTilt": f"{tag * degrees:g}"}),
            ),
            flags=() if tag is None or abs(degrees) < 1 or tag else ("ATTRIBUTES_CONTRADICT",),
        )
        for degrees in (15, -15, 22, 0.1, -0.1)
        for name, tag in (("tagged", 1), ("untagged", None), ("lying", 0), ("other sign", -1))
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
    **{
        f"odd and even slices differ in {keyword}: {each}": Kind(
            changed(lambda k, ds, keyword=keyword, each=each: assign(ds, **{keyword: each[k % 2]})),
            flags=flags,
        )
        for keyword, each, flags in (
            ("AcquisitionNumber", (1, 2), ()),
            ("SliceThickness", ("0.62", "0.63"), ()),
            ("SliceThickness", ("2.5", "0"), ("SLICES_DIFFER",)),
            ("SliceThickness", ("-1", "2.5"), ("SLICES_DIFFER",)),
            ("ScanOptions", (["FS", "PFP"], ["PFP", "FS"]), ()),
            (
                "ImageType",
                (["ORIGINAL", "PRIMARY", "M", "ND"], ["ORIGINAL", "PRIMARY", "ND", "M"]),
                (),
            ),
            ("ConvolutionKernel", ("SOFT TISSUE", "SOFT_TISSUE"), ()),
        )
    },
    **{
        f"odd and even slices differ in {name}": Kind(
            changed(lambda k, ds, keyword=keyword, each=each: assign(ds, **{keyword: each[k % 2]})),
            flags=("SLICES_DIFFER",),
        )
        for name, keyword, each in (
            (
                "correction of distortion",
                "ImageType",
                (["ORIGINAL", "PRIMARY", "ND"], ["ORIGINAL", "PRIMARY", "DIS2D"]),
            ),
            ("the time, by 16 minutes", "AcquisitionTime", ("095900", "101500")),
            ("a kernel that half of them lack", "ConvolutionKernel", ("B30f", None)),
            ("the range of the padding", "PixelPaddingRangeLimit", (-2000, -2001)),
        )
    },
    "trigger time a slice": Kind(
        changed(lambda k, ds: assign(ds, TriggerTime=str(7 * (k % 5))), Modality="MR")
    ),
}
