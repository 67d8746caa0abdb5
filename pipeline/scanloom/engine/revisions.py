"""Corrected results: published as revisions of a case.

A revision is `OUT/review/revisions/<case>/<number>/`. It is written, read back and published as a
case is; the case itself is not touched. Its labels were corrected in the browser, or come from a
file of another program.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.check import check_measurement
from scanloom.cards.codes import structure_of_entry
from scanloom.core import (
    Case,
    Flag,
    Grid,
    Layer,
    Measurement,
    Outputs,
    Reason,
    Relations,
    ScanError,
    Segmentation,
    Series,
)
from scanloom.core.process import lock_file
from scanloom.core.relations import Asymmetry, Share
from scanloom.engine.case.differences import outputs_document
from scanloom.engine.case.writers import read_back, write_files, writers_of
from scanloom.io.identity import read_key
from scanloom.io.output.audit import AuditTrail
from scanloom.io.output.case_folder import CaseContent, CaseFolder
from scanloom.io.output.crosswalk import find_sources, latest_by_id
from scanloom.io.output.file_names import CASE, TIMING
from scanloom.io.output.json_file import read_json, write_document
from scanloom.io.output.layout import case_folder, is_case_name, listed_label_maps
from scanloom.io.output.measurements import read_measurements
from scanloom.io.output.private import check_links
from scanloom.io.output.work_folder import clean_up
from scanloom.io.scan import Scan
from scanloom.io.system.disk_errors import output_error
from scanloom.io.system.regular_files import open_descriptor
from scanloom.ops.measure import add_ratios, measure
from scanloom.review.label_files import LabelFile, read_label_file
from scanloom.review.report.data import references_of
from scanloom.review.revisions import (
    REVISIONS,
    latest_result,
    read_label_maps,
    revision_folders,
)
from scanloom.review.sources import read_source
from scanloom.review.verdicts.verdict import Seen, seen_of

Origin = Literal["brush", "file"]
STALE_AFTER_S = 86_400.0
"""Age at which temporary files of processes that were killed are removed."""


@dataclass(frozen=True)
class Correction:
    """Changes that a person made.

    Parameters
    ----------
    labels : mapping
        Corrected label maps (I, J, K), by the file of the case that they replace.
    reviewer : str
        Code of the reviewer.
    origin : "brush" or "file"
        How it was made.
    seen : Seen
        The result, of the case or a revision, that was corrected.
    """

    labels: Mapping[str, NDArray[Any]]
    reviewer: str
    origin: Origin
    seen: Seen


def publish_revision(out: Path, name: str, correction: Correction, key: Path | None) -> Path:
    """Publish a correction of the latest result of a case.

    One process at a time publishes corrections to an output folder; others wait.

    Parameters
    ----------
    out, name
        The output folder, and the name of the case folder.
    correction : Correction
    key : Path or None
        File with the key of the case ids: the scan is read for measurements and DICOM SEG.

    Returns
    -------
    Path
        The folder of the revision.

    Raises
    ------
    ScanError
        CORRECTED if the result was corrected or replaced since; what `read_source` raises if
        the scan can't be read or was changed; RESULT_DAMAGED; WRITE_MISMATCH; DISK_FULL or
        OUTPUT_UNWRITABLE. Then nothing is published.
    """
    try:
        check_links(out)
        with _locked(Path(out, *REVISIONS)):
            clean_up(out, time.time() - STALE_AFTER_S)
            return _publish(out, name, correction, key)
    except OSError as exc:
        raise output_error(exc, "the revision") from exc


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = open_descriptor(folder, os.O_RDONLY)
    try:
        lock_file(descriptor)
        yield
    finally:
        os.close(descriptor)


def _publish(out: Path, name: str, correction: Correction, key: Path | None) -> Path:
    document = read_json(case_folder(out, name) / CASE)
    before = latest_result(out, name)
    labels = read_label_maps(before)
    # Within the lock: of two corrections of one result, the second would undo the first. After all
    # was read: what a run replaced meanwhile must not be taken for the result that was corrected
    if seen_of(before) != correction.seen:
        raise ScanError(Reason.CORRECTED, "the result was corrected or replaced by another since")
    scan = read_source(out, name, key)
    number = 1 + max((int(folder.name) for folder in revision_folders(out, name)), default=0)
    revision = {
        "number": number,
        "of_recipe": document["recipe"],
        "reviewer": correction.reviewer,
        "origin": correction.origin,
        "changed_voxels": {
            file: int(np.count_nonzero(array != labels[file]))
            for file, array in correction.labels.items()
        },
    }
    labels |= correction.labels
    segmentations = _segmentations(before, document, labels, scan)
    recipe = _recipe(document["recipe"], labels)
    requested = document["outputs"]
    case = Case(
        id=document["case"],
        series=Series(document["source"]["kind"], ()),
        outputs=Outputs(
            seg=requested["seg"],
            dates=requested["dates"],
            structures=tuple(requested.get("structures", ())),
        ),
        source_hash=document["source"]["hash"],
        recipe=recipe,
        relations=_ratios(document),
    )
    flags = tuple(Flag[each["code"]] for each in document["flags"])
    flags = tuple(flag for flag in flags if flag is not Flag.EMPTY)  # of the labels before
    # a flag of the case may be that of one model's result only, such as an empty crop
    flags_before = {(m.model, m.label): m.flags for m in read_measurements(before)}
    measurements = list[Measurement]()
    for each in segmentations:
        ranges = each.reference_ranges
        labels_of_model = {usual.structure for usual in ranges}
        for m in measure(each, scan.volume):
            unusual = check_measurement(m, ranges, labels_of_model)
            own = flags_before.get((m.model, m.label), flags)
            of_case = (flag for flag in flags if flag in own)
            measurements.append(replace(m, flags=(*m.flags, *unusual, *of_case)))
    measurements = list(add_ratios(measurements, case.relations))
    if not any(m.voxels for m in measurements):
        flags = (*flags, Flag.EMPTY)
    content = CaseContent(case, scan, segmentations, measurements, flags)
    target = Path(out, *REVISIONS, name, str(number))
    writers = writers_of(case.outputs)
    audit = AuditTrail(out, read_key(key))
    with CaseFolder(out, f"{name}-revision", target=target, audit=audit) as draft:
        write_files(draft.path, content, writers)
        outputs = outputs_document(case.outputs)  # without the files on request of the result
        of_revision = {
            "outputs": outputs,
            "recipe": recipe,
            "revision": revision,
            "flags": [{"code": flag.code, "text": flag.text} for flag in flags],
        }
        write_document(draft.path / CASE, {**document, **of_revision})
        read_back(draft.path, content, writers)  # before `timing.json`, which has no checksum
        write_document(draft.path / TIMING, {"steps": {}})
        return draft.publish()


def _segmentations(
    folder: Path, document: Mapping[str, Any], labels: Mapping[str, NDArray[Any]], scan: Scan
) -> Sequence[Segmentation]:
    """Return the corrected segmentations, by the structures of the result before."""
    versions = {
        m["name"]: m["version"] for m in (*document["models"], *document.get("results", []))
    }
    ranges = {m["name"]: references_of(m) for m in document["models"]}
    for result in document.get("results", []):
        ranges[result["name"]] = tuple(r for name in result["models"] for r in ranges[name])
    layers: dict[str, list[Layer]] = {}
    for entry in listed_label_maps(folder):
        structures = tuple(map(structure_of_entry, entry["structures"]))
        highest = max(s.number for s in structures)
        dtype = np.uint8 if highest < 256 else np.uint16
        array = np.asfortranarray(labels[entry["file"]], dtype)
        layers.setdefault(entry["model"], []).append(Layer(array, structures))
    grid = scan.volume.grid
    return [
        Segmentation(
            model,
            tuple(each),
            grid,
            versions.get(model, ""),
            corrected=True,
            reference_ranges=ranges.get(model, ()),
        )
        for model, each in layers.items()
    ]


def _ratios(document: Mapping[str, Any]) -> Relations:
    """Return the shares and asymmetries that the workflow of a case asked for."""
    asked = document.get("relations", {})
    return Relations(
        shares=tuple(
            Share(tuple(each["of"]), tuple(each["structures"])) for each in asked.get("shares", ())
        ),
        asymmetries=tuple(
            Asymmetry(tuple(each["left"]), tuple(each["right"]))
            for each in asked.get("asymmetries", ())
        ),
    )


def _recipe(recipe: str, labels: Mapping[str, NDArray[Any]]) -> str:
    """Return the hash from which the DICOM UIDs of a revision follow: of recipe and labels."""
    digest = hashlib.sha256(recipe.encode())
    # In an order of its own: the same labels have the same UIDs
    for name in sorted(labels):
        digest.update(name.encode())
        digest.update(np.asfortranarray(labels[name]).tobytes(order="F"))
    return digest.hexdigest()


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
    out, name
        The output folder, and the name of the case folder.
    file : Path
        NIfTI, NRRD, MetaImage, `.seg.nrrd` or DICOM SEG.
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
    if not is_case_name(name) or not (folder := case_folder(out, name)).is_dir():
        raise ScanError(Reason.ID_UNKNOWN, f"there is no case {name}")
    latest = latest_result(out, name)
    try:  # before its labels are read: what a run puts in its place meanwhile is not what was seen
        document = read_json(folder / CASE)
        grid = Grid(tuple(document["grid"]["shape"]), document["grid"]["affine_ras_mm"])
        seen, entries = seen_of(latest), listed_label_maps(latest)
    except (ValueError, LookupError, TypeError) as exc:
        detail = f"a document of {latest.parent.name}/{latest.name} is damaged"
        raise ScanError(Reason.RESULT_DAMAGED, detail) from exc
    model = _one_model(entries, model)
    entries = [entry for entry in entries if entry["model"] == model]
    before = read_label_maps(latest)
    label_file = read_label_file(file, grid)
    source = latest_by_id(find_sources(out, [document["case"]])).get(document["case"])
    uid = source.series_uid if source else ""
    # A DICOM SEG names its series, since the grid of another may be the same
    if uid and label_file.series and uid not in label_file.series:
        raise ScanError(Reason.GRID_DIFFERS, "the file refers to another series than the case's")
    after = (
        _by_number(label_file, entries)
        if label_file.names is None
        else _by_name(label_file, entries, before)
    )
    changed = {name: array for name, array in after.items() if (array != before[name]).any()}
    if not changed:
        return None
    correction = Correction(changed, reviewer, "file", seen)
    return publish_revision(out, name, correction, key)


def _one_model(files: Iterable[Mapping[str, Any]], model: str | None) -> str | None:
    """Return the model of some label maps: numbers of two models mean different things."""
    models = sorted({entry["model"] for entry in files})
    results = f"the case has results of {', '.join(models)}"
    if model is None and len(models) > 1:
        raise ScanError(Reason.LABELS_UNKNOWN, f"{results}: name one with `review --model`")
    if model is not None and models and model not in models:
        raise ScanError(Reason.LABELS_UNKNOWN, f"{results} only")
    return model if model is not None else next(iter(models), None)


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
        _plain(text): (entry["file"], structure["number"])
        for entry in entries
        for structure in entry["structures"]
        for text in (structure["name"], structure["label"])
    }
    after = {entry["file"]: before[entry["file"]].copy() for entry in entries}
    names = label_file.names or {}
    if foreign := sorted(name for name in names if _plain(name) not in places):
        listed = ", ".join(repr(name[:40]) for name in foreign[:3])
        raise ScanError(Reason.LABELS_UNKNOWN, f"the case has no structure {listed}")
    targets = {name: places[_plain(name)] for name in names}
    if len(set(targets.values())) < len(targets):
        raise ScanError(Reason.LABELS_UNKNOWN, "two segments name the same structure")
    # All named structures are erased first: one may move to where another was
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
    """Return a name without case, underscores, repeated spaces and what `.seg.nrrd` can't hold."""
    return " ".join(re.sub(r"[_~^|\\]", " ", text.lower()).split())


def changed_structures(before: Path, after: Path) -> dict[str, tuple[int, int]]:
    """Return the voxels of each structure in two results, by folder, if they differ."""
    was, now = (
        {(m.model, m.label): m.voxels for m in read_measurements(folder)}
        for folder in (before, after)
    )
    return {
        label: (was[model, label], n) for (model, label), n in now.items() if was[model, label] != n
    }
