"""Data of patients that each file of an output folder may hold: the one list of them.

Exports, `docs/identity.md` and the test that searches an output folder for a patient's name follow
this list. A file that no entry describes may not be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Literal

Identity = Literal["ids", "shapes", "pixels", "dicom", "private"]
"""Keyed ids, numbers and codes; label maps, whose outline of a head is a face; pixels of the scan;
patient, UIDs and dates, as DICOM requires them; everything, for the holder of the key."""


@dataclass(frozen=True)
class Entry:
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
        pattern, parts = self.pattern.split("/"), path.parts
        if pattern[-1] == "**":
            pattern, parts = pattern[:-1], parts[: len(pattern) - 1]
            if len(path.parts) <= len(pattern):
                return False
        same = len(pattern) == len(parts)
        return same and all(map(fnmatchcase, parts, pattern))


def _result(folder: str) -> tuple[Entry, ...]:
    """Return the entries of a case's folder, or of a revision's, which has the same files."""
    documents = ("case.json", "segments.json", "measurements.*", "timing.json", "SHA256SUMS")
    maps = ("*segmentation*.nii.gz", "*entropy.nii.gz", "*disagreement.nii.gz", "split/*.nii.gz")
    return (
        *(Entry(f"{folder}/{name}", "ids") for name in documents),
        *(Entry(f"{folder}/{name}", "shapes") for name in maps),
        *(Entry(f"{folder}/{n}", "pixels") for n in ("preview.png", "thumbnail.png")),
        Entry(f"{folder}/image*.nii.gz", "pixels"),
        Entry(f"{folder}/dicom/**", "dicom"),
    )


CONTENTS: tuple[Entry, ...] = (
    Entry("manifest.*", "ids"),
    Entry("measurements.*", "ids"),
    Entry("failed/*.json", "ids"),
    Entry("runs/**", "ids"),
    Entry("engines/*/engine.json", "ids"),
    Entry(".work/**", "dicom"),  # cases that are being written, or whose process died
    *_result("cases/*"),
    Entry("bids/**", "shapes"),
    Entry("report/**", "pixels"),
    *(Entry(f"review/{n}", "ids") for n in (".lock", "verdicts.jsonl", "readers.json")),
    *(Entry(f"review/{n}", "ids") for n in ("review.csv", "review.parquet", "agreement.csv")),
    *_result("review/revisions/*/*"),
    Entry("private/**", "private"),
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


def copy_excludes(*, pixels: bool) -> Sequence[str]:
    """Return the patterns that a copy for others leaves out, as rsync takes them.

    Parameters
    ----------
    pixels : bool
        Whether the copy may have pictures.
    """
    kept = {"ids", "shapes", *(["pixels"] if pixels else [])}
    return [f"/{entry.pattern}" for entry in CONTENTS if entry.holds not in kept]
