"""Restores labels on a CPU with kernels that Numba compiles.

Compiled code is cached in the user's cache folder (`$XDG_CACHE_HOME` or `~/.cache`), or in a
temporary folder of the process if other users could add code to that folder. If no folder can be
written, or Numba does not work, `KernelChoice` gives the reason, and plain torch is used.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scanloom.cards.card import Argmax, Decision, Paint, Threshold
from scanloom.core import user_cache_folder
from scanloom.inference.device import dtype_name
from scanloom.inference.restore.decisions import lowest_score, painted
from scanloom.own_python import is_closed, make_private_folder

_CHUNKS_PER_THREAD = 4
"""Chunks of work per thread, for balance: some regions of a scan have more edges than others."""

Coordinates = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
Axis = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]

_STORED = {torch.float32: torch.float32, torch.float16: torch.uint16, torch.bfloat16: torch.int16}
"""Types as which the kernels view scores: NumPy has no bfloat16, Numba no half."""


@dataclass(frozen=True)
class KernelChoice:
    """Whether the compiled kernels can be used, and the reason."""

    usable: bool
    why: str


@functools.cache
def available(
    overlapping: bool = False,
    dtype: torch.dtype = torch.float32,
    wide: bool = False,
    rounded: bool = False,
) -> KernelChoice:
    """Return whether a kernel works, which is tested once on four voxels of known labels.

    Parameters
    ----------
    overlapping : bool
        Compare scores with a threshold, not with each other.
    dtype : torch.dtype
        Type of the scores.
    wide : bool
        Labels are uint16.
    rounded : bool
        Interpolated scores are rounded to half precision.
    """
    if dtype not in _STORED:
        return KernelChoice(False, f"scores are {dtype_name(dtype)}")
    try:
        _kernels()
        decision = Threshold(0.5) if overlapping else Argmax()
        labels = np.dtype(np.uint16 if wide else np.uint8)
        correct = _works(decision, dtype, labels, rounded=rounded)
    except OSError:
        return KernelChoice(False, "compiled code can't be kept in the user's cache folder")
    except ImportError:
        return KernelChoice(False, "Numba is not installed, or not for these versions")
    except Exception as exc:  # noqa: BLE001 a compiler fails in its own ways; torch still works
        return KernelChoice(False, f"Numba does not run here ({type(exc).__name__})")
    if not correct:
        return KernelChoice(False, "Numba's labels were wrong")
    return KernelChoice(True, "the Numba kernels were compiled and tested")


def cache_folder() -> Path:
    """Return a folder for compiled code that only this user can write; created if missing.

    Raises
    ------
    OSError
        If no folder can be written, or other users could add code to every candidate.
    """
    folder = user_cache_folder() / "numba"
    make_private_folder(folder)
    # Compiled code is run as it is: who can write it runs code as this user
    if not is_closed(folder):
        folder = _temporary_folder()
    with tempfile.TemporaryFile(dir=folder):
        return folder


@functools.cache
def _temporary_folder() -> Path:
    """Return a new folder that is removed at the end of this process."""
    if not is_closed(Path(tempfile.gettempdir()).absolute(), sticky=True):
        raise PermissionError("others could move a temporary folder away")
    folder = Path(tempfile.mkdtemp(prefix="scanloom-numba-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _kernels() -> ModuleType:
    """Import the kernels; their compiled code is loaded from and saved to the cache folder."""
    source = Path(__file__).with_name("numba_kernels.py").read_bytes()
    folder = cache_folder() / hashlib.sha256(source).hexdigest()[:16]  # of this version's code
    from numba import config

    # Other users of Numba in this process keep their own folder
    before = config.CACHE_DIR
    config.CACHE_DIR = str(folder)  # read where functions are defined, and there only
    try:
        from scanloom.inference.restore import numba_kernels
    finally:
        config.CACHE_DIR = before
    return numba_kernels


def _works(decision: Decision, dtype: torch.dtype, labels: np.dtype[Any], *, rounded: bool) -> bool:
    """Return whether a kernel separates two classes that cross between two voxels."""
    line = torch.tensor([[0.0, 1.0], [0.75, 0.25]], dtype=dtype)[None, :, None]
    at = (np.zeros(1), np.zeros(1), np.arange(4) / 3)
    expected = [[1, 1, 0, 0]] if isinstance(decision, Argmax) else [[0, 0, 1, 1], [2, 2, 0, 0]]
    out = [np.zeros((1, 1, 4), labels) for _ in expected]
    label(line, at, decision, out, rounded=rounded)
    return [written.ravel().tolist() for written in out] == expected


def label(
    scores: torch.Tensor,
    at: Coordinates,
    decision: Decision,
    out: Sequence[NDArray[Any]],
    *,
    rounded: bool = False,
) -> None:
    """Label source voxels from planes of scores.

    Parameters
    ----------
    scores : (P, C, B, D) float32, half or bfloat16 tensor
        Planes of the network's grid on the CPU.
    at : (along, rows, columns)
        Coordinates of source voxels along planes (S), rows (J) and columns (I) of the scores,
        rising or falling; clipped to the ends. The last two may have one line per slice.
    decision : Decision
        The first largest score, or each score against a threshold.
    out : sequence of (S, J, I) uint8 or uint16 arrays
        Output, of any strides: one with the channel of the largest score; or one per channel n,
        initially 0, with n + 1 where its score reaches the threshold; or one, initially 0, with the
        numbers of painted regions.
    rounded : bool
        Round interpolated scores to half precision.
    """
    if not all(out[0].shape):
        return
    kernels = _kernels()
    for n in range(3):
        if at[n].shape[-1] > 1 and at[n].flat[0] > at[n].flat[at[n].shape[-1] - 1]:
            out, at = flipped(out, at, n)  # kernels take rising coordinates
    # Kernels step through columns one by one; other axes may have any stride
    if scores.stride(-1) != 1 and scores.shape[-1] > 1:
        scores = scores.contiguous()
    flat, steps = _flat_scores(scores)
    shape = tuple(scores.shape)
    axes = tuple(taps(a, shape[n]) for a, n in zip(at, (0, 2, 3), strict=True))
    half = True if rounded else None  # a type of its own: each is compiled separately
    jobs: list[tuple[NDArray[Any], tuple[int, np.float32, int] | None]] = [(out[0], None)]
    if not isinstance(decision, Argmax):
        lowest = np.float32(lowest_score(decision))
        jobs = [
            (out[which], (channel, lowest, number))
            for channel, number, which in painted(decision, shape[1])
        ]
    # Regions are painted over one another, so that a thread labels its rows by all of them in order
    groups = [jobs] if isinstance(decision, Paint) else [[job] for job in jobs]
    n_rows, threads = axes[1][2].shape[1] - 1, torch.get_num_threads()

    def label_rows(group: Sequence[tuple[NDArray[Any], Any]], rows: tuple[int, int]) -> None:
        for labels, rule in group:
            target, layout = _flat_labels(labels)
            kernels.label_rows(flat, shape, steps, axes, target, layout, rows, rule, half)

    label_rows(groups[0], (0, 0))  # compile or load the kernel once, before the threads start
    if threads == 1:
        for group in groups:
            label_rows(group, (0, n_rows))
        return
    ends = np.linspace(0, n_rows, min(n_rows, _CHUNKS_PER_THREAD * threads) + 1).astype(int)
    chunks = list(itertools.pairwise(ends.tolist()))
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(label_rows, g, chunk) for g in groups for chunk in chunks]:
            future.result()


def flipped(
    out: Sequence[NDArray[Any]], at: Coordinates, axis: int
) -> tuple[list[NDArray[Any]], Coordinates]:
    """Return labels and coordinates of `label`, flipped along an axis."""
    axes = list(at)
    axes[axis] = axes[axis][..., ::-1]
    if axis == 0:  # lines follow their slices
        axes = [a[::-1] if a.ndim == 2 else a for a in axes]
    return [np.flip(labels, axis) for labels in out], (axes[0], axes[1], axes[2])


def _flat_scores(scores: torch.Tensor) -> tuple[NDArray[Any], tuple[int, int, int]]:
    """Return a flat view from the first to the last score, and the strides in elements."""
    p, c, b, _ = scores.stride()
    span = 1 + sum((n - 1) * step for n, step in zip(scores.shape, scores.stride(), strict=True))
    stored = scores.view(_STORED[scores.dtype])
    return stored.as_strided((span,), (1,)).numpy(), (p, c, b)


def _flat_labels(labels: NDArray[Any]) -> tuple[NDArray[Any], tuple[int, int, int, int]]:
    """Return a flat view of the memory of labels, the offset of the first label and the strides."""
    steps = [step // labels.itemsize for step in labels.strides]
    falls = tuple(n for n, step in enumerate(steps) if step < 0)
    lowest = np.flip(labels, falls)
    ends = [(n - 1) * abs(step) for n, step in zip(labels.shape, steps, strict=True)]
    flat = np.lib.stride_tricks.as_strided(lowest, (1 + sum(ends),), (labels.itemsize,))
    return flat, (sum(ends[n] for n in falls), steps[0], steps[1], steps[2])


def taps(at: NDArray[np.float64], size: int) -> Axis:
    """Return the neighbours and weights of rising coordinates on an axis.

    Parameters
    ----------
    at : (N,) or (L, N) array
        Coordinates.
    size : int
        Length of the axis.

    Returns
    -------
    (index, weight, starts) of shapes (L, N), (L, N), (L, blocks + 1)
        The network voxel below, the weight of the voxel above, and the first source index in each
        block of network voxels.
    """
    block = _kernels().BLOCK
    inside = np.clip(np.atleast_2d(at), 0.0, size - 1.0)
    index = np.minimum(np.floor(inside), max(size - 2, 0)).astype(np.int64)
    weight = np.ascontiguousarray((inside - index).astype(np.float32))
    blocks = np.arange(-(-max(size - 1, 1) // block) + 1) * block
    starts = np.stack([np.searchsorted(line, blocks) for line in index])
    return np.ascontiguousarray(index), weight, starts.astype(np.int64)
