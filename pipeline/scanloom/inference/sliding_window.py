"""Sliding-window inference that yields planes of scores as soon as they are final.

The outermost loop over windows is along one axis. So only the planes that later windows overlap (as
many as a window is wide) are kept as sums; all others are divided, activated and yielded.

With float32 sums, the order of windows does not matter: the outermost loop is along any axis, and
planes that no later window overlaps are final. Sums in half precision depend on it. They are added
in the order of nnU-Net, whose outermost loop is along the first axis; along another axis, all
planes are final only after the last window.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter1d
from torch import nn
from torch.nn import functional

from scanloom.cards.card import Window
from scanloom.core import Reason, ScanError
from scanloom.core.grid import Shape
from scanloom.inference.device import all_finite, is_out_of_memory
from scanloom.inference.network.layers import FinalLayer
from scanloom.inference.network.loading import LoadedNetwork, TakingTurns, is_on, take_turns
from scanloom.inference.resampling.resample import SLAB_BYTES
from scanloom.inference.transfers import LateAnswer

_LARGEST_WEIGHT = 10.0
"""Maximum of nnU-Net's weights: the smallest are not rounded to 0 in half precision."""
_STEP_DIGITS = 12
"""Decimals of a step, in window sizes: 1 - 0.7 is 0.3."""

MAX_WINDOWS = 1_000_000
"""Most windows of a scan, hours on a GPU: 512 x 512 x 300 voxels have 100,000 windows of 96 voxels
with the largest overlap."""

CACHED_BYTES = 1024**2
"""Bytes of scores that are activated at a time on a CPU, which its cache holds."""
HEAD_SLABS = 4
"""Slabs of scores that a final layer computes at once: labelling more planes at once is faster."""
_NOT_FINITE = "scores are not finite"
_ROWS_AT_ONCE = 16
"""Rows of windows that are looked at together."""
_BATCH_WINDOWS = 2.75
"""Windows whose time the start of a batch takes. On an H200, 1, 2, 4 and 8 windows of 128^3 voxels
of nnU-Net's largest network take 21, 27, 38 and 61 ms: a few windows do not fill it."""
Network = Callable[[torch.Tensor], torch.Tensor]
_CHANNELS_AT_ONCE = 16
"""Channels of a window's scores that are weighted at a time."""
_CACHED_VALUES = 1 << 18
"""Values that a processor's cache holds in two types."""
Values = tuple[float, ...]
"""The value of each channel."""
_SAMPLED = 8
"""Every so many voxels along each axis are compared first: few other windows pass."""


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

    def batch(self, most: int) -> int:
        """Return the number of windows in a batch, at most `most`, that wastes least.

        Layout, engines and their measurement ask here, so that they agree.
        """
        along = self.together or len(self.starts[self.axis])
        return even_batch(self.count // len(self.starts[self.axis]) * along, most)

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
            corners = []
            for start, first, second in itertools.product(row, *inner):
                corner = [first, second]
                corner.insert(self.axis, start)
                corners.append((corner[0], corner[1], corner[2]))
            yield WindowRow(corners, following)


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
        Largest number of windows in a batch: planes that are run one by one are grouped to fill it.

    Raises
    ------
    ScanError
        TOO_LARGE if there are more than `MAX_WINDOWS` windows.
    """
    size, overlap = window_size(window, shape), window.overlap
    x, y, z = (max(n, roi) for n, roi in zip(shape, size, strict=True))
    starts_along = window_starts if window.starts == "fixed" else even_starts
    # A two-dimensional network runs on every plane
    a, b, c = (
        tuple(range(length)) if n == window.plane else tuple(starts_along(length, roi, overlap))
        for n, (length, roi) in enumerate(zip((x, y, z), size, strict=True))
    )
    starts = (a, b, c)
    if (count := math.prod(map(len, starts))) > MAX_WINDOWS:
        windows = f"{count:,} windows of {' x '.join(map(str, size))} voxels"
        limit = f"{MAX_WINDOWS:,} are the limit; a smaller overlap needs fewer"
        raise ScanError(Reason.TOO_LARGE, f"{windows}; {limit}")
    earlier = (len(starts[n]) for n in range(axis) if n != window.plane)
    together = 1
    if window.plane == axis:  # windows of different planes do not overlap
        per_plane = math.prod(len(starts[n]) for n in range(3) if n != axis)
        together = even_batch(len(starts[axis]), math.ceil(batch / per_plane))
    elif window.sums == "float16" and any(count > 1 for count in earlier):
        together = 0
    return WindowLayout(size, (x, y, z), starts, axis, together)


def even_batch(count: int, most: int) -> int:
    """Return the number of windows in a batch with which `count` windows take the least work.

    An engine runs batches of one size, and fills up the last: with 8 it would run 16 for 9 windows,
    with 3 it runs 9. Of 11 windows it runs 12, in two batches of 6.
    """
    sizes = range(1, min(count, most) + 1)
    return min(reversed(sizes), key=lambda n: math.ceil(count / n) * (n + _BATCH_WINDOWS))


def window_size(window: Window, shape: Shape) -> Shape:
    """Return the window's size in voxels: the whole grid if the card gives no size."""
    return shape if window.size is None else window.size


def window_starts(length: int, size: int, overlap: float) -> list[int]:
    """Return the starts of windows along an axis, as MONAI's dense_patch_slices.

    The last window ends at the end of the axis. `length` is at least `size`.
    """
    # MONAI: a window as long as the axis does not step
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
        # The filter is separable: the filtered point is the product of filtered points on a line
        lines = []
        for axis, n in enumerate(size):
            line = np.zeros(n)
            line[n // 2] = 1.0
            if axis != window.plane:
                line = gaussian_filter1d(line, n * window.sigma_scale, mode="constant")
            lines.append(line)
        product: NDArray[np.float64] = functools.reduce(np.multiply.outer, lines)
        weights = torch.from_numpy(product / (product.max() / _LARGEST_WEIGHT)).to(torch.float16)
        zero = weights == 0  # rounded away: such a voxel would divide by 0
        return weights.masked_fill_(zero, float(weights[~zero].min())).to(device, dtype)
    weight = torch.ones((), device=device)
    for n in size:
        x = torch.arange(-(n - 1) / 2.0, (n - 1) / 2.0 + 1, dtype=torch.float32, device=device)
        weight = weight[..., None] * torch.exp(x**2 / (-2 * (n * window.sigma_scale) ** 2))
    return weight.clamp_(min=max(float(weight.min()), 1e-3)).to(dtype)


_kept_weights = functools.lru_cache(maxsize=4)(window_weights)
"""Weights that are not changed, for the next scan: a workflow has few sizes of windows."""


def window_slices(corner: Shape, size: Shape) -> tuple[slice, ...]:
    """Return the slices of a window."""
    return tuple(slice(n, n + roi) for n, roi in zip(corner, size, strict=True))


def slices_with_margin(corner: Shape, size: Shape, low: Shape) -> tuple[slice, ...]:
    """Return the slices, in the unpadded image, of a window with a margin of one voxel.

    `low` are the voxels of padding before each axis.
    """
    ends = ((p - n - 1, p - n + roi + 1) for p, roi, n in zip(corner, size, low, strict=True))
    return tuple(slice(max(first, 0), max(last, 0)) for first, last in ends)


@dataclass(frozen=True, eq=False)
class ScorePlanes:
    """Final scores of neighbouring planes of the network's grid.

    Parameters
    ----------
    first : int
        Index of the first plane.
    scores : (N, C, ., .) float tensor
        Planes, classes, and the two other axes of the network's grid in their order.
    members : tuple of (N, C, ., .) float tensors
        Scores of each network, if `scores` are their mean and they were requested.
    known : (N, 1, ., .) bool tensor or None
        Voxels that a network saw; None for all.
    logits : tuple of (N, C, ., .) float tensors
        Scores of each member of an ensemble before they became probabilities, if they did.
    """

    first: int
    scores: torch.Tensor
    members: tuple[torch.Tensor, ...] = ()
    known: torch.Tensor | None = None
    logits: tuple[torch.Tensor, ...] = ()


@dataclass
class BatchSize:
    """Largest number of windows in a batch, which is halved when memory runs out."""

    count: int

    def halve(self, windows: int, error: BaseException) -> None:
        """Take half of a batch of `windows`, which did not fit.

        Raises
        ------
        ScanError
            OUT_OF_MEMORY if the batch was a single window.
        """
        if windows == 1:
            detail = "a single window does not fit the device's memory"
            raise ScanError(Reason.OUT_OF_MEMORY, detail) from error
        self.count = windows // 2


@dataclass
class SkippedWindows:
    """Number of windows, of skipped ones that contain only air, and of ones with shared scores."""

    windows: int = 0
    skipped: int = 0
    shared: int = 0

    def __str__(self) -> str:
        counts = ((self.skipped, "were air"), (self.shared, "shared scores"))
        return ", ".join(f"{n} of {self.windows} windows {verb}" for n, verb in counts if n)


@dataclass(frozen=True, eq=False)
class Fold:
    """A network of a model; the scores of a model with several are averaged.

    Parameters
    ----------
    network : callable
        Maps (N, channels, x, y, z) to (N, C, x, y, z).
    head : FinalLayer or None
        The network's final layer, if detached: then features are summed.
    """

    network: Network
    head: FinalLayer | None = None


def place_networks(loaded: LoadedNetwork, device: torch.device) -> list[Fold]:
    """Return the networks of a model for a device, which share its memory by turns if scarce."""
    networks = [loaded, *loaded.folds]
    turns = TakingTurns(device) if take_turns(networks, device) else None

    def on_device(network: nn.Module) -> nn.Module:
        # A look at one value costs less than to move all to where they are: the device waits
        return network if is_on(network, device) else network.to(device)

    return [
        Fold(
            turns.wrap(each.network) if turns else on_device(each.network),
            each.head and each.head.to(device),
        )
        for each in networks
    ]


@dataclass(frozen=True, eq=False)
class SlidingWindow:
    """Sliding-window inference with one network, or with several that were trained alike.

    Parameters
    ----------
    folds : sequence of Fold
        The networks, whose scores are averaged. Their final layers, if detached, are on the image's
        device.
    window : Window
        Size, overlap, blending, padding, flips and type of the sums, from the model card.
    dtype : torch.dtype
        Type of the network's input.
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
    on_windows : callable or None
        Called with the number of windows that are done, and of all, of all networks together.
    keep_members : bool
        Whether the scores of each network are yielded too.
    share_uniform : bool
        Whether windows in which each channel has a single value share their scores.
    """

    folds: Sequence[Fold]
    window: Window
    dtype: torch.dtype = torch.float32
    batch: BatchSize = field(default_factory=lambda: BatchSize(1))
    activation: str | None = None
    slab: int = SLAB_BYTES
    sums: torch.device | None = None
    passed: SkippedWindows = field(default_factory=SkippedWindows)
    on_windows: Callable[[int, int], None] | None = None
    keep_members: bool = False
    share_uniform: bool = False

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
        layout = window_layout(self.window, shape, axis, self.batch.count)
        padded, low = pad_to_window(image, layout.size, self.window)
        # Of windows of the size of a scan the weights would be kept for nothing
        make = window_weights if self.window.size is None else _kept_weights
        weight = make(layout.size, self.window, self.sums or image.device)
        crop = [slice(low[x], low[x] + shape[x]) for x in range(3) if x != axis]
        sums = [ScoreAccumulator(layout, weight) for _ in self.folds]
        done, total = 0, layout.count * len(self.folds)
        if self.on_windows is not None:  # a scan may be a single window
            self.on_windows(done, total)
        finite = None
        for row, corners, uniform in self._chosen(layout, padded, seen, low):
            for fold_sums in sums:
                fold_sums.gaps |= len(corners) < len(row.corners)
            done += (len(row.corners) - len(corners)) * len(self.folds)
            self.passed.shared += SharedScores(uniform).saved
            for fold, fold_sums in zip(self.folds, sums, strict=True):
                shared = SharedScores(uniform)
                for corner, scores in self._run(fold.network, padded, corners, layout, shared):
                    fold_sums.add(scores, corner)
                    del scores  # the next windows need the memory
                    done += 1
                    if self.on_windows is not None:
                        self.on_windows(done, total)
            along = (low[axis], shape[axis])
            before = finite
            finite = yield from self._finish(sums, row.following, crop, along, image.device)
            # Of the row before: a GPU has the next row to do while the host waits for its answer
            _refuse_infinite(before)
        _refuse_infinite(finite)

    def _chosen(
        self, layout: WindowLayout, padded: torch.Tensor, seen: torch.Tensor | None, low: Shape
    ) -> Iterator[tuple[WindowRow, list[Shape], dict[Shape, Values]]]:
        """Yield each row, its windows that are run, and the values of those that share scores.

        Several rows at once are looked at, before any of them is run: the host waits for a GPU.
        """
        rows = layout.rows()
        while batch := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            corners = [corner for row in batch for corner in row.corners]
            kept = self._windows_to_run(corners, layout.size, seen, low)
            uniform = uniform_windows(padded, kept, layout.size) if self.share_uniform else {}
            run = set(kept)
            for row in batch:
                own = [corner for corner in row.corners if corner in run]
                alike = {corner: uniform[corner] for corner in own if corner in uniform}
                yield row, own, alike if len(own) > 1 else {}

    def _windows_to_run(
        self, corners: list[Shape], size: Shape, seen: torch.Tensor | None, low: Shape
    ) -> list[Shape]:
        """Return the windows that are not skipped.

        The first window of a scan is always run: it gives the number of classes.
        """
        # The margin of one voxel: interpolation to the source reads neighbours
        kept = corners
        if seen is not None:
            first = self.passed.windows == 0
            windows = (seen[slices_with_margin(corner, size, low)] for corner in corners)
            # All windows in one copy: each result would wait for the device
            occupied = torch.stack([window.any() for window in windows]).cpu().tolist()
            kept = [
                corner
                for n, (corner, body) in enumerate(zip(corners, occupied, strict=True))
                if body or (first and n == 0)
            ]
        self.passed.windows += len(corners)
        self.passed.skipped += len(corners) - len(kept)
        return kept

    def _run(
        self,
        network: Network,
        padded: torch.Tensor,
        corners: Sequence[Shape],
        layout: WindowLayout,
        shared: SharedScores,
    ) -> Iterator[tuple[Shape, torch.Tensor]]:
        """Yield each window's corner and scores (C, x, y, z), in the order of `corners`."""
        size, done = layout.size, 0
        while done < len(corners):
            batch = shared.batch(corners[done:], layout.batch(self.batch.count))
            if not batch:
                yield corners[done], shared.take(corners[done])
                done += 1
                continue
            try:
                scores = self._forward(network, padded, batch, size)
            except Exception as exc:  # an engine's library has errors of its own
                if is_out_of_memory(exc):
                    self.batch.halve(len(batch), exc)
                elif isinstance(exc, RuntimeError) and (
                    self.window.size is None or padded.is_cpu  # else the device may be at fault
                ):
                    voxels = f"{size[0]} x {size[1]} x {size[2]} voxels"
                    detail = f"the network does not accept an input of {voxels}"
                    raise ScanError(Reason.MODEL_NETWORK, detail) from exc
                else:
                    raise
            else:
                for corner, each in zip(batch, scores, strict=True):
                    shared.keep(corner, each)
                    yield corner, each
                del scores, each
                done += len(batch)

    def _forward(
        self, network: Network, padded: torch.Tensor, corners: Sequence[Shape], size: Shape
    ) -> torch.Tensor:
        """Return the network's scores (N, C, x, y, z) of windows, which are copied first."""
        batch = torch.stack([padded[:, *window_slices(corner, size)] for corner in corners])

        def checked(windows: torch.Tensor) -> torch.Tensor:
            scores = network(windows)
            shape = tuple(scores.shape) if isinstance(scores, torch.Tensor) else ()
            if len(shape) != 5 or shape[2:] != size or len(scores) != len(corners):
                detail = "the network's output does not have the shape of its input"
                raise ScanError(Reason.MODEL_NETWORK, detail)
            return scores

        window = self.window
        return mean_over_flips(
            checked, batch.to(self.dtype), window.mirror, window.mirrored_channels
        )

    def _finish(
        self,
        sums: Sequence[ScoreAccumulator],
        following: int,
        crop: list[slice],
        along: tuple[int, int],
        device: torch.device,
    ) -> Generator[ScorePlanes, None, LateAnswer | None]:
        """Yield the planes before `following`, without padding, and drop them.

        `along` are the first plane of the image in the padded image, and its number of planes.
        Returns whether all scores are finite, if that is not known yet.
        """
        low, count = along
        first, last = max(sums[0].first, low), min(following, low + count)
        step = self._planes_at_once(sums[0], last - first, device)
        ends: list[torch.Tensor] = []
        for start in range(first, last, step):
            stop = min(start + step, last)
            (scores, *members), empty = self._means(sums, (start, stop), crop, device)
            # Comparisons with NaN are false: such a voxel would become background silently
            if not scores.is_cpu:
                ends += scores.aminmax()
            elif not all_finite(scores):
                raise FloatingPointError(_NOT_FINITE)
            for each in (scores, *members):
                if empty is not None:  # background
                    each.masked_fill_(empty, 0.0)[:, :1].masked_fill_(empty, 1.0)
                self._activate(each)
            known = None if empty is None else ~empty
            yield ScorePlanes(start - low, scores, tuple(members), known)
        for fold_sums in sums:
            fold_sums.advance(following)
        return LateAnswer(torch.stack(ends).isfinite().all()) if ends else None

    def _planes_at_once(self, sums: ScoreAccumulator, count: int, device: torch.device) -> int:
        """Return how many of `count` planes are yielded together."""
        if (head := self.folds[0].head) is not None:
            plane = sums.plane_bytes * len(head.weight) // head.weight.shape[1]
            return max(1, HEAD_SLABS * self.slab // plane)
        if sums.device != device or len(self.folds) > 1 or sums.whole:
            return max(1, self.slab // sums.plane_bytes)
        return max(1, count)  # all planes: nothing is copied

    def _means(
        self,
        sums: Sequence[ScoreAccumulator],
        planes: tuple[int, int],
        crop: list[slice],
        device: torch.device,
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Return the mean scores of all networks, and the mask of voxels without a window.

        Each network's own scores follow their mean, if `keep_members`. Scores are summed in the
        type of the sums, then divided, as by nnU-Net.
        """
        first, *further = self.folds
        total, empty = sums[0].means(*planes, crop, device)
        total = total if first.head is None else first.head(total)
        members = [total.clone()] if self.keep_members and further else []
        for fold_sums, fold in zip(sums[1:], further, strict=True):
            means, _ = fold_sums.means(*planes, crop, device)
            means = means if fold.head is None else fold.head(means)
            total += means
            members += [means] if members else []
        if further:
            total /= len(sums)
        return [total, *members], empty

    def _activate(self, scores: torch.Tensor) -> None:
        """Apply softmax or sigmoid over the classes (dim 1), in place."""
        if self.activation == "sigmoid":
            scores.sigmoid_()
        elif self.activation == "softmax":
            # Softmax reads memory in its order, in pieces that the cache holds
            order = sorted((0, 2, 3), key=scores.stride, reverse=True)
            planes = scores.permute(order[0], 1, *order[1:])  # in memory order
            plane_bytes = max(1, planes[0].nbytes)
            step = max(1, CACHED_BYTES // plane_bytes) if scores.is_cpu else len(planes)
            for chunk in torch.split(planes.transpose(0, 1), step, dim=1):
                chunk.copy_(torch.softmax(chunk.contiguous(), dim=0))


def _refuse_infinite(finite: LateAnswer | None) -> None:
    if finite is not None and not finite:
        raise FloatingPointError(_NOT_FINITE)


class ScoreAccumulator:
    """Weighted sums of the planes that windows still overlap.

    Parameters
    ----------
    layout : WindowLayout
        Windows of the padded image.
    weight : (x, y, z) tensor
        Weights of a window's voxels. Sums have its type and device; scores may be on another
        device.

    Attributes
    ----------
    axis : 0, 1 or 2
        Axis across the planes.
    first : int
        Index of the first plane in the padded image.
    whole : bool
        Whether sums of all planes are kept, until the last window.
    gaps : bool
        Whether windows were skipped as air, which leaves voxels without a score.
    """

    def __init__(self, layout: WindowLayout, weight: torch.Tensor) -> None:
        self.axis, self.first, self.gaps = layout.axis, 0, False
        self._weight = weight
        self._size, self._length = layout.size, layout.padded[layout.axis]
        self._single = layout.count == 1 and bool((weight == 1).all())
        shape = [layout.planes if x == self.axis else n for x, n in enumerate(layout.padded)]
        self.whole = layout.together == 0
        self._count = weight.new_zeros((1, *shape))
        self._sum = self._count[:0]  # the first window gives the number of classes

    @property
    def device(self) -> torch.device:
        """Device of the sums."""
        return self._weight.device

    @property
    def plane_bytes(self) -> int:
        """Bytes of the scores of one plane."""
        return self._sum.nbytes // self._sum.shape[self.axis + 1]

    def add(self, scores: torch.Tensor, corner: Shape) -> None:
        """Add a window's scores (C, x, y, z), which may be overwritten."""
        alike = (scores.device, scores.dtype) == (self.device, self._weight.dtype)
        # A window that covers the image saves the memory of the sums
        if self._single and alike:  # the only scores of a voxel are their mean
            self._sum = scores
            self._count.fill_(1)
            return
        if len(self._sum) == 0:
            self._sum = self._count.new_zeros((len(scores), *self._count.shape[1:]))
        x, y, z = (n - self.first if axis == self.axis else n for axis, n in enumerate(corner))
        box = (slice(None), *window_slices((x, y, z), self._size))
        accumulate(self._sum[box], self._count[box], scores.to(self.device), self._weight)

    def means(
        self, first: int, last: int, crop: list[slice], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the cropped means of planes `first` to before `last` on a device.

        The sums are divided in place, so each plane can be requested only once.

        Returns
        -------
        (means, empty)
            Means (N, C, ., .), and a mask (N, 1, ., .) of the voxels that no window covers; None
            if windows cover all voxels.
        """
        selected = slice(first - self.first, last - self.first)
        sums, counts = (
            planes.movedim(self.axis + 1, 0)[selected][:, :, crop[0], crop[1]]
            for planes in (self._sum, self._count)
        )
        if not self.gaps:
            return sums.div_(counts).to(device), None
        empty = counts == 0
        if counts.is_cpu and not bool(empty.any()):  # a GPU is not asked: the host would wait
            return sums.div_(counts).to(device), None
        return sums.div_(counts.masked_fill(empty, 1.0)).to(device), empty.to(device)

    def advance(self, following: int) -> None:
        """Drop the planes before `following` and append as many new ones, if any follow."""
        shift = following - self.first
        if following == self._length:
            return
        for slab in (self._sum, self._count):
            planes = slab.movedim(self.axis + 1, 0)
            size = len(planes)
            # In place: a second array of sums would double the memory of this step
            for n in range(0, size - shift, max(shift, 1)):  # source and target do not overlap
                count = min(shift, size - shift - n)
                planes[n : n + count] = planes[n + shift : n + shift + count]
            planes[max(size - shift, 0) :] = 0
        self.first = following


def accumulate(
    sums: torch.Tensor, counts: torch.Tensor, scores: torch.Tensor, weight: torch.Tensor
) -> None:
    """Add weighted scores and the weights, in place.

    Half sums are rounded as by nnU-Net: scores are weighted in their own type, and overwritten.

    Parameters
    ----------
    sums : (C, x, y, z) float32 or float16 tensor
        Sums of scores at the window's voxels.
    counts : (1, x, y, z) tensor
        Sums of weights, of the same type.
    scores : (C, x, y, z) tensor
        Scores of the window, of any floating type.
    weight : (x, y, z) tensor
        Weights of the window, of the type of the sums.
    """
    if sums.dtype is torch.float32:
        chunks = (torch.split(values, _CHANNELS_AT_ONCE) for values in (sums, scores))
        for total, chunk in zip(*chunks, strict=True):
            # A GPU converts while it multiplies, with the same bits
            total.addcmul_(chunk.to(torch.float32) if chunk.is_cpu else chunk, weight)
    else:
        _add_half(sums, scores, weight)
    counts.add_(weight)


def _add_half(sums: torch.Tensor, scores: torch.Tensor, weight: torch.Tensor) -> None:
    """Add weighted scores to half sums, in place; scores of a wider type are not rounded first.

    On a CPU, torch adds types that differ one value at a time. A part that its cache holds is
    converted, added to and converted back in a twentieth of the time, with the same bits.
    """
    if scores.dtype is sums.dtype or not sums.is_cpu:
        sums.add_(scores.mul_(weight))
        return
    wide = torch.promote_types(scores.dtype, sums.dtype)
    step = max(1, _CACHED_VALUES // max(1, weight[0].numel()))
    for total, own in zip(sums, scores, strict=True):
        pieces = (torch.split(values, step) for values in (total, own, weight))
        for piece, score, factor in zip(*pieces, strict=True):
            piece.copy_(piece.to(wide).add_(score.mul_(factor).to(wide)))


def uniform_windows(
    padded: torch.Tensor, corners: Sequence[Shape], size: Shape
) -> dict[Shape, Values]:
    """Return the values of those windows in which each channel has a single one, by corner.

    Clipped air, padding, and the background of an MR are the same value in every window, whatever
    the intensity steps were. A network gives such windows the same scores, which are added to each
    of them: labels are exactly those of running it for all. (With batches of several windows, on
    GPUs, the last bits of scores depend on a window's batch, and so on which windows are left out.)

    Parameters
    ----------
    padded : (channels, X, Y, Z) tensor
        The image.
    corners : sequence of (x, y, z)
        First voxels of the windows.
    size : (x, y, z)
        Size of a window.
    """
    windows = [padded[:, *window_slices(corner, size)] for corner in corners]
    # A sparse sample first: nearly all windows with several values differ in it
    samples = [window[:, ::_SAMPLED, ::_SAMPLED, ::_SAMPLED] for window in windows]
    possible = [n for n, alike in enumerate(_single_valued(samples)) if alike]
    corners = [corners[n] for n in possible]
    windows = [windows[n] for n in possible]
    corners = [c for c, alike in zip(corners, _single_valued(windows), strict=True) if alike]
    if not corners:
        return {}
    firsts = torch.stack([padded[:, x, y, z] for x, y, z in corners]).cpu().tolist()
    return {corner: tuple(values) for corner, values in zip(corners, firsts, strict=True)}


def _single_valued(windows: Sequence[torch.Tensor]) -> list[bool]:
    """Return of each window (channels, x, y, z) whether each channel has a single value.

    One copy to the host for all: each result would wait for the device.
    """
    if not windows:
        return []
    single = [(window == window[:, :1, :1, :1]).all() for window in windows]
    return [bool(alike) for alike in torch.stack(single).cpu().tolist()]


class SharedScores:
    """Scores of uniform windows, from the first window to the last one with the same values.

    Parameters
    ----------
    uniform : mapping of (x, y, z) to tuple of float
        From `uniform_windows`.
    """

    def __init__(self, uniform: Mapping[Shape, Values]) -> None:
        self._uniform = uniform
        self._following = Counter(uniform.values())
        self._kept: dict[Values, torch.Tensor] = {}

    @property
    def saved(self) -> int:
        """Number of windows for which the network is not run."""
        return len(self._uniform) - len(set(self._uniform.values()))

    def batch(self, corners: Sequence[Shape], count: int) -> Sequence[Shape]:
        """Return the first corners, up to `count`, that the network is to be run for together."""
        known = set(self._kept)
        for n, corner in enumerate(corners[:count]):
            values = self._uniform.get(corner)
            if values in known:
                return corners[:n]
            if values is not None:
                known.add(values)
        return corners[:count]

    def keep(self, corner: Shape, scores: torch.Tensor) -> None:
        """Keep the scores (C, x, y, z) of a window if later windows have the same values."""
        values = self._uniform.get(corner)
        if values is not None:
            self._following[values] -= 1
            if self._following[values]:
                self._kept[values] = scores.clone()

    def take(self, corner: Shape) -> torch.Tensor:
        """Return the kept scores of a window's values, which the caller may overwrite."""
        values = self._uniform[corner]
        self._following[values] -= 1
        return self._kept[values].clone() if self._following[values] else self._kept.pop(values)


def mean_over_flips(
    network: Callable[[torch.Tensor], torch.Tensor],
    windows: torch.Tensor,
    axes: Sequence[int],
    channels: Sequence[int],
) -> torch.Tensor:
    """Return the mean of a network's scores over all combinations of flips.

    Scores are summed in their own type, then divided, as by nnU-Net.

    Parameters
    ----------
    network : callable
        Maps (N, channels, x, y, z) to scores (N, C, x, y, z); may work in place.
    windows : (N, channels, x, y, z) tensor
        Input of the network; not changed if `axes` are given.
    axes : sequence of int
        Axes of the windows, 0 to 2; empty for no flip.
    channels : sequence of int
        Order in which the scores of flipped windows are added, as `Window.mirrored_channels`.
    """
    if not axes:
        return network(windows)
    scores = network(windows.clone())
    # nnU-Net's order: a sum in half precision depends on it
    for count in range(1, len(axes) + 1):
        for combination in itertools.combinations(axes, count):
            dims = [axis + 2 for axis in combination]
            flipped = network(windows.flip(dims)).flip(dims)
            if channels:
                # one by one: an index would have to go to the device, for which the host waits
                for channel, source in enumerate(channels):
                    scores[:, channel] += flipped[:, source]
            else:
                scores += flipped
    scores /= 1 << len(axes)
    return scores
