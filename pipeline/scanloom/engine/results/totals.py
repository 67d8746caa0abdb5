"""Summarise a run: reasons, seconds by step, busy share, energy, cost and the slowest cases."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from scanloom.core import OUTCOMES
from scanloom.engine.monitor import Status
from scanloom.engine.run_files import LOG
from scanloom.io.output.crosswalk import case_folders
from scanloom.io.output.file_names import TIMING
from scanloom.io.output.json_file import read_json, write_document
from scanloom.io.output.layout import TOTALS, case_folder
from scanloom.io.output.parquet_file import open_parquet
from scanloom.io.system.atomic_write import atomic_write

_SLOWEST_CASES = 5
"""Number of the slowest cases that are listed."""
_ROWS_AT_ONCE = 100_000
"""Rows of the manifest that are in memory at a time."""


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
    steps, seconds = _times(out, _read_log(folder / LOG))
    device = busy_share(_read_log(folder / LOG))
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
    busy: dict[str, float] = defaultdict(float)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for entry in entries:
        worker = entry.get("engine", "")
        for begin, end in entry.get("device") or ():
            busy[worker] += end - begin
            first[worker] = min(begin, first.get(worker, begin))
            last[worker] = max(end, last.get(worker, end))
    if not busy:
        return None
    in_use = sum(busy.values())
    span = sum(last[worker] - first[worker] for worker in busy)
    return {
        "workers": len(busy),
        "busy_s": round(in_use, 3),
        "span_s": round(span, 3),
        "busy_share": round(in_use / span, 4) if span > 0 else 1.0,
    }


def _read_log(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a run's log; none if no case was worked on."""
    with suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _times(
    out: Path, entries: Iterator[dict[str, Any]]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return the seconds of each step over the run's published cases, and of each case.

    A case that had its result before was not worked on.
    """
    steps: dict[str, dict[str, float]] = {}
    seconds: dict[str, float] = {}
    folders: Mapping[str, str] | None = None  # not read for a run that did nothing
    for entry in entries:
        if entry["recalled"]:
            continue
        case = entry["case"]
        seconds[case] = sum(attempt["seconds"] for attempt in entry["tries"])
        if entry["reason"] is not None:
            continue
        folders = case_folders(out) if folders is None else folders
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
    counted: Counter[tuple[str, str]] = Counter()
    with suppress(FileNotFoundError), open_parquet(manifest) as file:
        columns = ["outcome", "reason"]
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns, use_threads=False):
            counted.update(zip(*(batch[name].to_pylist() for name in columns), strict=True))
    files: dict[str, dict[str, int]] = defaultdict(dict)
    for (outcome, reason), count in sorted(
        counted.items(), key=lambda item: (item[0][0], -item[1], item[0][1])
    ):
        files[outcome][reason] = count
    return dict(files)
