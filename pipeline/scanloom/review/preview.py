"""The preview: one picture that shows whether a segmentation can be right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from scanloom.core import Flag, Measurement, Segmentation, Volume
from scanloom.review.draw import (
    PAGE,
    PANEL,
    QUIET,
    RULE,
    TEXT,
    label_on,
    scale_bar,
    shortened,
    write,
)
from scanloom.review.layout import (
    CAPTION,
    COLUMN_GAP,
    GUTTER,
    MAIN_WIDTH,
    MARGIN,
    WIDTH,
    Frame,
    Mosaic,
    Planes,
    arrange_mosaic,
    arrange_planes,
)
from scanloom.review.legend import draw_legend, legend_entries, notes_of
from scanloom.review.planes import AXIAL, CORONAL, LETTERS, SAGITTAL, Direction, Raster
from scanloom.review.subject import Subject, choose_subject

NOTICE = "Research use only - not for diagnosis"
HEADER = 116
RULE_AT = 100
BAR_ROW = 40
BAR_ROOM = 150
CAPTION_ROOM = 200
LETTERED = 70
"""A tile that is smaller has no room for R and L beside its place."""
FOOTER = 64
TICK = 6
LETTER = 17
"""From a plane's edge to the middle of the letter beside it."""


def draw_preview(
    volume: Volume,
    segmentations: Sequence[Segmentation],
    measurements: Sequence[Measurement],
    flags: Sequence[Flag],
    path: Path,
    title: str | None = None,
) -> None:
    """Draw the scan with its structures into a PNG file.

    Three planes through the largest structure and axial slices spread over it, in radiological
    convention (the patient's right on the left, sagittal planes facing left, head up) and true
    proportions, whatever way the scan is stored or tilted; with letters at the edges, scale bars,
    a legend with volumes, and the flags.

    Parameters
    ----------
    volume : Volume
        The scan.
    segmentations : sequence of Segmentation
        On the volume's grid; drawn in this order.
    measurements : sequence of Measurement
        One for each structure of each segmentation.
    flags : sequence of Flag
        Of the case.
    path : Path
        Where to write. Equal input gives equal bytes.
    title : str or None
        The heading; None for the names of the models.

    Raises
    ------
    ValueError
        If the image says that it has identifying text burned in: of such a scan there is no
        picture.
    OSError
        If it can't be written.
    """
    if Flag.BURNED_IN in flags or Flag.BURNED_IN in volume.flags:
        raise ValueError("no picture is made of a scan with text burned in")
    subject = choose_subject(volume, segmentations, measurements)
    areas = [subject.view.field_of_view(d) for d in (AXIAL, CORONAL, SAGITTAL)]
    planes = arrange_planes(areas[0].size, areas[1].size, areas[2].size)
    mosaic = arrange_mosaic(subject.slices, subject.area.size)
    main = planes.height + BAR_ROW + CAPTION + mosaic.height
    entries = legend_entries(segmentations, measurements)
    notes = notes_of(segmentations, measurements, flags)
    # The legend may be longer than the pictures; what is below it is cut off in the end.
    page = Image.new("RGB", (WIDTH, HEADER + main + 4000), PAGE)
    pen = ImageDraw.Draw(page)
    _draw_header(pen, subject, title or " + ".join(s.model for s in segmentations))
    _draw_planes(page, subject, planes)
    _draw_mosaic(page, subject, mosaic, HEADER + planes.height + BAR_ROW)
    corner = MARGIN + MAIN_WIDTH + COLUMN_GAP, HEADER + CAPTION + GUTTER
    end = draw_legend(pen, corner, HEADER + main - corner[1], entries, notes)
    bottom = max(HEADER + main, end) + FOOTER
    write(pen, (MARGIN, bottom - FOOTER / 2), NOTICE, 14, QUIET, "lm")
    page.crop((0, 0, WIDTH, bottom)).save(path, format="PNG", compress_level=6)


def _draw_header(pen: ImageDraw.ImageDraw, subject: Subject, title: str) -> None:
    volume = subject.volume
    shape = " x ".join(str(n) for n in volume.grid.shape)
    spacing = " x ".join(f"{s:.2f}" for s in volume.grid.spacing)
    facts = (
        volume.modality or "modality unknown",
        subject.window.text,
        f"{shape} voxels of {spacing} mm, {volume.grid.axis_codes}",
    )
    write(pen, (MARGIN, 28), shortened(title, 30, WIDTH - 2 * MARGIN), 30, TEXT)
    write(pen, (MARGIN, 70), "  ·  ".join(facts), 15, QUIET)
    pen.line([(MARGIN, RULE_AT), (WIDTH - MARGIN, RULE_AT)], fill=RULE)


def _draw_planes(page: Image.Image, subject: Subject, planes: Planes) -> None:
    """Draw the three planes, and the scale bar that is true for all of them."""
    for direction, frame in zip((AXIAL, CORONAL, SAGITTAL), planes.frames, strict=True):
        moved = Frame(frame.x + MARGIN, frame.y + HEADER, frame.width, frame.height, frame.picture)
        _draw_plane(page, subject, direction, moved)
    at = MARGIN + planes.frames[0].x, HEADER + planes.height + 8
    scale_bar(ImageDraw.Draw(page), at, planes.pixels_per_mm, BAR_ROOM)


def _draw_plane(page: Image.Image, subject: Subject, direction: Direction, frame: Frame) -> None:
    pen = ImageDraw.Draw(page)
    area = subject.view.field_of_view(direction)
    position = float(subject.center[direction.normal])
    picture = subject.picture(direction, position, Raster(area, frame.picture))
    left, top = frame.x, frame.y
    right, bottom = left + frame.width, top + frame.height
    pen.rectangle([left, top, right - 1, bottom - 1], fill=PANEL)
    page.paste(picture, frame.corner)
    write(pen, (left, top - GUTTER - CAPTION + 4), direction.name, 16, QUIET)
    across, down = LETTERS[direction.across], LETTERS[direction.down]
    middle = (left + right) / 2, (top + bottom) / 2
    write(pen, (left - LETTER, middle[1]), across[0], 16, TEXT, "mm")
    write(pen, (right + LETTER, middle[1]), across[1], 16, TEXT, "mm")
    write(pen, (middle[0], top - LETTER), down[0], 16, TEXT, "mm")
    write(pen, (middle[0], bottom + LETTER), down[1], 16, TEXT, "mm")
    # Where the two other planes cut this one.
    x, y = (
        corner + (subject.center[axis] - low) / length * pixels
        for corner, axis, low, length, pixels in zip(
            frame.corner,
            (direction.across, direction.down),
            area.low,
            area.size,
            frame.picture,
            strict=True,
        )
    )
    for end in (top - TICK, bottom):
        pen.line([(x, end), (x, end + TICK - 1)], fill=QUIET)
    for end in (left - TICK, right):
        pen.line([(end, y), (end + TICK - 1, y)], fill=QUIET)


def _draw_mosaic(page: Image.Image, subject: Subject, mosaic: Mosaic, top: int) -> None:
    """Draw axial slices from head to foot, each with its place along the patient."""
    pen = ImageDraw.Draw(page)
    write(pen, (MARGIN, top), "Axial, from head to foot", 16, QUIET)
    scale_bar(pen, (MARGIN + CAPTION_ROOM, top + 11), mosaic.pixels_per_mm, BAR_ROOM / 2)
    positions = subject.tiles(len(mosaic.frames))
    for frame, position in zip(mosaic.frames, positions, strict=True):
        x, y = MARGIN + frame.x, top + CAPTION + frame.y
        pen.rectangle([x, y, x + frame.width - 1, y + frame.height - 1], fill=PANEL)
        picture = subject.picture(AXIAL, position, Raster(subject.area, frame.picture))
        page.paste(picture, (MARGIN + frame.corner[0], top + CAPTION + frame.corner[1]))
        place = f"{'I' if position > 0 else 'S'} {abs(position):.0f} mm"
        label_on(pen, (x + 6, y + frame.height - 6), place, 13, "ls")
    first = mosaic.frames[0]
    if first.height > LETTERED and first.width > LETTERED:
        middle = top + CAPTION + first.height / 2
        label_on(pen, (MARGIN + 6, middle), "R", 14, "lm")
        label_on(pen, (MARGIN + first.width - 6, middle), "L", 14, "rm")
