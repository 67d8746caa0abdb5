"""Damage to files, by seed: the same number gives the same bytes on every machine."""

from __future__ import annotations

import gzip
import random
import re
import struct
from collections.abc import Callable

from fuzz.seeds import Seed, seeds

EXTREMES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF, 0x10000, 0x7FFFFFFF)
EXTREMES += (0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
NUMBERS = (b"0", b"-1", b"1", b"2", b"nan", b"inf", b"1e308", b"-1e-308", b"99999999", b"3.5")
NUMBERS += (b"4294967295", b"18446744073709551616", b"9" * 400, b"1_0", b"0x10", b"", b"--1")
PIXEL_DATA = b"\xe0\x7f\x10\x00"

Mutator = Callable[[bytearray, random.Random], None]


def position(data: bytearray, rng: random.Random, size: int = 1) -> int:
    """Return a place, mostly in the first kilobyte, where headers are."""
    end = max(1, len(data) - size)
    return rng.randrange(min(end, 1024) if rng.random() < 0.7 else end)


def flip_bits(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        data[position(data, rng)] ^= 1 << rng.randrange(8)


def set_bytes(data: bytearray, rng: random.Random) -> None:
    at = position(data, rng)
    for n in range(min(rng.choice((1, 2, 4, 8, 32)), len(data) - at)):
        data[at + n] = rng.randrange(256)


def truncate(data: bytearray, rng: random.Random) -> None:
    del data[position(data, rng) :]


def append(data: bytearray, rng: random.Random) -> None:
    data += rng.randbytes(rng.choice((1, 2, 8, 4096)))


def set_length(data: bytearray, rng: random.Random) -> None:
    """Put an extreme number where a length, count or type may be."""
    form = rng.choice(["<I", ">I", "<H", ">H", "<Q", "<f", "<d"])
    kind = form[1]
    value: float = rng.choice((float("nan"), float("inf"), -1.0, 1e38)) if kind in "fd" else 0
    if kind not in "fd":
        value = rng.choice(EXTREMES) & (1 << 8 * struct.calcsize(form)) - 1
    piece = struct.pack(form, value)
    at = position(data, rng, len(piece)) & ~(rng.random() < 0.8)
    data[at : at + len(piece)] = piece


def swap(data: bytearray, rng: random.Random) -> None:
    size = rng.choice((4, 8, 12, 16, 64))
    first, second = position(data, rng, size), position(data, rng, size)
    data[first : first + size], data[second : second + size] = (
        data[second : second + size],
        data[first : first + size],
    )


def duplicate(data: bytearray, rng: random.Random) -> None:
    at, size = position(data, rng), rng.choice((4, 8, 16, 132, 1024))
    data[at:at] = data[at : at + size] * rng.choice((1, 1, 2, 50))


def remove(data: bytearray, rng: random.Random) -> None:
    at = position(data, rng)
    del data[at : at + rng.choice((1, 2, 4, 8, 100))]


ANYWHERE: tuple[Mutator, ...] = (
    flip_bits,
    set_bytes,
    truncate,
    append,
    set_length,
    set_length,
    swap,
    duplicate,
    remove,
)


def _elements(data: bytes) -> list[tuple[int, int]]:
    """Return begin and end of the elements at the top of an explicit little endian file."""
    spans, at = [], 132
    while at + 8 <= len(data):
        vr, size, head = data[at + 4 : at + 6], 0, 8
        if not vr.isalpha():
            break
        if vr in (b"OB", b"OW", b"SQ", b"UN", b"UT", b"OF", b"OD", b"OL", b"UC", b"UR"):
            if at + 12 > len(data):
                break
            size, head = struct.unpack_from("<I", data, at + 8)[0], 12
        else:
            size = struct.unpack_from("<H", data, at + 6)[0]
        end = len(data) if size == 0xFFFFFFFF else at + head + size
        if end > len(data):
            break
        spans.append((at, end))
        at = end
    return spans


def change_element(data: bytearray, rng: random.Random) -> None:
    """Duplicate, drop, swap, retag or empty one DICOM element, or say another length of it."""
    spans = _elements(bytes(data))
    if len(spans) < 4:
        return flip_bits(data, rng)
    at, end = rng.choice(spans)
    element = bytes(data[at:end])
    change = rng.randrange(7)
    if change == 0:
        data[at:at] = element * rng.choice((1, 1, 30))
    elif change == 1:
        del data[at:end]
    elif change == 2:
        begin, stop = rng.choice(spans)
        if begin >= end:
            data[begin:stop], data[at:end] = element, bytes(data[begin:stop])
    elif change == 3:
        data[at : at + 4] = data[(source := rng.choice(spans)[0]) : source + 4]
    elif change == 4:
        data[at + 4 : at + 6] = rng.choice((b"SQ", b"UN", b"OB", b"DS", b"US", b"FD", b"??", b"UT"))
    elif change == 5:
        data[at + 6 : at + 8] = struct.pack("<H", rng.choice(EXTREMES) & 0xFFFF)
    else:
        value = rng.choice(NUMBERS)[:64]
        size = end - at - 8
        data[at + 8 : end] = value.ljust(size)[:size]
    return None


def change_number(data: bytearray, rng: random.Random) -> None:
    """Put another number where a text has one."""
    end = data.find(b"\n\n") if data.startswith(b"NRRD") else data.find(b"LOCAL")
    numbers = list(re.finditer(rb"[-+0-9.]+", data[: end if end > 0 else None]))
    if numbers:
        number = rng.choice(numbers)
        data[number.start() : number.end()] = rng.choice(NUMBERS)


def change_line(data: bytearray, rng: random.Random) -> None:
    """Drop, double, swap or join lines of a text."""
    lines = bytes(data).split(b"\n")
    first, second = rng.randrange(min(20, len(lines))), rng.randrange(min(20, len(lines)))
    change = rng.randrange(5)
    if change == 0:
        del lines[first]
    elif change == 1:
        lines.insert(second, lines[first])
    elif change == 2:
        lines[first], lines[second] = lines[second], lines[first]
    elif change == 3:
        lines[first] = lines[first] * rng.choice((2, 2000))
    else:
        values = (
            b"..",
            b"/etc/hostname",
            b"LIST",
            b"%03d",
            b"none",
            b"\0",
            b"\xff\xfe",
            b"a" * 300,
        )
        lines[first] = lines[first].rpartition(b" ")[0] + b" " + rng.choice(values)
    data[:] = b"\n".join(lines)


MUTATORS: dict[str, tuple[Mutator, ...]] = {
    "dicom": (*ANYWHERE, *[change_element] * 9),
    "nifti": (*ANYWHERE, set_length, set_length),
    "nrrd": (*ANYWHERE, *[change_number] * 6, *[change_line] * 5),
    "mha": (*ANYWHERE, *[change_number] * 6, *[change_line] * 5),
    "stream": ANYWHERE,
}


def damaged(kind: str, number: int) -> Seed:
    """Return the scan with this number: one of the kind's, with one file damaged or all."""
    rng = random.Random(f"{kind} {number}")
    seed = rng.choice(seeds(kind))
    alike = rng.random() < 0.3  # the same damage to each file: they still fit each other
    names = seed.targets if alike else (rng.choice(seed.targets),)
    state, count = rng.getstate(), rng.choice((1, 1, 1, 2, 3))
    files = dict(seed.files)
    for name in names:
        rng.setstate(state)
        rng.random()
        if name.endswith(".gz") and rng.random() < 0.7:  # what is packed, and not the packing
            inner = _damaged_file(kind, gzip.decompress(files[name]), count, rng)
            files[name] = gzip.compress(inner, mtime=0)
        else:
            files[name] = _damaged_file(kind, files[name], count, rng)
    return Seed(files, names)


def _damaged_file(kind: str, whole: bytes, count: int, rng: random.Random) -> bytes:
    at = whole.rfind(PIXEL_DATA) + 12 if kind == "stream" else 0  # only what decoders see
    data = bytearray(whole[at:])
    for _ in range(count):
        if len(data) > 4:
            rng.choice(MUTATORS[kind])(data, rng)
    return whole[:at] + bytes(data)
