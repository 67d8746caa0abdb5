"""The hand that draws: colours, type, overlays and scale bars."""

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
QUIET: Rgb = (160, 168, 180)
"""For captions: 8 to 1 against the page, above what WCAG 2.2 asks for small text (7 to 1)."""
WARN: Rgb = (255, 190, 92)

FILL = 0.36
"""Opacity of a structure's area: the tissue stays legible below."""
OUTLINE = 0.95

LINE = 1.4
"""Line height, in sizes of the type."""


@lru_cache
def font(size: int) -> ImageFont.FreeTypeFont:
    """Return Pillow's own typeface: the same on every machine."""
    face = ImageFont.load_default(size)
    if not isinstance(face, ImageFont.FreeTypeFont):
        raise TypeError("Pillow was built without FreeType")
    return face


@lru_cache
def _drawable(character: str) -> bool:
    """Whether the typeface has a character."""
    missing = font(16).getmask("\ufffe")
    glyph = font(16).getmask(character)
    return glyph.size != missing.size or bytes(glyph) != bytes(missing)


def plain(text: str) -> str:
    """Return text in characters that the typeface has: accents may go, others become "?"."""
    drawn = []
    for character in text:
        if character == " " or _drawable(character):
            drawn.append(character)
        else:
            bare = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
            drawn.append(bare or "?")
    return "".join(drawn)


def text_width(text: str, size: int) -> float:
    """Return the width of a line of type in pixels."""
    return float(font(size).getlength(plain(text)))


def shortened(text: str, size: int, width: float) -> str:
    """Return text, cut short where it is wider than `width` pixels."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1].rstrip()
    return text + "…"


def wrapped(text: str, size: int, width: float) -> Iterator[str]:
    """Yield the lines of a text that is set `width` pixels wide."""
    line = ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if line and text_width(longer, size) > width:
            yield line
            longer = word
        line = shortened(longer, size, width)
    if line:
        yield line


def write(
    pen: ImageDraw.ImageDraw, at: Point, text: str, size: int, color: Rgb = TEXT, anchor: str = "la"
) -> None:
    """Write a line of type; `anchor` is Pillow's: "la" has its left top at `at`."""
    pen.text(at, plain(text), fill=color, font=font(size), anchor=anchor)


def label_on(pen: ImageDraw.ImageDraw, at: Point, text: str, size: int, anchor: str) -> None:
    """Write on a picture: with a dark rim, legible on bright and dark."""
    pen.text(
        at,
        plain(text),
        fill=TEXT,
        font=font(size),
        anchor=anchor,
        stroke_width=2,
        stroke_fill=PANEL,
    )


def color_table(structures: Sequence[Structure], highest: int) -> NDArray[np.float32]:
    """Return the colour (highest + 1, 3) of each value of a label map."""
    table = np.zeros((highest + 1, 3), np.float32)
    for structure in structures:
        table[structure.number] = structure.color
    return table


def overlaid(
    gray: NDArray[np.uint8], layers: Sequence[tuple[NDArray[Any], NDArray[np.float32]]]
) -> Image.Image:
    """Return a picture of a plane with its structures: areas first, then all outlines.

    Parameters
    ----------
    gray : (H, W) array
        The scan, 0 to 255.
    layers : sequence of ((H, W) array, (N, 3) array)
        Labels in the same pixels, and the colour of each value.
    """
    picture = np.repeat(gray[:, :, None].astype(np.float32), 3, axis=2)
    for labels, colors in layers:
        inside = labels > 0
        picture[inside] += FILL * (colors[labels[inside]] - picture[inside])
    for labels, colors in layers:
        edge = outline(labels)
        picture[edge] += OUTLINE * (colors[labels[edge]] - picture[edge])
    return Image.fromarray((picture + 0.5).astype(np.uint8))


def outline(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Return the pixels of structures (H, W) that have a lower value above, below or beside.

    So a line is one pixel wide also where two structures meet.
    """
    edge = np.zeros(labels.shape, bool)
    edge[:, 1:] |= labels[:, 1:] > labels[:, :-1]
    edge[:, :-1] |= labels[:, :-1] > labels[:, 1:]
    edge[1:] |= labels[1:] > labels[:-1]
    edge[:-1] |= labels[:-1] > labels[1:]
    return edge


def scale_bar(pen: ImageDraw.ImageDraw, at: Point, pixels_per_mm: float, room: float) -> None:
    """Draw a bar of a round length, at most `room` pixels wide, from its left middle `at`."""
    length, text = round_length(room / pixels_per_mm)
    x, y, end = at[0], at[1], at[0] + length * pixels_per_mm
    pen.line([(x, y), (end, y)], fill=TEXT, width=2)
    for tick in (x, end):
        pen.line([(tick, y - 5), (tick, y + 5)], fill=TEXT, width=2)
    write(pen, (end + 10, y), text, 14, TEXT, "lm")


def round_length(most: float) -> tuple[float, str]:
    """Return the longest of 1, 2, 5, 10, 20... mm up to `most` mm, and how it is written."""
    power = 10.0 ** np.floor(np.log10(most))
    length = max((n * power for n in (1, 2, 5, 10) if n * power <= most), default=most)
    text = f"{length / 10:g} cm" if length >= 10 else f"{length:g} mm"
    return float(length), text
