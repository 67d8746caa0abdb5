"""What a run came to: reasons, seconds by step, busy share, energy, cost, the slowest cases."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scanloom.engine.status import Status
from scanloom.io.json_file import write_json
from scanloom.io.names import TIMING
from scanloom.io.whole import write_whole

TOTALS = "totals.json"
LOG = "log.jsonl"
SLOWEST = 5
"""Cases that are named."""


def write_totals(
    out: Path,
    status: Status,
    *,
    joules: dict[str, float] | None = None,
    price: float | None = None,
) -> dict[str, Any]:
    """Sum up a run in `OUT/runs/<run id>/totals.json`.

    Parameters
    ----------
    out : Path
        The output folder; its manifest, its cases and the run's log are read.
    status : Status
        The run's last word.
    joules : dict or None
        What the machine took while the run went on, by kind of device, where that is known.
    price : float or None
        Of an hour of a worker with its device, in whatever currency.

    Returns
    -------
    dict
        What was written.

    Raises
    ------
    OSError, ValueError
        If a file of the run can't be read or written.
    """
    folder = out / "runs" / status.run
    lines = _log(folder / LOG)
    steps, seconds = _times(out / "cases", lines)
    device = busy_share(lines)
    done = status.done
    took = sum(joules.values()) if joules else None
    totals = {
        "schema": 1,
        "run": status.run,
        "state": status.state,
        "cases": {
            "planned": status.cases,
            "before": status.before,
            "done": done,
            "skipped": status.skipped,
            "ambiguous": status.ambiguous,
            "failed": status.failed,
        },
        "reasons": status.reasons,
        "files": _files(out / "manifest.parquet"),
        "elapsed_s": status.elapsed_s,
        "steps": steps,
        "device": device,
        "joules": joules,
        "joules_a_scan": round(took / done, 1) if took is not None and done else None,
        "cost": _cost(price, status.elapsed_s, device["workers"] if device else 1),
        "slowest": [
            {"case": case, "seconds": round(seconds[case], 2)}
            for case in sorted(seconds, key=lambda case: (-seconds[case], case))[:SLOWEST]
        ],
    }
    write_whole(folder / TOTALS, lambda draft: write_json(draft, totals))
    return totals


def busy_share(lines: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return how busy the devices were, from the first step on each to the last one's end.

    Parameters
    ----------
    lines : iterable of dict
        Of `log.jsonl`: `device` is when a case held the device of `engine`, by that host's clock.

    Returns
    -------
    dict or None
        `workers`, `busy_s`, `span_s` (summed over workers) and `busy_share`; None where no case
        got to a device.
    """
    held: dict[str, list[Sequence[float]]] = defaultdict(list)
    for line in lines:
        if line.get("device"):
            held[line.get("engine", "")].append(line["device"])
    if not held:
        return None
    busy = sum(end - begin for those in held.values() for begin, end in those)
    span = sum(max(e for _, e in those) - min(b for b, _ in those) for those in held.values())
    return {
        "workers": len(held),
        "busy_s": round(busy, 3),
        "span_s": round(span, 3),
        "busy_share": round(busy / span, 4) if span > 0 else 1.0,
    }


def _log(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    except FileNotFoundError:
        return []  # no case was worked on


def _times(
    cases: Path, lines: Sequence[dict[str, Any]]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return seconds by step over the run's published cases, and seconds by case."""
    steps: dict[str, dict[str, float]] = {}
    seconds: dict[str, float] = {}
    for line in lines:
        case = line["case"]
        seconds[case] = sum(one["seconds"] for one in line["tries"])
        if line["reason"] is not None:
            continue
        try:
            told = json.loads((cases / case / TIMING).read_text(encoding="utf-8"))["steps"]
        except (OSError, ValueError, LookupError, TypeError):
            continue  # taken away since, or damaged
        for name, step in told.items():
            so_far = steps.get(name, {})
            steps[name] = {kind: so_far.get(kind, 0.0) + value for kind, value in step.items()}
        seconds[case] = sum(step["wall_s"] for step in told.values())
    rounded = {
        name: {kind: round(value, 3) for kind, value in sums.items()}
        for name, sums in steps.items()
    }
    return rounded, seconds


def _files(manifest: Path) -> dict[str, dict[str, int]]:
    """Return how many files came to what, by outcome and reason."""
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


def _cost(price: float | None, elapsed: float, workers: int) -> dict[str, float] | None:
    """Return what the run costs if each worker with its device is paid from start to end."""
    if price is None:
        return None
    hours = elapsed * workers / 3600
    return {
        "price_per_hour": price,
        "worker_hours": round(hours, 4),
        "amount": round(hours * price, 4),
    }
