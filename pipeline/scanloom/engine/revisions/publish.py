"""Publish a corrected result as a revision: `OUT/review/revisions/<case>/<number>/`.

A revision is written, read back and published as a case is; the case itself is not touched.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from scanloom.core import (
    Case,
    Code,
    Flag,
    Layer,
    Outputs,
    Reason,
    ScanError,
    Segmentation,
    Series,
    Structure,
)
from scanloom.core.process import lock_file
from scanloom.engine.case.writers import read_back, write_files, writers_of
from scanloom.io.output.case_folder import CaseContent, CaseFolder
from scanloom.io.output.file_names import CASE, SEGMENTS, TIMING
from scanloom.io.output.json_file import read_json, write_document
from scanloom.io.output.private import check_links
from scanloom.io.output.work_folder import clean_up
from scanloom.io.scan import Scan
from scanloom.io.system.disk_errors import output_error
from scanloom.io.system.regular_files import open_descriptor
from scanloom.ops.measure import measure
from scanloom.review.revisions import (
    REVISIONS,
    latest_result,
    read_label_maps,
    revision_folders,
    revision_number,
)
from scanloom.review.sources import read_source

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
    corrected : int
        Number of the revision that was corrected; 0 for the result of the case.
    """

    labels: Mapping[str, NDArray[Any]]
    reviewer: str
    origin: Origin
    corrected: int


def publish_revision(out: Path, name: str, correction: Correction, key: Path | None = None) -> Path:
    """Publish a correction of the latest result of a case.

    One process at a time publishes corrections to an output folder; others wait.

    Parameters
    ----------
    out : Path
        The output folder.
    name : str
        Name of the case folder.
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
        CORRECTED if another correction was published since; what `read_source` raises if
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
    before = latest_result(out, name)
    if revision_number(before) != correction.corrected:
        raise ScanError(Reason.CORRECTED, "the case was corrected by another since")
    labels = read_label_maps(before)
    document = read_json(out / "cases" / name / CASE)
    scan = read_source(out, name, key)
    changed = {
        file: int(np.count_nonzero(array != labels[file]))
        for file, array in correction.labels.items()
    }
    labels |= correction.labels
    segmentations = _segmentations(before, document, labels, scan)
    numbers = [int(folder.name) for folder in revision_folders(out, name)]
    number = max(numbers, default=0) + 1
    revision = {
        "number": number,
        "of_recipe": document["recipe"],
        "reviewer": correction.reviewer,
        "origin": correction.origin,
        "changed_voxels": changed,
    }
    recipe = _recipe(document["recipe"], labels)
    case = Case(
        id=document["case"],
        series=Series(document["source"]["kind"], ()),
        outputs=Outputs(seg=document["outputs"]["seg"], dates=document["outputs"]["dates"]),
        source_hash=document["source"]["hash"],
        recipe=recipe,
    )
    flags = tuple(Flag[each["code"]] for each in document["flags"])
    measurements = [m for s in segmentations for m in measure(s, scan.volume, flags)]
    content = CaseContent(case, scan, segmentations, measurements, flags)
    target = Path(out, *REVISIONS, name, str(number))
    with CaseFolder(out, f"{name}-revision", target=target) as draft:
        _write(draft.path, content, {**document, "recipe": recipe, "revision": revision})
        return draft.publish()


def _write(folder: Path, content: CaseContent, document: dict[str, Any]) -> None:
    writers = writers_of(content.case.outputs)
    write_files(folder, content, writers)
    write_document(folder / CASE, document)
    read_back(folder, content, writers)
    write_document(folder / TIMING, {"steps": {}})


def _segmentations(
    folder: Path, document: Mapping[str, Any], labels: Mapping[str, NDArray[Any]], scan: Scan
) -> Sequence[Segmentation]:
    """Return the corrected segmentations, by the structures of the result before."""
    versions = {
        m["name"]: m["version"] for m in (*document["models"], *document.get("results", []))
    }
    layers: dict[str, list[Layer]] = {}
    for entry in read_json(folder / SEGMENTS)["files"]:
        structures = tuple(map(structure_from_plain, entry["structures"]))
        highest = max(s.number for s in structures)
        dtype = np.uint8 if highest < 256 else np.uint16
        array = np.asfortranarray(labels[entry["file"]], dtype)
        layers.setdefault(entry["model"], []).append(Layer(array, structures))
    grid = scan.volume.grid
    return [
        Segmentation(model, tuple(each), grid, versions.get(model, ""), corrected=True)
        for model, each in layers.items()
    ]


def structure_from_plain(plain: Mapping[str, Any]) -> Structure:
    """Return the structure in an entry of `segments.json`."""
    side = plain["laterality"]
    red, green, blue = plain["color"]
    return Structure(
        plain["label"],
        plain["number"],
        plain["name"],
        Code(**plain["category"]),
        Code(**plain["type"]),
        (red, green, blue),
        Code(**side) if side else None,
        plain["experimental"],
    )


def _recipe(recipe: str, labels: Mapping[str, NDArray[Any]]) -> str:
    """Return the hash from which the DICOM UIDs of a revision follow: of recipe and labels."""
    digest = hashlib.sha256(recipe.encode())
    for name in sorted(labels):
        digest.update(name.encode())
        digest.update(np.asfortranarray(labels[name]).tobytes(order="F"))
    return digest.hexdigest()
