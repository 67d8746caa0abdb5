"""Tables of reviews, without names: `review/review.parquet`, `review.csv` and `agreement.csv`.

Agreement of reviewers is given as Cohen's kappa and Krippendorff's alpha for nominal categories:
1 for full agreement and 0 for that of chance; they are not defined (NaN) where there is nothing to
compare, or only one category. Intervals are percentiles of bootstrap samples of cases. Verdicts are
compared that are about the same result, and were given without seeing the verdict of another.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.io.output.measurements import escape_formula
from scanloom.io.output.parquet_file import write_parquet
from scanloom.io.system.atomic_write import atomic_write
from scanloom.review.verdicts.log import REVIEW, VerdictStack, read_verdicts
from scanloom.review.verdicts.verdict import DECISIONS, Verdict, current_results, state_of

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
class ReaderAgreement:
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
    # one category only: agreement by chance is whole, and 0 / 0 would be rounding
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
    # a case with one value has no pair to compare
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


def interval(table: Table, measure: Measure) -> tuple[float, float]:
    """Return the bootstrap interval of a measure, of samples of cases with replacement.

    Parameters
    ----------
    table : (readers, cases) array
    """
    columns = np.nan_to_num(table, nan=-1)
    # cases with the same decisions are drawn together: a sample is a count of each kind
    columns, counts = np.unique(columns, axis=1, return_counts=True)
    random = np.random.default_rng(0)  # the same samples each time, so that reports repeat
    weights = random.multinomial(counts.sum(), counts / counts.sum(), SAMPLES).astype(float)
    values = measure(np.where(columns < 0, np.nan, columns), weights)
    values = values[~np.isnan(values)]
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.quantile(values, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return float(low), float(high)


def agreements(verdicts: Iterable[Verdict]) -> list[ReaderAgreement]:
    """Return the agreement about cases and about each structure.

    Alpha of all reviewers, kappa of each pair, and kappa of a reviewer's two readings.

    Parameters
    ----------
    verdicts : iterable of Verdict
        Those that were not undone.
    """
    independent, readings = _selected(verdicts)
    results = list[ReaderAgreement]()
    for subject, decisions in _by_subject(independent).items():
        # r2 before r10
        readers = sorted({reader for reader, _ in decisions}, key=lambda code: (len(code), code))
        results += _agreement(subject, "alpha", decisions, readers, alpha)
        for first, second in itertools.combinations(readers, 2):
            name = f"kappa {first} {second}"
            results += _agreement(subject, name, decisions, (first, second), kappa)
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


def _agreement(
    subject: str, name: str, decisions: _Decisions, readers: Sequence[str], measure: Measure
) -> list[ReaderAgreement]:
    """Return an agreement; none if nothing was judged twice."""
    table = table_of(decisions, readers)
    table = table[:, (~np.isnan(table)).sum(axis=0) >= 2]
    if not table.shape[1]:
        return []
    low, high = interval(table, measure)
    return [ReaderAgreement(subject, name, value_of(table, measure), low, high, table.shape[1])]


def table_of(decisions: Mapping[tuple[str, str], str], readers: Sequence[str]) -> Table:
    """Return the decisions of some readers as a table, results in the order of their names."""
    cases = sorted({case for reader, case in decisions if reader in readers})
    numbers: dict[str | None, float] = {name: n for n, name in enumerate(DECISIONS)}
    rows = [
        [numbers.get(decisions.get((reader, case)), float("nan")) for case in cases]
        for reader in readers
    ]
    return np.array(rows, dtype=np.float64).reshape(len(readers), len(cases))


COLUMNS = (
    *("case", "reviewer", "reading", "subject", "decision", "tags"),
    *("seconds", "at", "current", "independent", "recipe"),
)
"""Columns of `review.csv`: a row for each decision that counts, about a case or a structure."""


def write_review_tables(out: Path) -> None:
    """Write the tables of an output folder's verdicts; nothing if it never had any.

    Raises
    ------
    ScanError
        REVIEW_DAMAGED if the log is damaged.
    OSError
        If they can't be written.
    """
    verdicts = read_verdicts(out)
    if not verdicts:
        return
    kept = [verdict for stacked in VerdictStack(verdicts).history().values() for verdict in stacked]
    rows = list(_rows(out, kept))
    folder = out / REVIEW
    atomic_write(folder / "review.csv", lambda draft: _write_csv(draft, COLUMNS, rows))
    atomic_write(folder / "review.parquet", lambda draft: _write_parquet(draft, rows))
    names = [field.name for field in fields(ReaderAgreement)]
    agreed = [[_cell(value) for value in astuple(each)] for each in agreements(kept)]
    atomic_write(folder / "agreement.csv", lambda draft: _write_csv(draft, names, agreed))


def review_states(out: Path) -> dict[str, str]:
    """Return the state of each case with a verdict: a decision, "disagreed" or "stale".

    Raises
    ------
    ScanError
        REVIEW_DAMAGED if the log is damaged.
    """
    current = VerdictStack(read_verdicts(out)).current()
    results = current_results(out, current)
    return {
        case: state_of(results[case], verdicts) if case in results else "stale"
        for case, verdicts in sorted(current.items())
    }


def _rows(out: Path, verdicts: Iterable[Verdict]) -> Iterator[list[Any]]:
    """Return the rows of each reviewer's last verdict in each reading of a case."""
    last = {(v.case, v.reviewer, v.reading): v for v in sorted(verdicts, key=lambda v: v.number)}
    ordered = [verdict for _, verdict in sorted(last.items())]
    results = current_results(out, {each.case for each in ordered})
    for each in ordered:
        is_current = results.get(each.case) == each.seen
        of_case = {CASE_SUBJECT: each.decision} if each.decision else {}
        for subject, decision in {**of_case, **each.structures}.items():
            yield [
                *(each.case, each.reviewer, each.reading, subject, decision, " ".join(each.tags)),
                *(each.seconds, each.at, is_current, each.independent, each.seen.recipe),
            ]


def _write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(columns)
        lines.writerows([escape_formula(str(cell)) for cell in row] for row in rows)


def _write_parquet(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    import pyarrow as pa

    types = {"seconds": pa.float64(), "reading": pa.int64()}
    types |= dict.fromkeys(("current", "independent"), pa.bool_())
    schema = pa.schema([(name, types.get(name, pa.string())) for name in COLUMNS])
    plain = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    write_parquet(pa.Table.from_pylist(plain, schema), path)


def _cell(value: object) -> object:
    """Return a cell; empty for a number that is not defined."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4f}"
    return value
