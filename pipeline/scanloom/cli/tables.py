"""Tables of models, and of the status and the totals of a run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from scanloom.cli.console import console, error_document

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scanloom.cards.card import ModelCard
    from scanloom.cards.store import ModelEntry
    from scanloom.core import Structure
    from scanloom.engine.monitor import Status
    from scanloom.inference.engines.cache import EngineTrial


def print_list(entries: tuple[ModelEntry, ...]) -> None:
    """Print a line for each model; a broken one with the code of its error."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    columns = ("version", "scans", "structures", "source", "format", "licence", "title")
    name = Column("model", no_wrap=True)  # whole, since other commands need it
    table = Table(name, *columns, box=SIMPLE_HEAD, pad_edge=False)
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

    card = entry.card
    if card is None:
        raise ValueError("the model has no card")
    facts = Table.grid(padding=(0, 2))
    for name, text in (*_facts(card), *_origin(entry), *_engines(card)):
        facts.add_row(name, text)
    table = Table("number", "label", "name", "code", "side", box=SIMPLE_HEAD, pad_edge=False)
    for s in card.structures:
        code = f"{s.type.value} {s.type.scheme} {s.type.meaning}"
        side = s.laterality.meaning if s.laterality else ""
        table.add_row(str(s.number), s.label, s.name, code, side)
    screen = console()
    screen.print(facts)
    screen.print(table)
    for sentence in card.limitations:
        screen.print(f"! {sentence}", soft_wrap=True)
    if any(s.experimental for s in card.structures):
        labels = ", ".join(s.label for s in card.structures if s.experimental)
        screen.print(f"Experimental, according to its authors: {labels}", soft_wrap=True)


def limitation_lines(models: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each model with limitations: the first one, and where the others are.

    Parameters
    ----------
    models : iterable of mapping
        Entries of `models` in `case.json`; models may be repeated.
    """
    lines = {}
    for model in models:
        first, *further = model.get("limitations") or ("",)
        if first:
            name = model["name"]
            more = f" {len(further)} more: scanloom models show {name}" if further else ""
            lines[name] = f"! {name}: {first}{more}"
    return list(lines.values())


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
    from scanloom.cards.requested import networks

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
        "limitations": card.limitations,
        "reference_ranges": [asdict(each) for each in card.reference_ranges],
        "channels": [{"name": c.name, "modality": c.modality} for c in card.channels],
        "network": card.network.name,
        "orientation": card.grid.orientation,
        "spacing_mm": card.grid.spacing,
        "precisions": card.precisions,
        "fast": less_work(card) or None,
        "networks": [_plain_network(network) for network in networks(card)],
        "weights_sha256": card.weights.sha256,
        **_plain_origin(entry),
        "checks": asdict(card.checks),
        "engines": [
            {**asdict(trial), "used": trial.used, "why": trial.why} for trial in trials_of(card)
        ],
        "structures": [_plain_structure(s) for s in card.structures],
    }


def _engines(card: ModelCard) -> list[tuple[str, str]]:
    """Return the measurements of engines with a model on this machine, as lines of a table."""
    return [("engine", str(trial)) for trial in trials_of(card)]


def trials_of(card: ModelCard) -> list[EngineTrial]:
    """Return the trials of engines for a model and its parts, by this user on this machine."""
    from scanloom.cards.requested import networks
    from scanloom.inference.engines.cache import all_trials

    names = {network.name for network in networks(card)}
    return [trial for trial in all_trials() if trial.model in names]


def _licence(entry: ModelEntry) -> str:
    if entry.provenance is not None:
        return entry.provenance.licence
    return entry.card.license if entry.card else ""


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
        ("spacing", _format_spacing(spacing)),
        ("precisions", ", ".join(card.precisions)),
        ("--fast", less_work(card) or "changes nothing"),
        *_checks(card),
        *_weights(card),
    ]


def less_work(card: ModelCard) -> str:
    """Return what `--fast` changes, in words; else ""."""
    from scanloom.cards.requested import describe_changes, requested_card
    from scanloom.core import ComputeOptions

    return describe_changes(card, requested_card(card, ComputeOptions(fast=True)))


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
    if any(checks.needs_hounsfield(channel.modality) for channel in card.channels):
        yield "check", "CT must be in Hounsfield units, or refused"


def _weights(card: ModelCard) -> Iterator[tuple[str, str]]:
    """Yield a line for the weights of each network, in the order in which they run."""
    from scanloom.cards.requested import networks

    if card.stage is not None:
        structures = ", ".join(card.stage.labels) or "all structures"
        if card.stage.use == "crop":
            yield "crop", f"{card.stage.card.name}: {structures}, {card.stage.margin:g} mm around"
        else:
            yield "first stage", card.stage.card.name
    for network in networks(card):
        name = "weights" if network is card else f"weights of {network.name}"
        for weights in (network.weights, *network.folds):
            yield name, f"sha256 {weights.sha256}"


def _plain_network(card: ModelCard) -> dict[str, Any]:
    """Return the JSON object of one of a model's networks."""
    return {
        "name": card.name,
        "weights_sha256": [weights.sha256 for weights in (card.weights, *card.folds)],
        "structures": [s.label for s in card.structures],
    }


def _format_spacing(spacing: Sequence[float | None] | None) -> str:
    if spacing is None:
        return "the scan's own"
    return " x ".join("own" if s is None else f"{s:g}" for s in spacing) + " mm"


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


def status_table(status: Status) -> RenderableType:
    """Return the status of a run as a table."""
    from rich.table import Table

    from scanloom.core import Reason, counted, format_bytes

    table = Table.grid(padding=(0, 2))
    cause = f" ({status.reason})" if status.reason else ""
    table.add_row("run", f"{status.run}: {status.state}{cause}")
    table.add_row(
        "cases",
        f"{status.ended} of {status.cases}: {status.done} done, {status.skipped} skipped, "
        f"{status.ambiguous} ambiguous, {status.failed} failed, {status.before} from before",
    )
    if status.remade:
        table.add_row("replaced", f"{status.remade}, because their scans had changed")
    for problem, count in status.sent_away.items():
        table.add_row("rejected", f"{counted(count, 'worker')}: {problem}")
    if status.per_hour:
        remaining = f", {format_clock(status.left_s)} left" if status.left_s else ""
        table.add_row("rate", f"{counted(round(status.per_hour), 'scan')} an hour{remaining}")
    table.add_row("time", format_clock(status.elapsed_s))
    if status.state == "died":
        heard = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.moment))
        table.add_row("last heartbeat", f"{heard}; resume with the same command")
    when = "in progress" if status.state == "running" else "not finished"
    for case, seconds in sorted(status.in_flight.items(), key=lambda item: -item[1]):
        table.add_row(when, f"{case}  {seconds:.0f} s")
    for device in status.devices:
        used, total = format_bytes(device["memory_used"]), format_bytes(device["memory_total"])
        readings = [
            f"{device['busy_percent']} % busy",
            f"{used} of {total}",
            f"{device['celsius']} °C",
        ]
        table.add_row(f"GPU {device['device']}", ", ".join([*readings, f"{device['watts']} W"]))
    for reason, count in status.reasons.items():
        advice = Reason[reason].advice if reason in Reason.__members__ else ""
        table.add_row(reason, f"{count}  {advice}".rstrip())
    return table


def totals_table(totals: dict[str, Any]) -> RenderableType:
    """Return the totals of a run as a table."""
    from rich.table import Table

    from scanloom.core import OUTCOMES, counted

    table = Table.grid(padding=(0, 2))
    for outcome in OUTCOMES:
        for reason, count in totals["files"].get(outcome, {}).items():
            table.add_row(outcome, f"{counted(count, 'file')}: {reason}")
    if totals["steps"]:
        steps = (f"{name} {step['wall_s']:.1f}" for name, step in totals["steps"].items())
        table.add_row("seconds", ", ".join(steps))
    if totals["device"]:
        busy, workers = totals["device"]["busy_share"], totals["device"]["workers"]
        table.add_row("device", f"{busy:.1%} busy, {counted(workers, 'worker')}")
    if totals["joules_a_scan"] is not None:
        table.add_row("energy", f"{totals['joules_a_scan']:.0f} J a scan, of the whole machine")
    if totals["cost"]:
        cost = totals["cost"]
        table.add_row("cost", f"{cost['amount']:.2f} for {cost['worker_hours']:.2f} worker hours")
    for slow in totals["slowest"]:
        table.add_row("slowest", f"{slow['case']}  {slow['seconds']:.1f} s")
    return table


def format_clock(seconds: float | None) -> str:
    """Return a duration as h:mm:ss."""
    whole = int(seconds or 0)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
