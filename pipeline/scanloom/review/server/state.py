"""State of a review server: the list of cases, doubtful ones first, and the verdicts on them."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Measurement, Reason, ScanError, is_passing
from scanloom.core.measurement import ReferenceRange
from scanloom.io.output.file_names import CASE
from scanloom.io.output.layout import (
    case_entries,
    case_folder,
    case_parents,
    is_case_name,
    published_cases,
    read_case,
)
from scanloom.io.output.measurements import read_measurements
from scanloom.io.output.published import check_files
from scanloom.io.output.tabled_cases import read_tabled
from scanloom.review import outliers
from scanloom.review.outliers import Finding
from scanloom.review.revisions import REVISIONS, latest_result, revision_number
from scanloom.review.scratch import Objects
from scanloom.review.server.cases import OpenCases, OpenedCase
from scanloom.review.server.drafts import Drafts
from scanloom.review.server.patients import PatientNames
from scanloom.review.server.rows import (
    STATES,
    CaseRows,
    ListedCase,
    ListRow,
    MeasuredCase,
    Query,
    ReviewerRows,
    doubts_of,
)
from scanloom.review.server.security import RefusedError
from scanloom.review.server.stored_list import StoredList, read_list, remove_list, store_list
from scanloom.review.verdicts.log import REVIEW, VerdictLog
from scanloom.review.verdicts.readers import Readers
from scanloom.review.verdicts.verdict import TAGS, Seen, Verdict, about, seen_of, state_of

LEAST_INTERVAL_S = 2.0
"""Time between two looks for new cases; with many cases, some times as long as a look takes."""
_INTERVALS_PER_LOOK = 10
MAX_WAIT_S = 1.0
"""Time that a request waits for a look; then it is answered from the look before."""
CHECKED = 5_000
"""Cases whose files are compared with their records in a look, in turn; of the others only those in
whose folder, or revisions, a file was added, replaced or removed."""
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Exceptions when reading a file that was changed after its publication."""


class CaseStore(Mapping[str, MeasuredCase]):
    """The cases of a list by name, in a temporary file; threads may read it while it changes.

    Parameters
    ----------
    folder : Path or None
        A folder of the file system that has room for the file; None for memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._objects, self._places = Objects[MeasuredCase](folder), dict[str, int]()

    def __getitem__(self, name: str) -> MeasuredCase:
        """Return a case; KeyError if it is not there."""
        return self._objects[self._places[name]]

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the cases that there are now."""
        return iter(tuple(self._places))

    def __len__(self) -> int:
        """Return the number of cases."""
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        """Return whether a case is there, without reading it."""
        return name in self._places

    def put(self, case: MeasuredCase) -> None:
        """Add or replace a case; OSError if it can't be written."""
        self._places[case.name] = self._objects.add(case)

    def remove(self, name: str) -> None:
        """Remove a case, if it is there."""
        self._places.pop(name, None)


class Worklist:
    """The published cases of an output folder, in the order of review; new ones appear.

    At the start, the list is that of the server before, if it was stored. Its rows are there at
    once; `checking` says how many were compared with their folders since. If one differs, the list
    is made anew meanwhile.

    A new list takes cases from the tables of the last run if their folders are those that the
    tables were made of, by inode and time. Some folders are read; if one differs, all are. As soon
    as more of a case is needed than a stored list or tables have, its folder is read: then that
    counts.

    Parameters
    ----------
    out : Path
        The output folder.
    judged : set of str
        Names of cases that have verdicts: their folders are read at the start.
    """

    def __init__(self, out: Path, judged: Set[str] = frozenset()) -> None:
        self.out, self._judged = out, judged
        self.damaged: set[str] = set()
        """Names of cases that can't be read, which are left out."""
        self._scratch = out / REVIEW if (out / REVIEW).is_dir() else None
        self.cases = CaseStore(self._scratch)
        self.rows = CaseRows(())
        """The rows of the cases; others after a look that found another case in `cases/`."""
        self.version = 0
        self._guard = threading.Lock()  # of the looks
        self._swap = threading.Lock()  # of the attributes above
        self._cohort = outliers.Cohort((), {})
        self._stamps: tuple[object, ...] | None = None  # of the folders of cases
        self._next_look, self._next_checked = 0.0, 0
        self._looks = dict[str, int]()  # of each case's folder
        self._revised = dict[str, int]()  # of its revisions
        self._is_sorted = False  # by what the cases are now
        self._look: threading.Thread | None = None
        self._stored: StoredList | None = None  # until all folders were compared with it
        self._is_measured = True  # whether `cases` has all cases, else those that were read
        self._looked = 0  # folders that were compared
        self._anew: Worklist | None = None  # while a list is made anew

    def refresh(self) -> None:
        """Look for cases that were added, replaced or removed, unless that was done just now."""
        with self._guard:
            if self._stamps is None and self._look is None and not self._take_stored():
                self._make()
                return
            if self._look is None or not self._look.is_alive():
                if time.monotonic() < self._next_look:
                    return
                self._look = threading.Thread(target=self._read_changes, daemon=True)
                self._look.start()
            look = self._look
        if self._stored is None and self._anew is None:  # else it takes minutes
            look.join(MAX_WAIT_S)

    @property
    def checking(self) -> int | None:
        """Percentage of the folders that were compared with a stored list; None at its end."""
        stored = self._stored
        if stored is None:
            return None
        return min(99, 100 * (self._anew or self)._looked // max(1, len(stored.names)))

    def seen(self, name: str) -> Seen | None:
        """Return what a verdict about a case is about; None if it is not there.

        As long as a stored list is not checked, its word counts for cases that were not read.

        Raises
        ------
        OSError
            If the case can't be read for the moment.
        """
        case, stored = self.cases.get(name), self._stored
        if not isinstance(case, ListedCase):
            if stored is not None and (seen := stored.seen(name)) and self.rows.of(name):
                return seen
            case = self.read(name)
        return None if case is None else case.seen

    def read(self, name: str) -> ListedCase | None:
        """Return a case of the list, whose folder is read if it was not; None if it is not there.

        Raises
        ------
        OSError
            If it can't be read for the moment.
        """
        case = self.cases.get(name)
        is_listed = case is not None or (not self._is_measured and self.rows.of(name) is not None)
        if is_listed and not isinstance(case, ListedCase):
            self.update(name)
            case = self.cases.get(name)
        return case if isinstance(case, ListedCase) else None

    def findings(self, name: str) -> list[Finding]:
        """Return the findings of a case; [] if it is not there; errors as `read`."""
        case = self.cases.get(name) or self.read(name)
        return [] if case is None else _findings(case, self._cohort)

    def update(self, name: str) -> bool:
        """Read a case again if it was replaced, corrected or removed; return whether it was.

        Its findings are made anew; its place in the list, and what other cases are compared with,
        stay until the next look that finds another case in `cases/`.

        Raises
        ------
        OSError
            If it can't be read for the moment: then it stays as it was.
        """
        folder = case_folder(self.out, name)
        case = self._current(folder)
        with self._swap:
            if case is not None and not self._put(case):
                return False
            self._is_sorted = False
            if case is None:
                self.cases.remove(name)
                self.damaged = self.damaged - {name} | ({name} if folder.is_dir() else set())
                self.rows.remove(name)
            else:
                row = ListRow.of(case, _findings(case, self._cohort))
                self.damaged = self.damaged - {name}
                if not self.rows.put(row):
                    self.rows = CaseRows(itertools.chain(self.rows, [row]))
            self.version += 1
            return True

    def _put(self, case: ListedCase) -> bool:
        """Keep a case as it was read; return whether the list had another one, or none."""
        listed = self.cases.get(case.name)
        if isinstance(listed, ListedCase) and listed.stamp == case.stamp:
            return False
        self.cases.put(case)
        row = None if self._is_measured else self.rows.of(case.name)
        if listed is None and row is not None:  # of a stored list
            seen = None if self._stored is None else self._stored.seen(case.name)
            is_same = row == ListRow.of(case, _findings(case, self._cohort))
            return not is_same or seen not in (None, case.seen)
        return isinstance(listed, ListedCase) or case.as_measured != listed

    def _take_stored(self) -> bool:
        """Take the list that an earlier server stored, if there is one."""
        stored = read_list(self.out)
        if stored is None:
            return False
        self.rows, self._cohort, self.damaged = stored.rows, stored.cohort, stored.damaged
        self._stored, self._is_measured = stored, False
        self.version += 1
        return True

    def _make(self) -> None:
        """Make the list of tables and folders."""
        self._take_tabled()
        self._read_changes()

    def _make_anew(self) -> bool:
        """Make the list anew while this one is shown, and take it; return whether it is whole."""
        self._anew = anew = Worklist(self.out, self._judged)
        try:
            anew._make()
        finally:
            self._anew = None
        if anew._stamps is None:  # the folder can't be read now
            return False
        before = self.cases
        with self._swap:
            for name in ("cases", "rows", "damaged", "_cohort", "_looks", "_revised", "_is_sorted"):
                setattr(self, name, getattr(anew, name))
            self._stored, self._is_measured, self._next_checked = None, True, anew._next_checked
            self.version += 1
        for name in before:  # it may have been corrected after the new list read it
            self.update(name)
        return anew._stamps[0] is not None

    def _check(self, stored: StoredList, revised: Mapping[str, int]) -> bool:
        """Compare all folders with a stored list; return whether it is that of a new look.

        Of damaged cases, those with verdicts, those with new corrections and some others, the
        folders are read.
        """
        self._looked = 0
        names, missing, damaged = stored.names, np.ones(len(stored.names), bool), set[str]()
        entries = (entry for entry, _ in case_entries(self.out))
        while batch := list(itertools.islice(entries, CHECKED)):
            damaged |= stored.damaged.intersection(entry.name for entry in batch)
            whole = [entry for entry in batch if entry.name not in damaged]
            indices = names.first_rows([entry.name for entry in whole])
            looks = np.fromiter((_look(_stamp(each)) for each in whole), np.int64, len(whole))
            if (indices < 0).any() or (stored.looks[indices] != looks).any():
                return False
            missing[indices] = False
            self._looked += len(whole)
        folders = (case_folder(self.out, name) for name in damaged)
        if missing.any() or damaged != stored.damaged or any(map(self._current, folders)):
            return False
        corrected = {name for name, _ in stored.revised().items() ^ revised.items()}
        judged = {name for name in self._judged if names.first_row(name) is not None}
        sampled = np.random.default_rng().choice(
            len(names), min(CHECKED, len(names)), replace=False
        )
        for name in judged.union(names[index] for index in sampled) - corrected:
            self.update(name)
        # rows that changed, also those that somebody looked at meanwhile
        if self.rows is not stored.rows or {*map(names.__getitem__, self.rows.updated)} - corrected:
            return False
        for name in corrected.intersection(names):
            self.update(name)
        self._stored, self._revised = None, dict(revised)
        if self.rows.updated or any(stored.seen(name) is None for name in judged):
            self._store(dict(zip(names, stored.looks.tolist(), strict=True)))
        return True

    def _store(self, looks: Mapping[str, int]) -> None:
        """Store the list for the next server, if it is a long one."""
        if len(self.rows.names) <= CHECKED:
            remove_list(self.out)
        else:
            cases = ((name, self.cases.get(name)) for name in self._judged)
            seen = {name: case.seen for name, case in cases if isinstance(case, ListedCase)}
            rows, cohort, damaged = self.rows, self._cohort, self.damaged
            store_list(self.out, rows, cohort, damaged, looks, self._revised, seen)

    def _take_tabled(self) -> None:
        """Take the cases of the tables, as after a look at the folders that these were made of."""
        for name, time_ns, inode, document, measurements in read_tabled(self.out):
            with suppress(LookupError, TypeError):
                if name not in self._judged:
                    self.cases.put(MeasuredCase.of(name, document, measurements))
                    self._looks[name] = _look((time_ns, inode))
        self._next_checked = secrets.randbelow(len(self._looks) or 1)

    def _read_changes(self) -> None:
        began = time.monotonic()
        whole = True
        with suppress(OSError):  # the folder is gone or can't be read now: the list stays
            stamps = [*map(_stamp, case_parents(self.out))], _revision_looks(self.out)
            if self._stored is not None and self._check(self._stored, stamps[1]):
                pass
            elif not self._is_measured and (self._stamps is None or stamps[0] != self._stamps[0]):
                whole = self._make_anew()
            elif self._stamps is None or stamps[0] != self._stamps[0]:
                whole = self._read(stamps[1])
            else:
                for name in {name for name, _ in stamps[1].items() ^ self._revised.items()}:
                    self.update(name)
                self._revised = stamps[1]
            # the stamps were taken before the look: a change meanwhile is seen by the next one
            self._stamps = (stamps[0] if whole else None,)
        now = time.monotonic()
        self._next_look = now + max(LEAST_INTERVAL_S, _INTERVALS_PER_LOOK * (now - began))

    def _read(self, revised: Mapping[str, int]) -> bool:
        """Read new and changed cases; return whether each could be read, or is damaged.

        One that can't be read for the moment stays as it was. `revised` are the looks of the
        revisions that there are.
        """
        self._looked = 0
        damaged, whole, is_sorted = set[str](), True, self._is_sorted
        gone, folders = set(self.cases), published_cases(self.out)
        count = len(folders)
        for n, folder in enumerate(folders):
            self._looked = n
            name, listed = folder.name, folder.name in self.cases
            gone.discard(name)
            is_checked = (n - self._next_checked) % count < CHECKED
            look = _look(_stamp(folder))
            is_same = listed and look == self._looks.get(name)
            is_same &= revised.get(name) == self._revised.get(name)
            if is_same and not is_checked:
                continue
            try:
                case = self._current(folder)
            except OSError:
                whole = False
                self._looks.pop(name, None)
                if not listed:
                    damaged.add(name)
                continue
            self._looks[name] = look
            is_tabled = listed and not isinstance(self.cases.get(name), ListedCase)
            if case is None:
                damaged.add(name)
                self.cases.remove(name)
            if self._put(case) if case is not None else listed:
                is_sorted = False
                if is_same and is_tabled:  # the table is not to be trusted
                    self._looks = {}
                    return self._read(revised)
        self._next_checked = (self._next_checked + CHECKED) % max(1, count)
        for name in gone:
            self.cases.remove(name)
            self._looks.pop(name, None)
            is_sorted = False
        self._revised = dict(revised)
        if is_sorted:
            self.damaged = damaged
        else:
            self._sort(damaged)
            if whole:
                self._store(self._looks)
        return whole

    def _sort(self, damaged: set[str]) -> None:
        """Compare all cases with each other; of equal ones, the order is that of their names."""
        names = sorted(self.cases)
        references = dict[str, tuple[ReferenceRange, ...]]()

        def listed() -> Iterator[MeasuredCase]:
            return filter(None, map(self.cases.get, names))

        def measurements() -> Iterator[Measurement]:
            for case in listed():
                references.update(case.references)
                yield from case.measurements

        cohort = outliers.Cohort(measurements(), references, self._scratch)
        of_cases = (ListRow.of(case, _findings(case, cohort)) for case in listed())
        rows = CaseRows(of_cases, by_risk=True)
        with self._swap:
            self._cohort, self.damaged = cohort, damaged
            self.rows, self._is_sorted = rows, True
            self.version += 1

    def _current(self, folder: Path) -> ListedCase | None:
        """Return a case as it is now: the listed one if it is the same; None if damaged or gone.

        Raises
        ------
        OSError
            If it can't be read for the moment, such as with too many open files.
        """
        try:
            check_files(folder)
            latest = latest_result(self.out, folder.name)
            stamp = _stamp(folder / CASE), _stamp(latest / CASE)
            listed = self.cases.get(folder.name)
            if isinstance(listed, ListedCase) and listed.stamp == stamp:
                return listed
            document = read_case(folder)
            measured = MeasuredCase.of(folder.name, document, read_measurements(latest))
            return ListedCase(
                **vars(measured),
                stamp=stamp,
                shape=tuple(document["grid"]["shape"]),
                spacing=tuple(document["grid"]["spacing_mm"]),
                seen=seen_of(latest),
                revision=revision_number(latest),
            )
        except (*_DAMAGE, ScanError) as exc:
            if is_passing(exc):
                raise
            return None


def _findings(case: MeasuredCase, cohort: outliers.Cohort) -> list[Finding]:
    return outliers.find_outliers(case.measurements, cohort, case.axes)


def _look(stamp: object) -> int:
    """Return a number that changes with the stamp of a folder; of integers, in any process."""
    return hash(stamp) if stamp else 0


def _revision_looks(out: Path) -> dict[str, int]:
    """Return numbers that change when a revision is added, by the name of its case."""
    try:
        return {path.name: _look(_stamp(path)) for path in Path(out, *REVISIONS).iterdir()}
    except OSError as exc:
        if is_passing(exc):
            raise
        return {}


def _stamp(path: Path | os.DirEntry[str]) -> object:
    """Return a value that changes when a file or folder is replaced; None if it is missing."""
    with suppress(OSError):
        stat = path.stat()
        return stat.st_mtime_ns, stat.st_ino
    return None


BLIND = (
    "Others read this case without knowing of each other: the strokes are kept until all have "
    "decided, save them then."
)
DECIDED = (
    "You decided on this case in another window, or undid that: look at the verdict that counts, "
    "then do this again."
)
ByReviewer = Mapping[str, Verdict]
AHEAD = 2
"""Cases after the one that is shown, which its page fetches ahead."""
ENDS: tuple[Literal["left", "right"], ...] = ("left", "right")
Publish = Callable[[str, Seen, Mapping[str, NDArray[Any]], str], Path]
"""Publishes corrected label maps: name of the case, the result that was corrected, label maps
(I, J, K) by file, and the reviewer's code. Returns the folder of the revision."""


@dataclass(eq=False)
class _View:
    """A reviewer's rows, and what was taken into them.

    Parameters
    ----------
    prefix : str
        Begin of the versions of these rows: that of others differs.
    assigned : dict
        Whether the reviewer reads a case without verdicts, by name; empty if all are read.
    lines, updated : int
        Lines of the log, and updates of the cases.
    back, drafts : set of str
        Cases to read again, and those with a draft.
    """

    rows: ReviewerRows
    prefix: str
    assigned: dict[str, bool]
    lines: int = 0
    updated: int = 0
    back: set[str] = field(default_factory=set)
    drafts: set[str] = field(default_factory=set)

    @property
    def version(self) -> str:
        """A text that changes when the rows do."""
        return f"{self.prefix}{self.rows.number}"


@dataclass(eq=False)
class ReviewState:
    """State of a review server.

    Parameters
    ----------
    names : mapping
        Display name of each reviewer's code.
    publish : callable or None
        Publishes corrections; None if they are not accepted.
    patients : PatientNames or None
        Names for the list; None if reviewers don't see them.
    """

    out: Path
    log: VerdictLog
    readers: Readers
    open_cases: OpenCases
    names: Mapping[str, str] = field(default_factory=dict)
    publish: Publish | None = None
    patients: PatientNames | None = None

    def __post_init__(self) -> None:
        judged = self.log.cases_of(0, self.log.stack.count)
        self.worklist = Worklist(self.out, judged)
        self.drafts = Drafts(self.out)
        self._views, self._guard = dict[str, _View](), threading.Lock()
        self._deciding = threading.Lock()
        self._start, self._made = secrets.token_hex(4), 0  # of no earlier server
        self._named: tuple[object, ...] = ()

    def listed(
        self, reviewer: str, query: Query, first: int, last: int, since: str = ""
    ) -> dict[str, Any] | None:
        """Return some rows of a reviewer's list, after a look for new cases.

        Parameters
        ----------
        first, last : int
            Positions in the selection of the query, from 0; the last one included.
        since : str
            Version of the rows that a page has: of these, only those that changed are returned.

        Returns
        -------
        dict or None
            "names" of all rows at these positions, and "cases", the rows; None if nothing changed
            since the version.
        """
        with self._view(reviewer) as view:
            checking = self.worklist.checking
            version = f"{view.version}.{'' if checking is None else checking}"
            if since == version:
                return None
            rows, names = view.rows, view.rows.rows.names
            chosen = self._chosen(view, query)
            indices = changed = chosen[first : last + 1]
            known = since.removeprefix(view.prefix).partition(".")[0]
            if since.startswith(view.prefix) and known.isdecimal() and len(known) < 10:
                changed = rows.changed_since(indices, int(known))
            models, modalities = rows.rows.choices(rows.all)
            return {
                "version": version,
                "checking": checking,
                "names": [names[index] for index in indices],
                "cases": self._shown_rows(view, changed, reviewer),
                "found": len(chosen),
                "counts": rows.counts(),
                "models": models,
                "modalities": modalities,
                "next": rows.next_waiting(chosen),
                "damaged": len(self.worklist.damaged),
            }

    def near(self, reviewer: str, query: Query, name: str) -> dict[str, Any]:
        """Return the cases before and after a case in a selection, and the next that waits.

        A case that the selection lacks, such as one that was just decided on, keeps its place in
        the order of review.
        """
        with self._view(reviewer) as view:
            chosen, names = self._chosen(view, query), view.rows.rows.names
            index = names.first_row(name)
            own = -1 if index is None else index
            before, after = (int(np.searchsorted(chosen, own, side)) for side in ENDS)
            return {
                "before": [names[n] for n in chosen[max(0, before - 1) : before]],
                "after": [names[n] for n in chosen[after : after + AHEAD]],
                "next": view.rows.next_waiting(chosen, own),
            }

    @contextmanager
    def _view(self, reviewer: str) -> Iterator[_View]:
        """Give a reviewer's rows, after a look; those of which something changed are made anew."""
        self.worklist.refresh()
        with self._guard:
            rows, stack = self.worklist.rows, self.log.stack
            view = self._views.get(reviewer)
            if view is None or view.rows.rows is not rows:
                view = self._views[reviewer] = self._new_view(reviewer, rows, view)
            updated, back = len(rows.updated), self._coming_back(reviewer)
            drafts = self.drafts.cases_of(reviewer)
            changed = {rows.names[index] for index in rows.updated[view.updated : updated]}
            changed |= self.log.cases_of(view.lines, stack.count)
            # a draft is in no file that the looks stat
            changed |= (back ^ view.back) | (drafts ^ view.drafts)
            view.lines, view.updated, view.back, view.drafts = stack.count, updated, back, drafts
            indices = [index for index in map(rows.names.first_row, changed) if index is not None]
            view.rows.number += bool(indices)
            for index in indices:
                self._set(view, index, reviewer, stack.of_case(rows.names[index]))
            yield view

    def _new_view(self, reviewer: str, rows: CaseRows, before: _View | None) -> _View:
        """Return rows of a reviewer as without any verdict."""
        reads = np.ones(len(rows.names), bool)
        assigned = before.assigned if before else {}
        if self.readers.double:
            for index, name in enumerate(rows.names):
                if name not in assigned:
                    assigned[name] = reviewer in self.readers.assigned(name, {})
                reads[index] = assigned[name]
        self._made += 1
        return _View(ReviewerRows(rows, reads), f"{self._start}.{self._made}.", assigned)

    def _set(self, view: _View, index: int, reviewer: str, verdicts: ByReviewer) -> None:
        """Set the state of a row by all verdicts about its case."""
        name = view.rows.rows.names[index]
        seen = self.worklist.seen(name)
        if seen is None:  # removed: no selection has it
            return
        visible = self._visible(name, reviewer, verdicts, view.back)
        state = state_of(seen, visible)
        reads = self.readers.reads(name, reviewer, about(seen, verdicts))
        view.rows.set(index, state, own=reviewer in visible, reads=reads)

    def _shown_rows(
        self, view: _View, indices: NDArray[np.int64], reviewer: str
    ) -> list[dict[str, Any]]:
        """Return the rows of some cases, as the page shows them."""
        shown = []
        for index in indices:
            name = view.rows.rows.names[index]
            case = self.worklist.read(name)
            if case is None:  # removed since
                continue
            kept = self.log.stack.of_case(name)
            if kept and self.worklist.checking is not None:  # its state was by the stored list
                self._set(view, index, reviewer, kept)
            verdicts = self._visible(name, reviewer, kept, view.back)
            own = verdicts.get(reviewer)
            row: dict[str, Any] = {
                "id": name,
                "modality": case.modality,
                "slices": case.shape,
                "spacing": [round(s, 3) for s in case.spacing],
                "models": case.models,
                "doubts": [text for text, _ in doubts_of(self.worklist.findings(name))],
                "state": STATES[view.rows.states[index]],
                "mine": own.decision if own else None,
                "revision": case.revision,
                "version": case.seen.version,
                "draft": name in view.drafts,
                "who": self.patients.of(name) if self.patients else [],
            }
            shown.append(row)
        return shown

    def _chosen(self, view: _View, query: Query) -> NDArray[np.int64]:
        """Return the indices of the rows that a query leaves."""
        rows, patients = view.rows.rows, self.patients
        named = rows, patients, patients.stamp if patients else None
        if query.words and named != self._named:
            texts = (" ".join(patients.of(name)) for name in rows.names) if patients else ()
            rows.name_patients(texts)
            self._named = named
        return view.rows.chosen(query)

    def me(self, reviewer: str) -> dict[str, Any]:
        """Return the reviewer, and the tags that a verdict may have."""
        tags = [{"id": key, "name": name} for key, name in TAGS.items()]
        blind = bool(self.readers.double)
        return {"reviewer": reviewer, "name": self.names[reviewer], "blind": blind, "tags": tags}

    def verdicts(self, name: str, reviewer: str) -> dict[str, Any]:
        """Return the verdicts about a case that a reviewer may see."""
        back = self._coming_back(reviewer)
        visible = self._visible(name, reviewer, self.log.stack.of_case(name), back)
        case = self.worklist.read(name)
        return {
            "state": state_of(case.seen, visible) if case else "",
            "again": name in back,
            "last": self._last(name, reviewer),
            "verdict": self._shown(visible.get(reviewer)),
            "others": [self._shown(v) for code, v in visible.items() if code != reviewer],
        }

    def findings(self, case: OpenedCase) -> list[dict[str, Any]]:
        """Return the doubts about a case, each with the voxel (view) that it speaks of."""
        shown = []
        for text, finding in doubts_of(self.worklist.findings(case.name)):
            box = next((m.box for m in finding.subjects if m.box is not None), None)
            point = box and [
                (a + b) // 2
                for a, b in zip(*(case.view.index_of(corner) for corner in box), strict=True)
            ]
            shown.append({"text": text, "point": point})
        return shown

    def check(self, name: str, reviewer: str, *, anew: bool = False) -> None:
        """Refuse a case that is not there, or not for a reviewer.

        Parameters
        ----------
        anew : bool
            Whether to look if the case was replaced, corrected or removed.

        Raises
        ------
        ScanError
            ID_UNKNOWN; RESULT_DAMAGED.
        """
        if is_case_name(name):
            if anew or name not in self.worklist.cases:
                self.worklist.update(name)
            if name in self.worklist.damaged:
                raise ScanError(Reason.RESULT_DAMAGED, "the case is damaged")
            valid = self._valid_of(name)
            if name in self.worklist.cases and self.readers.reads(name, reviewer, valid):
                return
        raise ScanError(Reason.ID_UNKNOWN, "there is no such case")

    def opened(self, name: str) -> OpenedCase:
        """Return an open case, opened again if its result was replaced.

        Raises
        ------
        ScanError
            As of `open_case`; RESULT_DAMAGED if label maps are not those of their checksums.
        """
        for is_last in (False, True):
            case, listed = self.open_cases.get(name), self.worklist.read(name)
            if listed is None or listed.seen == case.seen:
                return case
            if not is_last:
                self.worklist.update(name)
            self.open_cases.forget(name)
        raise ScanError(Reason.RESULT_DAMAGED, "the case is damaged")

    def keep(self, verdict: Verdict, comment: str, last: int) -> Verdict:
        """Keep a verdict about the result that there is now, with how it was given.

        Parameters
        ----------
        last : int
            Number of the reviewer's verdict that it replaces; 0 for none.

        Raises
        ------
        ScanError
            ID_UNKNOWN if the case was removed; STALE if another result was seen; DISK_FULL or
            OUTPUT_UNWRITABLE.
        RefusedError
            VERDICT_CHANGED if another verdict than `last` counts.
        """
        name, reviewer = verdict.case, verdict.reviewer
        # the last look may be older than a correction that was published meanwhile
        self.worklist.update(name)
        case = self.worklist.read(name)
        if case is None:
            raise ScanError(Reason.ID_UNKNOWN, "there is no such case")
        if verdict.seen != case.seen:
            raise ScanError(Reason.STALE, "the result was replaced since it was opened")
        again = name in self._coming_back(reviewer) and reviewer in self._valid_of(name)
        lines = self.log.stack.lines_of_case(name)
        independent = not self.readers.may_have_seen_others(name, reviewer, lines)
        reading = 2 if again else 1
        kept = replace(verdict, reading=reading, independent=independent)
        with self._after(name, reviewer, last):
            return self.log.append(kept, comment)

    def undo(self, name: str, reviewer: str, last: int) -> Verdict:
        """Undo a reviewer's last verdict about a case.

        Raises
        ------
        ScanError, RefusedError
            As for `keep`; NOTHING without one.
        """
        with self._after(name, reviewer, last):
            undone = self.log.undo(reviewer, name)
        if undone is None:
            raise RefusedError(409, "NOTHING", "There is no verdict of yours to undo.")
        return undone

    @contextmanager
    def _after(self, name: str, reviewer: str, last: int) -> Iterator[None]:
        """Let a reviewer decide if this verdict is still the last one about the case."""
        with self._deciding:
            if last != self._last(name, reviewer):
                raise RefusedError(409, "VERDICT_CHANGED", DECIDED)
            yield

    def _last(self, name: str, reviewer: str) -> int:
        """Return the number of a reviewer's verdict about a case that counts; 0 without one."""
        verdict = self.log.stack.of_case(name).get(reviewer)
        return 0 if verdict is None else verdict.number

    def save_draft(self, name: str, reviewer: str, version: str) -> int:
        """Publish a correction as a revision, and return its number.

        Parameters
        ----------
        version : str
            The draft that was seen.

        Raises
        ------
        ScanError
            STALE if the result was replaced since the first stroke; what `Publish` raises.
        RefusedError
            If nothing was changed; DRAFT_CHANGED.
        """
        self.worklist.update(name)
        case = self.opened(name)
        held = self.drafts.of(case, reviewer)
        if self.readers.is_blind(name, reviewer, self._valid_of(name)):
            raise RefusedError(409, "BLIND", BLIND)
        with held.changing(case, version) as draft:
            layers = {case.layers[n].file: case.view.back(draft.layer(n)) for n in draft.changed}
            if not layers or self.publish is None:
                raise RefusedError(409, "NOTHING", "Nothing was changed.")
            seen = case.seen
            self.open_cases.forget(name)  # its arrays and the draft's: publishing needs the memory
            held.painted = None
            del case, draft
            folder = self.publish(name, seen, layers, reviewer)
            self.drafts.drop(held)
        self.open_cases.forget(name)
        self.worklist.update(name)
        return int(folder.name)

    def _visible(
        self, name: str, reviewer: str, verdicts: ByReviewer, back: set[str]
    ) -> dict[str, Verdict]:
        """Return the verdicts about a case that a reviewer may see; none of one to read again."""
        seen = self.worklist.seen(name)
        if name in back or seen is None:
            return {}
        return self.readers.visible(name, reviewer, verdicts, seen)

    def _coming_back(self, reviewer: str) -> set[str]:
        if not self.readers.repeat:
            return set()
        return self.readers.coming_back(reviewer, self.log.stack.history())

    def _valid_of(self, name: str) -> dict[str, Verdict]:
        """Return the verdicts about the result of a case that there is now."""
        case = self.worklist.read(name)
        return {} if case is None else about(case.seen, self.log.stack.of_case(name))

    def _shown(self, verdict: Verdict | None) -> dict[str, Any] | None:
        if verdict is None:
            return None
        return {
            "number": verdict.number,
            "reviewer": self.names.get(verdict.reviewer, verdict.reviewer),
            "decision": verdict.decision,
            "structures": verdict.structures,
            "tags": verdict.tags,
            "comment": self.log.comment_of(verdict),
            "at": verdict.at,
        }
