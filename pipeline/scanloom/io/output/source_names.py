"""Names of case folders that are derived from their sources; used only on request."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable

from scanloom.io.formats import VOLUME_SUFFIXES as VOLUME_SUFFIXES
from scanloom.io.output.crosswalk import SourceRecord
from scanloom.io.system.archives import ARCHIVE_SUFFIXES as ARCHIVE_SUFFIXES

MAX_NAME_BYTES = 80
"""Maximum length of a name in bytes of UTF-8: file systems allow 255, and other programs append to
names."""
_ID_CHARACTERS = 6
"""Characters of the id that distinguish cases of the same name."""

_EXTENSIONS = {
    "dcm",
    "img",
    *(name for suffix in (*VOLUME_SUFFIXES, *ARCHIVE_SUFFIXES) for name in suffix[1:].split(".")),
}
_SUFFIXES = re.compile(rf"(\.({'|'.join(sorted(_EXTENSIONS))}))+$", re.IGNORECASE)
_DEVICES = re.compile(r"con|prn|aux|nul|(com|lpt)\d", re.IGNORECASE)  # reserved on Windows


def folder_name(source: SourceRecord, taken: Iterable[str]) -> str:
    """Return a name for a case folder that identifies the source of the case.

    Parameters
    ----------
    source : SourceRecord
        The name is made of PatientID and series number of a DICOM series; of the file or folder
        name for other formats, or if PatientID is empty.
    taken : iterable of str
        The names of other cases. Case is ignored, as on some file systems.

    Returns
    -------
    str
        Letters and digits of any script, "-" and "_". The end of the id is appended if the name is
        taken. If no valid character remains, the id is the name.
    """
    if source.patient_id:
        name = safe_file_name(f"{source.patient_id} {source.series_number}")
    else:
        name = safe_file_name(_file_name(source))
    used = {folder.casefold() for folder in taken}
    for candidate in (name, f"{name}-{source.id[-_ID_CHARACTERS:]}"):
        if name and candidate.casefold() not in used:
            return candidate
    return source.id


def safe_file_name(text: str) -> str:
    """Return a text as a file name that is safe on any system; may be empty."""
    text = unicodedata.normalize("NFC", text)
    name = re.sub(r"[^\w-]+", "_", text).strip("_-")
    short = name.encode()[:MAX_NAME_BYTES].decode("utf-8", "ignore").strip("_-")
    return f"{short}_" if _DEVICES.fullmatch(short) else short


def _file_name(source: SourceRecord) -> str:
    """Return the name of the source's file or folder, without suffixes."""
    return _SUFFIXES.sub("", os.path.basename(source.path))  # noqa: PTH119 escaped, not a path
