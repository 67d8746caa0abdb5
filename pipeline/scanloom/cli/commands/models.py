"""`scanloom models`: add, list, show, verify and remove models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scanloom.cli.console import (
    DebugOption,
    JsonOption,
    OutputMode,
    error_boundary,
    error_document,
    format_error,
    print_json,
    say,
)
from scanloom.cli.exit_codes import Exit
from scanloom.cli.model_tables import plain_card, plain_entry, print_entry, print_list

if TYPE_CHECKING:
    from scanloom.cards.download.licence import Licence
    from scanloom.cards.download.sources import Progress

app = typer.Typer(
    help="Add models; list, show, verify and remove them.",
    no_args_is_help=True,
)

NameArgument = Annotated[str, typer.Argument(help="Name of a model, or path of a model folder.")]
_SHOWN_LICENCE_LINES = 40


@app.command()
def add(
    source: Annotated[
        str,
        typer.Argument(
            help="Folder, zip file, https address, name in MONAI's model zoo, brainchop/NAME or "
            "totalsegmentator/TASK."
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
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Copy or download a model into your store.

    No code in it is run. Its files are hashed, and compared with these hashes whenever it is used.
    An interrupted download continues with the next attempt.
    """
    with error_boundary(OutputMode(json, debug)):
        from scanloom.cards.download.add import AddOptions, add_model
        from scanloom.cards.store import describe_model

        def accept(model: str, licence: Licence) -> bool:
            return accept_licence or _ask(model, licence)

        with _progress() as progress:
            options = AddOptions(accept, name, offline, progress, _report_wait)
            added = add_model(source, options)
        entry = describe_model(added.name)
        if json:
            print_json({"schema": 1, "already": added.already, "model": plain_card(entry)})
        elif added.already:
            say(f"{added.name} is in the store already, unchanged.")
        else:
            say(f"Added {added.name} ({entry.format}). Use it with --model {added.name}.")


@app.command("list")
def list_all(json: JsonOption = False, debug: DebugOption = False) -> None:
    """List models that ship, shared models and your own."""
    with error_boundary(OutputMode(json, debug)):
        from scanloom.cards.store import list_models

        entries = list_models()
        if json:
            print_json({"schema": 1, "models": [plain_entry(entry) for entry in entries]})
        else:
            print_list(entries)


@app.command()
def show(name: NameArgument, json: JsonOption = False, debug: DebugOption = False) -> None:
    """Show a model's intended use, inputs, structures, licence and source."""
    with error_boundary(OutputMode(json, debug)):
        from scanloom.cards.store import describe_model

        entry = describe_model(name)
        if json:
            print_json({"schema": 1, "model": plain_card(entry)})
        else:
            print_entry(entry)


@app.command()
def verify(
    name: Annotated[
        str | None, typer.Argument(help="Name of a model, or path of its folder; all if omitted.")
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare all files of a model, or of all, with the hashes from when it was added."""
    with error_boundary(OutputMode(json, debug)):
        from scanloom.cards.provenance import PROVENANCE_FILE
        from scanloom.cards.store import list_models, locate_model, verify_model
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
            if not json:
                say(f"{entry.name}: {state}")
        if json:
            print_json({"schema": 1, "models": results})
        if any(result["error"] for result in results):
            raise typer.Exit(Exit.UNUSABLE if name is not None else Exit.SOME_FAILED)


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="Name of one of your own models.")],
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Remove a model from your store; models that ship or are shared stay."""
    with error_boundary(OutputMode(json, debug)):
        from scanloom.cards.download.add import remove_model

        remove_model(name)
        if json:
            print_json({"schema": 1, "removed": name})
        else:
            say(f"Removed {name}.")


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


@contextmanager
def _progress() -> Iterator[Progress]:
    """Yield a callback for downloads: a bar on a terminal, a line for each file otherwise."""
    if not sys.stderr.isatty():
        yield _plain_lines()
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

    from scanloom.cli.console import console

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=console(stderr=True), transient=True) as bars:
        shown: dict[str, TaskID] = {}

        def update(file: str, received: int, total: int | None) -> None:
            if file not in shown:
                for task in shown.values():
                    bars.update(task, visible=False)
                shown[file] = bars.add_task(file)
            bars.update(shown[file], completed=received, total=total)

        yield update


def _plain_lines() -> Progress:
    from scanloom.core import format_bytes

    printed: set[str] = set()

    def report(file: str, received: int, total: int | None) -> None:
        if file not in printed:
            printed.add(file)
            size = f" ({format_bytes(total)})" if total is not None else ""
            say(f"downloading {file}{size}", err=True)

    return report
