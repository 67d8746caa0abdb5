"""An output folder as others meet it: what tells it from any folder, and what is ours in it."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from scanloom.core import Reason, ScanError
from scanloom.io.names import CASE
from scanloom.io.private import CROSSWALK, KEY_FINGERPRINT, MOST_BYTES, PRIVATE
from scanloom.io.published import MOST, check_files
from scanloom.io.regular import read_regular

CASES = "cases"
FIRST_WRITTEN = frozenset({".work", "runs", PRIVATE})
"""What a run makes before an output folder is known as one."""
WRITTEN = FIRST_WRITTEN | {
    CASES,
    "failed",
    "report",
    "bids",
    *(f"{table}.{kind}" for table in ("manifest", "measurements") for kind in ("csv", "parquet")),
}
"""All that scanloom writes into an output folder."""
_OFTEN_EMPTY = frozenset({CASES, "failed"})
"""What may be left of a run that died before it had a result."""

_CASE_NAME = re.compile(r"[^\W_][\w-]*")  # ids, and what `scanloom.io.source_names` makes
_FINGERPRINT = re.compile(rb"[a-z2-7]{26}")
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading a file that is not as it was published ends with."""

T = TypeVar("T")


def is_output(folder: str, inside: list[str]) -> bool:
    """Whether a folder is an output folder.

    Parameters
    ----------
    folder : str
    inside : list of str
        The names in it.
    """
    if PRIVATE not in inside:
        return False
    file = Path(folder, PRIVATE, KEY_FINGERPRINT)
    with suppress(OSError):
        if _FINGERPRINT.fullmatch(read_regular(file, MOST_BYTES).strip()):
            return True
    try:
        file.lstat()
    except PermissionError:  # somebody else's
        pass
    except OSError:
        return False
    return CASES in inside and _holds_a_case(Path(folder, CASES))  # or its fingerprint is damaged


def _holds_a_case(cases: Path) -> bool:
    """Whether a folder of a folder is a published case."""
    try:
        with os.scandir(cases) as items:
            return any(os.path.lexists(os.path.join(item.path, CASE)) for item in items)  # noqa: PTH118
    except OSError:
        return False


def check_unclaimed(out: Path) -> None:
    """Refuse a folder of somebody's own files where scanloom would write over some of them.

    Parameters
    ----------
    out : Path
        The output folder, which need not be there. One that was claimed for a key passes; so does
        one that lost its fingerprint and has its crosswalk.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if something has a name that scanloom writes to, or the folder can't be
        read.
    """
    try:
        foreign = _foreign(out)
    except OSError as exc:
        raise ScanError(
            Reason.OUTPUT_UNWRITABLE, f"it can't be read ({type(exc).__name__})"
        ) from exc
    if foreign is not None:
        detail = f"it holds {foreign} that scanloom did not write: name another --out"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail)


def _foreign(out: Path) -> str | None:
    """Return what stands under a name of ours in a folder that no key was claimed for."""
    if any(os.path.lexists(out / PRIVATE / name) for name in (KEY_FINGERPRINT, CROSSWALK)):
        return None
    for name in sorted(WRITTEN - FIRST_WRITTEN):
        path = out / name
        empty = name in _OFTEN_EMPTY and path.is_dir() and not any(path.iterdir())
        if os.path.lexists(path) and not empty:
            return name
    return None


def published_cases(out: Path) -> list[Path]:
    """Return the folders of the published cases, by name; what others put beside them is none."""
    try:
        with os.scandir(out / CASES) as items:
            names = [item.name for item in items if is_case_name(item.name) and item.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [out / CASES / name for name in sorted(names)]


def each_case(out: Path, read: Callable[[Path], T], damaged: set[str]) -> Iterator[T]:
    """Give what `read` makes of the folder of each published case.

    Parameters
    ----------
    out : Path
        The output folder.
    read : function of a case's folder
        Opens files of it and no others.
    damaged : set of str
        Gets the names of the cases whose files are not as they were published.
    """
    for folder in published_cases(out):
        try:
            check_files(folder)
            made = read(folder)
        except _DAMAGE:
            damaged.add(folder.name)
        else:
            yield made


def read_case(folder: Path) -> dict[str, Any]:
    """Return what `case.json` of a published case says.

    Raises
    ------
    OSError, ValueError
        If it is not there, or not ours.
    """
    told = json.loads(read_regular(folder / CASE, MOST))
    if not isinstance(told, dict):
        raise ValueError("case.json has another form")  # noqa: TRY004
    return told


def is_case_name(name: str) -> bool:
    """Whether a folder in `cases/` may be called so."""
    return _CASE_NAME.fullmatch(unicodedata.normalize("NFC", name)) is not None
