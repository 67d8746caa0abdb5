"""`fetch`: ask a source of the site for studies, and keep what it gives as the spool keeps it.

    OUT/private/fetched/          a spool: see `scanloom.engine.listen.spool`
      studies/<study>/<series>/<SOPInstanceUID>.dcm
      fetched.csv                 what became of each row, of the last call

What is there is not asked for again: a call that was killed is given again. A series is whole if
all instances are there that the source lists, and as many as it says. Only such ones are handed on.

Logs have numbers of rows and counts, no UID.
"""

from __future__ import annotations

import csv
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from scanloom.core import Reason, ScanError, counted
from scanloom.engine.listen.nodes import check_installed, dicom_address, make_finder, web_address
from scanloom.engine.listen.rows import COLUMNS, FetchRow, Question, several_patients
from scanloom.engine.listen.site import Site, Source
from scanloom.engine.listen.spool import STUDIES, SUFFIX, IncomingFile, Spool
from scanloom.io.dicom.header.header import pydicom_muted
from scanloom.io.dicom.instance import Instance
from scanloom.io.dicom.uids import is_uid
from scanloom.io.identity import key_fingerprint, study_id
from scanloom.io.output.audit import AuditTrail
from scanloom.io.output.measurements import escape_formula
from scanloom.io.output.private import PRIVATE, load_key_of, private_folder, write_private
from scanloom.io.output.work_folder import open_output
from scanloom.io.system.disk_errors import disk_errors_as_scan_errors, output_error
from scanloom.own_python import make_private_folder

if TYPE_CHECKING:
    from scanloom.io.network.receiver import Receiver
    from scanloom.io.network.source import Finder, Pulse, SeriesRequest, StudyFound

LOG = logging.getLogger(__name__)
T = TypeVar("T")

FETCHED, TABLE = "fetched", "fetched.csv"
ATTEMPTS = 3
"""At a row or a series while the source does not answer."""
MAX_AWAY = 3
"""Rows in a row for which the source was away, after which it is asked no more."""
LATE_S = 10.0
"""How long after its last answer to C-MOVE a source may still send."""
LOOK_S = 0.5
SYNC_INTERVAL_S = 1.0
"""Between two flushes of the journal."""


@dataclass(frozen=True)
class StudyFetched:
    """The outcome of a study of a row, or of a row without one.

    Parameters
    ----------
    study : str
        StudyInstanceUID, or "".
    series : tuple of Path
        Folders of the series that are whole.
    instances, new : int
        That the source has of what is wanted, and that came now.
    reason : Reason or None
        Why it is not whole.
    """

    row: FetchRow
    study: str = ""
    series: tuple[Path, ...] = ()
    instances: int = 0
    new: int = 0
    reason: Reason | None = None
    detail: str = ""


@dataclass(frozen=True)
class Fetched:
    """The outcomes of all rows.

    Parameters
    ----------
    studies : tuple of StudyFetched
        By the numbers of their rows.
    """

    folder: Path
    rows: int
    studies: tuple[StudyFetched, ...]

    @property
    def failed(self) -> tuple[StudyFetched, ...]:
        """Those that have a reason."""
        return tuple(each for each in self.studies if each.reason is not None)

    @property
    def series(self) -> list[Path]:
        """Folders of the series that are whole, each once."""
        return list(dict.fromkeys(path for each in self.studies for path in each.series))


Tell = Callable[[str], None]
"""Receives a sentence without UIDs for the one who waits."""


def fetch(
    site: Site,
    source: Source,
    out: Path,
    rows: Sequence[FetchRow] | None,
    question: Question,
    key: Path | None = None,
    tell: Tell = lambda text: None,
) -> Fetched:
    """Fetch what rows name, or what matches a question, as far as it is not there.

    Parameters
    ----------
    out : Path
        The output folder.
    rows : sequence of FetchRow or None
        None for all that matches the question.
    key : Path or None
        As of a run.
    tell : callable

    Raises
    ------
    ScanError
        NOT_INSTALLED; ENVIRONMENT if credentials, certificates or the port for C-MOVE can't be
        used; LOCKED if another process fetches into the folder; SOURCE_AWAY or NOT_FETCHED if the
        question gets no answer; OUTPUT_UNWRITABLE, DISK_FULL; KEY_MISMATCH.
    """
    check_installed(source)
    secret = load_key_of(out, key)
    fingerprint = key_fingerprint(secret)
    open_output(out, fingerprint)
    folder = out / PRIVATE / FETCHED if site.fetched is None else Path(site.fetched)
    with disk_errors_as_scan_errors():
        make_private_folder(out)
        with private_folder(out, fingerprint):
            pass  # claims it for the key, by which the audit trail is chained
        audit = AuditTrail(out, secret)
        with (
            pydicom_muted(),
            Spool(folder, site.changed, site.reserve) as spool,
            _Fetch(site, source, spool, audit, secret, tell) as work,
        ):
            count = None if rows is None else len(rows)
            audit.append("asked", {"source": source.name, "rows": count})
            if rows is None:
                rows = work.ask(question)
            done: list[StudyFetched] = []
            try:
                for studies in work.fetch(rows):
                    done += studies
            finally:
                done.sort(key=lambda each: each.row.number)
                _write_table(folder / TABLE, done)
        return Fetched(folder, len(rows), tuple(done))


def _write_table(path: Path, studies: Sequence[StudyFetched]) -> None:
    """Write what became of each row; it names patients."""

    def write(draft: Path) -> None:
        with draft.open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            outcome = ("study", "series", "instances", "new", "reason", "detail")
            table.writerow(["row", *COLUMNS, *outcome])
            for each in studies:
                of_row = [each.row.cells.get(name, "") for name in COLUMNS]
                counts = [str(len(each.series)), str(each.instances), str(each.new)]
                code = each.reason.code if each.reason else ""
                cells = [*of_row, each.study, *counts, code, each.detail]
                table.writerow([str(each.row.number), *map(escape_formula, cells)])

    write_private(path, write)


# --- limits ---------------------------------------------------------------------------------------


class Pace:
    """Limits how many objects and bytes are taken in a second; used by several threads."""

    def __init__(self, per_second: float | None, bytes_per_second: int | None) -> None:
        self._seconds_each = 1 / per_second if per_second else 0.0
        self._seconds_a_byte = 1 / bytes_per_second if bytes_per_second else 0.0
        self._due, self._lock = 0.0, threading.Lock()

    def wait(self, size: int, end: threading.Event, beat: Callable[[], None]) -> None:
        """Wait until an object of some bytes may be answered; `beat` is called meanwhile."""
        now = time.monotonic()
        with self._lock:
            lasts = max(self._seconds_each, size * self._seconds_a_byte)
            due = self._due = max(now, self._due) + lasts
        while (seconds := due - time.monotonic()) > 0 and not end.is_set():
            beat()
            end.wait(min(seconds, LOOK_S))


def now_of_day() -> int:
    """Return the minutes since midnight, local time."""
    now = time.localtime()
    return now.tm_hour * 60 + now.tm_min


class EndedError(Exception):
    """The end was requested."""


# --- what arrives ---------------------------------------------------------------------------------


class _Intake:
    """Takes the objects of one series that was asked for; see `Store` of `io.network`."""

    def __init__(self, work: _Fetch, study: str, series: str, pulse: Pulse) -> None:
        self._work, self.study, self.series, self.pulse = work, study, series, pulse
        self.error = OSError()
        self.drafts: list[IncomingFile] = []

    def has_room(self) -> bool:
        """Return whether something may be received."""
        return self._work.spool.has_room()

    def draft(self) -> IncomingFile:
        """Begin a data set."""
        draft = self._work.spool.draft(self.pulse.add)
        self.drafts.append(draft)
        return draft

    def keep(self, draft: IncomingFile, instance: Instance, sender: str) -> str:
        """Keep an object of the series; OSError, `UnwantedError`."""
        from scanloom.io.network.data_sets import UnwantedError

        if (instance.study, instance.series) != (self.study, self.series):
            raise UnwantedError
        size = draft.size
        try:
            kept = self._work.spool.keep(draft, instance, sender)
        except OSError as exc:
            self.error = exc
            raise
        self.pulse.beat()
        self._work.pace.wait(size, self._work.end, self.pulse.beat)
        return kept

    def check_disk(self) -> None:
        """Raise why something could not be written: every other object would meet it, too."""
        for error in (self.error, *(draft.error for draft in self.drafts if draft.error)):
            if error.errno not in (None, errno.ECANCELED):
                raise output_error(error, "what came")
        self.drafts.clear()


class _Landing:
    """Hands what a receiver is sent by C-MOVE to the series that was asked for.

    Faults of the disk are told to all of them: the source only says that it could not send.
    """

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self.intakes: dict[tuple[str, str], _Intake] = {}

    def has_room(self) -> bool:
        """Return whether something may be received."""
        has_room = self._spool.has_room()
        for intake in [] if has_room else list(self.intakes.values()):
            intake.error = OSError(errno.ENOSPC, "below the reserve")
        return has_room

    def draft(self) -> IncomingFile:
        """Begin a data set: of which series it is, is not known yet."""
        draft = self._spool.draft(self._heard)
        for intake in list(self.intakes.values()):
            intake.drafts.append(draft)
        return draft

    def _heard(self, count: int) -> None:
        for intake in list(self.intakes.values()):
            intake.pulse.add(count)

    def keep(self, draft: IncomingFile, instance: Instance, sender: str) -> str:
        """Keep an object of a series that was asked for; OSError, `UnwantedError`."""
        from scanloom.io.network.data_sets import UnwantedError

        intake = self.intakes.get((instance.study, instance.series))
        if intake is None:
            raise UnwantedError
        return intake.keep(draft, instance, sender)


# --- the work -------------------------------------------------------------------------------------


@dataclass
class _SeriesState:
    """The instances of a series that its source has, and those that are in the folder.

    Parameters
    ----------
    classes : dict
        The class of each instance that the source lists, by its UID.
    count : int or None
        How many it says that there are.
    """

    folder: Path
    classes: dict[str, str]
    count: int | None
    modality: str
    here: set[str] = field(default_factory=set)

    def look(self) -> None:
        """Take note of what is there."""
        paths = self.folder.glob(f"*{SUFFIX}") if self.folder.is_dir() else ()
        self.here = {path.stem for path in paths}

    @property
    def size(self) -> int:
        """The number of instances that the source has."""
        return max(len(self.classes), self.count or 0)

    @property
    def is_whole(self) -> bool:
        """Whether all is there; never for a source that says nothing."""
        is_known = bool(self.classes) or bool(self.count)
        return is_known and self.classes.keys() <= self.here and len(self.here) >= self.size

    @property
    def missing(self) -> int:
        """The number of missing instances."""
        return max(len(self.classes.keys() - self.here), self.size - len(self.here))


class _Fetch:
    """The work of one call; a context manager, which ends what runs."""

    def __init__(
        self,
        site: Site,
        source: Source,
        spool: Spool,
        audit: AuditTrail,
        key: bytes,
        tell: Tell,
    ) -> None:
        self.site, self.source, self.spool, self._audit = site, source, spool, audit
        self._key, self._tell = key, tell
        self.pace = Pace(source.per_second, source.bytes_per_second)
        self.end = threading.Event()
        self._lock = threading.Lock()
        self._study_locks: dict[str, threading.Lock] = {}
        self._told_hours = False
        self._get_offered = True
        self._receiver: Receiver | None = None
        self._landing = _Landing(spool)
        self._running: set[Any] = set()
        self._pulses: set[Pulse] = set()
        self._away, self._has_answered = 0, False
        if source.url is not None:
            self._web = web_address(source)
        else:
            self._address = dicom_address(site.title, source)

    def __enter__(self) -> _Fetch:
        if self.source.retrieve == "move":
            self._receive()
        return self

    def __exit__(self, *error: object) -> None:
        self.end.set()
        for pulse in list(self._pulses):
            pulse.stop()
        for connection in list(self._running):
            connection.cut()
        if self._receiver is not None:
            self._receiver.stop(1.0)

    def ask(self, question: Question) -> list[FetchRow]:
        """Return a row for each study that may match a question.

        Raises
        ------
        ScanError
            SOURCE_AWAY or NOT_FETCHED.
        """
        from scanloom.io.network.peer import PeerError
        from scanloom.io.network.source import Keys

        self._wait_for_hours()
        keys = Keys(dates=question.dates, modalities=question.modalities)
        try:
            with self._finder() as finder:
                studies = finder.find_studies(keys)
                self._has_answered = True
        except PeerError as exc:
            raise ScanError(_reason_of(exc), f"{self.source.name}: {exc.reason}") from exc
        uids = sorted({each.study for each in studies})
        return [
            FetchRow(number, {}, replace(keys, study=uid), question, "" if is_uid(uid) else _NO_UID)
            for number, uid in enumerate(uids, 1)
        ]

    def fetch(self, rows: Sequence[FetchRow]) -> Iterator[list[StudyFetched]]:
        """Yield what became of each row, as they end.

        Raises
        ------
        ScanError
            If nothing can be written.
        """
        with ThreadPoolExecutor(self.source.associations, "fetch") as pool:
            waiting, running = iter(rows), set[Future[list[StudyFetched]]]()
            try:
                while True:
                    while len(running) < self.source.associations:
                        row = next(waiting, None)
                        if row is None:
                            break
                        running.add(pool.submit(self._row, row))
                    if not running:
                        return
                    done, running = wait(running, SYNC_INTERVAL_S, FIRST_COMPLETED)
                    self.spool.journal.sync()
                    for each in done:
                        yield each.result()
            except BaseException:
                self.__exit__()
                raise

    def _row(self, row: FetchRow) -> list[StudyFetched]:
        """Fetch what a row names."""
        from scanloom.io.network.peer import PeerError, UnreachableError

        def listed() -> StudyFetched | list[tuple[str, list[_SeriesState]]]:
            with self._finder() as finder:
                matches = finder.find_studies(row.keys)
                self._has_answered = True
                fault = _fault_of(row, matches)
                return fault or [(x.study, self._list_series(finder, row, x)) for x in matches]

        def failed(reason: Reason, detail: str) -> list[StudyFetched]:
            return [self._report(StudyFetched(row, reason=reason, detail=detail))]

        if row.fault:
            return failed(Reason.ROW_INVALID, row.fault)
        if self._away >= MAX_AWAY:
            detail = "not asked: the source was away for the rows before"
            return [StudyFetched(row, reason=Reason.SOURCE_AWAY, detail=detail)]
        try:
            found = self._tried(listed)
            if isinstance(found, StudyFetched):
                self._away = 0
                return [self._report(found)]
            # The association is not kept while objects come, or a night is waited for
            studies = [self._study(row, study, series) for study, series in found if series]
        except UnreachableError as exc:
            self._away += 1
            return failed(Reason.SOURCE_AWAY, exc.reason)
        except PeerError as exc:  # it answered
            self._away = 0
            return failed(Reason.NOT_FETCHED, exc.reason)
        except EndedError:
            return []
        gone = any(each.reason is Reason.SOURCE_AWAY for each in studies)
        gave = any(each.new for each in studies)
        self._away = self._away + 1 if gone and not gave else 0
        if not studies and row.cells:
            detail = "none of its series is of this modality, or has these words"
            return failed(Reason.NO_MATCH, detail)
        return [self._report(each) for each in studies]

    def _report(self, done: StudyFetched) -> StudyFetched:
        """Tell of a study, and return it."""
        number = f"row {done.row.number}"
        if done.reason is None:
            objects = counted(done.instances, "object")
            LOG.info("%s: %s, %d new", number, objects, done.new)
        else:
            LOG.warning("%s: %s (%s)", number, done.detail, done.reason.code)
            self._tell(f"{number}: {done.detail} ({done.reason.code})")
        return done

    def _list_series(self, finder: Finder, row: FetchRow, study: StudyFound) -> list[_SeriesState]:
        """Return the series of a study that a row asks for, as the source describes them."""
        from scanloom.io.network.peer import NotOfferedError, RefusedError

        states = []
        for each in finder.find_series(study.study):
            if row.keys.series not in ("", each.series):
                continue
            if not row.question.takes(each.modality, study.description, each.description):
                continue
            try:
                classes = finder.find_instances(study.study, each.series)
            except (NotOfferedError, RefusedError):
                classes = {}  # its number has to do
            folder = self.spool.folder / STUDIES / study.study / each.series
            states.append(_SeriesState(folder, classes, each.instances, each.modality))
        return states

    def _study(self, row: FetchRow, study: str, states: Sequence[_SeriesState]) -> StudyFetched:
        """Fetch what is missing of series; a fault of one does not stop the others."""
        from scanloom.io.network.peer import PeerError

        with self._lock:
            lock = self._study_locks.setdefault(study, threading.Lock())
        faults = list[tuple[Reason, str]]()
        new, is_recorded = 0, False
        with lock:
            for state in states:
                state.look()
                if state.is_whole:
                    continue
                if not is_recorded:
                    is_recorded = True
                    of_study = {"study": study_id(study, self._key), "series": len(states)}
                    self._audit.append("fetched", {"source": self.source.name, **of_study})
                before, reason, why = len(state.here), Reason.NOT_FETCHED, ""
                try:
                    self._retrieve(study, state)
                except PeerError as exc:
                    reason, why = _reason_of(exc), f": {exc.reason}"
                state.look()
                new += len(state.here) - before
                fault = "the source does not say which objects a series has"
                if state.size:
                    missing = counted(state.missing, "object")
                    fault = f"{missing} of {state.size} did not come{why}"
                if not state.is_whole:
                    faults.append((reason, fault))
        whole = tuple(state.folder for state in states if state.is_whole)
        instances = sum(state.size for state in states)
        first = faults[0] if faults else (None, "")
        return StudyFetched(row, study, whole, instances, new, *first)

    def _retrieve(self, study: str, state: _SeriesState) -> None:
        """Let the source give what is missing.

        Raises
        ------
        PeerError
            Why it did not; some may have come.
        """
        from scanloom.io.network.source import Pulse

        intake = _Intake(self, study, state.folder.name, Pulse(self.source.patience))
        self._pulses.add(intake.pulse)

        def retrieve() -> None:
            state.look()
            try:
                self._retrieve_once(intake, state)
            finally:
                intake.check_disk()

        try:
            self._tried(retrieve)
        finally:
            self._pulses.discard(intake.pulse)

    def _tried(self, ask: Callable[[], T]) -> T:
        """Return what the source gives; while it is away, ask again, if it has ever answered."""
        from scanloom.io.network.peer import UnreachableError

        attempt = 0
        while True:
            self._wait_for_hours()
            attempt += 1
            try:
                return ask()
            except UnreachableError:
                if self.end.is_set():
                    raise EndedError from None
                if attempt == ATTEMPTS or not self._has_answered:
                    raise
            self.end.wait(self.source.retry)

    def _retrieve_once(self, intake: _Intake, state: _SeriesState) -> None:
        from scanloom.io.network import source as network
        from scanloom.io.network.peer import NotOfferedError, PeerError, UnreachableError

        fault: PeerError | None = None
        if self.source.url is not None:
            with self._cut_at_end(network.WebSource(*self._web)) as web:
                web.give(request_of(intake, state), intake, self.source.name, intake.pulse)
        elif self.source.retrieve != "move" and self._get_offered:
            try:
                network.get(self._address, request_of(intake, state), intake, intake.pulse)
            except UnreachableError as exc:
                before = state.here
                state.look()
                if self.source.retrieve == "get" or state.here != before or self.end.is_set():
                    raise
                fault = exc  # as Orthanc does if it does not allow C-GET to our title
            except PeerError as exc:
                fault = exc
                if isinstance(exc, NotOfferedError) and self.source.retrieve == "auto":
                    self._get_offered = False
        intake.check_disk()
        state.look()
        if state.is_whole:
            return
        if self.source.url is None and self.source.retrieve != "get":
            self._move(intake, state, fault)
            return
        if fault is not None:
            raise fault

    def _move(self, intake: _Intake, state: _SeriesState, fault: Any) -> None:
        """Let the source send what is missing by C-MOVE."""
        from scanloom.io.network import source as network
        from scanloom.io.network.peer import PeerError, RefusedError, UnreachableError

        try:
            self._receive()
        except ScanError as exc:
            if isinstance(fault, UnreachableError):  # it is tried again
                raise fault from exc
            why = f"{fault.reason}; " if fault is not None else ""
            raise RefusedError(f"{why}C-MOVE: {exc.detail}") from exc
        uids = intake.study, intake.series
        self._landing.intakes[uids] = intake
        moved: PeerError | None = None
        try:
            try:
                network.move(
                    self._address, request_of(intake, state), self._move_title, intake.pulse
                )
            except PeerError as exc:
                moved = exc
            until = time.monotonic() + (LATE_S if moved is None else 0.0)
            state.look()
            while not state.is_whole and time.monotonic() < until and not self.end.wait(0.1):
                state.look()
        finally:
            del self._landing.intakes[uids]
            intake.check_disk()
            state.look()
        if not state.is_whole and moved is not None:
            why = f"C-GET: {fault.reason}; C-MOVE: " if fault is not None else ""
            raise type(moved)(f"{why}{moved.reason}")

    @property
    def _move_title(self) -> str:
        """Own title, which the source sends to."""
        destination = self.source.destination
        return self.site.title if destination is None else destination.title

    def _receive(self) -> None:
        """Begin to take what the source sends by C-MOVE; ENVIRONMENT if the port is taken."""
        from scanloom.engine.listen.receive import receiver_options
        from scanloom.io.network.receiver import Receiver, Sender

        with self._lock:
            if self._receiver is not None:
                return
            here, source = self.site, self.source
            sender = Sender(str(source.title), (str(source.address), *source.senders))
            port = here.port if source.destination is None else source.destination.port
            options = receiver_options(here, None)
            options = replace(options, title=self._move_title, port=port, senders=[sender])
            self._receiver = Receiver(options, self._landing)

    def _finder(self) -> Any:
        """Return a connection for questions."""
        return self._cut_at_end(make_finder(self.site.title, self.source))

    @contextmanager
    def _cut_at_end(self, connection: Any) -> Iterator[Any]:
        """Yield a connection that is cut off if the call ends."""
        if self.end.is_set():
            raise EndedError
        self._running.add(connection)
        try:
            with connection as opened:
                yield opened
        finally:
            self._running.discard(connection)

    def _wait_for_hours(self) -> None:
        """Wait until the source may be asked, and say so."""
        hours = self.source.hours
        while hours is not None and not self.end.is_set():
            if hours.contains(now_of_day()):
                self._told_hours = False
                break
            if not self._told_hours:
                self._told_hours = True
                text = f"{self.source.name} may be asked at {hours}: waiting"
                LOG.info("%s", text)
                self._tell(text)
            self.end.wait(LOOK_S)
        if self.end.is_set():
            raise EndedError


def request_of(intake: _Intake, state: _SeriesState) -> SeriesRequest:
    """Return what is to be asked for: all of a series of which nothing is there, else the rest."""
    from scanloom.io.network.source import SeriesRequest

    missing = {uid: each for uid, each in state.classes.items() if uid not in state.here}
    # More than are listed: all, since nobody knows which
    whole = not state.here or len(missing) < state.missing
    classes = state.classes if whole else missing
    return SeriesRequest(intake.study, intake.series, classes, whole, state.modality)


def _reason_of(error: Exception) -> Reason:
    from scanloom.io.network.peer import UnreachableError

    return Reason.SOURCE_AWAY if isinstance(error, UnreachableError) else Reason.NOT_FETCHED


_NO_UID = "the source has a study whose StudyInstanceUID is no UID"


def _fault_of(row: FetchRow, matches: Sequence[StudyFound]) -> StudyFetched | None:
    """Return why the studies that match a row are not fetched; None if they are."""
    if not matches:
        detail = "the source has nothing that matches"
        return StudyFetched(row, reason=Reason.NO_MATCH, detail=detail)
    if not all(is_uid(found.study) for found in matches):
        return StudyFetched(row, reason=Reason.NOT_FETCHED, detail=_NO_UID)
    if row.cells and several_patients([(x.patient, x.issuer, x.born) for x in matches]):
        detail = f"{counted(len(matches), 'study', 'studies')} of several patients match"
        return StudyFetched(row, reason=Reason.MATCH_AMBIGUOUS, detail=detail)
    return None
