"""Provenance of a published case, and the check that its files are unchanged.

`case.json` records the recipe and the hash of the source's content. `timing.json`, the one file
that differs between two equal runs, records two stamps, which cost only a `stat` to compare: the
stamp of the source's files, and size and modification time of each file of the folder. If a stamp
differs, the contents are compared; if they are equal, as after a copy, the new stamp is stored.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from scanloom.core import Case, Reason, ScanError, is_passing
from scanloom.io.output.file_names import CASE, CHECKSUMS, TIMING
from scanloom.io.output.json_file import MAX_DOCUMENT_BYTES, read_json, write_json
from scanloom.io.system.atomic_write import atomic_write
from scanloom.io.system.disk_errors import disk_error
from scanloom.io.system.regular_files import read_regular_file, sha256_of

FILE_STAMPS, SOURCE_STAMP = "files", "source_stamp"
"""Keys of `timing.json`: size and modification time of each other file; stamp of the source."""


OTHER_RECIPE = "the existing result was made by another recipe"
"""Detail of a result that is STALE because of the request, not of its files."""
OTHER_MEANWHILE = "another process published a result of another recipe in the meantime"
"""Detail of a result that is STALE although there was none when its case was begun."""


class _ChangedFileError(ValueError):
    """A file of a published case differs from its record; the text names the file."""


class ResultState(Enum):
    """State of a published result, compared with the requested case."""

    ABSENT = auto()
    """No result exists."""
    CURRENT = auto()
    """Made from the same content by the same recipe."""
    UNSURE = auto()
    """Made by the same recipe; the source may have changed, so its content must be compared."""
    CHANGED = auto()
    """Made by the same recipe from different content."""
    REPLACEABLE = auto()
    """Made by another recipe, or damaged, and it may be replaced."""


@dataclass(frozen=True)
class ResultProvenance:
    """Provenance of a published case.

    Parameters
    ----------
    recipe : str
        Hash of the recipe.
    source : str
        Hash of the source's content.
    stamp : str
        Stamp of the source's files; empty if not recorded.
    """

    recipe: str
    source: str
    stamp: str


def result_state(folder: Path, case: Case, *, replace: bool) -> ResultState:
    """Compare the published result in a case's folder, if any, with the requested case.

    Recipe and stamp are compared, and the source hash if the case has one. `replace` says whether a
    result that is damaged, or of another recipe, may be replaced.

    Raises
    ------
    ScanError
        STALE, RESULT_DAMAGED or NEWER_VERSION if such a result exists and may not be replaced;
        STALE also if its source has changed and its folder contains foreign files;
        OUTPUT_UNWRITABLE if it can't be read now.
    """
    if not folder.is_dir():
        return ResultState.ABSENT
    try:
        provenance = read_provenance(folder)
    except (OSError, ValueError, ScanError) as exc:  # ScanError: NEWER_VERSION
        if replace:
            return ResultState.REPLACEABLE
        if isinstance(exc, ScanError):
            raise
        if is_passing(exc) and (away := disk_error(exc)) is not None:
            raise away from exc
        raise ScanError(Reason.RESULT_DAMAGED, _damage(exc)) from exc
    if provenance.recipe != case.recipe:
        if replace:
            return ResultState.REPLACEABLE
        raise ScanError(Reason.STALE, OTHER_RECIPE)
    if case.source_hash and provenance.source != case.source_hash:
        if not replace and _has_foreign_files(folder):
            detail = "the case folder contains foreign files, such as a correction"
            raise ScanError(Reason.STALE, detail)
        return ResultState.CHANGED
    if case.source_hash or (case.stamp and provenance.stamp == case.stamp):
        return ResultState.CURRENT
    return ResultState.UNSURE


def _damage(error: OSError | ValueError) -> str:
    """Return which file of a published case is missing, or was changed.

    The case is not named: its folder may have the name of a patient.
    """
    if isinstance(error, FileNotFoundError) and error.filename:
        missing = Path(os.fsdecode(error.filename)).name
        return f"{missing} of the published case is missing"
    if isinstance(error, _ChangedFileError):
        return f"{error} in the published case"
    return "a file of the published case was changed or can't be read"


def read_provenance(folder: Path) -> ResultProvenance:
    """Return the provenance of a published case after checking its files.

    Raises
    ------
    OSError, ValueError
        If the case is damaged: a file is missing, unreadable or changed.
    """
    timing, case = check_files(folder), read_json(folder / CASE)
    source = case.get("source")
    recipe, content = case.get("recipe"), source.get("hash") if isinstance(source, dict) else None
    if not isinstance(recipe, str) or not isinstance(content, str):
        raise ValueError("case.json is malformed")  # noqa: TRY004  # a damaged file
    return ResultProvenance(recipe, content, str(timing.get(SOURCE_STAMP, "")))


def check_files(folder: Path) -> dict[str, Any]:
    """Check size and modification time of each file of a published case; return `timing.json`.

    If only the time differs, the content is compared with `SHA256SUMS`.

    Raises
    ------
    OSError, ValueError
        If a file is missing, unreadable or changed.
    """
    timing = read_json(folder / TIMING)
    stamps = timing.get(FILE_STAMPS, {})
    if not isinstance(stamps, dict):
        raise ValueError("timing.json is malformed")  # noqa: TRY004  # a damaged file
    touched = []
    for name, stamp in stamps.items():
        state = os.lstat(folder / name)
        if not stat.S_ISREG(state.st_mode):
            raise _ChangedFileError(f"{name} is not a regular file")
        if not isinstance(stamp, list) or stamp[:1] != [state.st_size]:
            raise _ChangedFileError(f"{name} has a different size")
        if stamp[1:] != [state.st_mtime_ns]:
            touched.append(name)
    if touched:
        _compare_sums(folder, touched)
        with suppress(OSError, ValueError):  # the contents are compared again next time
            store_file_stamps(folder, stamps)
    return timing


def store_source_stamp(folder: Path, stamp: str) -> None:
    """Store the new stamp of a source whose content was compared and is unchanged."""
    with suppress(OSError, ValueError, ScanError):  # the content is compared again next time
        timing = read_json(folder / TIMING)
        if stamp and timing.get(SOURCE_STAMP) != stamp:
            _write_timing(folder, {**timing, SOURCE_STAMP: stamp})


def store_file_stamps(folder: Path, names: Iterable[str] | None = None) -> None:
    """Store size and modification time of a case folder's files in its `timing.json`.

    `names` are relative to the folder; by default, they are all files but `timing.json`.

    Raises
    ------
    OSError, ValueError
        If `timing.json` can't be read or written.
    """
    timing = read_json(folder / TIMING)
    if names is None:
        names = [name for name in files_in(folder) if name != TIMING]
    states = {name: (folder / name).stat() for name in names}
    stamps = {name: [s.st_size, s.st_mtime_ns] for name, s in states.items()}
    _write_timing(folder, {**timing, FILE_STAMPS: stamps})


def files_in(folder: Path) -> list[str]:
    """Return the names of all files below a folder, relative to it, sorted."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path.relative_to(folder).as_posix() for path in files]


def _has_foreign_files(folder: Path) -> bool:
    """Return whether a case folder contains unpublished files, except those of file managers."""
    stamps = read_json(folder / TIMING).get(FILE_STAMPS, {})
    foreign = (set(files_in(folder)) - {TIMING} - set(stamps)) if stamps else set()
    return any(not name.rpartition("/")[2].startswith((".", "@", "Thumbs.db")) for name in foreign)


def _compare_sums(folder: Path, files: Sequence[str]) -> None:
    lines = read_regular_file(folder / CHECKSUMS, MAX_DOCUMENT_BYTES).decode().splitlines()
    sums = {line[66:]: line[:64] for line in lines}
    for name in files:
        if name != CHECKSUMS and sha256_of(folder / name) != sums.get(name):
            raise _ChangedFileError(f"{name} was changed")


def _write_timing(folder: Path, timing: dict[str, Any]) -> None:
    atomic_write(folder / TIMING, lambda draft: write_json(draft, timing))
