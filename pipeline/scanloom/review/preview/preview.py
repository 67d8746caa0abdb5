"""The pictures of a case, to check the plausibility of its segmentation: preview and thumbnail."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from scanloom.core import Flag, Measurement, Segmentation, Volume
from scanloom.core.grid import Box
from scanloom.review.preview.content import Plane, PreviewContent, choose_content
from scanloom.review.preview.drawing import (
    MUTED,
    PAGE,
    PNG_LEVEL,
    TEXT,
    Legend,
    draw_plate,
    draw_text,
    legend_entries,
    legend_notes,
    scale_bar,
    truncated,
    wrap_text,
)
from scanloom.review.preview.layout import (
    CONTENT_WIDTH,
    GAP,
    HEADER_HEIGHT,
    MARGIN,
    WIDTH,
    About,
    Frame,
    Mosaic,
    Planes,
    arrange_mosaic,
    arrange_planes,
    fill_row,
)
from scanloom.review.preview.slicing import LETTERS

NOTICE = "Research use only - not for diagnosis"
RULE_Y = HEADER_HEIGHT - 8
"""Lower end of the header, which alone depends on the order in which voxels are stored."""
FOOTER_HEIGHT = 28
BAR_MAX_WIDTH = 150
CAPTION_SIZE = 14
LETTER_SIZE = 15
MIN_LETTERED = 90
"""Minimum width and height of a frame with letters at all four sides."""
Show = Literal["labels", "scan"]


def draw_preview(
    volume: Volume,
    segmentations: Sequence[Segmentation],
    measurements: Sequence[Measurement],
    flags: Sequence[Flag],
    path: Path,
    about: About = About(),
) -> None:
    """Draw a scan with its structures to a PNG file.

    The page shows a plane through the largest structure without and with structures, two other
    planes, and slices spread over the structures, of which each is in at least one. Planes are
    cropped to the body and follow the radiological convention (the patient's right on the left,
    sagittal planes facing left, head up), at true proportions for any storage order. The slices of
    tilted and of thin stacks are shown as acquired. Letters at the edges, a scale bar, a legend
    with volumes, and the flags are added.

    Parameters
    ----------
    volume : Volume
        The scan.
    segmentations : sequence of Segmentation
        Segmentations on the volume's grid, in drawing order.
    measurements : sequence of Measurement
        One measurement for each structure of each segmentation.
    flags : sequence of Flag
        The flags of the case.
    path : Path
        The PNG file. Equal input gives equal bytes.
    about : About
        Case id, assumed modality, limitations of the models.

    Raises
    ------
    ValueError
        If the scan is marked as having identifying text burned in.
    OSError
        If the file can't be written.
    """
    if Flag.BURNED_IN in flags or Flag.BURNED_IN in volume.flags:
        raise ValueError("a scan with identifying text burned in must not have a preview")
    draw_page(choose_content(volume, segmentations, measurements, about), flags, path)


def draw_page(content: PreviewContent, flags: Sequence[Flag], path: Path) -> None:
    """Draw the page of `draw_preview`."""
    results = content.segmentations, content.measurements
    legend = Legend(
        tuple(legend_entries(*results, content.color_of)),
        tuple(legend_notes(*results, flags, content.about.limitations)),
    )
    main, second, third = (plane.area.size for plane in content.planes)
    planes = arrange_planes(main, second, third, legend.heights())
    mosaic = arrange_mosaic(len(content.tiles), content.tiles[0].area.size)
    below = HEADER_HEIGHT + planes.height + GAP
    page = Image.new("RGB", (WIDTH, below + mosaic.height + FOOTER_HEIGHT), PAGE)
    _draw_header(page, content)
    _draw_planes(page, content, planes)
    corner = MARGIN + planes.legend[0], HEADER_HEIGHT + planes.legend[1]
    legend.draw(page, corner, planes.columns, planes.column_width)
    _draw_mosaic(page, content, mosaic, below)
    at = MARGIN, page.height - FOOTER_HEIGHT / 2
    draw_text(ImageDraw.Draw(page), at, NOTICE, 13, MUTED, "lm")
    frames = [frame.moved(MARGIN, below) for frame in mosaic.frames]
    info = tile_info(map_tiles(content.tiles, frames))
    page.save(path, format="PNG", compress_level=PNG_LEVEL, pnginfo=info)


def _draw_header(page: Image.Image, content: PreviewContent) -> None:
    """Write models with their versions; case, scan, device and precision below."""
    canvas, grid = ImageDraw.Draw(page), content.volume.grid
    models = [f"{s.title} {s.version}".strip() for s in content.segmentations]
    title = truncated(" + ".join(models), 26, CONTENT_WIDTH)
    draw_text(canvas, (MARGIN, 12), title, 26, TEXT)
    runs = dict.fromkeys(
        ", ".join(filter(None, (s.device, s.precision, s.changes))) for s in content.segmentations
    )
    shape = " x ".join(str(n) for n in grid.shape)
    spacing = " x ".join(f"{s:.2f}" for s in grid.spacing)
    facts = (
        f"case {content.about.case_id}" if content.about.case_id else "",
        f"{content.modality}, {content.window_text}",
        f"{shape} voxels of {spacing} mm, {grid.axis_codes}",
        *runs,
    )
    lines = wrap_text("  ·  ".join(filter(None, facts)), 14, CONTENT_WIDTH)
    for n, line in enumerate(list(lines)[:2]):
        draw_text(canvas, (MARGIN, 46 + 19 * n), line, 14, MUTED)


def _draw_planes(page: Image.Image, content: PreviewContent, planes: Planes) -> None:
    """Draw the main plane without and with labels, with the scale bar, and the two others."""
    main, second, third = content.planes
    frames = [frame.moved(MARGIN, HEADER_HEIGHT) for frame in planes.frames]
    shows: tuple[Show, ...] = ("scan", "labels", "labels", "labels")
    for frame, plane, show in zip(frames, (main, main, second, third), shows, strict=True):
        _draw_plane(page, content, plane, frame, show)
    labelled = frames[1]
    room = min(BAR_MAX_WIDTH, labelled.width / 3)
    at = labelled.x + 12, labelled.y + labelled.height - 16
    scale_bar(page, at, labelled.picture[0] / main.area.size[0], room)


def _draw_plane(
    page: Image.Image, content: PreviewContent, plane: Plane, frame: Frame, show: Show
) -> None:
    """Draw a plane with its caption and, at its edges, the letters of the sides."""
    draw_picture(page, content, plane, frame, show)
    caption = "Scan" if show == "scan" else plane.name
    caption = truncated(caption, CAPTION_SIZE, frame.width - 12)
    if frame.width > MIN_LETTERED:
        draw_plate(page, (frame.x + 6, frame.y + 6), caption, CAPTION_SIZE)
    across, down = LETTERS[plane.direction.across], LETTERS[plane.direction.down]
    middle = frame.x + frame.width / 2, frame.y + frame.height / 2
    draw_plate(page, (frame.x + 6, middle[1]), across[0], LETTER_SIZE, "lm")
    draw_plate(page, (frame.x + frame.width - 6, middle[1]), across[1], LETTER_SIZE, "rm")
    if min(frame.width, frame.height) > MIN_LETTERED:
        draw_plate(page, (middle[0], frame.y + 24), down[0], LETTER_SIZE, "ma")
        draw_plate(page, (middle[0], frame.y + frame.height - 6), down[1], LETTER_SIZE, "mb")


def draw_picture(
    page: Image.Image, content: PreviewContent, plane: Plane, frame: Frame, show: Show = "labels"
) -> None:
    """Draw a plane in the middle of its frame, which has the colour of air."""
    picture = content.picture(plane, frame.picture, show)
    edge = (255, 255, 255) if content.window.inverted else (0, 0, 0)
    box = (frame.x, frame.y, frame.x + frame.width - 1, frame.y + frame.height - 1)
    ImageDraw.Draw(page).rectangle(box, fill=edge)
    page.paste(picture, frame.corner)


def _draw_mosaic(page: Image.Image, content: PreviewContent, mosaic: Mosaic, top: int) -> None:
    """Draw slices in order, each with its number and position."""
    for plane, at in zip(content.tiles, mosaic.frames, strict=True):
        frame = at.moved(MARGIN, top)
        draw_picture(page, content, plane, frame)
        caption = truncated(plane.short, 12, frame.width - 10)
        draw_plate(page, (frame.x + 5, frame.y + frame.height - 5), caption, 12, "lb")


THUMBNAIL_SIZE = (520, 200)


def draw_thumbnail(content: PreviewContent, path: Path) -> None:
    """Draw the three planes of a preview side by side to a PNG file of `THUMBNAIL_SIZE` pixels.

    Raises
    ------
    OSError
        If the file can't be written.
    """
    page = Image.new("RGB", THUMBNAIL_SIZE, PAGE)
    frames: tuple[Frame, ...] = fill_row(
        [plane.area.size for plane in content.planes], THUMBNAIL_SIZE
    )
    for plane, frame in zip(content.planes, frames, strict=True):
        draw_picture(page, content, plane, frame)
    page.save(path, format="PNG", compress_level=PNG_LEVEL)


TILE_MAP_KEYWORD = "scanloom tiles"
"""Keyword of the text chunk of the PNG file."""

Row = tuple[float, float, float, float]
Pixels = tuple[int, int, int, int]
"""Left, top, width and height in pixels."""


@dataclass(frozen=True)
class MosaicSlice:
    """A slice of the mosaic.

    Parameters
    ----------
    slice : int
        Its index along the slice axis.
    number : int
        Its number on the page, where slices are counted from 1 towards the feet.
    x, y : int
        Corner on the page.
    """

    slice: int
    number: int
    x: int
    y: int


@dataclass(frozen=True)
class TileMap:
    """Positions of the slices of a mosaic on the page, in pixels.

    Parameters
    ----------
    axis : 0, 1 or 2
        Axis of the voxel array across the slices.
    size : (width, height)
        Size of the picture of each slice.
    tiles : tuple of MosaicSlice
        The slices; at least one.
    to_picture : (row, row)
        Affine from a voxel index (i, j, k, 1) to x and y within the picture of its slice.
    """

    axis: int
    size: tuple[int, int]
    tiles: tuple[MosaicSlice, ...]
    to_picture: tuple[Row, Row]

    def nearest(self, box: Box) -> MosaicSlice:
        """Return the slice that is nearest to the middle of a bounding box."""
        middle = (box[0][self.axis] + box[1][self.axis]) / 2
        return min(self.tiles, key=lambda tile: abs(tile.slice - middle))

    def outline(self, box: Box, tile: MosaicSlice) -> Pixels:
        """Return the outline of a bounding box in the picture of a slice, on the page."""
        ends = np.array([[*box[0], 1.0], [*box[1], 1.0]])
        ends[0, :3] -= 0.5
        ends[1, :3] += 0.5
        corners = ends @ np.array(self.to_picture).T
        low = np.clip(corners.min(axis=0), 0, self.size)
        high = np.clip(corners.max(axis=0), 0, self.size)
        (left, top), (width, height) = np.rint(low), np.rint(high - low)
        return tile.x + int(left), tile.y + int(top), int(width), int(height)


def map_tiles(planes: Sequence[Plane], frames: Sequence[Frame]) -> TileMap:
    """Return the map of a mosaic, from its planes and their frames on the page."""
    view, direction, area = planes[0].view, planes[0].direction, planes[0].area
    axis, size = direction.normal, frames[0].picture
    step, origin = np.diag(view.to_lpi)[:3], view.to_lpi[:3, 3]
    tiles = []
    for plane, frame in zip(planes, frames, strict=True):
        n = round(float((plane.position - origin[axis]) / step[axis]))
        index = view.shape[axis] - 1 - n if view.flipped[axis] else n
        tiles.append(MosaicSlice(index, n + 1, *frame.corner))
    rows = np.zeros((2, 4))
    for row, lpi, low, mm, pixels in zip(
        rows, (direction.across, direction.down), area.low, area.size, size, strict=True
    ):
        flip, scale = view.flipped[lpi], pixels / mm
        first = origin[lpi] + (step[lpi] * (view.shape[lpi] - 1) if flip else 0.0)
        row[view.order[lpi]] = (-1 if flip else 1) * step[lpi] * scale
        row[3] = (first - low) * scale
    to_x, to_y = ((float(a), float(b), float(c), float(d)) for a, b, c, d in rows.round(4))
    return TileMap(view.order[axis], size, tuple(tiles), (to_x, to_y))


def tile_info(tile_map: TileMap) -> PngInfo:
    """Return the text chunk with a map, for the PNG file of the page."""
    info = PngInfo()
    info.add_text(TILE_MAP_KEYWORD, json.dumps(asdict(tile_map), separators=(",", ":")))
    return info


def read_tile_map(info: dict[Any, Any]) -> TileMap | None:
    """Read the map from the `info` of an opened PNG file; None if it is missing or malformed."""
    names = [field.name for field in dataclass_fields(MosaicSlice)]
    try:
        fields = json.loads(info[TILE_MAP_KEYWORD])
        width, height = (int(n) for n in fields["size"])
        (a, b, c, d), (e, f, g, h) = ([float(x) for x in row] for row in fields["to_picture"])
        tiles = tuple(MosaicSlice(*(int(t[n]) for n in names)) for t in fields["tiles"])
        axis = int(fields["axis"])
    except (LookupError, TypeError, ValueError):
        return None
    if axis not in (0, 1, 2) or not tiles or min(width, height) < 1:
        return None
    return TileMap(axis, (width, height), tiles, ((a, b, c, d), (e, f, g, h)))
