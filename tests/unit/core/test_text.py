"""Foreign text as it may reach a terminal, and sizes in bytes."""

from __future__ import annotations

import pytest

from scanloom.core import (
    did_you_mean,
    format_bytes,
    milliliters,
    parse_bytes,
    plain_number,
    printable,
)


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


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("8GB", 8 * 10**9),
        ("8G", 8 * 10**9),
        ("8gib", 8 * 2**30),
        ("7.5 GiB", 15 * 2**29),
        (".5 MiB", 2**19),
        (" 900MB ", 900 * 10**6),
        ("12 B", 12),
        ("8000000000", 8 * 10**9),
        (8 * 10**9, 8 * 10**9),
    ],
)
def test_sizes_are_parsed(size: str | int, count: int) -> None:
    assert parse_bytes(size) == count


@pytest.mark.parametrize(
    "size",
    [
        "",
        "GB",
        "-1GB",
        "0",
        "16",
        16,
        "nan",
        "8 apples",
        "8,5GB",
        "1.5.5GB",
        "8 GB or so",
        True,
        None,
    ],
)
def test_other_text_is_not_a_size(size: object) -> None:
    with pytest.raises(ValueError, match=r"such as 8GB, 7\.5GiB or 900MB"):
        parse_bytes(size)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (2048, "2 KiB"), (1.5 * 2**30, "1.5 GiB")]
)
def test_bytes_are_formatted_in_binary_units(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345, "12300"), (1e5, "100000"), (-5e-5, "-0.00005"), (0.25, "0.25"), (4.2e32, "4.2e+32")],
)
def test_numbers_for_readers_have_no_exponent(value: float, text: str) -> None:
    assert plain_number(value, 3) == text
    assert plain_number(value, 3, "+").lstrip("+") == text


@pytest.mark.parametrize(
    ("volume", "text"), [(345.6, "345.6"), (0.04, "0.04"), (5e-5, "< 0.001"), (0, "0")]
)
def test_a_small_structure_has_a_volume(volume: float, text: str) -> None:
    assert milliliters(volume) == text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("livr", "did you mean liver?"),
        ("Liver", "did you mean liver?"),
        ("femurleft", "did you mean femur_left or femur_right?"),
        ("zzz", "none of the 31 known names is like it"),
    ],
)
def test_of_many_names_only_the_nearest_are_suggested(name: str, message: str) -> None:
    known = ["liver", "femur_left", "femur_right", *(f"rib_{n}" for n in range(28))]
    assert did_you_mean(name, known) == message
    assert "expected one of liver, femur_left, femur_right" in did_you_mean(name, known[:3])
