"""NIfTI files packed by bzip2, xz and zstd are the volumes that they were packed of."""

from __future__ import annotations

import gzip
import lzma
import shutil
import zlib
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

import scanloom
from scanloom.core import ScanError
from scanloom.io.index.build import build_index
from scanloom.io.system.compressed_streams import MAX_DICTIONARY_BYTES
from support.case_folders import ORDERS
from support.input_kinds import PACKERS, affine_of, command, write_nifti
from support.write_dicom import noise

SUFFIXES = sorted(PACKERS)


def code_of(path: Path, **options: Any) -> str:
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(path, **options)
    return caught.value.code


@pytest.mark.parametrize("order", ORDERS)
def test_all_48_orders_lie_where_nibabel_puts_them(tmp_path: Path, order: str) -> None:
    for suffix in SUFFIXES:
        write_nifti(tmp_path / f"a.nii{suffix}", affine=affine_of(order))
    plain = write_nifti(tmp_path / "a.nii", affine=affine_of(order))
    image = nibabel.load(plain)
    for suffix in SUFFIXES[ORDERS.index(order) % 3 :: 3]:  # each its turn: decoding has a process
        volume = scanloom.load_volume(tmp_path / f"a.nii{suffix}")
        assert volume.grid.axis_codes == order
        np.testing.assert_allclose(volume.grid.affine, image.affine, atol=1e-5)
        np.testing.assert_array_equal(volume.array, np.asarray(image.dataobj))


def test_nibabel_reads_the_bzip2_that_we_read(tmp_path: Path) -> None:
    path = write_nifti(tmp_path / "a.nii.bz2")
    np.testing.assert_array_equal(nibabel.load(path).get_fdata(), scanloom.load_volume(path).array)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8"])
def test_every_type_is_kept_and_the_index_knows_it(
    tmp_path: Path, suffix: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    array = (noise() % 120).astype(dtype)
    path = write_nifti(tmp_path / f"a.nii{suffix}", array)
    volume = scanloom.load_volume(path)
    assert volume.array.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(volume.array, array)
    [series] = build_index([path], bytes(32)).series
    assert (series.kind, series.info.shape, series.info.reason) == ("nifti", array.shape, "")


PROGRAMS = {".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_the_programs_pack_in_several_streams_is_read(tmp_path: Path, suffix: str) -> None:
    if shutil.which(PROGRAMS[suffix]) is None:
        pytest.skip(f"no {PROGRAMS[suffix]} here")
    pack = command(PROGRAMS[suffix], "-9", "-c")
    data = write_nifti(tmp_path / "a.nii").read_bytes()
    between = bytes(8) if suffix == ".xz" else b""  # stream padding
    packed = b"".join(pack(data[n : n + 2000]) + between for n in range(0, len(data), 2000))
    path = tmp_path / f"a.nii{suffix}"
    path.write_bytes(packed)
    np.testing.assert_array_equal(scanloom.load_volume(path).array, noise())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_called_packed_and_is_not_is_read(tmp_path: Path, suffix: str) -> None:
    """As with .nii.gz: content decides."""
    write_nifti(tmp_path / "a.nii").rename(tmp_path / f"a.nii{suffix}")
    np.testing.assert_array_equal(scanloom.load_volume(tmp_path / f"a.nii{suffix}").array, noise())


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("share", [0.002, 0.5, 0.98])
def test_a_file_that_ends_too_early_is_refused(tmp_path: Path, suffix: str, share: float) -> None:
    path = write_nifti(tmp_path / f"a.nii{suffix}")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    assert code_of(path) == "TRUNCATED"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damage_and_what_follows_are_refused(tmp_path: Path, suffix: str) -> None:
    path = write_nifti(tmp_path / f"a.nii{suffix}")
    data = path.read_bytes()
    if suffix != ".zst":  # which pyarrow packs without a checksum
        path.write_bytes(data[:900] + bytes(200) + data[1100:])
        assert code_of(path) in ("DAMAGED", "TRUNCATED")
    plain = write_nifti(tmp_path / "a.nii").read_bytes()
    path.write_bytes(PACKERS[suffix](plain + b"more"))
    assert code_of(path) == "DAMAGED"
    path.write_bytes(PACKERS[suffix](plain[:-1]))
    assert code_of(path) == "TRUNCATED"
    path.write_bytes(data + b"no stream" * 9)
    assert code_of(path) == "DAMAGED"


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("more", [b"x", b"\n", b"no stream", bytes(8) + b"ab"])
def test_a_few_bytes_behind_a_stream_are_damage(tmp_path: Path, suffix: str, more: bytes) -> None:
    """Nothing is missing; a second stream that is cut is."""
    pack = gzip.compress if suffix == ".gz" else PACKERS[suffix]
    data = pack(write_nifti(tmp_path / "a.nii").read_bytes())
    path = tmp_path / f"a.nii{suffix}"
    path.write_bytes(data + more)
    assert code_of(path) == "DAMAGED"
    path.write_bytes(data + data[:2])
    assert code_of(path) == "TRUNCATED"
    path.write_bytes(data[:-1])
    assert code_of(path) == "TRUNCATED"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_header_that_claims_terabytes_asks_for_no_memory(tmp_path: Path, suffix: str) -> None:
    plain = bytearray(write_nifti(tmp_path / "a.nii").read_bytes())
    plain[42:48] = np.array([30000, 30000, 30000], "<i2").tobytes()
    path = tmp_path / f"a.nii{suffix}"
    path.write_bytes(PACKERS[suffix](bytes(plain)))
    assert code_of(path) == "TOO_LARGE"


@pytest.mark.parametrize(("size", "code"), [(28, ""), (37, "DAMAGED")])
def test_an_xz_that_needs_much_memory_to_unpack_is_refused(
    tmp_path: Path, size: int, code: str
) -> None:
    """A dictionary of 64 MiB, as -9 has it, and of 1.5 GiB, which its header asks for."""
    assert (2 | size & 1) << (size // 2 + 11) in (MAX_DICTIONARY_BYTES // 2, 3 << 29)
    path = tmp_path / "b.nii.xz"
    path.write_bytes(with_dictionary(lzma.compress(nifti_bytes(tmp_path)), size))
    if code:
        assert code_of(path) == code
    else:
        np.testing.assert_array_equal(scanloom.load_volume(path).array, noise())


def nifti_bytes(folder: Path) -> bytes:
    return write_nifti(folder / "a.nii").read_bytes()


def with_dictionary(packed: bytes, size: int) -> bytes:
    """Change the memory that the header of the first block of an xz file requires."""
    data, block = bytearray(packed), 12
    length = (data[block] + 1) * 4
    data[data.index(b"\x21\x01", block) + 2] = size  # LZMA2, one byte of properties
    check = zlib.crc32(bytes(data[block : block + length - 4]))
    data[block + length - 4 : block + length] = check.to_bytes(4, "little")
    return bytes(data)
