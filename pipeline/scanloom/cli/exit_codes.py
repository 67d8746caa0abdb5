"""Exit codes of commands, after sysexits.h where it defines one."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scanloom.core import CaseRecord, Reason
    from scanloom.engine.run import RunResult


class Exit(IntEnum):
    """The exit codes of every command."""

    OK = 0
    SOME_FAILED = 1  # also: a problem found by `doctor`, an internal error
    USAGE = 2
    UNUSABLE = 65  # EX_DATAERR: the requested scan, or a model, can't be used; nothing selected
    INPUT_OUTPUT = 74  # EX_IOERR: the disk is full, or OUT is not writable
    INTERRUPTED = 130  # 128 + SIGINT


def exit_of_reason(reason: Reason) -> Exit:
    """Return the exit code of a command that ends with `reason`."""
    from scanloom.core import Reason

    if reason in (Reason.DISK_FULL, Reason.OUTPUT_UNWRITABLE, Reason.SCRATCH_FULL):
        return Exit.INPUT_OUTPUT
    internal = reason in (Reason.INTERNAL, Reason.ENVIRONMENT)
    return Exit.SOME_FAILED if internal else Exit.UNUSABLE


def exit_of_records(records: Sequence[CaseRecord], *, strict: bool = False) -> Exit:
    """Return the exit code for the records of one or several scans.

    Among several scans, skipped ones do not count if any other scan has a result, unless `strict`.
    Ambiguous ones count as failed: they were requested and have no result.
    """
    from scanloom.core import Reason

    reasons = [r.reason for r in records if r.reason is not None]
    if not reasons:
        return Exit.OK
    if len(records) == 1:
        return exit_of_reason(reasons[0])
    if any(reason in (Reason.DISK_FULL, Reason.OUTPUT_UNWRITABLE) for reason in reasons):
        return Exit.INPUT_OUTPUT
    failed = strict or any(reason.expects_result for reason in reasons)
    return Exit.SOME_FAILED if failed or len(reasons) == len(records) else Exit.OK


NO_SERIES = frozenset({"NOT_AN_IMAGE", "DUPLICATE_LINK", "LEFT_OUT", "NESTED_ARCHIVE"})
"""Codes of skipped files that are no series of their own."""


def exit_of_run(result: RunResult, *, strict: bool = False) -> Exit:
    """Return the exit code of a run: 0 if every selected case is done.

    With `strict`, a series also counts that failed, waits for a choice, or was skipped for another
    reason than the workflow's selection.
    """
    if result.failed_cases or result.damaged:
        return Exit.SOME_FAILED
    files = result.totals["files"]
    skipped = set(files.get("skipped", ())) - NO_SERIES - {"NOT_SELECTED"}
    incomplete = bool(files.get("failed") or files.get("ambiguous") or skipped)
    return Exit.SOME_FAILED if strict and incomplete else Exit.OK
