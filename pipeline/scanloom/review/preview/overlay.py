"""Structures on a picture of a scan: tinted areas, and outlines that stand out from any tissue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

FILL_OPACITY = 0.2
"""Opacity of a structure's area, low enough to show the tissue below it."""
OVERSAMPLING = 3
"""Samples per pixel along each axis, from which outlines are antialiased."""
SAMPLES = OVERSAMPLING**2
LINE_SAMPLES = 4
"""Width of an outline in samples: 1.3 pixels, inside its structure."""
CASING_SAMPLES = 3
"""Width in samples of the dark edge on each side of an outline: 1 pixel."""
CONTRAST = 3.2
"""Least contrast of an outline to the tissue below it: 3 (WCAG 2.2, 1.4.11), and some more since
pixels are rounded."""
DARK = 0.15
"""Luminance of tissue up to which the colour must have that contrast; on brighter tissue the
casing has it: 4:1 if it is black, 3:1 where it covers most of a pixel."""
LIGHTEST = 0.5
"""Luminance to which an outline is lightened at most."""


@dataclass(frozen=True, eq=False)
class Overlay:
    """Structures of one layer in a picture.

    Parameters
    ----------
    labels : (3 H, 3 W) array
        Labels of `OVERSAMPLING` samples per pixel along each axis; 0 for none.
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

    def cropped(self, rows: slice, columns: slice) -> Overlay:
        """Return the structures in some rows and columns of pixels."""
        sides = (slice(OVERSAMPLING * s.start, OVERSAMPLING * s.stop) for s in (rows, columns))
        return replace(self, labels=self.labels[tuple(sides)])


def overlay_structures(gray: NDArray[np.uint8], layers: Sequence[Overlay]) -> Image.Image:
    """Return a plane (H, W) with its structures on top: areas, then casings, then outlines.

    An outline lies inside its structure, so that those of neighbours lie side by side. On bright
    tissue its dark casing stands out, on dark tissue its colour, which is lightened if need be:
    no single colour has a contrast of 3:1 to black, grey and white.
    """
    picture = np.repeat(gray[:, :, None], 3, axis=2)
    rows, columns = _reached(layers)
    region = picture[rows, columns]
    if not region.size:
        return Image.fromarray(picture)
    flat = region.reshape(-1, 3)
    layers = [layer.cropped(rows, columns) for layer in layers]
    # areas first and casings next: neither may cover the outline of another layer
    for layer in layers:
        labels = layer.middle.ravel()
        at = np.flatnonzero(layer.filled[labels])
        _blend(flat, at, layer.colors[labels[at]], FILL_OPACITY)
    edges = [contour(layer.labels) for layer in layers]
    counts = [_counts(edge) for edge in edges]
    outlines = [np.flatnonzero(count) for count in counts]
    tissues = [_luminance(flat[at]) for at in outlines]
    for edge in edges:
        casing = _counts(grown(edge) & ~edge)
        at = np.flatnonzero(casing)
        _blend(flat, at, np.zeros(3, np.float32), casing[at, None] / SAMPLES)
    for layer, edge, count, at, tissue in zip(
        layers, edges, counts, outlines, tissues, strict=True
    ):
        share = count[at, None] / SAMPLES
        # two structures may share a pixel: the mean, and not the colour of one of them
        colors = layer.colors[_samples(layer.labels, at)]
        total = np.einsum("ns,nsc->nc", _samples(edge, at).astype(np.float32), colors)
        mean = total / (share * SAMPLES)
        _blend(flat, at, lightened(mean, tissue), share)
    picture[rows, columns] = flat.reshape(region.shape)
    return Image.fromarray(picture)


def _reached(layers: Sequence[Overlay]) -> tuple[slice, slice]:
    """Return the rows and columns of pixels that structures and their casings are in."""
    reached = []
    for axis in (0, 1):
        samples = [np.flatnonzero(layer.labels.any(axis=1 - axis)) for layer in layers]
        ends = [int(end) // OVERSAMPLING for each in samples if each.size for end in each[[0, -1]]]
        # a casing is a pixel wide
        reached.append(slice(max(0, min(ends) - 1), max(ends) + 2) if ends else slice(0, 0))
    return reached[0], reached[1]


def contour(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Return the samples of a structure within `LINE_SAMPLES` of another one or of none."""
    edge = np.zeros(labels.shape, bool)
    # half the distance as well: a gap that is narrower than a line has outlines too
    for step in (LINE_SAMPLES, LINE_SAMPLES // 2):
        across = labels[:, step:] != labels[:, :-step]
        edge[:, step:] |= across
        edge[:, :-step] |= across
        down = labels[step:] != labels[:-step]
        edge[step:] |= down
        edge[:-step] |= down
    return edge & (labels > 0)


def lightened(colors: NDArray[np.float32], tissue: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return colours (M, 3) that are brighter where tissue is too dark for the casing.

    `tissue` (M,) has relative luminances. The hue stays.
    """
    # rises to what dark tissue needs, then falls: a step would flicker in the noise of a scan
    rising = CONTRAST * (tissue + 0.05) - 0.05
    needed = np.minimum(rising, LIGHTEST - 2 * np.maximum(tissue - DARK, 0))
    linear = _linear(colors)
    # brighter first, which keeps the saturation, and mixed with white for the rest
    brighter = np.maximum(needed / np.maximum(linear @ LUMINANCE, 1e-3), 1)
    linear *= np.minimum(brighter, 1 / np.maximum(linear.max(axis=1), 1e-3))[:, None]
    own = linear @ LUMINANCE
    white = np.clip((needed - own) / np.maximum(1 - own, 1e-3), 0, 1)[:, None]
    return _encoded(linear + white * (1 - linear))


LUMINANCE = np.array((0.2126, 0.7152, 0.0722), np.float32)
"""Shares of linear red, green and blue in the relative luminance (WCAG 2.2)."""


def _linear(colors: NDArray[Any]) -> NDArray[np.float32]:
    share = np.asarray(colors, np.float32) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def _encoded(linear: NDArray[np.float32]) -> NDArray[np.float32]:
    share = np.where(
        linear <= 0.0031308, linear * 12.92, 1.055 * np.maximum(linear, 0) ** (1 / 2.4) - 0.055
    )
    return np.asarray(share * 255, np.float32)


_LUMINANCE_OF_BYTE = _linear(np.arange(256))[:, None] * LUMINANCE


def _luminance(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the relative luminance (N,) of pixels (N, 3)."""
    red, green, blue = (_LUMINANCE_OF_BYTE[pixels[:, n], n] for n in range(3))
    return np.asarray(red + green + blue)


def grown(edge: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the samples within `CASING_SAMPLES` of an edge, across and down."""
    wide = edge.copy()
    for step in range(1, CASING_SAMPLES + 1):
        wide[:, step:] |= edge[:, :-step]
        wide[:, :-step] |= edge[:, step:]
    high = wide.copy()
    for step in range(1, CASING_SAMPLES + 1):
        high[step:] |= wide[:-step]
        high[:-step] |= wide[step:]
    return high


def _counts(samples: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return how many samples of each pixel are set, (H W,)."""
    # along columns first: their additions are of whole rows
    rows = samples.reshape(-1, OVERSAMPLING, samples.shape[1]).sum(axis=1, dtype=np.uint8)
    first, second, third = (rows[:, n::OVERSAMPLING] for n in range(OVERSAMPLING))
    return np.asarray((first + second + third).ravel(), np.float32)


def _samples(samples: NDArray[Any], at: NDArray[np.intp]) -> NDArray[Any]:
    """Return the samples (M, 9) of the pixels `at` (M,)."""
    height, width = (n // OVERSAMPLING for n in samples.shape)
    y, x = np.divmod(at, width)
    cells = samples.reshape(height, OVERSAMPLING, width, OVERSAMPLING)
    return cells[y, :, x].reshape(len(at), SAMPLES)


def _blend(
    flat: NDArray[np.uint8],
    at: NDArray[np.intp],
    colors: NDArray[np.float32],
    opacity: float | NDArray[np.floating[Any]],
) -> None:
    """Mix colours (M, 3) into the pixels `at` (M,) of a picture (N, 3)."""
    below = flat[at].astype(np.float32)
    flat[at] = (below + opacity * (colors - below) + 0.5).astype(np.uint8)
