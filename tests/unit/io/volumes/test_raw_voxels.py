"""Sizes in a header are judged before memory is allocated: limits, bombs, sizes that do not fit."""

from __future__ import annotations

import bz2
import gzip
import os
import struct
import subprocess
import sys
import zlib

import nibabel
import numpy as np
import pytest

import scanloom
from scanloom.core import ReadOptions, ScanError
from scanloom.io.formats import FORMATS
from support.write_dicom import noise

GIB = 1 << 30
NIFTI, ITK = FORMATS["nifti"], FORMATS["itk"]


def nifti_header(shape, code=4, bits=16, offset=352):
    """Return 352 bytes that promise a volume."""
    header = nibabel.Nifti1Header()
    header["dim"][: len(shape) + 1] = (len(shape), *shape)
    header["datatype"], header["bitpix"], header["vox_offset"] = code, bits, offset
    header["sform_code"], header["srow_x"][0] = 1, 1
    header["srow_y"][1] = header["srow_z"][2] = 1
    header["magic"] = b"n+1"
    return bytes(header.binaryblock) + bytes(4)


def code_of(read, *arguments, **options):
    with pytest.raises(ScanError) as caught:
        read(*arguments, **options)
    return caught.value.code


def write_nrrd(path, sizes, data, encoding="gzip", kind="short"):
    lines = [
        "NRRD0004",
        f"type: {kind}",
        f"dimension: {len(sizes)}",
        "space: RAS",
        f"sizes: {' '.join(map(str, sizes))}",
        "space directions: (1,0,0) (0,1,0) (0,0,1)",
        "endian: little",
        f"encoding: {encoding}",
    ]
    path.write_bytes("\n".join([*lines, "", ""]).encode() + data)
    return path


def write_mha(path, sizes, data, compressed=True):
    lines = {
        "ObjectType": "Image",
        "NDims": len(sizes),
        "BinaryData": True,
        "CompressedData": compressed,
        "ElementSpacing": " ".join("1" for _ in sizes),
        "DimSize": " ".join(map(str, sizes)),
        "ElementType": "MET_SHORT",
        "ElementDataFile": "LOCAL",
    }
    path.write_bytes("".join(f"{k} = {v}\n" for k, v in lines.items()).encode() + data)
    return path


def test_the_limit_counts_decoded_voxels(tmp_path):
    array = noise()
    nibabel.Nifti1Image(array, np.eye(4)).to_filename(tmp_path / "a.nii.gz")
    files = {
        (tmp_path / "a.nii.gz",): NIFTI,
        (write_nrrd(tmp_path / "a.nrrd", array.shape, gzip.compress(array.tobytes("F"))),): ITK,
        (write_mha(tmp_path / "a.mha", array.shape, zlib.compress(array.tobytes("F"))),): ITK,
    }
    for paths, volume_format in files.items():
        need = array.nbytes
        volume_format.read(paths, options=ReadOptions(max_size=need))
        volume_format.probe(paths, limit=need)
        less = ReadOptions(max_size=need - 1)
        assert code_of(volume_format.read, paths, options=less) == "TOO_LARGE"
        assert code_of(volume_format.probe, paths, limit=need - 1) == "TOO_LARGE"


def test_scaled_values_count_as_what_they_become(tmp_path):
    image = nibabel.Nifti1Image(noise().astype(np.uint8), np.eye(4))
    image.header.set_slope_inter(2, 1)
    image.to_filename(tmp_path / "a.nii")
    need = noise().size * 4
    NIFTI.read((tmp_path / "a.nii",), options=ReadOptions(max_size=need))
    less = ReadOptions(max_size=need - 1)
    assert code_of(NIFTI.read, (tmp_path / "a.nii",), options=less) == "TOO_LARGE"


ABSURD = (32767, 32767, 32767)


def files_that_promise_too_much(folder):
    """Small files whose headers exceed the limit, and the reason for which they are refused."""
    (folder / "a.nii").write_bytes(nifti_header(ABSURD) + bytes(1000))
    yield folder / "a.nii", "TRUNCATED"
    zeros = gzip.compress(bytes(1 << 20), 1)
    (folder / "b.nii.gz").write_bytes(gzip.compress(nifti_header((2048, 2048, 600))) + zeros * 1200)
    yield folder / "b.nii.gz", "TOO_LARGE"
    (folder / "c.nii.gz").write_bytes(gzip.compress(nifti_header(ABSURD) + bytes(1000)))
    yield folder / "c.nii.gz", "TRUNCATED"
    yield write_nrrd(folder / "d.nrrd", ABSURD, zlib.compress(bytes(1000))), "TRUNCATED"
    yield write_nrrd(folder / "e.nrrd", ABSURD, bz2.compress(bytes(1000)), "bzip2"), "TOO_LARGE"
    yield write_nrrd(folder / "f.nrrd", ABSURD, b"1 2 3", "ascii"), "TRUNCATED"
    yield write_mha(folder / "g.mha", (9**8, 9**8, 9**8), zlib.compress(bytes(1000))), "TRUNCATED"
    sparse = write_mha(folder / "h.mha", (2048, 2048, 600), b"", compressed=False)
    os.truncate(sparse, sparse.stat().st_size + 2048 * 2048 * 600 * 2)
    yield sparse, "TOO_LARGE"


def test_what_promises_too_much_is_refused(tmp_path):
    for path, code in files_that_promise_too_much(tmp_path):
        assert code_of(scanloom.load_volume, path) == code, path.name


BOMB = """
import resource, sys, time
import scanloom
from scanloom.core import ScanError
scanloom.load_volume(sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF)
try:
    scanloom.load_volume(sys.argv[1])
except ScanError as error:
    print(error.code)
after = resource.getrusage(resource.RUSAGE_SELF)
print(after.ru_utime - before.ru_utime, (after.ru_maxrss - before.ru_maxrss) // 1024)
"""


def write_bomb(path, kind):
    """Write a small volume behind which 4 GiB of zeros are packed into a few MB."""
    head, zeros = noise().tobytes("F"), 4096
    if kind == "nifti":
        data = gzip.compress(nifti_header(noise().shape) + head)
        path.write_bytes(data + gzip.compress(bytes(1 << 20)) * zeros)
    elif kind == "metaimage":
        packer = zlib.compressobj(9)
        data = packer.compress(head)
        data += b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()
        write_mha(path, noise().shape, data)
    elif kind == "bzip2":
        data = bz2.compress(head) + bz2.compress(bytes(1 << 24)) * 256
        write_nrrd(path, noise().shape, data, "bzip2")
    else:
        data = gzip.compress(head) + gzip.compress(bytes(1 << 20)) * zeros
        write_nrrd(path, noise().shape, data)
    return path


KINDS = [("a.nii.gz", "nifti"), ("a.nrrd", "gzip"), ("a.nrrd", "bzip2"), ("a.mha", "metaimage")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_bomb_is_refused_without_being_inflated(tmp_path, name, kind):
    bomb = write_bomb(tmp_path / name, kind)
    good = tmp_path / "good.nii.gz"
    good.write_bytes(gzip.compress(nifti_header(noise().shape) + noise().tobytes("F")))
    command = [sys.executable, "-c", BOMB, str(bomb), str(good)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    code, figures = done.stdout.splitlines()
    seconds, mebibytes = map(float, figures.split())
    assert code == "DAMAGED"
    assert mebibytes < 64
    assert seconds < 10  # it takes a hundredth of that


@pytest.mark.parametrize("offset", [3.0e9, 1.0e12])
def test_voxels_that_begin_absurdly_far_behind_are_refused(tmp_path, offset):
    data = nifti_header(noise().shape, offset=offset) + gzip.compress(bytes(1 << 20)) * 4000
    (tmp_path / "a.nii.gz").write_bytes(gzip.compress(data[:352]) + data[352:])
    assert code_of(scanloom.load_volume, tmp_path / "a.nii.gz") in ("DAMAGED", "TRUNCATED")


def test_more_voxels_than_the_header_says_are_damage(tmp_path):
    data = nifti_header(noise().shape) + noise().tobytes("F")
    for name, pack in (("a.nii", bytes), ("a.nii.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack(data))
        np.testing.assert_array_equal(scanloom.load_volume(tmp_path / name).array, noise())
        (tmp_path / name).write_bytes(pack(data + b"\0\1"))
        assert code_of(scanloom.load_volume, tmp_path / name) == "DAMAGED"


def test_a_pipe_is_no_file(tmp_path):
    for name in ("a.nii", "a.nrrd"):
        os.mkfifo(tmp_path / name)
        read = NIFTI.read if name == "a.nii" else ITK.read
        assert code_of(read, (tmp_path / name,)) == "UNREADABLE"


def test_a_damaged_gzip_header_or_trailer(tmp_path):
    data = bytearray(gzip.compress(nifti_header(noise().shape) + noise().tobytes("F")))
    for at, value in ((-1, 0x55), (-8, data[-8] ^ 1), (10, 0x07), (2, 9)):
        damaged = data.copy()
        damaged[at] = value
        (tmp_path / "a.nii.gz").write_bytes(damaged)
        assert code_of(scanloom.load_volume, tmp_path / "a.nii.gz") in ("DAMAGED", "TRUNCATED")
    (tmp_path / "a.nii.gz").write_bytes(bytes(data) + struct.pack("<I", 7))
    assert code_of(scanloom.load_volume, tmp_path / "a.nii.gz") in ("DAMAGED", "TRUNCATED")
