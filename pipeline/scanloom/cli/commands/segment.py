"""`scanloom segment`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from scanloom.cli.console import (
    DebugOption,
    JsonOption,
    OutputMode,
    console,
    error_boundary,
    error_document,
    format_error,
    print_json,
    say,
)
from scanloom.cli.exit_codes import exit_of_records
from scanloom.cli.progress import progress, silence
from scanloom.cli.shared_options import ArchivesOption, report_new_key
from scanloom.extras import EXTRAS, describe_extras

if TYPE_CHECKING:
    from scanloom.core import CaseRecord
    from scanloom.engine.segment import SegmentOptions

    Records = Sequence[tuple[Path, CaseRecord]]
    """Each path with the record of a case."""


def axis_codes(text: str) -> str:
    """Return axis codes such as RAS in capitals; refuse any other text."""
    codes = text.strip().upper()
    if sorted("LR PA IS".find(c) // 3 for c in codes) != [0, 1, 2] or " " in codes:
        raise typer.BadParameter("three letters, one each of R or L, A or P, S or I: RAS, LPS ...")
    return codes


def device_name(text: str) -> str:
    """Return the name of a device; refuse any other text."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", text) is None:
        raise typer.BadParameter('"auto", "cpu", "cuda" or "cuda:0", "cuda:1" ...')
    return text


def extra_name(text: str) -> str:
    """Return the name of an optional writer; refuse any other text."""
    from scanloom.core import did_you_mean

    name = text.strip().lower()
    if name not in EXTRAS:
        raise typer.BadParameter(did_you_mean(name, EXTRAS))
    return name


def byte_count(text: str) -> int:
    """Return the number of bytes of a size such as 8GB or 7.5GiB; refuse any other text."""
    from scanloom.core import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc


_OF_COMMAND = ("paths", "model", "quiet", "json", "debug")
"""Parameters of the command that are not options of a segmentation."""


def segment(
    context: typer.Context,
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...", help="DICOM folders, or .nii, .nii.gz, .nrrd, .mha ... files."
        ),
    ],
    model: Annotated[
        list[str],
        typer.Option(help="A model's name, or a bundle's folder. May be given several times."),
    ],
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("scanloom-out"),
    archives: ArchivesOption = False,
    series: Annotated[
        str | None,
        typer.Option(
            metavar="WHICH",
            help="Series to segment if there are several: best, all, its number or UID.",
        ),
    ] = None,
    phase: Annotated[
        int | None, typer.Option(min=0, help="Volume to segment if a scan has several, from 0.")
    ] = None,
    gaps: Annotated[
        Literal["refuse", "interpolate"], typer.Option(help="Handling of missing slices.")
    ] = "refuse",
    nan: Annotated[
        Literal["refuse", "padding"],
        typer.Option(help="Handling of voxels that are not numbers (NaN)."),
    ] = "refuse",
    orientation: Annotated[
        str | None,
        typer.Option(
            parser=axis_codes,
            metavar="CODES",
            help="Axes of a file that does not state them: RAS, LPS.",
        ),
    ] = None,
    modality: Annotated[
        Literal["CT", "MR", "PT", "NM"] | None,
        typer.Option(case_sensitive=False, help="Modality of a file that does not state it."),
    ] = None,
    device: Annotated[
        str, typer.Option(parser=device_name, metavar="NAME", help="auto, cpu, cuda:0 ...")
    ] = "auto",
    precision: Annotated[
        Literal["auto", "float32", "half"], typer.Option(help="Numeric precision of the network.")
    ] = "auto",
    seg: Annotated[
        Literal["binary", "labelmap"], typer.Option(help="Kind of DICOM SEG.")
    ] = "binary",
    dates: Annotated[
        Literal["source", "now"], typer.Option(help="Dates in the DICOM SEG; now for a PACS.")
    ] = "source",
    also: Annotated[
        list[str] | None,
        typer.Option(
            parser=extra_name,
            metavar="|".join(EXTRAS),
            help=f"Also write {describe_extras()}.",
        ),
    ] = None,
    structures: Annotated[
        str, typer.Option(metavar="A,B", help="Structures to keep; default all.")
    ] = "",
    key: Annotated[Path | None, typer.Option(help="File with the key of the case ids.")] = None,
    names: Annotated[
        Literal["id", "source"],
        typer.Option(
            help="Names of case folders. source: PatientID and series number, or the file's name; "
            "such names identify the patient."
        ),
    ] = "id",
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace results made with other models or options.")
    ] = False,
    memory_limit: Annotated[
        int | None,
        typer.Option(
            parser=byte_count,
            metavar="SIZE",
            help="Most memory that scanloom may use: 8GB, 7.5GiB.",
        ),
    ] = None,
    max_size: Annotated[
        int | None,
        typer.Option(
            parser=byte_count, metavar="SIZE", help="Largest size of a scan's voxels; default 4GiB."
        ),
    ] = None,
    skip_air: Annotated[
        bool, typer.Option(help="Skip windows of air, if the model defines air.")
    ] = True,
    compiled_restore: Annotated[
        bool,
        typer.Option(
            help="Map labels back to the scan's grid with compiled kernels, or plain PyTorch."
        ),
    ] = True,
    mirror: Annotated[
        Literal["auto", "no"],
        typer.Option(help="Run the network on mirrored scans too: as the model says, or not."),
    ] = "auto",
    remove_small: Annotated[
        float,
        typer.Option(min=0.0, help="Remove components of a structure up to this volume, in mm3."),
    ] = 0.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no table.")] = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Segment scans; each result is a folder in OUT/cases.

    For example: scanloom segment study/ --model ct_tissue --out results
    """
    with error_boundary(OutputMode(json, debug)):
        from scanloom.engine.segment import segment_options

        values = {name: value for name, value in context.params.items() if name not in _OF_COMMAND}
        options = segment_options(
            **values
            | {
                "models": tuple(model),
                "also": tuple(also or ()),
                "structures": tuple(s.strip() for s in structures.split(",") if s.strip()),
            }
        )
        records = run(paths, options, quiet=quiet)
        if json:
            print_json(document(records))
        else:
            show(records, quiet=quiet)
        raise typer.Exit(exit_of_records([record for _, record in records]))


def run(paths: Sequence[Path], options: SegmentOptions, *, quiet: bool = False) -> Records:
    """Segment scans, with progress on stderr unless `quiet`; errors as in `segment_paths`."""
    from scanloom.engine.machine.lean_imports import without_optional_imports
    from scanloom.engine.segment import iter_segment

    with without_optional_imports(), report_new_key(options.key):
        if quiet:
            return list(iter_segment(paths, options, silence))
        with progress(paths) as on_step:
            return list(iter_segment(paths, options, on_step))


def document(records: Records) -> dict[str, Any]:
    """Return the document of `--json`: the cases of each path, in order."""
    return {"schema": 1, "cases": [_case(path, record) for path, record in records]}


def _case(path: Path, record: CaseRecord) -> dict[str, Any]:
    from scanloom.io.output.measurements import measurement_to_json

    reason = record.reason
    return {
        "path": str(path),
        "case": record.id or None,
        "outcome": "used" if reason is None else reason.outcome,
        "reason": None if reason is None else error_document(reason, record.detail),
        "flags": [{"code": flag.code, "text": flag.text} for flag in record.flags],
        "recalled": record.reused,
        "remade": record.updated,
        "folder": None if record.folder is None else str(record.folder),
        "seconds": round(record.seconds, 3),
        "measurements": [measurement_to_json(m) for m in record.measurements],
    }


def show(records: Records, *, quiet: bool = False) -> None:
    """Print tables on stdout and errors on stderr."""
    from scanloom.core import printable

    for path, record in records:
        if record.reason is not None:
            message = format_error(record.reason, record.detail, record.private)
            names_it = record.private and "\n" not in record.private
            say(message if names_it else f"{printable(str(path))}: {message}", err=True)
        elif not quiet:
            show_case(path, record)


def show_case(path: Path, record: CaseRecord) -> None:
    """Print the measurements of one case, and the paths of its results."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from scanloom.core import printable

    several = len({m.model for m in record.measurements}) > 1
    columns = [*(["model"] if several else []), "structure", "ml", "mean", "sd", "unit", "flags"]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in ("ml", "mean", "sd") else "left")
    for m in record.measurements:
        mean = "" if m.mean is None else f"{m.mean:.0f}"
        sd = "" if m.sd is None else f"{m.sd:.0f}"
        # flags of the whole case are printed once, below the table
        flags = " ".join(f.code for f in m.flags if f not in record.flags)
        row = [m.label, f"{m.volume_ml:.1f}", mean, sd, m.unit, flags]
        table.add_row(*([m.model] if several else []), *row)
    screen = console()
    screen.print(f"\n{printable(str(path))}: case {record.id}")
    screen.print(table)
    for flag in record.flags:
        screen.print(f"! {flag.text} ({flag.code}).", soft_wrap=True)
    if record.reused:
        screen.print("A result of this recipe already exists: nothing was done.")
    if record.updated:
        screen.print("The scan had changed: this result replaces the earlier one.")
    screen.print(f"Results: {record.folder}", soft_wrap=True)
    if record.folder is not None and (picture := record.folder / "preview.png").exists():
        screen.print(f"Look at: {picture}", soft_wrap=True)
