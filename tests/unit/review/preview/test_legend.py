from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scanloom.cards.codes import coding, shown_name
from scanloom.convert import totalsegmentator
from scanloom.core import Flag, Grid, Layer, Segmentation, Structure, Volume
from scanloom.ops.measure import measure
from scanloom.review.preview.page import Legend, legend_entries, legend_notes, rounded_milliliters
from support.review_phantoms import case, structure, torso

TASKS = Path(totalsegmentator.__file__).with_suffix(".json")


def test_structures_come_by_volume():
    """The largest first, each with its name, colour and volume; absent structures are left out."""
    array, labels, affine = torso()
    structures = (
        structure(2, "Left", (1, 2, 3)),
        structure(1, "Body"),
        structure(9, "Absent"),
        structure(3, "Front", experimental=True),
    )

    colors = {("model", s.number): s.color for s in structures}
    entries = legend_entries(*case(array, labels, affine, structures)[1:], colors)

    ml = 4 * 5 * 6 / 1000
    assert [entry.text for entry in entries] == ["Body", "Left", "Front"]
    assert entries[0].amount == f"{np.count_nonzero(labels == 1) * ml:,.0f} ml"
    assert entries[1].color == (1, 2, 3)
    assert entries[2].tag == "(exp.)"


def test_models_are_named_where_there_are_two():
    """Each model's structures stand below its name."""
    labels = np.ones((4, 4, 4), np.uint8)
    grid = Grid(labels.shape, np.eye(4))
    models = [Segmentation(m, (Layer(labels, (structure(1, "Liver"),)),), grid) for m in "ab"]
    volume = Volume(labels, grid, "HU", "CT")
    measurements = [m for s in models for m in measure(s, volume)]

    colors = {("a", 1): (1, 2, 3), ("b", 1): (1, 2, 3)}
    assert texts(models, measurements, colors) == ["a", "Liver", "b", "Liver"]
    assert texts(models[:1], measurements[:1], colors) == ["Liver"]


def texts(*results) -> list[str]:
    return [entry.text for entry in legend_entries(*results)]


def test_many_structures_are_grouped_by_system_and_none_is_left_out():
    """All 117 of TotalSegmentator, in full, below the names of their systems."""
    names = json.loads(TASKS.read_text())["classes"]["total"].values()
    codes = [coding(name) for name in names]
    structures = tuple(
        Structure(f"s{n}", n, name, c.category, c.type, (n, 9, 200), c.laterality)
        for n, (name, c) in enumerate(zip(names, codes, strict=True), start=1)
    )
    labels = (np.arange(4**5) % 118).reshape(16, 8, 8).astype(np.uint8)
    results = case(labels.astype(np.int16), labels, np.eye(4), structures)[1:]

    entries = legend_entries(*results, {("model", s.number): s.color for s in structures})

    assert {entry.text for entry in entries} >= {shown_name(name) for name in names}
    assert [e.text for e in entries if e.color is None][:2] == [
        "Digestive system",
        "Urinary and reproductive system",
    ]
    heights = Legend(tuple(entries), ()).heights()
    assert heights[4] < heights[3] < heights[2] < heights[1]


def test_known_errors_of_the_models_are_said():
    """Each sentence once, before the flags."""
    _, segmentations, measurements = case(*torso())

    notes = legend_notes(segmentations, measurements, [Flag.SHEARED], ["Kidneys count as bone"] * 2)

    assert [n.text for n in notes] == ["Limitation: Kidneys count as bone", Flag.SHEARED.text]


def test_the_mark_of_experimental_structures_is_explained_only_where_it_stands():
    """Not if the only one was not found."""
    array, labels, affine = torso()
    structures = (structure(1, "Body"), structure(9, "Absent", experimental=True))
    _, segmentations, measurements = case(array, labels, affine, structures)

    notes = [n.text for n in legend_notes(segmentations, measurements, [])]

    assert notes == ["Not found: Absent"]


@pytest.mark.parametrize(
    ("volume", "text"),
    [
        (12345.6, "12,346"),
        (100, "100"),
        (99.97, "100"),
        (99.4, "99.4"),
        (1, "1.0"),
        (0.082, "0.082"),
        (5e-5, "< 0.001"),
        (0, "0"),
    ],
)
def test_volumes_have_the_digits_that_mean_something(volume, text):
    assert rounded_milliliters(volume) == text


def test_notes_say_what_must_be_known():
    """Flags once each, a part as a part, missing structures by name, and not a word more."""
    array, labels, affine = torso()
    structures = (structure(1, "Body"), *(structure(n, f"No {n}") for n in range(10, 18)))
    _, segmentations, inside = case(array, labels, affine, structures)
    labels[0] = 1
    _, _, touching = case(array, labels, affine, structures)

    texts = [n.text for n in legend_notes(segmentations, inside, [Flag.SHEARED, Flag.SHEARED])]
    at_border = [n.text for n in legend_notes(segmentations, touching, [])]

    assert texts == [
        Flag.SHEARED.text,
        "Not found: No 10, No 11, No 12, No 13, No 14, No 15, No 16, No 17",
    ]
    assert at_border[0].startswith("* ")
    assert len(at_border) == 2


def test_a_volume_outside_the_usual_range_has_a_mark():
    """Beside that of a cut one; a structure that was not found has none."""
    array, labels, affine = torso()
    labels[0] = 1
    structures = (structure(1, "Body"), structure(9, "Absent"))
    _, segmentations, measurements = case(array, labels, affine, structures)
    flagged = [replace(m, flags=(*m.flags, Flag.OUT_OF_RANGE)) for m in measurements]

    [entry] = legend_entries(segmentations, flagged, {("model", 1): (1, 2, 3)})
    notes = [n.text for n in legend_notes(segmentations, flagged, [])]

    assert entry.amount.endswith(" ml*!")
    assert [text[:2] for text in notes] == ["! ", "* ", "No"]
    assert [n.text[:2] for n in legend_notes(segmentations, measurements, [])] == ["* ", "No"]


def test_nothing_found_is_said_first():
    """An empty result is not a blank legend."""
    array, labels, affine = torso()
    _, segmentations, measurements = case(array, labels * 0, affine)

    notes = legend_notes(segmentations, measurements, [Flag.SHEARED])

    assert [n.text for n in notes] == ["No structure was found in this scan", Flag.SHEARED.text]
