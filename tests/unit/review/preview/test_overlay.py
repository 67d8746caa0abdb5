from __future__ import annotations

import numpy as np
import pytest
from scipy.ndimage import maximum_filter

from scanloom.review.preview.overlay import (
    CASING_SAMPLES,
    OVERSAMPLING,
    Overlay,
    grown,
    overlay_structures,
)

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


def test_outlines_are_one_and_a_third_pixels_wide():
    """The red adds up to 1.3 pixels across an edge, inside the structure."""
    page = drawn(square(), gray=0, filled=(False, False)).astype(float)

    assert page[10, :10, 0].sum() / 255 == pytest.approx(4 / 3, abs=0.03)
    assert 0 < page[10, 5, 0] < page[10, 4, 0]
    assert not page[10, :4].any()


def test_outlines_of_neighbours_are_both_seen():
    """Each lies in its own structure, of which it has the colour; red left, green right."""
    fine = np.ones((60, 60), np.uint8)
    fine[:, 31:] = 2
    colors = np.array([(0, 0, 0), RED, (0, 255, 0)], np.float32)
    overlay = Overlay(fine, colors, np.array([False] * 3))

    row = np.asarray(overlay_structures(np.zeros((20, 20), np.uint8), [overlay]))[10].astype(int)

    assert row[9].tolist() == [255, 0, 0]
    assert (row[11, 0], row[11, 2]) == (0, 0)
    assert row[11, 1] > 150
    assert row[10, 0] > 60
    assert row[10, 1] > 60


def test_areas_let_the_scan_shine_through():
    """A light fill inside; two pixels outside and in the largest structure nothing changes."""
    labels = square()

    page = drawn(labels).astype(int)

    assert (page[:3] == 100).all()
    assert 0.15 <= (page[10, 10, 0] - 100) / 155 <= 0.2
    assert (drawn(labels, filled=(False, False))[10, 10] == 100).all()


def luminance(picture) -> np.ndarray:
    """Return the relative luminance of WCAG 2.2."""
    share = np.asarray(picture, float) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return linear @ (0.2126, 0.7152, 0.0722)


@pytest.mark.parametrize("gray", range(0, 256, 15))
@pytest.mark.parametrize("rgb", [RED, (160, 85, 255), (30, 160, 135), (255, 192, 0), (60, 40, 90)])
def test_an_outline_stands_out_on_any_tissue(rgb, gray):
    """The line on dark tissue, its casing on bright tissue: 3 to 1 at least."""
    fine = np.repeat(np.repeat(square(), OVERSAMPLING, 0), OVERSAMPLING, 1)
    overlay = Overlay(fine, np.array([(0, 0, 0), rgb], np.float32), np.array([False, False]))

    page = overlay_structures(np.full((20, 20), gray, np.uint8), [overlay])

    across = luminance(np.asarray(page)[10, :8]) + 0.05
    tissue = luminance((gray, gray, gray)) + 0.05
    assert np.maximum(across / tissue, tissue / across).max() >= 3


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


@pytest.mark.parametrize("place", [(0, 0), (0, 39), (39, 0), (20, 33)])
def test_a_picture_is_the_same_however_far_it_extends(place):
    """Only the part with structures is drawn: nothing else changes, and nothing at its borders."""
    labels = np.zeros((40, 40), np.uint8)
    rows, columns = (slice(max(0, n - 6), n + 5) for n in place)
    labels[rows, columns] = 1
    reached = tuple(slice(max(0, s.start - 2), s.stop + 2) for s in (rows, columns))

    page = drawn(labels, gray=200).copy()

    np.testing.assert_array_equal(page[reached], drawn(labels[reached], gray=200))
    page[reached] = 200
    assert (page == 200).all()


def test_casings_extend_a_pixel_beyond_their_outlines():
    """As far on all sides, which SciPy's square filter has."""
    edge = np.random.default_rng(0).random((60, 75)) < 0.01

    np.testing.assert_array_equal(grown(edge), maximum_filter(edge, 2 * CASING_SAMPLES + 1))
