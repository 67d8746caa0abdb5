"""Options of several commands: those of every command, and those of commands that read scans."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from scanloom.cli.command import read_defaults
from scanloom.cli.console import OutputMode
from scanloom.cli.options import values
from scanloom.options import DEFAULT_OUT


@dataclass(frozen=True)
class General:
    """Options of every command."""

    panel: ClassVar[str] = "General"

    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            is_eager=True,
            callback=read_defaults,
            help="YAML or TOML file with values for options.",
        ),
    ] = None
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append a log without names and paths.")
    ] = None
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print the log on stderr.")
    ] = False
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks, without text from other libraries.")
    ] = False

    @property
    def mode(self) -> OutputMode:
        """Form in which results and errors are printed."""
        return OutputMode(debug=self.debug, verbose=self.verbose, log=self.log)


@dataclass(frozen=True)
class Reporting(General):
    """Options of every command that prints a result."""

    json: Annotated[
        bool, typer.Option("--json", help="Print a single JSON document on stdout.")
    ] = False
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress and no tables, only errors.")
    ] = False

    @property
    def mode(self) -> OutputMode:
        """Form in which results and errors are printed."""
        return OutputMode(self.json, self.debug, self.quiet, self.verbose, self.log)


KeyOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File with the key of the case ids.")
]


@dataclass(frozen=True)
class KeyOptions:
    """The key of an output folder's ids."""

    panel: ClassVar[str] = "Input"

    key: KeyOption = None


@dataclass(frozen=True)
class ResultsOptions:
    """The output folder of commands that read one."""

    panel: ClassVar[str] = "Input"

    folder: Annotated[Path | None, typer.Argument(metavar="OUT", hidden=True, help="As --out.")] = (
        None
    )
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Output folder to read.")
    ] = DEFAULT_OUT

    @property
    def path(self) -> Path:
        """The output folder, given by --out or as an argument; nothing in it may be a link.

        Raises
        ------
        typer.BadParameter
            If both are given and differ.
        """
        if self.folder is not None and self.out not in (self.folder, DEFAULT_OUT):
            raise typer.BadParameter(f"OUT is {self.folder}, but --out is {self.out}: give one")
        from scanloom.io.system.regular_files import refuse_links_below

        path = self.out if self.folder is None else self.folder
        refuse_links_below(path)
        return path


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
            autocompletion=values.complete_workflows,
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
