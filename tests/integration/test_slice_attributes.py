"""Each attribute of the table, in four patterns: nothing is mixed, and nothing is split in vain."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import numpy as np
import pytest
from pydicom import Dataset, dcmread

import scanloom
from scanloom.core import ScanError
from scanloom.io.dicom.slice_attributes import SLICE_ATTRIBUTES, Rule
from scanloom.io.index.build import build_index
from support.dicom_kinds.attributes import (
    IN_FRAMES,
    MEANING,
    PATTERNS,
    RECORDED,
    THEIRS,
    TRUTHS,
    Drawing,
)
from support.write_dicom import Geometry, noise, write_series
from support.write_multiframe import frames_of, item, write_enhanced

SEED = int(os.environ.get("SCANLOOM_SEED") or secrets.randbits(32))
"""Changes between runs; `SCANLOOM_SEED` repeats one."""
OF_GEOMETRY = ("SpacingBetweenSlices", "GantryDetectorTilt")
"""Attributes that are compared with the positions instead."""
OF_NUCLEAR_FRAMES = (
    *("EnergyWindowVector", "DetectorVector", "PhaseVector"),
    *("RRIntervalVector", "TimeSlotVector", "TimeSliceVector"),
)


def outcome(folder: Path, count: int) -> str:
    """Return how a series is read: as a whole with or without a flag, split, or refused."""
    try:
        volume = scanloom.load_volume(folder)
    except ScanError as error:
        if error.code != "PHASES":
            return error.code
        for phase in range(2):
            values = np.unique(scanloom.load_volume(folder, phase=phase).array)
            assert len(values) == 1, "a volume of two meanings"
        return "PHASES"
    assert volume.array.shape[2] == count
    assert THEIRS in volume.array
    return "flagged" if "SLICES_DIFFER" in {flag.code for flag in volume.flags} else "whole"


def expected(rule: str, pattern: str) -> tuple[str, ...]:
    if rule == MEANING and pattern != "harmless":
        return ("PHASES", "MIXED_SLICES") if pattern == "alternating" else ("MIXED_SLICES",)
    return ("flagged",) if rule == RECORDED and pattern != "harmless" else ("whole",)


CASES = [
    (name, pattern)
    for name, truth in TRUTHS.items()
    for pattern in PATTERNS
    if pattern != "harmless" or truth.alike
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "pattern"),
    [pytest.param(*x, marks=pytest.mark.thorough if n % 3 else ()) for n, x in enumerate(CASES)],
)
def test_slices_are_mixed_split_or_flagged_as_the_table_says(tmp_path, name, pattern):
    truth, drawing = TRUTHS[name], Drawing(SEED, pattern)
    drawing.write(tmp_path, truth)
    result = outcome(tmp_path, len(drawing.differing()))
    assert result in expected(truth.rule, pattern), f"SCANLOOM_SEED={SEED}"


@pytest.mark.parametrize("pattern", [p for p in PATTERNS if p != "harmless"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.thorough if n % 3 else ()) for n, x in enumerate(IN_FRAMES)],
)
def test_frames_are_mixed_split_or_flagged_as_the_table_says(tmp_path, name, pattern):
    location, drawing = IN_FRAMES[name], Drawing(SEED, pattern)
    drawing.write_frames(tmp_path, location)
    result = outcome(tmp_path, len(drawing.differing()))
    assert result in expected(location[-1], pattern), f"SCANLOOM_SEED={SEED}"


def reason(folder: Path) -> str:
    """Return the code with which a series is refused by the reader and the index alike."""
    (series,) = build_index([folder], bytes(32)).series
    if not series.info.reason:
        scanloom.load_volume(folder)
        return ""
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(folder)
    assert caught.value.code == series.info.reason
    return caught.value.code


@pytest.mark.parametrize(
    ("keyword", "first", "second", "code"),
    [
        ("ContrastBolusVolume", "100", "0.0", "MIXED_SLICES"),
        ("ContrastBolusVolume", "100", "97.5", ""),
        ("ContrastBolusTotalDose", "100", "0.0", "MIXED_SLICES"),
        ("ContrastBolusTotalDose", "100", "97.5", ""),
        ("ContrastBolusIngredient", "IODINE", None, "MIXED_SLICES"),
    ],
)
def test_contrast_that_no_agent_names_is_not_mixed_with_none(
    tmp_path, monkeypatch, keyword, first, second, code
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = write_series(tmp_path, noise())
    for n, file in enumerate(sorted(files, key=lambda f: dcmread(f).ImagePositionPatient[2])):
        header = dcmread(file)
        setattr(header, keyword, first if n > 2 else second)
        header.save_as(file)
    assert reason(tmp_path) == code


def test_a_second_agent_is_not_mixed_with_the_first_alone(tmp_path, monkeypatch):
    """Drunk before the scan, and injected in it."""

    def usage(number: int, administered: str) -> Dataset:
        return item(ContrastBolusAgentNumber=number, ContrastBolusAgentAdministered=administered)

    def edit(ds: Dataset) -> None:
        for n, group in enumerate(ds.PerFrameFunctionalGroupsSequence):
            agents = [usage(1, "YES"), usage(2, "YES" if n > 2 else "NO")]
            group.ContrastBolusUsageSequence = agents

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    geometry = Geometry()
    write_enhanced(tmp_path / "object.dcm", frames_of(noise(), geometry), edit=edit)
    assert reason(tmp_path) == "MIXED_SLICES"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_index_and_reading_agree(tmp_path, monkeypatch, pattern):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = [name for name, truth in TRUTHS.items() if pattern != "harmless" or truth.alike][::7]
    for name in names:
        folder, drawing = tmp_path / pattern / name, Drawing(SEED, pattern)
        drawing.write(folder, TRUTHS[name])
        (series,) = build_index([folder], bytes(32)).series
        result = outcome(folder, len(drawing.differing()))
        assert series.info.reason == ("" if result in ("whole", "flagged") else result), name


def test_every_attribute_of_the_table_is_drawn_and_has_its_rule():
    rules = {Rule.MEANING: MEANING, Rule.RECORDED: RECORDED}
    drawn = {name: truth.rule for name, truth in TRUTHS.items()}
    drawn = {name: rule for name, (*_, rule) in IN_FRAMES.items()} | drawn
    table = {a.name: rules.get(a.rule, "ignored") for a in SLICE_ATTRIBUTES}
    for name in (*OF_GEOMETRY, *OF_NUCLEAR_FRAMES):
        del table[name]
    assert table == drawn
