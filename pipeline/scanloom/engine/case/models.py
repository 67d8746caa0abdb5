"""The models of a run: their cards checked together, their networks loaded."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from scanloom.cards.card import ModelCard
from scanloom.cards.card_file import card_digest
from scanloom.cards.graph import check_relations, check_side, networks, structures_of_results
from scanloom.convert.store import find_model
from scanloom.core import ComputeOptions, Outputs, Reason, ScanError, did_you_mean
from scanloom.core.relations import Relations
from scanloom.engine.workflow.schema import Execution
from scanloom.inference.graph import Predictor
from scanloom.io.output.engines import OutputEngines
from scanloom.ops.measure import resolve_asymmetries, resolve_shares


def unique_cards(cards: Sequence[ModelCard]) -> tuple[ModelCard, ...]:
    """Return cards that may run on the same cases.

    Raises
    ------
    ScanError
        MODEL_UNKNOWN if two have the same name: their results would take each other's place.
    """
    counts = Counter(card.name for card in cards)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise ScanError(Reason.MODEL_UNKNOWN, f"two of the models have the name {repeated[0]}")
    return tuple(cards)


def check_networks(cards: Sequence[ModelCard]) -> None:
    """Refuse cards that make no model, before a scan is looked at; torch is imported for it.

    Raises
    ------
    ScanError
        As `scanloom.inference.network.architectures.check_network`.
    """
    from scanloom.inference.network.architectures import check_network

    for card in cards:
        for network in networks(card):
            check_network(network)


def check_structures(cards: Sequence[ModelCard], outputs: Outputs, relations: Relations) -> None:
    """Refuse relations that do not fit, a label without a result, and a result without a label.

    A model of whose structures none is requested may serve others: then it has no result.

    Raises
    ------
    ScanError
        STRUCTURE_UNKNOWN; WORKFLOW as `check_relations`.
    """
    check_relations(cards, relations)
    structures = structures_of_results(cards, relations)
    results = {name: [each.label for each in listed] for name, listed in structures.items()}
    requested = set(outputs.structures)
    needed = {reference.model for _, reference in relations.references}
    for name, labels in results.items():
        if requested and requested.isdisjoint(labels) and name not in needed:
            detail = f"{name} has no {' and no '.join(sorted(requested))}"
            raise ScanError(
                Reason.STRUCTURE_UNKNOWN, f"{detail}; {did_you_mean(min(requested), labels)}"
            )
    known = dict.fromkeys(label for labels in results.values() for label in labels)
    unknown = requested.difference(known)
    if unknown:
        detail = f"no model has {', '.join(sorted(unknown))}; {did_you_mean(min(unknown), known)}"
        raise ScanError(Reason.STRUCTURE_UNKNOWN, detail)
    names = [(name, label) for name, labels in results.items() for label in labels]
    written = [name for name in names if not requested or name[1] in requested]
    resolve_shares(relations.shares, written)
    by_name = {(name, each.label): each for name, listed in structures.items() for each in listed}
    pairs = dict.fromkeys(resolve_asymmetries(relations.asymmetries, written).values())
    for n, (left, right) in enumerate(pairs):
        for i, member in enumerate(left):
            check_side(("asymmetries", n, "left", i), "left", [by_name[member]])
        for i, member in enumerate(right):
            check_side(("asymmetries", n, "right", i), "right", [by_name[member]])


DEFERRED_MODULES = (
    "cc3d",
    "scipy.sparse.csgraph",
    "pydicom.pixels.encoders",
    "nibabel",
    "SimpleITK",
    "PIL.Image",
    "scanloom.io.volumes.nifti",
    "scanloom.inference.memory",
)
"""Modules that the steps of a case import on first use."""


def import_heavy() -> None:
    """Import the modules that reading and writing need, outside the timed steps of a case."""
    for name in DEFERRED_MODULES:
        importlib.import_module(name)


def find_unchanged(name: str, digest: str) -> ModelCard:
    """Return the card of a model; MODEL_CHANGED if its `card_digest` is not that of the recipe."""
    try:
        card = find_model(name)
    except ScanError as exc:
        raise ScanError(Reason.MODEL_CHANGED, f"a model is missing now ({exc.code})") from exc
    if card_digest(card) != digest:
        raise ScanError(Reason.MODEL_CHANGED, f"{card.name} has changed")
    return card


def check_unchanged(models: Sequence[str], digests: Sequence[str]) -> None:
    """Refuse models that changed since their digests were taken: MODEL_CHANGED."""
    for name, digest in zip(models, digests, strict=True):
        find_unchanged(name, digest)


def load_models(
    models: Sequence[str],
    digests: Sequence[str],
    execution: Execution,
    structures: Sequence[str] = (),
    planned_cases: int = 1,
    out: Path | None = None,
) -> tuple[Predictor, ...]:
    """Load the networks of models, in the process that will run them.

    Parameters
    ----------
    models : sequence of str
        Names from the store, or bundle folders.
    digests : sequence of str
        The `card_digest` of each when the recipe was made: a model replaced since is refused.
    execution : Execution
        On which device, with how many threads: the same number gives the same bytes.
    structures : sequence of str
        Labels that are requested; empty for all. Parts of models without one are not loaded.
    planned_cases : int
        Scans that will be segmented: whether it pays to prepare an engine depends on it.
    out : Path or None
        The output folder, all of whose cases are made by the same engine.

    Raises
    ------
    ScanError
        MODEL_CHANGED, or why a model can't be loaded.
    """
    from scanloom.inference.combined import make_predictor
    from scanloom.inference.device import set_thread_count

    set_thread_count(execution.threads)
    cards = [find_unchanged(name, digest) for name, digest in zip(models, digests, strict=True)]
    try:
        return tuple(
            make_predictor(
                card,
                execution.options(ComputeOptions),
                device=execution.device,
                memory_limit=execution.memory_limit,
                structures=structures,
                planned_cases=planned_cases,
                records=None if out is None else OutputEngines(out),
            )
            for card in cards
        )
    except ScanError as exc:
        if exc.reason is not Reason.MODEL_HASH:
            raise
        detail = "the weights were replaced while they were read"
        raise ScanError(Reason.MODEL_CHANGED, detail) from exc
