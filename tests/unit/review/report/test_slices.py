"""Slices of findings: those of the structure, at the end that it reaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scanloom.core import Flag, Measurement
from scanloom.review.preview.page import MosaicSlice, TileMap
from scanloom.review.report.page import read_mosaic, slices_of
from support.make_report import draw_noise, measured

SHAPE = (100, 100, 40)
TILES = TileMap(
    axis=2,
    size=(100, 100),
    tiles=tuple(MosaicSlice(n, 40 - n, 10 * n, 7) for n in (0, 9, 20, 30, 39)),
    to_picture=((1.0, 0.0, 0.0, 0.5), (0.0, 1.0, 0.0, 0.5)),
)


def subject(first: int, last: int, **changes: Any) -> Measurement:
    return measured("m", "liver", 10.0, box=((10, 20, first), (19, 39, last)), **changes)


def numbers(kind: Any, *subjects: Measurement) -> list[int]:
    return [shown["number"] for shown in slices_of(kind, subjects, TILES, SHAPE)]


def test_an_unusual_structure_is_outlined_in_its_middle() -> None:
    [shown] = slices_of("volume", [subject(15, 27)], TILES, SHAPE)

    assert shown == {"number": 20, "area": (200, 7, 100, 100), "outlines": [(210, 27, 10, 20)]}


@pytest.mark.parametrize(
    ("first", "last", "expected"), [(0, 9, [40]), (30, 39, [1]), (0, 39, [1, 40]), (5, 12, [31])]
)
def test_a_structure_at_the_border_is_shown_at_the_ends_that_it_reaches(
    first: int, last: int, expected: list[int]
) -> None:
    """The last one reaches an edge of the slices, not an end of the stack."""
    assert numbers("border", subject(first, last, flags=(Flag.TOUCHES_BORDER,))) == expected


def test_what_has_no_place_has_no_slice() -> None:
    assert numbers("scan") == []
    assert numbers("empty", measured("m", "liver", 0.0)) == []


def test_a_pair_shares_a_slice() -> None:
    assert numbers("imbalance", subject(18, 22), subject(19, 22)) == [20]


def test_pictures_without_a_map_have_no_mosaic(tmp_path: Path) -> None:
    assert read_mosaic(draw_noise(tmp_path / "p.png", 0, (40, 40))) is None
    (tmp_path / "q.png").write_bytes((tmp_path / "p.png").read_bytes()[:20])
    assert read_mosaic(tmp_path / "q.png") is None
