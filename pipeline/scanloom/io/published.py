"""What a published case folder says of how it was made, and whether its files are still the same.

`case.json` names the recipe and the hash of the source's content. `timing.json`, the one file that
differs between two equal runs, names two stamps, which are compared at the price of a stat: that of
the source's files, and size and time of change of each file of the folder. Where a stamp differs,
content is compared instead; where that is the same, as after a copy, the new stamp is kept.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from scanloom.core import Case, Reason, ScanError
from scanloom.io.json_file import read_json, write_json
from scanloom.io.names import CASE, SUMS, TIMING
from scanloom.io.regular import open_regular, read_regular
from scanloom.io.whole import write_whole

MOST = 1 << 26
"""Bytes of a document of a case: more is none of ours."""
FILES, SOURCE = "files", "source_stamp"
"""Entries of `timing.json`: size and time of change of each other file; stamp of the source."""


class Standing(Enum):
    """How a result that may be there stands to the case that is wanted."""

    ABSENT = auto()
    """There is none."""
    CURRENT = auto()
    """It was made of the same content by the same recipe."""
    UNSURE = auto()
    """By the same recipe; the source's files may have changed: their content has to be compared."""
    CHANGED = auto()
    """By the same recipe, of other content."""
    REPLACEABLE = auto()
    """By another recipe, or damaged, and it may be replaced."""


@dataclass(frozen=True)
class Made:
    """How a published case was made; `recipe` and `source` are empty where it does not say."""

    recipe: str
    source: str
    stamp: str


def standing_of(out: Path, name: str, case: Case, *, replace: bool) -> Standing:
    """Return how the result of a case stands to what is wanted now.

    Parameters
    ----------
    out : Path
        The output folder, which need not exist.
    name : str
        Of the case's folder.
    case : Case
        Recipe and stamp count, and its hash of the source where it has one.
    replace : bool
        Whether a result of another recipe, or a damaged one, may be replaced.

    Raises
    ------
    ScanError
        STALE, RESULT_DAMAGED or NEWER_VERSION if such a result is there and may not be replaced;
        STALE also where its source has other content, and files that scanloom did not write lie in
        its folder.
    """
    folder = out / "cases" / name
    if not folder.is_dir():
        return Standing.ABSENT
    try:
        made = read_made(folder)
    except (OSError, ValueError) as exc:
        if replace:
            return Standing.REPLACEABLE
        raise ScanError(Reason.RESULT_DAMAGED, "a file of its result is not as published") from exc
    except ScanError:  # NEWER_VERSION
        if replace:
            return Standing.REPLACEABLE
        raise
    if made.recipe != case.recipe:
        if replace:
            return Standing.REPLACEABLE
        raise ScanError(Reason.STALE, "its result was made by another recipe")
    if case.source_hash and made.source != case.source_hash:
        if not replace and _has_strangers(folder):
            detail = "its folder holds files of somebody else, such as a correction"
            raise ScanError(Reason.STALE, detail)
        return Standing.CHANGED
    if case.source_hash:
        return Standing.CURRENT
    return Standing.CURRENT if case.stamp and made.stamp == case.stamp else Standing.UNSURE


def read_made(folder: Path) -> Made:
    """Return how a published case was made, after its files were looked at.

    Raises
    ------
    OSError, ValueError
        If it is damaged: a file is missing, unreadable, or not as it was published.
    """
    case, timing = _read(folder / CASE), _read(folder / TIMING)
    _check_files(folder, timing)
    source = case.get("source")
    recipe, content = case.get("recipe"), source.get("hash") if isinstance(source, dict) else None
    if not isinstance(recipe, str) or not isinstance(content, str):
        raise ValueError("case.json has another form")  # noqa: TRY004
    return Made(recipe, content, str(timing.get(SOURCE, "")))


def check_files(folder: Path) -> None:
    """Compare size and time of change of each file of a published case with those it had.

    Where only the time differs, the content is compared with `SHA256SUMS`.

    Raises
    ------
    OSError, ValueError
        If a file is not as it was published.
    """
    _check_files(folder, _read(folder / TIMING))


def keep_source_stamp(folder: Path, stamp: str) -> None:
    """Keep another stamp of a source whose content was compared and is the same."""
    with suppress(OSError, ValueError, ScanError):  # it is compared again next time
        timing = _read(folder / TIMING)
        if stamp and timing.get(SOURCE) != stamp:
            _write_timing(folder, {**timing, SOURCE: stamp})


def keep_file_stamps(folder: Path, names: Iterable[str] | None = None) -> None:
    """Write size and time of change of a case folder's files into its `timing.json`.

    Parameters
    ----------
    folder : Path
    names : iterable of str, optional
        Relative to the folder; all other files by default.

    Raises
    ------
    OSError, ValueError
        If `timing.json` can't be read or written.
    """
    timing = _read(folder / TIMING)
    wanted = [name for name in _names(folder) if name != TIMING] if names is None else names
    states = {name: (folder / name).stat() for name in wanted}
    stamps = {name: [s.st_size, s.st_mtime_ns] for name, s in states.items()}
    _write_timing(folder, {**timing, FILES: stamps})


def _names(folder: Path) -> Iterator[str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    yield from (path.relative_to(folder).as_posix() for path in files)


def _has_strangers(folder: Path) -> bool:
    """Whether a case folder holds files that were not published, but for what systems leave."""
    stamps = _read(folder / TIMING).get(FILES, {})
    strange = (set(_names(folder)) - {TIMING} - set(stamps)) if stamps else set()
    return any(not name.rpartition("/")[2].startswith((".", "@", "Thumbs.db")) for name in strange)


def _check_files(folder: Path, timing: dict[str, Any]) -> None:
    stamps = timing.get(FILES, {})  # earlier versions had none
    if not isinstance(stamps, dict):
        raise ValueError("timing.json has another form")  # noqa: TRY004
    touched = []
    for name, stamp in stamps.items():
        state = os.stat(folder / name)  # noqa: PTH116
        if not isinstance(stamp, list) or state.st_size != stamp[0]:
            raise ValueError(f"{name} has another size")
        if state.st_mtime_ns != stamp[1]:
            touched.append(name)
    if touched:
        _compare_sums(folder, touched)
        with suppress(OSError, ValueError):  # they are compared again next time
            keep_file_stamps(folder, stamps)


def _compare_sums(folder: Path, files: Sequence[str]) -> None:
    lines = read_regular(folder / SUMS, MOST).decode().splitlines()
    sums = {line[66:]: line[:64] for line in lines}
    for name in files:
        if name == SUMS:
            continue
        with open_regular(folder / name) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sums.get(name):
                raise ValueError(f"{name} was changed")


def _write_timing(folder: Path, timing: dict[str, Any]) -> None:
    write_whole(folder / TIMING, lambda draft: write_json(draft, timing))


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, MOST)
