"""The network moved over its grid, window by window; scores leave as soon as they are final.

Places, weights and padding are those of MONAI's `sliding_window_inference`. The windows go in
another order: outermost along one axis, so that only the planes that later windows still touch
(as many as a window is wide) hold sums; the others are divided, activated, handed on and dropped.
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
from scanloom.inference.head import Head
from scanloom.inference.resample import SLAB_BYTES

CACHED_BYTES = 1024**2
"""Of scores that are activated together on a CPU: read and written once."""
HEAD_SLABS = 4
"""Slabs of scores that a head makes at once: planes that are labelled together are cheaper."""
CHANNELS = 16
"""Of a window's scores that become float32 together."""

Network = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class ScorePlanes:
    """Final scores of some neighbouring planes of the network's grid.

    Parameters
    ----------
    first : int
        Index of the first plane along the axis they are cut across.
    scores : (N, C, ., .) float tensor
        Planes, classes, and the two other axes of the network's grid in their order.
    """

    first: int
    scores: torch.Tensor


@dataclass
class BatchSize:
    """How many windows go through the network at once; halved when memory runs out."""

    count: int

    def halve(self, error: BaseException) -> None:
        """Go on with half as many, or give up.

        Raises
        ------
        ScanError
            OUT_OF_MEMORY if it was one window already.
        """
        if self.count == 1:
            detail = "not even one window fits the device"
            raise ScanError(Reason.OUT_OF_MEMORY, detail) from error
        self.count //= 2


@dataclass
class PassedOver:
    """How many windows there were, and how many of them held only air and were not run."""

    windows: int = 0
    skipped: int = 0


@dataclass(frozen=True, eq=False)
class Slider:
    """A network and how it is moved over its grid.

    Parameters
    ----------
    network : callable
        (N, channels, x, y, z) of `dtype` to (N, C, x, y, z).
    window : Window
        Of the card.
    dtype : torch.dtype
        In which the network calculates; sums are float32.
    batch : BatchSize
        How many windows at once.
    activation : "softmax", "sigmoid" or None
        Applied to final scores.
    slab : int
        Bytes of scores that are handed on together, at least one plane.
    sums : torch.device or None
        Where the scores of open planes are summed; None for where the image is.
    passed : PassedOver
        Counts windows, and those that were not run.
    head : Head or None
        The network's last layer where it was taken off: features are summed. On the image's device.
    """

    network: Network
    window: Window
    dtype: torch.dtype = torch.float32
    batch: BatchSize = field(default_factory=lambda: BatchSize(1))
    activation: str | None = None
    slab: int = SLAB_BYTES
    sums: torch.device | None = None
    passed: PassedOver = field(default_factory=lambda: PassedOver())
    head: Head | None = None

    def slide(
        self, image: torch.Tensor, axis: int, seen: torch.Tensor | None = None
    ) -> Iterator[ScorePlanes]:
        """Yield the scores of all planes across `axis`, ascending, each once.

        They are good until the next are asked for: their memory is used again.

        Parameters
        ----------
        image : (channels, X, Y, Z) float32 tensor
            Not changed, even by a network that works in place.
        axis : 0, 1 or 2
            Along which to go outermost.
        seen : (X, Y, Z) bool tensor, optional
            Windows that hold none of these voxels, nor have one beside them, are not run; what
            no other window covers is background: channel 0 has the largest score there.

        Raises
        ------
        ScanError
            OUT_OF_MEMORY if one window is too much; MODEL_NETWORK if it gives another shape.
        FloatingPointError
            If a score is NaN or infinite: comparisons would call it background.
        """
        shape = (image.shape[1], image.shape[2], image.shape[3])
        size = window_size(self.window, shape)
        padded, low = pad(image, size, self.window)
        starts = [
            window_starts(n, roi, self.window.overlap)
            for n, roi in zip(padded.shape[1:], size, strict=True)
        ]
        weight = importance(size, self.window, self.sums or image.device)
        inner = [x for x in range(3) if x != axis]
        crop = [slice(low[x], low[x] + shape[x]) for x in inner]
        sums = _OpenSlab(axis, size, padded, weight.device)
        for start, following in itertools.pairwise([*starts[axis], padded.shape[axis + 1]]):
            places = [
                _place(axis, start, corner)
                for corner in itertools.product(*(starts[x] for x in inner))
            ]
            places = self._worth(places, size, seen, low)
            for corner, scores in self._run(padded, places, size):
                sums.add(scores, weight, corner)
                del scores  # the next windows need the memory
            yield from self._finish(sums, following, crop, (low[axis], shape[axis]), image.device)

    def _worth(
        self, places: list[Shape], size: Shape, seen: torch.Tensor | None, low: Shape
    ) -> list[Shape]:
        """Return the windows that are to be run; the scan's first says how many classes are."""
        kept = places
        if seen is not None:
            first = self.passed.windows == 0
            kept = [
                place
                for n, place in enumerate(places)
                if (first and n == 0) or bool(seen[_around(place, size, low)].any())
            ]
        self.passed.windows += len(places)
        self.passed.skipped += len(places) - len(kept)
        return kept

    def _run(
        self, padded: torch.Tensor, places: Sequence[Shape], size: Shape
    ) -> Iterator[tuple[Shape, torch.Tensor]]:
        """Yield each window's place and scores (C, x, y, z), in the order of `places`."""
        done = 0
        while done < len(places):
            some = places[done : done + self.batch.count]
            try:
                scores = self._forward(padded, some, size)
            except (RuntimeError, MemoryError) as exc:
                if is_out_of_memory(exc):
                    self.batch.halve(exc)
                elif self.window.size is None or padded.is_cpu:  # else the device may be at fault
                    detail = f"it can't take {size[0]} x {size[1]} x {size[2]} voxels"
                    raise ScanError(Reason.MODEL_NETWORK, detail) from exc
                else:
                    raise
            else:
                yield from zip(some, scores, strict=True)
                del scores
                done += len(some)

    def _forward(self, padded: torch.Tensor, places: Sequence[Shape], size: Shape) -> torch.Tensor:
        """Return the network's scores (N, C, x, y, z) of windows; they are copied out first."""
        batch = torch.stack([padded[:, *_box(place, size)] for place in places])
        scores = self.network(batch.to(self.dtype))
        shape = tuple(scores.shape) if isinstance(scores, torch.Tensor) else ()
        if len(shape) != 5 or shape[2:] != size or len(scores) != len(places):
            raise ScanError(Reason.MODEL_NETWORK, "its output does not have the shape of its input")
        return scores

    def _finish(
        self,
        sums: _OpenSlab,
        following: int,
        crop: list[slice],
        along: tuple[int, int],
        device: torch.device,
    ) -> Iterator[ScorePlanes]:
        """Yield the planes before `following`, without padding, and drop them."""
        low, count = along
        first, last = max(sums.first, low), min(following, low + count)
        step = max(1, last - first)  # where they lie, nothing is copied
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
            whole = scores.permute(order[0], 1, *order[1:])  # neighbours in memory stay together
            step = max(1, CACHED_BYTES // max(1, whole[0].nbytes)) if scores.is_cpu else len(whole)
            for some in torch.split(whole.transpose(0, 1), step, dim=1):
                some.copy_(torch.softmax(some.contiguous(), dim=0))
        return scores


class _OpenSlab:
    """Sums of the planes that windows still touch, in the order in which windows stand in memory.

    Parameters
    ----------
    axis : int
        Across which planes are cut.
    size : (x, y, z)
        Of a window.
    padded : (channels, X, Y, Z) tensor
        What windows are cut from.
    device : torch.device
        Where sums lie; scores come from anywhere.
    """

    def __init__(self, axis: int, size: Shape, padded: torch.Tensor, device: torch.device) -> None:
        self.axis, self.first, self.device = axis, 0, device
        shape = [size[x] if x == axis else n for x, n in enumerate(padded.shape[1:])]
        self._count = torch.zeros((1, *shape), device=device)
        self._sum = self._count[:0]  # the first window says how many classes there are

    @property
    def plane_bytes(self) -> int:
        """Bytes of the scores of one plane."""
        return self._sum.nbytes // self._sum.shape[self.axis + 1]

    def add(self, scores: torch.Tensor, weight: torch.Tensor, corner: Shape) -> None:
        """Add a window's scores (C, x, y, z); its planes are those that are open."""
        if len(self._sum) == 0:
            shape = (len(scores), *self._count.shape[1:])
            self._sum = torch.zeros(shape, device=self.device)
        place = [0 if x == self.axis else n for x, n in enumerate(corner)]
        where = (slice(None), *_box((place[0], place[1], place[2]), weight.shape))
        accumulate(self._sum[where], self._count[where], scores.to(self.device), weight)

    def means(
        self, first: int, last: int, crop: list[slice], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the means (N, C, ., .) of planes `first` to before `last`, cropped, on a device.

        And where no window was run, (N, 1, ., .) bool or None. Once for each plane: the sums are
        divided where they lie.
        """
        where = slice(first - self.first, last - self.first)
        sums, counts = (
            planes.movedim(self.axis + 1, 0)[where][:, :, crop[0], crop[1]]
            for planes in (self._sum, self._count)
        )
        empty = counts == 0
        if not bool(empty.any()):
            return sums.div_(counts).to(device), None
        return sums.div_(counts.masked_fill(empty, 1.0)).to(device), empty.to(device)

    def advance(self, following: int) -> None:
        """Drop the planes before `following` and open as many behind the others."""
        gone = following - self.first
        for slab in (self._sum, self._count):
            planes = slab.movedim(self.axis + 1, 0)
            size = len(planes)
            for n in range(0, size - gone, max(gone, 1)):  # so that neither end overlaps
                some = min(gone, size - gone - n)
                planes[n : n + some] = planes[n + gone : n + gone + some]
            planes[max(size - gone, 0) :] = 0
        self.first = following


def accumulate(
    sums: torch.Tensor, counts: torch.Tensor, scores: torch.Tensor, weight: torch.Tensor
) -> None:
    """Add weighted scores and the weights, in place.

    Parameters
    ----------
    sums : (C, x, y, z) float32 tensor
        Of the window's voxels.
    counts : (1, x, y, z) float32 tensor
        Sum of the weights.
    scores : (C, x, y, z) tensor
        Of a window, of any floating type.
    weight : (x, y, z) float32 tensor
        Of a window.
    """
    for total, some in zip(torch.split(sums, CHANNELS), torch.split(scores, CHANNELS), strict=True):
        total.addcmul_(some.to(torch.float32), weight)
    counts.add_(weight)


def window_size(window: Window, shape: Shape) -> Shape:
    """Return the window's size in voxels: the whole grid where the card names none."""
    return shape if window.size is None else window.size


def window_starts(length: int, size: int, overlap: float) -> list[int]:
    """Return where windows start along an axis (MONAI dense_patch_slices); the last ends with it.

    `length` is at least `size`.
    """
    step = size if size == length else max(int(size * (1 - overlap)), 1)
    starts = list(range(0, length - size, step))
    return [*starts, length - size]


def pad(image: torch.Tensor, size: Shape, window: Window) -> tuple[torch.Tensor, Shape]:
    """Enlarge an image whose grid is smaller than the window; return how much was put before it.

    Odd voxels go behind. "reflect" needs a grid of more than half the window (torch).

    Raises
    ------
    ScanError
        IMPLAUSIBLE if the grid is too small to be reflected.
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
        raise ScanError(Reason.IMPLAUSIBLE, "the scan is too small to be reflected to a window")
    return functional.pad(image[None], ends, mode=window.padding)[0], low


def importance(size: Shape, window: Window, device: torch.device) -> torch.Tensor:
    """Return the weight of each voxel of a window (MONAI compute_importance_map): (x, y, z)."""
    if window.blending == "constant":
        return torch.ones(size, device=device)
    weight = torch.ones((), device=device)
    for n in size:
        x = torch.arange(-(n - 1) / 2.0, (n - 1) / 2.0 + 1, dtype=torch.float32, device=device)
        weight = weight[..., None] * torch.exp(x**2 / (-2 * (n * window.sigma_scale) ** 2))
    return weight.clamp_(min=max(float(weight.min()), 1e-3))


def _place(axis: int, start: int, corner: tuple[int, ...]) -> Shape:
    """Return a window's first voxel from its place along `axis` and along the two others."""
    place = [*corner]
    place.insert(axis, start)
    return place[0], place[1], place[2]


def _around(place: Shape, size: Shape, low: Shape) -> tuple[slice, ...]:
    """Return the slices of a window and the voxels beside it, where `low` voxels were put first."""
    ends = ((p - n - 1, p - n + roi + 1) for p, roi, n in zip(place, size, low, strict=True))
    return tuple(slice(max(first, 0), max(last, 0)) for first, last in ends)


def _box(corner: Shape, size: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of a window."""
    return tuple(slice(n, n + roi) for n, roi in zip(corner, size, strict=True))
