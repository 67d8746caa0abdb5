"""Every file of an archive is counted once, with the right reason, however the index is made."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from scanloom.core import Reason, ScanError
from scanloom.io.dicom.header import header as header_module
from scanloom.io.formats import VolumeFormat
from scanloom.io.identity import key_fingerprint
from scanloom.io.index import build, parts, storage
from scanloom.io.index import inspection as survey_module
from scanloom.io.index.build import INDEX_NAME, Index, build_index, cached_index_path
from scanloom.io.index.series import find_series
from scanloom.io.output.private import PRIVATE
from scanloom.io.read import read_scan
from scanloom.io.system.archives import ARCHIVE_KINDS, ArchiveKind
from scanloom.io.volumes.mgh import parse_mgh
from support.archives import Outcomes, series, write_archive, write_zip
from support.write_dicom import noise

KEY, OTHER_KEY = bytes(32), bytes(range(32))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(scope="module")
def messy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcomes]:
    root = tmp_path_factory.mktemp("archive")
    return root, write_archive(root)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A small archive that a test may change."""
    root = tmp_path / "archive"
    for name in ("a", "b", "c"):
        (root / name).mkdir(parents=True)
        series(root / name, name)
    return root


def outcomes(index: Index, root: Path) -> Outcomes:
    return {os.path.relpath(file.entry.path, root): file.outcome for file in index.files()}


def rows(index: Index) -> list[Any]:
    """Return all that an index says, file by file and series by series, whatever its parts."""
    files = [
        (file.entry, file.outcome, file.reason, file.series and file.series.id, info)
        for file, info in zip(index.files(), index.infos(), strict=True)
    ]
    series = [
        (one._replace(files=(), pieces=()), one.n_files, list(index.paths_of(one)))
        for one in index.series
    ]
    return [files, series, index.counts(), index.reasons]


def used(index: Index) -> int:
    return index.counts()["used"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files whose headers are read in this process."""
    paths: list[str] = []
    real = survey_module.read_header

    def noted(path: Path | str) -> Any:
        paths.append(str(path))
        return real(path)

    monkeypatch.setattr(survey_module, "read_header", noted)
    return paths


def with_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let other processes help with few files, and cut folders and series in pieces."""
    for name, value in (("MIN_FILES_FOR_WORKERS", 0), ("_CHUNK", 3), ("_LARGEST", 7)):
        monkeypatch.setattr(parts, name, value)


# --- what is found --------------------------------------------------------------------------------


def test_every_file_of_a_messy_archive_is_counted_with_its_reason(
    messy: tuple[Path, Outcomes],
) -> None:
    root, expected = messy
    index = build_index([root], KEY)
    assert outcomes(index, root) == expected
    counts = index.counts()
    assert counts.pop("found") == sum(counts.values()) == len(expected) > 100


def test_what_the_index_calls_used_is_read(messy: tuple[Path, Outcomes]) -> None:
    """Its shape and spacing are true as well."""
    root, _ = messy
    index = build_index([root], KEY)
    read = 0
    for indexed in index.series:
        if indexed.status != "used":
            continue
        volume = read_scan(index.as_series(indexed)).volume
        assert indexed.info.shape == volume.grid.shape
        np.testing.assert_allclose(indexed.info.spacing, volume.grid.spacing, atol=1e-5)
        assert indexed.info.modality in (volume.modality, "")
        read += 1
    assert read >= 12


def test_what_the_index_calls_failed_fails_with_that_reason(
    messy: tuple[Path, Outcomes],
) -> None:
    root, _ = messy
    index = build_index([root], KEY)
    failed = [indexed for indexed in index.series if indexed.status == "failed"]
    for indexed in failed:
        with pytest.raises(ScanError) as caught:
            read_scan(index.as_series(indexed))
        assert caught.value.reason is indexed.reason
    assert len(failed) >= 4


def test_an_index_and_the_finder_know_the_same_series(messy: tuple[Path, Outcomes]) -> None:
    root, _ = messy
    ours = [series for series in build_index([root], KEY).series if series.slices]
    theirs = find_series(root)
    assert [series.series_uid for series in ours] == [series.series_uid for series in theirs]
    assert [series.n_files for series in ours] == [len(series.files) for series in theirs]


def test_the_whole_archive_is_the_same_with_helpers_stored_or_fresh(
    messy: tuple[Path, Outcomes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Row by row: in one process, from the file, and by three in pieces of a few files."""
    root, _ = messy
    fresh = build_index([root], KEY, tmp_path / "a", processes=1)
    stored = build_index([root], KEY, tmp_path / "a")
    with_helpers(monkeypatch)
    helped = build_index([root], KEY, tmp_path / "b", processes=3)
    from_helped = build_index([root], KEY, tmp_path / "b")

    assert fresh.opened == helped.opened > 90
    assert stored.opened == from_helped.opened == 0
    assert rows(fresh) == rows(stored) == rows(helped) == rows(from_helped)


def test_the_files_of_some_series_are_those_of_a_walk(
    messy: tuple[Path, Outcomes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of series that lie over several parts."""
    monkeypatch.setattr(parts, "PART_FILES", 4)
    index = build_index([messy[0]], KEY, processes=1)
    assert any(one.pieces for one in index.series)
    assert list(index.identities()) == [
        (file.entry.path, info.packed, file.reason, file.series)
        for file, info in zip(index.files(), index.infos(), strict=True)
    ]
    by_id = dict[str, list[Any]]()
    for file, info in zip(index.files(), index.infos(), strict=True):
        if file.series is not None:
            by_id.setdefault(file.series.id, []).append((file.entry, info, file.series))
    ids = [name for name in by_id if name]
    assert len(ids) > 12
    for name in ids:
        assert list(index.files_of_series({name})) == by_id[name]
    several = set(ids[::3])
    walked = [each for name, files in by_id.items() if name in several for each in files]
    walked.sort(key=lambda each: each[0].path)
    assert sorted(index.files_of_series(several), key=lambda each: each[0].path) == walked
    assert not list(index.files_of_series({"unknown"}))


def test_a_file_and_two_folders_that_overlap_are_counted_once(archive: Path) -> None:
    whole = build_index([archive], KEY)
    paths = [archive, archive / "a", str(archive / "b" / ".."), archive / "c"]
    index = build_index(paths, KEY)
    assert index.counts()["found"] == 15
    assert outcomes(index, archive) == outcomes(whole, archive)
    assert [series.id for series in index.series] == [series.id for series in whole.series]


def test_a_zip_archive_that_is_named_is_looked_into(tmp_path: Path) -> None:
    names = write_zip(tmp_path / "scans.zip")
    index = build_index([tmp_path / "scans.zip"], KEY)
    assert index.counts() == {"found": 5, "used": 4, "skipped": 1, "ambiguous": 0, "failed": 0}
    inside = {file.entry.path.partition("\0")[2] for file in index.files()}
    assert inside == {*names, "deep/read me"}
    again = build_index([tmp_path / "scans.zip"], KEY)
    assert again.opened == 0
    volume = read_scan(again.as_series(again.series[0])).volume
    expected = noise((12, 10, 4), seed=4) - 1024
    np.testing.assert_array_equal(volume.array, expected)


# --- what changed ---------------------------------------------------------------------------------


def test_unchanged_files_are_not_opened_again(archive: Path, opened: list[str]) -> None:
    assert build_index([archive], KEY).opened == len(opened) == 15
    opened.clear()
    assert build_index([archive], KEY).opened == len(opened) == 0


def test_a_changed_file_is_opened_and_no_other(archive: Path, opened: list[str]) -> None:
    build_index([archive], KEY)
    path = sorted((archive / "b").iterdir())[0]
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"HU", b"US"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # a nanosecond is enough
    opened.clear()
    assert build_index([archive], KEY).opened == 1
    assert opened == [str(path)]


@pytest.mark.parametrize("change", ["shorter", "swapped", "new", "removed", "moved"])
def test_a_change_gives_what_a_fresh_index_gives(
    archive: Path, change: str, opened: list[str]
) -> None:
    build_index([archive], KEY)
    path = sorted((archive / "b").iterdir())[2]
    state = path.stat()
    if change == "shorter":
        path.write_bytes(path.read_bytes()[:-50])
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    elif change == "swapped":  # as large and as old, another inode
        renamed = path.with_name("other")
        renamed.write_bytes(path.read_bytes().replace(b"AXIAL", b"OTHER"))
        os.utime(renamed, ns=(state.st_atime_ns, state.st_mtime_ns))
        renamed.replace(path)
    elif change == "new":
        series(archive / "b", "new", count=3)
    elif change == "removed":
        path.unlink()
    else:
        path.rename(archive / "c" / "moved")
    opened.clear()
    after = build_index([archive], KEY)
    assert after.opened == len(opened) == {"new": 3, "removed": 0}.get(change, 1)
    ours = rows(after)
    shutil.rmtree(cached_index_path([archive]).parent)
    assert ours == rows(build_index([archive], KEY))
    remaining = {"shorter": 10, "swapped": 15, "new": 18, "removed": 10, "moved": 15}
    assert ours[2]["used"] == remaining[change]


@pytest.mark.parametrize(
    "error",
    [PermissionError(), *(ScanError(reason, "") for reason in Reason if reason.retry)],
    ids=lambda error: getattr(error, "code", type(error).__name__),
)
def test_a_file_that_could_not_be_read_is_tried_again(
    archive: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Access and memory can change without a trace in a file's size and times."""
    denied = sorted((archive / "b").iterdir())[4]
    code = getattr(error, "code", "UNREADABLE")
    real = header_module.read_elements

    def refuse(path: Path | str) -> Any:
        if str(path) == str(denied):
            raise error
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(header_module, "read_elements", refuse)
        index = build_index([archive], KEY)
        assert outcomes(index, archive)[f"b/{denied.name}"] == ("failed", code)
        assert build_index([archive], KEY).opened == 1
    again = build_index([archive], KEY)
    assert (again.opened, used(again)) == (1, 15)
    assert build_index([archive], KEY).opened == 0


def test_what_was_tried_again_counts_although_the_merge_was_killed(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part that was stored then has the name of the one before: its files are the same."""
    denied, real = sorted((archive / "b").iterdir())[4], header_module.read_elements

    def refuse(path: Path | str) -> Any:
        if str(path) == str(denied):
            raise PermissionError
        return real(path)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(header_module, "read_elements", refuse)
        assert used(build_index([archive], KEY)) == 10  # the series of the file is not used
    with monkeypatch.context() as patch:
        patch.setattr(build, "merge_parts", killed)
        with pytest.raises(KeyboardInterrupt):
            build_index([archive], KEY)
    again = build_index([archive], KEY)
    assert (again.opened, used(again)) == (0, 15)


def test_a_folder_that_can_t_be_entered_is_counted_as_failed(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.scandir

    def refuse(path: Any) -> Any:
        if not isinstance(path, int) and os.fspath(path) == str(archive / "b"):
            raise PermissionError
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        index = build_index([archive], KEY)
    assert index.counts() == {"found": 11, "used": 10, "skipped": 0, "ambiguous": 0, "failed": 1}
    assert outcomes(index, archive)["b"] == ("failed", "UNREADABLE")
    assert used(build_index([archive], KEY)) == 15


# --- the file -------------------------------------------------------------------------------------


def test_another_key_gives_other_ids_and_is_refused_in_an_output_folder(
    archive: Path, tmp_path: Path
) -> None:
    ours, theirs = build_index([archive], KEY), build_index([archive], OTHER_KEY)
    assert theirs.opened == 15
    assert not {series.id for series in ours.series} & {series.id for series in theirs.series}
    build_index([archive], KEY, tmp_path / "out")
    before = (tmp_path / "out" / PRIVATE / INDEX_NAME).read_bytes()
    with pytest.raises(ScanError) as caught:
        build_index([archive], OTHER_KEY, tmp_path / "out")
    assert caught.value.code == "KEY_MISMATCH"
    assert (tmp_path / "out" / PRIVATE / INDEX_NAME).read_bytes() == before


def test_the_index_is_for_its_owner_alone(archive: Path, tmp_path: Path) -> None:
    build_index([archive], KEY)
    build_index([archive], KEY, tmp_path / "out")
    for path in (cached_index_path([archive]), tmp_path / "out" / PRIVATE / INDEX_NAME):
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.thorough
@pytest.mark.parametrize("of", ["a part", "the catalogue"])
def test_a_damaged_index_is_made_anew(archive: Path, of: str) -> None:
    fresh = rows(build_index([archive], KEY))
    path = cached_index_path([archive])
    if of == "a part":
        [path] = path.with_suffix("").iterdir()
    good = path.read_bytes()
    chance = random.Random(3)
    damaged = [b"", b"PAR1", good[:-1], good[: len(good) // 2], good[4:], bytes(len(good))]
    for _ in range(60):
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        damaged.append(bytes(data))
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    for _ in range(300):  # of the footer, which has no checksum
        data = bytearray(good)
        data[chance.randrange(footer, len(data))] = chance.randrange(256)
        damaged.append(bytes(data))
    changed = sorted((archive / "b").iterdir())[0]
    state = changed.stat()
    for data in damaged:
        path.write_bytes(data)
        again = build_index([archive], KEY)
        assert rows(again) == fresh
        path.write_bytes(data)
        os.utime(changed, ns=(0, 0))  # so that all of the file is needed
        again = build_index([archive], KEY)
        os.utime(changed, ns=(state.st_atime_ns, state.st_mtime_ns))
        assert list(again.infos()) == [info for *_, info in fresh[0]]
        assert [one.id for one in again.series] == [one.id for one, *_ in fresh[1]]


@pytest.mark.parametrize("of", ["a part", "the catalogue"])
@pytest.mark.parametrize("left", [0, 1])
def test_an_index_that_lost_rows_is_made_anew(archive: Path, left: int, of: str) -> None:
    fresh = rows(build_index([archive], KEY))
    path = cached_index_path([archive])
    if of == "a part":
        [path] = path.with_suffix("").iterdir()
    table, metadata = parquet.read_table(path), parquet.read_metadata(path).metadata
    with parquet.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table.slice(0, left))
        writer.add_key_value_metadata(metadata)
    again = build_index([archive], KEY)
    assert (rows(again), again.opened) == (fresh, 15 if of == "a part" else 0)


@pytest.mark.parametrize("of", ["a part", "the catalogue"])
@pytest.mark.parametrize("metadata", [{}, {"scanloom.index": "0"}, None])
def test_a_table_of_others_is_no_index(
    archive: Path, metadata: dict[str, str] | None, of: str
) -> None:
    fresh = rows(build_index([archive], KEY))
    path = cached_index_path([archive])
    if of == "a part":
        [path] = path.with_suffix("").iterdir()
    table = pa.table({"path": [1, 2]})
    if metadata is None:  # of ours, as the file says
        stored_metadata = parquet.read_schema(path).metadata
        table = table.replace_schema_metadata(stored_metadata)
    else:
        table = table.replace_schema_metadata(metadata)
    parquet.write_table(table, path)
    again = build_index([archive], KEY)
    assert (rows(again), again.opened) == (fresh, 15 if of == "a part" else 0)


def test_an_index_of_another_version_is_made_anew(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may judge otherwise."""
    build_index([archive], KEY)
    monkeypatch.setattr(storage, "__version__", "0.0.0")
    assert build_index([archive], KEY).opened == 15


@pytest.mark.parametrize(
    ("table", "added"),
    [
        ("VOLUME_FORMATS", VolumeFormat("other", (".other",), parse_mgh)),
        ("ARCHIVE_KINDS", ArchiveKind("other", (".other",), ARCHIVE_KINDS[0].contents)),
    ],
)
def test_an_index_of_fewer_formats_is_made_anew(
    archive: Path, monkeypatch: pytest.MonkeyPatch, table: str, added: object
) -> None:
    """A file that had no format may have the added one."""
    build_index([archive], KEY)
    assert build_index([archive], KEY).opened == 0
    monkeypatch.setattr(storage, table, (*getattr(storage, table), added))
    assert build_index([archive], KEY).opened == 15


def test_who_has_no_cache_folder_does_without(
    archive: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert build_index([archive], KEY).opened == 15
    assert build_index([archive], KEY).opened == 15


def test_an_index_that_was_killed_while_it_was_stored_is_made_again(
    archive: Path, tmp_path: Path
) -> None:
    """The draft of the killed process is a folder; it goes once it is older than an hour."""
    killed = f"""
import os, signal
from pathlib import Path
from scanloom.io.index import build
from pyarrow import parquet
parquet.ParquetWriter.write_table = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
build.build_index([{str(archive)!r}], {KEY!r}, Path({str(tmp_path)!r}))
"""
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
    (draft,) = (tmp_path / PRIVATE / "index").glob(".*.parquet.*")
    assert draft.is_dir()

    assert build_index([archive], KEY, tmp_path).opened == 15
    assert build_index([archive], KEY, tmp_path).opened == 0
    for path in (draft, *draft.iterdir()):
        os.utime(path, (0, 0))
    series(archive / "a", "new")
    build_index([archive], KEY, tmp_path)
    assert not draft.exists()


def test_ids_are_those_of_the_content(archive: Path, tmp_path: Path) -> None:
    """Whatever the place: an archive that was moved gives the same cases."""
    here = [series.id for series in build_index([archive], KEY).series]
    moved = archive.rename(tmp_path / "elsewhere")
    assert [series.id for series in build_index([moved], KEY).series] == here
    assert len(set(here)) == 3
    assert all(len(name) == 26 for name in here)
    assert key_fingerprint(KEY) not in here
