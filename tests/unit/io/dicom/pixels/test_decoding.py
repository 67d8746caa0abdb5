"""Stored samples survive a round trip through every transfer syntax, fragmentation and depth."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from pathlib import Path

import imagecodecs
import numpy as np
import pydicom
import pytest
from pydicom import Dataset
from pydicom.encaps import encapsulate, encapsulate_extended, fragment_frame
from pydicom.pixels.encoders import RLELosslessEncoder

import scanloom
from scanloom.core import ScanError
from scanloom.io.dicom.geometry.slices import Tile, single_slice
from scanloom.io.dicom.header.header import Header, read_headers
from scanloom.io.dicom.header.parser import inflate
from scanloom.io.dicom.pixels import frame as frame_module
from scanloom.io.dicom.pixels.voxels import (
    read_stored,
    read_stored_frame,
    read_values,
    same_pixels,
)
from support.write_dicom import Coding, add_overlays, noise, write_series

JPEG = "1.2.840.10008.1.2.4."
EXPLICIT = "1.2.840.10008.1.2.1"
BIG = "1.2.840.10008.1.2.2"
RLE = "1.2.840.10008.1.2.5"
DEFLATED = EXPLICIT + ".99"
DEFLATED_FRAMES = "1.2.840.10008.1.2.8.1"
ENCAPSULATED = EXPLICIT + ".98"
SHAPE = (19, 23)


def smooth(count: int, bits: int, signed: bool = False) -> np.ndarray:
    """Return smooth frames that use all bits; lossy codecs reproduce them closely."""
    rows, columns = np.indices(SHAPE)
    values = [(rows * 3 + columns * 5 + 7 * k) / 220 * (2**bits - 1) for k in range(count)]
    kind = next(n for n in (8, 16, 32) if bits <= n)
    low = 2 ** (bits - 1) if signed else 0
    return (np.array(values).clip(0, 2**bits - 1).astype(np.int64) - low).astype(
        f"<{'i' if signed else 'u'}{kind // 8}"
    )


def encoded(frame: np.ndarray, syntax: str, bits: int) -> bytes:
    """Encode with an encoder independent of the decoder under test, if there is one."""
    plain = frame.view(f"<u{frame.itemsize}")
    if syntax == RLE and frame.itemsize == 4:  # pydicom has no encoder for it
        return run_lengths(frame)
    if syntax == RLE:
        return RLELosslessEncoder.encode(
            frame.tobytes(),
            rows=frame.shape[0],
            columns=frame.shape[1],
            samples_per_pixel=1,
            bits_allocated=8 * frame.itemsize,
            bits_stored=8 * frame.itemsize,
            pixel_representation=0,
            number_of_frames=1,
            photometric_interpretation="MONOCHROME2",
        )
    if syntax == DEFLATED_FRAMES:
        state = zlib.compressobj(wbits=-15)
        return state.compress(frame.tobytes()) + state.flush()
    if syntax == ENCAPSULATED:
        return frame.tobytes()
    name = syntax.removeprefix(JPEG)
    if name in ("50", "51"):
        return imagecodecs.jpeg8_encode(plain, level=99, bitspersample=max(8, bits))
    if name in ("57", "70"):
        return imagecodecs.ljpeg_encode(plain)
    if name in ("80", "81"):
        return imagecodecs.jpegls_encode(plain, level=2 if name == "81" else 0)
    if name in ("90", "91"):
        return imagecodecs.jpeg2k_encode(frame, codecformat="j2k", reversible=True, level=0)
    return imagecodecs.htj2k_encode(frame)


def run_lengths(frame: np.ndarray) -> bytes:
    """Encode by PS3.5 G: one segment per byte, most significant first, literal runs only."""
    planes = frame.reshape(-1, 1).view(np.uint8)[:, ::-1].T
    segments = []
    for plane in planes:
        runs = [plane[n : n + 128].tobytes() for n in range(0, plane.size, 128)]
        segment = b"".join(bytes([len(run) - 1]) + run for run in runs)
        segments.append(segment + bytes(len(segment) % 2))
    offsets = 64 + np.cumsum([0, *map(len, segments)])[:-1]
    head = struct.pack("<16I", len(segments), *offsets, *[0] * (15 - len(segments)))
    return head + b"".join(segments)


CASES = [
    (RLE, 8, False, 0),
    (RLE, 16, True, 0),
    (RLE, 32, False, 0),
    (DEFLATED_FRAMES, 16, True, 0),
    (ENCAPSULATED, 16, False, 0),
    (JPEG + "50", 8, False, 4),
    (JPEG + "51", 12, False, 8),
    (JPEG + "51", 8, False, 4),
    (JPEG + "57", 16, False, 0),
    (JPEG + "70", 12, False, 0),
    (JPEG + "70", 16, True, 0),
    (JPEG + "80", 8, False, 0),
    (JPEG + "80", 16, True, 0),
    (JPEG + "81", 16, False, 2),
    (JPEG + "90", 8, False, 0),
    (JPEG + "90", 16, True, 0),
    (JPEG + "91", 16, False, 0),
    (JPEG + "201", 16, True, 0),
    (JPEG + "202", 8, False, 0),
    (JPEG + "203", 16, False, 0),
]


def header_of(path: Path) -> Header:
    [header] = read_headers([path])
    assert isinstance(header, Header)
    return header


def frame_of(path: Path, frame: int = 0) -> np.ndarray:
    return read_stored_frame(header_of(path), frame)


def dataset_of(path: Path, frames: np.ndarray, bits: int = 0, **more: int) -> Dataset:
    """Return the header of a CT image with these frames."""
    kind = {1: 8, 2: 16, 4: 32}[frames.itemsize]
    coding = Coding(kind, bits or kind, frames.dtype.kind == "i")
    [path_of_series] = write_series(path.parent, frames[0].T[..., None], coding=coding)
    dataset = pydicom.dcmread(path_of_series)
    path_of_series.unlink()
    dataset.NumberOfFrames = len(frames)
    for keyword, value in more.items():
        setattr(dataset, keyword, value)
    return dataset


def save(path: Path, dataset: Dataset, data: bytes, syntax: str) -> Path:
    dataset.PixelData = data
    native = syntax in (EXPLICIT, BIG, DEFLATED)
    dataset["PixelData"].VR = "OB" if not native else dataset["PixelData"].VR
    dataset["PixelData"].is_undefined_length = not native
    dataset.file_meta.TransferSyntaxUID = syntax
    if syntax in (DEFLATED_FRAMES, ENCAPSULATED):  # pydicom cannot write them
        dataset.file_meta.TransferSyntaxUID = JPEG + "90"
        dataset.save_as(path, enforce_file_format=True)
        text = path.read_bytes()
        new = syntax.encode().ljust(len(JPEG) + 2, b"\0")
        old = (JPEG + "90").encode()
        assert text.count(old) == 1
        assert len(new) == len(old)
        path.write_bytes(text.replace(old, new))
        return path
    if syntax == BIG:  # as if read from big endian; its values are in memory, not bytes
        for element in dataset.iterall():
            assert element.VR
        dataset.set_original_encoding(False, False, dataset.original_character_set)
    dataset.save_as(path, enforce_file_format=True)
    return path


@pytest.mark.parametrize(("syntax", "bits", "signed", "tolerance"), CASES)
def test_every_frame_of_every_syntax_is_decoded(syntax, bits, signed, tolerance, tmp_path):
    frames = smooth(3, bits, signed)
    data = encapsulate([encoded(f, syntax, bits) for f in frames])
    path = save(tmp_path / "a.dcm", dataset_of(tmp_path / "a", frames, bits), data, syntax)
    for k in (2, 0, 1):
        off = np.abs(frame_of(path, k).astype(np.int64) - frames[k])
        assert off.max() <= tolerance


@pytest.mark.parametrize("table", ["basic", "none", "wrong", "extended"])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("syntax", [JPEG + "80", JPEG + "90"])
def test_frames_are_located_in_fragments(syntax, pieces, table, tmp_path):
    """With a valid basic offset table, with none and with an invalid one."""
    if table == "extended" and pieces > 1:
        pytest.skip("the standard forbids it")
    frames = smooth(4, 16)
    encoded_frames = [encoded(f, syntax, 16) for f in frames]
    dataset = dataset_of(tmp_path / "a", frames)
    if table == "extended":
        data, dataset.ExtendedOffsetTable, dataset.ExtendedOffsetTableLengths = (
            encapsulate_extended(encoded_frames)
        )
    else:
        data = encapsulate(encoded_frames, fragments_per_frame=pieces, has_bot=table != "none")
    if table == "wrong":
        start = struct.unpack("<I", data[12:16])[0]
        data = data[:12] + struct.pack("<I", start + 2) + data[16:]
    path = save(tmp_path / "a.dcm", dataset, data, syntax)
    for k in range(4):
        np.testing.assert_array_equal(frame_of(path, k), frames[k])


def test_reading_a_frame_decodes_no_other_frame(tmp_path):
    frames = smooth(3, 16)
    encoded_frames = [encoded(f, JPEG + "80", 16) for f in frames]
    encoded_frames[0] = encoded_frames[2] = b"\xff\xd8" + bytes(60) + b"\xff\xd9"
    path = save(
        tmp_path / "a.dcm",
        dataset_of(tmp_path / "a", frames),
        encapsulate(encoded_frames),
        JPEG + "80",
    )
    np.testing.assert_array_equal(frame_of(path, 1), frames[1])
    assert code_of(frame_of, path, 2) == "DAMAGED"


def test_a_file_with_fewer_frames_than_its_header_describes_is_truncated(tmp_path):
    frames = smooth(3, 16)
    data = encapsulate([encoded(f, JPEG + "80", 16) for f in frames[:2]])
    path = save(tmp_path / "a.dcm", dataset_of(tmp_path / "a", frames), data, JPEG + "80")
    assert code_of(frame_of, path, 0) == "TRUNCATED"
    assert code_of(frame_of, path, 3) == "DAMAGED"


@pytest.mark.parametrize("syntax", [RLE, JPEG + "70", JPEG + "80", JPEG + "90"])
def test_a_single_frame_file_with_two_images_is_refused(syntax, tmp_path):
    frames = smooth(2, 16)
    data = encapsulate([encoded(f, syntax, 16) for f in frames], has_bot=False)
    path = save(tmp_path / "a.dcm", dataset_of(tmp_path / "a", frames[:1]), data, syntax)
    assert code_of(frame_of, path) == "DAMAGED"


def test_an_offset_table_that_lists_fragments_is_not_read_as_a_fragment(tmp_path):
    """Some writers list every fragment of a single frame."""
    frame = smooth(1, 16)
    pieces = list(fragment_frame(encoded(frame[0], JPEG + "90", 16), 3))
    items = [struct.pack("<3I", 0, 9, 18), *pieces]
    data = b"".join(b"\xfe\xff\x00\xe0" + struct.pack("<I", len(i)) + i for i in items)
    path = save(tmp_path / "a.dcm", dataset_of(tmp_path / "a", frame), data, JPEG + "90")
    np.testing.assert_array_equal(frame_of(path), frame[0])


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("bits", range(1, 33))
@pytest.mark.parametrize("signed", [False, True])
def test_stored_bits_keep_their_sign_and_unused_bits_are_cleared(bits, signed, big, tmp_path):
    """With overlays in up to 16 unused bits, and without sign extension."""
    if bits == 1 and signed:
        pytest.skip("samples of one bit cannot be signed")
    allocated = next(n for n in (8, 16, 32) if bits <= n)
    rng = np.random.default_rng(bits)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    values = rng.integers(low, high, (2, 5, 7))  # an odd number of samples
    overlays = range(bits, min(allocated, bits + 16))
    dirt = rng.integers(0, 2 ** len(overlays), values.shape) << bits
    stored = ((values & (2**bits - 1)) | dirt).astype(f"<u{allocated // 8}")
    dataset = dataset_of(
        tmp_path / "a",
        stored,
        BitsStored=bits,
        HighBit=bits - 1,
        PixelRepresentation=int(signed),
    )
    add_overlays(dataset, overlays)
    data = stored.tobytes()
    if big and allocated == 8:
        data = np.frombuffer(data + bytes(len(data) % 2), "<u2").astype(">u2").tobytes()
        dataset["PixelData"].VR = "OW"
    elif big:
        data = stored.astype(stored.dtype.newbyteorder(">")).tobytes()
    path = save(tmp_path / "a.dcm", dataset, data + bytes(len(data) % 2), BIG if big else EXPLICIT)
    for k in (1, 0):
        np.testing.assert_array_equal(frame_of(path, k), values[k])


@pytest.mark.parametrize("allocated", [1, 12, 24])
def test_packed_samples_are_unpacked(allocated, tmp_path):
    """PS3.5 8.1.1: the first sample in the lowest bits, frames not aligned to bytes."""
    frames = np.random.default_rng(0).integers(0, 2**allocated, (3, 5, 7))
    whole = sum(int(v) << n * allocated for n, v in enumerate(frames.reshape(-1)))
    data = whole.to_bytes(-(-frames.size * allocated // 8), "little")
    dataset = dataset_of(
        tmp_path / "a",
        frames.astype("<u4"),
        BitsAllocated=allocated,
        BitsStored=allocated,
        HighBit=allocated - 1,
    )
    path = save(tmp_path / "a.dcm", dataset, data + bytes(len(data) % 2), EXPLICIT)
    for k in range(3):
        np.testing.assert_array_equal(frame_of(path, k), frames[k])
    if allocated == 1:  # checked by pydicom too
        np.testing.assert_array_equal(pydicom.dcmread(path).pixel_array, frames)


def test_rle_of_packed_bits_is_decoded(tmp_path):
    frame = np.random.default_rng(0).integers(0, 2, (1, 6, 8)).astype(np.uint8)
    packed = np.packbits(frame, bitorder="little")
    data = encapsulate([encoded(packed[None], RLE, 8)])
    dataset = dataset_of(tmp_path / "a", frame, BitsAllocated=1, BitsStored=1, HighBit=0)
    path = save(tmp_path / "a.dcm", dataset, data, RLE)
    np.testing.assert_array_equal(frame_of(path), frame[0])


def test_a_deflated_file_is_inflated_once_for_all_frames(tmp_path, monkeypatch):
    kept = []  # the inflated files that are in memory when another one is inflated

    def counting(*args):
        kept.append(frame_module._inflated_data_set.cache_info().currsize)
        return inflate(*args)

    monkeypatch.setattr(frame_module, "inflate", counting)
    frames = smooth(9, 16)
    dataset = dataset_of(tmp_path / "a", frames)
    for name in "ab":
        path = save(tmp_path / f"{name}.dcm", dataset, frames.tobytes(), DEFLATED)
        stored = read_stored([frame_module.frame_ref(header_of(path), n) for n in range(9)])
        np.testing.assert_array_equal(stored, frames)
    assert kept == [0, 0]


def test_deflated_files_are_read(tmp_path):
    frames = smooth(2, 16, signed=True)
    dataset = dataset_of(tmp_path / "a", frames)
    path = save(tmp_path / "a.dcm", dataset, frames.tobytes(), DEFLATED)
    np.testing.assert_array_equal(frame_of(path, 1), frames[1])
    cut = path.read_bytes()[:-200]
    path.write_bytes(cut)
    assert code_of(frame_of, path) in ("TRUNCATED", "DAMAGED")


def series(folder: Path, syntax: str, frames: np.ndarray) -> list[Path]:
    """Write one file per frame."""
    folder.mkdir()
    paths = []
    for k, frame in enumerate(frames):
        dataset = dataset_of(folder / "x" / "a", frame[None])
        del dataset.NumberOfFrames
        path = folder / f"{k}.dcm"
        paths.append(save(path, dataset, encapsulate([encoded(frame, syntax, 16)]), syntax))
    return paths


def values_of(paths: list[Path], **more: int) -> np.ndarray:
    return read_values([single_slice(header_of(p)) for p in paths], **more)


@pytest.mark.parametrize("syntax", [RLE, JPEG + "80", JPEG + "90"])
def test_a_compressed_series_has_the_values_of_the_native_one(syntax, tmp_path):
    stored = noise((23, 19, 4))
    plain = write_series(tmp_path / "plain", stored)
    packed = series(tmp_path / "packed", syntax, stored.transpose(2, 1, 0))
    ours, theirs = values_of(packed), values_of(plain)
    np.testing.assert_array_equal(ours, theirs)
    assert (ours.dtype, ours.strides) == (theirs.dtype, theirs.strides)
    slices = [single_slice(header_of(p)) for p in packed[:2]]
    assert same_pixels(slices[0], slices[0])
    assert not same_pixels(slices[0], slices[1])


def test_values_too_large_for_int16_are_returned_as_int32(tmp_path):
    stored = smooth(3, 16)
    paths = series(tmp_path / "packed", JPEG + "80", stored)
    values = values_of(paths)
    assert values.dtype == np.int32
    np.testing.assert_array_equal(values.T, stored.astype(int) - 1024)


def test_missing_slices_are_zero(tmp_path):
    stored = noise((23, 19, 2))
    for paths in (
        write_series(tmp_path / "plain", stored),
        series(tmp_path / "packed", RLE, stored.transpose(2, 1, 0)),
    ):
        first, last = (single_slice(header_of(p)) for p in paths)
        values = read_values([first, None, last])
        assert not values[..., 1].any()
        np.testing.assert_array_equal(values[..., [0, 2]], stored.astype(int) - 1024)


def code_of(work, *arguments, **more) -> str:
    with pytest.raises(ScanError) as caught:
        work(*arguments, **more)
    return caught.value.code


@pytest.mark.parametrize("syntax", [EXPLICIT, RLE, DEFLATED])
def test_implausible_sizes_are_refused_before_allocation(syntax, tmp_path):
    frame = smooth(1, 16)
    data = frame.tobytes() if syntax != RLE else encapsulate([encoded(frame[0], RLE, 16)])
    dataset = dataset_of(tmp_path / "a", frame, Rows=65535, Columns=65535)
    path = save(tmp_path / "a.dcm", dataset, data, syntax)
    assert code_of(values_of, [path]) == "TOO_LARGE"
    assert code_of(values_of, [path] * 3, limit=1 << 20) == "TOO_LARGE"


@pytest.mark.parametrize(("slope", "itemsize"), [("1", 2), ("0.5", 4)])
def test_the_limit_applies_to_the_values(tmp_path, slope, itemsize):
    paths = write_series(tmp_path, noise((23, 19, 4)), coding=Coding(slope=slope))
    size = 23 * 19 * 4 * itemsize
    assert values_of(paths, limit=size).nbytes == size
    assert code_of(values_of, paths, limit=size - 1) == "TOO_LARGE"
    assert scanloom.load_volume(tmp_path, max_bytes=size).array.nbytes == size
    assert code_of(scanloom.load_volume, tmp_path, max_bytes=size - 1) == "TOO_LARGE"


@pytest.mark.parametrize("syntax", sorted({c[0] for c in CASES if c[0].startswith(JPEG)}))
def test_a_codestream_larger_than_its_header_describes_is_refused(syntax, tmp_path):
    """Gigabytes of samples in a few bytes, refused before decoding."""
    frame = smooth(1, 8)
    code = encoded(frame[0], syntax, 8)
    for form in (">II", ">HH"):  # JPEG 2000 stores columns first
        small = (23, 19) if form == ">II" else (19, 23)
        code = code.replace(struct.pack(form, *small), struct.pack(form, 65500, 65500))
    data = encapsulate([code])
    path = save(tmp_path / "a.dcm", dataset_of(tmp_path / "a", frame), data, syntax)
    with pytest.raises(ScanError, match="about the size") as caught:
        frame_of(path)
    assert caught.value.code == "DAMAGED"


@pytest.mark.parametrize(("offset", "value"), [(16, 1 << 28), (20, 1 << 12), (24, 1), (32, 1)])
def test_a_codestream_of_too_many_tiles_is_refused(offset, value, tmp_path):
    """OpenJPH loops over tiles: damaged offsets and tile sizes (ISO 15444-1 A.5.1)."""
    frame = np.zeros((1, 300, 300), np.uint16)
    code = bytearray(encoded(frame[0], JPEG + "201", 16))
    code[offset : offset + 4] = struct.pack(">I", value)
    if offset == 24:
        code[28:32] = code[24:28]
    path = save(
        tmp_path / "a.dcm",
        dataset_of(tmp_path / "a", frame),
        encapsulate([bytes(code)]),
        JPEG + "201",
    )
    assert code_of(frame_of, path) == "DAMAGED"


def test_a_deflated_bomb_is_refused(tmp_path):
    """160 MB of zeros after a small image."""
    frames = smooth(1, 16)
    path = save(tmp_path / "a.dcm", dataset_of(tmp_path / "a", frames), frames.tobytes(), DEFLATED)
    data = path.read_bytes()
    start = 144 + struct.unpack("<I", data[140:144])[0]
    plain = zlib.decompress(data[start:], -15)
    state = zlib.compressobj(9, wbits=-15)
    chunks = [state.compress(plain)] + [state.compress(bytes(1 << 20)) for _ in range(160)]
    path.write_bytes(data[:start] + b"".join(chunks) + state.flush())
    assert code_of(frame_of, path) == "TOO_LARGE"


def test_an_rle_bomb_is_refused(tmp_path):
    frame = smooth(1, 16)
    runs = b"\x81\x00" * 500_000  # 64 MB of zeros in one of two segments
    head = struct.pack("<16I", 2, 64, 64 + len(runs), *[0] * 13)
    data = encapsulate([head + runs + runs[:2]])
    path = save(tmp_path / "a.dcm", dataset_of(tmp_path / "a", frame), data, RLE)
    assert code_of(frame_of, path) in ("DAMAGED", "TRUNCATED", "TOO_LARGE")


@pytest.mark.parametrize(
    ("lengths", "code"), [((437, 300), "TRUNCATED"), ((900, 300), "TRUNCATED"), ((437,), "DAMAGED")]
)
def test_short_or_missing_rle_segments_are_refused(lengths, code, tmp_path):
    """A long segment next to a short one has enough bytes in total."""
    frame = smooth(1, 16)
    segments = [run_lengths(np.zeros((1, n), np.uint8))[64:] for n in lengths]
    offsets = 64 + np.cumsum([0, *map(len, segments)])[:-1]
    head = struct.pack("<16I", len(segments), *offsets, *[0] * (15 - len(segments)))
    data = encapsulate([head + b"".join(segments)])
    path = save(tmp_path / "a.dcm", dataset_of(tmp_path / "a", frame), data, RLE)
    assert code_of(frame_of, path) == code


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("syntax", [JPEG + "70", JPEG + "80", JPEG + "90", JPEG + "91"])
def test_samples_with_more_bits_than_stored_are_refused(syntax, signed, tmp_path):
    frame = smooth(1, 16, signed)
    data = encapsulate([encoded(frame[0], syntax, 16)])
    path = save(tmp_path / "a.dcm", dataset_of(tmp_path / "a", frame, 12), data, syntax)
    assert code_of(frame_of, path) == "DAMAGED"


@pytest.mark.parametrize("signed", [False, True])
def test_lossy_coding_may_slightly_exceed_the_range(signed, tmp_path):
    frame = smooth(1, 12, signed)
    frame[0, 3, 5] = 2047 if signed else 4095
    grown = frame[0].copy()
    grown[3, 5] += 20
    for syntax in ("90", "91"):
        data = encapsulate([encoded(grown, JPEG + syntax, 16)])
        path = tmp_path / f"{syntax}.dcm"
        save(path, dataset_of(tmp_path / "a", frame, 12), data, JPEG + syntax)
    np.testing.assert_array_equal(frame_of(tmp_path / "91.dcm"), frame[0])
    assert code_of(frame_of, tmp_path / "90.dcm") == "DAMAGED"


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("syntax", [JPEG + "70", JPEG + "80"])
def test_the_sign_may_extend_into_unused_bits(syntax, filled, tmp_path):
    frame = smooth(1, 12, True)
    data = encapsulate([encoded(frame[0] if filled else frame[0] & 0xFFF, syntax, 16)])
    path = save(tmp_path / "a.dcm", dataset_of(tmp_path / "a", frame, 12), data, syntax)
    np.testing.assert_array_equal(frame_of(path), frame[0])


@pytest.mark.parametrize("syntax", [RLE, JPEG + "70", JPEG + "80", JPEG + "90", JPEG + "201"])
def test_a_high_bit_that_compressed_samples_contradict_is_refused(syntax, tmp_path):
    frame = smooth(1, 12)
    for shift, code in ((0, "DAMAGED"), (4, "")):
        data = encapsulate([encoded(frame[0] << shift, syntax, 16)])
        dataset = dataset_of(tmp_path / "a", frame, 12, HighBit=15)
        path = save(tmp_path / "a.dcm", dataset, data, syntax)
        if code:
            assert code_of(frame_of, path) == code
        else:
            np.testing.assert_array_equal(frame_of(path), frame[0])


def test_an_implausibly_large_frame_is_refused(tmp_path):
    frame = smooth(1, 16)
    code = encoded(frame[0], JPEG + "90", 16)
    data = encapsulate([code[:-2] + bytes(3 << 20) + code[-2:]])
    path = save(tmp_path / "a.dcm", dataset_of(tmp_path / "a", frame), data, JPEG + "90")
    assert code_of(frame_of, path) == "DAMAGED"


@pytest.mark.parametrize("syntax", sorted({c[0] for c in CASES}))
def test_damaged_frames_raise_only_scan_errors(syntax, tmp_path):
    """Bytes changed, removed and repeated; a good file can still be read afterwards."""
    frame = smooth(1, 8 if syntax == JPEG + "50" else 16 if syntax != JPEG + "51" else 12)
    bits = 8 * frame.itemsize if syntax != JPEG + "51" else 12
    code = encoded(frame[0], syntax, bits)
    rng = np.random.default_rng(0)
    dataset, codes = dataset_of(tmp_path / "a", frame), set()
    for n in range(8):
        bad = bytearray(code)
        for at in rng.integers(0, len(bad), 4):
            bad[at] = rng.integers(256)
        if n % 4 == 3:
            bad = bad[: len(bad) // 2] + code[-2:]
        path = save(tmp_path / "a.dcm", dataset, encapsulate([bytes(bad)]), syntax)
        try:
            assert frame_of(path).shape == frame[0].shape
        except ScanError as error:
            codes.add(error.code)
    assert codes <= {"DAMAGED", "TRUNCATED", "TOO_LARGE", "DECODER"}
    path = save(tmp_path / "a.dcm", dataset, encapsulate([code]), syntax)
    assert np.abs(frame_of(path).astype(int) - frame[0]).max() <= 8


def test_an_unknown_transfer_syntax_has_no_decoder(tmp_path):
    frame = smooth(1, 16)
    dataset = dataset_of(tmp_path / "a", frame)
    path = save(tmp_path / "a.dcm", dataset, encapsulate([b"\0" * 64]), JPEG + "102")
    assert code_of(frame_of, path) == "DECODER"


def test_the_tiles_of_a_frame_are_read_together(tmp_path):
    frame = noise((12, 8, 1))[..., 0].T  # 8 rows of 12
    for syntax in (EXPLICIT, RLE):
        dataset = dataset_of(tmp_path / "a", frame[None])
        data = frame.tobytes() if syntax == EXPLICIT else encapsulate([encoded(frame, RLE, 16)])
        whole = single_slice(header_of(save(tmp_path / "a.dcm", dataset, data, syntax)))
        corners = [(row, column) for row in (0, 4) for column in (0, 4, 8)]
        tiles = [replace(whole, tile=Tile(*corner, 4, 4)) for corner in corners]
        values = read_values(tiles)
        for k, (row, column) in enumerate(corners):
            expected = frame[row : row + 4, column : column + 4].astype(int) - 1024
            np.testing.assert_array_equal(values[..., k].T, expected)
        assert same_pixels(tiles[0], tiles[0])
        assert not same_pixels(tiles[0], tiles[1])
