"""Exit codes tell the outcome of a command."""

from __future__ import annotations

import pytest

from scanloom.cli.console import Exit, exit_of_reason, exit_of_run, exit_of_scans
from scanloom.core import Reason
from scanloom.engine.monitor import Status
from scanloom.engine.run import RunResult


@pytest.mark.parametrize(
    ("reasons", "code"),
    [
        ((None,), 0),
        ((None, None), 0),
        ((Reason.SLICE_GAP,), 65),
        ((Reason.MODALITY,), 65),
        ((Reason.DISK_FULL,), 74),
        ((Reason.OUTPUT_UNWRITABLE,), 74),
        ((Reason.INTERNAL,), 1),
        ((None, Reason.SLICE_GAP), 1),
        ((None, Reason.MODALITY), 0),
        ((Reason.MODALITY, Reason.LOCALIZER), 1),
        ((None, Reason.SLICE_GAP, Reason.DISK_FULL), 74),
    ],
)
def test_code_of_scans(reasons: tuple[Reason | None, ...], code: int) -> None:
    assert exit_of_scans(reasons) == code


def test_strictly_no_scan_may_lack_a_result() -> None:
    assert exit_of_scans((None, Reason.MODALITY), strict=True) == 1
    assert exit_of_scans((None, None), strict=True) == 0
    assert exit_of_scans((Reason.MODALITY,), strict=True) == 65


@pytest.mark.parametrize("reason", list(Reason))
def test_no_reason_ends_well(reason: Reason) -> None:
    assert exit_of_reason(reason) in (Exit.SOME_FAILED, Exit.UNUSABLE, Exit.INPUT_OUTPUT)


@pytest.mark.parametrize(
    ("failed", "refused", "files", "codes"),
    [
        (0, 0, {"used": {"": 9}}, (0, 0)),
        (1, 0, {"failed": {"SLICE_GAP": 4}}, (1, 1)),
        (1, 1, {"failed": {"SLICE_GAP": 4}}, (0, 1)),
        (0, 0, {"used": {"": 9}, "failed": {"SCRATCH_FULL": 24}}, (1, 1)),
        (0, 0, {"used": {"": 9}, "failed": {"UNREADABLE": 1}}, (1, 1)),
        (0, 0, {"used": {"": 9}, "failed": {"DAMAGED": 1}}, (0, 1)),
        (0, 0, {"ambiguous": {"PHASES": 4}}, (0, 1)),
        (0, 0, {"skipped": {"LOCALIZER": 3}}, (0, 1)),
        (0, 0, {"skipped": {"NOT_SELECTED": 3, "NOT_AN_IMAGE": 1}}, (0, 0)),
    ],
)
def test_code_of_a_run(
    failed: int, refused: int, files: dict[str, dict[str, int]], codes: tuple[int, int]
) -> None:
    status, totals = Status("run", "done", failed=failed), {"files": files}
    result = RunResult("run", status, {}, True, totals, selected=3, refused=refused)
    assert (exit_of_run(result), exit_of_run(result, strict=True)) == codes
