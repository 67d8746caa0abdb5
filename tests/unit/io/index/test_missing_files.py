"""A part of a scan is never told as the whole.

Beside its slices, what can't be read is a failure; elsewhere, a flag.
"""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from pydicom import dcmread
from pydicom.uid import BasicTextSRStorage

import scanloom
from scanloom.core import Flag, ScanError
from scanloom.io.index.build import Index, build_index
from scanloom.io.index.series import find_series
from support.archives import write_dicomdir
from support.write_dicom import Words, noise, uid, write_series

SLICES = 12
SHAPE = (10, 11, SLICES)
KEY = bytes(32)
NAMES = ("scan", "a", "b", "c", "d", "e")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def series(folder: Path, name: str = "scan", count: int = SLICES, **attributes: str) -> list[Path]:
    return write_series(folder, noise((*SHAPE[:2], count)), words=Words(name=name, **attributes))


def spread(files: Sequence[Path], folders: Sequence[Path]) -> list[Path]:
    """Put equal parts of the files into folders; return where each one is."""
    moved = []
    for n, file in enumerate(files):
        folder = folders[n * len(folders) // len(files)]
        folder.mkdir(parents=True, exist_ok=True)
        moved.append(file.rename(folder / file.name))
    return moved


def cut(files: Iterable[Path], size: int) -> None:
    for file in files:
        file.write_bytes(file.read_bytes()[:size])


def pack_zip(files: Iterable[Path], archive: Path, folder: str = "") -> Path:
    with zipfile.ZipFile(archive, "w") as pack:
        for file in files:
            pack.write(file, folder + file.name)
    return archive


def pack_tar(files: Iterable[Path], archive: Path) -> Path:
    with tarfile.open(archive, "w:gz") as pack:
        for file in files:
            pack.add(file, file.name)
    return archive


def shorten(path: Path, size: int = 1000) -> None:
    path.write_bytes(path.read_bytes()[:-size])


def lost(root: Path) -> dict[str, int]:
    """Return how many files each series may lack: found, indexed and indexed again alike."""
    series = find_series(root, archives=True)
    unreadable = {known.series_uid: known.unreadable for known in series if known.series_uid}
    for _ in range(2):
        assert of_index(build_index([root], KEY, archives=True)) == unreadable
    return {name: unreadable[uid(name)] for name in NAMES if uid(name) in unreadable}


def of_index(index: Index) -> dict[str, int]:
    return {
        known.series_uid: index.as_series(known).unreadable
        for known in index.series
        if known.slices and known.series_uid
    }


def is_told(root: Path, slices: int) -> bool:
    """Whether a scan of so many slices has the flag."""
    volume = scanloom.load_volume(root, series="best", archives=True)
    assert volume.array.shape[2] == slices
    return Flag.FILES_LOST in volume.flags


def is_refused(root: Path, slices: int) -> bool:
    """Whether a scan is refused, unless the loss of slices is accepted: then it has the flag."""
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(root, series=uid("scan"))
    [index] = [
        known for known in build_index([root], KEY).series if known.series_uid == uid("scan")
    ]
    volume = scanloom.load_volume(root, series=uid("scan"), gaps="interpolate")
    assert volume.array.shape[2] == slices
    assert Flag.FILES_LOST in volume.flags
    return caught.value.code == index.info.reason == "SLICES_UNREADABLE"


def two_zips(root: Path, files: Sequence[Path]) -> None:
    pack_zip(files[:6], root / "export1.zip")
    shorten(pack_zip(files[6:], root / "export2.zip"))


def two_zips_with_folders(root: Path, files: Sequence[Path]) -> None:
    pack_zip(files[:6], root / "export1.zip", "disc/slices/")
    shorten(pack_zip(files[6:], root / "export2.zip", "disc/slices/"))


def zip_with_damaged_members(root: Path, files: Sequence[Path]) -> None:
    """The list of the members is whole: unpacking them fails."""
    pack_zip(files[:6], root / "export1.zip")
    damaged = pack_zip(files[6:], root / "export2.zip")
    data = bytearray(damaged.read_bytes())
    data[500] ^= 255
    damaged.write_bytes(data)


def two_tars(root: Path, files: Sequence[Path]) -> None:
    pack_tar(files[:6], root / "part1.tgz")
    shorten(pack_tar(files[6:], root / "part2.tgz"))


def plain_and_zip(root: Path, files: Sequence[Path]) -> None:
    spread(files[:6], [root / "slices"])
    shorten(pack_zip(files[6:], root / "rest.zip"))


def zip_in_the_folder(root: Path, files: Sequence[Path]) -> None:
    spread(files[:6], [root])
    shorten(pack_zip(files[6:], root / "rest.zip"))


PACKED = [
    two_zips,
    two_zips_with_folders,
    zip_with_damaged_members,
    two_tars,
    plain_and_zip,
    zip_in_the_folder,
]


@pytest.mark.parametrize("pack", PACKED)
def test_half_a_scan_in_an_archive_that_can_not_be_read(
    tmp_path: Path, pack: Callable[[Path, Sequence[Path]], None]
) -> None:
    root = tmp_path / "in"
    root.mkdir()
    pack(root, series(tmp_path / "whole"))

    assert is_told(root, 6)
    assert lost(root)["scan"] > 0


def test_half_a_scan_in_a_folder_without_permission_beside_its_own(tmp_path: Path) -> None:
    root = tmp_path / "in"
    spread(series(tmp_path / "whole"), [root / "1", root / "2"])
    shutil.rmtree(root / "2")
    (root / "2").symlink_to(tmp_path / "away")  # as unreadable for all users as a closed folder

    assert is_told(root, 6)
    assert lost(root) == {"scan": 1}


@pytest.mark.parametrize("suffix", [".dcm", "", "uid"])
@pytest.mark.parametrize("size", [0, 100, 400])
def test_half_a_scan_in_a_folder_of_its_own(tmp_path: Path, size: int, suffix: str) -> None:
    whole = series(tmp_path / "whole")
    names = [f"1.2.3.{n}" if suffix == "uid" else f"IM{n}{suffix}" for n in range(SLICES)]
    whole = [file.rename(file.with_name(name)) for file, name in zip(whole, names, strict=True)]
    root = tmp_path / "in"
    files = spread(whole, [root / "DICOM" / "00000001", root / "DICOM" / "00000002"])
    cut(files[6:], size)

    assert is_told(root, 6)
    assert lost(root) == {"scan": 6}


@pytest.mark.parametrize("size", [0, 400])
def test_a_folder_for_each_file(tmp_path: Path, size: int) -> None:
    root = tmp_path / "in"
    files = spread(series(tmp_path / "whole"), [root / f"{n}" for n in range(SLICES)])
    cut(files[9:], size)

    assert is_refused(root, 9)
    assert lost(root) == {"scan": 3}


@pytest.mark.parametrize(
    "name",
    [
        "IM0012",
        *(pytest.param(x, marks=pytest.mark.thorough) for x in ("12", "slice.dcm", "1.2.3.12")),
    ],
)
@pytest.mark.parametrize("k", [0, 5, 11])
@pytest.mark.parametrize("how", ["away", "cut", "empty", "damaged"])
def test_a_slice_that_can_not_be_read_beside_the_others(
    tmp_path: Path, name: str, k: int, how: str
) -> None:
    """First, in the middle or last: the remaining slices are a regular stack, or have a gap."""
    root = tmp_path / "in"
    files = series(root)
    named = [
        file.rename(file.with_name(name.replace("12", f"{n:02d}").replace("slice", f"slice{n}")))
        for n, file in enumerate(files)
    ]
    cut([named[k]], {"cut": 400, "empty": 0}.get(how, 10**9))
    if how == "away":  # as unreadable for all users as a file without permission
        named[k].unlink()
        named[k].symlink_to("nowhere")
    elif how == "damaged":
        named[k].write_bytes(named[k].read_bytes()[:132] + b"\x02\0\0\0ZZ")
    if k == 5:
        with pytest.raises(ScanError, match="next to its slices") as caught:
            scanloom.load_volume(root, series=uid("scan"))
        assert caught.value.code == "SLICE_GAP"
        assert ("permissions" in str(caught.value)) == (how == "away")
        assert ("copy or export" in str(caught.value)) == (how != "away")
    else:
        assert is_refused(root, SLICES - 1)


def test_notes_that_can_not_be_read_beside_the_slices_refuse_nothing(tmp_path: Path) -> None:
    root = tmp_path / "in"
    for n, file in enumerate(series(root)):
        file.rename(file.with_name(f"IM{n}"))
    for name in ("notes.txt", "README", "thumbs.db"):
        (root / name).symlink_to("nowhere")

    assert is_told(root, SLICES)


def test_several_series_beside_a_file_that_can_not_be_read_are_refused(tmp_path: Path) -> None:
    """A series of the same study in another folder is not."""
    root = tmp_path / "in"
    for name in "abc":
        files = series(tmp_path / name, name)
        for file in spread(files, [root / ("1" if name < "c" else "2")]):
            file.rename(file.with_name(f"{name}{file.name}"))
    (root / "1" / "a9999.dcm").symlink_to("nowhere")

    reasons = {known.series_uid: known.info.reason for known in build_index([root], KEY).series}
    expected = {"a": "SLICES_UNREADABLE", "b": "SLICES_UNREADABLE", "c": ""}
    assert reasons == {uid(name): code for name, code in expected.items()}


def test_a_series_is_read_again_when_its_neighbour_is_readable(tmp_path: Path) -> None:
    """The stored index does not keep the reason of the neighbours."""
    root, out = tmp_path / "in", tmp_path / "out"
    *_, last = series(root)
    last.rename(tmp_path / "away")
    last.symlink_to(tmp_path / "nowhere")
    [before] = build_index([root], KEY, out).series
    [again] = build_index([root], KEY, out).series
    last.unlink()
    (tmp_path / "away").rename(last)
    [after] = build_index([root], KEY, out).series
    assert [known.info.reason for known in (before, again, after)] == ["SLICES_UNREADABLE"] * 2 + [
        ""
    ]


def test_files_that_a_dicomdir_names_and_that_are_not_there(tmp_path: Path) -> None:
    disc = tmp_path / "disc"
    files = spread(series(tmp_path / "whole"), [disc / "1", disc / "2"])
    write_dicomdir(disc / "DICOMDIR", [(file.parent.name, file.name) for file in files])
    shutil.rmtree(disc / "2")

    [scan] = find_series(tmp_path / "disc" / "DICOMDIR")

    assert (len(scan.files), scan.unreadable) == (6, 6)


def test_a_readable_localiser_beside_the_damaged_half_tells_the_study(tmp_path: Path) -> None:
    """Among other studies: theirs are not concerned."""
    root = tmp_path / "in"
    files = spread(series(tmp_path / "whole", study="x"), [root / "1" / "s", root / "2" / "s"])
    cut(files[6:], 400)
    report = Words(
        name="scout", study="x", more={"ImageType": ["ORIGINAL", "PRIMARY", "LOCALIZER"]}
    )
    write_series(root / "2", noise((10, 11, 1)), words=report)
    for name in "abc":
        series(root / "other" / name, name, 3, study=name)

    assert lost(root) == {"scan": 6, "a": 0, "b": 0, "c": 0}


# what is not flagged


def test_a_damaged_study_does_not_concern_other_studies(tmp_path: Path) -> None:
    """Patient, study, series: of b a slice is damaged, of d all of one series, of e all."""
    root = tmp_path / "in"
    for name in "abcde":
        series(root / name / "study" / "1", name, 4, study=name)
    series(root / "d" / "study" / "2", "other", 4, study="d")
    cut([sorted((root / "b" / "study" / "1").iterdir())[0]], 400)
    cut((root / "d" / "study" / "2").iterdir(), 400)
    cut((root / "e" / "study" / "1").iterdir(), 400)
    (root / "stray.dcm").write_bytes(next((root / "e").rglob("*.dcm")).read_bytes())

    assert lost(root) == {"a": 0, "b": 1, "c": 0, "d": 4}


def test_of_many_archives_those_beside_the_damaged_one_are_told(tmp_path: Path) -> None:
    """In the order of people: 9 and 11 beside 10."""
    root = tmp_path / "in"
    root.mkdir()
    for name, number in zip("abcde", (2, 9, 10, 11, 100), strict=True):
        files = series(tmp_path / name, name, 4, study=name)
        pack_zip(files, root / f"export{number}.zip")
    shorten(root / "export10.zip")

    assert lost(root) == {"a": 0, "b": 1, "d": 1, "e": 0}


def test_short_files_that_are_no_slices_concern_nobody(tmp_path: Path) -> None:
    root = tmp_path / "in"
    for n, file in enumerate(series(root / "scan")):
        file.rename(file.with_name(f"IM{n}"))
    (root / "README").touch()
    (root / "notes").mkdir()
    (root / "notes" / "done.txt").touch()
    (root / "marks").mkdir()
    (root / "marks" / "done").touch()
    (root / "marks" / "log").write_text("nothing was lost " * 20)

    assert not is_told(root, SLICES)
    assert lost(root) == {"scan": 0}


def test_an_archive_that_is_not_looked_into_says_nothing(tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    plain_and_zip(root, series(tmp_path / "whole"))

    assert Flag.FILES_LOST not in scanloom.load_volume(root).flags


def zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def hole(file: Path) -> None:
    size = file.stat().st_size
    file.write_bytes(b"")
    with file.open("r+b") as opened:
        opened.truncate(size)


def zeros_at_the_start(file: Path) -> None:
    file.write_bytes(bytes(200) + file.read_bytes()[200:])


def random_bytes(file: Path) -> None:
    file.write_bytes(noise((30, 30, 3)).tobytes())


def page(file: Path) -> None:
    file.write_text("<html><body>" + "404 Not Found " * 500 + "</body></html>")


def whole_scan(root: Path, pattern: str) -> list[Path]:
    """Write a scan whose files have names of a pattern, in the order of their numbers."""
    files = series(root)
    return [file.rename(root / pattern.format(n)) for n, file in enumerate(files)]


@pytest.mark.parametrize("pattern", ["IM{:05d}", "scan-{}.dcm"])
@pytest.mark.parametrize("damage", [zeros, hole, zeros_at_the_start, random_bytes, page])
def test_a_slice_whose_content_was_replaced_refuses_its_series(
    tmp_path: Path, damage: Callable[[Path], None], pattern: str
) -> None:
    files = whole_scan(tmp_path / "in", pattern)
    damage(files[-1])

    assert is_refused(tmp_path / "in", SLICES - 1)
    assert lost(tmp_path / "in") == {"scan": 1}


def test_a_slice_without_a_number_is_known_by_its_suffix(tmp_path: Path) -> None:
    files = series(tmp_path / "in")
    for file, letters in zip(files, "abcdefghijkl", strict=True):
        file.rename(file.with_name(f"{letters * 8}.dcm"))
    zeros(tmp_path / "in" / "llllllll.dcm")

    assert is_refused(tmp_path / "in", SLICES - 1)


def test_slices_of_a_folder_that_were_all_replaced_refuse_their_series(tmp_path: Path) -> None:
    root = tmp_path / "in"
    for file in spread(series(root), [root / "1", root / "2", root / "3"])[8:]:
        zeros(file)

    assert is_refused(root, 8)


def test_half_a_scan_whose_content_was_replaced_in_a_folder_of_its_own(tmp_path: Path) -> None:
    root = tmp_path / "in"
    for file in spread(series(root), [root / "1", root / "2"])[6:]:
        zeros(file)

    assert lost(root) == {"scan": 6}
    assert is_told(root, 6)


def test_a_member_whose_content_was_replaced_refuses_its_series(tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    files = series(tmp_path / "whole")
    zeros(files[-1])
    archive = pack_zip(files, root / "export.zip")

    with pytest.raises(ScanError, match="SLICES_UNREADABLE"):
        scanloom.load_volume(archive)
    [index] = build_index([archive], KEY).series
    assert index.info.reason == "SLICES_UNREADABLE"


def test_other_files_next_to_slices_refuse_nothing(tmp_path: Path) -> None:
    root = tmp_path / "in"
    whole_scan(root, "IM{:05d}.dcm")
    text = "nothing was lost " * 50
    for name in (
        "README",
        "DICOMDIR",
        "notes.txt",
        "IM00001.json",
        "IM00002.jpg",
        "IM00003.png",
        "._IM00004.dcm",
        ".hidden.dcm",
        "export",
    ):
        (root / name).write_text(text)
    report = dcmread(root / "IM00000.dcm")
    report.SOPClassUID = report.file_meta.MediaStorageSOPClassUID = BasicTextSRStorage
    report.SOPInstanceUID = report.file_meta.MediaStorageSOPInstanceUID = "1.2.3.4"
    del report.PixelData
    report.save_as(root / "IM00099.dcm")

    assert lost(root) == {"scan": 0}
    assert not is_told(root, SLICES)
    assert [known.info.reason for known in build_index([root], KEY).series] == [""]
