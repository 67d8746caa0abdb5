"""Slices that differ in meaning are never combined into one volume."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydicom import Dataset
from pydicom.tag import Tag

import scanloom
from scanloom.core import ScanError
from scanloom.io.dicom.slice_attributes import (
    ADAPTED_SHARE,
    ROUNDING_SHARE,
    VOLTAGE_SHARE,
    Rule,
    attributes_with,
)
from scanloom.io.index.build import build_index
from support.dicom_kinds.base import AXIAL, stored
from support.dicom_kinds.mixed import (
    ATTRIBUTES,
    CREATORS,
    MAY_LACK,
    OURS,
    THEIRS,
    WHICH,
    Mixture,
    mixtures,
    two_kinds,
    write_private,
)
from support.write_multiframe import frames_of, write_enhanced

ALL = tuple(mixtures())


def values_of(folder: Path, **options: Any) -> set[float] | str:
    """Return the distinct voxel values of a volume, or the reason code of its refusal."""
    try:
        return set(np.unique(scanloom.load_volume(folder, **options).array).tolist())
    except ScanError as error:
        return error.code


@pytest.mark.sampled(3)
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_slices_that_differ_in_meaning_are_not_a_volume(tmp_path, attribute, step):
    """One slice, two or half of them differ; stacked or interleaved; other values or none."""
    outcomes, expected = {}, {}
    ours = [mixture for mixture in ALL if mixture.attribute == attribute]
    first = list(ATTRIBUTES).index(attribute) % step  # so that attributes differ in their mixtures
    for n, mixture in enumerate(ours[first::step]):
        folder = tmp_path / str(n)
        mixture.write(folder)
        outcomes[mixture] = values_of(folder)
        expected[mixture] = next(
            (c for c in mixture.codes if c == outcomes[mixture]), mixture.codes
        )
        for phase in (0, 1):
            values = values_of(folder, phase=phase)
            assert isinstance(values, str) or len(values) == 1, (mixture, phase)
    assert outcomes == expected


def test_every_tag_on_which_slices_agree_is_among_the_attributes():
    mixed = {int(Tag(tag)) for tag, *_ in ATTRIBUTES.values()}
    elsewhere = (  # drawn in test_slice_attributes.py
        *("FrameType", "VolumeBasedCalculationTechnique", "ContrastBolusAgentAdministered"),
        *("ContrastBolusVolume", "ContrastBolusTotalDose", "ContrastBolusIngredient"),
    )
    meaning = {tag for a in attributes_with(Rule.MEANING) for tag in a.tags}
    assert meaning - mixed - {int(Tag(keyword)) for keyword in elsewhere} == set()


@pytest.mark.parametrize("keyword", ["StudyDate", "AcquisitionDate", "ContentDate", "Manufacturer"])
def test_enhanced_objects_that_differ_in_meaning_are_not_a_volume(tmp_path, keyword):
    frames = frames_of(stored(AXIAL), AXIAL)
    for n, value in enumerate(("20250102", "20100102")):

        def edit(ds: Any, value: str = value) -> None:
            setattr(ds, keyword, value)

        write_enhanced(tmp_path / f"{n}.dcm", frames[n * 10 : n * 10 + 10], edit=edit, number=n)
    assert values_of(tmp_path) == "MIXED_SLICES"


@pytest.mark.parametrize("block", [0x10, 0xFB])
@pytest.mark.parametrize("name", [name for name in ATTRIBUTES if name.startswith("direction, ")])
def test_enhanced_frames_that_differ_in_a_private_direction_are_not_a_volume(tmp_path, name, block):
    """Each component of the direction counts, although the others are equal."""
    tag, _, _, second = ATTRIBUTES[name]

    def edit(ds: Dataset) -> None:
        for n, group in enumerate(ds.PerFrameFunctionalGroupsSequence):
            private = Dataset()
            for neighbor, (t, vr, *values) in ATTRIBUTES.items():
                if neighbor.startswith("direction, ") and CREATORS[neighbor] == CREATORS[name]:
                    private.add_new(Tag(t) & 0xFFFF0000 | block, "LO", CREATORS[neighbor])
                    shifted = Tag(t) & 0xFFFF00FF | block << 8
                    private.add_new(shifted, vr, second if t == tag and n >= 10 else values[0])
            group.UnassignedPerFrameConvertedAttributesSequence = [private]

    write_enhanced(tmp_path / "0.dcm", frames_of(stored(AXIAL), AXIAL)[:20], edit=edit)
    assert values_of(tmp_path) == "MIXED_SLICES"


@pytest.mark.parametrize("name", CREATORS)
def test_private_attributes_count_in_any_block_of_their_creator(tmp_path, name):
    """PS3.5 7.8.1: a creator reserves any block that is free."""
    for block in (0x10, 0x12, 0xFF):
        creators = {0x10: "ANOTHER CREATOR", 0x11: "", block: CREATORS[name]}
        write_private(tmp_path / str(block), name, creators, block)
        assert values_of(tmp_path / str(block)) in ("PHASES", "MIXED_SLICES")


@pytest.mark.parametrize("name", CREATORS)
def test_private_attributes_of_other_creators_are_ignored(tmp_path, name):
    for block, creators in (
        (0x10, {0x10: "ANOTHER CREATOR"}),
        (0x10, {0x10: "ANOTHER CREATOR", 0x11: CREATORS[name]}),
        (0x11, {0x10: CREATORS[name]}),
    ):
        folder = tmp_path / f"{block} {len(creators)}"
        write_private(folder, name, creators, block)
        assert values_of(folder) == {OURS, THEIRS}


def test_every_private_attribute_is_tried_with_its_creator():
    private = {name for name, (tag, *_) in ATTRIBUTES.items() if Tag(tag).is_private}
    assert private == CREATORS.keys()


def test_the_mixtures_are_complete():
    assert len(ALL) > 300


@pytest.mark.parametrize("attribute", MAY_LACK)
def test_attributes_that_slices_may_lack_do_not_prevent_reading(tmp_path, attribute):
    Mixture(attribute, "each second", lacking=True).write(tmp_path)
    assert OURS in values_of(tmp_path)


def test_the_index_agrees_with_reading(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for n, lacking in enumerate((True, False)):
        folder = tmp_path / str(n)
        Mixture("EchoTime", "the upper half", lacking=lacking).write(folder)
        (series,) = build_index([folder], bytes(32)).series
        assert series.info.reason == values_of(folder)
        verb = "is missing" if lacking else "differs"
        assert series.info.detail == f"EchoTime {verb} in 6 of 12 slices"


@pytest.mark.parametrize("which", WHICH)
def test_slices_with_equal_values_in_another_notation_are_read(tmp_path, which):
    """A number with more digits, or words in another order, has the same meaning."""
    has_second_value = WHICH[which]

    def edit(k: int, ds: Any) -> None:
        ds.EchoTime = "4.600" if has_second_value(k) else "4.6"
        ds.CorrectedImage = ["ATTN", "DECY"] if has_second_value(k) else ["DECY", "ATTN"]
        ds.FlipAngle = "15.2" if has_second_value(k) else "15"

    two_kinds(tmp_path, has_second_value, edit)
    assert len(values_of(tmp_path)) == 2


@settings(max_examples=25)
@given(
    keyword=st.sampled_from(["EchoTime", "InversionTime", "FlipAngle", "KVP"]),
    value=st.floats(1.0, 900.0),
    share=st.one_of(st.floats(0.0, 0.9), st.floats(0.9, 1.1), st.floats(1.1, 3.5)),
    which=st.sampled_from(list(WHICH)),
)
def test_only_rounded_numbers_count_as_equal(keyword, value, share, which):
    has_second_value = WHICH[which]
    shares = {"InversionTime": ADAPTED_SHARE, "KVP": VOLTAGE_SHARE}
    allowed = shares.get(keyword, ROUNDING_SHARE)
    assume(abs(share - 1) > 0.01)

    def edit(k: int, ds: Any) -> None:
        setattr(ds, keyword, f"{value / (1 - share * allowed):.6g}")
        if not has_second_value(k):
            setattr(ds, keyword, f"{value:.6g}")

    with TemporaryDirectory() as folder:
        two_kinds(Path(folder), has_second_value, edit)
        values = values_of(Path(folder))
    if share < 1:
        assert not isinstance(values, str)
    else:
        assert values in ("PHASES", "MIXED_SLICES")
