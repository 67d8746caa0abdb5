from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scanloom.review.preview.layout import (
    GUTTER,
    MAIN_WIDTH,
    MIN_FRAME_SIZE,
    TILE_GAP,
    Frame,
    arrange_mosaic,
    arrange_planes,
)

LENGTH = st.floats(0.5, 3000)


def apart(a: Frame, b: Frame, gap: int) -> bool:
    return (
        a.x + a.width + gap <= b.x
        or b.x + b.width + gap <= a.x
        or a.y + a.height + gap <= b.y
        or b.y + b.height + gap <= a.y
    )


@given(LENGTH, LENGTH, LENGTH)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_planes_fit_and_keep_apart(x, y, z):
    """Whatever the field of view, frames lie beside each other, on the page, in proportion."""
    planes = arrange_planes((x, y), (x, z), (y, z))

    for frame, size in zip(planes.frames, ((x, y), (x, z), (y, z)), strict=True):
        assert frame.x >= 0
        assert frame.x + frame.width <= MAIN_WIDTH + 2 * MIN_FRAME_SIZE
        assert frame.y + frame.height + GUTTER <= planes.height <= 900
        for pixels, mm in zip(frame.picture, size, strict=True):
            assert abs(pixels - mm * planes.pixels_per_mm) <= 0.51 or pixels == 1
    for a, b in itertools.combinations(planes.frames, 2):
        assert apart(a, b, GUTTER)


def test_a_thin_stack_is_stacked():
    """Twenty slices of an abdomen: the axial plane takes the left, the others share the right."""
    axial, coronal, sagittal = arrange_planes((400, 400), (400, 100), (400, 100)).frames

    assert coronal.x == sagittal.x > axial.x + axial.width
    assert sagittal.y > coronal.y + coronal.height


def test_a_torso_stands_in_a_row():
    """Where all planes are of a size, they stand side by side."""
    frames = arrange_planes((370, 300), (370, 340), (300, 340)).frames

    assert len({frame.y for frame in frames}) == 1


@given(st.integers(1, 500), LENGTH, LENGTH)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_tiles_fill_whole_rows(most, width, height):
    """No more tiles than slices, no row half empty, none on another."""
    mosaic = arrange_mosaic(most, (width, height))

    assert min(most, 10) <= len(mosaic.frames) <= min(most, 12)
    rows = {frame.y for frame in mosaic.frames}
    columns = {frame.x for frame in mosaic.frames}
    assert len(rows) * len(columns) == len(mosaic.frames)
    assert all(f.x + f.width <= MAIN_WIDTH + 12 * MIN_FRAME_SIZE for f in mosaic.frames)
    assert mosaic.height == max(f.y + f.height for f in mosaic.frames)
    for a, b in itertools.combinations(mosaic.frames, 2):
        assert apart(a, b, TILE_GAP)


def test_a_picture_stands_in_the_middle_of_its_frame():
    """What is smaller than its frame is centred."""
    assert Frame(10, 20, 28, 100, (8, 100)).corner == (20, 20)


@pytest.mark.parametrize("slices", [1, 2, 3, 4, 7])
def test_few_slices_are_all_shown(slices):
    """A scan of fewer slices than tiles shows every one."""
    assert len(arrange_mosaic(slices, (300, 250)).frames) == slices
