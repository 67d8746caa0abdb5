"""The rows of an index, in memory and as a Parquet file.

A row is a file; the first row of a series describes the series too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from scanloom.core import Reason
from scanloom.io.find import Group, Kind
from scanloom.io.survey import Description, Look
from scanloom.io.walk import Entry

if TYPE_CHECKING:
    import pyarrow as pa

FORM = "1"
"""Of the file; with the version of scanloom, since another one may judge otherwise."""

_FORM, _KEY = b"scanloom.index", b"scanloom.key"
_LOOKED_AGAIN = Reason.UNREADABLE.code  # who may read a file can change without a trace


class IndexedSeries(NamedTuple):
    """One series of the index.

    Parameters
    ----------
    id : str
        Its case id; empty where its files can't be read.
    study : str
        Keyed id of the study; empty where there is none.
    kind : "dicom", "nifti" or "itk"
    study_uid, series_uid : str
    files : tuple of int
        Its slices, by their rows in the index; of a series that is skipped, all its files.
    slices : bool
        Whether any of them may be a slice: others are counted, and can't be chosen.
    what : Description
        What it is like, and what reading it would say. Its last words may hold identity.
    """

    id: str
    study: str
    kind: Kind
    study_uid: str
    series_uid: str
    files: tuple[int, ...]
    slices: bool
    what: Description

    @property
    def reason(self) -> Reason | None:
        """Why it gives no volume."""
        return Reason[self.what.reason] if self.what.reason else None

    @property
    def status(self) -> str:
        """What became of it: used, skipped or failed."""
        return "used" if self.reason is None else self.reason.outcome


@dataclass(eq=False)
class Rows:
    """What is known of each file, in the order of `entries`.

    Parameters
    ----------
    entries : list of Entry
    reasons : list of str
        Code of why a file is no part of a series that is used; empty where its series decides.
    groups : list of int
        The number of its series in `series`, -1 where it belongs to none.
    gzipped : list of bool
    series : list of IndexedSeries
    """

    entries: list[Entry]
    reasons: list[str]
    groups: list[int]
    gzipped: list[bool]
    series: list[IndexedSeries]
    looks: list[Look] | None = None
    file: Path | None = None

    def __len__(self) -> int:
        return len(self.entries)

    def is_of(self, entries: list[Entry]) -> bool:
        """Whether these are the files, unchanged, and none has to be tried again."""
        return self.entries == entries and not any(map(self._must_be_tried, range(len(self))))

    def unchanged(self, entries: Sequence[Entry]) -> list[int]:
        """Return for each entry the row of the same file, -1 where it is new or was changed."""
        places = {entry: n for n, entry in enumerate(self.entries) if not self._must_be_tried(n)}
        return [places.get(entry, -1) for entry in entries]

    def look(self, row: int) -> Look:
        """Return what a file is."""
        if self.looks is None:
            self.looks = _read_looks(self.file) if self.file else []
        return self.looks[row]

    def _must_be_tried(self, row: int) -> bool:
        return self.reasons[row] == _LOOKED_AGAIN and self.entries[row].reason is None


def make_rows(
    entries: list[Entry],
    looks: list[Look],
    groups: Sequence[Group],
    series: list[IndexedSeries],
) -> Rows:
    """Return the rows of files that were looked at and grouped."""
    reasons = [look.reason for look in looks]
    numbers = [-1] * len(entries)
    for number, (group, one) in enumerate(zip(groups, series, strict=True)):
        for n in one.files:
            numbers[n] = number
        for n in group.members:
            reasons[n] = ""  # as its series; voxels beside a header are no image on their own
    return Rows(entries, reasons, numbers, [look.gzipped for look in looks], series, looks)


def write_index(rows: Rows, path: Path, fingerprint: str) -> None:
    """Write rows to a Parquet file.

    Raises
    ------
    OSError
        If it can't be written.
    """
    from pyarrow import parquet

    table = _table(rows).replace_schema_metadata({_FORM: _form(), _KEY: fingerprint.encode()})
    parquet.write_table(table, path, compression="zstd", compression_level=1)


def read_index(path: Path, fingerprint: str) -> Rows | None:
    """Return what was written for the same key; None if it is not there, older or damaged."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            said = file.schema_arrow.metadata or {}
            if said.get(_FORM) != _form() or said.get(_KEY) != fingerprint.encode():
                return None
            names = [n for n in file.schema_arrow.names if n not in _OF_LOOKS]
            return _rows(file.read(columns=names), path)
    except (OSError, LookupError, TypeError, ValueError, pa.ArrowException):
        return None


_OF_LOOKS = ("study", "series", "detail", "packed")
_TEXT = ("plane", "modality", "body_part", "date", "image_type", "kernel", "description")


def _form() -> bytes:
    return f"{FORM} {version('scanloom')}".encode()


def _table(rows: Rows) -> pa.Table:
    import pyarrow as pa

    looks = [rows.look(n) for n in range(len(rows))]
    columns = {
        "path": pa.array([os.fsencode(e.path) for e in rows.entries], pa.binary()),
        "size": pa.array([e.size for e in rows.entries], pa.int64()),
        "mtime_ns": pa.array([e.mtime_ns for e in rows.entries], pa.int64()),
        "inode": pa.array([e.inode for e in rows.entries], pa.uint64()),
        "unopened": _strings(e.reason.code if e.reason else "" for e in rows.entries),
        "reason": _strings(rows.reasons),
        "group": pa.array(rows.groups, pa.int32()),
        "gzipped": pa.array(rows.gzipped, pa.bool_()),
        "kind": _strings(look.kind for look in looks),
        "study": _strings(look.study for look in looks),
        "series": _strings(look.series for look in looks),
        "look_reason": _strings(look.reason for look in looks),
        "detail": _strings(look.detail for look in looks),
        "packed": pa.array([look.packed for look in looks], pa.binary()),
    }
    return pa.table(columns | _series_columns(rows))


def _series_columns(rows: Rows) -> dict[str, pa.Array]:
    import pyarrow as pa

    leaders: list[IndexedSeries | None] = [None] * len(rows)
    for one in rows.series:
        leaders[one.files[0]] = one

    def column(name: str, kind: pa.DataType) -> pa.Array:
        values = (None if one is None else getattr(one, name, None) for one in leaders)
        return pa.array([_clean(v) for v in values], kind)

    def described(name: str, kind: pa.DataType) -> pa.Array:
        values = (None if one is None else getattr(one.what, name) for one in leaders)
        return pa.array([_clean(v) for v in values], kind)

    own = ("id", "study", "kind", "study_uid", "series_uid")
    return (
        {f"series_{name}": column(name, pa.string()) for name in own}
        | {"series_slices": column("slices", pa.bool_())}
        | {f"series_{name}": described(name, pa.string()) for name in ("reason", "detail", *_TEXT)}
        | {
            "series_shape": described("shape", pa.list_(pa.int32())),
            "series_spacing": described("spacing", pa.list_(pa.float64())),
            "series_number": described("number", pa.int64()),
            "series_contrast": described("contrast", pa.bool_()),
        }
    )


def _clean(value: Any) -> Any:
    """Return a value that Parquet can hold: text without halves of characters."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _strings(texts: Iterable[str]) -> pa.Array:
    import pyarrow as pa

    return pa.array([_clean(text) for text in texts], pa.string()).dictionary_encode()


def _rows(table: pa.Table, path: Path) -> Rows:
    columns = {name: table.column(name) for name in table.column_names}
    reasons = {reason.code: reason for reason in Reason}
    entries = [
        Entry(os.fsdecode(p), size, mtime, inode, reasons[why] if why else None)
        for p, size, mtime, inode, why in zip(
            *(columns[n].to_pylist() for n in ("path", "size", "mtime_ns", "inode", "unopened")),
            strict=True,
        )
    ]
    groups = columns["group"].to_pylist()
    rows = Rows(
        entries=entries,
        reasons=columns["reason"].to_pylist(),
        groups=groups,
        gzipped=columns["gzipped"].to_pylist(),
        series=_read_series(table, groups),
        file=path,
    )
    if not set(rows.reasons) <= {"", *reasons}:
        raise ValueError("a reason that does not exist")
    return rows


def _read_series(table: pa.Table, groups: Sequence[int]) -> list[IndexedSeries]:
    names = [name for name in table.column_names if name.startswith("series_")]
    leading = table.select([*names, "group"]).filter(table.column("series_kind").is_valid())
    files: list[list[int]] = [[] for _ in range(len(leading))]
    for n, group in enumerate(groups):
        if group >= 0:
            files[group].append(n)
    found: dict[int, IndexedSeries] = {}
    for row in leading.to_pylist():
        group = row.pop("group")
        said = {name.removeprefix("series_"): value for name, value in row.items()}
        own = {n: said.pop(n) for n in ("id", "study", "kind", "study_uid", "series_uid", "slices")}
        said["shape"], said["spacing"] = tuple(said["shape"]), tuple(said["spacing"])
        what = Description(**said)
        _ = Reason[what.reason] if what.reason else None  # KeyError for one of another version
        found[group] = IndexedSeries(**own, files=tuple(files[group]), what=what)
    return [found[number] for number in range(len(found))]


def _read_looks(path: Path) -> list[Look]:
    from pyarrow import parquet

    names = ["kind", "gzipped", "study", "series", "look_reason", "detail", "packed"]
    with parquet.ParquetFile(path) as file:
        table = file.read(columns=names)
    columns = (table.column(name).to_pylist() for name in names)
    return [Look(*cast("Any", row)) for row in zip(*columns, strict=True)]
