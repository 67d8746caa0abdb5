"""Segment the studies of a spool as they become whole, by the steps of a run.

A `Lane` for each workflow of the rules keeps its networks loaded. A study goes through what a run
does with an archive: index, selection, cases that have no current result, workers, marks. Its state
in the queue is "begun" from then on, until each of its cases has a result or a reason: a process
that is killed leaves it there, and the next one begins it again.

Logs have counts, case ids and hashes of studies, no UID.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from scanloom.core import (
    Case,
    CaseRecord,
    Flag,
    Reason,
    ScanError,
    counted,
    did_you_mean,
    printable,
)
from scanloom.core.paths import shipped_workflows
from scanloom.engine import run_files
from scanloom.engine.listen.nodes import check_installed, make_finder
from scanloom.engine.listen.outbox import NOT_SENT
from scanloom.engine.listen.site import Ask, Rule, Site
from scanloom.engine.listen.spool import last_arrival
from scanloom.engine.listen.studies import (
    QUEUE,
    Images,
    Outcome,
    Queue,
    StudyState,
    Waiting,
    WaitingStudies,
    survey,
)
from scanloom.engine.monitor import StatusWriter, final_status
from scanloom.engine.prepare import Request
from scanloom.engine.results.run_cases import RunCases
from scanloom.engine.run import RunOptions, RunSteps
from scanloom.engine.worker.messages import CaseFile
from scanloom.engine.worker.pool import dispatch_cases
from scanloom.engine.worker.supervisor import CaseOutcome
from scanloom.engine.workflow.schema import read_workflow
from scanloom.engine.workflow.selection import check_channels, criteria_of, mismatch
from scanloom.io.identity import key_fingerprint, study_id
from scanloom.io.index.build import Index, index_of
from scanloom.io.output.audit import AuditTrail
from scanloom.io.output.layout import case_folder, fan_out
from scanloom.io.output.private import load_key_of
from scanloom.io.output.work_folder import open_output
from scanloom.io.session import read_session
from scanloom.io.system.disk_errors import disk_errors_as_scan_errors

LOG = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks at the journal."""
ASK_AGAIN_S = 30.0
"""Between two questions to the sender of a study; `quiet` if that is shorter."""
EXPECTED_CASES = 1000
"""Cases of a lane, by which it is judged whether an engine pays: it runs for months."""
MAX_IN_WORK = 32
"""Studies in work, whose indices are in memory; more of them wait."""
RETRY_PAUSES_S = (60.0, 600.0, 3600.0)
"""Before each further attempt at a study that failed for a reason that may pass."""
SUSPECT, MAX_ATTEMPTS = 3, 8
"""Attempts that no process survived, after which a study is worked on alone, and not any more."""
TABLES_PAUSE_S = 60.0
"""Longest time without tables while studies keep coming; ten times what they take if longer."""
TABLES_LONG_S = 3600.0
"""A process that writes tables for so long is named: it may be stopped, or hang."""
_NO_STUDYS_FAULT = frozenset(
    {*(reason for reason in Reason if reason.subject == "run"), Reason.OUTPUT_UNWRITABLE}
)
"""Reasons for which a worker ends: such as a full disk, which would else use up the attempts."""
DRAIN_S = 6.0
"""For cases in work when the end is requested; they begin anew the next time."""

Published = Callable[[Path, Sequence[str], float], None]
"""Receives the folder of a published case, the targets of its rule, and a time before its scan was
read, in seconds since 1970; perhaps several times."""


def read_requests(site: Site) -> dict[str, Request]:
    """Return the request of each workflow that the rules name, by its file.

    Raises
    ------
    ScanError
        SITE if there is no such workflow; WORKFLOW, or why a model can't be used; with its path.
    """
    requests = {}
    for path in dict.fromkeys(rule.workflow for rule in site.rules):
        if not Path(path).exists():
            name = Path(path).name
            known = did_you_mean(name, list(shipped_workflows()))
            raise ScanError(Reason.SITE, f"`workflow` of a rule: no file {name!r}; {known}", path)
        try:
            request = Request.of(read_workflow(Path(path)))
            check_channels(request.workflow, request.cards)
        except ScanError as error:
            raise error.about(path) from None
        requests[path] = request
    return requests


class Lane:
    """The workers of a workflow, with its networks loaded, from its making until it is closed.

    Parameters
    ----------
    request, options, key
        As of a run.
    on_outcome : callable
        Is called in the lane's thread with the lane, a case and its outcome.
    """

    def __init__(
        self,
        request: Request,
        options: RunOptions,
        key: bytes,
        on_outcome: Callable[[Lane, Case, CaseOutcome], None],
    ) -> None:
        self.request, self.fault, self._on_outcome = request, Future[None](), on_outcome
        with disk_errors_as_scan_errors():
            name = run_files.create_run_folder(
                options.out, request.workflow, request.cards, request.recipe
            )
            self.status = StatusWriter(name, options.out / run_files.RUNS / name)
            self.steps = RunSteps(request, options, key, name, self.status)
            private = self.steps.save_workflow()
            self._cases = CaseFile(private / run_files.CASES_FILE, EXPECTED_CASES)
        self._stop, self._open = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="lane", daemon=True)
        self._thread.start()
        while not self._open.wait(0.1):  # one after another: Dask's settings are the process's
            self.check()
        self.status.state("running")

    def check(self) -> None:
        """Raise why the lane has ended by itself, if it has."""
        if self.fault.done():
            self.fault.result()

    def submit(self, cases: Sequence[Case]) -> None:
        """Hand cases to the workers; OSError if they can't be written."""
        for case in cases:
            self._cases.append(case)

    def close(self) -> None:
        """Let the cases in flight end, for a few seconds."""
        self._stop.set()
        self._thread.join()

    def _serve(self) -> None:
        try:
            with final_status(self.status), self.steps.workers(self._cases) as pool:
                self._open.set()
                while not self._stop.is_set():
                    if self._cases.wait(LOOK_S):
                        dispatch_cases(
                            self._cases,
                            pool,
                            self._end,
                            on_start=lambda case: self.status.start(case.id),
                            stop=self._stop,
                            drain=DRAIN_S,
                        )
                self.status.state("stopped")
        except BaseException as error:  # noqa: BLE001  # raised by `check`, in the main thread
            self.fault.set_exception(error)

    def _end(self, case: Case, outcome: CaseOutcome) -> None:
        if outcome.record is not None:  # first: after that the case may come again
            self._cases.remove(case.id)
        self._on_outcome(self, case, outcome)


@dataclass
class StudyInWork:
    """A study whose cases are with the workers.

    Parameters
    ----------
    study, label : str
        Its UID, and a hash for the log.
    open : set of str
        Ids of the cases without an outcome yet.
    failed : dict of str to Reason
        Cases and series without a result, by id.
    read : float
        Before its files were read, seconds since 1970.
    """

    study: str
    label: str
    state: StudyState
    lane: Lane
    rule: Rule
    index: Index
    cases: RunCases
    open: set[str]
    failed: dict[str, Reason]
    read: float
    began: float = field(default_factory=time.monotonic)


class Worker:
    """Works on the studies of a spool, until it is closed; a context manager, which holds OUT.

    Parameters
    ----------
    key : Path or None
        As of a run.
    published : callable
        Is called with each published case of a rule, also after a restart: `send` of the rule says
        what for. RESULT_DAMAGED or UNREADABLE if it can't be sent as it is.
    write_tables : callable
        Starts a process that writes tables and report; it receives the run folders.

    Raises
    ------
    ScanError
        As of a run: because of the models, the key, the output folder, its lock or the cluster.
    """

    def __init__(
        self,
        site: Site,
        spool: Path,
        out: Path,
        key: Path | None,
        published: Published,
        write_tables: Callable[[Sequence[str]], subprocess.Popen[bytes]],
    ) -> None:
        self._site, self._spool, self._out = site, spool, out
        self._published, self._start_tables = published, write_tables
        self._requests = read_requests(site)
        for peer in site.peers:  # what the page names has to be there
            if peer.ask is not None:
                check_installed(peer.ask)
                make_finder(site.title, peer.ask)
        self._options = RunOptions(out, key, site.cluster, spool=spool)
        self._key = load_key_of(out, key)
        self._stack = ExitStack()
        self._lanes: dict[str, Lane] = {}
        self._queue = Queue(spool)
        self._rules = site.rules_digest
        self._lock = threading.RLock()
        self._begun: dict[str, StudyState] = {}
        self._in_work: dict[str, StudyInWork] = {}
        self._by_case: dict[str, StudyInWork] = {}
        self._answers: dict[str, tuple[Images, float, Future[frozenset[str] | None]]] = {}
        self._tables: subprocess.Popen[bytes] | None = None
        self._tables_due = any((spool / QUEUE).glob("*.json"))
        self._tables_failed, self._tables_began, self._tables_pause = False, 0.0, 0.0
        self._tables_late = False
        self._again: list[tuple[str, float]] = []
        self._suspect_waits = False

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            open_output(self._out, key_fingerprint(self._key))
            stack.enter_context(run_files.hold_run_lock(self._out))
            with disk_errors_as_scan_errors():
                fan_out(self._out, 0)
            for path, request in self._requests.items():
                lane = Lane(request, self._options, self._key, self._on_outcome)
                stack.callback(lane.close)
                self._lanes[path] = lane
            self._askers = ThreadPoolExecutor(4, "ask")
            stack.callback(self._askers.shutdown, wait=False, cancel_futures=True)
            self.waiting = WaitingStudies(self._spool, self._queue, self._rules)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._stack.close()
        if error is None or (isinstance(error, ScanError) and error.reason in _NO_STUDYS_FAULT):
            self._give_back()
        if self._tables is not None:
            self._tables.wait()
        if self._tables_due and error is None:
            self._write_tables().wait()

    def _give_back(self) -> None:
        """Take back the attempts at the studies that are in work: it is not they who ended it."""
        for study, state in self._begun.items():
            with suppress(OSError):
                self._queue.write(study, replace(state, attempts=state.attempts - 1))

    @property
    def is_idle(self) -> bool:
        """Whether no study is in work."""
        return not self._in_work

    def step(self, sign: Callable[[], None] = lambda: None) -> None:
        """Begin the studies that are whole; to be called again and again.

        Parameters
        ----------
        sign : callable
            Is called before each study that is looked at, as a sign of life.

        Raises
        ------
        ScanError
            If no study can be worked on, such as without room on the disk.
        """
        sign()
        for lane in self._lanes.values():
            lane.check()
        with disk_errors_as_scan_errors():
            with self._lock:
                while self._again:
                    self.waiting.again(*self._again.pop())
            self.waiting.look()
            self._suspect_waits = False
            for study, waiting in self.waiting.in_order():
                sign()
                with self._lock:
                    alone = any(w.state.attempts >= SUSPECT for w in self._in_work.values())
                    if alone or self._suspect_waits or len(self._in_work) >= MAX_IN_WORK:
                        break
                    if study in self._in_work:
                        continue
                try:
                    self._look_at(study, waiting)
                except FileNotFoundError:  # cleared from the spool just now
                    if self.waiting.folder(study).is_dir():
                        raise
                    self.waiting.by_study.pop(study, None)
            self._keep_tables()

    # --- when a study is whole --------------------------------------------------------------------

    def _look_at(self, study: str, waiting: Waiting) -> None:
        """Begin a study if it is whole, or has waited for too long."""
        now, site = time.monotonic(), self._site
        is_quiet = now - waiting.last >= site.quiet
        is_overdue = now - waiting.first >= site.longest_wait
        if not (is_quiet or is_overdue):
            return
        images = waiting.images
        if images is None:
            waiting.seen = last_arrival(self.waiting.folder(study))
            images = waiting.images = survey(self.waiting.folder(study))
        state = self._queue.read(study)
        was_cleared = state is not None and state.cleared
        if not images.digest:
            self._leave(study, StudyState("", waiting.seen, "no image", cleared=was_cleared))
        elif state is not None and state.images == images.digest and state.is_over(self._rules):
            self._leave(study, replace(state, seen=waiting.seen))  # what came is no image
        elif not is_quiet:
            self._begin(study, waiting, images, None)
        elif (answer := self._answer(study, images, is_overdue=is_overdue)) is not None:
            short = answer.result()
            if short is not None and not short:
                self._begin(study, waiting, images, frozenset())
            elif is_overdue:
                self._begin(study, waiting, images, short)
            else:
                waiting.not_before = now + min(ASK_AGAIN_S, site.quiet)

    def _answer(
        self, study: str, images: Images, *, is_overdue: bool
    ) -> Future[frozenset[str] | None] | None:
        """Return which series its senders have more of, in a future that is done; None for later.

        Its result is None if a sender does not say, or not in time for a study that is overdue.
        """
        asks = self._asks(images)
        known = Future[frozenset[str] | None]()
        if not asks:
            known.set_result(frozenset())
            return known
        of_images, since, answer = self._answers.get(study, (None, 0.0, known))
        if of_images is not images:
            since, answer = time.monotonic(), self._askers.submit(self._ask, study, images, asks)
            self._answers[study] = images, since, answer
        if not answer.done():
            if not is_overdue or time.monotonic() - since < ASK_AGAIN_S:
                return None
            answer.cancel()  # others are asked first, or it gives its answer piece by piece
            answer = known
            answer.set_result(None)
        del self._answers[study]
        return answer

    def _asks(self, images: Images) -> list[Ask]:
        """Return the query services of a study's senders."""
        titles = set(images.senders)
        return [peer.ask for peer in self._site.peers if peer.ask and peer.title in titles]

    def _ask(self, study: str, images: Images, asks: Sequence[Ask]) -> frozenset[str] | None:
        from scanloom.io.network.peer import PeerError

        short: frozenset[str] = frozenset()
        for ask in asks:
            name = "the query service" if ask.title is None else printable(ask.title)
            try:
                with make_finder(self._site.title, ask) as finder:
                    sent = finder.find_series(study)
            except (PeerError, ScanError) as error:
                why = error.detail if isinstance(error, ScanError) else error.reason
                LOG.warning("%s can't be asked: %s", name, why)
                return None
            lacking = images.short_of(sent, received_only=ask.series == "received")
            if lacking is None:
                LOG.warning("%s does not say how many images a study has", name)
                return None
            short |= lacking
        return short

    def _leave(self, study: str, state: StudyState) -> None:
        """Take a study off the queue without work."""
        self._queue.write(study, state)
        self._begun.pop(study, None)
        del self.waiting.by_study[study]

    # --- work on a study --------------------------------------------------------------------------

    @read_session()
    def _begin(
        self, study: str, waiting: Waiting, images: Images, short: frozenset[str] | None
    ) -> None:
        """Hand the cases of a study to the workers; of the series that are short, with a flag.

        All are, if it is not known which.
        """
        label, before, attempts = study_id(study, self._key)[:8], self._queue.read(study), 1
        if before is not None and before.images == images.digest and before.outcome == "begun":
            attempts = before.attempts + 1
        was_cleared = before is not None and before.cleared
        if attempts >= SUSPECT and self._in_work:
            self._suspect_waits = True  # alone, when those in work have ended
            return
        if attempts > MAX_ATTEMPTS:
            LOG.error("study %s: no process survived it %d times", label, MAX_ATTEMPTS)
            code = Reason.WORKER_LOST.code
            lost = StudyState(images.digest, waiting.seen, "failed", code, cleared=was_cleared)
            self._leave(study, lost)
            return
        state = StudyState(
            images.digest, waiting.seen, "begun", attempts=attempts, cleared=was_cleared
        )
        self._queue.write(study, state)
        self._begun[study] = state
        if was_cleared and not self._asks(images):
            short = None  # the rest of it may be what was removed
        count = counted(sum(images.counts.values()), "image")
        received = f"{count} from {', '.join(map(printable, images.senders)) or 'no title'}"
        read = time.time()
        try:
            index = index_of([self.waiting.folder(study)], self._key)
            rule = self._rule_of(index, images)
            if rule is None:
                LOG.info("study %s: %s, no rule fits", label, received)
                self._leave(study, replace(state, outcome="no rule", rules=self._rules))
                return
            lane = self._lanes[rule.workflow]
            scope = self._options.scope
            cases = RunCases(index, lane.request, self._key, self._out, scope)
            cases.compare()
        except ScanError as error:
            if error.reason.subject == "run":  # every other study would end so
                raise
            pause = _pause_after(attempts) if error.reason.retry else None
            outcome: Outcome = "failed" if pause is None else "begun"
            detail = f"{error.detail}{_later(pause)}"
            LOG.warning("study %s: failed (%s): %s", label, error.code, detail)
            self._leave(study, replace(state, outcome=outcome, reason=error.code))
            if pause is not None:
                self.waiting.again(study, pause)
            return
        flagged = (Flag.MAYBE_INCOMPLETE,)
        pending = [
            replace(case, flags=flagged)
            if short is None or case.series.series_uid in short
            else case
            for case in cases.pending
        ]
        doubt = "" if short is not None and not short else ", maybe incomplete"
        count = counted(len(pending), "case")
        name = lane.request.workflow.name
        LOG.info("study %s: %s, %s to segment by %s%s", label, received, count, name, doubt)
        failed = {entry.id: Reason[entry.code] for entry in cases.left_out if entry.is_failure}
        ids = {case.id for case in pending}
        work = StudyInWork(study, label, state, lane, rule, index, cases, ids, failed, read)
        images_of = {"images": sum(images.counts.values()), "senders": sorted(images.senders)}
        audit = AuditTrail(self._out, self._key)
        audit.append("received", {"study": study_id(study, self._key), **images_of})
        lane.steps.enter(cases)
        for record in cases.records:
            self._note(work, record)
        del self.waiting.by_study[study]
        with self._lock:
            self._in_work[study] = work
            self._by_case |= dict.fromkeys(ids, work)
        if pending:
            lane.submit(pending)
        else:
            self._finish(work)

    def _rule_of(self, index: Index, images: Images) -> Rule | None:
        """Return the first rule that fits a study."""
        slices = [series.info for series in index.series if series.slices]
        for rule in self._site.rules:
            policy = self._lanes[rule.workflow].request.workflow.policy
            criteria = criteria_of(rule.select, policy)
            is_sender = not rule.senders or not set(rule.senders).isdisjoint(images.senders)
            if is_sender and any(mismatch(info, criteria) is None for info in slices):
                return rule
        return None

    def _on_outcome(self, lane: Lane, case: Case, outcome: CaseOutcome) -> None:
        """Note the outcome of a case, in the thread of its lane; finish its study if it is last."""
        work = self._by_case[case.id]
        record = lane.steps.end_case(case, outcome, work.cases)
        if record is None:
            return
        self._note(work, record)
        with self._lock:
            del self._by_case[case.id]
            work.open.discard(case.id)
        if not work.open:
            self._finish(work)

    def _note(self, work: StudyInWork, record: CaseRecord) -> None:
        if record.reason is not None:
            work.failed[record.id] = record.reason
            LOG.warning("case %s: %s: %s", record.id, record.reason.code, record.detail)
        elif record.folder is not None:
            if not record.reused and record.seconds:
                LOG.info("case %s: published after %.1f s of work", record.id, record.seconds)
            folder = case_folder(self._out, record.folder.name)
            if work.rule.send and self._has_changed(work):
                LOG.info("case %s: not sent, since images came meanwhile", record.id)
                return
            try:
                self._published(folder, work.rule.send, work.read)
            except ScanError as error:
                if error.reason not in NOT_SENT:  # any other case would end so
                    raise
                work.failed[record.id] = error.reason
                LOG.warning("case %s: %s (%s)", record.id, error.detail, error.code)

    def _has_changed(self, work: StudyInWork) -> bool:
        """Return whether images came since those were read: it is worked on again then.

        Its result may name a patient that has been corrected.
        """
        folder, state = self.waiting.folder(work.study), work.state
        try:
            return last_arrival(folder) != state.seen and survey(folder).digest != state.images
        except FileNotFoundError:  # cleared
            return False

    def _finish(self, work: StudyInWork) -> None:
        """Take a study off the queue: each of its cases has a result or a reason."""
        work.lane.steps.leave(work.index, work.cases)
        reason = next(iter(work.failed.values()), None)
        pause = None
        if any(reason.retry for reason in work.failed.values()):
            pause = _pause_after(work.state.attempts)
        state = replace(
            work.state,
            outcome="begun" if pause is not None else "done" if reason is None else "failed",
            reason="" if reason is None else reason.code,
            workflow=work.rule.workflow,
        )
        self._queue.write(work.study, state)
        ended = "done" if reason is None else f"failed ({reason.code})"
        took = f"in {time.monotonic() - work.began:.1f} s{_later(pause)}"
        LOG.info("study %s: %s %s", work.label, ended, took)
        with self._lock:
            del self._in_work[work.study], self._begun[work.study]
            self._tables_due = True
            if pause is not None:
                self._again.append((work.study, pause))

    # --- tables -----------------------------------------------------------------------------------

    def _keep_tables(self) -> None:
        """Have tables and report written while nothing else is to do, or once in a while."""
        now = time.monotonic()
        if self._tables is not None:
            if self._tables.poll() is None:
                if now - self._tables_began > TABLES_LONG_S and not self._tables_late:
                    self._tables_late = True
                    number = self._tables.pid
                    LOG.warning("tables are not written for an hour: kill -9 %d ends it", number)
                return
            self._tables_failed = self._tables.returncode != 0
            if self._tables_failed:
                LOG.warning("tables were not written; this is tried again")
                self._tables_due = True
            took, self._tables = now - self._tables_began, None
            self._tables_pause = max(TABLES_PAUSE_S, 10 * took)
        waits = now - self._tables_began < self._tables_pause
        if self._tables_due and (not waits or (not self._in_work and not self._tables_failed)):
            self._write_tables()

    def _write_tables(self) -> subprocess.Popen[bytes]:
        self._tables_due, self._tables_began = False, time.monotonic()
        self._tables_late = False
        self._tables = self._start_tables([lane.steps.name for lane in self._lanes.values()])
        return self._tables


def _pause_after(attempts: int) -> float | None:
    """Return the pause before the next attempt; None if there is none."""
    return next(iter(RETRY_PAUSES_S[attempts - 1 :]), None)


def _later(pause: float | None) -> str:
    return "" if pause is None else f", tried again in {pause:.0f} s"
