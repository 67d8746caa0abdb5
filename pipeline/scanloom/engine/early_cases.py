"""Cases that begin while the index of their archive still grows.

The index is built in a thread. Of each part that is stored, the series that are probably whole are
worked on meanwhile. When the index is complete, each of these is compared with the series that the
whole archive gives: if they are not exactly equal, its result is withdrawn, so that the output
folder is as if no case had begun before. A list on disk, written before a case begins, lets the
next run do so for one that was killed.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from scanloom.core import DICOM, Case, CaseRecord, Reason, ScanError
from scanloom.engine.outcomes import NameSet, Outcome, Outcomes
from scanloom.engine.prepare import Request, make_cases, with_files
from scanloom.engine.results.run_cases import add_sources
from scanloom.engine.worker.messages import CaseFile
from scanloom.engine.workflow.schema import Workflow
from scanloom.engine.workflow.selection import Scope, select
from scanloom.io.identity import key_fingerprint
from scanloom.io.index.build import (
    Index,
    OnPart,
    PartName,
    ids_of_part,
    index_of_part,
    source_from_index,
)
from scanloom.io.index.storage import IndexedSeries
from scanloom.io.output import crosswalk, failures
from scanloom.io.output.audit import AuditTrail
from scanloom.io.output.case_folder import withdraw
from scanloom.io.output.early_list import (
    EARLY,
    EarlyCase,
    add_early,
    early_lists,
    keep_early,
    read_early,
)
from scanloom.io.output.file_names import CASE
from scanloom.io.output.json_file import read_json
from scanloom.io.output.layout import FANNED_ABOVE, case_folder, fan_out
from scanloom.io.output.ledger import list_folders
from scanloom.io.output.parquet_file import read_errors
from scanloom.io.output.published import read_provenance
from scanloom.io.session import current_session

ENOUGH_CASES = 40
"""Cases that wait before workers start. Whether an engine is measured depends on whether a run has
20 windows or more: with twice as many cases, this is decided as it will be for the whole archive,
unless more than half of them turn out to be none."""
_NAMES_AT_ONCE = 10_000
_POLL_INTERVAL_S = 0.2
_PATIENCE_S = 1.0
"""Time that an index which is given up has to end; it does so with its next part."""


def may_begin_early(workflow: Workflow) -> bool:
    """Return whether a workflow decides series by series, not among those of a study."""
    return workflow.select.choose == "all" and not workflow.channels


class _AbandonedError(Exception):
    """The run has ended before its index."""


class GrowingIndex:
    """An index that is built in a thread, and its parts as they are stored.

    Parameters
    ----------
    build : callable
        Builds the index, and hands each part to the function that it gets.
    on_files : callable
        Receives the number of files of each part; called in the thread.
    """

    def __init__(self, build: Callable[[OnPart], Index], on_files: Callable[[int], None]) -> None:
        self._build, self._on_files = build, on_files
        self._parts = queue.SimpleQueue[PartName | None]()
        self._index, self._abandoned = Future[Index](), False
        self._thread = threading.Thread(target=self._run, name="index", daemon=True)

    def __enter__(self) -> Self:
        self._session = current_session()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._abandoned = True
        if kind is None or issubclass(kind, Exception):  # not for a second Ctrl-C
            self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        try:
            with self._session.active():
                self._index.set_result(self._build(self._add))
        except BaseException as error:  # noqa: BLE001  # the run raises it
            self._index.set_exception(error)
        self._parts.put(None)  # wakes up who waits

    def _add(self, part: PartName, files: int) -> None:
        if self._abandoned:
            raise _AbandonedError
        self._on_files(files)
        self._parts.put(part)

    def is_complete(self) -> bool:
        """Return whether it is complete; raise its error if it failed."""
        return self._index.done() and self.result() is not None

    def next_part(self, wait_s: float = 0.0) -> PartName | None:
        """Return the next part that was stored; None if there is none yet, or none follows."""
        try:
            return self._parts.get(timeout=wait_s) if wait_s else self._parts.get_nowait()
        except queue.Empty:
            return None

    def result(self) -> Index:
        """Wait for the index, and return it.

        Raises
        ------
        ScanError
            As `scanloom.io.index.build.build_index`.
        """
        return self._index.result()


class EarlyCases(Iterator[Case | None]):
    """The cases of the parts of a growing index, as an iterator that ends when it is complete.

    None stands for no case yet. An earlier result is never replaced: cases that have one, or a
    record of a failure, wait for the whole index. In memory are a digest of each case that was
    given, and what other runs published.

    Parameters
    ----------
    growing, request, key, out, scope
        The index, what is requested, the key of the ids, the output folder, and the share of it.
    """

    def __init__(
        self, growing: GrowingIndex, request: Request, key: bytes, out: Path, scope: Scope
    ) -> None:
        self._growing, self._request, self._key = growing, request, key
        self._out, self._scope = out, scope
        self._ready = deque[tuple[IndexedSeries, Case]]()
        self._of_part: Iterator[tuple[IndexedSeries, Case]] = iter(())
        self._case_file: CaseFile | None = None
        self._ended = Outcomes()

    def wait(self, stop: threading.Event) -> bool:
        """Wait until cases can begin; return False if the index is complete before."""
        while not stop.is_set() and not self._growing.is_complete():
            if (found := self._find(_POLL_INTERVAL_S)) is not None:
                self._ready.append(found)
            if len(self._ready) >= ENOUGH_CASES:
                return True
        return False

    def begin(self, case_file: CaseFile, folder: Path) -> None:
        """Give cases from now on, each of which is added before to a file and the run's list."""
        self._case_file, self._list = case_file, folder / EARLY

    def __next__(self) -> Case | None:
        if self._growing.is_complete() or self._case_file is None:
            raise StopIteration
        found = self._ready.popleft() if self._ready else self._find()
        if found is None:
            return None
        series, case = found
        if len(self._case_file) * (self._scope.shard or (1, 1))[1] >= FANNED_ABOVE:
            fan_out(self._out)
        source = crosswalk.source_from_series(case.series, case.id)
        add_sources(self._out, key_fingerprint(self._key), iter([source]))
        series_digest = _digest(series, self._key)
        line = EarlyCase(case.id, case.folder_name, case.recipe, case.stamp, series_digest)
        add_early(self._list, line)
        self._case_file.append(case)
        return next(self._case_file)

    def note(self, record: CaseRecord) -> None:
        """Note the outcome of a case."""
        code = record.reason.code if record.reason else ""
        self._ended.append(Outcome(record.id, code, record.detail))

    def _find(self, wait_s: float = 0.0) -> tuple[IndexedSeries, Case] | None:
        """Return the next case; None if there is none yet."""
        while (found := next(self._of_part, None)) is None:
            part = self._growing.next_part(wait_s)
            if part is None:
                return None
            self._of_part = self._cases_of(part)
        return found

    def _cases_of(self, part: PartName) -> Iterator[tuple[IndexedSeries, Case]]:
        """Yield the cases of a part whose series are whole as far as it shows, and without one."""
        with suppress(*read_errors()):
            if all(map(self._is_taken, ids_of_part(self._out, part))):
                return
            index = index_of_part(self._out, part, self._key)
            chosen = select(index.series, self._request.workflow, self._request.cards, _ignore)
            of_whole = (inputs for inputs in chosen if _may_be_whole(inputs[0]))
            for inputs, light in make_cases(index, of_whole, self._request, self._key, _ignore):
                if self._is_taken(light.id) or not self._scope.holds(light.id):
                    continue
                with suppress(ScanError):  # the whole index tells it
                    case = with_files(index, inputs, light)
                    if case.series.kind == DICOM and len({f.parent for f in case.series.files}) > 1:
                        continue  # perhaps in a further folder too
                    self._taken.add(case.id)
                    yield inputs[0], case

    def _is_taken(self, name: str) -> bool:
        """Return whether a case was given, or has a result or a failure of an earlier run."""
        return not name or name in self._taken or self._folders.get(name, name) != name

    @cached_property
    def _folders(self) -> Mapping[str, str]:
        return crosswalk.renamed_folders(self._out)

    @cached_property
    def _taken(self) -> NameSet:
        taken, names = NameSet(), list_folders(self._out)["name"]
        for start in range(0, len(names), _NAMES_AT_ONCE):
            taken.add_all(names.slice(start, _NAMES_AT_ONCE).to_pylist())
        taken.add_all(list(failures.failed_cases(self._out)))
        return taken

    @property
    def outcomes(self) -> Iterable[Outcome]:
        """The outcomes that were noted."""
        return self._ended


# --- when the index is complete -------------------------------------------------------------------


class Compared(NamedTuple):
    """Cases that began early, compared with the whole index.

    Parameters
    ----------
    made : Outcomes
        Outcomes of this run that hold.
    void : list of Outcome
        Outcomes of this run that do not: the cases are worked on again, or are none.
    withdrawn : int
        Number of results that were removed, also of killed runs.
    """

    made: Outcomes
    void: list[Outcome]
    withdrawn: int

    def record(self) -> Callable[[str], CaseRecord | None]:
        """Return a function that gives how a case ended in this run, by its id."""
        if not len(self.made):
            return lambda _: None
        find = self.made.finder()

        def record(name: str) -> CaseRecord | None:
            for _, code, detail in find(name)[-1:]:
                return CaseRecord(name, Reason[code] if code else None, detail, (), None)
            return None

        return record


def compare_early(
    index: Index, key: bytes, out: Path, scope: Scope, outcomes: Iterable[Outcome], run: str
) -> Compared:
    """Compare the cases that began early, in this run or a killed one, with the whole index.

    If a series is not exactly as it was, or several have its id, the result is withdrawn, as well
    as the record of its failure. What the index does not have stays listed.

    Parameters
    ----------
    index, key, out, scope
        The whole index, the key of its ids, the output folder, and the cases that the run takes.
    outcomes : iterable of Outcome
        Of the cases of this run so far.
    run : str
        Its id.
    """
    # That of this run last: it tells what there is now
    lists = sorted(early_lists(out), key=lambda path: path.parent.name == run)
    began = {line.case: line.series for path in lists for line in read_early(path)}
    if not any(name in began and scope.holds(name) for name in index.series.ids()):
        return Compared(Outcomes(), [], 0)
    found = dict[str, str]()
    for series in index.series:
        if series.id in began and scope.holds(series.id):
            found[series.id] = "" if series.id in found else _digest(series, key)
    differ = {name for name, digest in found.items() if digest != began[name]}
    if differ:  # the crosswalk may have them as they were
        different = (series for series in index.series if series.id in differ)
        sources = (source_from_index(index, series) for series in different)
        add_sources(out, key_fingerprint(key), sources)
    made, void = Outcomes(), list[Outcome]()
    for outcome in outcomes:
        if outcome.id not in differ:
            made.append(outcome)
            continue
        void.append(outcome)
        failures.remove_failure(out, outcome.id)
    audit, withdrawn = AuditTrail(out, key), 0
    for path in lists:
        for line in read_early(path):
            if line.case in differ and _is_result_of(out, line):
                withdraw(out, line.folder, audit)
                withdrawn += 1
    for path in lists:
        lines = list(read_early(path))
        kept = [line for line in lines if line.case not in found]
        if len(kept) < len(lines):  # else a run of another shard may be adding to it
            keep_early(path, kept)
    return Compared(made, void, withdrawn)


def _is_result_of(out: Path, line: EarlyCase) -> bool:
    """Return whether a result is the one that a line tells: not made anew, nor corrected."""
    folder = case_folder(out, line.folder)
    try:
        made_by = read_provenance(folder)
        is_corrected = read_json(folder / CASE).get("revision") is not None
    except (OSError, ValueError, ScanError):
        return False  # there is none; of a damaged one, the run tells it
    return (made_by.recipe, made_by.stamp) == (line.recipe, line.stamp) and not is_corrected


def _may_be_whole(series: IndexedSeries) -> bool:
    """Return whether nothing in its part hints that a series goes on elsewhere, or is refused."""
    is_known = series.kind != DICOM or bool(series.series_uid)
    return is_known and series.reason is None and not series.unreadable and not series.damaged


def _digest(series: IndexedSeries, key: bytes) -> str:
    """Return a keyed digest of what makes the case of a series, whatever its part's number."""
    runs = [(run.start, run.stop) for run in series.files]
    text = json.dumps([*series._replace(files=(), pieces=()), runs])
    return hashlib.blake2b(text.encode(), key=key, digest_size=8).hexdigest()


def _ignore(_: Outcome) -> None:
    """Leave out a series: the whole index tells why."""
