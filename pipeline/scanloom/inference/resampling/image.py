"""The image that a network sees of a scan: resampled, cropped, intensities changed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from scanloom.cards.card import Crop, FillHoles, Fit, ModelCard, NetworkGrid, Normalize
from scanloom.core import Reason, ScanError, Volume
from scanloom.core.grid import Box, Shape
from scanloom.inference.device import all_finite, float64_device
from scanloom.inference.geometry import Float64, NetworkPlan
from scanloom.inference.intensity import apply_steps
from scanloom.inference.resampling.resample import (
    SAME_POSITION,
    ResampleOptions,
    decisive_values,
    orient,
    planes_across,
    to_network,
)
from scanloom.inference.sliding_window import ScorePlanes
from scanloom.inference.transfers import StagedArray
from scanloom.ops.components import fill_holes
from scanloom.ops.label_maps import crop_volume

BoxSlices = tuple[slice, slice, slice]
_EMPTY_PLANES = 16
"""Planes of a cropped grid that are yielded at once."""

Channels = list[torch.Tensor]
_Key = tuple[Hashable, str]
OUTSIDE = -1
"""Label of background outside the scan's foreground: for nnU-Net, a class of its own."""
_SLAB = 4_000_000
"""Voxels that are resampled at once."""
IntArray = NDArray[np.int32]


@dataclass(frozen=True)
class GridBox:
    """Box of a network grid that an image covers.

    Parameters
    ----------
    first : (x, y, z)
        Index on the grid of the first voxel; negative if the box extends beyond the grid.
    shape : (X, Y, Z)
        Shape of the box.
    inside : (x, y, z) of slices
        Part of the grid whose voxels are in the box; others in it were added.
    """

    first: Shape
    shape: Shape
    inside: BoxSlices

    @classmethod
    def whole(cls, shape: Shape) -> GridBox:
        """Return the box that is the grid."""
        x, y, z = (slice(0, n) for n in shape)
        return cls((0, 0, 0), shape, (x, y, z))

    @property
    def own_slices(self) -> BoxSlices:
        """The part `inside`, in the indices of the box."""
        x, y, z = (
            slice(ends.start - first, ends.stop - first)
            for ends, first in zip(self.inside, self.first, strict=True)
        )
        return x, y, z

    def cut(self, bounds: Sequence[tuple[int, int]]) -> GridBox:
        """Return a box by where it starts and stops along each axis of this one."""
        first, shape, inside = [], [], []
        for axis, (start, stop) in enumerate(bounds):
            first.append(self.first[axis] + start)
            shape.append(stop - start)
            ends = self.inside[axis]
            low = max(ends.start, first[axis])
            inside.append(slice(low, max(low, min(ends.stop, first[axis] + shape[axis]))))
        (i, j, k), (x, y, z), (a, b, c) = first, shape, inside
        return GridBox((i, j, k), (x, y, z), (a, b, c))


def source_box(volumes: Sequence[Volume], crop: Crop | None) -> Box | None:
    """Return the box on the scan's grid that the network sees; None for the whole scan."""
    if crop is None or crop.grid != "source":
        return None
    arrays = [volume.array for volume in volumes]
    shape = arrays[0].shape

    def occupied(axis: int, box: list[slice]) -> NDArray[np.bool_]:
        """Return whether a box has foreground, of each index along an axis."""
        mask = foreground([array[tuple(box)] for array in arrays], crop.foreground)
        return np.asarray(mask.any(axis=tuple(n for n in range(3) if n != axis)))

    # The body in the middle planes need not be searched again, only the margins around it
    along = []
    for axis in range(3):
        box, across = [slice(None)] * 3, 1 if axis == 2 else 2
        box[across] = slice(shape[across] // 2, shape[across] // 2 + 1)
        along.append(occupied(axis, box))
    box = [slice(None)] * 3
    for axis in (2, 1, 0):  # planes that lie together in memory first: less is left for others
        body = np.flatnonzero(along[axis])
        first, last = (body[0], body[-1]) if len(body) else (shape[axis], shape[axis])
        for margin in (slice(0, first), slice(last + 1, shape[axis])):
            box[axis] = margin
            along[axis][margin] = occupied(axis, box)
        body = np.flatnonzero(along[axis])
        box[axis] = slice(body[0], body[-1] + 1) if len(body) else slice(None)
    bounds = foreground_bounds(along, crop)  # within the grid
    if bounds is None:
        return None
    i, j, k = bounds
    return Box((i[0], j[0], k[0]), (i[1] - 1, j[1] - 1, k[1] - 1))


def network_bounds(channels: Sequence[torch.Tensor], crop: Crop) -> list[tuple[int, int]] | None:
    """Return the bounds of a crop of the channels (X, Y, Z); None for the whole grid."""
    # MONAI crops to the union of the channels' foregrounds
    mask = torch.zeros_like(channels[0], dtype=torch.bool)
    largest = max(float(channel.max()) for channel in channels)
    limit = crop.above * largest if crop.above else crop.threshold
    for channel in channels:
        mask |= channel != 0 if crop.foreground == "nonzero" else channel > limit
    axes = [mask.any(dim=second).any(dim=first) for first, second in ((1, 2), (0, 2), (0, 1))]
    return foreground_bounds([axis.cpu().numpy() for axis in axes], crop)


def cut(
    channel: torch.Tensor,
    bounds: Sequence[tuple[int, int]],
    padding: Literal["constant", "replicate", "reflect"] = "constant",
    value: float = 0.0,
) -> torch.Tensor:
    """Return a box of a channel (X, Y, Z), padded where it extends beyond the channel; a copy.

    Raises
    ------
    ScanError
        IMPLAUSIBLE if the channel is too small for "reflect".
    """
    ends = list(zip(bounds, channel.shape, strict=True))
    crop = channel[tuple(slice(max(0, start), min(n, stop)) for (start, stop), n in ends)]
    missing = [(max(0, -start), max(0, stop - n)) for (start, stop), n in ends]
    if not any(map(any, missing)):
        return crop.clone()
    if padding == "reflect" and any(
        max(pair) >= n for pair, n in zip(missing, crop.shape, strict=True)
    ):
        raise ScanError(Reason.IMPLAUSIBLE, "the scan is too small for the model's padding")
    widths = [width for pair in reversed(missing) for width in pair]
    if padding == "constant":
        return functional.pad(crop, widths, value=value)
    return functional.pad(crop[None, None], widths, mode=padding)[0, 0]


def largest_box(plan: NetworkPlan, grid: NetworkGrid) -> Shape:
    """Return the shape of the largest box that a scan can have on its network grid.

    Voxels outside the scan are empty with alignment "centre", so the box is not around them.
    """
    crop, size = grid.crop, list(plan.network.shape)
    if crop is not None and crop.grid == "network":
        for axis in range(3) if plan.alignment == "centre" else ():
            # Empty margins of the network grid have no foreground
            at, last = plan.to_source(axis), plan.source.shape[axis] - 1
            inside = (at >= -SAME_POSITION) & (at <= last + SAME_POSITION)
            x = plan.network_axis(axis)
            size[x] = min(size[x], int(inside.sum()) + 2 * crop.margin) or size[x]
        added = 2 * crop.margin if crop.beyond else 0
        size = [-(-(n + added) // k) * k for n, k in zip(size, crop.multiple, strict=True)]
    for fit in grid.fits:
        ends = [fit.bounds(axis, n) for axis, n in enumerate(size)]
        size = [stop - start for start, stop in ends]
    return size[0], size[1], size[2]


def foreground(
    arrays: Sequence[NDArray[Any]], kind: Literal["nonzero", "positive"]
) -> NDArray[np.bool_]:
    """Return the voxels that are foreground in any of several arrays of the same shape."""
    mask = np.zeros(arrays[0].shape, np.bool_, order="F")
    for array in arrays:
        mask |= array != 0 if kind == "nonzero" else array > 0
    return mask


def foreground_bounds(
    along: Sequence[NDArray[np.bool_]], crop: Crop
) -> list[tuple[int, int]] | None:
    """Return where the smallest box around the foreground starts and stops, with its margin.

    `along` says of each index along an axis whether any voxel there is foreground. None if the box
    is the whole grid, or if no voxel differs from 0 (nnU-Net).

    Raises
    ------
    ScanError
        IMPLAUSIBLE if no voxel is positive, and the model sees positive ones only (MONAI).
    """
    ends = []
    for occupied, multiple in zip(along, crop.multiple, strict=True):
        index = np.flatnonzero(occupied)
        if len(index) == 0 and crop.foreground == "positive":
            detail = "no voxel is as bright as the foreground to which the model crops a scan"
            raise ScanError(Reason.IMPLAUSIBLE, detail)
        if len(index) == 0:
            return None
        low, high = int(index[0]) - crop.margin, int(index[-1]) + 1 + crop.margin
        if not crop.beyond:
            low, high = max(low, 0), min(high, len(occupied))
        low -= -(high - low) % multiple // 2  # MONAI: an odd voxel is added at the end
        high += -(high - low) % multiple
        ends.append((low, high))
    if all(end == (0, len(occupied)) for end, occupied in zip(ends, along, strict=True)):
        return None
    return ends


def filled_foreground(
    volumes: Sequence[Volume], kind: Literal["nonzero", "positive"]
) -> NDArray[np.bool_]:
    """Return the foreground of a scan with its holes, as by SciPy's `binary_fill_holes`."""
    mask = foreground([volume.array for volume in volumes], kind).view(np.uint8)
    return np.asarray(fill_holes(mask, FillHoles(connectivity=6)).view(np.bool_))


def uncrop(
    planes: Iterable[ScorePlanes], box: GridBox, axis: int, shape: tuple[int, int, int]
) -> Iterator[ScorePlanes]:
    """Yield the planes of a whole network grid from those of a box: other scores are 0.

    Scores of voxels that were added to the grid, or to a part of it, are dropped.

    Parameters
    ----------
    planes : iterable of ScorePlanes
        Planes of the box across `axis`, all of them or some.
    shape : (X, Y, Z)
        Shape of the whole grid.
    """
    inner = [x for x in range(3) if x != axis]
    sizes = [shape[x] for x in inner]
    target = (box.inside[inner[0]], box.inside[inner[1]])
    b, c = (box.own_slices[x] for x in inner)
    low, high = box.inside[axis].start, box.inside[axis].stop

    def pad(block_planes: torch.Tensor) -> torch.Tensor:
        whole = block_planes.new_zeros((*block_planes.shape[:2], *sizes))
        whole[:, :, *target] = block_planes[:, :, b, c]
        return whole

    for block in planes:
        first = block.first + box.first[axis]
        if block.first == 0:
            yield from _empty_planes(block.scores, sizes, 0, low)
        known = block.known
        if known is None:
            known = torch.ones_like(block.scores[:, :1], dtype=torch.bool)
        stop = min(len(block.scores), high - first)
        for start in range(max(0, low - first), stop, _EMPTY_PLANES):
            chunk = slice(start, min(start + _EMPTY_PLANES, stop))
            members = tuple(pad(each[chunk]) for each in block.members)
            yield ScorePlanes(first + start, pad(block.scores[chunk]), members, pad(known[chunk]))
        if block.first + len(block.scores) == box.shape[axis]:
            yield from _empty_planes(block.scores, sizes, high, shape[axis])


def _empty_planes(
    like: torch.Tensor, sizes: Sequence[int], first: int, stop: int
) -> Iterator[ScorePlanes]:
    """Yield planes without scores from `first` to before `stop`, with the channels of others."""
    if first == stop:
        return
    empty = like.new_zeros((_EMPTY_PLANES, like.shape[1], *sizes))
    unknown = torch.zeros_like(empty[:, :1], dtype=torch.bool)
    for start in range(first, stop, _EMPTY_PLANES):
        count = min(_EMPTY_PLANES, stop - start)
        yield ScorePlanes(start, empty[:count], known=unknown[:count])


@dataclass(frozen=True, eq=False)
class ModelInput:
    """The input of a model.

    Parameters
    ----------
    volumes : tuple of Volume
        The input channels, on the same grid.
    stage_labels : (I, J, K) integer array or None
        Label map of the previous stage on that grid, if its structures are further channels.
    staged : tuple of StagedArray
        The planes of each channel, for a CUDA device; empty if they are not staged yet.
    """

    volumes: tuple[Volume, ...]
    stage_labels: NDArray[Any] | None = None
    staged: tuple[StagedArray, ...] = ()

    def crop(self, box: Box) -> ModelInput:
        """Return the part of the scan in a box."""
        labels = None if self.stage_labels is None else self.stage_labels[box.slices]
        return ModelInput(tuple(crop_volume(volume, box) for volume in self.volumes), labels)

    def stage(self, lead: int) -> ModelInput:
        """Return the scan with its planes across an axis staged from now on, for a CUDA device."""
        planes = (planes_across(volume.array, lead) for volume in self.volumes)
        return replace(self, staged=tuple(map(StagedArray, planes)))


@dataclass(frozen=True, eq=False)
class NetworkImage:
    """All input channels on the network grid, or on a box of it.

    Parameters
    ----------
    image : (channels, X, Y, Z) float32 tensor
        The image.
    seen : (X, Y, Z) bool tensor or None
        Voxels that are not air; None if windows of air are not skipped.
    box : GridBox or None
        Box of the network grid that the image covers; None for the grid itself.
    """

    image: torch.Tensor
    seen: torch.Tensor | None
    box: GridBox | None


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
    where : (device, slab)
        Device of the image, and bytes of source slices that are resampled together.
    skip_air : bool
        Whether `NetworkImage.seen` is needed.
    shared : SharedScan, optional
        Keeps the resampled channels for further models.

    Raises
    ------
    ScanError
        NOT_FINITE if intensities are not finite, or overflow.
    """
    device = float64_device(where[0])

    def resample() -> list[torch.Tensor]:
        options = ResampleOptions(decisive_values(card), _filled(scan, card))
        steps = [(*channel.steps, *card.before) for channel in card.channels]
        staged = scan.staged or (None,) * len(scan.volumes)
        return [
            to_network(volume.array, plan, device, own, where[1], replace(options, staged=planes))
            for volume, own, planes in zip(scan.volumes, steps, staged, strict=True)
        ]

    channels = shared.channels(card, str(where[0]), resample) if shared else resample()
    seen = channels[0] >= card.air_below if skip_air and card.air_below is not None else None
    box, done = GridBox.whole(plan.network.shape), 0
    # The card says how many steps come before each change of the box, whose voxels they measure
    bounds: list[tuple[int, int]] | None
    changes: list[Crop | Fit] = [*card.grid.fits]
    if card.grid.crop is not None and card.grid.crop.grid == "network":
        changes.insert(0, card.grid.crop)
    for each in changes:
        until = len(card.after) if each.steps is None else each.steps
        channels = [apply_steps(channel, card.after[done:until]) for channel in channels]
        done = until
        if isinstance(each, Fit):
            bounds = [each.bounds(axis, n) for axis, n in enumerate(box.shape)]
            padding, value = each.padding, each.padding_value
        else:
            bounds, padding, value = network_bounds(channels, each), "constant", 0.0
        if bounds is None or bounds == [(0, n) for n in box.shape]:
            continue
        channels = [cut(channel, bounds, padding, value) for channel in channels]
        seen = seen if seen is None else cut(seen, bounds)
        box = box.cut(bounds)
    channels = [apply_steps(channel, card.after[done:]) for channel in channels]
    if not all(map(all_finite, channels)):
        detail = "the scan's intensities are not finite, or overflow in the card's intensity steps"
        raise ScanError(Reason.NOT_FINITE, detail)
    image = channels[0][None] if len(channels) == 1 else torch.stack(channels)
    if scan.stage_labels is not None and card.stage is not None:
        inside = filled_foreground(scan.volumes, "nonzero")
        used = sorted(
            s.number
            for s in card.stage.card.structures
            if not card.stage.labels or s.label in card.stage.labels
        )
        previous = stage_channels(scan.stage_labels, inside, plan, tuple(used), device)
        image = torch.cat((image, previous[:, *box.inside]))
    seen = seen if seen is None else seen.to(where[0])
    is_whole = box == GridBox.whole(plan.network.shape)
    return NetworkImage(image.to(where[0]), seen, None if is_whole else box)


def _filled(scan: ModelInput, card: ModelCard) -> NDArray[np.bool_] | None:
    """Return the voxels that `Normalize.filled` measures and changes; None if no step needs them.

    The scan is that in the card's box: its foreground is not 0. As in nnU-Net, structures of the
    previous stage count as foreground wherever they lie.
    """
    steps = [*card.before, *(step for channel in card.channels for step in channel.steps)]
    if not any(isinstance(step, Normalize) and step.filled for step in steps):
        return None
    crop = card.grid.crop
    inside = filled_foreground(scan.volumes, "nonzero" if crop is None else crop.foreground)
    return inside if scan.stage_labels is None else inside | (scan.stage_labels != 0)


def sharing_key(card: ModelCard) -> Hashable:
    """Return a key that is equal for models that need the same resampled scan.

    Equal are the network grid and the intensity steps before resampling; later steps are those of
    each model. None for a model that runs several others: it shares nothing.
    """
    if card.parts or card.stage is not None:
        return None
    steps = tuple((*channel.steps, *card.before) for channel in card.channels)
    return card.grid, steps, decisive_values(card)


class SharedScan:
    """Input channels of one scan on the network grids of the models that are still to run.

    Each is kept on its device from its first user to its last, which takes it over; others get a
    copy, since intensity steps change it.

    Parameters
    ----------
    users : iterable of (ModelCard, device name)
        The models that will see the scan, each once.
    """

    def __init__(self, users: Iterable[tuple[ModelCard, str]]) -> None:
        keys = ((sharing_key(card), device) for card, device in users)
        self._remaining = Counter[_Key](key for key in keys if key[0] is not None)
        self._kept: dict[_Key, Channels] = {}

    def channels(self, card: ModelCard, device: str, make: Callable[[], Channels]) -> Channels:
        """Return the resampled channels (X, Y, Z) for a model, which may change them.

        `make` resamples them; it is called if no earlier model left them.
        """
        key = (sharing_key(card), device)
        # The last user takes the channels over: intensity steps may work in place
        if not self.is_shared(card, device):
            return self._kept.pop(key, None) or make()
        if key not in self._kept:
            self._kept[key] = make()
        return [channel.clone() for channel in self._kept[key]]

    def holds(self, card: ModelCard, device: str) -> bool:
        """Return whether an earlier model left the channels."""
        return (sharing_key(card), device) in self._kept

    def is_shared(self, card: ModelCard, device: str) -> bool:
        """Return whether a later model needs the same channels."""
        return self._remaining[sharing_key(card), device] > 1

    def finish(self, card: ModelCard, device: str) -> None:
        """Count a model as done, whether or not it used the channels."""
        key = (sharing_key(card), device)
        self._remaining[key] -= 1
        if self._remaining[key] < 1:
            self._kept.pop(key, None)

    def release(self) -> None:
        """Free all channels, and keep none from now on: memory is scarce."""
        self._kept.clear()
        self._remaining.clear()


@dataclass(frozen=True, eq=False)
class _Taps:
    """Neighbours of the voxels of one axis: indices (2, N), weights (2, N), nearest (N)."""

    index: NDArray[np.intp]
    weight: Float64
    nearest: NDArray[np.intp]

    def between(self, first: int, last: int) -> _Taps:
        """Return the neighbours of voxels `first` to before `last`."""
        cut = slice(first, last)
        return _Taps(self.index[:, cut], self.weight[:, cut], self.nearest[cut])


def stage_channels(
    labels: NDArray[Any],
    foreground: NDArray[np.bool_],
    plan: NetworkPlan,
    numbers: tuple[int, ...],
    device: torch.device,
) -> torch.Tensor:
    """Return the structures of a previous stage as channels on the network grid.

    Parameters
    ----------
    labels : (I, J, K) integer array
        The label map of the previous stage, on the plan's source grid.
    foreground : (I, J, K) bool array
        The scan's foreground without holes. Background outside of it counts as another label.
    numbers : tuple of int
        Numbers of the structures, in the order of the channels.
    device : torch.device
        Device of the result.

    Returns
    -------
    (len(numbers), X, Y, Z) float32 tensor
        1 in the structure, else 0.
    """
    marked = np.where((labels == 0) & ~foreground, OUTSIDE, labels).astype(np.int32)
    resampled = resample_labels(orient(marked, plan), plan.network.shape, plan.nearest[0])
    channels = torch.empty((len(numbers), *resampled.shape), device=device)
    values = torch.from_numpy(resampled).to(device)
    for channel, number in zip(channels, numbers, strict=True):
        torch.eq(values, number, out=channel)
    return channels


def resample_labels(
    labels: IntArray, shape: tuple[int, int, int], coarse: int | None = None
) -> IntArray:
    """Return a label map on a grid with the same outer edges (nnU-Net, batchgenerators 0.25.5).

    The indicator of each label is interpolated linearly, and the largest decides. If several are
    equal, the nearest neighbour decides if it is one of them, else the smallest label. Ties are
    exact equality in float64, so coordinates and weights are computed in the order of operations of
    SciPy's `zoom`. Of the eight neighbours of a voxel nearly all have the same label: only the
    others are computed.

    Parameters
    ----------
    labels : (x, y, z) int32 array
        The label map.
    shape : (X, Y, Z)
        Shape of the result.
    coarse : int or None
        Axis that is resampled by nearest neighbour.
    """
    if labels.shape == shape:
        return np.ascontiguousarray(labels)
    taps = [
        _taps(count, size, x == coarse)
        for x, (count, size) in enumerate(zip(shape, labels.shape, strict=True))
    ]
    out = np.empty(shape, np.int32)
    step = max(1, _SLAB // (shape[1] * shape[2]))
    for first in range(0, shape[0], step):
        last = min(first + step, shape[0])
        out[first:last] = _decide(labels, [taps[0].between(first, last), *taps[1:]])
    return out


def _taps(count: int, size: int, coarse: bool) -> _Taps:
    """Return the neighbours of `count` voxels on an axis of `size` voxels (SciPy `zoom`)."""
    at = np.clip((np.arange(count) + 0.5) * (size / count) - 0.5, 0.0, size - 1.0)
    nearest = np.minimum(np.floor(at + 0.5), size - 1).astype(np.intp)
    if coarse:
        ones = np.ones(count)
        return _Taps(np.stack((nearest, nearest)), np.stack((ones, 0 * ones)), nearest)
    low = np.floor(at)
    below = 1.0 - (at - low)
    index = np.stack((low, np.minimum(low + 1, size - 1))).astype(np.intp)
    return _Taps(index, np.stack((below, 1.0 - below)), nearest)


def _decide(labels: IntArray, taps: list[_Taps]) -> IntArray:
    """Return the labels of a block of voxels."""
    # Nearly all voxels have eight equal neighbours, whose label needs no arithmetic
    out = labels[np.ix_(*(tap.nearest for tap in taps))]
    corners = list(itertools.product((0, 1), repeat=3))
    mixed = np.zeros(out.shape, np.bool_)
    for corner in corners:
        index = [tap.index[side] for tap, side in zip(taps, corner, strict=True)]
        mixed |= labels[np.ix_(*index)] != out
    where = np.nonzero(mixed)
    if len(where[0]) == 0:
        return out
    candidates = np.empty((8, len(where[0])), np.int32)
    weight = np.empty((8, len(where[0])))
    for n, corner in enumerate(corners):  # in the order of memory, as SciPy adds them
        sides = list(zip(taps, corner, where, strict=True))
        candidates[n] = labels[tuple(tap.index[side][at] for tap, side, at in sides)]
        x, y, z = (tap.weight[side][at] for tap, side, at in sides)
        weight[n] = x * y * z
    out[where] = _largest(candidates, weight, out[where])
    return out


def _largest(candidates: IntArray, weight: Float64, nearest: IntArray) -> IntArray:
    """Return for each voxel the label with the largest sum of weights.

    `candidates` and `weight` (8, N) are labels and weights of a voxel's neighbours.
    """
    # Ties are exact equality of float64 sums, added in the order of SciPy
    best = np.full(len(nearest), -1.0)
    label = np.zeros(len(nearest), np.int32)
    decides = np.zeros(len(nearest), np.bool_)  # whether the nearest label has the largest sum
    for candidate in candidates:
        score = np.zeros(len(nearest))
        for label_there, share in zip(candidates, weight, strict=True):
            score += np.where(label_there == candidate, share, 0.0)
        larger = score > best
        level = (score == best) & (candidate < label)
        decides = np.where(larger, False, decides) | (
            (score >= best) & (candidate == nearest) & (score > 0)
        )
        label = np.where(larger | level, candidate, label)
        best = np.maximum(best, score)
    return np.where(decides, nearest, label)
