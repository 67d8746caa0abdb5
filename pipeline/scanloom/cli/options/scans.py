"""Options of commands that read scans: `segment`, `index`, `plan` and `run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from scanloom.cli.options import complete, values
from scanloom.cli.options.general import KeyOption
from scanloom.options import DEFAULT_OUT

PathArgument = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="PATH",
        help="Folder, DICOM or .nii.gz, .nrrd, .mha ... file, zip, DICOMDIR, BIDS, glob pattern.",
        show_default=False,
    ),
]
InputOption = Annotated[
    list[Path] | None,
    typer.Option("--input", "-i", metavar="PATH", help="The same as PATH; may be repeated."),
]
ArchivesOption = Annotated[
    bool, typer.Option("--archives", help="Also read zip and tar archives inside folders.")
]
OutOption = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Output folder.")]
StrictOption = Annotated[
    bool,
    typer.Option("--strict", help="Exit with 1 if any series failed or was skipped."),
]
ReplaceOption = Annotated[
    bool, typer.Option("--replace", help="Replace results of other models or options.")
]


def given_paths(paths: list[Path] | None, more: list[Path] | None) -> list[Path]:
    """Return the paths of the scans, given as arguments or by --input.

    Raises
    ------
    BadParameter
        If there is none.
    """
    every = [*(paths or ()), *(more or ())]
    if not every:
        raise typer.BadParameter(
            "missing: name a folder or a file with scans, such as `study/` or `scan.nii.gz`",
            param_hint="'PATH'",
        )
    return every


@dataclass(frozen=True)
class PathOptions:
    """Paths of scans."""

    panel: ClassVar[str] = "Input"

    paths: PathArgument = None
    input: InputOption = None

    @property
    def given(self) -> list[Path]:
        """The paths of the scans; see `given_paths`."""
        return given_paths(self.paths, self.input)


@dataclass(frozen=True)
class ArchiveOptions(PathOptions):
    """Files that are read from an archive."""

    archives: ArchivesOption = False


@dataclass(frozen=True)
class WorkflowOptions:
    """A workflow, and the archive on which it runs."""

    panel: ClassVar[str] = "Input"

    workflow: Annotated[
        str,
        typer.Argument(
            metavar="WORKFLOW",
            autocompletion=complete.workflows,
            help="A YAML or JSON file, or a shipped workflow.",
        ),
    ]
    paths: PathArgument = None
    input: InputOption = None
    archives: ArchivesOption = False
    shard: Annotated[
        values.Shard | None,
        typer.Option(
            parser=values.shard, metavar="K/N", help="Process only part K of N, for job arrays."
        ),
    ] = None

    @property
    def given(self) -> list[Path]:
        """The paths of the scans; see `given_paths`."""
        if not self.paths and not self.input and Path(self.workflow).is_dir():
            raise typer.BadParameter(
                f"a workflow comes before the scans, such as ct_tissue {self.workflow}",
                param_hint="'WORKFLOW'",
            )
        return given_paths(self.paths, self.input)


@dataclass(frozen=True)
class RunOutputOptions:
    """Folder of a run's results, and results that are made again."""

    panel: ClassVar[str] = "Output"

    out: OutOption = DEFAULT_OUT
    replace: ReplaceOption = False
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Retry all failed cases.")
    ] = False
    key: KeyOption = None
