from __future__ import annotations

import numpy as np
import pytest

from scanloom.review.preview.slicing import LUNG, SOFT_TISSUE, GrayWindow, choose_window

VALUES = np.arange(1000, dtype=np.float64)


def test_enhanced_tissue_is_not_plain_white():
    """An enhanced heart of 500 HU is brighter than its wall, and not at the end of the scale."""
    window = choose_window(VALUES, "CT", "HU", enhanced=True)

    wall, heart = window.gray(np.array([100.0, 500.0])).tolist()

    assert wall + 60 < heart < 250
    assert window.text == "W 800 L 200 HU"


def test_windows_are_those_that_radiologists_name():
    """Width 400 at level 40 runs from -160 to 240 HU; width 1500 at -600 from -1350 to 150."""
    assert (SOFT_TISSUE.low, SOFT_TISSUE.high) == (-160, 240)
    assert (LUNG.low, LUNG.high) == (-1350, 150)
    assert choose_window(VALUES, "CT", "HU") == SOFT_TISSUE


@pytest.mark.parametrize(("unit", "modality"), [("a.u.", "MR"), ("unknown", None), ("a.u.", "CT")])
def test_without_hounsfield_units_the_percentiles_count(unit, modality):
    """From the 0.5th to the 99.5th percentile."""
    window = choose_window(VALUES, modality, unit)

    assert (window.low, window.high) == pytest.approx(tuple(np.percentile(VALUES, (0.5, 99.5))))
    assert not window.inverted


def test_uptake_is_black_on_white():
    """PET starts at 0, is inverted, and says so."""
    window = choose_window(VALUES + 5, "PT", "a.u.")

    assert window.low == 0
    assert window.gray(np.array([0.0, 2000.0])).tolist() == [255, 0]
    assert "inverted" in window.text


def test_pet_of_known_suv_is_shown_up_to_an_suv_of_7() -> None:
    window = choose_window(VALUES, "PT", "a.u.", suv_factor=0.001)
    assert (window.low, window.high, window.inverted) == (0, pytest.approx(7000), True)
    assert window.text == "SUV 0 to 7, inverted"


@pytest.mark.parametrize("value", [0.0, 7.0, -3e30])
@pytest.mark.parametrize("modality", ["MR", "PT"])
def test_a_scan_of_one_value_has_a_window(value, modality):
    """Nothing is divided by zero, also without any value."""
    window = choose_window(np.full(9, value), modality, "a.u.")

    assert window.high > window.low
    assert choose_window(VALUES[:0], modality, "a.u.").high > 0


def test_gray_runs_from_black_to_white():
    """Ends are 0 and 255, beyond them nothing more; no number is black."""
    gray = GrayWindow(-100, 100, "").gray(
        np.array([-np.inf, -200, -100, 0, 100, 3000, np.inf, np.nan])
    )

    assert gray.dtype == np.uint8
    assert gray.tolist() == [0, 0, 0, 128, 255, 255, 255, 0]
