"""File names of a case folder that several modules use: writers, read-back, tables.

`docs/outputs.md` says what is in the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

PREVIEW = "preview.png"
THUMBNAIL = "thumbnail.png"
SEGMENTS = "segments.json"
SCAN_COPY = "image.nii.gz"
MEASUREMENTS_CSV = "measurements.csv"
MEASUREMENTS_JSON = "measurements.json"
MEASUREMENTS_SR = "dicom/measurements.dcm"
RADIOMICS_CSV = "radiomics.csv"
RADIOMICS_JSON = "radiomics.json"
CASE = "case.json"
TIMING = "timing.json"
CHECKSUMS = "SHA256SUMS"

Stem = Literal["segmentation", "segmentation_rect"]


def label_map_name(stem: Stem, model: str, models: Sequence[str], layer: int = 0) -> str:
    """Return the name of a label map; `layer` counts from 0; `models` lists the case's models."""
    return f"{_prefix(model, models)}{stem}{_number(layer)}.nii.gz"


def seg_name(stem: Stem, model: str, models: Sequence[str], layer: int = 0) -> str:
    """Return the name of a DICOM SEG; `layer` counts from 0; `models` lists the case's models."""
    return f"dicom/{_prefix(model, models)}{stem}{_number(layer)}.dcm"


def slicer_name(model: str, models: Sequence[str]) -> str:
    """Return the name of a segmentation of 3D Slicer; `models` lists the case's models."""
    return f"{_prefix(model, models)}segmentation.seg.nrrd"


def rtstruct_name(model: str, models: Sequence[str]) -> str:
    """Return the name of an RTSTRUCT; `models` lists the case's models."""
    return f"dicom/{_prefix(model, models)}rtstruct.dcm"


def surface_name(model: str, models: Sequence[str]) -> str:
    """Return the name of the meshes of a model's structures; `models` lists the case's models."""
    return f"{_prefix(model, models)}surface.glb"


def mask_name(label: str, model: str, models: Sequence[str]) -> str:
    """Return the name of the mask of one structure; `models` lists the case's models."""
    return f"split/{_prefix(model, models)}{label}.nii.gz"


def uncertainty_name(kind: str, model: str, models: Sequence[str]) -> str:
    """Return the name of a map of uncertainty; `models` lists the case's models."""
    return f"{_prefix(model, models)}{kind}.nii.gz"


def _prefix(model: str, models: Sequence[str]) -> str:
    if model not in models or len(set(models)) != len(models):
        raise ValueError(f"{model!r} must be one of {list(models)}, and these must be unique")
    return f"{model}-" if len(models) > 1 else ""


def _number(layer: int) -> str:
    return f"-{layer + 1}" if layer else ""
