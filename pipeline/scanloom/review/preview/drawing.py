"""Drawing of previews: colours, text, scale bars, structures on a scan, and the legend."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from scanloom.cards.codes import system_of, systems
from scanloom.core import Flag, Measurement, Segmentation
from scanloom.core.segmentation import Color
from scanloom.review.preview.layout import CONTENT_WIDTH, LEGEND_GAP, LEGEND_WIDTH

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
    """Whether the font has a glyph for a character."""
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


def draw_plate(
    page: Image.Image, at: Point, text: str, size: int, anchor: str = "la", color: Color = TEXT
) -> None:
    """Write on a picture, on a plate of `PLATE_OPACITY` that keeps text legible."""
    canvas = ImageDraw.Draw(page)
    shown = displayable(text)
    left, top, right, bottom = canvas.textbbox(at, shown, font=font(size), anchor=anchor)
    darken(page, (left - PLATE_MARGIN, top - PLATE_MARGIN, right + PLATE_MARGIN, bottom + 3))
    canvas.text(at, shown, fill=color, font=font(size), anchor=anchor)


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


FILL_OPACITY = 0.18
"""Opacity of a structure's area, low enough to show the tissue below it."""
OUTLINE_OPACITY = 0.95
"""Opacity of a structure's contour."""
OVERSAMPLING = 3
"""Samples per pixel along each axis, from which contours are antialiased."""
LINE_SAMPLES = 4
"""Width of a contour in samples: 1.3 pixels."""


@dataclass(frozen=True, eq=False)
class Overlay:
    """Structures of one layer in a picture.

    Parameters
    ----------
    labels : (3 H, 3 W) array
        Labels of `OVERSAMPLING` samples per pixel along each axis.
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


def overlay_structures(gray: NDArray[np.uint8], layers: Sequence[Overlay]) -> Image.Image:
    """Return a plane (H, W) with its structures on top: first all areas, then all contours."""
    picture = np.repeat(gray[:, :, None], 3, axis=2)
    flat = picture.reshape(-1, 3)
    for layer in layers:
        labels = layer.middle.ravel()
        at = np.flatnonzero(layer.filled[labels])
        _blend(flat, at, layer.colors[labels[at]], FILL_OPACITY)
    for layer in layers:
        edges = np.where(contour(layer.labels), layer.labels, 0)
        cells = _cells(edges)
        label = cells[0].copy()
        samples = (cells[0] > 0).astype(np.uint8)
        for cell in cells[1:]:
            np.maximum(label, cell, out=label)
            samples += cell > 0
        at = np.flatnonzero(label)
        share = samples.ravel()[at].astype(np.float32) / len(cells)
        _blend(flat, at, layer.colors[label.ravel()[at]], OUTLINE_OPACITY * share[:, None])
    return Image.fromarray(picture)


def contour(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Return the samples of a structure within `LINE_SAMPLES` of another one or of none."""
    edge = np.zeros(labels.shape, bool)
    for step in (LINE_SAMPLES, LINE_SAMPLES // 2):
        across = labels[:, step:] != labels[:, :-step]
        edge[:, step:] |= across
        edge[:, :-step] |= across
        down = labels[step:] != labels[:-step]
        edge[step:] |= down
        edge[:-step] |= down
    return edge


def _cells(samples: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the n-th sample of every pixel, for each n."""
    steps = range(OVERSAMPLING)
    return [samples[a::OVERSAMPLING, b::OVERSAMPLING] for a in steps for b in steps]


def _blend(
    flat: NDArray[np.uint8],
    at: NDArray[np.intp],
    colors: NDArray[np.float32],
    opacity: float | NDArray[np.floating[Any]],
) -> None:
    """Mix colours (M, 3) into the pixels `at` (M,) of a picture (N, 3)."""
    below = flat[at].astype(np.float32)
    flat[at] = (below + opacity * (colors - below) + 0.5).astype(np.uint8)


NOTE_SIZE = 14
NOTE_GAP = 10
NOTE_INDENT = 14
MANY = 14
"""Number of structures from which the legend is small and grouped by system."""
MAX_COLUMNS = 4
SWATCH_GAP = 8
SWATCH_INSET = 2
"""Number of pixels by which a swatch is lower than the text."""
EXPERIMENTAL = "(exp.)"


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
    found = [m for m in measurements if m.voxels]
    for segmentation in segmentations:
        by_number = {s.number: s for s in segmentation.structures}
        present = [m for m in found if m.model == segmentation.model]
        if len(segmentations) > 1 and present:
            entries.append(Entry(segmentation.title))
        if len(found) <= MANY:
            groups = {"": sorted(present, key=lambda m: (-m.volume_ml, m.number))}
        else:
            ordered = sorted(present, key=lambda m: m.number)
            groups = {
                name: [m for m in ordered if system_of(by_number[m.number]) == name]
                for name in systems()
            }
        for name, members in groups.items():
            if name and members:
                entries.append(Entry(name))
            for m in members:
                structure = by_number[m.number]
                mark = "*" if Flag.TOUCHES_BORDER in m.flags else ""
                amount = f"{milliliters(m.volume_ml)} ml{mark}"
                tag = EXPERIMENTAL if structure.experimental else ""
                color = color_of[segmentation.model, m.number]
                entries.append(Entry(structure.name, color, amount, tag))
    return entries


def milliliters(volume: float) -> str:
    """Return a volume in ml as text: 12,340, 345, 6.7, 0.08."""
    if volume >= 99.95:
        return f"{volume:,.0f}"
    return f"{volume:.1f}" if volume >= 0.995 else f"{volume:.2g}"


def legend_notes(
    segmentations: Sequence[Segmentation],
    measurements: Sequence[Measurement],
    flags: Iterable[Flag],
    limitations: Iterable[str] = (),
) -> list[Note]:
    """Return the notes on a result: flags, limitations, cut and missing structures."""
    notes = [Note(flag.text, WARN) for flag in dict.fromkeys(flags)]
    notes += [Note(f"Known error: {text}", WARN) for text in dict.fromkeys(limitations)]
    present = [m for m in measurements if m.voxels]
    if not present:
        notes.insert(0, Note("No structure was found in this scan", WARN))
    if any(Flag.TOUCHES_BORDER in m.flags for m in present):
        notes.append(Note("* Cut off by the border of the scan: the volume is incomplete", MUTED))
    structures = {(s.model, t.number): t for s in segmentations for t in s.structures}
    if any(structures[m.model, m.number].experimental for m in present):
        notes.append(
            Note(f"{EXPERIMENTAL} The authors of the model advise against relying on it", MUTED)
        )
    absent = [structures[m.model, m.number].name for m in measurements if not m.voxels]
    if absent and present:
        notes.append(Note(f"Not found: {', '.join(absent)}", MUTED))
    return notes


Item = tuple[Entry | Note, int]
"""An entry or note with its height in pixels."""


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
        """Return its height in 1 to `MAX_COLUMNS` columns, of the width that the layout uses."""
        heights = {}
        for columns in range(1, MAX_COLUMNS + 1):
            width = (CONTENT_WIDTH - (columns - 1) * LEGEND_GAP) // columns
            width = width if columns >= MAX_COLUMNS - 1 else LEGEND_WIDTH
            heights[columns] = _least_height(self._items(width), columns)
        return heights

    def draw(self, page: Image.Image, corner: tuple[int, int], columns: int, width: int) -> None:
        """Draw it below `corner` in columns of a width."""
        items = self._items(width)
        canvas, x = ImageDraw.Draw(page), corner[0]
        for column in _columns_at(items, _least_height(items, columns)):
            y = corner[1]
            for item, size in column:
                if isinstance(item, Entry):
                    _draw_entry(canvas, (x, y), item, self.sizes, width)
                else:
                    _draw_note(canvas, (x, y), item, width)
                y += size
            x += width + LEGEND_GAP

    def _items(self, width: int) -> list[Item]:
        """Return entries and notes with their heights in a column of a width."""
        line = round(NOTE_SIZE * LINE_HEIGHT)
        items: list[Item] = [
            (e, self.sizes.height + (len(_names(e, self.sizes, width)) - 1) * self.sizes.text)
            for e in self.entries
        ]
        for note in self.notes:
            lines = len(list(wrap_text(note.text, NOTE_SIZE, width - NOTE_INDENT)))
            items.append((note, NOTE_GAP + lines * line))
        return items


def _least_height(items: Sequence[Item], columns: int) -> int:
    """Return the smallest height at which items fit into columns in their order."""
    sizes = [size for _, size in items]
    height = max([-(-sum(sizes) // columns), *sizes], default=0)
    while len(_columns_at(items, height)) > columns:
        height += 1
    return height


def _columns_at(items: Sequence[Item], height: int) -> list[list[Item]]:
    """Return the items of each column of a height; a heading is not the last of a column."""
    columns: list[list[Item]] = [[]]
    for n, (item, size) in enumerate(items):
        heading = isinstance(item, Entry) and item.color is None
        needed = size + (items[n + 1][1] if heading and n + 1 < len(items) else 0)
        if columns[-1] and sum(s for _, s in columns[-1]) + needed > height:
            columns.append([])
        columns[-1].append((item, size))
    return columns


def _draw_note(
    canvas: ImageDraw.ImageDraw, corner: tuple[int, int], note: Note, width: int
) -> None:
    x, y = corner[0], corner[1] + NOTE_GAP // 2
    line = round(NOTE_SIZE * LINE_HEIGHT)
    lines = list(wrap_text(note.text, NOTE_SIZE, width - NOTE_INDENT))
    canvas.rectangle([x, y + 2, x + 2, y + len(lines) * line - 2], fill=note.color)
    for n, text in enumerate(lines):
        draw_text(canvas, (x + NOTE_INDENT, y + n * line), text, NOTE_SIZE, note.color)


def _draw_entry(
    canvas: ImageDraw.ImageDraw, corner: tuple[int, int], entry: Entry, sizes: Sizes, width: int
) -> None:
    """Draw a line; dots lead from a long name to its volume."""
    x, y = corner[0], corner[1] + sizes.height / 2
    if entry.color is None:
        name = truncated(entry.text, NOTE_SIZE, width)
        draw_text(canvas, (x, y), name, NOTE_SIZE, MUTED, "lm")
        start = x + text_width(name, NOTE_SIZE) + 8
        canvas.line([(start, y), (x + width, y)], fill=RULE)
        return
    names, swatch = _names(entry, sizes, width), sizes.text - SWATCH_INSET
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


def _names(entry: Entry, sizes: Sizes, width: int) -> list[str]:
    """Return the lines of an entry's name, which end before its volume."""
    left = sizes.text - SWATCH_INSET + 2 * SWATCH_GAP
    room = width - left - text_width(entry.amount, sizes.text)
    return list(wrap_text(f"{entry.text} {entry.tag}", sizes.text, room)) or [""]
