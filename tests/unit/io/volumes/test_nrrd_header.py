"""NRRD headers by the format's definition; SimpleITK and known values are the witnesses."""

from __future__ import annotations

import bz2
import gzip
import os

import numpy as np
import pytest
import SimpleITK

import scanloom
from scanloom.core import Flag, ScanError
from scanloom.core.case import Series
from scanloom.io.formats import probe
from scanloom.io.volumes.itk import itk_companions
from support.write_dicom import noise

SHAPE = (24, 20, 6)
HEADER = {
    "type": "short",
    "dimension": "3",
    "space": "left-posterior-superior",
    "sizes": "24 20 6",
    "space directions": "(0.8,0,0) (0,0.9,0) (0,0,2.5)",
    "kinds": "domain domain domain",
    "endian": "little",
    "encoding": "raw",
    "space origin": "(11,-23,47)",
}
RAS = np.array([[-0.8, 0, 0, -11], [0, -0.9, 0, 23], [0, 0, 2.5, 47], [0, 0, 0, 1.0]])
CODERS = {"raw": bytes, "gzip": gzip.compress, "bzip2": bz2.compress, "gz": gzip.compress}


def write(path, array=None, *, data=None, before=b"", end="\n", **changes):
    """Write a NRRD; a change to None leaves a field out, underscores stand for spaces."""
    fields = {**HEADER, **{name.replace("_", " "): text for name, text in changes.items()}}
    array = noise() if array is None else array
    order = {"little": "<", "big": ">"}[fields["endian"] or "little"]
    encoding = fields["encoding"]
    if data is None and encoding in ("ascii", "text", "txt"):
        data = " ".join(map(str, array.ravel("F"))).encode()
    elif data is None:
        stored = array.astype(array.dtype.newbyteorder(order)).tobytes("F")
        data = CODERS.get(encoding, bytes)(stored)
    lines = ["NRRD0005", "# a comment", *(f"{k}: {v}" for k, v in fields.items() if v is not None)]
    header = end.join([*lines, "a key:=a value: with: colons", "", ""]).encode()
    if "data file" in fields:
        (path.parent / fields["data file"]).write_bytes(before + data)
        path.write_bytes(header)
    else:
        path.write_bytes(header + before + data)
    return path


def code_of(path, **options):
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(path, **options)
    return caught.value.code


@pytest.mark.parametrize("encoding", ["raw", "gzip", "gz", "bzip2", "ascii", "txt"])
@pytest.mark.parametrize("endian", ["little", "big"])
@pytest.mark.parametrize("where", ["a.nrrd", "a.nhdr"])
def test_every_encoding_gives_the_same_volume(tmp_path, encoding, endian, where):
    detached = {"data_file": "a.data"} if where == "a.nhdr" else {}
    path = write(tmp_path / where, encoding=encoding, endian=endian, **detached)
    volume = scanloom.load_volume(path)
    np.testing.assert_array_equal(volume.array, noise())
    assert volume.array.flags.f_contiguous
    assert volume.array.dtype == np.int16
    np.testing.assert_allclose(volume.grid.affine, RAS)
    grid, dtype = probe(Series("itk", itk_companions(path)))
    assert (dtype, grid.matches(volume.grid)) == (np.int16, True)


TYPES = {
    "signed char": "i1",
    "uint8_t": "u1",
    "short int": "i2",
    "ushort": "u2",
    "int32": "i4",
    "unsigned int": "u4",
    "long long int": "i8",
    "uint64": "u8",
    "float": "f4",
    "double": "f8",
}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("encoding", ["raw", "ascii"])
def test_every_type_is_kept(tmp_path, name, encoding):
    array = (noise() % 120).astype(TYPES[name])
    volume = scanloom.load_volume(write(tmp_path / "a.nrrd", array, type=name, encoding=encoding))
    assert volume.array.dtype == np.dtype(TYPES[name])
    np.testing.assert_array_equal(volume.array, array)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_may_end_as_on_windows(tmp_path, end):
    volume = scanloom.load_volume(write(tmp_path / "a.nrrd", end=end))
    np.testing.assert_array_equal(volume.array, noise())


@pytest.mark.parametrize("encoding", ["raw", "gzip", "ascii"])
def test_lines_and_bytes_before_the_data_are_skipped(tmp_path, encoding):
    """Lines as the file has them; bytes behind them, of compressed data once unpacked."""
    fields = {"data_file": "a.data", "line_skip": "2", "byte_skip": "5", "encoding": encoding}
    data = " ".join(map(str, noise().ravel("F"))).encode()
    data = b"12345" + (data if encoding == "ascii" else noise().tobytes("F"))
    data = gzip.compress(data) if encoding == "gzip" else data
    path = write(tmp_path / "a.nhdr", data=data, before=b"one\ntwo\n", **fields)
    np.testing.assert_array_equal(scanloom.load_volume(path).array, noise())
    (tmp_path / "a.data").write_bytes(b"one\n" + bytes(7000))
    assert code_of(path) == "TRUNCATED"


def test_a_byte_skip_of_minus_one_counts_from_the_end(tmp_path):
    path = write(tmp_path / "a.nhdr", before=b"whatever", data_file="a.data", byte_skip="-1")
    np.testing.assert_array_equal(scanloom.load_volume(path).array, noise())
    path = write(tmp_path / "b.nrrd", encoding="gzip", byte_skip="-1")
    assert code_of(path) == "DAMAGED"


@pytest.mark.parametrize(
    ("space", "signs"),
    [
        ("left-posterior-superior", (-1, -1, 1)),
        ("LPS", (-1, -1, 1)),
        ("right-anterior-superior", (1, 1, 1)),
        ("RAS", (1, 1, 1)),
        ("Left-Anterior-Superior", (-1, 1, 1)),
        ("las", (-1, 1, 1)),
    ],
)
def test_spaces_long_and_short(tmp_path, space, signs):
    volume = scanloom.load_volume(write(tmp_path / "a.nrrd", space=space))
    np.testing.assert_allclose(volume.grid.affine[:3, 3], np.array((11, -23, 47)) * signs)
    np.testing.assert_allclose(volume.grid.affine[:3, :3], np.diag((0.8, 0.9, 2.5)) * signs)


UNSAID = {
    "no space": {"space": None},
    "scanner": {"space": "scanner-xyz"},
    "dimension only": {"space": None, "space_dimension": "3"},
    "no directions": {"space_directions": None, "spacings": "0.8 0.9 2.5"},
    "axes only": {
        "space": None,
        "space_directions": None,
        "space_origin": None,
        "kinds": None,
        "spacings": "0.8 0.9 2.5",
    },
}


@pytest.mark.parametrize("name", UNSAID)
def test_what_does_not_say_its_space_needs_orientation(tmp_path, name):
    path = write(tmp_path / "a.nrrd", **UNSAID[name])
    assert code_of(path) == "ORIENTATION_UNKNOWN"
    volume = scanloom.load_volume(path, orientation="PIR")
    assert (volume.grid.axis_codes, volume.flags) == ("PIR", (Flag.ORIENTATION_GIVEN,))
    np.testing.assert_allclose(volume.grid.spacing, (0.8, 0.9, 2.5))


def test_directions_follow_their_axes_as_for_simpleitk(tmp_path):
    """Axes permuted, flipped and oblique; the measurement frame is no matter."""
    oblique = "(0,0,-1.5) (0.8660254037844386,-0.5,0) (1.0,1.7320508075688772,0)"
    frame = "(0,1,0) (1,0,0) (0,0,-1)"
    path = write(tmp_path / "a.nrrd", space_directions=oblique, measurement_frame=frame)
    volume, image = scanloom.load_volume(path), SimpleITK.ReadImage(str(path))
    for index in [(0, 0, 0), (23, 0, 0), (0, 19, 0), (0, 0, 5), (7, 3, 2)]:
        ras = np.array(image.TransformIndexToPhysicalPoint(index)) * (-1, -1, 1)
        np.testing.assert_allclose(volume.grid.world(index), ras, atol=1e-6)
        assert volume.array[index] == image.GetPixel(index)


def test_the_unit_of_time_is_no_matter(tmp_path):
    array = np.stack([noise(seed=n) for n in range(3)])
    path = write(
        tmp_path / "a.nrrd",
        array,
        dimension="4",
        sizes="3 24 20 6",
        kinds="time domain domain domain",
        space_directions=f"none {HEADER['space directions']}",
        units='"s" "mm" "" "mm"',
    )
    np.testing.assert_array_equal(scanloom.load_volume(path, phase=2).array, noise(seed=2))


def test_a_shear_is_kept(tmp_path):
    volume = scanloom.load_volume(
        write(tmp_path / "a.nrrd", space_directions="(0.8,0,0) (0,0.9,0) (0,0.5,2.5)")
    )
    assert volume.grid.shear_axis == 2
    np.testing.assert_allclose(volume.grid.affine[:3, 2], (0, -0.5, 2.5))


@pytest.mark.parametrize("axis", [0, 1, 3])
@pytest.mark.parametrize("encoding", ["raw", "gzip", "ascii"])
@pytest.mark.parametrize("kind", ["list", "time", "none"])
def test_one_volume_of_several_wherever_their_axis_is(tmp_path, axis, encoding, kind):
    array = np.stack([noise(seed=n) for n in range(4)], axis=axis)
    vectors = HEADER["space directions"].split()
    vectors.insert(axis, "none")
    kinds = ["domain"] * 3
    kinds.insert(axis, kind)
    path = write(
        tmp_path / "a.nrrd",
        array,
        dimension="4",
        sizes=" ".join(map(str, array.shape)),
        space_directions=" ".join(vectors),
        kinds=" ".join(kinds),
        encoding=encoding,
    )
    assert code_of(path) == "FOUR_D"
    assert code_of(path, phase=4) == "FOUR_D"
    for phase in (0, 3):
        volume = scanloom.load_volume(path, phase=phase)
        np.testing.assert_array_equal(volume.array, noise(seed=phase))
        np.testing.assert_allclose(volume.grid.affine, RAS)


def test_a_space_with_time(tmp_path):
    array = np.stack([noise(seed=n) for n in range(4)], axis=3)
    path = write(
        tmp_path / "a.nrrd",
        array,
        space="left-posterior-superior-time",
        dimension="4",
        sizes="24 20 6 4",
        kinds="domain domain domain time",
        space_directions="(0.8,0,0,0) (0,0.9,0,0) (0,0,2.5,0) (0,0,0,1.5)",
        space_origin="(11,-23,47,0)",
    )
    volume = scanloom.load_volume(path, phase=2)
    np.testing.assert_array_equal(volume.array, noise(seed=2))
    np.testing.assert_allclose(volume.grid.affine, RAS)


@pytest.mark.parametrize(
    ("kind", "size", "code"),
    [
        ("RGB-color", 3, "COLOR"),
        ("4-color", 4, "COLOR"),
        ("vector", 2, "PIXEL_TYPE"),
        ("complex", 2, "PIXEL_TYPE"),
        ("3D-matrix", 9, "PIXEL_TYPE"),
    ],
)
def test_several_numbers_a_voxel_are_refused(tmp_path, kind, size, code):
    path = write(
        tmp_path / "a.nrrd",
        np.zeros((size, *SHAPE), np.int16),
        dimension="4",
        sizes=f"{size} 24 20 6",
        kinds=f"{kind} domain domain domain",
        space_directions="none " + HEADER["space directions"],
    )
    assert code_of(path) == code
    assert code_of(path, phase=0) == code


WRONG = {
    "version": ({"end": "\n"}, b"NRRD0005", b"NRRD0009", "DAMAGED"),
    "no encoding": ({"encoding": None}, b"", b"", "DAMAGED"),
    "odd encoding": ({"encoding": "hex"}, b"", b"", "DECODER"),
    "no endian": ({}, b"endian: little\n", b"", "DAMAGED"),
    "odd endian": ({}, b"endian: little", b"endian: middle", "DAMAGED"),
    "block": ({"type": "block", "block_size": "2"}, b"", b"", "PIXEL_TYPE"),
    "dimension": ({"dimension": "4"}, b"", b"", "DAMAGED"),
    "dimension huge": ({"dimension": "9" * 30}, b"", b"", "DAMAGED"),
    "sizes negative": ({"sizes": "24 20 -6"}, b"", b"", "DAMAGED"),
    "sizes zero": ({"sizes": "24 20 0"}, b"", b"", "DAMAGED"),
    "sizes fraction": ({"sizes": "24 20 6.5"}, b"", b"", "DAMAGED"),
    "sizes larger": ({"sizes": "24 20 7"}, b"", b"", "TRUNCATED"),
    "sizes smaller": ({"sizes": "24 20 5"}, b"", b"", "DAMAGED"),
    "sizes absurd": ({"sizes": "99999999 99999999 99999999"}, b"", b"", "TRUNCATED"),
    "a field twice": ({}, b"encoding: raw", b"encoding: raw\nsizes: 24 20 6", "DAMAGED"),
    "no field": ({}, b"encoding: raw", b"encoding: raw\nspacf origin: (1,2,3)", "DAMAGED"),
    "two directions": ({"space_directions": "(0.8,0,0) (0,0.9,0)"}, b"", b"", "DAMAGED"),
    "words": ({"space_directions": "(a,0,0) (0,1,0) (0,0,1)"}, b"", b"", "DAMAGED"),
    "NaN": ({"space_directions": "(nan,0,0) (0,1,0) (0,0,1)"}, b"", b"", "BAD_GEOMETRY"),
    "metres": ({"space_directions": "(8e-4,0,0) (0,9e-4,0) (0,0,3e-3)"}, b"", b"", "BAD_GEOMETRY"),
    "micrometres": (
        {"space_directions": "(800,0,0) (0,900,0) (0,0,3e3)"},
        b"",
        b"",
        "BAD_GEOMETRY",
    ),
    "parallel": ({"space_directions": "(1,0,0) (1,0,0) (0,0,1)"}, b"", b"", "BAD_GEOMETRY"),
    "huge": ({"space_directions": "(1e300,0,0) (0,1e300,0) (0,0,1)"}, b"", b"", "BAD_GEOMETRY"),
    "origin": ({"space_origin": "(1,2)"}, b"", b"", "DAMAGED"),
    "kinds": ({"kinds": "domain domain"}, b"", b"", "DAMAGED"),
    "skip": ({"byte_skip": "-2"}, b"", b"", "DAMAGED"),
    "several files": ({"data_file": "LIST"}, b"", b"", "DAMAGED"),
    "a pattern": ({"data_file": "a%03d.raw 1 6 1"}, b"", b"", "NOT_FOUND"),
    "units": ({"space_units": '"um" "um" "um"'}, b"", b"", "BAD_GEOMETRY"),
    "units of axes": ({"units": '"um" "um" "um"'}, b"", b"", "BAD_GEOMETRY"),
    "quantised": ({"old_min": "-1024", "old_max": "3071"}, b"", b"", "RESCALE"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_header_that_breaks_the_rules_is_refused(tmp_path, name):
    changes, old, new, code = WRONG[name]
    path = write(tmp_path / "a.nrrd", data=noise().tobytes("F"), **changes)
    path.write_bytes(path.read_bytes().replace(old, new, 1) if old else path.read_bytes())
    assert code_of(path) == code


@pytest.mark.parametrize("encoding", ["raw", "gzip", "bzip2", "ascii"])
@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.99])
def test_a_file_that_ends_too_early_is_truncated(tmp_path, encoding, kept):
    path = write(tmp_path / "a.nrrd", encoding=encoding)
    data = path.read_bytes()
    start = data.index(b"\n\n") + 2
    path.write_bytes(data[: start + int((len(data) - start) * kept)])
    assert code_of(path) == "TRUNCATED"


@pytest.mark.parametrize("encoding", ["raw", "gzip", "bzip2", "ascii"])
def test_a_file_that_holds_more_than_it_says_is_damaged(tmp_path, encoding):
    array = np.concatenate([noise(), noise()[:, :, :1]], axis=2)
    assert code_of(write(tmp_path / "a.nrrd", array, encoding=encoding)) == "DAMAGED"


@pytest.mark.parametrize("token", ["x", "1.5", "99999", "1" * 400])
def test_text_that_is_no_number_of_the_type_is_damaged(tmp_path, token):
    tokens = [b"7"] * (24 * 20 * 6 - 1) + [token.encode()]
    path = write(tmp_path / "a.nrrd", data=b"\n".join(tokens), encoding="ascii")
    assert code_of(path) == "DAMAGED"


def test_data_are_never_read_from_outside_the_folder(tmp_path):
    outside, inside = tmp_path / "out.raw", tmp_path / "in"
    outside.write_bytes(noise().tobytes("F"))
    inside.mkdir()
    (inside / "link.raw").symlink_to(outside)
    (inside / "folder").symlink_to(tmp_path)
    (inside / "circle.raw").symlink_to("circle.raw")
    os.mkfifo(inside / "pipe.raw")
    names = {
        "../out.raw": "DAMAGED",
        str(outside): "DAMAGED",
        "link.raw": "DAMAGED",
        "folder/out.raw": "DAMAGED",
        "x/../../out.raw": "DAMAGED",
        "circle.raw": "DAMAGED",
        "a" * 5000: "DAMAGED",
        "zero\0.raw": "DAMAGED",
        "absent.raw": "NOT_FOUND",
        "pipe.raw": "NOT_FOUND",
        ".": "NOT_FOUND",
    }
    text = write(tmp_path / "a.nhdr", data_file="out.raw").read_bytes()
    for name, code in names.items():
        path = inside / "a.nhdr"
        path.write_bytes(text.replace(b"out.raw", name.encode()))
        assert code_of(path) == code, name
        assert itk_companions(path) == (path,)
    (inside / "b.nhdr").write_bytes(text.replace(b"out.raw", b"sub/own.raw"))
    (inside / "sub").mkdir()
    (inside / "sub" / "own.raw").write_bytes(noise().tobytes("F"))
    np.testing.assert_array_equal(scanloom.load_volume(inside / "b.nhdr").array, noise())
