"""Kinds of multi-frame objects that are read."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydicom import Dataset, dcmread, dcmwrite
from pydicom.uid import ExplicitVRBigEndian, ImplicitVRLittleEndian

from support.balls import SHAPE, STEP, around
from support.dicom_kinds.base import (
    AXIAL,
    COUNT,
    Kind,
    Maker,
    assign,
    picture,
    rewritten,
    stored,
    tilt,
)
from support.dicom_kinds.single import READ
from support.write_dicom import Geometry, Words, uid
from support.write_multiframe import (
    LEGACY_CT,
    Frame,
    frames_of,
    item,
    write_enhanced,
    write_mosaic,
    write_nuclear,
)


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


def spacing_in_frames_too(ds: Dataset) -> None:
    """Repeat the shared spacing in each frame, in another notation."""
    [shared] = ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence
    spacing = [f"{float(mm):.4f}" for mm in shared.PixelSpacing]
    for group in ds.PerFrameFunctionalGroupsSequence:
        group.PixelMeasuresSequence = [item(PixelSpacing=spacing)]


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


def first_part_without_total(folder: Path) -> None:
    """Leave half of a stack that nothing but its place in a concatenation tells from a whole."""

    def edit(ds: Dataset) -> None:
        ds.ConcatenationUID, ds.InConcatenationNumber = uid("all"), 1

    write_enhanced(folder / "0.dcm", frames_of(stored(AXIAL), AXIAL)[:7], edit=edit)


def file_a_slice(folder: Path) -> None:
    for n, frame in enumerate(shuffled(frames_of(stored(AXIAL), AXIAL))):
        write_enhanced(folder / f"{n}.dcm", [frame], number=n)


def with_localiser(folder: Path) -> None:
    geometry = around("coronal")
    frame_type = {"FrameType": ["ORIGINAL", "PRIMARY", "LOCALIZER", "NONE"]}
    scout = Frame(
        np.full(SHAPE[:2], 900), geometry, 3, groups={"CTImageFrameTypeSequence": frame_type}
    )
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
    "enhanced, a shared group is repeated in the frames": Kind(
        enhanced(edit=spacing_in_frames_too)
    ),
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
    "tomography of an eye": Kind(enhanced(edit=of_class("77.1.5.4", "OPT"))),
    "nuclear": Kind(nuclear(1)),
    "nuclear, against the normal": Kind(nuclear(-1)),
    "mosaic": Kind(mosaic(AXIAL)),
    "mosaic, downwards": Kind(mosaic(AXIAL, downwards=True)),
    "mosaic, sagittal": Kind(mosaic(around("sagittal"))),
    "mosaic, doubly oblique": Kind(mosaic(around("doubly oblique"), downwards=True)),
}
