"""The tables of a run: `manifest`, one row per file, and `measurements`, per structure.

`radiomics` has the features of structures, if any case has them.

Holders of the key find the sources of the file ids in a manifest.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scanloom.core import OUTCOMES, Flag, Reason, ScanError
from scanloom.engine.outcomes import NameSet, Outcome, Outcomes
from scanloom.engine.run_files import RUNS, WORKFLOW, exclusively
from scanloom.engine.workflow.schema import MAX_PAGE_BYTES
from scanloom.io.dicom.header.elements import EncodedElements, decode_elements
from scanloom.io.extras.radiomics import feature_columns, read_features
from scanloom.io.identity import file_id, key_fingerprint
from scanloom.io.index.build import Index, stored_index
from scanloom.io.output.crosswalk import (
    SourceRecord,
    find_sources,
    gather_sources,
    latest_by_id,
    path_text,
)
from scanloom.io.output.failures import failed_cases
from scanloom.io.output.growing_table import file_state
from scanloom.io.output.layout import TOTALS, iter_cases
from scanloom.io.output.measurements import (
    COLUMNS,
    measurement_to_row,
    read_measurements_json,
)
from scanloom.io.output.parquet_file import open_parquet, read_errors, read_parquet
from scanloom.io.output.private import private_folder
from scanloom.io.output.tabled_cases import (
    BATCH_ROWS,
    MEASUREMENTS,
    OldTableError,
    ReadCase,
    Rows,
    TabledCases,
    described,
    has_columns,
    merge_rows,
    write_both,
    write_rows,
)
from scanloom.io.system.atomic_write import atomic_write
from scanloom.io.system.regular_files import read_regular_file
from scanloom.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa

MANIFEST = "manifest"
RADIOMICS = "radiomics"

MANIFEST_COLUMNS = ("file", "copy", "case", "outcome", "reason", "detail")
MEASUREMENT_COLUMNS = ("case", *COLUMNS, "recipe")

_MERGE_WAIT_S = 3600.0
"""Longest wait for another shard that merges the tables of a large archive."""
_SOP_INSTANCE_UID = 0x00080018
_WRITTEN = b"scanloom.written"
"""Key of the metadata that tell what the manifest was written from."""
_TEXT_COLUMNS = {
    *("file", "case", "outcome", "reason", "detail"),
    *("model", "label", "unit", "flags", "share_of", "asymmetry_of", "settings", "recipe"),
    *("predictions", "structure"),
}
_BOX_COLUMNS = {name for name in COLUMNS if name[2:] in ("first", "last")}
_INTEGER_COLUMNS = {"copy", "number", "voxels", "components", *_BOX_COLUMNS}


def write_tables(
    out: Path,
    index: Index,
    left_out: Outcomes,
    endings: Outcomes,
    key: bytes,
    shard: Path | None = None,
    damaged: set[str] | None = None,
) -> dict[str, int]:
    """Write `manifest` and `measurements`, each as Parquet and CSV, and gather the crosswalk.

    Parameters
    ----------
    out, index, key
        The output folder, the index of all files found, and the key of the ids.
    left_out : Outcomes
        Of series without a case.
    endings : Outcomes
        Of the cases of each series, by series id; a series that is missing was not worked on yet.
    shard : Path or None
        The folder of the run if it works on one shard of the cases: its manifest is written there,
        and the manifest of `out` is merged from those of all shards.
    damaged : set of str, optional
        Receives the names of published cases that can't be read; `measurements` omits them.

    Returns
    -------
    dict
        Counts of files found, used, skipped, ambiguous and failed, and of pending files ("open"),
        which include those of other shards.

    Raises
    ------
    OSError
        If the tables can't be written.
    """
    counts: Counter[str] = Counter()
    damaged = set() if damaged is None else damaged

    def counted_rows() -> Iterator[dict[str, Any]]:
        for row in _with_copies(_manifest_rows(index, left_out, endings, key)):
            counts[row["outcome"]] += 1
            yield row

    with private_folder(out, key_fingerprint(key)) as private:
        gather_sources(private)
    # The manifest first: `measurements` flags the cases that it calls STALE
    stem, digest = (shard or out) / MANIFEST, _manifest_digest(index, left_out, endings)
    if (unchanged := _counts_of(stem, digest)) is not None:
        counts.update(unchanged)
    else:
        write_table(
            stem,
            MANIFEST_COLUMNS,
            counted_rows(),
            lambda csv_size: {"digest": digest, "csv_size": csv_size, "counts": counts},
        )
    if shard is None:
        write_case_tables(out, damaged)
    else:
        _merge_shards(out, shard, damaged)
    files = {name: counts[name] for name in ("used", *OUTCOMES, "open")}
    return {"found": sum(files.values()), **files}


def _manifest_digest(index: Index, left_out: Outcomes, endings: Outcomes) -> str:
    """Return a digest of all that decides what the manifest says.

    A part of the index is named by the states of its files. What is known of a file that could not
    be read may change without them, and is then counted under another reason.
    """
    parts, reasons = index.catalogue.parts, sorted(index.reasons.items())
    head = [__version__, MANIFEST_COLUMNS, index.catalogue.fingerprint, parts, reasons]
    digest = hashlib.blake2b(json.dumps(head).encode("utf-8", "backslashreplace"), digest_size=16)
    for name, code, detail in endings.decided(_of_cases):
        digest.update(f"{name} {code} {detail}\n".encode())
    digest.update(b"\n")
    for name, code, detail in left_out.decided(lambda outcomes: outcomes[-1]):
        digest.update(f"{name} {code} {detail}\n".encode())
    return digest.hexdigest()


def _counts_of(stem: Path, digest: str) -> dict[str, int] | None:
    """Return the counts of files of a whole manifest with a digest, or None."""
    table, text = stem.with_suffix(".parquet"), stem.with_suffix(".csv")
    with suppress(*read_errors()):
        with open_parquet(table) as file:
            written = json.loads(file.metadata.metadata[_WRITTEN])
        as_table, as_text = table.stat(), text.stat()
        # The text is complete first: if it is the newer one, a process died between the two
        is_whole = as_text.st_size == written["csv_size"]
        if written["digest"] == digest and is_whole and as_text.st_mtime_ns <= as_table.st_mtime_ns:
            counts: dict[str, int] = written["counts"]
            return counts
    return None


def merge_shard_tables(out: Path, damaged: set[str] | None = None) -> bool:
    """Write both tables over all shards, and return True, if the run that ended last was a shard.

    `damaged` is as in `write_tables`.

    Raises
    ------
    OSError, ValueError
        If the tables can't be read or written.
    """
    finished = sorted(path.parent for path in (out / "runs").glob(f"*/{TOTALS}"))
    if not finished or not _manifest_of(finished[-1]).exists():
        return False
    _merge_shards(out, finished[-1], set() if damaged is None else damaged)
    return True


def _merge_shards(out: Path, newest: Path, damaged: set[str]) -> None:
    """Write both tables over `newest` and all other shards with the same workflow.

    One after another: of two that end at the same time, the second has the manifest of the first.
    """
    workflow, runs = _workflow_of(newest), out / RUNS
    with exclusively(runs, _MERGE_WAIT_S):
        manifests = [
            _manifest_of(run)
            for run in runs.iterdir()
            if _manifest_of(run).exists() and (run == newest or _workflow_of(run) == workflow)
        ]
        # By time, not by name: shards of one job array start together, and end apart
        manifests.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        write_table(out / MANIFEST, MANIFEST_COLUMNS, _merged(manifests))
        write_case_tables(out, damaged)


def _manifest_of(folder: Path) -> Path:
    return folder / f"{MANIFEST}.parquet"


def _workflow_of(run: Path) -> bytes:
    """Return the workflow document of a run; if unreadable, bytes that no other run has."""
    try:
        return read_regular_file(run / WORKFLOW, MAX_PAGE_BYTES)
    except OSError:
        return run.name.encode()


def _read_manifest(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a manifest, some at a time."""
    schema = _schema(MANIFEST_COLUMNS)
    try:
        with open_parquet(path) as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=schema.names, use_threads=False):
                yield batch.cast(schema)
    except read_errors() as exc:
        if isinstance(exc, OSError) and exc.errno is not None:
            raise
        name = f"runs/{path.parent.name}/{path.name}"
        detail = f"{name} is damaged: delete it, and run that shard again"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail) from exc


def _merged(manifests: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield a row for each file that the newest run found.

    The newest run knows every result that was there when it looked. A file that is open in it takes
    the outcome that the manifest of its own shard gives, the most recent one first: a reason, or
    "used" if that run was at work at the same time, so that the result may have come later.
    """
    import pyarrow as pa
    from pyarrow import compute

    newest, *older = manifests
    unknown, known = NameSet(), Outcomes()  # by the id of the file and the number of its copy
    for batch in _read_manifest(newest) if older else ():
        for row in batch.filter(compute.equal(batch["outcome"], "open")).to_pylist():
            unknown.add(f"{row['file']} {row['copy']}")
    begin = file_state(newest.parent / WORKFLOW)  # its first file
    for path in older:
        is_beside = begin is not None and path.stat().st_mtime_ns > begin.st_mtime_ns
        taken = [*OUTCOMES, "used"] if is_beside else OUTCOMES
        for batch in _read_manifest(path):
            is_taken = compute.is_in(batch["outcome"], value_set=pa.array(taken))
            for row in batch.filter(is_taken).to_pylist():
                if (name := f"{row['file']} {row['copy']}") in unknown:
                    known.append(Outcome(name, f"{row['outcome']} {row['reason']}", row["detail"]))
    find = known.finder()
    for batch in _read_manifest(newest):
        for row in batch.to_pylist():
            if row["outcome"] == "open" and (earlier := find(f"{row['file']} {row['copy']}")):
                outcome, _, reason = earlier[0].code.partition(" ")
                row |= {"outcome": outcome, "reason": reason, "detail": earlier[0].detail}
            yield row


def write_case_tables(out: Path, damaged: set[str]) -> bool:
    """Write `measurements` and `radiomics` from the published cases, as in `write_tables`.

    Without a case that has features, no table of them is written. Rows of cases that did not change
    are copied; tables that would be equal are left as they are.

    Returns
    -------
    bool
        Whether a table changed.
    """
    outdated = outdated_cases(out)
    tabled = TabledCases(out, outdated, (MEASUREMENTS, RADIOMICS))
    read = partial(_measured, outdated=outdated)
    if tabled.is_up_to_date(lambda folder: any(iter_cases(out, read, damaged, [folder]))):
        return False
    try:
        return _write_case_tables(out, tabled, outdated, damaged)
    except OldTableError:
        tabled.read_all()
        _write_case_tables(out, tabled, outdated, damaged)
        return True


def _write_case_tables(
    out: Path, tabled: TabledCases, outdated: Container[str], damaged: set[str]
) -> bool:
    def measured() -> Iterator[tuple[str, Rows]]:
        read = partial(_measured, outdated=outdated)
        for case, rows, columns in iter_cases(out, read, damaged, tabled.folders()):
            if columns is None:
                damaged.add(case.name)
            else:
                tabled.note(case, columns)
            yield case.name, rows

    def features(folders: Iterator[Path]) -> Iterator[tuple[str, Rows]]:
        def read(folder: Path, document: dict[str, Any], _: dict[str, Any]) -> tuple[str, Rows]:
            return folder.name, feature_rows(folder, document, outdated)

        return iter_cases(out, read, damaged, folders)

    stem, schema = out / MEASUREMENTS, _schema(MEASUREMENT_COLUMNS)
    pieces = merge_rows(stem, schema, tabled.copied_names(), measured())
    is_changed, written = write_rows(stem, schema, pieces)
    stem, names = out / RADIOMICS, tabled.columns()
    if names:
        schema = _schema(("case", *names, "recipe"))
        copied, folders = tabled.copied_names(), tabled.folders()
        if not has_columns(stem, schema):  # each settings of features have their own
            copied, folders = iter(()), tabled.with_features()
        pieces = merge_rows(stem, schema, copied, features(folders))
        is_other, of_features = write_rows(stem, schema, pieces)
        is_changed, written = is_changed or is_other, written | of_features
    else:
        for path in (stem.with_suffix(".csv"), stem.with_suffix(".parquet")):
            is_changed |= path.exists()
            path.unlink(missing_ok=True)
    tabled.save(damaged, written)
    return is_changed


def _measured(
    folder: Path, document: dict[str, Any], _: dict[str, Any], outdated: Container[str]
) -> tuple[ReadCase, Rows, Sequence[str] | None]:
    """Return a case, its rows, and the columns of its features, None if damaged."""
    time = folder.stat().st_mtime_ns  # before its tables are read
    rows = measurement_rows(folder, document, outdated)
    columns = None
    with suppress(OSError, ValueError):
        columns = feature_columns(folder)
    case = ReadCase(folder.name, str(document["case"]), time, described(document))
    return case, rows, columns


def read_measurements_table(out: Path, damaged: set[str]) -> pa.Table:
    """Return the table that `write_case_tables` would write."""
    import pyarrow as pa

    outdated = outdated_cases(out)

    def read(folder: Path, document: dict[str, Any], _: dict[str, Any]) -> Rows:
        return measurement_rows(folder, document, outdated)

    rows = list(itertools.chain.from_iterable(iter_cases(out, read, damaged)))
    return pa.Table.from_pylist(rows, _schema(MEASUREMENT_COLUMNS))


def stale_cases(out: Path) -> set[str]:
    """Return the ids of the cases that the manifest calls STALE: made by another recipe.

    They are unknown (an empty set) without a manifest.
    """
    from pyarrow import compute

    is_stale = compute.field("reason") == Reason.STALE.code
    with suppress(*read_errors()):
        table = read_parquet(_manifest_of(out), ["case", "reason"], is_stale)
        return set(table["case"].to_pylist())
    return set()


def outdated_cases(out: Path) -> set[str]:
    """Return the ids of the cases of another recipe, or whose last attempt failed."""
    return stale_cases(out) | failed_cases(out)


def measurement_rows(folder: Path, document: dict[str, Any], outdated: Container[str]) -> Rows:
    """Return the rows of a published case, one per model and structure.

    `document` is its `case.json`. If its id is in `outdated`, each row has the flag OUTDATED.

    Raises
    ------
    OSError, ValueError, LookupError, TypeError
        If the case is damaged.
    """
    rows = read_measurements_json(folder)
    case, recipe = str(document["case"]), document["recipe"]
    if case in outdated:
        rows = [{**row, "flags": [*row["flags"], Flag.OUTDATED.code]} for row in rows]
    return [{"case": folder.name, **measurement_to_row(row), "recipe": recipe} for row in rows]


def feature_rows(folder: Path, document: dict[str, Any], outdated: Container[str]) -> Rows:
    """Return the features of a published case, one row per model and structure; none without.

    Parameters and errors are as in `measurement_rows`.
    """
    rows = read_features(folder)
    case, recipe = str(document["case"]), document["recipe"]
    if case in outdated:
        flag = Flag.OUTDATED.code
        rows = [{**row, "flags": f"{row['flags']} {flag}".strip()} for row in rows]
    return [{"case": folder.name, **row, "recipe": recipe} for row in rows]


def _manifest_rows(
    index: Index,
    left_out: Outcomes,
    endings: Outcomes,
    key: bytes,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each file, with the outcome of its series, or else its own."""
    find_ending, find_left_out = endings.finder(), left_out.finder()
    known: str | None = None
    of_known = "open", "", ""
    for path, header, reason, series in index.identities():
        if reason or series is None:
            code = reason or Reason.NOT_AN_IMAGE.code
            outcome, detail = str(Reason[code].outcome), ""
        else:
            if series.id != known:  # else it is that of the file before
                known, of_known = series.id, ("open", "", "")
                if outcomes := find_ending(known) or find_left_out(known)[-1:]:
                    _, code, detail = _of_cases(outcomes)
                    of_known = (Reason[code].outcome if code else "used"), code, detail
            outcome, code, detail = of_known
        yield {
            "file": manifest_file_id(path, header, key),
            "copy": 1,
            "case": series.id if series else "",
            "outcome": outcome,
            "reason": code,
            "detail": detail,
        }


def _with_copies(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows with the number of the copy of a file: all copies have one id."""
    known, copies = NameSet(), dict[str, int]()
    while batch := list(itertools.islice(rows, BATCH_ROWS)):
        again = known.add_all([row["file"] for row in batch])
        for row, is_copy in zip(batch, again, strict=True):
            if is_copy:
                row["copy"] = copies[row["file"]] = copies.get(row["file"], 1) + 1
            yield row


def _of_cases(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of a series by those of its cases: published if any of them was."""
    return next((outcome for outcome in outcomes if not outcome.code), outcomes[0])


def manifest_file_id(path: str, packed: EncodedElements | None, key: bytes) -> str:
    """Return the id of a file; if the file can't be read, an id of its path."""
    # From the SOPInstanceUID if there is one: a copy of a file then has the same id
    instance = ""
    if packed:
        instance = decode_elements(packed).raw(_SOP_INSTANCE_UID).decode("ascii", "replace")
    try:
        return file_id(path, instance.strip(" \0"), key)
    except (ScanError, ValueError):
        return file_id("", f"path {path}", key)


def write_table(
    stem: Path,
    columns: Sequence[str],
    rows: Iterable[dict[str, Any]],
    written: Callable[[int], dict[str, Any]] | None = None,
) -> None:
    """Write rows as `stem`.csv and .parquet in one pass, a batch at a time.

    `written` returns metadata of the Parquet file; it is called last, with the size of the other.

    Raises
    ------
    OSError
        If a table can't be written.
    """
    schema, remaining = _schema(columns), iter(rows)
    batches = iter(lambda: list(itertools.islice(remaining, BATCH_ROWS)), [])

    def metadata(csv_size: int) -> dict[bytes, bytes]:
        return {} if written is None else {_WRITTEN: json.dumps(written(csv_size)).encode()}

    def write(table: Path, text: Path) -> None:
        write_both(table, text, schema, batches, metadata)

    table, text = stem.with_suffix(".parquet"), stem.with_suffix(".csv")
    atomic_write(table, lambda draft: atomic_write(text, partial(write, draft)))


def _schema(columns: Sequence[str]) -> pa.Schema:
    import pyarrow as pa

    types = dict.fromkeys(_TEXT_COLUMNS, pa.string()) | dict.fromkeys(_INTEGER_COLUMNS, pa.int64())
    return pa.schema([(name, types.get(name, pa.float64())) for name in columns])


def find_files(out: Path, ids: Collection[str], key: bytes) -> tuple[tuple[int, SourceRecord], ...]:
    """Return the copy's number, as in the manifest, and the source of files by their ids.

    The index of the output folder tells their paths; a file is opened only if it has no
    SOPInstanceUID, and only among the files of the same series.

    Ids that the manifest lacks are passed over.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the crosswalk can't be read.
    """
    series_ids = _series_of(out, ids)
    index = stored_index(out, key_fingerprint(key)) if series_ids else None
    if index is None:
        return ()
    series = latest_by_id(find_sources(out, sorted(series_ids)))
    copies: Counter[str] = Counter()
    sources = []
    for file, path, kind, series_id in _files_by_id(index, series_ids, key):
        copies[file] += 1
        if file in ids:
            of_series = series.get(series_id, SourceRecord("", kind, "", 1))
            record = replace(of_series, id=file, path=path_text(path), files=1, folder="")
            sources.append((copies[file], record))
    return tuple(sources)


def is_in_manifest(out: Path, ids: Collection[str]) -> bool:
    """Return whether the manifest of an output folder has files with one of these ids."""
    return bool(_series_of(out, ids))


def _series_of(out: Path, ids: Collection[str]) -> set[str]:
    """Return the ids of the series of files, empty for files of none, as the manifest gives them.

    An unreadable manifest has none: `verify` names it.
    """
    import pyarrow as pa
    from pyarrow import compute

    try:
        is_wanted = compute.field("file").isin(pa.array(ids, pa.string()))
        table = read_parquet(_manifest_of(out), ["case", "file"], is_wanted)
    except read_errors():
        return set()
    return set(table.column("case").to_pylist())


def _files_by_id(
    index: Index, series_ids: Collection[str], key: bytes
) -> Iterator[tuple[str, str, str, str]]:
    """Yield the id, path and kind of the files of some series, and the id of their series."""
    if "" not in series_ids:
        for entry, look, series in index.files_of_series(series_ids):
            yield manifest_file_id(entry.path, look.packed, key), entry.path, look.kind, series.id
        return
    for (entry, _, maybe), look in zip(index.files(), index.infos(), strict=True):  # all parts
        if (series_id := maybe.id if maybe else "") in series_ids:
            yield manifest_file_id(entry.path, look.packed, key), entry.path, look.kind, series_id
