"""Exit codes of commands, after sysexits.h where it defines one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def unexamined(reasons: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of files that this machine could not look at, by reason code.

    Their reasons are those that another attempt may remove: no room to unpack an archive, a disk
    or a permission that is missing, a helper process that died. What they hold is unknown, so that
    nobody can say that all selected cases are done.

    Parameters
    ----------
    reasons : mapping
        Counts of files by reason code; the key of a file without is "".
    """
    from scanloom.core import Reason

    known = {code: Reason[code] for code in reasons if code}
    return {c: reasons[c] for c, r in known.items() if r.outcome == "failed" and r.retry}


def exit_of_nothing(reasons: Mapping[str, int]) -> Exit:
    """Return the exit code if there are files, but nothing to be used."""
    from scanloom.core import Reason

    codes = {exit_of_reason(Reason[code]) for code in unexamined(reasons)}
    return Exit.INPUT_OUTPUT if Exit.INPUT_OUTPUT in codes else Exit.UNUSABLE


def exit_of_run(result: RunResult, *, strict: bool = False) -> Exit:
    """Return the exit code of a run: 0 if every selected case is done.

    Files that could not be examined may belong to selected cases: with them, it is 1. With
    `strict`, a series also counts that failed, waits for a choice, or was skipped for another
    reason than the workflow's selection.
    """
    files = result.totals["files"]
    if result.failed_cases or result.damaged or unexamined(files.get("failed", {})):
        return Exit.SOME_FAILED
    skipped = set(files.get("skipped", ())) - NO_SERIES - {"NOT_SELECTED"}
    incomplete = bool(files.get("failed") or files.get("ambiguous") or skipped)
    return Exit.SOME_FAILED if strict and incomplete else Exit.OK
