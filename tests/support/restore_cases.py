"""Scores, positions and decisions for kernels that restore labels, and the right labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scanloom.cards.card import Argmax, Decision, Paint, Threshold
from scanloom.inference.restore import cuda
from scanloom.inference.restore.decisions import map_count

TIE = 1e-4
"""Scores of about 1 that differ less are one in float32."""
POISON = 201
"""What stands in labels before: no kernel under test gives it."""

PAINT = Paint(((3, 7), (1, 1), (4, 2)), 0.5)
"""Three regions, not in the order of their channels or numbers."""

Places = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class Case:
    """The input of a kernel.

    Parameters
    ----------
    scores : (P, C, B, D) tensor
        On a CPU, of any strides.
    places : (S,), (J,) or (S, J), (I,) or (S, I) arrays
        Coordinates of source voxels on planes, rows and columns.
    decision : Decision
        Rule that makes labels of scores.
    out : callable
        Gives an empty label map of a shape: its type and strides are part of the case.
    rounded : bool
        Whether scores are rounded to half precision on the source's voxels too.
    """

    scores: torch.Tensor
    places: Places
    decision: Decision = Argmax()  # noqa: RUF009 it is frozen
    out: Callable[[tuple[int, ...]], NDArray[Any]] = lambda shape: np.empty(shape, np.uint8)
    rounded: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Slices, rows and columns of the labels."""
        s, j, i = (at.shape[-1] for at in self.places)
        return s, j, i


def smooth(
    planes: int, classes: int, rows: int, columns: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return scores like a network's: smooth, each class the largest somewhere."""
    generator = torch.Generator().manual_seed(classes)
    coarse = torch.randn(1, classes, 4, 4, 4, generator=generator) * 4
    size = (planes, rows, columns)
    fine = torch.nn.functional.interpolate(coarse, size, mode="trilinear", align_corners=True)
    return fine[0].transpose(0, 1).contiguous().to(dtype)


def spread(size: int, count: int, beyond: float = 0.0) -> NDArray[np.float64]:
    """Return coordinates from one end of an axis to the other, and a little beyond both."""
    return np.linspace(-beyond, size - 1 + beyond, count)


def _places(scores: torch.Tensor, shape: tuple[int, int, int]) -> Places:
    planes, _, rows, columns = scores.shape
    s, j, i = shape
    return spread(planes, s, 0.4), spread(rows, j, 0.3), spread(columns, i)


def cases() -> dict[str, Case]:
    """Return the cases by name; small enough for an interpreter."""
    plain = smooth(6, 5, 11, 17)
    where = _places(plain, (4, 9, 20))
    coarse = (plain + 8).to(torch.float16)  # rounding makes ties: values are 1/128 apart
    half, bf16 = plain.to(torch.float16), plain.to(torch.bfloat16)
    lean = 1.7 * np.arange(4)[:, None]
    tight = smooth(6, 5, 17, 11).transpose(2, 3)
    many, most = smooth(5, 40, 9, 10), smooth(3, 260, 3, 4)
    noise = torch.randn(6, 20, 7, 9, generator=torch.Generator().manual_seed(9))
    over = _places(noise, (8, 15, 20))
    single = smooth(1, 3, 1, 9)
    tied = torch.ones(4, 5, 6, 7)
    tied[:, 0] = 0
    few = tuple(at[::3] for at in where)
    cut = smooth(9, 8, 11, 17)[2:8, :5]
    falling = (where[0][::-1], where[1][::-1], where[2][::-1])
    own = (np.arange(2.0, 6.0), np.arange(11.0), np.arange(17.0))
    leaning = (where[0], where[1] + lean - 3, where[2] - lean / 2)
    return {
        "float32": Case(plain, _places(plain, (4, 9, 35))),
        "half": Case(half, where),
        "bfloat16": Case(bf16, where),
        "flipped": Case(plain, falling),
        "permuted": Case(tight, where),
        "part of larger scores": Case(cut, where),
        "finer than the scan": Case(plain, (few[0], few[1], few[2])),
        "leaning": Case(plain, leaning),
        "the scan's own voxels": Case(plain, own),
        "labels turned": Case(plain, where, out=lambda s: np.empty(s, np.uint8, order="F")),
        "labels backwards": Case(plain, where, out=_backwards),
        "leaning, backwards": Case(plain, leaning, out=_backwards),
        "labels apart": Case(plain, where, out=lambda s: np.empty((*s, 2), np.uint8)[..., 1]),
        "noise": Case(noise, over),
        "noise, leaning, backwards": Case(
            noise, (over[0], over[1] + 0.9 * np.arange(8)[:, None], over[2]), out=_backwards
        ),
        "noise, rounded": Case((noise + 8).to(torch.float16), over, rounded=True),
        "noise of many classes": Case(noise.reshape(2, 60, 7, 9), _places(noise[:2], (3, 9, 17))),
        "noise, one voxel thick": Case(noise[:1, :, :1], _places(noise[:1, :, :1], (2, 3, 21))),
        "two words of classes": Case(many, _places(many, (4, 7, 13))),
        "more classes than a byte": Case(most, _places(most, (2, 5, 7)), out=_wide),
        "one class": Case(plain[:, :1], where),
        "one voxel thick": Case(single, _places(single, (3, 4, 20))),
        "ties": Case(tied, _places(tied, (3, 8, 9))),
        "thresholds": Case(plain, where, Threshold(0.5)),
        "thresholds, leaning, half": Case(
            half, (where[0], where[1] + lean, where[2]), Threshold(-0.25)
        ),
        "rounded": Case(coarse, where, rounded=True),
        "rounded, leaning": Case(coarse, leaning, rounded=True),
        "rounded thresholds": Case(coarse, where, Threshold(8.0), rounded=True),
        "painted": Case(plain, where, PAINT),
        "painted, leaning, backwards": Case(plain, leaning, PAINT, _backwards),
        "painted, rounded, wide": Case(
            coarse,
            where,
            Paint(((3, 300), (1, 1), (4, 2)), 8.0, inclusive=False),
            _wide,
            rounded=True,
        ),
    }


def _wide(shape: tuple[int, ...]) -> NDArray[Any]:
    """Return labels of two bytes."""
    return np.empty(shape, np.uint16)


def _backwards(shape: tuple[int, ...]) -> NDArray[Any]:
    """Return labels of which slices and columns go backwards through memory."""
    return np.empty(shape, np.uint8)[::-1, :, ::-1]


def brought_back(case: Case) -> NDArray[np.float64]:
    """Return all scores at the source's voxels by matrices in float64: (S, C, J, I)."""
    planes, _, rows, columns = case.scores.shape
    along, down, wide = (np.atleast_2d(at) for at in case.places)
    scores = np.tensordot(_matrix(along[0], planes), case.scores.double().numpy(), 1)
    return np.stack(
        [
            _matrix(down[s % len(down)], rows) @ scores[s] @ _matrix(wide[s % len(wide)], columns).T
            for s in range(len(scores))
        ]
    )


def _matrix(at: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return linear interpolation as a (N, size) matrix."""
    inside = np.clip(at, 0, size - 1)[:, None]
    return np.maximum(0.0, 1.0 - np.abs(inside - np.arange(size)))


def labelled(case: Case, device: torch.device) -> list[NDArray[Any]]:
    """Return the kernels' labels of a case, made on `device`."""
    out = [case.out(case.shape) for _ in range(map_count(case.decision, case.scores.shape[1]))]
    for labels in out:
        labels[:] = POISON
    scores = case.scores.to(device)
    cuda.label(scores, case.places, case.decision, out, rounded=case.rounded)
    return out


def wrong(case: Case, labels: list[NDArray[Any]]) -> int:
    """Return how many labels are neither right nor a matter of rounding."""
    truth = brought_back(case)
    rounding = TIE * max(1.0, float(np.abs(truth).max()))
    if case.rounded:
        truth, rounding = truth.astype(np.float16).astype(np.float64), 0.0
    if isinstance(case.decision, Threshold):
        value = case.decision.value
        sure = np.abs(truth - value) >= rounding
        decided = np.stack(labels, axis=1)
        numbers = np.arange(1, truth.shape[1] + 1)[None, :, None, None]
        return int((sure & (decided != (truth >= value) * numbers)).sum())
    (decided,) = labels
    if isinstance(case.decision, Paint):
        return int(np.sum(_unlike_painted(decided, truth, case.decision, rounding)))
    if case.rounded:
        return int((decided != truth.argmax(axis=1)).sum())
    known = decided < truth.shape[1]
    chosen = np.take_along_axis(truth, np.where(known, decided, 0)[:, None].astype(int), axis=1)
    return int((~known | (truth.max(axis=1) - chosen[:, 0] > rounding)).sum())


def _unlike_painted(
    decided: NDArray[Any], truth: NDArray[np.float64], paint: Paint, rounding: float
) -> NDArray[np.bool_]:
    """Return where labels are not those of regions painted one over the other."""
    expected, sure = np.zeros(decided.shape, int), np.ones(decided.shape, bool)
    for channel, number in paint.regions:
        score = truth[:, channel]
        expected[score >= paint.value if paint.inclusive else score > paint.value] = number
        sure &= np.abs(score - paint.value) >= rounding
    return np.asarray(sure & (decided != expected))
