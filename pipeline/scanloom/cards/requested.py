"""A model as an option asks for it: with less work than its card says."""

from __future__ import annotations

from dataclasses import replace

from scanloom.cards.card import GENERAL_PRESET, FastPreset, ModelCard
from scanloom.cards.graph import networks
from scanloom.core import ComputeOptions, counted


def requested_card(card: ModelCard, compute: ComputeOptions) -> ModelCard:
    """Return a card with the networks, windows, grid and precisions that options ask for.

    With `fast`: as the card's preset says, else `GENERAL_PRESET`. `overlap` and `mirror` by
    themselves change only their own part. Parts and previous stages are changed too. The card
    that is returned asks for nothing more: a second request with the same options leaves it as is.
    """
    preset = (card.fast or GENERAL_PRESET) if compute.fast else FastPreset()
    if preset.card is not None:
        own = preset.card.fast or FastPreset()
        coarser = replace(preset.card, name=card.name, fast=own)
        return requested_card(coarser, compute)
    window, grid = card.window, card.grid
    if preset.overlap is not None:
        window = replace(window, overlap=min(window.overlap, preset.overlap))
    if compute.overlap is not None:
        window = replace(window, overlap=compute.overlap)
    if compute.mirror == "no":
        window = replace(window, mirror=())
    elif preset.mirror is not None:
        window = replace(window, mirror=tuple(a for a in window.mirror if a in preset.mirror))
    if preset.spacing is not None:
        grid = replace(grid, spacing=preset.spacing)
    requested = replace(
        card,
        window=window,
        grid=grid,
        folds=card.folds if preset.folds is None else card.folds[: preset.folds - 1],
        precisions=tuple(dict.fromkeys((*card.precisions, *preset.precisions))),
        parts=tuple(
            requested_card(replace(network, fast=network.fast or card.fast), compute)
            for network in card.parts
        ),
        stage=card.stage and replace(card.stage, card=requested_card(card.stage.card, compute)),
    )
    return card if requested == card else requested


def describe_changes(card: ModelCard, requested: ModelCard) -> str:
    """Return what a requested card leaves out or changes, such as "not mirrored"; else "".

    Of a model with parts, its first network is described.
    """

    def weights_of(model: ModelCard) -> list[str]:
        return [network.weights.sha256 for network in networks(model)]

    changes = []
    coarser = card.fast.card if card.fast else None
    if coarser is not None and weights_of(requested) == weights_of(coarser) != weights_of(card):
        changes.append(f"{coarser.name} instead")
        card = coarser
    spacing = requested.grid.spacing
    if spacing is not None and card.grid.spacing != spacing:
        changes.append(f"{' x '.join(f'{mm:g}' for mm in spacing if mm)} mm")
    if card.parts and requested.parts:
        card, requested = card.parts[0], requested.parts[0]
    if card.folds != requested.folds:
        changes.append(f"{len(requested.folds) + 1} of {len(card.folds) + 1} folds")
    if card.window.mirror != requested.window.mirror:
        fewer = f"mirrored along {counted(len(requested.window.mirror), 'axis', 'axes')}"
        changes.append(fewer if requested.window.mirror else "not mirrored")
    overlap = requested.window.overlap
    if card.window.size is not None and card.window.overlap != overlap:
        changes.append(f"overlap {overlap:g} instead of {card.window.overlap:g}")
    if allowed := [name for name in requested.precisions if name not in card.precisions]:
        changes.append(f"{' and '.join(allowed)} allowed")
    return ", ".join(changes)
