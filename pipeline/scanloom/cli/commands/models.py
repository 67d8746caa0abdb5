"""`scanloom models`: list and show models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from scanloom.cli.console import (
    DebugOption,
    JsonOption,
    OutputMode,
    console,
    error_boundary,
    error_document,
    print_json,
)

if TYPE_CHECKING:
    from scanloom.cards.card import ModelCard
    from scanloom.cards.store import ModelEntry
    from scanloom.core import Structure

app = typer.Typer(
    help="List models and show their purpose, inputs and structures.", no_args_is_help=True
)


@app.command("list")
def list_all(json: JsonOption = False, debug: DebugOption = False) -> None:
    """List shipped models and your own."""
    with error_boundary(OutputMode(json, debug)):
        from scanloom.cards.store import list_models

        entries = list_models()
        if json:
            print_json({"schema": 1, "models": [_plain_entry(entry) for entry in entries]})
        else:
            _print_list(entries)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Name of a model, or path of a model folder.")],
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show a model's intended use, inputs, structures and licence."""
    with error_boundary(OutputMode(json, debug)):
        from scanloom.cards.store import find_model

        card = find_model(name)
        if json:
            print_json({"schema": 1, "model": _plain_card(card)})
        else:
            _print_card(card)


def _print_list(entries: tuple[ModelEntry, ...]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        "model", "version", "scans", "structures", "title", box=SIMPLE_HEAD, pad_edge=False
    )
    for entry in entries:
        card = entry.card
        if card is None:
            code = entry.error.code if entry.error else "?"
            table.add_row(entry.name, "", "", "", f"can't be used ({code})")
        else:
            scans = " + ".join(c.modality for c in card.channels)
            table.add_row(card.name, card.version, scans, str(len(card.structures)), card.title)
    console().print(table)


def _print_card(card: ModelCard) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    facts = Table.grid(padding=(0, 2))
    for name, text in _facts(card):
        facts.add_row(name, text)
    table = Table("number", "label", "name", "code", "side", box=SIMPLE_HEAD, pad_edge=False)
    for s in card.structures:
        code = f"{s.type.value} {s.type.scheme} {s.type.meaning}"
        side = s.laterality.meaning if s.laterality else ""
        table.add_row(str(s.number), s.label, s.name, code, side)
    screen = console()
    screen.print(facts)
    screen.print(table)
    if any(s.experimental for s in card.structures):
        labels = ", ".join(s.label for s in card.structures if s.experimental)
        screen.print(f"Experimental, according to its authors: {labels}", soft_wrap=True)


def _facts(card: ModelCard) -> list[tuple[str, str]]:
    spacing = card.grid.spacing
    return [
        ("model", f"{card.name} {card.version}".strip()),
        ("title", card.title),
        ("description", card.description),
        ("intended use", card.intended_use or "not stated"),
        ("licence", card.license or "not stated"),
        ("attribution", card.attribution or "not stated"),
        ("input", ", ".join(f"{c.name} ({c.modality})" for c in card.channels)),
        ("network", card.network.name),
        ("axes", card.grid.orientation or "the scan's own"),
        (
            "spacing",
            " x ".join(f"{s:g}" for s in spacing) + " mm" if spacing else "the scan's own",
        ),
        ("precisions", ", ".join(card.precisions)),
        ("weights", f"sha256 {card.weights.sha256}"),
    ]


def _plain_entry(entry: ModelEntry) -> dict[str, Any]:
    card, error = entry.card, entry.error
    return {
        "name": card.name if card else entry.name,
        "version": card.version if card else None,
        "title": card.title if card else None,
        "modalities": [c.modality for c in card.channels] if card else None,
        "structures": [s.label for s in card.structures] if card else None,
        "error": error_document(error.reason, error.detail) if error else None,
    }


def _plain_card(card: ModelCard) -> dict[str, Any]:
    return {
        "name": card.name,
        "version": card.version,
        "title": card.title,
        "description": card.description,
        "intended_use": card.intended_use,
        "license": card.license,
        "attribution": card.attribution,
        "channels": [{"name": c.name, "modality": c.modality} for c in card.channels],
        "network": card.network.name,
        "orientation": card.grid.orientation,
        "spacing_mm": card.grid.spacing,
        "precisions": card.precisions,
        "weights_sha256": card.weights.sha256,
        "structures": [_plain_structure(s) for s in card.structures],
    }


def _plain_structure(structure: Structure) -> dict[str, Any]:
    side = structure.laterality
    return {
        "number": structure.number,
        "label": structure.label,
        "name": structure.name,
        "category": vars(structure.category),
        "type": vars(structure.type),
        "laterality": vars(side) if side else None,
        "experimental": structure.experimental,
    }
