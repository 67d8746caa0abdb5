"""`OUT/failed/<case id>.json`: why a case gave no result, without a word of its source."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scanloom.core import CaseRecord, Reason
from scanloom.io.regular import read_regular
from scanloom.io.tables import write_json
from scanloom.io.whole import write_whole

FAILED = "failed"
MOST = 1 << 20
"""Bytes of a record: more is none of ours."""

_OF_THE_OUTPUT = (
    Reason.DISK_FULL,
    Reason.OUTPUT_UNWRITABLE,
    Reason.STALE,
    Reason.RESULT_DAMAGED,
    Reason.KEY_MISMATCH,
)
"""These say something of OUT, nothing of the case."""


def is_failure(record: CaseRecord) -> bool:
    """Whether a case failed by itself or waits for a choice, and is to be found in `failed/`."""
    reason = record.reason
    return reason is not None and reason.wanted and reason not in _OF_THE_OUTPUT


def write_failure(out: Path, record: CaseRecord, recipe: str, stamp: str = "") -> Path:
    """Write why a case failed; an older record of it is replaced.

    Parameters
    ----------
    out : Path
        The output folder.
    record : CaseRecord
        With an id and a reason.
    recipe : str
        What was asked for, as in `case.json`.
    stamp : str
        Of its source, as in `Case`.

    Raises
    ------
    OSError
        If it can't be written.
    """
    if record.reason is None or not record.id:
        raise ValueError("only a case that is known, and failed, has a failure")
    document = {
        "schema": 1,
        "case": record.id,
        "outcome": record.reason.outcome,
        "reason": record.reason.code,
        "detail": record.detail,
        "advice": record.reason.advice,
        "retry": record.reason.retry,
        "flags": [{"code": flag.code, "text": flag.text} for flag in record.flags],
        "recipe": recipe,
        "source_stamp": stamp,
    }
    path = out / FAILED / f"{record.id}.json"
    with suppress(OSError, ValueError, RecursionError):
        if json.loads(read_regular(path, MOST)) == document:
            return path
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda draft: write_json(draft, document))
    return path


@dataclass(frozen=True)
class Failure:
    """Why a case failed in an earlier run."""

    reason: Reason
    detail: str


def has_failed(out: Path, case_id: str) -> bool:
    """Whether the last attempt at a case failed."""
    return (out / FAILED / f"{case_id}.json").exists()


def failed_cases(out: Path) -> set[str]:
    """Return the ids of the cases whose last attempt failed."""
    return {path.stem for path in (out / FAILED).glob("*.json")}


def failed_before(out: Path, case_id: str, recipe: str, stamp: str) -> Failure | None:
    """Return how a case failed when the same was asked of the same files; None if it did not."""
    try:
        told = json.loads(read_regular(out / FAILED / f"{case_id}.json", MOST))
        if told["recipe"] != recipe or told.get("source_stamp", "") != stamp:
            return None
        reason = Reason[told["reason"]]
        return Failure(reason, str(told["detail"])) if reason.wanted else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # not there, or not ours: it is tried again


def forget_failure(out: Path, case_id: str) -> None:
    """Take away the record of a case that has a result now.

    Raises
    ------
    OSError
        If it is there and can't be taken away.
    """
    (out / FAILED / f"{case_id}.json").unlink(missing_ok=True)
