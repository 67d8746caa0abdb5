"""`scanloom plan`: predict a run from headers; a few cases are segmented to measure their cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scanloom.cli import values
from scanloom.cli.commands.models import fetch_missing
from scanloom.cli.console import Exit, console, error_boundary, print_result, report_new_key
from scanloom.cli.options import Reporting, RunOutputOptions, WorkflowOptions, takes_panels
from scanloom.cli.workflows import explain_nothing_selected, explain_unstated, find_workflow

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from scanloom.engine.plan import Range, RunPlan, SamplePlan
    from scanloom.io.index.sample import Estimate


@dataclass(frozen=True)
class PlanOptions(WorkflowOptions):
    """A workflow, the archive on which it would run, and the share of it that is opened."""

    sample: Annotated[
        float | None,
        typer.Option(
            parser=values.sample_size,
            metavar="SHARE",
            help="Open a share of the folders only: 1%, 0.01, or a number such as 200.",
        ),
    ] = None


@takes_panels
def plan(scans: PlanOptions, output: RunOutputOptions, general: Reporting) -> None:
    """Predict a run: cases, exclusions and their reasons, time, memory and disk space.

    Cases and memory follow from headers. Times are ranges, from cases that this machine has run
    before; if these say too little of the archive, a few cases are segmented (half a minute on top
    of loading the models) and their results discarded. With --sample, all of this is estimated from
    a share of the folders, with ranges.

    Example: scanloom plan ct_tissue archive/ -o results
    """
    with error_boundary(general.mode):
        from scanloom.engine.planning import make_plan, plan_sample, save_plan
        from scanloom.engine.workflow.selection import NO_MODALITY, Scope

        paths, out, key = scans.all_paths, output.out, output.key
        scope = Scope(output.replace, output.retry_failed, scans.shard)
        with report_new_key(key):
            workflow = find_workflow(scans.workflow, paths)
            fetch_missing(workflow.models)
            if scans.sample is None:
                planned = make_plan(workflow, paths, out, key, scope, archives=scans.archives)
                save_plan(planned, out)
            else:
                estimated = plan_sample(
                    workflow, paths, out, scans.sample, key, scope, archives=scans.archives
                )
                planned = estimated.plan
        plain = {**asdict(planned), "todo": len(planned.todo)}
        document: dict[str, Any] = {"schema": 1, "plan": plain}
        rows, exclusions = table(planned), excluded_lines(planned)
        if scans.sample is not None:
            document = {"schema": 1, "estimate": _plain(estimated), "sample": plain}
            rows, exclusions = estimate_table(estimated), estimated_exclusions(estimated)
        print_result(general.mode, lambda: document, lambda: _show(rows, exclusions))
        # what a shard or a sample lacks, the rest may have
        is_whole = scans.shard is None and scans.sample is None
        has_files = planned.files["found"] > 0
        nothing = is_whole and has_files and not planned.cases and not planned.before
        unstated = sum(detail == NO_MODALITY for _, _, detail in planned.left)
        if scans.sample is not None and unstated:
            unstated = _two_digits(estimated.not_selected[NO_MODALITY].total)
        if nothing:
            explain_nothing_selected(planned.left_out, unstated, scans.workflow, workflow)
        elif unstated and not general.quiet:
            explain_unstated(unstated, scans.workflow, workflow)
    raise typer.Exit(Exit.UNUSABLE if nothing else Exit.OK)


def _show(rows: RenderableType, exclusions: Sequence[str]) -> None:
    screen = console()
    screen.print(rows)
    for line in exclusions:
        screen.print(line)


def _plain(estimated: SamplePlan) -> dict[str, Any]:
    """Return an estimate for JSON, without the plan of the sample."""
    document = {name: value for name, value in vars(estimated).items() if name != "plan"}
    for name, value in document.items():
        if isinstance(value, Mapping):
            document[name] = {key: each._asdict() for key, each in value.items()}
    return {**document, "confidence": 0.95}


def estimate_table(estimated: SamplePlan) -> RenderableType:
    """Return the cases, times, memory and notes that a sample tells of an archive, as a table."""
    from rich.table import Table

    from scanloom.core import counted
    from scanloom.engine.planning import format_range

    planned, rows = estimated.plan, Table.grid(padding=(0, 2))
    files, opened = planned.files["found"], estimated.opened
    rows.add_row("workflow", planned.workflow)
    folders = f"{estimated.sampled:,} of {estimated.found:,} folders with {counted(files, 'file')}"
    how = "opened" if opened == files else f"of which {opened:,} were opened now"
    listed = counted(estimated.listed, "folder")
    rows.add_row("estimate", f"from {folders}, {how}; {listed} listed to find them")
    rows.add_row("", "each range holds the truth of the archive in about 95 of 100 samples")
    for name, amount in estimated.files.items():
        rows.add_row("files" if name == "found" else "", f"{format_estimate(amount)} {name}")
    todo, before = estimated.cases["todo"], estimated.cases["before"]
    rows.add_row("cases", f"{format_estimate(todo)} to do")
    if before.sampled:
        rows.add_row("", f"{format_estimate(before)} from before")
    _add_device(rows, planned)
    if estimated.seconds is not None:
        rows.add_row("this run", f"{format_range(estimated.seconds)} on this machine")
    elif planned.todo:
        rows.add_row("this run", f"time unknown: {estimated.unknown}")
    _add_sizes(rows, planned, estimated.written, "a worker for the largest scans of the sample")
    for note in estimated.notes:
        rows.add_row("", note)
    for note in planned.notes:
        rows.add_row("", f"in the sample: {note}")
    return rows


def estimated_exclusions(estimated: SamplePlan) -> list[str]:
    """Return an estimate for each reason for which cases are not processed, with its advice.

    The last line says what a sample may lack.
    """
    from scanloom.core import Reason

    counts = [*estimated.left_out.items(), *estimated.refused.items()]
    lines = ["", "Not processed, series and cases"] if counts else []
    for code, amount in sorted(counts, key=lambda each: -each[1].total):
        lines.append(f"{format_estimate(amount)} {code}: {Reason[code].advice}.")
        if code == Reason.NOT_SELECTED.code:  # its details are the workflow's own conditions
            details = estimated.not_selected.items()
            lines += [f"        {format_estimate(each)} {detail}" for detail, each in details]
    if estimated.sampled == estimated.found:
        return lines
    rare = f"What is in fewer than {estimated.unseen:,.0f} of the {estimated.found:,} folders"
    return [*lines, f"{rare} may be missing here."]


def format_estimate(amount: Estimate) -> str:
    """Return an estimated count with its range, such as "1,200 (980 to 1,500)"."""
    low, total, high = (_two_digits(end) for end in (amount.low, amount.total, amount.high))
    return f"{total:,}" if amount.low == amount.high else f"{total:,} ({low:,} to {high:,})"


def _two_digits(count: float) -> int:
    """Return a count of 100 or more with two significant digits, since more say nothing."""
    return round(count) if count < 100 else int(float(f"{count:.1e}"))


def table(planned: RunPlan) -> RenderableType:
    """Return the cases, times, memory and notes of a plan as a table."""
    from rich.table import Table

    from scanloom.core import counted
    from scanloom.engine.planning import format_range

    totals, todo = planned.totals, len(planned.todo)
    rows = Table.grid(padding=(0, 2))
    rows.add_row("workflow", planned.workflow)
    rows.add_row("files", ", ".join(f"{count} {name}" for name, count in planned.files.items()))
    counts = f"{todo} to do, {planned.before} from before"
    rows.add_row("cases", f"{counts}, {planned.selected} in the archive")
    _add_device(rows, planned)
    if todo and totals.seconds is None:
        rows.add_row("this run", f"time unknown: {totals.unknown}")
    elif todo and totals.seconds is not None:
        each = format_range([end / todo for end in totals.seconds])
        duration = f"{format_range(totals.seconds)} on this machine"
        rows.add_row("this run", f"{duration}: {counted(todo, 'case')}, {each} a case")
        basis = f"from {counted(totals.tried, 'case')} that this machine has processed"
        share = "all" if totals.known_share == 1 else f"{100 * totals.known_share:.0f} %"
        rows.add_row("", f"{basis}; {share} of the voxels are in scans of no more than their size")
    if todo and totals.archive_seconds is not None and planned.selected > todo:
        duration = f"{format_range(totals.archive_seconds)} on this machine, if none were done yet"
        rows.add_row("whole archive", f"{duration}: {counted(planned.selected, 'case')}")
    _add_sizes(rows, planned, totals.written, "a worker")
    for note in planned.notes:
        rows.add_row("", note)
    return rows


def _add_device(rows: Table, planned: RunPlan) -> None:
    from scanloom.core import counted

    workers = counted(planned.workers, "worker")
    rows.add_row("device", f"{planned.device}, {planned.precision}; {workers}")


def _add_sizes(rows: Table, planned: RunPlan, written: Range | None, of_memory: str) -> None:
    """Add the size of the results, and the memory of a worker and its device."""
    from scanloom.core import format_bytes

    if written is not None:
        low, high = (format_bytes(end) for end in written)
        rows.add_row("results", low if low == high else f"{low} to {high}")
    if planned.todo:
        rows.add_row("memory", f"{format_bytes(planned.totals.host)} {of_memory}")
    if planned.totals.device:
        rows.add_row("", f"{format_bytes(planned.totals.device)} on the device")


def excluded_lines(planned: RunPlan) -> list[str]:
    """Return a count of each reason for which cases are not processed, with its advice."""
    from scanloom.core import Reason, counted

    refused = [(case.reason, case.detail) for case in planned.cases if case.reason]
    listed = [*((reason, detail) for _, reason, detail in planned.left), *refused]
    if not listed:
        return []
    series, cases = counted(len(planned.left), "series", "series"), counted(len(refused), "case")
    both = " and ".join([*([series] if planned.left else []), *([cases] if refused else [])])
    lines = ["", f"Not processed: {both}"]
    for code, count in Counter(reason for reason, _ in listed).most_common():
        lines.append(f"{count:7} {code}: {Reason[code].advice}.")
        if code == Reason.NOT_SELECTED.code:  # its details are the workflow's own conditions
            details = Counter(detail for reason, detail in listed if reason == code)
            lines += [f"        {n} {detail}" for detail, n in details.most_common()]
    return lines


def compared_rows(compared: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows that compare a run with its plan."""
    from scanloom.core import format_bytes, format_duration

    happened, planned = compared["happened"], compared["planned"]
    rows_by_key = {
        "seconds": ("time", format_duration),
        "written": ("results", format_bytes),
        "host": ("memory", format_bytes),
    }
    rows = []
    for key, (name, format_value) in rows_by_key.items():
        if planned[key]:
            low, high = (format_value(end) for end in planned[key])
            expected = f"up to {high}" if not planned[key][0] else f"{low} to {high}"
            rows.append((name, f"{format_value(happened[key])}, {expected} planned"))
    return rows
