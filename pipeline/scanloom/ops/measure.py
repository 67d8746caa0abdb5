"""Measure structures: size, bounding box and intensities, and ratios of volumes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import (
    Flag,
    Layer,
    Measurement,
    Segmentation,
    Structure,
    Volume,
    WorkflowError,
    did_you_mean,
)
from scanloom.core.grid import Box
from scanloom.core.relations import Asymmetry, Relations, Share
from scanloom.ops.components import count_components
from scanloom.ops.run_length import find_runs, iter_slabs

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_MAX_EXACT_CELLS = 1 << 22
"""Largest exact histogram (structures x integer values); 32 MiB."""
_COARSE_BINS = 4096
"""Bins for all other intensities; a second pass refines only the bins that hold a quantile."""
SLAB_VOXELS = 1 << 19

_IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class _Bins:
    """Histogram bins of intensities, in ascending order; `exact` if each holds a single integer."""

    low: float
    high: float
    exact: bool
    count: int

    def of(self, values: NDArray[Any]) -> _IntArray:
        """Return the coarse bin of each value."""
        if self.high == self.low:
            return np.zeros(values.shape, np.int64)
        scale = (self.count - 1) / (self.high - self.low)
        return ((values.astype(np.float64) - self.low) * scale).astype(np.int64)


def measure(
    segmentation: Segmentation, volume: Volume, flags: Sequence[Flag] = ()
) -> tuple[Measurement, ...]:
    """Measure every structure of a segmentation, in the order of its structures.

    Parameters
    ----------
    segmentation : Segmentation
        Label maps (I, J, K) on the volume's grid.
    volume : Volume
        The scan (I, J, K). Padding and non-finite voxels count for sizes, but not for
        intensities.
    flags : sequence of Flag
        Flags of the case, appended to the flags of every measurement.

    Returns
    -------
    tuple of Measurement
        One measurement per structure, empty structures included.

    Raises
    ------
    ValueError
        If the segmentation and the volume differ in shape.

    Notes
    -----
    Quantiles are exact and interpolate linearly between voxels (numpy.quantile's default; method 7
    of Hyndman and Fan, doi:10.1080/00031305.1996.10473566). Memory does not grow with the scan if
    the intensities are integers of a limited range. Otherwise the voxels in the bins that hold
    quantiles are kept.
    """
    if segmentation.grid.shape != volume.grid.shape:
        raise ValueError(f"{segmentation.grid.shape} does not fit {volume.grid.shape}")
    max_structures = max(len(layer.structures) for layer in segmentation.layers)
    bins = _make_bins(volume, max_structures)
    measured: list[Measurement] = []
    for layer in segmentation.layers:
        measured += _measure_layer(segmentation.model, layer, volume, bins, tuple(flags))
    return tuple(measured)


def _measure_layer(
    model: str, layer: Layer, volume: Volume, bins: _Bins, flags: tuple[Flag, ...]
) -> Iterator[Measurement]:
    voxels, boxes = _voxels_and_boxes(layer)
    intensities = _intensities(layer, volume, bins)
    components = count_components(layer.labels, (s.number for s in layer.structures))
    for n, structure in enumerate(layer.structures):
        box = boxes[n] if voxels[n] else None
        mean, sd, p05, p25, median, p75, p95 = map(finite_or_none, intensities[n])
        yield Measurement(
            model=model,
            label=structure.label,
            number=structure.number,
            voxels=int(voxels[n]),
            volume_ml=int(voxels[n]) * volume.grid.voxel_volume / 1000,
            unit=volume.unit,
            mean=mean,
            sd=sd,
            p05=p05,
            p25=p25,
            median=median,
            p75=p75,
            p95=p95,
            box=box,
            components=components[structure.number],
            flags=(*_flags_of(structure, box, volume.grid.shape), *flags),
        )


def _flags_of(
    structure: Structure, box: Box | None, shape: tuple[int, int, int]
) -> tuple[Flag, ...]:
    """Return EMPTY, TOUCHES_BORDER if it may leave the scan, and EXPERIMENTAL, as they apply."""
    own = (Flag.EXPERIMENTAL,) if structure.experimental else ()
    if box is None:
        return (Flag.EMPTY, *own)
    inside = all(a > 0 and b < n - 1 for a, b, n in zip(*box, shape, strict=True))
    return own if inside else (Flag.TOUCHES_BORDER, *own)


def finite_or_none(value: float) -> float | None:
    """Return a finite number, None for NaN."""
    return float(value) if math.isfinite(value) else None


def _voxels_and_boxes(layer: Layer) -> tuple[_IntArray, list[Box]]:
    """Return the voxel count of each structure, and its box."""
    row_of, count = _structure_rows(layer), len(layer.structures)
    rows, columns, slices = layer.labels.shape
    voxels = np.zeros(count + 1, np.int64)
    begins, ends, in_j, in_k = (
        np.zeros((length, count + 1), bool) for length in (rows, rows, columns, slices)
    )
    for slab in iter_slabs(layer.labels.shape):
        runs = find_runs(layer.labels[:, :, slab])
        structure = row_of[runs.value]
        voxels += np.bincount(structure, runs.length, count + 1).astype(np.int64)
        row = runs.start // rows
        # Flat indices: NumPy takes half the time of pairs of indices
        i = (runs.start - row * rows) * (count + 1) + structure
        begins.reshape(-1)[i] = True
        ends.reshape(-1)[i + (runs.length - 1) * (count + 1)] = True
        filled = np.zeros((slab.stop - slab.start, columns, count + 1), bool)
        filled.reshape(-1)[row * (count + 1) + structure] = True
        in_j |= filled.any(axis=0)
        in_k[slab] = filled.any(axis=1)
    # Along i a run has a first and a last voxel; a row or slice has voxels or not
    pairs = ((begins, ends), (in_j, in_j), (in_k, in_k))
    first = np.stack([low.argmax(axis=0) for low, _ in pairs], axis=1)
    last = np.stack([len(high) - 1 - high[::-1].argmax(axis=0) for _, high in pairs], axis=1)
    boxes = [
        Box((int(a[0]), int(a[1]), int(a[2])), (int(b[0]), int(b[1]), int(b[2])))
        for a, b in zip(first[1:], last[1:], strict=True)
    ]
    return voxels[1:], boxes


def centroids(segmentation: Segmentation) -> dict[str, tuple[float, NDArray[np.float64]]]:
    """Return volume in ml and centroid (3,) in RAS mm of each structure that has voxels."""
    found = {}
    for layer in segmentation.layers:
        row_of, count = _structure_rows(layer), len(layer.structures) + 1
        rows, columns, _ = layer.labels.shape
        voxels, sums = np.zeros(count), np.zeros((3, count))
        for slab in iter_slabs(layer.labels.shape):
            runs = find_runs(layer.labels[:, :, slab])
            inside = runs.value != 0
            start, length = runs.start[inside], runs.length[inside]
            structure = row_of[runs.value[inside]]
            row, first = np.divmod(start, rows)
            middle = (first + (length - 1) / 2, row % columns, row // columns + slab.start)
            voxels += np.bincount(structure, length, count)
            for axis, index in zip(sums, middle, strict=True):
                axis += np.bincount(structure, index * length, count)
        for n, structure in enumerate(layer.structures, 1):
            if voxels[n]:
                ml = float(voxels[n]) * segmentation.grid.voxel_volume / 1000
                found[structure.label] = ml, segmentation.grid.world(sums[:, n] / voxels[n])
    return found


def _structure_rows(layer: Layer) -> _IntArray:
    """Return the structure, from 1, of each value of the label map; 0 for other values."""
    table = np.zeros(int(np.iinfo(layer.labels.dtype).max) + 1, np.int64)
    table[[s.number for s in layer.structures]] = range(1, len(layer.structures) + 1)
    return table


def _make_bins(volume: Volume, structures: int) -> _Bins:
    """Return bins for a volume: exact ones for integers of a limited range, else coarse ones."""
    low, high = math.inf, -math.inf
    integers = volume.array.dtype.kind in "iu"
    for slab in iter_slabs(volume.array.shape, SLAB_VOXELS):
        values = volume.array[:, :, slab]
        extremes = float(values.min()), float(values.max())
        if not integers and not valid_mask(np.array(extremes), volume).all():
            values = values[valid_mask(values, volume)]  # else the bins would be too coarse
            if not values.size:
                continue
            extremes = float(values.min()), float(values.max())
        low, high = min(low, extremes[0]), max(high, extremes[1])
    if low > high:  # no valid voxel
        low = high = 0.0
    steps = int(high - low) + 1
    if integers and steps * structures <= _MAX_EXACT_CELLS:
        return _Bins(low, high, exact=True, count=steps)
    return _Bins(low, high, exact=False, count=_COARSE_BINS)


def valid_mask(values: NDArray[Any], volume: Volume) -> NDArray[np.bool_]:
    """Return a mask of valid intensities: finite numbers other than the padding."""
    is_valid = ~volume.is_padding(values)
    return is_valid if values.dtype.kind in "iu" else is_valid & np.isfinite(values)


def _foreground(layer: Layer, volume: Volume) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield, by slabs, the labels (N,) and intensities (N,) of valid voxels.

    Voxels of the background may be among them where most voxels are labelled.
    """
    for slab in iter_slabs(layer.labels.shape, SLAB_VOXELS):
        labels = layer.labels[:, :, slab].reshape(-1, order="F")
        values = volume.array[:, :, slab].reshape(-1, order="F")
        is_valid = valid_mask(values, volume)
        if 2 * np.count_nonzero(labels) < labels.size or not is_valid.all():
            is_valid &= labels != 0
            labels, values = labels[is_valid], values[is_valid]
        yield labels, values


def _intensities(layer: Layer, volume: Volume, bins: _Bins) -> NDArray[np.float64]:
    """Return mean, population sd and `QUANTILES` of each structure (S, 7); NaN without voxels."""
    n = len(layer.structures) + 1  # row 0 is for labels without a structure
    histogram, sums = np.zeros((n, bins.count), np.int64), np.zeros(n)
    row_of = _structure_rows(layer)
    # A cell for each structure and bin: one count of all slabs instead of one for each structure
    first_cell = row_of * bins.count - (int(bins.low) if bins.exact else 0)
    work = np.empty(0, np.int64)  # for all slabs: memory that is new takes longer than the sums
    for labels, values in _foreground(layer, volume):
        if work.size < labels.size:
            work = np.empty(labels.size, np.int64)
        cells = first_cell.take(labels, out=work[: labels.size], mode="clip")  # unbuffered
        np.add(cells, values if bins.exact else bins.of(values), out=cells, dtype=np.int64)
        histogram += np.bincount(cells, minlength=histogram.size).reshape(histogram.shape)
        if not bins.exact:
            sums += np.bincount(row_of[labels], values, n)
    total = histogram.sum(axis=1)
    if not bins.exact:
        return _refined(layer, volume, bins, histogram, _ratio(sums, total))
    value = np.arange(bins.count, dtype=np.float64) + bins.low
    mean = _ratio(histogram @ value, total)
    square = np.array([h @ (value - m) ** 2 for h, m in zip(histogram, mean, strict=True)])
    quantiles = np.array([_quantiles(h, value[_bins_of_ranks(h)]) for h in histogram])
    return np.column_stack((mean, np.sqrt(_ratio(square, total)), quantiles))[1:]


def _refined(
    layer: Layer, volume: Volume, bins: _Bins, histogram: _IntArray, mean: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the same by a second pass over the voxels in the bins that hold quantiles."""
    rank_bins = np.array([_bins_of_ranks(h) for h in histogram])
    is_needed = np.zeros(histogram.shape, bool)
    np.put_along_axis(is_needed, rank_bins, values=True, axis=1)
    square, kept = np.zeros(len(mean)), []
    row_of = _structure_rows(layer)
    for labels, values in _foreground(layer, volume):
        row = row_of[labels]
        square += np.bincount(row, (values - mean[row]) ** 2, len(mean))
        is_kept = is_needed[row, bins.of(values)]
        kept.append((row[is_kept], values[is_kept]))
    rows = np.concatenate([row for row, _ in kept])
    values = np.concatenate([values for _, values in kept])
    quantiles = np.full((len(mean), len(QUANTILES)), np.nan)
    for n, h in enumerate(histogram):
        if h.any():
            ordered = np.sort(values[rows == n])
            # Voxels below each rank's bin that were not kept
            below = np.cumsum(np.where(is_needed[n], 0, h))[rank_bins[n]]
            quantiles[n] = _quantiles(h, ordered[_ranks(h) - below].astype(np.float64))
    sd = np.sqrt(_ratio(square, histogram.sum(axis=1)))
    return np.column_stack((mean, sd, quantiles))[1:]


def _ranks(histogram: _IntArray) -> _IntArray:
    """Return the ranks of the voxels just below (5) and just above (5) each quantile."""
    positions = np.array(QUANTILES) * max(0, int(histogram.sum()) - 1)
    return np.concatenate([np.floor(positions), np.ceil(positions)]).astype(np.int64)


def _bins_of_ranks(histogram: _IntArray) -> _IntArray:
    """Return the bin of the voxel at each of `_ranks`; arbitrary for an empty histogram."""
    bins = np.searchsorted(np.cumsum(histogram), _ranks(histogram), side="right")
    return np.minimum(bins, len(histogram) - 1)


def _quantiles(histogram: _IntArray, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the quantiles from the values at `_ranks`; NaN for an empty histogram."""
    total = int(histogram.sum())
    if not total:
        return np.full(len(QUANTILES), np.nan)
    below, above = np.split(values, 2)
    weight = (np.array(QUANTILES) * (total - 1)) % 1
    return np.asarray(below + (above - below) * weight)


def _ratio(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """Return a / b, NaN if b is 0."""
    result = np.full(len(b), np.nan)
    np.divide(a, b, out=result, where=b > 0)
    return result


Name = tuple[str, str]
"""Model and label of a structure."""


def resolve_shares(shares: Sequence[Share], known: Sequence[Name]) -> dict[Name, tuple[Name, ...]]:
    """Return the structures whose volumes are added to the whole of each structure.

    Parameters
    ----------
    shares : sequence of Share
        Shares, whose structures are named by LABEL or MODEL/LABEL.
    known : sequence of (model, label)
        All structures of the results.

    Raises
    ------
    WorkflowError
        If a name is unknown or ambiguous, a structure has two wholes, a whole has one twice, or
        nothing is left to be measured.
    """
    wholes: dict[Name, tuple[Name, ...]] = {}
    for n, share in enumerate(shares):
        whole = _resolve_all(("shares", n, "of"), share.of, known)
        for member in whole:
            if whole.count(member) > 1:
                problem = f"{'/'.join(member)} is named twice"
                raise WorkflowError(("shares", n, "of"), problem)
        members = _resolve_all(("shares", n, "structures"), share.structures, known)
        members = members or tuple(name for name in known if name not in whole)
        if not members:
            raise WorkflowError(("shares", n), "no structure is left whose share is measured")
        for member in members:
            if member in wholes:
                problem = f"{'/'.join(member)} is measured as a share twice"
                raise WorkflowError(("shares", n), problem)
            wholes[member] = whole
    return wholes


Sides = tuple[tuple[Name, ...], tuple[Name, ...]]
"""Structures of the left and of the right side."""


def resolve_asymmetries(
    asymmetries: Sequence[Asymmetry], known: Sequence[Name]
) -> dict[Name, Sides]:
    """Return the two sides of the asymmetry of each structure; arguments as `resolve_shares`.

    Raises
    ------
    WorkflowError
        If a name is unknown or ambiguous, or a structure is named twice.
    """
    sides_of: dict[Name, Sides] = {}
    for n, each in enumerate(asymmetries):
        first = _resolve_all(("asymmetries", n, "left"), each.left, known)
        second = _resolve_all(("asymmetries", n, "right"), each.right, known)
        for member in (*first, *second):
            if member in sides_of or (*first, *second).count(member) > 1:
                raise WorkflowError(("asymmetries", n), f"{'/'.join(member)} is named twice")
        sides_of |= dict.fromkeys((*first, *second), (first, second))
    return sides_of


def add_ratios(
    measurements: Sequence[Measurement], relations: Relations
) -> tuple[Measurement, ...]:
    """Return measurements with the requested shares and asymmetries.

    None of an empty whole, and of structures on which a model was not run.
    """
    by_name = {(m.model, m.label): m for m in measurements}
    searched = {
        name: None if Flag.CROP_EMPTY in m.flags else m.voxels for name, m in by_name.items()
    }
    for name, whole in resolve_shares(relations.shares, list(by_name)).items():
        share, text = share_of(name, whole, searched), describe(whole)
        by_name[name] = replace(by_name[name], share=share, share_of=text)
    for name, sides in resolve_asymmetries(relations.asymmetries, list(by_name)).items():
        by_name[name] = replace(
            by_name[name],
            asymmetry=asymmetry_of(sides, searched),
            asymmetry_of=" : ".join(map(describe, sides)),
        )
    return tuple(by_name.values())


def asymmetry_of(sides: Sides, voxels: Mapping[Name, int | None]) -> float | None:
    """Return the asymmetry index of two sides, in percent; None of structures with unknown voxels.

    It is 100 (L - R) / ((L + R) / 2), from -200 to 200, and None if both are empty.
    """
    counts = [[voxels[name] for name in side] for side in sides]
    if None in (*counts[0], *counts[1]):
        return None
    n_left, n_right = (sum(n for n in side if n is not None) for side in counts)
    total = n_left + n_right
    return 200 * (n_left - n_right) / total if total else None


def share_of(name: Name, whole: Sequence[Name], voxels: Mapping[Name, int | None]) -> float | None:
    """Return the share of a structure in a whole, from numbers of voxels on one grid.

    None of an empty whole, and of structures with unknown voxels.
    """
    own, *counts = [voxels[member] for member in (name, *whole)]
    if own is None or None in counts:
        return None
    total = sum(n for n in counts if n is not None)
    return own / total if total else None


def describe(whole: Sequence[Name]) -> str:
    """Return a whole as text: "model/brain + model/csf"."""
    return " + ".join("/".join(name) for name in whole)


def _resolve_all(
    keys: tuple[str | int, ...], names: Sequence[str], known: Sequence[Name]
) -> tuple[Name, ...]:
    """Return the structures of a list in a workflow, whose place there is `keys`."""
    return tuple(_resolve((*keys, n), name, known) for n, name in enumerate(names))


def _resolve(keys: tuple[str | int, ...], name: str, known: Sequence[Name]) -> Name:
    model, separator, label = name.rpartition("/")
    matches = [each for each in known if each[1] == label and (not separator or each[0] == model)]
    if not matches:
        labels = ["/".join(each) if separator else each[1] for each in known]
        raise WorkflowError(keys, did_you_mean(name, dict.fromkeys(labels)))
    if len(matches) > 1:
        expected = " or ".join("/".join(each) for each in matches)
        raise WorkflowError(keys, f"several results have {name}: {expected}")
    return matches[0]
