"""The column beside the pictures: structures by volume, and what must be known of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from PIL import ImageDraw

from scanloom.core import Flag, Measurement, Segmentation
from scanloom.review.draw import (
    LINE,
    PAGE,
    QUIET,
    TEXT,
    WARN,
    Rgb,
    shortened,
    text_width,
    wrapped,
    write,
)
from scanloom.review.layout import LEGEND_WIDTH

NAME_SIZE = 17
NOTE_SIZE = 14
ROW = 27
SWATCH = 16
FEWEST_ROWS = 8
"""So many structures are named, however low the pictures beside are."""
NOTE_GAP = 14
MOST_ABSENT = 6
EXPERIMENTAL = "(exp.)"


@dataclass(frozen=True)
class Note:
    """A sentence below the structures."""

    text: str
    color: Rgb


@dataclass(frozen=True)
class Entry:
    """A line of the legend: a structure that was found, or the model of those that follow."""

    text: str
    color: Rgb | None = None
    amount: str = ""
    tag: str = ""


def legend_entries(
    segmentations: Sequence[Segmentation], measurements: Sequence[Measurement]
) -> list[Entry]:
    """Return the structures that were found, the largest first, model by model."""
    entries = []
    for segmentation in segmentations:
        of_number = {s.number: s for s in segmentation.structures}
        found = [m for m in measurements if m.model == segmentation.model and m.voxels]
        if len(segmentations) > 1 and found:
            entries.append(Entry(segmentation.model))
        for m in sorted(found, key=lambda m: (-m.volume_ml, m.number)):
            structure = of_number[m.number]
            mark = "*" if Flag.TOUCHES_BORDER in m.flags else ""
            amount = f"{milliliters(m.volume_ml)} ml{mark}"
            tag = EXPERIMENTAL if structure.experimental else ""
            entries.append(Entry(structure.name, structure.color, amount, tag))
    return entries


def milliliters(volume: float) -> str:
    """Return a volume with about three digits: 12,340, 345, 6.7, 0.08."""
    if volume >= 99.95:
        return f"{volume:,.0f}"
    return f"{volume:.1f}" if volume >= 0.995 else f"{volume:.2g}"


def notes_of(
    segmentations: Sequence[Segmentation],
    measurements: Sequence[Measurement],
    flags: Iterable[Flag],
) -> list[Note]:
    """Return what must be known beside the numbers: what is missing, what is a part, the flags."""
    notes = [Note(flag.text, WARN) for flag in dict.fromkeys(flags)]
    found = [m for m in measurements if m.voxels]
    if not found:
        notes.insert(0, Note("No structure was found in this scan", WARN))
    if any(Flag.TOUCHES_BORDER in m.flags for m in found):
        notes.append(Note("* It reaches the border of the scan, so its volume is a part", QUIET))
    structures = [t for s in segmentations for t in s.structures]
    if any(t.experimental for t in structures):
        notes.append(Note(f"{EXPERIMENTAL} Its authors warn against relying on it", QUIET))
    names = {(s.model, t.number): t.name for s in segmentations for t in s.structures}
    absent = [names[m.model, m.number] for m in measurements if not m.voxels]
    if absent and found:
        more = f" + {len(absent) - MOST_ABSENT} more" if len(absent) > MOST_ABSENT else ""
        notes.append(Note(f"Not found: {', '.join(absent[:MOST_ABSENT])}{more}", QUIET))
    return notes


def draw_legend(
    pen: ImageDraw.ImageDraw,
    corner: tuple[int, int],
    height: int,
    entries: Sequence[Entry],
    notes: Sequence[Note],
) -> int:
    """Draw the column below `corner`, `height` pixels high where that can be; return its end.

    What has no room is counted: "+ 12 more".
    """
    x, y = corner
    set_notes = [(note, list(wrapped(note.text, NOTE_SIZE, LEGEND_WIDTH - 16))) for note in notes]
    line = round(NOTE_SIZE * LINE)
    notes_height = sum(len(lines) * line + NOTE_GAP for _, lines in set_notes)
    room = max(FEWEST_ROWS, (height - notes_height - NOTE_GAP) // ROW)
    shown = entries if len(entries) <= room else entries[: room - 1]
    for entry in shown:
        _draw_entry(pen, (x, y), entry)
        y += ROW
    if len(shown) < len(entries):
        hidden = sum(1 for entry in entries[len(shown) :] if entry.amount)
        write(pen, (x, y + ROW / 2), f"+ {hidden} more", NAME_SIZE, QUIET, "lm")
        y += ROW
    y += NOTE_GAP if shown else 0
    for note, lines in set_notes:
        pen.rectangle([x, y, x + 2, y + len(lines) * line - 4], fill=note.color)
        for text in lines:
            write(pen, (x + 16, y), text, NOTE_SIZE, note.color)
            y += line
        y += NOTE_GAP
    return y


def _draw_entry(pen: ImageDraw.ImageDraw, corner: tuple[int, int], entry: Entry) -> None:
    x, y = corner[0], corner[1] + ROW / 2
    if entry.color is None:
        name = shortened(entry.text, NOTE_SIZE, LEGEND_WIDTH)
        write(pen, (x, y), name, NOTE_SIZE, QUIET, "lm")
        return
    top = y - SWATCH / 2
    inner = tuple(round(p + 0.5 * (c - p)) for p, c in zip(PAGE, entry.color, strict=True))
    pen.rectangle([x, top, x + SWATCH, top + SWATCH], fill=inner, outline=entry.color, width=2)
    tag = f" {entry.tag}" if entry.tag else ""
    taken = SWATCH + 24 + text_width(entry.amount, NAME_SIZE) + text_width(tag, NAME_SIZE)
    name = shortened(entry.text, NAME_SIZE, LEGEND_WIDTH - taken) + tag
    write(pen, (x + SWATCH + 12, y), name, NAME_SIZE, TEXT, "lm")
    write(pen, (x + LEGEND_WIDTH, y), entry.amount, NAME_SIZE, TEXT, "rm")
