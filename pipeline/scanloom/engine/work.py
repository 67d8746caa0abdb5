"""One case through the three doors, whoever asks: the command line, a worker's child, a test."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from scanloom.core import Case, CaseRecord, Clock, blame
from scanloom.engine import steps
from scanloom.io.casefolder import CaseFolder, is_done
from scanloom.io.crosswalk import Source
from scanloom.io.identity import source_hash

logger = logging.getLogger(__name__)
"""Says nothing above DEBUG: tracebacks may hold foreign text."""


@dataclass(frozen=True)
class Place:
    """Where results go.

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


def work_on(
    case: Case,
    labellers: Callable[[], Sequence[steps.Labeller]],
    place: Place,
    clock: Clock | None = None,
    door: Callable[[], AbstractContextManager[None]] = nullcontext,
    *,
    folder: str | None = None,
    source: Source | None = None,
) -> CaseRecord:
    """Read, label, write and publish a case.

    Parameters
    ----------
    case : Case
        Which one.
    labellers : callable
        Gives the models; asked for when the scan is in memory.
    place : Place
        Where the result goes.
    clock : Clock or None
        Is told of each step.
    door : callable
        A context manager to hold while the device works.
    folder : str or None
        What the case's folder is called; None for its id.
    source : Source or None
        Where the case comes from, if the crosswalk does not know it yet.

    Returns
    -------
    CaseRecord
        Never an exception: why there is no result stands in its `reason`.
    """
    clock = clock or Clock()
    name = folder or case.id
    try:
        if is_done(place.out, name, case.recipe, replace=place.replace):
            # published by a process that died before it could say so
            return CaseRecord(case.id, None, "", (), place.out / "cases" / name)
        if not case.source_hash:
            with clock.step("find"):
                case = replace(case, source_hash=_source_hash(case, place.key))
        loaded = steps.load(case, clock)
        models = labellers()
        with door():
            segmented = steps.segment(loaded, models)
        with CaseFolder(place.out, name, place.fingerprint) as made:
            record = steps.write(segmented, made.path)
            published = made.publish(replace=place.replace, source=source)
        return replace(record, folder=published)
    except Exception as error:  # a fault in one case must not stop the others
        logger.debug("case not used", exc_info=True)
        return failed_record(case.id, error)


def failed_record(case: str, error: Exception) -> CaseRecord:
    """Return the record of a case that ended with an error: its reason, and what may be said."""
    fault = blame(error)
    return CaseRecord(case, fault.reason, fault.detail, (), None)


def _source_hash(case: Case, key: bytes) -> str:
    """Return the hash over the files of all input channels."""
    files = [file for series in (case.series, *case.others) for file in series.files]
    return source_hash(replace(case.series, files=tuple(files)), key)
