"""An archive in many parts has the index of the same archive in one, whatever lies in several."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from scanloom.io.identity import key_fingerprint
from scanloom.io.index import merge, parts, storage
from scanloom.io.index.build import INDEX_NAME, Index, build_index, index_of, stored_index
from scanloom.io.index.series import find_series
from scanloom.io.output.private import PRIVATE
from support.archives import nifti, series
from support.index_rows import index_rows

KEY = bytes(32)
FOLDERS = ("a", "a/b", "a/b/c", "a/d", "e", "e/f", "g10", "g9", "h")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(os, "fsync", lambda _: None)  # hundreds of tiny parts on a busy disk


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Files of four series, two of which are of one study, and of one that has no slices."""
    root = tmp_path_factory.mktemp("slices")
    drawn = {}
    for name, study, count in (("p", "1", 6), ("q", "1", 4), ("r", "2", 5), ("s", "3", 3)):
        drawn[name] = series(root / name, name, study=study, count=count)
    drawn["t"] = series(root / "t", "t", study="3", count=2)
    for file in drawn["t"]:  # as long as CT: an RT Structure Set
        data = file.read_bytes().replace(
            b"1.2.840.10008.5.1.4.1.1.2\0", b"1.2.840.10008.5.1.4.1.1.481.3"
        )
        file.write_bytes(data)
    return drawn


def in_small_parts(monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    """Cut an archive into parts of so many files, and sort and describe few at once."""
    monkeypatch.setattr(parts, "PART_FILES", files)
    monkeypatch.setattr(merge, "_DESCRIBED_AT_ONCE", 2)
    monkeypatch.setattr(storage, "SORTED_AT_ONCE", 8)
    monkeypatch.setattr(storage, "MERGED_AT_ONCE", 3)
    monkeypatch.setattr(storage, "_BATCH", 3)
    monkeypatch.setattr(storage, "_ROW_GROUP", 2)


def draw(root: Path, slices: dict[str, list[Path]], chance: random.Random) -> None:
    """Scatter slices, copies, damaged files, notes, archives, volumes and links over folders."""
    folders = [root / name for name in FOLDERS]
    for folder in folders:
        folder.mkdir(parents=True)
    for name, files in slices.items():
        homes = chance.sample(folders, chance.randint(1, 3))
        for file in files:
            placed = Path(shutil.copy(file, chance.choice(homes) / f"{name}{file.name}.dcm"))
            fate = chance.random()
            if fate < 0.1:
                shutil.copy(file, chance.choice(folders) / f"copy of {file.name}")
            elif fate < 0.2:
                placed.write_bytes(placed.read_bytes()[: chance.choice((0, 40, 300, 900, -30))])
            elif fate < 0.25:
                placed.write_bytes(bytes(chance.choice((60, 600))))
            elif fate < 0.3:
                (chance.choice(folders) / f"link {file.name}").symlink_to(placed)
    for folder in chance.sample(folders, 3):
        (folder / chance.choice(("note.txt", "7.xyz", "README"))).write_bytes(
            b"n" * chance.choice((5, 500))
        )
    with zipfile.ZipFile(chance.choice(folders) / "more.zip", "w") as pack:
        for file in slices["s"][: chance.randint(1, 3)]:
            pack.write(file, f"in/{file.name}")
    nifti(chance.choice(folders) / "volume.nii.gz", seed=chance.randrange(9))
    home = root / chance.choice(("a", "a/b", "e"))
    voxels = home / chance.choice((".", "b/c", "f"))
    voxels.mkdir(exist_ok=True, parents=True)
    write_detached(home, voxels / "v.raw")
    if chance.random() < 0.5:
        (root / "z").symlink_to(root.parent / "elsewhere")
        (root.parent / "elsewhere").mkdir()
        shutil.copy(slices["p"][0], root.parent / "elsewhere" / "outside")


def write_detached(folder: Path, voxels: Path) -> None:
    """Write a MetaImage whose voxels are in a file of their own."""
    np.zeros((4, 5, 6), np.int16).tofile(voxels)
    name = os.path.relpath(voxels, folder)
    lines = ("ObjectType = Image", "NDims = 3", "DimSize = 6 5 4", "ElementType = MET_SHORT")
    lines += ("ElementSpacing = 1 1 1", "Offset = 0 0 0", "TransformMatrix = 1 0 0 0 1 0 0 0 1")
    (folder / "v.mhd").write_text("\n".join((*lines, f"ElementDataFile = {name}\n")))


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.thorough) for n in range(3, 24))]
)
def test_many_parts_give_the_index_of_one(
    seed: int, slices: dict[str, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New, stored and changed; and the finder, which knows no parts, has the same series."""
    chance = random.Random(seed)
    root = tmp_path / "archive"
    draw(root, slices, chance)
    archives = chance.random() < 0.5

    def both() -> tuple[Index, Index]:
        whole = build_index([root], KEY, tmp_path / "whole", archives=archives)
        with monkeypatch.context() as patch:
            in_small_parts(patch, chance.randint(1, 6))
            cut = build_index([root], KEY, tmp_path / "cut", archives=archives)
            assert len(cut.catalogue.parts) > len(whole.catalogue.parts) + 1
            assert index_rows(cut) == index_rows(whole)
        return whole, cut

    whole, cut = both()
    assert whole.opened == cut.opened
    found = find_series(root, archives=archives)
    ours = [one for one in cut.series if one.slices]
    assert [one.stamp for one in ours] == [one.stamp for one in found]
    assert [(one.unreadable, one.damaged) for one in ours] == [
        (one.unreadable, one.damaged) for one in found
    ]
    files = [file for file in root.rglob("*") if file.is_file() and not file.is_symlink()]
    for file in chance.sample(sorted(files), 4):
        file.unlink() if chance.random() < 0.5 else file.rename(root / "h" / f"moved {file.name}")
    both()
    whole, cut = both()
    assert whole.opened == cut.opened == 0 or archives


def test_what_did_not_change_is_neither_opened_nor_written(
    slices: dict[str, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, out = tmp_path / "archive", tmp_path / "out"
    for n, file in enumerate(slices["p"]):
        (root / f"{n}").mkdir(parents=True)
        shutil.copy(file, root / f"{n}" / "slice")
    in_small_parts(monkeypatch, 2)
    first = build_index([root], KEY, out)
    assert (first.opened, len(first.catalogue.parts), len(first.series)) == (6, 3, 1)
    before = {file: file.stat().st_ino for file in (out / PRIVATE).rglob("*.parquet")}

    assert build_index([root], KEY, out).opened == 0
    assert before == {file: file.stat().st_ino for file in (out / PRIVATE).rglob("*.parquet")}

    shutil.copy(slices["q"][0], root / "1" / "more")
    again = build_index([root], KEY, out)
    assert (again.opened, len(again.series)) == (1, 2)
    others = {name for name, folder in first.catalogue.parts if folder != str(root / "0")}
    assert others < {name for name, _ in again.catalogue.parts}


def test_after_a_kill_the_index_goes_on_with_the_next_part(
    slices: dict[str, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "archive"
    for name in "pqr":
        shutil.copytree(slices[name][0].parent, root / name)
    killed = f"""
import os, signal
from pathlib import Path
from scanloom.io.index import build, parts
parts.PART_FILES = 6
write, written = build.write_part, []
def once(*arguments):
    if written:
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(write(*arguments))
build.write_part = once
build.build_index([{str(root)!r}], {KEY!r}, Path({str(tmp_path / "out")!r}))
"""
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
    assert stored_index(tmp_path / "out", key_fingerprint(KEY)) is None
    monkeypatch.setattr(parts, "PART_FILES", 6)

    index = build_index([root], KEY, tmp_path / "out")

    assert (index.opened, index.counts()["used"]) == (9, 15)
    assert index_rows(index) == index_rows(build_index([root], KEY, tmp_path / "undisturbed"))


def test_a_part_that_is_missing_or_damaged_is_read_again(
    slices: dict[str, list[Path]], tmp_path: Path
) -> None:
    fresh = build_index([slices["p"][0].parent], KEY, tmp_path)
    expected = index_rows(fresh)
    [part] = (tmp_path / PRIVATE / "index").glob("*.parquet")
    data = part.read_bytes()
    for damaged in (None, b"", data[:-100], bytes(len(data))):
        part.unlink()
        if damaged is not None:
            part.write_bytes(damaged)
        assert stored_index(tmp_path, key_fingerprint(KEY)) is None
        again = build_index([slices["p"][0].parent], KEY, tmp_path)
        assert (again.opened, index_rows(again)) == (6, expected)
    (tmp_path / PRIVATE / INDEX_NAME).unlink()
    again = build_index([slices["p"][0].parent], KEY, tmp_path)
    assert (again.opened, index_rows(again)) == (0, expected)


def test_parts_that_are_not_named_go_after_a_week(
    slices: dict[str, list[Path]], tmp_path: Path
) -> None:
    """Until then, a run that began earlier may read them."""
    root = tmp_path / "archive"
    shutil.copytree(slices["p"][0].parent, root)
    before = build_index([root], KEY, tmp_path / "out")
    [old] = (tmp_path / "out" / PRIVATE / "index").iterdir()
    expected = index_rows(before)
    sorted(root.iterdir())[0].unlink()
    build_index([root], KEY, tmp_path / "out")
    assert index_rows(before) == expected

    os.utime(old, (0, 0))
    sorted(root.iterdir())[0].unlink()
    after = build_index([root], KEY, tmp_path / "out")
    assert not old.exists()
    assert after.counts()["found"] == 4


def test_paths_of_series_in_one_part_are_read_once(
    slices: dict[str, list[Path]], tmp_path: Path
) -> None:
    index = build_index([slices[name][0].parent for name in "pq"], KEY, tmp_path)
    first, second = index.series
    assert len(index.as_series(first).files) == 6
    shutil.rmtree(tmp_path / PRIVATE / "index")
    assert set(index.as_series(second).files) == set(slices["q"])


def test_a_few_files_are_indexed_without_a_folder(slices: dict[str, list[Path]]) -> None:
    index = index_of([slices["p"][0].parent], KEY)
    [only] = index.series
    assert index.series[0] == index.series[-1] == only
    assert len(index.as_series(only).files) == 6
    assert len(index.as_series(only, 2).files) == 2


def test_rows_are_sorted_in_few_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more files than are merged at once, and none in the end."""
    in_small_parts(monkeypatch, 1)
    numbers = list(range(200))
    random.Random(1).shuffle(numbers)

    def to_table(rows: list[int]) -> pa.Table:
        return pa.table({"number": pa.array(rows, pa.int64())})

    folder = tmp_path / os.fsdecode(b"M\xfcller")  # not UTF-8
    (folder / "index").mkdir(parents=True)
    store = storage.IndexStore(folder / "index.parquet", lambda _: nullcontext())
    ordered = storage.SortedOnDisk(
        store, lambda row: row, to_table, lambda batch: batch["number"].to_pylist()
    )
    most = 0
    for number in numbers:
        ordered.add(number)
        most = max(most, len(list((folder / "index").iterdir())))
    assert most == storage.MERGED_AT_ONCE - 1
    assert list(ordered.rows()) == sorted(numbers)
    assert not list((folder / "index").iterdir())
