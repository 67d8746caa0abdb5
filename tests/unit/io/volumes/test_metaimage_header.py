"""MetaImage headers are read as MetaIO does; SimpleITK and known values are the witnesses."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import SimpleITK

import scanloom
from scanloom.core import Flag, ScanError
from support.write_dicom import noise

HEADER = {
    "ObjectType": "Image",
    "NDims": "3",
    "BinaryData": "True",
    "BinaryDataByteOrderMSB": "False",
    "CompressedData": "False",
    "TransformMatrix": "0 0 -1 0.8660254037844386 -0.5 0 0.5 0.8660254037844386 0",
    "Offset": "11 -23 47",
    "CenterOfRotation": "0 0 0",
    "AnatomicalOrientation": "RAI",
    "ElementSpacing": "0.8 0.9 2.5",
    "DimSize": "24 20 6",
    "ElementType": "MET_SHORT",
}


def write(path, array=None, *, data=None, end="\n", file="LOCAL", **changes):
    """Write a MetaImage; a change to None leaves a field out."""
    fields = {**HEADER, **changes}
    array = noise() if array is None else array
    if data is None and fields["BinaryData"] == "False":
        data = " ".join(map(str, array.ravel("F"))).encode()
    elif data is None:
        big = fields["BinaryDataByteOrderMSB"] == "True"
        data = array.astype(array.dtype.newbyteorder(">" if big else "<")).tobytes("F")
        if fields["CompressedData"] == "True":
            data = zlib.compress(data)
            fields.setdefault("CompressedDataSize", str(len(data)))  # ITK wants it
    fields["ElementDataFile"] = file
    lines = [f"{name} = {text}" for name, text in fields.items() if text is not None]
    header = end.join([*lines, ""]).encode()
    if file == "LOCAL":
        path.write_bytes(header + data)
    else:
        (path.parent / file).write_bytes(data)
        path.write_bytes(header)
    return path


def code_of(path, **options):
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(path, **options)
    return caught.value.code


def check_like_simpleitk(path):
    volume, image = scanloom.load_volume(path), SimpleITK.ReadImage(str(path))
    for index in [(0, 0, 0), (23, 0, 0), (0, 19, 0), (0, 0, 5), (7, 3, 2)]:
        ras = np.array(image.TransformIndexToPhysicalPoint(index)) * (-1, -1, 1)
        np.testing.assert_allclose(volume.grid.world(index), ras, atol=1e-6)
    np.testing.assert_array_equal(volume.array.T, SimpleITK.GetArrayFromImage(image))
    np.testing.assert_array_equal(volume.array, noise())
    return volume


@pytest.mark.parametrize("order", ["True", "False"])
@pytest.mark.parametrize("coding", ["raw", "zlib", "text"])
@pytest.mark.parametrize("file", ["LOCAL", "a.raw"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_every_coding_lies_where_simpleitk_puts_it(tmp_path, order, coding, file, end):
    changes = {"BinaryDataByteOrderMSB": order, "BinaryData": str(coding != "text")}
    changes["CompressedData"] = str(coding == "zlib")
    name = "a.mha" if file == "LOCAL" else "a.mhd"
    path = write(tmp_path / name, file=file, end=end, **changes)
    if end == "\n" and coding != "text":  # SimpleITK does not read the text it documents
        check_like_simpleitk(path)
    np.testing.assert_array_equal(scanloom.load_volume(path).array, noise())


@pytest.mark.parametrize(
    "changes",
    [
        {"Offset": None, "Position": "11 -23 47"},
        {"Offset": None, "Origin": "11 -23 47"},
        {"BinaryData": None},
        {"TransformMatrix": None},
        {"TransformMatrix": None, "AnatomicalOrientation": None},
        {"TransformMatrix": None, "AnatomicalOrientation": "???"},
        {"TransformMatrix": None, "Orientation": "0 1 0 1 0 0 0 0 -1"},
        {"Offset": None},
        {"CompressedDataSize": "77"},
        {"Comment": "any: thing = at all", "Name": "Canary^Bird"},
        {"DistanceUnits": "mm", "Modality": "MET_MOD_CT", "SequenceID": "0 0 0"},
    ],
)
def test_fields_that_may_be_there_or_not(tmp_path, changes):
    check_like_simpleitk(write(tmp_path / "a.mha", **changes))


def test_directions_by_words_alone_are_not_believed(tmp_path):
    """SimpleITK reads such a file as if it had said nothing."""
    path = write(tmp_path / "a.mha", TransformMatrix=None, AnatomicalOrientation="LPI")
    assert code_of(path) == "ORIENTATION_UNKNOWN"
    volume = scanloom.load_volume(path, orientation="RAS")
    assert (volume.grid.axis_codes, volume.flags) == ("RAS", (Flag.ORIENTATION_GIVEN,))
    np.testing.assert_allclose(volume.grid.spacing, (0.8, 0.9, 2.5))


@pytest.mark.parametrize("size", ["0", "-1", "5"])
def test_header_size_says_where_the_data_begin(tmp_path, size):
    before = b"" if size == "0" else b"12345"
    data = before + noise().tobytes("F")
    check_like_simpleitk(write(tmp_path / "a.mhd", data=data, file="a.raw", HeaderSize=size))


TYPES = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", ["a.mha", "a.nrrd"])
def test_every_type_that_simpleitk_writes(tmp_path, dtype, compressed, name):
    array = (noise() % 120).astype(dtype)
    image = SimpleITK.GetImageFromArray(np.ascontiguousarray(array.T))
    SimpleITK.WriteImage(image, str(tmp_path / name), compressed)
    volume = scanloom.load_volume(tmp_path / name)
    np.testing.assert_array_equal(volume.array, array)
    assert volume.array.dtype == np.dtype(dtype)


def test_one_volume_of_several(tmp_path):
    images = [SimpleITK.GetImageFromArray(noise(seed=n).T.copy()) for n in range(3)]
    for image in images:
        image.SetOrigin((11, -23, 47))
        image.SetSpacing((0.8, 0.9, 2.5))
    joined = SimpleITK.JoinSeries(images, 5.0, 2.0)
    for compressed in (False, True):
        SimpleITK.WriteImage(joined, str(tmp_path / "a.mha"), compressed)
        assert code_of(tmp_path / "a.mha") == "FOUR_D"
        assert code_of(tmp_path / "a.mha", phase=3) == "FOUR_D"
        volume = scanloom.load_volume(tmp_path / "a.mha", phase=2)
        np.testing.assert_array_equal(volume.array, noise(seed=2))
        np.testing.assert_allclose(volume.grid.affine[:3, 3], (-11, 23, 47))


WRONG = {
    "another object": ({"ObjectType": "Tube"}, "NOT_AN_IMAGE"),
    "no NDims": ({"NDims": None}, "DAMAGED"),
    "NDims": ({"NDims": "99"}, "DAMAGED"),
    "DimSize negative": ({"DimSize": "24 20 -6"}, "DAMAGED"),
    "DimSize short": ({"DimSize": "24 20"}, "DAMAGED"),
    "DimSize larger": ({"DimSize": "24 20 7"}, "TRUNCATED"),
    "DimSize smaller": ({"DimSize": "24 20 5"}, "DAMAGED"),
    "DimSize absurd": ({"DimSize": "99999999 99999999 99999999"}, "TRUNCATED"),
    "no ElementType": ({"ElementType": None}, "DAMAGED"),
    "text as type": ({"ElementType": "MET_STRING"}, "PIXEL_TYPE"),
    "colour": ({"ElementNumberOfChannels": "3", "ElementType": "MET_UCHAR"}, "COLOR"),
    "three shorts": ({"ElementNumberOfChannels": "3"}, "PIXEL_TYPE"),
    "vectors": ({"ElementNumberOfChannels": "2"}, "PIXEL_TYPE"),
    "no channels": ({"ElementNumberOfChannels": "0"}, "PIXEL_TYPE"),
    "no spacing": ({"ElementSpacing": None}, "BAD_GEOMETRY"),
    "spacing zero": ({"ElementSpacing": "0 1 1"}, "BAD_GEOMETRY"),
    "spacing NaN": ({"ElementSpacing": "nan 1 1"}, "BAD_GEOMETRY"),
    "matrix short": ({"TransformMatrix": "1 0 0 1"}, "DAMAGED"),
    "matrix singular": ({"TransformMatrix": "1 0 0 1 0 0 0 0 1"}, "BAD_GEOMETRY"),
    "turned elsewhere": ({"CenterOfRotation": "1 2 3"}, "BAD_GEOMETRY"),
    "centimetres": ({"DistanceUnits": "cm"}, "BAD_GEOMETRY"),
    "neither": ({"CompressedData": "maybe"}, "DAMAGED"),
    "scaled": ({"ElementToIntensityFunctionSlope": "2"}, "RESCALE"),
    "size": ({"HeaderSize": "-7"}, "DAMAGED"),
    "twice": ({"Position": "1 2 3"}, "DAMAGED"),
    "not compressed": ({"CompressedData": "True", "data": b"hello" * 100}, "DAMAGED"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_header_that_breaks_the_rules_is_refused(tmp_path, name):
    changes, code = WRONG[name]
    assert code_of(write(tmp_path / "a.mha", **changes)) == code


@pytest.mark.parametrize("kept", [0.05, 0.6, 0.999])
@pytest.mark.parametrize("changes", [{}, {"CompressedData": "True"}, {"BinaryData": "False"}])
def test_a_file_that_ends_too_early_is_truncated(tmp_path, kept, changes):
    path = write(tmp_path / "a.mha", noise() + 1000, **changes)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept) - 1])
    if kept > 0.99 and changes == {"BinaryData": "False"}:
        return  # half a number is a number
    assert code_of(path) == "TRUNCATED"


def test_compressed_data_of_another_length_than_said(tmp_path):
    data = zlib.compress(noise().tobytes("F"))
    fields = {"CompressedData": "True", "data": data}
    path = write(tmp_path / "a.mha", CompressedDataSize=str(len(data)), **fields)
    np.testing.assert_array_equal(scanloom.load_volume(path).array, noise())
    assert code_of(write(path, CompressedDataSize=str(len(data) - 9), **fields)) == "TRUNCATED"
    assert code_of(write(path, CompressedDataSize=str(len(data) + 9), **fields)) == "TRUNCATED"
    assert code_of(write(path, CompressedDataSize="-1", **fields)) == "DAMAGED"
