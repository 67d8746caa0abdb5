"""The legend of the preview: structures by volume, and notes on the result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from PIL import ImageDraw

from scanloom.core import Flag, Measurement, Segmentation
from scanloom.review.preview.drawing import (
    LINE_HEIGHT,
    MUTED,
    PAGE,
    TEXT,
    WARN,
    Rgb,
    draw_text,
    text_width,
    truncated,
    wrap_text,
)
from scanloom.review.preview.layout import LEGEND_WIDTH

NAME_SIZE = 17
NOTE_SIZE = 14
ENTRY_HEIGHT = 27
SWATCH = 16
MIN_ROWS = 8
"""Minimum number of listed structures, even if the pictures next to them are low."""
NOTE_GAP = 14
MAX_ABSENT_NAMES = 6
EXPERIMENTAL = "(exp.)"


@dataclass(frozen=True)
class Note:
    """A sentence below the list of structures."""

    text: str
    color: Rgb


@dataclass(frozen=True)
class Entry:
    """A line of the legend: a structure with its volume, or the name of a model as a heading."""

    text: str
    color: Rgb | None = None
    amount: str = ""
    tag: str = ""


def legend_entries(
    segmentations: Sequence[Segmentation], measurements: Sequence[Measurement]
) -> list[Entry]:
    """Return the structures with voxels, model by model, the largest first."""
    entries = []
    for segmentation in segmentations:
        by_number = {s.number: s for s in segmentation.structures}
        present = [m for m in measurements if m.model == segmentation.model and m.voxels]
        if len(segmentations) > 1 and present:
            entries.append(Entry(segmentation.title))
        for m in sorted(present, key=lambda m: (-m.volume_ml, m.number)):
            structure = by_number[m.number]
            mark = "*" if Flag.TOUCHES_BORDER in m.flags else ""
            amount = f"{milliliters(m.volume_ml)} ml{mark}"
            tag = EXPERIMENTAL if structure.experimental else ""
            entries.append(Entry(structure.name, structure.color, amount, tag))
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
) -> list[Note]:
    """Return the notes on a result: flags, structures cut by the border, missing structures."""
    notes = [Note(flag.text, WARN) for flag in dict.fromkeys(flags)]
    present = [m for m in measurements if m.voxels]
    if not present:
        notes.insert(0, Note("No structure was found in this scan", WARN))
    if any(Flag.TOUCHES_BORDER in m.flags for m in present):
        notes.append(Note("* Cut off by the border of the scan: the volume is incomplete", MUTED))
    structures = [t for s in segmentations for t in s.structures]
    if any(t.experimental for t in structures):
        notes.append(
            Note(f"{EXPERIMENTAL} The authors of the model advise against relying on it", MUTED)
        )
    names = {(s.model, t.number): t.name for s in segmentations for t in s.structures}
    absent = [names[m.model, m.number] for m in measurements if not m.voxels]
    if absent and present:
        more = f" + {len(absent) - MAX_ABSENT_NAMES} more" if len(absent) > MAX_ABSENT_NAMES else ""
        notes.append(Note(f"Not found: {', '.join(absent[:MAX_ABSENT_NAMES])}{more}", MUTED))
    return notes


def draw_legend(
    canvas: ImageDraw.ImageDraw,
    corner: tuple[int, int],
    height: int,
    entries: Sequence[Entry],
    notes: Sequence[Note],
) -> int:
    """Draw the legend below `corner`, if possible within `height` pixels; return its lower end.

    Entries that do not fit are counted: "+ 12 more".
    """
    x, y = corner
    wrapped_notes = [
        (note, list(wrap_text(note.text, NOTE_SIZE, LEGEND_WIDTH - 16))) for note in notes
    ]
    line = round(NOTE_SIZE * LINE_HEIGHT)
    notes_height = sum(len(lines) * line + NOTE_GAP for _, lines in wrapped_notes)
    room = max(MIN_ROWS, (height - notes_height - NOTE_GAP) // ENTRY_HEIGHT)
    shown = entries if len(entries) <= room else entries[: room - 1]
    for entry in shown:
        _draw_entry(canvas, (x, y), entry)
        y += ENTRY_HEIGHT
    if len(shown) < len(entries):
        hidden = sum(1 for entry in entries[len(shown) :] if entry.amount)
        draw_text(canvas, (x, y + ENTRY_HEIGHT / 2), f"+ {hidden} more", NAME_SIZE, MUTED, "lm")
        y += ENTRY_HEIGHT
    y += NOTE_GAP if shown else 0
    for note, lines in wrapped_notes:
        canvas.rectangle([x, y, x + 2, y + len(lines) * line - 4], fill=note.color)
        for text in lines:
            draw_text(canvas, (x + 16, y), text, NOTE_SIZE, note.color)
            y += line
        y += NOTE_GAP
    return y


def _draw_entry(canvas: ImageDraw.ImageDraw, corner: tuple[int, int], entry: Entry) -> None:
    x, y = corner[0], corner[1] + ENTRY_HEIGHT / 2
    if entry.color is None:
        name = truncated(entry.text, NOTE_SIZE, LEGEND_WIDTH)
        draw_text(canvas, (x, y), name, NOTE_SIZE, MUTED, "lm")
        return
    top = y - SWATCH / 2
    inner = tuple(round(p + 0.5 * (c - p)) for p, c in zip(PAGE, entry.color, strict=True))
    canvas.rectangle([x, top, x + SWATCH, top + SWATCH], fill=inner, outline=entry.color, width=2)
    tag = f" {entry.tag}" if entry.tag else ""
    used = SWATCH + 24 + text_width(entry.amount, NAME_SIZE) + text_width(tag, NAME_SIZE)
    name = truncated(entry.text, NAME_SIZE, LEGEND_WIDTH - used) + tag
    draw_text(canvas, (x + SWATCH + 12, y), name, NAME_SIZE, TEXT, "lm")
    draw_text(canvas, (x + LEGEND_WIDTH, y), entry.amount, NAME_SIZE, TEXT, "rm")
