from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from scanloom.review.preview.page import (
    MUTED,
    PAGE,
    TEXT,
    WARN,
    displayable,
    draw_plate,
    encode_png,
    round_length,
    scale_bar,
    text_width,
    truncated,
    wrap_text,
)


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
@settings(max_examples=100)
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
@settings(max_examples=200)
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

    scale_bar(page, (20, 20), 1.5, 160)

    row = np.asarray(page)[20]
    lit = np.flatnonzero((row == TEXT).all(axis=-1))
    run = lit[: np.flatnonzero(np.diff(lit, append=999) > 1)[0] + 1]
    assert np.ptp(run) == pytest.approx(150, abs=2)


def test_text_on_a_picture_is_legible_on_white():
    """A plate of 60 % black gives WCAG's contrast for text, 4.5 to 1, where the scan is white."""
    page = Image.new("RGB", (200, 60), (255, 255, 255))

    draw_plate(page, (20, 20), "I 482 mm", 14)

    plate = tuple(page.getpixel((18, 22)))
    assert max(plate) <= 105
    assert (luminance(TEXT) + 0.05) / (luminance(plate) + 0.05) >= 4.5


@pytest.mark.parametrize("texts", [{}, {"a key": "{}", "another": "x" * 300}])
def test_files_are_read_by_pillow(texts):
    """Pixels and texts are the same, and all checksums are right."""
    page = np.random.default_rng(0).integers(0, 256, (9, 14, 3), np.uint8)

    file = encode_png(Image.fromarray(page), texts)

    with Image.open(io.BytesIO(file)) as read:
        assert (read.format, read.mode, read.text) == ("PNG", "RGB", texts)
        np.testing.assert_array_equal(np.asarray(read), page)
    with Image.open(io.BytesIO(file)) as read:
        read.verify()
