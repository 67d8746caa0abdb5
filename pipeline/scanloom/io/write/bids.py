"""Writes the results as a BIDS derivative: label maps as `dseg`, subjects named by case ids.

The Brain Imaging Data Structure (bids-specification.readthedocs.io, 1.10, "Derivatives: imaging")
defines names of files, tables and sidecars so that other programs find them. It has no data type
for CT: label maps are in `anat`. The derivative identifies patients no more than `cases/` does.
"""

from __future__ import annotations

import csv
import json
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scanloom.core import Flag, Reason, ScanError
from scanloom.io.output.failures import has_failed
from scanloom.io.output.json_file import MAX_DOCUMENT_BYTES, write_json
from scanloom.io.output.layout import iter_cases, listed_label_maps, output_of
from scanloom.io.output.work_folder import make_work_folder
from scanloom.io.system.regular_files import open_regular_file, read_regular_file

BIDS = "bids"
BIDS_VERSION = "1.10.0"
_DESCRIPTION = "dataset_description.json"
_README = """# Segmentations by scanloom

Label maps of scans, one subject per scan. The name of a subject is a keyed hash; the crosswalk of
the run maps it to the source. Edit copies of the label maps only: these may be hard links to the
files of the results. Research software: not a medical device, not for diagnosis or treatment.
"""


def write_bids(out: Path, version: str, damaged: set[str] | None = None) -> Path:
    """Rebuild `OUT/bids` from the published cases.

    Names of published cases that can't be read, and are left out, are added to `damaged`.

    Returns
    -------
    Path
        The folder. It is replaced as a whole; if writing fails, the old one stays. Label maps are
        hard links to the files of `cases/`, or copies if the file system has no hard links.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if `OUT/bids` was not written by scanloom.
    OSError
        If the derivative can't be written.
    """
    check_bids(out)
    folder, token = out / BIDS, secrets.token_hex(4)
    new, old = out / ".work" / f"bids-{token}", out / ".work" / f"bids-{token}-old"
    try:
        make_work_folder(out, new.name)
        names = []
        for subject in iter_cases(out, _read_subject, set() if damaged is None else damaged):
            name = f"sub-{subject.document['case']}"
            _write_subject(new / name / "anat", name, subject)
            names.append(name)
        _write_dataset(new, names, version)
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
    finally:
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
    return folder


def check_bids(out: Path) -> None:
    """Refuse to replace an `OUT/bids` that scanloom did not write.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE.
    """
    if os.path.lexists(out / BIDS) and not has_bids(out):
        detail = f"{BIDS} already exists and was not written by scanloom: use another --out"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail)


def has_bids(out: Path) -> bool:
    """Return whether `OUT/bids` exists and its description names scanloom as its generator."""
    try:
        description = json.loads(read_regular_file(out / BIDS / _DESCRIPTION, MAX_DOCUMENT_BYTES))
        return any(generator["Name"] == "scanloom" for generator in description["GeneratedBy"])
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _write_dataset(folder: Path, subjects: Sequence[str], version: str) -> None:
    description = {
        "Name": "Segmentations by scanloom",
        "BIDSVersion": BIDS_VERSION,
        "DatasetType": "derivative",
        "GeneratedBy": [{"Name": "scanloom", "Version": version}],
    }
    write_json(folder / _DESCRIPTION, description)
    (folder / "README.md").write_text(_README, encoding="utf-8")
    _write_tsv(folder / "participants.tsv", ("participant_id",), [(s,) for s in subjects])
    columns = {"participant_id": {"Description": "A scan, by its case id"}}
    write_json(folder / "participants.json", columns)


@dataclass(frozen=True)
class _Subject:
    """A published case: its folder, its `case.json`, and its label maps from `segments.json`.

    `models` are its models, and results of several models, by name.
    """

    case: Path
    document: dict[str, Any]
    models: dict[str, dict[str, Any]]
    files: list[dict[str, Any]]


def _read_subject(case: Path, document: dict[str, Any], _: dict[str, Any]) -> _Subject:
    files = listed_label_maps(case)
    for file in files:
        open_regular_file(case / file["file"]).close()
    results = [*document["models"], *document.get("results", ())]
    return _Subject(case, document, {result["name"]: result for result in results}, files)


def _write_subject(folder: Path, name: str, subject: _Subject) -> None:
    folder.mkdir(parents=True)
    taken: set[str] = set()
    failed_later = has_failed(output_of(subject.case), str(subject.document["case"]))
    outdated = [Flag.OUTDATED.code] if failed_later else []
    for file in subject.files:
        layer = re.search(r"segmentation-(\d+)\.nii\.gz$", file["file"])
        label = _alphanumeric(file["model"]) + (f"layer{layer[1]}" if layer else "")
        while label in taken:
            label += "x"  # two models whose names differ by a dash
        taken.add(label)
        stem = folder / f"{name}_seg-{label}_dseg"
        _link(subject.case / file["file"], stem.with_name(f"{stem.name}.nii.gz"))
        sidecar = _sidecar(subject, file["model"], outdated)
        write_json(stem.with_name(f"{stem.name}.json"), sidecar)
        _write_tsv(
            stem.with_name(f"{stem.name}.tsv"),
            ("index", "name", "color"),
            _rows(file["structures"]),
        )


def _sidecar(subject: _Subject, result: str, outdated: Sequence[str]) -> dict[str, Any]:
    """Return the JSON sidecar of a label map."""
    document, model = subject.document, subject.models[result]
    weights = model.get("weights_sha256") or [
        subject.models[name]["weights_sha256"] for name in model["models"]
    ]
    return {
        "Description": f"Segmentation by {model['name']} {model['version']}".strip(),
        "Manual": False,
        "ModelWeightsSHA256": weights,
        "SourceModality": document["source"]["modality"] or "unknown",
        "Flags": [*(flag["code"] for flag in document["flags"]), *outdated],
    }


def _rows(structures: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows of the lookup table, background first; colours as #rrggbb."""
    rows = [
        (s["number"], s["label"], "#{:02x}{:02x}{:02x}".format(*s["color"])) for s in structures
    ]
    return [("0", "background", "#000000"), *((str(n), name, c) for n, name, c in sorted(rows))]


def _write_tsv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, delimiter="\t", lineterminator="\n")
        lines.writerow(columns)
        lines.writerows(rows)


def _link(source: Path, target: Path) -> None:
    """Create a hard link, or a copy if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target, follow_symlinks=False)


def _alphanumeric(text: str) -> str:
    """Return the letters and digits of a text, which a BIDS label consists of."""
    return re.sub(r"[^A-Za-z0-9]", "", text)
