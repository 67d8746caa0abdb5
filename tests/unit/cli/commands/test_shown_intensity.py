"""The table after `segment` shows intensities with the digits that their unit needs."""

from __future__ import annotations

import pytest

from scanloom.cli.commands.segment import shown_intensity


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (-57.4, "HU", "-57"),
        (-0.3, "HU", "0"),
        (0.00012345, "a.u.", "0.000123"),  # a scan that was scaled to 0 to 1
        (2.318, "SUVbw", "2.32"),
        (-99.94, "a.u.", "-99.9"),
        (12345.6, "a.u.", "12346"),
        (-4.17e32, "a.u.", "-4.17e+32"),
        (None, "a.u.", ""),
    ],
)
def test_no_digit_that_matters_is_lost(value: float | None, unit: str, shown: str) -> None:
    assert shown_intensity(value, unit) == shown
