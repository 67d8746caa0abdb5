"""`TileMap`: where the slices of a preview's mosaic are on its page, stored in the PNG file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
from PIL.PngImagePlugin import PngInfo

from scanloom.core.measurement import Box
from scanloom.review.preview.content import Plane
from scanloom.review.preview.layout import Frame

KEYWORD = "scanloom tiles"
"""Keyword of the text chunk of the PNG file."""

Row = tuple[float, float, float, float]
Pixels = tuple[int, int, int, int]
"""Left, top, width and height in pixels."""


@dataclass(frozen=True)
class Tile:
    """A slice of the mosaic.

    Parameters
    ----------
    slice : int
        Its index along the slice axis.
    number : int
        Its number on the page, where slices are counted from 1 towards the feet.
    x, y : int
        Corner on the page.
    """

    slice: int
    number: int
    x: int
    y: int


@dataclass(frozen=True)
class TileMap:
    """Positions of the slices of a mosaic on the page, in pixels.

    Parameters
    ----------
    axis : 0, 1 or 2
        Axis of the voxel array across the slices.
    size : (width, height)
        Size of the picture of each slice.
    tiles : tuple of Tile
        The slices; at least one.
    to_picture : (row, row)
        Affine from a voxel index (i, j, k, 1) to x and y within the picture of its slice.
    """

    axis: int
    size: tuple[int, int]
    tiles: tuple[Tile, ...]
    to_picture: tuple[Row, Row]

    def nearest(self, box: Box) -> Tile:
        """Return the slice that is nearest to the middle of a bounding box."""
        middle = (box[0][self.axis] + box[1][self.axis]) / 2
        return min(self.tiles, key=lambda tile: abs(tile.slice - middle))

    def outline(self, box: Box, tile: Tile) -> Pixels:
        """Return the outline of a bounding box in the picture of a slice, on the page."""
        ends = np.array([[*box[0], 1.0], [*box[1], 1.0]])
        ends[0, :3] -= 0.5
        ends[1, :3] += 0.5
        corners = ends @ np.array(self.to_picture).T
        low = np.clip(corners.min(axis=0), 0, self.size)
        high = np.clip(corners.max(axis=0), 0, self.size)
        (left, top), (width, height) = np.rint(low), np.rint(high - low)
        return tile.x + int(left), tile.y + int(top), int(width), int(height)


def map_tiles(planes: Sequence[Plane], frames: Sequence[Frame]) -> TileMap:
    """Return the map of a mosaic, from its planes and their frames on the page."""
    view, direction, area = planes[0].view, planes[0].direction, planes[0].area
    axis, size = direction.normal, frames[0].picture
    step, origin = np.diag(view.to_lpi)[:3], view.to_lpi[:3, 3]
    tiles = []
    for plane, frame in zip(planes, frames, strict=True):
        n = round(float((plane.position - origin[axis]) / step[axis]))
        index = view.shape[axis] - 1 - n if view.flipped[axis] else n
        tiles.append(Tile(index, n + 1, *frame.corner))
    rows = np.zeros((2, 4))
    for row, lpi, low, mm, pixels in zip(
        rows, (direction.across, direction.down), area.low, area.size, size, strict=True
    ):
        flip, scale = view.flipped[lpi], pixels / mm
        first = origin[lpi] + (step[lpi] * (view.shape[lpi] - 1) if flip else 0.0)
        row[view.order[lpi]] = (-1 if flip else 1) * step[lpi] * scale
        row[3] = (first - low) * scale
    to_x, to_y = ((float(a), float(b), float(c), float(d)) for a, b, c, d in rows.round(4))
    return TileMap(view.order[axis], size, tuple(tiles), (to_x, to_y))


def tile_info(tile_map: TileMap) -> PngInfo:
    """Return the text chunk with a map, for the PNG file of the page."""
    info = PngInfo()
    info.add_text(KEYWORD, json.dumps(asdict(tile_map), separators=(",", ":")))
    return info


def read_tile_map(info: dict[Any, Any]) -> TileMap | None:
    """Read the map from the `info` of an opened PNG file; None if it is missing or malformed."""
    names = [field.name for field in dataclass_fields(Tile)]
    try:
        fields = json.loads(info[KEYWORD])
        width, height = (int(n) for n in fields["size"])
        (a, b, c, d), (e, f, g, h) = ([float(x) for x in row] for row in fields["to_picture"])
        tiles = tuple(Tile(*(int(t[n]) for n in names)) for t in fields["tiles"])
        axis = int(fields["axis"])
    except (LookupError, TypeError, ValueError):
        return None
    if axis not in (0, 1, 2) or not tiles or min(width, height) < 1:
        return None
    return TileMap(axis, (width, height), tiles, ((a, b, c, d), (e, f, g, h)))
