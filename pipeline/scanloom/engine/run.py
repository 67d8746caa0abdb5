"""Run a workflow over an archive: a result for each usable scan, a reason for every other one.

`find -> index -> select -> [load | segment | write] -> publish -> collect -> report`. All state
is on disk: a run that was killed resumes when the same command is started again.
"""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from scanloom.core import Case, CaseRecord, ScanError
from scanloom.engine import case_progress, run_files
from scanloom.engine.clusters.kinds import LOCAL, NO_CLUSTER
from scanloom.engine.costs import PLAN_FILE, RunTimeline, compare_with_plan
from scanloom.engine.early_cases import (
    ENOUGH_CASES,
    EarlyCases,
    EarlyOutcomes,
    GrowingIndex,
    may_begin_early,
)
from scanloom.engine.machine.devices import EnergyMeter
from scanloom.engine.monitor import Status, StatusWriter, check_metrics, final_status
from scanloom.engine.prepare import OutputTarget, Request, model_loader
from scanloom.engine.results.run_cases import OutdatedMarker, RunCases, record_sources
from scanloom.engine.results.tables import MANIFEST, write_tables
from scanloom.engine.results.totals import write_totals
from scanloom.engine.stop_request import StopRequest
from scanloom.engine.worker.messages import CaseFile, ChildSetup
from scanloom.engine.worker.pool import LocalPool, Pool, dispatch_cases
from scanloom.engine.worker.supervisor import CaseOutcome, WorkerSupervisor
from scanloom.engine.workflow.schema import Workflow
from scanloom.engine.workflow.selection import Scope, check_channels
from scanloom.io.identity import key_fingerprint
from scanloom.io.index.build import Index, build_index, record_series
from scanloom.io.index.walk import check_paths
from scanloom.io.output.failures import (
    FAILED,
    failed_cases,
    is_failure,
    remove_failure,
    write_failure,
)
from scanloom.io.output.json_file import write_document, write_json
from scanloom.io.output.layout import fan_out
from scanloom.io.output.ledger import Ledger
from scanloom.io.output.private import load_key_of, private_folder, write_private
from scanloom.io.output.tabled_cases import MEASUREMENTS
from scanloom.io.output.work_folder import open_output
from scanloom.io.session import read_session
from scanloom.io.system.disk_errors import disk_errors_as_scan_errors
from scanloom.io.write.bids import BIDS, check_bids, write_bids
from scanloom.review.report.page import write_report
from scanloom.version import __version__

_THIS_MACHINE = (LOCAL, NO_CLUSTER)
"""Clusters on this machine, so that its energy counters and its cost model apply."""


@dataclass(frozen=True)
class RunOptions:
    """Options of a run other than its workflow.

    Parameters
    ----------
    out : Path
        The output folder.
    key : Path or None
        The file with the key of the ids; None for SCANLOOM_KEY or the user's own.
    cluster : str
        "local" (Dask on this machine), "none" (without Dask), a name of
        `scanloom.engine.clusters.kinds`, such as "slurm" or "ssh:HOSTS", or the address or
        scheduler file of an existing cluster.
    scope : Scope
        The cases that the run takes.
    take_over : bool
        Whether the lock of a run on another host is replaced.
    metrics : Path or None
        A file that is kept up to date for Prometheus.
    price : float or None
        Price of one hour of a worker with its device, for an estimate of the cost.
    bids : bool
        Whether a BIDS derivative is written too, to `OUT/bids`.
    archives : bool
        Whether archives inside folders are opened too, not only those named in `paths`.
    spool : Path or None
        The spool of a service, which workers must read.
    """

    out: Path
    key: Path | None = None
    cluster: str = LOCAL
    scope: Scope = field(default_factory=Scope)
    take_over: bool = False
    metrics: Path | None = None
    price: float | None = None
    bids: bool = False
    archives: bool = False
    spool: Path | None = None


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Parameters
    ----------
    run : str
        The run's id; its folder is `OUT/runs/<run id>`.
    status : Status
        The final status.
    files : dict
        Counts of files found, used, skipped, ambiguous and failed.
    complete : bool
        Whether every case was worked on.
    totals : dict
        The content of the run's `totals.json`.
    compared : dict or None
        Comparison with the plan, as `scanloom.engine.costs.compare_with_plan` returns it.
    damaged : tuple of str
        Published cases that can't be read; tables and report omit them.
    selected : int
        Number of cases that the workflow selected, those from before included.
    refused : int
        Number of series that failed by their headers, so that they are no cases.
    unstated : int
        Number of series that were not selected because their files state no modality.
    metrics_error : ScanError or None
        Why the last metrics could not be written.
    """

    run: str
    status: Status
    files: dict[str, int]
    complete: bool
    totals: dict[str, Any]
    compared: dict[str, Any] | None = None
    damaged: tuple[str, ...] = ()
    selected: int = 0
    refused: int = 0
    unstated: int = 0
    metrics_error: ScanError | None = None

    @property
    def failed_cases(self) -> int:
        """Number of selected cases that failed."""
        return self.status.failed - self.refused


def run(
    workflow: Workflow,
    paths: Sequence[Path],
    options: RunOptions,
    *,
    stop: StopRequest | None = None,
    display: Callable[[StatusWriter], AbstractContextManager[None]] | None = None,
) -> RunResult:
    """Run a workflow over an archive, or resume a run that was stopped.

    Parameters
    ----------
    workflow, paths, options
        The workflow, folders and files with the scans, and all other options.
    stop : StopRequest or None
        Set it to stop the run after the current writes.
    display : callable or None
        Receives the run's status writer, to display it; returns a context that spans the run.

    Raises
    ------
    ScanError
        If no case can run: because of the models, paths, key, output folder, lock or cluster, or a
        full disk.
    """
    stop = stop or StopRequest()
    request = _checked_request(workflow, paths, options)
    key = load_key_of(options.out, options.key)
    open_output(options.out, key_fingerprint(key))
    recipe, shard = request.recipe, options.scope.shard
    lock = "{}-of-{}".format(*shard) if shard else ""
    held = run_files.hold_run_lock(options.out, shard=lock, take_over=options.take_over)
    with held as release:
        with disk_errors_as_scan_errors(), run_files.exclusively(options.out):
            if not options.scope.replace:
                run_files.check_other_runs(options.out, recipe, shard)
            name = run_files.create_run_folder(
                options.out, request.workflow, request.cards, recipe, shard
            )
        status_writer = StatusWriter(
            name, options.out / run_files.RUNS / name, metrics=options.metrics
        )

        def hand_back() -> None:
            status_writer.close("stopped")
            if options.cluster in _THIS_MACHINE:  # elsewhere, workers may still publish
                release()

        meter = EnergyMeter() if options.cluster in _THIS_MACHINE else None
        shown = display(status_writer) if display else nullcontext()
        given_up = stop.handing_back(hand_back)
        with given_up, final_status(status_writer), shown, disk_errors_as_scan_errors():
            current = _Run(request, options, key, name, status_writer, stop)
            complete, files = current.execute(paths)
            state = "done" if complete else "stopped"
            joules = meter.joules() if meter else None
            status = replace(status_writer.now(), state=state)
            totals = write_totals(options.out, status, joules=joules, price=options.price)
            changed = bool(len(current.case_file) or current.damaged)
            if options.bids and (changed or _is_outdated(options.out)):
                write_bids(options.out, __version__, current.damaged)
            write_report(options.out, current.damaged, changed=changed)
            status_writer.state(state)
        return RunResult(
            run=name,
            status=status,
            files=files,
            complete=complete,
            totals=totals,
            compared=current.compared,
            damaged=tuple(sorted(current.damaged)),
            selected=current.cases.selected,
            refused=current.cases.refused,
            unstated=current.cases.unstated,
            metrics_error=status_writer.metrics_error,
        )


def _is_outdated(out: Path) -> bool:
    """Return whether a table or a failure may be newer than `OUT/bids`, as after a killed run."""
    sources = [out / FAILED, *(out / f"{name}.parquet" for name in (MANIFEST, MEASUREMENTS))]
    try:
        built_ns = (out / BIDS).stat().st_ctime_ns
        return any(path.stat().st_ctime_ns > built_ns for path in sources if path.exists())
    except OSError:
        return True


def _checked_request(workflow: Workflow, paths: Sequence[Path], options: RunOptions) -> Request:
    """Return the request of a run; refuse impossible options before anything is written."""
    request = Request.of(workflow)
    check_channels(workflow, request.cards)
    check_paths(paths, options.out)
    if options.bids:
        check_bids(options.out)
    if options.metrics is not None:
        check_metrics(options.metrics)
    if options.cluster not in _THIS_MACHINE:
        from scanloom.engine.clusters.connect import check_cluster

        check_cluster(options.cluster, workflow.execution)
    return request


class RunSteps:
    """The steps of a run around the work on its cases: `listen` repeats them for each study.

    Cases `enter`, the pool of `workers` has them, each outcome is noted by `end_case`, and when all
    have ended they `leave`.

    Parameters
    ----------
    request, options, key
        The workflow with its models, the run's options, and the key of the ids.
    name : str
        Id of the run.
    status_writer : StatusWriter
        Receives the progress.
    """

    def __init__(
        self,
        request: Request,
        options: RunOptions,
        key: bytes,
        name: str,
        status_writer: StatusWriter,
    ) -> None:
        self.request, self.options, self.key = request, options, key
        self.status_writer = status_writer
        self.out, self.fingerprint = options.out.absolute(), key_fingerprint(key)
        self.name, self.folder = name, self.out / run_files.RUNS / name

    def save_workflow(self) -> Path:
        """Write the workflow, with its paths, to the run's private folder; return the folder."""
        with private_folder(self.out, self.fingerprint) as private:
            self.private = private / run_files.RUNS / self.name
            for folder in (self.private.parent, self.private):
                folder.mkdir(exist_ok=True, mode=0o700)
        document = self.request.workflow.model_dump(mode="json")
        write_private(self.private / run_files.WORKFLOW, lambda draft: write_json(draft, document))
        return self.private

    def enter(self, cases: RunCases) -> None:
        """Add cases to the crosswalk and the status; record series that failed by their headers."""
        failed_before = failed_cases(self.out)
        for name in cases.with_result(failed_before) if failed_before else ():
            remove_failure(self.out, name)  # an earlier run may have died before this
        record_sources(self.out, self.fingerprint, cases)
        failed = sum(1 for _ in self._failed(cases))
        ended, lacking, work = cases.ended, cases.without_result, cases.work
        self.status_writer.plan(work + ended + failed, ended - len(lacking), work)
        for record in itertools.chain(lacking, self._failed(cases)):
            self.status_writer.finish(record)
        for record in self._failed(cases):
            if record.id:
                write_failure(self.out, record, self.request.recipe)

    def _failed(self, cases: RunCases) -> Iterator[CaseRecord]:
        """Yield records of the series that failed without being cases."""
        for entry in cases.left_out:
            if entry.is_failure and self.options.scope.holds(entry.id):
                yield CaseRecord(entry.id, entry.reason, entry.detail, (), None)

    @contextmanager
    def workers(self, case_file: CaseFile) -> Iterator[Pool]:
        """Open the worker processes of the run's cluster; stop them at the end."""
        execution, cluster = self.request.workflow.execution, self.options.cluster
        progress = self.folder / case_progress.FOLDER
        setup = ChildSetup(
            OutputTarget(self.out, self.key, self.options.scope.replace),
            model_loader(self.request, len(case_file), self.out),
            in_flight=execution.in_flight,
            memory_limit=execution.memory_limit,
            progress=progress,
        )
        try:
            if cluster == NO_CLUSTER:
                log = self.private / "engine.log"
                supervisor = WorkerSupervisor(setup, execution.time_limit, log=log)
                local_pool = LocalPool(supervisor, execution.in_flight)
                try:
                    yield local_pool
                finally:
                    local_pool.stop(5.0)
                return
            from scanloom.engine.clusters.connect import open_pool

            on_unfit, spool = self.status_writer.send_away, self.options.spool
            with open_pool(cluster, self.request, case_file, setup, on_unfit, spool) as dask_pool:
                yield dask_pool
        finally:  # the progress of its cases, which workers tell
            shutil.rmtree(progress, ignore_errors=True)

    def end_case(self, case: Case, outcome: CaseOutcome, cases: RunCases) -> CaseRecord | None:
        """Record the outcome of a case; one that was interrupted counts as never started: None.

        Raises
        ------
        ScanError
            If every further case would end so, as with a full disk.
        """
        record = outcome.record
        if record is None:
            return None
        run_files.append_to_log(self.folder, case, outcome)
        check_run_goes_on(record)
        if record.reason is None:
            remove_failure(self.out, record.id)
        elif is_failure(record):
            write_failure(self.out, record, case.recipe, case.stamp)
        cases.note(record)
        self.status_writer.finish(record)
        return record

    def leave(self, index: Index, cases: RunCases) -> None:
        """Record the series of an index whose cases have ended, and mark outdated results."""
        scope = self.options.scope
        record_series(self.out, self.fingerprint, index, scope.holds)
        held = (series for series in index.series if scope.holds(series.id))
        OutdatedMarker(self.out, self.key, self.request.recipe, index).mark(held, cases)


def check_run_goes_on(record: CaseRecord) -> None:
    """Raise the reason of a case's failure if every further case would end so: ScanError."""
    if record.reason is not None and record.reason.subject == "run":
        raise ScanError(record.reason, record.detail)


class _Run(RunSteps):
    """A run over an archive, from the index to the tables; `stop` ends its work on cases."""

    def __init__(
        self,
        request: Request,
        options: RunOptions,
        key: bytes,
        name: str,
        status_writer: StatusWriter,
        stop: threading.Event,
    ) -> None:
        super().__init__(request, options, key, name, status_writer)
        self.timeline = RunTimeline(time.monotonic())
        self.compared: dict[str, Any] | None = None
        self.damaged: set[str] = set()
        self._stop, self._early = stop, EarlyOutcomes(key, self.out, options.scope)
        self._stack = ExitStack()
        self._pool: Pool | None = None

    @read_session()
    def execute(self, paths: Sequence[Path]) -> tuple[bool, dict[str, int]]:
        """Run all stages; return whether the run was completed, and the counts of files."""
        scope, request, key = self.options.scope, self.request, self.key
        with self._stack:
            index = self._index(paths)
            if self._pool is None:  # no case began early
                self.case_file = CaseFile(self.save_workflow() / run_files.CASES_FILE)
            case_file = self.case_file
            self.cases = cases = RunCases(
                index, request, key, self.out, scope, pending=case_file, ledger=Ledger(self.out)
            )
            cases.compare()
            case_file.sync()
            self.enter(cases)
            complete = True
            if case_file.wait(0.0) and not self._stop.is_set():
                fan_out(self.out, cases.work * (scope.shard or (1, 1))[1])
                complete = self._work_on(self._unconfirmed(), self._on_outcome)
            if complete and not self._stop.is_set():
                self._early.remove()
        # From here on the order decides: a mark needs the records of failed cases, and tables
        # need the marks
        self.status_writer.state("collecting")
        if self.options.cluster in _THIS_MACHINE and len(case_file):
            self.compared = compare_with_plan(self.out, self.timeline, request)
            if self.compared is not None:
                write_document(self.folder / PLAN_FILE, self.compared)
        self.leave(index, cases)
        cases.note_other_shards()
        cases.close_ledger()
        shard = self.folder if scope.shard else None
        files = write_tables(
            self.out, index, cases.left_out, cases.endings, key, shard, self.damaged
        )
        return complete and not self._stop.is_set(), files

    def _index(self, paths: Sequence[Path]) -> Index:
        """Build the index, and work meanwhile on cases of parts that are complete."""
        build = partial(build_index, paths, self.key, self.out, archives=self.options.archives)
        if not may_begin_early(self.request.workflow):
            return build()
        grown = GrowingIndex(lambda add: build(on_part=add), self.status_writer.add_indexed)
        with grown as growing:
            scope = self.options.scope
            cases = EarlyCases(growing, self.request, self.key, self.out, scope, self._early)
            if cases.wait(self._stop):
                file = self.save_workflow() / run_files.CASES_FILE
                self.case_file = CaseFile(file, at_least=ENOUGH_CASES)
                cases.begin(self.case_file)
                self._work_on(cases, self._on_early_outcome)
            return growing.result()

    def _unconfirmed(self) -> Iterator[Case]:
        """Yield the cases to be worked on; record those that ended before the index."""
        for case in self.case_file:
            if self._stop.is_set():
                return
            outcome = self._early.confirm(case)
            if outcome is None:
                yield case
            else:
                self.status_writer.confirm()
                self._record(case, outcome)

    def _work_on(
        self, cases: Iterable[Case | None], on_outcome: Callable[[Case, CaseOutcome], None]
    ) -> bool:
        """Dispatch cases to the workers, which start with the first ones."""
        if self._pool is None:
            self.timeline.began = time.monotonic()
            self._pool = self._stack.enter_context(self.workers(self.case_file))
        return dispatch_cases(
            cases,
            self._pool,
            on_outcome,
            on_start=lambda case: self.status_writer.start(case.id),
            stop=self._stop,
        )

    def _on_early_outcome(self, case: Case, outcome: CaseOutcome) -> None:
        if outcome.record is not None:
            self.case_file.remove(case.id)
            self.timeline.note_end(outcome)
            check_run_goes_on(outcome.record)
            self._early.note(case, outcome.record, outcome)
            self.status_writer.set_aside(case.id)

    def _on_outcome(self, case: Case, outcome: CaseOutcome) -> None:
        if outcome.record is not None:
            self.timeline.note_end(outcome)
            self._record(case, outcome)

    def _record(self, case: Case, outcome: CaseOutcome) -> None:
        self.case_file.remove(case.id)
        self.timeline.note_result(outcome)
        self.end_case(case, outcome, self.cases)
