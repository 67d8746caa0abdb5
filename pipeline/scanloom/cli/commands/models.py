"""`scanloom models`: add, bundle, list, show, verify and remove models."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scanloom.cli import values
from scanloom.cli.command import Command, Group
from scanloom.cli.console import (
    Exit,
    console,
    error_boundary,
    error_document,
    format_error,
    print_json,
    print_result,
    say,
)
from scanloom.cli.options import Reporting, takes_panels

if TYPE_CHECKING:
    from rich.progress import TaskID

    from scanloom.cards.card import ModelCard
    from scanloom.convert.download.add import Added, Licence
    from scanloom.convert.download.sources import ModelSource, Progress
    from scanloom.convert.onnx_model import Answers
    from scanloom.convert.store import ModelEntry

app = typer.Typer(
    cls=Group,
    help="Add models; list, show, bundle, verify and remove them; describe a network of your own.",
    no_args_is_help=True,
)

_SHOWN_LICENCE_LINES = 40


def _model_argument(text: str, metavar: str = "NAME") -> Any:
    """Return an argument for a model, which the shell completes."""
    return typer.Argument(metavar=metavar, autocompletion=values.complete_models, help=text)


@app.command(cls=Command)
@takes_panels
def add(
    general: Reporting,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Folder, zip file, file of `models bundle`, https address, name in MONAI's model "
            "zoo, brainchop/NAME or totalsegmentator/TASK; options of a model as SOURCE:KEY=VALUE.",
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
        from scanloom.convert.download.archive import find_sources
        from scanloom.convert.store import describe_model
        from scanloom.core import Reason, ScanError

        sources = find_sources(source)
        if name is not None and len(sources) > 1:
            detail = f"--name is for one model, and the archive holds {len(sources)}"
            raise ScanError(Reason.MODEL_UNKNOWN, detail)
        documents = list[dict[str, Any]]()
        for each in sources:
            added = _add(each, name, accept_licence=accept_licence, offline=offline)
            entry = describe_model(added.name)
            documents.append({"already": added.already, "model": plain_card(entry)})
            if not (general.json or general.quiet):
                text = f"Added {added.name} ({entry.format}). Use it with --model {added.name}."
                already = f"{added.name} is in the store already, unchanged."
                say(already if added.already else text)
        if general.json:
            further = {"models": documents} if len(documents) > 1 else documents[0]
            print_json({"schema": 1, **further})


@app.command(cls=Command)
@takes_panels
def bundle(
    general: Reporting,
    names: Annotated[
        list[str], _model_argument("Names of models, or paths of model folders.", "NAME...")
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            envvar="SCANLOOM_BUNDLE_OUT",
            help="The file, such as models.zip.",
        ),
    ],
) -> None:
    """Write models into one file for a machine without a network.

    There, `scanloom models add FILE` adds them. Licences and hashes are in the file.

    Example: scanloom models bundle total_fast mindgrab -o models.zip
    """
    with error_boundary(general.mode):
        from scanloom.convert.download.archive import write_archive
        from scanloom.core import format_bytes, printable

        fetch_missing(names)
        entries = write_archive(names, out)
        size, titles = out.stat().st_size, [entry.name for entry in entries]
        plain = {"schema": 1, "file": str(out), "bytes": size, "models": titles}
        file = printable(str(out))
        text = (
            f"Wrote {', '.join(titles)} into {file} ({format_bytes(size)}). Add them elsewhere "
            f"with: scanloom models add {printable(out.name)}"
        )
        print_result(general.mode, lambda: plain, lambda: say(text))


def fetch_missing(models: Sequence[str]) -> None:
    """Ask on the terminal whether known models that are missing are to be added, and add them.

    Size, licence and source are shown first: the server of a model is asked for its size. Without
    a terminal, offline, or if the answer is no, nothing is done: to use the model is then an error
    that names the command.

    Parameters
    ----------
    models : sequence of str
        As of `find_model`.

    Raises
    ------
    ScanError
        As `add_model`.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    from scanloom.convert.download.add import is_offline, source_size
    from scanloom.convert.download.addresses import ZOO_BUNDLES
    from scanloom.convert.download.sources import find_source
    from scanloom.convert.store import missing_request
    from scanloom.core import ScanError, format_bytes

    requests = dict.fromkeys(filter(None, map(missing_request, models)))
    if not requests or is_offline():
        return
    sources = [find_source(request) for request in requests]
    for source in sources:
        try:
            size = source_size(source)
        except ScanError as exc:
            detail = f"the model {source.name} is not in the store, and {exc.detail}"
            raise ScanError(exc.reason, detail) from exc
        licence = source.licence or ZOO_BUNDLES.get(source.name, "as in its files")
        say(f"The model {source.name} is not in your store. It can be fetched:", err=True)
        say(f"  source   {source.origin}", err=True)
        say(f"  licence  {licence}", err=True)
        say(f"  size     {'not stated' if size is None else format_bytes(size)}", err=True)
    if typer.confirm(f"Fetch {'it' if len(sources) == 1 else 'them'} now?", err=True):
        for source in sources:
            _add(source)


def _add(
    source: ModelSource,
    name: str | None = None,
    *,
    accept_licence: bool = False,
    offline: bool = False,
) -> Added:
    """Add a model, with progress on stderr and a question about its licence."""
    from scanloom.convert.download.add import AddOptions, add_model

    downloads = _Downloads()

    def accept(model: str, licence: Licence) -> bool:
        downloads.stop()
        return accept_licence or _ask(model, licence)

    try:
        return add_model(source, AddOptions(accept, name, offline, downloads.report, _report_wait))
    finally:
        downloads.stop()


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
def show(
    name: Annotated[str, _model_argument("Name of a model, or path of a model folder.")],
    general: Reporting,
) -> None:
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
        str | None, _model_argument("Name of a model, or path of its folder; all if omitted.")
    ] = None,
) -> None:
    """Compare all files of a model, or of all, with the hashes from when it was added."""
    with error_boundary(general.mode):
        from scanloom.convert.provenance import PROVENANCE_FILE
        from scanloom.convert.readers import split_options
        from scanloom.convert.store import list_models, locate_model, verify_model
        from scanloom.core import ScanError

        results: list[dict[str, Any]] = []
        plain, options = split_options(name or "")
        for entry in [locate_model(plain)] if name is not None else list_models():
            recorded = (entry.folder / PROVENANCE_FILE).is_file()
            try:
                verify_model(entry, options)
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
    name: Annotated[str, _model_argument("Name of one of your own models.")],
    general: Reporting,
) -> None:
    """Remove a model from your store; models that ship or are shared stay."""
    with error_boundary(general.mode):
        from scanloom.convert.download.add import remove_model

        remove_model(name)
        plain = {"schema": 1, "removed": name}
        print_result(general.mode, lambda: plain, lambda: say(f"Removed {name}."))


@app.command(cls=Command)
@takes_panels
def new(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of model.onnx; made if it is missing.")
    ],
    general: Reporting,
    like: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="MODEL",
            envvar="SCANLOOM_NEW_FROM",
            autocompletion=values.complete_models,
            help="Model, or folder of a bundle, that is used in the same way.",
        ),
    ] = None,
) -> None:
    """Write card.yaml for a network in ONNX: like that of a model, or by questions.

    Example: scanloom models new my_model --from spleen_ct_segmentation
    """
    with error_boundary(general.mode):
        from scanloom.convert.onnx_model import (
            CARD_YAML,
            GRAPH_FILE,
            card_like,
            card_of_answers,
            read_onnx_model,
        )
        from scanloom.convert.store import find_model
        from scanloom.core import ScanError, printable

        file, whole = folder / CARD_YAML, folder.absolute()
        existing = next(each for each in (whole, *whole.parents) if each.exists())
        if not existing.is_dir():  # before the questions
            shown = f"{printable(str(existing))} is not a folder"
            raise typer.BadParameter(shown, param_hint="'FOLDER'")
        if file.exists():
            raise typer.BadParameter(f"{printable(str(file))} is there already")
        text = card_like(find_model(like)) if like else card_of_answers(_ask_card(folder))
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        complete = (folder / GRAPH_FILE).exists()
        if complete:
            try:
                read_onnx_model(folder)
            except ScanError:
                say(f"Wrote {printable(str(file))}, which does not fit the network yet.", err=True)
                raise
        plain = {"schema": 1, "file": str(file), "complete": complete}
        following = (
            f"Try it: scanloom segment SCAN --model {printable(str(folder))}"
            if complete
            else f"Put the network next to it, as {GRAPH_FILE}"
        )
        shown = f"Wrote {printable(str(file))}. {following}"
        print_result(general.mode, lambda: plain, lambda: say(shown))


def _ask_card(folder: Path) -> Answers:
    """Ask what a network needs and returns; Enter takes what stands in brackets."""
    from scanloom.convert.onnx_model import Answers

    def ask(question: str, default: str) -> str:
        answer: str = typer.prompt(question, default=default, err=True, show_default=bool(default))
        return answer.strip()

    return Answers(
        title=ask("Title", folder.resolve().name),
        modality=ask("Modality (CT, MR, PT, NM, any)", "CT"),
        orientation=ask("Axes from first to last voxel, such as RAS; Enter for the scan's", ""),
        spacing=ask("Spacing that it takes, mm, such as 1.5 1.5 2; Enter for the scan's", ""),
        intensity=ask("Intensities: range for 0 to 1, such as -57 164; normalise; none", "none"),
        window=ask("Window, voxels, such as 96 96 96; Enter for the whole scan", ""),
        layout=ask("Axes of the graph (channels_first, channels_last)", "channels_first"),
        scores=ask("Function after the graph (softmax, sigmoid, none)", "none"),
        structures=ask("Structures after the background, separated by commas", "structure"),
    )


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

        text = TextColumn("{task.description}", markup=False)
        columns = (text, BarColumn(), DownloadColumn(binary_units=True))
        screen = console(stderr=True)
        self._bars = Progress(*columns, console=screen, transient=True)
        self.report = self._draw if screen.is_terminal else _plain_lines()
        self._files: dict[str, TaskID] = {}

    def stop(self) -> None:
        """Remove the bar, so that other text can be written."""
        if self._bars.live.is_started:  # else it would write an empty line
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


def print_list(entries: tuple[ModelEntry, ...]) -> None:
    """Print a line for each model; a broken one with the code of its error."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    titles = ("version", "scans", "structures", "source", "format", "licence", "title")
    name = Column("model", no_wrap=True)  # in one line, since other commands need it
    table = Table(name, *titles, box=SIMPLE_HEAD, pad_edge=False)
    for entry in entries:
        card, section = entry.card, entry.section or ""
        if card is None:
            code = entry.error.code if entry.error else "?"
            title = f"can't be used ({code})"
            table.add_row(entry.name, "", "", "", section, entry.format, _licence(entry), title)
        else:
            scans = " + ".join(c.modality for c in card.channels)
            count, licence = str(len(card.structures)), _licence(entry)
            about = (card.name, card.version, scans, count)
            table.add_row(*about, section, entry.format, licence, card.title)
    console().print(table)


def print_entry(entry: ModelEntry) -> None:
    """Print the card of a model, its source, and a table of its structures."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from scanloom.engine.machine.devices import NEVER_RUN
    from scanloom.inference.engines.cache import trials_of

    card = entry.card
    if card is None:
        raise ValueError("the model has no card")
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column()
    untried = ("never run on", ", ".join(NEVER_RUN))
    trials = [
        (_of(trial.model, card, "engine"), f"{trial}; on {trial.place}")
        for trial in trials_of(card)
    ]
    for name, text in (*_facts(card), *_origin(entry), *trials, untried):
        facts.add_row(name, text)
    table = Table("number", "label", "name", "code", "side", box=SIMPLE_HEAD, pad_edge=False)
    for s in card.structures:
        code = f"{s.type.value} {s.type.scheme} {s.type.meaning}"
        side = s.laterality.meaning if s.laterality else ""
        table.add_row(str(s.number), s.label, s.name, code, side)
    screen = console()
    screen.print(facts)
    screen.print(table)
    for limitation in card.limitations:
        screen.print(f"! {limitation.text}")
    if any(s.experimental for s in card.structures):
        labels = ", ".join(s.label for s in card.structures if s.experimental)
        screen.print(f"Experimental, according to its authors: {labels}")
    if card.on_request:
        labels = ", ".join(card.on_request)
        screen.print(f"Only on request, by --structures: {labels}")


def plain_entry(entry: ModelEntry) -> dict[str, Any]:
    """Return the JSON object of a model in a list."""
    card, error = entry.card, entry.error
    return {
        "name": card.name if card else entry.name,
        "version": card.version if card else None,
        "title": card.title if card else None,
        "modalities": [c.modality for c in card.channels] if card else None,
        "structures": [s.label for s in card.structures] if card else None,
        **_plain_origin(entry),
        "error": error_document(error.reason, error.detail) if error else None,
    }


def plain_card(entry: ModelEntry) -> dict[str, Any]:
    """Return the JSON object of a model with its card."""
    from scanloom.cards.graph import networks
    from scanloom.engine.machine.devices import NEVER_RUN
    from scanloom.inference.engines.cache import trials_of

    card = entry.card
    if card is None:
        raise ValueError("the model has no card")
    return {
        "name": card.name,
        "version": card.version,
        "title": card.title,
        "description": card.description,
        "intended_use": card.intended_use,
        "license": card.license,
        "attribution": card.attribution,
        "limitations": [each.text for each in card.limitations],
        "reference_ranges": [asdict(each) for each in card.reference_ranges],
        "reference_directions": [asdict(each) for each in card.reference_directions],
        "channels": [{"name": c.name, "modality": c.modality} for c in card.channels],
        "network": card.network.name,
        "orientation": card.grid.orientation,
        "spacing_mm": card.grid.spacing,
        "precisions": card.precisions,
        "fast": less_work(card) or None,
        "networks": [
            {
                "name": network.name,
                "weights_sha256": [w.published for w in (network.weights, *network.folds)],
                "structures": [s.label for s in network.structures],
                "mirrored": _mirrored(network) or None,
            }
            for network in networks(card)
        ],
        "weights_sha256": card.weights.published,
        **_plain_origin(entry),
        "checks": asdict(card.checks),
        "engines": [
            {**asdict(trial), "used": trial.used, "why": trial.why} for trial in trials_of(card)
        ],
        "never_run_on": list(NEVER_RUN),
        "structures": [
            {
                "number": s.number,
                "label": s.label,
                "name": s.name,
                "category": vars(s.category),
                "type": vars(s.type),
                "laterality": vars(s.laterality) if s.laterality else None,
                "experimental": s.experimental,
                "on_request": s.label in card.on_request,
            }
            for s in card.structures
        ],
    }


def _licence(entry: ModelEntry) -> str:
    if entry.provenance is not None:
        return entry.provenance.licence
    return entry.card.license if entry.card else ""


def _facts(card: ModelCard) -> list[tuple[str, str]]:
    own, sizes = "the scan's own", card.grid.spacing
    spacing = own
    if sizes is not None:
        spacing = " x ".join("own" if s is None else f"{s:g}" for s in sizes) + " mm"
    return [
        ("model", f"{card.name} {card.version}".strip()),
        ("title", card.title),
        ("description", card.description),
        ("intended use", card.intended_use or "not stated"),
        ("licence", card.license or "not stated"),
        ("attribution", card.attribution or "not stated"),
        ("input", ", ".join(f"{c.name} ({c.modality})" for c in card.channels)),
        ("network", card.network.name),
        ("axes", card.grid.orientation or own),
        ("spacing", spacing),
        ("precisions", ", ".join(card.precisions)),
        ("--fast", less_work(card) or "changes nothing"),
        *_mirrors(card),
        *_checks(card),
        *_weights(card),
    ]


def less_work(card: ModelCard) -> str:
    """Return the changes by `--fast` in words; else ""."""
    from scanloom.cards.requested import describe_changes, requested_card
    from scanloom.core import ComputeOptions

    return describe_changes(card, requested_card(card, ComputeOptions(fast=True)))


def _mirrors(card: ModelCard) -> Iterator[tuple[str, str]]:
    """Yield a line for each network that also runs on mirrored scans."""
    from scanloom.cards.graph import networks

    for network in networks(card):
        if text := _mirrored(network):
            yield _of(network.name, card, "mirrored"), text


def _mirrored(network: ModelCard) -> str:
    """Return how the scores of mirrored scans enter those of a network; "" if they do not."""
    window = network.window
    if not window.mirror:
        return ""
    flips = (1 << len(window.mirror)) - 1
    several = "the mirrored scan" if flips == 1 else f"{flips} mirrored scans"
    sides = ", where left and right change places" if window.mirrored_channels else ""
    return f"scores are the mean with those of {several}{sides}, unless --mirror no"


def _checks(card: ModelCard) -> Iterator[tuple[str, str]]:
    """Yield a line for each range that scans are compared with."""
    checks = card.checks
    ranges = (
        ("intensity", "1st percentile", checks.low, ""),
        ("intensity", "99th percentile", checks.high, ""),
        ("spacing", "spacing", checks.spacing, " mm"),
        ("extent", "field of view", checks.extent, " mm"),
    )
    for check, quantity, limits, unit in ranges:
        if limits is not None:
            outcome = "refused" if check in checks.refuse else "flagged"
            yield "check", f"{quantity} {limits.low:g} to {limits.high:g}{unit}, or {outcome}"
    if checks.tilt is not None:
        outcome = "refused" if "tilt" in checks.refuse else "flagged"
        yield "check", f"axes tilted by {checks.tilt:g} degrees at most, or {outcome}"
    if any(checks.needs_hounsfield(channel.modality) for channel in card.channels):
        yield "check", "CT must be in Hounsfield units, or refused"


def _weights(card: ModelCard) -> Iterator[tuple[str, str]]:
    """Yield a line for the weights of each network, in the order in which they run."""
    from scanloom.cards.graph import networks

    if card.stage is not None:
        structures = ", ".join(card.stage.labels) or "all structures"
        if card.stage.use == "crop":
            yield "crop", f"{card.stage.card.name}: {structures}, {card.stage.margin:g} mm around"
        else:
            yield "first stage", card.stage.card.name
    for network in networks(card):
        for weights in (network.weights, *network.folds):
            yield _of(network.name, card, "weights"), f"sha256 {weights.published}"


def _of(network: str, card: ModelCard, title: str) -> str:
    """Return the title of a line about a network of a model, which may have several."""
    return title if network == card.name else f"{title} of {network}"


def _origin(entry: ModelEntry) -> list[tuple[str, str]]:
    """Return section, format and provenance of a model as lines of a table."""
    from scanloom.core import counted

    lines = [
        ("section", entry.section or "a folder outside of the store"),
        ("format", entry.format),
    ]
    record = entry.provenance
    if record is None:
        return [*lines, ("hashes", "no record: the model was not added by `scanloom models add`")]
    published = "equal to the published ones" if record.published else "recorded when it was added"
    accepted = " (accepted)" if record.accepted else ""
    return [
        *lines,
        ("source", record.source),
        ("address", record.address),
        ("added", record.added),
        ("licence shown", f"{record.licence or 'not stated'}{accepted}"),
        ("hashes", f"of {counted(len(record.files), 'file')}, {published}; unchanged"),
    ]


def _plain_origin(entry: ModelEntry) -> dict[str, Any]:
    """Return the fields of section, format and provenance."""
    record = entry.provenance
    added = record and {
        "source": record.source,
        "address": record.address,
        "added": record.added,
        "licence": record.licence,
        "licence_accepted": record.accepted,
        "hashes_published": record.published,
        "files": len(record.files),
    }
    return {"section": entry.section, "format": entry.format, "provenance": added}
