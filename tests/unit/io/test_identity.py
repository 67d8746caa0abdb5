"""Ids depend on the scan and the key, and on nothing else."""

from __future__ import annotations

import multiprocessing
import os
import pwd
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from scanloom.core import ScanError, Series
from scanloom.io.identity import (
    case_id,
    default_key_file,
    file_id,
    key_fingerprint,
    load_key,
    read_key,
    source_hash,
)

KEY, SECOND_KEY = bytes(range(32)), bytes(range(1, 33))


def written(folder: Path, *contents: bytes, prefix: str = "") -> tuple[Path, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for n, content in enumerate(contents):
        paths.append(folder / f"{prefix}{n}")
        paths[-1].write_bytes(content)
    return tuple(paths)


def test_the_id_of_a_dicom_series_is_made_of_its_uids():
    series = Series("dicom", (Path("a"), Path("b")), study_uid="1.2", series_uid="3.4")
    elsewhere = Series("dicom", (Path("x/b"), Path("x/a")), "1.2", "3.4", "CT", "words")
    assert case_id(series, KEY) == case_id(elsewhere, KEY)
    assert re.fullmatch(r"[a-z2-7]{26}", case_id(series, KEY))
    changed = [
        case_id(series, SECOND_KEY),
        case_id(Series("dicom", series.files, "1.2", "3.5"), KEY),
        case_id(Series("dicom", series.files, "1.23", ".4"), KEY),
        case_id(Series("dicom", series.files, "", "1.23.4"), KEY),
    ]
    assert len({case_id(series, KEY), *changed}) == 5


def test_without_uids_it_is_made_of_what_the_files_hold(tmp_path):
    contents = [bytes([n]) * 300_000 for n in range(3)]
    series = Series("nifti", written(tmp_path / "a", *contents))
    moved = Series("nifti", written(tmp_path / "b", *contents[::-1], prefix="other"))
    assert case_id(series, KEY) == case_id(moved, KEY)
    assert case_id(series, KEY) != case_id(series, SECOND_KEY)


@pytest.mark.parametrize("offset", [0, 65_536 + 10, 150_000 + 10, 299_999])
def test_a_change_gives_another_hash(tmp_path, offset):
    content = bytearray(300_000)
    before = written(tmp_path / "a", bytes(content))
    content[offset] = 1
    after = written(tmp_path / "b", bytes(content))
    series, changed_series = (Series("nifti", files) for files in (before, after))
    assert source_hash(series, KEY) != source_hash(changed_series, KEY)
    if offset in (0, 65_536 + 10, 299_999):  # head, a sample and tail make the id
        assert case_id(series, KEY) != case_id(changed_series, KEY)


def test_the_source_hash_knows_neither_path_nor_order(tmp_path):
    series = Series("dicom", written(tmp_path / "a", b"one", b"two"), "1", "2")
    changed_series = Series("dicom", written(tmp_path / "b", b"two", b"one", prefix="x"), "1", "2")
    assert source_hash(series, KEY) == source_hash(changed_series, KEY)
    assert source_hash(series, KEY) != source_hash(series, SECOND_KEY)


def test_small_and_empty_files_have_ids(tmp_path):
    ids = {case_id(Series("nifti", written(tmp_path / str(n), b"x" * n)), KEY) for n in range(3)}
    assert len(ids) == 3


def test_a_key_is_made_on_first_use_for_its_owner_only(tmp_path):
    path = tmp_path / "key"
    key = load_key(path)
    assert len(key) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_key(path) == key
    assert [p.name for p in path.parent.iterdir()] == ["key"]


def test_a_mistyped_key_makes_no_folders(tmp_path, monkeypatch):
    named = tmp_path / "nope" / "key"
    monkeypatch.setenv("SCANLOOM_KEY", str(named))
    for file in (named, None):
        with pytest.raises(ScanError) as caught:
            load_key(file)
        assert caught.value.code == "NOT_FOUND"
    assert list(tmp_path.iterdir()) == []


def test_an_empty_home_is_not_the_root_folder(monkeypatch):
    """It is taken for none: the user's own one counts."""
    for name in ("SCANLOOM_KEY", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    own = Path(pwd.getpwuid(os.getuid()).pw_dir)
    for value in ("", str(own)):
        monkeypatch.setenv("HOME", value)
        assert default_key_file() == own / ".config" / "scanloom" / "key"


def test_where_the_key_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("SCANLOOM_KEY", raising=False)
    usual = load_key()
    assert (tmp_path / "config" / "scanloom" / "key").read_bytes() == usual
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "named"))
    named = load_key()
    assert (tmp_path / "named").read_bytes() == named != usual
    assert load_key(tmp_path / "given") not in (named, usual)


def test_a_file_that_is_no_key_is_refused(tmp_path):
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(ScanError) as caught:
        load_key(tmp_path / "key")
    assert caught.value.code == "KEY_DAMAGED"
    (tmp_path / "folder").mkdir()
    with pytest.raises(ScanError) as caught:
        load_key(tmp_path / "folder")
    assert caught.value.code == "UNREADABLE"


def test_many_who_start_at_once_get_one_key(tmp_path):
    context = multiprocessing.get_context("spawn")
    with context.Pool(4) as pool:
        keys = pool.map_async(load_key, [tmp_path / "key"] * 16, chunksize=1).get(120)
    assert len(set(keys)) == 1


def test_the_fingerprint_tells_keys_apart():
    assert key_fingerprint(KEY) == key_fingerprint(bytes(range(32))) != key_fingerprint(SECOND_KEY)
    assert KEY.hex() not in key_fingerprint(KEY)


def test_a_file_that_is_gone_is_unreadable(tmp_path):
    with pytest.raises(ScanError) as caught:
        case_id(Series("nifti", (tmp_path / "gone",)), KEY)
    assert caught.value.code == "UNREADABLE"


def test_the_id_of_a_file_is_made_of_its_instance_uid(tmp_path):
    here, gone = tmp_path / "a", tmp_path / "gone"
    here.write_bytes(b"content")
    assert file_id(gone, "1.2.3", KEY) == file_id(here, "1.2.3", KEY)
    assert re.fullmatch(r"[a-z2-7]{26}", file_id(here, "1.2.3", KEY))
    changed = [
        file_id(here, "1.2.4", KEY),
        file_id(here, "1.2.3", SECOND_KEY),
        file_id(here, "", KEY),
    ]
    changed.append(case_id(Series("dicom", (here,), "", "1.2.3"), KEY))
    assert len({file_id(here, "1.2.3", KEY), *changed}) == 5


def test_a_file_without_uid_is_known_by_what_it_holds(tmp_path):
    series, moved = written(tmp_path / "a", b"x" * 300_000), written(tmp_path / "b", b"x" * 300_000)
    assert file_id(series[0], "", KEY) == file_id(moved[0], "", KEY)
    moved[0].write_bytes(b"x" * 299_999)
    assert file_id(series[0], "", KEY) != file_id(moved[0], "", KEY)
    with pytest.raises(ScanError) as caught:
        file_id(tmp_path / "gone", "", KEY)
    assert caught.value.code == "UNREADABLE"


def test_asking_makes_no_key(tmp_path):
    with pytest.raises(ScanError) as caught:
        read_key(tmp_path / "key")
    assert caught.value.code == "KEY_MISMATCH"
    assert not (tmp_path / "key").exists()
    assert load_key(tmp_path / "key") == read_key(tmp_path / "key")


@pytest.mark.parametrize("fault", ["folder", "file", "owner", "link"])
def test_a_key_that_others_may_have_put_there_is_refused(fault, tmp_path, monkeypatch):
    """With the key, the source of an id can be told. A path may be an id's."""
    if fault == "owner" and os.getuid() != 0:
        pytest.skip("only root can give files away")
    monkeypatch.delenv("SCANLOOM_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "a" / "config"))
    load_key()
    path = default_key_file()
    above = (tmp_path / "a", path.parents[1], path.parent)
    assert [stat.S_IMODE(p.stat().st_mode) for p in above] == [0o700] * 3
    if fault == "folder":
        path.parent.chmod(0o777)
    elif fault == "file":
        path.chmod(0o666)
    elif fault == "owner":
        os.chown(path, 65534, 65534)
    else:
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs").chmod(0o777)
        path.symlink_to(path.rename(tmp_path / "theirs" / "key"))

    for attempt in (load_key, read_key):
        with pytest.raises(ScanError, match="name another file with `key=`") as caught:
            attempt()
        assert caught.value.code == "UNREADABLE"
    assert len(load_key(path)) == 32


def test_no_key_is_made_where_others_may_write(tmp_path, monkeypatch):
    monkeypatch.delenv("SCANLOOM_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "scanloom").mkdir()
    (tmp_path / "scanloom").chmod(0o777)
    with pytest.raises(ScanError, match="other users may write"):
        load_key()
    assert list((tmp_path / "scanloom").iterdir()) == []


NO_LINKS = """
import os, sys
from pathlib import Path
def refuse(*arguments, **more):
    raise PermissionError(1, "no hard links here")
os.link = refuse
from scanloom.io.identity import load_key
print(load_key(Path(sys.argv[1])).hex())
"""


def test_of_many_who_make_a_key_where_there_are_no_hard_links_all_get_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NO_LINKS, str(tmp_path / "key")]
    many = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    keys = {each.communicate()[0].strip() for each in many}

    assert keys == {(tmp_path / "key").read_bytes().hex()}
    assert len(keys.pop()) == 64
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
