"""What the report shows of each case, read from what was published: no path, no identity."""

from __future__ import annotations

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from scanloom.core import OUTCOMES, Flag, Measurement, Reason, ScanError
from scanloom.io.failures import FAILED
from scanloom.io.living import state_seen
from scanloom.io.names import TIMING
from scanloom.io.outfolder import each_case, read_case
from scanloom.io.published import MOST
from scanloom.io.regular import open_regular, read_regular
from scanloom.io.tables import read_measurements

PREVIEW = "preview.png"
FILES = ("used", *OUTCOMES, "open")


@dataclass(frozen=True)
class Shown:
    """A case as the report shows it.

    Parameters
    ----------
    id : str
        Its folder's name in `cases/`, or its id where it failed.
    status : "done", "failed" or "ambiguous"
    reason, detail : str
        Why it failed, or what has to be chosen; of a case that is done, why a later attempt failed.
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


def gather(out: Path, damaged: set[str]) -> Gathered:
    """Read what an output folder holds.

    Parameters
    ----------
    out : Path
        The output folder.
    damaged : set of str
        Gets the names of published cases that can't be read, and are left out.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the manifest can't be read.
    """
    models: dict[str, dict[str, Any]] = {}
    versions: dict[str, str] = {}
    cases = []
    failed = {case.id: case for case in _failures(out)}
    for one in each_case(out, _published, damaged):
        later = failed.pop(one.case, None)
        cases.append(_outdated(one.shown, later) if later else one.shown)
        models.update(one.models)
        versions = one.versions
    cases += failed.values()
    left_out, files = _manifest(out)
    folders = sorted((p for p in (out / "runs").glob("*/") if p.is_dir()), reverse=True)
    runs = [_json(p / "totals.json") or _status(p) for p in folders]
    workflows = (told for p in folders if (told := _json(p / "workflow.json")) is not None)
    return Gathered(
        tuple(sorted(cases, key=lambda case: case.id)),
        left_out,
        files,
        tuple(models.values()),
        versions,
        next(workflows, None),
        tuple(run for run in runs if run is not None),
    )


def _status(run: Path) -> dict[str, Any] | None:
    """Return what a run that did not come to its totals last said."""
    told = _json(run / "status.json")
    try:
        return told and {**told, "state": state_seen(told)}
    except (LookupError, TypeError):
        return None  # not ours


@dataclass(frozen=True)
class _Published:
    """A published case, its models by what tells them apart, and the versions of libraries."""

    case: str
    shown: Shown
    models: dict[str, dict[str, Any]]
    versions: dict[str, str]


def _published(folder: Path) -> _Published:
    told = read_case(folder)
    timing = json.loads(read_regular(folder / TIMING, MOST))
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
    models = {m["card_sha256"] + m["device"] + m["precision"]: m for m in told["models"]}
    return _Published(told["case"], shown, models, told["versions"])


def _outdated(case: Shown, later: Shown) -> Shown:
    flags = (*case.flags, Flag.OUTDATED.code)
    return replace(case, flags=flags, reason=later.reason, detail=later.detail)


def _failures(out: Path) -> Iterator[Shown]:
    for path in sorted((out / FAILED).glob("*.json")):
        told = _json(path)
        with suppress(LookupError, TypeError):  # not ours: the case is tried again
            if told is not None:
                flags = tuple(flag["code"] for flag in told["flags"])
                code = told["reason"]
                status = Reason[code].outcome if code in Reason.__members__ else "failed"
                yield Shown(told["case"], status, code, told["detail"], flags=flags)


def _manifest(out: Path) -> tuple[tuple[LeftOut, ...], dict[str, int]]:
    """Return what came to nothing for each reason, and files by outcome."""
    files: Counter[str] = Counter()
    by_reason: Counter[tuple[str, str]] = Counter()
    series: dict[tuple[str, str], set[str]] = defaultdict(set)
    try:
        with TextIOWrapper(open_regular(out / "manifest.csv"), "utf-8", newline="") as file:
            for row in csv.DictReader(file):
                files[row["outcome"]] += 1
                if row["reason"]:
                    key = row["reason"], row["outcome"]
                    by_reason[key] += 1
                    series[key] |= {row["case"]} - {""}
    except FileNotFoundError:
        return (), {}
    except (OSError, ValueError, LookupError, TypeError, csv.Error) as exc:
        detail = "manifest.csv is damaged: take it away, and the next run writes it anew"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail) from exc
    order = sorted(by_reason, key=lambda key: (-by_reason[key], key))
    left_out = (LeftOut(*key, len(series[key]), by_reason[key]) for key in order)
    return tuple(left_out), {name: files[name] for name in FILES if files[name]}


def advice(code: str) -> str:
    """Return what a person can do about a reason, or what a flag says."""
    if code in Reason.__members__:
        return Reason[code].advice
    return Flag[code].text if code in Flag.__members__ else ""


def _json(path: Path) -> dict[str, Any] | None:
    """Return what a file says; None where it is not there, or says nothing that is ours."""
    try:
        with open_regular(path) as file:
            told = json.load(file)
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None
