"""Deliver what an outbox holds to its targets, and clear from the spool what has ended.

A thread a target: one that is away, or says nothing, holds up no other. Reports of storage
commitment are taken from the outbox, into which whoever received them puts them.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scanloom.core import Reason, ScanError
from scanloom.engine.listen.nodes import check_installed, dicom_address, web_address
from scanloom.engine.listen.outbox import DELIVERED, Line, Outbox, Proof, State, Trouble, case_name
from scanloom.engine.listen.site import Site, Target
from scanloom.engine.listen.spool import INCOMING, STUDIES, received_studies, remove_study
from scanloom.engine.listen.studies import Queue, survey
from scanloom.io.output.layout import case_folder
from scanloom.io.system.disk_errors import disk_errors_as_scan_errors
from scanloom.io.system.regular_files import open_regular_file
from scanloom.io.system.scratch_folders import lock_folder

if TYPE_CHECKING:
    from scanloom.io.network.sender import Peer, Reference

BATCH = 50
"""Lines of an association."""
TICK_S = 0.5
"""Between two looks for lines and reports."""
MAX_REFUSALS = 5
"""Refusals of an object after which it is given up."""
MAX_WAIT_S = 3600.0
"""Longest wait between two attempts."""
SAME_ASSOCIATION_S = 2.0
"""How long an association is kept for a report of commitment, which mostly comes on another."""
TIDY_S = 3600.0
"""Between two looks for requests of commitment that are not needed any more."""
AGAIN_S = 10.0
"""Until deliveries begin again that could not, or ended by an error."""
QUIET_S = 120.0
"""Nothing is cleared until so long after an object came, of whatever study."""
KEPT_S = 30 * 24 * 3600.0
"""How long it is known what became of a study that has left the spool."""
LOG = logging.getLogger(__name__)


class _ChangedError(Exception):
    """A file is not that of its line any more."""


class _CommitmentEndsItError(Exception):
    """The target ends an association in which it is asked for storage commitment."""


def deliver(
    site: Site,
    outbox: Outbox,
    end: threading.Event,
    is_done: Callable[[], bool] = lambda: False,
) -> None:
    """Send what the outbox holds to the site's targets, until `end` is set or `is_done` says so.

    Each target has a thread of its own: one that is silent stops no other.

    Parameters
    ----------
    end : threading.Event
        Running transfers are cut off; they are done again later.
    is_done : callable
        Asked at each look for lines.

    Raises
    ------
    ScanError
        NOT_INSTALLED without pynetdicom or dicomweb-client; LOCKED if another process delivers;
        ENVIRONMENT if credentials or certificates can't be read.
    """
    with _locked(outbox):
        stopping = threading.Event()
        deliveries = [_Delivery(site, target, outbox, stopping) for target in site.targets]
        tidied = -math.inf
        try:
            while not end.is_set() and not is_done():
                if time.monotonic() - tidied > TIDY_S:
                    tidied = time.monotonic()
                    with suppress(OSError):  # a share that is away for a while
                        outbox.tidy()
                _look(outbox, deliveries)
                end.wait(TICK_S)
        finally:
            stopping.set()
            for delivery in deliveries:
                delivery.stop()


@contextmanager
def delivering(site: Site, outbox: Outbox, sign: Callable[[], None]) -> Iterator[None]:
    """Deliver in a thread while the block runs; `sign` is called at each look for lines."""
    for target in site.targets:  # what the page names has to be there
        peer_maker(site, target, outbox)
    names = {target.name for target in site.targets}
    with disk_errors_as_scan_errors():
        for name in {line.target for line in outbox.open_lines()} - names:
            now = time.time()
            outbox.set_trouble(name, Trouble("the site has no such target", 1, 0.0, now, now))
    end = threading.Event()

    def still() -> bool:
        sign()
        return False

    def run() -> None:
        while not end.is_set():
            sign()
            try:
                deliver(site, outbox, end, still)
            except Exception as exc:  # noqa: BLE001  # receiving goes on
                # `scanloom send` may deliver just now, or a share be away
                why = exc.code if isinstance(exc, ScanError) else type(exc).__name__
                LOG.warning("nothing is delivered for a while: %s", why)
                end.wait(AGAIN_S)

    thread = threading.Thread(target=run, name="deliver", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(4 * SAME_ASSOCIATION_S)


@contextmanager
def _locked(outbox: Outbox) -> Iterator[None]:
    """Hold the lock of the one process that delivers."""
    with disk_errors_as_scan_errors():
        lock = lock_folder(outbox.folder)
    if lock is None:
        detail = "another process delivers from this outbox, or its disk has no locks"
        raise ScanError(Reason.LOCKED, detail, str(outbox.folder))
    try:
        yield
    finally:
        lock.close()


def _look(outbox: Outbox, deliveries: Sequence[_Delivery]) -> None:
    """Take the reports that came, and let each target begin with what is due."""
    try:
        busy = {each.target.name for each in deliveries if each.is_busy}
        _take_reports(outbox, {each.target.name: each.target for each in deliveries}, busy)
        lines = outbox.open_lines()
    except OSError as exc:  # a share that is away for a while
        LOG.warning("the outbox can't be read or written (%s)", type(exc).__name__)
        return
    now = time.time()
    for delivery in deliveries:
        target = delivery.target
        if target.name not in busy:
            due = [x for x in lines if x.target == target.name and _is_due(x.due, now, target)]
            if due and _is_due(outbox.trouble(target.name).due, now, target):
                delivery.begin(due[:BATCH])


def _is_due(due: float, now: float, target: Target) -> bool:
    """Return whether to go on; if it is due later than ever planned, the clock was put back."""
    return not now < due <= now + max(MAX_WAIT_S, target.retry, target.report_within)


def _take_reports(outbox: Outbox, targets: dict[str, Target], busy: Container[str]) -> None:
    """Let the lines know what was reported; those of busy targets later."""
    from scanloom.io.network.commitment import FAILURES
    from scanloom.io.network.peer import is_busy

    for name, ids, report, path in outbox.reports():
        if name in busy or name not in targets:
            continue
        for line in outbox.open_lines():
            if line.id not in ids:
                continue
            if line.instance in report.committed:
                _deliver_line(outbox, line, "committed")
            elif line.instance in report.failed:
                number = report.failed[line.instance]
                cause = f"not committed: {FAILURES.get(number, 'no reason given')} ({number:04X})"
                again = replace(line, state="waiting")
                _refuse(outbox, targets[name], again, cause, busy=is_busy(number))
        path.unlink(missing_ok=True)


def _deliver_line(outbox: Outbox, line: Line, proof: Proof) -> None:
    done = replace(line, state="delivered", proof=proof, reason="", ended=time.time())
    outbox.update(done)
    LOG.info("%s has %s: %s", line.target, _subject(line), proof)


def _refuse(
    outbox: Outbox,
    target: Target,
    line: Line,
    reason: str,
    *,
    final: bool = False,
    busy: bool = False,
) -> None:
    """Let a line wait after a refusal of its object, or give it up.

    One for which the target has no room is refused as often as `give_up` leaves time for.
    """
    if busy:
        wait = min(max(target.retry, line.awaited), max(MAX_WAIT_S, target.retry))
        is_over = line.awaited >= target.give_up
        line = replace(line, awaited=line.awaited + wait)
    else:
        line = replace(line, refusals=line.refusals + 1)
        wait, is_over = _wait(target, line.refusals), line.refusals >= MAX_REFUSALS
    if final or is_over:
        _give_up(outbox, line, reason)
        return
    outbox.update(replace(line, due=time.time() + wait, reason=reason))
    LOG.warning("%s: %s: %s", line.target, _subject(line), reason)


def _give_up(outbox: Outbox, line: Line, reason: str) -> None:
    outbox.update(replace(line, state="failed", reason=reason, ended=time.time()))
    LOG.warning("%s: gave up %s: %s", line.target, _subject(line), reason)


def _subject(line: Line) -> str:
    """Return the file of a line for the log."""
    return f"{line.file} of {case_name(line, 'case ')}"


def _wait(target: Target, failures: int) -> float:
    """Return the seconds until the next attempt after so many in vain."""
    return float(min(target.retry * 2.0 ** min(failures - 1, 30), max(MAX_WAIT_S, target.retry)))


class _Delivery:
    """Sends lines to a target, in one thread at a time."""

    def __init__(self, site: Site, target: Target, outbox: Outbox, end: threading.Event) -> None:
        self.target, self._outbox, self._end = target, outbox, end
        self._make = peer_maker(site, target, outbox)
        place = {name: value for name, value in target.committer or () if value is not None}
        committer = target.model_copy(update=place)
        self._make_committer = peer_maker(site, committer, outbox) if place else None
        self._thread: threading.Thread | None = None
        self._peer: Peer | None = None
        self._commits_after = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, lines: Sequence[Line]) -> None:
        """Begin with some lines."""
        self._thread = threading.Thread(
            target=self._run, args=(lines,), name="delivery", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Cut the connection off, and wait a moment for the end of the thread."""
        if self._peer is not None:
            self._peer.cut()
        if self._thread is not None:
            self._thread.join(SAME_ASSOCIATION_S)

    def _run(self, lines: Sequence[Line]) -> None:
        from scanloom.io.network.peer import UnreachableError

        try:
            self._send_all(lines)
        except UnreachableError as exc:
            self._in_trouble(exc.reason)
        except ScanError as exc:  # such as of a certificate that is being renewed
            self._in_trouble(exc.detail)
        except Exception as exc:  # noqa: BLE001  # this target's fault, or the disk's, for a while
            self._in_trouble(f"an unexpected {type(exc).__name__}")
        else:
            if self._outbox.trouble(self.target.name).tries:
                LOG.info("%s can be reached again", self.target.name)
                self._outbox.set_trouble(self.target.name, Trouble())

    def _in_trouble(self, reason: str) -> None:
        """Note that the target takes nothing; give up what it was tried with for too long."""
        if self._end.is_set():  # cut off by ourselves
            return
        now, target, before = time.time(), self.target, self._outbox.trouble(self.target.name)
        # Time in which nobody tried does not count
        lasted = min(now - before.last, 2 * _wait(target, before.tries)) if before.tries else 0.0
        tries = before.tries + 1
        failing = before.failing + max(0.0, lasted)
        due = now + _wait(target, tries)
        with suppress(OSError):  # tried again at the next look
            self._outbox.set_trouble(target.name, Trouble(reason, tries, failing, now, due))
            LOG.warning("%s: %s; attempt %d", target.name, reason, tries)
            if failing > target.give_up:
                for line in self._outbox.open_lines():
                    if line.target == target.name and now - line.added > target.give_up:
                        _give_up(self._outbox, line, reason)

    def _send_all(self, lines: Sequence[Line]) -> None:
        """Send and confirm lines, over several associations if an object ends one.

        Raises
        ------
        UnreachableError
            If the target takes nothing.
        """
        from scanloom.io.network.peer import PeerError, UnreachableError

        to_send = deque(line for line in lines if line.state == "waiting")
        to_confirm = [line for line in lines if line.state != "waiting"]
        lost: tuple[Line, PeerError] | None = None
        while to_send or to_confirm or lost:
            self._peer = self._make([reference_of(x) for x in (*to_send, *to_confirm)])
            with self._peer as peer:
                if lost is not None:
                    # It takes an association, and answers: so the object is to blame
                    peer.echo()
                    line, error = lost
                    _refuse(self._outbox, self.target, line, error.reason, busy=error.busy)
                    lost = None
                while to_send and not self._end.is_set():
                    line = to_send.popleft()
                    try:
                        sent = self._send(peer, line)
                    except UnreachableError as exc:
                        lost = line, exc
                        break
                    to_confirm += [sent] if sent is not None else []
                if self._end.is_set():
                    return
                if lost is None and to_confirm:
                    try:
                        self._confirm(peer, to_confirm)
                    except _CommitmentEndsItError:
                        continue  # in another association
                    to_confirm = []

    def _send(self, peer: Peer, line: Line) -> Line | None:
        """Send an object; return its line if the target has acknowledged it."""
        from scanloom.io.network.peer import RefusedError

        try:
            with self._file(line) as path:
                peer.store(reference_of(line), path)
        except _ChangedError:
            reason = "the result was changed, replaced or removed since it was added"
            _give_up(self._outbox, line, reason)
            return None
        except OSError as exc:
            _refuse(self._outbox, self.target, line, f"can't be read ({type(exc).__name__})")
            return None
        except RefusedError as exc:
            if not self._is_there(peer, line):
                how = {"final": exc.final, "busy": exc.busy}
                _refuse(self._outbox, self.target, line, exc.reason, **how)
                return None
        return self._outbox.update(replace(line, state="sent", reason=""))

    def _is_there(self, peer: Peer, line: Line) -> bool:
        """Return whether the target names an object that it has just refused.

        Some refuse what they have, as after an answer that was lost. A UID stands for its bytes.
        """
        from scanloom.io.network.peer import NotOfferedError, RefusedError

        try:
            return peer.find(reference_of(line))
        except (NotOfferedError, RefusedError):
            return False

    @contextmanager
    def _file(self, line: Line) -> Iterator[Path]:
        """Yield a path to the very file that was compared with the line's checksum."""
        path = case_folder(self._outbox.out, line.case) / line.file
        try:
            file = open_regular_file(path)
        except OSError as exc:
            if isinstance(exc, FileNotFoundError | NotADirectoryError):
                raise _ChangedError from exc
            raise
        with file:
            if hashlib.file_digest(file, "sha256").hexdigest() != line.sha256:
                raise _ChangedError
            # The name may lead to a newer result by now, this one does not
            yield Path(f"/dev/fd/{file.fileno()}")

    def _confirm(self, peer: Peer, lines: Sequence[Line]) -> None:
        """Let the target prove that it has what it acknowledged, as far as it offers that."""
        from scanloom.io.network.peer import NotOfferedError, RefusedError, UnreachableError

        commitment = self.target.commitment
        if commitment == "auto" and time.monotonic() < self._commits_after:
            commitment = "no"
        overdue = [line for line in lines if line.state == "asked"]
        lines = [line for line in lines if line.state != "asked"]
        if commitment == "auto":  # no report came: ask in the other way
            overdue = self._find(peer, overdue)
        for line in overdue:
            if line.awaited < self.target.give_up:
                lines.append(line)
            elif commitment == "yes":
                _give_up(self._outbox, line, "stored, but no report of commitment came")
            else:
                _deliver_line(self._outbox, line, "acknowledged")
        if commitment != "no" and lines:
            try:
                self._request(peer, lines)
            except (NotOfferedError, RefusedError) as exc:
                if commitment == "yes":
                    for line in lines:
                        _refuse(self._outbox, self.target, line, exc.reason, busy=exc.busy)
                    return
            except UnreachableError as exc:  # as Orthanc does if it does not know our title
                if commitment == "yes":
                    raise UnreachableError(f"{exc.reason}, when asked for commitment") from exc
                self._commits_after = time.monotonic() + MAX_WAIT_S
                raise _CommitmentEndsItError from exc
            else:
                return
        for line in self._find(peer, lines):  # neither is offered
            _deliver_line(self._outbox, line, "acknowledged")

    def _request(self, peer: Peer, lines: Sequence[Line]) -> None:
        from pydicom.uid import generate_uid

        transaction = str(generate_uid())
        self._outbox.ask(transaction, self.target.name, lines)
        make = self._make_committer
        with nullcontext(peer) if make is None else make(()) as committer:
            committer.request_commitment(transaction, [reference_of(line) for line in lines])
            within = self.target.report_within
            due = time.time() + within
            for line in lines:
                reason = "stored; its report of commitment has not come"
                awaited = line.awaited + max(within, SAME_ASSOCIATION_S)
                asked = replace(line, state="asked", due=due, reason=reason, awaited=awaited)
                self._outbox.update(asked)
            until = time.monotonic() + SAME_ASSOCIATION_S
            while time.monotonic() < until and not self._outbox.has_report(transaction):
                if self._end.wait(0.05):
                    return

    def _find(self, peer: Peer, lines: Sequence[Line]) -> list[Line]:
        """Ask for objects; return those that can't be asked for."""
        from scanloom.io.network.peer import NotOfferedError, RefusedError

        unanswered = []
        for line in lines:
            try:
                if peer.find(reference_of(line)):
                    _deliver_line(self._outbox, line, "found")
                    continue
                reason = "acknowledged, but not there when asked"
            except NotOfferedError:
                unanswered.append(line)
                continue
            except RefusedError as exc:
                _refuse(self._outbox, self.target, line, exc.reason, busy=exc.busy)
                continue
            # It may be slow to list what it has: sent again after the second question
            state: State = "waiting" if line.refusals % 2 else "sent"
            _refuse(self._outbox, self.target, replace(line, state=state), reason)
        return unanswered


def reference_of(line: Line) -> Reference:
    """Return what is sent, of a line."""
    from scanloom.io.network.sender import Reference

    uids = (line.sop_class, line.instance, line.series, line.study, line.syntax)
    return Reference(*uids, line.size)


def peer_maker(site: Site, target: Target, outbox: Outbox) -> Callable[[Sequence[Reference]], Peer]:
    """Return a function that makes a peer of a target, for what is sent.

    Credentials and certificates are read each time: they may be renewed.

    Raises
    ------
    ScanError
        NOT_INSTALLED without pynetdicom or dicomweb-client; ENVIRONMENT if credentials or
        certificates can't be read, then and by the function.
    """
    check_installed(target)
    from scanloom.io.network.sender import DicomPeer, WebPeer

    if target.url is not None:
        web_address(target)
        return lambda references: WebPeer(*web_address(target))
    dicom_address(site.title, target)
    return lambda references: DicomPeer(
        dicom_address(site.title, target),
        references,
        lambda report: outbox.note(report, (target.name,)),
    )


# --- clearing -------------------------------------------------------------------------------------


def clear_studies(spool: Path, outbox: Outbox, after: float, rules: str) -> int:
    """Remove from a spool the studies that ended some time ago, and forget those that are gone.

    A study has ended once its newest results were delivered; one without any to deliver, when its
    last object came. It stays if it failed without results, if a result waits or was given up,
    while one of its scans is worked on or is to be tried again, if an object came that the worker
    has not seen, and while anything is received.

    Parameters
    ----------
    after : float
        Seconds since the end.
    rules : str
        Digest of the site's rules: others may have left a study out.

    Returns
    -------
    int
        How many were removed.

    Raises
    ------
    OSError
    """
    try:
        if time.time() - (spool / INCOMING).stat().st_mtime < QUIET_S:
            return 0  # nothing would be removed; by day this is mostly so
    except FileNotFoundError:  # the receiver makes it
        return 0
    removed, queue = 0, Queue(spool)
    # Before the lines, which the worker adds before it calls a study done
    states = {folder.name: queue.read(folder.name) for folder in received_studies(spool)}
    undone: dict[str, list[Line]] = {}
    for line in (*outbox.open_lines(), *outbox.failed_lines()):
        undone.setdefault(line.study, []).append(line)
    for study, state in states.items():
        folder = spool / STUDIES / study
        if queue.read(study) != state:
            continue  # it has just been worked on
        known = [*outbox.delivered_lines(study), *undone.get(study, ())]
        begun: dict[str, float] = {}  # by bytes: some lines only know an earlier time
        for line in known:
            begun[line.sha256] = max(line.begun, begun.get(line.sha256, 0.0))
        by_age = sorted(known, key=lambda line: begun[line.sha256])
        lines = {line.copy: line for line in by_age}.values()  # the newest of each
        if any(line.state != DELIVERED for line in lines):
            continue
        if lines:
            ended = max(line.ended for line in lines)
            read = min(begun[line.sha256] for line in lines)
        elif state is not None and state.outcome in ("done", "no image", "no rule"):
            ended = read = state.seen
        else:
            continue
        if time.time() - ended < after:
            continue
        if state is not None:
            # Times of files don't tell all: a clock may have been put back
            if not state.is_over(rules) or state.images != survey(folder).digest:
                continue
            # The worker has seen what came until then: our own SEG, or the like
            read = max(read, math.nextafter(state.seen, math.inf))
        if remove_study(spool, study, read, QUIET_S):
            removed += 1
            if state is not None and queue.read(study) == state:
                queue.write(study, replace(state, outcome="cleared", cleared=True))
    since = time.time() - KEPT_S
    queue.forget(since, states)
    outbox.forget(since, {*states, *undone})
    return removed
