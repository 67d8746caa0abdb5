"""`scanloom dataset`: images and labels for training, from results."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from scanloom.cli.console import Exit, case_progress, console, error_boundary, print_result, say
from scanloom.cli.options import KeyOption, Reporting, folder_option, takes_panels
from scanloom.cli.values import complete_structures, names, percentage

if TYPE_CHECKING:
    from scanloom.training.dataset import Dataset


@dataclass(frozen=True)
class SourceOptions:
    """The output folder whose results are taken, and which of them."""

    panel: ClassVar[str] = "Input"

    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output folder of `segment` or `run`.")]
    verdict: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="Of accepted, corrected, edit, stale and unreviewed: results to take.",
        ),
    ] = "accepted,corrected"
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            envvar="SCANLOOM_DATASET_MODEL",
            help="Take the labels of this model only.",
        ),
    ] = None
    structures: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            envvar="SCANLOOM_DATASET_STRUCTURES",
            autocompletion=complete_structures,
            help="Structures, in the order of their values; default all.",
        ),
    ] = None
    key: KeyOption = None


@dataclass(frozen=True)
class FormOptions:
    """Folder and form of the dataset."""

    panel: ClassVar[str] = "Output"

    folder: Annotated[Path, folder_option("Folder of the dataset.", "--folder", "FOLDER")]
    format: Annotated[
        Literal["msd", "nnunet", "monai"],
        typer.Option("--format", help="Decathlon, a folder of nnUNet_raw, or a datalist of MONAI."),
    ] = "msd"
    folds: Annotated[
        int | None,
        typer.Option(min=2, help="Folds of patients; default 5, or one for each of fewer."),
    ] = None
    test_share: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", parser=percentage, help="Share of patients set aside: 20% or 0.2."
        ),
    ] = None


@takes_panels
def dataset(source: SourceOptions, form: FormOptions, general: Reporting) -> None:
    """Write reviewed results as training data: images, labels, folds by patient.

    Run again, it brings the folder up to date. Names are case ids.

    Example: scanloom dataset results -o nnUNet_raw/Dataset501_Liver --format nnunet
    """
    verdicts = tuple(dict.fromkeys(names(source.verdict)))
    structures = () if source.structures is None else names(source.structures)
    with error_boundary(general.mode):
        from scanloom.training.dataset import TAKEN, DatasetOptions, write_dataset

        if unknown := [each for each in verdicts if each not in TAKEN]:
            expected = ", ".join(TAKEN)
            raise typer.BadParameter(f"{unknown[0]}: expected {expected}", param_hint="--verdict")
        try:
            options = DatasetOptions(
                form.format,
                verdicts,  # type: ignore[arg-type]  # checked above
                structures,
                source.model,
                form.folds,
                form.test_share or 0.0,
            )
        except ValueError as exc:
            raise typer.BadParameter(str(exc)) from exc
        with case_progress(general.mode) as progress:
            written = write_dataset(source.out, form.folder, options, source.key, progress)
        print_result(general.mode, lambda: _document(written), lambda: _show(written, form.folder))
        if not written.cases:
            say("scanloom: no case remains, so that no dataset was written.", err=True)
    raise typer.Exit(Exit.SOME_FAILED if written.left_out else Exit.OK)


def _document(written: Dataset) -> dict[str, Any]:
    """Return the document for `--json`: ids, codes from closed lists and numbers."""
    return {
        "schema": 1,
        "format": written.form,
        "labels": dict(written.labels),
        "patients": dict(zip(("training", "test"), written.patients, strict=True)),
        "unidentified": written.unidentified,
        "folds": written.folds,
        "cases": [
            {
                "case": case.case,
                "set": "test" if case.test else "training",
                "fold": case.fold,
                "verdict": case.status,
                "revision": case.revision,
            }
            for case in written.cases
        ],
        "left_out": [
            {"case": case, "reason": reason.code, "detail": detail}
            for case, (reason, detail) in written.left_out.items()
        ],
        "unselected": dict(written.unselected),
    }


def _show(written: Dataset, folder: Path) -> None:
    """Print the cases by set, those left out with the reasons, and the folder as it was given."""
    from rich.table import Table

    from scanloom.core import counted
    from scanloom.training.dataset import SPLITS

    screen = console()
    table = Table.grid(padding=(0, 2))
    values = ", ".join(f"{value} {label}" for label, value in written.labels.items())
    table.add_row("labels", values)
    for name, test, patients in zip(
        ("training", "test"), (False, True), written.patients, strict=True
    ):
        cases = [case for case in written.cases if case.test is test]
        line = f"{counted(len(cases), 'case')} of {counted(patients, 'patient')}"
        if not test and written.folds:
            sizes = [sum(case.fold == n for case in cases) for n in range(written.folds)]
            line += f", in folds of {', '.join(map(str, sizes))}"
        table.add_row(name, line)
    if corrected := [case for case in written.cases if case.revision > 0]:
        line = counted(len(corrected), "case")
        if alone := sum(case.status == "corrected" for case in corrected):
            line += f", {alone} of them judged by nobody since"
        table.add_row("corrected", line)
    for status, count in written.unselected.items():
        advice = ", replaced since its review: judge it again" if status == "stale" else ""
        table.add_row("not taken", f"{counted(count, 'case')}: {status}{advice}")
    for case, (reason, detail) in written.left_out.items():
        table.add_row("left out", f"{case}: {detail} ({reason.code})")
    screen.print(table)
    if written.unidentified:
        several = counted(written.unidentified, "case")
        say(f"The files of {several} name no patient: each file was taken for a patient.")
    if written.form == "nnunet" and written.folds:
        name = written.folder.name
        say("nnU-Net splits cases, not patients. Once it has planned, and before it trains:")
        say(f"cp {shlex.quote(str(folder / SPLITS))} $nnUNet_preprocessed/{name}/")
    if written.cases:
        say(f"Dataset: {folder}")
