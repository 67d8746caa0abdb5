"""A zip file or folder is copied within its bounds, or refused before anything is written."""

from __future__ import annotations

import os
import stat
import zipfile
from pathlib import Path

import pytest

from scanloom.convert.download import sources
from scanloom.convert.download.sources import copy_folder, unpack_zip
from scanloom.core import Reason, ScanError


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "inside" / "target").mkdir(parents=True)
    return tmp_path / "inside" / "target"


def write_zip(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def special(name: str, kind: int, content: bytes = b"/etc/passwd") -> tuple[zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, (kind | 0o777) << 16
    return info, content


def tree(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def refusal(archive: Path, target: Path) -> ScanError:
    with pytest.raises(ScanError) as caught:
        unpack_zip(archive, target)
    assert tree(target.parent) == []
    return caught.value


def test_files_keep_their_paths_and_content(tmp_path: Path, target: Path) -> None:
    archive = write_zip(tmp_path / "m.zip", ("m/configs/a.json", b"{}"), ("m/models/w.pt", b"w"))

    unpack_zip(archive, target)

    assert tree(target) == ["m/configs/a.json", "m/models/w.pt"]
    assert (target / "m" / "models" / "w.pt").read_bytes() == b"w"


def test_folders_are_separated_as_windows_does(tmp_path: Path, target: Path) -> None:
    """By PowerShell's Compress-Archive; a path out of the folder is none, however it is written."""
    members = [(zipfile.ZipInfo(name), content) for name, content in WINDOWS.items()]
    for info, _ in members:
        info.create_system = 0

    unpack_zip(write_zip(tmp_path / "m.zip", *members), target)

    assert tree(target) == ["m/configs/a.json"]
    out = zipfile.ZipInfo("m\\..\\..\\out")
    out.create_system = 0
    with pytest.raises(ScanError, match="not a path inside the model"):
        unpack_zip(write_zip(tmp_path / "n.zip", (out, b"")), target)


WINDOWS = {"m\\configs\\": b"", "m\\configs\\a.json": b"{}"}
UNSAFE_NAMES = [
    "../out",
    "a/../../out",
    "/etc/out",
    "//host/out",
    "..\\out",
    "C:\\out",
    "c:out",
    "a//b",
    "./a",
    "a/./b",
    "a\nb",
    "a\x1b[2Jb",
    "\u202egpj.exe",
    "x" * 300,
    "a/" * 30 + "b",
]


@pytest.mark.parametrize("name", UNSAFE_NAMES)
def test_a_path_out_of_the_folder_is_refused(tmp_path: Path, target: Path, name: str) -> None:
    """Nothing is unpacked, even if a safe member comes first."""
    error = refusal(write_zip(tmp_path / "m.zip", ("good", b""), (name, b"x")), target)

    assert error.reason is Reason.MODEL_UNSAFE
    assert error.detail.isprintable()
    assert tree(tmp_path) == ["m.zip"]


def test_a_name_that_hides_its_end_is_refused(tmp_path: Path, target: Path) -> None:
    archive = write_zip(tmp_path / "m.zip", ("weightsX.txt", b"x"))
    archive.write_bytes(archive.read_bytes().replace(b"weightsX.txt", b"weights\0.txt"))

    assert refusal(archive, target).reason is Reason.MODEL_UNSAFE


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFSOCK])
def test_links_and_special_files_are_refused(tmp_path: Path, target: Path, kind: int) -> None:
    archive = write_zip(tmp_path / "m.zip", special("link", kind), ("link/out", b"x"))

    assert refusal(archive, target).reason is Reason.MODEL_UNSAFE


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("names", [("a", "a"), ("a", "a/b"), ("a/b", "a")])
def test_members_that_meet_are_refused(
    tmp_path: Path, target: Path, names: tuple[str, str]
) -> None:
    archive = write_zip(tmp_path / "m.zip", *((name, b"x") for name in names))

    assert refusal(archive, target).reason is Reason.MODEL_UNSAFE


def test_a_bomb_is_refused_by_its_ratio(tmp_path: Path, target: Path) -> None:
    archive = write_zip(tmp_path / "m.zip", ("w", bytes(64 << 20)))

    assert "would expand" in refusal(archive, target).detail


def test_a_bomb_of_members_that_share_their_data_is_refused(tmp_path: Path, target: Path) -> None:
    """Each entry of the directory leads to the same bytes."""
    with zipfile.ZipFile(tmp_path / "m.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w0", os.urandom(1 << 20))
        first = archive.filelist[0]
        for n in range(1, 100):
            info = zipfile.ZipInfo(f"w{n}")
            info.compress_type, info.header_offset = first.compress_type, first.header_offset
            info.CRC, info.file_size = first.CRC, first.file_size
            info.compress_size = first.compress_size
            archive.filelist.append(info)

    assert refusal(tmp_path / "m.zip", target).reason is Reason.MODEL_UNSAFE


def test_too_many_and_too_large_files_are_refused(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = write_zip(tmp_path / "m.zip", *((f"f{n}", b"1234") for n in range(10)))

    monkeypatch.setattr(sources, "MAX_FILES", 9)
    assert refusal(archive, target).reason is Reason.MODEL_UNSAFE
    monkeypatch.setattr(sources, "MAX_FILES", 10)
    monkeypatch.setattr(sources, "MAX_MODEL_BYTES", 39)
    assert refusal(archive, target).reason is Reason.MODEL_UNSAFE


def test_a_size_that_lies_is_damage(tmp_path: Path, target: Path) -> None:
    """No more is written than the directory states."""
    archive = write_zip(tmp_path / "m.zip", ("w", b"0123456789" * 100))
    data = bytearray(archive.read_bytes())
    entry = data.rindex(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = (10).to_bytes(4, "little")
    archive.write_bytes(bytes(data))

    with pytest.raises(ScanError) as caught:
        unpack_zip(archive, target)
    assert caught.value.reason is Reason.MODEL_DAMAGED
    assert sum(p.stat().st_size for p in target.iterdir()) <= 10


@pytest.mark.parametrize("tenths", range(1, 10))
def test_a_truncated_zip_file_is_refused(tmp_path: Path, target: Path, tenths: int) -> None:
    archive = write_zip(tmp_path / "m.zip", *((f"f{n}", os.urandom(999)) for n in range(10)))
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) * tenths // 10])

    assert refusal(archive, target).reason is Reason.MODEL_DAMAGED


def test_an_encrypted_or_unusual_zip_file_is_refused(tmp_path: Path, target: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("w", b"x")

    assert refusal(tmp_path / "m.zip", target).reason is Reason.MODEL_DAMAGED


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "fold_0" / "validation").mkdir(parents=True)
    (folder / "plans.json").write_text("{}")
    (folder / "fold_0" / "checkpoint_final.pth").write_bytes(b"w")
    return folder


def test_scans_and_hidden_files_of_a_folder_are_left_out(folder: Path, target: Path) -> None:
    """Folders of trained models hold predictions of the training data."""
    (folder / "fold_0" / "validation" / "patient.nii.gz").write_bytes(b"scan")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("")
    os.mkfifo(folder / "pipe")

    copy_folder(folder, target)

    assert tree(target) == ["fold_0/checkpoint_final.pth", "plans.json"]


def test_links_inside_a_folder_become_files(folder: Path, target: Path) -> None:
    (folder / "twin.json").symlink_to("plans.json")

    copy_folder(folder, target)

    assert not (target / "twin.json").is_symlink()
    assert (target / "twin.json").read_text() == "{}"


@pytest.mark.parametrize("goal", ["/etc/passwd", "../outside"])
def test_links_out_of_a_folder_are_refused(folder: Path, target: Path, goal: str) -> None:
    (folder.parent / "outside").write_text("secret")
    (folder / "a").symlink_to(goal)

    with pytest.raises(ScanError) as caught:
        copy_folder(folder, target)
    assert caught.value.reason is Reason.MODEL_UNSAFE
    assert tree(target) == []


def test_links_to_folders_are_refused(folder: Path, target: Path) -> None:
    (folder / "sub").symlink_to(folder.parent)

    with pytest.raises(ScanError) as caught:
        copy_folder(folder, target)
    assert caught.value.reason is Reason.MODEL_UNSAFE
