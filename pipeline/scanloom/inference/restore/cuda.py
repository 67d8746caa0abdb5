"""Restores labels on CUDA, tile by tile; most tiles read no score twice.

As on a CPU, linear interpolation mixes neighbours with weights that add up to 1. So within a block
of network voxels, a class can win only if its maximum there reaches the largest of all classes'
minima. One kernel records the remaining classes of each block. Another processes a tile of a source
slice: it fills the tile if one class remains, else interpolates the remaining classes, with the
running maximum in registers. Labels equal those of plain torch, except for exact ties, which
rounding decides.

Triton comes with torch's CUDA packages only; without it, plain torch is used.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scanloom.cards.card import Argmax, Decision, Paint
from scanloom.inference.device import is_out_of_memory, to_device
from scanloom.inference.restore.cpu import Coordinates, KernelChoice, flipped
from scanloom.inference.restore.decisions import lowest_score, map_count, painted
from scanloom.inference.transfers import LabelCopies

BLOCK = 4
"""Edge of a block in network voxels: larger blocks exclude fewer classes, smaller cost more."""
TILE_ROWS, TILE_COLUMNS = 8, 32
"""Source voxels of a slice that are decided together: a warp writes whole sectors of memory."""
MAX_CLASSES = 1024
"""Maximum number of classes: beyond it, the values of one block overflow a program's registers."""
_BLOCK_VALUES = 256
"""Classes x blocks whose bounds one program holds: 8 values per thread; 32 spill registers."""
_CLASSES_PER_WORD = 31
"""Classes per word of a bit mask of remaining classes, as in the kernels."""


@dataclass(frozen=True, eq=False)
class AxisTaps:
    """Neighbours and weights of the source voxels along an axis, on the device.

    Parameters
    ----------
    index : (L, N) int32 tensor
        The network voxel below. One line, or one line per slice of a sheared stack.
    weight : (L, N) float32 tensor
        Weight of the voxel above; 0 beyond the last voxel.
    """

    index: torch.Tensor
    weight: torch.Tensor

    @property
    def step(self) -> int:
        """Elements from the line of one slice to the line of the next."""
        return self.index.shape[1] if len(self.index) > 1 else 0


SourceTaps = tuple[AxisTaps, AxisTaps, AxisTaps]
"""Taps along planes, rows and columns of scores."""


def taps(at: Coordinates, sizes: Sequence[int], device: torch.device) -> SourceTaps:
    """Return the neighbours and weights of coordinates, copied to the device in one transfer.

    Parameters
    ----------
    at : three (N,) or (L, N) float64 arrays
        Coordinates on planes, rows and columns, in any order; clipped to the ends.
    sizes : three int
        Numbers of planes, rows and columns.
    device : torch.device
        Device of the scores.
    """
    # Six small arrays in one transfer
    inside = [np.atleast_2d(np.clip(a, 0.0, n - 1.0)) for a, n in zip(at, sizes, strict=True)]
    below = [np.floor(a) for a in inside]
    indices = [b.astype(np.int32) for b in below]
    weights = [(a - b).astype(np.float32) for a, b in zip(inside, below, strict=True)]
    lines = [v.view(np.int32).ravel() for v in (*indices, *weights)]
    ends = np.cumsum([len(line) for line in lines[:-1]]).tolist()
    tensors = to_device(np.concatenate(lines), device).tensor_split(ends)
    along, rows, columns = (
        AxisTaps(index.view(a.shape), weight.view(torch.float32).view(a.shape))
        for index, weight, a in zip(tensors[:3], tensors[3:], inside, strict=True)
    )
    return along, rows, columns


def available(device: torch.device, classes: int = 1) -> KernelChoice:
    """Return whether the kernels support that many classes, and work on a device."""
    if device.type != "cuda":
        return KernelChoice(False, "the device is not CUDA")
    if classes > MAX_CLASSES:
        return KernelChoice(False, f"there are more than {MAX_CLASSES} classes")
    return _tested(device)


@functools.cache
def _tested(device: torch.device) -> KernelChoice:
    """Return whether the kernels work, which is tested once on four voxels of known labels.

    Triton requires a compiler and a cache folder.
    """
    # torch's packages for CPUs come without it
    if importlib.util.find_spec("triton") is None:
        return KernelChoice(False, "Triton is not installed")
    line = torch.tensor([[0.0, 1.0], [0.75, 0.25]])[None, :, None]  # two classes that cross
    out = np.full((1, 1, 4), 9, np.uint8)
    try:
        label(line.to(device), (np.zeros(1), np.zeros(1), np.arange(4) / 3), Argmax(), [out])
    except Exception as exc:  # a compiler fails in its own ways; torch still works
        if is_out_of_memory(exc):
            raise
        return KernelChoice(False, f"Triton does not run here ({type(exc).__name__})")
    if out.ravel().tolist() != [1, 1, 0, 0]:
        return KernelChoice(False, "Triton's labels were wrong")
    return KernelChoice(True, "the Triton kernels were compiled and tested")


def label(
    scores: torch.Tensor,
    at: Coordinates,
    decision: Decision,
    out: Sequence[NDArray[Any]],
    *,
    rounded: bool = False,
    copies: LabelCopies | None = None,
) -> None:
    """Label source voxels from planes of scores: `cpu.label` for scores on CUDA.

    Coordinates may be in any order. `out` is overwritten: at once, for which the host waits, or if
    `copies` are given, when the caller waits for them.

    Raises
    ------
    ValueError
        If shapes don't match, or there are more than `MAX_CLASSES` classes.
    """
    for n in range(3):
        if out[0].strides[n] < 0:  # torch has none
            out, at = flipped(out, at, n)
    on_device = [torch.empty_like(torch.from_numpy(labels), device=scores.device) for labels in out]
    where = taps(at, (scores.shape[0], *scores.shape[2:]), scores.device)
    decide(scores, where, decision, on_device, rounded=rounded)
    if scores.device.type != "cuda":  # Triton's interpreter
        for target, labels in zip(out, on_device, strict=True):
            target[...] = labels.numpy()
        return
    started = LabelCopies() if copies is None else copies
    for target, labels in zip(out, on_device, strict=True):
        started.add(target, labels)
    if copies is None:
        started.wait()


def decide(
    scores: torch.Tensor,
    where: SourceTaps,
    decision: Decision,
    out: Sequence[torch.Tensor],
    *,
    rounded: bool = False,
) -> None:
    """Label source voxels on the device asynchronously.

    Arguments as of `label`, but for the neighbours and weights of the source voxels, and labels
    (S, J, I) of uint8, uint16 or int32 on the device of the scores.

    Raises
    ------
    ValueError
        If shapes don't match, or there are more than `MAX_CLASSES` classes.
    """
    _check(scores, where, decision, out)
    if out[0].numel() == 0:
        return
    with torch.cuda.device(scores.get_device()):  # Triton launches on the current one
        _launch(scores, where, decision, out, rounded)


def _check(
    scores: torch.Tensor,
    where: SourceTaps,
    decision: Decision,
    out: Sequence[torch.Tensor],
) -> None:
    """Refuse arguments with which the kernels would access memory out of bounds."""
    # Kernels do not check bounds
    if scores.shape[1] > MAX_CLASSES:
        raise ValueError(f"at most {MAX_CLASSES} classes, got {scores.shape[1]}")
    maps = map_count(decision, scores.shape[1])
    shape = tuple(axis.index.shape[1] for axis in where)
    if len(out) != maps or any(tuple(labels.shape) != shape for labels in out):
        shapes = [tuple(labels.shape) for labels in out]
        raise ValueError(f"labels must be {maps} of {shape}, got {shapes}")
    if any(len(axis.index) not in (1, shape[0]) for axis in where[1:]) or len(where[0].index) != 1:
        raise ValueError("taps must have one line or, except on the leading axis, one per slice")


def _launch(
    scores: torch.Tensor,
    where: SourceTaps,
    decision: Decision,
    out: Sequence[torch.Tensor],
    rounded: bool,
) -> None:
    """Launch the kernels: for argmax once, else for each class that is compared with a threshold.

    Painted regions are labelled one by one in a map of their own, with the class + 1.
    """
    from scanloom.inference.restore import triton_kernels as kernels

    planes, classes, height, width = scores.shape
    mask_words = -(-classes // _CLASSES_PER_WORD)
    block_planes, block_rows, block_columns = (
        -(-size // BLOCK) for size in (planes, height, width)
    )
    # Few classes, many blocks in a program, and the reverse: its registers hold both
    lanes = 1 << (classes - 1).bit_length()  # Triton requires powers of two
    at_once = max(1, _BLOCK_VALUES // lanes)
    labelled, value = [(0, 0, 0)], 0.0
    argmax = isinstance(decision, Argmax)
    if not isinstance(decision, Argmax):
        labelled, value = list(painted(decision, classes)), lowest_score(decision)
    shape = (1 if argmax else 2, block_planes, block_rows, block_columns, mask_words)
    masks = torch.empty(shape, dtype=torch.int32, device=scores.device)
    constants = {"BLOCK": BLOCK, "MASK_WORDS": mask_words, "ARGMAX": argmax}
    kernels.mark_classes[block_planes, block_rows, -(-block_columns // at_once)](
        scores,
        masks,
        *scores.shape,
        *scores.stride(),
        block_columns,
        value,
        CLASSES=lanes,
        BLOCKS=at_once,
        **constants,
    )
    # Regions may share a map and overwrite one another, so each is marked in a map of its own
    region = None
    if isinstance(decision, Paint):
        region = torch.empty_like(out[0], dtype=torch.uint8 if classes < 256 else torch.int32)
        out[0].zero_()
    along, rows, columns = where
    for channel, number, which in labelled:
        labels = out[which] if region is None else region
        n_slices, n_rows, n_columns = labels.shape
        kernels.label_tile[-(-n_columns // TILE_COLUMNS), -(-n_rows // TILE_ROWS), n_slices](
            scores,
            masks,
            labels,
            along.index,
            along.weight,
            rows.index,
            rows.weight,
            rows.step,
            columns.index,
            columns.weight,
            columns.step,
            planes,
            height,
            width,
            *scores.stride(),
            n_rows,
            n_columns,
            *labels.stride(),
            channel,
            value,
            masks[0].numel(),
            ROWS=TILE_ROWS,
            COLUMNS=TILE_COLUMNS,
            HALF=rounded,
            **constants,
        )
        if region is not None:
            out[0].copy_(torch.where(region != 0, number, out[0].to(torch.int32)))
