"""Small pictures of previews, each at most 6 kB."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from scanloom.io.outfolder import is_case_name
from scanloom.io.whole import draft_of
from scanloom.review.layout import GUTTER, MAIN_WIDTH, MARGIN, WIDTH

SIZE = (264, 210)
MOST_BYTES = 6000
_QUALITIES = (55, 40, 25, 10, 1)
_LEFT, _TOP = MARGIN - GUTTER, 116
_RIGHT = MARGIN + MAIN_WIDTH + GUTTER
_TALLEST = round((_RIGHT - _LEFT) * SIZE[1] / SIZE[0])
"""What of a preview is worth a look at this size: its planes and tiles, no heading, no legend."""


def draw_thumbs(
    previews: Sequence[tuple[str, Path]], folder: Path, threads: int = 2
) -> dict[str, tuple[int, int]]:
    """Write `<case>.webp` for each preview; those that are newer than their preview stay.

    Parameters
    ----------
    previews : sequence of (case, file)
    folder : Path
        Made if it is not there; pictures of other cases are taken away.
    threads : int
        How many are drawn at once.

    Returns
    -------
    dict
        Case to the size of its picture, for the page to leave room; no case whose preview can't be
        read.

    Raises
    ------
    OSError
        If a thumbnail can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {f"{case}.webp" for case, _ in previews}
    for old in folder.iterdir():
        known = old.suffix == ".webp" and is_case_name(old.stem)
        if known and old.name not in wanted and not old.is_dir():
            old.unlink(missing_ok=True)
    with ThreadPoolExecutor(threads) as pool:
        sizes = pool.map(lambda item: _draw(item[1], folder / f"{item[0]}.webp"), previews)
        drawn = zip(previews, sizes, strict=True)
        return {case: size for (case, _), size in drawn if size is not None}


def _draw(preview: Path, thumb: Path) -> tuple[int, int] | None:
    if thumb.is_file() and thumb.stat().st_mtime_ns >= preview.stat().st_mtime_ns:
        with suppress(UnidentifiedImageError), Image.open(thumb) as drawn:
            return drawn.size
    try:
        with Image.open(preview) as page:
            small = page.convert("RGB")
    except (OSError, ValueError, SyntaxError):  # Pillow's for damaged chunks
        return None
    if small.width == WIDTH:
        small = small.crop((_LEFT, _TOP, _RIGHT, min(small.height, _TOP + _TALLEST)))
    small.thumbnail(SIZE, Image.Resampling.LANCZOS, reducing_gap=2.0)
    data = next((d for d in map(partial(_encoded, small), _QUALITIES) if len(d) <= MOST_BYTES), b"")
    if not data:
        small.thumbnail((SIZE[0] // 2, SIZE[1] // 2))
        data = _encoded(small, _QUALITIES[-1])
    draft = draft_of(thumb)
    try:
        draft.write_bytes(data)
        draft.replace(thumb)
    finally:
        draft.unlink(missing_ok=True)
    return small.size


def _encoded(picture: Image.Image, quality: int) -> bytes:
    buffer = BytesIO()
    picture.save(buffer, "WEBP", quality=quality, method=2)
    return buffer.getvalue()
