"""Features of structures by the definitions of the IBSI, computed by the library mirp.

mirp gets the box around a structure, resamples and bins it, and computes the features: no number is
of our own making. Definitions: the reference manual of the Image Biomarker Standardisation
Initiative (IBSI), arXiv:1612.07003; reference values: Zwanenburg et al., Radiology 295:328 (2020).
mirp: Zwanenburg and Löck, JOSS 9:6413 (2024).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid, Layer, Segmentation, Structure, Volume, lacks_memory
from scanloom.core.packages import package_version
from scanloom.ops.measure import finite_or_none, valid_mask
from scanloom.ops.run_length import iter_slabs
from scanloom.options import Radiomics

logger = logging.getLogger(__name__)
"""Logs at DEBUG only: tracebacks may hold foreign text."""

MIRP = "mirp"
MIRP_MODULES = (MIRP, "scipy.signal", "skimage")
"""mirp, and what it imports when it computes features."""
_AIR_HU = -1000.0
_SMOOTHING = math.sqrt(-8 * math.log(0.98))
"""Standard deviation of mirp's filter before resampling, in voxels of the new grid."""
_SPLINE_VOXELS = 20
"""Voxels after which a cubic spline has forgotten a value: 0.268^20 of it is left, 4e-12."""
_PEAK_MM = 6.2
"""Radius of the sphere of a local intensity peak, 1 cm3 (IBSI 2.2)."""
_VOXEL_BYTES = 220
"""Memory of mirp for each voxel of a box, as measured: 125 to 217."""
_TISSUE_BYTES = 4
"""Memory for each voxel of a scan whose tissue is found."""
_TISSUE = 0.02
"""Share of the scan's range above which a voxel is tissue: mirp's own default."""
_ESTIMATED = ("morph_moran_i", "morph_geary_c")
"""Features of morphology that mirp estimates from random voxels in a structure of 1,000 or more:
they differ by some per cent with every change of the box."""
Box = tuple[slice, slice, slice]
"""Voxels along I, J and K."""
_LOCK = threading.Lock()
"""mirp sets filters of warnings, and several at once would take several times the memory."""


@dataclass(frozen=True)
class Features:
    """Features of one structure.

    Parameters
    ----------
    model, label : str
        Names of the model and the structure.
    number : int
        The structure's value in the label map.
    voxels : int
        Number of its voxels in the label map.
    reason : str
        Reason for which they are missing; else empty.
    values : mapping
        By mirp's names; None where a feature is not defined, such as the skewness of one value.
    """

    model: str
    label: str
    number: int
    voxels: int
    reason: str
    values: Mapping[str, float | None]


def effective_settings(settings: Radiomics, volume: Volume) -> dict[str, Any]:
    """Return everything that decides the features of a scan, as plain data.

    Settings that its kind of intensities does not use are left out, and the version of mirp is
    added. A scan in Hounsfield units has bins of a fixed width, any other a fixed number.
    """
    document = {**asdict(settings), "families": list(settings.families)}
    unused = ("bins", "normalise") if volume.unit == "HU" else ("bin_width",)
    # they decide which structures have features, not the features
    for name in (*unused, "min_voxels", "max_voxels", "experimental"):
        del document[name]
    return {**document, "unit": volume.unit, MIRP: package_version(MIRP)}


def settings_hash(effective: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of settings as JSON with sorted keys and without spaces."""
    text = json.dumps(effective, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def compute_features(
    segmentations: Sequence[Segmentation], volume: Volume, settings: Radiomics
) -> tuple[Features, ...]:
    """Compute the features of every structure, in the order of the structures.

    Parameters
    ----------
    segmentations : sequence of Segmentation
        Label maps (I, J, K) on the volume's grid.
    volume : Volume
        The scan (I, J, K). Padding and voxels that are not finite belong to no structure, and count
        as air (-1000 HU), or as the scan's smallest value, when it is resampled.
    settings : Radiomics
        Families of features, resampling and bins.

    Returns
    -------
    tuple of Features
        One for each structure; those without features have a reason.
    """
    computer = _Computer(volume, settings)
    return tuple(
        computer.features(segmentation.model, layer, structure, slices)
        for segmentation in segmentations
        for layer in segmentation.layers
        for structure, slices in _boxes(layer)
    )


def _boxes(layer: Layer) -> Iterator[tuple[Structure, Box | None]]:
    """Yield each structure with the box (I, J, K) of its voxels; None without any."""
    from scipy.ndimage import find_objects

    # transposed: SciPy needs C order, else it copies
    boxes = find_objects(layer.labels.T, max(s.number for s in layer.structures))
    for structure in layer.structures:
        box = boxes[structure.number - 1]
        yield structure, None if box is None else (box[2], box[1], box[0])


class _Computer:
    """Computes the features of structures of one scan."""

    def __init__(self, volume: Volume, settings: Radiomics) -> None:
        self._volume, self._settings = volume, settings
        self._hounsfield = volume.unit == "HU"
        self._lowest, self._shift, self._scale = _AIR_HU, 0.0, 1.0
        if not self._hounsfield and not volume.grid.sheared:
            self._lowest, highest = _range(volume)
            if settings.normalise:
                self._shift, self._scale = _mean_and_sd(volume, self._lowest, highest)

    def features(self, model: str, layer: Layer, structure: Structure, box: Box | None) -> Features:
        """Return the features of a structure in the box (I, J, K) of its voxels."""
        voxels, values, reason = 0, dict[str, float | None](), "no voxels"
        if box is not None:
            own = layer.labels[box] == structure.number
            voxels = int(np.count_nonzero(own))
            own &= valid_mask(self._volume.array[box], self._volume)
            outer = self._outer(box)
            reason = self._refusal(structure, own, outer)
            if not reason:
                try:
                    values = self._compute(box, outer, own)
                except Exception as error:  # a fault in one structure must not stop the others
                    if lacks_memory(error) or isinstance(error, ImportError):
                        raise
                    logger.debug("no features", exc_info=True)
                    reason = f"mirp can't compute them ({type(error).__name__})"
        return Features(model, structure.label, structure.number, voxels, reason, values)

    def _refusal(self, structure: Structure, own: NDArray[np.bool_], outer: Box) -> str:
        """Return why a structure, `own` (I, J, K), has no features; else an empty text."""
        settings, grid = self._settings, self._volume.grid
        spacing = _new_spacing(grid, settings)
        count = np.count_nonzero(own) * grid.voxel_volume / math.prod(spacing)
        size = _voxels([each.stop - each.start for each in outer], grid, settings)
        of = "" if settings.spacing is None else f" of {settings.spacing:g} mm"
        if structure.experimental and not settings.experimental:
            return "experimental"
        if grid.sheared:
            return "sheared scan"
        if not own.any():
            return "only padding"
        if count < settings.min_voxels:
            return f"smaller than {settings.min_voxels} voxels{of}"
        extents = [np.ptp(np.flatnonzero(own.any(axis=axes))) for axes in ((1, 2), (0, 2), (0, 1))]
        if min(extents) < 1:
            return "one voxel thick"
        if size > settings.max_voxels:
            return f"larger than a box of {settings.max_voxels} voxels{of}"
        return ""

    def _outer(self, box: Box) -> Box:
        """Return the box with the voxels around it that can change the features in it."""
        grid, peak = self._volume.grid, 0.0
        spacing = _new_spacing(grid, self._settings)
        if "local_intensity" in self._settings.families:
            peak = _PEAK_MM
        margins = (
            _SPLINE_VOXELS
            + math.ceil(4 * _SMOOTHING * new / old)  # SciPy cuts the filter there
            + math.ceil((peak + 2 * new) / old)
            for old, new in zip(_spacing(grid), spacing, strict=True)
        )
        i, j, k = (
            slice(max(0, inner.start - margin), min(n, inner.stop + margin))
            for inner, margin, n in zip(box, margins, grid.shape, strict=True)
        )
        return i, j, k

    def _compute(self, box: Box, outer: Box, own: NDArray[np.bool_]) -> dict[str, float | None]:
        """Return the features of a structure, `own` (I, J, K) in its box.

        The new grid of the outer box is shifted by a fraction of a voxel onto that of the whole
        scan: so the features are those that mirp computes from the whole scan.
        """
        grid = self._volume.grid
        spacing = _new_spacing(grid, self._settings)
        mask = np.zeros([each.stop - each.start for each in outer], np.bool_)
        inside = (
            slice(inner.start - each.start, inner.stop - each.start)
            for inner, each in zip(box, outer, strict=True)
        )
        mask[tuple(inside)] = own
        values = self._volume.array[outer]
        image = np.where(valid_mask(values, self._volume), values, self._lowest).astype(np.float64)
        shifts = [*map(_grid_shift, grid.shape, outer, _spacing(grid), spacing)]
        image = (image - self._shift) / self._scale
        return self._ask_mirp(image, mask, spacing, shifts)

    def _ask_mirp(
        self,
        image: NDArray[np.float64],
        mask: NDArray[np.bool_],
        spacing: Sequence[float],
        shifts: Sequence[float],
    ) -> dict[str, float | None]:
        """Return the features of a mask of an image (I, J, K) as mirp computes them.

        `shifts` are those of the new grid along each axis, in its voxels, 0 to 1.
        """
        with _mirp_muted():
            from mirp._images.ct_image import CTImage
            from mirp._images.generic_image import GenericImage
            from mirp._masks.base_mask import BaseMask
            from mirp._workflows.standardWorkflow import StandardWorkflow

            # mirp's axes are z, y, x: K, J, I. Features are the same in any orientation
            common = {
                "image_spacing": _spacing(self._volume.grid)[::-1],
                "image_origin": (0.0, 0.0, 0.0),
                "image_orientation": np.eye(3),
                "sample_name": "case",
                "image_modality": "ct" if self._hounsfield else "generic",
            }
            kind = CTImage if self._hounsfield else GenericImage
            mirp_image = kind(image_data=np.ascontiguousarray(image.T), **common)
            mirp_mask = BaseMask("structure", image_data=np.ascontiguousarray(mask.T), **common)
            mirp_image.associated_masks = [mirp_mask]
            settings = self._mirp_settings()
            workflow = StandardWorkflow(
                image_file=mirp_image,
                settings=settings,
                export_features=True,
                translation=tuple(shifts[::-1]),
                new_image_spacing=tuple(spacing[::-1]),
            )
            for resampled, [its_mask] in workflow.standard_image_processing():
                return _values(resampled, its_mask, settings.feature_extr)
        raise ValueError("mirp found no voxels")

    def _mirp_settings(self) -> Any:
        """Return the settings in mirp's terms."""
        from mirp.settings.import_config_parameters import import_configuration_settings

        settings = self._settings
        bins = (
            {
                "base_discretisation_method": "fixed_bin_size",
                "base_discretisation_bin_width": float(settings.bin_width),
            }
            if self._hounsfield
            else {
                "base_discretisation_method": "fixed_bin_number",
                "base_discretisation_n_bins": settings.bins,
            }
        )
        [mirp_settings] = import_configuration_settings(
            compute_features=True,
            base_feature_families=list(settings.families),
            new_spacing=settings.spacing,
            **bins,
        )
        return mirp_settings


def _values(image: Any, mask: Any, settings: Any) -> dict[str, float | None]:
    """Return the features of the IBSI, but `_ESTIMATED`, of a resampled image and mask."""
    from mirp._features.feature_generator import generate_features

    features = [
        each
        for each in generate_features(settings)
        if each.is_ibsi_compliant(image) and each.abbr_name not in _ESTIMATED
    ]
    previous = None
    for feature in features:
        feature.compute(image=image, mask=mask)
        if previous is not None:
            previous.clear_local_cache(other=feature)  # matrices that no further feature needs
        previous = feature
    for feature in features:
        feature.clear_cache()
        feature.create_table_name()
    return {
        each.table_name: None if each.value is None else finite_or_none(each.value)
        for each in features
    }


def _spacing(grid: Grid) -> tuple[float, float, float]:
    """Return the spacing (I, J, K) of a scan, mm, without the last bits of a header.

    mirp rounds the size of the new grid up: 20.0000003 voxels would become 21, half a voxel off.
    """
    i, j, k = (round(each, 6) for each in grid.spacing)
    return i, j, k


def _new_spacing(grid: Grid, settings: Radiomics) -> tuple[float, float, float]:
    """Return the spacing (I, J, K) after resampling, mm."""
    if settings.spacing is None:
        return _spacing(grid)
    return settings.spacing, settings.spacing, settings.spacing


def _voxels(shape: Sequence[int], grid: Grid, settings: Radiomics) -> int:
    """Return the number of voxels of a part (I, J, K) of a scan after resampling."""
    spacing = zip(shape, _spacing(grid), _new_spacing(grid, settings), strict=True)
    return math.prod(math.ceil(n * (old / new)) for n, old, new in spacing)


def estimate_features(grid: Grid, settings: Radiomics, *, hounsfield: bool) -> int:
    """Return the bytes that `compute_features` holds, for the largest structure that it takes."""
    box = min(_voxels(grid.shape, grid, settings), settings.max_voxels)
    tissue = 0 if hounsfield else math.prod(grid.shape) * _TISSUE_BYTES
    return max(tissue, box * _VOXEL_BYTES)


def _grid_shift(size: int, crop: slice, old: float, new: float) -> float:
    """Return the shift of a crop's new grid onto that of the whole, in voxels of it, 0 to 1.

    Each grid has its centre where its old grid has it (IBSI 1.4).
    """
    origins = []
    for first, count in ((0, size), (crop.start, crop.stop - crop.start)):
        samples = math.ceil(count * (old / new))  # as mirp rounds it
        origins.append((first + (count - 1) / 2) * old / new - (samples - 1) / 2)
    shift = (origins[0] - origins[1]) % 1.0
    return 0.0 if math.isclose(shift, 1.0, abs_tol=1e-9) else shift


def _range(volume: Volume) -> tuple[float, float]:
    """Return the smallest and the largest value that is not padding; zeros without any."""
    low, high = math.inf, -math.inf
    for slab in iter_slabs(volume.array.shape):
        values = volume.array[:, :, slab]
        values = values[valid_mask(values, volume)]
        if values.size:
            low, high = min(low, float(values.min())), max(high, float(values.max()))
    return (low, high) if low <= high else (0.0, 0.0)


def _mean_and_sd(volume: Volume, low: float, high: float) -> tuple[float, float]:
    """Return mean and standard deviation of the scan's tissue, as mirp's `standardisation` does.

    Tissue is what lies above a share of the range, opened by the neighbours of a voxel.
    """
    from scipy.ndimage import binary_dilation, binary_erosion

    values: NDArray[Any] = volume.array
    threshold = low + _TISSUE * (high - low)
    tissue = np.greater_equal(values, threshold) & valid_mask(values, volume)
    tissue = binary_dilation(binary_erosion(tissue, border_value=1))
    if not tissue.any():
        tissue = valid_mask(values, volume)
    count, total, squares = 0, 0.0, 0.0
    for slab in iter_slabs(values.shape):
        in_tissue = values[:, :, slab][tissue[:, :, slab]].astype(np.float64)
        count, total = count + in_tissue.size, total + float(in_tissue.sum())
    mean = total / max(1, count)
    for slab in iter_slabs(values.shape):
        in_tissue = values[:, :, slab][tissue[:, :, slab]].astype(np.float64)
        squares += float(((in_tissue - mean) ** 2).sum())
    return mean, math.sqrt(squares / max(1, count)) or 1.0


@contextmanager
def _mirp_muted() -> Iterator[None]:
    """Use mirp alone, without its warnings and its messages on stdout.

    mirp calls `logging.basicConfig`, which does nothing if the root logger has a handler: it gets
    the one that Python uses when there is none.
    """
    root, default = logging.getLogger(), logging.lastResort
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        added = [] if default is None or root.handlers else [default]
        for handler in added:
            root.addHandler(handler)
        try:
            yield
        finally:
            for handler in added:
                root.removeHandler(handler)
