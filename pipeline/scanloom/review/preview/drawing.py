"""Drawing primitives of previews: colours, text, overlays and scale bars."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Rgb = tuple[int, int, int]
Point = tuple[float, float]

PAGE: Rgb = (13, 15, 19)
PANEL: Rgb = (0, 0, 0)
RULE: Rgb = (44, 49, 58)
TEXT: Rgb = (234, 236, 240)
MUTED: Rgb = (160, 168, 180)
"""Colour of captions: contrast of 8:1 to the page; WCAG 2.2 requires 7:1 for small text."""
WARN: Rgb = (255, 190, 92)

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
    color: Rgb = TEXT,
    anchor: str = "la",
) -> None:
    """Write a line of text; `anchor` is Pillow's: with "la" its top left corner is at `at`."""
    canvas.text(at, displayable(text), fill=color, font=font(size), anchor=anchor)


def draw_plate(
    page: Image.Image, at: Point, text: str, size: int, anchor: str = "la", color: Rgb = TEXT
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
