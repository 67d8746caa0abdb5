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
import os
import shutil
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from scanloom.core import Reason, ScanError
from scanloom.engine.listen.documents import Documents, stamped_files, state_of
from scanloom.io.dicom.header.header import read_elements
from scanloom.io.dicom.instance import read_instance
from scanloom.io.dicom.uids import is_uid
from scanloom.io.identity import ID_FORM
from scanloom.io.output.audit import audit_trail
from scanloom.io.output.file_names import CASE, TIMING
from scanloom.io.output.json_file import read_json, write_document
from scanloom.io.output.private import PRIVATE, check_links, write_private
from scanloom.io.system.atomic_write import fsync_path, remove_stale_temporaries
from scanloom.io.system.disk_errors import disk_errors_as_scan_errors
from scanloom.io.system.regular_files import open_regular_file
from scanloom.own_python import make_private_folder

if TYPE_CHECKING:
    from scanloom.io.network.commitment import Report

OUTBOX = "outbox"
WAITING, DELIVERED, FAILED = "waiting", "delivered", "failed"
TARGETS, ASKED, REPORTS = "targets", "asked", "reports"
REPLACED = "replaced"

MOST_WAITING_S = 3600.0
"""A scan that was read may have waited so long for its device."""
_STALE_S = 3600.0
NOT_SENT = (Reason.RESULT_DAMAGED, Reason.UNREADABLE)
"""Reasons for which a single case can't be added."""

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
    awaited : float
        Seconds that it waited for reports of commitment, or for room at the target. They are
        counted, since a clock may be put forward.
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
    awaited: float = 0.0

    @property
    def id(self) -> str:
        """The name of the line's file."""
        identity = "\0".join((self.target, self.instance, self.sha256)).encode()
        return hashlib.blake2b(identity, digest_size=16).hexdigest()

    @property
    def copy(self) -> tuple[str, str, str]:
        """What it is about: a newer line of the same replaces it."""
        return self.target, self.case, self.file

    @property
    def is_open(self) -> bool:
        """Whether something is to be done about it."""
        return self.state not in (DELIVERED, FAILED)


@dataclass(frozen=True)
class Trouble:
    """A target that takes nothing.

    Parameters
    ----------
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
        self._waiting = Documents(folder / WAITING, self._settled)
        self._failed = Documents(folder / FAILED, _read_line)
        self._delivered: dict[str, tuple[int, Counter[tuple[str, Proof]]]] = {}
        self._replaced = set[tuple[str, float]]()
        check_links(self.out)
        with disk_errors_as_scan_errors():
            for each in (folder, *(folder / name for name in _FOLDERS)):
                if not each.is_dir():
                    make_private_folder(each)
                    fsync_path(each.parent)
                elif each.stat().st_mode & 0o077:  # `status` may be asked about a read-only disk
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
            `clear_studies` keeps studies that came shortly before.

        Returns
        -------
        list of Line
            A line a file, as it is now: one that was added before may be delivered already.

        Raises
        ------
        ScanError
            RESULT_DAMAGED if `verify` finds a fault in the case; UNREADABLE if it can't be read
            now; OUTPUT_UNWRITABLE, DISK_FULL.
        """
        from scanloom.engine.results.verify import verify_case

        faults = {each.fault for each in verify_case(case_folder, case_folder.name)}
        if faults == {"unreadable"}:  # such as of a share that is away for a while
            raise ScanError(Reason.UNREADABLE, "the case can't be read, and is not sent")
        if faults:
            detail = "the case differs from what was published, and is not sent"
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
        return sorted(self._waiting.values().values(), key=lambda line: line.added)

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
        return sorted(self._failed.values().values(), key=lambda line: line.ended)

    def delivered_lines(self, study: str | None = None) -> Iterator[Line]:
        """Yield the lines that were delivered; of one study, or of all."""
        folder = self.folder / DELIVERED
        folders = folder.glob("??/*") if study is None else [folder / _study_folder(study)]
        for each in folders:
            yield from _lines_in(each)

    def forget(self, since: float, studies: Iterable[str]) -> None:
        """Remove the lines of studies that were delivered before a time, but not of some."""
        kept = {_study_folder(study).name for study in studies}
        for folder in (self.folder / DELIVERED).glob("??/*"):
            if folder.name not in kept and folder.stat().st_mtime < since:
                shutil.rmtree(folder)

    def state(self) -> OutboxState:
        """Return what it holds; of a study's delivered lines once, since they never change."""
        waiting, given_up = self.open_lines(), self.failed_lines()
        counts: dict[str, Counter[str]] = {}
        before, self._delivered = self._delivered, {}
        for folder in (self.folder / DELIVERED).glob("??/*"):
            with suppress(FileNotFoundError):  # forgotten just now
                seen, known = state_of(folder), before.get(folder.name)
                if known is None or known[0] != seen or seen < 0:
                    known = seen, Counter((each.target, each.proof) for each in _lines_in(folder))
                self._delivered[folder.name] = known
                for (target, proof), number in known[1].items():
                    counts.setdefault(target, Counter())[proof] += number
        newest: dict[tuple[str, str, str], float] = {}
        for line in (*waiting, *given_up):
            newest[line.copy] = max(line.added, newest.get(line.copy, 0.0))
        failed = []
        for line in given_up:
            if (line.id, line.added) not in self._replaced:
                delivered = self.delivered_lines(line.study)
                added = (each.added for each in delivered if each.copy == line.copy)
                if line.added >= max(newest[line.copy], max(added, default=0.0)):
                    failed.append(line)
                    continue
                self._replaced.add((line.id, line.added))
            counts.setdefault(line.target, Counter())[REPLACED] += 1
        for line in (*waiting, *failed):
            counts.setdefault(line.target, Counter())[line.state] += 1
        troubles = {name: self.trouble(name) for name in sorted(counts)}
        return OutboxState(
            {name: dict(counts[name]) for name in sorted(counts)},
            waiting,
            failed,
            {name: trouble for name, trouble in troubles.items() if trouble.tries},
        )

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
        request = self.folder / ASKED / f"{report.transaction}.json"
        try:
            known = is_uid(report.transaction) and read_json(request)["target"] in targets
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

        for path, _ in stamped_files(self.folder / REPORTS):
            try:
                content = read_json(path)
                report = Report(
                    content["transaction"], tuple(content["committed"]), dict(content["failed"])
                )
                request = read_json(self.folder / ASKED / f"{report.transaction}.json")
                yield request["target"], list(request["lines"]), report, path
            except (FileNotFoundError, ValueError, KeyError, TypeError, ScanError):
                path.unlink(missing_ok=True)  # of a request that is known no more

    def tidy(self) -> None:
        """Remove requests all of whose lines have ended, and what killed processes left."""
        since = time.time() - _STALE_S
        for name in _FOLDERS:
            remove_stale_temporaries(self.folder / name, since)
        waiting = {path.stem for path, _ in stamped_files(self.folder / WAITING)}
        for path, _ in stamped_files(self.folder / ASKED):
            with suppress(OSError, ValueError, KeyError, ScanError):
                if waiting.isdisjoint(read_json(path)["lines"]):
                    path.unlink(missing_ok=True)

    def _path(self, line: Line) -> Path:
        name = f"{line.id}.json"
        if line.state == DELIVERED:
            return self.folder / DELIVERED / _study_folder(line.study) / name
        return self.folder / (FAILED if line.state == FAILED else WAITING) / name

    def _write(self, path: Path, line: Line) -> None:
        write_private(path, lambda draft: write_document(draft, asdict(line)))


@dataclass(frozen=True)
class OutboxState:
    """The lines of an outbox, by their states.

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


def open_outbox(out: Path) -> Outbox | None:
    """Return the outbox of an output folder; None if there is none that can be read.

    Raises
    ------
    ScanError
        As of `Outbox`.
    """
    folder = outbox_folder(out)
    return Outbox(folder) if os.access(folder, os.R_OK | os.X_OK) else None


_FOLDERS = (WAITING, DELIVERED, FAILED, TARGETS, ASKED, REPORTS)


def _study_folder(study: str) -> Path:
    """Return where the delivered lines of a study are."""
    key = hashlib.blake2b(study.encode(), digest_size=16).hexdigest()
    return Path(key[:2], key)


def _lines_in(folder: Path) -> Iterator[Line]:
    """Yield the lines of a folder."""
    for path, _ in stamped_files(folder) if folder.is_dir() else ():
        if (line := _read_line(path)) is not None:
            yield line


def _read_line(path: Path) -> Line | None:
    try:
        content = read_json(path)
        # One of an earlier version may lack what has a default
        names = (name for name in Line.__dataclass_fields__ if name in content)
        return Line(**{name: content[name] for name in names})
    except (OSError, ValueError, KeyError, TypeError, ScanError):
        return None


def _fresh(line: Line) -> Line:
    """Return a line as it is to be tried from now on."""
    state: State = "waiting" if line.state == FAILED else line.state
    kept = replace(line, state=state, added=time.time(), refusals=0, due=0.0)
    return replace(kept, reason="", ended=0.0, awaited=0.0)


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


def case_name(line: Line, before: str = "") -> str:
    """Return the id of a line's case; `--names source` names some by their patients."""
    return before + line.case if ID_FORM.fullmatch(line.case) else "a case named by its source"
