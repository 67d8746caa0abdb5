"""Collect the data of a report from published files; it contains no path and no identity."""

from __future__ import annotations

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from scanloom.cards.card import Range, ReferenceRange
from scanloom.core import OUTCOMES, Flag, Measurement, Reason, ScanError, printable
from scanloom.io.output.crosswalk import find_sources, known_ids, latest_by_id
from scanloom.io.output.failures import FAILED
from scanloom.io.output.file_names import PREVIEW, TIMING
from scanloom.io.output.json_file import read_json
from scanloom.io.output.layout import CASES, iter_cases, read_case
from scanloom.io.output.measurements import read_measurements
from scanloom.io.system.regular_files import open_regular_file
from scanloom.io.system.scratch_folders import observed_state

MAX_IDS = 20
"""Number of ids that are listed below a reason; a link leads to the others."""
FILE_OUTCOMES = ("used", *OUTCOMES, "open")


@dataclass(frozen=True)
class ReportCase:
    """A case as the report shows it.

    Parameters
    ----------
    id : str
        Name of its folder in `cases/`, or the case id if it failed.
    status : "done", "failed", "ambiguous" or "skipped"
    reason, detail : str
        Why it failed, or the choice that it waits for; of a case that is done, why a later
        attempt failed.
    models, flags : tuple of str
        Names of its models, and codes of its flags.
    axes : str
        Axis codes of its grid.
    shape : tuple of int
        Voxels along each axis of its grid.
    seconds : dict
        Wall seconds by step.
    subfolder : str
        Name of the subfolder of `cases/` that its folder is in; "" for none.
    files : tuple of str
        Names of the files in its folder.
    references : dict
        Reference ranges by model.
    """

    id: str
    case_id: str
    status: str
    reason: str = ""
    detail: str = ""
    models: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    axes: str = ""
    shape: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    preview: Path | None = None
    subfolder: str = ""
    files: tuple[str, ...] = ()
    references: dict[str, tuple[ReferenceRange, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class ExclusionCount:
    """Number of series, and of files, without a result for one reason, and some of their ids.

    `criteria` counts the series by the word of the workflow that left them out (NOT_SELECTED).
    """

    code: str
    outcome: str
    series: int
    files: int
    ids: tuple[str, ...] = ()
    criteria: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class ReportData:
    """The data of a report.

    Parameters
    ----------
    cases : tuple of ReportCase
        Cases in the order of their ids.
    left_out : tuple of ExclusionCount
        Counts by reason, those with the most files first.
    files : dict
        Count of files by outcome.
    models : tuple of dict
        Each model of a `case.json`, and each result of several models, once.
    versions : dict
        Versions of the libraries, from the last case.
    workflow : dict or None
        Workflow of the newest run.
    runs : tuple of dict
        `totals.json` of each run, or else its status; the newest first.
    """

    cases: tuple[ReportCase, ...]
    left_out: tuple[ExclusionCount, ...]
    files: dict[str, int]
    models: tuple[dict[str, Any], ...]
    versions: dict[str, str]
    workflow: dict[str, Any] | None
    runs: tuple[dict[str, Any], ...]


def collect_report_data(out: Path, damaged: set[str]) -> ReportData:
    """Read the data of a report from an output folder.

    Parameters
    ----------
    damaged : set of str
        Receives the names of published cases that can't be read, which are left out.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the manifest can't be read.
    """
    models: dict[str, dict[str, Any]] = {}
    versions: dict[str, str] = {}
    cases = []
    published_ids: set[str] = set()
    failed = {case.id: case for case in _failures(out)}
    for case, models_of_case, libraries in iter_cases(out, _published, damaged):
        published_ids.add(case.case_id)
        later = failed.pop(case.case_id, None)
        cases.append(_outdated(case, later) if later else case)
        models.update(models_of_case)
        versions = libraries  # of the last case
    cases += failed.values()
    left_out, files, excluded = _manifest(out)
    cases = [_with_exclusion(case, excluded) for case in cases]
    known = {case.id for case in cases} | published_ids
    cases += [each for id_, each in excluded.items() if id_ not in known]
    folders = sorted((p for p in (out / "runs").glob("*/") if p.is_dir()), reverse=True)
    runs = [_json(p / "totals.json") or _status(p) for p in folders]
    workflows = (_json(p / "workflow.json") for p in folders)
    return ReportData(
        tuple(sorted(cases, key=lambda case: case.id)),
        left_out,
        files,
        tuple(models.values()),
        versions,
        next((workflow for workflow in workflows if workflow is not None), None),
        tuple(run for run in runs if run is not None),
    )


def _status(run: Path) -> dict[str, Any] | None:
    """Return the last status of a run, for one without totals."""
    status = _json(run / "status.json")
    try:
        return status and {**status, "state": observed_state(status)}
    except (LookupError, TypeError):
        return None  # not written by scanloom


def _published(folder: Path) -> tuple[ReportCase, dict[str, dict[str, Any]], dict[str, str]]:
    """Return a case, its models by card, device and precision, and its library versions."""
    document = read_case(folder)
    timing = read_json(folder / TIMING)
    preview, results = folder / PREVIEW, document.get("results", [])
    files = [path for entry in folder.iterdir() for path in (entry, *entry.glob("*"))]
    case = ReportCase(
        id=folder.name,
        case_id=document["case"],
        status="done",
        models=tuple(each["name"] for each in (*document["models"], *results)),
        flags=tuple(flag["code"] for flag in document["flags"]),
        measurements=read_measurements(folder),
        axes=document["grid"]["axes"],
        shape=tuple(document["grid"].get("shape", ())),
        seconds={name: step["wall_s"] for name, step in timing["steps"].items()},
        preview=preview if preview.exists() else None,
        subfolder="" if folder.parent.name == CASES else folder.parent.name,
        files=tuple(sorted(p.relative_to(folder).as_posix() for p in files if p.is_file())),
        references={m["name"]: references_of(m) for m in document["models"]},
    )
    models = {
        m["card_sha256"] + m["device"] + m["precision"] + m.get("changes", ""): m
        for m in document["models"]
    }
    models |= {f"{result['name']} {result['version']}": result for result in results}
    return case, models, document["versions"]


def references_of(model: dict[str, Any]) -> tuple[ReferenceRange, ...]:
    """Return the reference ranges of a model in a `case.json`."""
    return tuple(
        ReferenceRange(
            each["structure"],
            each["quantity"],
            Range(each["range"]["low"], each["range"]["high"]),
            each["source"],
        )
        for each in model.get("reference_ranges", ())
    )


def _with_exclusion(case: ReportCase, excluded: dict[str, ReportCase]) -> ReportCase:
    """Return a case with the reason for which the newest run did not replace its result, if any."""
    later = excluded.get(case.case_id)
    if later is None or case.status != "done" or Flag.OUTDATED.code in case.flags:
        return case
    return _outdated(case, later) if later.reason == Reason.STALE.code else case


def _outdated(case: ReportCase, later: ReportCase) -> ReportCase:
    flags = (*case.flags, Flag.OUTDATED.code)
    return replace(case, flags=flags, reason=later.reason, detail=later.detail)


def _failures(out: Path) -> Iterator[ReportCase]:
    for path in sorted((out / FAILED).glob("*.json")):
        document = _json(path)
        with suppress(LookupError, TypeError):  # not written by scanloom: ignored
            if document is not None:
                flags = tuple(flag["code"] for flag in document["flags"])
                code = document["reason"]
                status = Reason[code].outcome if code in Reason.__members__ else "failed"
                case = document["case"]
                yield ReportCase(case, case, status, code, document["detail"], flags=flags)


_Manifest = tuple[tuple[ExclusionCount, ...], dict[str, int], dict[str, ReportCase]]


def _manifest(out: Path) -> _Manifest:
    """Return counts by reason, files by outcome, and the series without a result by id."""
    files: Counter[str] = Counter()
    by_reason: Counter[tuple[str, str]] = Counter()
    series: dict[tuple[str, str], set[str]] = defaultdict(set)
    excluded: dict[str, ReportCase] = {}
    try:
        with TextIOWrapper(open_regular_file(out / "manifest.csv"), "utf-8", newline="") as file:
            for row in csv.DictReader(file):
                files[row["outcome"]] += 1
                if row["reason"]:
                    key, case = (row["reason"], row["outcome"]), row["case"]
                    by_reason[key] += 1
                    if case:
                        series[key].add(case)
                        without = ReportCase(case, case, key[1], key[0], row["detail"])
                        excluded.setdefault(case, without)
    except FileNotFoundError:
        return (), {}, {}
    except (OSError, ValueError, LookupError, TypeError, csv.Error) as exc:
        detail = "manifest.csv is damaged: delete it, and the next run writes it again"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail) from exc
    order = sorted(by_reason, key=lambda key: (-by_reason[key], key))
    left_out = tuple(
        ExclusionCount(
            *key,
            len(series[key]),
            by_reason[key],
            tuple(sorted(series[key])[:MAX_IDS]),
            _criteria(excluded[case] for case in series[key]),
        )
        for key in order
    )
    return left_out, {name: files[name] for name in FILE_OUTCOMES if files[name]}, excluded


def _criteria(series: Iterable[ReportCase]) -> tuple[tuple[str, int], ...]:
    """Return the criteria that left series out, with their numbers, the most frequent first."""
    details = (each.detail for each in series if each.reason == Reason.NOT_SELECTED.code)
    return tuple(sorted(Counter(details).items(), key=lambda item: (-item[1], item[0])))


def advice(code: str) -> str:
    """Return the advice of a reason, or the text of a flag; empty for an unknown code."""
    if code in Reason.__members__:
        return Reason[code].advice
    return Flag[code].text if code in Flag.__members__ else ""


def _json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if it is missing, unreadable or not an object."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


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


def summed_runs(runs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
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
        summed_runs([run, run])
    except _OTHER_FORM:
        return False
    return True


PRIVATE_FIELDS = (
    "patient_id",
    "patient_name",
    "accession_number",
    "study_date",
    "series_number",
    "series_description",
    "path",
)
"""Columns of the crosswalk that the private report shows, in order."""


def private_rows(out: Path) -> dict[str, list[str]]:
    """Return the values of `FIELDS` of each case id in the crosswalk; empty without any.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the crosswalk can't be read.
    """
    latest = latest_by_id(find_sources(out, sorted(known_ids(out))))
    return {
        case_id: [printable(str(getattr(source, field))) for field in PRIVATE_FIELDS]
        for case_id, source in latest.items()
    }
