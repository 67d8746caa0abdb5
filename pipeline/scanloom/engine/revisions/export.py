"""Export accepted and corrected results as images and labels for training."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scanloom.core import Reason, ScanError
from scanloom.io.output.file_names import CASE, SEGMENTS
from scanloom.io.output.json_file import read_json, write_json
from scanloom.io.output.layout import published_cases
from scanloom.io.system.atomic_write import temporary_path
from scanloom.io.system.disk_errors import output_error
from scanloom.io.write.nifti import write_image
from scanloom.review.corrections.revisions import latest_result, revision_number
from scanloom.review.sources import read_unchanged_source
from scanloom.review.verdicts.log import current_verdicts, read_verdicts
from scanloom.review.verdicts.results import seen_of
from scanloom.review.verdicts.verdict import Verdict

DATASET = "dataset.json"


def export(out: Path, folder: Path, key: Path | None = None) -> dict[str, str]:
    """Write images, labels and `dataset.json` of accepted and corrected cases.

    A case counts if its latest result was accepted by all who decided on it, or if it was
    corrected and nobody rejected the correction.

    Parameters
    ----------
    out : Path
        The output folder.
    folder : Path
        Folder to be made; it must not exist.
    key : Path or None
        File with the key of the case ids.

    Returns
    -------
    dict
        Why a case that counts is left out, by its name: its scan can't be read.

    Raises
    ------
    ScanError
        NOT_FOUND if no case counts; OUTPUT_UNWRITABLE if the folder exists; DISK_FULL.
    """
    if folder.exists():
        raise ScanError(Reason.OUTPUT_UNWRITABLE, "the export folder exists", str(folder))
    current = current_verdicts(read_verdicts(out))
    chosen = [
        result
        for case in published_cases(out)
        if counts(result := latest_result(out, case.name), current.get(case.name, {}))
    ]
    if not chosen:
        raise ScanError(Reason.NOT_FOUND, "no case is accepted or corrected")
    draft, left_out, entries = temporary_path(folder), dict[str, str](), list[dict[str, Any]]()
    try:
        for name in ("images", "labels"):
            (draft / name).mkdir(parents=True)
        for result in chosen:
            name = case_name(result)
            try:
                entries.append(_export(out, result, draft, key))
            except ScanError as error:
                left_out[name] = error.code
        write_json(draft / DATASET, _dataset(out, chosen, entries))
        draft.rename(folder)
    except OSError as exc:
        raise output_error(exc, "the export") from exc
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return left_out


def counts(result: Path, verdicts: Mapping[str, Verdict]) -> bool:
    """Return whether a result is exported, by the verdicts about it that count."""
    seen = seen_of(result)
    decisions = {each.decision for each in verdicts.values() if each.seen == seen}
    if revision_number(result):
        return decisions <= {"accept"}
    return decisions == {"accept"}


def case_name(result: Path) -> str:
    """Return the name of the case of a result's folder."""
    return result.parent.name if revision_number(result) else result.name


def _export(out: Path, result: Path, draft: Path, key: Path | None) -> dict[str, Any]:
    """Write the image and the label maps of a case; return its entry."""
    name = case_name(result)
    scan = read_unchanged_source(out, name, key)
    write_image(scan.volume, scan.source, draft / "images" / f"{name}.nii.gz")
    files = [entry["file"] for entry in read_json(result / SEGMENTS)["files"]]
    labels = {}
    for file in files:
        target = f"labels/{name}.nii.gz" if len(files) == 1 else f"labels/{name}-{file}"
        shutil.copyfile(result / file, draft / target)
        labels[file] = f"./{target}"
    one = {"label": labels[files[0]]} if len(files) == 1 else {"labels": labels}
    number = revision_number(result)
    return {"image": f"./images/{name}.nii.gz", **one, "case": name, "revision": number}


def _dataset(out: Path, chosen: list[Path], entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return `dataset.json` as of the Medical Segmentation Decathlon and nnU-Net."""
    structures = {
        structure["label"]: structure["number"]
        for result in chosen
        for entry in read_json(result / SEGMENTS)["files"]
        for structure in entry["structures"]
    }
    modalities = {
        str(read_json(out / "cases" / case_name(result) / CASE)["source"]["modality"])
        for result in chosen
    }
    return {
        "name": "scanloom review",
        "channel_names": {"0": " ".join(sorted(modalities))},
        "labels": {"background": 0, **dict(sorted(structures.items(), key=lambda each: each[1]))},
        "numTraining": len(entries),
        "file_ending": ".nii.gz",
        "training": entries,
    }
