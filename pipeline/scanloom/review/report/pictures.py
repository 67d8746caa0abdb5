"""Pictures of the report: charts of volumes and times as SVG files, and thumbnails of previews."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from scanloom.io.output.layout import is_case_name
from scanloom.io.system.atomic_write import atomic_write, private_draft
from scanloom.io.system.regular_files import open_regular_file
from scanloom.review.preview.layout import GUTTER, HEADER_HEIGHT, MAIN_WIDTH, MARGIN, WIDTH
from scanloom.review.report.data import ReportCase

MAX_STRUCTURES = 40
MIN_FOR_QUARTILES = 5
"""Number of volumes from which a box plot is drawn; fewer are drawn one by one."""
SHORTEST_S = 0.01
"""Times below this are labelled as such, without their value."""
_INK, _BAR = "#1b1f24", "#3b6ea8"


@dataclass(frozen=True)
class Chart:
    """File name, heading, text alternative and size in pixels of a chart."""

    file: str
    title: str
    text: str
    size: tuple[int, int]


def draw_charts(
    cases: Sequence[ReportCase], structures: Mapping[tuple[str, str], str], folder: Path
) -> list[Chart]:
    """Draw the charts for which there is data.

    Parameters
    ----------
    cases : sequence of ReportCase
        All cases; failed ones are ignored.
    structures : mapping
        Display name of each (model, label).
    folder : Path
        The folder for the files, which exists.

    Returns
    -------
    list of Chart
        Empty without a published case.
    """
    charts = []
    volumes = _volumes(cases, structures)
    if volumes:
        charts.append(_draw_volumes(volumes, folder))
    steps = _steps(cases)
    if steps:
        charts.append(_draw_times(steps, folder))
    return charts


def _volumes(
    cases: Sequence[ReportCase], structures: Mapping[tuple[str, str], str]
) -> dict[str, list[float]]:
    """Return the volumes in ml of the most frequent structures, by display name."""
    volumes: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        for m in case.measurements:
            if m.volume_ml > 0:
                volumes[structures[m.model, m.label]].append(m.volume_ml)
    frequent = sorted(volumes, key=lambda name: (-len(volumes[name]), name))[:MAX_STRUCTURES]
    return {name: volumes[name] for name in sorted(frequent)}


def _steps(cases: Sequence[ReportCase]) -> dict[str, list[float]]:
    steps: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        for name, seconds in case.seconds.items():
            steps[name].append(seconds)
    return dict(steps)


def _draw_volumes(volumes: dict[str, list[float]], folder: Path) -> Chart:
    figure, axes = _figure(len(volumes))
    names = list(volumes)[::-1]
    if all(len(values) < MIN_FOR_QUARTILES for values in volumes.values()):
        title = "Volumes of structures, one dot per case"
        for row, name in enumerate(names):
            axes.plot(volumes[name], [row] * len(volumes[name]), "o", color=_BAR, alpha=0.7)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(-0.6, len(names) - 0.4)
    else:
        title = "Volumes of structures: median, quartiles, whiskers up to 1.5 IQR"
        axes.boxplot(
            [volumes[name] for name in names],
            orientation="horizontal",
            tick_labels=names,
            widths=0.6,
            flierprops={"marker": ".", "markersize": 3, "markeredgecolor": _BAR},
            medianprops={"color": _BAR, "linewidth": 2},
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda ml, _: f"{ml:g}")
    axes.set_xlabel("ml")
    medians = [f"{name}: median {statistics.median(v):.3g} ml" for name, v in volumes.items()]
    return _saved(figure, folder, "volumes.svg", title, "Volumes. " + "; ".join(medians))


def _draw_times(steps: dict[str, list[float]], folder: Path) -> Chart:
    figure, axes = _figure(len(steps))
    names = list(steps)[::-1]
    medians = [statistics.median(steps[name]) for name in names]
    bars = axes.barh(names, medians, color=_BAR, height=0.6)
    labels = [f"{m:.3g} s" if m >= SHORTEST_S else f"< {SHORTEST_S:g} s" for m in medians]
    axes.bar_label(bars, labels, padding=4, color=_INK)
    axes.set_xlabel("s")
    axes.margins(x=0.15)
    times = [f"{name} {label}" for name, label in zip(names[::-1], labels[::-1], strict=True)]
    title = "Median seconds per case, by step"
    return _saved(figure, folder, "times.svg", title, f"{title}: " + ", ".join(times))


def _figure(rows: int):  # type: ignore[no-untyped-def]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 0.8 + 0.28 * max(rows, 3)), layout="constrained")
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _saved(figure: Any, folder: Path, file: str, title: str, text: str) -> Chart:
    """Write a figure with a transparent background and text as text; equal figures, equal bytes."""
    import matplotlib as mpl

    style = {"svg.hashsalt": "scanloom", "svg.fonttype": "none", "font.family": "sans-serif"}
    with mpl.rc_context(style):

        def save(draft: Path) -> None:
            figure.savefig(draft, format="svg", metadata={"Date": None}, transparent=True)

        atomic_write(folder / file, save)
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    return Chart(file, title, text, (width, height))


THUMB_SIZE = (264, 210)
MAX_BYTES = 6000
_QUALITIES = (55, 40, 25, 10, 1)
_CROP_X = MARGIN - GUTTER, MARGIN + MAIN_WIDTH + GUTTER
"""Left and right edge of the area of a preview that is legible at this size, without legend."""
_MAX_HEIGHT = round((_CROP_X[1] - _CROP_X[0]) * THUMB_SIZE[1] / THUMB_SIZE[0])
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
        sizes = pool.map(lambda item: _draw_thumb(item[1], folder / f"{item[0]}.webp"), previews)
        drawn = zip(previews, sizes, strict=True)
        return {case: size for (case, _), size in drawn if size is not None}


def _draw_thumb(preview: Path, thumb: Path) -> tuple[int, int] | None:
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
    small.thumbnail(THUMB_SIZE, Image.Resampling.LANCZOS, reducing_gap=2.0)
    data = next((d for d in map(partial(_encoded, small), _QUALITIES) if len(d) <= MAX_BYTES), b"")
    if not data:
        small.thumbnail((THUMB_SIZE[0] // 2, THUMB_SIZE[1] // 2))
        data = _encoded(small, _QUALITIES[-1])
    with private_draft(thumb) as draft:
        draft.write_bytes(data)
        draft.replace(thumb)
    return small.size


def _encoded(picture: Image.Image, quality: int) -> bytes:
    buffer = BytesIO()
    picture.save(buffer, "WEBP", quality=quality, method=2)
    return buffer.getvalue()
