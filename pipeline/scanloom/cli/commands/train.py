"""`scanloom train`: train a recipe as a MONAI bundle."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from scanloom.cli.console import case_progress, console, error_boundary, print_result, say
from scanloom.cli.options import Reporting, folder_option, takes_panels

if TYPE_CHECKING:
    from scanloom.training.train import Measured, Prepared


@dataclass(frozen=True)
class TrainingOptions:
    """The bundle, and the part of the data that validates."""

    panel: ClassVar[str] = "Training"

    out: Annotated[
        Path, folder_option("Folder of the bundle.", "--out", "BUNDLE", "SCANLOOM_TRAIN_OUT")
    ]
    fold: Annotated[
        int, typer.Option(min=0, help="Part of the cases that validates, from 0 (`folds`).")
    ] = 0
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the data, measure a step, and write nothing.")
    ] = False


@takes_panels
def train(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="YAML or JSON file: see docs/training.md.")
    ],
    options: TrainingOptions,
    general: Reporting,
) -> None:
    """Train a recipe as a MONAI bundle; the same command continues a training that was stopped.

    `python -m monai.bundle run --config_file configs/train.json` does the same in the bundle.

    Example: scanloom train recipe.yaml -o my_model
    """
    with error_boundary(general.mode):
        from scanloom.training.recipe import read_recipe

        page = read_recipe(recipe)
        _check_extra()
        from scanloom.training.train import (
            MEASURED_STEPS,
            check_folder,
            measure,
            prepare,
            run_training,
            write_training,
        )

        with case_progress(general.mode, "Checking cases") as progress:
            prepared = prepare(page, recipe.absolute().parent, options.fold, progress)
        if not general.quiet:
            for line in data_lines(prepared):
                say(line, err=True)
        if options.dry_run:
            check_folder(prepared, options.out)
            if not general.quiet:
                say(f"measuring {2 * MEASURED_STEPS} steps", err=True)
            measured = measure(prepared)
            plain = {"schema": 1, "training": {**asdict(measured), "seconds": measured.seconds}}
            print_result(general.mode, lambda: plain, lambda: _show(measured))
            return
        write_training(prepared, options.out)
        report = (lambda line: None) if general.quiet else partial(say, err=True)
        run_training(options.out, report)
        plain = {"schema": 1, "bundle": str(options.out)}
        print_result(general.mode, lambda: plain, lambda: say(f"Trained: {options.out}"))


def _check_extra() -> None:
    """Refuse a training without the libraries of the extra."""
    from importlib.util import find_spec

    from scanloom.core import Reason, ScanError

    missing = [name for name in ("fire", "ignite", "tensorboard") if find_spec(name) is None]
    if missing:
        raise ScanError(Reason.NOT_INSTALLED, "training needs: pip install 'scanloom[train]'")


SHOWN = 10
"""Cases, or structures, that are listed on the terminal; the bundle's docs/data.json has all."""


def data_lines(prepared: Prepared) -> list[str]:
    """Return lines about the cases, and about those that are left out."""
    from scanloom.core import counted

    used = ", ".join(f"{len(pairs)} {split}" for split, pairs in prepared.cases.items())
    lines = [f"cases: {used}"]
    if prepared.not_validated:
        listed = ", ".join(prepared.not_validated[:SHOWN])
        if (more := len(prepared.not_validated) - SHOWN) > 0:
            listed += f" and {more} more"
        lines.append(f"no case for validation has {listed}: not in the mean Dice")
    if prepared.left_out:
        lines.append(f"left out: {counted(len(prepared.left_out), 'case')}")
        lines += [f"  {each.case}: {each.problem}" for each in prepared.left_out[:SHOWN]]
    return lines


def _show(measured: Measured) -> None:
    from rich.table import Table

    from scanloom.core import counted, format_bytes, format_duration

    rows: Any = Table.grid(padding=(0, 2))
    rows.add_row("steps", f"{measured.steps} in {counted(measured.epochs, 'epoch')}")
    rows.add_row("a step", f"{measured.step_s:.3g} s, measured")
    if measured.validations:
        each = format_duration(measured.validation_s)
        rows.add_row("validations", f"{measured.validations} of {each}")
    rows.add_row("memory", format_bytes(measured.memory))
    rows.add_row("time", format_duration(measured.seconds))
    console().print(rows)
