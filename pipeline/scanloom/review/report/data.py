"""Collect the data of a report from published files; it contains no path and no identity."""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scanloom.core import OUTCOMES, Flag, Measurement, Reason, ScanError, printable
from scanloom.core.measurement import Range, ReferenceRange
from scanloom.io.output.crosswalk import find_sources, known_ids, latest_by_id
from scanloom.io.output.failures import FAILED, failed_cases
from scanloom.io.output.file_names import PREVIEW
from scanloom.io.output.json_file import read_json
from scanloom.io.output.layout import CASES, TOTALS, iter_cases
from scanloom.io.output.lookup import Lookup
from scanloom.io.output.measurements import read_measurements
from scanloom.io.system.regular_files import open_regular_file
from scanloom.io.system.scratch_folders import observed_state
from scanloom.review.scratch import Columns, Objects

if TYPE_CHECKING:
    import pyarrow as pa

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

    Series with `files` of None are not in the manifest. `criteria` counts the series by the word of
    the workflow that left them out (NOT_SELECTED).
    """

    code: str
    outcome: str
    series: int
    files: int | None
    ids: tuple[str, ...] = ()
    criteria: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class ReportData:
    """The data of a report.

    Parameters
    ----------
    cases : iterator of ReportCase
        The cases, which are read one by one: first those that have a result.
    left_out : list of ExclusionCount
        Counts by reason, those with the most files first. Complete, like `models` and `versions`,
        when all cases were read.
    files : dict
        Count of files by outcome.
    models : dict
        Each model of a `case.json`, and each result of several models, once.
    versions : dict
        Versions of the libraries, from the last case.
    """

    cases: Iterator[ReportCase]
    left_out: list[ExclusionCount]
    files: dict[str, int]
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


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
    manifest = _read_manifest(out)
    models, versions = dict[str, dict[str, Any]](), dict[str, str]()
    cases = _read_cases(out, damaged, manifest, models, versions)
    return ReportData(cases, manifest.left_out, manifest.files, models, versions)


def _read_cases(
    out: Path,
    damaged: set[str],
    manifest: _Manifest,
    models: dict[str, dict[str, Any]],
    versions: dict[str, str],
) -> Iterator[ReportCase]:
    """Yield the published cases, then those that failed, then other series without a result."""
    failed = failed_cases(out)
    for case, models_of_case, libraries in iter_cases(out, _published, damaged):
        models |= models_of_case
        versions.clear()
        versions |= libraries  # of the last case
        later = manifest.without_result(case.case_id, case.id)
        failure = _failure(out, case.case_id) if case.case_id in failed else None
        failed.discard(case.case_id)
        if failure is None and later is not None and later.reason == Reason.STALE.code:
            failure = later  # the newest run did not replace it
        if failure:
            flags = (*case.flags, Flag.OUTDATED.code)
            case = replace(case, flags=flags, reason=failure.reason, detail=failure.detail)
        yield case
    unlisted = defaultdict[tuple[str, str], list[str]](list)
    for id_ in sorted(failed):
        if (failure := _failure(out, id_)) is not None:
            if manifest.without_result(failure.id) is None:
                unlisted[failure.reason, failure.status].append(failure.id)
            yield failure
    for key in sorted(unlisted, key=lambda key: (-len(unlisted[key]), key)):
        ids = unlisted[key]
        manifest.left_out.append(ExclusionCount(*key, len(ids), None, tuple(ids[:MAX_IDS])))
    yield from manifest.remaining()


class StoredCases:
    """The cases of a report in a temporary file, and what it needs of all of them at once.

    Parameters
    ----------
    folder : Path
        A folder of the file system that has room for the file.

    Attributes
    ----------
    structures : set of (label, model)
    references : dict
        Reference ranges by model.
    volumes, seconds : Columns
        Volumes in ml by (label, model), and seconds by step.
    """

    def __init__(self, folder: Path) -> None:
        self._cases = Objects[ReportCase](folder)
        self.structures = set[tuple[str, str]]()
        self.references = dict[str, tuple[ReferenceRange, ...]]()
        self.volumes, self.seconds = Columns[tuple[str, str]](folder), Columns[str](folder)

    def take(self, cases: Iterable[ReportCase]) -> Iterator[Measurement]:
        """Store cases; yield the measurements of those with a result."""
        for case in cases:
            self._cases.add(replace(case, references={}))
            self.references |= case.references
            for name, seconds in case.seconds.items():
                self.seconds.add(name, seconds)
            for m in case.measurements:
                key = m.label, m.model
                self.structures.add(key)
                if 0 < m.volume_ml < math.inf:
                    self.volumes.add(key, m.volume_ml)
            yield from case.measurements

    def __iter__(self) -> Iterator[ReportCase]:
        """Yield the cases as they were taken, without their references."""
        return iter(self._cases)


def collect_runs(out: Path) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return `totals.json` of each run, or else its status, the newest first; and a workflow.

    The workflow is that of the newest run that has one; None without any. Documents that scanloom
    did not write are left out.
    """
    folders = sorted((p for p in (out / "runs").glob("*/") if p.is_dir()), reverse=True)
    runs = [_json(p / TOTALS) or _status(p) for p in folders]
    workflows = (_json(p / "workflow.json") for p in folders)
    newest = next((workflow for workflow in workflows if workflow is not None), None)
    return [run for run in runs if run is not None and _is_ours(run)], newest


def _status(run: Path) -> dict[str, Any] | None:
    """Return the last status of a run, for one without totals."""
    status = _json(run / "status.json")
    try:
        return status and {**status, "state": observed_state(status)}
    except (LookupError, TypeError):
        return None  # not written by scanloom


def _published(
    folder: Path, document: dict[str, Any], timing: dict[str, Any]
) -> tuple[ReportCase, dict[str, dict[str, Any]], dict[str, str]]:
    """Return a case, its models by card, device and precision, and its library versions."""
    files, results = _files_of(folder), document.get("results", [])
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
        preview=folder / PREVIEW if PREVIEW in files else None,
        subfolder="" if folder.parent.name == CASES else folder.parent.name,
        files=files,
        references={m["name"]: references_of(m) for m in document["models"]},
    )
    models = {
        m["card_sha256"] + m["device"] + m["precision"] + m.get("changes", ""): m
        for m in document["models"]
    }
    models |= {f"{result['name']} {result['version']}": result for result in results}
    return case, models, document["versions"]


def _files_of(folder: Path) -> tuple[str, ...]:
    """Return the relative names of the files in a folder, and in those in it, sorted."""
    names = list[str]()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                with os.scandir(entry) as inside:
                    names += [f"{entry.name}/{each.name}" for each in inside if each.is_file()]
            elif entry.is_file():
                names.append(entry.name)
    return tuple(sorted(names))


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


def _failure(out: Path, id_: str) -> ReportCase | None:
    """Return a case that failed; None if scanloom did not write its record."""
    document = _json(out / FAILED / f"{id_}.json")
    with suppress(LookupError, TypeError):
        if document is not None:
            flags = tuple(flag["code"] for flag in document["flags"])
            code = document["reason"]
            status = Reason[code].outcome if code in Reason.__members__ else "failed"
            case = document["case"]
            return ReportCase(case, case, status, code, document["detail"], flags=flags)
    return None


class _Manifest:
    """Content of the manifest: counts, and the series without a result.

    Parameters
    ----------
    files : mapping
        Number of files by outcome.
    by_reason : mapping
        The same by reason and outcome, of those that have a reason.
    series : table
        Series, reason, outcome and detail of files that have a reason: mostly a row a series.
    """

    def __init__(
        self, files: Mapping[str, int], by_reason: Mapping[tuple[str, str], int], series: pa.Table
    ) -> None:
        self.files = {name: files[name] for name in FILE_OUTCOMES if name in files}
        names = [("reason", "first"), ("outcome", "first"), ("detail", "first")]
        first = series.group_by("case", use_threads=False).aggregate(names)
        self._rows = first.rename_columns(["case", *MANIFEST_COLUMNS[:3]]).sort_by("case")
        self._ids = Lookup(self._rows["case"])
        self._is_known = np.zeros(len(self._rows), bool)
        order = sorted(by_reason, key=lambda key: (-by_reason[key], key))
        self.left_out = [self._left_out(series, key, by_reason[key]) for key in order]

    def without_result(self, *names: str) -> ReportCase | None:
        """Return the series with the first of some names, if it has a reason; all are known then.

        Series that are known are not in `remaining`.
        """
        rows = [n for n in map(self._ids.first_row, names) if n is not None]
        self._is_known[rows] = True
        row = self._ids.first_row(names[0])
        return None if row is None else self._case(self._rows.slice(row, 1).to_pylist()[0])

    def remaining(self) -> Iterator[ReportCase]:
        """Yield the series that nobody asked for."""
        for first in range(0, len(self._rows), BATCH_SERIES):
            unknown = np.flatnonzero(~self._is_known[first : first + BATCH_SERIES])
            yield from map(self._case, self._rows.take(first + unknown).to_pylist())

    def _case(self, row: dict[str, str]) -> ReportCase:
        return ReportCase(row["case"], row["case"], row["outcome"], row["reason"], row["detail"])

    def _left_out(self, series: pa.Table, key: tuple[str, str], files: int) -> ExclusionCount:
        """Return the numbers of a reason and outcome."""
        from pyarrow import compute

        of_key = [compute.equal(series[n], v) for n, v in zip(MANIFEST_COLUMNS, key, strict=False)]
        ids = compute.unique(series.filter(compute.and_(*of_key))["case"])
        unselected = self._rows.filter(
            compute.and_(
                compute.equal(self._rows["reason"], Reason.NOT_SELECTED.code),
                compute.is_in(self._rows["case"], value_set=ids),
            )
        )
        criteria = Counter(unselected["detail"].to_pylist())
        return ExclusionCount(
            *key,
            len(ids),
            files,
            tuple(ids.take(compute.array_sort_indices(ids)[:MAX_IDS]).to_pylist()),
            tuple(sorted(criteria.items(), key=lambda item: (-item[1], item[0]))),
        )


MANIFEST_COLUMNS = ("reason", "outcome", "detail", "case")
BATCH_SERIES = 10_000
"""Series that are read at a time."""


def _read_manifest(out: Path) -> _Manifest:
    """Read the manifest, which may have a row for each of a hundred million files."""
    import pyarrow as pa
    from pyarrow import compute
    from pyarrow import csv as arrow

    texts = dict.fromkeys(MANIFEST_COLUMNS, pa.string())
    files, by_reason = Counter[str](), Counter[tuple[str, str]]()
    series = [pa.schema(texts).empty_table()]
    try:
        with open_regular_file(out / "manifest.csv") as file:
            batches = arrow.open_csv(
                file,
                arrow.ReadOptions(use_threads=False),
                arrow.ParseOptions(newlines_in_values=True),
                arrow.ConvertOptions(column_types=texts, include_columns=list(texts)),
            )
            for batch in batches:
                counts = compute.value_counts(batch["outcome"]).to_pylist()
                files.update({each["values"]: each["counts"] for each in counts})
                rows = pa.Table.from_batches([batch])
                rows = rows.filter(compute.not_equal(rows["reason"], ""))
                groups = rows.group_by(["reason", "outcome"], use_threads=False)
                for each in groups.aggregate([([], "count_all")]).to_pylist():
                    by_reason[each["reason"], each["outcome"]] += each["count_all"]
                series.append(_distinct(rows.filter(compute.not_equal(rows["case"], ""))))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, pa.ArrowException) as exc:
        detail = "manifest.csv is damaged: delete it, and the next run writes it again"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail) from exc
    return _Manifest(files, by_reason, _distinct(pa.concat_tables(series)))


def _distinct(rows: pa.Table) -> pa.Table:
    """Return the first row of each series, reason and outcome, in their order."""
    groups = rows.group_by(["case", "reason", "outcome"], use_threads=False)
    return (
        groups.aggregate([("detail", "first")])
        .rename_columns(["case", "reason", "outcome", "detail"])
        .select(list(MANIFEST_COLUMNS))
    )


def advice(code: str) -> str:
    """Return the advice of a reason, or the text of a flag; empty for an unknown code."""
    if code in Reason.__members__:
        return Reason[code].advice
    return Flag[code].text if code in Flag.__members__ else ""


def _json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if it is missing, damaged or of another version."""
    try:
        return read_json(path)
    except (OSError, ValueError, ScanError):
        return None


def damaged_totals(out: Path) -> list[str]:
    """Return the paths of totals that are damaged, relative to OUT."""

    def is_damaged(path: Path) -> bool:
        try:
            return not _is_ours(read_json(path))
        except ScanError:  # of another version
            return False
        except (OSError, ValueError):
            return True

    paths = sorted((out / "runs").glob(f"*/{TOTALS}"))
    return [path.relative_to(out).as_posix() for path in paths if is_damaged(path)]


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
    except (LookupError, TypeError, ValueError, AttributeError):
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
    """Return the `PRIVATE_FIELDS` of each case id in the crosswalk; empty without any.

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
