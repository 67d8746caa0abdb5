"""NRRD and MetaImage whose voxels lie in several files; SimpleITK is the witness."""

from __future__ import annotations

import bz2
import gzip
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK
from numpy.typing import NDArray

import scanloom
from scanloom.core import ScanError
from scanloom.io.identity import case_id
from scanloom.io.index.build import build_index
from scanloom.io.index.series import find_series
from scanloom.io.volumes.text_header import MAX_DATA_FILES
from support.case_folders import ORDERS
from support.input_kinds import CORNERS, header_of
from support.write_dicom import noise

KINDS = ("a.nhdr", "a.mhd")
Packer = Callable[[bytes], bytes]


def code_of(path: Path, **options: Any) -> str:
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(path, **options)
    return caught.value.code


def names_of(form: str, numbers: Sequence[int]) -> list[str]:
    return [form % n for n in numbers]


def write(
    path: Path,
    names: Sequence[str],
    file: str,
    array: NDArray[Any] | None = None,
    *,
    before: bytes = b"",
    pack: Packer = bytes,
    order: str = "LPS",
    **changes: str | None,
) -> Path:
    """Write a header and its data, an equal share to each file; `file` is a field of the header."""
    array = noise() if array is None else array
    kind = "nrrd" if path.suffix == ".nhdr" else "metaimage"
    last = "data_file" if kind == "nrrd" else "ElementDataFile"
    listed = "".join(f"{name}\n" for name in names) if "LIST" in file else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        header_of(kind, array, order=order, **changes, **{last: file}) + listed.encode()
    )
    data = array.tobytes("F")
    share = len(data) // len(names)
    for n, name in enumerate(names):
        (path.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (path.parent / name).write_bytes(before + pack(data[n * share : (n + 1) * share]))
    return path


def check_like_simpleitk(path: Path) -> None:
    volume, image = scanloom.load_volume(path), SimpleITK.ReadImage(str(path))
    np.testing.assert_array_equal(volume.array, SimpleITK.GetArrayFromImage(image).T)
    for at in CORNERS:
        ras = np.array(image.TransformIndexToPhysicalPoint(at)) * (-1, -1, 1)
        np.testing.assert_allclose(volume.grid.world(at), ras, atol=1e-4)


TEN = [f"slice {n}.raw" for n in (3, 1, 2, 6, 5, 4)]
FILES: dict[str, tuple[str, list[str], str]] = {
    "list": ("a.nhdr", TEN, "LIST"),
    "list of planes": ("a.nhdr", TEN, "LIST 2"),
    "list of slabs": ("a.nhdr", ["a.raw", "b.raw"], "LIST 3"),
    "list of lines": ("a.nhdr", names_of("%03d.raw", range(120)), "LIST 1"),
    "pattern": ("a.nhdr", names_of("s%03d.raw", range(1, 7)), "s%03d.raw 1 6 1"),
    "pattern by twos": ("a.nhdr", names_of("s%d.raw", range(0, 12, 2)), "s%d.raw 0 10 2"),
    "pattern downwards": ("a.nhdr", names_of("s%2d.raw", range(11, 5, -1)), "s%2d.raw 11 6 -1"),
    "pattern of slabs": ("a.nhdr", names_of("s%d.raw", range(3)), "s%d.raw 0 2 1 3"),
    "list, MetaImage": ("a.mhd", TEN, "LIST"),
    "list of planes, MetaImage": ("a.mhd", TEN, "LIST 2D"),
    "list of lines, MetaImage": ("a.mhd", names_of("%03d.raw", range(120)), "LIST 1D"),
    "pattern, MetaImage": ("a.mhd", names_of("s%03d.raw", range(1, 7)), "s%03d.raw"),
    "pattern from 7": ("a.mhd", names_of("s%d.raw", range(7, 13)), "s%d.raw 7"),
    "pattern by twos, MetaImage": (
        *("a.mhd", names_of("s%d.raw", range(0, 12, 2)), "s%d.raw 0 10 2"),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_volume_of_several_files_is_read_as_simpleitk_reads_it(tmp_path: Path, name: str) -> None:
    header, names, file = FILES[name]
    path = write(tmp_path / header, names, file)
    np.testing.assert_array_equal(scanloom.load_volume(path).array, noise())
    check_like_simpleitk(path)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("header", KINDS)
def test_all_48_orders_lie_where_simpleitk_puts_them(
    tmp_path: Path, header: str, order: str
) -> None:
    path = write(tmp_path / header, TEN, "LIST", order=order)
    assert scanloom.load_volume(path).grid.axis_codes == order
    check_like_simpleitk(path)


@pytest.mark.parametrize("dtype", ["u1", "i2", "u2", "f4"])
@pytest.mark.parametrize("header", KINDS)
def test_every_type_is_kept(tmp_path: Path, header: str, dtype: str) -> None:
    array = (noise() % 120).astype(dtype)
    path = write(tmp_path / header, TEN, "LIST", array)
    assert scanloom.load_volume(path).array.dtype == np.dtype(dtype)
    check_like_simpleitk(path)


CODERS: dict[str, Packer] = {"gzip": gzip.compress, "bzip2": bz2.compress}


@pytest.mark.parametrize("encoding", CODERS)
def test_each_file_is_packed_and_skipped_into_by_itself(tmp_path: Path, encoding: str) -> None:
    pack, before = CODERS[encoding], b"one\ntwo\n"
    fields = {"encoding": encoding, "line_skip": "2", "byte_skip": "5"}
    path = write(
        *(tmp_path / "a.nhdr", TEN, "LIST"),
        before=before,
        pack=lambda data: pack(b"12345" + data),
        **fields,
    )
    np.testing.assert_array_equal(scanloom.load_volume(path).array, noise())


def test_bytes_before_the_data_of_each_file_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.nhdr", TEN, "LIST", before=b"12345", byte_skip="-1")
    np.testing.assert_array_equal(scanloom.load_volume(path).array, noise())
    for size in ("5", "-1"):
        path = write(tmp_path / "a.mhd", TEN, "LIST", before=b"12345", HeaderSize=size)
        np.testing.assert_array_equal(scanloom.load_volume(path).array, noise())
        check_like_simpleitk(path)


def test_compressed_files_of_a_metaimage_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mhd", TEN, "LIST", pack=zlib.compress, CompressedData="True")
    np.testing.assert_array_equal(scanloom.load_volume(path).array, noise())


def test_several_volumes_over_several_files_are_told_apart(tmp_path: Path) -> None:
    array = np.stack([noise(seed=n) for n in range(2)], axis=-1)
    for header, file in (("a.nhdr", "LIST 2"), ("a.mhd", "LIST 2D")):
        path = write(tmp_path / header, names_of("%02d.raw", range(12)), file, array)
        assert code_of(path) == "FOUR_D"
        np.testing.assert_array_equal(scanloom.load_volume(path, phase=1).array, array[..., 1])


@pytest.mark.parametrize("header", KINDS)
def test_all_files_belong_to_the_series_also_those_in_folders_below(
    tmp_path: Path, header: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scans = tmp_path / "scans"
    names = [f"far/er/{name}" for name in TEN]
    path = write(scans / header, names, "LIST")
    [series] = find_series(path)
    assert list(series.files) == [path, *(scans / name for name in names)]
    index = build_index([scans], bytes(32))
    assert index.counts() == {
        "found": 7,
        "used": 7,
        "skipped": 0,
        "ambiguous": 0,
        "failed": 0,
    }
    [only] = index.series
    assert only.id == case_id(series, bytes(32))
    assert index.as_series(only).stamp == series.stamp
    (scans / names[2]).write_bytes(bytes(960))
    [changed] = build_index([scans], bytes(32)).series
    assert changed.id != only.id


@pytest.mark.parametrize("header", ["a.nrrd", "a.mha"])
def test_data_beside_a_header_that_usually_has_them_belong_to_it(
    tmp_path: Path, header: str
) -> None:
    """Else two scans with equal headers would be one case."""
    first = write(tmp_path / {"a.nrrd": "b.nhdr", "a.mha": "b.mhd"}[header], ["a.raw"], "a.raw")
    path = first.rename(tmp_path / header)
    [series] = find_series(path)
    assert [file.name for file in series.files] == [header, "a.raw"]


WRONG: dict[str, tuple[str, list[str], str, str]] = {
    "one missing": ("a.nhdr", TEN[:-1], "LIST", "DAMAGED"),
    "one too many": ("a.mhd", [*TEN, "more.raw"], "LIST", "DAMAGED"),
    "one twice": ("a.nhdr", [*TEN[:-1], TEN[0]], "LIST", "DAMAGED"),
    "no list": ("a.mhd", [], "LIST", "DAMAGED"),
    "no name": ("a.mhd", TEN, "", "DAMAGED"),
    "no axes": ("a.mhd", TEN, "LIST 0D", "DAMAGED"),
    "too many axes": ("a.nhdr", TEN, "LIST 4", "DAMAGED"),
    "a text": ("a.nhdr", TEN, "LIST of files", "DAMAGED"),
    "slabs that don't fit": ("a.nhdr", TEN[:4], "LIST 3", "DAMAGED"),
    "other numbers": ("a.nhdr", TEN, "s%d.raw 1 7 1", "DAMAGED"),
    "no step": ("a.nhdr", TEN, "s%d.raw 1 6 0", "DAMAGED"),
    "a step of MetaIO's": ("a.mhd", TEN, "s%d.raw 1 12", "DAMAGED"),
    "strings": ("a.nhdr", TEN, "s%s.raw 1 6 1", "DAMAGED"),
    "memory": ("a.nhdr", TEN, "s%999999999d.raw 1 6 1", "DAMAGED"),
    "two numbers": ("a.nhdr", TEN, "s%d%d.raw 1 6 1", "DAMAGED"),
    "written to": ("a.nhdr", TEN, "s%n.raw 1 6 1", "DAMAGED"),
    "endless": ("a.nhdr", TEN, "s%d.raw 1 999999999999 1", "DAMAGED"),
    "negative": ("a.nhdr", TEN, "s%d.raw -3 2 1", "DAMAGED"),
    "not there": ("a.mhd", TEN, "s%d.raw", "NOT_FOUND"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_list_or_pattern_that_can_not_be_is_refused(tmp_path: Path, name: str) -> None:
    header, names, file, code = WRONG[name]
    path = write(tmp_path / header, TEN, file)
    if "LIST" in file:
        text = path.read_text().split("LIST")[0] + file + "\n"
        path.write_text(text + "".join(f"{name}\n" for name in names))
    assert code_of(path) == code


@pytest.mark.parametrize("header", KINDS)
@pytest.mark.parametrize("where", ["../", "/", "link/", "sub/../../"])
def test_no_file_out_of_the_folder_is_read(tmp_path: Path, header: str, where: str) -> None:
    path = write(tmp_path / "scan" / header, TEN, "LIST")
    for file in (tmp_path / "scan").glob("*.raw"):
        file.rename(tmp_path / file.name)
    (tmp_path / "scan" / "link").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "scan" / "sub").mkdir()
    prefix = f"{tmp_path}/" if where == "/" else where
    text = path.read_text()
    for name in TEN:
        text = text.replace(f"\n{name}\n", f"\n{prefix}{name}\n")
    path.write_text(text)
    assert code_of(path) == "DAMAGED"


@pytest.mark.parametrize("header", KINDS)
def test_a_file_that_is_too_short_too_long_or_none_is_refused(tmp_path: Path, header: str) -> None:
    path = write(tmp_path / header, TEN, "LIST")
    data_file = tmp_path / TEN[3]
    data = data_file.read_bytes()
    data_file.write_bytes(data[:-1])
    assert code_of(path) == "TRUNCATED"
    data_file.write_bytes(data + b"1")
    assert code_of(path) == "DAMAGED"
    data_file.unlink()
    assert code_of(path) == "NOT_FOUND"
    os.mkfifo(data_file)
    assert code_of(path) == "NOT_FOUND"


def test_a_packed_file_that_holds_too_little_or_too_much_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.nhdr", TEN, "LIST", pack=gzip.compress, encoding="gzip")
    data_file, second_file = tmp_path / TEN[3], tmp_path / TEN[4]
    data = gzip.decompress(data_file.read_bytes())
    data_file.write_bytes(gzip.compress(data[:-1]))
    second_file.write_bytes(
        gzip.compress(gzip.decompress(second_file.read_bytes()) + b"1")
    )  # the sum is right
    assert code_of(path) == "TRUNCATED"
    data_file.write_bytes(gzip.compress(data))
    assert code_of(path) == "DAMAGED"


def test_a_header_that_claims_terabytes_asks_for_no_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "a.nhdr", TEN, "LIST")
    path.write_text(path.read_text().replace("sizes: 24 20 6", "sizes: 900000 900000 6"))
    assert code_of(path) == "TRUNCATED"
    path.write_text(path.read_text().replace("900000 900000 6", f"24 20 {MAX_DATA_FILES + 1}"))
    assert code_of(path) == "DAMAGED"
