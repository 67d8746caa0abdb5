"""Kinds of series that other readers read right and scanloom once refused, and their neighbours.

As in `kinds`: a kind says what reading it has to give.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydicom import Dataset

from balls import BALL, LATE, Ball, around
from dicom_maker import Edit, Geometry, uid
from kinds import (
    AXIAL,
    MIDDLE,
    Kind,
    Maker,
    assign,
    changed,
    phases,
    stack,
    tilt,
)

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
    """Draw two balls side by side, each slice in a frame of reference of its own."""
    for n, (geometry, ball) in enumerate(((AXIAL, BALL), (around("coronal"), LATE))):

        def edit(k: int, ds: Dataset, n: int = n) -> None:
            assign(ds, SOPInstanceUID=uid("stack", n, k), FrameOfReferenceUID=uid("frame", n, k))

        stack(folder / str(n), geometry, ball, edit)


def own_frames_of_phases(folder: Path) -> None:
    frames = ({"FrameOfReferenceUID": lambda k, n=n: uid("frame", n, k)} for n in (0, 1))
    phases(*frames)(folder)


def lacking(k: int, edit: Edit) -> Maker:
    """Return the maker of a series that lacks one slice."""

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
    """Return the edit that rounds each position to so many decimals."""

    def edit(k: int, ds: Dataset) -> None:
        ds.ImagePositionPatient = [f"{float(v):.{digits}f}" for v in ds.ImagePositionPatient]

    return edit


def moved(geometry: Geometry) -> Geometry:
    """Return slices of which the first does not lie at whole tenths."""
    return replace(geometry, origin=tuple(np.add(geometry.origin, (0.037, -0.043, 0.031))))


def after(first: Edit, then: Edit) -> Edit:
    """Return both edits, one after the other."""

    def edit(k: int, ds: Dataset) -> None:
        first(k, ds)
        then(k, ds)

    return edit


def wobble(amount: float) -> Edit:
    """Return the edit that moves every third slice along z, by mm."""

    def edit(k: int, ds: Dataset) -> None:
        x, y, z = map(float, ds.ImagePositionPatient)
        ds.ImagePositionPatient = [x, y, z + amount * (k % 3 == 1)]

    return edit


def wider_above(k: int, ds: Dataset) -> None:
    """Give the slices above the middle a larger distance, by a tenth of a mm."""
    x, y, z = map(float, ds.ImagePositionPatient)
    ds.ImagePositionPatient = [x, y, z + 0.1 * max(0, k - MIDDLE)]


def in_turn(*each: dict[str, Any], balls: tuple[Ball, ...] = (BALL, LATE)) -> Maker:
    """Return the maker of stacks one within the other, told apart, all positions rounded."""

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
    "rounded to 0.1 mm, the table wobbles": Kind(
        changed(after(wobble(0.3), rounded(1)), ROUND), "SPACING_CHANGES"
    ),
}


# --- patients -------------------------------------------------------------------------------------


def names(*each: str) -> Edit:
    """Return the edit that gives the slices these names in turn."""
    return lambda k, ds: assign(ds, PatientName=each[k % len(each)])


PATIENTS: dict[str, Kind] = {
    "a name that ends in delimiters": Kind(
        changed(names("Doe^John", "Doe^John^^", "Doe^John^^^", "Doe^John=", "Doe^John^^=^^="))
    ),
    "a name of which a group ends in delimiters": Kind(
        changed(names("Doe^John^^=Doh^Jon", "Doe^John=Doh^Jon^^"))
    ),
    "a name of only delimiters, and none": Kind(changed(names("", "^^^^"))),
    **{
        f"two patients, {one} and {other}": Kind(changed(names(one, other)), "DUPLICATE_SLICES")
        for one, other in (
            ("Doe^John", "Doe^^John"),
            ("Doe^John", "DOE^JOHN"),
            ("Doe", "=Doe"),
            ("^Doe", "Doe"),
            ("Doe^John", "Doe^Joh"),
        )
    },
}

KINDS = OWN_FRAMES | ROUNDED | PATIENTS
