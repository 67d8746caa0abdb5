"""A run: an archive in, results for all that can be segmented and a reason for all that can't.

`find -> index -> select -> [load | segment | write] -> publish -> collect -> report`. What is on
the disk is the only truth: a run that was killed is started again with the same words, and goes on
where it was.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from scanloom.cards.card import ModelCard
from scanloom.cards.store import find_model
from scanloom.core import Case, CaseRecord, Reason, ScanError
from scanloom.engine.book import CaseBook
from scanloom.engine.cases import first_of_each, leave_out, make_cases, workflow_recipe
from scanloom.engine.child import Setup
from scanloom.engine.collect import Ending, collect
from scanloom.engine.energy import Meter
from scanloom.engine.engine import Engine, Outcome
from scanloom.engine.gpus import local_devices
from scanloom.engine.history import Course, conclude
from scanloom.engine.lock import hold_lock
from scanloom.engine.models import check_structures, load_predictors, unique_cards
from scanloom.engine.outdated import Marker
from scanloom.engine.plan import PLAN
from scanloom.engine.pool import LocalPool, Pool
from scanloom.engine.pump import pump
from scanloom.engine.record import card_digest
from scanloom.engine.run_folder import RUNS, keep_workflow, new_run
from scanloom.engine.scope import OF_RESULTS, Scope
from scanloom.engine.select import Inputs, LeftOut, check_channels, select
from scanloom.engine.status import Board, Status, closing
from scanloom.engine.totals import write_totals
from scanloom.engine.work import Place
from scanloom.engine.workflow import Workflow
from scanloom.io.bids import check_bids, write_bids
from scanloom.io.casefolder import claim_out, output_border
from scanloom.io.crosswalk import (
    add_sources,
    case_folders,
    known_ids,
    remember_series,
    source_of,
)
from scanloom.io.failures import forget_failure, is_failure, write_failure
from scanloom.io.identity import key_fingerprint, load_key
from scanloom.io.index import Index, build_index
from scanloom.io.private import private_folder
from scanloom.io.session import read_session
from scanloom.io.tables import write_json
from scanloom.io.walk import check_paths
from scanloom.io.whole import check_replaceable
from scanloom.review.report.page import write_report

logger = logging.getLogger(__name__)

NO_CLUSTER, LOCAL = "none", "local"
HERE = ("local", NO_CLUSTER)
"""Clusters whose energy this machine's counters count."""

OF_ALL = (Reason.DISK_FULL, Reason.KEY_MISMATCH, Reason.MODEL_CHANGED)
"""What ends a run, since it is no single case's."""


@dataclass(frozen=True)
class RunOptions:
    """How a run is done, beside its workflow.

    Parameters
    ----------
    out : Path
        The output folder.
    key : Path or None
        The file with the key of the ids; None for SCANLOOM_KEY or the user's own.
    cluster : str
        "local" (Dask on this machine), "none" (without Dask), "slurm", "ssh:HOSTS",
        "kubernetes", or the address or scheduler file of a cluster that is there.
    scope : Scope
        Which cases.
    take_over : bool
        Whether the lock of another host is taken.
    metrics : Path or None
        A file that is kept up to date for Prometheus.
    price : float or None
        Of an hour of a worker with its device, for an estimate of the cost.
    bids : bool
        Also a BIDS derivative, `OUT/bids`.
    archives : bool
        Whether archives in folders are looked into, not only those that are named.
    """

    out: Path
    key: Path | None = None
    cluster: str = "local"
    scope: Scope = field(default_factory=Scope)
    take_over: bool = False
    metrics: Path | None = None
    price: float | None = None
    bids: bool = False
    archives: bool = False


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Parameters
    ----------
    run : str
        Its id; its folder is `OUT/runs/<run id>`.
    status : Status
        The last word.
    files : dict
        Files found, used, skipped, ambiguous, failed.
    complete : bool
        Whether every case was worked on.
    totals : dict
        What `totals.json` of the run holds.
    compared : dict or None
        What was planned beside what happened, as `scanloom.engine.history.conclude` gives it.
    damaged : tuple of str
        Published cases that can't be read, and are missing from tables and report.
    """

    run: str
    status: Status
    files: dict[str, int]
    complete: bool
    totals: dict[str, Any]
    compared: dict[str, Any] | None = None
    damaged: tuple[str, ...] = ()

    @property
    def any_failed(self) -> bool:
        """Whether a file, a series or a case failed, or a published case is damaged.

        What waits for a choice did not fail.
        """
        return bool(self.status.failed or self.files["failed"] or self.damaged)


@dataclass
class _Books:
    """What became of the cases of this run and of those before it, by series."""

    series: dict[str, tuple[str, ...]] = field(default_factory=dict)
    endings: dict[str, list[Ending]] = field(default_factory=dict)

    def note(self, case_id: str, ending: Ending) -> None:
        for series in self.series[case_id]:
            self.endings.setdefault(series, []).append(ending)


def run(
    workflow: Workflow,
    paths: Sequence[Path],
    options: RunOptions,
    *,
    stop: threading.Event | None = None,
    on_board: Callable[[Board], AbstractContextManager[None]] | None = None,
) -> RunResult:
    """Run a workflow over an archive, or go on with a run that was stopped.

    Parameters
    ----------
    workflow : Workflow
        What to do.
    paths : sequence of Path
        Where the scans are.
    options : RunOptions
        How.
    stop : threading.Event or None
        Set it to end the run in good order.
    on_board : callable or None
        Gets the board of the run, for showing it; entered while the run goes on.

    Raises
    ------
    ScanError
        For what concerns all: models, paths, key, output folder, lock, cluster, a full disk.
    """
    stop = stop or threading.Event()
    cards = _check(workflow, paths, options)
    key = load_key(options.key)
    fingerprint = key_fingerprint(key)
    claim_out(options.out, fingerprint)
    shard = "{}-of-{}".format(*options.scope.shard) if options.scope.shard else ""
    with hold_lock(options.out, shard=shard, take_over=options.take_over):
        with output_border():
            name = new_run(options.out, workflow, cards)
        board = Board(name, options.out / RUNS / name, metrics=options.metrics)
        meter = Meter() if options.cluster in HERE else None
        shown = on_board(board) if on_board else _nothing()
        with closing(board), shown, output_border():
            made = _Run(workflow, options, cards, key, name, board)
            complete, files = made.go(paths, stop)
            state = "done" if complete else "stopped"
            joules = meter.joules() if meter else None
            status = replace(board.now(), state=state)
            totals = write_totals(options.out, status, joules=joules, price=options.price)
            if options.bids:
                write_bids(options.out, metadata.version("scanloom"), made.damaged)
            write_report(options.out, made.damaged)
            board.state(state)
        damaged = tuple(sorted(made.damaged))
        return RunResult(name, status, files, complete, totals, made.compared, damaged)


def _check(workflow: Workflow, paths: Sequence[Path], options: RunOptions) -> tuple[ModelCard, ...]:
    """Return the cards of a run's models; what can't be is refused before anything is made."""
    cards = unique_cards([find_model(name) for name in workflow.models])
    check_structures(cards, workflow.outputs.outputs())
    check_channels(workflow, cards)
    check_paths(paths, options.out)
    if options.bids:
        check_bids(options.out)
    if options.metrics is not None:
        check_replaceable(options.metrics, "the file of --metrics")
    if options.cluster not in HERE:
        from scanloom.engine.clusters import check_cluster

        check_cluster(options.cluster, workflow.execution)
    return cards


class _Run:
    def __init__(
        self,
        workflow: Workflow,
        options: RunOptions,
        cards: Sequence[ModelCard],
        key: bytes,
        name: str,
        board: Board,
    ) -> None:
        self.workflow, self.options, self.cards = workflow, options, cards
        self.key, self.name, self.board = key, name, board
        self.out, self.fingerprint = options.out.absolute(), key_fingerprint(key)
        self.books = _Books()
        self.elsewhere: list[tuple[tuple[str, ...], Case]] = []
        self.course = Course(time.monotonic())
        self.compared: dict[str, Any] | None = None
        self.damaged: set[str] = set()

    @read_session()
    def go(self, paths: Sequence[Path], stop: threading.Event) -> tuple[bool, dict[str, int]]:
        """Do the whole run; return whether it was completed, and the count of files."""
        index = build_index(paths, self.key, self.out, archives=self.options.archives)
        chosen, left = select(index.series, self.workflow, self.cards)
        cases = list(self._cases(index, chosen, left))
        once, taken = first_of_each(cases, self.key)
        left += leave_out(taken, index.series)
        todo, before = self._todo(once)
        self._remember_sources(cases, {case.id for case in todo})
        keep_workflow(self._private(), self.workflow)
        book = CaseBook.write(self._private() / "cases.jsonl", todo)
        unread = [self._unread(one) for one in left if self._failed(one)]
        self.board.plan(len(once) + len(unread), before)
        self._note_unread(unread)
        complete = True
        if todo and not stop.is_set():
            self.course.began = time.monotonic()
            with self._pool(book) as pool:
                complete = pump(
                    todo,
                    pool,
                    self._ended,
                    on_start=lambda case: self.board.start(case.id),
                    stop=stop,
                )
        self.board.state("collecting")
        if self.options.cluster in (LOCAL, NO_CLUSTER) and todo:
            self._conclude(todo[0].recipe)
        own = self.out / RUNS / self.name if self.options.scope.shard else None
        ids = (one.id for one in index.series if self.options.scope.holds(one.id))
        remember_series(self.out, self.fingerprint, index, ids)
        held = [one for one in index.series if self.options.scope.holds(one.id)]
        recipe = workflow_recipe(self.workflow, self.cards)
        Marker(self.out, self.key, recipe).mark(index, held, left, {case.id for case in once})
        self._note_elsewhere()
        ends = self.books.endings
        files = collect(self.out, index, left, ends, self.key, own, self.damaged)
        return complete and not stop.is_set(), files

    def _cases(self, index: Index, chosen: Sequence[Inputs], left: list[LeftOut]) -> Iterator[Case]:
        made = make_cases(index, chosen, self.workflow, self.cards, self.key, left)
        folders = case_folders(self.out)
        for inputs, found in made:
            case = replace(found, folder=folders.get(found.id, ""))
            series = tuple(one.id for one in inputs)
            if self.options.scope.holds(case.id):
                self.books.series[case.id] = series
                yield case
            else:
                light = replace(case, series=replace(case.series, files=()), others=())
                self.elsewhere.append((series, light))

    def _todo(self, cases: Sequence[Case]) -> tuple[list[Case], int]:
        """Return what is to be done, and how many cases need nothing."""
        todo: list[Case] = []
        before = 0
        for case in cases:
            end = self.options.scope.before(self.out, case)
            if end is None:
                todo.append(case)
            elif end.reason in OF_RESULTS:
                self._finish(end)
            else:
                before += 1
                code = end.reason.code if end.reason else ""
                self.books.note(case.id, Ending(code, end.detail, 0.0))
                if end.reason is None:
                    forget_failure(self.out, case.id)  # a run may have died just before this
        return todo, before

    def _failed(self, one: LeftOut) -> bool:
        """Whether a series of this run's part has no result by its headers alone, and might."""
        return one.reason.wanted and self.options.scope.holds(one.series.id)

    def _unread(self, one: LeftOut) -> CaseRecord:
        return CaseRecord(one.series.id, one.reason, one.detail, (), None)

    def _note_unread(self, unread: Sequence[CaseRecord]) -> None:
        """Write down which series failed by their headers."""
        recipe = workflow_recipe(self.workflow, self.cards)
        for record in unread:
            self.board.finish(record)
            if record.id:
                write_failure(self.out, record, recipe)

    def _note_elsewhere(self) -> None:
        """Take in what has become of the cases of other shards by now."""
        for series, case in self.elsewhere:
            end = self.options.scope.before(self.out, case)
            if end is not None:
                self.books.series[case.id] = series
                code = end.reason.code if end.reason else ""
                self.books.note(case.id, Ending(code, end.detail, 0.0))

    @contextmanager
    def _pool(self, book: CaseBook) -> Iterator[Pool]:
        execution = self.workflow.execution
        digests = tuple(card_digest(card) for card in self.cards)
        setup = Setup(
            Place(self.out, self.fingerprint, self.options.scope.replace, self.key),
            partial(load_predictors, self.workflow.models, digests, execution),
            in_flight=execution.in_flight,
            memory_limit=execution.memory_limit,
            neighbours=max(1, len(local_devices(execution))) if self._is_local() else 1,
        )
        logs = self._private()
        if self.options.cluster == NO_CLUSTER:
            engine = Engine(setup, execution.time_limit, log=logs / "engine.log")
            pool = LocalPool([engine], execution.in_flight)
            try:
                yield pool
            finally:
                pool.stop(5.0)
            return
        from scanloom.engine.clusters import Job, open_pool

        job = Job(self.out, logs, book, setup, digests, self.board.send_away)
        with open_pool(self.options.cluster, self.workflow, job) as made:
            yield made

    def _ended(self, case: Case, outcome: Outcome) -> None:
        record = outcome.record
        if record is None:
            return  # cut off: it is as if it had not been started
        self.course.note(outcome)
        self._log(case, outcome)
        if record.reason in OF_ALL:
            raise ScanError(record.reason, record.detail)
        if record.reason is None:
            forget_failure(self.out, record.id)
        elif is_failure(record):
            write_failure(self.out, record, case.recipe, case.stamp)
        self._finish(record)

    def _is_local(self) -> bool:
        return self.options.cluster == LOCAL

    def _conclude(self, recipe: str) -> None:
        """Learn what cases take on this machine; keep how it went beside its plan."""
        self.compared = conclude(self.out, self.course, self.workflow, self.cards, recipe)
        if self.compared is not None:
            told = {"schema": 1, **self.compared}
            write_json(self.out / RUNS / self.name / PLAN, told)

    def _finish(self, record: CaseRecord) -> None:
        code = record.reason.code if record.reason else ""
        self.books.note(record.id, Ending(code, record.detail, record.seconds))
        self.board.finish(record)

    def _log(self, case: Case, outcome: Outcome) -> None:
        record = outcome.record
        line = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "case": case.id,
            "reason": record.reason.code if record and record.reason else None,
            "recalled": bool(record and record.recalled),
            "remade": bool(record and record.remade),
            "tries": [
                {"end": t.end, "alone": t.alone, "seconds": round(t.seconds, 3)}
                for t in outcome.tries
            ],
            "device": [round(t, 4) for t in outcome.device] if outcome.device else None,
            "engine": outcome.engine,
        }
        with (self.out / RUNS / self.name / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _private(self) -> Path:
        """Return the part of `OUT/private/` that is this run's."""
        with private_folder(self.out, self.fingerprint) as private:
            folder = private / RUNS / self.name
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder

    def _remember_sources(self, cases: Sequence[Case], todo: set[str]) -> None:
        """Add the cases that are new, or are worked on, to the crosswalk, all at once."""
        known = known_ids(self.out) - todo
        new = [source_of(case.series, case.id) for case in cases if case.id not in known]
        if new:
            with private_folder(self.out, self.fingerprint) as private:
                add_sources(private, new)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
