"""Kappa and alpha against scikit-learn and krippendorff, on tables with missing values."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scanloom.review.verdicts.tables import agreements, alpha, interval, kappa, value_of
from scanloom.review.verdicts.verdict import Seen, Verdict


def tables(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    values = []
    for _ in range(count):
        table = rng.integers(0, 3, (rng.integers(2, 5), rng.integers(2, 40))).astype(float)
        table[rng.random(table.shape) < rng.random() * 0.6] = np.nan
        values.append(table)
    return values


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
    judged = [
        Verdict(case, reader, seen, "accept" if case < "c" else "reject", {"m/liver": liver})
        for case in "abcd"
        for reader, liver in (("r1", "accept"), ("r2", "edit" if case == "a" else "accept"))
    ]

    values = {(each.subject, each.measure): each for each in agreements(judged)}

    assert values["case", "alpha"].value == values["case", "kappa r1 r2"].value == 1
    assert values["case", "alpha"].cases == 4
    assert values["m/liver", "kappa r1 r2"].value == 0
    assert agreements(judged[:1]) == []


def test_intervals_are_those_of_scipy_over_the_libraries() -> None:
    stats = pytest.importorskip("scipy.stats")
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(1)
    first = rng.integers(0, 3, 60).astype(float)
    second = np.where(rng.random(60) < 0.7, first, rng.integers(0, 3, 60))

    expected = stats.bootstrap(
        *((first, second), metrics.cohen_kappa_score),
        paired=True,
        vectorized=False,
        method="percentile",
        n_resamples=400,
        rng=rng,
    ).confidence_interval

    np.testing.assert_allclose(interval(np.array((first, second)), kappa), expected, atol=0.04)


def judged(case: str, reader: str, decision: str, number: int, **more: Any) -> Verdict:
    return Verdict(case, reader, Seen("r", {}), decision, number=number, **more)


def cells(verdicts: list[Verdict]) -> dict[str, tuple[float, int]]:
    return {each.measure: (each.value, each.cases) for each in agreements(verdicts)}


def test_verdicts_about_different_results_are_not_compared() -> None:
    verdicts = [judged(c, reader, "accept", 1) for c in "ab" for reader in ("r1", "r2")]
    changed = replace(verdicts[0], seen=Seen("r", {"segmentation.nii.gz": "1" * 64}))

    assert cells([*verdicts[1:], changed])["alpha"][1] == 1
    assert cells(verdicts)["alpha"][1] == 2


def test_only_independent_verdicts_are_compared() -> None:
    verdicts = [judged(c, "r1", "accept" if c < "c" else "reject", 1) for c in "abcd"]
    verdicts += [judged(c, "r2", "reject" if c in "ac" else "accept", 2) for c in "abcd"]
    expected = cells(verdicts)

    agreed = [judged(c, "r2", "accept", 3, independent=False) for c in "abcd"]

    assert cells([*verdicts, *agreed]) == expected
    assert expected["kappa r1 r2"] == (0, 4)
    assert cells([*verdicts[:4], *agreed]) == {}


def test_two_readings_of_a_reviewer_are_compared() -> None:
    verdicts = [judged(c, "r1", "accept" if c < "c" else "reject", 1) for c in "abcd"]
    verdicts += [judged(c, "r1", "accept" if c < "d" else "reject", 2, reading=2) for c in "bcd"]

    assert cells(verdicts) == {"kappa r1 r1": (pytest.approx(0.4), 3)}
