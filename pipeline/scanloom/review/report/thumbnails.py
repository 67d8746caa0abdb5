"""Thumbnails of previews, each at most 6 kB."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from scanloom.io.output.layout import is_case_name
from scanloom.io.system.atomic_write import private_draft
from scanloom.io.system.regular_files import open_regular_file
from scanloom.review.preview.layout import GUTTER, HEADER_HEIGHT, MAIN_WIDTH, MARGIN, WIDTH

SIZE = (264, 210)
MAX_BYTES = 6000
_QUALITIES = (55, 40, 25, 10, 1)
_CROP_X = MARGIN - GUTTER, MARGIN + MAIN_WIDTH + GUTTER
"""Left and right edge of the area of a preview that is legible at this size, without legend."""
_MAX_HEIGHT = round((_CROP_X[1] - _CROP_X[0]) * SIZE[1] / SIZE[0])
"""Height of that area, below the preview's header."""


def draw_thumbs(
    previews: Sequence[tuple[str, Path]], folder: Path, threads: int = 2
) -> dict[str, tuple[int, int]]:
    """Write `<case>.webp` for each preview, unless it is newer than the preview.

    Parameters
    ----------
    previews : sequence of (case, file)
        Name of each case, and the file of its preview.
    folder : Path
        Created if it is missing; thumbnails of other cases are removed.
    threads : int
        Number of threads.

    Returns
    -------
    dict
        Size (width, height) of each thumbnail, by case; cases whose preview can't be read are
        missing.

    Raises
    ------
    OSError
        If a thumbnail can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    current = {f"{case}.webp" for case, _ in previews}
    for old in folder.iterdir():
        is_thumbnail = old.suffix == ".webp" and is_case_name(old.stem)
        if is_thumbnail and old.name not in current and not old.is_dir():
            old.unlink(missing_ok=True)
    with ThreadPoolExecutor(threads) as pool:
        sizes = pool.map(lambda item: _draw(item[1], folder / f"{item[0]}.webp"), previews)
        drawn = zip(previews, sizes, strict=True)
        return {case: size for (case, _), size in drawn if size is not None}


def _draw(preview: Path, thumb: Path) -> tuple[int, int] | None:
    """Draw a thumbnail unless it is current; return its size, None for an unreadable preview."""
    if thumb.is_file() and thumb.stat().st_mtime_ns >= preview.stat().st_mtime_ns:
        with (
            suppress(UnidentifiedImageError, OSError),
            open_regular_file(thumb) as file,
            Image.open(file) as drawn,
        ):
            return drawn.size
    try:
        with open_regular_file(preview) as file, Image.open(file) as page:
            small = page.convert("RGB")
    except (OSError, ValueError, SyntaxError):  # Pillow raises the last two for damaged chunks
        return None
    if small.width == WIDTH:
        bottom = min(small.height, HEADER_HEIGHT + _MAX_HEIGHT)
        small = small.crop((_CROP_X[0], HEADER_HEIGHT, _CROP_X[1], bottom))
    small.thumbnail(SIZE, Image.Resampling.LANCZOS, reducing_gap=2.0)
    data = next((d for d in map(partial(_encoded, small), _QUALITIES) if len(d) <= MAX_BYTES), b"")
    if not data:
        small.thumbnail((SIZE[0] // 2, SIZE[1] // 2))
        data = _encoded(small, _QUALITIES[-1])
    with private_draft(thumb) as draft:
        draft.write_bytes(data)
        draft.replace(thumb)
    return small.size


def _encoded(picture: Image.Image, quality: int) -> bytes:
    buffer = BytesIO()
    picture.save(buffer, "WEBP", quality=quality, method=2)
    return buffer.getvalue()
