"""Checks of a model card, and of the scans that a model is given."""

from __future__ import annotations

from collections.abc import Sequence

from scanloom.cards.card import ModelCard
from scanloom.core import Reason, ScanError, Volume, counted

_SAME_POSITION_MM = 0.01
"""Largest distance between corresponding voxels of two channels."""


def check_supported(card: ModelCard) -> None:
    """Refuse cards that this version does not support."""
    if card.restore == "scores" and any(rule.when == "before" for rule in card.cleaning):
        detail = "connected components can't be selected before labels are decided"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
    if card.grid.mode == "area" and card.restore == "labels":
        raise ScanError(Reason.MODEL_UNSUPPORTED, "the model requires labels restored by area")


def check_channels(volumes: Sequence[Volume], card: ModelCard) -> None:
    """Refuse scans that are not the card's input channels."""
    if len(volumes) != len(card.channels):
        detail = (
            f"{card.name} takes {counted(len(card.channels), 'input channel')}, got {len(volumes)}"
        )
        raise ScanError(Reason.CHANNELS, detail)
    for volume, channel in zip(volumes[1:], card.channels[1:], strict=True):
        if not volume.grid.matches(volumes[0].grid, _SAME_POSITION_MM):
            detail = f"{channel.name} and the first channel have different grids"
            raise ScanError(Reason.CHANNELS, detail)
