"""The report's charts, as SVG files: volumes of structures, and where the time went."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from scanloom.review.report.gather import Shown

MOST_STRUCTURES = 40
_INK, _BAR = "#1b1f24", "#3b6ea8"


def draw_charts(cases: Sequence[Shown], folder: Path) -> list[tuple[str, str]]:
    """Draw what there is to draw.

    Parameters
    ----------
    cases : sequence of Shown
        The published ones count.
    folder : Path
        Where the files go; it is there.

    Returns
    -------
    list of (file, description)
        For `img` and its `alt`.
    """
    drawn = []
    volumes = _volumes(cases)
    if volumes:
        drawn.append(("volumes.svg", _draw_volumes(volumes, folder / "volumes.svg")))
    steps = _steps(cases)
    if steps:
        drawn.append(("times.svg", _draw_times(steps, folder / "times.svg")))
    return drawn


def _volumes(cases: Sequence[Shown]) -> dict[str, list[float]]:
    """Return the volumes (ml) of each structure where it was found, those found most often."""
    found: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        for m in case.measurements:
            if m.volume_ml > 0:
                found[m.label.replace("_", " ")].append(m.volume_ml)
    often = sorted(found, key=lambda name: (-len(found[name]), name))[:MOST_STRUCTURES]
    return {name: found[name] for name in sorted(often)}


def _steps(cases: Sequence[Shown]) -> dict[str, list[float]]:
    steps: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        for name, seconds in case.seconds.items():
            steps[name].append(seconds)
    return dict(steps)


def _draw_volumes(volumes: dict[str, list[float]], path: Path) -> str:
    figure, axes = _figure(len(volumes))
    names = list(volumes)[::-1]
    axes.boxplot(
        [volumes[name] for name in names],
        orientation="horizontal",
        tick_labels=names,
        widths=0.6,
        flierprops={"marker": ".", "markersize": 3, "markeredgecolor": _BAR},
        medianprops={"color": _BAR, "linewidth": 2},
    )
    axes.set_xscale("log")
    axes.set_xlabel("ml (logarithmic); box: quartiles, line: median, whiskers: 1.5 x the box")
    figure.savefig(path, format="svg", metadata={"Date": None})
    told = [f"{name}: median {statistics.median(v):.3g} ml" for name, v in volumes.items()]
    return "Volumes of structures. " + "; ".join(told)


def _draw_times(steps: dict[str, list[float]], path: Path) -> str:
    figure, axes = _figure(len(steps))
    names = list(steps)[::-1]
    medians = [statistics.median(steps[name]) for name in names]
    bars = axes.barh(names, medians, color=_BAR, height=0.6)
    axes.bar_label(bars, [f"{m:.3g} s" for m in medians], padding=4, color=_INK)
    axes.set_xlabel("median seconds a case")
    axes.margins(x=0.15)
    figure.savefig(path, format="svg", metadata={"Date": None})
    told = [f"{name} {m:.3g} s" for name, m in zip(names[::-1], medians[::-1], strict=True)]
    return "Median seconds a case by step: " + ", ".join(told)


def _figure(rows: int):  # type: ignore[no-untyped-def]
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "scanloom", "font.family": "sans-serif"})
    figure = Figure(figsize=(7.5, 1.2 + 0.28 * rows), layout="constrained")
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes
