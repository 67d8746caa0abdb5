"""Label maps of many cases, read from an output folder, a dataset or a folder of files.

Structures have the names of `segments.json`, `dataset.json`, the JSON beside a file, or segments of
the file itself; otherwise labels are numbers only.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid, Reason, ScanError, Volume
from scanloom.io.formats import VOLUME_SUFFIXES
from scanloom.io.output.crosswalk import case_folders, find_sources, latest_by_id
from scanloom.io.output.file_names import CASE, SEGMENTS
from scanloom.io.output.json_file import read_json
from scanloom.io.output.layout import CASES, listed_label_maps, no_results, published_cases
from scanloom.io.output.private import CROSSWALK, PRIVATE, check_links, read_key_of
from scanloom.io.read import load_volume
from scanloom.io.system.regular_files import read_regular_file
from scanloom.review.label_files import on_grid, read_label_file
from scanloom.review.revisions import read_label_maps, revision_folders
from scanloom.review.sources import read_source
from scanloom.review.verdicts.log import VerdictStack, read_verdicts
from scanloom.review.verdicts.verdict import Verdict, reference_result, seen_of
from scanloom.training.dataset import RECORD, named_patient, review_status

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

Values = tuple[int, ...]
"""Values of a structure in a label map: several for a region of nnU-Net."""
Names = dict[str, Values]

T = TypeVar("T")

_SEGMENT_SUFFIXES: Final = (".seg.nrrd", ".dcm")
"""Formats of segments, which may leave out slices of the scan."""
_SUFFIXES: Final = (*_SEGMENT_SUFFIXES, *VOLUME_SUFFIXES)
_REFERENCED_SERIES: Final = 0x0008_1115
_SEG_CLASSES: Final = ("1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7")
_DOCUMENTS: Final = ("dataset.json", "datalist.json")
_CONFIGS: Final = "configs"
"""Folder of a bundle's list of cases."""
_TESTS: Final = ("test", "testing")
_TRAINING: Final = ("training", "validation")
"""Lists of a description of a dataset."""
MAX_LIST_BYTES: Final = 64 << 20
"""A list of a hundred thousand cases."""
MAX_VALUE: Final = 65535
"""Largest value in a label map."""
IGNORED: Final = "ignore"
"""Label of nnU-Net for voxels whose structure is unknown."""


@dataclass(frozen=True, eq=False)
class Labels:
    """Labels of a case in memory.

    Parameters
    ----------
    layers : tuple of (I, J, K) arrays
        Label maps on `grid`.
    names : mapping or None
        Layer and values of each structure; None if labels are numbers only, in one layer.
    are_segments : bool
        Whether the file names its segments, of which each may be a layer of its own: their values
        then mean nothing in another label map.
    """

    layers: tuple[NDArray[Any], ...]
    names: Mapping[str, tuple[int, Values]] | None
    grid: Grid
    are_segments: bool = False


@dataclass(frozen=True, eq=False)
class CaseLabels:
    """The labels of a case, which are read on request.

    Parameters
    ----------
    name : str
        Name of the case in its set.
    names : tuple of str
        Names by which a case of another set is the same, the surest first.
    patient : str
        A text that stands for the patient, only as equal or not; empty if unknown.
    path : Path
        The file, or the folder of the result; for the terminal.
    has_grid : bool
        Whether the files state the grid of the scan.
    read : callable
        Returns the labels on a grid, or on that of the files for None. Raises ScanError:
        GRID_DIFFERS, or why they can't be read.
    image : callable
        Returns the scan, None if it can't be read.
    folder : str
        Name of the folder around the scan, by which another set may call the case; empty if
        unknown.
    series : str
        UID of the series that the labels are of; empty if unknown. It is one of `names`, too.
    """

    name: str
    names: tuple[str, ...]
    patient: str
    path: Path
    has_grid: bool
    read: Callable[[Grid | None], Labels]
    image: Callable[[], Volume | None]
    folder: str = ""
    series: str = ""


@dataclass(frozen=True)
class LabelSet:
    """Label maps of several cases.

    Parameters
    ----------
    cases : tuple of CaseLabels
        In the order of their names.
    pseudonymous : bool
        Whether names of cases are keyed ids: names of files don't belong beside them.
    is_file : bool
        Whether it is one file, which needs no name to be paired with a single case.
    training : frozenset of str
        Names of the dataset's cases for training, if `cases` are those set aside for testing.
    unreviewed : bool
        Whether it is an output folder in which nobody judged or corrected anything.
    """

    cases: tuple[CaseLabels, ...]
    pseudonymous: bool = False
    is_file: bool = False
    training: frozenset[str] = frozenset()
    unreviewed: bool = False


def open_label_set(path: Path, key: Path | None = None, *, corrected: bool = False) -> LabelSet:
    """Find the label maps at a path.

    Parameters
    ----------
    path : Path
        An output folder; a dataset of MSD, nnU-Net or MONAI, of which the cases that are set aside
        for testing count, or all if there are none; a bundle of `scanloom train`, of which those
        count that it held out; a folder of label maps, or of subfolders that have one each; or one
        label map.
    key : Path or None
        File with the key of an output folder, whose cases also have the names of their scans'
        files; None for the user's own. It is not needed for a folder without the crosswalk.
    corrected : bool
        Whether corrections replace the results of an output folder, of which only accepted and
        corrected structures count if anything in it was reviewed. Of a result that was replaced
        since, and nobody judged again, the correction counts.

    Raises
    ------
    ScanError
        NOT_FOUND; NO_REFERENCE if there is no label map; DAMAGED or LABELS_UNKNOWN if a dataset
        can't be read; TRAINING_DATA if a bundle held out no case; KEY_MISMATCH and other errors of
        the key.
    """
    if path.is_file():
        return LabelSet((_file_labels(path, case_name(path.name)),), is_file=True)
    if not path.is_dir():
        raise ScanError(Reason.NOT_FOUND, "this path does not exist", str(path))
    if (path / CASES).is_dir():
        return _results(path, key, corrected=corrected)
    if of_bundle := _document(path / _CONFIGS):
        cases, training = _held_out(path, of_bundle)
    else:
        cases, training = _dataset_cases(path), _training_names(path)
    if not cases:
        detail = "this folder has no label map, and is no output folder and no dataset"
        raise ScanError(Reason.NO_REFERENCE, detail, str(path))
    cases.sort(key=lambda case: case.name)
    return LabelSet(tuple(cases), training=training - {case.name for case in cases})


def _stem(name: str) -> str:
    """Return the name of a file without the suffix of its format."""
    suffix = next((s for s in _SUFFIXES if name.lower().endswith(s)), "")
    return name[: len(name) - len(suffix)]


def case_name(file: str) -> str:
    """Return the name of a file's case: macOS writes an umlaut as two characters."""
    return unicodedata.normalize("NFC", _stem(file))


def scan_name(file: Path) -> str:
    """Return the name of a scan's case: nnU-Net numbers the channels of images."""
    return case_name(file.name).removesuffix("_0000")


def _results(out: Path, key: Path | None, *, corrected: bool) -> LabelSet:
    check_links(out)
    folders = published_cases(out)
    if not folders:
        raise no_results(out)
    records = {}
    if (out / PRIVATE / CROSSWALK).exists():
        read_key_of(out, key)  # refuses another key
        # a folder of which no other name is recorded has that of the case
        ids = {folder.name: folder.name for folder in folders}
        ids |= {folder: case for case, folder in case_folders(out).items()}
        sources = latest_by_id(find_sources(out, sorted(ids.values())))
        records = {name: sources[case] for name, case in ids.items() if case in sources}
    verdicts = VerdictStack(read_verdicts(out)).current() if corrected else {}
    # of a folder that nobody ever reviewed, as of another model, every result is a reference
    is_reviewed = corrected and (
        any(verdicts.values()) or any(revision_folders(out, each.name) for each in folders)
    )
    cases = []
    for folder in folders:
        result = (
            reference_result(out, folder.name, verdicts.get(folder.name, {}))
            if corrected
            else folder
        )
        record = records.get(folder.name)
        names, patient, around, series = [folder.name], "", "", ""
        if record is not None:
            source = Path(record.path)
            around = source.parent.name  # files of one name have folders of their own
            file = scan_name(source)
            names += [record.id, f"{around}/{file}", file]
            series = record.series_uid
            names += [series] if series else []
            patient = named_patient(record)
        judged = verdicts.get(folder.name, {}) if is_reviewed else None
        cases.append(
            CaseLabels(
                folder.name,
                tuple(names),
                patient,
                result,
                has_grid=True,
                read=partial(_read_result, result, judged),
                image=partial(_source_image, out, folder.name, key),
                folder=around,
                series=series,
            )
        )
    return LabelSet(tuple(cases), pseudonymous=True, unreviewed=not is_reviewed)


def _read_result(folder: Path, verdicts: Mapping[str, Verdict] | None, grid: Grid | None) -> Labels:
    """Return the labels of a result: of the case's folder, or that of a revision.

    With verdicts, those of structures that were accepted or corrected: what a model labelled and
    nobody approved is no reference, least of all for that model.
    """
    maps = read_label_maps(folder)  # refuses damaged files first
    try:
        document = read_json(folder / CASE)["grid"]
        own = Grid(tuple(document["shape"]), document["affine_ras_mm"])
        entries = listed_label_maps(folder)
        regions = unique_names(
            (plain_name(structure["label"]), (n, (int(structure["number"]),)))
            for n, entry in enumerate(entries)
            for structure in entry["structures"]
        )
        if verdicts is not None:
            seen = seen_of(folder)
            statuses = {
                plain_name(structure["label"]): review_status(
                    folder, seen, verdicts, [f"{entry['model']}/{structure['label']}"]
                )
                for entry in entries
                for structure in entry["structures"]
            }
    except (ValueError, LookupError, TypeError) as exc:
        raise ScanError(Reason.RESULT_DAMAGED, "a document of the result is damaged") from exc
    grid = own if grid is None else grid
    layers = [on_grid(each, own.affine, grid) for each in maps.values()]
    if verdicts is not None:
        unapproved = [n for n in regions if statuses[n] not in ("accepted", "corrected")]
        dropped = [regions.pop(label) for label in unapproved]
        if not regions:
            phrases = {"stale": "replaced since its review"}
            listed = " and ".join(sorted({phrases.get(each, each) for each in statuses.values()}))
            raise ScanError(Reason.NOT_REVIEWED, f"the reference is {listed}")
        for n, layer in enumerate(layers):
            numbers = [value for of_layer, values in dropped if of_layer == n for value in values]
            layers[n] = np.where(np.isin(layer, numbers), 0, layer) if numbers else layer
    return Labels(tuple(layers), regions, grid)


def _source_image(out: Path, name: str, key: Path | None) -> Volume | None:
    try:
        return read_source(out, name, key).volume
    except ScanError:  # moved, changed, or the key is missing
        return None


def _file_labels(
    path: Path,
    name: str,
    values: Names | None = None,
    image: Path | None = None,
    patient: str = "",
    names: Sequence[str] = (),
) -> CaseLabels:
    """Return the labels of a file; `values` are those that a dataset names."""
    series = _referenced_series(path)
    return CaseLabels(
        name,
        (name, *(each for each in (*names, series) if each not in ("", name))),
        patient,
        path,
        has_grid=not path.name.lower().endswith(_SEGMENT_SUFFIXES),
        read=partial(_read_file, path, values),
        image=partial(_image, image),
        series=series,
    )


def _referenced_series(path: Path) -> str:
    """Return the UID of the series that a DICOM SEG refers to; empty if there is not one."""
    with suppress(Exception):  # damaged files fail in many ways: told when it is read
        [series] = _dicom_header(path).ReferencedSeriesSequence
        return str(series.SeriesInstanceUID)
    return ""


def _dicom_header(path: Path) -> Dataset:
    """Return the first elements of a DICOM file; none of a file that is damaged or no DICOM."""
    from pydicom.dataset import Dataset
    from pydicom.filereader import read_partial

    with suppress(Exception):
        if path.name.lower().endswith(".dcm"):
            with path.open("rb") as file:  # not the description of its frames, which may be long
                return read_partial(file, lambda tag, _, __: tag > _REFERENCED_SERIES)
    return Dataset()


def _read_file(path: Path, values: Names | None, grid: Grid | None) -> Labels:
    file = read_label_file(path, grid)
    if file.names is not None:
        segments = unique_names((plain_name(name), segment) for name, segment in file.names.items())
        regions = {name: (layer, (value,)) for name, (layer, value) in segments.items()}
        return Labels(file.layers, regions, file.grid, are_segments=True)
    values = values or _names_beside(path)
    names = None if values is None else {name: (0, each) for name, each in values.items()}
    return Labels(file.layers, names, file.grid)


def _image(path: Path | None) -> Volume | None:
    try:
        return None if path is None else load_volume(path)
    except ScanError:
        return None


# --- datasets -------------------------------------------------------------------------------------


def _dataset_cases(folder: Path) -> list[CaseLabels]:
    """Return the label maps of a dataset, or of a folder of files."""
    document = _document(folder)
    for subsets, end in ((_TESTS, "Ts"), (_TRAINING, "Tr")):
        files = _listed(folder, document, subsets)
        if files := files or [(file, None) for file in _files(folder / f"labels{end}")]:
            return _listed_cases(folder, files, document, _scans(folder / f"images{end}"))
    root, scans = folder, dict[str, Path]()
    if not document and folder.name.startswith("labels"):  # of a dataset
        root = folder.parent
        document = _document(root)
        scans = _scans(root / folder.name.replace("labels", "images", 1))
    found = _files(folder) or _files_below(folder)
    return _listed_cases(root, [(file, None) for file in found], document, scans)


def _listed_cases(
    root: Path,
    files: Sequence[tuple[Path, str | None]],
    document: Mapping[str, Any],
    scans: Mapping[str, Path],
) -> list[CaseLabels]:
    """Return the label maps of a dataset with its description; images are listed or in `scans`."""
    values, patients, of_images = value_names(document), _patients(root), _image_names(document)
    of_cases = _case_names([file for file, _ in files])
    return [
        _file_labels(
            file,
            name,
            values,
            root / image if image else scans.get(name),
            patients.get(name, ""),
            [of_images[image]] if image in of_images else [],
        )
        for name, (file, image) in zip(of_cases, files, strict=True)
    ]


def _held_out(bundle: Path, document: Mapping[str, Any]) -> tuple[list[CaseLabels], frozenset[str]]:
    """Return the cases that a training held out, and the names of those that it has seen."""
    try:
        root = Path(read_json(bundle / _CONFIGS / "train.json")["data_root"])
    except (OSError, ValueError, LookupError, TypeError) as exc:
        detail = "configs/train.json does not say where the cases of this bundle are"
        raise ScanError(Reason.TRAINING_DATA, detail, str(bundle)) from exc
    files = _listed(root, document, _TESTS)
    if not files:
        detail = "the recipe of this bundle held out no case (hold_out)"
        raise ScanError(Reason.TRAINING_DATA, detail, str(bundle))
    seen = _all_names(_listed(root, document, _TRAINING), document)
    return _listed_cases(root, files, document, {}), seen


def _listed(
    folder: Path, document: Mapping[str, Any], subsets: Sequence[str]
) -> list[tuple[Path, str | None]]:
    """Return the label maps, with their images, that a description of a dataset lists."""
    return [
        (folder / each["label"], each.get("image"))
        for subset in subsets
        for each in _items(document, subset)
    ]


def _training_names(folder: Path) -> frozenset[str]:
    """Return the names of the training cases of a dataset, or of that of a folder `labelsTs`."""
    document = _document(folder)
    if not document and folder.name == "labelsTs":
        folder, document = folder.parent, _document(folder.parent)
    if not document:
        return frozenset()
    listed = _listed(folder, document, _TRAINING)
    listed = listed or [(file, None) for file in _files(folder / "labelsTr")]
    return _all_names(listed, document)


def _all_names(
    files: Sequence[tuple[Path, str | None]], document: Mapping[str, Any]
) -> frozenset[str]:
    """Return the names of label maps, and those of `_image_names` of their images."""
    of_images = _image_names(document)
    images = (of_images[image] for _, image in files if image in of_images)
    return frozenset((*_case_names([file for file, _ in files]), *images))


def _image_names(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of listed images: a list may pair `segmentation-0` with `volume-0`.

    A name that several images of the list have, whatever they are for, tells no case.
    """
    listed = (
        each["image"] for subset in (*_TESTS, *_TRAINING) for each in _items(document, subset)
    )
    names = {image: scan_name(Path(image)) for image in listed if image}
    counts = Counter(names.values())
    return {image: name for image, name in names.items() if counts[name] == 1}


def _patients(folder: Path) -> dict[str, str]:
    """Return the patient of each case of a dataset of ours: a number."""
    return {case: f"number {number}" for case, number in recorded(folder, "patient").items()}


def recorded(folder: Path, name: Literal["patient", "fold"]) -> dict[str, int]:
    """Return the patient or fold of each case of a dataset of ours, where it has one."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # none, or of another program
        cases = read_json(folder / RECORD)["cases"]
        return {case["case"]: int(case[name]) for case in cases if case[name] is not None}
    return {}


def _case_names(files: Sequence[Path]) -> list[str]:
    """Return the names of files; if some are equal, those of folders around them, or paths."""
    paths = [Path(os.path.normpath(file.absolute())) for file in files]
    paths = [path.with_name(case_name(path.name)) for path in paths]
    for level in range(1, min((len(path.parts) for path in paths), default=0)):
        names = [path.parts[-level] for path in paths]
        if len(set(names)) == len(names):
            return names
    around = os.path.commonpath([path.parent for path in paths]) if paths else ""
    return [path.relative_to(around).as_posix() for path in paths]


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(
        file
        for file in folder.iterdir()
        if file.name.lower().endswith(_SUFFIXES) and file.name[0] != "." and file.is_file()
    )


def _files_below(folder: Path) -> list[Path]:
    """Return the label maps of subfolders, each of which has one; scans in DICOM don't count."""
    if (folder / CASES).is_dir():
        detail = "a subfolder is an output folder: name it"
        raise ScanError(Reason.LABELS_UNKNOWN, detail, str(folder))
    seg = _SEG_CLASSES[0]
    files = [f for f in _files(folder) if _dicom_header(f).get("SOPClassUID", seg) in _SEG_CLASSES]
    if len(files) > 1:
        detail = "a subfolder has several label maps or scans: give each case one file"
        raise ScanError(Reason.LABELS_UNKNOWN, detail, str(folder))
    for each in sorted(folder.iterdir()):
        if each.is_dir() and each.name[0] != "." and not each.is_symlink():
            files += _files_below(each)
    return files


def _scans(folder: Path) -> dict[str, Path]:
    """Return the images of a dataset by the names of their label maps; the first channel counts."""
    scans: dict[str, Path] = {}
    for file in _files(folder):
        scans.setdefault(scan_name(file), file)
    return scans


def _document(folder: Path) -> dict[str, Any]:
    """Return the description of a dataset; empty for a folder without one."""
    for name in _DOCUMENTS:
        try:
            document = json.loads(read_regular_file(folder / name, MAX_LIST_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as exc:
            detail = f"{name} can't be read ({type(exc).__name__})"
            raise ScanError(Reason.UNREADABLE, detail, str(folder)) from exc
        except (ValueError, RecursionError) as exc:
            raise ScanError(Reason.DAMAGED, f"{name} is not JSON", str(folder)) from exc
        if not isinstance(document, dict):
            raise ScanError(Reason.DAMAGED, f"{name} is not a JSON object", str(folder))
        return document
    return {}


def _items(document: Mapping[str, Any], subset: str) -> list[dict[str, Any]]:
    """Return the cases of a list that name a label map."""
    listed = document.get(subset)
    items = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    # a case of several channels lists its images
    return [
        {**each, "image": each.get("image") if isinstance(each.get("image"), str) else None}
        for each in items
        if isinstance(each.get("label"), str)
    ]


def value_names(document: Mapping[str, Any]) -> Names | None:
    """Return the values of each structure of a dataset; None if it names none.

    MSD has names by value, nnU-Net values by name, of which a region has several.
    """
    labels = document.get("labels")
    if not isinstance(labels, dict):
        return None
    pairs: list[tuple[str, Any]] = [
        (value, key) if isinstance(value, str) else (key, value) for key, value in labels.items()
    ]
    named = []
    for name, value in pairs:
        listed = value if isinstance(value, list) else [value]
        numbers = [str(each) for each in listed]
        if not all(number.isdecimal() and int(number) <= MAX_VALUE for number in numbers):
            detail = f"dataset.json has a label without a value from 0 to {MAX_VALUE}"
            raise ScanError(Reason.LABELS_UNKNOWN, detail)
        # a region of the background and others is the background
        if 0 not in (values := tuple(map(int, numbers))):
            named.append((plain_name(name), values))
    return unique_names(named)


def plain_name(text: str) -> str:
    """Return a name of a structure without case and punctuation, of any script."""
    return re.sub(r"[\W_]+", "_", text.casefold()).strip("_")


def unique_names(pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return values by name; LABELS_UNKNOWN if two structures have one name, or one has none."""
    listed = list(pairs)
    names = dict(listed)
    if len(names) < len(listed) or "" in names:
        raise ScanError(Reason.LABELS_UNKNOWN, "two structures have one name, or one has none")
    return names


def _names_beside(path: Path) -> Names | None:
    """Return the structures in the JSON beside a file: its own, or `segments.json` of its case."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # none, or of another program
        document = read_json(path.with_name(f"{_stem(path.name)}.json"))
        return _numbers(document["structures"])
    with suppress(OSError, ValueError, LookupError, TypeError):
        files = {entry["file"]: entry for entry in read_json(path.with_name(SEGMENTS))["files"]}
        return _numbers(files[path.name]["structures"])
    return None


def _numbers(structures: Iterable[Mapping[str, Any]]) -> Names:
    """Return the number of each structure in a document of a result, by its label."""
    return unique_names((plain_name(each["label"]), (int(each["number"]),)) for each in structures)
