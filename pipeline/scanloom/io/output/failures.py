"""Failure records `OUT/failed/<case id>.json`, which do not identify the source of a case."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from scanloom.core import CaseRecord, Reason, ScanError
from scanloom.io.output.json_file import SCHEMA, read_json, write_document
from scanloom.io.system.atomic_write import atomic_write
from scanloom.io.system.regular_files import read_regular_file

FAILED = "failed"
_MAX_RECORD_BYTES = 1 << 20
"""Size limit of a record; a larger file was not written by scanloom."""


def is_failure(record: CaseRecord) -> bool:
    """Return whether a case belongs in `failed/`: it failed by itself, or awaits a choice."""
    reason = record.reason
    if reason is None or reason.subject != "case" or reason is Reason.OUTPUT_UNWRITABLE:
        return False
    return reason.expects_result


def write_failure(out: Path, record: CaseRecord, recipe: str, stamp: str = "") -> Path:
    """Write the failure record of a case, in place of an older one.

    The record has an id and a reason; recipe and stamp are those of its `Case`.

    Raises
    ------
    OSError
        If the record can't be written.
    """
    if record.reason is None or not record.id:
        raise ValueError("a failure record requires a case id and a reason")
    document = {
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
        if json.loads(read_regular_file(path, _MAX_RECORD_BYTES)) == {"schema": SCHEMA, **document}:
            return path
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, lambda draft: write_document(draft, document))
    return path


def has_failed(out: Path, case_id: str) -> bool:
    """Return whether the last attempt at a case failed."""
    return (out / FAILED / f"{case_id}.json").exists()


def failed_cases(out: Path) -> set[str]:
    """Return the ids of the cases whose last attempt failed."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(out / FAILED) as entries:
        names = (entry.name for entry in entries)
        return {name.removesuffix(".json") for name in names if name.endswith(".json")}
    return set()


def previous_failure(out: Path, case_id: str, recipe: str, stamp: str) -> ScanError | None:
    """Return the recorded failure of the same recipe on the same files, or None."""
    path = out / FAILED / f"{case_id}.json"
    try:
        document = read_json(path, _MAX_RECORD_BYTES)
        if document["recipe"] != recipe or document.get("source_stamp", "") != stamp:
            return None
        reason = Reason[document["reason"]]
        return ScanError(reason, str(document["detail"])) if reason.expects_result else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ScanError):
        return None  # missing or not written by scanloom: the case is tried again


def remove_failure(out: Path, case_id: str) -> None:
    """Remove the failure record of a case that has a result now.

    Raises
    ------
    OSError
        If the record exists and can't be removed.
    """
    (out / FAILED / f"{case_id}.json").unlink(missing_ok=True)
