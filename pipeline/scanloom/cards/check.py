"""Check a scan against the limits in a model card, and CT against values that no CT has.

Label maps, pictures and wrong rescale values are told from CT: `find_foreign_scale` gives reasons
to refuse a scan, `seems_altered` tells which to doubt, and `looks_like_hounsfield` tells CT
from scans of other modalities.

The rules refuse no scan for its anatomy. Air, fat, noise and padding give nearly every CT values
below 0, and then only the scale is checked: few values are below -4096. In a CT that is scaled by
10, air is near -10000. A crop of dense tissue without such values still differs from other images:

- Noise spreads its values over several HU, unlike those of a mask, or intensities from 0 to 1.
- Its lowest value is rare. The background of label maps, of MR and PET, and of pictures with 256
  grey values is a large share of voxels with the value 0.

In a CT whose RescaleIntercept of -1024 was lost, soft tissue is near 1024 and little below 0. No
other scan has half of its dense voxels there. If it was subtracted twice, air is near -2024, and no
tissue but the densest bone is above -500.

Altered scales are told by air: clipped values share the lowest one, which in noise is rare; values
that were halved or doubled have air near -500 or -2000, and few values between air and fat.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.card import ANY_MODALITY, CT, Checks, ModelCard, ReferenceDirection
from scanloom.core import (
    Flag,
    Grid,
    Measurement,
    Reason,
    ScanError,
    Volume,
    counted,
    plain_number,
)
from scanloom.core.measurement import Range, ReferenceRange

MAX_SAMPLES = 1_000_000
"""Largest number of voxels for percentiles: accurate to 0.1 %, within a few milliseconds."""

NOT_NEGATIVE = -2.0
"""Limit above which no value counts as negative; it includes intensities from -1 to 1."""
LEAST_RANGE_HU = 5.0
"""Smallest range of 98 % of the values; the noise of CT has a standard deviation of 3 to 50 HU."""
COMMON_LOWEST = 0.05
"""Share of voxels from which on the lowest value is a background, not the tail of noise."""
SHIFTED_HU = (900.0, 1200.0)
"""Fat and soft tissue in a CT without its RescaleIntercept of -1024."""
DENSE_HU = 300.0
"""Limit above which lie all tissues of such a CT but lung."""
FEW_BELOW_HU = -200.0
"""Limit below which 1 % of the voxels lie wherever there is air."""
TWICE_HU = (-1300.0, -500.0)
"""Limits of the 5th and 95th percentile in a CT with its RescaleIntercept subtracted twice."""
HIGHEST_HU = 30_000.0
"""Limit above which less than 1 % of the values lie: metal on an extended scale reaches it."""
WRAPPED_HU = 32_767.0
"""Largest value of 16 bits with a sign: a negative voxel that was stored without one is above."""
IMPOSSIBLE_HU = 1e6
"""Limit of any value: those of 16 bits are far below."""
LOWEST_HU = -4096.0
"""Lower limit of values other than padding: that of 12 bits, with a margin for other slopes."""
CLIPPED_SHARE = 0.01
"""Share of voxels from which on the lowest value may be the limit to which values were clipped."""
CLIPPED_VOXELS = 10
"""Least number of such voxels: the lowest value of a tiny crop is no limit."""
CLIPPED_ABOVE_HU = -500.0
"""Limit below which clipping changes no tissue but lung."""
HALVED_AIR_HU = (-600.0, -350.0)
"""Limits of noisy air and lung in a CT whose values were halved."""
HALVED_GAP_HU = (-300.0, -200.0)
"""Limits between lung and fat in such a CT: only voxels at a surface have such values."""
GAP_CONTRAST = 3.0
"""Least ratio of the frequency per HU of air to that between lung and fat, if values were halved.
In a crop of lung tissue without air, all these values are similarly frequent."""
AIR_HU = (-1100.0, -600.0)
"""Limits of air and lung, with noise."""
SURFACE_HU = (-600.0, -300.0)
"""Limits of values that voxels at the surface of the body or of the lungs have."""
SOFT_HU = (-150.0, 150.0)
"""Limits of fat and soft tissue."""
BONE_HU = 400.0
"""Lower limit of dense bone, which takes less space than air does."""
LONGEST_MM = 3000.0
"""Limit of any scan of a body: those of the whole body are up to 2.1 m long."""
LEAST_ML = 1.0
"""Volume of a structure from which on its place tells how a head lies: smaller ones may be specks
of another tissue, or what the border of the scan left."""
LARGEST_LABEL = 1 << 15
"""FreeSurfer's largest label is 14175."""
EQUAL_NEIGHBOURS = 0.3
"""Share of equal neighbours from which voxels are labels: at least 0.47 in real label maps of three
values and more, at most 0.23 in real scans of whole numbers."""


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
        Any of SHEARED, MODALITY_UNKNOWN, HU_IMPLAUSIBLE, SPACING_IMPLAUSIBLE, TILT_IMPLAUSIBLE,
        FOV_IMPLAUSIBLE.

    Raises
    ------
    ScanError
        CHANNELS if the number of inputs differs from the model's; MODALITY if the scan states
        another modality, or states none and has the intensities of CT; IMPLAUSIBLE if a check fails
        for which the card refuses the scan, all its voxels have one value, it is longer than any
        body, or its intensities are no Hounsfield units and the model is for CT.
    """
    volumes = (volume, *further_channels)
    # Headers before voxels, and the scale before the ranges, which mean nothing in other units
    flags = [Flag.SHEARED] if volume.grid.sheared else []
    flags += check_modalities([v.modality for v in volumes], card)
    flags += _check_scale(volumes, card)
    if _is_blank(volume):
        raise ScanError(Reason.IMPLAUSIBLE, "all voxels of the scan have one value")
    if (longest := max(volume.grid.extent)) > LONGEST_MM:
        detail = f"the scan is {longest / 1000:.3g} m long, as if its spacing were not in mm"
        raise ScanError(Reason.IMPLAUSIBLE, detail)
    checks = card.checks
    for name, flag, problem in (
        ("intensity", Flag.HU_IMPLAUSIBLE, _intensity(volume, checks)),
        ("spacing", Flag.SPACING_IMPLAUSIBLE, _axes(volume.grid.spacing, checks.spacing)),
        ("tilt", Flag.TILT_IMPLAUSIBLE, _tilt(volume.grid.tilt, checks.tilt)),
    ):
        flags += _judged(name, flag, problem, checks)
    if checks.hounsfield is not False and looks_like_labels(volume.array):
        flags.append(Flag.HU_IMPLAUSIBLE)
    flags += check_extent(volume.grid, card)
    return tuple(dict.fromkeys(flags))


def check_extent(grid: Grid, card: ModelCard) -> tuple[Flag, ...]:
    """Check the extent of what a model sees: of a scan, or of a crop.

    Returns
    -------
    tuple of Flag
        FOV_IMPLAUSIBLE if it is not that of the card.

    Raises
    ------
    ScanError
        IMPLAUSIBLE if the card refuses such scans.
    """
    problem = _axes(grid.extent, card.checks.extent)
    return _judged("extent", Flag.FOV_IMPLAUSIBLE, problem, card.checks)


def check_measurement(
    measurement: Measurement, ranges: Sequence[ReferenceRange], labels: Collection[str]
) -> tuple[Flag, ...]:
    """Compare a structure with its reference ranges, those of a model with these labels.

    One without voxels is not compared, nor is the mean in other units than HU. What the border of
    the scan cuts off may be smaller. In a result of one side, `kidney_left` is the model's kidney.

    Returns
    -------
    tuple of Flag
        OUT_OF_RANGE if a value is outside its range.
    """
    label = measurement.label
    if label not in labels:
        label = label.removesuffix("_left").removesuffix("_right")
    for each in ranges:
        if each.structure != label or not measurement.voxels:
            continue
        value, cut = measurement.volume_ml, Flag.TOUCHES_BORDER in measurement.flags
        if each.quantity == "mean_hu":
            if measurement.mean is None or measurement.unit != "HU":
                continue
            value, cut = measurement.mean, False
        if value > each.range.high or (value < each.range.low and not cut):
            return (Flag.OUT_OF_RANGE,)
    return ()


def check_directions(
    centroids: Mapping[str, tuple[float, NDArray[np.float64]]],
    directions: Sequence[ReferenceDirection],
) -> tuple[Flag, ...]:
    """Compare how structures lie to one another with the reference directions of a model.

    A direction is not compared if one of its structures has less than `LEAST_ML`.

    Parameters
    ----------
    centroids : mapping of str to (float, (3,) array)
        By label, volume in ml and centroid in RAS mm.
    directions : sequence of ReferenceDirection
        The usual directions.

    Returns
    -------
    tuple of Flag
        DIRECTION_IMPLAUSIBLE if an angle to the usual direction is too large.
    """
    for each in directions:
        found = [centroids.get(label, (0.0, np.zeros(3))) for label in (*each.start, *each.end)]
        if min(ml for ml, _ in found) < LEAST_ML:
            continue
        ml, points = np.array([ml for ml, _ in found]), np.array([point for _, point in found])
        n = len(each.start)
        line = np.average(points[n:], 0, ml[n:]) - np.average(points[:n], 0, ml[:n])
        lengths = np.linalg.norm(line) * np.linalg.norm(each.direction)
        # at one place: in no direction, so not in the usual one
        cosine = line @ np.array(each.direction) / lengths if lengths else -1.0
        if cosine < math.cos(math.radians(each.within)):
            return (Flag.DIRECTION_IMPLAUSIBLE,)
    return ()


def _judged(name: str, flag: Flag, problem: str | None, checks: Checks) -> tuple[Flag, ...]:
    """Return the flag of a failed check; IMPLAUSIBLE is raised if the card refuses the scan."""
    if problem is not None and name in checks.refuse:
        raise ScanError(Reason.IMPLAUSIBLE, f"{name}: {problem}")
    return () if problem is None else (flag,)


def _tilt(degrees: float, limit: float | None) -> str | None:
    """Return what is wrong with the angle between the axes of a scan and of the body."""
    if limit is None or degrees <= limit:
        return None
    return f"axes tilted by {degrees:.0f} degrees, not at most {limit:g}"


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
        expected = counted(len(card.channels), "input channel")
        detail = f"{card.name} takes {expected}, got {len(modalities)}"
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
        HU_IMPLAUSIBLE for Hounsfield units that seem to be clipped, halved, doubled or wrapped.
    """
    flags = []
    for volume, channel in zip(volumes, card.channels, strict=True):
        modality, other = channel.modality, channel.modality not in (CT, ANY_MODALITY)
        if volume.modality is None and other and looks_like_hounsfield(_sample(volume)):
            stated = f"`segment --modality {modality}` or a workflow's `modality`"
            why = f"{card.name} is for {modality}, and the intensities are Hounsfield units of CT"
            raise ScanError(Reason.MODALITY, f"{why}; if it is {modality}, state it with {stated}")
        if not card.checks.needs_hounsfield(modality) or volume.unit == "a.u.":
            continue
        problem = find_impossible(volume.array) or find_foreign_scale(_sample(volume))
        if problem is not None:
            detail = f"{card.name} is for CT in Hounsfield units, and these are not: {problem}"
            raise ScanError(Reason.IMPLAUSIBLE, detail)
        # Any voxel: too few for a share distort the mean of their structure
        if float(volume.array.max()) > WRAPPED_HU or seems_altered(_sample(volume)):
            flags.append(Flag.HU_IMPLAUSIBLE)
    return flags


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
    """Return every n-th voxel (N,), without padding and voxels that are not finite.

    Functions below with an argument `sample` take these.
    """
    flat = volume.array.reshape(-1, order="F")  # a view: I runs fastest in memory
    sample = flat[:: _stride(volume.grid.shape)]
    kept: NDArray[Any] = sample[np.isfinite(sample) & ~volume.is_padding(sample)]
    return kept


def _is_blank(volume: Volume) -> bool:
    """Return whether all voxels have one value, which networks label all the same."""
    sample = _sample(volume)
    if sample.size and sample.min() < sample.max():
        return False
    return bool(volume.array.min() == volume.array.max())  # what the sample may have missed


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
    if limits is None:
        return None
    for value in values:
        # with tolerance: 5 mm may be stored as 4.9999999
        ends = (math.isclose(value, end, rel_tol=1e-4) for end in (limits.low, limits.high))
        if not (limits.holds(value) or any(ends)):
            return f"{value:.4g} mm along an axis, {_outside(limits)}"
    return None


def _outside(limits: Range) -> str:
    return f"outside {limits.low:g} to {limits.high:g}"


def looks_like_hounsfield(sample: NDArray[Any]) -> bool:
    """Return whether intensities are those of a CT with air around or inside the body.

    Phase images are not: their values below -600 and above 600 are equally frequent. Scans of MR
    and PET have hardly any values below 0.
    """
    if not sample.size:
        return False
    air, soft = _share(sample, *AIR_HU), _share(sample, *SOFT_HU)
    inner = sample[sample > sample.min()]  # without padding that no header declares
    return bool(
        air >= 0.01
        and soft >= max(0.03, 1.5 * _share(sample, *SURFACE_HU))
        and _share(sample, BONE_HU, np.inf) < air / 2
        and _share(inner, -np.inf, AIR_HU[0]) < 0.01
    )


def looks_like_labels(array: NDArray[Any]) -> bool:
    """Return whether voxels are small whole numbers that mostly equal their neighbours.

    Programs write labels as floats, too. Background beside background does not count. Two values
    are labels in any case, and so is background alone. Of large scans every n-th row is looked at.
    """
    if not array.size:
        return False
    step = max(1, math.isqrt(array.size // MAX_SAMPLES))
    rows = array[:, ::step, ::step]
    low, high = rows.min(), rows.max()
    if not 0 <= low <= high <= LARGEST_LABEL:  # nor if one is NaN
        return False
    if rows.dtype.kind == "f" and not np.array_equal(rows, np.rint(rows)):
        return False
    if low == 0 and not ((rows != 0) & (rows != high)).any():
        return True
    first, second = rows[:-1], rows[1:]
    inside = (first != 0) | (second != 0)
    return bool(np.mean((first == second)[inside]) >= EQUAL_NEIGHBOURS)


def hounsfield_by_values(volume: Volume) -> bool | None:
    """Return whether a scan without a modality has Hounsfield units; None if values do not tell.

    A CT that lost its RescaleIntercept is neither: a model for other scans must not get it.
    """
    sample = _sample(volume)
    if looks_like_hounsfield(sample):
        return True
    if not sample.size:
        return None
    lowest = float(sample.min())
    inner = sample[sample > lowest]
    if _shifted(inner) or _shifted_twice(inner):
        return None
    # without any air or fat, as scans of MR and PET: a crop of dense tissue at most is such a CT
    never_negative = lowest > NOT_NEGATIVE
    if never_negative or find_impossible(volume.array) or find_foreign_scale(sample):
        return False
    return None


def seems_altered(sample: NDArray[Any]) -> bool:
    """Return whether Hounsfield units seem to be clipped, halved or doubled."""
    if not sample.size:
        return False
    lowest = float(sample.min())
    inner = sample[sample > lowest]
    if lowest > CLIPPED_ABOVE_HU and _is_clipped(inner, lowest, sample.size - inner.size):
        return True
    air = _frequency(sample, HALVED_AIR_HU)
    if (
        _share(sample, *HALVED_AIR_HU) >= 0.02
        and _share(sample, -np.inf, HALVED_AIR_HU[0]) < 0.001
        and air > GAP_CONTRAST * _frequency(sample, HALVED_GAP_HU)
    ):
        return True
    return bool(inner.size and np.percentile(inner, 5) < TWICE_HU[0])


def _is_clipped(inner: NDArray[Any], lowest: float, count: int) -> bool:
    """Return whether the lowest value is frequent, and more so than the values next above it."""
    frequent = count >= max(CLIPPED_VOXELS, CLIPPED_SHARE * (count + inner.size))
    return frequent and count > int(np.count_nonzero(inner <= lowest + 2))


def _share(sample: NDArray[Any], low: float, high: float) -> float:
    """Return the share of values from `low` to `high`."""
    return float(np.mean((sample >= low) & (sample <= high))) if sample.size else 0.0


def _frequency(sample: NDArray[Any], limits: tuple[float, float]) -> float:
    """Return the share of values between two limits, per HU."""
    return _share(sample, *limits) / (limits[1] - limits[0])


def find_impossible(array: NDArray[Any]) -> str | None:
    """Return why a value of a scan can't be in Hounsfield units, None if all may be.

    Values far below are padding; NaN and infinities are refused elsewhere. `array` has all voxels.
    """
    highest = float(array.max()) if array.size else 0.0
    if not IMPOSSIBLE_HU < highest < np.inf:
        return None
    return f"the largest value is {highest:.6g}"


def find_foreign_scale(sample: NDArray[Any]) -> str | None:
    """Return why intensities can't be Hounsfield units, None if they may be."""
    if not sample.size:
        return None
    lowest = float(sample.min())
    if (last := float(np.percentile(sample, 99))) > HIGHEST_HU:
        return f"1 % of the values are above {last:.6g}"
    inner = sample[sample > lowest]  # padding that no header declares is the lowest value
    if lowest > NOT_NEGATIVE:
        why = _without_negative(lowest, inner, 1 - inner.size / sample.size)
        return why or _shifted(inner)
    if inner.size and (fifth := float(np.percentile(inner, 5))) < LOWEST_HU:
        return f"5 % of the values are below {fifth:.6g}"
    return _shifted(inner) or _shifted_twice(inner)


def _without_negative(lowest: float, inner: NDArray[Any], share: float) -> str | None:
    """Return why intensities without values below 0 can't be Hounsfield units, None if they may.

    `share` is that of the voxels with the lowest value, `inner` are all higher values.
    """
    if not inner.size:
        return f"all voxels have the value {lowest:g}"
    low, high = (float(value) for value in np.percentile(inner, (1, 99)))
    if high - low < LEAST_RANGE_HU:
        ends = f"{plain_number(low, 4)} and {plain_number(high, 4)}"
        return f"98 % of the values above the lowest lie between {ends}"
    if share >= COMMON_LOWEST:
        return f"no value is below 0, and {share:.0%} of the voxels have the lowest, {lowest:g}"
    return None


def _shifted(inner: NDArray[Any]) -> str | None:
    """Return why intensities seem to lack a RescaleIntercept of -1024, None if they may not."""
    dense = inner[inner > DENSE_HU]
    low, high = SHIFTED_HU
    between = dense[(dense >= low) & (dense <= high)]
    if not dense.size or between.size < 0.5 * dense.size or between.size < 0.1 * inner.size:
        return None
    if float(np.percentile(inner, 1)) < FEW_BELOW_HU:
        return None
    share = between.size / inner.size
    return f"{share:.0%} of the values lie between {low:g} and {high:g}, and few below 0"


def _shifted_twice(inner: NDArray[Any]) -> str | None:
    """Return why a RescaleIntercept of -1024 seems to be subtracted twice, None if it may not."""
    if not inner.size:
        return None
    low, high = (float(value) for value in np.percentile(inner, (5, 95)))
    if low > TWICE_HU[0] or high > TWICE_HU[1]:
        return None
    return f"90 % of the values lie between {low:.6g} and {high:.6g}"
