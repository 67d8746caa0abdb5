"""`scanloom report` writes one table of all measurements, also where there was no run."""

from __future__ import annotations

import csv
from pathlib import Path

from pyarrow import parquet

from support.commands import scanloom
from support.review_cases import affine_of, publish, scan_array


def test_results_of_segment_get_one_table(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for count, name in enumerate(("a", "b"), start=1):
        publish(tmp_path, scan_array(count), affine_of("LAS"), name)

        ended = scanloom("report", "--out", out)

        assert ended.code == 0, ended.err
        with (out / "measurements.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert {row["case"] for row in rows} == {case.name for case in (out / "cases").iterdir()}
        assert len({row["case"] for row in rows}) == count
        assert parquet.read_metadata(out / "measurements.parquet").num_rows == len(rows)
    assert scanloom("verify", "--out", out).code == 0
