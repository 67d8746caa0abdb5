"""The preview of a case: one picture to check the plausibility of its segmentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from scanloom.core import Flag, Measurement, Segmentation, Volume
from scanloom.review.preview.content import PreviewContent, choose_subject
from scanloom.review.preview.drawing import (
    MUTED,
    PAGE,
    PANEL,
    RULE,
    TEXT,
    draw_label,
    draw_text,
    scale_bar,
    truncated,
)
from scanloom.review.preview.layout import (
    CAPTION_HEIGHT,
    COLUMN_GAP,
    GUTTER,
    HEADER_HEIGHT,
    MAIN_WIDTH,
    MARGIN,
    WIDTH,
    Frame,
    Mosaic,
    Planes,
    arrange_mosaic,
    arrange_planes,
)
from scanloom.review.preview.legend import draw_legend, legend_entries, legend_notes
from scanloom.review.preview.slicing import AXIAL, CORONAL, LETTERS, SAGITTAL, Direction, Raster

NOTICE = "Research use only - not for diagnosis"
RULE_Y = 100
BAR_ROW_HEIGHT = 40
BAR_MAX_WIDTH = 150
CAPTION_WIDTH = 200
MIN_LETTERED_TILE = 70
"""Minimum tile size for the letters R and L next to the slice position."""
FOOTER_HEIGHT = 64
TICK_LENGTH = 6
LETTER_DISTANCE = 17
"""Distance from the edge of a plane to the centre of the letter next to it."""


def draw_preview(
    volume: Volume,
    segmentations: Sequence[Segmentation],
    measurements: Sequence[Measurement],
    flags: Sequence[Flag],
    path: Path,
    title: str | None = None,
) -> None:
    """Draw a scan with its structures to a PNG file.

    The page shows three planes through the largest structure, and axial slices spread over it.
    Planes follow the radiological convention (the patient's right on the left, sagittal planes
    facing left, head up), at true proportions for any storage order or tilt. Letters at the edges,
    scale bars, a legend with volumes, and the flags are added.

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
    title : str or None
        The heading; by default the names of the models.

    Raises
    ------
    ValueError
        If the scan is marked as having identifying text burned in.
    OSError
        If the file can't be written.
    """
    if Flag.BURNED_IN in flags or Flag.BURNED_IN in volume.flags:
        raise ValueError("a scan with identifying text burned in must not have a preview")
    content = choose_subject(volume, segmentations, measurements)
    areas = [content.view.field_of_view(d) for d in (AXIAL, CORONAL, SAGITTAL)]
    planes = arrange_planes(areas[0].size, areas[1].size, areas[2].size)
    mosaic = arrange_mosaic(content.slices, content.area.size)
    main = planes.height + BAR_ROW_HEIGHT + CAPTION_HEIGHT + mosaic.height
    entries = legend_entries(segmentations, measurements)
    notes = legend_notes(segmentations, measurements, flags)
    # The legend may be longer than the pictures: the page is cropped to its end below
    page = Image.new("RGB", (WIDTH, HEADER_HEIGHT + main + 4000), PAGE)
    canvas = ImageDraw.Draw(page)
    _draw_header(canvas, content, title or " + ".join(s.title for s in segmentations))
    _draw_planes(page, content, planes)
    _draw_mosaic(page, content, mosaic, HEADER_HEIGHT + planes.height + BAR_ROW_HEIGHT)
    corner = MARGIN + MAIN_WIDTH + COLUMN_GAP, HEADER_HEIGHT + CAPTION_HEIGHT + GUTTER
    end = draw_legend(canvas, corner, HEADER_HEIGHT + main - corner[1], entries, notes)
    bottom = max(HEADER_HEIGHT + main, end) + FOOTER_HEIGHT
    draw_text(canvas, (MARGIN, bottom - FOOTER_HEIGHT / 2), NOTICE, 14, MUTED, "lm")
    page.crop((0, 0, WIDTH, bottom)).save(path, format="PNG", compress_level=6)


def _draw_header(canvas: ImageDraw.ImageDraw, content: PreviewContent, title: str) -> None:
    volume = content.volume
    shape = " x ".join(str(n) for n in volume.grid.shape)
    spacing = " x ".join(f"{s:.2f}" for s in volume.grid.spacing)
    facts = (
        volume.modality or "modality unknown",
        content.window.text,
        f"{shape} voxels of {spacing} mm, {volume.grid.axis_codes}",
    )
    draw_text(canvas, (MARGIN, 28), truncated(title, 30, WIDTH - 2 * MARGIN), 30, TEXT)
    draw_text(canvas, (MARGIN, 70), "  ·  ".join(facts), 15, MUTED)
    canvas.line([(MARGIN, RULE_Y), (WIDTH - MARGIN, RULE_Y)], fill=RULE)


def _draw_planes(page: Image.Image, content: PreviewContent, planes: Planes) -> None:
    """Draw the three planes, and the scale bar that applies to all of them."""
    for direction, frame in zip((AXIAL, CORONAL, SAGITTAL), planes.frames, strict=True):
        moved = Frame(
            frame.x + MARGIN, frame.y + HEADER_HEIGHT, frame.width, frame.height, frame.picture
        )
        _draw_plane(page, content, direction, moved)
    at = MARGIN + planes.frames[0].x, HEADER_HEIGHT + planes.height + 8
    scale_bar(ImageDraw.Draw(page), at, planes.pixels_per_mm, BAR_MAX_WIDTH)


def _draw_plane(
    page: Image.Image, content: PreviewContent, direction: Direction, frame: Frame
) -> None:
    canvas = ImageDraw.Draw(page)
    area = content.view.field_of_view(direction)
    position = float(content.center[direction.normal])
    picture = content.picture(direction, position, Raster(area, frame.picture))
    x_min, y_min = frame.x, frame.y
    x_max, y_max = x_min + frame.width, y_min + frame.height
    canvas.rectangle([x_min, y_min, x_max - 1, y_max - 1], fill=PANEL)
    page.paste(picture, frame.corner)
    draw_text(canvas, (x_min, y_min - GUTTER - CAPTION_HEIGHT + 4), direction.name, 16, MUTED)
    across, down = LETTERS[direction.across], LETTERS[direction.down]
    middle = (x_min + x_max) / 2, (y_min + y_max) / 2
    draw_text(canvas, (x_min - LETTER_DISTANCE, middle[1]), across[0], 16, TEXT, "mm")
    draw_text(canvas, (x_max + LETTER_DISTANCE, middle[1]), across[1], 16, TEXT, "mm")
    draw_text(canvas, (middle[0], y_min - LETTER_DISTANCE), down[0], 16, TEXT, "mm")
    draw_text(canvas, (middle[0], y_max + LETTER_DISTANCE), down[1], 16, TEXT, "mm")
    # Ticks at the intersections with the two other planes
    x, y = (
        corner + (content.center[axis] - low) / length * pixels
        for corner, axis, low, length, pixels in zip(
            frame.corner,
            (direction.across, direction.down),
            area.low,
            area.size,
            frame.picture,
            strict=True,
        )
    )
    for end in (y_min - TICK_LENGTH, y_max):
        canvas.line([(x, end), (x, end + TICK_LENGTH - 1)], fill=MUTED)
    for end in (x_min - TICK_LENGTH, x_max):
        canvas.line([(end, y), (end + TICK_LENGTH - 1, y)], fill=MUTED)


def _draw_mosaic(page: Image.Image, content: PreviewContent, mosaic: Mosaic, top: int) -> None:
    """Draw axial slices from head to foot, each with its position along the patient."""
    canvas = ImageDraw.Draw(page)
    draw_text(canvas, (MARGIN, top), "Axial, from head to foot", 16, MUTED)
    scale_bar(canvas, (MARGIN + CAPTION_WIDTH, top + 11), mosaic.pixels_per_mm, BAR_MAX_WIDTH / 2)
    positions = content.tiles(len(mosaic.frames))
    for frame, position in zip(mosaic.frames, positions, strict=True):
        x, y = MARGIN + frame.x, top + CAPTION_HEIGHT + frame.y
        canvas.rectangle([x, y, x + frame.width - 1, y + frame.height - 1], fill=PANEL)
        picture = content.picture(AXIAL, position, Raster(content.area, frame.picture))
        page.paste(picture, (MARGIN + frame.corner[0], top + CAPTION_HEIGHT + frame.corner[1]))
        caption = f"{'I' if position > 0 else 'S'} {abs(position):.0f} mm"
        draw_label(canvas, (x + 6, y + frame.height - 6), caption, 13, "ls")
    first = mosaic.frames[0]
    if first.height > MIN_LETTERED_TILE and first.width > MIN_LETTERED_TILE:
        middle = top + CAPTION_HEIGHT + first.height / 2
        draw_label(canvas, (MARGIN + 6, middle), "R", 14, "lm")
        draw_label(canvas, (MARGIN + first.width - 6, middle), "L", 14, "rm")
