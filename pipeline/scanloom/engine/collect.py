"""What a run gave, in tables: a row for every file, and one for every structure of every case."""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scanloom.core import OUTCOMES, Flag, Reason, ScanError
from scanloom.engine.select import LeftOut
from scanloom.engine.workflow import MOST_BYTES
from scanloom.io.dicom.elements import Packed, unpack_elements
from scanloom.io.failures import has_failed
from scanloom.io.identity import file_id
from scanloom.io.index import Index
from scanloom.io.join import defused
from scanloom.io.outfolder import each_case, read_case
from scanloom.io.regular import read_regular
from scanloom.io.tables import COLUMNS, flat_measurement, read_plain_measurements
from scanloom.io.whole import write_whole

if TYPE_CHECKING:
    import pyarrow as pa

MANIFEST = "manifest"
MEASUREMENTS = "measurements"
BATCH = 20_000
"""Rows that are in memory at once."""

MANIFEST_COLUMNS = ("file", "copy", "case", "outcome", "reason", "detail")
MEASUREMENT_COLUMNS = ("case", *COLUMNS)

_INSTANCE = 0x00080018  # SOPInstanceUID
_TEXT = {"file", "case", "outcome", "reason", "detail", "model", "label", "unit", "flags"}
_ENDS = {name for name in COLUMNS if name[2:] in ("first", "last")}
_WHOLE = {"copy", "number", "voxels", "components", *_ENDS}


@dataclass(frozen=True)
class Ending:
    """How a case ended: the code of its reason, empty where it was published."""

    reason: str
    detail: str
    seconds: float


def collect(
    out: Path,
    index: Index,
    left: Sequence[LeftOut],
    endings: Mapping[str, Sequence[Ending]],
    key: bytes,
    shard: Path | None = None,
    damaged: set[str] | None = None,
) -> dict[str, int]:
    """Write `manifest` and `measurements`, each as Parquet and CSV.

    Parameters
    ----------
    out : Path
        The output folder.
    index : Index
        All files that were found.
    left : sequence of LeftOut
        Series that no case was made of.
    endings : mapping
        The endings of the cases of each series, by the series' id; a series without one was not
        worked on yet.
    key : bytes
        Of the ids.
    shard : Path or None
        The run's own folder if it works on a part of the cases: its manifest goes there, and that
        of `out` is then put together from those of all parts.
    damaged : set of str, optional
        Gets the names of published cases that can't be read: `measurements` has no row of them.

    Returns
    -------
    dict
        Files found, used, skipped, ambiguous and failed, and those that are still to do ("open"),
        which are the files of other shards too.

    Raises
    ------
    OSError
        If the tables can't be written.
    """
    counts: Counter[str] = Counter()
    damaged = set() if damaged is None else damaged

    def manifest() -> Iterator[dict[str, Any]]:
        for row in _manifest_rows(index, left, endings, key):
            counts[row["outcome"]] += 1
            yield row

    _write_table((shard or out) / MANIFEST, MANIFEST_COLUMNS, manifest)
    if shard is None:
        collect_measurements(out, damaged)
    else:
        _collect_shards(out, shard, damaged)
    files = {name: counts[name] for name in ("used", *OUTCOMES, "open")}
    return {"found": sum(files.values()), **files}


def collect_shards(out: Path, damaged: set[str] | None = None) -> bool:
    """Write both tables over all shards; return whether the last one to end was one.

    Parameters
    ----------
    out : Path
        The output folder.
    damaged : set of str, optional
        As in `collect`.

    Raises
    ------
    OSError, ValueError
        If the tables can't be read or written.
    """
    over = sorted(path.parent for path in (out / "runs").glob("*/totals.json"))
    if not over or not _manifest_of(over[-1]).exists():
        return False
    _collect_shards(out, over[-1], set() if damaged is None else damaged)
    return True


def _collect_shards(out: Path, newest: Path, damaged: set[str]) -> None:
    """Write both tables over the runs that did the same as `newest`, each a part of the cases."""
    same = _workflow_of(newest)
    shards = [
        _manifest_of(run)
        for run in (out / "runs").iterdir()
        if _manifest_of(run).exists() and (run == newest or _workflow_of(run) == same)
    ]
    shards.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    _write_table(out / MANIFEST, MANIFEST_COLUMNS, lambda: _merged(shards))
    collect_measurements(out, damaged)


def _manifest_of(run: Path) -> Path:
    return (run / MANIFEST).with_suffix(".parquet")


def _workflow_of(run: Path) -> bytes:
    """Return what a run was asked to do; nothing that any other was where that can't be read."""
    try:
        return read_regular(run / "workflow.json", MOST_BYTES)
    except OSError:
        return run.name.encode()


def _read_manifest(path: Path) -> pa.Table:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.read_table(path, schema=_schema(MANIFEST_COLUMNS))
    except (OSError, pa.ArrowException) as exc:
        if isinstance(exc, OSError) and exc.errno is not None:
            raise
        name = f"runs/{path.parent.name}/{path.name}"
        detail = f"{name} is damaged: take it away, and run that shard again"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail) from exc


def _merged(manifests: Sequence[Path]) -> Iterable[dict[str, Any]]:
    """Give a row for each file that the run found that ended last.

    It knows all results that are current. Why files of other shards were not used, their own runs
    say, the newest first.
    """
    import pyarrow as pa
    from pyarrow import compute

    newest, *older = manifests
    rows = {(row["file"], row["copy"]): row for row in _read_manifest(newest).to_pylist()}
    for path in older:
        table = _read_manifest(path)
        unused = compute.is_in(table["outcome"], value_set=pa.array(OUTCOMES))
        known = table.filter(unused)
        for row in known.to_pylist():
            now = rows.get((row["file"], row["copy"]))
            if now is not None and now["outcome"] == "open":
                rows[row["file"], row["copy"]] = row
    return rows.values()


def collect_measurements(out: Path, damaged: set[str]) -> None:
    """Write `measurements` anew; parameters as in `collect`."""

    def rows() -> Iterator[dict[str, Any]]:
        return itertools.chain.from_iterable(each_case(out, measurement_rows, damaged))

    _write_table(out / MEASUREMENTS, MEASUREMENT_COLUMNS, rows)


def measurement_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a published case: one a model and structure.

    Where a later attempt at it failed, each has the flag OUTDATED.

    Raises
    ------
    OSError, ValueError, LookupError, TypeError
        If it is damaged.
    """
    told = read_case(folder)  # what the report can't show is not in the table either
    rows = read_plain_measurements(folder)
    if has_failed(folder.parent.parent, str(told["case"])):
        rows = [{**row, "flags": [*row["flags"], Flag.OUTDATED.code]} for row in rows]
    return [{"case": folder.name, **flat_measurement(row)} for row in rows]


def _manifest_rows(
    index: Index,
    left: Sequence[LeftOut],
    endings: Mapping[str, Sequence[Ending]],
    key: bytes,
) -> Iterator[dict[str, Any]]:
    """Give a row for each file: what its series, or else it alone, came to."""
    came_to: dict[str, tuple[str, str, str]] = {
        one.series.id: (one.reason.outcome, one.reason.code, one.detail) for one in left
    }
    came_to.update({name: _came_to(those) for name, those in endings.items()})
    seen: Counter[str] = Counter()  # copies of a file have its id
    rows = index.rows
    for entry, look, reason, group in zip(
        rows.entries, rows.looks(), rows.reasons, rows.groups, strict=True
    ):
        series = rows.series[group] if group >= 0 else None
        if reason or series is None:
            code = reason or Reason.NOT_AN_IMAGE.code
            outcome, detail = str(Reason[code].outcome), ""
        else:
            outcome, code, detail = came_to.get(series.id, ("open", "", ""))
        file = _file_id(entry.path, look.packed, key)
        seen[file] += 1
        yield {
            "file": file,
            "copy": seen[file],
            "case": series.id if series else "",
            "outcome": outcome,
            "reason": code,
            "detail": detail,
        }


def _came_to(endings: Sequence[Ending]) -> tuple[str, str, str]:
    """Return what became of a series by its cases: used if any was published."""
    bad = [e for e in endings if e.reason]
    if len(bad) < len(endings):
        return "used", "", ""
    return Reason[bad[0].reason].outcome, bad[0].reason, bad[0].detail


def _file_id(path: str, packed: Packed | None, key: bytes) -> str:
    """Return the id of a file; of one that can't be read, that of its path."""
    instance = ""
    if packed:
        instance = unpack_elements(packed).raw(_INSTANCE).decode("ascii", "replace")
    try:
        return file_id(Path(path), instance.strip(" \0"), key)
    except (ScanError, ValueError):
        return file_id(Path(), f"path {path}", key)


def _write_table(
    stem: Path, columns: Sequence[str], rows: Callable[[], Iterable[dict[str, Any]]]
) -> None:
    """Write rows as CSV and Parquet, in one pass, a batch at a time."""
    parquet_file, csv_file = stem.with_suffix(".parquet"), stem.with_suffix(".csv")

    def write(draft: Path) -> None:
        write_whole(csv_file, lambda other: _write_both(draft, other, columns, rows()))

    write_whole(parquet_file, write)


def _write_both(
    parquet_file: Path, csv_file: Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    schema = _schema(columns)
    with (
        parquet.ParquetWriter(parquet_file, schema) as whole,
        csv_file.open("w", encoding="utf-8", newline="") as text,
    ):
        lines = csv.DictWriter(text, columns, lineterminator="\n")
        lines.writeheader()
        waiting = iter(rows)
        while batch := list(itertools.islice(waiting, BATCH)):
            whole.write_table(pa.Table.from_pylist(batch, schema))
            lines.writerows(
                {name: defused(v) if isinstance(v, str) else v for name, v in row.items()}
                for row in batch
            )


def _schema(columns: Sequence[str]) -> pa.Schema:
    import pyarrow as pa

    return pa.schema([(name, _kind(name)) for name in columns])


def _kind(column: str) -> pa.DataType:
    import pyarrow as pa

    if column in _TEXT:
        return pa.string()
    return pa.int64() if column in _WHOLE else pa.float64()
