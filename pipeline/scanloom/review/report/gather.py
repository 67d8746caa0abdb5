"""What the report shows of each case, read from what was published: no path, no identity."""

from __future__ import annotations

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scanloom.core import Flag, Measurement, Reason
from scanloom.io.failures import FAILED
from scanloom.io.names import CASE, TIMING
from scanloom.io.tables import read_measurements

PREVIEW = "preview.png"
OUTCOMES = ("used", "skipped", "failed", "open")


@dataclass(frozen=True)
class Shown:
    """A case as the report shows it.

    Parameters
    ----------
    id : str
        Its folder's name in `cases/`, or its id where it failed.
    status : "done" or "failed"
    reason, detail : str
        Why it failed.
    models, flags : tuple of str
    measurements : tuple of Measurement
    modality : str
    axes : str
        Axis codes of its grid.
    seconds : dict
        Wall seconds by step.
    preview : Path or None
    """

    id: str
    status: str
    reason: str = ""
    detail: str = ""
    models: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    modality: str = ""
    axes: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    preview: Path | None = None


@dataclass(frozen=True)
class LeftOut:
    """How many series, and files in all, came to nothing for one reason."""

    code: str
    outcome: str
    series: int
    files: int


@dataclass(frozen=True)
class Gathered:
    """All that a report is made of.

    Parameters
    ----------
    cases : tuple of Shown
        In the order of ids.
    left_out : tuple of LeftOut
        By reason, what concerns most files first.
    files : dict
        Files by outcome.
    models : tuple of dict
        Of `case.json`, each once.
    versions : dict
        Of the libraries, of the last case.
    workflow : dict or None
        Of the newest run.
    runs : tuple of dict
        `totals.json` of each run, or else its status; the newest first.
    """

    cases: tuple[Shown, ...]
    left_out: tuple[LeftOut, ...]
    files: dict[str, int]
    models: tuple[dict[str, Any], ...]
    versions: dict[str, str]
    workflow: dict[str, Any] | None
    runs: tuple[dict[str, Any], ...]


def gather(out: Path) -> Gathered:
    """Read what an output folder holds.

    Raises
    ------
    OSError, ValueError
        If a published case can't be read.
    """
    models: dict[str, dict[str, Any]] = {}
    versions: dict[str, str] = {}
    cases = []
    for shown, told in _published(out):
        cases.append(shown)
        versions = told["versions"]
        for model in told["models"]:
            models[model["card_sha256"] + model["device"] + model["precision"]] = model
    there = {case.id for case in cases}
    cases += [failed for failed in _failures(out) if failed.id not in there]
    left_out, files = _manifest(out)
    folders = sorted((p for p in (out / "runs").glob("*/") if p.is_dir()), reverse=True)
    runs = [_json(p / "totals.json") or _json(p / "status.json") for p in folders]
    return Gathered(
        tuple(sorted(cases, key=lambda case: case.id)),
        left_out,
        files,
        tuple(models.values()),
        versions,
        _json(folders[0] / "workflow.json") if folders else None,
        tuple(run for run in runs if run is not None),
    )


def _published(out: Path) -> Iterator[tuple[Shown, dict[str, Any]]]:
    cases = out / "cases"
    for folder in sorted(cases.iterdir()) if cases.is_dir() else ():
        told = _json(folder / CASE)
        if told is None:
            continue
        timing = _json(folder / TIMING) or {"steps": {}}
        preview = folder / PREVIEW
        shown = Shown(
            id=folder.name,
            status="done",
            models=tuple(model["name"] for model in told["models"]),
            flags=tuple(flag["code"] for flag in told["flags"]),
            measurements=read_measurements(folder),
            modality=told["source"]["modality"] or "",
            axes=told["grid"]["axes"],
            seconds={name: step["wall_s"] for name, step in timing["steps"].items()},
            preview=preview if preview.exists() else None,
        )
        yield shown, told


def _failures(out: Path) -> Iterator[Shown]:
    for path in sorted((out / FAILED).glob("*.json")):
        told = _json(path)
        if told is not None:
            flags = tuple(flag["code"] for flag in told["flags"])
            yield Shown(told["case"], "failed", told["reason"], told["detail"], flags=flags)


def _manifest(out: Path) -> tuple[tuple[LeftOut, ...], dict[str, int]]:
    """Return what came to nothing for each reason, and files by outcome."""
    files: Counter[str] = Counter()
    by_reason: Counter[tuple[str, str]] = Counter()
    series: dict[tuple[str, str], set[str]] = defaultdict(set)
    try:
        with (out / "manifest.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                files[row["outcome"]] += 1
                if row["reason"]:
                    key = row["reason"], row["outcome"]
                    by_reason[key] += 1
                    series[key] |= {row["case"]} - {""}
    except FileNotFoundError:
        return (), {}
    order = sorted(by_reason, key=lambda key: (-by_reason[key], key))
    left_out = (LeftOut(*key, len(series[key]), by_reason[key]) for key in order)
    return tuple(left_out), {name: files[name] for name in OUTCOMES if files[name]}


def advice(code: str) -> str:
    """Return what a person can do about a reason, or what a flag says."""
    if code in Reason.__members__:
        return Reason[code].advice
    return Flag[code].text if code in Flag.__members__ else ""


def _json(path: Path) -> dict[str, Any] | None:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return told if isinstance(told, dict) else None
