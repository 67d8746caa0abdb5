"""A case that is open for review: its scan, its label maps, and what was decided on them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid, Measurement, Reason, ScanError, Volume
from scanloom.io.output.file_names import CASE, SEGMENTS
from scanloom.io.output.json_file import read_json
from scanloom.io.output.measurements import read_measurements
from scanloom.io.output.published import check_files
from scanloom.io.read import load_volume
from scanloom.io.system.disk_errors import is_passing
from scanloom.io.system.regular_files import open_regular_file
from scanloom.review.corrections.revisions import latest_result, read_label_map, revision_number
from scanloom.review.preview.slicing import (
    LUNG,
    SOFT_TISSUE,
    GrayWindow,
    View,
    choose_window,
    hounsfield_window,
)
from scanloom.review.server.pixels import PLANES, Image, as_image, describe_plane
from scanloom.review.sources import read_source
from scanloom.review.verdicts.verdict import Seen

IMAGE = "image.nii.gz"
_PRESETS = {"soft tissue": SOFT_TISSUE, "lung": LUNG, "bone": hounsfield_window(2000, 400)}
WITHOUT = {
    Reason.KEY_MISMATCH: "The scan is not shown: it takes the key of this output folder.",
    Reason.NOT_FOUND: "The scan is not shown: it is no longer where it was.",
    Reason.ID_UNKNOWN: "The scan is not shown: the crosswalk lacks the case.",
}
"""Why a case has no scan, by the reason; the labels and the preview are shown."""
_SAMPLE = 97
"""Every n-th voxel decides on the window of scans that are not in Hounsfield units."""
_DAMAGE = (OSError, ValueError, LookupError, TypeError, nib.filebasedimages.ImageFileError)  # type: ignore[attr-defined]  # nibabel is not typed


@dataclass(frozen=True, eq=False)
class Layer:
    """A label map.

    Parameters
    ----------
    file : str
        Its name in the case folder.
    model : str
    labels : (X, Y, Z) uint8 or uint16 array
        In the view.
    structures : tuple of dict
        Entries of `segments.json`.
    """

    file: str
    model: str
    labels: NDArray[Any]
    structures: tuple[dict[str, Any], ...]


@dataclass(frozen=True, eq=False)
class OpenedCase:
    """A case that is open for review.

    Parameters
    ----------
    name : str
        Name of its folder.
    document : dict
        `case.json`.
    view : View
        The grid, in the orientation in which slices are drawn.
    image : Image or None
        The scan, if it can be had.
    origin : "image", "source" or ""
        Where the scan is from.
    missing : str
        Why there is no scan.
    layers : tuple of Layer
    measurements : tuple of Measurement
    seen : Seen
        Recipe and hashes of the label maps.
    windows : tuple of (str, GrayWindow)
        Named windows; the first is the default.
    revision : int
        Number of the revision whose labels are shown; 0 for the case's own.
    """

    name: str
    document: dict[str, Any]
    view: View
    image: Image | None
    origin: str
    missing: str
    layers: tuple[Layer, ...]
    measurements: tuple[Measurement, ...]
    seen: Seen
    windows: tuple[tuple[str, GrayWindow], ...]
    revision: int

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        image = self.image.array.nbytes if self.image else 0
        return image + sum(layer.labels.nbytes for layer in self.layers)


def open_case(out: Path, name: str, key: Path | None = None) -> OpenedCase:
    """Open a published case.

    Parameters
    ----------
    out : Path
        The output folder.
    name : str
        Name of the case folder.
    key : Path or None
        File with the key of the case ids; None for SCANLOOM_KEY or the user's own key.

    Raises
    ------
    ScanError
        ID_UNKNOWN if there is no such case; RESULT_DAMAGED if a file is missing or changed.
    OSError
        If a file can't be read for the moment.
    """
    folder = out / "cases" / name
    if not folder.is_dir():
        raise ScanError(Reason.ID_UNKNOWN, "there is no such case")
    try:
        check_files(folder)
        document = read_json(folder / CASE)
        latest = latest_result(out, name)
        if latest != folder:
            check_files(latest)
        grid = Grid(tuple(document["grid"]["shape"]), document["grid"]["affine_ras_mm"])
        view = View(grid)
        seen = Seen(read_json(latest / CASE)["recipe"], _hashes(latest))
        layers = tuple(_layers(latest, view))
        measurements = read_measurements(latest)
    except _DAMAGE as exc:
        if is_passing(exc):
            raise
        raise ScanError(Reason.RESULT_DAMAGED, f"case {name} is damaged") from exc
    volume, origin, missing = _scan(out, folder, document, grid, key)
    windows = _windows(volume) if volume else ()
    image = as_image(volume, view) if volume else None
    return OpenedCase(
        *(name, document, view, image, origin, missing),
        *(layers, measurements, seen, windows, revision_number(latest)),
    )


def _hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each label map that `segments.json` lists."""
    files = [entry["file"] for entry in read_json(folder / SEGMENTS)["files"]]
    return {name: _sha256(folder / name) for name in dict.fromkeys(files)}


def _sha256(path: Path) -> str:
    with open_regular_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _layers(folder: Path, view: View) -> list[Layer]:
    layers = []
    for entry in read_json(folder / SEGMENTS)["files"]:
        labels = read_label_map(folder / entry["file"])
        if labels.shape != view.source.shape:
            raise ValueError("a label map has another shape than its case")
        kept = np.asfortranarray(labels, np.uint8 if labels.max(initial=0) < 256 else np.uint16)
        structures = tuple(entry["structures"])
        layers.append(Layer(entry["file"], entry["model"], view.of(kept), structures))
    return layers


def _scan(
    out: Path, folder: Path, document: dict[str, Any], grid: Grid, key: Path | None
) -> tuple[Volume | None, str, str]:
    """Return the scan of a case, where it is from, and why there is none."""
    stored = folder / IMAGE
    try:
        if stored.is_file():
            modality = document["options"]["modality"] or document["source"]["modality"]
            volume = load_volume(stored, modality=modality)
        else:
            volume = read_source(out, folder.name, key).volume
    except ScanError as exc:
        return None, "", _why(exc.reason, exc.detail)
    if not volume.grid.matches(grid, tolerance=1e-2):
        return None, "", _why(Reason.SERIES_DIFFERS, "the scan has other voxels than the labels")
    return volume, "image" if stored.is_file() else "source", ""


def _why(reason: Reason, detail: str) -> str:
    """Return why a case has no scan."""
    if reason is Reason.SERIES_DIFFERS:
        return f"The scan is not shown: {detail} ({reason.code})."
    return WITHOUT.get(reason, f"The scan can't be read ({reason.code}).")


def _windows(volume: Volume) -> tuple[tuple[str, GrayWindow], ...]:
    if volume.unit == "HU":
        return tuple(_PRESETS.items())
    sample = volume.array.reshape(-1, order="F")[::_SAMPLE]
    sample = sample[np.isfinite(sample) & (sample != sample.min(initial=0))]
    chosen = choose_window(sample, volume.modality, volume.unit, volume.suv_factor)
    return (("usual", chosen),)


def describe(case: OpenedCase) -> dict[str, Any]:
    """Return what the viewer needs, as JSON; no path and no identity."""
    view, image = case.view, case.image
    lps = np.diag((1, 1, -1, 1)) @ view.to_lpi
    return {
        "id": case.name,
        "shape": view.shape,
        "spacing": [view.source.spacing[n] for n in view.order],
        "affine": lps.tolist(),
        "sheared": view.source.sheared,
        "modality": case.document["source"]["modality"],
        "unit": case.document["source"]["unit"],
        "image": case.origin or None,
        "image_reason": case.missing,
        "scale": [image.slope, image.intercept] if image else None,
        "exact": image.exact if image else None,
        "windows": [
            {"name": name, "low": w.low, "high": w.high, "inverted": w.inverted}
            for name, w in case.windows
        ],
        "planes": {name: describe_plane(view, plane) for name, plane in PLANES.items()},
        "layers": [_plain_layer(case, n, layer) for n, layer in enumerate(case.layers)],
        "models": [f"{m['name']} {m['version']}".strip() for m in case.document["models"]],
        "flags": [flag["code"] for flag in case.document["flags"]],
        "revision": case.revision,
        "recipe": case.seen.recipe,
        "seen": case.seen.labels,
    }


def _plain_layer(case: OpenedCase, index: int, layer: Layer) -> dict[str, Any]:
    measured = {m.label: m for m in case.measurements if m.model == layer.model}
    return {
        "index": index,
        "file": layer.file,
        "model": layer.model,
        "bytes": layer.labels.itemsize,
        "labels": [
            _plain_structure(case, layer, each, measured.get(each["label"]))
            for each in layer.structures
        ],
    }


def _plain_structure(
    case: OpenedCase, layer: Layer, structure: dict[str, Any], m: Measurement | None
) -> dict[str, Any]:
    red, green, blue = structure["color"]
    return {
        "value": structure["number"],
        "label": structure["label"],
        "name": structure["name"],
        "color": f"#{red:02x}{green:02x}{blue:02x}",
        "volume_ml": m.volume_ml if m else None,
        "centre": centre_of(case, layer, structure["number"], m),
    }


def centre_of(
    case: OpenedCase, layer: Layer, number: int, m: Measurement | None
) -> Sequence[int] | None:
    """Return the voxel (view) of a structure that is nearest to the middle of its box."""
    if m is None or m.box is None:
        return None
    ends = np.array([case.view.index_of(corner) for corner in m.box])
    low, high = ends.min(axis=0), ends.max(axis=0)
    middle = (low + high) // 2
    for axis in (2, 1, 0):  # the middle slice of the box holds the structure, or its neighbours do
        box = tuple(
            slice(middle[n], middle[n] + 1) if n == axis else slice(low[n], high[n] + 1)
            for n in range(3)
        )
        inside = np.argwhere(layer.labels[box] == number)
        if len(inside):
            corner = np.array([part.start for part in box])
            nearest = np.abs(inside + corner - middle).sum(axis=1).argmin()
            return [int(n) for n in inside[nearest] + corner]
    return [int(n) for n in middle]
