"""`scanloom models`: add, list, show, verify and remove models."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scanloom.cli.command import Command, Group
from scanloom.cli.console import (
    Exit,
    error_boundary,
    error_document,
    format_error,
    print_json,
    print_result,
    say,
)
from scanloom.cli.options import values
from scanloom.cli.options.common import Reporting
from scanloom.cli.options.panels import takes_panels
from scanloom.cli.tables import plain_card, plain_entry, print_entry, print_list

if TYPE_CHECKING:
    from rich.progress import TaskID

    from scanloom.convert.download.add import Licence
    from scanloom.convert.download.sources import Progress

app = typer.Typer(
    cls=Group,
    help="Add models; list, show, verify and remove them.",
    no_args_is_help=True,
)

NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        autocompletion=values.complete_models,
        help="Name of a model, or path of a model folder.",
    ),
]
_SHOWN_LICENCE_LINES = 40


@app.command(cls=Command)
@takes_panels
def add(
    general: Reporting,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Folder, zip file, https address, name in MONAI's model zoo, brainchop/NAME or "
            "totalsegmentator/TASK.",
        ),
    ],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model in the store.")
    ] = None,
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="Accept a licence for non-commercial use.")
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not use the network; also SCANLOOM_OFFLINE=1.")
    ] = False,
) -> None:
    """Copy or download a model into your store.

    No code in it is run. Its files are hashed, and compared with these hashes whenever it is used.
    An interrupted download continues with the next attempt.
    """
    with error_boundary(general.mode):
        from scanloom.convert.download.add import AddOptions, add_model
        from scanloom.convert.store import describe_model

        downloads = _Downloads()

        def accept(model: str, licence: Licence) -> bool:
            downloads.stop()
            return accept_licence or _ask(model, licence)

        try:
            options = AddOptions(accept, name, offline, downloads.report, _report_wait)
            added = add_model(source, options)
        finally:
            downloads.stop()
        entry = describe_model(added.name)
        plain = {"schema": 1, "already": added.already, "model": plain_card(entry)}
        text = f"Added {added.name} ({entry.format}). Use it with --model {added.name}."
        if added.already:
            text = f"{added.name} is in the store already, unchanged."
        print_result(general.mode, lambda: plain, lambda: say(text))


@app.command("list", cls=Command)
@takes_panels
def list_all(general: Reporting) -> None:
    """List models that ship, shared models and your own."""
    with error_boundary(general.mode):
        from scanloom.convert.store import list_models

        entries = list_models()
        plain = {"schema": 1, "models": [plain_entry(entry) for entry in entries]}
        print_result(general.mode, lambda: plain, lambda: print_list(entries))


@app.command(cls=Command)
@takes_panels
def show(name: NameArgument, general: Reporting) -> None:
    """Show a model's intended use, inputs, structures, licence and source."""
    with error_boundary(general.mode):
        from scanloom.convert.store import describe_model

        entry = describe_model(name)
        plain = {"schema": 1, "model": plain_card(entry)}
        print_result(general.mode, lambda: plain, lambda: print_entry(entry))


@app.command(cls=Command)
@takes_panels
def verify(
    general: Reporting,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            autocompletion=values.complete_models,
            help="Name of a model, or path of its folder; all if omitted.",
        ),
    ] = None,
) -> None:
    """Compare all files of a model, or of all, with the hashes from when it was added."""
    with error_boundary(general.mode):
        from scanloom.convert.provenance import PROVENANCE_FILE
        from scanloom.convert.store import list_models, locate_model, verify_model
        from scanloom.core import ScanError

        results: list[dict[str, Any]] = []
        for entry in [locate_model(name)] if name is not None else list_models():
            recorded = (entry.folder / PROVENANCE_FILE).is_file()
            try:
                verify_model(entry)
                state, error = "unchanged" if recorded else "readable; no record of hashes", None
            except ScanError as exc:
                state = format_error(exc.reason, exc.detail)
                error = error_document(exc.reason, exc.detail)
            results.append({"name": entry.name, "recorded": recorded, "error": error})
            if not (general.json or general.quiet):
                say(f"{entry.name}: {state}")
        if general.json:
            print_json({"schema": 1, "models": results})
        if any(result["error"] for result in results):
            raise typer.Exit(Exit.UNUSABLE if name is not None else Exit.SOME_FAILED)


@app.command(cls=Command)
@takes_panels
def remove(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            autocompletion=values.complete_models,
            help="Name of one of your own models.",
        ),
    ],
    general: Reporting,
) -> None:
    """Remove a model from your store; models that ship or are shared stay."""
    with error_boundary(general.mode):
        from scanloom.convert.download.add import remove_model

        remove_model(name)
        plain = {"schema": 1, "removed": name}
        print_result(general.mode, lambda: plain, lambda: say(f"Removed {name}."))


def _ask(model: str, licence: Licence) -> bool:
    """Show a licence and ask on the terminal; without a terminal it is not accepted."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    lines = licence.text.splitlines()
    say(f"Licence of {model}: {licence.name}", err=True)
    say("\n".join(lines[:_SHOWN_LICENCE_LINES]), err=True)
    if len(lines) > _SHOWN_LICENCE_LINES:
        say(f"... {len(lines) - _SHOWN_LICENCE_LINES} more lines in the model's files", err=True)
    return typer.confirm("It excludes commercial use. Do you accept it?", err=True)


def _report_wait() -> None:
    say("Another process is adding a model of this name: waiting for it.", err=True)


class _Downloads:
    """Progress of downloads on stderr: a bar on a terminal, a line for each file otherwise."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        from scanloom.cli.console import console

        text = TextColumn("{task.description}", markup=False)
        columns = (text, BarColumn(), DownloadColumn(binary_units=True))
        screen = console(stderr=True)
        self._bars = Progress(*columns, console=screen, transient=True)
        self.report = self._draw if screen.is_terminal else _plain_lines()
        self._files: dict[str, TaskID] = {}

    def stop(self) -> None:
        """Remove the bar, so that other text can be written."""
        self._bars.stop()

    def _draw(self, file: str, received: int, total: int | None) -> None:
        if file not in self._files:
            self._bars.start()
            for task in self._files.values():
                self._bars.update(task, visible=False)
            self._files[file] = self._bars.add_task(file)
        self._bars.update(self._files[file], completed=received, total=total)


def _plain_lines() -> Progress:
    from scanloom.core import format_bytes

    printed: set[str] = set()

    def report(file: str, received: int, total: int | None) -> None:
        if file not in printed:
            printed.add(file)
            size = f" ({format_bytes(total)})" if total is not None else ""
            say(f"downloading {file}{size}", err=True)

    return report
