"""Tables of measurements and JSON documents."""

from __future__ import annotations

import csv
import json
from dataclasses import MISSING, field, fields, make_dataclass
from pathlib import Path

import pytest

from scanloom.core import Flag, Measurement
from scanloom.io.output import measurements
from scanloom.io.output.json_file import write_json
from scanloom.io.output.measurements import COLUMNS, read_measurements, write_measurements

FULL = Measurement(
    model="organs",
    label="liver",
    number=1,
    voxels=123456,
    volume_ml=1 / 3 * 1000,
    unit="HU",
    mean=-12.3456789012,
    sd=1.0,
    p05=-100.0,
    p25=-50.0,
    median=0.0,
    p75=50.0,
    p95=1e-7 / 3,
    box=((0, 1, 2), (3, 4, 5)),
    components=2,
    flags=(Flag.TOUCHES_BORDER, Flag.HU_IMPLAUSIBLE),
)
NOTHING = Measurement("organs", "spleen", 2, 0, 0.0, "unknown", *[None] * 7, None, 0, (Flag.EMPTY,))


def test_csv_leaves_empty_what_is_not_known(tmp_path: Path) -> None:
    """Empty and not 0: a mean of nothing is no zero."""
    write_measurements(tmp_path, [FULL, NOTHING])
    text = (tmp_path / "measurements.csv").read_text(encoding="utf-8")
    assert "\r" not in text
    full, nothing = csv.DictReader(text.splitlines())
    assert list(full) == list(COLUMNS)
    assert full["volume_ml"] == "333.3333"
    assert full["mean"] == "-12.34568"
    assert full["median"] == "0.0"
    assert float(full["p95"]) == pytest.approx(1e-7 / 3, rel=1e-6)
    assert [full[c] for c in COLUMNS[-14:-8]] == ["0", "1", "2", "3", "4", "5"]
    assert full["flags"] == "TOUCHES_BORDER HU_IMPLAUSIBLE"
    assert nothing["voxels"] == "0"
    assert {nothing[c] for c in ("mean", "sd", "median", "p95", "i_first", "k_last")} == {""}


def test_json_says_null(tmp_path: Path) -> None:
    write_measurements(tmp_path, [FULL, NOTHING])
    document = json.loads((tmp_path / "measurements.json").read_text())
    full, nothing = document["measurements"]
    assert full["box"] == [[0, 1, 2], [3, 4, 5]]
    assert full["flags"] == ["TOUCHES_BORDER", "HU_IMPLAUSIBLE"]
    assert nothing["mean"] is None
    assert nothing["box"] is None
    assert nothing["voxels"] == 0


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    write_measurements(tmp_path, [FULL, NOTHING])
    full, nothing = read_measurements(tmp_path)
    assert nothing == NOTHING
    assert full.flags == FULL.flags
    assert full.box == FULL.box
    assert full.mean == pytest.approx(FULL.mean, rel=1e-6)


def test_results_without_a_newer_field_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = make_dataclass(
        "Newer", [("roundness", float, field(default=0.5))], bases=(Measurement,), frozen=True
    )
    write_measurements(tmp_path, [NOTHING])
    monkeypatch.setattr(measurements, "Measurement", newer)
    (read,) = read_measurements(tmp_path)
    assert read == newer(**{f.name: getattr(NOTHING, f.name) for f in fields(NOTHING)})


def test_fields_that_the_first_version_lacked_have_a_default() -> None:
    """Results that the first version wrote have only the fields of `NOTHING`, in that order."""
    required = [f.name for f in fields(Measurement) if f.default is MISSING]
    statistics = ["mean", "sd", "p05", "p25", "median", "p75", "p95"]
    first = ["model", "label", "number", "voxels", "volume_ml", "unit", *statistics]
    assert required == [*first, "box", "components"]


def test_another_document_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "measurements.json", {"measurements": [{"label": "liver"}]})
    with pytest.raises(ValueError, match="malformed"):
        read_measurements(tmp_path)


def test_json_is_stable_and_strict(tmp_path: Path) -> None:
    """Order as given, UTF-8, one newline at the end, no NaN."""
    path = tmp_path / "x.json"
    write_json(path, {"b": 1, "a": {"ö": [1.5, None]}})
    numbers = '{\n    "ö": [\n      1.5,\n      null\n    ]\n  }'
    text = f'{{\n  "b": 1,\n  "a": {numbers}\n}}\n'
    assert path.read_bytes().decode() == text
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"x": float("nan")})
