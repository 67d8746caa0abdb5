"""Measure structures: size, place and intensities, all structures of a layer at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Flag, Layer, Measurement, Segmentation, Volume
from scanloom.core.measurement import Box
from scanloom.ops.components import count_components
from scanloom.ops.runs import runs_of, slabs_of

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
EXACT_CELLS = 1 << 22
"""Structures times values up to which each integer value is counted by itself: 32 MiB."""
COARSE_BINS = 4096
"""Bins for all other intensities; only the few in which a quantile lies are looked into."""
SLAB_VOXELS = 1 << 20

Table = NDArray[np.int64]


@dataclass(frozen=True)
class Bins:
    """Bins of intensity: numbers that never fall as the intensity grows.

    Parameters
    ----------
    low, high : float
        The least and the largest intensity.
    exact : bool
        Whether each bin holds one value: integers, one step a bin.
    count : int
        How many bins.
    """

    low: float
    high: float
    exact: bool
    count: int

    def of(self, values: NDArray[Any]) -> Table:
        """Return the bin of each value."""
        if self.exact:
            return values.astype(np.int64) - int(self.low)
        if self.high == self.low:
            return np.zeros(values.shape, np.int64)
        scale = (self.count - 1) / (self.high - self.low)
        return ((values.astype(np.float64) - self.low) * scale).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Intensities:
    """What was found of S structures' intensities; NaN where a structure has no voxel that counts.

    Parameters
    ----------
    mean, sd : (S,) array
        In the volume's unit; sd of the population.
    quantiles : (S, 5) array
        At `QUANTILES`.
    """

    mean: NDArray[np.float64]
    sd: NDArray[np.float64]
    quantiles: NDArray[np.float64]


def measure(
    segmentation: Segmentation, volume: Volume, flags: Sequence[Flag] = ()
) -> tuple[Measurement, ...]:
    """Measure every structure of a segmentation, in the order of its structures.

    Parameters
    ----------
    segmentation : Segmentation
        Label maps (I, J, K) on the volume's grid.
    volume : Volume
        The scan (I, J, K). Voxels of its padding value and those that are no finite number count
        for sizes, but not for intensities.
    flags : sequence of Flag
        Those of the case; every measurement carries them after its own.

    Returns
    -------
    tuple of Measurement
        One a structure, found or not.

    Raises
    ------
    ValueError
        If the segmentation and the volume differ in shape.

    Notes
    -----
    Quantiles are exact and interpolate linearly between voxels (numpy.quantile's default; method 7
    of Hyndman and Fan, doi:10.1080/00031305.1996.10473566). The memory needed doesn't grow with
    the scan, except for intensities that are no integers or far apart: then the voxels of the bins
    where quantiles lie are held.
    """
    if segmentation.grid.shape != volume.grid.shape:
        raise ValueError(f"{segmentation.grid.shape} does not fit {volume.grid.shape}")
    most = max(len(layer.structures) for layer in segmentation.layers)
    bins = _bins(volume, most)
    measured: list[Measurement] = []
    for layer in segmentation.layers:
        measured += _measure_layer(segmentation.model, layer, volume, bins, tuple(flags))
    return tuple(measured)


def _measure_layer(
    model: str, layer: Layer, volume: Volume, bins: Bins, flags: tuple[Flag, ...]
) -> Iterator[Measurement]:
    voxels, boxes = _sizes(layer)
    found = _intensities(layer, volume, bins)
    components = count_components(layer.labels, (s.number for s in layer.structures))
    for n, structure in enumerate(layer.structures):
        box = boxes[n] if voxels[n] else None
        p05, p25, median, p75, p95 = (_known(q) for q in found.quantiles[n])
        yield Measurement(
            model=model,
            label=structure.label,
            number=structure.number,
            voxels=int(voxels[n]),
            volume_ml=int(voxels[n]) * volume.grid.voxel_volume / 1000,
            unit=volume.unit,
            mean=_known(found.mean[n]),
            sd=_known(found.sd[n]),
            p05=p05,
            p25=p25,
            median=median,
            p75=p75,
            p95=p95,
            box=box,
            components=components[structure.number],
            flags=(*_flags_of(box, volume.grid.shape), *flags),
        )


def _flags_of(box: Box | None, shape: tuple[int, int, int]) -> tuple[Flag, ...]:
    """Return what must be known of a structure: nothing there, or more of it outside the scan."""
    if box is None:
        return (Flag.EMPTY,)
    first, last = box
    inside = all(a > 0 and b < n - 1 for a, b, n in zip(first, last, shape, strict=True))
    return () if inside else (Flag.TOUCHES_BORDER,)


def _known(value: float) -> float | None:
    """Return a number, None where it is not known."""
    return float(value) if math.isfinite(value) else None


def _sizes(layer: Layer) -> tuple[Table, list[Box]]:
    """Return how many voxels each structure has, and its first and last voxel."""
    row_of, n = _rows(layer), len(layer.structures)
    rows, columns = layer.labels.shape[:2]
    voxels = np.zeros(n + 1, np.int64)
    first, last = np.full((n + 1, 3), max(layer.labels.shape)), np.full((n + 1, 3), -1)
    for slab in slabs_of(layer.labels.shape):
        runs = runs_of(layer.labels[:, :, slab])
        value = row_of[runs.value]
        voxels += np.bincount(value, runs.length, n + 1).astype(np.int64)
        row, i = np.divmod(runs.start, rows)
        k, j = np.divmod(row, columns)
        for axis, low, high in (
            (0, i, i + runs.length - 1),
            (1, j, j),
            (2, k + slab.start, k + slab.start),
        ):
            np.minimum.at(first[:, axis], value, low)
            np.maximum.at(last[:, axis], value, high)
    boxes = [
        ((int(a[0]), int(a[1]), int(a[2])), (int(b[0]), int(b[1]), int(b[2])))
        for a, b in zip(first[1:], last[1:], strict=True)
    ]
    return voxels[1:], boxes


def _rows(layer: Layer) -> Table:
    """Return which structure, from 1, each value of the label map is; 0 for none of them."""
    table = np.zeros(int(np.iinfo(layer.labels.dtype).max) + 1, np.int64)
    table[[s.number for s in layer.structures]] = range(1, len(layer.structures) + 1)
    return table


def _bins(volume: Volume, structures: int) -> Bins:
    """Return bins for a volume: a value each for integers that lie close enough together."""
    low, high = math.inf, -math.inf
    integers = volume.array.dtype.kind in "iu"
    for slab in slabs_of(volume.array.shape, SLAB_VOXELS):
        values = volume.array[:, :, slab]
        ends = float(values.min()), float(values.max())
        if not integers and not _counts(np.array(ends), volume).all():
            values = values[_counts(values, volume)]  # bins would be too coarse with it
            if not values.size:
                continue
            ends = float(values.min()), float(values.max())
        low, high = min(low, ends[0]), max(high, ends[1])
    if low > high:  # not one voxel that counts
        low = high = 0.0
    steps = int(high - low) + 1
    if integers and steps * structures <= EXACT_CELLS:
        return Bins(low, high, exact=True, count=steps)
    return Bins(low, high, exact=False, count=COARSE_BINS)


def _counts(values: NDArray[Any], volume: Volume) -> NDArray[np.bool_]:
    """Return which values are intensities: finite numbers other than the padding."""
    counts = np.ones(values.shape, bool) if volume.padding is None else ~volume.is_padding(values)
    return counts if values.dtype.kind in "iu" else counts & np.isfinite(values)


def _foreground(layer: Layer, volume: Volume) -> Iterator[tuple[Table, NDArray[Any]]]:
    """Yield structures (N,), from 1, and intensities (N,) of the voxels that count, by slabs."""
    row_of = _rows(layer)
    for slab in slabs_of(layer.labels.shape, SLAB_VOXELS):
        labels = layer.labels[:, :, slab].reshape(-1, order="F")
        values = volume.array[:, :, slab].reshape(-1, order="F")
        inside = (labels != 0) & _counts(values, volume)
        yield row_of[labels[inside]], values[inside]


def _intensities(layer: Layer, volume: Volume, bins: Bins) -> Intensities:
    """Return mean, sd and quantiles of each structure."""
    n = len(layer.structures) + 1  # row 0 takes values that stand for no structure
    histogram, sums = np.zeros((n, bins.count), np.int64), np.zeros(n)
    for row, values in _foreground(layer, volume):
        cells = np.bincount(row * bins.count + bins.of(values), minlength=histogram.size)
        histogram += cells.reshape(histogram.shape)
        if not bins.exact:
            sums += np.bincount(row, values, n)
    total = histogram.sum(axis=1)
    if not bins.exact:
        return _look_into(layer, volume, bins, histogram, _ratio(sums, total))
    value = np.arange(bins.count, dtype=np.float64) + bins.low
    mean = _ratio(histogram @ value, total)
    square = np.array([h @ (value - m) ** 2 for h, m in zip(histogram, mean, strict=True)])
    quantiles = np.array([_quantiles(h, value[_bins_of_ranks(h)]) for h in histogram])
    return Intensities(mean[1:], np.sqrt(_ratio(square, total))[1:], quantiles[1:])


def _look_into(
    layer: Layer, volume: Volume, bins: Bins, histogram: Table, mean: NDArray[np.float64]
) -> Intensities:
    """Return mean, sd and quantiles by a second look at the voxels in the quantiles' bins."""
    needed = np.array([_bins_of_ranks(h) for h in histogram])
    wanted = np.zeros(histogram.shape, bool)
    np.put_along_axis(wanted, needed, values=True, axis=1)
    square, taken = np.zeros(len(mean)), []
    for row, values in _foreground(layer, volume):
        square += np.bincount(row, (values - mean[row]) ** 2, len(mean))
        hit = wanted[row, bins.of(values)]
        taken.append((row[hit], values[hit]))
    rows = np.concatenate([row for row, _ in taken])
    values = np.concatenate([values for _, values in taken])
    quantiles = np.full((len(mean), len(QUANTILES)), np.nan)
    for n, h in enumerate(histogram):
        if h.any():
            held = np.sort(values[rows == n])
            skipped = np.cumsum(np.where(wanted[n], 0, h))[needed[n]]  # voxels below, not held
            quantiles[n] = _quantiles(h, held[_ranks(h) - skipped].astype(np.float64))
    sd = np.sqrt(_ratio(square, histogram.sum(axis=1)))
    return Intensities(mean[1:], sd[1:], quantiles[1:])


def _ranks(histogram: Table) -> Table:
    """Return the ranks of the voxels just below (5) and just above (5) each quantile."""
    place = np.array(QUANTILES) * max(0, int(histogram.sum()) - 1)
    return np.concatenate([np.floor(place), np.ceil(place)]).astype(np.int64)


def _bins_of_ranks(histogram: Table) -> Table:
    """Return the bin in which each of those voxels lies; any where there are none."""
    found = np.searchsorted(np.cumsum(histogram), _ranks(histogram), side="right")
    return np.minimum(found, len(histogram) - 1)


def _quantiles(histogram: Table, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the quantiles between the values of those voxels; NaN where there are none."""
    total = int(histogram.sum())
    if not total:
        return np.full(len(QUANTILES), np.nan)
    below, above = np.split(values, 2)
    share = (np.array(QUANTILES) * (total - 1)) % 1
    return np.asarray(below + (above - below) * share)


def _ratio(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """Return a / b, NaN where b is 0."""
    result = np.full(len(b), np.nan)
    np.divide(a, b, out=result, where=b > 0)
    return result
