"""Layout of the preview page: positions and sizes in pixels, and facts of a case that it names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

WIDTH = 1600
MARGIN = 32
CONTENT_WIDTH = WIDTH - 2 * MARGIN
HEADER_HEIGHT = 92
GUTTER = 0
"""Space around a plane: its letters are inside it."""
GAP = 6
"""Distance between frames."""
LEGEND_WIDTH = 330
"""Minimum width of a column of the legend."""
LEGEND_GAP = 24
MAIN_WIDTH = CONTENT_WIDTH - LEGEND_WIDTH - LEGEND_GAP
MAX_PLANES_HEIGHT = 940
TILES = 16
TILE_COLUMNS = 8
MAX_TILE_HEIGHT = 230
MIN_FRAME_SIZE = 40
"""Minimum width and height of a plane's frame, so that its letters fit next to a thin scan."""
LARGE_MAIN_WIDTH = 600
"""Width of the main plane in pixels from which a larger one is no better."""
MAIN_WEIGHT = 0.25
"""Weight of the size of the main plane, compared with that of the used share of the page."""

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

    def moved(self, x: int, y: int) -> Frame:
        """Return the frame at another position."""
        return replace(self, x=self.x + x, y=self.y + y)


@dataclass(frozen=True)
class Planes:
    """Frames of the main plane without and with labels and of the two other planes, at one scale.

    The legend stands at `legend` (x, y), in `columns` columns of `column_width` pixels. All is
    relative to the corner of the planes; `height` includes the legend.
    """

    frames: tuple[Frame, Frame, Frame, Frame]
    pixels_per_mm: float
    height: int
    legend: tuple[int, int]
    columns: int
    column_width: int


Block = tuple[tuple[tuple[int, ...], ...], ...]
"""Columns from left to right, each of rows from top to bottom of planes side by side."""
_BLOCKS: tuple[Block, ...] = (
    (((0, 1), (2, 3)),),
    (((0,),), ((1,),), ((2,), (3,))),
    (((0,),), ((1,),), ((2,),), ((3,),)),
    (((0,), (1,)), ((2,), (3,))),
    (((0,), (1,)), ((2,),), ((3,),)),
    (((0, 1), (2,), (3,)),),
)


def arrange_planes(main: Size, second: Size, third: Size, legend: Mapping[int, int]) -> Planes:
    """Arrange planes, given by width and height in mm, and the legend beside or below them.

    `legend` gives the height in pixels of the legend in each number of columns.

    Of all arrangements, the one is chosen that leaves the least of the page empty and shows the
    main plane large.
    """
    sizes = (main, main, second, third)
    candidates = [
        planes
        for block in _BLOCKS
        for columns, height in legend.items()
        for planes in _candidates(block, sizes, columns, height)
    ]
    area = legend[1] * LEGEND_WIDTH  # of one column, which has no gaps
    return max(candidates, key=lambda planes: _merit(planes, area))


def _candidates(
    block: Block, sizes: Sequence[Size], columns: int, legend_height: int
) -> Iterator[Planes]:
    """Yield the arrangement with the legend on the right, and with the legend below."""
    beside = columns * (LEGEND_WIDTH + LEGEND_GAP)
    if CONTENT_WIDTH - beside >= CONTENT_WIDTH // 2:
        frames, scale, height = _filled_block(block, sizes, CONTENT_WIDTH - beside)
        corner = CONTENT_WIDTH - beside + LEGEND_GAP, 0
        total = max(height, legend_height)
        yield Planes(frames, scale, total, corner, columns, LEGEND_WIDTH)
    if columns >= 3:
        frames, scale, height = _filled_block(block, sizes, CONTENT_WIDTH)
        width = (CONTENT_WIDTH - (columns - 1) * LEGEND_GAP) // columns
        total = height + LEGEND_GAP // 2 + legend_height
        yield Planes(frames, scale, total, (0, height + LEGEND_GAP // 2), columns, width)


def _merit(planes: Planes, legend_area: float) -> float:
    """Return the share of the area that is used, plus a term for the main plane's size."""
    pictures = sum(f.picture[0] * f.picture[1] for f in planes.frames)
    covered = (pictures + legend_area) / (CONTENT_WIDTH * max(planes.height, 1))
    return covered + MAIN_WEIGHT * min(1.0, planes.frames[0].picture[0] / LARGE_MAIN_WIDTH)


def _filled_block(
    block: Block, sizes: Sequence[Size], width: int
) -> tuple[tuple[Frame, Frame, Frame, Frame], float, int]:
    """Return frames that fill a width, their scale and their common height.

    The pictures are as large as possible at one scale. Frames are enlarged to fill the width and,
    in each column, the height.
    """
    widths = [max(sum(sizes[n][0] for n in row) for row in column) for column in block]
    heights = [sum(max(sizes[n][1] for n in row) for row in column) for column in block]
    in_row = max(len(row) for column in block for row in column)
    gaps = GAP * (len(block) * in_row - 1), GAP * (max(len(c) for c in block) - 1)
    scale = min((width - gaps[0]) / sum(widths), (MAX_PLANES_HEIGHT - gaps[1]) / max(heights))
    columns = _shared(width - GAP * (len(block) - 1), [w * scale for w in widths])
    height = max(
        sum(max(MIN_FRAME_SIZE, round(max(sizes[n][1] for n in row) * scale)) for row in column)
        + GAP * (len(column) - 1)
        for column in block
    )
    frames: dict[int, Frame] = {}
    x = 0
    for column, column_width in zip(block, columns, strict=True):
        y = 0
        wanted = [max(sizes[n][1] for n in row) * scale for row in column]
        for row, row_height in zip(
            column, _shared(height - GAP * (len(column) - 1), wanted), strict=True
        ):
            cells = _shared(column_width - GAP * (len(row) - 1), [sizes[n][0] for n in row])
            left = x
            for n, cell in zip(row, cells, strict=True):
                picture = _pixels(sizes[n], scale, (cell, row_height))
                frames[n] = Frame(left, y, cell, row_height, picture)
                left += cell + GAP
            y += row_height + GAP
        x += column_width + GAP
    return (frames[0], frames[1], frames[2], frames[3]), scale, height


def fill_row(sizes: Sequence[Size], room: tuple[int, int]) -> tuple[Frame, ...]:
    """Return frames of planes side by side that fill a room in pixels, at one scale."""
    gaps = GAP * (len(sizes) - 1)
    scale = min((room[0] - gaps) / sum(s[0] for s in sizes), room[1] / max(s[1] for s in sizes))
    x, frames = 0, []
    for size, width in zip(sizes, _shared(room[0] - gaps, [s[0] for s in sizes]), strict=True):
        frames.append(Frame(x, 0, width, room[1], _pixels(size, scale, (width, room[1]))))
        x += width + GAP
    return tuple(frames)


def _shared(total: int, requested: Sequence[float]) -> list[int]:
    """Return whole lengths of a sum, in proportion to wanted ones, none below the minimum."""
    room = total - MIN_FRAME_SIZE * len(requested)
    over = [max(0.0, length - MIN_FRAME_SIZE) + 1e-9 for length in requested]
    ends = [0, *(round(room * sum(over[: n + 1]) / sum(over)) for n in range(len(over)))]
    return [MIN_FRAME_SIZE + b - a for a, b in itertools.pairwise(ends)]


def _pixels(size: Size, scale: float, limit: tuple[int, int]) -> tuple[int, int]:
    """Return a size in pixels, at a smaller scale if it would exceed the limit."""
    scale = min(scale, limit[0] / size[0], limit[1] / size[1])
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


@dataclass(frozen=True)
class Mosaic:
    """Frames of tiles in rows, at one scale."""

    frames: tuple[Frame, ...]
    pixels_per_mm: float
    height: int


def arrange_mosaic(count: int, size: Size) -> Mosaic:
    """Arrange `count` tiles of `size` mm in rows over the full width."""
    columns = min(count, TILE_COLUMNS)
    rows = -(-count // columns)
    columns = -(-count // rows)
    edges = [round(n * (CONTENT_WIDTH + GAP) / columns) for n in range(columns + 1)]
    width = edges[1] - edges[0] - GAP
    height = max(MIN_FRAME_SIZE, min(MAX_TILE_HEIGHT, round(width * size[1] / size[0])))
    scale = min(width / size[0], height / size[1])
    frames = tuple(
        Frame(
            edges[n % columns],
            n // columns * (height + GAP),
            edges[n % columns + 1] - edges[n % columns] - GAP,
            height,
            _pixels(size, scale, (width, height)),
        )
        for n in range(count)
    )
    return Mosaic(frames, scale, frames[-1].y + height)


@dataclass(frozen=True)
class About:
    """Facts of a case that are not in its scan and results.

    Parameters
    ----------
    case_id : str
        Id of the case; empty if it has none.
    assumed_modality : str or None
        Modality that was assumed because the scan states none.
    limitations : tuple of str
        Known errors of the models, as sentences.
    """

    case_id: str = ""
    assumed_modality: str | None = None
    limitations: tuple[str, ...] = ()
