"""What a command's exit code says (sysexits.h where it has a word)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scanloom.core import CaseRecord, Reason


class Exit(IntEnum):
    """The exit codes of every command."""

    OK = 0
    SOME_FAILED = 1  # also: something is wrong (doctor), a fault of scanloom
    USAGE = 2
    UNUSABLE = 65  # EX_DATAERR: the one scan asked for, or a model, can't be used
    INPUT_OUTPUT = 74  # EX_IOERR: the disk is full, OUT can't be written
    INTERRUPTED = 130  # 128 + SIGINT


def exit_of_reason(reason: Reason) -> Exit:
    """Return the code for a command that ends because of `reason`."""
    from scanloom.core import Reason

    if reason in (Reason.DISK_FULL, Reason.OUTPUT_UNWRITABLE, Reason.SCRATCH_FULL):
        return Exit.INPUT_OUTPUT
    blameless = reason in (Reason.INTERNAL, Reason.ENVIRONMENT)
    return Exit.SOME_FAILED if blameless else Exit.UNUSABLE


def exit_of_records(records: Sequence[CaseRecord]) -> Exit:
    """Return the code for what became of one or several scans.

    Of several scans, those that are not for the model (skipped) do no harm while any other gave a
    result; those of which a volume has to be chosen were asked for, and gave none.
    """
    from scanloom.core import Reason

    reasons = [r.reason for r in records if r.reason is not None]
    if not reasons:
        return Exit.OK
    if len(records) == 1:
        return exit_of_reason(reasons[0])
    if any(reason in (Reason.DISK_FULL, Reason.OUTPUT_UNWRITABLE) for reason in reasons):
        return Exit.INPUT_OUTPUT
    failed = any(reason.wanted for reason in reasons)
    return Exit.SOME_FAILED if failed or len(reasons) == len(records) else Exit.OK
