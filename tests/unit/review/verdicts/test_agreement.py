"""Kappa and alpha against scikit-learn and krippendorff, on tables with missing values."""

from __future__ import annotations

import warnings
from contextlib import suppress

import numpy as np
import pytest

from scanloom.review.verdicts.agreement import agreements, alpha, interval, kappa, value_of
from scanloom.review.verdicts.verdict import Seen, Verdict


def tables(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    found = []
    for _ in range(count):
        table = rng.integers(0, 3, (rng.integers(2, 5), rng.integers(2, 40))).astype(float)
        table[rng.random(table.shape) < rng.random() * 0.6] = np.nan
        found.append(table)
    return found


def test_both_are_those_of_the_libraries() -> None:
    krippendorff = pytest.importorskip("krippendorff")
    metrics = pytest.importorskip("sklearn.metrics")
    defined = 0
    for table in tables(200):
        with warnings.catch_warnings(), suppress(ValueError):
            warnings.simplefilter("ignore")
            expected = np.nan  # if there is one category only, or nothing to compare
            expected = krippendorff.alpha(table, level_of_measurement="nominal")
        np.testing.assert_allclose(value_of(table, alpha), expected, atol=1e-12)
        both = table[:2, ~np.isnan(table[:2]).any(axis=0)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = metrics.cohen_kappa_score(*both) if both.size else np.nan
        np.testing.assert_allclose(value_of(table[:2], kappa), expected, atol=1e-12)
        defined += not np.isnan(expected)
    assert defined > 150


def test_intervals_hold_the_value_and_narrow_with_cases() -> None:
    rng = np.random.default_rng(0)
    first = rng.integers(0, 3, 400).astype(float)
    second = np.where(rng.random(400) < 0.8, first, rng.integers(0, 3, 400))
    table = np.array((first, second))

    low, high = interval(table, kappa)
    few_low, few_high = interval(table[:, :40], kappa)

    assert low < value_of(table, kappa) < high
    assert high - low < (few_high - few_low) / 2
    assert interval(table, kappa) == (low, high)


def test_cases_and_structures_are_told_apart() -> None:
    seen = Seen("r", {})
    given = [
        Verdict(case, who, seen, "accept" if case < "c" else "reject", {"m/liver": liver})
        for case in "abcd"
        for who, liver in (("r1", "accept"), ("r2", "edit" if case == "a" else "accept"))
    ]

    found = {(each.subject, each.measure): each for each in agreements(given)}  # type: ignore[arg-type]

    assert found["case", "alpha"].value == found["case", "kappa r1 r2"].value == 1
    assert found["case", "alpha"].cases == 4
    assert found["m/liver", "kappa r1 r2"].value == 0
    assert agreements(given[:1]) == []  # type: ignore[arg-type]
