"""Exports are complete or absent, whoever writes or damages them."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from scanloom.inference.engines import cache
from scanloom.inference.engines.cache import cached_export, export_key, exports_folder
from scanloom.own_python import own_python

KEY = export_key({"network": "a"})

WRITER = """
import sys, time
from pathlib import Path
from scanloom.inference.engines.cache import cached_export, export_key

def write(folder):
    (folder / "graph").write_text("half")
    Path(sys.argv[1]).open("a").write("written\\n")
    time.sleep(float(sys.argv[2]))
    (folder / "graph").write_text("whole")

with cached_export(export_key({"network": "a"}), write) as (folder, found):
    print((folder / "graph").read_text())
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def write(folder: Path) -> None:
    (folder / "graph").write_text("whole")


def refuse(folder: Path) -> None:
    raise AssertionError("written again")


def names() -> set[str]:
    return {path.name for path in exports_folder().iterdir()}


def test_an_export_is_written_once() -> None:
    with cached_export(KEY, write) as (folder, cached):
        assert not cached
        assert (folder / "graph").read_text() == "whole"
    with cached_export(KEY, refuse) as (folder, cached):
        assert cached
        assert (folder / "graph").read_text() == "whole"
    assert names() == {KEY, f"{KEY}.lock"}


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "more", "no hashes", "hashes"])
def test_a_damaged_export_is_written_again(damage: str) -> None:
    with cached_export(KEY, write) as (folder, _):
        graph, hashes = folder / "graph", folder / cache.HASHES
    if damage == "flipped":
        graph.write_text("whOle")
    elif damage == "cut":
        graph.write_text("who")
    elif damage == "missing":
        graph.unlink()
    elif damage == "more":
        (folder / "weights").write_text("of another")
    elif damage == "no hashes":
        hashes.unlink()
    else:
        hashes.write_text("[1]")

    with cached_export(KEY, write) as (folder, cached):
        assert not cached
        assert (folder / "graph").read_text() == "whole"
        assert {path.name for path in folder.iterdir()} == {"graph", cache.HASHES}


def test_a_failure_leaves_nothing() -> None:
    def fail(folder: Path) -> None:
        (folder / "graph").write_text("half")
        raise ValueError("unsupported")

    with pytest.raises(ValueError, match="unsupported"), cached_export(KEY, fail):
        pass
    assert names() == {f"{KEY}.lock"}


def test_a_read_only_cache_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # no folder can be made in a file, even by root
    with cached_export(KEY, write) as (folder, cached):
        assert not cached
        assert (folder / "graph").read_text() == "whole"
    assert not folder.exists()


def test_folders_of_others_are_not_used() -> None:
    exports_folder().mkdir(parents=True)
    exports_folder().chmod(0o777)
    with cached_export(KEY, write) as (folder, _):
        assert not folder.is_relative_to(exports_folder())
    assert names() == set()


def test_old_exports_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [export_key({"network": n}) for n in range(3)]
    monkeypatch.setattr(cache, "LARGEST_BYTES", 200)
    for age, key in enumerate(keys):
        with cached_export(key, write) as (folder, _):
            stamp = time.time() - 1000 + age
            os.utime(folder, (stamp, stamp))
    assert keys[0] not in names()
    assert keys[2] in names()


def start(log: Path, seconds: float) -> subprocess.Popen[str]:
    command = own_python("-c", WRITER, str(log), str(seconds))
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_writer_leaves_nothing_half(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start(log, 60.0)
    while not log.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    with cached_export(KEY, write) as (folder, cached):
        assert not cached
        assert (folder / "graph").read_text() == "whole"
    assert names() == {KEY, f"{KEY}.lock"}


def test_what_another_machine_writes_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cache folder that several machines share, where no process here has its number."""
    monkeypatch.setattr(os, "getpid", lambda: 1 << 30)

    def write_slowly(folder: Path) -> None:
        with cached_export(export_key({"network": "b"}), write):
            assert folder.exists()
        write(folder)

    with cached_export(KEY, write_slowly) as (folder, cached):
        assert not cached
        assert (folder / "graph").read_text() == "whole"


def test_the_first_export_stays_where_locks_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may read it: some file systems of clusters have no locks to wait for."""
    monkeypatch.setattr(cache, "lock_file", lambda *_: False)
    first: list[int] = []

    def write_second(folder: Path) -> None:
        with cached_export(KEY, write) as (published, _):
            first.append(published.stat().st_ino)
        write(folder)

    with cached_export(KEY, write_second) as (folder, _):
        assert [folder.stat().st_ino] == first
    assert names() == {KEY, f"{KEY}.lock"}


@pytest.mark.thorough
def test_processes_wait_for_the_first(tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [start(log, 0.2) for _ in range(20)]
    assert [process.communicate(timeout=500)[0] for process in processes] == ["whole\n"] * 20
    assert log.read_text() == "written\n"
