"""The private folder: for its owner alone, one key, nothing lost between two writers."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from scanloom.core import ScanError
from scanloom.io.output.private import check_key, private_folder, read_fingerprint, write_private
from scanloom.io.system.atomic_write import atomic_write

KEY, SECOND_KEY = "abc", "xyz"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_everything_in_it_is_for_the_owner_alone(tmp_path: Path) -> None:
    """Also where somebody made the folder for all beforehand."""
    (tmp_path / "out" / "private").mkdir(parents=True, mode=0o777)
    with private_folder(tmp_path / "out", KEY) as private:
        write_private(private / "some.file", lambda draft: draft.write_text("x"))

    assert mode(private) == 0o700
    assert {mode(path) for path in private.iterdir()} == {0o600}
    assert read_fingerprint(tmp_path / "out") == KEY


def test_another_key_is_refused(tmp_path: Path) -> None:
    check_key(tmp_path, KEY)  # not claimed yet: any will do
    with private_folder(tmp_path, KEY):
        pass
    check_key(tmp_path, KEY)
    with pytest.raises(ScanError) as caught, private_folder(tmp_path, SECOND_KEY):
        pass
    assert caught.value.code == "KEY_MISMATCH"
    with pytest.raises(ScanError) as caught:
        check_key(tmp_path, SECOND_KEY)
    assert caught.value.code == "KEY_MISMATCH"
    assert read_fingerprint(tmp_path) == KEY


def test_a_failed_claim_leaves_out_unclaimed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="boom"), private_folder(out, KEY):
        raise RuntimeError("boom")
    assert not (out / "private").exists()
    with private_folder(out, SECOND_KEY):
        pass
    with pytest.raises(RuntimeError, match="boom"), private_folder(out, SECOND_KEY):
        raise RuntimeError("boom")
    assert read_fingerprint(out) == SECOND_KEY


def test_a_failed_claim_leaves_what_others_put_there(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "index.parquet").write_text("x")
    with pytest.raises(RuntimeError, match="boom"), private_folder(tmp_path, KEY):
        raise RuntimeError("boom")
    assert (tmp_path / "private" / "index.parquet").exists()
    assert read_fingerprint(tmp_path) is None


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, lambda draft: draft.write_text("old"))

    def half(draft: Path) -> None:
        draft.write_text("ne")
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        atomic_write(path, half)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_dead_writer_left_is_cleared(tmp_path: Path) -> None:
    with private_folder(tmp_path, KEY) as private:
        pass
    for name, age in [(".crosswalk.parquet.0123abcd", 7200), (".crosswalk.parquet.4567abcd", 0)]:
        (private / name).write_text("half")
        os.utime(private / name, (time.time() - age,) * 2)
    for name, inside in [("key.89abcdef", "0123456789abcdef"), ("mine.20261124", "of somebody")]:
        (private / f".{name}").mkdir()
        (private / f".{name}" / inside).write_text("half")
        for path in (private / f".{name}" / inside, private / f".{name}"):
            os.utime(path, (time.time() - 7200,) * 2)
    with private_folder(tmp_path, KEY):
        pass
    (private / ".mine.20261124" / "of somebody").unlink()  # no draft has such a name
    (private / ".mine.20261124").rmdir()
    (private / ".crosswalk.parquet.4567abcd").unlink()  # may still be written: it was left alone
    assert {path.name for path in private.iterdir()} == {"key.fingerprint", ".lock"}


def test_a_private_folder_that_cannot_be_read_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "private" / "key.fingerprint").mkdir(parents=True)
    with pytest.raises(ScanError) as caught:
        read_fingerprint(tmp_path)
    assert caught.value.code == "OUTPUT_UNWRITABLE"
