"""Boxes around the foreground: the part of a scan that the network gets, and their undoing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage

from scanloom.cards.card import Crop
from scanloom.core import Grid, Reason, ScanError, Volume
from scanloom.inference.geometry import NetworkPlan, Shape
from scanloom.inference.sliding_window import ScorePlanes

Box = tuple[slice, slice, slice]

SAME_POSITION = 1e-6
"""Largest rounding error of a coordinate, in voxels."""
_EMPTY_PLANES = 16
"""Planes of a cropped grid that are yielded at once."""


def source_box(volumes: Sequence[Volume], crop: Crop | None) -> Box | None:
    """Return the box on the scan's grid that the network sees; None for the whole scan."""
    if crop is None or crop.grid != "source":
        return None
    mask = foreground([volume.array for volume in volumes], crop.foreground)
    axes = [np.asarray(mask.any(axis=others)) for others in ((1, 2), (0, 2), (0, 1))]
    return bounding_box(axes, crop)


def network_box(channels: Sequence[torch.Tensor], crop: Crop) -> Box | None:
    """Return the box of the channels (X, Y, Z) on the network grid; None for the whole grid."""
    mask = torch.zeros_like(channels[0], dtype=torch.bool)
    largest = max(float(channel.max()) for channel in channels)
    for channel in channels:
        mask |= channel != 0 if crop.foreground == "nonzero" else channel > crop.above * largest
    axes = [mask.any(dim=second).any(dim=first) for first, second in ((1, 2), (0, 2), (0, 1))]
    return bounding_box([axis.cpu().numpy() for axis in axes], crop)


def largest_box(plan: NetworkPlan, crop: Crop | None) -> Shape:
    """Return the shape of the largest box that a scan can have on its network grid.

    Voxels outside the scan are empty with alignment "centre", so the box is not around them.
    """
    if crop is None or crop.grid != "network" or plan.alignment != "centre":
        return plan.network.shape
    size = list(plan.network.shape)
    for axis in range(3):
        at, last = plan.to_source(axis), plan.source.shape[axis] - 1
        inside = (at >= -SAME_POSITION) & (at <= last + SAME_POSITION)
        x = plan.network_axis(axis)
        size[x] = min(size[x], int(inside.sum()) + 2 * crop.margin) or size[x]
    return size[0], size[1], size[2]


def foreground(
    arrays: Sequence[NDArray[Any]], kind: Literal["nonzero", "positive"]
) -> NDArray[np.bool_]:
    """Return the voxels that are foreground in any of several arrays of the same shape."""
    mask = np.zeros(arrays[0].shape, np.bool_, order="F")
    for array in arrays:
        mask |= array != 0 if kind == "nonzero" else array > 0
    return mask


def bounding_box(along: Sequence[NDArray[np.bool_]], crop: Crop) -> Box | None:
    """Return the smallest box around the foreground, with the crop's margin.

    `along` says of each index along an axis whether any voxel there is foreground. None if the box
    is the whole grid, or if no voxel differs from 0 (nnU-Net).

    Raises
    ------
    ScanError
        IMPLAUSIBLE if no voxel is positive, and the model sees positive ones only (MONAI).
    """
    ends = []
    for found in along:
        index = np.flatnonzero(found)
        if len(index) == 0 and crop.foreground == "positive":
            detail = "no voxel is as bright as the foreground to which the model crops a scan"
            raise ScanError(Reason.IMPLAUSIBLE, detail)
        if len(index) == 0:
            return None
        low, high = int(index[0]) - crop.margin, int(index[-1]) + 1 + crop.margin
        ends.append((max(low, 0), min(high, len(found))))
    if all(end == (0, len(found)) for end, found in zip(ends, along, strict=True)):
        return None
    x, y, z = (slice(*end) for end in ends)
    return x, y, z


def fill_holes(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask with its holes: background that faces don't connect to the border."""
    regions, _ = ndimage.label(~mask)
    is_open = np.zeros(int(regions.max()) + 1, np.bool_)
    for axis in range(3):
        for end in (0, -1):
            is_open[np.take(regions, end, axis)] = True
    is_open[0] = False  # the mask itself
    return np.asarray(~is_open[regions])


def crop_volume(volume: Volume, box: Box | None) -> Volume:
    """Return the part of a scan in a box."""
    if box is None:
        return volume
    shift = np.eye(4)
    shift[:3, 3] = [part.start for part in box]
    i, j, k = (part.stop - part.start for part in box)
    grid = Grid((i, j, k), volume.grid.affine @ shift)
    return replace(volume, array=volume.array[box], grid=grid)


def paste(labels: NDArray[Any], box: Box | None, shape: tuple[int, int, int]) -> NDArray[Any]:
    """Return the label map of a whole scan, with 0 outside the box."""
    if box is None:
        return labels
    whole = np.zeros(shape, labels.dtype, order="F")
    whole[box] = labels
    return whole


def uncrop(
    planes: Iterator[ScorePlanes], box: Box, axis: int, shape: tuple[int, int, int]
) -> Iterator[ScorePlanes]:
    """Yield the planes of a whole network grid from those in a box: other scores are 0.

    Parameters
    ----------
    planes : iterator of ScorePlanes
        Planes of the box across `axis`.
    box : Box
        The box.
    axis : int
        Axis across the planes.
    shape : (X, Y, Z)
        Shape of the whole grid.
    """
    inner = [x for x in range(3) if x != axis]
    sizes = [shape[x] for x in inner]
    inside = (box[inner[0]], box[inner[1]])

    def pad(part: torch.Tensor) -> torch.Tensor:
        whole = part.new_zeros((*part.shape[:2], *sizes))
        whole[:, :, *inside] = part
        return whole

    empty = torch.zeros(0)
    for block in planes:
        first = block.first + box[axis].start
        if block.first == 0:
            empty = block.scores.new_zeros((_EMPTY_PLANES, block.scores.shape[1], *sizes))
            yield from _empty_planes(empty, 0, first)
        known = block.known
        if known is None:
            known = torch.ones_like(block.scores[:, :1], dtype=torch.bool)
        for start in range(0, len(block.scores), _EMPTY_PLANES):
            part = slice(start, start + _EMPTY_PLANES)
            members = tuple(pad(each[part]) for each in block.members)
            yield ScorePlanes(first + start, pad(block.scores[part]), members, pad(known[part]))
    yield from _empty_planes(empty, box[axis].stop, shape[axis])


def _empty_planes(empty: torch.Tensor, first: int, stop: int) -> Iterator[ScorePlanes]:
    """Yield planes without scores from `first` to before `stop`."""
    unknown = torch.zeros_like(empty[:, :1], dtype=torch.bool)
    for start in range(first, stop, _EMPTY_PLANES):
        count = min(_EMPTY_PLANES, stop - start)
        yield ScorePlanes(start, empty[:count], known=unknown[:count])
