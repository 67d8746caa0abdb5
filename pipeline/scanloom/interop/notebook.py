"""HTML of volumes, segmentations and records for notebooks: a picture and a few lines of text."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

import numpy as np

from scanloom.core import CaseRecord, Flag, Segmentation, Volume
from scanloom.interop.planes import draw_labels, draw_volume
from scanloom.io.output.file_names import PREVIEW


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
            rows.append((structure.label, f"{volume_ml:.1f} ml"))
    return _page(repr(segmentation), _image(draw_labels(segmentation)), rows)


def record_html(record: CaseRecord) -> str:
    """Return the preview of a case and the volumes of its structures."""
    rows = [(m.label, f"{m.volume_ml:.1f} ml") for m in record.measurements]
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
