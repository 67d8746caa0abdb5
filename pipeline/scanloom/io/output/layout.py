"""Layout of an output folder: its recognition, its entries and its published cases."""

from __future__ import annotations

import heapq
import itertools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any, Literal, TypeVar

from scanloom.core import Reason, ScanError
from scanloom.io.identity import ID_FORM
from scanloom.io.output.file_names import CASE, CHECKSUMS, SEGMENTS
from scanloom.io.output.json_file import read_json
from scanloom.io.output.private import CROSSWALK, KEY_FINGERPRINT, MAX_FINGERPRINT_BYTES, PRIVATE
from scanloom.io.output.published import check_files
from scanloom.io.system.atomic_write import fsync_path
from scanloom.io.system.regular_files import check_folder, read_regular_file
from scanloom.io.system.scratch_folders import DIED, FINAL_STATES, observed_state

CASES = "cases"
SUBFOLDERS = "_folders"
"""The file in `cases/` by which new cases go to subfolders: `cases/_xy/<name>`."""
_SUBFOLDERS_TEXT = (
    "A case is in the subfolder of the last two characters of its name: cases/_xy/<name>. "
    "Cases that lie in cases/ itself stay there.\n"
)
FANNED_ABOVE = 10_000
"""Number of cases above which new ones go to subfolders."""
LISTEN, LISTEN_STATUS = "listen", "listen/status.json"
TOTALS = "totals.json"
"""The file in the folder of a run that has ended."""
EARLY_ENTRIES = frozenset({".work", "runs", "engines", LISTEN, PRIVATE})
"""Entries that a run creates before the folder is recognizable as an output folder."""
_TABLES = ("manifest", "measurements", "radiomics")
OUTPUT_ENTRIES = EARLY_ENTRIES | {
    CASES,
    "failed",
    "report",
    "bids",
    "review",
    *(f"{table}.{kind}" for table in _TABLES for kind in ("csv", "parquet")),
}
"""All entries that scanloom writes to an output folder."""
_MAY_BE_EMPTY = frozenset({CASES, "failed"})
"""Folders that a run may leave if it dies before its first result."""

MAX_NAME_BYTES = 255
"""Length of a file name that file systems have."""
_CASE_NAME = re.compile(r"[^\W_][\w-]*")  # ids, and the names of `scanloom.io.output.crosswalk`
_FINGERPRINT = re.compile(rb"[a-z2-7]{26}")
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Exceptions when reading a file that was changed after its publication."""

T = TypeVar("T")


def is_output_folder(folder: str, inside: list[str]) -> bool:
    """Return whether a folder, with the names of the entries `inside`, is an output folder.

    A copy of one without `private/`, such as an export, is one too.
    """
    if PRIVATE not in inside:
        return CASES in inside and any(map(_is_result, _entries_found(folder)))
    file = Path(folder, PRIVATE, KEY_FINGERPRINT)
    with suppress(OSError):
        if _FINGERPRINT.fullmatch(read_regular_file(file, MAX_FINGERPRINT_BYTES).strip()):
            return True
    try:
        file.lstat()
    except PermissionError:  # the folder of another user
        pass
    except OSError:
        return False
    # The fingerprint is damaged or unreadable: a published case identifies the folder too
    return CASES in inside and any(
        os.path.lexists(os.path.join(path, CASE))  # noqa: PTH118  # of many entries
        for path in _entries_found(folder)
    )


def _entries_found(folder: str) -> Iterator[str]:
    """Yield the paths of the entries of `cases/` as far as it can be read."""
    with suppress(OSError):
        yield from (entry.path for entry, _ in _entries(Path(folder)))


def _is_result(path: str) -> bool:
    """Return whether a folder holds a result of ours: other programs may write a `case.json`."""
    if not os.path.lexists(os.path.join(path, CHECKSUMS)):  # noqa: PTH118  # of many entries
        return False
    try:
        return "recipe" in read_json(Path(path, CASE))
    except ScanError:  # of another version
        return True
    except _DAMAGE:
        return False


def check_foreign_entries(out: Path) -> None:
    """Refuse a folder with foreign files that scanloom would overwrite.

    A folder that was claimed for a key is accepted; so is one that lost its fingerprint but has its
    crosswalk, and one that does not exist.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if a foreign entry has a name that scanloom writes to, or the folder can't
        be read.
    """
    if any(os.path.lexists(out / PRIVATE / name) for name in (KEY_FINGERPRINT, CROSSWALK)):
        return
    empty = set[str]()
    try:
        for name in _MAY_BE_EMPTY:
            if (out / name).is_dir() and not any(
                _entries(out) if name == CASES else (out / name).iterdir()
            ):
                empty.add(name)
    except OSError as exc:
        detail = f"the output folder can't be read ({type(exc).__name__})"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail) from exc
    for name in sorted(OUTPUT_ENTRIES - EARLY_ENTRIES - empty):
        if os.path.lexists(out / name):
            detail = f"{name} in the output folder was not written by scanloom: use another --out"
            raise ScanError(Reason.OUTPUT_UNWRITABLE, detail)


def no_results(out: Path, missing: str = "results") -> ScanError:
    """Return the error for a folder whose results were asked for, saying its kind.

    Parameters
    ----------
    out : Path
        The folder that was named as output folder.
    missing : str
        The entries that it lacks, such as "results".
    """
    try:
        inside = [path.name for path in out.iterdir()]
    except FileNotFoundError:
        return ScanError(Reason.NOT_FOUND, "this path does not exist", str(out))
    except NotADirectoryError:
        return ScanError(Reason.NO_RESULTS, "this is a file, not an output folder", str(out))
    except OSError as exc:
        detail = f"this folder can't be read ({type(exc).__name__})"
        return ScanError(Reason.UNREADABLE, detail, str(out))
    if not is_output_folder(str(out), inside):
        kind = "no output folder of scanloom" if inside else "empty"
        detail = f"there are no {missing}: this folder is {kind}"
        return ScanError(Reason.NO_RESULTS, detail, str(out))
    detail = f"there are no {missing} in this output folder"
    if _is_at_work(out):
        detail += " yet: a run is at work"
    elif not {CASES, "failed", "runs", LISTEN}.intersection(inside):
        detail += ", only an index of scans"
    return ScanError(Reason.NO_RESULTS, detail, str(out))


def _is_at_work(out: Path) -> bool:
    """Return whether a run of an output folder goes on; damaged ones do not count."""
    for file in (out / "runs").glob("*/status.json"):
        with suppress(OSError, ValueError, LookupError, TypeError, ScanError):
            if observed_state(read_json(file)) not in (*FINAL_STATES, DIED):
                return True
    return False


# --- where a case lies ----------------------------------------------------------------------------


def case_folder(out: Path, name: str) -> Path:
    """Return the folder of a case: where it lies, or else where a new one belongs.

    A case lies in `OUT/cases/<name>`, or in `OUT/cases/_xy/<name>` with the last two characters of
    its name. Of one that lies in both, the former counts.
    """
    flat = out / CASES / name
    if flat.is_dir():
        return flat
    fanned = flat.with_name(subfolder_of(name)) / name
    return fanned if fanned.is_dir() or is_fanned(out) else flat


def subfolder_of(name: str) -> str:
    """Return the name of the subfolder of `cases/` for a case; no case can have such a name.

    The last characters are evenly distributed for ids and for numbered names. Names that some file
    systems do not distinguish have one subfolder.
    """
    return f"_{unicodedata.normalize('NFC', name.lower())[-2:]}"


def output_of(folder: Path) -> Path:
    """Return the output folder of the folder of a case."""
    parent = folder.parent
    return parent.parent if parent.name == CASES else parent.parent.parent


def is_fanned(out: Path) -> bool:
    """Return whether new cases of an output folder go to subfolders of `cases/`."""
    return os.path.lexists(out / CASES / SUBFOLDERS)


def fan_out(out: Path, added: int | None = None) -> None:
    """Let new cases of an output folder go to subfolders of `cases/`, if there will be many.

    Parameters
    ----------
    out : Path
        The output folder; created if missing. Its cases stay where they are.
    added : int or None
        Number of cases that may be added; None if it has no limit.

    Raises
    ------
    OSError
        If the file `cases/_folders` can't be written.
    """
    if is_fanned(out):
        return
    with suppress(FileNotFoundError, NotADirectoryError):
        if added is not None:
            added += sum(1 for _ in itertools.islice(_entries(out), FANNED_ABOVE))
    if added is not None and added <= FANNED_ABOVE:
        return
    cases = out / CASES
    check_folder(cases)
    cases.mkdir(parents=True, exist_ok=True)
    # That it exists counts, not its text: no draft, which a killed process would leave in `cases/`
    with suppress(FileExistsError), (cases / SUBFOLDERS).open("x", encoding="utf-8") as file:
        file.write(_SUBFOLDERS_TEXT)
    fsync_path(cases)


def case_parents(out: Path) -> list[Path]:
    """Return `OUT/cases` and its subfolders, whose times change with the cases in them."""
    cases, parents = out / CASES, [out / CASES]
    if is_fanned(out):
        with suppress(FileNotFoundError), os.scandir(cases) as entries:
            parents += sorted(cases / entry.name for entry in entries if _is_subfolder(entry))
    return parents


def taken_names(out: Path) -> list[str]:
    """Return the names that no new case may have, of cases and of foreign entries."""
    try:
        return [entry.name for entry, _ in _entries(out)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _entries(out: Path) -> Iterator[tuple[os.DirEntry[str], str]]:
    """Yield the entries of `OUT/cases` and of its subfolders, each with its subfolder or "".

    Raises
    ------
    OSError
        If `OUT/cases` can't be read.
    """
    with os.scandir(out / CASES) as entries:
        for entry in entries:
            if _is_subfolder(entry):
                with suppress(FileNotFoundError), os.scandir(entry) as inside:
                    yield from ((each, entry.name) for each in inside)
            elif entry.name != SUBFOLDERS:
                yield entry, ""


def _is_subfolder(entry: os.DirEntry[str]) -> bool:
    name = unicodedata.normalize("NFC", entry.name)
    return name[0] == "_" and 2 <= len(name) <= 3 and entry.is_dir(follow_symlinks=False)


def case_entries(out: Path) -> Iterator[tuple[os.DirEntry[str], bool]]:
    """Yield the folder of each published case, in any order, and whether it lies in a subfolder.

    A case may lie in both places; foreign entries are ignored.

    Raises
    ------
    OSError
        If `OUT/cases` can't be read.
    """
    for entry, subfolder in _entries(out):
        name = entry.name
        in_place = not subfolder or unicodedata.normalize("NFC", subfolder) == subfolder_of(name)
        if in_place and is_case_name(name) and entry.is_dir(follow_symlinks=False):
            yield entry, bool(subfolder)


def stray_results(out: Path) -> list[str]:
    """Return the names of folders in `OUT/cases` that hold a result but are no cases, sorted.

    Their names can't be those of cases: somebody renamed or copied them. Other entries are those of
    systems, such as `.DS_Store`.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(
            entry.name
            for entry, subfolder in _entries(out)
            if not (subfolder or is_case_name(entry.name)) and Path(entry.path, CASE).is_file()
        )
    return []


class PublishedCases(Iterable[Path], Sized):
    """The folders of published cases, sorted by name; foreign entries are ignored.

    They are listed once, without a `stat` of any. Names are kept in sorted runs of text, which are
    merged while they are read: a million ids take 30 MB instead of 330.

    Parameters
    ----------
    out : Path
        The output folder.
    """

    def __init__(self, out: Path) -> None:
        self._out, self._cases = out, out / CASES
        self._runs: list[bytes] = []
        self._in_place = Counter[bool]()  # by whether they lie in subfolders
        with suppress(FileNotFoundError, NotADirectoryError):
            entries = self._list()
            while run := sorted(itertools.islice(entries, _RUN)):
                self._runs.append("\n".join(run).encode())

    def _list(self) -> Iterator[str]:
        """Yield the name of each case, with `_FANNED` if it lies in a subfolder."""
        for entry, fanned in case_entries(self._out):
            self._in_place[fanned] += 1
            yield entry.name + _FANNED if fanned else entry.name

    def _merged(self) -> Iterator[tuple[str, bool]]:
        """Yield names in order, and whether each lies in a subfolder; of equal ones, that last."""
        # UTF-8 sorts as its characters do, and no character of a name sorts before `_FANNED`
        lines = ((line.group() for line in re.finditer(rb"[^\n]+", run)) for run in self._runs)
        for line in heapq.merge(*lines):
            text = line.decode()
            name = text.removesuffix(_FANNED)
            yield name, name != text

    def _places(self) -> Iterator[tuple[str, Iterator[tuple[str, bool]]]]:
        """Yield each name with the one or two entries of `_merged` that have it."""
        return itertools.groupby(self._merged(), itemgetter(0))

    def __bool__(self) -> bool:
        return bool(self._runs)

    def __len__(self) -> int:
        if len(self._in_place) > 1:  # some may lie in both places
            return sum(1 for _ in self.names())
        return self._in_place.total()

    def __iter__(self) -> Iterator[Path]:
        for _, places in self._places():
            yield self._path(*next(places))

    def names(self) -> Iterator[str]:
        """Yield the names of the folders, in order."""
        return (name for name, _ in self._places())

    def copies(self) -> Iterator[Path]:
        """Yield the folders in subfolders whose cases lie in `cases/` too, where they count."""
        for _, (_, *copies) in self._places():
            yield from itertools.starmap(self._path, copies)

    def _path(self, name: str, fanned: bool) -> Path:
        return Path(self._cases, subfolder_of(name), name) if fanned else Path(self._cases, name)


_FANNED = "\0"
_RUN = 10_000


def published_cases(out: Path) -> PublishedCases:
    """Return the folders of the published cases, sorted by name."""
    return PublishedCases(out)


def iter_cases(
    out: Path,
    read: Callable[[Path, dict[str, Any], dict[str, Any]], T],
    damaged: set[str],
    folders: Iterable[Path] | None = None,
) -> Iterator[T]:
    """Yield the result of `read` for the folder of each published case.

    Parameters
    ----------
    out : Path
        The output folder.
    read : callable
        Function of a case folder, its `case.json` and its `timing.json`, which opens no files
        outside the folder.
    damaged : set of str
        Receives the names of the cases whose files are missing, unreadable or changed, and of
        folders that hold the result of another case, or one of another version of scanloom.
    folders : iterable of Path, optional
        The folders of some cases, in place of all.
    """
    owners = Owners(out)
    for folder in published_cases(out) if folders is None else folders:
        try:
            timing, document = check_files(folder), read_case(folder)
            other = owners.other_case(folder.name, document)
            case = None if other else read(folder, document, timing)
        except (*_DAMAGE, ScanError):  # ScanError: of another version
            case = None
        if case is None:
            damaged.add(folder.name)
        else:
            yield case


class Owners:
    """Tells whose result a case folder holds: it may have been copied, renamed or exchanged."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def other_case(self, name: str, document: Mapping[str, Any]) -> str:
        """Return the id of the case to which the result belongs; "" if it is where it belongs.

        `name` is that of the folder, `document` its `case.json`.

        A folder that is not named by the case id is named by the source, which the crosswalk tells.
        Without it, only names that look like ids are judged.
        """
        name = unicodedata.normalize("NFC", name)
        case = str(document.get("case", name))
        if case == name:
            return ""
        known, names = self._crosswalk
        if case in known:
            return "" if names.get(case, case) == name else case
        return case if ID_FORM.fullmatch(name) else ""

    @cached_property
    def _crosswalk(self) -> tuple[Container[str], Mapping[str, str]]:
        """The ids in the crosswalk, and their names; none if it is missing or can't be read."""
        from scanloom.io.output.crosswalk import case_folders, known_ids

        try:
            return known_ids(self._out), case_folders(self._out)
        except (OSError, ScanError):  # it is readable for its owner alone
            return (), {}


def read_case(folder: Path) -> dict[str, Any]:
    """Return the document `case.json` of a published case.

    Raises
    ------
    OSError, ValueError
        If the document is missing or damaged.
    """
    return read_json(folder / CASE)


def listed_label_maps(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of the label maps in the `segments.json` of a case or revision.

    Each has a `file` in the folder, a `model` and `structures`. The document may have been changed:
    no other file is opened, linked or copied for it.

    Raises
    ------
    OSError, ValueError, LookupError, TypeError
        If the document is missing or damaged, or names another file.
    """
    entries: list[dict[str, Any]] = read_json(folder / SEGMENTS)["files"]
    for entry in entries:
        if not fnmatchcase(entry["file"], "*segmentation*.nii.gz") or "/" in entry["file"]:
            raise ValueError(f"{SEGMENTS} names a file that is no label map")
    return entries


def is_case_name(name: str) -> bool:
    """Return whether a folder with that name is that of a case."""
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        return False
    return _CASE_NAME.fullmatch(unicodedata.normalize("NFC", name)) is not None


# --- data of patients in an output folder ---------------------------------------------------------
# Data of patients that each file of an output folder may hold: the one list of them.
#
# Exports, `docs/identity.md` and the test that searches an output folder for a patient's name
# follow this list. A file that no entry describes may not be written.

Identity = Literal["ids", "shapes", "pixels", "dicom", "private"]
"""Keyed ids, numbers and codes; label maps and surfaces, of a head with its face; pixels of the
scan; patient, UIDs and dates, as DICOM requires them; everything, for the holder of the key."""


@dataclass(frozen=True)
class OutputEntry:
    """Files of an output folder.

    Parameters
    ----------
    pattern : str
        Path below OUT; `*` stands for any text without a slash, a last `**` for all below.
        `cases/*` is the folder of a case, also in a subfolder.
    holds : Identity
        The most that a file may hold.
    """

    pattern: str
    holds: Identity

    def describes(self, path: PurePath) -> bool:
        """Return whether the entry describes the file with a path relative to OUT."""
        pattern, names = self.pattern.split("/"), path.parts
        if names[:1] == (CASES,) and len(names) > 2 and names[1].startswith("_"):
            if names[1] != subfolder_of(names[2]):
                return False
            names = (CASES, *names[2:])
        if pattern[-1] == "**":
            if len(names) < len(pattern):
                return False
            pattern, names = pattern[:-1], names[: len(pattern) - 1]
        same = len(pattern) == len(names)
        return same and all(map(fnmatchcase, names, pattern))


def _result(folder: str) -> tuple[OutputEntry, ...]:
    """Return the entries of a case's folder, or of a revision's, which has the same files."""
    tables = ("measurements.*", "radiomics.*")
    documents = (*tables, "case.json", "segments.json", "timing.json", "SHA256SUMS")
    maps = (
        *("*segmentation*.nii.gz", "*entropy.nii.gz", "*disagreement.nii.gz", "split/*.nii.gz"),
        *("*segmentation.seg.nrrd", "*surface.glb"),
    )
    return (
        *(OutputEntry(f"{folder}/{name}", "ids") for name in documents),
        *(OutputEntry(f"{folder}/{name}", "shapes") for name in maps),
        *(OutputEntry(f"{folder}/{n}", "pixels") for n in ("preview.png", "thumbnail.png")),
        OutputEntry(f"{folder}/image*.nii.gz", "pixels"),
        OutputEntry(f"{folder}/dicom/**", "dicom"),
    )


CONTENTS: tuple[OutputEntry, ...] = (
    OutputEntry("manifest.*", "ids"),
    OutputEntry("measurements.*", "ids"),
    OutputEntry("radiomics.*", "ids"),
    OutputEntry("failed/*.json", "ids"),
    OutputEntry("runs/**", "ids"),
    OutputEntry("engines/*/engine.json", "ids"),
    OutputEntry(".work/**", "dicom"),  # cases being written, or waiting for an index
    OutputEntry(f"{CASES}/{SUBFOLDERS}", "ids"),
    *_result(f"{CASES}/*"),
    OutputEntry("bids/**", "shapes"),
    OutputEntry("report/**", "pixels"),
    OutputEntry("listen/*", "ids"),
    *(OutputEntry(f"review/{n}", "ids") for n in (".lock", "verdicts.jsonl", "readers.json")),
    *(OutputEntry(f"review/{n}", "ids") for n in ("review.csv", "review.parquet", "agreement.csv")),
    *_result("review/revisions/*/*"),
    OutputEntry("private/**", "private"),
)


def identity_of(path: PurePath) -> Identity:
    """Return the data that a file may hold, by its path relative to OUT.

    Raises
    ------
    ValueError
        If not exactly one entry describes it.
    """
    entries = [entry for entry in CONTENTS if entry.describes(path)]
    if len(entries) != 1:
        raise ValueError(f"{len(entries)} entries describe a file of an output folder")
    return entries[0].holds
