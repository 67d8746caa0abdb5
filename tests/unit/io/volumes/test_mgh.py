"""Volumes of FreeSurfer lie where nibabel puts them, or are refused."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

import scanloom
from scanloom.core import ScanError
from scanloom.io.formats import count_volumes, probe
from scanloom.io.index.series import find_series
from support.case_folders import ORDERS
from support.input_kinds import CORNERS, affine_of, write_mgh
from support.write_dicom import noise

TYPES = ["u1", "i2", "i4", "f4", "u2"]


def code_of(path: Path, **options: Any) -> str:
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(path, **options)
    return caught.value.code


@pytest.mark.parametrize("order", ORDERS)
def test_all_48_orders_lie_where_nibabel_puts_them(tmp_path: Path, order: str) -> None:
    path = write_mgh(tmp_path / "a.mgz", affine=affine_of(order))
    volume, image = scanloom.load_volume(path), nibabel.load(path)
    assert volume.grid.axis_codes == "".join(nibabel.aff2axcodes(image.affine))
    np.testing.assert_allclose(volume.grid.affine, image.affine, atol=1e-4)
    np.testing.assert_allclose(volume.grid.affine, affine_of(order), atol=1e-3)
    assert [volume.array[at] for at in CORNERS] == [image.dataobj[at] for at in CORNERS]
    np.testing.assert_array_equal(volume.array, noise())


@pytest.mark.parametrize("name", ["a.mgh", "a.mgz", "A.MGZ"])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_is_kept(tmp_path: Path, name: str, dtype: str) -> None:
    array = (noise() % 120).astype(dtype)
    volume = scanloom.load_volume(write_mgh(tmp_path / name, array))
    assert volume.array.dtype == np.dtype(dtype)
    assert volume.array.flags.f_contiguous
    np.testing.assert_array_equal(volume.array, array)


def test_each_of_several_volumes_is_one(tmp_path: Path) -> None:
    array = np.stack([noise(seed=n) for n in range(3)], axis=-1)
    path = write_mgh(tmp_path / "a.mgz", array)
    assert code_of(path) == "FOUR_D"
    [series] = find_series(path)
    assert (series.kind, count_volumes(series)) == ("mgh", 3)
    for n in range(3):
        np.testing.assert_array_equal(scanloom.load_volume(path, phase=n).array, array[..., n])
        assert probe(series, n)[1] == np.int16
    assert code_of(path, phase=3) == "FOUR_D"


def test_what_follows_the_voxels_is_passed_over(tmp_path: Path) -> None:
    """FreeSurfer writes a processing history there; older programs write nothing."""
    whole = write_mgh(tmp_path / "a.mgh").read_bytes()
    end = 284 + noise().nbytes
    for rest in (b"", bytes(20), whole[end:] + b"\0\0\0\3 mri_convert" * 99):
        for name, pack in (("a.mgh", bytes), ("b.mgz", gzip.compress)):
            (tmp_path / name).write_bytes(pack(whole[:end] + rest))
            np.testing.assert_array_equal(scanloom.load_volume(tmp_path / name).array, noise())


def patched(path: Path, offset: int, value: bytes) -> Path:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(value)] = value
    path.write_bytes(data)
    return path


def big(*numbers: float, kind: str = "i4") -> bytes:
    return np.array(numbers, f">{kind}").tobytes()


HEADERS = {
    "text": (0, b"x" * 400, "DAMAGED"),
    "version": (0, big(2), "DAMAGED"),
    "negative": (4, big(-24), "DAMAGED"),
    "none": (16, big(0), "DAMAGED"),
    "surface": (4, big(24 * 20 * 6, 1, 1), "TOO_FEW_SLICES"),
    "terabytes": (4, big(20000, 20000, 20000), "TRUNCATED"),
    "frames": (16, big(1 << 30), "FOUR_D"),
    "type": (20, big(2), "PIXEL_TYPE"),
    "no directions": (28, big(0, kind="i2"), "BAD_GEOMETRY"),
    "no voxel size": (30, big(0, kind="f4"), "BAD_GEOMETRY"),
    "voxel size NaN": (30, big(np.nan, kind="f4"), "BAD_GEOMETRY"),
    "directions NaN": (42, big(np.nan, kind="f4"), "BAD_GEOMETRY"),
    "directions 0": (42, bytes(36), "BAD_GEOMETRY"),
    "far away": (78, big(1e30, kind="f4"), "BAD_GEOMETRY"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_damaged_header_is_refused(tmp_path: Path, name: str) -> None:
    offset, value, code = HEADERS[name]
    path = patched(write_mgh(tmp_path / "a.mgh"), offset, value)
    assert code_of(path) == code
    assert code_of(path, orientation="RAS") == code


def test_a_packed_header_that_claims_terabytes_asks_for_no_memory(tmp_path: Path) -> None:
    path = patched(write_mgh(tmp_path / "a.mgh"), 4, big(20000, 20000, 20000))
    (tmp_path / "a.mgz").write_bytes(gzip.compress(path.read_bytes()))
    assert code_of(tmp_path / "a.mgz") == "TRUNCATED"
    (tmp_path / "b.mgz").write_bytes(gzip.compress(path.read_bytes()[:284] + bytes(1 << 24)))
    assert code_of(tmp_path / "b.mgz") in ("TRUNCATED", "TOO_LARGE")


@pytest.mark.parametrize("share", [0.001, 0.03, 0.5, 0.9])
@pytest.mark.parametrize("name", ["a.mgh", "a.mgz"])
def test_a_file_that_ends_too_early_is_refused(tmp_path: Path, name: str, share: float) -> None:
    path = write_mgh(tmp_path / name)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    assert code_of(path) == "TRUNCATED"
