"""Sessions own the caches of reading: each sees its own, and frees them when it ends."""

from __future__ import annotations

import gzip
import tempfile
import threading
from pathlib import Path

import pytest

import scanloom
from scanloom.core import Series
from scanloom.io.dicom.header.header import HeaderCache
from scanloom.io.index.series import find_series
from scanloom.io.read import read_scan
from scanloom.io.session import ReadSession, current_session, read_session
from support.archives import series


@pytest.fixture
def compressed(tmp_path: Path) -> Path:
    folder = tmp_path / "compressed"
    folder.mkdir()
    for path in series(folder, "a", count=3):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    return folder


def only_series(folder: Path) -> Series:
    [only] = find_series(folder)
    return only


def test_unpacked_files_go_with_their_session(compressed: Path) -> None:
    with read_session():
        scan = only_series(compressed)
        assert all(file.exists() and compressed not in file.parents for file in scan.files)
        assert read_scan(scan).volume.grid.shape[2] == 3
    assert not any(file.exists() for file in scan.files)


def test_headers_are_those_of_the_session_that_found_them(tmp_path: Path) -> None:
    series(tmp_path, "a", count=3)
    with read_session() as outer:
        [*files] = only_series(tmp_path).files
        with read_session() as inner:
            assert current_session() is inner
            assert inner.cache(HeaderCache).take(files[0]) is None
        assert current_session() is outer
        assert outer.cache(HeaderCache).take(files[0]) is not None


def test_without_a_session_there_is_one_for_the_process(compressed: Path) -> None:
    seen: list[ReadSession] = []
    with read_session():
        thread = threading.Thread(target=lambda: seen.append(current_session()))
        thread.start()
        thread.join()
    assert seen == [current_session()]
    files = only_series(compressed).files
    assert only_series(compressed).files == files


def test_loading_leaves_no_unpacked_files(
    compressed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    assert scanloom.load_volume(compressed).grid.shape[2] == 3
    assert not any(scratch.iterdir())


def test_a_thread_can_enter_a_session(tmp_path: Path) -> None:
    series(tmp_path, "a", count=3)

    def read() -> None:
        with session.active():
            seen.append(session.cache(HeaderCache).take(only_series(tmp_path).files[0]))

    seen: list[object] = []
    session = ReadSession()
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    session.close()
    assert len(seen) == 1
    assert seen[0] is not None
    assert current_session() is not session


def test_a_fault_ends_the_session(compressed: Path) -> None:
    def failing() -> None:
        with read_session():
            files.extend(only_series(compressed).files)
            raise KeyboardInterrupt

    files: list[Path] = []
    with pytest.raises(KeyboardInterrupt):
        failing()
    assert not any(file.exists() for file in files)
