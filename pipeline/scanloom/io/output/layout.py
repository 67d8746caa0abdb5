"""Layout of an output folder: its recognition, its entries and its published cases."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any, Literal, TypeVar

from scanloom.core import Reason, ScanError
from scanloom.io.output.file_names import CASE
from scanloom.io.output.json_file import read_json
from scanloom.io.output.private import CROSSWALK, KEY_FINGERPRINT, MAX_FINGERPRINT_BYTES, PRIVATE
from scanloom.io.output.published import check_files
from scanloom.io.system.regular_files import read_regular_file

CASES = "cases"
LISTEN = "listen"
EARLY_ENTRIES = frozenset({".work", "runs", "engines", LISTEN, PRIVATE})
"""Entries that a run creates before the folder is recognizable as an output folder."""
_TABLES = ("manifest", "measurements", "radiomics")
OUTPUT_ENTRIES = EARLY_ENTRIES | {
    CASES,
    "failed",
    "report",
    "bids",
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
    """Return whether a folder, with the names of the entries `inside`, is an output folder."""
    if PRIVATE not in inside:
        return False
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
    return CASES in inside and _contains_a_case(Path(folder, CASES))


def _contains_a_case(cases: Path) -> bool:
    """Return whether a folder in `cases` has a `case.json`."""
    try:
        with os.scandir(cases) as entries:
            return any(os.path.lexists(os.path.join(entry.path, CASE)) for entry in entries)  # noqa: PTH118
    except OSError:
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
    try:
        foreign = _foreign(out)
    except OSError as exc:
        detail = f"the output folder can't be read ({type(exc).__name__})"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail) from exc
    if foreign is not None:
        detail = f"{foreign} in the output folder was not written by scanloom: use another --out"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail)


def _foreign(out: Path) -> str | None:
    """Return the name of a foreign entry that scanloom would overwrite; None for a claimed OUT."""
    if any(os.path.lexists(out / PRIVATE / name) for name in (KEY_FINGERPRINT, CROSSWALK)):
        return None
    for name in sorted(OUTPUT_ENTRIES - EARLY_ENTRIES):
        path = out / name
        empty = name in _MAY_BE_EMPTY and path.is_dir() and not any(path.iterdir())
        if os.path.lexists(path) and not empty:
            return name
    return None


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
    if not {CASES, "failed", "runs", LISTEN}.intersection(inside):
        detail += ", only an index of scans"
    return ScanError(Reason.NO_RESULTS, detail, str(out))


def published_cases(out: Path) -> list[Path]:
    """Return the folders of the published cases, sorted by name; foreign entries are ignored."""
    try:
        with os.scandir(out / CASES) as entries:
            names = [
                entry.name
                for entry in entries
                if is_case_name(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [out / CASES / name for name in sorted(names)]


def iter_cases(out: Path, read: Callable[[Path], T], damaged: set[str]) -> Iterator[T]:
    """Yield the result of `read` for the folder of each published case.

    Parameters
    ----------
    out : Path
        The output folder.
    read : callable
        Function of a case folder, which opens no files outside it.
    damaged : set of str
        Receives the names of the cases whose files are missing, unreadable or changed.
    """
    for folder in published_cases(out):
        try:
            check_files(folder)
            case = read(folder)
        except _DAMAGE:
            damaged.add(folder.name)
        else:
            yield case


def read_case(folder: Path) -> dict[str, Any]:
    """Return the document `case.json` of a published case.

    Raises
    ------
    OSError, ValueError
        If the document is missing or damaged.
    """
    return read_json(folder / CASE)


def is_case_name(name: str) -> bool:
    """Return whether a folder in `cases/` with that name is a case folder."""
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
    holds : Identity
        The most that a file may hold.
    """

    pattern: str
    holds: Identity

    def describes(self, path: PurePath) -> bool:
        """Return whether the entry describes the file with a path relative to OUT."""
        pattern, names = self.pattern.split("/"), path.parts
        if pattern[-1] == "**":
            pattern, names = pattern[:-1], names[: len(pattern) - 1]
            if len(path.parts) <= len(pattern):
                return False
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
    OutputEntry(".work/**", "dicom"),  # cases that are being written, or whose process died
    *_result("cases/*"),
    OutputEntry("bids/**", "shapes"),
    OutputEntry("report/**", "pixels"),
    OutputEntry("listen/index.html", "ids"),
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
