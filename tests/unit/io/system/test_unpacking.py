"""Unpacked files go away with their process, however that ends."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tempfile
import zipfile
from contextlib import closing
from pathlib import Path

import pytest

from scanloom.core import ScanError
from scanloom.io.system import scratch_folders
from scanloom.io.system import unpacking as unpack_module
from scanloom.io.system.unpacking import UnpackedFiles
from support.processes import next_line

UNPACK = """
import os, sys
from scanloom.io.session import current_session
from scanloom.io.system.unpacking import UnpackedFiles
print(current_session().cache(UnpackedFiles).readable_file(sys.argv[1], gzipped=True), flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
if sys.argv[2] == "living":
    sys.stdin.read()
"""


def unpack(packed: Path, end: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "TMPDIR": str(packed.parent)}
    command = [sys.executable, "-c", UNPACK, str(packed), end]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def test_what_a_killed_process_unpacked_goes_when_the_next_one_unpacks(tmp_path: Path) -> None:
    packed = tmp_path / "scan.dcm.gz"
    packed.write_bytes(gzip.compress(b"scan"))
    foreign = tmp_path / "scanloom-of-somebody"  # without a lock: not ours to judge
    foreign.mkdir()

    with unpack(packed, "living") as living:
        kept = Path(next_line(living).strip())
        dead, _ = unpack(packed, "killed").communicate()
        assert Path(dead.strip()).read_bytes() == b"scan"
        unpack(packed, "ended").communicate()
        assert not Path(dead.strip()).exists()
        assert kept.read_bytes() == b"scan"

    assert sorted(tmp_path.iterdir()) == [packed, foreign]


def test_a_process_that_starts_meanwhile_takes_no_folder_for_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for folders whose locks are free, just before the lock of a new one is taken."""
    lock_file = scratch_folders.lock_file

    def late(descriptor: int, timeout_s: float | None = None) -> bool:
        monkeypatch.setattr(scratch_folders, "lock_file", lock_file)
        scratch_folders.remove_stale_folders(tmp_path)
        return lock_file(descriptor, timeout_s)

    monkeypatch.setattr(scratch_folders, "lock_file", late)
    with scratch_folders.locked_temporary_folder(tmp_path) as folder:
        assert folder.is_dir()
        scratch_folders.remove_stale_folders(tmp_path)
        assert folder.is_dir()
    assert not list(tmp_path.iterdir())


def scratch_files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file() and path.name != "lock"]


def test_a_gzip_file_that_grows_beyond_reason_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "bomb.dcm.gz"
    packed.write_bytes(gzip.compress(bytes(1 << 22)))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(unpack_module, "ALWAYS_ALLOWED_BYTES", 1 << 16)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    with closing(UnpackedFiles()) as unpacked:
        with pytest.raises(ScanError) as caught:
            unpacked.readable_file(str(packed), gzipped=True)
        remaining = scratch_files(scratch)

    assert caught.value.code == "TOO_LARGE"
    assert remaining == []
    assert not list(scratch.iterdir())


def test_an_archive_that_can_not_be_unpacked_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, scratch = tmp_path / "scans.zip", tmp_path / "scratch"
    scratch.mkdir()
    with zipfile.ZipFile(archive, "w") as pack:  # stored, so that one byte is damage
        pack.writestr("a", b"one" * 100)
        pack.writestr("b", b"two" * 100)
    archive.write_bytes(archive.read_bytes().replace(b"twotwo", b"TWOTWO", 1))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    with closing(UnpackedFiles()) as unpacked:
        with pytest.raises(ScanError) as caught:
            unpacked.readable_file(f"{archive}\0b")
        remaining = scratch_files(scratch)

    assert caught.value.code == "DAMAGED"
    assert remaining == []
    assert not list(scratch.iterdir())
