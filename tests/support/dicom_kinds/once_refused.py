"""Kinds of series that other readers read and scanloom once refused, and similar ones.

As in `kinds`, a kind defines the expected result.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from pydicom import Dataset, dcmread, dcmwrite
from pydicom.datadict import dictionary_VR, tag_for_keyword
from pydicom.filebase import DicomBytesIO
from pydicom.filewriter import write_dataset, write_file_meta_info
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ImplicitVRLittleEndian,
)

from support.balls import BALL, LATE, SHAPE, Ball, around
from support.dicom_kinds.base import (
    AXIAL,
    COUNT,
    MIDDLE,
    Kind,
    Maker,
    assign,
    changed,
    phases,
    rewritten,
    stack,
    stored,
    tilt,
    void,
)
from support.dicom_kinds.enhanced import enhanced, mosaic
from support.write_dicom import Coding, Edit, Geometry, Words, dataset_of, uid
from support.write_multiframe import csa_header, item

# --- frames of reference --------------------------------------------------------------------------


def own_frame(k: int, ds: Dataset) -> None:
    ds.FrameOfReferenceUID = uid("frame", k)


def frame_for_two(k: int, ds: Dataset) -> None:
    ds.FrameOfReferenceUID = uid("frame", k // 2)


def own_frame_but_one(k: int, ds: Dataset) -> None:
    ds.FrameOfReferenceUID = uid("frame", max(k, 1))


def no_frame_in_one(k: int, ds: Dataset) -> None:
    ds.FrameOfReferenceUID = uid("frame", k) if k != MIDDLE else ""


def own_frames_of_two_stacks(folder: Path) -> None:
    """Write two balls side by side, each slice in its own frame of reference."""
    for n, (geometry, ball) in enumerate(((AXIAL, BALL), (around("coronal"), LATE))):

        def edit(k: int, ds: Dataset, n: int = n) -> None:
            assign(ds, SOPInstanceUID=uid("stack", n, k), FrameOfReferenceUID=uid("frame", n, k))

        stack(folder / str(n), geometry, ball, edit)


def own_frames_of_phases(folder: Path) -> None:
    frames = ({"FrameOfReferenceUID": lambda k, n=n: uid("frame", n, k)} for n in (0, 1))
    phases(*frames)(folder)


def lacking(k: int, edit: Edit) -> Maker:
    """Return a writer of a series with one missing slice."""

    def make(folder: Path) -> None:
        stack(folder, edit=edit)[k].unlink()

    return make


FRAMES = "FRAME_OF_REFERENCE"
OWN_FRAMES: dict[str, Kind] = {
    "each slice in its own frame of reference": Kind(
        changed(own_frame), flags=("FRAMES_OF_REFERENCE",)
    ),
    **{
        f"{name}, each slice in its own frame of reference": Kind(
            changed(own_frame, around(name)), flags=("FRAMES_OF_REFERENCE",)
        )
        for name in ("coronal", "doubly oblique")
    },
    "tilted, each slice in its own frame of reference": Kind(
        changed(own_frame, around(tilt=tilt(15))), flags=("FRAMES_OF_REFERENCE",)
    ),
    "two slices in each frame of reference": Kind(changed(frame_for_two), FRAMES),
    "two slices in one frame of reference, the others in their own": Kind(
        changed(own_frame_but_one), FRAMES
    ),
    "no frame of reference in one slice, others in the rest": Kind(
        changed(no_frame_in_one), FRAMES
    ),
    "two stacks, each slice in its own frame of reference": Kind(own_frames_of_two_stacks, FRAMES),
    "two phases, each slice in its own frame of reference": Kind(own_frames_of_phases, FRAMES),
    "own frames of reference, a slice is missing": Kind(lacking(MIDDLE, own_frame), "SLICE_GAP"),
}


# --- rounded positions ----------------------------------------------------------------------------


def rounded(digits: int) -> Edit:
    """Return an edit that rounds each position to a number of decimals."""

    def edit(k: int, ds: Dataset) -> None:
        ds.ImagePositionPatient = [f"{float(v):.{digits}f}" for v in ds.ImagePositionPatient]

    return edit


def moved(geometry: Geometry) -> Geometry:
    """Return slices whose first position is not a multiple of 0.1 mm."""
    return replace(geometry, origin=tuple(np.add(geometry.origin, (0.037, -0.043, 0.031))))


def after(first: Edit, then: Edit) -> Edit:
    """Return an edit that applies both edits in order."""

    def edit(k: int, ds: Dataset) -> None:
        first(k, ds)
        then(k, ds)

    return edit


def wobble(amount: float) -> Edit:
    """Return an edit that shifts every third slice along z, in mm."""

    def edit(k: int, ds: Dataset) -> None:
        x, y, z = map(float, ds.ImagePositionPatient)
        ds.ImagePositionPatient = [x, y, z + amount * (k % 3 == 1)]

    return edit


def off_by(amount: float) -> Edit:
    """Return an edit that adds a constant to every coordinate, as six significant digits."""

    def edit(k: int, ds: Dataset) -> None:
        ds.ImagePositionPatient = [f"{float(v) + amount:.6g}" for v in ds.ImagePositionPatient]

    return edit


def wider(ds: Dataset, amount: float) -> None:
    """Shift a slice along z, in mm."""
    x, y, z = map(float, ds.ImagePositionPatient)
    ds.ImagePositionPatient = [x, y, z + amount]


def uneven(k: int) -> list[str]:
    """Return a position whose distance from the next grows by 0.5 mm in the middle."""
    x, y, z = AXIAL.position(k)
    return [f"{x:.6g}", f"{y:.6g}", f"{z + 0.5 * max(0, k - MIDDLE):.6g}"]


def wider_above(k: int, ds: Dataset) -> None:
    """Increase the spacing of the slices above the middle by 0.1 mm."""
    wider(ds, 0.1 * max(0, k - MIDDLE))


def in_turn(*each: dict[str, Any], balls: tuple[Ball, ...] = (BALL, LATE)) -> Maker:
    """Return a writer of interleaved, distinguishable stacks with rounded positions."""

    def make(folder: Path) -> None:
        for n, (attributes, ball) in enumerate(zip(each, balls, strict=True)):
            geometry = replace(ROUND, origin=tuple(ROUND.position(n / len(each))))

            def edit(
                k: int, ds: Dataset, n: int = n, attributes: dict[str, Any] = attributes
            ) -> None:
                rounded(1)(k, ds)
                assign(ds, SOPInstanceUID=uid("turn", n, k), **attributes)

            stack(folder / str(n), geometry, ball, edit)

    return make


ROUND = moved(around(step=2.53))
TENTHS = ("POSITIONS_ROUNDED",)
ROUNDED: dict[str, Kind] = {
    "rounded to 0.1 mm": Kind(changed(rounded(1), ROUND), flags=TENTHS),
    **{
        f"{name}, rounded to 0.1 mm": Kind(
            changed(rounded(1), moved(around(name, step=2.53))), flags=TENTHS
        )
        for name in ("sagittal", "oblique", "doubly oblique", "doubly oblique")
    },
    "tilted, rounded to 0.1 mm": Kind(
        changed(rounded(1), moved(around(step=2.53, tilt=tilt(15)))), flags=(*TENTHS, "SHEARED")[:1]
    ),
    **{
        f"{name}, {step:g} mm, rounded to 0.1 mm plus a constant": Kind(
            changed(after(rounded(1), off_by(0.0425)), moved(around(name, step=step))), flags=TENTHS
        )
        for name in ("oblique", "doubly oblique")
        for step in (2.53, 6.936)
    },
    "rounded to 0.01 mm": Kind(changed(rounded(2), ROUND)),
    "doubly oblique, rounded to 0.01 mm": Kind(
        changed(rounded(2), moved(around("doubly oblique", step=2.53)))
    ),
    "rounded to 0.1 mm, a slice is missing": Kind(
        lacking(MIDDLE, rounded(1)), "SLICE_GAP", options={"gaps": "interpolate"}
    ),
    "rounded to 0.1 mm, two echoes in turn": Kind(
        in_turn({"EchoTime": "4.6"}, {"EchoTime": "30"}), "PHASES", (BALL, LATE)
    ),
    "rounded to 0.1 mm, the spacing changes by 0.1": Kind(
        changed(after(wider_above, rounded(1)), ROUND), "SPACING_CHANGES"
    ),
    "steps of 1.0 and 1.05 mm": Kind(
        changed(lambda k, ds: wider(ds, 0.05 * max(0, k - MIDDLE)), around(step=1.0)),
        "SPACING_CHANGES",
    ),
    "steps of 2.55 and 2.5 mm, a slice is missing": Kind(
        lacking(4, lambda k, ds: wider(ds, 0.05 * min(k, 10))), "SPACING_CHANGES"
    ),
    "two echoes, each with steps of 2.5 and 3 mm": Kind(
        phases(*({"EchoTime": echo, "ImagePositionPatient": uneven} for echo in ("4.6", "30"))),
        "SPACING_CHANGES",
    ),
    "rounded to 0.1 mm, the table wobbles": Kind(
        changed(after(wobble(0.3), rounded(1)), ROUND), "SPACING_CHANGES"
    ),
}


# --- patients -------------------------------------------------------------------------------------


def names(*each: str) -> Edit:
    """Return an edit that assigns these patient names to the slices in turn."""
    return lambda k, ds: assign(ds, PatientName=each[k % len(each)])


PATIENTS: dict[str, Kind] = {
    "a name that ends in delimiters": Kind(
        changed(names("Doe^John", "Doe^John^^", "Doe^John^^^", "Doe^John=", "Doe^John^^=^^="))
    ),
    "a name of which a group ends in delimiters": Kind(
        changed(names("Doe^John^^=Doh^Jon", "Doe^John=Doh^Jon^^"))
    ),
    "a name in capitals": Kind(changed(names("Doe^John", "DOE^JOHN"))),
    "a name of which some slices have another group": Kind(
        changed(names("Doe^John=Doh", "Doe^John"))
    ),
    "a name that some slices lack": Kind(changed(names("Doe^John", ""))),
    "a name of only delimiters, and none": Kind(changed(names("", "^^^^"))),
    **{
        f"two patients, {first} and {second}": Kind(
            changed(names(first, second)), "SEVERAL_PATIENTS"
        )
        for first, second in (
            ("Doe^John", "Doe^^John"),
            ("^Doe", "Doe"),
            ("Doe^John", "Doe^Joh"),
        )
    },
}

# --- repeated elements ----------------------------------------------------------------------------

SPARE = 0x00FE
"""Element number of a placeholder for the second of two elements; unused by the groups here."""


def twice(keyword: str, value: object, k: int | None = None, first: bool = False) -> Maker:
    """Return a writer of a series in which slice k, or each, repeats an element.

    The other value follows the true one, or precedes it with `first`.
    """
    tag = tag_for_keyword(keyword)

    def edit(n: int, ds: Dataset) -> None:
        if k in (None, n):
            true = ds[tag].value
            ds.add_new(stand_in(tag), dictionary_VR(tag), true if first else value)
            if first:
                setattr(ds, keyword, value)

    def make(folder: Path) -> None:
        for path in stack(folder, edit=edit):
            rename(path, tag)

    return make


def stand_in(tag: int) -> int:
    return tag & 0xFFFF0000 | tag & 0xFF00 | SPARE


def rename(path: Path, tag: int, *, big: bool = False) -> None:
    """Replace the placeholder's tag by the element's, so that the element is repeated."""
    order = ">" if big else "<"
    old, new = (struct.pack(f"{order}HH", n >> 16, n & 0xFFFF) for n in (stand_in(tag), tag))
    data = path.read_bytes()
    path.write_bytes(data.replace(old, new))


def in_syntax(make: Maker, syntax: UID, tag: int) -> Maker:
    """Return a writer of the same series in another transfer syntax."""

    def again(folder: Path) -> None:
        rewritten(make, syntax)(folder)
        for path in folder.glob("*.dcm"):
            rename(path, tag, big=syntax == ExplicitVRBigEndian)

    return again


def with_stand_in(folder: Path) -> None:
    stack(folder, edit=lambda k, ds: void(ds.add_new(stand_in(0x00280030), "DS", ["3", "3"])))


def enhanced_twice(keyword: str, content: Dataset, *, shared: bool) -> Maker:
    """Return a writer of an enhanced scan with a repeated functional group."""
    tag = tag_for_keyword(keyword)

    def edit(ds: Dataset) -> None:
        groups = (
            ds.SharedFunctionalGroupsSequence if shared else ds.PerFrameFunctionalGroupsSequence
        )
        groups[0].add_new(stand_in(tag), "SQ", [content])

    def make(folder: Path) -> None:
        enhanced(edit=edit)(folder)
        for path in folder.rglob("*.dcm"):
            rename(path, tag)

    return make


def shared_groups_twice(folder: Path) -> None:
    """Write an enhanced scan with two sequences of shared groups."""

    def edit(ds: Dataset) -> None:
        second_groups = deepcopy(ds.SharedFunctionalGroupsSequence[0])
        second_groups.PixelMeasuresSequence[0].PixelSpacing = ["3", "3"]
        ds.add_new(stand_in(0x52009229), "SQ", [second_groups])

    enhanced(edit=edit)(folder)
    for path in folder.rglob("*.dcm"):
        rename(path, 0x52009229)


def deflated_twice(folder: Path) -> None:
    """Write the second element into the deflated data set."""
    with_stand_in(folder)
    for path in folder.glob("*.dcm"):
        rename(path, 0x00280030)
        data = path.read_bytes()
        end = 144 + int.from_bytes(data[140:144], "little")
        meta = dcmread(path, stop_before_pixels=True).file_meta
        meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
        head = BytesIO()
        write_file_meta_info(head, meta)
        packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        packed = packer.compress(data[end:]) + packer.flush()
        path.write_bytes(bytes(128) + b"DICM" + head.getvalue() + packed)


def class_twice(folder: Path) -> None:
    """Write a second MediaStorageSOPClassUID into each meta header."""
    for path in stack(folder):
        data = path.read_bytes()
        at = data.index(b"\x02\0\x02\0UI")
        size = 8 + int.from_bytes(data[at + 6 : at + 8], "little")
        second_class = data[at : at + size].replace(b".1.1.2\0", b".1.1.4\0")
        length = int.from_bytes(data[140:144], "little") + size
        head = data[:140] + length.to_bytes(4, "little") + data[144 : at + size]
        path.write_bytes(head + second_class + data[at + size :])


TWICE = "HEADER_CONTRADICTS"
DOUBLED: dict[str, Kind] = {
    **{
        f"{keyword} twice{where}{order}": Kind(twice(keyword, value, k, first), TWICE)
        for keyword, value in (
            ("PixelSpacing", ["3", "3"]),
            ("ImagePositionPatient", ["1", "2", "3"]),
            ("RescaleIntercept", "0"),
            ("Columns", 36),
        )
        for k, where in ((None, ""), (MIDDLE, " in one slice"))
        for first, order in ((False, ""), (True, ", the true one last"))
    },
    "PixelSpacing twice, implicit": Kind(
        in_syntax(with_stand_in, ImplicitVRLittleEndian, 0x00280030), TWICE
    ),
    "PixelSpacing twice, big endian": Kind(
        in_syntax(with_stand_in, ExplicitVRBigEndian, 0x00280030), TWICE
    ),
    "PixelSpacing twice, deflated": Kind(deflated_twice, TWICE),
    "PixelSpacing twice, but the same": Kind(twice("PixelSpacing", ["1.6", "1.5"])),
    "the class of the meta header twice": Kind(class_twice, TWICE),
    "a shared group twice": Kind(
        enhanced_twice("PixelMeasuresSequence", item(PixelSpacing=["3", "3"]), shared=True), TWICE
    ),
    "a frame's group twice": Kind(
        enhanced_twice(
            "PlanePositionSequence", item(ImagePositionPatient=["1", "2", "3"]), shared=False
        ),
        TWICE,
    ),
    "the shared groups twice": Kind(shared_groups_twice, TWICE),
}


# --- floating-point pixels ------------------------------------------------------------------------


def floats(keyword: str, kind: str, k: int | None = None) -> Maker:
    """Return a writer of a series in which slice k, or each, has floating-point pixels."""

    def edit(n: int, ds: Dataset) -> None:
        if k in (None, n):
            samples = np.frombuffer(ds.PixelData, "<i2").astype(kind)
            del ds.PixelData
            ds.BitsAllocated = 8 * samples.itemsize
            setattr(ds, keyword, samples.tobytes())

    return changed(edit)


FLOATS: dict[str, Kind] = {
    "float pixels": Kind(floats("FloatPixelData", "<f4"), "PIXEL_TYPE"),
    "double pixels": Kind(floats("DoubleFloatPixelData", "<f8"), "PIXEL_TYPE"),
    "float pixels in one slice": Kind(floats("FloatPixelData", "<f4", MIDDLE), "PIXEL_TYPE"),
}

# --- tiles ----------------------------------------------------------------------------------------


def plan_of(geometry: Geometry, count: int = COUNT, upwards: bool = True) -> str:
    """Return the slices of a Siemens protocol: their centres, without zero coordinates."""
    middle = np.array(geometry.across) * geometry.spacing[1] * SHAPE[0] / 2
    middle = middle + np.array(geometry.down) * geometry.spacing[0] * SHAPE[1] / 2
    lines = [f"sSliceArray.lSize\t = \t{count}"]
    for n, k in enumerate(range(COUNT) if upwards else range(COUNT)[::-1]):
        for axis, value in zip(("Sag", "Cor", "Tra"), geometry.position(k) + middle, strict=True):
            if abs(value) > 1e-6:
                lines.append(f"sSliceArray.asSlice[{n}].sPosition.d{axis}\t = \t{value:.9g}")
    text = "\n".join(lines)
    return f"<XProtocol>\n### ASCCONV BEGIN ###\n{text}\n### ASCCONV END ###\n"


def without_creator(make: Maker) -> Maker:
    """Return a writer of mosaics whose CSA header's block no element reserves any more."""

    def again(folder: Path) -> None:
        make(folder)
        ds = dcmread(folder / "m.dcm")
        del ds[0x00290010]
        ds.save_as(folder / "m.dcm")

    return again


def planned(
    geometry: Geometry, plan: str, *, downwards: bool = False, count: int | None = None
) -> Maker:
    """Return a writer of a mosaic with only the CSA series header."""

    def make(folder: Path) -> None:
        mosaic(geometry, csa=False, downwards=downwards)(folder)
        ds = dcmread(folder / "m.dcm")
        if count is not None:
            ds.add_new(0x00190010, "LO", "SIEMENS MR HEADER")
            ds.add_new(0x0019100A, "US", count)
        ds.add_new(0x00290010, "LO", "SIEMENS CSA HEADER")
        ds.add_new(0x00291020, "OB", csa_header({"MrPhoenixProtocol": ("UN", [plan])}))
        ds.save_as(folder / "m.dcm")

    return make


def grid(
    geometry: Geometry,
    edit: Callable[[Dataset], None] = void,
    count: int = COUNT,
    turned: bool = False,
) -> Maker:
    """Return a writer of one UIH grid: twenty slices in five columns and four rows."""

    def make(folder: Path) -> None:
        samples = stored(geometry)[:, :, :count]
        across = math.ceil(math.sqrt(count))
        plane = np.zeros((SHAPE[1] * -(-count // across), SHAPE[0] * across), np.int16)
        ks = range(count)[::-1] if turned else range(count)
        for n, k in enumerate(ks):
            top, column = n // across * SHAPE[1], n % across * SHAPE[0]
            plane[top : top + SHAPE[1], column : column + SHAPE[0]] = samples[:, :, k].T
        ds = dataset_of(plane, np.zeros(3), geometry, Coding(), Words("MR"))
        del ds.ImagePositionPatient
        ds.Manufacturer = "UIH"
        ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = uid("grid")
        ds.InstanceNumber = 1
        ds.ImageType = ["ORIGINAL", "PRIMARY", "M", "NONE", "VFRAME"]
        ds.add_new(0x00650010, "LO", "Image Private Header")
        ds.add_new(0x00651050, "DS", str(count))
        frames = [item(ImagePositionPatient=[f"{v:.9g}" for v in geometry.position(k)]) for k in ks]
        ds.add_new(0x00651051, "SQ", frames)
        edit(ds)
        folder.mkdir(parents=True, exist_ok=True)
        dcmwrite(folder / "grid.dcm", ds, enforce_file_format=True)

    return make


def tile_elsewhere(ds: Dataset) -> None:
    x, y, z = map(float, ds[0x00651051].value[4].ImagePositionPatient)
    ds[0x00651051].value[4].ImagePositionPatient = [x, y, z + 1.1]


def unnamed_type(ds: Dataset) -> None:
    """Write the sequence as raw bytes (UN), as archives do with private sequences."""
    buffer = DicomBytesIO()
    buffer.is_little_endian, buffer.is_implicit_VR = True, True
    for frame in ds[0x00651051].value:
        body = DicomBytesIO()
        body.is_little_endian, body.is_implicit_VR = True, True
        write_dataset(body, frame)
        data = body.getvalue()
        buffer.write(struct.pack("<HHI", 0xFFFE, 0xE000, len(data)) + data)
    del ds[0x00651051]
    ds.add_new(0x00651051, "UN", buffer.getvalue())


def other_block(ds: Dataset) -> None:
    """Move the private attributes into another block."""
    count, frames = ds[0x00651050].value, ds[0x00651051].value
    for tag in (0x00650010, 0x00651050, 0x00651051):
        del ds[tag]
    ds.add_new(0x00650010, "LO", "Public Private Header")
    ds.add_new(0x00650012, "LO", "Image Private Header")
    ds.add_new(0x00651250, "DS", count)
    ds.add_new(0x00651251, "SQ", frames)


def turned_tile(ds: Dataset) -> None:
    for n, frame in enumerate(ds[0x00651051].value):
        turn = ["1", "0", "0", "0", "1", "0"] if n else ["0", "1", "0", "0", "0", "1"]
        frame.ImageOrientationPatient = turn


PLANES_OF_TILES = ("axial", "sagittal", "coronal, rows negated", "doubly oblique")
TILES: dict[str, Kind] = {
    **{
        f"mosaic by its plan, {name}{'' if upwards else ', planned from above'}"
        f"{', tiles from above' if downwards else ''}": Kind(
            planned(around(name), plan_of(around(name), upwards=upwards), downwards=downwards)
        )
        for name in PLANES_OF_TILES
        for upwards in (True, False)
        for downwards in (True, False)
    },
    "mosaic, its header without a creator": Kind(without_creator(mosaic(AXIAL, downwards=True))),
    "mosaic by its plan without a creator": Kind(
        without_creator(planned(AXIAL, plan_of(AXIAL), downwards=True))
    ),
    "mosaic by its plan, implicit, without a creator": Kind(
        rewritten(
            without_creator(planned(around("oblique"), plan_of(around("oblique")))),
            ImplicitVRLittleEndian,
        )
    ),
    "mosaic, a plan of other slices": Kind(planned(AXIAL, plan_of(around(step=3.1))), "MOSAIC"),
    "mosaic, a plan of slices elsewhere": Kind(
        planned(AXIAL, plan_of(replace(AXIAL, origin=tuple(AXIAL.position(5))))), "MOSAIC"
    ),
    "mosaic, a plan of as many slices": Kind(planned(AXIAL, plan_of(AXIAL), count=COUNT)),
    "mosaic, a plan of fewer slices": Kind(
        planned(AXIAL, plan_of(AXIAL, COUNT - 3), count=COUNT), "MOSAIC"
    ),
    "mosaic, a plan of none": Kind(planned(AXIAL, plan_of(AXIAL, 0)), "MOSAIC"),
    "mosaic, a plan of a million": Kind(planned(AXIAL, plan_of(AXIAL, 10**6)), "MOSAIC"),
    **{f"grid, {name}": Kind(grid(around(name))) for name in PLANES_OF_TILES},
    "grid, tiles from above": Kind(grid(AXIAL, turned=True)),
    "grid, tilted": Kind(grid(around(tilt=tilt(12)))),
    "grid, implicit": Kind(rewritten(grid(AXIAL), ImplicitVRLittleEndian)),
    "grid, a sequence of no named type": Kind(grid(AXIAL, unnamed_type)),
    "grid, another private block": Kind(grid(AXIAL, other_block)),
    "grid, no sequence": Kind(grid(AXIAL, lambda ds: void(ds.pop(0x00651051))), "MOSAIC"),
    "grid, no number": Kind(grid(AXIAL, lambda ds: void(ds.pop(0x00651050))), "MOSAIC"),
    "grid, a tile too few": Kind(
        grid(AXIAL, lambda ds: void(ds[0x00651051].value.pop())), "MOSAIC"
    ),
    "grid, a number of 1e9": Kind(
        grid(AXIAL, lambda ds: void(ds.add_new(0x00651050, "DS", "1e9"))), "MOSAIC"
    ),
    "grid, a tile without a place": Kind(
        grid(AXIAL, lambda ds: delattr(ds[0x00651051].value[3], "ImagePositionPatient")), "MOSAIC"
    ),
    "grid, a tile elsewhere": Kind(grid(AXIAL, tile_elsewhere), "SPACING_CHANGES"),
    "grid, tiles turned": Kind(grid(AXIAL, turned_tile), "SLICE_ORIENTATION"),
    "grid, other rows": Kind(grid(AXIAL, lambda ds: void(assign(ds, Rows=143))), "DAMAGED"),
}

KINDS = OWN_FRAMES | ROUNDED | PATIENTS | DOUBLED | FLOATS | TILES
