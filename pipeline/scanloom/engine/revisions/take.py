"""Take corrected labels from a file of another program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid, Reason, ScanError
from scanloom.engine.revisions.publish import Correction, publish_revision
from scanloom.io.output.crosswalk import find_sources, latest_by_id
from scanloom.io.output.file_names import CASE, SEGMENTS
from scanloom.io.output.json_file import read_json
from scanloom.io.output.layout import is_case_name
from scanloom.io.output.measurements import read_measurements
from scanloom.io.output.private import check_links
from scanloom.review.label_files import LabelFile, read_label_file
from scanloom.review.revisions import (
    latest_result,
    read_label_maps,
    revision_number,
)


def take_file(
    out: Path,
    file: Path,
    name: str,
    reviewer: str,
    *,
    model: str | None = None,
    key: Path | None = None,
) -> Path | None:
    """Publish the labels in a file as a revision of a case; None if they are the case's.

    A file of numbers replaces a label map as a whole. A file of named segments replaces the
    structures that it names, and leaves the others; where both claim a voxel, it is the file's.
    Segments of one label map must not overlap.

    Parameters
    ----------
    out : Path
        The output folder.
    file : Path
        NIfTI, NRRD, MetaImage, `.seg.nrrd` or DICOM SEG.
    name : str
        Name of the case folder.
    reviewer : str
        Code of the reviewer.
    model : str or None
        The model whose labels they are, if the case has several.
    key : Path or None
        File with the key of the case ids.

    Raises
    ------
    ScanError
        ID_UNKNOWN; GRID_DIFFERS; LABELS_UNKNOWN; what `read_label_file` and `publish_revision`
        raise.
    """
    check_links(out)
    folder = out / "cases" / name
    if not is_case_name(name) or not folder.is_dir():
        raise ScanError(Reason.ID_UNKNOWN, f"there is no case {name}")
    document = read_json(folder / CASE)
    grid = Grid(tuple(document["grid"]["shape"]), document["grid"]["affine_ras_mm"])
    latest = latest_result(out, name)
    entries = _entries(read_json(latest / SEGMENTS)["files"], model)
    before = read_label_maps(latest)
    label_file = read_label_file(file, grid)
    _check_series(label_file, out, document["case"])
    after = (
        _by_number(label_file, entries)
        if label_file.names is None
        else _by_name(label_file, entries, before)
    )
    changed = {name: array for name, array in after.items() if (array != before[name]).any()}
    if not changed:
        return None
    correction = Correction(changed, reviewer, "file", revision_number(latest))
    return publish_revision(out, name, correction, key)


def _check_series(label_file: LabelFile, out: Path, number: str) -> None:
    """Refuse a DICOM SEG of another series, whose grid may be the same.

    Raises
    ------
    ScanError
        GRID_DIFFERS.
    """
    source = latest_by_id(find_sources(out, [number])).get(number)
    if source is None or not source.series_uid or not label_file.series:
        return
    if source.series_uid not in label_file.series:
        raise ScanError(Reason.GRID_DIFFERS, "the file refers to another series than the case's")


def _entries(files: Sequence[Mapping[str, Any]], model: str | None) -> list[Mapping[str, Any]]:
    """Return the label maps of the model that is meant."""
    models = sorted({entry["model"] for entry in files})
    if model is None and len(models) > 1:
        detail = f"the case has results of {', '.join(models)}: name one with `review --model`"
        raise ScanError(Reason.LABELS_UNKNOWN, detail)
    if model is not None and model not in models:
        raise ScanError(Reason.LABELS_UNKNOWN, f"the case has results of {', '.join(models)} only")
    return [entry for entry in files if model in (None, entry["model"])]


def _by_number(
    label_file: LabelFile, entries: Sequence[Mapping[str, Any]]
) -> dict[str, NDArray[Any]]:
    if len(entries) > 1:
        detail = "the case has several label maps: take a DICOM SEG or .seg.nrrd, which name theirs"
        raise ScanError(Reason.LABELS_UNKNOWN, detail)
    [entry], [labels] = entries, label_file.layers
    known = {structure["number"] for structure in entry["structures"]}
    foreign = sorted(set(np.unique(labels).tolist()) - known - {0})
    if foreign:
        listed = ", ".join(map(str, foreign[:5]))
        raise ScanError(Reason.LABELS_UNKNOWN, f"the case has no structure {listed}")
    return {entry["file"]: labels}


def _by_name(
    label_file: LabelFile, entries: Sequence[Mapping[str, Any]], before: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    places = {
        _plain(word): (entry["file"], structure["number"])
        for entry in entries
        for structure in entry["structures"]
        for word in (structure["name"], structure["label"])
    }
    after = {entry["file"]: before[entry["file"]].copy() for entry in entries}
    names = label_file.names or {}
    if foreign := sorted(name for name in names if _plain(name) not in places):
        listed = ", ".join(repr(name[:40]) for name in foreign[:3])
        raise ScanError(Reason.LABELS_UNKNOWN, f"the case has no structure {listed}")
    targets = {name: places[_plain(name)] for name in names}
    if len(set(targets.values())) < len(targets):
        raise ScanError(Reason.LABELS_UNKNOWN, "two segments name the same structure")
    for file, number in targets.values():
        after[file][after[file] == number] = 0
    painted = {entry["file"]: np.zeros(before[entry["file"]].shape, bool) for entry in entries}
    for name, (layer, value) in names.items():
        file, number = targets[name]
        inside = label_file.layers[layer] == value
        if (inside & painted[file]).any():
            raise ScanError(Reason.LABELS_UNKNOWN, f"segment {name[:40]!r} overlaps another")
        painted[file] |= inside
        after[file][inside] = number
    return after


def _plain(text: str) -> str:
    """Return a name without case, underscores and repeated spaces."""
    return " ".join(text.lower().replace("_", " ").split())


def changed_structures(before: Path, after: Path) -> dict[str, tuple[int, int]]:
    """Return the voxels of each structure before and after a correction, if they differ.

    Parameters
    ----------
    before, after : Path
        Folders of the result that was corrected, and of the revision.
    """
    was, now = (
        {(m.model, m.label): m.voxels for m in read_measurements(folder)}
        for folder in (before, after)
    )
    return {
        label: (was[model, label], n) for (model, label), n in now.items() if was[model, label] != n
    }
