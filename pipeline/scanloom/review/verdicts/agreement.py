"""Agreement of reviewers: Cohen's kappa and Krippendorff's alpha for nominal categories.

Both are 1 for full agreement and 0 for that of chance; they are not defined (NaN) where there is
nothing to compare, or only one category. Intervals are percentiles of bootstrap samples of cases.

Verdicts are compared that are about the same result, and were given without seeing another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scanloom.review.verdicts.verdict import DECISIONS, Verdict

SAMPLES = 1000
"""Bootstrap samples."""
CASE_SUBJECT = "case"
"""Subject of decisions about the case as a whole."""
LEVEL = 0.95
"""Confidence level of the intervals."""

Table = NDArray[np.float64]
"""(readers, cases): index of a category, NaN where a reader gave none."""
Measure = Callable[[Table, NDArray[np.float64]], NDArray[np.float64]]
"""Maps a table, and how often each sample has each case (samples, cases), to a value a sample."""
_Decisions = dict[tuple[str, str], str]
"""Decisions by reader and result."""


@dataclass(frozen=True)
class Agreement:
    """Agreement of reviewers about one subject.

    Parameters
    ----------
    subject : str
        "case", or "<model>/<label>" of a structure.
    measure : str
        "alpha", "kappa r1 r2" of two reviewers, or "kappa r1 r1" of a reviewer's first and second
        reading.
    value, low, high : float
        The value, and its interval; NaN if not defined.
    cases : int
        Number of results that were judged twice at least.
    """

    subject: str
    measure: str
    value: float
    low: float
    high: float
    cases: int


def kappa(table: Table, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return Cohen's kappa of two readers in each sample; cases that lack one are left out.

    Parameters
    ----------
    table : (2, cases) array
    weights : (samples, cases) array

    Returns
    -------
    (samples,) array
        NaN without a common case, or if both gave one and the same category only.
    """
    common = ~np.isnan(table).any(axis=0)
    first, second = table[:, common]
    weights = weights[:, common]
    categories = np.unique(table[:, common])
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = weights / weights.sum(axis=1, keepdims=True)
        shares = [weights @ (reader[:, None] == categories) for reader in (first, second)]
        chance, observed = (shares[0] * shares[1]).sum(axis=1), weights @ (first == second)
        values = (observed - chance) / (1 - chance)
    values[chance > 1 - 1e-12] = np.nan
    return np.asarray(values if common.any() else np.full(len(weights), np.nan))


def alpha(table: Table, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return Krippendorff's alpha for nominal categories in each sample; values may be missing.

    Parameters
    ----------
    table : (readers, cases) array
    weights : (samples, cases) array

    Returns
    -------
    (samples,) array
        NaN if no case has two values, or if there is one category only.
    """
    categories = np.unique(table[~np.isnan(table)])
    counts = (table[:, :, None] == categories).sum(axis=0).astype(float)
    each = counts.sum(axis=1)
    counts, weights, each = counts[each >= 2], weights[:, each >= 2], each[each >= 2]
    total, of_category = weights @ each, weights @ counts
    differing = (each**2 - (counts**2).sum(axis=1)) / (each - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        observed = weights @ differing / total
        expected = (total**2 - (of_category**2).sum(axis=1)) / (total * (total - 1))
        values = 1 - observed / expected
    values[expected == 0] = np.nan
    return np.asarray(values)


def value_of(table: Table, measure: Measure) -> float:
    """Return a measure of a table."""
    return float(measure(table, np.ones((1, table.shape[1])))[0])


def interval(table: Table, measure: Measure, seed: int = 0) -> tuple[float, float]:
    """Return the bootstrap interval of a measure, of samples of cases with replacement.

    Parameters
    ----------
    table : (readers, cases) array
    measure : callable
    seed : int
        Of the samples, so that reports repeat.
    """
    columns = np.nan_to_num(table, nan=-1)
    columns, counts = np.unique(columns, axis=1, return_counts=True)
    random = np.random.default_rng(seed)
    weights = random.multinomial(counts.sum(), counts / counts.sum(), SAMPLES).astype(float)
    values = measure(np.where(columns < 0, np.nan, columns), weights)
    values = values[~np.isnan(values)]
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.quantile(values, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return float(low), float(high)


def agreements(verdicts: Iterable[Verdict]) -> list[Agreement]:
    """Return the agreement about cases and about each structure.

    Alpha of all reviewers, kappa of each pair, and kappa of a reviewer's two readings.

    Parameters
    ----------
    verdicts : iterable of Verdict
        Those that were not undone.
    """
    independent, readings = _selected(verdicts)
    results = _between(_by_subject(independent))
    for reviewer in sorted({reader for reader, _ in readings}):
        pairs = {
            (f"{reviewer} {verdict.reading}", key): verdict
            for (reader, key), both in readings.items()
            for verdict in both
            if reader == reviewer
        }
        for subject, decisions in _by_subject(pairs).items():
            rows = [f"{reviewer} 1", f"{reviewer} 2"]
            results += _agreement(subject, f"kappa {reviewer} {reviewer}", decisions, rows, kappa)
    return sorted(results, key=lambda each: (each.subject != CASE_SUBJECT, each.subject))


def _selected(
    verdicts: Iterable[Verdict],
) -> tuple[dict[tuple[str, str], Verdict], dict[tuple[str, str], tuple[Verdict, Verdict]]]:
    """Return verdicts by reviewer and result: the last independent ones; and both readings."""
    independent: dict[tuple[str, str], Verdict] = {}
    first: dict[tuple[str, str], Verdict] = {}
    again: dict[tuple[str, str], tuple[Verdict, Verdict]] = {}
    for verdict in sorted(verdicts, key=lambda each: each.number):
        sums = [f"{name} {value}" for name, value in sorted(verdict.seen.labels.items())]
        key = verdict.reviewer, " ".join((verdict.case, verdict.seen.recipe, *sums))
        if verdict.reading > 1:
            if key in first:
                again[key] = first[key], verdict
            continue
        first[key] = verdict
        if verdict.independent:
            independent[key] = verdict
    return independent, again


def _by_subject(verdicts: Mapping[tuple[str, str], Verdict]) -> dict[str, _Decisions]:
    decisions: dict[str, _Decisions] = {}
    for key, verdict in verdicts.items():
        if verdict.decision is not None:
            decisions.setdefault(CASE_SUBJECT, {})[key] = verdict.decision
        for structure, decision in verdict.structures.items():
            decisions.setdefault(structure, {})[key] = decision
    return decisions


def _between(by_subject: Mapping[str, _Decisions]) -> list[Agreement]:
    """Return the agreement between reviewers."""
    results = list[Agreement]()
    for subject, decisions in by_subject.items():
        readers = sorted({reader for reader, _ in decisions}, key=lambda code: (len(code), code))
        results += _agreement(subject, "alpha", decisions, readers, alpha)
        for n, first in enumerate(readers):
            for second in readers[n + 1 :]:
                name = f"kappa {first} {second}"
                results += _agreement(subject, name, decisions, (first, second), kappa)
    return results


def _agreement(
    subject: str, name: str, decisions: _Decisions, readers: Sequence[str], measure: Measure
) -> list[Agreement]:
    """Return an agreement; none if nothing was judged twice."""
    table = table_of(decisions, readers)
    table = table[:, (~np.isnan(table)).sum(axis=0) >= 2]
    if not table.shape[1]:
        return []
    low, high = interval(table, measure)
    return [Agreement(subject, name, value_of(table, measure), low, high, table.shape[1])]


def table_of(decisions: Mapping[tuple[str, str], str], readers: Sequence[str]) -> Table:
    """Return the decisions of some readers as a table, results in the order of their names."""
    cases = sorted({case for reader, case in decisions if reader in readers})
    numbers: dict[str | None, float] = {name: n for n, name in enumerate(DECISIONS)}
    rows = [
        [numbers.get(decisions.get((reader, case)), float("nan")) for case in cases]
        for reader in readers
    ]
    return np.array(rows, dtype=np.float64).reshape(len(readers), len(cases))
