"""Check a scan against the limits in a model card."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from scanloom.cards.card import ANY_MODALITY, Checks, ModelCard, Range
from scanloom.core import Flag, Reason, ScanError, Volume, counted

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
        Further input channels, in the card's order; only their modality counts.

    Returns
    -------
    tuple of Flag
        Any of MODALITY_UNKNOWN, HU_IMPLAUSIBLE, SPACING_IMPLAUSIBLE, FOV_IMPLAUSIBLE.

    Raises
    ------
    ScanError
        CHANNELS if the number of inputs differs from the model's; MODALITY if the scan states
        another modality; IMPLAUSIBLE if a check fails for which the card refuses the scan.
    """
    volumes = (volume, *further_channels)
    if len(card.channels) != len(volumes):
        detail = (
            f"{card.name} takes {counted(len(card.channels), 'input channel')}, got {len(volumes)}"
        )
        raise ScanError(Reason.CHANNELS, detail)
    flags = []
    for channel_volume, channel in zip(volumes, card.channels, strict=True):
        if channel_volume.modality is None or channel.modality == ANY_MODALITY:
            flags.append(Flag.MODALITY_UNKNOWN)
        elif channel_volume.modality != channel.modality:
            detail = f"{card.name} is for {channel.modality}, the scan is {channel_volume.modality}"
            raise ScanError(Reason.MODALITY, detail)
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


def percentiles(volume: Volume) -> tuple[float, float] | None:
    """Return the 1st and 99th percentile without padding; None if all voxels are padding.

    Computed from every n-th voxel, at most `MAX_SAMPLES`, so that results are reproducible.
    """
    flat = volume.array.reshape(-1, order="F")  # a view: I runs fastest in memory
    sample = flat[:: _stride(volume.grid.shape)]
    keep = np.isfinite(sample)
    keep &= ~volume.is_padding(sample)
    if not keep.any():
        return None
    low, high = np.percentile(sample[keep], (1, 99))
    return float(low), float(high)


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
