"""The legend of the preview: structures with their volumes, and notes on the result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

from scanloom.cards.codes import system_of, systems
from scanloom.core import Flag, Measurement, Segmentation
from scanloom.core.segmentation import Color
from scanloom.review.preview.drawing import (
    LINE_HEIGHT,
    MUTED,
    RULE,
    TEXT,
    WARN,
    Rgb,
    draw_text,
    text_width,
    truncated,
    wrap_text,
)
from scanloom.review.preview.layout import CONTENT_WIDTH, LEGEND_GAP, LEGEND_WIDTH

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
    color: Rgb


@dataclass(frozen=True)
class Entry:
    """A line of the legend: a structure with its volume, or a heading, which has no colour."""

    text: str
    color: Rgb | None = None
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
