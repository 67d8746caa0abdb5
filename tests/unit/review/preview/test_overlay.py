from __future__ import annotations

import numpy as np
import pytest

from scanloom.review.preview.content import OVERSAMPLING, Overlay, overlay_structures

RED = (255.0, 0.0, 0.0)


def drawn(labels, gray=100, filled=(False, True)) -> np.ndarray:
    """Draw labels, given per pixel, in red on a grey picture."""
    fine = np.repeat(np.repeat(labels, OVERSAMPLING, 0), OVERSAMPLING, 1)
    colors = np.array([(0, 0, 0), RED], np.float32)
    picture = np.full(labels.shape, gray, np.uint8)
    return np.asarray(overlay_structures(picture, [Overlay(fine, colors, np.array(filled))]))


def square(size=20) -> np.ndarray:
    labels = np.zeros((size, size), np.uint8)
    labels[4:-4, 4:-4] = 1
    return labels


def test_contours_are_one_and_a_third_pixels_wide():
    """The red above the fill adds up to 1.3 pixels across an edge."""
    page = drawn(square(), gray=0, filled=(False, False)).astype(float)

    assert page[10, :10, 0].sum() / 255 / 0.95 == pytest.approx(4 / 3, abs=0.03)
    assert 0 < page[10, 5, 0] < page[10, 4, 0]


def test_areas_let_the_scan_shine_through():
    """A light fill inside; outside and in large structures nothing changes."""
    labels = square()

    page = drawn(labels).astype(int)

    assert (page[labels == 0] == 100).all()
    assert 0.15 <= (page[10, 10, 0] - 100) / 155 <= 0.2
    assert (drawn(labels, filled=(False, False))[10, 10] == 100).all()


def test_contours_are_antialiased():
    """A slanted edge has pixels between grey and red."""
    rows, columns = np.indices((60, 60))
    fine = (rows < 0.37 * columns + 20).astype(np.uint8)
    colors = np.array([(0, 0, 0), RED], np.float32)

    page = overlay_structures(
        np.zeros((20, 20), np.uint8), [Overlay(fine, colors, np.array([False, False]))]
    )

    assert len(np.unique(np.asarray(page)[..., 0])) >= 6


def test_a_single_voxel_is_seen():
    """A structure as small as a pixel is drawn as strongly as a contour."""
    labels = np.zeros((9, 9), np.uint8)
    labels[4, 4] = 1

    assert drawn(labels)[4, 4, 0] > 240
