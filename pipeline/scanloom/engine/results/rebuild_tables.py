"""Write the tables of a run that ended before writing them, from its results, without the scans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from scanloom.core import Reason, ScanError, Series
from scanloom.engine.outcomes import Outcome, Outcomes
from scanloom.engine.prepare import Request
from scanloom.engine.results import tables
from scanloom.engine.results.verify import missing_tables
from scanloom.engine.run_files import RUNS, WORKFLOW, run_folders
from scanloom.engine.workflow.schema import MAX_PAGE_BYTES, Workflow, parse_stored_workflow
from scanloom.engine.workflow.selection import Inputs, select
from scanloom.io.identity import case_id, key_fingerprint, source_stamp
from scanloom.io.index.build import stored_index
from scanloom.io.output.crosswalk import case_folders, ids_of_volumes
from scanloom.io.output.failures import previous_failure
from scanloom.io.output.layout import TOTALS, case_folder
from scanloom.io.output.ledger import Ledger
from scanloom.io.output.parquet_file import open_parquet, read_errors
from scanloom.io.output.private import PRIVATE
from scanloom.io.output.published import OTHER_RECIPE, read_provenance
from scanloom.io.output.tabled_cases import MEASUREMENTS
from scanloom.io.system.regular_files import read_regular_file


def lacks_tables(out: Path) -> bool:
    """Whether tables are missing or unreadable, or the newest run has not written its own.

    Totals of a run are written after its tables.
    """
    runs = run_folders(out)
    if not runs:
        return False
    try:
        for name in (tables.MANIFEST, MEASUREMENTS):
            open_parquet(out / f"{name}.parquet").close()
    except read_errors():
        return True
    return not (runs[-1] / TOTALS).is_file() or bool(missing_tables(out))


def rewrite_tables(out: Path, key: bytes | None, damaged: set[str]) -> bool:
    """Write tables of cases, and with the key `manifest`; return whether `manifest` was written.

    The index of `out` and the workflow of its newest run are read, and the ledger is made anew. Of
    a run that died while it indexed there is no workflow: that of the run before it counts.
    `damaged` is as in `scanloom.engine.results.tables.write_tables`.

    Raises
    ------
    ScanError, OSError
        If the workflow or a model is missing; if tables can't be written.
    """
    Ledger(out).rebuild()
    index = None if key is None else stored_index(out, key_fingerprint(key))
    workflow = None if index is None else _newest_workflow(out)
    if key is None or index is None or workflow is None:
        tables.write_case_tables(out, damaged)
        return False
    request = Request.of(workflow)
    endings, left_out = Outcomes(), Outcomes()
    chosen = select(index.series, workflow, request.cards, left_out.append, index.store)
    folders, volumes = case_folders(out), ids_of_volumes(out)
    for inputs in chosen:
        stamp = source_stamp([series.stamp for series in inputs], key)
        for case in _case_ids(inputs, workflow, key, volumes):
            folder = folders.get(case, case)
            if (ending := _ending(out, case, folder, request.recipe, stamp)) is not None:
                for series in inputs:
                    endings.append(Outcome(series.id, *ending))
    tables.write_tables(out, index, left_out, endings, key, None, damaged)
    return True


def _newest_workflow(out: Path) -> Workflow | None:
    """Return the workflow of the newest run that has stored it."""
    for run in reversed(run_folders(out)):
        with suppress(FileNotFoundError):
            private_copy = out / PRIVATE / RUNS / run.name / WORKFLOW  # has the paths of the models
            return parse_stored_workflow(read_regular_file(private_copy, MAX_PAGE_BYTES))
    return None


def _case_ids(
    inputs: Inputs, workflow: Workflow, key: bytes, volumes: Mapping[tuple[str, str], set[str]]
) -> Iterable[str]:
    """Return the case ids of a series; `volumes` are as of `ids_of_volumes`."""
    first = inputs[0]
    if first.reason not in (Reason.PHASES, Reason.FOUR_D):
        return [first.id]
    if not first.series_uid:
        return ()  # an id would need the files' content: whether they were used stays open
    if workflow.policy.phases == "first":
        return [case_id(Series(first.kind, (), first.study_uid, first.series_uid), key, 0)]
    return sorted(volumes.get((first.study_uid, first.series_uid), ()))


def _ending(out: Path, case: str, folder: str, recipe: str, stamp: str) -> tuple[str, str] | None:
    """Return code and detail of a case for the files as they are now; None if not known."""
    failure = previous_failure(out, case, recipe, stamp)
    if failure is not None:
        return failure.reason.code, failure.detail
    try:
        made_by = read_provenance(case_folder(out, folder))
    except (OSError, ValueError):
        return None
    except ScanError as exc:  # of another version of scanloom
        return exc.reason.code, exc.detail
    if made_by.recipe != recipe:
        return Reason.STALE.code, OTHER_RECIPE
    return ("", "") if made_by.stamp == stamp else None
