"""Foreign text as it may reach a terminal."""

from __future__ import annotations

import pytest

from scanloom.core import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x1b[2J\x00", r"\x1b[2J\x00"),
        ("a\x9bHb\x85", r"a\x9bHb\x85"),  # C1: a control sequence of one character
        ("first\r\nsecond\tthird\x7f", r"first\r\nsecond\tthird\x7f"),
        ("a\u202eb\u2066c\u200fd", r"a\u202eb\u2066c\u200fd"),  # the direction of writing
        ("a\u2028b\u2029c", r"a\u2028b\u2029c"),
        ("no\u200bspace\ufeff\U000e0041", r"no\u200bspace\ufeff\U000e0041"),
        ("slice-\udcff.dcm", r"slice-\udcff.dcm"),
        ("\ue000", r"\ue000"),
    ],
)
def test_what_has_no_shape_is_escaped(text, shown):
    """Nothing that steers a terminal or the order of letters is left, and nothing is lost."""
    assert printable(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "",
        "liver (left)",
        "Müller^Ärztin",
        "山田^太郎　医",
        "نمی\u200cشود",
        "क्\u200dष",
        "a\\b",
        "\xa0",
    ],
)
def test_what_people_write_stays(text):
    """Letters of all scripts stay, with the joiners that spelling needs."""
    assert printable(text) == text
