"""Sliding-window inference that yields planes of scores as soon as they are final.

Positions, weights and padding of windows are those of MONAI's `sliding_window_inference`. Their
order differs: the outermost loop is along one axis. So only the planes that later windows overlap
(as many as a window is wide) are kept as sums; all others are divided, activated and yielded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from scanloom.cards.card import Window
from scanloom.core import Reason, ScanError
from scanloom.inference.device import is_out_of_memory
from scanloom.inference.finite import all_finite
from scanloom.inference.geometry import Shape
from scanloom.inference.network.final_layer import FinalLayer
from scanloom.inference.resample import SLAB_BYTES
from scanloom.inference.score_sums import ScoreAccumulator, window_slices

CACHED_BYTES = 1024**2
"""Bytes of scores that are activated at a time on a CPU, which its cache holds."""
HEAD_SLABS = 4
"""Slabs of scores that a final layer computes at once: labelling more planes at once is faster."""

Network = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class ScorePlanes:
    """Final scores of neighbouring planes of the network's grid.

    Parameters
    ----------
    first : int
        Index of the first plane.
    scores : (N, C, ., .) float tensor
        Planes, classes, and the two other axes of the network's grid in their order.
    """

    first: int
    scores: torch.Tensor


@dataclass
class BatchSize:
    """Number of windows in a batch, which is halved when memory runs out."""

    count: int

    def halve(self, error: BaseException) -> None:
        """Halve the batch.

        Raises
        ------
        ScanError
            OUT_OF_MEMORY if the batch was a single window.
        """
        if self.count == 1:
            detail = "a single window does not fit the device's memory"
            raise ScanError(Reason.OUT_OF_MEMORY, detail) from error
        self.count //= 2


@dataclass
class SkippedWindows:
    """Number of windows, and of those that contain only air and were skipped."""

    windows: int = 0
    skipped: int = 0


@dataclass(frozen=True, eq=False)
class SlidingWindow:
    """Sliding-window inference with one network.

    Parameters
    ----------
    network : callable
        Maps (N, channels, x, y, z) of `dtype` to (N, C, x, y, z).
    window : Window
        Size, overlap, blending and padding, from the model card.
    dtype : torch.dtype
        Type of the network's input; sums are float32.
    batch : BatchSize
        Number of windows in a batch.
    activation : "softmax", "sigmoid" or None
        Activation of the final scores.
    slab : int
        Bytes of scores that are yielded together, at least one plane.
    sums : torch.device or None
        Device on which scores are summed; None for the image's device.
    passed : SkippedWindows
        Counts windows and skipped windows.
    head : FinalLayer or None
        The network's final layer, if detached: then features are summed. On the image's device.
    """

    network: Network
    window: Window
    dtype: torch.dtype = torch.float32
    batch: BatchSize = field(default_factory=lambda: BatchSize(1))
    activation: str | None = None
    slab: int = SLAB_BYTES
    sums: torch.device | None = None
    passed: SkippedWindows = field(default_factory=lambda: SkippedWindows())
    head: FinalLayer | None = None

    def slide(
        self, image: torch.Tensor, axis: int, seen: torch.Tensor | None = None
    ) -> Iterator[ScorePlanes]:
        """Yield the scores of all planes across `axis`, ascending, each plane once.

        Scores are valid until the next planes are requested: their memory is reused.

        Parameters
        ----------
        image : (channels, X, Y, Z) float32 tensor
            Not changed, even by a network that works in place.
        axis : 0, 1 or 2
            Axis of the outermost loop.
        seen : (X, Y, Z) bool tensor, optional
            Mask of the body. Windows without a voxel of it, inside or next to them, are skipped.
            Voxels that no window covers are background: channel 0 has the largest score there.

        Raises
        ------
        ScanError
            OUT_OF_MEMORY if a single window does not fit; MODEL_NETWORK if the network's output has
            another shape.
        FloatingPointError
            If a score is NaN or infinite: comparisons would make it background.
        """
        shape = (image.shape[1], image.shape[2], image.shape[3])
        size = window_size(self.window, shape)
        padded, low = pad_to_window(image, size, self.window)
        starts = [
            window_starts(n, roi, self.window.overlap)
            for n, roi in zip(padded.shape[1:], size, strict=True)
        ]
        weight = window_weights(size, self.window, self.sums or image.device)
        inner = [x for x in range(3) if x != axis]
        crop = [slice(low[x], low[x] + shape[x]) for x in inner]
        sums = ScoreAccumulator(axis, size, padded, weight.device)
        for start, following in itertools.pairwise([*starts[axis], padded.shape[axis + 1]]):
            corners = [
                _corner(axis, start, inner_corner)
                for inner_corner in itertools.product(*(starts[x] for x in inner))
            ]
            corners = self._windows_to_run(corners, size, seen, low)
            for corner, scores in self._run(padded, corners, size):
                sums.add(scores, weight, corner)
                del scores  # the next windows need the memory
            yield from self._finish(sums, following, crop, (low[axis], shape[axis]), image.device)

    def _windows_to_run(
        self, corners: list[Shape], size: Shape, seen: torch.Tensor | None, low: Shape
    ) -> list[Shape]:
        """Return the windows that are not skipped.

        The first window of a scan is always run: it gives the number of classes.
        """
        kept = corners
        if seen is not None:
            first = self.passed.windows == 0
            kept = [
                corner
                for n, corner in enumerate(corners)
                if (first and n == 0) or bool(seen[_with_margin(corner, size, low)].any())
            ]
        self.passed.windows += len(corners)
        self.passed.skipped += len(corners) - len(kept)
        return kept

    def _run(
        self, padded: torch.Tensor, corners: Sequence[Shape], size: Shape
    ) -> Iterator[tuple[Shape, torch.Tensor]]:
        """Yield each window's corner and scores (C, x, y, z), in the order of `corners`."""
        done = 0
        while done < len(corners):
            batch = corners[done : done + self.batch.count]
            try:
                scores = self._forward(padded, batch, size)
            except (RuntimeError, MemoryError) as exc:
                if is_out_of_memory(exc):
                    self.batch.halve(exc)
                elif self.window.size is None or padded.is_cpu:  # else the device may be at fault
                    voxels = f"{size[0]} x {size[1]} x {size[2]} voxels"
                    detail = f"the network does not accept an input of {voxels}"
                    raise ScanError(Reason.MODEL_NETWORK, detail) from exc
                else:
                    raise
            else:
                yield from zip(batch, scores, strict=True)
                del scores
                done += len(batch)

    def _forward(self, padded: torch.Tensor, corners: Sequence[Shape], size: Shape) -> torch.Tensor:
        """Return the network's scores (N, C, x, y, z) of windows, which are copied first."""
        batch = torch.stack([padded[:, *window_slices(corner, size)] for corner in corners])
        scores = self.network(batch.to(self.dtype))
        shape = tuple(scores.shape) if isinstance(scores, torch.Tensor) else ()
        if len(shape) != 5 or shape[2:] != size or len(scores) != len(corners):
            detail = "the network's output does not have the shape of its input"
            raise ScanError(Reason.MODEL_NETWORK, detail)
        return scores

    def _finish(
        self,
        sums: ScoreAccumulator,
        following: int,
        crop: list[slice],
        along: tuple[int, int],
        device: torch.device,
    ) -> Iterator[ScorePlanes]:
        """Yield the planes before `following`, without padding, and drop them.

        `along` are the first plane of the image in the padded image, and its number of planes.
        """
        low, count = along
        first, last = max(sums.first, low), min(following, low + count)
        step = max(1, last - first)  # all planes at once: on the same device, nothing is copied
        if self.head is not None:
            plane = sums.plane_bytes * len(self.head.weight) // self.head.weight.shape[1]
            step = max(1, HEAD_SLABS * self.slab // plane)
        elif sums.device != device:
            step = max(1, self.slab // sums.plane_bytes)
        for start in range(first, last, step):
            means, empty = sums.means(start, min(start + step, last), crop, device)
            scores = means if self.head is None else self.head(means)
            if not all_finite(scores):
                raise FloatingPointError("scores are not finite")
            if empty is not None:  # background
                scores.masked_fill_(empty, 0.0)[:, :1].masked_fill_(empty, 1.0)
            yield ScorePlanes(start - low, self._activate(scores))
        sums.advance(following)

    def _activate(self, scores: torch.Tensor) -> torch.Tensor:
        """Return softmax or sigmoid over the classes (dim 1), in place."""
        if self.activation == "sigmoid":
            return scores.sigmoid_()
        if self.activation == "softmax":
            order = sorted((0, 2, 3), key=scores.stride, reverse=True)
            planes = scores.permute(order[0], 1, *order[1:])  # in memory order
            plane_bytes = max(1, planes[0].nbytes)
            step = max(1, CACHED_BYTES // plane_bytes) if scores.is_cpu else len(planes)
            for chunk in torch.split(planes.transpose(0, 1), step, dim=1):
                chunk.copy_(torch.softmax(chunk.contiguous(), dim=0))
        return scores


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
    """Return the weights (x, y, z) of a window's voxels, as MONAI's compute_importance_map."""
    if window.blending == "constant":
        return torch.ones(size, device=device)
    weight = torch.ones((), device=device)
    for n in size:
        x = torch.arange(-(n - 1) / 2.0, (n - 1) / 2.0 + 1, dtype=torch.float32, device=device)
        weight = weight[..., None] * torch.exp(x**2 / (-2 * (n * window.sigma_scale) ** 2))
    return weight.clamp_(min=max(float(weight.min()), 1e-3))


def _corner(axis: int, start: int, inner: tuple[int, ...]) -> Shape:
    """Return a window's first voxel, given its index along `axis` and along the other axes."""
    corner = [*inner]
    corner.insert(axis, start)
    return corner[0], corner[1], corner[2]


def _with_margin(corner: Shape, size: Shape, low: Shape) -> tuple[slice, ...]:
    """Return the slices, in the unpadded image, of a window with a margin of one voxel.

    `low` are the voxels of padding before each axis.
    """
    ends = ((p - n - 1, p - n + roi + 1) for p, roi, n in zip(corner, size, low, strict=True))
    return tuple(slice(max(first, 0), max(last, 0)) for first, last in ends)
