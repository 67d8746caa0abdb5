"""Drawing primitives of previews: colours, text, overlays and scale bars."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from scanloom.core import Structure

Rgb = tuple[int, int, int]
Point = tuple[float, float]

PAGE: Rgb = (13, 15, 19)
PANEL: Rgb = (0, 0, 0)
RULE: Rgb = (44, 49, 58)
TEXT: Rgb = (234, 236, 240)
MUTED: Rgb = (160, 168, 180)
"""Colour of captions: contrast of 8:1 to the page; WCAG 2.2 requires 7:1 for small text."""
WARN: Rgb = (255, 190, 92)

FILL_OPACITY = 0.36
"""Opacity of a structure's area, low enough to show the tissue below it."""
OUTLINE_OPACITY = 0.95
"""Opacity of a structure's outline."""

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
    color: Rgb = TEXT,
    anchor: str = "la",
) -> None:
    """Write a line of text; `anchor` is Pillow's: with "la" its top left corner is at `at`."""
    canvas.text(at, displayable(text), fill=color, font=font(size), anchor=anchor)


def draw_label(canvas: ImageDraw.ImageDraw, at: Point, text: str, size: int, anchor: str) -> None:
    """Write on a picture, with a dark outline that keeps text legible on bright pixels."""
    canvas.text(
        at,
        displayable(text),
        fill=TEXT,
        font=font(size),
        anchor=anchor,
        stroke_width=2,
        stroke_fill=PANEL,
    )


def color_table(structures: Sequence[Structure], highest: int) -> NDArray[np.float32]:
    """Return the RGB colour (highest + 1, 3) of each value of a label map; 0 is black."""
    table = np.zeros((highest + 1, 3), np.float32)
    for structure in structures:
        table[structure.number] = structure.color
    return table


def overlay_structures(
    gray: NDArray[np.uint8], layers: Sequence[tuple[NDArray[Any], NDArray[np.float32]]]
) -> Image.Image:
    """Return a plane with its structures on top: first all areas, then all outlines.

    Parameters
    ----------
    gray : (H, W) array
        Brightness of the scan, 0 to 255.
    layers : sequence of ((H, W) array, (N, 3) array)
        Labels of the same pixels, and the RGB colour of each value.
    """
    picture = np.repeat(gray[:, :, None].astype(np.float32), 3, axis=2)
    for labels, colors in layers:
        inside = labels > 0
        picture[inside] += FILL_OPACITY * (colors[labels[inside]] - picture[inside])
    for labels, colors in layers:
        edge = outline(labels)
        picture[edge] += OUTLINE_OPACITY * (colors[labels[edge]] - picture[edge])
    return Image.fromarray((picture + 0.5).astype(np.uint8))


def outline(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Return the pixels (H, W) with a label higher than that of one of their four neighbours.

    The line between two adjacent structures is therefore one pixel wide.
    """
    edge = np.zeros(labels.shape, bool)
    edge[:, 1:] |= labels[:, 1:] > labels[:, :-1]
    edge[:, :-1] |= labels[:, :-1] > labels[:, 1:]
    edge[1:] |= labels[1:] > labels[:-1]
    edge[:-1] |= labels[:-1] > labels[1:]
    return edge


def scale_bar(canvas: ImageDraw.ImageDraw, at: Point, pixels_per_mm: float, room: float) -> None:
    """Draw a bar of a round length, at most `room` pixels wide, that starts at `at`."""
    length, text = round_length(room / pixels_per_mm)
    x, y, end = at[0], at[1], at[0] + length * pixels_per_mm
    canvas.line([(x, y), (end, y)], fill=TEXT, width=2)
    for tick in (x, end):
        canvas.line([(tick, y - 5), (tick, y + 5)], fill=TEXT, width=2)
    draw_text(canvas, (end + 10, y), text, 14, TEXT, "lm")


def round_length(max_mm: float) -> tuple[float, str]:
    """Return the longest of 1, 2, 5, 10, 20... mm up to `max_mm`, and its text with unit."""
    power = 10.0 ** np.floor(np.log10(max_mm))
    length = max((n * power for n in (1, 2, 5, 10) if n * power <= max_mm), default=max_mm)
    text = f"{length / 10:g} cm" if length >= 10 else f"{length:g} mm"
    return float(length), text
