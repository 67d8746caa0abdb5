"""Index of all files at some paths, of the series they form, and of the outcome of each file.

An archive is read in parts, which are stored one by one: an unchanged file (size, modification
time, inode) is not opened again, and after an interruption the index goes on with the next part.
Neither the files nor the series of an archive are in memory at once. The stored index contains
paths, UIDs and patient IDs: in an output folder it lies in `private/`, otherwise in the user's
cache folder.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from scanloom.core import OUTCOMES, Reason, ScanError, Series, user_cache_folder
from scanloom.core.process import core_count
from scanloom.io.dicom.header.elements import EncodedElements
from scanloom.io.identity import key_fingerprint
from scanloom.io.index import parts as reading
from scanloom.io.index.claims import MERGE, Claims
from scanloom.io.index.inspection import FileInfo
from scanloom.io.index.merge import merge_parts
from scanloom.io.index.parts import KnownFiles, may_go_on, read_part
from scanloom.io.index.storage import (
    Catalogue,
    IndexedSeries,
    IndexStore,
    StoredPart,
    StoredSeries,
    part_name,
    read_catalogue,
    write_part,
)
from scanloom.io.index.walk import FileEntry, FileWalk
from scanloom.io.index.workers import HeaderWorkers
from scanloom.io.output.crosswalk import (
    MAX_HEADERS_READ,
    SourceRecord,
    add_sources,
    find_sources,
    ids_of_volumes,
    latest_by_id,
    path_text,
    source_from_series,
    unrecorded_ids,
)
from scanloom.io.output.layout import check_foreign_entries
from scanloom.io.output.parquet_file import read_errors
from scanloom.io.output.private import PRIVATE, check_key, private_folder
from scanloom.io.session import current_session
from scanloom.io.system.disk_errors import output_error
from scanloom.io.system.unpacking import UnpackedFiles
from scanloom.own_python import make_private_folder

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

INDEX_NAME = "index.parquet"
PARTS_IN_MEMORY = 8
"""Parts whose paths are kept: series that follow one another often lie in the same ones."""
_LINKED = "\0"  # stands for the folder of linked files, which come last

PartName = tuple[str, str]
"""Name of a stored part, and its first folder."""
OnPart = Callable[[PartName, int], None]
"""Receives each part as it is stored, and the number of its files."""


def _ignore_part(part: PartName, files: int) -> None:
    """Wait for the whole index."""


class IndexedFile(NamedTuple):
    """A file of the index.

    Parameters
    ----------
    entry : FileEntry
    reason : str
        Code of the reason for which it is not part of a used series; empty if that of its series
        applies.
    series : IndexedSeries or None
        Its series, of which only those with several pieces have final `files`.
    """

    entry: FileEntry
    reason: str
    series: IndexedSeries | None

    @property
    def outcome(self) -> tuple[str, str]:
        """Its outcome, "used" or one of `OUTCOMES`, and its reason code."""
        code = self.reason or (self.series.info.reason if self.series else "")
        return (Reason[code].outcome, code) if code else ("used", "")


@dataclass(frozen=True, eq=False)
class Index:
    """All files that were found, and the series that they form; both are read as they are used.

    Parameters
    ----------
    series : StoredSeries
        The series, in the order in which `find_series` numbers them; skipped ones come last. A
        series beside unreadable files is SLICES_UNREADABLE.
    opened : int
        Number of files that had to be opened this time.
    store : IndexStore
    catalogue : Catalogue
    """

    series: StoredSeries
    opened: int
    store: IndexStore
    catalogue: Catalogue

    @property
    def reasons(self) -> Mapping[str, int]:
        """Number of files of each reason code; the empty code stands for those that are used."""
        return self.catalogue.reasons

    def counts(self) -> dict[str, int]:
        """Return the number of files found, used, and of each outcome; "found" is the sum."""
        counts = dict.fromkeys(("found", "used", *OUTCOMES), 0)
        for code, number in self.reasons.items():
            counts[Reason[code].outcome if code else "used"] += number
            counts["found"] += number
        return counts

    def files(self) -> Iterator[IndexedFile]:
        """Yield all files in the order in which they were listed."""
        for part, reasons, owners in self._owned():
            yield from map(IndexedFile, part.entries(), reasons, owners)

    def identities(self) -> Iterator[tuple[str, EncodedElements | None, str, IndexedSeries | None]]:
        """Yield path, header, reason and series of each file, in the order of `files`."""
        for part, reasons, owners in self._owned():
            yield from zip(part.paths(), part.headers(), reasons, owners, strict=True)

    def infos(self) -> Iterator[FileInfo]:
        """Yield the result of inspecting each file, in the order of `files`."""
        for _, part in self._parts():
            yield from part.infos()

    def files_of_series(
        self, ids: Collection[str]
    ) -> Iterator[tuple[FileEntry, FileInfo, IndexedSeries]]:
        """Yield the files of some series in the order of `files`; no other part is read."""
        selected = list(self.series.with_ids(ids))
        of_parts = {piece for series in selected for piece in series.pieces}
        numbers = {run.part for series in selected for run in series.files}
        for number in sorted(numbers | {number for number, _ in of_parts}):
            stored = StoredPart(self.store, self.catalogue.parts[number][0])
            groups = {n: series for n, series in enumerate(stored.series()) if series.id in ids}
            groups |= {n: s for s in selected for piece, n in s.pieces if piece == number}
            reasons = stored.lists("reason")[0]
            for row, group, entry, info in stored.files_of(groups):
                if not (reasons[row] and groups[group].slices):
                    yield entry, info, groups[group]

    def _owned(self) -> Iterator[tuple[StoredPart, list[str], list[IndexedSeries | None]]]:
        """Yield each part with the reason of each file, and the series that it belongs to."""
        pieces = self.series.pieces(self.store)
        with_pieces, of_groups = next(pieces, (-1, {}))
        for number, part in self._parts():
            series = dict(enumerate(part.series()))
            if number == with_pieces:
                series |= of_groups
                with_pieces, of_groups = next(pieces, (-1, {}))
            reasons, groups = part.lists("reason", "group")
            owners = [
                series[group] if group >= 0 and not (reason and series[group].slices) else None
                for reason, group in zip(reasons, groups, strict=True)
            ]
            yield part, reasons, owners

    def _parts(self) -> Iterator[tuple[int, StoredPart]]:
        for number, (name, _) in enumerate(self.catalogue.parts):
            yield number, StoredPart(self.store, name)

    def as_series(self, series: IndexedSeries, most: int | None = None) -> Series:
        """Return a series as readers take it; compressed files and archives are unpacked.

        `most` is the number of its first files to which it is limited.
        """
        scratch = current_session().cache(UnpackedFiles)
        rows = itertools.islice(self.paths_of(series), most)
        return Series(
            kind=series.kind,
            files=tuple(scratch.readable_file(path, gzipped=gzipped) for path, gzipped in rows),
            study_uid=series.study_uid,
            series_uid=series.series_uid,
            modality=series.info.modality or None,
            description=series.info.description,
            unreadable=series.unreadable,
            damaged=series.damaged,
            stamp=series.stamp,
        )

    @cached_property
    def _paths_of_part(self) -> Callable[[int], pa.Table]:
        """Returns paths of the files of a part, and whether each is compressed: 2 MB or so."""

        @lru_cache(PARTS_IN_MEMORY)
        def read(number: int) -> pa.Table:
            return StoredPart(self.store, self.catalogue.parts[number][0]).columns(
                "path", "gzipped"
            )

        return read

    def paths_of(self, series: IndexedSeries) -> Iterator[tuple[str, bool]]:
        """Yield path of each file of a series, and whether it is compressed."""
        for number, runs in itertools.groupby(series.files, key=lambda run: run.part):
            table = self._paths_of_part(number)
            for _, start, stop in runs:
                rows = table.slice(start, stop - start)
                for path, gzipped in zip(
                    *(rows.column(n).to_pylist() for n in (0, 1)), strict=True
                ):
                    yield os.fsdecode(path), gzipped


def build_index(
    paths: Sequence[Path | str],
    key: bytes,
    out: Path | None = None,
    *,
    processes: int | None = None,
    archives: bool = False,
    on_part: OnPart = _ignore_part,
) -> Index:
    """List all files at some paths, inspect new and changed ones, and store the index.

    Parameters
    ----------
    paths : sequence of Path or str
        As for `scanloom.io.index.walk.FileWalk`.
    key : bytes
        Secret key of the case IDs.
    out : Path or None
        Output folder that the index belongs to; None for a file in the user's cache folder.
    processes : int or None
        Number of processes for many files; None for one per core.
    archives : bool
        Whether to search archives inside folders.
    on_part : callable
        Called when a part is stored, also if it was before.

    Raises
    ------
    ScanError
        NOT_FOUND; KEY_MISMATCH if OUT belongs to another key; OUTPUT_UNWRITABLE or DISK_FULL if its
        index can't be written.
    """
    fingerprint = key_fingerprint(key)
    if out is None:
        walk = FileWalk(paths, archives=archives)
        return _built(_store_in_cache(paths), walk, key, processes, on_part)
    check_key(out, fingerprint)
    check_foreign_entries(out)  # the index claims it
    walk = FileWalk(paths, out, archives=archives)
    try:
        return _built(_store_in_output(out, fingerprint), walk, key, processes, on_part)
    except OSError as exc:
        error = output_error(exc, "the index")
        raise ScanError(error.reason, error.detail, str(out)) from exc


def index_of(paths: Sequence[Path | str], key: bytes) -> Index:
    """Return the index of a few files, which is not stored; the parameters are as above."""
    return _built(IndexStore(), FileWalk(paths), key)


def index_of_files(entries: Sequence[FileEntry], key: bytes) -> Index:
    """Return the index of files that were listed, archive members too; it is not stored."""
    return _built(IndexStore(), _Listed(entries), key)


class _Listed(FileWalk):
    """Some files that were listed."""

    def __init__(self, entries: Sequence[FileEntry]) -> None:
        super().__init__([])
        self._entries = list(entries)

    def folders(self) -> Iterator[tuple[str, list[FileEntry]]]:
        yield "", self._entries


def index_of_walk(walk: FileWalk, names: Sequence[str], key: bytes) -> Index:
    """Return the index of the files of a walk, which is cached under some names."""
    return _built(_store_in_cache(names), walk, key)


def stored_index(out: Path, fingerprint: str) -> Index | None:
    """Return the index stored in an output folder, or None if it has none for this key.

    It describes the files that existed when it was built; none of them is checked.
    """
    store = IndexStore(out / PRIVATE / INDEX_NAME)
    stored = read_catalogue(store, fingerprint)
    if stored is None:
        return None
    try:
        for name, _ in stored[0].parts:
            StoredPart(store, name).check()
    except read_errors():
        return None
    return Index(stored[1], 0, store, stored[0])


def cached_index_path(paths: Sequence[Path | str]) -> Path:
    """Return the path of the stored index of some paths outside any output folder."""
    folder = user_cache_folder() / "index"
    joined = "\0".join(sorted({os.path.abspath(path) for path in paths}))  # keeps symbolic links
    digest = hashlib.blake2b(os.fsencode(joined), digest_size=16).hexdigest()
    return folder / f"{digest}.parquet"


def index_of_part(out: Path, part: PartName, key: bytes) -> Index:
    """Return the index of a part of an output folder's index as if there were no other one.

    Its catalogue is in memory.

    Raises
    ------
    Exception
        One of `scanloom.io.output.parquet_file.read_errors` if the part can't be read.
    """
    store, fingerprint = IndexStore(out / PRIVATE / INDEX_NAME), key_fingerprint(key)
    with closing(HeaderWorkers(1)) as workers:
        merge_parts([part], "", store, fingerprint, key, workers)
    stored = read_catalogue(store, fingerprint)
    if stored is None:
        raise OSError("the catalogue of a part can't be read")
    return Index(stored[1], 0, store, stored[0])


def ids_of_part(out: Path, part: PartName) -> list[str]:
    """Return the IDs of the series of a part; errors as `index_of_part`."""
    return StoredPart(IndexStore(out / PRIVATE / INDEX_NAME), part[0]).ids()


def _built(
    store: IndexStore,
    walk: FileWalk,
    key: bytes,
    processes: int | None = None,
    on_part: OnPart = _ignore_part,
) -> Index:
    """Read new and changed parts, and put all parts together unless they are unchanged.

    Other processes may do the same at the same time: each part is read, and the catalogue made, by
    one of them.
    """
    fingerprint = key_fingerprint(key)
    stored = read_catalogue(store, fingerprint)
    earlier = stored[0].parts if stored else []
    with (
        closing(Claims(store.make_folder())) as claims,
        closing(HeaderWorkers(processes or core_count())) as workers,
    ):
        builder = _Builder(store, key, workers, claims, earlier, on_part)
        builder.add(walk.folders())
        builder.add([(_LINKED, walk.links(builder.paths_with))])
        digest = builder.digest()

        def has_changed(catalogue: Catalogue) -> bool:
            return (catalogue.parts, catalogue.digest) != (builder.parts, digest)

        if stored is None or has_changed(stored[0]) or stored[0].retry:
            with claims.claim(MERGE, wait=True):
                stored = read_catalogue(store, fingerprint)  # another process may have made it
                if stored is None or has_changed(stored[0]) or stored[0].retry:
                    merge_parts(builder.parts, digest, store, fingerprint, key, workers)
                    store.keep(name for name, _ in (*builder.parts, *earlier))
                    stored = read_catalogue(store, fingerprint)
    if stored is None:
        raise OSError("the index was removed while it was made")
    return Index(stored[1], builder.opened, store, stored[0])


class _Unread(NamedTuple):
    """A part that another process is reading: its files, and stored parts that have some of them.

    `known` are files of it that were inspected already.
    """

    entries: Sequence[FileEntry]
    earlier: Sequence[str]
    known: KnownFiles


class _Builder:
    """Makes the parts of an archive, those that are stored already without reading their files.

    `parts` has their names and first folders, `opened` the number of files that were opened.
    """

    def __init__(
        self,
        store: IndexStore,
        key: bytes,
        workers: HeaderWorkers,
        claims: Claims,
        earlier: Iterable[tuple[str, str]],
        on_part: OnPart,
    ) -> None:
        self._on_part = on_part
        self._store, self._key, self._workers, self._claims = store, key, workers, claims
        self._fingerprint = key_fingerprint(key)
        self._starts: dict[str, list[str]] = {}
        for name, folder in earlier:
            self._starts.setdefault(folder, []).append(name)
        self.parts: list[tuple[str, str]] = []
        self.opened = 0
        self._digests: dict[str, str] = {}
        self._unread: dict[str, _Unread] = {}
        self._known = KnownFiles()

    def add(self, folders: Iterable[tuple[str, list[FileEntry]]]) -> None:
        """Make parts of consecutive folders."""
        first, entries, earlier = "", list[FileEntry](), list[str]()
        inside: tuple[str, ...] = ()  # the part goes on in here, whatever its size
        for folder, files in folders:
            if not files:
                continue
            is_full = len(entries) + len(files) > reading.PART_FILES
            if entries and (is_full or folder in self._starts) and not folder.startswith(inside):
                inside = self._make(first, entries, earlier, folder)
                entries = entries if inside else []
            if folder in self._starts:
                earlier = (earlier if entries else []) + self._starts[folder]
            first = first if entries else folder
            entries += files
            if not self._starts and len(entries) > reading.MIN_FILES_FOR_WORKERS:
                self._workers.start()  # while the remaining folders are listed
        if entries:
            self._make(first, entries, earlier, "")

    def paths_with(self, inodes: Set[int]) -> Iterator[str]:
        """Yield the paths of all files so far that have one of these inodes."""
        import pyarrow as pa
        from pyarrow import compute

        self._wait_for_others()
        requested = pa.array(sorted(inodes), pa.uint64())
        for name, _ in self.parts:
            table = StoredPart(self._store, name).columns("path", "inode")
            matching = table.filter(compute.is_in(table.column("inode"), value_set=requested))
            yield from map(os.fsdecode, matching.column("path").to_pylist())

    def digest(self) -> str:
        """Return the digest of all parts, once they are stored."""
        self._wait_for_others()
        digests = "".join(self._digests[name] for name, _ in self.parts)
        return hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()

    def _wait_for_others(self) -> None:
        """Wait for the parts that other processes read, or read them if these are gone."""
        while self._unread:
            self._look_again()
            if self._unread:
                self._claims.pause()

    def _make(
        self, first: str, entries: Sequence[FileEntry], earlier: Sequence[str], following: str
    ) -> tuple[str, ...]:
        """Make a part, unless it must go on with the `following` folder.

        That is the case if a volume of it may have its voxels there; the folders inside which it
        goes on are returned. `earlier` are stored parts that may have some of its files.
        """
        self._look_again()
        name = part_name(entries, self._fingerprint)
        unread = _Unread(entries, earlier, self._known)
        part = self._read(name, unread, wait=may_go_on(entries, following))
        inside = part.inside if part else ()
        if part and following.startswith(inside):
            self._known.add(part)
            return inside
        self.parts.append((name, first))
        self._known = KnownFiles()
        if part is None:
            self._unread[name] = unread
        else:
            self._on_part((name, first), len(entries))
        return ()

    def _look_again(self) -> None:
        """Read the parts that other processes claimed and left."""
        for name, unread in list(self._unread.items()):
            if self._read(name, unread) is not None:
                del self._unread[name]
                self._on_part((name, dict(self.parts)[name]), len(unread.entries))

    def _read(self, name: str, unread: _Unread, *, wait: bool = False) -> StoredPart | None:
        """Return a part, read if it is not stored yet; None if another process is reading it.

        With `wait`, it is stored in the end.
        """
        part = self._stored(name)
        if part is None or part.to_retry():
            with self._claims.claim(name, wait=wait) as is_ours:
                if not is_ours:
                    return None
                part = self._stored(name)  # by now
                if part is None or (part.to_retry() and name not in self._unread):
                    part = self._read_files(name, unread, part)
        self._digests[name] = part.digest
        return part

    def _read_files(self, name: str, unread: _Unread, unchanged: StoredPart | None) -> StoredPart:
        """Store a part; `unchanged` is the stored one of these files, of which some are retried."""
        entries, earlier, known = unread
        for stored in filter(None, (unchanged, *map(self._stored, earlier))):
            known.add(stored)
        part, opened = read_part(entries, known, self._key, self._workers)
        self.opened += opened
        if unchanged is None or (part.infos, part.series) != (
            unchanged.infos(),
            unchanged.series(),
        ):
            write_part(part, self._store, name)
        return StoredPart(self._store, name)

    def _stored(self, name: str) -> StoredPart | None:
        try:
            part = StoredPart(self._store, name)
            part.check()
        except read_errors():
            return None
        return part


def _store_in_output(out: Path, fingerprint: str) -> IndexStore:
    @contextmanager
    def writable(folder: Path) -> Iterator[None]:
        with private_folder(out, fingerprint):
            folder.mkdir(mode=0o700, exist_ok=True)
            yield

    return IndexStore(out / PRIVATE / INDEX_NAME, writable, keep_in_memory=False)


def _store_in_cache(paths: Sequence[Path | str]) -> IndexStore:
    """Return a store for its owner only; without a usable cache folder, it is in memory."""

    @contextmanager
    def writable(folder: Path) -> Iterator[None]:
        make_private_folder(folder)
        folder.chmod(0o700)
        yield

    return IndexStore(cached_index_path(paths), writable)


# --- rows of the crosswalk ------------------------------------------------------------------------
# Rows of the crosswalk for the series of an index.

BATCH_ROWS = 50_000
"""Rows that are collected before they are written: an archive may have a million series."""


def source_from_index(index: Index, indexed: IndexedSeries) -> SourceRecord:
    """Return the source of a series in an index, case or not; see `source_from_series`.

    From archives, only the files that are read for the patient's ID are unpacked.
    """
    try:
        source = source_from_series(index.as_series(indexed, MAX_HEADERS_READ), indexed.id)
    except ScanError:  # it cannot be unpacked, which is the series' reason in the index
        source = SourceRecord(
            id=indexed.id,
            kind=indexed.kind,
            path="",
            files=0,
            study_uid=indexed.study_uid,
            series_uid=indexed.series_uid,
        )
    return replace(source, path=path_text(indexed.path), files=indexed.n_files)


def record_series(
    out: Path, fingerprint: str, index: Index, holds: Callable[[str], bool] = bool
) -> None:
    """Add the series of an index that are not in the crosswalk yet, or were moved since.

    So are the volumes of those that were moved. Series without an ID are left out.

    Parameters
    ----------
    holds : callable
        Return whether a series is one of them, by its ID.

    Raises
    ------
    ScanError
        KEY_MISMATCH; OUTPUT_UNWRITABLE if the crosswalk cannot be read.
    OSError
        If the crosswalk cannot be written.
    """
    requested = unrecorded_ids(
        out,
        lambda: (
            (name, path_text(path)) for name, path in index.series.places() if name and holds(name)
        ),
    )
    if not requested:
        return
    volumes = ids_of_volumes(out)
    missing = (indexed for indexed in index.series if indexed.id in requested)
    while batch := list(itertools.islice(missing, BATCH_ROWS)):
        sources = [source_from_index(index, indexed) for indexed in batch]
        series_of = {
            volume: series
            for series in sources
            if series.series_uid
            for volume in volumes.get((series.study_uid, series.series_uid), ())
        }
        of_volumes = latest_by_id(find_sources(out, list(series_of))).values() if series_of else ()
        sources += [replace(each, path=series_of[each.id].path) for each in of_volumes]
        with private_folder(out, fingerprint) as private:
            add_sources(private, sources)
