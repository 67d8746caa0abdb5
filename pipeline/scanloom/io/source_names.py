"""Case folders that are called as their sources are: only where somebody wants that."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable

from scanloom.io.archives import SUFFIXES as ARCHIVE_SUFFIXES
from scanloom.io.crosswalk import Source
from scanloom.io.formats import SUFFIXES as VOLUME_SUFFIXES

LONGEST = 80
"""Bytes of a name in UTF-8: file systems take 255, and others want to add to it."""
TAIL = 6
"""Characters of the id that tell cases of one name apart."""

_EXTENSIONS = {
    "dcm",
    "img",
    *(part for suffix in (*VOLUME_SUFFIXES, *ARCHIVE_SUFFIXES) for part in suffix[1:].split(".")),
}
_SUFFIXES = re.compile(rf"(\.({'|'.join(sorted(_EXTENSIONS))}))+$", re.IGNORECASE)
_DEVICES = re.compile(r"con|prn|aux|nul|(com|lpt)\d", re.IGNORECASE)  # no file names on Windows


def folder_name(source: Source, taken: Iterable[str]) -> str:
    """Return a name for a case's folder that says where the case comes from.

    Parameters
    ----------
    source : Source
        A DICOM series gives its PatientID and series number, anything else, and a series without
        a PatientID, the name of its file or folder.
    taken : iterable of str
        The names of other cases; capitals make no difference, as on some file systems.

    Returns
    -------
    str
        Letters and digits of any script, "-" and "_"; with the end of the id behind it where the
        name is taken; the id where nothing is left of the name.
    """
    words = [source.patient_id, source.series_number] if source.patient_id else [_place(source)]
    name = clean(" ".join(words))
    used = {other.casefold() for other in taken}
    for candidate in (name, f"{name}-{source.id[-TAIL:]}"):
        if name and candidate.casefold() not in used:
            return candidate
    return source.id


def clean(text: str) -> str:
    """Return a text as a file name that is safe on any system; it may be empty."""
    text = unicodedata.normalize("NFC", text)
    name = re.sub(r"[^\w-]+", "_", text).strip("_-")
    short = name.encode()[:LONGEST].decode("utf-8", "ignore").strip("_-")
    return f"{short}_" if _DEVICES.fullmatch(short) else short


def _place(source: Source) -> str:
    return _SUFFIXES.sub("", os.path.basename(source.path))  # noqa: PTH119 a text, no path
