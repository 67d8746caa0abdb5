"""The outbox: results on their way to targets, a line an object and target, on disk.

    OUT/private/outbox/
      lock                        of the one process that delivers
      waiting/<id>.json           a line until its object is there, or was given up
      delivered/<2 letters>/<study>/<id>.json
      failed/<id>.json
      targets/<name>.json         since when a target takes nothing, and when it is tried again
      asked/<TransactionUID>.json  lines of a request for storage commitment
      reports/<TransactionUID>-<n>.json  what a target reported, until the lines know it

Nothing is sent without a line, which is on the disk before. A line's id is made of target, UID and
bytes: adding the same object again changes nothing, and a case that was made again has new lines.
A file is written anew and renamed, then the line is removed where it was: a kill leaves it twice at
worst, when the later state counts. An object may so be sent twice, with the same UIDs and bytes.

An object is *delivered* if its target has committed itself to keep it, or names it when asked, or,
where it offers neither, has acknowledged it. `proof` says which.

Everything here names studies: folders have mode 0700, files 0600.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from scanloom.core import Reason, ScanError
from scanloom.engine.listen.nodes import check_installed, dicom_address, web_address
from scanloom.engine.listen.site import Site, Target
from scanloom.engine.listen.spool import INCOMING, received_studies, remove_study
from scanloom.engine.listen.studies import Queue, survey
from scanloom.io.dicom.header.header import read_elements
from scanloom.io.dicom.instance import read_instance
from scanloom.io.dicom.uids import is_uid
from scanloom.io.output.audit import audit_trail
from scanloom.io.output.file_names import CASE, TIMING
from scanloom.io.output.json_file import read_json, write_document
from scanloom.io.output.layout import CASES
from scanloom.io.output.private import PRIVATE, check_links, write_private
from scanloom.io.system.atomic_write import fsync_path, remove_stale_temporaries
from scanloom.io.system.disk_errors import disk_errors_as_scan_errors
from scanloom.io.system.regular_files import open_regular_file
from scanloom.io.system.scratch_folders import lock_folder
from scanloom.own_python import make_private_folder

if TYPE_CHECKING:
    from scanloom.io.network.commitment import Report
    from scanloom.io.network.sender import Peer, Reference

OUTBOX = "outbox"
WAITING, DELIVERED, FAILED = "waiting", "delivered", "failed"
TARGETS, ASKED, REPORTS = "targets", "asked", "reports"
REPLACED = "replaced"

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
MOST_WAITING_S = 3600.0
"""A scan that was read may have waited so long for its device."""
AGAIN_S = 10.0
"""Until deliveries begin again that could not, or ended by an error."""
QUIET_S = 120.0
"""Nothing is cleared until so long after an object came, of whatever study."""
_STALE_S = 3600.0
_CASE_ID = re.compile("[a-z2-7]{26}")
LOG = logging.getLogger(__name__)

_Stamp = tuple[int, int]
"""Time of change, in ns, and inode: two states of a line may have been written in one tick."""
State = Literal["waiting", "sent", "asked", "delivered", "failed"]
Proof = Literal["", "committed", "found", "acknowledged"]


@dataclass(frozen=True)
class Line:
    """An object that goes to a target.

    Parameters
    ----------
    target : str
        Its name.
    case, file : str
        Name of the case's folder, and of the file in it.
    sha256 : str
        Of the file.
    size : int
        Bytes.
    sop_class, instance, series, study, syntax : str
        UIDs.
    added, begun : float
        When it was added, or given back by hand; when its scan was read. Seconds since 1970.
    state : State
        To be sent; sent, and to be confirmed; asked about; delivered; given up.
    refusals : int
        How often the target refused it.
    due : float
        When to go on with it.
    reason : str
        Why it waits, or was given up.
    proof : Proof
        How it is known to be there.
    ended : float
        When it was delivered or given up.
    """

    target: str
    case: str
    file: str
    sha256: str
    size: int
    sop_class: str
    instance: str
    series: str
    study: str
    syntax: str
    added: float
    begun: float
    state: State = "waiting"
    refusals: int = 0
    due: float = 0.0
    reason: str = ""
    proof: Proof = ""
    ended: float = 0.0

    @property
    def id(self) -> str:
        """The name of the line's file."""
        identity = "\0".join((self.target, self.instance, self.sha256)).encode()
        return hashlib.blake2b(identity, digest_size=16).hexdigest()

    @property
    def is_open(self) -> bool:
        """Whether something is to be done about it."""
        return self.state not in (DELIVERED, FAILED)


@dataclass(frozen=True)
class Trouble:
    """A target that takes nothing.

    Parameters
    ----------
    reason : str
    tries : int
        In a row.
    failing : float
        Seconds for which it was tried in vain.
    last, due : float
        The last attempt, and the next; seconds since 1970.
    """

    reason: str = ""
    tries: int = 0
    failing: float = 0.0
    last: float = 0.0
    due: float = 0.0


def outbox_folder(out: Path) -> Path:
    """Return the folder of an output folder's outbox."""
    return out / PRIVATE / OUTBOX


class Outbox:
    """The lines of an output folder; several processes may add, one delivers.

    Parameters
    ----------
    folder : Path
        `OUT/private/outbox`; it is made if missing.
    key : Path or None
        File with the key of the ids, for lines in the audit trail; None for SCANLOOM_KEY or the
        user's own key.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE or DISK_FULL.
    """

    def __init__(self, folder: Path, key: Path | None = None) -> None:
        self.folder, self.out, self._key = folder, folder.parent.parent, key
        self._known: dict[str, tuple[_Stamp, Line]] = {}
        self._seen = -1
        check_links(self.out)
        with disk_errors_as_scan_errors():
            for each in (folder, *(folder / name for name in _FOLDERS)):
                if not each.is_dir():
                    make_private_folder(each)
                    fsync_path(each.parent)
                each.chmod(0o700)

    def add(self, case_folder: Path, target: str, begun: float | None = None) -> list[Line]:
        """Add the DICOM files of a published case, for a target; they are on the disk then.

        Parameters
        ----------
        case_folder : Path
            A folder in `OUT/cases`.
        target : str
            Its name.
        begun : float, optional
            When its scan was read, seconds since 1970; by default an earlier time, so that
            `clear_delivered` keeps studies that came shortly before.

        Returns
        -------
        list of Line
            A line a file, as it is now: one that was added before may be delivered already.

        Raises
        ------
        ScanError
            RESULT_DAMAGED if `verify` finds a fault in the case; OUTPUT_UNWRITABLE, DISK_FULL.
        """
        from scanloom.engine.results.verify import verify_case

        if next(verify_case(case_folder, case_folder.name), None) is not None:
            detail = f"case {case_folder.name} differs from what was published, and is not sent"
            raise ScanError(Reason.RESULT_DAMAGED, detail)
        lines = []
        with disk_errors_as_scan_errors():
            began = _began(case_folder) if begun is None else begun
            for path in sorted((case_folder / "dicom").glob("*.dcm")):
                line = _line_of(path, case_folder, target, began)
                known = self.current(line)
                if known is None:
                    self._write(self._path(line), line)
                lines.append(known or line)
        return lines

    def current(self, line: Line) -> Line | None:
        """Return a line as it is now; None if there is none, or it is damaged.

        The later state counts: a kill may leave the one before.
        """
        states: tuple[State, ...] = ("delivered", "failed", "waiting")
        lines = (self._read(replace(line, state=state)) for state in states)
        return next(filter(None, lines), None)

    def _read(self, line: Line) -> Line | None:
        """Read a line where it is in its state; `retry` moves one, and then gives it its state."""
        now = _read_line(self._path(line))
        if now is None or now.is_open or not line.is_open:
            return now
        return _fresh(now)

    def open_lines(self) -> list[Line]:
        """Return the lines that are neither delivered nor given up, the oldest first."""
        waiting = self.folder / WAITING
        changed = waiting.stat().st_mtime_ns
        if changed != self._seen:
            known = {}
            for path, stamp in _files(waiting):
                before = self._known.get(path.stem)
                line = before[1] if before and before[0] == stamp else self._settled(path)
                if line is not None:
                    known[path.stem] = stamp, line
            # A file that is written in the tick of the clock of this look has the same time
            recent = time.time_ns() - changed < 50_000_000
            self._known, self._seen = known, -1 if recent else changed
        return sorted((line for _, line in self._known.values()), key=lambda line: line.added)

    def _settled(self, path: Path) -> Line | None:
        """Return an open line; remove one that a kill left here although it has ended."""
        line = _read_line(path)
        now = line and self.current(line)
        if now is not None and not now.is_open:
            path.unlink(missing_ok=True)
            return None
        return now

    def failed_lines(self) -> list[Line]:
        """Return the lines that were given up, the oldest first."""
        lines = [_read_line(path) for path, _ in _files(self.folder / FAILED)]
        return sorted(filter(None, lines), key=lambda line: line.ended)

    def delivered_lines(self, study: str | None = None) -> Iterator[Line]:
        """Yield the lines that were delivered; of one study, or of all."""
        folder = self.folder / DELIVERED
        folders = folder.glob("??/*") if study is None else [folder / _place(study)]
        for each in folders:
            for path, _ in _files(each) if each.is_dir() else ():
                line = _read_line(path)
                if line is not None:
                    yield line

    def update(self, line: Line) -> Line:
        """Write a line in its state; return it. Of one that was delivered the audit trail tells."""
        path = self._path(line)
        if line.state == DELIVERED and (audit := audit_trail(self.out, self._key)):
            names = ("file", "sha256", "target", "proof")
            plain = {name: getattr(line, name) for name in names}
            audit.append("sent", {"case": case_name(line, ""), **plain})
        for folder in (path.parent.parent, path.parent):
            if not folder.is_dir():
                folder.mkdir(mode=0o700)
                fsync_path(folder.parent)
        self._write(path, line)
        if not line.is_open:
            (self.folder / WAITING / path.name).unlink(missing_ok=True)
            self._seen = -1
        return line

    def retry(self, line: Line) -> Line:
        """Give a line that waits or was given up to the targets again, at once, with a new end."""
        if line.state == DELIVERED:
            return line
        fresh = _fresh(line)
        if line.state == FAILED:
            with suppress(FileNotFoundError):  # another process was faster
                self._path(line).rename(self._path(fresh))
            for name in (WAITING, FAILED):
                fsync_path(self.folder / name)
        return self.update(fresh)

    def trouble(self, target: str) -> Trouble:
        """Return the trouble with a target; one without tries if there is none."""
        try:
            content = read_json(self.folder / TARGETS / f"{target}.json")
            return Trouble(**{name: content[name] for name in asdict(Trouble())})
        except (OSError, ValueError, KeyError, ScanError):
            return Trouble()

    def set_trouble(self, target: str, trouble: Trouble) -> None:
        """Note the trouble with a target, or that there is none any more."""
        path = self.folder / TARGETS / f"{target}.json"
        if trouble.tries:
            write_private(path, lambda draft: write_document(draft, asdict(trouble)))
        else:
            path.unlink(missing_ok=True)

    def ask(self, transaction: str, target: str, lines: Iterable[Line]) -> None:
        """Note which lines a request for storage commitment is about, before it is sent."""
        content = {"target": target, "lines": [line.id for line in lines]}
        path = self.folder / ASKED / f"{transaction}.json"
        write_private(path, lambda draft: write_document(draft, content))

    def note(self, report: Report, targets: Container[str]) -> bool:
        """Note a report of one of these targets; return whether its request is known.

        Another process than the one that delivers may call it.

        Raises
        ------
        OSError
            If it can't be written: then it must not be acknowledged.
        """
        asked = self.folder / ASKED / f"{report.transaction}.json"
        try:
            known = is_uid(report.transaction) and read_json(asked)["target"] in targets
        except (FileNotFoundError, ValueError, KeyError, ScanError):
            known = False
        if known:
            # One that is partly good and partly not may come in two parts
            kind = 2 if report.failed else 1
            path = self.folder / REPORTS / f"{report.transaction}-{kind}.json"
            write_private(path, lambda draft: write_document(draft, asdict(report)))
        return known

    def has_report(self, transaction: str) -> bool:
        """Return whether a report has come that was not taken yet."""
        return any((self.folder / REPORTS / f"{transaction}-{n}.json").exists() for n in (1, 2))

    def reports(self) -> Iterator[tuple[str, list[str], Report, Path]]:
        """Yield the reports that came: target, ids of lines, report, and its file."""
        from scanloom.io.network.commitment import Report

        for path, _ in _files(self.folder / REPORTS):
            try:
                content = read_json(path)
                report = Report(
                    content["transaction"], tuple(content["committed"]), dict(content["failed"])
                )
                asked = read_json(self.folder / ASKED / f"{report.transaction}.json")
                yield asked["target"], list(asked["lines"]), report, path
            except (FileNotFoundError, ValueError, KeyError, TypeError, ScanError):
                path.unlink(missing_ok=True)  # of a request that is known no more

    def tidy(self) -> None:
        """Remove requests all of whose lines have ended, and what killed processes left."""
        since = time.time() - _STALE_S
        for name in _FOLDERS:
            remove_stale_temporaries(self.folder / name, since)
        waiting = {path.stem for path, _ in _files(self.folder / WAITING)}
        for path, _ in _files(self.folder / ASKED):
            with suppress(OSError, ValueError, KeyError, ScanError):
                if waiting.isdisjoint(read_json(path)["lines"]):
                    path.unlink(missing_ok=True)

    def _path(self, line: Line) -> Path:
        name = f"{line.id}.json"
        if line.state == DELIVERED:
            return self.folder / DELIVERED / _place(line.study) / name
        return self.folder / (FAILED if line.state == FAILED else WAITING) / name

    def _write(self, path: Path, line: Line) -> None:
        write_private(path, lambda draft: write_document(draft, asdict(line)))
        self._seen = -1


@dataclass(frozen=True)
class OutboxState:
    """What an outbox holds.

    Parameters
    ----------
    counts : dict
        Number of lines by target, and by state or, of delivered ones, proof; "replaced" for those
        that were given up since their case was made again.
    open, failed : list of Line
        Those that wait, and those that were given up, without replaced ones; the oldest first.
    troubles : dict
        Trouble with a target, by its name.
    """

    counts: dict[str, dict[str, int]]
    open: list[Line]
    failed: list[Line]
    troubles: dict[str, Trouble]


def outbox_state(out: Path) -> OutboxState | None:
    """Return what the outbox of an output folder holds; None if there is none.

    Raises
    ------
    ScanError
        As of `Outbox`.
    """
    folder = outbox_folder(out)
    if not os.access(folder, os.R_OK | os.X_OK):
        return None
    outbox = Outbox(folder)
    waiting, given_up = outbox.open_lines(), outbox.failed_lines()
    counts: dict[str, Counter[str]] = {}
    newest: dict[tuple[str, str, str], float] = {}
    for line in (*outbox.delivered_lines(), *waiting, *given_up):
        counts.setdefault(line.target, Counter())[line.proof or line.state] += 1
        place = line.target, line.case, line.file
        newest[place] = max(line.added, newest.get(place, 0.0))
    failed = []
    for line in given_up:
        if line.added < newest[line.target, line.case, line.file]:
            counts[line.target][FAILED] -= 1
            counts[line.target][REPLACED] += 1
        else:
            failed.append(line)
    troubles = {name: outbox.trouble(name) for name in sorted(counts)}
    return OutboxState(
        {name: dict(+counts[name]) for name in sorted(counts)},
        waiting,
        failed,
        {name: trouble for name, trouble in troubles.items() if trouble.tries},
    )


_FOLDERS = (WAITING, DELIVERED, FAILED, TARGETS, ASKED, REPORTS)


def _place(study: str) -> Path:
    """Return where the delivered lines of a study are."""
    key = hashlib.blake2b(study.encode(), digest_size=16).hexdigest()
    return Path(key[:2], key)


def _files(folder: Path) -> list[tuple[Path, _Stamp]]:
    """Return the documents of a folder with their stamps."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".json") and not entry.name.startswith("."):
                with suppress(FileNotFoundError):  # its state has changed
                    state = entry.stat(follow_symlinks=False)
                    found.append((Path(entry.path), (state.st_mtime_ns, state.st_ino)))
    return found


def _read_line(path: Path) -> Line | None:
    try:
        content = read_json(path)
        return Line(**{name: content[name] for name in Line.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError, ScanError):
        return None


def _fresh(line: Line) -> Line:
    """Return a line as it is to be tried from now on."""
    state: State = "waiting" if line.state == FAILED else line.state
    kept = replace(line, state=state, added=time.time(), refusals=0, due=0.0)
    return replace(kept, reason="", ended=0.0)


def _began(case_folder: Path) -> float:
    """Return a time at which the scan of a published case had surely not been read yet."""
    # `timing.json` may be written again, the document of the case never is
    published = (case_folder / CASE).stat().st_mtime
    lasted = 0.0
    with suppress(OSError, ValueError, AttributeError, KeyError, TypeError, ScanError):
        steps = read_json(case_folder / TIMING)["steps"]
        lasted = sum(float(step["wall_s"]) for step in steps.values())
    return published - lasted - MOST_WAITING_S


def _line_of(path: Path, case_folder: Path, target: str, begun: float) -> Line:
    """Return the line of a file; DAMAGED if it has no UIDs."""
    instance, elements = read_instance(path), read_elements(path)
    if elements is None:
        raise ScanError(Reason.DAMAGED, "it is not a DICOM file")
    with open_regular_file(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = os.fstat(file.fileno()).st_size
    uids = (instance.sop_class, instance.uid, instance.series, instance.study, elements.syntax)
    name = path.relative_to(case_folder).as_posix()
    return Line(target, case_folder.name, name, digest, size, *uids, time.time(), begun)


# --- delivering -----------------------------------------------------------------------------------


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
    site : Site
    outbox : Outbox
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
        deliveries = [
            _Delivery(
                outbox,
                target,
                peer_maker(site, target, outbox),
                committer_maker(site, target, outbox),
                stopping,
            )
            for target in site.targets
        ]
        outbox.tidy()
        try:
            while not end.is_set() and not is_done():
                _look(outbox, deliveries)
                end.wait(TICK_S)
        finally:
            stopping.set()
            for delivery in deliveries:
                delivery.stop()


@contextmanager
def delivering(site: Site, outbox: Outbox | None) -> Iterator[None]:
    """Deliver in a thread while the block runs; do nothing without targets."""
    if outbox is None or not site.targets:
        yield
        return
    for target in site.targets:  # what the page names has to be there
        peer_maker(site, target, outbox)
    names = {target.name for target in site.targets}
    with disk_errors_as_scan_errors():
        for name in {line.target for line in outbox.open_lines()} - names:
            now = time.time()
            outbox.set_trouble(name, Trouble("the site has no such target", 1, 0.0, now, now))
    end = threading.Event()

    def run() -> None:
        while not end.is_set():
            try:
                deliver(site, outbox, end)
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
        if delivery.target.name not in busy:
            due = [x for x in lines if x.target == delivery.target.name and x.due <= now]
            if due and outbox.trouble(delivery.target.name).due <= now:
                delivery.begin(due[:BATCH])


def _take_reports(outbox: Outbox, targets: dict[str, Target], busy: Container[str]) -> None:
    """Let the lines know what was reported; those of busy targets later."""
    from scanloom.io.network.commitment import FAILURES

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
                _refuse(outbox, targets[name], replace(line, state="waiting"), cause)
        path.unlink(missing_ok=True)


def _deliver_line(outbox: Outbox, line: Line, proof: Proof) -> None:
    done = replace(line, state="delivered", proof=proof, reason="", ended=time.time())
    outbox.update(done)
    LOG.info("%s has %s: %s", line.target, _subject(line), proof)


def _refuse(
    outbox: Outbox, target: Target, line: Line, reason: str, *, final: bool = False
) -> None:
    """Let a line wait after a refusal of its object, or give it up."""
    refusals = line.refusals + 1
    if final or refusals >= MAX_REFUSALS:
        _give_up(outbox, replace(line, refusals=refusals), reason)
        return
    due = time.time() + _wait(target, refusals)
    outbox.update(replace(line, refusals=refusals, due=due, reason=reason))
    LOG.warning("%s: %s: %s", line.target, _subject(line), reason)


def _give_up(outbox: Outbox, line: Line, reason: str) -> None:
    outbox.update(replace(line, state="failed", reason=reason, ended=time.time()))
    LOG.warning("%s: gave up %s: %s", line.target, _subject(line), reason)


def _subject(line: Line) -> str:
    """Return the file of a line for the log."""
    return f"{line.file} of {case_name(line, 'case ')}"


def case_name(line: Line, before: str = "") -> str:
    """Return the id of a line's case; `--names source` names some by their patients."""
    return before + line.case if _CASE_ID.fullmatch(line.case) else "a case named by its source"


def _wait(target: Target, failures: int) -> float:
    """Return the seconds until the next attempt after so many in vain."""
    return float(min(target.retry * 2.0 ** min(failures - 1, 30), max(MAX_WAIT_S, target.retry)))


class _Delivery:
    """What a target is sent, in one thread at a time."""

    def __init__(
        self,
        outbox: Outbox,
        target: Target,
        make_peer: Callable[[Sequence[Reference]], Peer],
        make_committer: Callable[[], Peer] | None,
        end: threading.Event,
    ) -> None:
        self.target, self._outbox, self._make, self._end = target, outbox, make_peer, end
        self._make_committer = make_committer
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
        from scanloom.io.network.peer import UnreachableError

        to_send = deque(line for line in lines if line.state == "waiting")
        to_confirm = [line for line in lines if line.state != "waiting"]
        lost: tuple[Line, str] | None = None
        while to_send or to_confirm or lost:
            self._peer = self._make([reference_of(x) for x in (*to_send, *to_confirm)])
            with self._peer as peer:
                if lost is not None:
                    # It takes an association, and answers: so the object is to blame
                    peer.echo()
                    _refuse(self._outbox, self.target, *lost)
                    lost = None
                while to_send and not self._end.is_set():
                    line = to_send.popleft()
                    try:
                        sent = self._send(peer, line)
                    except UnreachableError as exc:
                        lost = line, exc.reason
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
                _refuse(self._outbox, self.target, line, exc.reason, final=exc.final)
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
        path = self._outbox.out / CASES / line.case / line.file
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
        if commitment == "auto":  # no report came: ask in the other way
            rest = self._find(peer, overdue)
            lines = [line for line in lines if line not in overdue or line in rest]
        for line in [line for line in lines if line in overdue]:
            if time.time() - line.added > self.target.give_up:
                lines = [each for each in lines if each is not line]
                if commitment == "yes":
                    _give_up(self._outbox, line, "stored, but no report of commitment came")
                else:
                    _deliver_line(self._outbox, line, "acknowledged")
        if commitment != "no" and lines:
            try:
                self._request(peer, lines)
            except (NotOfferedError, RefusedError) as exc:
                if commitment == "yes":
                    for line in lines:
                        _refuse(self._outbox, self.target, line, exc.reason)
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
        with nullcontext(peer) if make is None else make() as committer:
            committer.request_commitment(transaction, [reference_of(line) for line in lines])
            due = time.time() + self.target.report_within
            for line in lines:
                reason = "stored; its report of commitment has not come"
                self._outbox.update(replace(line, state="asked", due=due, reason=reason))
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
                reason = exc.reason
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

    Raises
    ------
    ScanError
        NOT_INSTALLED without pynetdicom or dicomweb-client; ENVIRONMENT if credentials or
        certificates can't be read.
    """
    check_installed(target)
    from scanloom.io.network.sender import DicomPeer, WebPeer

    if target.url is not None:
        web = web_address(target)
        return lambda references: WebPeer(*web)
    address = dicom_address(site.title, target)
    return lambda references: DicomPeer(
        address, references, lambda report: outbox.note(report, (target.name,))
    )


def committer_maker(site: Site, target: Target, outbox: Outbox) -> Callable[[], Peer] | None:
    """Return a function that makes a peer to ask for commitment; None for that which stores.

    Raises
    ------
    ScanError
        ENVIRONMENT if certificates can't be read.
    """
    if (committer := target.committer) is None:
        return None
    from scanloom.io.network.sender import DicomPeer

    address = replace(
        dicom_address(site.title, target),
        title=committer.title,
        address=committer.address or str(target.address),
        port=committer.port,
    )
    return lambda: DicomPeer(address, (), lambda report: outbox.note(report, (target.name,)))


# --- clearing -------------------------------------------------------------------------------------


def clear_delivered(spool: Path, outbox: Outbox, after: float) -> int:
    """Remove from a spool the studies whose results were delivered some time ago.

    A study stays if one of its newest results waits or was given up, while one of its scans is
    worked on or is to be tried again, if an object came since its scans were read, and while
    anything is received.

    Parameters
    ----------
    spool : Path
    outbox : Outbox
    after : float
        Seconds since the last delivery.

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
    undone: dict[str, list[Line]] = {}
    for line in (*outbox.open_lines(), *outbox.failed_lines()):
        undone.setdefault(line.study, []).append(line)
    removed, queue = 0, Queue(spool)
    for folder in list(received_studies(spool)):
        known = [*outbox.delivered_lines(folder.name), *undone.get(folder.name, ())]
        begun: dict[str, float] = {}  # by bytes: some lines only know an earlier time
        for line in known:
            begun[line.sha256] = max(line.begun, begun.get(line.sha256, 0.0))
        newest: dict[tuple[str, str, str], Line] = {}
        for line in known:
            place = line.target, line.case, line.file
            if place not in newest or begun[newest[place].sha256] <= begun[line.sha256]:
                newest[place] = line
        lines = newest.values()
        if not lines or any(line.state != DELIVERED for line in lines):
            continue
        if time.time() - max(line.ended for line in lines) < after:
            continue
        read = min(begun[line.sha256] for line in lines)
        state = queue.read(folder.name)
        # Times of files don't tell all: a clock may have been put back
        if state is not None and (
            state.outcome == "begun" or state.images != survey(folder).digest
        ):
            continue
        if remove_study(spool, folder.name, read, QUIET_S):
            removed += 1
            if state is not None and queue.read(folder.name) == state:
                queue.write(folder.name, replace(state, outcome="cleared"))
    return removed
