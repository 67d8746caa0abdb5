"""Rows of the report about runs, from their totals, or else their status."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from scanloom.io.system.regular_files import open_regular_file

TOTALS = "totals.json"
_OTHER_FORM = (LookupError, TypeError, ValueError, AttributeError)


def valid_runs(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs whose documents scanloom wrote."""
    return [run for run in runs if _is_ours(run)]


def damaged_totals(out: Path) -> list[str]:
    """Return the paths of totals that can't be read, relative to OUT."""
    damaged = []
    for path in sorted((out / "runs").glob(f"*/{TOTALS}")):
        try:
            with open_regular_file(path) as file:
                is_intact = _is_ours(json.load(file))
        except (OSError, ValueError):
            is_intact = False
        if not is_intact:
            damaged.append(path.relative_to(out).as_posix())
    return damaged


def run_row(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run's totals, or else its status, as a row of the page."""
    cases = run.get("cases")
    counts = cases if isinstance(cases, dict) else run
    device, cost, joules = run.get("device"), run.get("cost"), run.get("joules_a_scan")
    return {
        "name": run["run"],
        "state": run["state"],
        **{name: counts.get(name, 0) for name in ("done", "failed", "before")},
        "time": str(timedelta(seconds=round(run["elapsed_s"]))),
        "busy": f"{device['busy_share']:.0%}" if device else "",
        "joules": f"{joules:.0f}" if joules is not None else "",
        "cost": f"{cost['amount']:.2f}" if cost else "",
    }


def summed(runs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the sums over several runs, such as shards; None for fewer than two."""
    if len(runs) < 2:
        return None
    devices = [device for run in runs if (device := run.get("device"))]
    busy, span = (sum(device[name] for device in devices) for name in ("busy_s", "span_s"))
    costs = [cost["amount"] for run in runs if (cost := run.get("cost"))]
    rows = [run_row(run) for run in runs]
    return {
        "count": len(runs),
        "done": sum(row["done"] for row in rows),
        "time": str(timedelta(seconds=round(sum(run["elapsed_s"] for run in runs)))),
        "busy": f"{busy / span:.0%}" if span else "",
        "cost": f"{sum(costs):.2f}" if costs else "",
    }


def _is_ours(run: Any) -> bool:
    """Whether a document has the fields that the report needs."""
    try:
        summed([run, run])
    except _OTHER_FORM:
        return False
    return True
