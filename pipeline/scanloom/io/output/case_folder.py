"""Builds and publishes case folders: a case folder that exists is complete.

A case is built in `OUT/.work/`. Every file and folder is synced to the disk (fsync), then one
rename moves the case to `OUT/cases/<name>/`, or to the subfolder of `cases/` that
`scanloom.io.output.layout.case_folder` tells. The name is the case id, unless names of sources are
requested. `scanloom.io.output.work_folder` documents the names in `.work`, how a published case is
replaced, and the recovery from an interruption.

The result of a case that began before its archive was indexed is staged: its rename leads to
another name in `.work`, and from there to `cases/` when the index has confirmed it.

`SHA256SUMS` lists every file but itself and `timing.json`: the timing is the one file that differs
between two equal runs, and the checksums must not.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Self

from scanloom.cards.card import ModelCard
from scanloom.core import Case, Flag, Grid, Measurement, Outputs, Reason, ScanError, Segmentation
from scanloom.io.output.audit import AuditTrail, result_line
from scanloom.io.output.crosswalk import SourceRecord, add_sources
from scanloom.io.output.file_names import CASE, CHECKSUMS, TIMING
from scanloom.io.output.json_file import read_json
from scanloom.io.output.layout import case_folder
from scanloom.io.output.ledger import add_published
from scanloom.io.output.private import private_folder
from scanloom.io.output.published import (
    OTHER_MEANWHILE,
    ResultProvenance,
    files_in,
    read_provenance,
    store_file_stamps,
)
from scanloom.io.output.work_folder import STAGED, WorkEntry, make_work_folder
from scanloom.io.scan import Scan
from scanloom.io.system.atomic_write import fsync_path
from scanloom.io.system.disk_errors import output_error
from scanloom.io.system.regular_files import check_folder, sha256_of
from scanloom.ops.radiomics import Features


def check_writable(out: Path) -> None:
    """Check that a case can be built in `out`, which is left unchanged.

    Raises
    ------
    ScanError
        DISK_FULL or OUTPUT_UNWRITABLE.
    """
    with CaseFolder(out, "check"):
        pass


class CaseFolder:
    """A case folder being built; leaving the block without `publish` removes it.

    Parameters
    ----------
    out : Path
        The output folder; created if missing, and removed again if it stays empty.
    name : str
        Name of the published folder: the case id, or another name without dots.
    fingerprint : str or None
        Fingerprint of the key that made the ids, for `OUT/private/`; None does not claim `out`.
    target : Path or None
        Folder that it becomes; None for that of the case.
    audit : AuditTrail or None
        Receives a line when the case is published.
    staged : Path or None
        A complete folder in `.work` that it is, instead of a new one to be filled.

    Raises
    ------
    ScanError
        DISK_FULL or OUTPUT_UNWRITABLE, for every OSError between entering and leaving the block.
    """

    def __init__(
        self,
        out: Path,
        name: str,
        fingerprint: str | None = None,
        *,
        target: Path | None = None,
        audit: AuditTrail | None = None,
        staged: Path | None = None,
    ) -> None:
        self.out, self.name, self.fingerprint, self.audit = out, name, fingerprint, audit
        self._target, self._staged = target, staged
        self.path = out / ".work" / str(WorkEntry.of_this_process(name))

    @property
    def target(self) -> Path:
        """The folder that it becomes: it may change until it is published."""
        return self._target or case_folder(self.out, self.name)

    def __enter__(self) -> Self:
        self._created = _missing_folders(self.path.parent)
        try:
            make_work_folder(self.out, self.path.name if self._staged is None else "")
            if self._staged is not None:
                self._staged.rename(self.path)
        except ScanError:
            self._undo()
            raise
        except OSError as exc:
            self._undo()
            raise output_error(exc) from exc
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._undo()
        if isinstance(error, OSError):
            raise output_error(error) from error

    def publish(self, *, replace: bool = False, source: SourceRecord | None = None) -> Path:
        """Sync the case to the disk and rename it to its target.

        Parameters
        ----------
        replace : bool
            Replace an existing result of another recipe. A result of the same recipe is always
            replaced if the content of its source was different.
        source : SourceRecord or None
            The source of the case, for the crosswalk.

        Returns
        -------
        Path
            The target.

        Raises
        ------
        ScanError
            STALE if a result of another recipe exists and `replace` is false; ID_TAKEN if another
            case was given the name of its source in the meantime; KEY_MISMATCH if OUT was claimed
            for another key.
        OSError
            If writing fails; leaving the block converts it to ScanError.
        """
        target = self.target
        check_folder(target.parent)
        self._check_owner(target)
        if not replace and self._is_published(target):
            return target
        if self._staged is None:
            _write_checksums(self.path)
            if (self.path / TIMING).exists():
                store_file_stamps(self.path)
            _sync_tree(self.path)
        created = _missing_folders(target.parent)
        self._created += created
        target.parent.mkdir(parents=True, exist_ok=True)
        for folder in created:
            fsync_path(folder.parent)
        with self._locked() as private:
            self._check_owner(target)
            if not replace and self._is_published(target):  # while the files were synced
                return target
            # Crosswalk, ledger and audit trail have the case before it becomes visible
            self._record(private, source)
            if target.exists():
                self._replace(target)
            else:
                self.path.rename(target)
        fsync_path(target.parent)
        fsync_path(self.path.parent)
        self._created = []
        return target

    def _replace(self, target: Path) -> None:
        ready, old = self.path.with_suffix(".ready"), self.path.with_suffix(".old")
        self.path.rename(ready)
        fsync_path(ready.parent)
        target.rename(old)
        try:
            ready.rename(target)
        except BaseException:
            old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)  # the next start removes any remains

    def _check_owner(self, target: Path) -> None:
        """Refuse to replace the result of another case: two processes may have chosen one name."""
        case = _case_of(self.path)
        if self.name != case and _case_of(target) not in (None, case):
            detail = "its folder has the result of another scan: run it again, or undo a renaming"
            raise ScanError(Reason.ID_TAKEN, detail)

    def _is_published(self, target: Path) -> bool:
        """Return whether another process was given the same case and finished first.

        Raises
        ------
        ScanError
            STALE if it published a result of another recipe.
        """
        if not target.exists():
            return False
        published, built = _provenance(target), _provenance(self.path)
        if published is None or built is None or published.recipe != built.recipe:
            raise ScanError(Reason.STALE, OTHER_MEANWHILE)
        return published.source == built.source

    def _locked(self) -> AbstractContextManager[Path | None]:
        """Claim OUT for the key, while no other publishes; on failure, OUT is left unclaimed."""
        if self.fingerprint is None:
            return nullcontext()
        return private_folder(self.out, self.fingerprint)

    def _record(self, private: Path | None, source: SourceRecord | None) -> None:
        if private is None:
            if self.audit is not None:
                self.audit.append(*result_line(self.path))
            return
        if source is not None:
            add_sources(private, [dataclasses.replace(source, folder=self.name)])
        add_published(private, self.name, self.path)
        if self.audit is not None:
            self.audit.append_locked(*result_line(self.path))

    def _undo(self) -> None:
        for state in (".new", ".ready"):
            shutil.rmtree(self.path.with_suffix(state), ignore_errors=True)
        for folder in reversed(self._created):
            with suppress(OSError):  # not empty: another process uses it
                folder.rmdir()


def staged_name(case: str, digest: str) -> str:
    """Return the name in `.work` of the staged result of a case with some digest."""
    return f"{case}.{digest}.{STAGED}"


def staged_folder(out: Path, name: str) -> Path:
    """Return the folder of a staged result."""
    return out / ".work" / name


def staged_results(out: Path) -> Iterator[tuple[str, str]]:
    """Yield the case id and the name of each staged result."""
    for folder in (out / ".work").glob(f"*.{STAGED}"):
        yield folder.name.partition(".")[0], folder.name


def remove_staged(out: Path, name: str) -> None:
    """Remove a staged result at once."""
    folder = staged_folder(out, name)
    removed = folder.with_name(str(WorkEntry.of_this_process(name.partition(".")[0])))
    with suppress(FileNotFoundError):
        folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def _case_of(folder: Path) -> str | None:
    """Return the id of the case whose result is in a folder; None if it tells none."""
    with suppress(OSError, ValueError, LookupError, ScanError):
        return str(read_json(folder / CASE)["case"])
    return None


def _provenance(folder: Path) -> ResultProvenance | None:
    """Return the recipe and source hash of a case, or None if the case is damaged."""
    try:
        return read_provenance(folder)
    except (OSError, ValueError):
        return None


def _write_checksums(folder: Path) -> None:
    """Write SHA256SUMS in the format of `sha256sum --check`."""
    names = [name for name in files_in(folder) if name not in (CHECKSUMS, TIMING)]
    lines = [f"{sha256_of(folder / name)}  {name}\n" for name in names]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def _sync_tree(folder: Path) -> None:
    """Sync all files to the disk, then all folders from the innermost outwards."""
    inside = sorted(folder.rglob("*"), reverse=True)
    for path in (*filter(Path.is_file, inside), *filter(Path.is_dir, inside), folder):
        fsync_path(path)


def _missing_folders(folder: Path) -> list[Path]:
    """Return `folder` and its parents as far as they do not exist, the outermost first."""
    return [p for p in (*reversed(folder.parents), folder) if not p.exists()]


# --- writers --------------------------------------------------------------------------------------
# `Writer` of one kind of file of a case, and `CaseContent`, which it writes.

Counts = dict[tuple[str, str], int]
"""Voxels of each (model, label)."""


@dataclass(frozen=True, eq=False)
class CaseContent:
    """Content of a case folder, which writers write and read back.

    Parameters
    ----------
    case : Case
        Outputs, and the recipe that DICOM UIDs are derived from.
    scan : Scan
        Volume and source.
    segmentations : sequence of Segmentation
        One for each model, with the requested structures.
    measurements : sequence of Measurement
        Of all structures.
    flags : sequence of Flag
        Of the case.
    cards : sequence of ModelCard
        Of the models.
    counts : dict
        Voxels of each (model, label), filled in when the label maps are read back.
    present : collection of str
        Conditions of known errors that the scan meets; see `scanloom.cards.card.Limitation`.
    features : list of Features
        Of all structures, filled in when they are written.
    """

    case: Case
    scan: Scan
    segmentations: Sequence[Segmentation]
    measurements: Sequence[Measurement] = ()
    flags: Sequence[Flag] = ()
    cards: Sequence[ModelCard] = ()
    counts: Counts = field(default_factory=dict)
    present: Collection[str] = ()
    features: list[Features] = field(default_factory=list)

    @property
    def models(self) -> list[str]:
        """Names of the models, in order."""
        return [s.model for s in self.segmentations]


@dataclass(frozen=True)
class Writer:
    """Writer of one kind of file.

    Parameters
    ----------
    name : str
        Its key in `scanloom.options.EXTRAS` if it runs only on request.
    expected : callable
        Return the relative names of the files that it writes for a content; none if it does not
        apply.
    write : callable
        Write them into the folder. Writers run concurrently.
    read_back : callable
        Compare them with the content; raise WRITE_MISMATCH at the first difference. Runs in the
        order of `scanloom.engine.case.writers.WRITERS`.
    memory : callable
        Estimate the bytes that it holds, from the scan's grid, the models' cards and the outputs.
    after : str
        Name of the writer whose files it reads as it writes: it begins when these are complete.
    modules : tuple of str
        Modules of optional packages that it needs, which the extra of its name installs.
    """

    name: str
    expected: Callable[[CaseContent], set[str]]
    write: Callable[[Path, CaseContent], None]
    read_back: Callable[[Path, CaseContent], None] = lambda *_: None
    memory: Callable[[Grid, Sequence[ModelCard], Outputs], int] = lambda *_: 0
    _: KW_ONLY
    after: str = ""
    modules: tuple[str, ...] = ()
