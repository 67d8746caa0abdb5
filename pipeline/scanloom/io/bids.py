"""A BIDS derivative beside the results: label maps as `dseg`, subjects named by case ids.

The Brain Imaging Data Structure (bids-specification.readthedocs.io, 1.10, "Derivatives: imaging")
names files, tables and sidecars so that other programs find them. It knows no CT: label maps stand
under `anat`. Nothing in it says more of a person than `cases/` does.
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
from scanloom.io.failures import has_failed
from scanloom.io.names import SEGMENTS
from scanloom.io.outfolder import each_case, read_case
from scanloom.io.tables import write_json

BIDS = "bids"
BIDS_VERSION = "1.10.0"
_DESCRIPTION = "dataset_description.json"
_README = """# Segmentations by scanloom

Label maps of scans, one subject a scan: what a subject is called is a keyed hash, which whoever
holds the crosswalk of the run can follow to its source. Research software: not a medical device,
not for diagnosis or treatment.
"""


def write_bids(out: Path, version: str, damaged: set[str] | None = None) -> Path:
    """Write `OUT/bids` anew from what was published.

    Parameters
    ----------
    out : Path
        The output folder.
    version : str
        Scanloom's.
    damaged : set of str, optional
        Gets the names of published cases that can't be read, and are left out.

    Returns
    -------
    Path
        The folder, there whole or as it was. Label maps are links to those of `cases/` where the
        file system knows links, copies elsewhere.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if a data set that is not scanloom's is there.
    OSError
        If the derivative can't be written.
    """
    check_bids(out)
    folder, word = out / BIDS, secrets.token_hex(4)
    draft, old = out / ".work" / f"bids-{word}", out / ".work" / f"bids-{word}-old"
    try:
        draft.mkdir(parents=True)
        subjects = []
        for one in each_case(out, _read_subject, set() if damaged is None else damaged):
            subjects.append(f"sub-{_alphanumeric(one.case.name)}")
            _write_subject(draft / subjects[-1] / "anat", subjects[-1], one)
        _write_dataset(draft, subjects, version)
        if folder.exists():
            folder.rename(old)
        draft.rename(folder)
    finally:
        for leftover in (draft, old):
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
        detail = f"{BIDS} is there already, and scanloom did not write it: name another --out"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail)


def has_bids(out: Path) -> bool:
    """Whether `OUT/bids` is there, and says that scanloom wrote it."""
    try:
        told = json.loads((out / BIDS / _DESCRIPTION).read_text(encoding="utf-8"))
        return any(maker["Name"] == "scanloom" for maker in told["GeneratedBy"])
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
    told = {"participant_id": {"Description": "A scan, by its case id"}}
    write_json(folder / "participants.json", told)


@dataclass(frozen=True)
class _Subject:
    """A published case: what it says of itself, and which label maps it has."""

    case: Path
    told: dict[str, Any]
    models: dict[str, dict[str, Any]]
    files: list[dict[str, Any]]


def _read_subject(case: Path) -> _Subject:
    told = read_case(case)
    files = json.loads((case / SEGMENTS).read_text(encoding="utf-8"))["files"]
    for file in files:
        (case / file["file"]).stat()
    return _Subject(case, told, {model["name"]: model for model in told["models"]}, files)


def _write_subject(folder: Path, subject: str, one: _Subject) -> None:
    folder.mkdir(parents=True)
    taken: set[str] = set()
    later = has_failed(one.case.parent.parent, str(one.told["case"]))
    outdated = [Flag.OUTDATED.code] if later else []
    for file in one.files:
        layer = re.search(r"segmentation-(\d+)\.nii\.gz$", file["file"])
        name = _alphanumeric(file["model"]) + (f"layer{layer[1]}" if layer else "")
        while name in taken:
            name += "x"  # two models whose names differ by a dash
        taken.add(name)
        stem = folder / f"{subject}_seg-{name}_dseg"
        _link(one.case / file["file"], stem.with_name(f"{stem.name}.nii.gz"))
        sidecar = _sidecar(one.models[file["model"]], one.told, outdated)
        write_json(stem.with_name(f"{stem.name}.json"), sidecar)
        _write_tsv(
            stem.with_name(f"{stem.name}.tsv"),
            ("index", "name", "color"),
            _rows(file["structures"]),
        )


def _sidecar(
    model: dict[str, Any], told: dict[str, Any], outdated: Sequence[str]
) -> dict[str, Any]:
    return {
        "Description": f"Segmentation by {model['name']} {model['version']}",
        "Manual": False,
        "ModelWeightsSHA256": model["weights_sha256"],
        "SourceModality": told["source"]["modality"] or "unknown",
        "Flags": [*(flag["code"] for flag in told["flags"]), *outdated],
    }


def _rows(structures: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the lookup table, with what is no structure; colours as #rrggbb."""
    known = [
        (s["number"], s["label"], "#{:02x}{:02x}{:02x}".format(*s["color"])) for s in structures
    ]
    return [("0", "background", "#000000"), *((str(n), name, c) for n, name, c in sorted(known))]


def _write_tsv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, delimiter="\t", lineterminator="\n")
        lines.writerow(columns)
        lines.writerows(rows)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _alphanumeric(text: str) -> str:
    """Return what may stand in a BIDS label."""
    return re.sub(r"[^A-Za-z0-9]", "", text)
