"""Small pictures of previews, each at most 6 kB."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

from PIL import Image

SIZE = (200, 132)
MOST_BYTES = 6000
_QUALITIES = (70, 55, 40, 25, 10)


def draw_thumbs(previews: Sequence[tuple[str, Path]], folder: Path, threads: int = 2) -> None:
    """Write `<case>.webp` for each preview; those that are newer than their preview stay.

    Parameters
    ----------
    previews : sequence of (case, file)
    folder : Path
        Made if it is not there; pictures of other cases are taken away.
    threads : int
        How many are drawn at once.

    Raises
    ------
    OSError
        If a preview can't be read, or a thumbnail can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {f"{case}.webp" for case, _ in previews}
    for old in folder.iterdir():
        if old.name not in wanted:
            old.unlink()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda item: _draw(item[1], folder / f"{item[0]}.webp"), previews))


def _draw(preview: Path, thumb: Path) -> None:
    if thumb.exists() and thumb.stat().st_mtime_ns >= preview.stat().st_mtime_ns:
        return
    with Image.open(preview) as page:
        page.draft("RGB", SIZE)
        small = page.convert("RGB")
    small.thumbnail(SIZE, Image.Resampling.LANCZOS, reducing_gap=2.0)
    data = b""
    for quality in _QUALITIES:
        buffer = BytesIO()
        small.save(buffer, "WEBP", quality=quality, method=4)
        data = buffer.getvalue()
        if len(data) <= MOST_BYTES:
            break
    thumb.write_bytes(data)
