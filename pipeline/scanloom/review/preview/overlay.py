"""Structures drawn on a scan: light areas and thin antialiased contours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

FILL_OPACITY = 0.18
"""Opacity of a structure's area, low enough to show the tissue below it."""
OUTLINE_OPACITY = 0.95
"""Opacity of a structure's contour."""
OVERSAMPLING = 3
"""Samples per pixel along each axis, from which contours are antialiased."""
LINE_SAMPLES = 4
"""Width of a contour in samples: 1.3 pixels."""


@dataclass(frozen=True, eq=False)
class Overlay:
    """Structures of one layer in a picture.

    Parameters
    ----------
    labels : (3 H, 3 W) array
        Labels of `OVERSAMPLING` samples per pixel along each axis.
    colors : (N, 3) array
        RGB colour of each label.
    filled : (N,) array
        Whether the area of each label is filled.
    """

    labels: NDArray[Any]
    colors: NDArray[np.float32]
    filled: NDArray[np.bool_]

    @property
    def middle(self) -> NDArray[Any]:
        """The label (H, W) of the middle sample of each pixel."""
        first = OVERSAMPLING // 2
        return self.labels[first::OVERSAMPLING, first::OVERSAMPLING]


def overlay_structures(gray: NDArray[np.uint8], layers: Sequence[Overlay]) -> Image.Image:
    """Return a plane (H, W) with its structures on top: first all areas, then all contours."""
    picture = np.repeat(gray[:, :, None], 3, axis=2)
    flat = picture.reshape(-1, 3)
    for layer in layers:
        labels = layer.middle.ravel()
        at = np.flatnonzero(layer.filled[labels])
        _blend(flat, at, layer.colors[labels[at]], FILL_OPACITY)
    for layer in layers:
        edges = np.where(contour(layer.labels), layer.labels, 0)
        cells = _cells(edges)
        label = cells[0].copy()
        samples = (cells[0] > 0).astype(np.uint8)
        for cell in cells[1:]:
            np.maximum(label, cell, out=label)
            samples += cell > 0
        at = np.flatnonzero(label)
        share = samples.ravel()[at].astype(np.float32) / len(cells)
        _blend(flat, at, layer.colors[label.ravel()[at]], OUTLINE_OPACITY * share[:, None])
    return Image.fromarray(picture)


def contour(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Return the samples of a structure within `LINE_SAMPLES` of another one or of none."""
    edge = np.zeros(labels.shape, bool)
    for step in (LINE_SAMPLES, LINE_SAMPLES // 2):
        across = labels[:, step:] != labels[:, :-step]
        edge[:, step:] |= across
        edge[:, :-step] |= across
        down = labels[step:] != labels[:-step]
        edge[step:] |= down
        edge[:-step] |= down
    return edge


def _cells(samples: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the n-th sample of every pixel, for each n."""
    steps = range(OVERSAMPLING)
    return [samples[a::OVERSAMPLING, b::OVERSAMPLING] for a in steps for b in steps]


def _blend(
    flat: NDArray[np.uint8],
    at: NDArray[np.intp],
    colors: NDArray[np.float32],
    opacity: float | NDArray[np.floating[Any]],
) -> None:
    """Mix colours (M, 3) into the pixels `at` (M,) of a picture (N, 3)."""
    below = flat[at].astype(np.float32)
    flat[at] = (below + opacity * (colors - below) + 0.5).astype(np.uint8)
