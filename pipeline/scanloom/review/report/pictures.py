"""Charts of the report, as SVG files: volumes and times."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scanloom.core import plain_number, printable
from scanloom.io.system.atomic_write import atomic_write
from scanloom.review.preview.page import round_length, text_width, truncated
from scanloom.review.scratch import Columns

MAX_STRUCTURES = 40
MIN_FOR_QUARTILES = 5
"""Number of volumes from which a box plot is drawn; fewer are drawn one by one."""
SHORTEST_S = 0.01
"""Times below this are labelled as such, without their value."""
CHART_WIDTH, ROW_HEIGHT, FONT_SIZE = 624, 27, 13
"""Sizes of charts in pixels."""
FONT_MARGIN = 1.15
"""Width of names in the browser's font, by which rows are set in, as of Pillow's font at most."""
MAX_DECADES = 8
"""Powers of ten that are written below an axis; if it has more, some are left out."""
INK, BAR = "#1b1f24", "#3b6ea8"


@dataclass(frozen=True)
class Chart:
    """File name, heading, text alternative and size in pixels of a chart."""

    file: str
    title: str
    text: str
    size: tuple[int, int]


def draw_charts(
    volumes: Columns[tuple[str, str]],
    seconds: Columns[str],
    structures: Mapping[tuple[str, str], str],
    folder: Path,
) -> list[Chart]:
    """Draw the charts for which there is data.

    Parameters
    ----------
    volumes : Columns
        Volumes in ml by (label, model), above 0.
    seconds : Columns
        Seconds by step.
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
    names: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for label, model in volumes:
        names[structures[model, label]].append((label, model))
    if names:
        charts.append(_draw_volumes(volumes, names, folder))
    medians = {name: float(np.median(seconds.read(name))) for name in seconds}
    if medians:
        charts.append(_draw_times(medians, folder))
    return charts


def _draw_volumes(
    volumes: Columns[tuple[str, str]], names: Mapping[str, list[tuple[str, str]]], folder: Path
) -> Chart:
    """Draw a box for each of the most frequent structures, or a dot for each case if few."""
    counts = {name: sum(map(volumes.count, keys)) for name, keys in names.items()}
    shown = sorted(sorted(counts, key=lambda name: (-counts[name], name))[:MAX_STRUCTURES])

    def of(name: str) -> NDArray[np.float64]:  # one in memory at a time
        return np.concatenate([volumes.read(key) for key in names[name]])

    low, high = (float(end([end(of(name)) for name in shown])) for end in (np.min, np.max))
    low, high = low / 1.3, high * 1.3  # room for dots at the ends
    chart = RowChart(shown, "ml", (low, high), math.log10)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = math.ceil((last - first) / MAX_DECADES)
    for n in range(first, last + 1):
        for digit in range(1, 10):
            # the numbers between powers of ten are written only where the axis has few powers
            is_written = n % every == 0 if digit == 1 else last - first < 3 and digit in (2, 5)
            if low <= digit * 10.0**n <= high:
                chart.tick(digit * 10.0**n, is_written)
    is_small = all(counts[name] < MIN_FOR_QUARTILES for name in shown)
    medians = []
    for row, name in enumerate(shown):
        values = of(name)
        medians.append(f"{name}: median {plain_number(float(np.median(values)), 3)} ml")
        if is_small:
            for value in values.tolist():
                chart.dot(row, value, 4, opacity="0.7")
        else:
            chart.box(row, values)
    title = "Volumes of structures, one dot per case"
    if not is_small:
        title = "Volumes of structures: median, quartiles, whiskers up to 1.5 IQR"
    return chart.save(folder / "volumes.svg", title, "Volumes. " + "; ".join(medians))


def _draw_times(medians: Mapping[str, float], folder: Path) -> Chart:
    highest = max(medians.values()) or 1.0
    chart = RowChart(list(medians), "s", (0.0, 1.2 * highest), float)  # room for the last label
    # about four ticks
    step, _ = round_length(highest / 4)
    for n in range(math.floor(1.2 * highest / step) + 1):
        chart.tick(n * step)
    labels = []
    for row, seconds in enumerate(medians.values()):
        is_short = seconds < SHORTEST_S
        labels.append(f"< {SHORTEST_S:g} s" if is_short else f"{plain_number(seconds, 3)} s")
        chart.bar(row, seconds, labels[-1])
    times = [f"{name} {label}" for name, label in zip(medians, labels, strict=True)]
    title = "Median seconds per case, by step"
    return chart.save(folder / "times.svg", title, f"{title}: " + ", ".join(times))


class Drawing:
    """An SVG of lines, dots and texts.

    Parameters
    ----------
    size : (width, height)
        In pixels.
    font_size : int
        Of its texts, in pixels.
    """

    def __init__(self, size: tuple[int, int], font_size: int) -> None:
        self.size = size
        width, height = map(str, size)
        self._svg = ET.Element(
            "svg", xmlns="http://www.w3.org/2000/svg", width=width, height=height
        )
        self._svg.set("viewBox", f"0 0 {width} {height}")
        self._svg.set("font-family", "sans-serif")
        self._svg.set("font-size", str(font_size))

    def svg(self) -> bytes:
        """Return the file's content; equal drawings have equal bytes."""
        return ET.tostring(self._svg)

    def _text(self, x: float, y: float, text: str, anchor: str, **style: str) -> None:
        at = {"x": f"{x:.1f}", "y": f"{y:.1f}", "dy": ".35em", "text-anchor": anchor, "fill": INK}
        ET.SubElement(self._svg, "text", at | style).text = text

    def _line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        stroke: str = INK,
        width: str = "1",
        **style: str,
    ) -> None:
        at = {"d": f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", "stroke": stroke}
        ET.SubElement(self._svg, "path", {**at, "stroke-width": width, **style})

    def _dot(self, x: float, y: float, radius: float, **style: str) -> None:
        at = {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": str(radius)}
        ET.SubElement(self._svg, "circle", {**at, "fill": BAR, **style})


class RowChart(Drawing):
    """An SVG chart with a row for each name, and an axis of values below.

    Parameters
    ----------
    names : sequence of str
        Names of the rows, from top to bottom.
    unit : str
        Unit of the values, which is written below the axis.
    ends : (float, float)
        Values at the ends of the axis.
    scale : callable
        Maps a value to a linear scale.
    """

    def __init__(
        self,
        names: Sequence[str],
        unit: str,
        ends: tuple[float, float],
        scale: Callable[[float], float],
    ) -> None:
        names = [truncated(printable(name), FONT_SIZE, CHART_WIDTH / 2) for name in names]
        self._left = round(FONT_MARGIN * max(text_width(n, FONT_SIZE) for n in names)) + 10
        self._bottom = ROW_HEIGHT * len(names) + 4
        self._ends, self._scale = ends, scale
        super().__init__((CHART_WIDTH, self._bottom + 44), FONT_SIZE)
        for row, name in enumerate(names):
            self._text(self._left - 8, self._y(row), name, "end")
            self._line(self._left - 4, self._y(row), self._left, self._y(row))
        self._line(self._left, 0, self._left, self._bottom)
        self._line(self._left, self._bottom, CHART_WIDTH, self._bottom)
        self._text((self._left + CHART_WIDTH) / 2, self._bottom + 34, unit, "middle")

    def tick(self, value: float, is_written: bool = True) -> None:
        """Mark a value on the axis."""
        x = self._x(value)
        self._line(x, self._bottom, x, self._bottom + (4 if is_written else 2))
        if is_written:
            self._text(x, self._bottom + 14, plain_number(value, 6), "middle")

    def dot(self, row: int, value: float, radius: float, **style: str) -> None:
        """Draw a value as a dot."""
        self._dot(self._x(value), self._y(row), radius, **style)

    def box(self, row: int, values: ArrayLike) -> None:
        """Draw median, quartiles, whiskers up to 1.5 times their distance, and values beyond."""
        every = np.asarray(values, np.float64)
        low, middle, high = np.quantile(every, (0.25, 0.5, 0.75)).tolist()
        reach = 1.5 * (high - low)
        is_inside = (low - reach <= every) & (every <= high + reach)
        inside = every[is_inside]
        y, half = self._y(row), 0.3 * ROW_HEIGHT
        # a quartile between two values may lie beyond all values within reach: no whisker there
        ends = (float(inside.min(initial=low)), low), (float(inside.max(initial=high)), high)
        for end, quartile in ends:
            self._line(self._x(quartile), y, self._x(end), y)
            self._line(self._x(end), y - half / 2, self._x(end), y + half / 2)
        self._rectangle(self._x(low), y - half, self._x(high), y + half, fill="none", stroke=INK)
        self._line(self._x(middle), y - half, self._x(middle), y + half, stroke=BAR, width="2")
        beyond = every[~is_inside].tolist()
        for value in {f"{self._x(value):.1f}": value for value in beyond}.values():  # one a place
            self.dot(row, value, 1.5)

    def bar(self, row: int, value: float, label: str) -> None:
        """Draw a value as a bar with a label at its end."""
        y, x = self._y(row), self._x(value)
        self._rectangle(self._left, y - 0.3 * ROW_HEIGHT, x, y + 0.3 * ROW_HEIGHT, fill=BAR)
        self._text(x + 5, y, label, "start")

    def save(self, path: Path, title: str, text: str) -> Chart:
        """Write the file."""
        content = self.svg()
        atomic_write(path, lambda draft: draft.write_bytes(content))
        return Chart(path.name, title, text, self.size)

    def _x(self, value: float) -> float:
        """Return the position of a value in pixels from the left."""
        low, high = map(self._scale, self._ends)
        share = (self._scale(value) - low) / (high - low)
        return self._left + share * (CHART_WIDTH - self._left)

    def _y(self, row: int) -> float:
        """Return the middle of a row in pixels from the top."""
        return ROW_HEIGHT * (row + 0.5)

    def _rectangle(
        self, left: float, top: float, right: float, bottom: float, **style: str
    ) -> None:
        at = {"x": f"{left:.1f}", "y": f"{top:.1f}", **style}
        size = {"width": f"{right - left:.1f}", "height": f"{bottom - top:.1f}"}
        ET.SubElement(self._svg, "rect", at | size)
