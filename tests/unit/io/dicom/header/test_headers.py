"""The fast parser agrees with pydicom on every plain header, and leaves other files to pydicom."""

from __future__ import annotations

import logging
import random
import struct
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import pytest
from pydicom import Dataset, dcmread, dcmwrite
from pydicom.dataset import FileMetaDataset
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
)
from pydicom.valuerep import EXPLICIT_VR_LENGTH_16, EXPLICIT_VR_LENGTH_32

from scanloom.core import ScanError
from scanloom.io.dicom import tags
from scanloom.io.dicom.header import parser
from scanloom.io.dicom.header.elements import (
    KEPT_TAGS,
    PER_SLICE_TAGS,
    Elements,
    PixelDataLocation,
    decode_elements,
    elements_from_values,
)
from scanloom.io.dicom.header.header import (
    Header,
    is_dicom,
    pydicom_muted,
    read_headers,
)
from scanloom.io.dicom.header.parser import (
    MAX_ELEMENTS,
    parse_plain,
    parse_with_pydicom,
    read_first_bytes,
)
from scanloom.io.dicom.slice_attributes import PHASE_ATTRIBUTES, SLICE_ATTRIBUTES
from support.real_scans import scans
from support.write_dicom import MR, Coding, Words, noise, write_series


def both(path: Path) -> tuple[Elements | None, Elements | None]:
    """Return the elements of a file as read by the fast parser and by pydicom."""
    with pydicom_muted():
        try:
            odd = parse_with_pydicom(path)
        except ScanError:
            odd = None
        return parse_plain(path, read_first_bytes(path)), odd


def same_header(path: Path) -> None:
    fast, odd = both(path)
    assert fast is not None
    assert odd is not None
    assert fast == odd
    assert decode_elements(fast.packed()) == fast
    ours, theirs = Header(path, fast), Header(path, odd)
    for name in Header.__annotations__:
        if name != "elements":
            assert repr(getattr(ours, name)) == repr(getattr(theirs, name))  # NaN too


PLAIN_CODING, CT_WORDS = Coding(), Words()


def one_file(folder: Path, coding=PLAIN_CODING, words=CT_WORDS, edit=None) -> Path:
    return write_series(folder, noise((36, 35, 1)), coding=coding, words=words, edit=edit)[0]


def with_sequences(k: int, ds: Dataset) -> None:
    """Add nested sequences, public and private, of all sizes and kinds of length."""
    leaf = Dataset()
    leaf.CodeValue, leaf.RescaleSlope = "1", "7"  # not that of the image
    empty, middle = Dataset(), Dataset()
    middle.RequestAttributesSequence = [leaf, empty]
    middle["RequestAttributesSequence"].is_undefined_length = True
    for keyword, undefined in (
        ("ReferencedStudySequence", True),
        ("ReferencedSeriesSequence", False),
        ("SourceImageSequence", True),
    ):
        setattr(ds, keyword, [middle, empty, leaf] if keyword != "SourceImageSequence" else [])
        ds[keyword].is_undefined_length = undefined
    for item in ds.ReferencedStudySequence:
        item.is_undefined_length_sequence_item = True
    block = ds.private_block(0x0029, "SCANLOOM TESTS", create=True)
    block.add_new(1, "SQ", [middle])
    block[1].is_undefined_length = True
    block.add_new(2, "OB", b"x" * 40_000)  # exceeds the first read
    block.add_new(3, "UT", "text")


def odd_words(k: int, ds: Dataset) -> None:
    ds.SpecificCharacterSet = ["ISO 2022 IR 6", "ISO 2022 IR 87"]
    ds.RescaleSlope, ds.ImageType = "", None
    del ds.PixelSpacing
    ds.PixelPaddingValue = 5
    ds.BurnedInAnnotation = "YES"


def with_private_blocks(k: int, ds: Dataset) -> None:
    """Add attributes in unusual blocks, of the right creator and of others."""
    for block, creator, b_value in ((0x10, "OTHER", "3"), (0x11, "Siemens MR header ", "50")):
        ds.add_new(0x00190000 | block, "LO", creator)
        ds.add_new(0x0019000C | block << 8, "IS", b_value)
    ds.add_new(0x20010003 | 0xFC << 8, "FL", 800.0)
    ds.add_new(0x200100FC, "LO", "PHILIPS IMAGING DD 001")
    ds.add_new(0x00431039, "IS", ["1000", "8"])  # whose creator was removed


PLAIN = {
    "explicit": Coding(),
    "implicit": Coding(syntax=ImplicitVRLittleEndian),
    "8 bit": Coding(8, 8, signed=False),
    "JPEG 2000": Coding(syntax=JPEG2000Lossless),
}


@pytest.mark.parametrize("coding", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("edit", [None, with_sequences, odd_words, with_private_blocks])
@pytest.mark.parametrize("modality", ["CT", "MR"])
def test_plain_headers_agree_with_pydicom(tmp_path, coding, edit, modality):
    same_header(one_file(tmp_path, coding, Words(modality=modality), edit))


def test_private_attributes_are_read_from_the_block_of_their_creator(tmp_path):
    [header] = read_headers([one_file(tmp_path, edit=with_private_blocks)])
    elements = header.elements
    assert elements.text(tags.SIEMENS_B_VALUE) == "50"
    assert struct.unpack("<f", elements.raw(tags.PHILIPS_DIFFUSION_B_FACTOR)) == (800.0,)
    assert elements.text(tags.GE_B_VALUE) == "1000\\8"


@pytest.mark.parametrize(("values", "faults"), [(("50", "50"), 0), (("50", "800"), 1)])
def test_blocks_of_one_creator_that_contradict_each_other_are_a_fault(tmp_path, values, faults):
    def edit(k: int, ds: Dataset) -> None:
        for block, value in zip((0x11, 0x12), values, strict=True):
            ds.add_new(0x00190000 | block, "LO", "SIEMENS MR HEADER")
            ds.add_new(0x0019000C | block << 8, "IS", value)

    path = one_file(tmp_path, edit=edit)
    same_header(path)
    assert both(path)[0].faults == faults


@pytest.mark.parametrize("coding", [Coding(), Coding(syntax=ImplicitVRLittleEndian)])
def test_the_pixel_offset_is_right(tmp_path, coding):
    path = one_file(tmp_path, coding, edit=with_sequences)
    [header] = read_headers([path])
    location = header.pixels
    expected = dcmread(path).PixelData
    assert path.read_bytes()[location.offset :] == expected
    assert location.length == len(expected)


def test_a_header_of_megabytes_is_read(tmp_path):
    def edit(k: int, ds: Dataset) -> None:
        ds.private_block(0x0029, "TESTS", create=True).add_new(1, "OB", bytes(1_000_000))

    same_header(one_file(tmp_path, edit=edit))


def rewritten(path: Path, syntax: str) -> Path:
    """Write the file in another transfer syntax, without pixels."""
    dataset = dcmread(path)
    fresh = Dataset()
    fresh.update({e.tag: e for e in dataset if e.keyword != "PixelData"})
    fresh.file_meta = FileMetaDataset()
    fresh.file_meta.TransferSyntaxUID = syntax
    fresh.file_meta.MediaStorageSOPClassUID = MR
    fresh.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    dcmwrite(path, fresh, enforce_file_format=True)
    return path


@pytest.mark.parametrize("syntax", [DeflatedExplicitVRLittleEndian, ExplicitVRBigEndian])
def test_other_transfer_syntaxes_give_the_same_header(tmp_path, syntax):
    plain = rewritten(one_file(tmp_path / "plain"), ExplicitVRLittleEndian)
    rewritten_path = rewritten(one_file(tmp_path / "other"), syntax)
    assert both(rewritten_path)[0] == both(rewritten_path)[1]
    ours, theirs = read_headers([plain, rewritten_path])
    for name in Header.__annotations__:
        if name not in ("path_string", "elements", "shared", "syntax", "pixels"):
            assert getattr(ours, name) == getattr(theirs, name)
    assert theirs.syntax == syntax


def test_a_deflated_header_is_inflated_no_further_than_needed(tmp_path, monkeypatch):
    from scanloom.io.dicom.header import parser

    path = rewritten(one_file(tmp_path), DeflatedExplicitVRLittleEndian)
    same_header(path)
    monkeypatch.setattr(parser, "MAX_INFLATED_BYTES", 300)
    header = Header(path, parse_with_pydicom(path))
    assert header.sop_class
    assert not header.series_uid  # the rest was not read


@pytest.mark.parametrize("coding", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("meta", [True, False])
def test_files_without_part_10_preamble_are_read(tmp_path, coding, meta):
    path = one_file(tmp_path, coding)
    data = path.read_bytes()
    length = int.from_bytes(data[140:144], "little")
    path.write_bytes(data[132 if meta else 144 + length :])
    assert is_dicom(read_first_bytes(path))
    same_header(path)


@pytest.mark.parametrize("coding", PLAIN.values(), ids=PLAIN)
def test_consecutive_files_agree_with_pydicom(tmp_path, coding):
    """With values of all lengths, added and missing elements, and sequences, in random order."""

    def edit(k: int, ds: Dataset) -> None:
        ds.SeriesDescription = "x" * (k % 7)
        ds.SliceLocation = f"{-100 + 17.5 * k:g}"
        if k % 5 == 0:
            del ds.KVP
        if k % 3 == 0:
            with_sequences(k, ds)

    paths = write_series(tmp_path, noise((36, 35, 40)), coding=coding, edit=edit)
    paths += write_series(tmp_path / "b", noise((36, 35, 20)), words=Words(modality="MR"))
    for path in [*paths, *reversed(paths), *random.Random(1).sample(paths, len(paths))]:
        fast, odd = both(path)
        assert fast == odd


def test_sop_classes_of_other_lengths_in_the_meta_header_are_distinguished(tmp_path):
    classes = ["1.2.840.10008.5.1.4.1.1.2", "1.2.840.10008.5.1.4.1.1.2.1", "1.2.3"]

    for n, path in enumerate(write_series(tmp_path, noise((36, 35, 12)))):
        dataset = dcmread(path)
        dataset.file_meta.MediaStorageSOPClassUID = classes[n % 3]
        dataset.save_as(path)
        fast, odd = both(path)
        assert fast == odd
        assert fast.text(tags.MEDIA_STORAGE_SOP_CLASS_UID) == classes[n % 3]


def test_threads_that_read_different_series_do_not_mix_them(tmp_path):
    def edit(k: int, ds: Dataset) -> None:
        ds.SeriesDescription = f"{k % 4:16}"

    paths = write_series(tmp_path, noise((36, 35, 8)), edit=edit)
    expected = {path: both(path)[1] for path in paths}
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            rounds = [path for path in paths for _ in range(300)]
            random.Random(1).shuffle(rounds)
            headers = list(
                pool.map(lambda path: (path, parse_plain(path, read_first_bytes(path))), rounds)
            )
    finally:
        sys.setswitchinterval(before)
    assert all(elements == expected[path] for path, elements in headers)


def test_headers_keep_the_attributes_that_separate_or_unite_slices():
    assert {tag for attribute in SLICE_ATTRIBUTES for tag in attribute.tags} <= KEPT_TAGS
    assert set(PHASE_ATTRIBUTES.values()) <= PER_SLICE_TAGS


def test_an_unknown_sequence_is_left_to_pydicom(tmp_path):
    """UN of undefined length is a sequence in implicit encoding (PS3.5 6.2.2)."""
    path = one_file(tmp_path)
    item = struct.pack("<HHI", 0x0008, 0x0100, 2) + b"1 "
    sequence = struct.pack("<HH2sHI", 0x0029, 0x1010, b"UN", 0, 0xFFFFFFFF)
    sequence += struct.pack("<HHI", 0xFFFE, 0xE000, len(item)) + item
    sequence += struct.pack("<HHI", 0xFFFE, 0xE0DD, 0)
    data = path.read_bytes()
    [header] = read_headers([path])
    offset = header.pixels.offset - 12
    path.write_bytes(data[:offset] + sequence + data[offset:])
    assert both(path)[0] is None
    [moved] = read_headers([path])
    assert moved.pixels == PixelDataLocation(offset + len(sequence) + 12, header.pixels.length)


@pytest.mark.parametrize("edit", [None, with_sequences], ids=["", "sequences"])
@pytest.mark.parametrize("coding", [Coding(), Coding(syntax=ImplicitVRLittleEndian)])
def test_a_truncated_file_never_disagrees_with_pydicom(tmp_path, coding, edit):
    data = one_file(tmp_path, coding, edit=edit).read_bytes()
    path = tmp_path / "cut.dcm"
    for length in {*range(140, min(len(data), 900), 7), *range(len(data) - 200, len(data), 7)}:
        path.write_bytes(data[:length])
        fast, odd = both(path)
        assert fast in (None, odd), length


@pytest.mark.parametrize("edit", [None, with_sequences], ids=["", "sequences"])
@pytest.mark.parametrize("coding", [Coding(), Coding(syntax=ImplicitVRLittleEndian)])
def test_a_mutated_file_never_disagrees_with_pydicom(tmp_path, coding, edit):
    data = one_file(tmp_path, coding, edit=edit).read_bytes()[:4000]
    path, chance, read = tmp_path / "mutated.dcm", random.Random(7), 0
    for _ in range(300):
        mutated = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            mutated[chance.randrange(132, len(data))] = chance.choice((0, 1, 8, 255, 65, 83))
        path.write_bytes(mutated)
        fast, odd = both(path)
        assert fast in (None, odd)
        read += fast is not None
    assert read > 50 or edit is not None


@pytest.mark.parametrize("edit", [None, with_sequences], ids=["", "sequences"])
@pytest.mark.parametrize("coding", [Coding(), Coding(syntax=ImplicitVRLittleEndian)])
def test_a_file_that_goes_on_with_zeros_is_read_as_if_it_was_cut(tmp_path, coding, edit):
    data = one_file(tmp_path, coding, edit=edit).read_bytes()
    path = tmp_path / "cut.dcm"
    for length in {132, 400, *range(140, min(len(data), 900), 31)}:
        path.write_bytes(data[:length] + bytes(1 << 20))
        fast, odd = both(path)
        assert fast in (None, odd), length
        assert odd is None or odd.pixels is None


def test_a_file_of_endless_elements_is_damaged(tmp_path):
    path = tmp_path / "many.dcm"
    path.write_bytes(bytes(128) + b"DICM" + struct.pack("<HHI", 9, 1, 0) * (MAX_ELEMENTS + 1))
    [error] = read_headers([path])
    assert isinstance(error, ScanError)
    assert error.code == "DAMAGED"


@pytest.mark.parametrize("item", [bytes(8), struct.pack("<HHI", 0xFFFE, 0xE000, 0)])
def test_a_sequence_without_end_takes_no_time(
    item: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pydicom would make an object of every eight bytes: an hour and gigabytes for a few MB."""
    monkeypatch.setattr("scanloom.io.dicom.header.parser.MAX_ITEMS", 100)
    path = tmp_path / "file"
    sequence = struct.pack("<HH2sHI", 8, 0x1140, b"SQ", 0, 0xFFFFFFFF)
    content = struct.pack("<HH2sH", 8, 0x60, b"CS", 2) + b"CT" + sequence
    path.write_bytes(bytes(128) + b"DICM" + content + item * (1 << 17))
    begun = time.process_time()

    (header,) = read_headers([path])

    assert isinstance(header, ScanError)
    assert header.code == "DAMAGED"
    assert time.process_time() - begun < 5


def test_vrs_are_those_that_pydicom_knows():
    assert set(parser.SHORT_LENGTH_VRS.decode().split()) == {
        str(vr) for vr in EXPLICIT_VR_LENGTH_16
    }
    assert set(parser.LONG_LENGTH_VRS.decode().split()) == {str(vr) for vr in EXPLICIT_VR_LENGTH_32}


def test_the_whole_data_set_can_be_read(tmp_path):
    path = one_file(tmp_path)
    [header] = read_headers([path])
    dataset = header.read_dataset()
    assert dataset.PatientID == "NOBODY"
    assert "PixelData" not in dataset
    path.unlink()
    with pytest.raises(ScanError) as caught:
        header.read_dataset()
    assert caught.value.code == "UNREADABLE"


def test_pipes_and_other_formats_give_no_header(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("no image " * 40)
    assert read_headers([tmp_path / "pipe", tmp_path / "text"]) == [None, None]


@pytest.mark.reference
def test_every_real_header_agrees_with_pydicom():
    read = 0
    for path in sorted(p for p in scans(".").rglob("*") if p.is_file()):
        if not is_dicom(read_first_bytes(path)):
            continue
        fast, odd = both(path)
        assert fast in (None, odd), path
        read += fast is not None
    assert read > 600


def test_bytes_after_the_pixels_are_not_read(tmp_path):
    """Elements after PixelData (padding, digital signatures) change nothing."""
    path = one_file(tmp_path)
    before = both(path)[0]
    tail = BytesIO()
    tail.write(struct.pack("<HH2sHI", 0xFFFC, 0xFFFC, b"OB", 0, 8) + bytes(8))
    path.write_bytes(path.read_bytes() + tail.getvalue())
    assert both(path)[0] == before


@pytest.mark.parametrize("length", [64, 256, 70_000])
def test_elements_are_kept_if_the_transfer_syntax_is_damaged(length):
    location = PixelDataLocation(1 << 40, 7)
    values = {tags.MEDIA_STORAGE_SOP_CLASS_UID: b"1.2"}
    elements = elements_from_values(values, "ÿ" * length, little=True, pixels=location)
    assert decode_elements(elements.packed()) == elements


def test_headers_have_all_attributes_that_their_class_declares(tmp_path: Path) -> None:
    for path in write_series(tmp_path / "in", noise()):
        [header] = read_headers([path])
        assert isinstance(header, Header)

        assert vars(header).keys() == set(Header.__annotations__)


def test_attributes_have_distinct_names():
    names = [attribute.name for attribute in SLICE_ATTRIBUTES]
    assert len(set(names)) == len(names)


def test_header_text_stays_muted_while_any_thread_reads():
    """Two threads in such a block may leave it in the order in which they entered."""
    before = list(warnings.filters), logging.getLogger("pydicom").disabled
    first, second = pydicom_muted(), pydicom_muted()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    warnings.warn("a name", stacklevel=1)
    assert logging.getLogger("pydicom").disabled
    second.__exit__(None, None, None)
    assert (list(warnings.filters), logging.getLogger("pydicom").disabled) == before
