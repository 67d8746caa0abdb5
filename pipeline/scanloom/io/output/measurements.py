"""Measurements of a case folder, as a table (CSV) and a document (JSON)."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scanloom.core import Flag, Measurement
from scanloom.core.grid import Box
from scanloom.core.reasons import known_flags
from scanloom.io.output.file_names import MEASUREMENTS_CSV, MEASUREMENTS_JSON
from scanloom.io.output.json_file import read_json, write_document

if TYPE_CHECKING:
    import pyarrow as pa

SIGNIFICANT_DIGITS = 7
"""Significant digits of numbers: more than a measurement is accurate to, without noise digits."""

_CORNERS = ("i_first", "j_first", "k_first", "i_last", "j_last", "k_last")
_LATER_COLUMNS = (
    *("components", "flags", "share", "share_of", "entropy", "disagreement"),
    *("asymmetry", "asymmetry_of"),
)
"""Columns after the box, in their order."""
COLUMNS = (
    *(f.name for f in fields(Measurement) if f.name not in ("box", *_LATER_COLUMNS)),
    *_CORNERS,
    *_LATER_COLUMNS,
)
"""Columns of `measurements.csv`, in order."""
_TYPES = {f.name: str(f.type) for f in fields(Measurement)} | dict.fromkeys(_CORNERS, "int")
INTEGER_COLUMNS = frozenset(name for name in COLUMNS if _TYPES[name] == "int")
FLOAT_COLUMNS = frozenset(name for name in COLUMNS if _TYPES[name].startswith("float"))


def write_measurements(folder: Path, measurements: Sequence[Measurement]) -> None:
    """Write `measurements.csv` and `measurements.json`, one row per model and structure.

    Unknown values are empty in the CSV and null in the JSON, never 0. Numbers have seven
    significant digits in both. Flags are codes, separated by spaces in the CSV.
    """
    rows = [measurement_to_json(m) for m in measurements]
    write_document(folder / MEASUREMENTS_JSON, {"measurements": rows})
    with (folder / MEASUREMENTS_CSV).open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(measurement_to_row(row) for row in rows)


def read_measurements(folder: Path) -> tuple[Measurement, ...]:
    """Read the measurements that `write_measurements` wrote, with seven digits.

    Raises
    ------
    OSError, ValueError
        If `measurements.json` is missing or malformed.
    ScanError
        NEWER_VERSION if a newer scanloom wrote it.
    """
    return parse_measurements(read_measurements_json(folder))


def parse_measurements(rows: Iterable[dict[str, Any]]) -> tuple[Measurement, ...]:
    """Return measurements from plain JSON objects; ValueError if they are malformed."""
    measurements = []
    try:
        for row in rows:
            known = {f.name: row[f.name] for f in fields(Measurement) if f.name in row}
            first_and_last = row["box"]
            box = None if first_and_last is None else Box(*map(tuple, first_and_last[:2]))
            known |= {"box": box, "flags": known_flags(row["flags"])}
            measurements.append(Measurement(**known))  # missing fields get their defaults
    except (KeyError, TypeError) as exc:
        raise ValueError("measurements are malformed") from exc
    return tuple(measurements)


def measurements_of_batch(rows: pa.RecordBatch) -> Iterator[Measurement]:
    """Yield the measurements in rows of `measurements.parquet`.

    They are those of `read_measurements`: OUTDATED, which only tables have, is left out.
    """
    columns = {name: rows.column(name).to_pylist() for name in COLUMNS}
    corners = zip(*(columns[name] for name in _CORNERS), strict=True)
    columns["box"] = [None if ends[0] is None else Box(ends[:3], ends[3:]) for ends in corners]
    flags = {text: known_flags(text.split()) for text in set(columns["flags"])}
    flags = {text: tuple(f for f in each if f is not Flag.OUTDATED) for text, each in flags.items()}
    columns["flags"] = [flags[text] for text in columns["flags"]]
    return map(Measurement, *(columns[field.name] for field in fields(Measurement)))


def read_measurements_json(folder: Path) -> list[dict[str, Any]]:
    """Read the measurements of a case folder as plain JSON objects.

    Raises
    ------
    OSError, ValueError
        If `measurements.json` is missing or malformed.
    ScanError
        NEWER_VERSION if a newer scanloom wrote it.
    """
    rows = read_json(folder / MEASUREMENTS_JSON).get("measurements")
    if not isinstance(rows, list):
        raise ValueError("measurements.json is malformed")  # noqa: TRY004  # a damaged file
    return rows


def measurement_to_json(measurement: Measurement) -> dict[str, Any]:
    """Return a measurement as a JSON object, as in `measurements.json` and `--json`."""
    row = {f.name: getattr(measurement, f.name) for f in fields(measurement)}
    row = {name: rounded(v) if isinstance(v, float) else v for name, v in row.items()}
    if measurement.box is not None:
        row["box"] = [[int(n) for n in corner] for corner in measurement.box]
    row["flags"] = [flag.code for flag in measurement.flags]
    return row


def measurement_to_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a plain measurement as a row of `COLUMNS`; unknown fields are left out."""
    box = row["box"]
    corners = [None] * 6 if box is None else [n for corner in box for n in corner]
    cells = {**row, **dict(zip(_CORNERS, corners, strict=True)), "flags": " ".join(row["flags"])}
    return {name: cells.get(name) for name in COLUMNS}


def rounded(value: float) -> float:
    """Return a number with `SIGNIFICANT_DIGITS`."""
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


# --- cells of CSV files ---------------------------------------------------------------------------
# Cells of CSV files that a spreadsheet must not execute.

_NUMBER = re.compile(r"[+-]?(\d+[.,]?\d*|[.,]\d+)([eE][+-]?\d+)?|[+-](inf|nan)", re.ASCII)
FORMULA_PREFIXES = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
"""Characters that begin a formula in a spreadsheet, the full-width forms of = + - @ included."""


def escape_formula(cell: str) -> str:
    """Return a CSV cell that no spreadsheet executes: a formula gets an apostrophe before it.

    Numbers stay as they are: "-3.5" and "-3,5" are no formulas, "-3.5+1" is.
    """
    if cell.startswith(FORMULA_PREFIXES) and not _NUMBER.fullmatch(cell):
        return f"'{cell}"
    return cell


def unescape_formula(cell: str) -> str:
    """Return the text of a CSV cell: without the apostrophe of `escape_formula`."""
    text = cell.removeprefix("'")
    return text if escape_formula(text) == cell else cell
