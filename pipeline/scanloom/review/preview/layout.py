"""Layout of the preview page: positions and sizes in pixels."""

from __future__ import annotations

from dataclasses import dataclass

WIDTH = 1600
MARGIN = 64
LEGEND_WIDTH = 330
COLUMN_GAP = 60
MAIN_WIDTH = WIDTH - 2 * MARGIN - LEGEND_WIDTH - COLUMN_GAP
HEADER_HEIGHT = 116
GUTTER = 28
"""Space around a plane for its letters; that of the first plane overlaps the page margin."""
CAPTION_HEIGHT = 26
ROW_HEIGHT = 620
STACK_HEIGHT = 760
MOSAIC_HEIGHT = 460
TILE_GAP = 6
MIN_STACKING_GAIN = 1.25
"""Factor by which a stacked layout must enlarge the planes to be preferred."""
MIN_TILES, MAX_TILES = 10, 12
MIN_FRAME_SIZE = 28
"""Minimum width and height of a plane's frame, so that its letters fit next to a thin scan."""

Size = tuple[float, float]


@dataclass(frozen=True)
class Frame:
    """A rectangle on the page, and the size of the picture that is centred in it."""

    x: int
    y: int
    width: int
    height: int
    picture: tuple[int, int]

    @property
    def corner(self) -> tuple[int, int]:
        """Top left corner (x, y) of the picture."""
        w, h = self.picture
        return self.x + (self.width - w) // 2, self.y + (self.height - h) // 2


@dataclass(frozen=True)
class Planes:
    """Frames of the three planes at one scale; `height` includes captions and letters."""

    frames: tuple[Frame, Frame, Frame]
    pixels_per_mm: float
    height: int


def arrange_planes(axial: Size, coronal: Size, sagittal: Size) -> Planes:
    """Arrange three planes, given by width and height in mm, as large as possible at one scale.

    The planes are side by side. If it makes them clearly larger, as for a thin stack of slices,
    the coronal and the sagittal plane are one above the other, to the right of the axial plane.
    """
    in_row = _in_row(axial, coronal, sagittal)
    stacked = _stacked(axial, coronal, sagittal)
    return stacked if stacked.pixels_per_mm > MIN_STACKING_GAIN * in_row.pixels_per_mm else in_row


def _in_row(axial: Size, coronal: Size, sagittal: Size) -> Planes:
    sizes = (axial, coronal, sagittal)
    room = MAIN_WIDTH - 4 * GUTTER, ROW_HEIGHT - CAPTION_HEIGHT - 2 * GUTTER
    scale = min(room[0] / sum(s[0] for s in sizes), room[1] / max(s[1] for s in sizes))
    x, frames = 0, []
    for size in sizes:
        frame = _frame(x, CAPTION_HEIGHT + GUTTER, size, scale)
        frames.append(frame)
        x += frame.width + 2 * GUTTER
    height = CAPTION_HEIGHT + 2 * GUTTER + max(f.height for f in frames)
    return Planes((frames[0], frames[1], frames[2]), scale, height)


def _stacked(axial: Size, coronal: Size, sagittal: Size) -> Planes:
    room = MAIN_WIDTH - 2 * GUTTER, STACK_HEIGHT - CAPTION_HEIGHT - 2 * GUTTER
    column = max(coronal[0], sagittal[0])
    between = CAPTION_HEIGHT + 2 * GUTTER
    scale = min(
        room[0] / (axial[0] + column),
        room[1] / axial[1],
        (room[1] - between) / (coronal[1] + sagittal[1]),
    )
    axial_frame = _frame(0, CAPTION_HEIGHT + GUTTER, axial, scale)
    x = axial_frame.x + axial_frame.width + 2 * GUTTER
    upper = _frame(x, axial_frame.y, coronal, scale)
    lower = _frame(x, upper.y + upper.height + between, sagittal, scale)
    bottom = max(f.y + f.height for f in (axial_frame, upper, lower))
    return Planes((axial_frame, upper, lower), scale, bottom + GUTTER)


def _frame(x: int, y: int, size: Size, scale: float) -> Frame:
    picture = _pixels(size, scale)
    return Frame(x, y, max(MIN_FRAME_SIZE, picture[0]), max(MIN_FRAME_SIZE, picture[1]), picture)


def _pixels(size: Size, scale: float) -> tuple[int, int]:
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


@dataclass(frozen=True)
class Mosaic:
    """Frames of tiles in rows, at one scale."""

    frames: tuple[Frame, ...]
    pixels_per_mm: float
    height: int


def arrange_mosaic(count: int, size: Size) -> Mosaic:
    """Arrange up to `count` tiles of `size` mm in full rows, covering as much area as possible."""
    lowest, highest = min(count, MIN_TILES), min(count, MAX_TILES)
    grids = [
        (columns, rows)
        for columns in range(1, highest + 1)
        for rows in range(1, highest + 1)
        if lowest <= columns * rows <= highest
    ]
    columns, rows = max(grids, key=lambda g: (g[0] * g[1] * _tile_scale(g, size) ** 2, g))
    picture = _pixels(size, _tile_scale((columns, rows), size))
    w, h = max(MIN_FRAME_SIZE, picture[0]), max(MIN_FRAME_SIZE, picture[1])
    frames = tuple(
        Frame(column * (w + TILE_GAP), row * (h + TILE_GAP), w, h, picture)
        for row in range(rows)
        for column in range(columns)
    )
    return Mosaic(frames, picture[0] / size[0], frames[-1].y + h)


def _tile_scale(grid: tuple[int, int], size: Size) -> float:
    """Return the pixels per mm at which a grid (columns, rows) of tiles fits into the mosaic."""
    columns, rows = grid
    width = (MAIN_WIDTH - (columns - 1) * TILE_GAP) // columns
    height = (MOSAIC_HEIGHT - (rows - 1) * TILE_GAP) // rows
    return min(width / size[0], height / size[1])
