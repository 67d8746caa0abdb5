"""The runs of an output folder as the report shows them: their totals, or else their status."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from scanloom.io.regular import open_regular

TOTALS = "totals.json"
_OTHER_FORM = (LookupError, TypeError, ValueError, AttributeError)


def our_runs(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs that say what ours do."""
    return [run for run in runs if _is_ours(run)]


def damaged_totals(out: Path) -> list[str]:
    """Return the totals of runs that can't be read, relative to OUT."""
    found = []
    for path in sorted((out / "runs").glob(f"*/{TOTALS}")):
        try:
            with open_regular(path) as file:
                whole = _is_ours(json.load(file))
        except (OSError, ValueError):
            whole = False
        if not whole:
            found.append(path.relative_to(out).as_posix())
    return found


def run_row(told: dict[str, Any]) -> dict[str, Any]:
    """Return a run's totals, or else its status, as a row of the page."""
    cases = told.get("cases")
    counts = cases if isinstance(cases, dict) else told
    device, cost, joules = told.get("device"), told.get("cost"), told.get("joules_a_scan")
    return {
        "name": told["run"],
        "state": told["state"],
        **{name: counts.get(name, 0) for name in ("done", "failed", "before")},
        "time": str(timedelta(seconds=round(told["elapsed_s"]))),
        "busy": f"{device['busy_share']:.0%}" if device else "",
        "joules": f"{joules:.0f}" if joules is not None else "",
        "cost": f"{cost['amount']:.2f}" if cost else "",
    }


def together(runs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return what several runs, shards for example, took together; None where there is one."""
    if len(runs) < 2:
        return None
    devices = [told for run in runs if (told := run.get("device"))]
    busy, span = (sum(told[name] for told in devices) for name in ("busy_s", "span_s"))
    costs = [told["amount"] for run in runs if (told := run.get("cost"))]
    rows = [run_row(run) for run in runs]
    return {
        "count": len(runs),
        "done": sum(row["done"] for row in rows),
        "time": str(timedelta(seconds=round(sum(run["elapsed_s"] for run in runs)))),
        "busy": f"{busy / span:.0%}" if span else "",
        "cost": f"{sum(costs):.2f}" if costs else "",
    }


def _is_ours(told: Any) -> bool:
    try:
        together([told, told])
    except _OTHER_FORM:
        return False
    return True
