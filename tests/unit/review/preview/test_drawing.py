from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from scanloom.review.preview.drawing import (
    MUTED,
    PAGE,
    TEXT,
    WARN,
    color_table,
    displayable,
    outline,
    overlay_structures,
    round_length,
    scale_bar,
    text_width,
    truncated,
    wrap_text,
)
from support.review_phantoms import structure


def luminance(color) -> float:
    """Return the relative luminance of WCAG 2.2."""
    share = np.array(color) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


@pytest.mark.parametrize("color", [TEXT, MUTED, WARN])
def test_type_is_legible(color):
    """Contrast to the page is at least 7 to 1 (WCAG 2.2, 1.4.6)."""
    assert (luminance(color) + 0.05) / (luminance(PAGE) + 0.05) >= 7


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Left kidney", "Left kidney"),
        ("Gehäuse 5 % · 2 mm…", "Gehause 5 % · 2 mm…"),
        ("10 mm²", "10 mm2"),
        ("肝臓", "??"),
    ],
)
def test_text_is_made_of_what_the_typeface_has(text, expected):
    """No empty boxes: a character that can't be drawn is replaced."""
    assert displayable(text) == expected


@given(st.text(min_size=1, max_size=80), st.integers(40, 400))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_lines_are_never_too_wide(text, width):
    """Wrapped and shortened text stays within its column."""
    assert all(text_width(line, 14) <= width for line in wrap_text(text, 14, width))
    assert text_width(truncated(text, 14, width), 14) <= width


def test_wrapping_loses_no_word():
    """All words come out, in order."""
    text = "The slices are sheared (gantry tilt); a rectangular copy is written beside the result"

    lines = list(wrap_text(text, 14, 200))

    assert len(lines) > 2
    assert " ".join(lines) == text


@given(st.floats(1e-3, 1e4))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_scale_bars_are_of_round_length(most):
    """1, 2 or 5 times a power of ten, at least 40 % of the room, written as it is long."""
    length, text = round_length(most)

    assert 0.4 * most <= length <= most * (1 + 1e-12)
    assert f"{length / 10 ** np.floor(np.log10(length) + 1e-9):.6g}" in {"1", "2", "5"}
    number, unit = text.split()
    assert float(number) * {"mm": 1, "cm": 10}[unit] == pytest.approx(length)


def test_a_scale_bar_is_as_long_as_it_says():
    """10 cm at 1.5 pixels a millimetre are 150 pixels."""
    page = Image.new("RGB", (400, 40), PAGE)

    scale_bar(ImageDraw.Draw(page), (20, 20), 1.5, 160)

    row = np.asarray(page)[20]
    lit = np.flatnonzero((row == TEXT).all(axis=-1))
    run = lit[: np.flatnonzero(np.diff(lit, append=999) > 1)[0] + 1]
    assert np.ptp(run) == pytest.approx(150, abs=2)


def test_outlines_are_one_pixel_wide():
    """Around a structure, and where two structures meet, there is one line."""
    labels = np.zeros((9, 12), np.uint8)
    labels[2:7, 2:6] = 1
    labels[2:7, 6:10] = 2

    edge = outline(labels)

    assert not edge[labels == 0].any()
    assert edge[4].tolist() == [n in (2, 6, 9) for n in range(12)]
    assert edge[:, 4].tolist() == [n in (2, 6) for n in range(9)]


def test_overlays_let_the_scan_shine_through():
    """Inside a structure bright stays brighter than dark; outside nothing changes."""
    gray = np.tile(np.array([40, 200], np.uint8).repeat(6), (12, 1))
    labels = np.zeros((12, 12), np.uint8)
    labels[3:9, 1:11] = 5
    colors = color_table((structure(5, "Thing", (255, 0, 0)),), 255)

    picture = np.asarray(overlay_structures(gray, [(labels, colors)])).astype(int)

    np.testing.assert_array_equal(picture[labels == 0], np.repeat(gray[labels == 0, None], 3, 1))
    dark, bright = picture[6, 4], picture[6, 8]
    assert bright[1] > dark[1] + 60
    assert dark[0] > dark[1] + 60
    assert (np.abs(picture[3, 4] - (255, 0, 0)) < 15).all()
