"""Provenance of models in the store: source, date, licence, and the hashes of all files.

Also checksums as publishers state them, and the hashing of files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from scanloom.core import Reason, ScanError, printable, read_error

PROVENANCE_FILE: Final = "scanloom-provenance.json"
"""Name of the record inside a model's folder; it is not among the files that it lists."""
SMALL_BYTES: Final = 16 << 20
"""Files up to this size are hashed whenever a model is found; larger ones are weights, which are
compared with the card when they are loaded."""
_MAX_RECORD_BYTES: Final = 8 << 20
_SHOWN_FILES: Final = 3

Algorithm = Literal["md5", "sha1", "sha256", "git"]
_HEX_DIGITS: Final = {"md5": 32, "sha1": 40, "sha256": 64, "git": 40}


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 (hex) of a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Provenance:
    """Record of a model that was added to the store.

    Parameters
    ----------
    source : str
        Request that it was added for, or kind and name of the folder or zip file.
    address : str
        Address that the files came from; equal to `source` for a folder or zip file.
    added : str
        Date and time, ISO 8601, UTC.
    licence : str
        Licence as shown when the model was added.
    accepted : bool
        Whether the user accepted a licence with conditions.
    published : bool
        Whether the files were compared with checksums of their publisher.
    files : mapping of str to FileRecord
        All files by their path relative to the folder.
    """

    source: str
    address: str
    added: str
    licence: str
    accepted: bool
    published: bool
    files: Mapping[str, FileRecord] = field(repr=False)


def write_provenance(folder: Path, provenance: Provenance) -> None:
    """Write the record of a model into its folder, and flush it to disk."""
    files = {name: [entry.size, entry.sha256] for name, entry in provenance.files.items()}
    document = {"schema": 1, **vars(provenance), "files": files}
    with (folder / PROVENANCE_FILE).open("w", encoding="utf-8") as output:
        json.dump(document, output, indent=1)
        output.flush()
        os.fsync(output.fileno())


def read_provenance(folder: Path) -> Provenance | None:
    """Return the record of a model, None if its folder has none.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if the record can't be read; NEWER_VERSION if its schema is unknown.
    """
    file = folder / PROVENANCE_FILE
    try:
        if not stat.S_ISREG(file.lstat().st_mode):  # a pipe would be waited for
            raise ScanError(Reason.MODEL_DAMAGED, f"{PROVENANCE_FILE} is not a file")
        with file.open("rb") as stream:
            document = json.loads(stream.read(_MAX_RECORD_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as exc:
        raise read_error(exc, PROVENANCE_FILE, Reason.MODEL_DAMAGED) from exc
    if isinstance(document, dict) and document.get("schema", 1) != 1:
        raise ScanError(Reason.NEWER_VERSION, f"{PROVENANCE_FILE} has another schema")
    try:
        return _parse(document)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{PROVENANCE_FILE} is malformed") from exc


def _parse(document: Any) -> Provenance:
    files = {
        str(name): FileRecord(int(size), str(sha256))
        for name, (size, sha256) in document["files"].items()
    }
    texts = {key: str(document[key]) for key in ("source", "address", "added", "licence")}
    accepted, published = document["accepted"] is True, document["published"] is True
    return Provenance(**texts, accepted=accepted, published=published, files=files)


def hash_files(folder: Path) -> dict[str, FileRecord]:
    """Return size and hash of all files of a model; MODEL_DAMAGED if a file can't be read."""
    return {name: FileRecord(size, _hash(folder / name)) for name, size in _sizes(folder).items()}


def check_files(folder: Path, provenance: Provenance, *, large: bool) -> None:
    """Compare the files of a model with its record.

    Parameters
    ----------
    large : bool
        Whether files beyond `SMALL_BYTES` are hashed too; otherwise only their sizes count.

    Raises
    ------
    ScanError
        MODEL_HASH, with the names of files that differ, are missing or new.
    """
    present = _sizes(folder)
    changed = sorted(present.keys() ^ provenance.files.keys())
    for name, size in present.items():
        entry = provenance.files.get(name)
        if entry is None:
            continue
        hashed = size <= SMALL_BYTES or large
        if size != entry.size or (hashed and _hash(folder / name) != entry.sha256):
            changed.append(name)
    if changed:
        names = ", ".join(printable(name) for name in changed[:_SHOWN_FILES])
        more = f" and {len(changed) - _SHOWN_FILES} more" if len(changed) > _SHOWN_FILES else ""
        detail = f"{names}{more} changed since the model was added on {provenance.added[:10]}"
        raise ScanError(Reason.MODEL_HASH, detail)


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of all files by relative path; hidden files and the record are left out."""

    def unreadable(exc: OSError) -> None:
        raise read_error(exc, "a folder of the model", Reason.MODEL_DAMAGED) from exc

    sizes = {}
    for root, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        # a link to a folder counts as a file: what it leads to is not the model's
        links = [name for name in folders if Path(root, name).is_symlink()]
        for name in [name for name in names if not name.startswith(".")] + links:
            file = Path(root, name)
            status = file.lstat()
            regular = stat.S_ISREG(status.st_mode)
            sizes[file.relative_to(folder).as_posix()] = status.st_size if regular else -1
    sizes.pop(PROVENANCE_FILE, None)
    return sizes


def _hash(file: Path) -> str:
    try:
        return file_digest(file)
    except OSError as exc:
        raise read_error(exc, printable(file.name), Reason.MODEL_DAMAGED) from exc


@dataclass(frozen=True)
class Digest:
    """A published checksum of a file.

    Parameters
    ----------
    algorithm : "md5", "sha1", "sha256" or "git"
        "git" is the name of a blob in a git repository: SHA-1 over a header and the content.
    value : str
        Hexadecimal digits, in lower case.
    """

    algorithm: Algorithm
    value: str

    def __post_init__(self) -> None:
        digits = _HEX_DIGITS.get(self.algorithm)
        if digits is None or not re.fullmatch(f"[0-9a-f]{{{digits}}}", self.value):
            raise ValueError(f"not a digest of {', '.join(get_args(Algorithm))}")

    def matches(self, file: Path) -> bool:
        """Return whether a file has this checksum."""
        return file_digest(file, self.algorithm) == self.value


def file_digest(file: Path, algorithm: Algorithm = "sha256") -> str:
    """Return a checksum of a file as hexadecimal digits."""
    digest = hashlib.new("sha1" if algorithm == "git" else algorithm, usedforsecurity=False)
    if algorithm == "git":  # a blob is hashed with its kind and size
        digest.update(b"blob %d\0" % file.stat().st_size)
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: digest).hexdigest()
