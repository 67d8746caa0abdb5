"""Check a scan against the limits in a model card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.card import ANY_MODALITY, ModelCard
from scanloom.cards.hounsfield import (
    find_altered_scale,
    find_foreign_scale,
    find_impossible,
    is_hounsfield,
)
from scanloom.cards.limits import Checks, Range
from scanloom.core import Flag, Reason, ScanError, Volume

MAX_SAMPLES = 1_000_000
"""Largest number of voxels for percentiles: accurate to 0.1 %, within a few milliseconds."""


def check_scan(
    volume: Volume, card: ModelCard, further_channels: Sequence[Volume] = ()
) -> tuple[Flag, ...]:
    """Check a scan before a model runs on it.

    Parameters
    ----------
    volume : Volume
        The scan; padding is excluded from intensity checks.
    card : ModelCard
        The model.
    further_channels : sequence of Volume
        Further input channels, in the card's order; of their intensities, only the scale of CT is
        checked.

    Returns
    -------
    tuple of Flag
        Any of MODALITY_UNKNOWN, HU_IMPLAUSIBLE, SPACING_IMPLAUSIBLE, FOV_IMPLAUSIBLE.

    Raises
    ------
    ScanError
        CHANNELS if the number of inputs differs from the model's; MODALITY if the scan states
        another modality, or states none and has the intensities of CT; IMPLAUSIBLE if a check fails
        for which the card refuses the scan, or its intensities are no Hounsfield units and the
        model is for CT.
    """
    volumes = (volume, *further_channels)
    flags = list(check_modalities([v.modality for v in volumes], card))
    flags += _check_scale(volumes, card)
    checks = card.checks
    for name, flag, problem in (
        ("intensity", Flag.HU_IMPLAUSIBLE, _intensity(volume, checks)),
        ("spacing", Flag.SPACING_IMPLAUSIBLE, _axes(volume.grid.spacing, checks.spacing)),
        ("extent", Flag.FOV_IMPLAUSIBLE, _axes(volume.grid.extent, checks.extent)),
    ):
        if problem is None:
            continue
        if name in checks.refuse:
            raise ScanError(Reason.IMPLAUSIBLE, f"{name}: {problem}")
        flags.append(flag)
    return tuple(dict.fromkeys(flags))


def check_modalities(modalities: Sequence[str | None], card: ModelCard) -> tuple[Flag, ...]:
    """Check the modalities of the inputs of a model, one for each channel; None if unknown.

    Returns
    -------
    tuple of Flag
        MODALITY_UNKNOWN if a modality is unknown, or the model takes any.

    Raises
    ------
    ScanError
        CHANNELS if the number of inputs differs from the model's; MODALITY.
    """
    if len(card.channels) != len(modalities):
        detail = f"{card.name} takes {len(card.channels)} input channels, got {len(modalities)}"
        raise ScanError(Reason.CHANNELS, detail)
    unknown = False
    for modality, channel in zip(modalities, card.channels, strict=True):
        if modality is None or channel.modality == ANY_MODALITY:
            unknown = True
        elif modality != channel.modality:
            detail = f"{card.name} is for {channel.modality}, the scan is {modality}"
            raise ScanError(Reason.MODALITY, detail)
    return (Flag.MODALITY_UNKNOWN,) if unknown else ()


def _check_scale(volumes: Sequence[Volume], card: ModelCard) -> list[Flag]:
    """Refuse CT whose intensities can't be Hounsfield units, unless the card accepts them.

    A header that states another unit is believed: such CT has the flag NOT_HOUNSFIELD. A scan
    without a modality that has Hounsfield units is refused by a model for another modality.

    Returns
    -------
    list of Flag
        HU_IMPLAUSIBLE for Hounsfield units that seem to be clipped, halved or doubled.
    """
    flags = []
    for volume, channel in zip(volumes, card.channels, strict=True):
        if volume.modality is None and channel.modality not in ("CT", ANY_MODALITY):
            _refuse_hounsfield(volume, card, channel.modality)
        if not card.checks.needs_hounsfield(channel.modality) or volume.unit == "a.u.":
            continue
        problem = find_impossible(volume.array) or find_foreign_scale(_sample(volume))
        if problem is not None:
            detail = f"{card.name} is for CT in Hounsfield units, and these are not: {problem}"
            raise ScanError(Reason.IMPLAUSIBLE, detail)
        if find_altered_scale(_sample(volume)) is not None:
            flags.append(Flag.HU_IMPLAUSIBLE)
    return flags


def _refuse_hounsfield(volume: Volume, card: ModelCard, modality: str) -> None:
    """Refuse a scan without a modality whose intensities are those of CT."""
    if is_hounsfield(_sample(volume)):
        options = f"`segment --modality {modality}` or a workflow's `modality`"
        detail = f"{card.name} is for {modality}, and the intensities are Hounsfield units of CT"
        raise ScanError(Reason.MODALITY, f"{detail}; if it is {modality}, state it with {options}")


def check_assumed_modality(modality: str | None, cards: Sequence[ModelCard]) -> None:
    """Refuse models of several modalities for a scan that does not state its own.

    Raises
    ------
    ScanError
        MODALITY: it can't be assumed to match each model.
    """
    models = {card.channels[0].modality: card.name for card in cards if len(card.channels) == 1}
    models.pop(ANY_MODALITY, None)
    if modality is None and len(models) > 1:
        listed = " and ".join(f"{name} is for {of}" for of, name in models.items())
        options = "`segment --modality` or a workflow's `modality`"
        detail = f"{listed}, and the scan states no modality: set it with {options}"
        raise ScanError(Reason.MODALITY, detail)


def percentiles(volume: Volume) -> tuple[float, float] | None:
    """Return the 1st and 99th percentile without padding; None if all voxels are padding.

    Computed from every n-th voxel, at most `MAX_SAMPLES`, so that results are reproducible.
    """
    sample = _sample(volume)
    if not sample.size:
        return None
    low, high = np.percentile(sample, (1, 99))
    return float(low), float(high)


def _sample(volume: Volume) -> NDArray[Any]:
    """Return every n-th voxel, without padding and voxels that are not finite."""
    flat = volume.array.reshape(-1, order="F")  # a view: I runs fastest in memory
    sample = flat[:: _stride(volume.grid.shape)]
    kept: NDArray[Any] = sample[np.isfinite(sample) & ~volume.is_padding(sample)]
    return kept


def _stride(shape: tuple[int, int, int]) -> int:
    """Return a step coprime with the slice size, so that every row and column is sampled."""
    step = max(1, math.ceil(math.prod(shape) / MAX_SAMPLES))
    while math.gcd(step, shape[0] * shape[1]) > 1:
        step += 1
    return step


def _intensity(volume: Volume, checks: Checks) -> str | None:
    """Return a description of implausible intensities, None if they are plausible."""
    if checks.low is None and checks.high is None:
        return None
    measured = percentiles(volume)
    if measured is None:
        return "all voxels are padding"
    for value, limits, rank in zip(
        measured, (checks.low, checks.high), ("1st", "99th"), strict=True
    ):
        if limits is not None and not limits.holds(value):
            return f"the {rank} percentile is {value:.6g}, {_outside(limits)}"
    return None


def _axes(values: tuple[float, float, float], limits: Range | None) -> str | None:
    """Return a description of an implausible length along an axis, None if all are plausible."""
    for value in values if limits is not None else ():
        # with tolerance: 5 mm may be stored as 4.9999999
        if limits is not None and not (
            limits.holds(value)
            or math.isclose(value, limits.low, rel_tol=1e-4)
            or math.isclose(value, limits.high, rel_tol=1e-4)
        ):
            return f"{value:.4g} mm along an axis, {_outside(limits)}"
    return None


def _outside(limits: Range) -> str:
    return f"outside {limits.low:g} to {limits.high:g}"
