"""Results that are one file with a name of the user's, and the JSON next to them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from scanloom.core import ScanError
from scanloom.io.output.json_file import read_json

NIFTI: Final = ".nii.gz"
FOREIGN: Final = (OSError, ValueError, LookupError, TypeError, ScanError)
"""Exceptions when reading a document that is not ours, or the file beside it."""


def document_of(file: Path) -> Path:
    """Return the JSON next to a file: of `labels.nii.gz`, `labels.json`, as in BIDS.

    Of `labels.dcm` it is `labels.dcm.json`, so that both can be of one scan.
    """
    is_nifti = file.name.lower().endswith(NIFTI)
    return file.with_name(f"{file.name[: -len(NIFTI)] if is_nifti else file.name}.json")


def is_result(file: Path) -> bool:
    """Return whether `segment -o` wrote a file, as the JSON next to it says."""
    with suppress(*FOREIGN):
        document = read_json(document_of(file))
        return bool(document["file"] == file.name and document["sha256"] and document["recipe"])
    return False
