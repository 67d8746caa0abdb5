"""Slices that findings are about: parts of the mosaic in the preview of a case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from scanloom.core import Measurement
from scanloom.io.system.regular_files import open_regular_file
from scanloom.review.outliers import Finding
from scanloom.review.preview.tile_map import Pixels, Tile, TileMap, read_tile_map

MAX_SLICES = 3
"""Number of slices that are shown for a finding."""
MAX_OUTLINED_SHARE = 0.6
"""Share of a slice above which a structure is not outlined: the outline would be the edge."""


@dataclass(frozen=True)
class Mosaic:
    """The mosaic of a preview: its map, and the size (width, height) of the page in pixels."""

    tiles: TileMap
    page: tuple[int, int]


@dataclass(frozen=True)
class ShownSlice:
    """A slice on the page of a preview, in pixels.

    Parameters
    ----------
    number : int
        Its number on the page.
    area : (x, y, width, height)
    outlines : tuple of (x, y, width, height)
        Outlines of the structures that the finding is about.
    """

    number: int
    area: Pixels
    outlines: tuple[Pixels, ...]


def read_mosaic(preview: Path) -> Mosaic | None:
    """Read the mosaic of a preview; None of a preview without a map, or one that can't be read."""
    try:
        with open_regular_file(preview) as file, Image.open(file) as page:
            tiles, size = read_tile_map(page.info), page.size
    except (OSError, ValueError, SyntaxError):  # Pillow raises the last two for damaged chunks
        return None
    return None if tiles is None else Mosaic(tiles, size)


def slices_of(finding: Finding, tiles: TileMap, shape: Sequence[int]) -> tuple[ShownSlice, ...]:
    """Return the slices that a finding is about: at most `MAX_SLICES`.

    A structure at the border is shown in the end slices that it reaches, any other in the slice
    nearest to its middle, with its outline. Findings of a scan, and of structures that were not
    found, have none.

    Parameters
    ----------
    finding : Finding
    tiles : TileMap
        The mosaic of the case.
    shape : (I, J, K)
        Shape of the case's grid.
    """
    outlines: dict[Tile, list[Pixels]] = {}
    for m in finding.subjects:
        for tile in _tiles(finding, m, tiles, shape):
            outline = outlines.setdefault(tile, [])
            if m.box is not None and finding.kind != "border":
                outline.append(tiles.outline(m.box, tile))
    width, height = tiles.size
    largest = MAX_OUTLINED_SHARE * width * height
    return tuple(
        ShownSlice(
            tile.number,
            (tile.x, tile.y, width, height),
            tuple(dict.fromkeys(o for o in findings if o[2] * o[3] <= largest)),
        )
        for tile, findings in sorted(outlines.items(), key=lambda item: item[0].number)[:MAX_SLICES]
    )


def _tiles(
    finding: Finding, m: Measurement, tiles: TileMap, shape: Sequence[int]
) -> Iterator[Tile]:
    """Yield the slices of the mosaic in which a structure is shown."""
    if m.box is None:
        return
    ends: list[Tile] = []
    if finding.kind == "border" and len(shape) > tiles.axis:
        first, last = (corner[tiles.axis] for corner in m.box)
        reached = {n for n in (first, last) if n in (0, shape[tiles.axis] - 1)}
        ends = [tile for tile in tiles.tiles if tile.slice in reached]
    yield from ends or [tiles.nearest(m.box)]
