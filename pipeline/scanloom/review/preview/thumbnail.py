"""The thumbnail of a case: three planes with labels, without text."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from scanloom.review.preview.content import PreviewContent
from scanloom.review.preview.drawing import PAGE, PNG_LEVEL
from scanloom.review.preview.layout import Frame, fill_row
from scanloom.review.preview.preview import draw_picture

SIZE = (520, 200)


def draw_thumbnail(content: PreviewContent, path: Path) -> None:
    """Draw the three planes of a preview side by side to a PNG file of `SIZE` pixels.

    Raises
    ------
    OSError
        If the file can't be written.
    """
    page = Image.new("RGB", SIZE, PAGE)
    frames: tuple[Frame, ...] = fill_row([plane.area.size for plane in content.planes], SIZE)
    for plane, frame in zip(content.planes, frames, strict=True):
        draw_picture(page, content, plane, frame)
    page.save(path, format="PNG", compress_level=PNG_LEVEL)
