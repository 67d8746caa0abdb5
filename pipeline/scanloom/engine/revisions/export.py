"""Export accepted and corrected results as images and labels for training."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scanloom.core import Reason, ScanError
from scanloom.io.output.file_names import CASE, SEGMENTS
from scanloom.io.output.json_file import read_json, write_json
from scanloom.io.output.layout import identity_of, published_cases
from scanloom.io.output.private import check_links
from scanloom.io.output.published import check_files
from scanloom.io.system.atomic_write import private_draft
from scanloom.io.system.disk_errors import output_error
from scanloom.io.system.regular_files import open_regular_file
from scanloom.io.write.nifti import write_image
from scanloom.review.revisions import latest_result, revision_number
from scanloom.review.sources import read_source
from scanloom.review.verdicts.log import current_verdicts, read_verdicts
from scanloom.review.verdicts.verdict import Verdict, seen_of

DATASET = "dataset.json"


def export(
    out: Path, folder: Path, key: Path | None = None, *, model: str | None = None
) -> dict[str, str]:
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
    model : str or None
        The model whose labels are exported, if the cases have results of several.

    Returns
    -------
    dict of str to str
        Why a case that counts is left out, by its name: its scan can't be read or was changed, or
        its result is damaged.

    Raises
    ------
    ScanError
        NOT_REVIEWED if no case counts; LABELS_UNKNOWN if there are results of several models, or a
        number stands for different structures; OUTPUT_UNWRITABLE if the folder exists; DISK_FULL.
    """
    check_links(out)
    if folder.exists():
        raise ScanError(Reason.OUTPUT_UNWRITABLE, "the export folder exists", str(folder))
    left_out = dict[str, str]()
    chosen = {r: _files_of(r) for r in _results(out, left_out)}
    model = _one_model(chosen.values(), model)
    chosen = {r: own for r, f in chosen.items() if (own := [e for e in f if e["model"] == model])}
    if not chosen and not left_out:
        raise ScanError(Reason.NOT_REVIEWED, "no case is accepted or corrected")
    structures = _structures(chosen.values())
    entries = list[dict[str, Any]]()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with private_draft(folder) as draft:
            for name in ("images", "labels"):
                (draft / name).mkdir(parents=True)
            for result, files in chosen.items():
                try:
                    entries.append(_export(out, result, files, draft, key))
                except ScanError as error:
                    left_out[case_name(result)] = error.code
            write_json(draft / DATASET, _dataset(out, chosen, structures, entries))
            draft.rename(folder)
    except OSError as exc:
        raise output_error(exc, "the export") from exc
    return left_out


def _results(out: Path, left_out: dict[str, str]) -> Iterator[Path]:
    """Yield the latest result of each case that counts; damaged ones are left out."""
    current = current_verdicts(read_verdicts(out))
    for case in published_cases(out):
        result = latest_result(out, case.name)
        try:
            if not counts(result, current.get(case.name, {})):
                continue
            check_files(result)
        except (OSError, ValueError, LookupError, TypeError):
            left_out[case.name] = Reason.RESULT_DAMAGED.name
        else:
            yield result


def _files_of(result: Path) -> list[dict[str, Any]]:
    """Return the entries of the label maps of a result."""
    files: list[dict[str, Any]] = read_json(result / SEGMENTS)["files"]
    return files


def _one_model(results: Iterable[list[dict[str, Any]]], model: str | None) -> str | None:
    """Return the model whose labels are exported: numbers of two models mean different things."""
    models = sorted({entry["model"] for files in results for entry in files})
    if model is None and len(models) > 1:
        detail = f"there are results of {', '.join(models)}: name one with --model"
        raise ScanError(Reason.LABELS_UNKNOWN, detail)
    if model is not None and models and model not in models:
        raise ScanError(Reason.LABELS_UNKNOWN, f"there are results of {', '.join(models)} only")
    return model if model is not None else next(iter(models), None)


def _structures(results: Iterable[list[dict[str, Any]]]) -> dict[str, int]:
    """Return the number of each structure, which must be the same in all results."""
    pairs = {
        (structure["number"], structure["label"])
        for files in results
        for entry in files
        for structure in entry["structures"]
    }
    for each in zip(*pairs, strict=True):
        if len(set(each)) < len(pairs):
            detail = "cases have different numbers for one structure: compute them by one model"
            raise ScanError(Reason.LABELS_UNKNOWN, detail)
    return {label: number for number, label in sorted(pairs)}


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


def _export(
    out: Path, result: Path, entries: list[dict[str, Any]], draft: Path, key: Path | None
) -> dict[str, Any]:
    """Write the image and the label maps of a case; return its entry."""
    name = case_name(result)
    scan = read_source(out, name, key)
    write_image(scan.volume, scan.source, draft / "images" / f"{name}.nii.gz")
    files = [entry["file"] for entry in entries]
    labels = {}
    for file in files:
        if identity_of((result / file).relative_to(out)) != "shapes":
            raise ScanError(Reason.RESULT_DAMAGED, "a file that is no label map is named as one")
        target = f"labels/{name}.nii.gz" if len(files) == 1 else f"labels/{name}-{file}"
        with open_regular_file(result / file) as stored, (draft / target).open("xb") as copy:
            shutil.copyfileobj(stored, copy)
        labels[file] = f"./{target}"
    description = {"label": labels[files[0]]} if len(files) == 1 else {"labels": labels}
    number = revision_number(result)
    return {"image": f"./images/{name}.nii.gz", **description, "case": name, "revision": number}


def _dataset(
    out: Path,
    results: Iterable[Path],
    structures: Mapping[str, int],
    entries: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return `dataset.json` as of the Medical Segmentation Decathlon and nnU-Net."""
    modalities = {
        str(read_json(out / "cases" / case_name(result) / CASE)["source"]["modality"])
        for result in results
    }
    return {
        "name": "scanloom review",
        "channel_names": {"0": " ".join(sorted(modalities))},
        "labels": {"background": 0, **structures},
        "numTraining": len(entries),
        "file_ending": ".nii.gz",
        "training": entries,
    }
