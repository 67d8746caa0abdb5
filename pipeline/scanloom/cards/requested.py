"""A model as an option asks for it: with less work than its card says."""

from __future__ import annotations

from dataclasses import replace

from scanloom.cards.card import ModelCard
from scanloom.core import ComputeOptions

FAST_OVERLAP = 0.25
"""Largest overlap of windows with `fast`."""


def requested_card(card: ModelCard, compute: ComputeOptions) -> ModelCard:
    """Return a card with the window and the networks that options ask for.

    With `fast`: the first of several folds, no mirrored scans, and an overlap of `FAST_OVERLAP` at
    most. `overlap` and `mirror` by themselves change only their own part.

    Parameters
    ----------
    card : ModelCard
        The model.
    compute : ComputeOptions
        The options.
    """
    window, folds = card.window, card.folds
    if compute.fast:
        window = replace(window, overlap=min(window.overlap, FAST_OVERLAP))
        folds = ()
    if compute.fast or compute.mirror == "no":
        window = replace(window, mirror=())
    if compute.overlap is not None:
        window = replace(window, overlap=compute.overlap)
    return replace(card, window=window, folds=folds)


def describe_changes(card: ModelCard, requested: ModelCard) -> str:
    """Return what a requested card leaves out or changes, such as "not mirrored"; else "".

    Parameters
    ----------
    card : ModelCard
        The model.
    requested : ModelCard
        The card from `requested_card`.
    """
    changes = []
    if card.folds != requested.folds:
        changes.append(f"1 of {len(card.folds) + 1} folds")
    if card.window.mirror != requested.window.mirror:
        changes.append("not mirrored")
    overlap = requested.window.overlap
    if card.window.size is not None and card.window.overlap != overlap:
        changes.append(f"overlap {overlap:g} instead of {card.window.overlap:g}")
    return ", ".join(changes)
