"""Run one case through its three steps, for the command line and for workers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from scanloom.core import Case, CaseRecord, Reason, ScanError, StepTimer, blame
from scanloom.engine.case import steps
from scanloom.engine.case.build import with_source_hash
from scanloom.engine.case.types import Predictor
from scanloom.io.output.case_folder import CaseFolder
from scanloom.io.output.crosswalk import SourceRecord
from scanloom.io.output.published import ResultState, result_state, store_source_stamp

logger = logging.getLogger(__name__)
"""Logs at DEBUG only: tracebacks may hold foreign text."""

FileStates = list[tuple[int, int, int] | None]


@dataclass(frozen=True)
class OutputTarget:
    """Output folder, with the key of its ids.

    Parameters
    ----------
    out : Path
        The output folder.
    fingerprint : str
        Of the key that its ids were made with.
    replace : bool
        Whether a result that is there is replaced.
    key : bytes
        For the hash of a source that was not hashed yet; empty where all were.
    """

    out: Path
    fingerprint: str
    replace: bool = False
    key: bytes = field(default=b"", repr=False)


def run_case(
    case: Case,
    make_predictors: Callable[[], Sequence[Predictor]],
    output: OutputTarget,
    clock: StepTimer | None = None,
    door: Callable[[], AbstractContextManager[None]] = nullcontext,
    *,
    folder: str | None = None,
    source: SourceRecord | None = None,
) -> CaseRecord:
    """Read, segment, write and publish a case.

    Parameters
    ----------
    case : Case
        The case.
    make_predictors : callable
        Function that returns the models; called when the scan is in memory.
    output : OutputTarget
        Output folder and key.
    clock : StepTimer or None
        Timer of each step.
    door : callable
        Returns a context manager that is held while the device is used.
    folder : str or None
        Name of the case's folder; None for its id.
    source : SourceRecord or None
        Source of the case, if the crosswalk does not have it yet.

    Returns
    -------
    CaseRecord
        No exception is raised: a failure is the `reason` of the record.
    """
    clock = clock or StepTimer()
    name = folder or case.folder_name
    try:
        with clock.step("find"):
            states = _file_states(case)
            case = with_source_hash(case, output.key)
            state = result_state(output.out, name, case, replace=output.replace)
        # such as the result of copied files, or of a run that died before it was recorded
        if state is ResultState.CURRENT:
            published = output.out / "cases" / name
            store_source_stamp(published, case.stamp)
            return CaseRecord(case.id, None, "", (), published, reused=True)
        loaded = steps.load(case, clock)
        _check_unchanged(case, states)
        clock.announce("models")
        models = make_predictors()
        with door():
            segmented = steps.segment(loaded, models)
        with CaseFolder(output.out, name, output.fingerprint) as draft:
            record = steps.write(segmented, draft.path)
            published = draft.publish(replace=output.replace, source=source)
        return replace(record, folder=published, updated=state is ResultState.CHANGED)
    except Exception as error:  # a fault in one case must not stop the others
        logger.debug("case not used", exc_info=True)
        return failed_record(case.id, error)


def failed_record(case: str, error: Exception) -> CaseRecord:
    """Return the record of a case that ended with an error: its reason and a safe detail."""
    fault = blame(error)
    return CaseRecord(case, fault.reason, fault.detail, (), None, private=fault.private)


def _all_files(case: Case) -> tuple[Path, ...]:
    return tuple(file for series in (case.series, *case.further_channels) for file in series.files)


def _check_unchanged(case: Case, states: FileStates) -> None:
    # a file that was missing at first has not been read before it reappeared
    pairs = zip(_file_states(case), states, strict=True)
    if any(before is not None and now != before for now, before in pairs):
        raise ScanError(Reason.SOURCE_CHANGED, "a file was changed while it was read")


def _file_states(case: Case) -> FileStates:
    """Return size, time of change and inode of each file; None for a missing file."""
    return [_file_state(file) for file in _all_files(case)]


def _file_state(file: Path) -> tuple[int, int, int] | None:
    try:
        state = os.stat(file)  # noqa: PTH116
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns, state.st_ino
