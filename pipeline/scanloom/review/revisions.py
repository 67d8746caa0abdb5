"""Corrected results beside a case: `OUT/review/revisions/<case>/<number>/`."""

from __future__ import annotations

import gzip
import zlib
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError, is_passing
from scanloom.io.output.file_names import CASE
from scanloom.io.output.json_file import read_json
from scanloom.io.output.layout import case_folder, listed_label_maps
from scanloom.io.output.published import check_files
from scanloom.io.system.regular_files import open_regular_file

REVISIONS = ("review", "revisions")
_DAMAGE = (OSError, ValueError, LookupError, TypeError)


def revision_folders(out: Path, name: str) -> list[Path]:
    """Return the folders of a case's revisions, the first one first.

    Raises
    ------
    OSError
        If it can't be known for the moment which there are.
    """
    try:
        folders = [p for p in Path(out, *REVISIONS, name).iterdir() if p.name.isdecimal()]
    except OSError as exc:
        if is_passing(exc):
            raise
        return []
    return sorted(folders, key=lambda path: int(path.name))


def latest_result(out: Path, name: str) -> Path:
    """Return the folder of the latest revision of a case's result, or else that of the case.

    Revisions of a result that was replaced since don't count. One whose `case.json` can't be read
    does: whoever reads its label maps finds that it is damaged.

    Raises
    ------
    OSError
        If a file can't be read for the moment: an earlier result must not stand in.
    """
    folder = case_folder(out, name)
    revisions = revision_folders(out, name)
    if not revisions:
        return folder
    made_of = _made_of(folder, ("recipe",))
    for revision in reversed(revisions if made_of else ()):
        if _made_of(revision, ("revision", "of_recipe")) in (made_of, None):
            return revision
    return folder


def replaced_correction(out: Path, name: str) -> Path | None:
    """Return the folder of the latest revision of a case's scan whose result was replaced since.

    None if none was replaced, or the result itself has a revision: that of `latest_result`.

    Raises
    ------
    OSError
        If a file can't be read for the moment.
    """
    if revision_number(latest := latest_result(out, name)):
        return None
    revisions = revision_folders(out, name)
    made_of = _made_of(latest, ("recipe",)) if revisions else None
    for revision in reversed(revisions if made_of else ()):
        corrected = _made_of(revision, ("revision", "of_recipe"))
        if made_of and corrected and corrected[1] == made_of[1]:
            return revision
    return None


def _made_of(folder: Path, recipe: tuple[str, ...]) -> tuple[str, str] | None:
    """Return recipe, by the keys that lead to it, and source of a result; None if it is damaged."""
    try:
        document = read_json(folder / CASE)
        return str(reduce(getitem, recipe, document)), document["source"]["hash"]
    except _DAMAGE as exc:
        if is_passing(exc):
            raise
        return None


def revision_number(folder: Path) -> int:
    """Return the number of a revision's folder; 0 for that of a case."""
    return int(folder.name) if folder.parent.parent.name == REVISIONS[-1] else 0


def read_label_map(file: Path) -> NDArray[Any]:
    """Return the label map (I, J, K) in a NIfTI of a case or revision.

    Raises
    ------
    OSError, ValueError
        If it can't be read, or is a link.
    """
    try:
        with open_regular_file(file) as compressed, gzip.GzipFile(fileobj=compressed) as stream:
            return np.asarray(nib.Nifti1Image.from_stream(stream).dataobj)
    except (EOFError, zlib.error, nib.filebasedimages.ImageFileError) as exc:  # type: ignore[attr-defined]  # nibabel is not typed
        raise ValueError("the label map is damaged") from exc


def read_label_maps(folder: Path) -> dict[str, NDArray[Any]]:
    """Return the label maps (I, J, K) of a case or revision, by file.

    Raises
    ------
    ScanError
        RESULT_DAMAGED if a file is missing, unreadable or changed.
    OSError
        If a file can't be read for the moment.
    """
    try:
        check_files(folder)
        files = [entry["file"] for entry in listed_label_maps(folder)]
        return {name: read_label_map(folder / name) for name in files}
    except _DAMAGE as exc:
        if is_passing(exc):
            raise
        detail = f"a file of {folder.parent.name}/{folder.name} is damaged"
        raise ScanError(Reason.RESULT_DAMAGED, detail) from exc
