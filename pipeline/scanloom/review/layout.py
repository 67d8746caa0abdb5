"""Where things stand on the page, in pixels."""

from __future__ import annotations

from dataclasses import dataclass

WIDTH = 1600
MARGIN = 64
LEGEND_WIDTH = 330
COLUMN_GAP = 60
MAIN_WIDTH = WIDTH - 2 * MARGIN - LEGEND_WIDTH - COLUMN_GAP
GUTTER = 28
"""Around a plane, for the letters at its edges; the first plane's stands in the page's margin."""
CAPTION = 26
ROW_HEIGHT = 620
STACK_HEIGHT = 760
MOSAIC_HEIGHT = 460
TILE_GAP = 6
CLEARLY = 1.25
FEWEST_TILES, MOST_TILES = 10, 12
SMALLEST = 28
"""A plane's frame is never narrower, however thin the scan: its letters need room."""

Size = tuple[float, float]


@dataclass(frozen=True)
class Frame:
    """A rectangle on the page, and the size of the picture that stands in its middle."""

    x: int
    y: int
    width: int
    height: int
    picture: tuple[int, int]

    @property
    def corner(self) -> tuple[int, int]:
        """Left top of the picture."""
        w, h = self.picture
        return self.x + (self.width - w) // 2, self.y + (self.height - h) // 2


@dataclass(frozen=True)
class Planes:
    """The three planes at one scale; `height` includes captions and letters."""

    frames: tuple[Frame, Frame, Frame]
    pixels_per_mm: float
    height: int


def arrange_planes(axial: Size, coronal: Size, sagittal: Size) -> Planes:
    """Place three planes of given width and height in mm as large as they can be, at one scale.

    Side by side, or, where that makes them clearly larger, the axial one left and the two others
    above each other on its right, as a thin stack of slices likes it.
    """
    beside = _beside(axial, coronal, sagittal)
    stacked = _stacked(axial, coronal, sagittal)
    return stacked if stacked.pixels_per_mm > CLEARLY * beside.pixels_per_mm else beside


def _beside(axial: Size, coronal: Size, sagittal: Size) -> Planes:
    sizes = (axial, coronal, sagittal)
    room = MAIN_WIDTH - 4 * GUTTER, ROW_HEIGHT - CAPTION - 2 * GUTTER
    scale = min(room[0] / sum(s[0] for s in sizes), room[1] / max(s[1] for s in sizes))
    x, frames = 0, []
    for size in sizes:
        frame = _frame(x, CAPTION + GUTTER, size, scale)
        frames.append(frame)
        x += frame.width + 2 * GUTTER
    height = CAPTION + 2 * GUTTER + max(f.height for f in frames)
    return Planes((frames[0], frames[1], frames[2]), scale, height)


def _stacked(axial: Size, coronal: Size, sagittal: Size) -> Planes:
    room = MAIN_WIDTH - 2 * GUTTER, STACK_HEIGHT - CAPTION - 2 * GUTTER
    column = max(coronal[0], sagittal[0])
    between = CAPTION + 2 * GUTTER
    scale = min(
        room[0] / (axial[0] + column),
        room[1] / axial[1],
        (room[1] - between) / (coronal[1] + sagittal[1]),
    )
    left = _frame(0, CAPTION + GUTTER, axial, scale)
    x = left.x + left.width + 2 * GUTTER
    upper = _frame(x, left.y, coronal, scale)
    lower = _frame(x, upper.y + upper.height + between, sagittal, scale)
    bottom = max(f.y + f.height for f in (left, upper, lower))
    return Planes((left, upper, lower), scale, bottom + GUTTER)


def _frame(x: int, y: int, size: Size, scale: float) -> Frame:
    picture = _pixels(size, scale)
    return Frame(x, y, max(SMALLEST, picture[0]), max(SMALLEST, picture[1]), picture)


def _pixels(size: Size, scale: float) -> tuple[int, int]:
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


@dataclass(frozen=True)
class Mosaic:
    """Tiles in rows, at one scale."""

    frames: tuple[Frame, ...]
    pixels_per_mm: float
    height: int


def arrange_mosaic(most: int, size: Size) -> Mosaic:
    """Place up to `most` tiles of a width and height in mm, in full rows that cover most room."""
    fewest, most = min(most, FEWEST_TILES), min(most, MOST_TILES)
    grids = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if fewest <= columns * rows <= most
    ]
    columns, rows = max(grids, key=lambda g: (g[0] * g[1] * _tile_scale(g, size) ** 2, g))
    picture = _pixels(size, _tile_scale((columns, rows), size))
    w, h = max(SMALLEST, picture[0]), max(SMALLEST, picture[1])
    frames = tuple(
        Frame(column * (w + TILE_GAP), row * (h + TILE_GAP), w, h, picture)
        for row in range(rows)
        for column in range(columns)
    )
    return Mosaic(frames, picture[0] / size[0], frames[-1].y + h)


def _tile_scale(grid: tuple[int, int], size: Size) -> float:
    """Return the pixels per mm at which tiles of `size` mm fill the room in columns and rows."""
    columns, rows = grid
    width = (MAIN_WIDTH - (columns - 1) * TILE_GAP) // columns
    height = (MOSAIC_HEIGHT - (rows - 1) * TILE_GAP) // rows
    return min(width / size[0], height / size[1])
