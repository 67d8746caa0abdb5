"""Training data from results: images and labels of reviewed cases, for MONAI and for nnU-Net.

Patients are split by a keyed hash: a patient who was set aside for testing stays so, however many
results are added later. The dataset is built beside its folder and renamed, and names cases by
their ids.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid, Reason, ScanError, Series, did_you_mean, is_passing
from scanloom.core.process import lock_file
from scanloom.io.formats import FORMATS
from scanloom.io.identity import patient_share
from scanloom.io.index.series import find_series
from scanloom.io.output.crosswalk import (
    SourceRecord,
    case_folders,
    find_sources,
    known_ids,
    latest_by_id,
)
from scanloom.io.output.file_names import CASE, SCAN_COPY, TIMING
from scanloom.io.output.json_file import read_json, write_document, write_json
from scanloom.io.output.layout import (
    Owners,
    listed_label_maps,
    no_results,
    published_cases,
    read_case,
)
from scanloom.io.output.private import check_links, read_key_of
from scanloom.io.output.published import FILE_STAMPS, SOURCE_STAMP, check_files
from scanloom.io.scan import GridOnlySource, Scan
from scanloom.io.system.atomic_write import fsync_path, private_draft
from scanloom.io.system.disk_errors import output_error
from scanloom.io.system.regular_files import open_descriptor, open_regular_file, sha256_of
from scanloom.io.write.nifti import LABEL, write_nifti
from scanloom.ops.rectify import rectangular_grid, rectangular_labels
from scanloom.review.revisions import latest_result, revision_number
from scanloom.review.sources import read_channels
from scanloom.review.verdicts.log import VerdictStack, read_verdicts
from scanloom.review.verdicts.verdict import (
    Seen,
    Verdict,
    about,
    reference_result,
    seen_of,
    state_of,
)

Form = Literal["msd", "nnunet", "monai"]
"""As the Medical Segmentation Decathlon; a folder of nnUNet_raw; a datalist of MONAI."""
Status = Literal["accepted", "corrected", "edit", "stale", "unreviewed", "rejected", "disagreed"]
"""Of the latest result: accepted; corrected, and nobody decided since; to be edited; replaced since
its review; nobody decided; rejected; reviewers differ."""
TAKEN: tuple[Status, ...] = ("accepted", "corrected", "edit", "stale", "unreviewed")
"""Those that may be requested: nobody trains on rejected labels."""
DEFAULT_FOLDS = 5
"""As nnU-Net; fewer if there are fewer patients."""

RECORD = "scanloom.json"
"""The file by which a folder is known as a dataset of ours: cases, files, left-out cases."""
SPLITS = "splits_final.json"
"""nnU-Net's list of folds, for its folder of preprocessed data."""
_NNUNET_NAME = re.compile(r"Dataset\d{3}_[\w.-]+")
_DATASET = {"msd": "dataset.json", "nnunet": "dataset.json", "monai": "datalist.json"}
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError)
_FILE = re.compile(r"(images|labels)T[rs]/\w+\.nii\.gz")
_DRAFT = re.compile(r"[0-9a-f]{16}")
"""Name of a draft of `private_draft`."""
_BEFORE = "before"
"""Name of a dataset that is being replaced, beside its draft."""


@dataclass(frozen=True)
class DatasetOptions:
    """Content and form of a dataset.

    Parameters
    ----------
    structures : tuple of str
        Labels, in the order of their values, from 1: where structures overlap, the later one
        covers the earlier one. Empty for all, which must be the same in all results.
    model : str or None
        The model whose labels are taken; None for all.
    folds : int or None
        Number of folds for cross-validation; None for five, or as many as there are patients.
    test_share : float
        Share of the patients who are set aside for testing, 0 to below 1.
    """

    form: Form = "msd"
    verdicts: tuple[Status, ...] = ("accepted", "corrected")
    structures: tuple[str, ...] = ()
    model: str | None = None
    folds: int | None = None
    test_share: float = 0.0

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise ValueError(f"form must be one of {get_args(Form)}, got {self.form!r}")
        if not self.verdicts or not set(self.verdicts) <= set(TAKEN):
            raise ValueError(f"verdicts must be of {TAKEN}, got {self.verdicts}")
        if len(set(self.structures)) < len(self.structures):
            raise ValueError(f"structures must be different, got {self.structures}")
        if self.folds is not None and self.folds < 2:
            raise ValueError(f"folds must be 2 or more, got {self.folds}")
        if not 0 <= self.test_share < 1:
            raise ValueError(f"test_share must be from 0 to below 1, got {self.test_share}")


@dataclass(frozen=True)
class DatasetCase:
    """A case of a dataset.

    Parameters
    ----------
    fold : int or None
        The fold that it validates; None if it is for testing, or there are no folds.
    patient : int
        Number of its patient in this dataset.
    revision : int
        Number of the correction whose labels were taken; 0 for the model's.
    files : mapping
        Size in bytes and time of change in ns of each of its files: images, then labels.
    image_of, labels_of : str
        Hashes of what the files were made of: equal ones are not made again.
    labels_sha256 : str
        Of the label map, in which somebody may draw.
    """

    case: str
    test: bool
    status: Status
    revision: int
    files: Mapping[str, tuple[int, int]]
    image_of: str
    labels_of: str
    labels_sha256: str
    fold: int | None = None
    patient: int = 0


@dataclass(frozen=True)
class Dataset:
    """A dataset that was written; without cases, nothing was.

    Parameters
    ----------
    labels : mapping
        Value of each structure.
    folds : int
        Number of folds; 0 for a single patient.
    patients : tuple of int
        Number of patients for training, and for testing.
    unidentified : int
        Number of cases whose files name no patient: each counts as a patient.
    left_out : mapping
        Reason and detail of cases that were to be taken, by their ids.
    unselected : mapping
        Number of cases of each status that was not requested.
    """

    folder: Path
    form: Form
    labels: Mapping[str, int]
    cases: tuple[DatasetCase, ...]
    folds: int
    patients: tuple[int, int]
    unidentified: int
    left_out: Mapping[str, tuple[Reason, str]]
    unselected: Mapping[Status, int]


@dataclass(frozen=True, eq=False)
class _Result:
    """A result of a case; `document` is `case.json` of the case, `seen` and `grid` its own."""

    folder: Path
    case_folder: Path
    case: str
    document: Mapping[str, Any]
    entries: Sequence[Mapping[str, Any]]
    seen: Seen
    grid: Grid
    channels: int
    has_image: bool
    status: Status = "unreviewed"

    def structures(self, labels: Container[str] = ()) -> Iterator[_Structure]:
        """Yield the structures with one of some labels; all by default."""
        for entry in self.entries:
            for each in entry["structures"]:
                if not labels or each["label"] in labels:
                    kind, side = each["type"], each["laterality"] or {}
                    code = f"{kind['scheme']} {kind['value']} {side.get('value', '')}"
                    fields = entry["model"], each["label"], code, entry["file"], each["number"]
                    yield _Structure(*fields)


class _Structure(NamedTuple):
    """A structure of a result: its number in a label map."""

    model: str
    label: str
    code: str
    file: str
    number: int


LeftOut = dict[str, tuple[Reason, str]]


def write_dataset(
    out: Path,
    folder: Path,
    options: DatasetOptions = DatasetOptions(),
    key: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Dataset:
    """Write images and labels of an output folder's results, or bring a dataset up to date.

    Parameters
    ----------
    out, folder : Path
        The output folder; the dataset's folder, outside of it. One that exists is replaced if it
        is a dataset of this form: files of cases that did not change are kept.
    key : Path or None
        File with the key of the case ids; None for SCANLOOM_KEY or the user's own key.
    progress : callable
        Is called with the numbers of cases that are done, and of all.

    Raises
    ------
    ScanError
        NOT_REVIEWED if no result has a requested verdict; STRUCTURE_UNKNOWN or LABELS_UNKNOWN if
        structures are not in the results, not the same in all, or ambiguous; TOO_FEW_PATIENTS;
        OUTPUT_UNWRITABLE if the folder is not a dataset of ours; KEY_MISMATCH; DISK_FULL.
    """
    check_links(out)
    if not (out / "cases").is_dir():
        raise no_results(out)
    secret = read_key_of(out, key)
    folder = folder.resolve()
    _clear_drafts(folder)
    earlier = _earlier(out.resolve(), folder, options.form)
    left_out, unselected = LeftOut(), Counter[Status]()
    chosen = _choose(out, options, left_out, unselected)
    if not chosen and not left_out:
        verdicts = " or ".join(options.verdicts)
        counts = ", ".join(f"{count} {status}" for status, count in unselected.items())
        detail = f"no result is {verdicts}" + (f": {counts}" if counts else "")
        raise ScanError(Reason.NOT_REVIEWED, detail)
    labels = _label_values(chosen, options.structures)
    _channel_names(out, chosen)  # refuses what it can't name, before the work
    patients, unidentified = _patients(out, [each.case for each in chosen])
    shares = {case: patient_share(patient, secret) for case, patient in patients.items()}
    # Now, so that a request that can't be met is refused before the work, and again with the
    # cases that remain
    _folds(shares, options)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked_draft(folder) as draft:
            maker = _Maker(out, draft, options, labels, earlier, folder, key)
            count, cases = _split(
                _make_cases(maker, chosen, shares, left_out, progress), shares, options
            )
            people = [
                len({patients[each.case] for each in cases if each.test is test})
                for test in (False, True)
            ]
            dataset = Dataset(
                folder,
                options.form,
                labels,
                tuple(cases),
                count,
                (people[0], people[1]),
                len(unidentified & {each.case for each in cases}),
                left_out,
                dict(unselected),
            )
            if cases:
                _write_documents(out, draft, dataset, chosen, options)
                _publish(draft, folder, earlier)
    except OSError as exc:
        raise output_error(exc, "the dataset") from exc
    return dataset


def _make_cases(
    maker: _Maker,
    chosen: Sequence[_Result],
    shares: Mapping[str, float],
    left_out: LeftOut,
    progress: Callable[[int, int], None],
) -> list[DatasetCase]:
    """Write the files of all cases; those that can't be taken come to `left_out`."""
    cases = list[DatasetCase]()
    for n, result in enumerate(chosen):
        progress(n, len(chosen))
        try:
            cases.append(maker.make(result, test=shares[result.case] < maker.options.test_share))
        except ScanError as error:
            if error.reason in (Reason.KEY_MISMATCH, Reason.DISK_FULL):
                raise
            left_out[result.case] = error.reason, error.detail
    progress(len(chosen), len(chosen))
    return cases


# --- results --------------------------------------------------------------------------------------


def _choose(
    out: Path, options: DatasetOptions, left_out: LeftOut, unselected: Counter[Status]
) -> list[_Result]:
    """Return the results that have a requested status and structure; count the others."""
    results = _read_results(out, options, left_out)
    _check_labels(results, options.structures)
    chosen = list[_Result]()
    for each in results:
        if not [*each.structures(options.structures)]:
            continue
        # A correction that was accepted is both
        corrected = each.status == "accepted" and revision_number(each.folder) > 0
        if each.status in options.verdicts or (corrected and "corrected" in options.verdicts):
            chosen.append(each)
        else:
            unselected[each.status] += 1
    return chosen


def _read_results(out: Path, options: DatasetOptions, left_out: LeftOut) -> list[_Result]:
    """Return the result of each case that has label maps of a model; damaged ones not.

    It is the latest one, or a correction of a result that it replaced.
    """
    ids = {case: case for case in known_ids(out)}
    ids |= {folder: case for case, folder in case_folders(out).items()}
    results, models, owners = list[_Result](), set[str](), Owners(out)
    current = VerdictStack(read_verdicts(out)).current()
    for folder in published_cases(out):
        verdicts = current.get(folder.name, {})
        try:
            latest = latest_result(out, folder.name)
            labelled = reference_result(out, folder.name, verdicts)
            for each in {folder, latest, labelled}:
                check_files(each)
            if owners.other_case(folder.name, read_case(folder)):
                raise ValueError("the folder holds the result of another case")
            read = [_read_result(out, folder, each) for each in dict.fromkeys((labelled, latest))]
            judged = [_judged(each, verdicts, options) for each in read]
            is_kept = _stands_in(judged[0], judged[-1], options.structures)
            result = judged[0 if is_kept else -1]
        except (*_DAMAGE, ScanError) as exc:
            if is_passing(exc):
                raise
            # The name of the folder may be a patient's: `--names source`
            case = ids.get(folder.name, "a case that the crosswalk lacks")
            left_out[case] = Reason.RESULT_DAMAGED, "a file of the result is damaged"
        else:
            models |= {entry["model"] for each in read for entry in each.entries}
            results += [result] if result.entries else []
    if options.model is not None and models and options.model not in models:
        detail = f"there are results of {', '.join(sorted(models))} only"
        raise ScanError(Reason.LABELS_UNKNOWN, detail)
    return results


def _read_result(out: Path, case_folder: Path, folder: Path) -> _Result:
    """Return the result in the folder of a case or revision."""
    timing = read_json(case_folder / TIMING)
    entries = listed_label_maps(folder)
    grid, document = read_json(folder / CASE)["grid"], read_json(case_folder / CASE)
    return _Result(
        folder,
        case_folder,
        str(document["case"]),
        document,
        entries,
        seen_of(folder),
        Grid(tuple(grid["shape"]), grid["affine_ras_mm"]),
        max(len(str(timing.get(SOURCE_STAMP, "")).split()), 1),
        SCAN_COPY in timing[FILE_STAMPS],
    )


def _judged(result: _Result, verdicts: Mapping[str, Verdict], options: DatasetOptions) -> _Result:
    """Return the label maps of the requested model, and the status of the requested structures."""
    entries = [each for each in result.entries if options.model in (None, each["model"])]
    result = replace(result, entries=entries)
    subjects = [f"{s.model}/{s.label}" for s in result.structures(options.structures)]
    return replace(result, status=review_status(result.folder, result.seen, verdicts, subjects))


def _stands_in(first: _Result, latest: _Result, requested: Sequence[str]) -> bool:
    """Return whether a correction of an earlier result counts, until the latest one is judged.

    It must have the voxels of the latest one and the structures that are taken of other results.
    """
    of_first, of_latest = ({each.label for each in r.structures()} for r in (first, latest))
    is_whole = of_first >= {*requested} if requested else not of_latest or of_first == of_latest
    is_kept = first.status in ("accepted", "corrected")
    return is_kept and is_whole and first.grid.matches(latest.grid, tolerance=1e-2)


def review_status(
    folder: Path, seen: Seen, verdicts: Mapping[str, Verdict], subjects: Iterable[str]
) -> Status:
    """Return the status of the latest result of a case, for some of its structures.

    A reviewer's decision about a structure counts before that about the case; of several
    reviewers, the majority's counts, as in the review.

    Parameters
    ----------
    verdicts : mapping
        Verdicts about the case, by reviewer.
    subjects : iterable of str
        The structures, as `<model>/<label>`.
    """
    counting = about(seen, verdicts)
    states = {
        state_of(
            seen,
            {
                reviewer: replace(verdict, decision=decision)
                for reviewer, verdict in counting.items()
                if (decision := verdict.structures.get(subject, verdict.decision))
            },
        )
        for subject in subjects
    }
    if "reject" in states:
        return "rejected"
    if "disagreed" in states:
        return "disagreed"
    if "edit" in states:
        return "edit"
    if states == {"accept"}:
        return "accepted"
    # Whoever corrected a result has looked at it: a revision needs no verdict
    if revision_number(folder):
        return "corrected"
    return "stale" if verdicts and not counting else "unreviewed"


def _check_labels(results: Iterable[_Result], requested: Sequence[str]) -> None:
    """Refuse labels that no result has, or that are of different structures.

    Raises
    ------
    ScanError
        STRUCTURE_UNKNOWN or LABELS_UNKNOWN.
    """
    models: dict[str, dict[str, str]] = defaultdict(dict)  # by label and code
    for result in results:
        for each in result.structures():
            models[each.label].setdefault(each.code, each.model)
    for label in requested or models:
        if label not in models:
            detail = f"no result has {label!r}; {did_you_mean(label, sorted(models))}"
            raise ScanError(Reason.STRUCTURE_UNKNOWN, detail)
        if len(models[label]) > 1:
            listed = " and ".join(sorted(set(models[label].values())))
            detail = f"{label} has different codes in results of {listed}: use --model"
            raise ScanError(Reason.LABELS_UNKNOWN, detail)


def _label_values(results: Sequence[_Result], requested: Sequence[str]) -> dict[str, int]:
    """Return the value of each label in a dataset of some results.

    Raises
    ------
    ScanError
        STRUCTURE_UNKNOWN if no labels are requested, and only some results have some.
    """
    # Values without gaps, as nnU-Net requires, in the order of the model's numbers
    order = {
        each.label: (each.model, each.number) for result in results for each in result.structures()
    }
    labels = requested or sorted(order, key=lambda label: order[label])
    counts = Counter(n for each in results for n in {s.label for s in each.structures()})
    partial = sorted(label for label in labels if counts[label] < len(results))
    if partial and not requested:
        listed = ", ".join(partial[:5]) + (", ..." if len(partial) > 5 else "")
        detail = f"only some results have {listed}: choose with --structures, or --model"
        raise ScanError(Reason.STRUCTURE_UNKNOWN, detail)
    return {label: value for value, label in enumerate(labels, 1)}


def _requested_structures(result: _Result, labels: Mapping[str, int]) -> dict[str, _Structure]:
    """Return the structures of a result by the labels of the dataset.

    Raises
    ------
    ScanError
        STRUCTURE_UNKNOWN if it lacks one; LABELS_UNKNOWN if two of its models have one.
    """
    structures: dict[str, _Structure] = {}
    for each in result.structures(labels):
        if (earlier := structures.setdefault(each.label, each)) is not each:
            detail = f"{earlier.model} and {each.model} both have {each.label}: use --model"
            raise ScanError(Reason.LABELS_UNKNOWN, detail)
    if lacking := [label for label in labels if label not in structures]:
        raise ScanError(Reason.STRUCTURE_UNKNOWN, f"the result has no {', '.join(lacking)}")
    return structures


# --- patients -------------------------------------------------------------------------------------

_SUBJECT = re.compile(r"(?:^|/)(sub-[a-zA-Z0-9]+)(?=[/_])")
"""Name of a person in a BIDS dataset."""


def _patients(out: Path, cases: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Return a text that stands for the patient of each case, and the cases that name none.

    Paths count only where nothing else is known, and only as equal or not: an archive may move.
    """
    # All cases, so that a patient's text does not change when further ones are accepted
    records = latest_by_id(find_sources(out, sorted(known_ids(out))))
    first: dict[str, str] = {}
    for case in sorted(records):
        first.setdefault(records[case].path, case)
    patients, unidentified = dict[str, str](), set[str]()
    for case in cases:
        record = records.get(case)
        if named := named_patient(record):
            patients[case] = named
        else:  # volumes of one file are of one patient
            patients[case] = f"case {case if record is None else first[record.path]}"
            unidentified.add(case)
    return patients, unidentified


def named_patient(record: SourceRecord | None) -> str:
    """Return the patient whom the header or path of a scan names; empty if none."""
    if record is None:
        return ""
    for kind in ("patient_id", "patient_name", "study_uid"):
        text = " ".join(str(getattr(record, kind)).casefold().split())
        if kind == "patient_name":
            text = _without_empty_ends(text)
        if text:
            return f"{kind} {text}"
    subject = _SUBJECT.search(record.path)
    return f"subject {subject[1]}" if subject else ""


def _without_empty_ends(name: str) -> str:
    """Return a DICOM person name without the delimiters of empty components at an end.

    They may be left out, of a component group (`^`) and of the name (`=`) alike (PS3.5 6.2.1).
    """
    groups = [
        each.rstrip(" ^") if each.rstrip().endswith("^") else each for each in name.split("=")
    ]
    return "=".join(groups).rstrip(" =")


def _folds(shares: Mapping[str, float], options: DatasetOptions) -> tuple[int, dict[str, int]]:
    """Return the number of folds, and the fold of each case that is not for testing.

    Parameters
    ----------
    shares : mapping
        `patient_share` of each case's patient: the smallest are for testing, whatever others
        there are, so that nobody changes sides when results are added; folds take turns.

    Raises
    ------
    ScanError
        TOO_FEW_PATIENTS if a requested fold or the test would be empty.
    """
    if not shares:
        return 0, {}
    people = sorted(set(shares.values()))
    training = [share for share in people if share >= options.test_share]
    if options.test_share and (len(training) == len(people) or not training):
        which = "none for training" if not training else "none for testing"
        detail = f"of {len(people)} patients, a share of {options.test_share:g} leaves {which}"
        raise ScanError(Reason.TOO_FEW_PATIENTS, detail)
    if options.folds is not None and options.folds > len(training):
        detail = f"{options.folds} folds need as many patients, there are {len(training)}"
        raise ScanError(Reason.TOO_FEW_PATIENTS, detail)
    count = options.folds or min(DEFAULT_FOLDS, len(training))
    if count < 2:
        return 0, {}
    ranks = {share: n for n, share in enumerate(training)}
    return count, {case: ranks[s] % count for case, s in shares.items() if s in ranks}


def _split(
    cases: Sequence[DatasetCase], shares: Mapping[str, float], options: DatasetOptions
) -> tuple[int, list[DatasetCase]]:
    """Return the number of folds, and the cases with their folds and the numbers of patients.

    Parameters and errors are those of `_folds`; shares of other cases do not count.
    """
    count, folds = _folds({each.case: shares[each.case] for each in cases}, options)
    # in the order of the hash, which says nothing of who they are
    numbers = {s: n for n, s in enumerate(sorted({shares[each.case] for each in cases}))}
    return count, [
        replace(each, fold=folds.get(each.case), patient=numbers[shares[each.case]])
        for each in cases
    ]


# --- files ----------------------------------------------------------------------------------------


def _earlier(out: Path, folder: Path, form: Form) -> Mapping[str, Any]:
    """Return the record of an existing dataset, by which its files are known; {} if there is none.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the folder is not ours to replace.
    """
    if form == "nnunet" and not _NNUNET_NAME.fullmatch(folder.name):
        detail = "nnU-Net takes folders named as Dataset501_Liver: three digits and a name"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail, str(folder))
    if folder.is_relative_to(out):
        detail = "the dataset's folder must be outside of the output folder"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail, str(folder))
    if not os.path.lexists(folder):
        return {}
    foreign = "there is no dataset of scanloom in it: name a new folder"
    try:
        if not any(folder.iterdir()):
            return {}
        record = read_json(folder / RECORD)
        if record["form"] != form:
            foreign = f"it is a dataset of the form {record['form']}: name a new folder"
            raise ValueError
        # Unchanged files are linked to the new dataset: none from elsewhere
        if not all(_FILE.fullmatch(file) for case in record["cases"] for file in case["files"]):
            raise ValueError
        _check_files(folder, record)
    except _DAMAGE as exc:
        raise ScanError(Reason.OUTPUT_UNWRITABLE, foreign, str(folder)) from exc
    return record


def _check_files(folder: Path, record: Mapping[str, Any]) -> None:
    """Refuse to replace a dataset's folder that has a file which its record does not name.

    So is one with a label map that was changed: to draw it may have taken hours. Equal content has
    another time after a copy, so that its hash decides.
    """
    known = {RECORD, *record.get("documents", ())}
    for case in record.get("cases", ()):
        known |= case["files"].keys()
    for path in folder.rglob("*"):
        is_folder = path.is_dir() and not path.is_symlink()
        if not is_folder and path.relative_to(folder).as_posix() not in known:
            detail = "the dataset's folder has a file that scanloom did not write: move it away"
            raise ScanError(Reason.OUTPUT_UNWRITABLE, detail, str(path))
    for case in record.get("cases", ()):
        [*_, (name, stamp)] = case["files"].items()
        path = folder / name
        with suppress(FileNotFoundError):
            if _stamp(path) != tuple(stamp) and sha256_of(path) != case["labels_sha256"]:
                detail = "a label map was changed in the dataset: `scanloom review --take` keeps it"
                detail += ", or remove it"
                raise ScanError(Reason.OUTPUT_UNWRITABLE, detail, str(path))


@dataclass
class _Maker:
    """Writes the files of cases to a draft, or links those of an earlier dataset."""

    out: Path
    draft: Path
    options: DatasetOptions
    labels: Mapping[str, int]
    earlier: Mapping[str, Any]
    folder: Path
    key: Path | None
    _known: dict[str, Mapping[str, Any]] = field(init=False)
    _find: Callable[[Path], Sequence[Series]] = field(init=False)

    def __post_init__(self) -> None:
        # An archive may be one folder, which lists as long as it takes to read many scans
        self._find = lru_cache(maxsize=4)(find_series)
        self._known = {case["case"]: case for case in self.earlier.get("cases", ())}

    def make(self, result: _Result, *, test: bool) -> DatasetCase:
        """Write the image and the labels of a case.

        Raises
        ------
        ScanError
            Why the case is left out; no file of it is left then.
        """
        structures = _requested_structures(result, self.labels)
        images, labels = _file_names(self.options.form, result, test=test)
        image_of = _digest(
            result.case,
            result.document["source"],
            result.document["options"],
            result.document["grid"],
            result.channels,
        )
        numbers = [(structures[label].file, structures[label].number) for label in self.labels]
        label_maps = {file: result.seen.labels[file] for file, _ in numbers}
        may_overlap = bool(self.options.structures)
        labels_of = _digest(label_maps, numbers, may_overlap, result.document["grid"])
        try:
            if not self._reuse(result.case, "image_of", image_of, images):
                self._write_images(result, images)
            if not self._reuse(result.case, "labels_of", labels_of, [labels]):
                self._write_labels(result, structures, labels)
            files = {name: _stamp(self.draft / name) for name in (*images, labels)}
            _check_same(result)
        except BaseException:
            for name in (*images, labels):
                (self.draft / name).unlink(missing_ok=True)
            raise
        revision = revision_number(result.folder)
        return DatasetCase(
            result.case,
            test,
            result.status,
            revision,
            files,
            image_of,
            labels_of,
            labels_sha256=sha256_of(self.draft / labels),
        )

    def _reuse(self, case: str, of: str, digest: str, names: Sequence[str]) -> bool:
        """Link files of the earlier dataset, if they are unchanged; return whether they are."""
        known = self._known.get(case, {})
        if known.get(of) != digest:
            return False
        *images, labels = known["files"].items()
        listed = images if of == "image_of" else [labels]
        with suppress(OSError):
            if len(listed) == len(names) and all(
                _stamp(self.folder / name) == tuple(stamp) for name, stamp in listed
            ):
                for (name, _), target in zip(listed, names, strict=True):
                    self._link(self.folder / name, target)
                return True
        return False

    def _link(self, path: Path, name: str) -> None:
        """Make a hard link to a file, or a copy where there can be none; not through a link."""
        target = self._target(name)
        folder = open_descriptor(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.link(path.name, target, src_dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISREG(target.lstat().st_mode):
                raise OSError("not a regular file")  # noqa: TRY301  # as others
        except OSError:  # another file system, or one without links
            self._copy(path, name)
        finally:
            os.close(folder)

    def _target(self, name: str) -> Path:
        """Return the path of a new file of the draft, in a folder that exists."""
        target = self.draft / name
        target.parent.mkdir(exist_ok=True)
        target.unlink(missing_ok=True)
        return target

    def _copy(self, path: Path, name: str) -> None:
        target = self._target(name)
        try:
            stored = open_regular_file(path)
        except OSError as exc:
            if is_passing(exc):
                raise
            raise ScanError(Reason.RESULT_DAMAGED, "a file of the result is damaged") from exc
        with stored, target.open("xb") as copy:
            shutil.copyfileobj(stored, copy)
        fsync_path(target)

    def _write(
        self, array: NDArray[Any], grid: Grid, scan: Scan, name: str, intent: int = 0
    ) -> None:
        path = self._target(name)
        # The forms of a sheared scan describe a grid that was left
        source = scan.source if grid is scan.volume.grid else GridOnlySource()
        write_nifti(array, grid, source, path, intent=intent)
        fsync_path(path)

    def _write_images(self, result: _Result, names: Sequence[str]) -> None:
        """Write the scan of a case, from the image in its folder or else from its source."""
        stored = result.case_folder / SCAN_COPY
        if result.has_image and result.channels == 1:
            if not result.grid.sheared:
                self._link(stored, names[0])
                return
            scans = [FORMATS["nifti"].read((stored,))]
        else:
            name, channels = result.case_folder.name, result.channels
            scans = read_channels(self.out, name, channels, self.key, self._find)
        arrays = []
        grid = scans[0].volume.grid
        for scan in scans:
            # Labels on other voxels would teach something wrong
            if not scan.volume.grid.matches(result.grid, tolerance=1e-2):
                raise ScanError(Reason.SERIES_DIFFERS, "the scan has other voxels than the labels")
            array, padding = scan.volume.array, scan.volume.padding
            outside = array.min() if padding is None else padding
            # Whole slices move, as those of the labels do
            arrays.append(rectangular_labels(array, scan.volume.grid, outside))
        if len(names) < len(arrays):  # channels of one file are its last axis
            arrays = [np.stack(arrays, axis=-1)]
        for array, name in zip(arrays, names, strict=True):
            self._write(array, rectangular_grid(grid), scans[0], name)

    def _write_labels(
        self, result: _Result, structures: Mapping[str, _Structure], name: str
    ) -> None:
        """Write the label map of a case, with the values of the dataset."""
        [*files] = dict.fromkeys(each.file for each in structures.values())
        stored = {s.label: s.number for s in result.structures() if s.file in files}
        if len(files) == 1 and stored == self.labels and not result.grid.sheared:
            # no link: programs that correct labels write them in their place
            self._copy(result.folder / files[0], name)
            return
        dtype = np.uint8 if len(self.labels) < 256 else np.uint16
        labels: NDArray[Any] = np.zeros(result.grid.shape, dtype, order="F")
        for file in files:
            scan = FORMATS["nifti"].read((result.folder / file,))
            array = scan.volume.array.astype(np.uint16)
            if array.shape != labels.shape:
                raise ScanError(Reason.RESULT_DAMAGED, "a label map has another shape")
            table = np.zeros(1 << 16, dtype)
            for label, value in self.labels.items():
                if structures[label].file == file:
                    table[structures[label].number] = value
            layer: NDArray[Any] = table[array]
            overlap = (labels > 0) & (layer > 0)
            if not self.options.structures and overlap.any():
                pair = int(labels[overlap][0]), int(layer[overlap][0])
                names = " and ".join(each for each, n in self.labels.items() if n in pair)
                raise ScanError(Reason.LABELS_OVERLAP, f"{names} overlap")
            # The requested order is that of the values: the later structure covers the earlier one
            labels = np.maximum(labels, layer)
        grid = scan.volume.grid
        self._write(rectangular_labels(labels, grid), rectangular_grid(grid), scan, name, LABEL)


def _check_same(result: _Result) -> None:
    """Refuse files of a result that was replaced, as by a run, since it was chosen."""
    same = False
    with suppress(*_DAMAGE, ScanError):
        document = read_json(result.case_folder / CASE)
        same = document == result.document and seen_of(result.folder) == result.seen
    if not same:
        detail = "the result was replaced while the dataset was written"
        raise ScanError(Reason.NOT_REVIEWED, detail)


def _file_names(form: Form, result: _Result, *, test: bool) -> tuple[list[str], str]:
    """Return the names of the images and of the label map of a case, relative to the dataset."""
    end, case = "Ts" if test else "Tr", result.case
    numbers = [f"_{n:04d}" for n in range(result.channels)] if form == "nnunet" else [""]
    images = [f"images{end}/{case}{number}.nii.gz" for number in numbers]
    return images, f"labels{end}/{case}.nii.gz"


def _digest(*content: Any) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _stamp(path: Path) -> tuple[int, int]:
    """Return size and time of change of a regular file, in bytes and ns."""
    state = path.lstat()
    if not stat.S_ISREG(state.st_mode):
        raise OSError("not a regular file")
    return state.st_size, state.st_mtime_ns


def _clear_drafts(folder: Path) -> None:
    """Remove drafts of processes that were killed; put back a dataset that one was replacing."""
    draft = re.compile(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{8}}")
    with suppress(OSError):  # what can't be listed stays
        for path in [each for each in folder.parent.iterdir() if draft.fullmatch(each.name)]:
            with suppress(OSError):
                _clear_draft(path, folder)


def _clear_draft(path: Path, folder: Path) -> None:
    descriptor = open_descriptor(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        names = {each.name for each in path.iterdir()}
        # `.liver.20261124` may be somebody's. A draft is locked before it is written to: an empty
        # one may be new
        ours = all(name == _BEFORE or _DRAFT.fullmatch(name) for name in names)
        if not names or not ours or path.lstat().st_uid != os.geteuid():
            return
        if lock_file(descriptor, 0):
            if _BEFORE in names and not os.path.lexists(folder):
                (path / _BEFORE).rename(folder)
            shutil.rmtree(path)
    finally:
        os.close(descriptor)


@contextmanager
def _locked_draft(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside that of the dataset, for its content; it is locked meanwhile."""
    with private_draft(folder) as draft:
        descriptor = open_descriptor(draft.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(OSError):  # NFS locks no folder: then nobody removes the draft either
                lock_file(descriptor, 0)
            draft.mkdir()
            yield draft
        finally:
            os.close(descriptor)


def _publish(draft: Path, folder: Path, earlier: Mapping[str, Any]) -> None:
    """Rename a draft, whose files are synced to the disk, to the dataset's folder.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if a file came into the folder that would be lost.
    """
    for path in (*(p for p in draft.iterdir() if p.is_dir()), draft):
        fsync_path(path)
    before = draft.with_name(_BEFORE)
    if folder.exists():
        draft.chmod(stat.S_IMODE(folder.stat().st_mode))
        folder.rename(before)
    try:
        _check_files(before, earlier)
        draft.rename(folder)
    except BaseException:
        if before.exists():
            before.rename(folder)
        raise
    fsync_path(folder.parent)


# --- documents ------------------------------------------------------------------------------------


def _write_documents(
    out: Path, draft: Path, dataset: Dataset, results: Sequence[_Result], options: DatasetOptions
) -> None:
    """Write the documents that other programs read, and the record of the dataset."""
    taken = {case.case for case in dataset.cases}
    channels = _channel_names(out, [each for each in results if each.case in taken])
    if options.form == "msd":  # programs that convert such a folder want one, be it empty
        (draft / "imagesTs").mkdir(exist_ok=True)
    written = [_DATASET[options.form]]
    write_json(draft / written[0], _description(dataset, channels))
    if options.form == "nnunet" and dataset.folds:
        (draft / SPLITS).write_text(f"{json.dumps(_nnunet_splits(dataset), indent=2)}\n")
        written.append(SPLITS)
    record = {
        "form": options.form,
        "labels": dict(dataset.labels),
        "verdicts": list(options.verdicts),
        "folds": dataset.folds,
        "test_share": options.test_share,
        "documents": written,
        "cases": [vars(case) | {"files": dict(case.files)} for case in dataset.cases],
        "left_out": {
            case: {"reason": reason.code, "detail": detail}
            for case, (reason, detail) in dataset.left_out.items()
        },
    }
    write_document(draft / RECORD, record)
    for file in (*written, RECORD):
        fsync_path(draft / file)


def _description(dataset: Dataset, channels: Sequence[str]) -> dict[str, Any]:
    """Return the content of `dataset.json`, or of MONAI's `datalist.json`, of a dataset."""
    training, tests = list[dict[str, Any]](), list[dict[str, Any]]()
    for case in dataset.cases:
        image, *_, labels = case.files
        fold = {} if case.fold is None else {"fold": case.fold}
        listed = {"image": f"./{image}", "label": f"./{labels}", **fold}
        (tests if case.test else training).append(listed)
    name, names = dataset.folder.name, {str(n): each for n, each in enumerate(channels)}
    if dataset.form == "nnunet":
        return {
            "name": name,
            "channel_names": names,
            "labels": {"background": 0, **dataset.labels},
            "numTraining": len(training),
            "file_ending": ".nii.gz",
        }
    of_values = {str(value): label for label, value in dataset.labels.items()}
    values = {"0": "background", **of_values}
    if dataset.form == "monai":
        return {
            "name": name,
            "modality": names,
            "labels": values,
            # Fold 0 validates; each case names its fold, to take another one
            "training": [each for each in training if each.get("fold") != 0],
            "validation": [each for each in training if each.get("fold") == 0],
            "testing": tests,
        }
    return {
        "name": name,
        "description": "Results of scanloom",
        "reference": "",
        "licence": "",
        "release": "",
        "tensorImageSize": "3D" if len(channels) == 1 else "4D",
        "modality": names,
        "labels": values,
        "numTraining": len(training),
        "numTest": len(tests),
        "training": training,
        "test": [each["image"] for each in tests],
    }


def _nnunet_splits(dataset: Dataset) -> list[dict[str, list[str]]]:
    """Return the content of `splits_final.json`: the cases of each fold, for nnU-Net."""
    return [
        {
            kind: [
                case.case
                for case in dataset.cases
                if not case.test and (case.fold == n) is (kind == "val")
            ]
            for kind in ("train", "val")
        }
        for n in range(dataset.folds)
    ]


def _channel_names(out: Path, results: Sequence[_Result]) -> list[str]:
    """Return the names of the channels: of the modality, or as workflows name several inputs.

    Raises
    ------
    ScanError
        CHANNELS if cases have different numbers of channels.
    """
    counts = {result.channels for result in results}
    if len(counts) > 1:
        listed = " and ".join(str(n) for n in sorted(counts))
        raise ScanError(Reason.CHANNELS, f"cases have {listed} channels: use --model")
    count = max(counts, default=0)
    modalities = {str(result.document["source"]["modality"] or "image") for result in results}
    modality = " ".join(sorted(modalities))
    if count < 2:
        return [modality] * count
    named = set[tuple[str, ...]]()
    for file in sorted(out.glob("runs/*/workflow.json")):
        with suppress(*_DAMAGE, ScanError):
            channels = tuple(map(str, read_json(file)["channels"]))
            named |= {channels} if len(channels) == count else set()
    return list(named.pop()) if len(named) == 1 else [f"{modality} {n}" for n in range(count)]
