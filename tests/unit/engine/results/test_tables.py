"""Tables of shards: each knows a part, together they know all."""

from __future__ import annotations

import csv
import os
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from scanloom.engine.results.tables import MANIFEST_COLUMNS, merge_shard_tables
from scanloom.engine.run_files import exclusively
from scanloom.io.output.json_file import write_json
from support.make_report import add_case, id_of, measured

USED, OPEN, FAILED = ("used", ""), ("open", ""), ("failed", "CRASHED")


def shard(out: Path, run: str, ends: list[tuple[str, str]], workflow: str = "w") -> None:
    """Write the tables of a shard, with the rows of the files that it knows."""
    folder = out / "runs" / run
    folder.mkdir(parents=True)
    write_json(folder / "workflow.json", {"name": workflow})
    write_json(folder / "totals.json", {})
    rows = [
        {
            **dict.fromkeys(MANIFEST_COLUMNS, ""),
            "file": f"file{n // 2}",
            "copy": n % 2 + 1,
            "outcome": outcome,
            "reason": reason,
        }
        for n, (outcome, reason) in enumerate(ends)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "manifest.parquet")


def outcomes(out: Path) -> list[str]:
    with (out / "manifest.csv").open(newline="") as file:
        return [row["outcome"] for row in csv.DictReader(file)]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    add_case(tmp_path, id_of(1), [measured("m", "liver", 5.0)])
    return tmp_path


def test_each_file_has_the_row_of_the_shard_that_decided_it(out: Path) -> None:
    shard(out, "1", [USED, OPEN, OPEN, FAILED])
    shard(out, "2", [OPEN, USED, OPEN, OPEN])

    assert merge_shard_tables(out)
    assert outcomes(out) == ["open", "used", "open", "failed"]
    assert parquet.read_table(out / "measurements.parquet")["label"].to_pylist() == ["liver"]


def test_a_retried_file_has_its_last_outcome(out: Path) -> None:
    """A file that was used before gets the later outcome too: its scan changed since."""
    shard(out, "1", [FAILED, USED, USED])
    shard(out, "2", [USED, FAILED, OPEN])

    merge_shard_tables(out)

    assert outcomes(out) == ["used", "failed", "open"]  # results are seen by who ended last


def test_a_result_that_came_while_the_newest_manifest_was_written_is_known(out: Path) -> None:
    """Both shards run at the same time, and the one that writes last looked before."""
    shard(out, "1", [USED, OPEN, FAILED])
    shard(out, "2", [OPEN, USED, OPEN])
    for moment, name in enumerate(("workflow.json", "manifest.parquet")):
        for run in (1, 2):
            os.utime(out / "runs" / str(run) / name, (moment, moment + run / 10))

    assert merge_shard_tables(out)

    assert outcomes(out) == ["used", "used", "failed"]


def test_another_workflow_is_another_run(out: Path) -> None:
    shard(out, "1", [USED, USED], workflow="another")
    shard(out, "2", [OPEN, USED])

    merge_shard_tables(out)

    assert outcomes(out) == ["open", "used"]


def test_shards_that_end_together_merge_one_after_the_other(out: Path) -> None:
    """Else the one that began first may end last, without the manifest of the other."""
    shard(out, "1", [USED])
    merge_shard_tables(out)
    (out / "manifest.csv").unlink()

    with exclusively(out / "runs"):
        second = threading.Thread(target=merge_shard_tables, args=(out,))
        second.start()
        second.join(2.0)
        assert not (out / "manifest.csv").exists()
    second.join(60.0)

    assert (out / "manifest.csv").exists()


def test_a_run_without_shards_is_not_merged(out: Path) -> None:
    shard(out, "1", [USED])
    (out / "runs" / "2").mkdir()
    write_json(out / "runs" / "2" / "totals.json", {})

    assert not merge_shard_tables(out)
    assert not (out / "manifest.csv").exists()
    assert not merge_shard_tables(out / "elsewhere")
