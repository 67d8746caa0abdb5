"""Zip and tar archives: each member is counted once, and damage fails alone, by its reason."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scanloom
from scanloom.core import ScanError
from scanloom.io.index.build import Index, build_index
from scanloom.io.index.series import find_series
from scanloom.io.index.walk import list_files
from scanloom.io.session import current_session
from scanloom.io.system import archives
from scanloom.io.system.archives import list_members
from scanloom.io.system.unpacking import UnpackedFiles
from support.archives import nifti, series, write_dicomdir
from support.input_kinds import (
    ARCHIVES,
    affine_of,
    header_of,
    write_archive,
    write_nifti,
    write_tar,
    write_zip,
)
from support.write_dicom import noise

KEY = bytes(32)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("volume") / "a.nii"
    nifti(path)
    return path.read_bytes()


def codes(index: Index) -> list[str]:
    return [file.outcome[1] for file in index.files()]


def code_of(path: Path) -> str:
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(path)
    return caught.value.code


def check_sum(index: Index, count: int) -> None:
    counts = index.counts()
    assert counts["found"] == counts["used"] + counts["skipped"] + counts["failed"] == count


# --- damage ---------------------------------------------------------------------------------------


def flagged(data: bytes, local: int, central: int, value: bytes) -> bytes:
    """Change a field of the one member of a zip archive, in both its headers."""
    changed, directory = bytearray(data), data.rindex(b"PK\1\2")
    changed[local : local + len(value)] = value
    changed[directory + central : directory + central + len(value)] = value
    return bytes(changed)


def damaged_archives(folder: Path, volume: bytes) -> dict[str, str]:
    """Write archives that can't be used; return the code of each."""
    whole = write_zip(folder / "whole", {"a.nii": volume}, zipfile.ZIP_STORED).read_bytes()
    named = write_zip(folder / "whole", {"ü.nii": volume}).read_bytes()
    lzma = write_zip(folder / "whole", {"a.nii": volume}, zipfile.ZIP_LZMA).read_bytes()
    tar = write_tar(folder / "whole", {"a.nii": volume, "b.nii": volume}).read_bytes()
    tgz = write_tar(folder / "x.tgz", {"a.nii": volume}).read_bytes()
    second = tar.index(b"b.nii")
    (folder / "whole").unlink()
    (folder / "x.tgz").unlink()
    kinds: dict[str, tuple[bytes, str]] = {
        "empty.zip": (b"", "DAMAGED"),
        "text.zip": (b"no zip" * 99, "DAMAGED"),
        "cut.zip": (whole[: len(whole) // 2], "DAMAGED"),
        "sum.zip": (whole[:500] + b"\xff\xff\xff" + whole[503:], "DAMAGED"),
        "lzma.zip": (lzma[:60] + b"\xff" * 20 + lzma[80:], "DAMAGED"),
        "name.zip": (named.replace("ü".encode(), b"\xff\xfe"), "DAMAGED"),
        "password.zip": (flagged(whole, 6, 8, b"\1\0"), "ENCRYPTED"),
        "masked.zip": (flagged(whole, 6, 8, b"\0\x20"), "ENCRYPTED"),
        "method.zip": (flagged(whole, 8, 10, b"\x09\0"), "DECODER"),  # Deflate64
        "empty.tar": (b"", "DAMAGED"),
        "text.tar": (b"no tar" * 999, "DAMAGED"),
        "cut.tar": (tar[: second + 700], "TRUNCATED"),
        "on the border.tar": (tar[:second], "TRUNCATED"),
        "header.tar": (tar[:second] + b"\xff" + tar[second + 1 :], "DAMAGED"),
        "cut.tgz": (tgz[:-20], "TRUNCATED"),
        "sum.tgz": (tgz[:-6] + b"\xff" + tgz[-5:], "DAMAGED"),
        "text.tar.gz": (b"no gzip" * 99, "DAMAGED"),
    }
    for name, (data, _) in kinds.items():
        (folder / name).write_bytes(data)
    return {name: code for name, (_, code) in kinds.items()}


def test_archives_that_can_not_be_used_fail_alone(tmp_path: Path, volume: bytes) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "a.nii").write_bytes(volume)
    expected = damaged_archives(tmp_path, volume)

    index = build_index([tmp_path / "good", *(tmp_path / name for name in expected)], KEY)

    outcome = {file.entry.path: file.outcome[1] for file in index.files()}
    reported = {Path(path.split("\0")[0]).name: code for path, code in outcome.items()}
    assert reported == {"a.nii": "", **expected}
    check_sum(index, 1 + len(expected))
    assert [only.status for only in index.series] == ["used"]
    again = build_index([tmp_path / "good", *(tmp_path / name for name in expected)], KEY)
    assert codes(again) == codes(index)
    in_folder = build_index([tmp_path], KEY, archives=True)
    assert sorted(codes(in_folder)) == sorted(codes(index))


def test_each_that_can_not_be_used_is_refused_by_its_reason(tmp_path: Path, volume: bytes) -> None:
    for name, code in damaged_archives(tmp_path, volume).items():
        assert code_of(tmp_path / name) == code, name


def test_a_damaged_dicomdir_among_others_fails_alone(tmp_path: Path, volume: bytes) -> None:
    (tmp_path / "a.nii").write_bytes(volume)
    (tmp_path / "disc").mkdir()
    write_dicomdir(tmp_path / "disc" / "DICOMDIR", [("A",), ("B",)])
    whole = (tmp_path / "disc" / "DICOMDIR").read_bytes()
    (tmp_path / "disc" / "DICOMDIR").write_bytes(whole[:-3])
    index = build_index([tmp_path / "disc" / "DICOMDIR", tmp_path / "a.nii"], KEY)
    assert sorted(codes(index)) == ["", "DAMAGED"]


def test_an_archive_that_goes_or_changes_on_the_way_fails_alone(
    tmp_path: Path, volume: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.nii").write_bytes(volume)
    paths = [tmp_path / "a.nii"]
    for name in ("gone.zip", "cut.zip", "other.tar", "late.zip"):
        paths.append(write_archive(tmp_path / name, {"b.nii": volume, "c.nii": volume}))
    real = archives.list_members

    def listed(path: Path) -> Any:
        result = real(path)
        if path.name == "gone.zip":
            path.unlink()
        elif path.name == "cut.zip":
            path.write_bytes(path.read_bytes()[:900])
        elif path.name == "other.tar":
            write_tar(path, {"d.nii": volume})
        elif path.name == "late.zip":
            raise FileNotFoundError
        return result

    monkeypatch.setattr("scanloom.io.index.walk.list_members", lambda path: reported(path, listed))
    result = build_index(paths, KEY)
    assert Counter(codes(result)) == {"": 1, "DAMAGED": 2, "NOT_FOUND": 3, "SOURCE_CHANGED": 2}


def reported(path: Path, listed: Any) -> Any:
    with archives.unpack_errors():
        return listed(path)


# --- what is counted ------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_members_with_equal_names_are_each_counted_and_read(
    tmp_path: Path, volume: bytes, suffix: str
) -> None:
    second = write_nifti(tmp_path / "b.nii", noise(seed=5)).read_bytes()
    path = tmp_path / f"a{suffix}"
    members = [("x/a.nii", volume), ("x/a.nii", second), ("t", b"1"), ("t", b"2"), ("t", b"3")]
    write_several(path, members)

    index = build_index([path], KEY)

    check_sum(index, 5)
    assert sorted(codes(index)) == ["", "", *["NOT_AN_IMAGE"] * 3]
    arrays = [scanloom.load_volume(path, series=str(n)).array for n in (1, 2)]
    assert any(np.array_equal(array, noise(seed=5)) for array in arrays)
    assert any(np.array_equal(array, noise(seed=0)) for array in arrays)


def write_several(path: Path, members: list[tuple[str, bytes]]) -> None:
    """Write an archive of members whose names may be equal."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as pack, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that are there already
            for name, data in members:
                pack.writestr(name, data)
        return
    mode = {".tgz": "w:gz", ".gz": "w:gz", ".bz2": "w:bz2", ".xz": "w:xz"}.get(path.suffix, "w")
    with tarfile.open(path, mode) as pack:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            pack.addfile(info, io.BytesIO(data))


def test_slices_with_equal_names_are_slices(tmp_path: Path) -> None:
    """A zip that was made of folders, without their names."""
    files = series(tmp_path, "slice")
    write_several(tmp_path / "a.zip", [("IM0001", path.read_bytes()) for path in files])
    [only] = find_series(tmp_path / "a.zip")
    assert len(only.files) == len(files)
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in files:
        path.rename(plain / path.name)
    np.testing.assert_array_equal(
        scanloom.load_volume(tmp_path / "a.zip").array, scanloom.load_volume(plain).array
    )


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_an_archive_of_folders_alone_is_counted(tmp_path: Path, volume: bytes, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    if suffix == ".zip":
        with zipfile.ZipFile(path, "w") as pack:
            pack.mkdir("folder")
    else:
        (tmp_path / "folder").mkdir()
        with tarfile.open(write_tar(path, {}), "w") as pack:
            pack.add(tmp_path / "folder", "folder")
    (tmp_path / "b.nii").write_bytes(volume)
    index = build_index([path, tmp_path / "b.nii"], KEY)
    check_sum(index, 2)
    assert codes(index) == ["NO_IMAGES", ""]
    assert code_of(path) == "NO_IMAGES"


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_an_archive_in_an_archive_is_packed(tmp_path: Path, volume: bytes, suffix: str) -> None:
    inner = write_zip(tmp_path / "inner.zip", {"a.nii": volume}).read_bytes()
    path = write_archive(tmp_path / f"a{suffix}", {"b.nii": volume, "inner.zip": inner})
    assert codes(build_index([path], KEY)) == ["", "NESTED_ARCHIVE"]


def test_links_in_a_zip_archive_are_links(tmp_path: Path, volume: bytes) -> None:
    link = zipfile.ZipInfo("b.nii")
    link.create_system, link.external_attr = 3, 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as pack:
        pack.writestr("a.nii", volume)
        pack.writestr(link, "/etc/passwd")
    assert codes(build_index([tmp_path / "a.zip"], KEY)) == ["", "DUPLICATE_LINK"]


def test_a_zip64_archive_is_read(tmp_path: Path, volume: bytes) -> None:
    pack = zipfile.ZipFile(tmp_path / "a.zip", "w")
    with pack, pack.open("a.nii", "w", force_zip64=True) as member:
        member.write(volume)
    assert codes(build_index([tmp_path / "a.zip"], KEY)) == [""]


# --- in folders -----------------------------------------------------------------------------------


def test_archives_in_folders_are_looked_into_where_that_is_asked_for(
    tmp_path: Path, volume: bytes
) -> None:
    (tmp_path / "far").mkdir()
    for n, suffix in enumerate(ARCHIVES):
        members = {"x/a.nii": volume[:-1] + bytes([n]), "read me": b"text"}
        write_archive(tmp_path / "far" / f"a{n}{suffix}", members)
    (tmp_path / "plain.nii").write_bytes(volume)

    without = build_index([tmp_path], KEY)
    assert sorted(codes(without)) == ["", *["NESTED_ARCHIVE"] * len(ARCHIVES)]
    index = build_index([tmp_path], KEY, archives=True)
    check_sum(index, 1 + 2 * len(ARCHIVES))
    assert codes(index).count("") == 1 + len(ARCHIVES)
    assert build_index([tmp_path], KEY, archives=True).opened == 0
    with pytest.raises(ScanError, match="SERIES_AMBIGUOUS"):
        scanloom.load_volume(tmp_path, archives=True)
    assert scanloom.load_volume(tmp_path / "far", archives=True, series="1").array.shape


def test_what_is_left_out_of_a_data_set_is_not_looked_into(tmp_path: Path, volume: bytes) -> None:
    (tmp_path / "derivatives").mkdir()
    (tmp_path / "dataset_description.json").write_text("{}")
    write_zip(tmp_path / "derivatives" / "a.zip", {"a.nii": volume})
    index = build_index([tmp_path], KEY, archives=True)
    assert sorted(codes(index)) == ["LEFT_OUT", "NOT_AN_IMAGE"]


@pytest.mark.parametrize("archives_too", [False, True])
def test_an_archive_that_is_named_beside_its_folder_is_counted_once(
    tmp_path: Path, volume: bytes, *, archives_too: bool
) -> None:
    (tmp_path / "scans").mkdir()
    path = write_zip(tmp_path / "scans" / "a.zip", {"a.nii": volume})
    (tmp_path / "scans" / "link.zip").symlink_to("a.zip")
    index = build_index([tmp_path / "scans", path], KEY, archives=archives_too)
    assert sorted(codes(index)) == ["", "DUPLICATE_LINK"]


# --- hostile tars ---------------------------------------------------------------------------------


def entry(name: str, **header: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in header.items():
        setattr(info, field, value)
    return info


def tar_of(path: Path, members: list[tarfile.TarInfo], data: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w") as pack:
        for info in members:
            info.size = len(data.get(info.name, b""))
            pack.addfile(info, io.BytesIO(data.get(info.name, b"")))
    return path


def test_only_regular_files_come_out_of_a_tar_and_none_leaves_the_scratch_folder(
    tmp_path: Path, volume: bytes
) -> None:
    names = ["../../up", "/absolute", str(tmp_path / "c"), "a/../../b", "..", "a.nii", "./d/e.nii"]
    other_names = [
        entry("to.nii", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        entry("hard.nii", type=tarfile.LNKTYPE, linkname="a.nii"),
        entry("fifo.nii", type=tarfile.FIFOTYPE),
        entry("disk.nii", type=tarfile.BLKTYPE, devmajor=8),
        entry("zero.nii", type=tarfile.CHRTYPE, devmajor=1, devminor=5),
        entry("folder", type=tarfile.DIRTYPE),
    ]
    data = dict.fromkeys(names, volume)
    path = tar_of(tmp_path / "a.tar", [*map(entry, names), *other_names], data)
    before = sorted(tmp_path.rglob("*"))

    entries = list_files([path])

    reasons = {e.path.split("\0")[-1]: e.reason.code for e in entries if e.reason}
    assert reasons == {
        **dict.fromkeys(("to.nii", "hard.nii"), "DUPLICATE_LINK"),
        **dict.fromkeys(("fifo.nii", "disk.nii", "zero.nii"), "NOT_AN_IMAGE"),
    }
    files = [
        current_session().cache(UnpackedFiles).readable_file(e.path)
        for e in entries
        if not e.reason
    ]
    assert len(set(files)) == len(names)
    assert all(file.read_bytes() == volume for file in files)
    scratch = Path(tempfile.gettempdir()).resolve()
    folders = {file.resolve().relative_to(scratch).parts[0] for file in files}
    assert len(folders) == 1
    assert sorted(tmp_path.rglob("*")) == before
    check_sum(build_index([path], KEY), len(names) + 5)


def block(name: str = "a", **header: Any) -> bytearray:
    return bytearray(entry(name, **header).tobuf(tarfile.GNU_FORMAT))


def summed(header: bytearray) -> bytes:
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def with_size(header: bytearray, size: int) -> bytes:
    header[124:136] = size.to_bytes(12, "big", signed=True)
    return summed(header)


HOSTILE = {
    "a name of gigabytes": bytes(block(type=b"L", size=10 << 30)),
    "words of gigabytes": bytes(block(type=b"x", size=10 << 30)),
    "words for all of gigabytes": bytes(block(type=b"g", size=10 << 30)),
    "a size below 0": with_size(block(), -1024),
    "a size that leads back": bytes(block("b")) + with_size(block(), -1024),
    "words that lead back": bytes(block("b")) + with_size(block(type=b"x"), -512),
    "a size in words": bytes(block(type=b"x", size=13)) + b"13 size=-512\n".ljust(512, b"\0")
    + bytes(block("b")),
    "a map without end": bytes(block(type=b"x", size=47))
    + b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n3 =\n".ljust(512, b"\0")
    + bytes(block("b", size=1 << 20))
    + b"99999999\n".ljust(512, b"1")
    + b"1\n" * (1 << 16),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_headers_that_would_take_all_memory_or_for_ever_are_refused(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(HOSTILE[kind] + bytes(1024))
    with pytest.raises(ScanError) as caught:
        list_members(path)
    assert caught.value.code == "DAMAGED"


def test_archives_that_grow_without_measure_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = tmp_path / "claims.tar"
    bomb.write_bytes(bytes(block(size=1 << 40)) + bytes(1024))
    with pytest.raises(ScanError, match="Unpack an archive") as caught:
        scanloom.load_volume(bomb)
    assert caught.value.code == "TOO_LARGE"
    for suffix in (".zip", ".tgz", ".tar.xz"):
        path = write_archive(tmp_path / f"a{suffix}", {str(n): bytes(1 << 20) for n in range(4)})
        assert len(list_members(path)) == 4
        for name, value in (
            ("ALWAYS_ALLOWED_BYTES", 1 << 20),
            ("MAX_UNPACKED_BYTES", 1 << 21),
            ("MAX_MEMBERS", 3),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(archives, name, value)
                archives._listed.cache_clear()
                assert code_of(path) == "TOO_LARGE", (suffix, name)
        archives._listed.cache_clear()


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar here")
@pytest.mark.parametrize("form", ["gnu", "pax", "ustar"])
def test_what_tar_writes_is_read_sparse_files_too(tmp_path: Path, form: str) -> None:
    scan = tmp_path / "scan"
    (scan / "sub").mkdir(parents=True)
    write_nifti(scan / "sub" / "a.nii")
    with (scan / "sub" / "b.raw").open("wb") as file:  # with a hole
        file.seek(1 << 22)
        file.write(b"end")
    (scan / "sub" / "c.nii").symlink_to("a.nii")
    sparse = ["--sparse"] if form != "ustar" else []
    command = ["tar", f"--format={form}", *sparse, "-czf", str(tmp_path / "a.tgz"), "-C", str(scan)]
    subprocess.run([*command, "."], check=True)

    entries = {e.path.split("\0")[-1]: e for e in list_files([tmp_path / "a.tgz"])}

    assert sorted(entries) == ["sub/a.nii", "sub/b.raw", "sub/c.nii"]
    plain = current_session().cache(UnpackedFiles).readable_file(entries["sub/b.raw"].path)
    assert plain.read_bytes() == (scan / "sub" / "b.raw").read_bytes()
    np.testing.assert_array_equal(scanloom.load_volume(tmp_path / "a.tgz").array, noise())


# --- unpacking ------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_header_and_voxels_in_folders_are_found_together(tmp_path: Path, suffix: str) -> None:
    slices = {f"far/sub/{n}.raw": noise()[..., n].tobytes("F") for n in range(6)}
    header = header_of("metaimage", noise(), ElementDataFile="sub/%d.raw 0")
    path = write_archive(tmp_path / f"a{suffix}", {"far/a.mhd": header, **slices})
    volume = scanloom.load_volume(path)
    np.testing.assert_array_equal(volume.array, noise())
    np.testing.assert_allclose(volume.grid.affine, affine_of(), atol=1e-6)
    assert build_index([path], KEY).counts()["used"] == 7


def test_names_that_no_file_system_takes_are_unpacked(tmp_path: Path, volume: bytes) -> None:
    deep = "/".join(["folder"] * 900)
    names = ["n" * 300 + ".nii", deep + "/a.nii", "f/" + "d" * 300 + "/a.nii", "f", "ü" * 200]
    path = write_zip(tmp_path / "a.zip", dict.fromkeys(names, volume))
    assert codes(build_index([path], KEY)) == ["", "", "", "NOT_AN_IMAGE", "NOT_AN_IMAGE"]


def test_a_tar_that_can_not_be_unpacked_leaves_nothing_of_it(
    tmp_path: Path, volume: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, scratch = write_tar(tmp_path / "a.tgz", {"a": volume, "b": volume}), tmp_path / "scratch"
    path.write_bytes(path.read_bytes()[:-6] + bytes(6))
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with closing(UnpackedFiles()) as unpacked:
        with pytest.raises(ScanError) as caught:
            unpacked.readable_file(f"{path}\0b")
        remaining = [file.name for file in scratch.rglob("*") if file.is_file()]
    assert caught.value.code == "DAMAGED"
    assert set(remaining) <= {"lock"}


@pytest.mark.parametrize("suffix", [".zip", ".tar", ".tgz"])
def test_no_room_to_unpack_is_said_of_the_folder_and_not_of_the_archive(
    tmp_path: Path, volume: bytes, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_archive(tmp_path / f"a{suffix}", {"a.nii": volume})
    full = type("usage", (), {"free": 10})
    monkeypatch.setattr("scanloom.io.system.unpacking.shutil.disk_usage", lambda _: full)
    assert code_of(path) == "SCRATCH_FULL"
