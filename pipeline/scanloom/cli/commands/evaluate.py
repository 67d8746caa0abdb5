"""`scanloom evaluate`: compare predicted label maps with reference labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from scanloom.cli import values
from scanloom.cli.console import Exit, case_progress, console, error_boundary, print_result, say
from scanloom.cli.options import KeyOption, Reporting, folder_option, takes_panels

if TYPE_CHECKING:
    from scanloom.core import Reason
    from scanloom.training.evaluate import Evaluation, Figure, LeftOut, Side

MAX_LISTED = 8
"""Cases of a reason, and structures, that the terminal lists; files list all."""


@dataclass(frozen=True)
class LabelOptions:
    """Predictions and references."""

    panel: ClassVar[str] = "Input"

    predictions: Annotated[
        Path,
        typer.Argument(
            metavar="PREDICTIONS",
            help="OUT, dataset, folder of label maps, or one label map.",
        ),
    ]
    reference: Annotated[
        Path,
        typer.Option(
            "--reference",
            "-r",
            metavar="PATH",
            help="The same, of references; or a trained bundle, of which the cases held out count.",
        ),
    ]
    against: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Other predictions, to be compared with the first."),
    ] = None
    labels: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=VALUE,...",
            help="Values of structures in the references: liver=1,tumour=2+3.",
        ),
    ] = None
    key: KeyOption = None


@dataclass(frozen=True)
class EvaluationOptions:
    """Figures and their files."""

    panel: ClassVar[str] = "Output"

    out: Annotated[
        Path,
        folder_option("Folder for table, document and page.", envvar="SCANLOOM_EVALUATE_OUT"),
    ] = Path("evaluation")
    tolerance: Annotated[
        float,
        typer.Option(
            metavar="MM", parser=values.distance, help="Of the normalised surface distance."
        ),
    ] = 2.0


@takes_panels
def evaluate(labels: LabelOptions, output: EvaluationOptions, general: Reporting) -> None:
    """Compare label maps with reference labels, per structure and case.

    Cases are matched by their ids, the series that DICOM SEG are of, or the names of their files,
    structures by name, or else by value. Writes Dice, HD95, normalised surface distance and
    volumes.

    Example: scanloom evaluate results -r Dataset501_Liver --against older-results
    """
    with error_boundary(general.mode):
        from scanloom.core import Reason, ScanError
        from scanloom.io.session import read_session
        from scanloom.training.evaluate import (
            check_evaluation_folder,
            evaluate,
            evaluation_document,
            write_evaluation,
        )
        from scanloom.training.evaluation_page import render_page
        from scanloom.training.label_sets import open_label_set

        values_of = None if labels.labels is None else _values(labels.labels)
        check_evaluation_folder(output.out)  # before the work
        with read_session(), case_progress(general.mode) as progress:
            predictions = open_label_set(labels.predictions, labels.key)
            references = open_label_set(labels.reference, labels.key, corrected=True)
            against = labels.against and open_label_set(labels.against, labels.key)
            compared = filter(None, (labels.predictions, labels.against))
            if references.unreviewed and any(map(labels.reference.samefile, compared)):
                detail = "nobody reviewed these results, which would agree with themselves"
                raise ScanError(Reason.NOT_REVIEWED, detail, str(labels.reference))
            evaluation = evaluate(
                predictions,
                references,
                against or None,
                tolerance_mm=output.tolerance,
                labels=values_of,
                progress=progress,
            )
            html = render_page(evaluation, values_of)
        page = write_evaluation(evaluation, html, output.out)
        print_result(
            general.mode,
            lambda: {"schema": 1, **evaluation_document(evaluation)},
            lambda: _show(evaluation, page),
        )
        if not general.json:
            for side in evaluation.sides:
                of_side = " of --against" if side == "second" else ""
                cases = [each for each in evaluation.left_out if each.side == side]
                _show_left_out(cases, of_side)
    raise typer.Exit(Exit.SOME_FAILED if evaluation.left_out else Exit.OK)


def _values(text: str) -> dict[str, tuple[int, ...]]:
    """Return the values of each structure of `--labels`."""
    from scanloom.training.label_sets import MAX_VALUE, plain_name

    named = dict[str, tuple[int, ...]]()
    for each in values.names(text):
        text_before, _, numbers = each.partition("=")
        name = plain_name(text_before)
        listed = [number.strip() for number in numbers.split("+")]
        if (
            not name
            or name in named
            or not all(n.isdecimal() and 0 < int(n) <= MAX_VALUE for n in listed)
        ):
            expected = "names with their values, such as liver=1,tumour=2+3"
            raise typer.BadParameter(f"{each}: expected {expected}", param_hint="--labels")
        named[name] = tuple(map(int, listed))
    return named


def _show(evaluation: Evaluation, page: Path) -> None:
    """Print the statistics of each structure, differences, and the cases that were left out."""
    from scanloom.core import counted

    for side in evaluation.sides:
        if len(evaluation.sides) > 1:
            title = "Predictions" if side == "first" else "Compared with (--against)"
            console().print(f"{title}: {counted(evaluation.count(side), 'case')}")
        _show_side(evaluation, side)
    if evaluation.differences:
        _show_differences(evaluation)
    for owner, names in evaluation.not_compared.items():
        owners = {"reference": "references", "first": "predictions"}.get(owner, "--against")
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        say(f"Only in {owners}: {', '.join(names[:MAX_LISTED])}{more}")
    for side, count in evaluation.for_training.items():
        if count:
            of_side = " of --against" if side == "second" else ""
            say(f"Not compared: {counted(count, 'case')}{of_side} for training in the references")
    say(f"Evaluation: {page}")


def _show_side(evaluation: Evaluation, side: Side) -> None:
    from rich.table import Table

    # some 60 columns beside the structure, so that 80 show most names in one line
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("structure")
    dice, tolerance = "Dice (quartiles)", f"NSD {evaluation.tolerance_mm:g} mm"
    for title in ("cases", dice, "HD95 mm", tolerance, "volume error ml", "missed, invented"):
        table.add_column(title, justify="right", no_wrap=title == dice)
    for each in evaluation.summaries:
        if each.side != side:
            continue
        figures = each.figures
        spread = figures["dice"]
        table.add_row(
            each.structure,
            str(spread.n),
            _range(spread.mean, (spread.low_quartile, spread.high_quartile), 3),
            _number(figures["hd95_mm"].mean, 2),
            _number(figures["nsd"].mean, 3),
            _number(figures["volume_error_ml"].mean, 2, sign="+"),
            f"{each.outcomes['missed']}, {each.outcomes['invented']}",
        )
    console().print(table)


def _show_differences(evaluation: Evaluation) -> None:
    from rich.table import Table

    from scanloom.core import counted
    from scanloom.training.metrics import FEWEST_PATIENTS

    patients = counted(evaluation.patients, "patient")
    interval = f"95 % interval (bootstrap of {patients})"
    if evaluation.patients < FEWEST_PATIENTS:
        interval = f"no interval ({patients}, it takes {FEWEST_PATIENTS})"
    console().print(f"Predictions minus --against: mean, {interval}")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("structure")
    table.add_column("figure")
    table.add_column("pairs", justify="right")
    table.add_column("difference", justify="right", no_wrap=True)
    titles: dict[Figure, str] = {"dice": "Dice", "hd95_mm": "HD95 mm", "nsd": "NSD"}
    for structure in (*evaluation.structures, ""):
        of_structure = {
            each.figure: each.difference
            for each in evaluation.differences
            if each.structure == structure
        }
        for figure, title in titles.items():
            each, digits = of_structure[figure], 2 if figure == "hd95_mm" else 3
            of_figure = _range(each.mean, (each.low, each.high), digits, sign="+")
            table.add_row(structure or "mean of structures", title, str(each.pairs), of_figure)
    console().print(table)


def _show_left_out(cases: Sequence[LeftOut], side: str) -> None:
    """Print the cases that were left out, by reason; those of the command's own choice last."""
    from scanloom.core import counted

    by_reason: dict[Reason, list[LeftOut]] = {}
    for each in cases:
        by_reason.setdefault(each.reason, []).append(each)
    for reason, listed in sorted(by_reason.items(), key=lambda item: len(item[1])):
        advice = f"{reason.code}{side}: {counted(len(listed), 'case')} left out. {reason.advice}."
        say(f"scanloom: {advice}", err=True)
        for each in listed[:MAX_LISTED]:
            say(f"  {each.private}: {each.detail}", err=True)
        if len(listed) > MAX_LISTED:
            say(f"  and {len(listed) - MAX_LISTED} more", err=True)


def _range(mean: float, ends: tuple[float, float], digits: int, sign: str = "") -> str:
    """Return a mean with the ends of its range."""
    low, high = (_number(end, digits, sign) for end in ends)
    of_range = "" if math.isnan(ends[0]) else f" ({low} to {high})"
    return f"{_number(mean, digits, sign)}{of_range}"


def _number(value: float, digits: int, sign: str = "") -> str:
    """Return a rounded number, "-" if it is not one; 0 has no minus."""
    return "-" if math.isnan(value) else f"{round(value, digits) + 0.0:{sign}.{digits}f}"
