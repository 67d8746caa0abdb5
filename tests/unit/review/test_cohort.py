"""Distributions of a cohort, by SciPy and NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import median_abs_deviation

from scanloom.core.measurement import Range, ReferenceRange
from scanloom.review.outliers import BINS, MIN_COHORT, OUTLIER_Z, Cohort, values_of
from support.make_report import measured


def test_a_distribution_counts_all_values() -> None:
    volumes = np.exp(np.random.default_rng(3).normal(5, 0.7, 200))
    cohort = Cohort([measured("m", "liver", float(ml)) for ml in volumes])

    known = cohort.distributions["m", "liver", "volume"]

    expected, _ = np.histogram(np.log(volumes), BINS)
    assert known.counts == tuple(expected)
    assert known.median == pytest.approx(np.median(volumes))
    assert (known.first, known.last) == (volumes.min(), volumes.max())
    spread = OUTLIER_Z * median_abs_deviation(np.log(volumes), scale="normal")
    middle = np.median(np.log(volumes))
    assert np.log(known.usual) == pytest.approx([middle - spread, middle + spread], rel=1e-4)
    assert known.unit == "ml"
    assert known.logarithmic


def test_equal_values_have_a_distribution() -> None:
    cohort = Cohort([measured("m", "liver", 10.0)] * MIN_COHORT)

    known = cohort.distributions["m", "liver", "volume"]
    assert sum(known.counts) == MIN_COHORT
    assert known.holds(10.0)


def test_if_half_of_the_values_are_equal_the_others_are_not_all_outliers() -> None:
    counts = [1, 1, 1, 1, 1, 13, 23, 26, 94]
    measurements = [measured("m", "liver", 10.0, components=n) for n in counts]

    cohort = Cohort(measurements)

    key = "m", "liver", "parts"
    assert max(cohort.z_score(key, values_of(m)["parts"]) for m in measurements) < OUTLIER_Z


def test_a_small_cohort_has_the_reference_ranges_of_its_models_only() -> None:
    usual = ReferenceRange("liver", "volume_ml", Range(800.0, 2500.0), "A page.")
    cohort = Cohort([measured("m", "liver", 100.0)] * (MIN_COHORT - 1), {"m": [usual]})

    assert list(cohort.distributions) == [("m", "liver", "volume")]
    known = cohort.distributions["m", "liver", "volume"]
    assert (known.usual, known.source, known.counts) == ((800.0, 2500.0), "A page.", ())
    assert cohort.reference(("m", "liver", "volume")) == known
    assert cohort.reference(("m", "liver", "intensity")) is None
