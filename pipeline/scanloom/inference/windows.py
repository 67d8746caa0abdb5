"""Positions, weights and padding of sliding windows, and the order in which windows are run.

With float32 sums, the order does not matter: the outermost loop is along any axis, and planes that
no later window overlaps are final. Sums in half precision depend on it. They are added in the order
of nnU-Net, whose outermost loop is along the first axis; along another axis, all planes are final
only after the last window.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from scanloom.cards.card import Window
from scanloom.core import Reason, ScanError
from scanloom.inference.geometry import Shape

_LARGEST_WEIGHT = 10.0
"""Maximum of nnU-Net's weights: the smallest are not rounded to 0 in half precision."""
_STEP_DIGITS = 12
"""Decimals of a step, in window sizes: 1 - 0.7 is 0.3."""

MAX_WINDOWS = 1_000_000
"""Most windows of a scan, hours on a GPU: 512 x 512 x 300 voxels have 100,000 windows of 96 voxels
with the largest overlap."""


@dataclass(frozen=True)
class WindowRow:
    """Windows that are run before the planes in front of `following` are final.

    `corners` are the first voxels of the windows in the padded image.
    """

    corners: list[Shape]
    following: int


@dataclass(frozen=True)
class WindowLayout:
    """Windows of an image.

    Parameters
    ----------
    size : (x, y, z)
        Size of a window.
    padded : (X, Y, Z)
        Shape of the padded image.
    starts : three tuples of int
        First voxels of the windows along each axis.
    axis : 0, 1 or 2
        Axis across the planes that are yielded.
    together : int
        Starts along `axis` that are run in one row; 0 for all.
    """

    size: Shape
    padded: Shape
    starts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    axis: int
    together: int = 1

    @property
    def count(self) -> int:
        """Number of windows."""
        return math.prod(map(len, self.starts))

    @property
    def planes(self) -> int:
        """Number of planes that the windows of a row span."""
        if self.together == 0:
            return self.padded[self.axis]
        return self.size[self.axis] + self.together - 1

    def rows(self) -> Iterator[WindowRow]:
        """Yield the windows, row by row."""
        length = self.padded[self.axis]
        if self.together == 0:
            yield WindowRow([(x, y, z) for x, y, z in itertools.product(*self.starts)], length)
            return
        along = self.starts[self.axis]
        inner = [starts for x, starts in enumerate(self.starts) if x != self.axis]
        for n in range(0, len(along), self.together):
            row = along[n : n + self.together]
            following = along[n + self.together] if n + self.together < len(along) else length
            corners = (_corner(self.axis, *c) for c in itertools.product(row, *inner))
            yield WindowRow(list(corners), following)


def window_layout(window: Window, shape: Shape, axis: int, batch: int = 1) -> WindowLayout:
    """Return the windows of an image.

    Parameters
    ----------
    window : Window
        Size, overlap and starts, from the model card.
    shape : (X, Y, Z)
        Shape of the image, without padding.
    axis : 0, 1 or 2
        Axis across the planes that are yielded.
    batch : int
        Number of windows in a batch: planes that are run one by one are grouped to fill it.

    Raises
    ------
    ScanError
        TOO_LARGE if there are more than `MAX_WINDOWS` windows.
    """
    size = window_size(window, shape)
    x, y, z = (max(n, roi) for n, roi in zip(shape, size, strict=True))
    starts = _starts(window, (x, y, z), size)
    if (count := math.prod(map(len, starts))) > MAX_WINDOWS:
        windows = f"{count:,} windows of {' x '.join(map(str, size))} voxels"
        limit = f"{MAX_WINDOWS:,} are the limit; a smaller overlap needs fewer"
        raise ScanError(Reason.TOO_LARGE, f"{windows}; {limit}")
    earlier = (len(starts[n]) for n in range(axis) if n != window.plane)
    together = 1
    if window.plane == axis:  # windows of different planes do not overlap
        per_plane = math.prod(len(starts[n]) for n in range(3) if n != axis)
        together = min(math.ceil(batch / per_plane), len(starts[axis]))
    elif window.sums == "float16" and any(count > 1 for count in earlier):
        together = 0
    return WindowLayout(size, (x, y, z), starts, axis, together)


def window_size(window: Window, shape: Shape) -> Shape:
    """Return the window's size in voxels: the whole grid if the card gives no size."""
    return shape if window.size is None else window.size


def window_starts(length: int, size: int, overlap: float) -> list[int]:
    """Return the starts of windows along an axis, as MONAI's dense_patch_slices.

    The last window ends at the end of the axis. `length` is at least `size`.
    """
    step = size if size == length else max(int(size * (1 - overlap)), 1)
    starts = list(range(0, length - size, step))
    return [*starts, length - size]


def even_starts(length: int, size: int, overlap: float) -> list[int]:
    """Return the starts of windows along an axis, as nnU-Net's compute_steps_for_sliding_window.

    The steps between them are equal before rounding, and at most `size` * (1 - `overlap`).
    """
    largest_step = size * round(1 - overlap, _STEP_DIGITS)
    intervals = math.ceil((length - size) / largest_step)
    if intervals == 0:
        return [0]
    step = (length - size) / intervals
    return [round(step * n) for n in range(intervals + 1)]


def _starts(
    window: Window, padded: Shape, size: Shape
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the starts of windows along each axis: every plane for two-dimensional networks."""
    function = window_starts if window.starts == "fixed" else even_starts
    x, y, z = (
        tuple(range(length)) if axis == window.plane else tuple(function(length, n, window.overlap))
        for axis, (length, n) in enumerate(zip(padded, size, strict=True))
    )
    return x, y, z


def pad_to_window(image: torch.Tensor, size: Shape, window: Window) -> tuple[torch.Tensor, Shape]:
    """Pad an image that is smaller than the window; return it and the padding before each axis.

    An odd voxel is added at the end. "reflect" requires a grid of more than half the window
    (torch).

    Raises
    ------
    ScanError
        IMPLAUSIBLE if the grid is too small for reflection.
    """
    missing = [max(roi - n, 0) for roi, n in zip(size, image.shape[1:], strict=True)]
    low = (missing[0] // 2, missing[1] // 2, missing[2] // 2)
    if not any(missing):
        return image, (0, 0, 0)
    ends = [n for m in reversed(missing) for n in (m // 2, m - m // 2)]
    if window.padding == "constant":
        return functional.pad(image, ends, value=window.padding_value), low
    if window.padding == "reflect" and any(
        m - m // 2 >= n for m, n in zip(missing, image.shape[1:], strict=True)
    ):
        raise ScanError(Reason.IMPLAUSIBLE, "the scan is too small for the window's padding")
    return functional.pad(image[None], ends, mode=window.padding)[0], low


def window_weights(size: Shape, window: Window, device: torch.device) -> torch.Tensor:
    """Return the weights (x, y, z) of a window's voxels, in the type of its sums.

    "constant" and "gaussian" are MONAI's compute_importance_map, "gaussian_filter" is nnU-Net's
    compute_gaussian.
    """
    dtype = torch.float16 if window.sums == "float16" else torch.float32
    if window.blending == "constant":
        return torch.ones(size, dtype=dtype, device=device)
    if window.blending == "gaussian_filter":
        return _filtered_point(size, window).to(device, dtype)
    weight = torch.ones((), device=device)
    for n in size:
        x = torch.arange(-(n - 1) / 2.0, (n - 1) / 2.0 + 1, dtype=torch.float32, device=device)
        weight = weight[..., None] * torch.exp(x**2 / (-2 * (n * window.sigma_scale) ** 2))
    return weight.clamp_(min=max(float(weight.min()), 1e-3)).to(dtype)


def _filtered_point(size: Shape, window: Window) -> torch.Tensor:
    """Return nnU-Net's weights, float16 on the CPU.

    The filter is separable: the filtered point is the product of filtered points on a line.
    """
    lines = [
        np.ones(1) if axis == window.plane else _filtered_line(n, n * window.sigma_scale)
        for axis, n in enumerate(size)
    ]
    product: NDArray[np.float64] = functools.reduce(np.multiply.outer, lines)
    weights = torch.from_numpy(product / (product.max() / _LARGEST_WEIGHT)).to(torch.float16)
    zero = weights == 0
    return weights.masked_fill_(zero, float(weights[~zero].min()))


def _filtered_line(length: int, sigma: float) -> NDArray[np.float64]:
    """Return SciPy's gaussian filter of a point in the middle of a line."""
    from scipy.ndimage import gaussian_filter1d

    line = np.zeros(length)
    line[length // 2] = 1.0
    return np.asarray(gaussian_filter1d(line, sigma, mode="constant"))


def window_slices(corner: Shape, size: Shape) -> tuple[slice, ...]:
    """Return the slices of a window."""
    return tuple(slice(n, n + roi) for n, roi in zip(corner, size, strict=True))


def slices_with_margin(corner: Shape, size: Shape, low: Shape) -> tuple[slice, ...]:
    """Return the slices, in the unpadded image, of a window with a margin of one voxel.

    `low` are the voxels of padding before each axis.
    """
    ends = ((p - n - 1, p - n + roi + 1) for p, roi, n in zip(corner, size, low, strict=True))
    return tuple(slice(max(first, 0), max(last, 0)) for first, last in ends)


def _corner(axis: int, start: int, *inner: int) -> Shape:
    """Return a window's first voxel, given its index along `axis` and along the other axes."""
    corner = [*inner]
    corner.insert(axis, start)
    return corner[0], corner[1], corner[2]
