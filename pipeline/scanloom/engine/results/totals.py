"""Summarise a run: reasons, seconds by step, busy share, energy, cost and the slowest cases."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scanloom.core import OUTCOMES
from scanloom.engine.monitor import Status
from scanloom.engine.run_files import LOG
from scanloom.io.output.crosswalk import case_folders
from scanloom.io.output.file_names import TIMING
from scanloom.io.output.json_file import read_json, write_document
from scanloom.io.output.layout import case_folder
from scanloom.io.system.atomic_write import atomic_write

TOTALS = "totals.json"
_SLOWEST_CASES = 5
"""Number of the slowest cases that are listed."""


def write_totals(
    out: Path,
    status: Status,
    *,
    joules: dict[str, float] | None = None,
    price: float | None = None,
) -> dict[str, Any]:
    """Write the totals of a run to `OUT/runs/<run id>/totals.json`.

    The manifest, crosswalk and cases of `out` are read, and the run's log.

    Parameters
    ----------
    out, status
        The output folder, and the final status of the run.
    joules : dict or None
        Energy that this machine used during the run, by kind of device; None if unknown.
    price : float or None
        Price of one hour of a worker with its device, in any currency.

    Returns
    -------
    dict
        The document that was written.

    Raises
    ------
    OSError, ValueError
        If a file of the run can't be read or written.
    """
    folder = out / "runs" / status.run
    entries = _read_log(folder / LOG)
    steps, seconds = _times(out, case_folders(out), entries)
    device = busy_share(entries)
    done = status.done
    energy = sum(joules.values()) if joules else None
    cost = None
    if price is not None:  # each worker with its device is paid from start to end
        hours = status.elapsed_s * (device["workers"] if device else 1) / 3600
        cost = {
            "price_per_hour": price,
            "worker_hours": round(hours, 4),
            "amount": round(hours * price, 4),
        }
    totals = {
        "run": status.run,
        "state": status.state,
        "cases": {
            "planned": status.cases,
            **{name: getattr(status, name) for name in ("before", "done", *OUTCOMES)},
        },
        "reasons": status.reasons,
        "files": _files(out / "manifest.parquet"),
        "elapsed_s": status.elapsed_s,
        "steps": steps,
        "device": device,
        "joules": joules,
        "joules_a_scan": round(energy / done, 1) if energy is not None and done else None,
        "cost": cost,
        "slowest": [
            {"case": case, "seconds": round(seconds[case], 2)}
            for case in sorted(seconds, key=lambda case: (-seconds[case], case))[:_SLOWEST_CASES]
        ],
    }
    atomic_write(folder / TOTALS, lambda draft: write_document(draft, totals))
    return totals


def busy_share(entries: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the busy share of the devices, each from its first case to the end of its last.

    Parameters
    ----------
    entries : iterable of dict
        Lines of `log.jsonl`: `device` has the intervals in which a case held the device of worker
        process `engine`, on that host's clock.

    Returns
    -------
    dict or None
        `workers`, `busy_s`, `span_s` (summed over workers) and `busy_share`; None if no case
        acquired a device.
    """
    by_worker: dict[str, list[Sequence[float]]] = defaultdict(list)
    for entry in entries:
        if spans := entry.get("device"):
            by_worker[entry.get("engine", "")] += spans
    if not by_worker:
        return None
    busy = sum(end - begin for held in by_worker.values() for begin, end in held)
    span = sum(max(e for _, e in held) - min(b for b, _ in held) for held in by_worker.values())
    return {
        "workers": len(by_worker),
        "busy_s": round(busy, 3),
        "span_s": round(span, 3),
        "busy_share": round(busy / span, 4) if span > 0 else 1.0,
    }


def _read_log(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    except FileNotFoundError:
        return []  # no case was worked on


def _times(
    out: Path, folders: Mapping[str, str], entries: Sequence[dict[str, Any]]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return the seconds of each step over the run's published cases, and of each case."""
    steps: dict[str, dict[str, float]] = {}
    seconds: dict[str, float] = {}
    for entry in entries:
        case = entry["case"]
        seconds[case] = sum(attempt["seconds"] for attempt in entry["tries"])
        if entry["reason"] is not None:
            continue
        try:
            folder = case_folder(out, folders.get(case, case))
            timing = read_json(folder / TIMING)["steps"]
        except (OSError, ValueError, LookupError, TypeError):
            continue  # removed since, or damaged
        for name, step in timing.items():
            total = steps.get(name, {})
            steps[name] = {kind: total.get(kind, 0.0) + value for kind, value in step.items()}
        seconds[case] = sum(step["wall_s"] for step in timing.values())
    rounded = {
        name: {kind: round(value, 3) for kind, value in total.items()}
        for name, total in steps.items()
    }
    return rounded, seconds


def _files(manifest: Path) -> dict[str, dict[str, int]]:
    """Return the count of files by outcome and reason."""
    from pyarrow import parquet

    try:
        table = parquet.read_table(manifest, columns=["outcome", "reason"])
    except FileNotFoundError:
        return {}
    counted = table.group_by(["outcome", "reason"]).aggregate([([], "count_all")]).to_pylist()
    files: dict[str, dict[str, int]] = defaultdict(dict)
    for row in sorted(counted, key=lambda row: (row["outcome"], -row["count_all"], row["reason"])):
        files[row["outcome"]][row["reason"]] = row["count_all"]
    return dict(files)
