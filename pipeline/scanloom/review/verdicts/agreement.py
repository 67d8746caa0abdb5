"""Agreement of reviewers: Cohen's kappa and Krippendorff's alpha for nominal categories.

Both are 1 for full agreement and 0 for that of chance; they are not defined (NaN) where there is
nothing to compare, or only one category. Intervals are percentiles of bootstrap samples of cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scanloom.review.verdicts.verdict import DECISIONS, Verdict

SAMPLES = 1000
"""Bootstrap samples."""
LEVEL = 0.95
"""Confidence level of the intervals."""

Table = NDArray[np.float64]
"""(readers, cases): index of a category, NaN where a reader gave none."""


@dataclass(frozen=True)
class Agreement:
    """Agreement of reviewers about one subject.

    Parameters
    ----------
    subject : str
        "case", or "<model>/<label>" of a structure.
    measure : str
        "alpha", or "kappa r1 r2" of two reviewers.
    value, low, high : float
        The value, and its interval; NaN if not defined.
    cases : int
        Number of cases that at least two reviewers judged.
    """

    subject: str
    measure: str
    value: float
    low: float
    high: float
    cases: int


def kappa(table: Table) -> float:
    """Return Cohen's kappa of two readers; cases that lack one are left out.

    Parameters
    ----------
    table : (2, cases) array

    Returns
    -------
    float
        NaN without a common case, or if both gave one and the same category only.
    """
    first, second = table[:, ~np.isnan(table).any(axis=0)]
    if not len(first):
        return float("nan")
    categories = np.unique(np.concatenate((first, second)))
    shares = [np.array([(reader == c).mean() for c in categories]) for reader in (first, second)]
    chance, observed = float(shares[0] @ shares[1]), float((first == second).mean())
    return float("nan") if chance == 1 else (observed - chance) / (1 - chance)


def alpha(table: Table) -> float:
    """Return Krippendorff's alpha for nominal categories; values may be missing.

    Parameters
    ----------
    table : (readers, cases) array

    Returns
    -------
    float
        NaN if no case has two values, or if there is one category only.
    """
    categories = np.unique(table[~np.isnan(table)])
    counts = np.array([(table == c).sum(axis=0) for c in categories]).T.reshape(-1, len(categories))
    paired = counts[counts.sum(axis=1) >= 2].astype(float)
    total = paired.sum()
    if total == 0:
        return float("nan")
    each = paired.sum(axis=1)
    differing = (each**2 - (paired**2).sum(axis=1)) / (each - 1)
    observed = differing.sum() / total
    of_category = paired.sum(axis=0)
    expected = (total**2 - (of_category**2).sum()) / (total * (total - 1))
    return float("nan") if expected == 0 else float(1 - observed / expected)


def interval(table: Table, measure: Callable[[Table], float], seed: int = 0) -> tuple[float, float]:
    """Return the bootstrap interval of a measure, of samples of cases with replacement.

    Parameters
    ----------
    table : (readers, cases) array
    measure : callable
    seed : int
        Of the samples, so that reports repeat.
    """
    random = np.random.default_rng(seed)
    drawn = random.integers(0, table.shape[1], (SAMPLES, table.shape[1]))
    values = np.array([measure(table[:, sample]) for sample in drawn])
    values = values[~np.isnan(values)]
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.quantile(values, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return float(low), float(high)


def agreements(verdicts: Iterable[Verdict]) -> list[Agreement]:
    """Return the agreement about cases and about each structure: alpha, and kappa of each pair.

    Parameters
    ----------
    verdicts : iterable of Verdict
        The verdicts that count, one of each reviewer and case.
    """
    by_subject: dict[str, dict[tuple[str, str], str]] = {}
    for verdict in verdicts:
        place = (verdict.reviewer, verdict.case)
        if verdict.decision is not None:
            by_subject.setdefault("case", {})[place] = verdict.decision
        for structure, decision in verdict.structures.items():
            by_subject.setdefault(structure, {})[place] = decision
    subjects = sorted(by_subject, key=lambda subject: (subject != "case", subject))
    return [each for subject in subjects for each in _of_subject(subject, by_subject[subject])]


def _of_subject(subject: str, given: Mapping[tuple[str, str], str]) -> list[Agreement]:
    readers = sorted({reader for reader, _ in given})
    table = table_of(given, readers)
    paired = table[:, (~np.isnan(table)).sum(axis=0) >= 2]
    if not paired.shape[1]:
        return []
    found = [_agreement(subject, "alpha", paired, alpha)]
    for n, first in enumerate(readers):
        for second in readers[n + 1 :]:
            two = table_of(given, (first, second))
            two = two[:, ~np.isnan(two).any(axis=0)]
            if two.shape[1]:
                found.append(_agreement(subject, f"kappa {first} {second}", two, kappa))
    return found


def _agreement(
    subject: str, name: str, table: Table, measure: Callable[[Table], float]
) -> Agreement:
    low, high = interval(table, measure)
    return Agreement(subject, name, measure(table), low, high, table.shape[1])


def table_of(given: Mapping[tuple[str, str], str], readers: Sequence[str]) -> Table:
    """Return the decisions of some readers as a table, cases in the order of their names."""
    cases = sorted({case for reader, case in given if reader in readers})
    numbers: dict[str | None, float] = {name: n for n, name in enumerate(DECISIONS)}
    rows = [
        [numbers.get(given.get((reader, case)), float("nan")) for case in cases]
        for reader in readers
    ]
    return np.array(rows, dtype=np.float64).reshape(len(readers), len(cases))
