"""The image that a network sees of a scan: resampled, cropped, intensities changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scanloom.cards.card import ModelCard, Stage
from scanloom.cards.intensity import Normalize
from scanloom.core import Reason, ScanError, Volume
from scanloom.inference.finite import all_finite
from scanloom.inference.geometry import NetworkPlan
from scanloom.inference.intensity import apply_steps
from scanloom.inference.resample import ResampleOptions, to_network
from scanloom.inference.resampling.crop import (
    Box,
    crop_volume,
    fill_holes,
    foreground,
    network_box,
)
from scanloom.inference.resampling.exact import decisive_values
from scanloom.inference.resampling.labels import stage_channels
from scanloom.inference.resampling.shared import SharedScan


@dataclass(frozen=True, eq=False)
class ModelInput:
    """The input of a model.

    Parameters
    ----------
    volumes : tuple of Volume
        The input channels, on the same grid.
    stage_labels : (I, J, K) integer array or None
        Label map of the previous stage on that grid, if its structures are further channels.
    """

    volumes: tuple[Volume, ...]
    stage_labels: NDArray[Any] | None = None

    def crop(self, box: Box | None) -> ModelInput:
        """Return the part of the scan in a box."""
        labels = self.stage_labels
        cropped = labels if labels is None or box is None else labels[box]
        return ModelInput(tuple(crop_volume(volume, box) for volume in self.volumes), cropped)


@dataclass(frozen=True, eq=False)
class NetworkImage:
    """All input channels on the network grid, or on a box of it.

    Parameters
    ----------
    image : (channels, X, Y, Z) float32 tensor
        The image.
    seen : (X, Y, Z) bool tensor or None
        Voxels that are not air; None if windows of air are not skipped.
    box : Box or None
        Part of the network grid that the image covers; None for all.
    """

    image: torch.Tensor
    seen: torch.Tensor | None
    box: Box | None


def network_image(
    scan: ModelInput,
    plan: NetworkPlan,
    card: ModelCard,
    where: tuple[torch.device, int],
    *,
    skip_air: bool = False,
    shared: SharedScan | None = None,
) -> NetworkImage:
    """Return the network's input.

    Parameters
    ----------
    scan : ModelInput
        The input channels, on the plan's source grid.
    plan : NetworkPlan
        Source grid and network grid.
    card : ModelCard
        The model.
    where : (device, slab)
        Device of the image, and bytes of source slices that are resampled together.
    skip_air : bool
        Whether `NetworkImage.seen` is needed.
    shared : SharedScan, optional
        Keeps the resampled channels for further models.

    Raises
    ------
    ScanError
        NOT_FINITE if intensities overflow.
    """
    device = where[0]

    def resample() -> list[torch.Tensor]:
        return _resampled(scan.volumes, plan, card, where)

    channels = shared.channels(card, str(device), resample) if shared else resample()
    seen = channels[0] >= card.air_below if skip_air and card.air_below is not None else None
    crop, box = card.grid.crop, None
    before = len(card.after)
    if crop is not None and crop.grid == "network":
        before = before if crop.steps is None else crop.steps
    channels = [apply_steps(channel, card.after[:before]) for channel in channels]
    if crop is not None and crop.grid == "network":
        box = network_box(channels, crop)
    if box is not None:
        channels = [channel[box].clone() for channel in channels]
        seen = seen if seen is None else seen[box]
    channels = [apply_steps(channel, card.after[before:]) for channel in channels]
    if not all(map(all_finite, channels)):
        detail = "the scan's intensities overflow in the card's intensity steps"
        raise ScanError(Reason.NOT_FINITE, detail)
    image = channels[0][None] if len(channels) == 1 else torch.stack(channels)
    if scan.stage_labels is not None and card.stage is not None:
        previous = _stage_channels(scan, scan.stage_labels, plan, card.stage, device)
        image = torch.cat((image, previous if box is None else previous[:, *box]))
    return NetworkImage(image, seen, box)


def _stage_channels(
    scan: ModelInput,
    labels: NDArray[Any],
    plan: NetworkPlan,
    stage: Stage,
    device: torch.device,
) -> torch.Tensor:
    """Return the used structures of a previous stage on the network grid."""
    inside = fill_holes(foreground([volume.array for volume in scan.volumes], "nonzero"))
    numbers = sorted(
        s.number for s in stage.card.structures if not stage.labels or s.label in stage.labels
    )
    return stage_channels(labels, inside, plan, tuple(numbers), device)


def _resampled(
    volumes: Sequence[Volume],
    plan: NetworkPlan,
    card: ModelCard,
    where: tuple[torch.device, int],
) -> list[torch.Tensor]:
    """Return the channels on the network grid, before the card's later intensity steps."""
    device, slab = where
    options = ResampleOptions(decisive_values(card), _filled(volumes, card))
    channels = []
    for volume, channel in zip(volumes, card.channels, strict=True):
        steps = (*channel.steps, *card.before)
        channels.append(to_network(volume.array, plan, device, steps, slab, options))
    return channels


def _filled(volumes: Sequence[Volume], card: ModelCard) -> NDArray[np.bool_] | None:
    """Return the voxels that `Normalize.filled` measures and changes; None if no step needs them.

    The scan is that in the card's box: its foreground is not 0.
    """
    steps = [*card.before, *(step for channel in card.channels for step in channel.steps)]
    if not any(isinstance(step, Normalize) and step.filled for step in steps):
        return None
    crop = card.grid.crop
    kind = "nonzero" if crop is None else crop.foreground
    return fill_holes(foreground([volume.array for volume in volumes], kind))
