"""Cases that are open for review, within a limit of memory: scan, label maps, and their slices.

All indices are those of a `View`: they increase towards the patient's left, back and feet, so that
axial and coronal slices show the patient's right on the left, and sagittal ones the front.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from scanloom.cards.codes import colors_of_models, shown_name, structure_of_entry
from scanloom.core import Grid, Measurement, Reason, ScanError, Structure, Volume, is_passing
from scanloom.core.segmentation import Color
from scanloom.io.output.file_names import CASE, SCAN_COPY
from scanloom.io.output.json_file import read_json
from scanloom.io.output.layout import case_folder, listed_label_maps
from scanloom.io.output.measurements import read_measurements
from scanloom.io.output.published import check_files
from scanloom.io.read import load_volume
from scanloom.io.system.regular_files import sha256_of
from scanloom.review.preview import slicing
from scanloom.review.preview.content import crop_box
from scanloom.review.preview.slicing import View
from scanloom.review.preview.solid import hides_others
from scanloom.review.revisions import latest_result, read_label_map, revision_number
from scanloom.review.sources import read_source
from scanloom.review.verdicts.verdict import Seen

_PRESETS = {
    "soft tissue": slicing.SOFT_TISSUE,
    "lung": slicing.LUNG,
    "bone": slicing.hounsfield_window(2000, 400),
}
WITHOUT = {
    Reason.KEY_MISMATCH: "The scan is not shown: it takes the key of this output folder.",
    Reason.NOT_FOUND: "The scan is not shown: it is no longer where it was.",
    Reason.ID_UNKNOWN: "The scan is not shown: the crosswalk lacks the case.",
}
"""Why a case has no scan, by the reason; the labels and the preview are shown."""
_DAMAGE = (OSError, ValueError, LookupError, TypeError, nib.filebasedimages.ImageFileError)  # type: ignore[attr-defined]  # nibabel is not typed


@dataclass(frozen=True, eq=False)
class Layer:
    """A label map.

    Parameters
    ----------
    file : str
        Its name in the case folder.
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
    document : dict
        `case.json`.
    view : View
        The grid, in the orientation in which slices are drawn.
    image : Image or None
        The scan, if it can be had.
    origin : "image", "source" or ""
        Where the scan is from.
    missing : str
        Reason for a missing scan.
    colors : dict
        Colour of each structure by model and number, which are those of the preview.
    seen : Seen
        Recipe and hashes of the label maps.
    windows : tuple of (str, GrayWindow)
        Named windows; the first is the default.
    revision : int
        Number of the revision whose labels are shown; 0 for the case's own.
    body : (low, high) or None
        Box around the body and all structures, by index of the view; None without a scan.
    """

    name: str
    document: dict[str, Any]
    view: View
    image: Image | None
    origin: str
    missing: str
    layers: tuple[Layer, ...]
    colors: dict[tuple[str, int], Color]
    measurements: tuple[Measurement, ...]
    seen: Seen
    windows: tuple[tuple[str, slicing.GrayWindow], ...]
    revision: int
    body: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        image = self.image.array.nbytes if self.image else 0
        return image + sum(layer.labels.nbytes for layer in self.layers)

    def check(self, version: str) -> None:
        """Refuse the version of another result, or of a draft of one; STALE."""
        if version.partition(".")[0] != self.seen.version:
            raise ScanError(Reason.STALE, "the result was replaced since it was opened")


def open_case(out: Path, name: str, key: Path | None = None) -> OpenedCase:
    """Open a published case.

    Parameters
    ----------
    key : Path or None
        File with the key of the case ids; None for SCANLOOM_KEY or the user's own key.

    Raises
    ------
    ScanError
        ID_UNKNOWN if there is no such case; RESULT_DAMAGED if a file is missing or changed.
    OSError
        If a file can't be read for the moment.
    """
    folder = case_folder(out, name)
    if not folder.is_dir():
        raise ScanError(Reason.ID_UNKNOWN, "there is no such case")
    try:
        check_files(folder)
        document = read_json(folder / CASE)
        # of both: the grid is that of the case, the labels those of its last revision
        latest = latest_result(out, name)
        if latest != folder:
            check_files(latest)
        grid = Grid(tuple(document["grid"]["shape"]), document["grid"]["affine_ras_mm"])
        view = View(grid)
        layers, hashes = _read_layers(latest, view)
        colors = _colors(layers)
        seen = Seen(read_json(latest / CASE)["recipe"], hashes)
        measurements = read_measurements(latest)
    except _DAMAGE as exc:
        if is_passing(exc):
            raise
        raise ScanError(Reason.RESULT_DAMAGED, "the case is damaged") from exc
    volume, origin, missing = _scan(out, folder, document, grid, key)
    body = slicing.find_body(volume, view, volume.unit == "HU") if volume else None
    boxes = [m.box for m in measurements if m.box is not None]
    return OpenedCase(
        name=name,
        document=document,
        view=view,
        image=as_image(volume, view) if volume else None,
        origin=origin,
        missing=missing,
        layers=layers,
        colors=colors,
        measurements=measurements,
        seen=seen,
        windows=_windows(volume, body) if volume and body else (),
        revision=revision_number(latest),
        body=crop_box(view, body, boxes) if body else None,
    )


def _read_layers(folder: Path, view: View) -> tuple[tuple[Layer, ...], dict[str, str]]:
    """Return the label maps that `segments.json` lists, and the SHA-256 of their files."""
    layers, hashes = [], dict[str, str]()
    for entry in listed_label_maps(folder):
        name = entry["file"]
        hashes[name] = sha256_of(folder / name)
        labels = read_label_map(folder / name)
        if labels.shape != view.source.shape:
            raise ValueError("a label map has another shape than its case")
        kept = np.asfortranarray(labels, np.uint8 if labels.max(initial=0) < 256 else np.uint16)
        layers.append(Layer(name, entry["model"], view.of(kept), tuple(entry["structures"])))
    return tuple(layers), hashes


def _colors(layers: Sequence[Layer]) -> dict[tuple[str, int], Color]:
    structures = dict[str, list[Structure]]()
    for layer in layers:
        structures.setdefault(layer.model, []).extend(map(structure_of_entry, layer.structures))
    return colors_of_models(structures.items())


def _scan(
    out: Path, folder: Path, document: dict[str, Any], grid: Grid, key: Path | None
) -> tuple[Volume | None, str, str]:
    """Return the scan of a case, where it is from, and why it is missing."""
    stored = folder / SCAN_COPY
    try:
        if stored.is_file():
            modality = document["options"]["modality"] or document["source"]["modality"]
            volume = load_volume(stored, modality=modality)
        else:
            volume = read_source(out, folder.name, key).volume
    except ScanError as exc:
        return None, "", _why(exc.reason, exc.detail)
    # labels on other voxels would be drawn beside what they mean
    if not volume.grid.matches(grid, tolerance=1e-2):
        return None, "", _why(Reason.SERIES_DIFFERS, "the scan has other voxels than the labels")
    return volume, "image" if stored.is_file() else "source", ""


def _why(reason: Reason, detail: str) -> str:
    if reason is Reason.SERIES_DIFFERS:
        return f"The scan is not shown: {detail} ({reason.code})."
    return WITHOUT.get(reason, f"The scan can't be read ({reason.code}).")


def _windows(volume: Volume, body: slicing.Body) -> tuple[tuple[str, slicing.GrayWindow], ...]:
    """Return the named windows; the first one, which is shown, is that of the preview."""
    if volume.unit == "HU":
        presets = {"contrast": slicing.ENHANCED, **_PRESETS}
        return tuple((presets if body.enhanced else _PRESETS).items())
    of_scan = volume.modality, volume.unit, volume.suv_factor
    return (("usual", slicing.choose_window(body.values, *of_scan)),)


def describe(case: OpenedCase) -> dict[str, Any]:
    """Return the description of a case that its page needs, as JSON; no path and no identity."""
    view, image = case.view, case.image
    lps = np.diag((1, 1, -1, 1)) @ view.to_lpi
    return {
        "id": case.name,
        "shape": view.shape,
        "spacing": [view.source.spacing[n] for n in view.order],
        "affine": lps.tolist(),
        "sheared": view.source.sheared,
        "body": [ends.tolist() for ends in case.body] if case.body else None,
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
        "layers": [
            {
                "index": index,
                "file": layer.file,
                "model": layer.model,
                "bytes": layer.labels.itemsize,
                "labels": _describe_structures(case, layer),
            }
            for index, layer in enumerate(case.layers)
        ],
        "models": [f"{m['name']} {m['version']}".strip() for m in case.document["models"]],
        "revision": case.revision,
        "version": case.seen.version,
    }


def _describe_structures(case: OpenedCase, layer: Layer) -> list[dict[str, Any]]:
    """Return the description of each structure of a label map."""
    view = case.view
    body = case.body or (np.zeros(3), np.array(view.shape) - 1.0)
    measured = {m.label: m for m in case.measurements if m.model == layer.model}
    labels = []
    for structure in layer.structures:
        m = measured.get(structure["label"])
        box = np.sort([view.index_of(end) for end in m.box], axis=0) if m and m.box else None
        red, green, blue = case.colors[layer.model, structure["number"]]
        hull = box is not None and hides_others(structure_of_entry(structure), box, body)
        labels.append(
            {
                "value": structure["number"],
                "label": structure["label"],
                "name": shown_name(structure["name"]),
                "color": f"#{red:02x}{green:02x}{blue:02x}",
                "volume_ml": m.volume_ml if m else None,
                "centre": centre_of(case, layer, structure["number"], m),
                "hull": hull,
            }
        )
    return labels


def centre_of(
    case: OpenedCase, layer: Layer, number: int, m: Measurement | None
) -> Sequence[int] | None:
    """Return the voxel (view) of a structure that is nearest to the middle of its box."""
    if m is None or m.box is None:
        return None
    ends = np.array([case.view.index_of(corner) for corner in m.box])
    low, high = ends.min(axis=0), ends.max(axis=0)
    # the middle of a bent structure may lie outside of it
    middle = (low + high) // 2
    for axis in (2, 1, 0):  # the middle slice of the box holds the structure, or its neighbours do
        box = tuple(
            slice(middle[n], middle[n] + 1) if n == axis else slice(low[n], high[n] + 1)
            for n in range(3)
        )
        inside = np.argwhere(layer.labels[box] == number)
        if len(inside):
            corner = np.array([extent.start for extent in box])
            nearest = np.abs(inside + corner - middle).sum(axis=1).argmin()
            return [int(n) for n in inside[nearest] + corner]
    return [int(n) for n in middle]


MAX_OPEN_BYTES = 704 << 20
"""Arrays of open cases that are kept; the case that was used longest ago is closed first."""
SHOWN_S = 1800.0
"""Time for which the case that a reviewer looks at stays open, from the last request."""
_BYTES_PER_VOXEL = 3
"""Of a case that is not open yet: an image of int16 and labels of uint8."""


class OpenCases:
    """Cases that are open, or being opened.

    The case that a reviewer looks at is not closed for another one, whatever the limit.
    """

    def __init__(self, out: Path, key: Path | None) -> None:
        self.out, self.key, self.limit = out, key, MAX_OPEN_BYTES
        self._guard = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "open")  # one at a time: memory
        self._open: OrderedDict[str, Future[OpenedCase]] = OrderedDict()
        self._shown: dict[str, tuple[str, float]] = {}
        for library in ("pyarrow.compute", "pyarrow.parquet"):  # while the list is looked at
            self._pool.submit(import_module, library)

    def show(self, name: str, reviewer: str) -> None:
        """Note which case a reviewer looks at."""
        with self._guard:
            self._shown[reviewer] = name, time.monotonic()

    def get(self, name: str) -> OpenedCase:
        """Return an open case; errors as `open_case`."""
        with self._guard:
            future = self._start(name)
        return future.result()

    def get_ahead(self, name: str) -> OpenedCase | None:
        """Return a case that is opened ahead of time; None if it has no room beside shown ones.

        Raises
        ------
        ScanError
            As of `open_case`.
        """
        expected = expected_bytes(self.out, name)
        with self._guard:
            shown = sum(
                (_arrays(self._open[each]) if each in self._open else 0)
                or expected_bytes(self.out, each)
                for each in self._kept() - {name}
            )
            # what a reviewer looks at must not be closed for a case that nobody asked for yet
            if shown + expected > self.limit:
                return None
            future = self._start(name)
        return future.result()

    def forget(self, name: str) -> None:
        """Close a case."""
        with self._guard:
            self._open.pop(name, None)

    def _start(self, name: str) -> Future[OpenedCase]:
        """Open a case in the background, unless it is open."""
        future = self._open.get(name)
        if future is None or (future.done() and future.exception() is not None):
            future = self._pool.submit(self._opened, name)
            self._open[name] = future
        self._open.move_to_end(name)
        return future

    def _opened(self, name: str) -> OpenedCase:
        expected = expected_bytes(self.out, name)
        with self._guard:  # make room before it is read
            self._close_old(name, expected)
        case = open_case(self.out, name, self.key)
        with self._guard:
            self._close_old(name, case.nbytes)
        return case

    def _close_old(self, name: str, added: int) -> None:
        """Close cases that were used longest ago, and that nobody looks at, to make room."""
        held = added + sum(map(_arrays, self._open.values()))
        kept = self._kept() | {name}
        for oldest in list(self._open):
            if held <= self.limit:
                return
            if oldest not in kept:
                held -= _arrays(self._open.pop(oldest))

    def _kept(self) -> set[str]:
        """Return the cases that reviewers look at."""
        oldest = time.monotonic() - SHOWN_S
        return {name for name, at in self._shown.values() if at >= oldest}


def expected_bytes(out: Path, name: str) -> int:
    """Return the bytes that the arrays of a case will have, about; 0 if that can't be known."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        shape = read_json(case_folder(out, name) / CASE)["grid"]["shape"]
        return _BYTES_PER_VOXEL * math.prod(map(int, shape))
    return 0


def _arrays(future: Future[OpenedCase]) -> int:
    if not future.done() or future.exception() is not None:
        return 0
    return future.result().nbytes


PLANES = {direction.name.lower(): direction for direction in slicing.DIRECTIONS}
MAX_CHUNK_BYTES = 16 << 20
"""Largest answer with slices."""
_LOWEST, _HIGHEST = -32768, 32767


@dataclass(frozen=True, eq=False)
class Image:
    """A scan as int16, and the factors of its values: `slope` * pixel + `intercept`.

    Parameters
    ----------
    array : (X, Y, Z) int16 array
        Pixels, in a view.
    exact : bool
        Whether the values are those of the scan, not rounded to `slope` / 2.
    """

    array: NDArray[np.int16]
    slope: float
    intercept: float
    exact: bool


def as_image(volume: Volume, view: View) -> Image:
    """Return a scan as an image. Voxels that are not numbers get the lowest value."""
    array = volume.array
    if array.dtype.kind == "f":
        array = np.where(np.isfinite(array), array, np.nanmin(array[np.isfinite(array)], initial=0))
    low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    whole = array.dtype.kind in "iu" or bool((array == np.rint(array)).all())
    # exact if it can be: as it is, else shifted (unsigned 16 bits), else rounded to 16 bits
    if whole and low >= _LOWEST and high <= _HIGHEST:
        return Image(view.of(_as_int16(array)), 1.0, 0.0, exact=True)
    if whole and high - low <= _HIGHEST - _LOWEST:
        shifted = np.asarray(array.astype(np.float64) - low + _LOWEST)
        return Image(view.of(_as_int16(shifted)), 1.0, low - _LOWEST, exact=True)
    slope = (high - low) / (_HIGHEST - _LOWEST) or 1.0
    pixels = np.rint((array.astype(np.float64) - low) / slope + _LOWEST)
    return Image(view.of(_as_int16(pixels)), slope, low - slope * _LOWEST, exact=False)


def _as_int16(array: NDArray[Any]) -> NDArray[np.int16]:
    return np.asfortranarray(array.astype(np.int16, copy=False))


def slices(array: NDArray[Any], plane: slicing.Direction, first: int, last: int) -> bytes:
    """Return slices as little-endian pixels, row by row.

    Parameters
    ----------
    array : (X, Y, Z) array
        In a view.
    first, last : int
        Indices of the first and the last slice.

    Raises
    ------
    IndexError
        If there are no such slices, or they exceed `MAX_CHUNK_BYTES`.
    """
    count, rows, columns = (array.shape[n] for n in (plane.normal, plane.down, plane.across))
    if not 0 <= first <= last < count:
        raise IndexError(f"slices {first} to {last} of {count}")
    if (last - first + 1) * rows * columns * array.itemsize > MAX_CHUNK_BYTES:
        raise IndexError(f"slices {first} to {last} exceed {MAX_CHUNK_BYTES >> 20} MiB")
    chosen = np.moveaxis(array, plane.normal, 0)[first : last + 1]
    pixels = chosen.copy(order="K")  # in one pass: sagittal slices are interleaved in memory
    if plane.across < plane.down:  # rows run along the second axis
        pixels = pixels.transpose(0, 2, 1)
    rows_in_order = np.ascontiguousarray(pixels, pixels.dtype.newbyteorder("<"))  # without the GIL
    return rows_in_order.tobytes()


def describe_plane(view: View, plane: slicing.Direction) -> dict[str, Any]:
    """Return what a page needs to draw a plane: axes, sizes in mm, and side letters."""
    spacing = [view.source.spacing[n] for n in view.order]
    across, down = slicing.LETTERS[plane.across], slicing.LETTERS[plane.down]
    return {
        "normal": plane.normal,
        "across": plane.across,
        "down": plane.down,
        "count": view.shape[plane.normal],
        "width": view.shape[plane.across],
        "height": view.shape[plane.down],
        "pixel_mm": [spacing[plane.across], spacing[plane.down]],
        "letters": {"left": across[0], "right": across[1], "top": down[0], "bottom": down[1]},
    }
