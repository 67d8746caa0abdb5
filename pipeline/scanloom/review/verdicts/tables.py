"""Tables of reviews: `review/review.parquet`, `review.csv` and `agreement.csv`, without names."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scanloom.io.output.csv_text import escape_formula
from scanloom.io.system.atomic_write import atomic_write
from scanloom.review.verdicts.agreement import CASE_SUBJECT, Agreement, agreements
from scanloom.review.verdicts.log import REVIEW, Stack, current_verdicts, read_verdicts
from scanloom.review.verdicts.results import current_results, state_of
from scanloom.review.verdicts.verdict import Verdict

if TYPE_CHECKING:
    import pyarrow as pa

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
    kept = [verdict for stacked in Stack(verdicts).history().values() for verdict in stacked]
    rows = list(_rows(out, kept))
    folder = out / REVIEW
    atomic_write(folder / "review.csv", lambda draft: _write_csv(draft, COLUMNS, rows))
    atomic_write(folder / "review.parquet", lambda draft: _write_parquet(draft, rows))
    names = [field.name for field in fields(Agreement)]
    agreed = [[_cell(value) for value in astuple(each)] for each in agreements(kept)]
    atomic_write(folder / "agreement.csv", lambda draft: _write_csv(draft, names, agreed))


def review_states(out: Path) -> dict[str, str]:
    """Return the state of each case with a verdict: a decision, "disagreed" or "stale".

    Raises
    ------
    ScanError
        REVIEW_DAMAGED if the log is damaged.
    """
    current = current_verdicts(read_verdicts(out))
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
    import pyarrow.parquet as pq

    plain = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    pq.write_table(pa.Table.from_pylist(plain, _schema()), path)


def _schema() -> pa.Schema:
    import pyarrow as pa

    types = {"seconds": pa.float64(), "reading": pa.int64()}
    types |= dict.fromkeys(("current", "independent"), pa.bool_())
    return pa.schema([(name, types.get(name, pa.string())) for name in COLUMNS])


def _cell(value: object) -> object:
    """Return a cell; empty for a number that is not defined."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4f}"
    return value
