"""Whether a scan is one that a model was made for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from scanloom.cards.card import Checks, ModelCard, Range
from scanloom.core import Flag, Reason, ScanError, Volume

MAX_SAMPLES = 1_000_000
"""Voxels whose percentiles are taken: enough for 0.1 % in a percentile, a few milliseconds."""


def check_scan(volume: Volume, card: ModelCard, others: Sequence[Volume] = ()) -> tuple[Flag, ...]:
    """Judge a scan before a model is run on it.

    Parameters
    ----------
    volume : Volume
        The scan; intensities in its own unit, padding left out.
    card : ModelCard
        What the model needs.
    others : sequence of Volume
        Further input channels, in the card's order; only their modality counts.

    Returns
    -------
    tuple of Flag
        MODALITY_UNKNOWN, HU_IMPLAUSIBLE, SPACING_IMPLAUSIBLE, FOV_IMPLAUSIBLE, as they apply.

    Raises
    ------
    ScanError
        CHANNELS where the model wants more or fewer; MODALITY where the scan says another modality;
        IMPLAUSIBLE where a check fails that the card wants refused.
    """
    volumes = (volume, *others)
    if len(card.channels) != len(volumes):
        detail = f"{card.name} wants {len(card.channels)} input channels, there are {len(volumes)}"
        raise ScanError(Reason.CHANNELS, detail)
    flags = []
    for one, channel in zip(volumes, card.channels, strict=True):
        if one.modality is None:
            flags.append(Flag.MODALITY_UNKNOWN)
        elif one.modality != channel.modality:
            detail = f"{card.name} was made for {channel.modality}, the scan is {one.modality}"
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
    """Return the 1st and 99th percentile without padding, None where nothing else is there.

    Taken of every n-th voxel, at most `MAX_SAMPLES`, so that the same scan gives the same numbers.
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
    """Return a step that shares no factor with rows and slices: each row and column is met."""
    step = max(1, math.ceil(math.prod(shape) / MAX_SAMPLES))
    while math.gcd(step, shape[0] * shape[1]) > 1:
        step += 1
    return step


def _intensity(volume: Volume, checks: Checks) -> str | None:
    """Return what is odd of the intensities, None where nothing is."""
    if checks.low is None and checks.high is None:
        return None
    found = percentiles(volume)
    if found is None:
        return "there is nothing but padding"
    for value, wanted, which in zip(found, (checks.low, checks.high), ("1st", "99th"), strict=True):
        if wanted is not None and not wanted.holds(value):
            return f"the {which} percentile is {value:.6g}, {_outside(wanted)}"
    return None


def _axes(values: tuple[float, float, float], wanted: Range | None) -> str | None:
    """Return what is odd of a length along the axes, None where nothing is."""
    for value in values if wanted is not None else ():
        # a hair of slack: 5 mm may be stored as 4.9999999
        if wanted is not None and not (
            wanted.holds(value)
            or math.isclose(value, wanted.low, rel_tol=1e-4)
            or math.isclose(value, wanted.high, rel_tol=1e-4)
        ):
            return f"{value:.4g} mm along an axis, {_outside(wanted)}"
    return None


def _outside(wanted: Range) -> str:
    return f"outside {wanted.low:g} to {wanted.high:g}"
