"""Tables and documents of a case folder: measurements, and anything that is JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from scanloom.core import Flag, Measurement
from scanloom.io.names import MEASUREMENTS_CSV, MEASUREMENTS_JSON
from scanloom.io.regular import read_regular

DIGITS = 7
"""Significant digits of a number in a table: more than a measurement has, fewer than noise."""

_CORNERS = ("i_first", "j_first", "k_first", "i_last", "j_last", "k_last")
MOST = 1 << 26
"""Bytes of `measurements.json`: more is none of ours."""
COLUMNS = (
    *(f.name for f in fields(Measurement) if f.name not in ("box", "components", "flags")),
    *_CORNERS,
    "components",
    "flags",
)
"""Columns of `measurements.csv`, in order."""


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write plain data as JSON: UTF-8, keys in the order given, a newline at the end.

    Bytes of a path that are no UTF-8 stand as escapes.

    Raises
    ------
    ValueError
        If a number is not finite: JSON has no word for it.
    """
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    path.write_bytes(f"{text}\n".encode("utf-8", "backslashreplace"))


def write_measurements(folder: Path, measurements: Sequence[Measurement]) -> None:
    """Write `measurements.csv` and `measurements.json`, one row a model and structure.

    What is not known is empty in the CSV and null in the JSON, never 0. Numbers have seven
    significant digits in both; flags are codes, joined by a space in the CSV.
    """
    rows = [plain_measurement(m) for m in measurements]
    write_json(folder / MEASUREMENTS_JSON, {"schema": 1, "measurements": rows})
    with (folder / MEASUREMENTS_CSV).open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(flat_measurement(row) for row in rows)


def read_measurements(folder: Path) -> tuple[Measurement, ...]:
    """Return what `write_measurements` wrote, to seven digits.

    Raises
    ------
    OSError, ValueError
        If `measurements.json` is not there or not ours.
    """
    try:
        return tuple(_measurement(row) for row in read_plain_measurements(folder))
    except (KeyError, TypeError) as exc:
        raise ValueError("measurements.json has another form") from exc


def read_plain_measurements(folder: Path) -> list[dict[str, Any]]:
    """Return the measurements of a case folder as they stand in its JSON.

    Raises
    ------
    OSError, ValueError
        If `measurements.json` is not there or not ours.
    """
    told = json.loads(read_regular(folder / MEASUREMENTS_JSON, MOST))
    if not isinstance(told, dict) or not isinstance(told.get("measurements"), list):
        raise ValueError("measurements.json has another form")  # noqa: TRY004
    return list(told["measurements"])


def plain_measurement(measurement: Measurement) -> dict[str, Any]:
    """Return a measurement as `measurements.json` and `--json` hold it."""
    row = {f.name: getattr(measurement, f.name) for f in fields(measurement)}
    row = {name: _rounded(v) if isinstance(v, float) else v for name, v in row.items()}
    if measurement.box is not None:
        row["box"] = [[int(n) for n in corner] for corner in measurement.box]
    row["flags"] = [flag.code for flag in measurement.flags]
    return row


def flat_measurement(row: dict[str, Any]) -> dict[str, Any]:
    """Return a plain measurement as a row of `COLUMNS`."""
    box = row["box"]
    corners = [None] * 6 if box is None else [n for corner in box for n in corner]
    plain = {name: value for name, value in row.items() if name != "box"}
    return {**plain, **dict(zip(_CORNERS, corners, strict=True)), "flags": " ".join(row["flags"])}


def _measurement(row: dict[str, Any]) -> Measurement:
    box = row["box"]
    return Measurement(
        **{
            **row,
            "box": None if box is None else (tuple(box[0]), tuple(box[1])),
            "flags": tuple(Flag[code] for code in row["flags"]),
        }
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
