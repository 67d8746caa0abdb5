"""Cases that begin while the index of their archive still grows.

The index is built in a thread. Of each part that is stored, the series that are probably whole are
worked on meanwhile, and their results wait in `OUT/.work`. When the index is complete, the outcome
of a case that is exactly one of the whole archive's becomes one of the run, as if it had ended just
now; the results of others are removed. The folder of a result is named by a digest of its case, so
that the next run finds it if this one is killed.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Self

from scanloom.core import DICOM, Case, CaseRecord, ScanError
from scanloom.engine.outcomes import NameSet
from scanloom.engine.prepare import Request
from scanloom.engine.results.run_cases import ignore, make_cases, with_files
from scanloom.engine.worker.messages import CaseFile
from scanloom.engine.worker.supervisor import CaseOutcome
from scanloom.engine.workflow.schema import Workflow
from scanloom.engine.workflow.selection import Scope, select
from scanloom.io.identity import key_fingerprint
from scanloom.io.index.build import Index, OnPart, PartName, ids_of_part, index_of_part
from scanloom.io.index.storage import IndexedSeries
from scanloom.io.output import crosswalk, failures
from scanloom.io.output.audit import AuditTrail
from scanloom.io.output.case_folder import (
    CaseFolder,
    remove_staged,
    staged_folder,
    staged_name,
    staged_results,
)
from scanloom.io.output.ledger import list_folders
from scanloom.io.output.parquet_file import read_errors
from scanloom.io.output.published import check_files
from scanloom.io.session import current_session
from scanloom.io.system.messages import Message

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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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
        """Return the next part that was stored; None if it is not stored yet, or none follows."""
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
    record of a failure, wait for the whole index. In memory are a number for each case that was
    given, and for what other runs published.

    Parameters
    ----------
    growing, request, key, out, scope
        The index, what is requested, the key of the ids, the output folder, and the share of it.
    outcomes : EarlyOutcomes
        Those of killed runs: their cases wait too.
    """

    def __init__(
        self,
        growing: GrowingIndex,
        request: Request,
        key: bytes,
        out: Path,
        scope: Scope,
        outcomes: EarlyOutcomes,
    ) -> None:
        self._growing, self._request, self._key = growing, request, key
        self._out, self._scope, self._outcomes = out, scope, outcomes
        self._ready = deque[Case]()
        self._of_part: Iterator[Case] = iter(())
        self._case_file: CaseFile | None = None

    def wait(self, stop: threading.Event) -> bool:
        """Wait until cases can begin; return False if the index is complete before."""
        while not stop.is_set() and not self._growing.is_complete():
            if (case := self._find(_POLL_INTERVAL_S)) is not None:
                self._ready.append(case)
            if len(self._ready) >= ENOUGH_CASES:
                return True
        return False

    def begin(self, case_file: CaseFile) -> None:
        """Give cases from now on, each of which is added before to a file.

        The first is added at once: by its files it is checked whether workers see the scans.
        """
        self._case_file = case_file
        self._add(case_file, self._ready.popleft())

    def __next__(self) -> Case | None:
        file = self._case_file
        if file is None:
            raise StopIteration
        if not file.wait(0.0):
            if self._growing.is_complete():
                raise StopIteration
            case = self._ready.popleft() if self._ready else self._find()
            if case is None:
                return None
            self._add(file, case)
        return next(file)

    def _add(self, file: CaseFile, case: Case) -> None:
        file.append(replace(case, staged=self._outcomes.name(case)))

    def _find(self, wait_s: float = 0.0) -> Case | None:
        """Return the next case; None if it is not there yet."""
        while (case := next(self._of_part, None)) is None:
            part = self._growing.next_part(wait_s)
            if part is None:
                return None
            self._of_part = self._cases_of(part)
        return case

    def _cases_of(self, part: PartName) -> Iterator[Case]:
        """Yield the cases of a part whose series are whole as far as it shows, and without one."""
        with suppress(*read_errors()):
            if all(map(self._is_taken, ids_of_part(self._out, part))):
                return
            index = index_of_part(self._out, part, self._key)
            # The whole index tells why a series is left out
            chosen = select(index.series, self._request.workflow, self._request.cards, ignore)
            of_whole = (inputs for inputs in chosen if _may_be_whole(inputs[0]))
            for inputs, light in make_cases(index, of_whole, self._request, self._key, ignore):
                if self._is_taken(light.id) or not self._scope.holds(light.id):
                    continue
                with suppress(ScanError):  # the whole index tells it
                    case = with_files(index, inputs, light)
                    if case.series.kind == DICOM and len({f.parent for f in case.series.files}) > 1:
                        continue  # perhaps in a further folder too
                    self._taken.add(case.id)
                    yield case

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
        taken.add_all(self._outcomes.cases())
        return taken


# --- when the index is complete -------------------------------------------------------------------


class EarlyOutcomes:
    """Outcomes of cases that began early, until the whole index confirms them.

    In memory are the outcomes of this run without their measurements, 1.2 KiB each. Of runs that
    were killed, only staged results remain, and no failures.

    Parameters
    ----------
    key, out, scope
        The key of the ids, the output folder, and the cases that the run takes.
    """

    def __init__(self, key: bytes, out: Path, scope: Scope) -> None:
        self._key, self._out, self._scope = key, out, scope
        self._ended = {
            name: CaseOutcome(CaseRecord(case, None, "", (), None, reused=True), ())
            for case, name in staged_results(out)
            if scope.holds(case)
        }
        """By the name that the result has, or would have."""

    def cases(self) -> list[str]:
        """Return the ids of all cases that have an outcome."""
        return [outcome.record.id for outcome in self._ended.values() if outcome.record]

    def name(self, case: Case) -> str:
        """Return the name of the result of a case, by a digest of all that a worker gets of it.

        So a case of the whole index that is in any way another one does not find it.
        """
        line = Message(replace(case, staged="")).json
        digest = hashlib.blake2b(line, key=self._key, digest_size=16).hexdigest()
        return staged_name(case.id, digest)

    def note(self, case: Case, record: CaseRecord, outcome: CaseOutcome) -> None:
        """Note the outcome of a case that began early, with its record."""
        self._ended[case.staged] = replace(outcome, record=replace(record, measurements=()))

    def confirm(self, case: Case) -> CaseOutcome | None:
        """Return the outcome of a case of the whole index, and publish its result.

        None if it did not begin early exactly as it is, or its result can't be published: then it
        is to be worked on.
        """
        if not self._ended:
            return None
        name = self.name(case)
        outcome = self._ended.pop(name, None)
        if outcome is None or outcome.record is None or outcome.record.reason is not None:
            return outcome
        folder = staged_folder(self._out, name)
        audit, fingerprint = AuditTrail(self._out, self._key), key_fingerprint(self._key)
        with suppress(ScanError, OSError, ValueError):  # its worker tells why
            check_files(folder)
            with CaseFolder(
                self._out, case.folder_name, fingerprint, audit=audit, staged=folder
            ) as draft:
                published = draft.publish(replace=self._scope.replace)
            return replace(outcome, record=replace(outcome.record, folder=published))
        return None

    def remove(self) -> None:
        """Remove the results that were not confirmed."""
        for case, name in staged_results(self._out):
            if self._scope.holds(case):
                remove_staged(self._out, name)


def _may_be_whole(series: IndexedSeries) -> bool:
    """Return whether nothing in its part hints that a series goes on elsewhere, or is refused."""
    is_known = series.kind != DICOM or bool(series.series_uid)
    return is_known and series.reason is None and not series.unreadable and not series.damaged
