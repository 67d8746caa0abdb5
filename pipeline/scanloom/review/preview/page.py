"""The pictures of a case, to check the plausibility of its segmentation: preview and thumbnail.

Layout of the page in pixels; text, scale bar and legend; then the page itself, and the map of its
slices, by which the report finds them.
"""

from __future__ import annotations

import itertools
import json
import struct
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as dataclass_fields
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from scanloom.cards.codes import shown_name, system_of, systems
from scanloom.core import Flag, Measurement, Segmentation, Volume, milliliters
from scanloom.core.grid import Box
from scanloom.core.segmentation import Color
from scanloom.review.preview.content import About, Plane, PreviewContent, choose_content
from scanloom.review.preview.slicing import LETTERS, Direction
from scanloom.review.preview.solid import FRONT, LEFT, Solid

WIDTH = 1600
MARGIN = 32
CONTENT_WIDTH = WIDTH - 2 * MARGIN
HEADER_HEIGHT = 92
GAP = 6
"""Distance between frames."""
LEGEND_WIDTH = 330
"""Minimum width of a column of the legend."""
LEGEND_GAP = 24
MAX_BESIDE = 2
"""Columns of the legend beside the planes: with three, less than half the page would be theirs."""
MAX_PLANES_HEIGHT = 940
TILE_COLUMNS = 8
VIEW_COLUMNS = 2
"""Columns of the mosaic that shaded views take, one each."""
MAX_TILE_HEIGHT = 230
MIN_FRAME_SIZE = 40
"""Minimum width and height of a plane's frame, so that its letters fit next to a thin scan."""
LARGE_MAIN_WIDTH = 600
"""Width of the main plane in pixels from which a larger one is no better."""
MAIN_WEIGHT = 0.15
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

    The legend stands at `legend` (x, y), in `columns` columns. All is relative to the corner of the
    planes; `height` includes the legend.
    """

    frames: tuple[Frame, Frame, Frame, Frame]
    height: int
    legend: tuple[int, int]
    columns: int


def column_width(columns: int) -> int:
    """Return the width of the legend's columns: up to two stand beside the planes, more below."""
    whole = CONTENT_WIDTH - (columns - 1) * LEGEND_GAP
    return LEGEND_WIDTH if columns <= MAX_BESIDE else whole // columns


Block = tuple[tuple[tuple[int, ...], ...], ...]
"""Columns from left to right, each of rows from top to bottom of planes side by side."""
# with one legend column the planes are narrow, with none they are wide: each form suits some scans
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
    # the main plane is shown twice: a contour hides what it follows
    sizes = (main, main, second, third)
    candidates = [
        _arrangement(block, sizes, columns, height)
        for block in _BLOCKS
        for columns, height in legend.items()
    ]
    legend_area = legend[1] * LEGEND_WIDTH  # of one column, which has no gaps

    def merit(planes: Planes) -> float:
        """Return the share of the area that is used, plus a term for the main plane's size."""
        pictures = sum(f.picture[0] * f.picture[1] for f in planes.frames)
        covered = (pictures + legend_area) / (CONTENT_WIDTH * max(planes.height, 1))
        return covered + MAIN_WEIGHT * min(1.0, planes.frames[0].picture[0] / LARGE_MAIN_WIDTH)

    return max(candidates, key=merit)


def _arrangement(block: Block, sizes: Sequence[Size], columns: int, legend_height: int) -> Planes:
    """Return planes with the legend on the right, or below if it has many columns."""
    if columns <= MAX_BESIDE:
        width = CONTENT_WIDTH - columns * (LEGEND_WIDTH + LEGEND_GAP)
        frames, height = _filled_block(block, sizes, width)
        return Planes(frames, max(height, legend_height), (width + LEGEND_GAP, 0), columns)
    frames, height = _filled_block(block, sizes, CONTENT_WIDTH)
    top = height + LEGEND_GAP // 2
    return Planes(frames, top + legend_height, (0, top), columns)


def _filled_block(
    block: Block, sizes: Sequence[Size], width: int
) -> tuple[tuple[Frame, Frame, Frame, Frame], int]:
    """Return frames that fill a width, and their common height.

    The pictures are as large as possible at one scale. Frames are enlarged to fill the width and,
    in each column, the height.
    """
    widths = [max(sum(sizes[n][0] for n in row) for row in column) for column in block]
    heights = [sum(max(sizes[n][1] for n in row) for row in column) for column in block]
    in_row = max(len(row) for column in block for row in column)
    gaps = GAP * (len(block) * in_row - 1), GAP * (max(len(c) for c in block) - 1)
    # one scale for all planes, so that sizes can be compared across them
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
        row_heights = _shared(
            height - GAP * (len(column) - 1),
            [max(sizes[n][1] for n in row) * scale for row in column],
        )
        for row, row_height in zip(column, row_heights, strict=True):
            room = column_width, row_height
            cells = _filled_row([sizes[n] for n in row], scale, room)
            frames |= {n: cell.moved(x, y) for n, cell in zip(row, cells, strict=True)}
            y += row_height + GAP
        x += column_width + GAP
    return (frames[0], frames[1], frames[2], frames[3]), height


def fill_row(sizes: Sequence[Size], room: tuple[int, int]) -> list[Frame]:
    """Return frames of planes side by side that fill a room in pixels, at one scale."""
    gaps = GAP * (len(sizes) - 1)
    scale = min((room[0] - gaps) / sum(s[0] for s in sizes), room[1] / max(s[1] for s in sizes))
    return _filled_row(sizes, scale, room)


def arrange_pair(first: Size, second: Size, room: tuple[int, int]) -> list[Frame]:
    """Return frames of two planes in a room in pixels, side by side or one below the other.

    Both have one scale, which is as large as possible.
    """
    beside = min((room[0] - GAP) / (first[0] + second[0]), room[1] / max(first[1], second[1]))
    above = min((room[1] - GAP) / (first[1] + second[1]), room[0] / max(first[0], second[0]))
    scale = max(beside, above)
    sizes = [(width * scale, height * scale) for width, height in (first, second)]
    if beside >= above:
        return fill_row(sizes, room)
    # as side by side, of planes whose width and height are exchanged, in such a room
    turned = fill_row([(height, width) for width, height in sizes], (room[1], room[0]))
    return [Frame(f.y, f.x, f.height, f.width, (f.picture[1], f.picture[0])) for f in turned]


def _filled_row(sizes: Sequence[Size], scale: float, room: tuple[int, int]) -> list[Frame]:
    """Return frames of planes side by side that fill a room in pixels, at a scale."""
    x, frames = 0, []
    widths = _shared(room[0] - GAP * (len(sizes) - 1), [size[0] for size in sizes])
    for size, width in zip(sizes, widths, strict=True):
        frames.append(Frame(x, 0, width, room[1], _pixels(size, scale, (width, room[1]))))
        x += width + GAP
    return frames


def _shared(total: int, requested: Sequence[float]) -> list[int]:
    """Return whole lengths of a sum, in proportion to wanted ones, none below the minimum."""
    room = total - MIN_FRAME_SIZE * len(requested)
    # not 0 where all lengths are below the minimum
    over = [max(0.0, length - MIN_FRAME_SIZE) + 1e-9 for length in requested]
    ends = [0, *(round(room * sum(over[: n + 1]) / sum(over)) for n in range(len(over)))]
    return [MIN_FRAME_SIZE + b - a for a, b in itertools.pairwise(ends)]


def _pixels(size: Size, scale: float, limit: tuple[int, int]) -> tuple[int, int]:
    """Return a size in pixels, at a smaller scale if it would exceed the limit."""
    scale = min(scale, limit[0] / size[0], limit[1] / size[1])
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def arrange_mosaic(count: int, size: Size, most_columns: int = TILE_COLUMNS) -> tuple[Frame, ...]:
    """Return frames of `count` tiles of `size` mm in rows, at one scale.

    The rows take the full width, or the share of `most_columns` in it.
    """
    columns = min(count, most_columns)
    rows = -(-count // columns)
    # rows of about one length, rather than a last one with a single tile
    columns = -(-count // rows)
    whole = (CONTENT_WIDTH + GAP) * most_columns / TILE_COLUMNS
    edges = [round(n * whole / columns) for n in range(columns + 1)]
    width = edges[1] - edges[0] - GAP
    height = max(MIN_FRAME_SIZE, min(MAX_TILE_HEIGHT, round(width * size[1] / size[0])))
    scale = min(width / size[0], height / size[1])
    return tuple(
        Frame(
            edges[n % columns],
            n // columns * (height + GAP),
            edges[n % columns + 1] - edges[n % columns] - GAP,
            height,
            _pixels(size, scale, (width, height)),
        )
        for n in range(count)
    )


Point = tuple[float, float]

PAGE: Color = (13, 15, 19)
PANEL: Color = (0, 0, 0)
RULE: Color = (44, 49, 58)
TEXT: Color = (234, 236, 240)
MUTED: Color = (160, 168, 180)
"""Colour of captions: contrast of 8:1 to the page; WCAG 2.2 requires 7:1 for small text."""
WARN: Color = (255, 190, 92)

PNG_LEVEL = 3
"""Compression of zlib: level 6 takes twice as long for files that are 1 to 5 % smaller."""
PLATE_OPACITY = 0.6
PLATE_MARGIN = 4
BAR_TEXT_SIZE = 13
LINE_HEIGHT = 1.4
"""Line height as a multiple of the font size."""


@lru_cache
def font(size: int) -> ImageFont.FreeTypeFont:
    """Return the font that Pillow includes, which is the same on every machine."""
    typeface = ImageFont.load_default(size)
    if not isinstance(typeface, ImageFont.FreeTypeFont):
        raise TypeError("Pillow was built without FreeType")
    return typeface


@lru_cache
def _drawable(character: str) -> bool:
    missing = font(16).getmask("\ufffe")
    glyph = font(16).getmask(character)
    return glyph.size != missing.size or bytes(glyph) != bytes(missing)


def displayable(text: str) -> str:
    """Return text in characters that the font has: without accents if need be, else with "?"."""
    characters = []
    for character in text:
        if character == " " or _drawable(character):
            characters.append(character)
        else:
            bare = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
            characters.append(bare or "?")
    return "".join(characters)


# the same words are measured for each number of columns
@lru_cache(maxsize=4096)
def text_width(text: str, size: int) -> float:
    """Return the width of a line of text in pixels."""
    return float(font(size).getlength(displayable(text)))


def truncated(text: str, size: int, width: float) -> str:
    """Return text, truncated with an ellipsis if it is wider than `width` pixels."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1].rstrip()
    return text + "…"


def wrap_text(text: str, size: int, width: float) -> Iterator[str]:
    """Yield the lines of a text that is wrapped to `width` pixels."""
    line = ""
    for token in text.split():
        longer = f"{line} {token}".strip()
        if line and text_width(longer, size) > width:
            yield line
            longer = token
        line = truncated(longer, size, width)
    if line:
        yield line


def draw_text(
    canvas: ImageDraw.ImageDraw,
    at: Point,
    text: str,
    size: int,
    color: Color = TEXT,
    anchor: str = "la",
) -> None:
    """Write a line of text; `anchor` is Pillow's: with "la" its top left corner is at `at`."""
    canvas.text(at, displayable(text), fill=color, font=font(size), anchor=anchor)


def draw_plate(page: Image.Image, at: Point, text: str, size: int, anchor: str = "la") -> None:
    """Write on a picture, on a plate of `PLATE_OPACITY` that keeps text legible."""
    canvas = ImageDraw.Draw(page)
    shown = displayable(text)
    left, top, right, bottom = canvas.textbbox(at, shown, font=font(size), anchor=anchor)
    darken(page, (left - PLATE_MARGIN, top - PLATE_MARGIN, right + PLATE_MARGIN, bottom + 3))
    canvas.text(at, shown, fill=TEXT, font=font(size), anchor=anchor)


def darken(page: Image.Image, box: tuple[float, float, float, float]) -> None:
    """Mix black into a rectangle (left, top, right, bottom) of a page, as a plate for text."""
    corners = (round(box[0]), round(box[1]), round(box[2]), round(box[3]))
    below = page.crop(corners)
    page.paste(Image.blend(below, Image.new("RGB", below.size, PANEL), PLATE_OPACITY), corners[:2])


def scale_bar(page: Image.Image, at: Point, pixels_per_mm: float, room: float) -> None:
    """Draw a bar of a round length, at most `room` pixels wide, on a plate; it starts at `at`."""
    length, text = round_length(room / pixels_per_mm)
    x, y, end = at[0], at[1], at[0] + length * pixels_per_mm
    darken(page, (x - 6, y - 10, end + text_width(text, BAR_TEXT_SIZE) + 14, y + 10))
    canvas = ImageDraw.Draw(page)
    canvas.line([(x, y), (end, y)], fill=TEXT, width=2)
    for tick in (x, end):
        canvas.line([(tick, y - 5), (tick, y + 5)], fill=TEXT, width=2)
    draw_text(canvas, (end + 8, y), text, BAR_TEXT_SIZE, TEXT, "lm")


def round_length(max_mm: float) -> tuple[float, str]:
    """Return the longest of 1, 2, 5, 10, 20... mm up to `max_mm`, and its text with unit."""
    power = 10.0 ** np.floor(np.log10(max_mm))
    length = max((n * power for n in (1, 2, 5, 10) if n * power <= max_mm), default=max_mm)
    text = f"{length / 10:g} cm" if length >= 10 else f"{length:g} mm"
    return float(length), text


NOTE_SIZE = 14
NOTE_GAP = 10
NOTE_INDENT = 14
NOTE_LINE = round(NOTE_SIZE * LINE_HEIGHT)
MANY = 14
"""Number of structures from which the legend is small and grouped by system."""
MAX_COLUMNS = 4
SWATCH_GAP = 8
SWATCH_INSET = 2
"""Number of pixels by which a swatch is lower than the text."""
EXPERIMENTAL = "(exp.)"
_MARKS = ((Flag.TOUCHES_BORDER, "*"), (Flag.OUT_OF_RANGE, "!"))
"""Marks behind the volume of a structure, which notes explain."""


@dataclass(frozen=True)
class Sizes:
    """Sizes in pixels of text and height of the legend's entries."""

    text: int
    height: int


LARGE, SMALL = Sizes(17, 27), Sizes(14, 21)


@dataclass(frozen=True)
class Note:
    """A sentence below the list of structures."""

    text: str
    color: Color


@dataclass(frozen=True)
class Entry:
    """A line of the legend: a structure with its volume, or a heading, which has no colour."""

    text: str
    color: Color | None = None
    amount: str = ""
    tag: str = ""


def legend_entries(
    segmentations: Sequence[Segmentation],
    measurements: Sequence[Measurement],
    color_of: dict[tuple[str, int], Color],
) -> list[Entry]:
    """Return the structures with voxels, model by model, the largest first.

    Many structures are grouped by system of the body, in the order of their numbers.
    """
    entries = []
    nonempty = [m for m in measurements if m.voxels]
    for segmentation in segmentations:
        by_number = {s.number: s for s in segmentation.structures}
        present = [m for m in nonempty if m.model == segmentation.model]
        if len(segmentations) > 1 and present:
            entries.append(Entry(segmentation.title))
        if len(nonempty) <= MANY:
            groups = {"": sorted(present, key=lambda m: (-m.volume_ml, m.number))}
        else:
            ordered = sorted(present, key=lambda m: m.number)
            groups = {
                name: [m for m in ordered if system_of(by_number[m.number]) == name]
                for name in systems()
            }
        several = sum(1 for members in groups.values() if members) > 1
        for name, members in groups.items():
            # neither a system without a structure nor the only one has a heading
            if name and members and several:
                entries.append(Entry(name))
            for m in members:
                structure = by_number[m.number]
                marks = "".join(mark for flag, mark in _MARKS if flag in m.flags)
                amount = f"{rounded_milliliters(m.volume_ml)} ml{marks}"
                tag = EXPERIMENTAL if structure.experimental else ""
                color = color_of[segmentation.model, m.number]
                entries.append(Entry(shown_name(structure.name), color, amount, tag))
    return entries


def rounded_milliliters(volume: float) -> str:
    """Return a volume in ml as text: 12,340, 345, 6.7, 0.082, < 0.001."""
    return f"{volume:,.0f}" if volume >= 99.95 else milliliters(volume)


def legend_notes(
    segmentations: Sequence[Segmentation],
    measurements: Sequence[Measurement],
    flags: Iterable[Flag],
    limitations: Iterable[str] = (),
) -> list[Note]:
    """Return the notes on a result: flags, limitations, cut and missing structures."""
    # first, since they may be about the whole result: a head, to a model that never saw one
    notes = [Note(f"Limitation: {text}", WARN) for text in dict.fromkeys(limitations)]
    notes += [Note(flag.text, WARN) for flag in dict.fromkeys(flags)]
    present = [m for m in measurements if m.voxels]
    if not present:
        notes.insert(0, Note("No structure was found in this scan", WARN))
    if any(Flag.OUT_OF_RANGE in m.flags for m in present):
        notes.append(Note("! Volume or mean outside the usual range that the model states", WARN))
    if any(Flag.TOUCHES_BORDER in m.flags for m in present):
        notes.append(Note("* Cut off by the border of the scan: the volume is incomplete", MUTED))
    structures = {(s.model, t.number): t for s in segmentations for t in s.structures}
    if any(structures[m.model, m.number].experimental for m in present):
        notes.append(
            Note(f"{EXPERIMENTAL} The authors of the model advise against relying on it", MUTED)
        )
    absent = [shown_name(structures[m.model, m.number].name) for m in measurements if not m.voxels]
    if absent and present:
        notes.append(Note(f"Not found: {', '.join(absent)}", MUTED))
    return notes


@dataclass(frozen=True)
class Item:
    """An entry or note in a column of the legend: its lines, and its height in pixels."""

    content: Entry | Note
    lines: tuple[str, ...]
    height: int


@dataclass(frozen=True)
class Legend:
    """The entries and notes of a legend, which flow through columns."""

    entries: tuple[Entry, ...]
    notes: tuple[Note, ...]

    @property
    def sizes(self) -> Sizes:
        """Sizes of its entries."""
        return SMALL if len(self.entries) > MANY else LARGE

    def heights(self) -> dict[int, int]:
        """Return its height in 1 to `MAX_COLUMNS` columns."""
        return {
            columns: _least_height(self._items(column_width(columns)), columns)
            for columns in range(1, MAX_COLUMNS + 1)
        }

    def draw(self, page: Image.Image, corner: tuple[int, int], columns: int) -> None:
        """Draw it in columns below `corner`."""
        width = column_width(columns)
        items = self._items(width)
        canvas, x = ImageDraw.Draw(page), corner[0]
        for column in _columns_at(items, _least_height(items, columns)):
            y = corner[1]
            for item in column:
                if isinstance(item.content, Entry):
                    _draw_entry(canvas, (x, y), item.content, item.lines, self.sizes, width)
                else:
                    _draw_note(canvas, (x, y), item.lines, item.content.color)
                y += item.height
            x += width + LEGEND_GAP

    def _items(self, width: int) -> list[Item]:
        """Return entries and notes in a column of a width; a name ends before its volume."""
        items, sizes = [], self.sizes
        before = sizes.text - SWATCH_INSET + 2 * SWATCH_GAP
        for entry in self.entries:
            room = width - before - text_width(entry.amount, sizes.text)
            lines = tuple(wrap_text(f"{entry.text} {entry.tag}", sizes.text, room)) or ("",)
            items.append(Item(entry, lines, sizes.height + (len(lines) - 1) * sizes.text))
        for note in self.notes:
            lines = tuple(wrap_text(note.text, NOTE_SIZE, width - NOTE_INDENT))
            items.append(Item(note, lines, NOTE_GAP + len(lines) * NOTE_LINE))
        return items


def _least_height(items: Sequence[Item], columns: int) -> int:
    """Return the smallest height at which items fit into columns in their order."""
    sizes = [item.height for item in items]
    height = max([-(-sum(sizes) // columns), *sizes], default=0)
    # no item is split, so that the mean height of a column may not suffice
    while len(_columns_at(items, height)) > columns:
        height += 1
    return height


def _columns_at(items: Sequence[Item], height: int) -> list[list[Item]]:
    """Return the items of each column of a height; a heading is not the last of a column."""
    columns: list[list[Item]] = [[]]
    for n, item in enumerate(items):
        heading = isinstance(item.content, Entry) and item.content.color is None
        # a heading without an entry below it would say nothing
        needed = item.height + (items[n + 1].height if heading and n + 1 < len(items) else 0)
        # the first item of a column stays, however high it is
        if columns[-1] and sum(each.height for each in columns[-1]) + needed > height:
            columns.append([])
        columns[-1].append(item)
    return columns


def _draw_note(
    canvas: ImageDraw.ImageDraw, corner: tuple[int, int], lines: Sequence[str], color: Color
) -> None:
    x, y = corner[0], corner[1] + NOTE_GAP // 2
    canvas.rectangle([x, y + 2, x + 2, y + len(lines) * NOTE_LINE - 2], fill=color)
    for n, text in enumerate(lines):
        draw_text(canvas, (x + NOTE_INDENT, y + n * NOTE_LINE), text, NOTE_SIZE, color)


def _draw_entry(
    canvas: ImageDraw.ImageDraw,
    corner: tuple[int, int],
    entry: Entry,
    names: Sequence[str],
    sizes: Sizes,
    width: int,
) -> None:
    """Draw a line; dots lead from a long name to its volume."""
    x, y = corner[0], corner[1] + sizes.height / 2
    if entry.color is None:
        name = truncated(entry.text, NOTE_SIZE, width)
        draw_text(canvas, (x, y), name, NOTE_SIZE, MUTED, "lm")
        start = x + text_width(name, NOTE_SIZE) + 8
        canvas.line([(start, y), (x + width, y)], fill=RULE)
        return
    swatch = sizes.text - SWATCH_INSET
    top = y - swatch / 2
    canvas.rectangle([x, top, x + swatch, top + swatch], fill=entry.color)
    for n, name in enumerate(names):
        at = x + swatch + SWATCH_GAP, y + n * sizes.text
        draw_text(canvas, at, name, sizes.text, TEXT, "lm")
    y += (len(names) - 1) * sizes.text
    draw_text(canvas, (x + width, y), entry.amount, sizes.text, TEXT, "rm")
    start = x + swatch + 2 * SWATCH_GAP + text_width(names[-1], sizes.text)
    end = x + width - text_width(entry.amount, sizes.text) - SWATCH_GAP
    for dot in range(round(start), round(end), 6):
        canvas.point([(dot, y + sizes.text / 3)], fill=MUTED)


NOTICE = "Research use only - not for diagnosis"
FOOTER_HEIGHT = 28
BAR_MAX_WIDTH = 150
CAPTION_SIZE, CAPTION_LINE = 14, 18
MAX_CAPTION_LINES = 3
LETTER_SIZE = 15
MIN_LETTERED = 90
"""Minimum width and height of a frame with letters at all four sides."""
Show = Literal["labels", "scan"]


def draw_preview(
    volume: Volume,
    segmentations: Sequence[Segmentation],
    measurements: Sequence[Measurement],
    flags: Sequence[Flag],
    path: Path,
    about: About = About(),
) -> None:
    """Draw a scan with its structures to a PNG file.

    The page shows a plane through the largest structure without and with structures, two other
    planes, and slices spread over the structures, of which each is in at least one. Planes are
    cropped to the body and follow the radiological convention (the patient's right on the left,
    sagittal planes facing left, head up), at true proportions for any storage order. The slices of
    tilted and of thin stacks are shown as acquired. Letters at the edges, a scale bar, a legend
    with volumes, and the flags are added.

    Parameters
    ----------
    segmentations : sequence of Segmentation
        Segmentations on the volume's grid, in drawing order.
    measurements : sequence of Measurement
        One measurement for each structure of each segmentation.
    path : Path
        The PNG file. Equal input gives equal bytes.
    about : About
        Case id, assumed modality, limitations of the models.

    Raises
    ------
    ValueError
        If the scan is marked as having identifying text burned in.
    OSError
        If the file can't be written.
    """
    # names would be pixels of the picture
    if Flag.BURNED_IN in flags or Flag.BURNED_IN in volume.flags:
        raise ValueError("a scan with identifying text burned in must not have a preview")
    draw_page(choose_content(volume, segmentations, measurements, about), flags, path)


def draw_page(content: PreviewContent, flags: Sequence[Flag], path: Path) -> None:
    """Draw the page of `draw_preview`."""
    results = content.segmentations, content.measurements
    legend = Legend(
        tuple(legend_entries(*results, content.color_of)),
        tuple(legend_notes(*results, flags, content.about.limitations)),
    )
    main, second, third = (plane.area.size for plane in content.planes)
    planes = arrange_planes(main, second, third, legend.heights())
    below = HEADER_HEIGHT + planes.height + GAP
    tile_size, solid = content.tiles[0].area.size, content.solid
    columns = TILE_COLUMNS if solid is None else TILE_COLUMNS - VIEW_COLUMNS
    mosaic = [
        frame.moved(MARGIN, below)
        for frame in arrange_mosaic(len(content.tiles), tile_size, columns)
    ]
    height = mosaic[-1].y + mosaic[-1].height + FOOTER_HEIGHT
    page = Image.new("RGB", (WIDTH, height), PAGE)
    _draw_header(page, content)
    _draw_planes(page, content, planes)
    corner = MARGIN + planes.legend[0], HEADER_HEIGHT + planes.legend[1]
    legend.draw(page, corner, planes.columns)
    for plane, frame in zip(content.tiles, mosaic, strict=True):
        draw_picture(page, content, plane, frame)
        caption = truncated(plane.short, 12, frame.width - 10)
        draw_plate(page, (frame.x + 5, frame.y + frame.height - 5), caption, 12, "lb")
    if solid is not None:
        room = page.height - FOOTER_HEIGHT - below
        _draw_solid(page, solid, (mosaic[columns - 1].x + mosaic[0].width + GAP, below), room)
    at = MARGIN, page.height - FOOTER_HEIGHT / 2
    draw_text(ImageDraw.Draw(page), at, NOTICE, 13, MUTED, "lm")
    tile_map = json.dumps(asdict(map_tiles(content.tiles, mosaic)), separators=(",", ":"))
    path.write_bytes(encode_png(page, {TILE_MAP_KEYWORD: tile_map}))


def _draw_header(page: Image.Image, content: PreviewContent) -> None:
    """Write models with their versions; case, scan, device and precision below."""
    canvas, grid = ImageDraw.Draw(page), content.volume.grid
    models = [f"{s.title} {s.version}".strip() for s in content.segmentations]
    title = truncated(" + ".join(models), 26, CONTENT_WIDTH)
    draw_text(canvas, (MARGIN, 12), title, 26, TEXT)
    # models that ran alike are described once
    runs = dict.fromkeys(
        ", ".join(filter(None, (s.device, s.precision, s.changes))) for s in content.segmentations
    )
    shape = " x ".join(str(n) for n in grid.shape)
    spacing = " x ".join(f"{s:.2f}" for s in grid.spacing)
    facts = (
        f"case {content.about.case_id}" if content.about.case_id else "",
        f"{content.modality}, {content.window_text}",
        f"{shape} voxels of {spacing} mm, {grid.axis_codes}",
        *runs,
    )
    lines = wrap_text("  ·  ".join(filter(None, facts)), 14, CONTENT_WIDTH)
    for n, line in enumerate(list(lines)[:2]):
        draw_text(canvas, (MARGIN, 46 + 19 * n), line, 14, MUTED)


def _draw_planes(page: Image.Image, content: PreviewContent, planes: Planes) -> None:
    """Draw the main plane without and with labels, with the scale bar, and the two others."""
    main, second, third = content.planes
    frames = [frame.moved(MARGIN, HEADER_HEIGHT) for frame in planes.frames]
    shows: tuple[Show, ...] = ("scan", "labels", "labels", "labels")
    for frame, plane, show in zip(frames, (main, main, second, third), shows, strict=True):
        _draw_plane(page, content, plane, frame, show)
    labelled = frames[1]
    room = min(BAR_MAX_WIDTH, labelled.width / 3)
    at = labelled.x + 12, labelled.y + labelled.height - 16
    scale_bar(page, at, labelled.picture[0] / main.area.size[0], room)


def _draw_plane(
    page: Image.Image, content: PreviewContent, plane: Plane, frame: Frame, show: Show
) -> None:
    """Draw a plane with its caption and, at its edges, the letters of the sides."""
    draw_picture(page, content, plane, frame, show)
    caption = "Scan" if show == "scan" else plane.name
    _draw_letters(page, frame, plane.direction, caption if frame.width > MIN_LETTERED else "")


def caption_lines(caption: str, width: float) -> list[str]:
    """Return the lines of a caption; the last one ends with an ellipsis if not all have room."""
    lines = list(wrap_text(caption, CAPTION_SIZE, width))
    if len(lines) <= MAX_CAPTION_LINES:
        return lines
    first, rest = lines[: MAX_CAPTION_LINES - 1], lines[MAX_CAPTION_LINES - 1 :]
    return [*first, truncated(" ".join(rest), CAPTION_SIZE, width)]


def _draw_letters(page: Image.Image, frame: Frame, direction: Direction, caption: str) -> None:
    """Write the letters of the sides at the edges of a frame, and a caption at its top."""
    lines = caption_lines(caption, frame.width - 12)
    if lines:
        draw_plate(page, (frame.x + 6, frame.y + 6), "\n".join(lines), CAPTION_SIZE)
    across, down = LETTERS[direction.across], LETTERS[direction.down]
    middle = frame.x + frame.width / 2, frame.y + frame.height / 2
    draw_plate(page, (frame.x + 6, middle[1]), across[0], LETTER_SIZE, "lm")
    draw_plate(page, (frame.x + frame.width - 6, middle[1]), across[1], LETTER_SIZE, "rm")
    if min(frame.width, frame.height) > MIN_LETTERED:
        below = frame.y + 24 + (max(1, len(lines)) - 1) * CAPTION_LINE
        draw_plate(page, (middle[0], below), down[0], LETTER_SIZE, "ma")
        draw_plate(page, (middle[0], frame.y + frame.height - 6), down[1], LETTER_SIZE, "mb")


def _draw_solid(page: Image.Image, solid: Solid, corner: tuple[int, int], height: int) -> None:
    """Draw the shaded views, at one scale, from a corner to the right margin."""
    front, left = (solid.area(direction).size for direction in (FRONT, LEFT))
    frames = arrange_pair(front, left, (MARGIN + CONTENT_WIDTH - corner[0], height))
    without = f", without {', '.join(solid.left_out).lower()}" if solid.left_out else ""
    names = f"Front{without}", "Left"
    for direction, name, placed in zip((FRONT, LEFT), names, frames, strict=True):
        frame = placed.moved(*corner)
        box = (frame.x, frame.y, frame.x + frame.width - 1, frame.y + frame.height - 1)
        ImageDraw.Draw(page).rectangle(box, fill=PANEL)
        page.paste(solid.picture(direction, frame.picture), frame.corner)
        _draw_letters(page, frame, direction, name)


def draw_picture(
    page: Image.Image, content: PreviewContent, plane: Plane, frame: Frame, show: Show = "labels"
) -> None:
    """Draw a plane in the middle of its frame, which has the colour of air."""
    picture = content.picture(plane, frame.picture, show)
    edge = (255, 255, 255) if content.window.inverted else (0, 0, 0)
    box = (frame.x, frame.y, frame.x + frame.width - 1, frame.y + frame.height - 1)
    ImageDraw.Draw(page).rectangle(box, fill=edge)
    page.paste(picture, frame.corner)


THUMBNAIL_SIZE = (520, 200)


def draw_thumbnail(content: PreviewContent, path: Path) -> None:
    """Draw the three planes of a preview side by side to a PNG file of `THUMBNAIL_SIZE` pixels.

    Raises
    ------
    OSError
        If the file can't be written.
    """
    page = Image.new("RGB", THUMBNAIL_SIZE, PAGE)
    frames = fill_row([plane.area.size for plane in content.planes], THUMBNAIL_SIZE)
    for plane, frame in zip(content.planes, frames, strict=True):
        draw_picture(page, content, plane, frame)
    path.write_bytes(encode_png(page))


def encode_png(page: Image.Image, texts: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """Return a page as a PNG file, with texts (ASCII) by keyword.

    All rows have one filter. Pillow tries five on each row and has no option for it: it takes twice
    as long for files that are as small.
    """
    import imagecodecs

    level, row_filter = PNG_LEVEL, imagecodecs.PNG.FILTER.PAETH
    encoded = bytes(imagecodecs.png_encode(np.asarray(page), level=level, filter=row_filter))
    chunks = [encoded[:_PNG_HEAD]]
    for keyword, text in texts.items():
        content = b"tEXt" + keyword.encode("ascii") + b"\0" + text.encode("ascii")
        chunks.append(struct.pack(">I", len(content) - 4) + content)
        chunks.append(struct.pack(">I", zlib.crc32(content)))
    return b"".join((*chunks, encoded[_PNG_HEAD:]))


_PNG_HEAD = 33
"""Bytes of a PNG file before any text: its signature, and the chunk IHDR (ISO/IEC 15948)."""
TILE_MAP_KEYWORD = "scanloom tiles"
"""Keyword of the text chunk of the PNG file."""

Row = tuple[float, float, float, float]
Pixels = tuple[int, int, int, int]
"""Left, top, width and height in pixels."""


@dataclass(frozen=True)
class MosaicSlice:
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
    tiles : tuple of MosaicSlice
        The slices; at least one.
    to_picture : (row, row)
        Affine from a voxel index (i, j, k, 1) to x and y within the picture of its slice.
    """

    axis: int
    size: tuple[int, int]
    tiles: tuple[MosaicSlice, ...]
    to_picture: tuple[Row, Row]

    def nearest(self, box: Box) -> MosaicSlice:
        """Return the slice that is nearest to the middle of a bounding box."""
        middle = (box[0][self.axis] + box[1][self.axis]) / 2
        return min(self.tiles, key=lambda tile: abs(tile.slice - middle))

    def outline(self, box: Box, tile: MosaicSlice) -> Pixels:
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
        tiles.append(MosaicSlice(index, n + 1, *frame.corner))
    rows = np.zeros((2, 4))
    for row, lpi, low, mm, pixels in zip(
        rows, (direction.across, direction.down), area.low, area.size, size, strict=True
    ):
        flip, scale = view.flipped[lpi], pixels / mm
        first = origin[lpi] + (step[lpi] * (view.shape[lpi] - 1) if flip else 0.0)
        row[view.order[lpi]] = (-1 if flip else 1) * step[lpi] * scale
        row[3] = (first - low) * scale
    # short in the file, and far finer than a pixel
    to_x, to_y = ((float(a), float(b), float(c), float(d)) for a, b, c, d in rows.round(4))
    return TileMap(view.order[axis], size, tuple(tiles), (to_x, to_y))


def read_tile_map(info: dict[Any, Any]) -> TileMap | None:
    """Read the map from the `info` of an opened PNG file; None if it is missing or malformed."""
    names = [field.name for field in dataclass_fields(MosaicSlice)]
    try:
        fields = json.loads(info[TILE_MAP_KEYWORD])
        width, height = (int(n) for n in fields["size"])
        (a, b, c, d), (e, f, g, h) = ([float(x) for x in row] for row in fields["to_picture"])
        tiles = tuple(MosaicSlice(*(int(t[n]) for n in names)) for t in fields["tiles"])
        axis = int(fields["axis"])
    except (LookupError, TypeError, ValueError):
        return None
    # the file may be of another program
    if axis not in (0, 1, 2) or not tiles or min(width, height) < 1:
        return None
    return TileMap(axis, (width, height), tiles, ((a, b, c, d), (e, f, g, h)))
