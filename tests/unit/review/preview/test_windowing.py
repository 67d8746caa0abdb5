from __future__ import annotations

import numpy as np
import pytest

from scanloom.core import Grid, Measurement, Volume
from scanloom.review.preview.windowing import LUNG, SOFT_TISSUE, Window, choose_window


def volume(array, unit="HU", modality="CT", padding=None) -> Volume:
    return Volume(array, Grid(array.shape, np.eye(4)), unit, modality, padding)


def largest(median: float | None) -> Measurement:
    none = (None,) * 2
    return Measurement(
        "m", "s", 1, 9, 0.1, "HU", None, None, *none, median, *none, box=None, components=1
    )


ARRAY = np.arange(1000, dtype=np.float32).reshape(10, 10, 10)


@pytest.mark.parametrize(
    ("median", "window"),
    [(-850, LUNG), (-100, SOFT_TISSUE), (60, SOFT_TISSUE), (None, SOFT_TISSUE)],
)
def test_ct_is_windowed_by_what_the_largest_structure_is_made_of(median, window):
    """Lung is seen in the lung window, everything else as soft tissue."""
    assert choose_window(volume(ARRAY), largest(median)) == window
    assert choose_window(volume(ARRAY), None) == SOFT_TISSUE


def test_windows_are_those_that_radiologists_name():
    """Width 400 at level 40 runs from -160 to 240 HU; width 1500 at -600 from -1350 to 150."""
    assert (SOFT_TISSUE.low, SOFT_TISSUE.high) == (-160, 240)
    assert (LUNG.low, LUNG.high) == (-1350, 150)


@pytest.mark.parametrize(("unit", "modality"), [("a.u.", "MR"), ("unknown", None), ("a.u.", "CT")])
def test_without_hounsfield_units_the_percentiles_count(unit, modality):
    """From the 1st to the 99th percentile."""
    window = choose_window(volume(ARRAY, unit, modality), largest(-850))

    assert (window.low, window.high) == pytest.approx(tuple(np.percentile(ARRAY, (1, 99))))


def test_padding_and_nan_do_not_count():
    """What stands outside of the field of view has no part in the window."""
    array = ARRAY.copy()
    array[:5] = -5000
    array[5] = np.nan

    window = choose_window(volume(array, "a.u.", "MR", -5000), None)

    assert (window.low, window.high) == pytest.approx(tuple(np.percentile(ARRAY[6:], (1, 99))))


@pytest.mark.parametrize("value", [0.0, 7.0, -3e30, np.nan])
def test_a_scan_of_one_value_has_a_window(value):
    """Nothing is divided by zero."""
    window = choose_window(volume(np.full((4, 4, 4), value), "a.u.", "MR"), None)

    assert window.high > window.low


def test_gray_runs_from_black_to_white():
    """Ends are 0 and 255, beyond them nothing more; no number is black."""
    gray = Window(-100, 100, "").gray(np.array([-np.inf, -200, -100, 0, 100, 3000, np.inf, np.nan]))

    assert gray.dtype == np.uint8
    assert gray.tolist() == [0, 0, 0, 128, 255, 255, 255, 0]
