"""The report's charts, as SVG files: volumes of structures, and where the time went."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scanloom.io.whole import write_whole
from scanloom.review.report.gather import Shown

MOST_STRUCTURES = 40
FEW = 5
"""Fewer volumes than this are shown one by one: quartiles would say more than is known."""
SHORTEST = 0.01
"""Seconds below which nobody cares how many."""
_INK, _BAR = "#1b1f24", "#3b6ea8"


@dataclass(frozen=True)
class Chart:
    """A chart's file, its heading, all it says in words, and its size in pixels."""

    file: str
    title: str
    text: str
    size: tuple[int, int]


def draw_charts(
    cases: Sequence[Shown], structures: Mapping[tuple[str, str], str], folder: Path
) -> list[Chart]:
    """Draw what there is to draw.

    Parameters
    ----------
    cases : sequence of Shown
        The published ones count.
    structures : mapping
        What each (model, label) is called.
    folder : Path
        Where the files go; it is there.

    Returns
    -------
    list of Chart
        None without a published case.
    """
    drawn = []
    volumes = _volumes(cases, structures)
    if volumes:
        drawn.append(_draw_volumes(volumes, folder))
    steps = _steps(cases)
    if steps:
        drawn.append(_draw_times(steps, folder))
    return drawn


def _volumes(
    cases: Sequence[Shown], structures: Mapping[tuple[str, str], str]
) -> dict[str, list[float]]:
    """Return the volumes (ml) of each structure where it was found, those found most often."""
    found: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        for m in case.measurements:
            if m.volume_ml > 0:
                found[structures[m.model, m.label]].append(m.volume_ml)
    often = sorted(found, key=lambda name: (-len(found[name]), name))[:MOST_STRUCTURES]
    return {name: found[name] for name in sorted(often)}


def _steps(cases: Sequence[Shown]) -> dict[str, list[float]]:
    steps: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        for name, seconds in case.seconds.items():
            steps[name].append(seconds)
    return dict(steps)


def _draw_volumes(volumes: dict[str, list[float]], folder: Path) -> Chart:
    figure, axes = _figure(len(volumes))
    names = list(volumes)[::-1]
    if all(len(found) < FEW for found in volumes.values()):
        title = "Volumes of structures, a dot a case"
        for row, name in enumerate(names):
            axes.plot(volumes[name], [row] * len(volumes[name]), "o", color=_BAR, alpha=0.7)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(-0.6, len(names) - 0.4)
    else:
        title = "Volumes of structures: median, quartiles, whiskers of 1.5 boxes"
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
    told = [f"{name}: median {statistics.median(v):.3g} ml" for name, v in volumes.items()]
    return _saved(figure, folder, "volumes.svg", title, "Volumes. " + "; ".join(told))


def _draw_times(steps: dict[str, list[float]], folder: Path) -> Chart:
    figure, axes = _figure(len(steps))
    names = list(steps)[::-1]
    medians = [statistics.median(steps[name]) for name in names]
    bars = axes.barh(names, medians, color=_BAR, height=0.6)
    said = [f"{m:.3g} s" if m >= SHORTEST else f"< {SHORTEST:g} s" for m in medians]
    axes.bar_label(bars, said, padding=4, color=_INK)
    axes.set_xlabel("s")
    axes.margins(x=0.15)
    told = [f"{name} {time}" for name, time in zip(names[::-1], said[::-1], strict=True)]
    title = "Seconds a case, median by step"
    return _saved(figure, folder, "times.svg", title, f"{title}: " + ", ".join(told))


def _figure(rows: int):  # type: ignore[no-untyped-def]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 0.8 + 0.28 * max(rows, 3)), layout="constrained")
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _saved(figure: Any, folder: Path, file: str, title: str, text: str) -> Chart:
    """Write a figure without a background, its words as text, the same for equal figures."""
    import matplotlib as mpl

    plain = {"svg.hashsalt": "scanloom", "svg.fonttype": "none", "font.family": "sans-serif"}
    with mpl.rc_context(plain):

        def save(draft: Path) -> None:
            figure.savefig(draft, format="svg", metadata={"Date": None}, transparent=True)

        write_whole(folder / file, save)
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    return Chart(file, title, text, (width, height))
