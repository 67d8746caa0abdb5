"""Options of the commands, as panels: dataclasses whose fields are options.

An option is written once, as a field of a panel:

    @dataclass(frozen=True)
    class InputPanel:
        panel: ClassVar[str] = "Input"
        archives: Annotated[bool, typer.Option(help="...")] = False

    @takes_panels
    def segment(scans: InputPanel, options: SegmentOptions) -> None: ...

or in `scanloom.options`, whose classes are taken like panels. typer sees one parameter for each
field; the command is called with the panels.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from scanloom.cli import values
from scanloom.cli.command import is_typed, read_defaults
from scanloom.cli.console import OutputMode
from scanloom.options import DEFAULT_OUT, PANELS, is_setting, walk_options


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


def _command_option(field: Field[Any], hint: Any) -> tuple[Any, OptionInfo]:
    """Return the type and the option that typer needs for a field of `scanloom.options`."""
    command, schema = field.metadata["command"], field.metadata["schema"]
    # A parser refuses values out of range in its own words, so that typer gets no limits
    parser = command["parser"] and getattr(values, command["parser"])
    info = typer.Option(
        *command["flags"],
        help=command["help"],
        metavar=command["metavar"],
        parser=parser,
        autocompletion=command["completion"] and getattr(values, command["completion"]),
        rich_help_panel=command["panel"],
        min=None if parser else schema.get("ge"),
        max=None if parser else schema.get("le"),
        case_sensitive=False,
    )
    if get_origin(hint) is not tuple:
        return hint, info
    return list[str] | None, info  # repeated; a parser may give several items of one text


def _shared(name: str) -> OptionInfo:
    """Return an option of `scanloom.options` that other commands have too."""
    return next(
        _command_option(each, hint)[1] for _, each, hint in walk_options() if each.name == name
    )


KeyOption = Annotated[Path | None, _shared("key")]


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
            If both are on the command line and differ.
        """
        if self.folder is not None and self.out != self.folder and is_typed("out"):
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
ArchivesOption = Annotated[bool, _shared("archives")]
StrictOption = Annotated[
    bool,
    typer.Option("--strict", help="Exit with 1 if any series failed or was skipped."),
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
    def all_paths(self) -> list[Path]:
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
    def all_paths(self) -> list[Path]:
        """The paths of the scans; see `given_paths`."""
        if not self.paths and not self.input and Path(self.workflow).is_dir():
            raise typer.BadParameter(
                f"a workflow comes before the scans, such as ct_tissue {self.workflow}",
                param_hint="'WORKFLOW'",
            )
        return given_paths(self.paths, self.input)


def folder_option(
    text: str, name: str = "--out", metavar: str = "DIR", envvar: str | None = None
) -> Any:
    """Return the option -o for a folder that is written: the name of a file is refused."""
    parser = values.output_folder
    return typer.Option(name, "-o", metavar=metavar, envvar=envvar, parser=parser, help=text)


@dataclass(frozen=True)
class OutOptions:
    """The output folder."""

    panel: ClassVar[str] = "Output"

    out: Annotated[Path, folder_option("Output folder.")] = DEFAULT_OUT


@dataclass(frozen=True)
class RunOutputOptions(OutOptions):
    """Folder of a run's results, and results that are made again."""

    replace: Annotated[bool, _shared("replace")] = False
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Retry all failed cases.")
    ] = False
    key: KeyOption = None


Values = Mapping[str, Any]


def takes_panels(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with one keyword parameter for each field of its panels, in panel order."""
    hints = get_type_hints(command, include_extras=True)
    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            flat += _parameters(hints[name])
        else:
            flat.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))
    # Stable: within a panel, options stay in the order in which they are written
    flat.sort(key=_panel_number)

    @functools.wraps(command)
    def flattened(**values_by_name: Any) -> None:
        command(
            **{
                name: _filled(hint, values_by_name) if is_dataclass(hint) else values_by_name[name]
                for name, hint in hints.items()
                if name != "return"
            }
        )

    # typer would follow it to the signature with the panels
    del flattened.__wrapped__
    flattened.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    flattened.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]  # for typer
    return flattened


def _panel_number(parameter: inspect.Parameter) -> int:
    """Return the number of a parameter's panel in help; arguments come first."""
    info = get_args(parameter.annotation)[1]
    panel = info.rich_help_panel if isinstance(info, OptionInfo) else None
    return PANELS.index(panel) if panel in PANELS else -1 if panel is None else len(PANELS)


def _parameters(panel: Any) -> list[inspect.Parameter]:
    """Return a parameter for each field of a panel, and of the dataclasses in it."""
    hints = get_type_hints(panel, include_extras=True)
    parameters = []
    for field in fields(panel):
        if is_setting(field):
            continue
        hint, default = hints[field.name], field.default
        if is_dataclass(hint):
            parameters += _parameters(hint)
            continue
        if "command" in field.metadata:
            kind, info = _command_option(field, hint)
            # Help would show an empty tuple as a default
            default = None if default == () else default
        else:
            kind, info = get_args(hint)
            # Several panels share an option: each copy has the name of its own panel
            info = copy(info)
            if isinstance(info, OptionInfo):
                info.rich_help_panel = panel.panel
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is MISSING else default,
                annotation=Annotated[kind, info],
            )
        )
    return parameters


def _filled(panel: Any, values_by_name: Values) -> Any:
    """Return a panel with its values, and with the dataclasses in it."""
    hints = get_type_hints(panel)
    arguments = {}
    for field in fields(panel):
        if is_setting(field):
            continue
        if is_dataclass(hints[field.name]):
            arguments[field.name] = _filled(hints[field.name], values_by_name)
            continue
        value = values_by_name[field.name]
        if "command" in field.metadata and get_origin(hints[field.name]) is tuple:
            items = [each if isinstance(each, tuple) else (each,) for each in value or ()]
            value = tuple(chain.from_iterable(items))
        arguments[field.name] = value
    return panel(**arguments)
