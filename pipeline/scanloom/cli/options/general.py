"""Options that every command has: configuration, log, detail and form of the output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from scanloom.cli.config_file import read_defaults
from scanloom.cli.console import OutputMode
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
