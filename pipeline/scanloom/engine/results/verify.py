"""Check an output folder: case files against their checksums, tables against the cases.

Rows of the tables are compared with the cases, and CSV with Parquet.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict, deque
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from itertools import groupby, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from scanloom.core import ScanError
from scanloom.engine.results import tables
from scanloom.engine.run_files import run_folders
from scanloom.io.identity import key_fingerprint, read_key
from scanloom.io.output.audit import AUDIT, AuditError, audit_key, read_trail, result_line
from scanloom.io.output.crosswalk import case_folders
from scanloom.io.output.file_names import CHECKSUMS, TIMING
from scanloom.io.output.growing_table import parse_line
from scanloom.io.output.json_file import MAX_DOCUMENT_BYTES
from scanloom.io.output.layout import (
    CASES,
    TOTALS,
    Owners,
    case_folder,
    no_results,
    published_cases,
    read_case,
    stray_results,
)
from scanloom.io.output.ledger import Ledger
from scanloom.io.output.measurements import escape_formula
from scanloom.io.output.parquet_file import open_parquet, read_errors
from scanloom.io.output.private import (
    KEY_FINGERPRINT,
    LEDGER,
    PRIVATE,
    read_fingerprint,
)
from scanloom.io.output.tabled_cases import BATCH_ROWS, MEASUREMENTS
from scanloom.io.system.regular_files import open_regular_file, read_regular_file, sha256_of
from scanloom.review.revisions import REVISIONS, revision_folders
from scanloom.review.verdicts.log import COMMENTS, REVIEW, VERDICTS, LineError, read_lines

_Row = dict[str, str]
"""A row of a table, each cell as the CSV file has it."""


class TableUnreadableError(Exception):
    """A table can't be read; its argument is the table's name in the output folder."""


def recorded_cases(out: Path) -> set[str]:
    """Return the names of the published cases according to the tables, or else the crosswalk."""
    files = _existing_files(out, MEASUREMENTS)
    names: set[str] = set()
    for file in files:
        with suppress(TableUnreadableError):  # the other table may be readable
            names.update(row["case"] for row in _rows(out / file, ["case"]))
    if not files:
        with suppress(ScanError, OSError):  # the crosswalk is readable for its owner alone
            names.update(case_folders(out).values())
    return names


def missing_tables(out: Path) -> list[str]:
    """Return the tables that are missing although a run, or `report`, has written them."""
    existing = {*_existing_files(out, tables.MANIFEST), *_existing_files(out, MEASUREMENTS)}
    features = _existing_files(out, tables.RADIOMICS)
    half = {*_files(tables.RADIOMICS)} - {*features} if features else set()
    if not existing and not any((out / "runs").glob(f"*/{TOTALS}")):
        return sorted(half)
    expected = {*_files(MEASUREMENTS)}
    # Results of `segment` have no manifest; a plan is in `runs` too, but no folder
    if run_folders(out) or not existing <= expected:
        expected |= {*_files(tables.MANIFEST)}
    return sorted((expected - existing) | half)


_ROWS = {MEASUREMENTS: tables.measurement_rows, tables.RADIOMICS: tables.feature_rows}
"""Rows of a case in each table."""


def altered_rows(out: Path, table: str, intact: Container[str]) -> set[str]:
    """Return the files of a table of `_ROWS` that differ from the cases.

    Parameters
    ----------
    out : Path
        The output folder.
    table : str
        Its name.
    intact : container of str
        Cases whose files are as published; rows of other cases are not checked.

    Raises
    ------
    TableUnreadableError
        If a table can't be read.
    """
    altered: set[str] = set()
    outdated = tables.outdated_cases(out)
    groups = {
        file: ((case, list(rows)) for case, rows in groupby(_rows(out / file), itemgetter("case")))
        for file in _existing_files(out, table)
    }
    heads = {file: next(cases, None) for file, cases in groups.items()}
    while names := [head[0] for head in heads.values() if head is not None]:
        case = min(names)  # both tables are sorted by name
        rows = None
        if case in intact:
            folder = case_folder(out, case)
            rows = _ROWS[table](folder, read_case(folder), outdated)
        # cases with other settings of features have other columns
        columns = next(head[1][0].keys() for head in heads.values() if head and head[0] == case)
        blank = dict.fromkeys(columns if table == tables.RADIOMICS else (), "")
        expected = None if rows is None else [{**blank, **_as_csv(row)} for row in rows]
        for file, head in heads.items():
            if head is None or head[0] != case:
                altered.add(file)
                continue
            following = next(groups[file], None)
            is_sorted = following is None or following[0] > case
            if not is_sorted or expected not in (None, head[1]):
                altered.add(file)
            heads[file] = following if is_sorted else None
    return altered


def altered_manifest(out: Path) -> set[str]:
    """Return the CSV of the manifest if it differs from the Parquet file.

    Raises
    ------
    TableUnreadableError
        If a table can't be read.
    """
    files = _existing_files(out, tables.MANIFEST)
    if len(files) < 2:
        return set()
    pairs = zip_longest(*(_rows(out / file) for file in files))
    return set() if all(a == b for a, b in pairs) else {f"{tables.MANIFEST}.csv"}


def _files(table: str) -> tuple[str, str]:
    return f"{table}.csv", f"{table}.parquet"


def _existing_files(out: Path, table: str) -> list[str]:
    return [file for file in _files(table) if (out / file).exists()]


def _rows(path: Path, columns: list[str] | None = None) -> Iterator[_Row]:
    """Yield the rows of a table, CSV or Parquet; a CSV always with all columns."""
    errors: tuple[type[Exception], ...] = (*read_errors(), csv.Error)
    try:
        if path.suffix == ".csv":
            with TextIOWrapper(open_regular_file(path), "utf-8", newline="") as text:
                rows = csv.DictReader(text, strict=True)
                _check_columns(rows.fieldnames or ["case"])
                yield from rows
            return
        with open_regular_file(path) as stream, open_parquet(stream) as file:
            _check_columns(file.schema_arrow.names)
            for batch in file.iter_batches(BATCH_ROWS, columns=columns):
                yield from map(_as_csv, batch.to_pylist())
    except errors as exc:
        raise TableUnreadableError(path.name) from exc


def _check_columns(names: Sequence[str]) -> None:
    """Refuse a table that another program saved: with semicolons, say, or a byte order mark."""
    if "case" not in names:
        raise ValueError("it has no column `case`")


def _as_csv(row: dict[str, Any]) -> _Row:
    texts = {name: "" if value is None else str(value) for name, value in row.items()}
    # Only text is escaped, as in the table: a minus sign of a number is no formula
    return {n: escape_formula(t) if isinstance(row[n], str) else t for n, t in texts.items()}


@dataclass(frozen=True)
class Discrepancy:
    """A file, or a whole case, that differs from its published state; relative to the output."""

    fault: Literal["changed", "missing", "extra", "unreadable"]
    file: str


def verify(out: Path, key: Path | None = None) -> Iterator[Discrepancy]:
    """Compare cases with sums, audit trail and ledger, tables with cases; read all else.

    Parameters
    ----------
    out : Path
        The output folder.
    key : Path or None
        File with the key of the ids; None for SCANLOOM_KEY or the user's own key. The audit trail
        is not checked without it: see `unchecked_trail`.

    Yields
    ------
    Discrepancy
        First case by case, sorted, then missing cases, then tables. `timing.json` has no checksum
        and only has to exist. Cases published after the tables were written are not a finding.

    Raises
    ------
    ScanError
        NOT_FOUND or NO_RESULTS if there are no results in `out`.
    """
    folders, expected = published_cases(out), recorded_cases(out)
    if not expected and not (out / CASES).is_dir():
        raise no_results(out)
    # Cases first: rows of a case that was changed can't be checked
    intact, owners = set(), Owners(out)
    for folder in folders:
        path = folder.relative_to(out).as_posix()
        findings = list(verify_case(folder, path))
        with suppress(OSError, ValueError, ScanError):  # found before
            if case := owners.other_case(folder.name, read_case(folder)):
                findings.append(Discrepancy("changed", f"{path}: it holds the result of {case}"))
        yield from findings
        if not findings:
            intact.add(folder.name)
    yield from (Discrepancy("extra", p.relative_to(out).as_posix()) for p in folders.copies())
    yield from (Discrepancy("extra", f"{CASES}/{name}") for name in stray_results(out))
    yield from _verify_readable(out)
    yield from _verify_fingerprint(out, key)
    yield from _verify_review(out)
    yield from _verify_trail(out, key)
    yield from _verify_ledger(out)
    missing = (case_folder(out, name) for name in sorted(expected.difference(folders.names())))
    yield from (Discrepancy("missing", p.relative_to(out).as_posix()) for p in missing)
    yield from (Discrepancy("missing", name) for name in missing_tables(out))
    of_cases = [partial(altered_rows, out, table, intact) for table in _ROWS]
    for find_altered in (*of_cases, partial(altered_manifest, out)):
        try:
            yield from (Discrepancy("changed", name) for name in sorted(find_altered()))
        except TableUnreadableError as error:
            yield Discrepancy("unreadable", str(error))


def _verify_review(out: Path) -> Iterator[Discrepancy]:
    """Yield the damaged lines of verdicts, and the differences of revisions from their sums."""
    for name in (f"{REVIEW}/{VERDICTS}", f"{PRIVATE}/{COMMENTS}"):
        try:
            for _ in read_lines(out / name):
                pass
        except LineError as error:
            yield Discrepancy("changed", f"{name}, {error}")
        except OSError:
            yield Discrepancy("unreadable", name)
    folder = Path(out, *REVISIONS)
    for case in sorted(folder.iterdir()) if folder.is_dir() else ():
        for revision in revision_folders(out, case.name):
            yield from verify_case(revision, revision.relative_to(out).as_posix())


_FOLDERS = ("engines", "failed", "report", "runs", PRIVATE)
_CHECKED_FURTHER = frozenset({LEDGER, AUDIT, COMMENTS})


def _verify_readable(out: Path) -> Iterator[Discrepancy]:
    """Yield the files outside `cases/` that can't be read.

    Pages of tables and the lines beside them have checksums; other files must be JSON.
    """
    errors = read_errors()
    for path in sorted(file for name in _FOLDERS for file in (out / name).rglob("[!.]*.*")):
        read = _READ.get(path.suffix)
        if read is None or path.name in _CHECKED_FURTHER or not path.is_file():
            continue
        try:
            read(path)
        except FileNotFoundError:  # a run at work replaced or removed it
            pass
        except errors:
            yield Discrepancy("unreadable", path.relative_to(out).as_posix())


def _read_pages(path: Path) -> None:
    with open_regular_file(path) as stream, open_parquet(stream) as file:
        for _ in file.iter_batches(BATCH_ROWS, use_threads=False):
            pass


def _read_document(path: Path) -> None:
    with open_regular_file(path) as stream:
        json.load(stream)


def _read_json_lines(path: Path) -> None:
    with open_regular_file(path) as stream:
        for line in stream:
            if line.endswith(b"\n"):  # else a process is writing it, or died
                parse_line(line)


_READ = {".parquet": _read_pages, ".json": _read_document, ".jsonl": _read_json_lines}


def _verify_fingerprint(out: Path, key: Path | None) -> Iterator[Discrepancy]:
    """Yield the fingerprint of the key if it can't be read, or is not that of the trail's key."""
    name = f"{PRIVATE}/{KEY_FINGERPRINT}"
    try:
        recorded = read_fingerprint(out)
    except ScanError:
        yield Discrepancy("unreadable", name)
        return
    secret = _trail_key(out, key)
    if secret is not None and recorded != key_fingerprint(secret):
        yield Discrepancy("missing" if recorded is None else "changed", name)


def _trail_key(out: Path, key: Path | None) -> bytes | None:
    """Return the key of the audit trail; None if it is missing.

    It is the one of the fingerprint, or else a given one with which the first line was written.
    """
    if (secret := audit_key(out, key)) is not None:
        return secret
    with suppress(ScanError, OSError, AuditError):
        secret = read_key(key)
        if next(read_trail(out, secret), None) is not None:
            return secret
    return None


def unchecked_trail(out: Path, key: Path | None) -> bool:
    """Return whether an output folder has an audit trail, and its key is missing."""
    return (out / PRIVATE / AUDIT).exists() and _trail_key(out, key) is None


def _verify_trail(out: Path, key: Path | None) -> Iterator[Discrepancy]:
    """Yield damage of the audit trail, and the results that it does not tell."""
    secret, name = _trail_key(out, key), f"{PRIVATE}/{AUDIT}"
    if secret is None:
        return
    cases = published_cases(out)
    if cases and not (out / name).exists():
        yield Discrepancy("missing", name)
        return
    # The last two lines of each result: a process may be killed between a line and its result
    recorded: dict[tuple[str, int], deque[str]] = defaultdict(lambda: deque(maxlen=2))
    try:
        for line in read_trail(out, secret):
            if line["event"] in ("segmented", "corrected"):
                recorded[line["case"], line.get("revision", 0)].append(line["sums"])
    except AuditError as error:
        yield Discrepancy("changed", f"{name}, {error}")
        return
    except OSError:
        yield Discrepancy("unreadable", name)
        return
    for case in cases:
        for folder in (case, *revision_folders(out, case.name)):
            with suppress(OSError, ValueError, LookupError, ScanError):  # found before
                _, details = result_line(folder)
                if details["sums"] not in recorded[details["case"], details.get("revision", 0)]:
                    path = folder.relative_to(out).as_posix()
                    yield Discrepancy("changed", f"{path}: not the result that {name} tells")


def _verify_ledger(out: Path) -> Iterator[Discrepancy]:
    """Yield what the ledger says of other results than those in the folders."""
    ledger, name = Ledger(out), f"{PRIVATE}/{LEDGER}"
    if ledger.is_damaged:
        yield Discrepancy("unreadable", name)
    yield from (Discrepancy("changed", f"{name}, case {case}") for case in ledger.differences())


def verify_case(folder: Path, name: str) -> Iterator[Discrepancy]:
    """Yield the differences of a case from its checksums; `name` stands before its files."""
    try:
        sums = read_sums(folder / CHECKSUMS)
    except FileNotFoundError:
        yield Discrepancy("missing", f"{name}/{CHECKSUMS}")
        return
    except (OSError, ValueError):
        yield Discrepancy("unreadable", f"{name}/{CHECKSUMS}")
        return
    present = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}
    expected = {*sums, CHECKSUMS, TIMING}
    yield from (Discrepancy("missing", f"{name}/{file}") for file in sorted(expected - present))
    yield from (Discrepancy("extra", f"{name}/{file}") for file in sorted(present - expected))
    for file in sorted(present & sums.keys()):
        try:
            is_same = sha256_of(folder / file) == sums[file]
        except OSError:
            yield Discrepancy("unreadable", f"{name}/{file}")
            continue
        if not is_same:
            yield Discrepancy("changed", f"{name}/{file}")


def read_sums(path: Path) -> dict[str, str]:
    """Return the digest of each file from a file in the format of `sha256sum --check`."""
    sums = {}
    for line in read_regular_file(path, MAX_DOCUMENT_BYTES).decode().splitlines():
        digest, gap, file = line[:64], line[64:66], line[66:]
        if gap != "  " or not file:
            raise ValueError(f"a line of {path.name} is not a checksum and a file name")
        sums[file] = digest
    return sums
