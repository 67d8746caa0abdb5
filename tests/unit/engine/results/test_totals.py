"""Totals of a run, and its status for Prometheus."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scanloom.engine.monitor import Status, StatusWriter, format_metrics
from scanloom.engine.results.totals import busy_share, write_totals
from scanloom.io.output.crosswalk import SourceRecord, add_sources
from scanloom.io.output.private import private_folder
from support.make_report import id_of, make_out

STATUS = Status(
    run="20260101T000000-abcdef",
    state="done",
    cases=5,
    before=1,
    done=2,
    failed=2,
    reasons={"CRASHED": 1, "DAMAGED": 1},
    in_flight={"case": 2.0},
    elapsed_s=1800.0,
    per_hour=8.5,
    moment=1.7e9,
    devices=[
        {
            "device": 0,
            "memory_used": 5,
            "memory_total": 9,
            "busy_percent": 50,
            "celsius": 60,
            "watts": None,
        }
    ],
)


def logged(
    case: str,
    device: list[list[float]],
    engine: str,
    reason: str | None = None,
    *,
    recalled: bool = False,
) -> str:
    tries = [{"end": "done", "alone": False, "seconds": 9.0}]
    line = {"case": case, "reason": reason, "tries": tries, "device": device, "engine": engine}
    return json.dumps({**line, "recalled": recalled}) + "\n"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run of two workers, whose clocks have nothing to do with each other."""
    out = make_out(tmp_path / "out", 2)
    folder = out / "runs" / STATUS.run
    folder.mkdir(parents=True)
    lines = [
        logged(id_of(0), [[10.0, 12.0], [12.0, 13.0]], "a"),
        logged(id_of(1), [[14.0, 20.0]], "a"),
        logged("x", [[9000.0, 9010.0]], "b", "CRASHED"),
        logged("y", [], "b", "DAMAGED"),
    ]
    (folder / "log.jsonl").write_text("".join(lines))
    return out


def test_totals(out: Path) -> None:
    totals = write_totals(out, STATUS, joules={"cpu": 300.0, "gpu": 100.0}, price=2.5)

    assert totals["steps"]["network"] == {"wall_s": 6.0, "cpu_s": 6.0}
    assert totals["device"] == {
        "workers": 2,
        "busy_s": 19.0,
        "span_s": 20.0,
        "busy_share": 0.95,
    }
    assert totals["joules_a_scan"] == 200.0
    assert totals["cost"] == {"price_per_hour": 2.5, "worker_hours": 1.0, "amount": 2.5}
    assert totals["slowest"][0] == {"case": "x", "seconds": 9.0}
    assert {"case": id_of(0), "seconds": 4.75} in totals["slowest"]
    reported = json.loads((out / "runs" / STATUS.run / "totals.json").read_text())
    assert reported == {"schema": 2, **totals}


def test_a_result_that_was_found_took_no_time_of_this_run(out: Path) -> None:
    found = logged(id_of(0), [], "a", recalled=True)
    (out / "runs" / STATUS.run / "log.jsonl").write_text(found)

    totals = write_totals(out, replace(STATUS, before=3, done=0), joules={"cpu": 300.0})

    assert (totals["steps"], totals["slowest"], totals["device"]) == ({}, [], None)
    assert totals["joules_a_scan"] is None


def test_times_of_folders_that_are_named_by_source(out: Path) -> None:
    (out / "cases" / id_of(0)).rename(out / "cases" / "A-1")
    with private_folder(out, "f" * 26) as private:
        add_sources(private, [SourceRecord(id_of(0), "nifti", "/scan.nii", 1, folder="A-1")])

    totals = write_totals(out, STATUS)

    assert totals["steps"]["network"] == {"wall_s": 6.0, "cpu_s": 6.0}
    assert {"case": id_of(0), "seconds": 4.75} in totals["slowest"]


def test_unknown_values_are_null(tmp_path: Path) -> None:
    (tmp_path / "runs" / STATUS.run).mkdir(parents=True)

    totals = write_totals(tmp_path, STATUS)

    assert totals["device"] is None
    assert totals["joules_a_scan"] is None
    assert totals["cost"] is None
    assert totals["steps"] == {}
    assert busy_share([]) is None


def read_metrics(status: Status) -> dict[str, Any]:
    """Return the metrics of a status by name, as Prometheus' own client reads them."""
    parser = pytest.importorskip("prometheus_client.parser")
    return {f.name: f for f in parser.text_string_to_metric_families(format_metrics(status))}


def test_prometheus_reads_the_metrics() -> None:
    families = read_metrics(STATUS)

    ends = {s.labels["outcome"]: s.value for s in families["scanloom_cases_finished"].samples}
    assert ends == {"done": 2.0, "skipped": 0.0, "ambiguous": 0.0, "failed": 2.0}
    assert families["scanloom_cases_finished"].type == "counter"
    assert families["scanloom_gpu_busy_ratio"].samples[0].value == 0.5
    assert "scanloom_gpu_power_watts" not in families
    assert "scanloom_left_seconds" not in families
    assert families["scanloom_run_info"].samples[0].labels["state"] == "done"


def test_prometheus_reads_any_label() -> None:
    odd = 'a "quoted" \\ word\nand a line'

    families = read_metrics(replace(STATUS, run=odd, reasons={odd: 3}))

    assert families["scanloom_run_info"].samples[0].labels["run"] == odd
    [sample] = families["scanloom_cases_without_result"].samples
    assert (sample.labels["reason"], sample.value) == (odd, 3.0)


def test_status_writer_updates_the_metrics(tmp_path: Path) -> None:
    file = tmp_path / "scanloom.prom"
    status_writer = StatusWriter("run", tmp_path, period=0.01, metrics=file)
    status_writer.plan(7, before=2, work=5)
    status_writer.close("done")

    assert "scanloom_cases_planned 7\n" in file.read_text()
    assert 'state="done"' in file.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["scanloom.prom", "status.json"]
