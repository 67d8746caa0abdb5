"""Decides labels on the source grid from scores on the network grid, plane by plane.

Scores are interpolated linearly and decided on the source grid, without an array of classes x
source voxels. The result equals that of resampling all scores to the source grid, then taking the
first maximum (or comparing each score with a threshold). Uses compiled kernels where available.
`decide_torch` is the plain PyTorch reference implementation, and runs on every other device.

Source slices lie between planes of the network grid, and are restored as the planes arrive.

Maps of uncertainty come from the scores that decide the labels, and where labels are decided: on
the source grid from interpolated scores, slab by slab, or on the network grid and then mapped back
by nearest neighbour. No array of classes x source voxels is made.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from scanloom.cards.card import Argmax, Decision, ModelCard, label_bytes
from scanloom.core.segmentation import UNCERTAINTY_STEPS, Uncertainty
from scanloom.inference.device import to_device
from scanloom.inference.geometry import NetworkPlan
from scanloom.inference.resampling.image import GridBox
from scanloom.inference.resampling.resample import LinearWeights, nearest, other_axes, unorient
from scanloom.inference.resampling.sampling import area_matrix
from scanloom.inference.restore import cpu, cuda
from scanloom.inference.restore.cpu import Coordinates
from scanloom.inference.restore.decisions import (
    Clean,
    Labels,
    decide_on_grid,
    label_type,
    lowest_score,
    map_count,
    painted,
)
from scanloom.inference.sliding_window import ScorePlanes
from scanloom.inference.transfers import LabelCopies

CPU_SLAB_BYTES = 2 * 1024**2
"""Bytes of one class of a slab of source slices on a CPU: it fits the caches."""
GPU_SLAB_BYTES = 128 * 1024**2
"""Bytes of one class of a slab of source slices on a GPU, which needs large amounts of work."""
Maps = Sequence[NDArray[Any]]
Restore = Callable[[torch.Tensor, Coordinates, Maps], None]
AREA_SLAB_BYTES = 64 * 1024**2
"""Largest size of the resampled scores of some source slices."""

STACK_BYTES = 32 * 1024**2
"""Bytes of planes of all networks that are restored at once, at least one plane."""
MEMBER_LABEL_BYTES = 16 * 1024**2
"""Bytes of one network's labels of some source slices, at least one slice."""


class Label(Protocol):
    """Function that labels source voxels from planes of scores, as `cpu.label` does."""

    def __call__(
        self,
        scores: torch.Tensor,
        at: Coordinates,
        decision: Decision,
        out: Sequence[Labels],
        *,
        rounded: bool = False,
    ) -> None:
        """Label source voxels."""


@dataclass(frozen=True)
class RestoreBackend:
    """Function that labels source voxels, and the reason for its choice."""

    label: Label
    why: str


def choose_backend(
    decision: Decision,
    classes: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    rounded: bool = False,
) -> RestoreBackend:
    """Return the fastest backend for scores of `dtype` on a device; compile it if necessary.

    `rounded` rounds scores to half precision before they are compared.
    """
    # Scores stay on their device: kernels for a CPU would need a copy of them
    label: Label = cuda.label
    if device.type != "cpu":
        kernels = cuda.available(device, classes)
    else:
        # A kernel is tested in the type that it will get: rounded scores are half precision
        scored = torch.float16 if rounded else dtype
        wide, label = label_type(decision, classes) is np.uint16, cpu.label
        kernels = cpu.available(not isinstance(decision, Argmax), scored, wide, rounded)
    if kernels.usable:
        return RestoreBackend(label, kernels.why)
    return RestoreBackend(restore_torch, f"plain torch: {kernels.why}")


class Restorer(Protocol):
    """Takes planes of scores and returns label maps on the source grid."""

    def add(self, planes: ScorePlanes) -> None:
        """Take the next planes across the network axis that follows ``plan.lead``."""

    def finish(self, clean: Clean) -> list[Labels]:
        """Return the label maps; `clean` is applied to labels on the network grid."""


def make_restorer(
    plan: NetworkPlan, card: ModelCard, device: torch.device, *, fused: bool
) -> Restorer:
    """Return the restorer of a model, for scores on a device.

    `fused` uses compiled kernels where available.
    """
    if card.restore == "scores" and plan.mode == "area":
        return AreaRestorer(plan, card.decision, card.n_outputs)
    if card.restore == "scores":
        # nnU-Net resamples scores in half precision, and compares them rounded
        rounded = card.window.sums == "float16"
        restorer = ScoreRestorer(plan, card.decision, card.n_outputs, fused=fused, rounded=rounded)
        if device.type == "cuda":
            restorer.make_pages()
        return restorer
    return LabelRestorer(plan, card.decision, card.n_outputs)


class ScoreRestorer:
    """Takes planes of scores and decides labels on the source's voxels.

    Parameters
    ----------
    decision : Decision
        The first largest score, or each score against a threshold.
    classes : int
        Number of channels to decide between.
    fused : bool
        Use compiled kernels where available; false for plain torch.
    rounded : bool
        Round scores to half precision, on both grids, before they are compared (nnU-Net).

    Attributes
    ----------
    labels : list of (I, J, K) uint8 or uint16 arrays
        I fastest in memory. The channel of the largest score; or one map per channel n, with n + 1
        where its score reaches the threshold; or one map with the numbers of painted regions.
        Complete after the last plane.
    backend : RestoreBackend or None
        The backend; None until the first planes are added.
    """

    def __init__(
        self,
        plan: NetworkPlan,
        decision: Decision,
        classes: int,
        *,
        fused: bool = True,
        rounded: bool = False,
    ) -> None:
        self._plan, self._decision, self._classes, self._rounded = plan, decision, classes, rounded
        self.backend: RestoreBackend | None = (
            None if fused else RestoreBackend(restore_torch, "plain torch: requested")
        )
        dtype = label_type(decision, classes)
        self.labels: list[Labels] = [
            np.zeros(plan.source.shape, dtype, order="F")
            for _ in range(map_count(decision, classes))
        ]
        self._copies = LabelCopies()
        self._slices = SourceSlices(plan, self.labels)

    def make_pages(self) -> None:
        """Start to make the pages of the label maps, while a device computes scores."""
        for labels in self.labels:
            self._copies.prepare(labels)

    def add(self, planes: ScorePlanes) -> None:
        """Take the next planes; label the source slices that now have planes on both sides.

        Parameters
        ----------
        planes : ScorePlanes
            Planes across the network axis that follows ``plan.lead``, ascending, without a gap.
            They may be overwritten afterwards.
        """
        self.add_scores(planes.scores[:, : self._classes], planes.first)

    def add_scores(self, scores: torch.Tensor, first: int) -> None:
        """Take the scores (N, C, ., .) of planes from `first` on."""
        if self._rounded:
            scores = scores.to(torch.float16)
        self._slices.add(scores, first, self._label)
        if self._slices.complete:
            self._copies.wait()
            clear_uncovered(self.labels, self._plan)

    def _label(self, scores: torch.Tensor, at: Coordinates, out: Sequence[Labels]) -> None:
        """Label the voxels of source slices from the planes around them."""
        if self.backend is None:
            self.backend = choose_backend(
                self._decision,
                self._classes,
                scores.device,
                scores.dtype,
                rounded=self._rounded,
            )
        if self.backend.label is cuda.label:  # a wait for each block would stop the device
            copies = self._copies
            cuda.label(scores, at, self._decision, out, rounded=self._rounded, copies=copies)
        else:
            self.backend.label(scores, at, self._decision, out, rounded=self._rounded)

    def finish(self, _: Clean) -> list[Labels]:
        """Return the label maps; cleaning on the network grid does not apply."""
        return self.labels


class MeanRestorer(ScoreRestorer):
    """Takes logits of several models and decides by the mean of their probabilities.

    As `nnUNetv2_ensemble`: logits are interpolated, become probabilities on the source grid, and
    these are averaged. Of a mean on the network grid, as of the mean of logits, other voxels at the
    borders of structures have another label.

    Parameters
    ----------
    plan, decision, classes, rounded
        As for `ScoreRestorer`; logits are rounded, probabilities are not.
    activation : "softmax" or "sigmoid"
        Function that makes probabilities of logits.
    """

    def __init__(
        self,
        plan: NetworkPlan,
        decision: Decision,
        classes: int,
        activation: Literal["softmax", "sigmoid"],
        *,
        rounded: bool,
    ) -> None:
        self._activation = activation
        super().__init__(plan, decision, classes, rounded=rounded)

    def add(self, planes: ScorePlanes) -> None:
        """Take the next planes; classes of all models follow one another."""
        logits = torch.cat([each[:, : self._classes] for each in planes.logits], dim=1)
        super().add_scores(logits, planes.first)

    def _label(self, scores: torch.Tensor, at: Coordinates, out: Sequence[Labels]) -> None:
        """Label the voxels of source slices from the planes around them."""
        members = scores.shape[1] // self._classes
        for slab, weights in slabs_of_slices(scores, at, 4 * self._classes):
            total: torch.Tensor | None = None
            for first in range(0, scores.shape[1], self._classes):
                channels = range(first, first + self._classes)
                # One member at a time: scores of all members on the source grid are too large
                logits = torch.stack([interpolate(scores[:, c], weights) for c in channels], dim=1)
                if self._rounded:
                    logits = logits.to(torch.float16).to(torch.float32)
                probabilities = activate(logits, self._activation)
                total = probabilities if total is None else total.add_(probabilities)
            if total is not None:
                labelled = decide_on_grid(total.div_(members), self._decision)
                for labels, decided in zip(out, labelled, strict=True):
                    labels[slab] = decided.cpu().numpy()


def activate(logits: torch.Tensor, activation: Literal["softmax", "sigmoid"]) -> torch.Tensor:
    """Return the probabilities of logits (N, C, ...)."""
    return logits.sigmoid() if activation == "sigmoid" else logits.softmax(dim=1)


def clear_uncovered(labels: Sequence[Labels], plan: NetworkPlan) -> None:
    """Set source voxels outside the network grid to 0, in place, if grids are aligned by centre."""
    if plan.alignment != "centre":
        return
    for axis in range(3):
        at, size = plan.to_network(axis), plan.network.shape[plan.network_axis(axis)]
        # Half a voxel beyond the outermost centres still belongs to the outermost voxels
        outside = (at < -0.5) | (at > size - 0.5)
        for label_map in labels:
            np.moveaxis(label_map, axis, 0)[outside] = 0


def restore_torch(
    scores: torch.Tensor,
    at: Coordinates,
    decision: Decision,
    out: Sequence[Labels],
    *,
    rounded: bool = False,
) -> None:
    """Label source voxels in plain torch, on any device; arguments as of `cpu.label`."""
    for slab, weights in slabs_of_slices(scores, at):
        labelled = decide_torch(scores, weights, decision, rounded=rounded)
        for labels, decided in zip(out, labelled, strict=True):
            labels[slab] = decided.cpu().numpy()


def decide_torch(
    scores: torch.Tensor, taps: list[LinearWeights], decision: Decision, *, rounded: bool = False
) -> list[torch.Tensor]:
    """Interpolate scores class by class and decide.

    Parameters
    ----------
    scores : (N, C, B, C') floating tensor
        Planes of the network's grid.
    taps : list of three LinearWeights
        Interpolation weights of the source voxels across planes, and along both axes of a plane.
    decision : Decision
        The first largest score, or each score against a threshold.
    rounded : bool
        Round interpolated scores to half precision.

    Returns
    -------
    list of (S, J, I) integer tensors
        The channel of the largest score; or one tensor per channel n, with n + 1 where its score
        reaches the threshold; or one with the numbers of painted regions.
    """

    def score_of(channel: int) -> torch.Tensor:
        values = interpolate(scores[:, channel], taps)
        return values.to(torch.float16).to(torch.float32) if rounded else values

    if isinstance(decision, Argmax):
        best = score_of(0)
        dtype = torch.uint8 if scores.shape[1] <= 255 else torch.int32
        labels = torch.zeros_like(best, dtype=dtype)
        for channel in range(1, scores.shape[1]):
            score = score_of(channel)
            larger = (score > best).to(labels.dtype).mul_(channel)
            torch.maximum(labels, larger, out=labels)  # numbers ascend: the last one wins
            torch.maximum(best, score, out=best)
        return [labels]
    lowest, maps = lowest_score(decision), list[torch.Tensor]()
    for channel, number, which in painted(decision, scores.shape[1]):
        reached = score_of(channel) >= lowest
        if which == len(maps):
            dtype = torch.uint8 if label_bytes(decision, scores.shape[1]) == 1 else torch.int32
            maps.append(torch.zeros_like(reached, dtype=dtype))
        maps[which].masked_fill_(reached, number)
    return maps


class LabelRestorer:
    """Decides labels on the network grid and resamples them to the source by nearest neighbour.

    Parameters are those of `ScoreRestorer`.

    Attributes
    ----------
    box : GridBox or None
        The box of the network grid whose planes are added; None for the grid itself.
    """

    def __init__(self, plan: NetworkPlan, decision: Decision, classes: int) -> None:
        self._plan, self._decision, self._classes = plan, decision, classes
        self._planes: list[torch.Tensor] = []
        self.box: GridBox | None = None

    def add(self, planes: ScorePlanes) -> None:
        """Take the next planes across the network axis that follows ``plan.lead``."""
        self._planes.append(decide_on_grid(planes.scores[:, : self._classes], self._decision))

    def finish(self, clean: Clean) -> list[Labels]:
        """Return the label maps on the source grid; `clean` is applied on the network grid."""
        axis = self._plan.network_axis(self._plan.lead)
        dtype = label_type(self._decision, self._classes)
        return [
            restore_labels(
                self._on_grid(clean(values.movedim(0, axis).cpu().numpy().astype(dtype))),
                self._plan,
            )
            for values in torch.cat(self._planes, dim=1)
        ]

    def _on_grid(self, labels: Labels) -> Labels:
        """Return the label map of the network grid from that of the box: 0 outside it."""
        if self.box is None:
            return labels
        whole = np.zeros(self._plan.network.shape, labels.dtype)
        whole[self.box.inside] = labels[self.box.own_slices]
        return whole


def restore_labels(labels: Labels, plan: NetworkPlan) -> Labels:
    """Resample a label map (X, Y, Z) on the network grid to the source by nearest neighbour."""
    values = labels
    # The order of operations is MONAI's: at exact ratios its rounding decides the neighbour
    if plan.unturned is not None:  # as MONAI: turned back first, then resampled
        values, plan = unorient(values, plan), plan.unturned
    if plan.alignment != "first" and plan.resampled:
        values = values.transpose([plan.network_axis(axis) for axis in range(3)])
        for axis in range(3):
            values = values.take(plan.label_index(axis), axis)
    else:
        if plan.resampled:
            step = np.linalg.solve(plan.network.affine, plan.oriented.affine)
            values = nearest(values, step, plan.oriented.shape)
        values = unorient(values, plan)
    restored = np.array(values, order="F")
    clear_uncovered([restored], plan)
    return restored


class SourceSlices:
    """Takes planes of values and restores the source slices between them, each slice once.

    Parameters
    ----------
    maps : sequence of (I, J, K) arrays
        Output on the source grid, I fastest in memory.
    """

    def __init__(self, plan: NetworkPlan, maps: Maps) -> None:
        self._plan, self._maps = plan, maps
        lead = plan.network_axis(plan.lead)
        self._positions = np.clip(plan.to_network(plan.lead), 0.0, plan.network.shape[lead] - 1.0)
        slices = np.arange(len(self._positions))
        self._pending = slices if plan.scale[lead] > 0 else slices[::-1]  # in order of the planes
        self._last_plane: torch.Tensor | None = None

    @property
    def complete(self) -> bool:
        """Whether all slices are restored."""
        return len(self._pending) == 0

    def add(self, planes: torch.Tensor, first: int, restore: Restore) -> None:
        """Take the next planes (P, C, B, D), whose first has the index `first`.

        Planes are ascending, without a gap; they may be overwritten afterwards. `restore` writes
        the voxels of neighbouring source slices, from planes, coordinates as of `cpu.label`, and
        views (S, J, I) of the maps. It is not kept: a cycle would keep the maps in memory.
        """
        last = first + len(planes) - 1
        positions = self._positions[self._pending]
        # A slice between two blocks of planes needs the last of one and the first of the next
        between = int(np.searchsorted(positions, first, side="left"))  # after the previous planes
        ready = int(np.searchsorted(np.ceil(positions), last, side="right"))
        if between and self._last_plane is not None:
            seam = torch.cat((self._last_plane, planes[:1]))
            self._write(self._pending[:between], seam, first - 1, restore)
        if ready > between:
            self._write(self._pending[between:ready], planes, first, restore)
        self._pending = self._pending[ready:]
        self._last_plane = None if self.complete else planes[-1:].clone()

    def _write(
        self, slices: NDArray[np.int64], planes: torch.Tensor, first: int, restore: Restore
    ) -> None:
        """Restore neighbouring source slices from the planes around them, from `first` on."""
        plan = self._plan
        b, c = other_axes(plan.lead)  # source axes, in the order of `out`
        # Only in a sheared stack do rows and columns depend on the slice
        lines = slices if any(plan.lean) else slices[:1]
        at = [self._positions[slices] - first]
        at += [np.stack([plan.to_network(axis, int(s)) for s in lines]) for axis in (b, c)]
        if plan.network_axis(b) > plan.network_axis(c):
            planes = planes.transpose(2, 3)
        low, high = int(slices.min()), int(slices.max()) + 1
        direction = 1 if slices[-1] >= slices[0] else -1
        out = [np.moveaxis(m.T, 2 - plan.lead, 0)[low:high][::direction] for m in self._maps]
        if len(lines) == 1:
            planes, at, out = _in_memory_order(planes, at, out)
        restore(planes, (at[0], at[1], at[2]), out)


def slabs_of_slices(
    planes: torch.Tensor, at: Coordinates, classes: int = 1
) -> Iterator[tuple[slice, list[LinearWeights]]]:
    """Yield neighbouring source slices, few at once, with their interpolation weights.

    Weights are those across planes (P, C, B, D), and along both axes of a plane. `classes` are
    interpolated at once.
    """
    along, rows, columns = at[0], np.atleast_2d(at[1]), np.atleast_2d(at[2])
    lines = max(len(rows), len(columns))
    max_bytes = CPU_SLAB_BYTES if planes.device.type == "cpu" else GPU_SLAB_BYTES
    step = (
        1
        if lines > 1
        else max(1, max_bytes // max(1, 4 * classes * rows.shape[1] * columns.shape[1]))
    )
    for start in range(0, len(along), step):
        line = rows[start % len(rows)], columns[start % len(columns)]
        slab = (along[start : start + step], *line)
        weights = [
            LinearWeights(coordinates, size, planes.device)
            for coordinates, size in zip(slab, (planes.shape[0], *planes.shape[2:]), strict=True)
        ]
        yield slice(start, start + step), weights


def interpolate(values: torch.Tensor, weights: Sequence[LinearWeights]) -> torch.Tensor:
    """Return the values (P, B, D) of one class at the source's voxels, float32 (S, J, I).

    Planes are transposed while they are small, so that whole rows are selected: selecting elements
    within rows is ten times slower.
    """
    across, b, c = weights
    values = across.along(values, 0)
    values = c.along(values.transpose(1, 2).contiguous(), 1)
    return b.along(values.transpose(1, 2).contiguous(), 1)


def _in_memory_order(
    scores: torch.Tensor, at: list[NDArray[np.float64]], out: list[NDArray[Any]]
) -> tuple[torch.Tensor, list[NDArray[np.float64]], list[NDArray[Any]]]:
    """Return the arguments with the three axes in the order of the scores in memory."""
    strides = [scores.stride(dim) for dim in (0, 2, 3)]
    a, b, c = sorted(range(3), key=lambda axis: -strides[axis])
    dims = [(0, 2, 3)[axis] for axis in (a, b, c)]
    permuted = scores.permute(dims[0], 1, dims[1], dims[2])
    lines = [np.atleast_2d(at[axis]) for axis in (a, b, c)]
    return permuted, [lines[0][0], *lines[1:]], [m.transpose(a, b, c) for m in out]


class AreaResampler:
    """Takes planes of values on the network grid and resamples them by area to the source grid.

    All planes are kept until the last one: networks on a grid of fixed shape are small.

    Parameters
    ----------
    plan : NetworkPlan
        Source grid and network grid; not sheared.
    """

    def __init__(self, plan: NetworkPlan) -> None:
        self._plan = plan
        self._planes: list[torch.Tensor] = []

    def add(self, planes: torch.Tensor) -> None:
        """Take the next planes (N, C, B, D) across the network axis that follows ``plan.lead``."""
        self._planes.append(planes.to(torch.float32, copy=True))

    def slabs(
        self, maps: Sequence[NDArray[Any]]
    ) -> Iterator[tuple[torch.Tensor, list[NDArray[Any]]]]:
        """Yield values (S, C, J, I) of source slices, and views (S, J, I) of `maps` of them."""
        plan, values = self._plan, torch.cat(self._planes)
        self._planes.clear()
        lead = plan.lead
        x, y = (n for n in range(3) if n != plan.network_axis(lead))
        b, c = plan.follows[x], plan.follows[y]
        across, rows, columns = (self._matrix(axis, values.device) for axis in (lead, b, c))
        slab = max(1, AREA_SLAB_BYTES // (4 * values.shape[1] * len(rows) * len(columns)))
        for start in range(0, len(across), slab):
            extent = slice(start, start + slab)
            views = [np.moveaxis(each, lead, 0)[extent] for each in maps]
            if b > c:
                views = [view.swapaxes(1, 2) for view in views]
            resampled = torch.einsum("sn,nkbc->skbc", across[extent], values)
            yield rows @ resampled @ columns.T, views

    def _matrix(self, axis: int, device: torch.device) -> torch.Tensor:
        """Return the weights of the network's voxels for the source voxels along an axis."""
        plan = self._plan
        x, count = plan.network_axis(axis), plan.source.shape[axis]
        matrix = area_matrix(np.arange(count), count, plan.network.shape[x])
        if plan.flipped[x]:
            matrix = matrix[::-1].copy()
        return to_device(matrix.astype(np.float32), device)


class AreaRestorer:
    """Takes planes of scores, resamples them by area and decides labels on the source's voxels.

    Parameters are those of `ScoreRestorer`; the source grid is not sheared.
    """

    def __init__(self, plan: NetworkPlan, decision: Decision, classes: int) -> None:
        self._plan, self._decision, self._classes = plan, decision, classes
        self._resampler = AreaResampler(plan)

    def add(self, planes: ScorePlanes) -> None:
        """Take the next planes across the network axis that follows ``plan.lead``."""
        self._resampler.add(planes.scores[:, : self._classes])

    def finish(self, _: Clean | None = None) -> list[NDArray[Any]]:
        """Return the label maps (I, J, K), I fastest in memory; cleaning does not apply."""
        dtype = label_type(self._decision, self._classes)
        count = map_count(self._decision, self._classes)
        shape = self._plan.source.shape
        labels = [np.zeros(shape, dtype, order="F") for _ in range(count)]
        for values, views in self._resampler.slabs(labels):
            for view, decided in zip(views, decide_on_grid(values, self._decision), strict=True):
                view[:] = decided.cpu().numpy()
        return labels


def uncertainty_restorer(plan: NetworkPlan, card: ModelCard, members: int) -> UncertaintyRestorer:
    """Return the restorer of the uncertainty of a model.

    Parameters
    ----------
    members : int
        Number of networks whose scores are averaged.
    """
    if card.restore == "labels":
        return _UncertaintyFromLabels(plan, card, members)
    return (_UncertaintyFromArea if plan.mode == "area" else _UncertaintyFromScores)(
        plan, card, members
    )


def uncertainty_map_bytes(voxels: int, planes: tuple[int, int], members: int) -> tuple[int, int]:
    """Return the bytes of the maps of a scan, and of the work on a device.

    Parameters
    ----------
    voxels : int
        Voxels of the scan.
    planes : (int, int)
        Bytes of the scores of one plane of the network grid, and number of planes.
    members : int
        Number of networks whose scores are averaged.
    """
    maps = voxels * _n_maps(members)
    plane, count = planes
    arrays = _n_stacked(members) + 1
    stack = min(max(STACK_BYTES, plane * arrays), plane * arrays * count)
    return maps, 2 * stack + (members + 1) * min(MEMBER_LABEL_BYTES, 2 * voxels)


def entropy(scores: Iterable[torch.Tensor], card: ModelCard) -> torch.Tensor:
    """Return the entropy of class probabilities, 0 to 1; classes are visited one by one.

    Parameters
    ----------
    scores : iterable of float tensors
        Scores of each class, after the card's activation. Without activation they are taken as
        logits.
    card : ModelCard
        With argmax, the entropy over all classes, divided by its maximum, the logarithm of their
        number. Otherwise, of channels that overlap, the largest binary entropy in bits.
    """
    if not isinstance(card.decision, Argmax) or card.activation == "sigmoid":
        return functools.reduce(torch.maximum, (_bits(v, card.activation) for v in scores))
    if card.activation is None:
        nats = _entropy_of_logits(scores)
    else:  # a softmax's probabilities
        positive = (values.to(torch.float32).clamp(min=0.0) for values in scores)
        nats = functools.reduce(torch.Tensor.add_, (-torch.xlogy(p, p) for p in positive))
    return (nats / math.log(max(card.n_outputs, 2))).clamp_(0.0, 1.0)


def _bits(scores: torch.Tensor, activation: str | None) -> torch.Tensor:
    """Return the binary entropy of the scores of one channel, in bits."""
    p = scores.to(torch.float32)
    p = (p.sigmoid() if activation is None else p).clamp(0.0, 1.0)
    return -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)) / math.log(2)


def _entropy_of_logits(scores: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the entropy of the softmax: log of the sum of exp, minus the mean score, in nats."""
    remaining = (values.to(torch.float32) for values in scores)
    highest = next(remaining).clone()
    sums, weighted = torch.ones_like(highest), highest.clone()
    for x in remaining:
        # A running maximum, so that exp can't overflow: earlier sums are scaled to the new one
        above = torch.maximum(highest, x)
        old, new = (highest - above).exp_(), (x - above).exp_()
        sums, weighted = sums.mul_(old).add_(new), weighted.mul_(old).add_(new * x)
        highest = above
    return sums.log() + highest - weighted / sums


def _n_maps(members: int) -> int:
    return 2 if members > 1 else 1


def _n_stacked(members: int) -> int:
    """Return the number of score arrays in a stack: the mean, and each network's own."""
    return 1 + members if members > 1 else 1


def _to_steps(values: torch.Tensor) -> NDArray[np.uint8]:
    return (values * UNCERTAINTY_STEPS).round_().to(torch.uint8).cpu().numpy()


class UncertaintyRestorer(ABC):
    """Takes planes of scores, as restorers of labels do, and returns maps of uncertainty."""

    def __init__(self, plan: NetworkPlan, card: ModelCard, members: int) -> None:
        self._plan, self._card, self._members = plan, card, members
        self._classes, self._rounded = card.n_outputs, card.window.sums == "float16"

    @abstractmethod
    def finish(self) -> Uncertainty:
        """Return the maps on the source grid."""

    @abstractmethod
    def _take(self, stack: torch.Tensor, first: int) -> None:
        """Take a stack of planes from `first` on, of shape (N, arrays x classes + 1, B, D).

        Its channels are the mean scores, each network's own, and `known`.
        """

    def add(self, planes: ScorePlanes) -> None:
        """Take the next planes."""
        mean = planes.scores[:, : self._classes]
        own = [each[:, : self._classes] for each in planes.members]
        arrays = [mean, *(own or [mean] * (_n_stacked(self._members) - 1))]
        known = planes.known
        # `known` is stacked with the scores, so that it is interpolated with their weights
        known = torch.ones_like(mean[:, :1]) if known is None else known.to(mean.dtype)
        step = max(1, STACK_BYTES // max(1, len(arrays) * mean[0].nbytes))
        for start in range(0, len(mean), step):
            planes_at_once = slice(start, start + step)
            slab = [array[planes_at_once] for array in (*arrays, known)]
            self._take(torch.cat(slab, dim=1), planes.first + start)

    def _scores(self, stack: torch.Tensor, member: int) -> torch.Tensor:
        """Return the scores of one network of a stack; the mean is number 0."""
        return stack[:, member * self._classes : (member + 1) * self._classes]

    def _on_grid(self, stack: torch.Tensor) -> list[NDArray[np.uint8]]:
        """Return the maps (N, B, D) of a stack, on its own grid."""
        uncertain = entropy(self._scores(stack, 0).unbind(1), self._card)
        maps = [_to_steps(uncertain * stack[:, -1])]
        if self._members > 1:
            decided = decide_on_grid(self._scores(stack, 0), self._card.decision)
            differ = torch.zeros(decided.shape[1:], device=stack.device)
            for member in range(1, self._members + 1):
                own = decide_on_grid(self._scores(stack, member), self._card.decision)
                differ += (own != decided).any(dim=0)
            maps.append(_to_steps(differ / self._members))
        return maps


class _UncertaintyFromScores(UncertaintyRestorer):
    """Computes the maps from scores that are interpolated on the source grid."""

    def __init__(self, plan: NetworkPlan, card: ModelCard, members: int) -> None:
        super().__init__(plan, card, members)
        count = _n_maps(members)
        self._maps = [np.zeros(plan.source.shape, np.uint8, order="F") for _ in range(count)]
        self._slices = SourceSlices(plan, self._maps)

    def _take(self, stack: torch.Tensor, first: int) -> None:
        self._slices.add(stack, first, self._restore)

    def finish(self) -> Uncertainty:
        clear_uncovered(self._maps, self._plan)
        return Uncertainty(*self._maps)

    def _restore(self, stack: torch.Tensor, at: Coordinates, out: Maps) -> None:
        for slab, weights in slabs_of_slices(stack, at):
            scores = (interpolate(stack[:, n], weights) for n in range(self._classes))
            uncertain = entropy(scores, self._card)
            out[0][slab] = _to_steps(
                uncertain * interpolate(stack[:, -1], weights).clamp_(0.0, 1.0)
            )
        if self._members > 1:
            self._disagreement(stack, at, out[1])

    def _disagreement(self, stack: torch.Tensor, at: Coordinates, out: NDArray[Any]) -> None:
        """Write the share of networks whose own labels differ from the result."""
        decision = self._card.decision
        # Few slices at once: labels of one network at a time are kept, not those of all
        dtype, count = label_type(decision, self._classes), map_count(decision, self._classes)
        slice_bytes = max(1, count * np.dtype(dtype).itemsize * math.prod(out.shape[1:]))
        step = max(1, MEMBER_LABEL_BYTES // slice_bytes)
        for start in range(0, len(out), step):
            slab = slice(start, start + step)
            lines = [axis[slab] if axis.ndim == 2 and len(axis) > 1 else axis for axis in at[1:]]
            slab_at = (at[0][slab], lines[0], lines[1])
            shape = out[slab].shape
            decided = self._labels(stack, 0, slab_at, shape)
            differ = np.zeros(shape, np.float32)
            for member in range(1, self._members + 1):
                own = self._labels(stack, member, slab_at, shape)
                differ += np.any([a != b for a, b in zip(own, decided, strict=True)], axis=0)
            out[slab] = np.rint(differ * (UNCERTAINTY_STEPS / self._members))

    def _labels(
        self, stack: torch.Tensor, member: int, at: Coordinates, shape: tuple[int, ...]
    ) -> list[Labels]:
        """Return the labels of one network at source voxels."""
        decision, scores = self._card.decision, self._scores(stack, member)
        backend = choose_backend(
            decision, self._classes, scores.device, scores.dtype, rounded=self._rounded
        )
        dtype = label_type(decision, self._classes)
        labels = [np.zeros(shape, dtype) for _ in range(map_count(decision, self._classes))]
        backend.label(scores, at, decision, labels, rounded=self._rounded)
        return labels


class _UncertaintyFromLabels(UncertaintyRestorer):
    """Computes the maps on the network grid and maps them back by nearest neighbour."""

    def __init__(self, plan: NetworkPlan, card: ModelCard, members: int) -> None:
        super().__init__(plan, card, members)
        self._planes: list[list[NDArray[np.uint8]]] = [[] for _ in range(_n_maps(members))]

    def _take(self, stack: torch.Tensor, _: int) -> None:
        for planes_of_map, added in zip(self._planes, self._on_grid(stack), strict=True):
            planes_of_map.append(added)

    def finish(self) -> Uncertainty:
        axis = self._plan.network_axis(self._plan.lead)
        whole = (np.moveaxis(np.concatenate(planes), 0, axis) for planes in self._planes)
        return Uncertainty(*(restore_labels(values, self._plan) for values in whole))


class _UncertaintyFromArea(UncertaintyRestorer):
    """Computes the maps on the source grid from scores that are resampled by area."""

    def __init__(self, plan: NetworkPlan, card: ModelCard, members: int) -> None:
        super().__init__(plan, card, members)
        self._resampler = AreaResampler(plan)

    def _take(self, stack: torch.Tensor, _: int) -> None:
        self._resampler.add(stack)

    def finish(self) -> Uncertainty:
        count = _n_maps(self._members)
        maps = [np.zeros(self._plan.source.shape, np.uint8, order="F") for _ in range(count)]
        for stack, views in self._resampler.slabs(maps):
            for view, values in zip(views, self._on_grid(stack), strict=True):
                view[:] = values
        return Uncertainty(*maps)
