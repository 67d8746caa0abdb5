"""One order of series, the best first: each rule decides only where those before it do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import scanloom
from scanloom.cards.card import ANY_MODALITY
from scanloom.core import ReadOptions, ScanError, Series
from scanloom.io.index.inspection import SeriesInfo, describe_as_read
from scanloom.io.index.listing import describe_series
from scanloom.io.index.ranking import (
    Preference,
    best_first,
    describe_selection,
    kernel_kind,
    preference_of,
    select_series,
)
from scanloom.io.index.series import find_series
from support.archives import series

THIN = SeriesInfo(
    modality="CT",
    shape=(512, 512, 300),
    spacing=(0.7, 0.7, 1.0),
    date="20250102101500",
    number=4,
    image_type="ORIGINAL\\PRIMARY\\AXIAL",
    kernel="Br40d\\3",
)


def like(mm: float = 1.0, count: int = 300, **changes: object) -> SeriesInfo:
    info = THIN._replace(spacing=(0.7, 0.7, mm), shape=(512, 512, count))
    return info._replace(**changes)


SOFT = Preference(kernel="soft")
RULES = {
    "the modality of the model": (
        like(5, 60),
        like(modality="PT"),
        Preference(modality="CT"),
    ),
    "original": (like(5, 60), like(image_type="DERIVED\\SECONDARY"), Preference()),
    "no short piece": (like(5, 60), like(0.6, 60), Preference()),
    "not the longest one only": (like(1, 200), like(2, 180), Preference()),
    "thin": (like(1, 300), like(2, 150), Preference()),
    "thin, but not too thin": (like(1, 300), like(0.4, 750), Preference(spacing=(0.5, 3))),
    "thin, but not too thick": (like(3, 100), like(3.2, 94), Preference(spacing=(0.5, 3))),
    "at the end of the range": (like(3.0000001, 100), like(0.4, 750), Preference(spacing=(1, 3))),
    "nearest to the range": (like(0.4, 750), like(0.2, 1500), Preference(spacing=(0.5, 3))),
    "preferred spacing": (like(5, 60), like(1), Preference((None), (0.5, 3), 5.0)),
    "coverage": (like(1, 330), like(1, 300, number=1), Preference()),
    "coverage before the kernel": (like(1, 330, kernel="Br60"), like(), SOFT),
    "soft": (like(number=9), like(kernel="Br64d", date="2026"), SOFT),
    "soft before unknown": (like(number=9), like(kernel="own", date="2026"), SOFT),
    "unknown before sharp": (like(kernel=""), like(kernel="BONEPLUS", date="2026"), SOFT),
    "sharp": (like(kernel="LUNG"), like(), Preference(kernel="sharp")),
    "newest": (like(date="20250102101501", number=9), like(), Preference()),
    "the date first": (like(date="2026", image_type="DERIVED"), like(), Preference(newest=True)),
    "some date before none": (like(number=9), like(date=""), Preference()),
    "series number": (like(number=3), like(), Preference()),
    "some number before none": (like(), like(number=-1), Preference()),
    "a known size before none": (like(5, 60), like(shape=(), spacing=()), Preference()),
    "a tenth of a millimetre is no difference": (like(1.04, 300, number=1), like(), Preference()),
}


@pytest.mark.parametrize("name", RULES)
def test_each_rule(name: str) -> None:
    better, worse, better_first = RULES[name]
    assert best_first([better, worse], better_first) == [0, 1]
    assert best_first([worse, better], better_first) == [1, 0]


def test_what_is_equal_stays_in_order() -> None:
    assert best_first([THIN, THIN, THIN]) == [0, 1, 2]
    assert best_first([]) == []


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        *((name, "soft") for name in ("B30f", "Br40d\\3", "I31s", "STANDARD", "SOFT", "B", "FC18")),
        *((name, "sharp") for name in ("B70s", "Bl57d", "LUNG", "BoNe", "YC", "FC30", "FC51")),
        *((name, None) for name in ("", "own", "7", "FCx")),
    ],
)
def test_kernels(kernel: str, kind: str | None) -> None:
    assert kernel_kind(kernel) == kind


def card(modality: str = "CT", spacing: object = None, kernel: object = None) -> SimpleNamespace:
    limits = SimpleNamespace(low=spacing[0], high=spacing[1]) if spacing else None
    return SimpleNamespace(
        channels=(SimpleNamespace(modality=modality),),
        checks=SimpleNamespace(spacing=limits),
        kernel=kernel,
    )


def test_models_are_asked_what_they_agree_on() -> None:
    def of(*cards: SimpleNamespace) -> Preference:
        return preference_of(cards)

    assert of() == Preference()
    assert of(card("MR", (0.5, 3), "soft")) == Preference("MR", (0.5, 3), kernel="soft")
    assert of(card(spacing=(0.5, 3)), card(spacing=(1, 5))) == Preference("CT", (1, 3))
    assert of(card(spacing=(0.5, 1)), card("MR", (2, 5), "soft")) == Preference()
    assert of(card(ANY_MODALITY)) == Preference()
    assert of(card(ANY_MODALITY), card("MR")) == Preference("MR")


@pytest.fixture
def study(tmp_path: Path) -> Path:
    folder = tmp_path / "study"
    folder.mkdir()
    series(folder, "long", count=9)
    series(folder, "short", count=4)
    series(folder, "made", count=12, ImageType=["DERIVED", "SECONDARY", "MPR"])
    for n, path in enumerate(series(folder, "gap", count=11, modality="MR")):
        if n == 4:
            path.unlink()
    return folder


def counts(all_series: tuple[scanloom.core.Series, ...]) -> list[int]:
    return [len(series.files) for series in all_series]


def test_the_best_of_a_folder(study: Path) -> None:
    all_series = find_series(study)
    assert counts(all_series) == [12, 10, 9, 4]
    assert counts(select_series(all_series, "best")) == [9]
    filled = ReadOptions(gaps="interpolate")
    assert counts(select_series(all_series, "best", Preference(modality="MR"), filled)) == [10]
    assert scanloom.load_volume(study, series="best").grid.shape[2] == 9
    volume = scanloom.load_volume(study, series="best", gaps="interpolate", modality="MR")
    assert (volume.grid.shape[2], volume.modality) == (11, "MR")


def test_all_of_a_folder_but_what_was_computed(study: Path) -> None:
    all_series = find_series(study)
    assert counts(select_series(all_series, "all")) == [10, 9, 4]
    with pytest.raises(ScanError) as caught:
        select_series(all_series[:1], "all")
    assert caught.value.code == "DERIVED"
    with pytest.raises(ValueError, match="one volume"):
        scanloom.load_volume(study, series="all")


def test_one_is_still_chosen_by_number_or_not_at_all(study: Path) -> None:
    all_series = find_series(study)
    assert counts(select_series(all_series, "4")) == [4]
    with pytest.raises(ScanError) as caught:
        select_series(all_series)
    assert caught.value.code == "SERIES_AMBIGUOUS"


@pytest.fixture
def named(tmp_path: Path) -> tuple[Series, ...]:
    """Three series with descriptions, whose SeriesNumbers contradict their places in the list."""
    for count, number, text in ((9, 3, "T1 MPRAGE"), (7, 7, "T1 mprage post"), (5, 1, "FLAIR")):
        folder = tmp_path / f"n{number}"
        folder.mkdir()
        attributes = {"SeriesDescription": text, "SeriesNumber": number}
        series(folder, text[:5], count=count, **attributes)
    return find_series(tmp_path)


@pytest.mark.parametrize(
    ("text", "number"),
    [("FLAIR", 1), ("flair", 1), ("t1  mprage", 3), ("post", 7), ("3", 1), ("1", 3)],
)
def test_a_series_is_chosen_by_its_name_or_a_unique_part(
    named: tuple[Series, ...], text: str, number: int
) -> None:
    """An exact name precedes names that contain it, and a number is the place in the list."""
    assert [series.number for series in select_series(named, text)] == [number]


@pytest.mark.parametrize(
    ("text", "code", "says", "listed"),
    [
        ("t1", "SERIES_AMBIGUOUS", "2 of 3 series have this name", 2),
        ("T2", "SERIES_UNKNOWN", "none has this UID or name", 3),
        (
            "7",
            "SERIES_UNKNOWN",
            "none is number 7 of the list (#); the SeriesNumber 7 is at # 2",
            3,
        ),
        ("99", "SERIES_UNKNOWN", "none is number 99 of the list", 3),
        ("bset", "SERIES_UNKNOWN", "did you mean best?", 3),
        (" ", "SERIES_UNKNOWN", "none has this UID or name", 3),
    ],
)
def test_a_refused_choice_lists_the_series(
    named: tuple[Series, ...], text: str, code: str, says: str, listed: int
) -> None:
    with pytest.raises(ScanError) as caught:
        select_series(named, text)
    assert caught.value.code == code
    assert says in caught.value.detail
    _, *rows = caught.value.private.splitlines()
    assert sum(row.split()[0].isdecimal() for row in rows) == listed
    assert rows[-1] == "# is the number in this list, DICOM # the SeriesNumber of the headers"
    assert "--" not in str(caught.value)


def test_what_else_a_choice_may_have_meant_is_said(named: tuple[Series, ...]) -> None:
    first, second, third = named
    assert describe_selection(named, "3", third) == (
        "3 is the number in the list (#); the SeriesNumber 3 is at # 1",
    )
    assert describe_selection(named, "2", second) == ()
    assert describe_selection(named, None, first) == ()
    assert describe_selection(named, "best", first) == ()  # all are of a single study
    of_other_study = replace(third, study_uid="1.2")
    [remark] = describe_selection((first, second, of_other_study), "best", first)
    assert "all 3 series at this path, of 2 studies" in remark


def test_a_series_is_described_in_a_line(named: tuple[Series, ...]) -> None:
    first = named[0]
    info = describe_as_read(first)
    folder = first.files[0].parent
    assert describe_series(first, info, 300) == (
        f'"T1 MPRAGE", CT, 9 slices of 2.5 mm, folder {folder}'
    )
    for width in (80, 64):
        line = describe_series(first, info, width)
        assert len(line) <= width
        assert line.endswith(folder.name)
    assert "CT, 9 files, folder" in describe_series(first, SeriesInfo(modality="CT"), 300)


def test_where_none_gives_a_volume_the_largest_says_why(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    series(tmp_path / "a", "few", count=2)
    series(tmp_path / "a", "fewer", count=1)
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(tmp_path, series="best")
    assert caught.value.code == "TOO_FEW_SLICES"
    assert "none of 2 series" in caught.value.detail


def test_the_best_is_told_by_what_reading_it_would_say(tmp_path: Path) -> None:
    """A cut file is no candidate, and the same sent twice is one volume."""
    cut = series(tmp_path, "cut", count=9)[3]
    cut.write_bytes(cut.read_bytes()[:-30])
    series(tmp_path, "whole", count=5)
    assert scanloom.load_volume(tmp_path, series="best").grid.shape[2] == 5
