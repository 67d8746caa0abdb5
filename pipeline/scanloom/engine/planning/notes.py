"""Notes of a plan: limits that cases exceed, results that would be replaced, measured engines."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from scanloom.cards.card import ModelCard
from scanloom.cards.parts import networks
from scanloom.cards.requested import describe_changes
from scanloom.core import Case, counted, format_bytes
from scanloom.engine.planning.model import ExecutionSite, PlannedCase


def limit_notes(cases: Sequence[PlannedCase], site: ExecutionSite, out: Path) -> Iterator[str]:
    """Yield a sentence for each limit that cases of a run exceed."""
    if site.host:
        if crowded := sum(case.host * site.in_flight > site.host for case in cases):
            yield f"{counted(crowded, 'case')}: fewer than {site.in_flight} of them run at once"
        if oversized := sum(case.host > site.host for case in cases):
            alone = "may exceed the memory: run alone, in smaller pieces"
            yield f"{counted(oversized, 'case')} {alone}"
    if site.device and (large := sum(case.device > site.device for case in cases)):
        slow = "too large for the device: fewer windows, scores on the host"
        yield f"{counted(large, 'case')} {slow}"
    written = sum(case.written or 0.0 for case in cases)
    folder = next(p for p in (out, *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if written > free:
        yield f"the disk has {format_bytes(free)} free; the results need {format_bytes(written)}"


def replacement_notes(pending: Sequence[Case], out: Path) -> Iterator[str]:
    """Yield a sentence about cases of a run that have a result."""
    count = sum((out / "cases" / case.folder_name).is_dir() for case in pending)
    if count:
        yield (
            f"{counted(count, 'case')} with a result: replaced if the content of the scan has "
            "changed, or with --replace"
        )


def engine_notes(cards: Sequence[ModelCard]) -> Iterator[str]:
    """Yield a line for each engine that was measured with a network of the models."""
    from scanloom.inference.engines.verdicts import all_verdicts

    names = {network.name for card in cards for network in networks(card)}
    for verdict in all_verdicts():
        if verdict.model in names:
            yield f"{verdict.model} with {verdict}"


def change_notes(cards: Sequence[ModelCard], requested: Sequence[ModelCard]) -> Iterator[str]:
    """Yield a line for each model that options ask to run otherwise than its card says."""
    for card, changed in zip(cards, requested, strict=True):
        if changes := describe_changes(card, changed):
            yield f"{card.name}: {changes}"
