"""`scanloom export`: a copy of results without what identifies patients."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from scanloom.cli.console import Exit, console, error_boundary, print_result, say
from scanloom.cli.options import KeyOptions, Reporting, folder_option, takes_panels

if TYPE_CHECKING:
    from scanloom.engine.results.export import Export


@dataclass(frozen=True)
class CopyOptions:
    """The folder of the copy, and its content."""

    panel: ClassVar[str] = "Output"

    folder: Annotated[Path, folder_option("The copy: a new or empty folder.", "--folder", "FOLDER")]
    pictures: Annotated[
        bool, typer.Option("--pictures", help="With pictures, scans and the report.")
    ] = False


@takes_panels
def export(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Output folder of `segment` or `run`.")
    ],
    copy: CopyOptions,
    keys: KeyOptions,
    general: Reporting,
) -> None:
    """Copy results without DICOM, pictures, scans and `private/`, checked on the way.

    Label maps of a head show its face: see "Identity" in the docs before you give them away.

    Example: scanloom export results -o copy
    """
    with error_boundary(general.mode):
        from scanloom.engine.results.export import export as copy_results

        copied = copy_results(out, copy.folder, pictures=copy.pictures, key=keys.key)
        plain = {"schema": 1, **asdict(copied)}
        print_result(general.mode, lambda: plain, lambda: _show(copied, copy.folder))
    raise typer.Exit(Exit.SOME_FAILED if copied.left_out else Exit.OK)


def _show(copied: Export, folder: Path) -> None:
    from scanloom.core import counted

    for name in copied.left_out:
        say(f"left out: {name}: its files are not as published (`scanloom verify`)", err=True)
    size = f"{copied.size / 1e6:.0f} MB" if copied.size > 1e6 else f"{copied.size / 1e3:.0f} kB"
    counts = f"{counted(copied.cases, 'case')}, {counted(copied.files, 'file')}"
    console().print(f"{counts}, {size}: {folder}")
