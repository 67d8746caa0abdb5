"""The page `evaluation.html`: one file with tables, charts and pictures of an evaluation."""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.codes import color
from scanloom.core import Flag, Grid, ScanError, Volume, counted, plain_number
from scanloom.review.label_files import grid_of_both, on_grid
from scanloom.review.preview import slicing
from scanloom.review.preview.content import acquired_axis
from scanloom.review.preview.overlay import OVERSAMPLING, Overlay, overlay_structures
from scanloom.review.preview.page import round_length, scale_bar
from scanloom.review.report.page import hash_source, page_style, page_template
from scanloom.review.report.pictures import BAR, INK, MIN_FOR_QUARTILES, Drawing, RowChart
from scanloom.training.evaluate import (
    Evaluation,
    Figure,
    Region,
    Side,
    StructureRow,
    StructureSummary,
    extended,
    match_structures,
    read_pair,
)
from scanloom.training.label_sets import CaseLabels, Labels, Names
from scanloom.training.metrics import FEWEST_PATIENTS, Agreement

MAX_PLOTS: Final = 24
"""Structures with a plot of volumes, those of the lowest Dice: a plot has a dot per case."""
MAX_PICTURES: Final = 8
"""Cases with pictures."""
PICTURE_PIXELS: Final = 320
"""Length of the longer side of a picture."""
MARGIN: Final = 0.35
"""Margin around a structure in its picture, as a share of its extent."""
LEAST_MM: Final = 40.0
"""Least extent of a picture: anatomy must be recognisable around a small structure."""
_PICTURES = """
h3 { font-size: 1rem; margin: 1.4rem 0 0; }
td .quiet { font-size: 0.85em; }
.wide { grid-template-columns: repeat(auto-fit, minmax(min(36rem, 100%), 1fr)); }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; }
.pictures img { display: block; max-width: 100%; height: auto; border-radius: 6px; }
"""
_POLICY = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; style-src {}"
TITLES: Final[dict[Figure, str]] = {
    "dice": "Dice",
    "hd95_mm": "HD95, mm",
    "nsd": "NSD",
    "volume_error_ml": "volume error, ml",
    "volume_error_percent": "volume error, %",
}
SIDE_TITLES: Final[dict[Side, str]] = {"first": "predictions", "second": "--against"}


@dataclass(frozen=True)
class Picture:
    """An inline picture, with its text alternative and size in pixels."""

    data: str
    text: str
    size: tuple[int, int]


def render_page(evaluation: Evaluation, labels: Names | None = None) -> str:
    """Return the page as HTML; it opens from disk and loads nothing.

    Parameters
    ----------
    labels : mapping or None
        As of `evaluate`.
    """
    style = page_style() + _PICTURES
    worst = _lowest_structures(evaluation)
    return page_template(Path(__file__).parent, "evaluation.html.jinja").render(
        policy=_POLICY.format(hash_source(style)),
        style=style,
        evaluation=evaluation,
        sides=SIDE_TITLES,
        titles=TITLES,
        number=_number,
        counted=counted,
        fewest_patients=FEWEST_PATIENTS,
        charts=list(_charts(evaluation)),
        plots=[_volume_plot(s, evaluation.agreements[s.side, s.structure]) for s in worst],
        all_plots=len(worst) == len(evaluation.summaries),
        worst=list(_worst_cases(evaluation, labels)),
    )


def _number(value: float, digits: int = 3, sign: str = "") -> str:
    """Return a number for a cell; a dash if it is not defined, and 0 without a minus."""
    return "–" if math.isnan(value) else f"{round(value, digits) + 0.0:{sign}.{digits}f}"  # noqa: RUF001  # a dash


def _inline(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


# --- charts ---------------------------------------------------------------------------------------


def _charts(evaluation: Evaluation) -> Iterator[tuple[str, Picture]]:
    """Yield title and chart of the distribution of each figure, a row per structure and side."""
    for figure, unit in (("dice", "Dice"), ("hd95_mm", "mm"), ("nsd", "share of the surface")):
        values = {}
        for structure in evaluation.structures:
            for side in evaluation.sides:
                of_side = f" ({SIDE_TITLES[side]})" if len(evaluation.sides) > 1 else ""
                numbers = [
                    value
                    for each in evaluation.agreements.get((side, structure), ())
                    if not math.isnan(value := getattr(each, figure))
                ]
                values[structure.replace("_", " ") + of_side] = numbers
        known = [v for numbers in values.values() for v in numbers]
        if figure == "hd95_mm":
            low, high = 0.0, max(known, default=0.0) or 1.0
        else:  # 1 is the best: a model's differences lie in the last tenths
            low, high = min(math.floor(10 * min(known, default=0.0)) / 10, 0.9), 1.0
        reach = 0.02 * (high - low)  # room for dots at the ends
        chart = RowChart(list(values), unit, (low - reach, high + reach), float)
        for tick in _ticks((low, high)):
            chart.tick(tick)
        for row, numbers in enumerate(values.values()):
            if len(numbers) >= MIN_FOR_QUARTILES:
                chart.box(row, numbers)
            else:
                for value in numbers:
                    chart.dot(row, value, 4, opacity="0.7")
        medians = (
            f"{k}: median {plain_number(float(np.median(v)), 3)}" for k, v in values.items() if v
        )
        title = {"dice": "Dice", "hd95_mm": "HD95 where both have the structure"}.get(
            figure, f"Normalised surface distance at {evaluation.tolerance_mm:g} mm"
        )
        picture = Picture(_inline(chart.svg(), "svg+xml"), "; ".join(medians), chart.size)
        yield title, picture


def _lowest_structures(evaluation: Evaluation) -> list[StructureSummary]:
    """Return the summaries of structures with the lowest Dice, in the order of the table."""
    known = [s for s in evaluation.summaries if s.figures["volume_error_ml"].n]
    lowest = sorted(known, key=lambda s: s.figures["dice"].mean)[:MAX_PLOTS]
    return [summary for summary in known if summary in lowest]


PLOT_WIDTH, PLOT_HEIGHT = 400, 240
LEFT, RIGHT, BOTTOM, TOP = 58, 310, 40, 12
"""Edges of the area of a plot, in pixels; names of lines are right of it."""
LINE = 13
"""Height of a line of text, in pixels."""
_SOFT = "#7a8794"


def _volume_plot(summary: StructureSummary, agreements: Sequence[Agreement]) -> tuple[str, Picture]:
    """Return title and plot of Bland and Altman: error of the volume by the mean of both."""
    means = [(a.reference_ml + a.prediction_ml) / 2 for a in agreements]
    errors = [a.volume_error_ml for a in agreements]
    mean_error = summary.figures["volume_error_ml"].mean
    limits = summary.limits_ml or ()
    plot = _Plot(
        _padded(means),
        _padded([0.0, *errors, *limits]),
        "mean of both volumes, ml",
        "error, ml",
    )
    plot.level(0.0, INK)
    plot.level(mean_error, BAR, f"mean {plain_number(mean_error, 3, '+')}")
    for limit in limits:
        plot.level(limit, _SOFT, plain_number(limit, 3, "+"), mean_error)
    for mean, error in zip(means, errors, strict=True):
        plot.dot(mean, error)
    text = f"mean error {_number(mean_error, 2, '+')} ml"
    if summary.limits_ml is not None:
        low, high = (plain_number(limit, 3, "+") for limit in summary.limits_ml)
        text += f", limits of agreement {low} to {high} ml"
    title = summary.structure.replace("_", " ")
    if summary.side == "second":
        title += f" ({SIDE_TITLES['second']})"
    return title, Picture(_inline(plot.svg(), "svg+xml"), text, plot.size)


def _padded(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis with room for dots at the outermost values."""
    low, high = min(values), max(values)
    # equal values but for rounding must not fill an axis of equal numbers
    reach = max(0.12 * (high - low), 0.02 * max(abs(low), abs(high))) or 1.0
    return low - reach, high + reach


class _Plot(Drawing):
    """An SVG with dots over two linear axes.

    Parameters
    ----------
    across, up : (low, high)
        Values at the ends of the axes.
    """

    def __init__(
        self, across: tuple[float, float], up: tuple[float, float], name_x: str, name_y: str
    ) -> None:
        super().__init__((PLOT_WIDTH, PLOT_HEIGHT), 11)
        self._across, self._up = across, up
        self._line(LEFT, TOP, LEFT, PLOT_HEIGHT - BOTTOM)
        self._line(LEFT, PLOT_HEIGHT - BOTTOM, RIGHT, PLOT_HEIGHT - BOTTOM)
        for value in _ticks(across):
            x, low = self._x(value), PLOT_HEIGHT - BOTTOM
            self._line(x, low, x, low + 4)
            self._text(x, low + 14, plain_number(value, 6), "middle")
        for value in _ticks(up):
            y = self._y(value)
            self._line(LEFT - 4, y, LEFT, y)
            self._text(LEFT - 7, y, plain_number(value, 6), "end")
        self._text((LEFT + RIGHT) / 2, PLOT_HEIGHT - 8, name_x, "middle")
        middle = (TOP + PLOT_HEIGHT - BOTTOM) / 2
        self._text(10, middle, name_y, "middle", transform=f"rotate(-90 10 {middle:g})")

    def level(self, value: float, ink: str, name: str = "", beside: float | None = None) -> None:
        """Draw a line across, with its name at its right end, apart from that of another value."""
        y = self._y(value)
        self._line(LEFT, y, RIGHT, y, ink, **{"stroke-dasharray": "4 3"} if name else {})
        if beside is not None:
            other = self._y(beside)
            y = max(y, other + LINE) if value < beside else min(y, other - LINE)
        self._text(RIGHT + 4, y, name, "start")

    def dot(self, x: float, y: float) -> None:
        """Draw a case."""
        self._dot(self._x(x), self._y(y), 2.5, **{"fill-opacity": "0.6"})

    def _x(self, value: float) -> float:
        low, high = self._across
        return LEFT + (value - low) / (high - low) * (RIGHT - LEFT)

    def _y(self, value: float) -> float:
        low, high = self._up
        bottom = PLOT_HEIGHT - BOTTOM
        return bottom - (value - low) / (high - low) * (bottom - TOP)


def _ticks(ends: tuple[float, float]) -> list[float]:
    """Return about four round values within an axis."""
    step, _ = round_length((ends[1] - ends[0]) / 4)
    # an end may be a multiple of the step but for rounding
    first, last = math.ceil(ends[0] / step - 1e-9), math.floor(ends[1] / step + 1e-9)
    return [round(n * step, 12) + 0.0 for n in range(first, last + 1)]


# --- pictures of the worst cases ------------------------------------------------------------------


def _worst_cases(
    evaluation: Evaluation, labels: Names | None
) -> Iterator[tuple[StructureRow, tuple[tuple[str, Picture], ...]]]:
    """Yield the cases with the lowest Dice of a structure, once each, with titles and pictures."""
    rows = [r for r in evaluation.rows if r.side == "first" and r.agreement.outcome != "absent"]
    # of structures without overlap, the largest error comes first
    rows.sort(key=lambda r: (r.agreement.dice, -abs(r.agreement.volume_error_ml), r.case))
    worst: dict[str, StructureRow] = {}
    for row in rows:
        worst.setdefault(row.case, row)
    for row in list(worst.values())[:MAX_PICTURES]:
        try:
            pictures = _pictures(row, evaluation, labels)
        except (ScanError, OSError):  # changed or lost since it was compared
            pictures = ()
        yield row, pictures


def _pictures(
    row: StructureRow, evaluation: Evaluation, labels: Names | None
) -> tuple[tuple[str, Picture], ...]:
    """Return title and picture of the reference and of each prediction, in one slice."""
    of_case = evaluation.pairs[row.case]
    reference = of_case["reference"]
    read = {
        side: read_pair(of_case[side], reference) for side in evaluation.sides if side in of_case
    }
    if not read:
        return ()
    grid = functools.reduce(grid_of_both, [predicted.grid for predicted, _ in read.values()])
    maps: dict[str, NDArray[np.uint16]] = {}
    for side, pair in read.items():
        predicted, referred = (extended(each, grid) for each in pair)
        regions = match_structures(predicted, referred, labels, evaluation.names, [row.structure])
        both = [{n: each[which] for n, each in regions.items()} for which in (0, 1)]
        maps.setdefault("reference", _numbered(referred, both[1], evaluation, row.structure))
        maps[SIDE_TITLES[side]] = _numbered(predicted, both[0], evaluation, row.structure)
    number = evaluation.structures.index(row.structure) + 1
    slice_ = _Slice(grid, [each == number for each in list(maps.values())[:2]])
    scan = _scan([reference, *(of_case[s] for s in evaluation.sides if s in of_case)])
    colors = np.zeros((len(evaluation.structures) + 1, 3), np.float32)
    colors[1:] = [color(n) for n in range(1, len(colors))]
    filled = np.arange(len(colors)) == number
    return tuple(
        (title, slice_.picture(drawn, scan, (colors, filled), f"{row.structure}, {title}"))
        for title, drawn in maps.items()
    )


def _numbered(
    labels: Labels, regions: Mapping[str, Region], evaluation: Evaluation, last: str
) -> NDArray[np.uint16]:
    """Return a label map of the compared structures by their numbers, from 1; `last` is on top."""
    numbers = {name: n for n, name in enumerate(evaluation.structures, 1) if name in regions}
    tables: dict[int, NDArray[np.uint16]] = {}
    for name in sorted(numbers, key=lambda name: name == last):
        layer, values = regions[name]
        # of the type's whole range: a value without a structure must not fail
        table = tables.setdefault(layer, np.zeros(np.iinfo(np.uint16).max + 1, np.uint16))
        table[list(values)] = numbers[name]
    drawn = np.zeros(labels.grid.shape, np.uint16, order="F")
    for layer in sorted(tables, key=lambda layer: last in regions and layer == regions[last][0]):
        mapped = tables[layer][labels.layers[layer]]
        np.copyto(drawn, mapped, where=mapped > 0)
    return drawn


def _scan(cases: Sequence[CaseLabels]) -> Volume | None:
    """Return the scan of the first labels that have one without burned-in text."""
    for case in cases:
        volume = case.image()
        if volume is not None:
            return None if Flag.BURNED_IN in volume.flags else volume
    return None


class _Slice:
    """The acquired slice in which two masks of a structure differ most, around the structure.

    Parameters
    ----------
    masks : sequence of two (I, J, K) bool arrays
        Reference and prediction; at least one has voxels.
    """

    def __init__(self, grid: Grid, masks: Sequence[NDArray[np.bool_]]) -> None:
        self._grid, view = grid, slicing.View(grid)
        # a tilted stack is shown slice by slice, as it was acquired
        self._view = view if view.upright else view.as_acquired()
        axis = acquired_axis(self._view)
        self._direction = next(d for d in slicing.DIRECTIONS if d.normal == axis)
        first, second = (self._view.of(mask) for mask in masks)
        in_plane = tuple(n for n in range(3) if n != axis)
        different = np.count_nonzero(first != second, axis=in_plane)
        index = int(different.argmax()) if different.any() else 0
        either = first | second
        if not different.any():
            index = int(np.count_nonzero(either, axis=in_plane).argmax())
        self._position = float(self._view.to_lpi[axis, 3] + index * self._view.to_lpi[axis, axis])
        self._area = self._around(np.argwhere(either))

    def _around(self, voxels: NDArray[np.intp]) -> slicing.Rectangle:
        """Return a square around the structure, within the scan."""
        axes = [self._direction.across, self._direction.down]
        ends = [self._view.lpi(tuple(end))[axes] for end in (voxels.min(0), voxels.max(0))]
        low, high = np.min(ends, axis=0), np.max(ends, axis=0)
        side = max(float((high - low).max()) * (1 + 2 * MARGIN), LEAST_MM)
        field = self._view.field_of_view(self._direction)
        bounds = []
        for n in range(2):
            middle, reach = (low[n] + high[n]) / 2, min(side, field.size[n]) / 2
            middle = min(max(middle, field.low[n] + reach), field.high[n] - reach)
            bounds.append((float(middle - reach), float(middle + reach)))
        across, down = bounds
        return slicing.Rectangle((across[0], down[0]), (across[1], down[1]))

    def picture(
        self,
        labels: NDArray[np.uint16],
        scan: Volume | None,
        display: tuple[NDArray[np.float32], NDArray[np.bool_]],
        text: str,
    ) -> Picture:
        """Return labels over the scan, or over black without it; `display` is as of `Overlay`."""
        scale = PICTURE_PIXELS / max(self._area.size)
        size = tuple(max(1, round(mm * scale)) for mm in self._area.size)
        raster = slicing.Raster(self._area, (size[0], size[1]))
        fine = slicing.Raster(self._area, (size[0] * OVERSAMPLING, size[1] * OVERSAMPLING))
        gray = np.zeros((size[1], size[0]), np.uint8)
        if scan is not None:
            gray = self._gray(scan, raster)
        cut = self._view.cut(labels, self._direction, self._position, None, raster)
        overlay = Overlay(slicing.label_pixels(cut, fine), *display)
        picture = overlay_structures(gray, [overlay])
        scale_bar(picture, (14, picture.height - 18), scale, 0.35 * picture.width)
        buffer = BytesIO()
        picture.save(buffer, "WEBP", quality=80, method=4)
        return Picture(_inline(buffer.getvalue(), "webp"), text, picture.size)

    def _gray(self, scan: Volume, raster: slicing.Raster) -> NDArray[np.uint8]:
        try:
            array = on_grid(scan.array, scan.grid.affine, self._grid)
        except ScanError:  # another image has the name of the case
            return np.zeros((raster.size[1], raster.size[0]), np.uint8)
        body = slicing.find_body(scan, slicing.View(scan.grid), scan.unit == "HU")
        window = slicing.choose_window(
            body.values, scan.modality, scan.unit, scan.suv_factor, body.enhanced
        )
        outside = min(window.low, float(array.min()))
        cut = self._view.cut(array, self._direction, self._position, outside, raster)
        return window.gray(slicing.scan_pixels(cut, raster))
