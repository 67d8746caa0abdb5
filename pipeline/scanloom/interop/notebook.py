"""HTML of volumes, segmentations and records for notebooks: a picture and a few lines of text."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from scanloom.core import CaseRecord, Flag, Segmentation, Volume, milliliters
from scanloom.core.grid import Index
from scanloom.io.output.file_names import PREVIEW
from scanloom.ops.label_maps import box_of_labels, union_of_boxes
from scanloom.review.preview import slicing
from scanloom.review.preview.page import draw_text

PLANE_PIXELS = 280
"""Pixels of the longest side of the scan."""
LETTER_PIXELS = 14
MAX_SAMPLE_VOXELS = 200_000
"""Number of voxels from which the window of intensities is estimated."""
SOFT_TISSUE_HU = (-160.0, 240.0)
GAP_PIXELS = 4

Rgb = NDArray[np.uint8]
DrawPlane = Callable[[slicing.Direction, float, slicing.Raster], Rgb]
"""Returns the picture of a plane at a position in LPI mm."""


def draw_volume(volume: Volume) -> bytes:
    """Return a PNG of the middle axial, coronal and sagittal plane of a scan."""
    view = slicing.View(volume.grid)
    low, high = _window(volume)

    def plane(direction: slicing.Direction, position: float, raster: slicing.Raster) -> Rgb:
        cut = view.cut(volume.array, direction, position, low, raster)
        values = np.nan_to_num(slicing.scan_pixels(cut, raster), nan=low)
        gray = ((values - low) / (high - low)).clip(0, 1) * 255
        return np.repeat(gray.astype(np.uint8)[:, :, None], 3, axis=2)

    a, b, c = ((n - 1) // 2 for n in view.shape)
    return _side_by_side(view, view.positions((a, b, c)), plane)


def draw_labels(segmentation: Segmentation) -> bytes:
    """Return a PNG of three planes through the middle of all structures, in their colours."""
    view = slicing.View(segmentation.grid)
    tables = []
    for layer in segmentation.layers:
        colors = np.zeros((int(np.iinfo(layer.labels.dtype).max) + 1, 3), np.uint8)
        for structure in layer.structures:
            colors[structure.number] = structure.color
        tables.append((layer.labels, colors))

    def plane(direction: slicing.Direction, position: float, raster: slicing.Raster) -> Rgb:
        picture = np.zeros((raster.size[1], raster.size[0], 3), np.uint8)
        for array, colors in tables:
            labels = slicing.label_pixels(
                view.cut(array, direction, position, None, raster), raster
            )
            np.copyto(picture, colors[labels], where=(labels > 0)[:, :, None])
        return picture

    return _side_by_side(view, view.positions(view.index_of(_center(segmentation))), plane)


def _center(segmentation: Segmentation) -> Index:
    """Return the voxel in the middle of the bounding box of all structures, or of the scan."""
    box = union_of_boxes(box_of_labels(layer.labels) for layer in segmentation.layers)
    first, last = box or ((0, 0, 0), np.array(segmentation.grid.shape) - 1)
    i, j, k = ((np.array(first) + last) // 2).tolist()
    return i, j, k


def _raster(view: slicing.View, direction: slicing.Direction) -> slicing.Raster:
    area = view.field_of_view(direction)
    scale = PLANE_PIXELS / float(np.ptp(view.corners, axis=0).max())
    width, height = (max(1, round(length * scale)) for length in area.size)
    return slicing.Raster(area, (width, height))


def _window(volume: Volume) -> tuple[float, float]:
    """Return the intensities shown as black and white: soft tissue, or percentiles 1 and 99."""
    if volume.unit == "HU":
        return SOFT_TISSUE_HU
    step = max(1, round((volume.array.size / MAX_SAMPLE_VOXELS) ** (1 / 3)))
    values = volume.array[::step, ::step, ::step].astype(np.float64).ravel()
    values = values[np.isfinite(values) & ~volume.is_padding(values)]
    low, high = (float(v) for v in np.percentile(values, (1, 99))) if values.size else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _side_by_side(view: slicing.View, center: NDArray[np.float64], draw: DrawPlane) -> bytes:
    """Return a PNG of the axial, coronal and sagittal plane through a point (3,) in LPI mm."""
    planes = []
    for direction in (slicing.AXIAL, slicing.CORONAL, slicing.SAGITTAL):
        position = float(center[direction.normal])
        plane = Image.fromarray(draw(direction, position, _raster(view, direction)))
        letter = slicing.LETTERS[direction.across][0]
        draw_text(ImageDraw.Draw(plane), (3, plane.height / 2), letter, LETTER_PIXELS, anchor="lm")
        planes.append(plane)
    width = sum(plane.width for plane in planes) + GAP_PIXELS * (len(planes) - 1)
    picture = Image.new("RGB", (width, max(plane.height for plane in planes)))
    x = 0
    for plane in planes:
        picture.paste(plane, (x, (picture.height - plane.height) // 2))
        x += plane.width + GAP_PIXELS
    png = io.BytesIO()
    picture.save(png, format="PNG")
    return png.getvalue()


def volume_html(volume: Volume) -> str:
    """Return the three middle planes of a scan; no picture if text is burned in."""
    if Flag.BURNED_IN in volume.flags:
        return _page(repr(volume), "", [])
    return _page(repr(volume), _image(draw_volume(volume)), [])


def segmentation_html(segmentation: Segmentation) -> str:
    """Return three planes through the structures, and the volume of each structure."""
    rows = []
    for layer in segmentation.layers:
        counts = np.bincount(layer.labels.ravel(order="K"), minlength=1)
        for structure in layer.structures:
            count = int(counts[structure.number]) if structure.number < len(counts) else 0
            volume_ml = count * segmentation.grid.voxel_volume / 1000
            rows.append((structure.label, f"{milliliters(volume_ml)} ml"))
    return _page(repr(segmentation), _image(draw_labels(segmentation)), rows)


def record_html(record: CaseRecord) -> str:
    """Return the preview of a case and the volumes of its structures."""
    rows = [(m.label, f"{milliliters(m.volume_ml)} ml") for m in record.measurements]
    picture = ""
    if record.folder is not None and (record.folder / PREVIEW).is_file():
        picture = _image((record.folder / PREVIEW).read_bytes())
    return _page(repr(record), picture, rows)


def _page(title: str, picture: str, rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>" for name, text in rows
    )
    table = f"<details><summary>Volumes</summary><table>{cells}</table></details>" if rows else ""
    return f"<div><div><code>{html.escape(title)}</code></div>{picture}{table}</div>"


def _image(png: bytes) -> str:
    data = base64.b64encode(png).decode("ascii")
    return f'<img style="max-width: 900px" alt="" src="data:image/png;base64,{data}">'
