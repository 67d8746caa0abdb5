"""Read-back of written files: decoded independently of the writers, compared voxel by voxel.

NIfTI is decoded by `nifti`, the rectangular copy of a sheared one by SimpleITK, DICOM SEG by
`dicom_seg`. A difference fails the case: nothing wrong is published.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scanloom.core import Segmentation, Volume
from scanloom.core.relations import Relations
from scanloom.io.output import file_names
from scanloom.io.output.case_folder import Counts
from scanloom.io.output.published import files_in
from scanloom.io.readback.mismatch import check_rectangular, count_labels, decoding, mismatch_error
from scanloom.io.readback.nifti import checked_planes, itk_affine, itk_array, same_planes
from scanloom.io.scan import Source
from scanloom.ops.measure import asymmetry_of, resolve_asymmetries, resolve_shares, share_of


def check_names(folder: Path, expected: Collection[str]) -> None:
    """Compare the files of a case folder with the expected ones.

    A file with voxels that is not among the `expected` relative names is a fault too.

    Raises
    ------
    ScanError
        WRITE_MISMATCH, as all functions of this module.
    """
    files = set(files_in(folder))
    missing = set(expected) - files
    extra = {name for name in files if name.endswith((".nii.gz", ".nrrd", ".dcm"))} - set(expected)
    if missing or extra:
        raise mismatch_error(f"{sorted(missing | extra)} missing or not expected")


def check_label_maps(folder: Path, segmentations: Sequence[Segmentation], source: Source) -> Counts:
    """Compare label maps and `segments.json`; return the voxels of each structure."""
    models = [s.model for s in segmentations]
    counts: Counts = {}
    for segmentation in segmentations:
        model, grid = segmentation.model, segmentation.grid
        for n, layer in enumerate(segmentation.layers):
            name = file_names.label_map_name("segmentation", model, models, n)
            with decoding(name):
                planes = checked_planes(folder / name, grid, source)
                voxels = count_labels(same_planes(planes, layer.labels, name), layer.labels.dtype)
            counts |= {(model, s.label): int(voxels[s.number]) for s in layer.structures}
            if grid.sheared:
                name = file_names.label_map_name("segmentation_rect", model, models, n)
                with decoding(name):
                    rect, affine = itk_array(folder / name), itk_affine(folder / name)
                    check_rectangular(rect, affine, layer.labels, grid, name)
    _check_legend(folder, segmentations)
    return counts


def _check_legend(folder: Path, segmentations: Sequence[Segmentation]) -> None:
    """Compare the structures and numbers of `segments.json`."""
    models = [s.model for s in segmentations]
    with decoding(file_names.SEGMENTS):
        files = json.loads((folder / file_names.SEGMENTS).read_text(encoding="utf-8"))["files"]
        written = {
            (file["file"], x["number"]): (x["label"], x["type"]["value"])
            for file in files
            for x in file["structures"]
        }
    expected = {
        (file_names.label_map_name("segmentation", s.model, models, n), x.number): (
            x.label,
            x.type.value,
        )
        for s in segmentations
        for n, layer in enumerate(s.layers)
        for x in layer.structures
    }
    if written != expected:
        raise mismatch_error(f"{file_names.SEGMENTS} names other structures")


def check_measurements(folder: Path, counts: Counts, volume: Volume, relations: Relations) -> None:
    """Compare voxels, volumes and ratios of both tables with the label maps that were decoded."""
    wholes = resolve_shares(relations.shares, list(counts))
    sides_of = resolve_asymmetries(relations.asymmetries, list(counts))
    with decoding(file_names.MEASUREMENTS_CSV):
        with (folder / file_names.MEASUREMENTS_CSV).open(encoding="utf-8", newline="") as file:
            table = list(csv.DictReader(file))
        document = json.loads((folder / file_names.MEASUREMENTS_JSON).read_text(encoding="utf-8"))
        for rows in (table, document["measurements"]):
            measured = {(r["model"], r["label"]): int(r["voxels"]) for r in rows}
            if len(rows) != len(measured) or measured != counts:
                raise mismatch_error("measured voxels are not those of the label map")
            searched = {
                (r["model"], r["label"]): None if "CROP_EMPTY" in r["flags"] else int(r["voxels"])
                for r in rows
            }
            for row in rows:
                ml = int(row["voxels"]) * volume.grid.voxel_volume / 1000
                if not np.isclose(float(row["volume_ml"]), ml, rtol=1e-6, atol=0):
                    raise mismatch_error(f"the volume of {row['label']} is not that of its voxels")
                name = row["model"], row["label"]
                whole, sides = wholes.get(name), sides_of.get(name)
                share = None if whole is None else share_of(name, whole, searched)
                asymmetry = None if sides is None else asymmetry_of(sides, searched)
                for column, terms, value in (
                    ("share", whole, share),
                    ("asymmetry", sides, asymmetry),
                ):
                    is_named = bool(row[f"{column}_of"]) == (terms is not None)
                    if not is_named or not _is_number(row[column], value):
                        detail = f"the {column} of {row['label']} is not that of its voxels"
                        raise mismatch_error(detail)


def _is_number(cell: Any, expected: float | None) -> bool:
    """Return whether a cell of a table is a number, or empty for None."""
    written = None if cell in (None, "") else float(cell)
    if written is None or expected is None:
        return written is expected
    return bool(np.isclose(written, expected, rtol=1e-6, atol=0))
