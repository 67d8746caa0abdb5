"""Corrected results beside a case: `OUT/review/revisions/<case>/<number>/`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.output.file_names import CASE, SEGMENTS
from scanloom.io.output.json_file import read_json
from scanloom.io.output.published import check_files

REVISIONS = ("review", "revisions")
_DAMAGE = (OSError, ValueError, LookupError, TypeError)


def revision_folders(out: Path, name: str) -> list[Path]:
    """Return the folders of a case's revisions, the first one first."""
    try:
        folders = [p for p in Path(out, *REVISIONS, name).iterdir() if p.name.isdecimal()]
    except OSError:
        return []
    return sorted(folders, key=lambda path: int(path.name))


def latest_result(out: Path, name: str) -> Path:
    """Return the folder of the latest revision of a case's result, or else that of the case.

    Revisions of a result that was replaced since don't count. One whose `case.json` can't be read
    does: whoever reads its label maps finds that it is damaged.
    """
    folder = out / "cases" / name
    revisions = revision_folders(out, name)
    if not revisions:
        return folder
    with suppress(*_DAMAGE):
        case = read_json(folder / CASE)
        made_of = case["recipe"], case["source"]["hash"]
        for revision in reversed(revisions):
            if _made_of(revision) in (made_of, None):
                return revision
    return folder


def _made_of(revision: Path) -> tuple[str, str] | None:
    """Return recipe and source of the result that was corrected; None of a damaged revision."""
    with suppress(*_DAMAGE):
        document = read_json(revision / CASE)
        return document["revision"]["of_recipe"], document["source"]["hash"]
    return None


def revision_number(folder: Path) -> int:
    """Return the number of a revision's folder; 0 for that of a case."""
    return int(folder.name) if folder.parent.parent.name == REVISIONS[-1] else 0


def read_label_maps(folder: Path) -> dict[str, NDArray[Any]]:
    """Return the label maps (I, J, K) of a case or revision, by file.

    Raises
    ------
    ScanError
        RESULT_DAMAGED if a file is missing, unreadable or changed.
    """
    try:
        check_files(folder)
        files = [entry["file"] for entry in read_json(folder / SEGMENTS)["files"]]
        return {name: np.asarray(nib.load(folder / name).dataobj) for name in files}
    except _DAMAGE as exc:
        detail = f"a file of {folder.parent.name}/{folder.name} is damaged"
        raise ScanError(Reason.RESULT_DAMAGED, detail) from exc
