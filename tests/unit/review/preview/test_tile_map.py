"""Positions of slices and structures on a page, compared with the pixels that were drawn there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.spatial.transform import Rotation

from scanloom.review.preview.page import TILE_MAP_KEYWORD, TileMap, draw_preview, read_tile_map
from support.review_phantoms import LEFT, case, stored, torso

TILTED = Rotation.from_euler("x", 15, degrees=True).as_matrix()


def drawn(folder: Path, codes: str, tilted: bool = False) -> tuple[np.ndarray, TileMap, list]:
    array, labels, affine = torso()
    if tilted:
        affine[:3, :3] = TILTED @ affine[:3, :3]
    turned, change = stored(array, affine, codes)
    results = case(turned, stored(labels, affine, codes)[0], change)
    draw_preview(*results, [], folder / "p.png")
    with Image.open(folder / "p.png") as page:
        tiles = read_tile_map(page.info)
        assert tiles is not None
        return np.asarray(page.convert("RGB")).astype(int), tiles, list(results[2])


@pytest.mark.parametrize(("codes", "tilted"), [("RAS", False), ("LPS", True), ("SPL", False)])
def test_outlines_hold_the_contours(tmp_path: Path, codes: str, tilted: bool) -> None:
    page, tiles, measurements = drawn(tmp_path, codes, tilted)
    left_structure = next(m for m in measurements if m.label == "s2")
    tile = tiles.nearest(left_structure.box)

    x, y, width, height = tiles.outline(left_structure.box, tile)

    picture = page[tile.y : tile.y + tiles.size[1], tile.x : tile.x + tiles.size[0]]
    red = (picture[..., 0] - picture[..., 1:].max(axis=-1)) > 60
    assert LEFT == (255, 0, 0)
    rows, columns = np.nonzero(red)
    assert abs(columns.min() + tile.x - x) <= 2
    assert abs(columns.max() + tile.x - (x + width - 1)) <= 2
    assert abs(rows.min() + tile.y - y) <= 2
    assert abs(rows.max() + tile.y - (y + height - 1)) <= 2


@pytest.mark.parametrize("codes", ["RAS", "LPI", "SPL"])
def test_slices_have_the_index_of_the_voxels(tmp_path: Path, codes: str) -> None:
    """The marker at the head is in the slices that its box spans, and in no other."""
    page, tiles, measurements = drawn(tmp_path, codes)
    head = next(m for m in measurements if m.label == "s4")
    assert head.box is not None
    first, last = (corner[tiles.axis] for corner in head.box)
    assert codes[tiles.axis] in "SI"

    for tile in tiles.tiles:
        picture = page[tile.y : tile.y + tiles.size[1], tile.x : tile.x + tiles.size[0]]
        blue = (picture[..., 2] - picture[..., :2].max(axis=-1)) > 60
        assert blue.any() == (first <= tile.slice <= last)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"axis": 5}', "{"])
def test_a_map_that_is_malformed_is_none(text: str) -> None:
    assert read_tile_map({TILE_MAP_KEYWORD: text}) is None
    assert read_tile_map({}) is None
