"""Output of `segment --dry-run`, and the series that `segment` takes at a path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scanloom.cli.console import (
    Exit,
    OutputMode,
    console,
    error_document,
    exit_of_reason,
    format_error,
    print_result,
    say,
)

if TYPE_CHECKING:
    from scanloom.core import Reason, SeriesChoice
    from scanloom.engine.dry_run import PlannedScan
    from scanloom.options import SegmentOptions


def choice_lines(choice: SeriesChoice | None) -> list[str]:
    """Return a line that names the series, and a line for each remark on the choice."""
    if choice is None:
        return []
    return [str(choice), *(f"! {remark}." for remark in (*choice.notes, *choice.unused))]


def choice_document(choice: SeriesChoice | None) -> dict[str, Any] | None:
    """Return the JSON object of a choice, without text of headers and paths."""
    if choice is None:
        return None
    remarks = [*choice.notes, *choice.unused]
    return {"number": choice.number, "of": choice.of, "remarks": remarks}


def show_failure(
    path: Path, reason: Reason, detail: str, private: str, choice: SeriesChoice | None
) -> None:
    """Print on stderr why a scan gave no result, and which of several series it is."""
    from scanloom.core import printable

    message = format_error(reason, detail, private)
    names_it = private and "\n" not in private
    say(message if names_it else f"{printable(str(path))}: {message}", err=True)
    if choice is not None and (choice.of > 1 or choice.unused):
        for line in choice_lines(choice):
            say(f"  {line}", err=True)


def show_dry_run(paths: Sequence[Path], options: SegmentOptions, mode: OutputMode) -> Exit:
    """Print what would be done with each scan, and return the exit code."""
    from scanloom.engine.dry_run import plan_scans
    from scanloom.engine.machine.lean_imports import without_optional_imports

    with without_optional_imports():
        planned = list(plan_scans(paths, options))
    plain = {"schema": 1, "planned": [_plain_scan(scan, options) for scan in planned]}
    print_result(mode, lambda: plain, lambda: _show(planned, options))
    errors = [scan.error for scan in planned if scan.error is not None]
    if not mode.json:
        for scan in planned:
            if scan.error is not None:
                error = scan.error
                show_failure(scan.path, error.reason, error.detail, error.private, scan.choice)
    if not errors:
        return Exit.OK
    return exit_of_reason(errors[0].reason) if len(planned) == 1 else Exit.SOME_FAILED


def _show(planned: Sequence[PlannedScan], options: SegmentOptions) -> None:
    from rich.table import Table

    from scanloom.core import counted, printable
    from scanloom.io.output.published import ResultState

    screen = console()
    for scan in planned:
        if scan.error is not None:
            continue
        table = Table.grid(padding=(0, 2))
        for name, text in _rows(scan, options):
            table.add_row("", name, printable(text))
        screen.print(printable(str(scan.path)))
        for line in choice_lines(scan.choice):
            screen.print(line, soft_wrap=True)
        screen.print(table)
    fitting = [scan for scan in planned if scan.error is None]
    done = sum(scan.state is ResultState.CURRENT for scan in fitting)
    before = f", {done} from before" if done else ""
    scans = counted(len(planned), "scan")
    screen.print(f"{scans}: {len(fitting) - done} would be segmented{before}. Nothing was written.")


def _rows(scan: PlannedScan, options: SegmentOptions) -> Iterator[tuple[str, str]]:
    from scanloom.core import format_bytes

    grid = scan.grid
    if grid is None:
        return
    yield "grid", f"{_times(grid.shape)} at {_times(round(mm, 3) for mm in grid.spacing)} mm"
    yield "model", ", ".join(options.models)
    if scan.changes:
        yield "changed", scan.changes
    if scan.memory is not None:
        yield "memory", f"{format_bytes(scan.memory)}, estimated for a CPU"
    yield "result", _result(scan, options)


def _result(scan: PlannedScan, options: SegmentOptions) -> str:
    from scanloom.io.output.published import ResultState

    if not scan.folder:
        return str(options.out / "cases")
    existing = {
        ResultState.CURRENT: " (exists already: nothing would be done)",
        ResultState.CHANGED: " (would be replaced: the scan has changed)",
        ResultState.REPLACEABLE: " (would be replaced)",
    }
    folder = options.out / "cases" / scan.folder
    return f"{folder}{existing.get(scan.state, '') if scan.state else ''}"


def _times(numbers: Any) -> str:
    return " x ".join(f"{number:g}" for number in numbers)


def _plain_scan(scan: PlannedScan, options: SegmentOptions) -> dict[str, Any]:
    """Return the JSON object of a planned scan."""
    return {
        "path": str(scan.path),
        "case": scan.case or None,
        "series": choice_document(scan.choice),
        "modality": scan.series.modality if scan.series else None,
        "files": len(scan.series.files) if scan.series else None,
        "shape": list(scan.grid.shape) if scan.grid else None,
        "spacing": [round(float(mm), 6) for mm in scan.grid.spacing] if scan.grid else None,
        "models": list(options.models),
        "changes": scan.changes or None,
        "memory": scan.memory,
        "result": None if scan.error else _result(scan, options),
        "reason": error_document(scan.error.reason, scan.error.detail) if scan.error else None,
    }
