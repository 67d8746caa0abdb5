"""Writes NIfTI: label maps, with their `segments.json`, masks and the scan, on the source's grid.

The same content gives the same bytes. Headers come from nibabel and contain geometry in mm, and no
text of the source; maps of uncertainty alone are scaled.

- Label maps and masks have the intent `LABEL`: MRIcroGL, NiiVue and others show them in colours.
- DICOM and ITK sources: sform and qform are equal, with codes 1 (scanner).
- Sheared grids: sform only. A quaternion cannot represent a shear, and readers that prefer the
  qform would drop it silently. The same if no float32 quaternion is close enough (`forms_for`).
- NIfTI sources: their own forms and codes, so that result and scan are aligned in every tool.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Code, Grid, Reason, ScanError, Segmentation, Structure
from scanloom.io.output import file_names
from scanloom.io.output.json_file import write_document
from scanloom.io.scan import GridOnlySource, NiftiSource, Scan, Source
from scanloom.io.volumes.nifti import forms_for
from scanloom.ops.rectify import rectangular_grid, rectangular_labels

_COMPRESSION_LEVEL = 1
"""zlib's fastest: a label map is small at any level. isal's igzip would be 6 times faster, but now
and then packs equal content into other bytes."""

_MAX_AXIS_LENGTH = 32767
"""Largest number of voxels along an axis in a NIfTI-1 header (int16)."""

LABEL = 1002
"""NIFTI_INTENT_LABEL: voxels are numbers of labels."""


def write_nifti(
    array: NDArray[Any],
    grid: Grid,
    source: Source,
    path: Path,
    slope: float = 1.0,
    intent: int = 0,
) -> None:
    """Write voxels (I, J, K) in their own type; bool becomes uint8.

    Parameters
    ----------
    array : (I, J, K) array, or (I, J, K, C) of several channels
        Voxels on `grid`.
    grid : Grid
        The scan's own grid, or the rectangular grid of a sheared scan.
    source : Source
        Format of the scan, on which sform and qform depend.
    path : Path
        Path that ends in `.nii.gz`.
    slope : float
        Voxels mean so many times their number (`scl_slope`).
    intent : int
        `LABEL`, or 0.
    """
    # NIfTI has neither bool nor float16, of which float32 represents every value
    if array.dtype == np.bool_:
        array = array.view(np.uint8)
    dtype = array.dtype if array.dtype != np.float16 else np.dtype(np.float32)
    array = array.astype(dtype.newbyteorder("<"), copy=False)
    # NIfTI's first index varies fastest, as in memory: the transpose is a contiguous view
    voxels = np.ascontiguousarray(array.T)
    with (
        path.open("wb") as file,
        gzip.GzipFile("", "wb", compresslevel=_COMPRESSION_LEVEL, fileobj=file, mtime=0) as zipped,
    ):
        zipped.write(_header(array, grid, source, slope, intent))
        zipped.write(voxels)


def _header(
    array: NDArray[Any], grid: Grid, source: Source, slope: float, intent: int = 0
) -> bytes:
    """Return the header and the extension flag: the 352 bytes before the voxels."""
    import nibabel as nib

    if max(grid.shape) > _MAX_AXIS_LENGTH:
        detail = f"NIfTI-1 allows at most {_MAX_AXIS_LENGTH} voxels along an axis"
        raise ScanError(Reason.TOO_LARGE, detail)
    header = nib.Nifti1Header(endianness="<")
    header.set_data_dtype(array.dtype)
    channels = array.shape[3:]
    header.set_data_shape((*grid.shape, *channels))
    header.set_zooms((*grid.spacing, *(1.0 for _ in channels)))
    header.set_xyzt_units(xyz="mm")
    header["scl_slope"], header["scl_inter"] = slope, 0
    header["intent_code"] = intent
    _set_forms(header, forms_for(grid, source))
    header["magic"] = header.single_magic
    header["vox_offset"] = header.single_vox_offset
    return bytes(header.binaryblock) + bytes(4)  # no extension follows


def _set_forms(header: Any, forms: NiftiSource) -> None:  # nibabel has no types
    if forms.sform is not None:
        header.set_sform(forms.sform, forms.sform_code)
    if forms.qform is None or forms.quaternion is None:
        return
    mirrored = np.linalg.det(forms.qform[:3, :3]) < 0
    header["qform_code"] = forms.qform_code
    header["pixdim"][:4] = -1 if mirrored else 1, *np.linalg.norm(forms.qform[:3, :3], axis=0)
    header["quatern_b"], header["quatern_c"], header["quatern_d"] = forms.quaternion
    header["qoffset_x"], header["qoffset_y"], header["qoffset_z"] = forms.qform[:3, 3]


# --- label maps of a case -------------------------------------------------------------------------


def write_label_maps(folder: Path, segmentations: Sequence[Segmentation], scan: Scan) -> None:
    """Write the label maps of all models, and `segments.json`, into a case folder.

    Parameters
    ----------
    folder : Path
        The case folder being built.
    segmentations : sequence of Segmentation
        One for each model, with the requested structures.
    scan : Scan
        The scan whose geometry they have.
    """
    models = [s.model for s in segmentations]
    write_document(folder / file_names.SEGMENTS, segments_json(segmentations))
    for segmentation in segmentations:
        model, grid = segmentation.model, segmentation.grid
        for n, layer in enumerate(segmentation.layers):
            name = file_names.label_map_name("segmentation", model, models, n)
            write_nifti(layer.labels, grid, scan.source, folder / name, intent=LABEL)
            if grid.sheared:
                labels, rectangular = rectangular_labels(layer.labels, grid), rectangular_grid(grid)
                name = file_names.label_map_name("segmentation_rect", model, models, n)
                write_nifti(labels, rectangular, GridOnlySource(), folder / name, intent=LABEL)


def segments_json(segmentations: Sequence[Segmentation]) -> dict[str, Any]:
    """Return the structures of each label map, by their numbers."""
    models = [s.model for s in segmentations]
    return {
        "files": [
            {
                "file": file_names.label_map_name("segmentation", s.model, models, n),
                "model": s.model,
                "structures": [_structure(structure) for structure in layer.structures],
            }
            for s in segmentations
            for n, layer in enumerate(s.layers)
        ]
    }


def _structure(structure: Structure) -> dict[str, Any]:
    return {
        "number": structure.number,
        "label": structure.label,
        "name": structure.name,
        "category": _code(structure.category),
        "type": _code(structure.type),
        "laterality": _code(structure.laterality) if structure.laterality else None,
        "color": list(structure.color),
        "experimental": structure.experimental,
    }


def _code(code: Code) -> dict[str, str]:
    return {"value": code.value, "scheme": code.scheme, "meaning": code.meaning}
