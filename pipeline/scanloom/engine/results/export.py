"""Copy results without what identifies patients, for people who do not hold the key."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from scanloom.core import Reason, ScanError
from scanloom.engine.results.verify import read_sums
from scanloom.io.output.audit import audit_trail
from scanloom.io.output.file_names import CHECKSUMS, TIMING
from scanloom.io.output.layout import (
    CASES,
    LISTEN,
    OUTPUT_ENTRIES,
    Identity,
    fan_out,
    identity_of,
    is_fanned,
    no_results,
    published_cases,
    read_case,
)
from scanloom.io.output.private import check_links
from scanloom.io.output.published import store_file_stamps
from scanloom.io.system.atomic_write import fsync_path, private_draft
from scanloom.io.system.disk_errors import disk_errors_as_scan_errors
from scanloom.io.system.regular_files import open_regular_file
from scanloom.review.revisions import REVISIONS, revision_folders

_ENTRIES = OUTPUT_ENTRIES - {LISTEN}
"""The page of `listen` has addresses and titles of a hospital's network, and no results."""
COPIED: frozenset[Identity] = frozenset({"ids", "shapes"})
"""Without pictures. Label maps and surfaces of a head show its face."""
_BLOCK = 1 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True)
class Export:
    """Extent of a copy.

    Parameters
    ----------
    cases, files, size : int
        Numbers of cases and files, and their bytes.
    left_out : tuple of str
        Cases, corrections and files that are not as published, below OUT.
    """

    cases: int
    files: int
    size: int
    left_out: tuple[str, ...]


def export(out: Path, folder: Path, *, pictures: bool = False, key: Path | None = None) -> Export:
    """Copy an output folder to a new one, without DICOM, pictures, scans and `private/`.

    Files are compared with their checksums while they are copied; a case that differs is left out
    as a whole. SHA256SUMS of the copy list what it has, so that `verify` checks it.

    Parameters
    ----------
    out : Path
        The output folder.
    folder : Path
        The copy. It must not exist, or be an empty folder; it appears when it is complete.
    pictures : bool
        Whether to copy pictures, scans and the report too.
    key : Path or None
        File with the key of the ids, for a line in the audit trail; None for SCANLOOM_KEY or the
        user's own key. Without the key, no line is written.

    Raises
    ------
    ScanError
        NOT_FOUND or NO_RESULTS if there are no results in `out`; OUTPUT_UNWRITABLE if its
        folders are links or named by patients, or there is something at `folder`; DISK_FULL.
    """
    check_links(out)
    cases = published_cases(out)
    if not cases:
        raise no_results(out)
    for case in cases:
        _refuse_source_names(case)
    if folder.absolute().is_relative_to(out.absolute()):
        detail = "the copy would lie inside the output folder: name another folder"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail, str(folder))
    with disk_errors_as_scan_errors():
        if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
            detail = "there is something at this path already: name a new folder"
            raise ScanError(Reason.OUTPUT_UNWRITABLE, detail, str(folder))
        folder.parent.mkdir(parents=True, exist_ok=True)
        with private_draft(folder) as draft:
            copy = _Copy(out, draft, COPIED | {"pixels"} if pictures else COPIED)
            copy.all()
            if audit := audit_trail(out, key):
                details = {"to": str(folder.absolute()), "cases": copy.cases, "pictures": pictures}
                audit.append("exported", details)
            if folder.is_dir():
                folder.rmdir()
            draft.rename(folder)
            fsync_path(folder.parent)
    return Export(copy.cases, copy.files, copy.size, tuple(copy.left_out))


def _refuse_source_names(case: Path) -> None:
    """Refuse a case whose folder is named by its source: `--names source`."""
    try:
        identifies = read_case(case)["case"] != case.name
    except (OSError, ValueError, LookupError, ScanError):  # damaged: left out
        return
    if identifies:
        detail = "its folders are named by patients or files (`segment --names`): no copy is safe"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail)


class _Copy:
    """A copy of an output folder that is being made in `target`."""

    def __init__(self, out: Path, target: Path, copied: frozenset[Identity]) -> None:
        self._out, self._target, self._copied = out, target, copied
        self.cases = self.files = self.size = 0
        self.left_out: list[str] = []

    def all(self) -> None:
        """Copy cases and corrections, which have checksums, then all else."""
        self._target.mkdir()
        if is_fanned(self._out):
            fan_out(self._target)
        for case in published_cases(self._out):
            if not self._result(case):
                continue
            self.cases += 1
            for revision in revision_folders(self._out, case.name):
                self._result(revision)
        has_sums = {Path(CASES), Path(*REVISIONS)}
        for folder, folders, names in os.walk(self._out):
            below = Path(folder).relative_to(self._out)
            folders[:] = [each for each in sorted(folders) if below / each not in has_sums]
            for path in (below / name for name in sorted(names)):
                if self._is_copied(path):
                    try:
                        self._file(path)
                    except OSError as exc:
                        self._leave_out(path, exc)

    def _is_copied(self, path: Path) -> bool:
        """Return whether to copy a file: files that are not ours may hold anything."""
        is_ours = path.parts[0] in _ENTRIES and not path.name.startswith(".")
        try:
            return is_ours and identity_of(path) in self._copied
        except ValueError:
            return False

    def _result(self, folder: Path) -> bool:
        """Copy the files of a case or a correction; return whether it is as published."""
        below, before = folder.relative_to(self._out), (self.files, self.size)
        try:
            sums = read_sums(folder / CHECKSUMS)
            kept = {name: sums[name] for name in sums if self._is_copied(below / name)}
            for name, digest in kept.items():
                self._file(below / name, digest)
            self._file(below / TIMING)
            lines = "".join(f"{digest}  {name}\n" for name, digest in kept.items())
            (self._target / below / CHECKSUMS).write_text(lines)
            store_file_stamps(self._target / below)
        except (OSError, ValueError, ScanError) as exc:  # ScanError: `timing.json` of a newer one
            self._leave_out(below, exc)
            shutil.rmtree(self._target / below, ignore_errors=True)
            self.files, self.size = before
            return False
        return True

    def _leave_out(self, path: Path, exc: Exception) -> None:
        """Note what can't be copied, unless it is for lack of room."""
        if isinstance(exc, OSError) and exc.errno in _FULL:
            raise exc
        self.left_out.append(path.as_posix())

    def _file(self, path: Path, expected: str | None = None) -> None:
        """Copy a file; ValueError if its SHA-256 is another than expected."""
        target = self._target / path
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with open_regular_file(self._out / path) as source, target.open("xb") as copy:
            while block := source.read(_BLOCK):
                digest.update(block)
                copy.write(block)
            self.size += copy.tell()
        if expected not in (None, digest.hexdigest()):
            raise ValueError("a file differs from its checksum")
        self.files += 1
