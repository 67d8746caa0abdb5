from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scanloom.review.preview.page import (
    CONTENT_WIDTH,
    GAP,
    Frame,
    arrange_mosaic,
    arrange_planes,
    column_width,
    fill_row,
)

LENGTH = st.floats(0.5, 3000)
LEGEND = {1: 240, 2: 130, 3: 90, 4: 70}


def apart(a: Frame, b: Frame, gap: int) -> bool:
    return (
        a.x + a.width + gap <= b.x
        or b.x + b.width + gap <= a.x
        or a.y + a.height + gap <= b.y
        or b.y + b.height + gap <= a.y
    )


@given(LENGTH, LENGTH, LENGTH)
@settings(max_examples=200)
def test_planes_fit_and_keep_apart(x, y, z):
    """Whatever the field of view, frames lie beside each other, on the page, in proportion."""
    planes = arrange_planes((x, y), (x, z), (y, z), LEGEND)

    for frame, size in zip(planes.frames, ((x, y), (x, y), (x, z), (y, z)), strict=True):
        assert 0 <= frame.x < frame.x + frame.width <= CONTENT_WIDTH
        assert frame.y + frame.height <= planes.height
        assert frame.picture[0] <= frame.width
        assert frame.picture[1] <= frame.height
        scale = max(pixels / mm for pixels, mm in zip(frame.picture, size, strict=True))
        for pixels, mm in zip(frame.picture, size, strict=True):
            assert abs(pixels - mm * scale) <= 1.01 * max(1, mm / min(size)) or pixels == 1
    for a, b in itertools.combinations(planes.frames, 2):
        assert apart(a, b, GAP)


@pytest.mark.parametrize("legend", [LEGEND, {1: 2600, 2: 1300, 3: 870, 4: 650}])
def test_the_legend_lies_beside_or_below_the_planes(legend):
    """It covers none of them and ends on the page."""
    planes = arrange_planes((400, 300), (400, 200), (300, 200), legend)

    width = planes.columns * column_width(planes.columns)
    legend = Frame(*planes.legend, width, legend[planes.columns], (1, 1))
    assert legend.x + legend.width <= CONTENT_WIDTH
    assert legend.y + legend.height <= planes.height
    assert all(apart(frame, legend, 0) for frame in planes.frames)


@given(st.integers(1, 40), LENGTH, LENGTH)
@settings(max_examples=200)
def test_tiles_take_the_full_width(count, width, height):
    """At most eight columns, none on another."""
    frames = arrange_mosaic(count, (width, height))

    assert len(frames) == count
    columns = {frame.x for frame in frames}
    assert len(columns) <= 8
    assert max(f.x + f.width for f in frames) == CONTENT_WIDTH
    assert frames[-1].y + frames[-1].height == max(f.y + f.height for f in frames)
    for a, b in itertools.combinations(frames, 2):
        assert apart(a, b, GAP)


def test_sixteen_tiles_are_two_rows_of_eight():
    frames = arrange_mosaic(16, (400, 300))

    assert [len(set(at)) for at in zip(*((f.x, f.y) for f in frames), strict=True)] == [8, 2]


@given(st.lists(st.tuples(LENGTH, LENGTH), min_size=3, max_size=3))
@settings(max_examples=100)
def test_a_row_fills_its_room(sizes):
    """The frames of a thumbnail end where it ends."""
    frames = fill_row(sizes, (520, 200))

    assert frames[-1].x + frames[-1].width == 520
    for frame in frames:
        assert frame.height == 200
        assert frame.picture[0] <= frame.width
        assert frame.picture[1] <= 200


def test_a_picture_stands_in_the_middle_of_its_frame():
    """A picture that is smaller than its frame is centred."""
    assert Frame(10, 20, 28, 100, (8, 100)).corner == (20, 20)
