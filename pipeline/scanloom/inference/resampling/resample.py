"""Resamples a scan to the network grid; the stored voxels move to the device once.

Interpolation is separable, since the network grid shares the source's axes: one pass per axis, slab
by slab. Linear interpolation agrees with MONAI's float64 `grid_sample` up to float32 rounding. A
cubic spline is a product with one matrix per axis, in float64 (`sampling`). Nearest neighbours are
computed in MONAI's own order of operations in float64 (normalise, affine_grid, grid_sample): at
exact ratios, such as 2, the last bit decides which neighbour is the nearest, of whole planes of
voxels. So they are computed on the host, whatever the device.

Linear interpolation in float32 is exact to 1e-4 of a scan's values, which is enough except where
the last bit decides: whether a value is exactly 0 (`Normalize.nonzero`, `Crop`), or just below an
integer (`Truncate`). Only these few voxels are computed again, in float64 and in the order of
operations of the program that the model was trained with. They are computed on the host: a GPU
rounds in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from scanloom.cards.card import IntensityStep, ModelCard, Normalize, ScaleRange, Truncate
from scanloom.core.grid import Shape
from scanloom.inference.device import to_device
from scanloom.inference.geometry import Float64, NetworkPlan
from scanloom.inference.intensity import apply_steps, is_pointwise
from scanloom.inference.resampling.sampling import (
    BandedMatrix,
    area_matrix,
    cubic_bands,
    grid_coordinates,
    nearest_index,
    sampling_base,
    sampling_coordinates,
    sampling_theta,
)
from scanloom.inference.transfers import ArrivingTensor, StagedArray

SAME_POSITION = 1e-6
"""Largest rounding error of a coordinate, in voxels."""
SAME_POSITION_FLOAT32 = 1e-3
"""The same of coordinates in float32."""
SLAB_BYTES = 64 * 1024**2
"""Approximate size of the values of a slab, on any device."""

Decisive = float | Literal["integers"]
"""A value, or values, at which the last bit decides."""
NEAR = 1e-3
"""Largest distance from a decisive value of voxels that are computed again."""
_VOXELS_AT_ONCE = 500_000
"""Voxels of a slab: some 100 MB while they are computed."""
Index = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


class LinearWeights:
    """Neighbours and weights of linear interpolation along an axis.

    Coordinates beyond the ends are clipped to them (torch's border padding).

    Parameters
    ----------
    at : (N,) float64 array
        Coordinates on the input axis.
    size : int
        Length of the input axis.
    device : torch.device
        Device of the values.
    """

    def __init__(self, at: NDArray[np.float64], size: int, device: torch.device) -> None:
        inside = np.clip(at, 0.0, size - 1.0)
        below = np.floor(inside).astype(np.int64)
        above, weight = np.minimum(below + 1, size - 1), inside - below
        self._exact = bool((weight == 0.0).all())
        self._low, self._high, self._weight = (
            to_device(each, device) for each in (below, above, weight.astype(np.float32))
        )

    def along(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """Return `values` interpolated along `dim`: a new float32 tensor.

        Fast if `dim` is not the last: then whole rows are selected.
        """
        low = values.index_select(dim, self._low).to(torch.float32)
        if self._exact:
            return low
        shape = [1] * values.ndim
        shape[dim] = -1
        high = values.index_select(dim, self._high).to(torch.float32)
        return low.lerp_(high, self._weight.view(shape))


class StoredPlanes:
    """Access to the planes of a scan along one axis, converted to float32 in small numbers.

    Parameters
    ----------
    array : (I, J, K) array
        I fastest in memory; never written to.
    lead : int
        Axis across the planes.
    device : torch.device
        Device of the planes. The array moves there once, in its own type.
    steps : sequence of IntensityStep
        Steps that are applied to the whole scan, which is then stored as float32.
    foreground : (I, J, K) bool array, optional
        The voxels that `Normalize.filled` measures and changes.
    staged : StagedArray, optional
        The planes of the array, for a CUDA device, if they are staged already.
    """

    def __init__(
        self,
        array: NDArray[Any],
        lead: int,
        device: torch.device,
        steps: Sequence[IntensityStep] = (),
        foreground: NDArray[np.bool_] | None = None,
        staged: StagedArray | None = None,
    ) -> None:
        self._lead, self._steps = lead, tuple[IntensityStep, ...]()
        self._arriving: ArrivingTensor | None = None
        stored = planes_across(array, lead)
        self._host = stored if device.type == "cpu" else None
        if device.type == "cuda":
            self._arriving = ArrivingTensor(staged or StagedArray(stored), device)
        elif self._host is None:
            self._on_device = to_device(stored, device)
        if steps and self._arriving is not None and all(map(is_pointwise, steps)):
            self._steps, self._stepped = tuple(steps), 0
            self._on_device = torch.empty(stored.shape, device=device)
        elif steps:
            mask = None
            if foreground is not None:
                mask = to_device(np.ascontiguousarray(planes_across(foreground, lead)), device)
            self._on_device = apply_steps(self.take(0, array.shape[lead] - 1), steps, mask)
            self._host = self._arriving = None

    def take(self, first: int, last: int) -> torch.Tensor:
        """Return a copy (N, ., .) of planes `first` to `last` inclusive, later axes first."""
        if self._host is None:
            return self._arrived(last + 1)[first : last + 1].to(torch.float32, copy=True)
        with np.errstate(over="ignore"):  # an overflow is refused after the card's steps
            return torch.from_numpy(np.array(self._host[first : last + 1], np.float32, order="C"))

    def _arrived(self, count: int | None = None) -> torch.Tensor:
        """Return the planes on the device, of which the first `count`, or all, may be used now."""
        if self._arriving is None:
            return self._on_device
        stored = self._arriving.until(count)
        if not self._steps:
            return stored
        new = slice(self._stepped, max(self._stepped, len(stored) if count is None else count))
        self._on_device[new] = apply_steps(stored[new].to(torch.float32), self._steps)
        self._stepped = new.stop
        return self._on_device

    def bounds(self, axis: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return minimum and maximum, of each plane across `axis` of `take` if it is given."""
        across = tuple(n for n in range(3) if n != axis)
        if self._host is not None:
            ends = np.stack([f(self._host, axis=across) for f in (np.min, np.max)])
            low, high = torch.from_numpy(ends.astype(np.float32))
            return low, high
        values = self._arrived().to(torch.float32)
        return values.amin(dim=across), values.amax(dim=across)

    def on_host(self) -> NDArray[np.float32]:
        """Return the whole scan (I, J, K) on the host, after the steps."""
        return np.moveaxis(self._arrived().cpu().numpy(), 0, 2 - self._lead).T


def planes_across(array: NDArray[Any], lead: int) -> NDArray[Any]:
    """Return the planes (N, ., .) of an array (I, J, K) across an axis, later axes first."""
    return np.moveaxis(array.T, 2 - lead, 0)


def other_axes(lead: int) -> tuple[int, int]:
    """Return the other two source axes, the later one first, as planes are stored."""
    b, c = (axis for axis in (2, 1, 0) if axis != lead)
    return b, c


@dataclass(frozen=True, eq=False)
class ResampleOptions:
    """Needs of the card's intensity steps.

    Parameters
    ----------
    decisive : float, "integers" or None
        Values at which the last bit decides: voxels close to them are exact (`correct`).
    foreground : (I, J, K) bool array, optional
        The voxels that `Normalize.filled` measures and changes.
    staged : StagedArray, optional
        The scan's planes, for a CUDA device, if they are staged already.
    """

    decisive: Decisive | None = None
    foreground: NDArray[np.bool_] | None = None
    staged: StagedArray | None = None


def to_network(
    array: NDArray[Any],
    plan: NetworkPlan,
    device: torch.device,
    steps: Sequence[IntensityStep] = (),
    slab_bytes: int = SLAB_BYTES,
    options: ResampleOptions = ResampleOptions(),
) -> torch.Tensor:
    """Resample a scan to the network grid, in the plan's mode.

    Parameters
    ----------
    array : (I, J, K) array
        The scan, of any numeric type; never written to.
    device : torch.device
        Device of the computation and of the result.
    steps : sequence of IntensityStep
        Intensity steps of the card before resampling.
    slab_bytes : int
        Largest size of a slab, which has at least one plane.
    options : ResampleOptions
        Values that later steps need.

    Returns
    -------
    (X, Y, Z) float32 tensor
        The resampled scan.
    """
    lead = plan.lead
    # Steps are applied before resampling if the card says so: they measure stored voxels
    planes = StoredPlanes(array, lead, device, steps, options.foreground, options.staged)
    if plan.mode == "nearest" and plan.alignment == "first" and plan.resampled:
        scan = planes.on_host() if steps else array
        values = nearest(orient(scan, plan), plan.step, plan.network.shape)
        return to_device(np.array(values, np.float32, order="C"), device)
    order = [plan.network_axis(axis) for axis in (lead, *other_axes(lead))]
    out = torch.empty([plan.network.shape[x] for x in order], device=device)
    slab = 1 if any(plan.lean) else max(1, slab_bytes // (8 * array[..., 0].size))
    interpolate = _by_matrices if plan.mode in ("cubic", "area") and plan.resampled else _linear
    interpolate(out, planes, plan, slab)
    resampled = out.permute([order.index(x) for x in range(3)])
    if plan.alignment == "centre":
        _empty_outside(resampled, plan)
    if options.decisive is not None and plan.resampled and plan.mode in ("linear", "trilinear"):
        correct(resampled, planes.on_host() if steps else array, plan, options.decisive)
    return resampled


def _linear(out: torch.Tensor, planes: StoredPlanes, plan: NetworkPlan, slab: int) -> None:
    """Write the linearly resampled scan, `slab` planes at a time, in the axes of `planes`."""
    lead, (b, c), device = plan.lead, other_axes(plan.lead), out.device
    positions, shape = plan.to_source(lead), plan.source.shape
    inner: list[LinearWeights] = []
    for start in range(0, len(positions), slab):
        inside = np.clip(positions[start : start + slab], 0, shape[lead] - 1)
        first, last = int(inside.min()), min(int(inside.max()) + 1, shape[lead] - 1)
        if start == 0 or any(plan.lean):
            at = float(positions[start])
            inner = [
                LinearWeights(plan.to_source(axis, at), shape[axis], device) for axis in (b, c)
            ]
        weights = LinearWeights(inside - first, last - first + 1, device)
        values = weights.along(planes.take(first, last), 0)
        for weights in inner:  # two transpositions, so that whole rows are selected in each pass
            values = weights.along(values, 1).transpose(1, 2).contiguous()
        out[start : start + slab] = values


def _by_matrices(out: torch.Tensor, planes: StoredPlanes, plan: NetworkPlan, slab: int) -> None:
    """Write the scan resampled by a cubic spline or by area, `slab` planes at a time.

    `out` has the axes of `planes`. Values are limited to the scan's range; to that of their slice
    if slices are resampled one by one.
    """
    lead, (b, c) = plan.lead, other_axes(plan.lead)
    positions, device = plan.to_source(lead), out.device
    alone = plan.nearest[0]  # the network axis across slices that are resampled one by one
    across = None if alone is None else (lead, b, c).index(plan.follows[alone])

    def matrix(axis: int, at: NDArray[np.float64]) -> BandedMatrix:
        if plan.mode == "area":
            count, size = plan.network.shape[plan.network_axis(axis)], plan.source.shape[axis]
            index = np.rint((at + 0.5) * count / size - 0.5).astype(np.int64)
            return BandedMatrix(area_matrix(index, count, size), device)
        if plan.network_axis(axis) == alone:
            return BandedMatrix(np.eye(plan.source.shape[axis])[at.astype(np.int64)], device)
        return cubic_bands(at.tobytes(), plan.source.shape[axis], device)

    inner = [matrix(axis, plan.to_source(axis)) for axis in (b, c)]
    for start in range(0, len(positions), slab):
        at = positions[start : start + slab]
        if any(plan.lean):
            inner = [matrix(axis, plan.to_source(axis, float(at[0]))) for axis in (b, c)]
        weights = matrix(lead, at)
        taken = planes.take(weights.first, weights.last).to(torch.float64)
        values = weights.along_rows(taken.flatten(1)).view(-1, *taken.shape[1:])
        for weights in inner:
            values = weights.along_rows(values[:, weights.first :]).transpose(1, 2)
        out[start : start + slab] = values
    # Last: planes are resampled while later ones are on their way to a device
    low, high = planes.bounds(across)
    size = [1, 1, 1]
    if alone is not None and across is not None:
        index = to_device(plan.to_source(plan.follows[alone]).astype(np.int64), device)
        size[across] = -1
        low, high = low[index], high[index]
    out.clamp_(low.view(size), high.view(size))


def _empty_outside(values: torch.Tensor, plan: NetworkPlan) -> None:
    """Set network voxels that do not lie between two voxels of the scan to 0, in place.

    As in niimath's conform, so are voxels at the last one of an axis.
    """
    for axis in range(3):
        at, last = plan.to_source(axis), plan.source.shape[axis] - 1
        outside = (at < -SAME_POSITION) | (at > last - SAME_POSITION)
        # Indices, not a mask, of which a GPU would tell the host the sum
        empty = to_device(np.flatnonzero(outside), values.device)
        values.movedim(plan.network_axis(axis), 0)[empty] = 0.0


def unorient(values: NDArray[Any], plan: NetworkPlan) -> NDArray[Any]:
    """Flip and permute voxels from the network's axes to (I, J, K)."""
    flipped = np.flip(values, tuple(x for x in range(3) if plan.flipped[x]))
    return flipped.transpose([plan.network_axis(axis) for axis in range(3)])


def nearest(values: NDArray[Any], step: NDArray[np.floating[Any]], shape: Shape) -> NDArray[Any]:
    """Resample by nearest neighbour, in MONAI's order of operations (AffineTransform) in float64.

    Parameters
    ----------
    values : (X, Y, Z) array
        The input.
    step : (4, 4) array
        Maps an index of the result to an index in `values`.
    shape : (X', Y', Z')
        Shape of the result.

    Returns
    -------
    (X', Y', Z') array
        Same type as `values`. Indices beyond the ends are clipped to them. Exactly between two
        voxels the even one is taken, as far as rounding leaves it there.
    """
    size, out, ties = values.shape, values, list[NDArray[np.int64]]()
    # What other axes contribute at most: rounding if the grids are turned, more if one is sheared
    cross_terms = np.abs(step[:3, :3] - np.diag(np.diag(step)[:3])) @ shape
    for axis in range(3):
        at = sampling_coordinates(size, step, shape, axis)
        out = out.take(nearest_index(torch.from_numpy(at), size[axis]).numpy(), axis)
        near = np.abs(at - np.floor(at) - 0.5) < cross_terms[axis] + SAME_POSITION
        ties.append(np.flatnonzero(near & (cross_terms[axis] > 0)))
    # Only at ties are other axes considered: all coordinates of a grid take fifty times as long
    planes = [np.arange(n) for n in shape]
    for axis in range(3):
        rest, planes[axis] = np.setdiff1d(planes[axis], ties[axis]), ties[axis]
        slab = max(1, SLAB_BYTES // (64 * max(1, len(planes[1]) * len(planes[2]))))
        for start in range(0, len(planes[0]), slab):
            index = [planes[0][start : start + slab], *planes[1:]]
            out[np.ix_(*index)] = _nearest_voxels(values, step, index, shape)
        planes[axis] = rest  # voxels of two such planes are done
    return out


def _nearest_voxels(
    values: NDArray[Any],
    step: NDArray[np.floating[Any]],
    index: Sequence[NDArray[np.int64]],
    shape: Shape,
) -> NDArray[Any]:
    """Return the result of `nearest` at the product of some indices along its axes."""
    ends = [sampling_base(n)[torch.from_numpy(at)] for n, at in zip(shape, index, strict=True)]
    x, y, z = torch.meshgrid(*ends, indexing="ij")
    base = torch.stack((z, y, x, torch.ones_like(x)), dim=-1)
    grid = base @ sampling_theta(values.shape, step, shape)
    i, j, k = (
        nearest_index(grid_coordinates(grid[..., 2 - n], size), size).numpy()
        for n, size in enumerate(values.shape)
    )
    return np.asarray(values[i, j, k])


def decisive_values(card: ModelCard) -> Decisive | None:
    """Return the values at which the last bit decides, for the card's steps after resampling."""
    crop = card.grid.crop
    if card.after and isinstance(card.after[0], Truncate):
        return "integers"
    for n, step in enumerate(card.after):
        if isinstance(step, Normalize) and step.nonzero:
            return _becomes_zero(card.after[:n])
    if crop is not None and crop.grid == "network":
        steps = card.after if crop.steps is None else card.after[: crop.steps]
        if crop.threshold:  # of the resampled scan itself, or rounding in the steps decides
            return None if steps else crop.threshold
        return _becomes_zero(steps)
    return None


def _becomes_zero(steps: Sequence[IntensityStep]) -> float | None:
    """Return the intensity that steps map to 0; None if rounding in the steps decides that."""
    # Without steps the stored value 0 itself decides
    if not steps:
        return 0.0
    first = steps[0]
    if len(steps) == 1 and isinstance(first, ScaleRange) and not first.b_min:
        return first.a_min
    return None


def correct(
    values: torch.Tensor, scan: NDArray[Any], plan: NetworkPlan, decisive: Decisive
) -> None:
    """Compute the voxels that are close to a decisive value again, in place.

    Parameters
    ----------
    values : (X, Y, Z) float32 tensor
        The linearly resampled scan.
    scan : (I, J, K) array
        The scan, on the host.
    decisive : float or "integers"
        Values at which the last bit decides.
    """
    reached = None
    # Between voxels that are all 0 the result is exactly 0 already: most of the air is left out
    if decisive == 0.0 and not any(plan.lean):
        reached = torch.from_numpy(_reached(scan != 0, plan))
    oriented = orient(scan, plan)
    if plan.mode == "trilinear":
        compute = _pytorch(oriented.shape, plan)
    else:
        compute = _scipy if plan.alignment == "ends" else _monai(oriented.shape, plan)
    step = max(1, _VOXELS_AT_ONCE // values[0].numel())
    for start in range(0, len(values), step):
        slab = values[start : start + step]
        nearest = slab.round() if decisive == "integers" else decisive
        near = (slab - nearest).abs() < NEAR
        if reached is not None:
            near &= reached[start : start + step].to(values.device)
        x, y, z = near.nonzero(as_tuple=True)
        index = (x.cpu().numpy() + start, y.cpu().numpy(), z.cpu().numpy())
        exact = compute(oriented, index, plan.network.shape)
        if decisive == "integers":  # float32 would round up what is just below
            exact = np.trunc(exact)
        slab[x, y, z] = torch.from_numpy(exact.astype(np.float32)).to(values.device)


def orient(array: NDArray[Any], plan: NetworkPlan) -> NDArray[Any]:
    """Return a view of a scan's voxels with the axes of the network."""
    turned = array.transpose(plan.follows)
    return turned[tuple(slice(None, None, -1 if back else None) for back in plan.flipped)]


def _monai(size: Shape, plan: NetworkPlan) -> Callable[[NDArray[Any], Index, Shape], Float64]:
    """Return the interpolation of MONAI's AffineTransform: affine_grid, then grid_sample."""
    theta = sampling_theta(size, plan.step, plan.network.shape)
    bases = [sampling_base(n) for n in plan.network.shape]

    def interpolate(oriented: NDArray[Any], index: Index, _: Shape) -> Float64:
        x, y, z = (base[torch.from_numpy(at)] for base, at in zip(bases, index, strict=True))
        grid = torch.stack((z, y, x, torch.ones_like(x)), dim=-1) @ theta
        at = [
            np.clip(grid_coordinates(grid[:, 2 - n], size[n]).numpy(), 0.0, size[n] - 1)
            for n in range(3)
        ]
        low = [np.floor(a) for a in at]
        taps = [((b + 1 - a), (a - b)) for a, b in zip(at, low, strict=True)]
        total = np.zeros(len(at[0]))
        for i, j, k in np.ndindex(2, 2, 2):
            weight = taps[2][k] * taps[1][j] * taps[0][i]
            total += _voxels(oriented, low, (i, j, k)) * weight
        return total

    return interpolate


def _pytorch(size: Shape, plan: NetworkPlan) -> Callable[[NDArray[Any], Index, Shape], Float64]:
    """Return the interpolation of PyTorch's `interpolate`, with its weights of each axis."""
    ends = plan.alignment == "ends"
    weights = [
        functional.interpolate(torch.eye(n)[None], size=m, mode="linear", align_corners=ends)[0]
        for n, m in zip(size, plan.network.shape, strict=True)
    ]
    below = [(each != 0).int().argmax(dim=0).numpy() for each in weights]

    def interpolate(oriented: NDArray[Any], index: Index, _: Shape) -> Float64:
        low = [first[at] for first, at in zip(below, index, strict=True)]
        total = np.zeros(len(index[0]))
        for corner in np.ndindex(2, 2, 2):
            weight = np.ones(len(index[0]))
            for each, first, step, at in zip(weights, low, corner, index, strict=True):
                inside = first + step < len(each)
                weight *= np.where(inside, each[np.minimum(first + step, len(each) - 1), at], 0.0)
            total += _voxels(oriented, low, corner) * weight
        return total

    return interpolate


def _scipy(oriented: NDArray[Any], index: Index, shape: Shape) -> Float64:
    """Interpolate as scipy.ndimage.zoom of order 1 does, with mode "nearest"."""
    at = [
        a * ((n - 1) / (m - 1) if m > 1 else 1.0)
        for a, n, m in zip(index, oriented.shape, shape, strict=True)
    ]
    low = [np.floor(a) for a in at]
    taps = [(1.0 - (a - b), a - b) for a, b in zip(at, low, strict=True)]
    total = np.zeros(len(at[0]))
    for i, j, k in np.ndindex(2, 2, 2):
        total += _voxels(oriented, low, (i, j, k)) * taps[0][i] * taps[1][j] * taps[2][k]
    return total


def _voxels(array: NDArray[Any], low: Sequence[Float64], corner: Sequence[int]) -> Float64:
    """Return the voxels at a corner of the cells whose first voxels are `low`, as float64."""
    i, j, k = (
        np.minimum(at.astype(np.int64) + step, n - 1)
        for at, step, n in zip(low, corner, array.shape, strict=True)
    )
    return np.asarray(array[i, j, k], dtype=np.float64)


def _reached(mask: NDArray[np.bool_], plan: NetworkPlan) -> NDArray[np.bool_]:
    """Return which network voxels (X, Y, Z) read a voxel of a mask (I, J, K)."""
    same = SAME_POSITION_FLOAT32 if plan.mode == "trilinear" else SAME_POSITION
    for axis in range(3):
        last = mask.shape[axis] - 1
        at = np.clip(plan.to_source(axis), 0, last)
        low = np.floor(at - same).astype(np.int64)
        high = np.ceil(at + same).astype(np.int64)
        steps = (np.clip(index, 0, last) for index in (low, low + 1, high))
        first, second, third = (mask.take(index, axis) for index in steps)
        mask = first | second | third
    return mask.transpose(plan.follows)
