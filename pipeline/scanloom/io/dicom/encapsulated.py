"""Where the frames of encapsulated pixel data lie (DICOM PS3.5 A.4)."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scanloom.core import Reason, ScanError
from scanloom.io.dicom.planes import Plane
from scanloom.io.dicom.sources import Source

SLACK = 1 << 20
"""Bytes by which a compressed frame may be larger than twice its samples."""

_ITEM = b"\xfe\xff\x00\xe0"
_STARTS = (b"\xff\xd8", b"\xff\x4f\xff\x51")
"""First marker of JPEG and JPEG-LS, and of JPEG 2000."""
_END = b"\xff\xd9"
"""Last marker of all of them; a zero may follow, to an even length."""


@dataclass(frozen=True)
class Fragment:
    """A piece of pixel data: its place in the file."""

    start: int
    length: int


Frames = tuple[tuple[Fragment, ...], ...]


def find_frames(plane: Plane, source: Source) -> Frames:
    """Return the fragments of every frame of a file.

    A frame may have several fragments. Where each begins is told by the basic offset table, else
    by one fragment a frame (which an extended offset table demands), else by JPEG's first marker.
    A file of one frame that holds several is refused.

    Raises
    ------
    ScanError
        TRUNCATED or DAMAGED.
    """
    table, fragments = _fragments(plane, source)
    if not fragments:
        raise ScanError(Reason.DAMAGED, "a slice has no pixels")
    if plane.frames == 1:
        if _ends_before_last(source, fragments):
            raise ScanError(Reason.DAMAGED, "the file holds more pixels than its header says")
        return (tuple(fragments),)
    if len(fragments) == plane.frames:
        return tuple((one,) for one in fragments)
    if len(fragments) < plane.frames:
        raise ScanError(Reason.TRUNCATED, "a file has fewer frames than it says")
    for begins in (_by_table(table, fragments), _by_markers(source, fragments)):
        if len(begins) == plane.frames and begins[0] == 0:
            ends = [*begins[1:], len(fragments)]
            return tuple(tuple(fragments[a:b]) for a, b in zip(begins, ends, strict=True))
    raise ScanError(Reason.DAMAGED, "nothing tells where the frames of a file begin")


def read_frame(plane: Plane, source: Source, fragments: Sequence[Fragment]) -> bytes:
    """Return one compressed frame, its fragments joined.

    Raises
    ------
    ScanError
        TRUNCATED or DAMAGED.
    """
    size = sum(one.length for one in fragments)
    if size > 2 * plane.count * plane.dtype.itemsize + SLACK:
        raise ScanError(Reason.DAMAGED, "a slice is larger compressed than it can be")
    frame = b"".join(source.read(one.start, one.length) for one in fragments)
    if len(frame) < size:
        raise ScanError(Reason.TRUNCATED, "a slice ends in the middle of its pixels")
    return frame


def _fragments(plane: Plane, source: Source) -> tuple[bytes, list[Fragment]]:
    """Return the basic offset table, and the fragments behind it."""
    if plane.length is not None:
        raise ScanError(Reason.DAMAGED, "compressed pixels are not encapsulated")
    items: list[Fragment] = []
    at = plane.offset
    while True:
        head = source.read(at, 8)
        if len(head) < 8 or head[:4] != _ITEM:
            break
        (length,) = struct.unpack("<I", head[4:])
        at += 8 + length
        if at > source.size:
            raise ScanError(Reason.TRUNCATED, "a slice ends in the middle of its pixels")
        items.append(Fragment(at - length, length))
    if not items:
        cut = len(head) < 8
        raise ScanError(Reason.TRUNCATED if cut else Reason.DAMAGED, "the pixels are no fragments")
    table = source.read(items[0].start, items[0].length)
    if table and (len(table) % 4 or any(table[:4])):  # no table: some writers leave its item away
        return b"", items
    return table, [one for one in items[1:] if one.length]


def _by_table(table: bytes, fragments: Sequence[Fragment]) -> list[int]:
    """Return the numbers of the first fragments by the basic offset table, which may be wrong."""
    origin = fragments[0].start
    numbers = {one.start - origin: n for n, one in enumerate(fragments)}
    offsets = np.frombuffer(table[: len(table) & ~3], "<u4").tolist()
    begins = [numbers.get(offset, -1) for offset in offsets]
    rising = all(a < b for a, b in itertools.pairwise(begins))
    return begins if rising and -1 not in begins else []


def _by_markers(source: Source, fragments: Sequence[Fragment]) -> list[int]:
    starts = [source.read(one.start, 4) for one in fragments]
    return [n for n, start in enumerate(starts) if start.startswith(_STARTS)]


def _ends_before_last(source: Source, fragments: Sequence[Fragment]) -> bool:
    """Whether an image ends with a fragment, and another one begins with the next."""
    for one, other in itertools.pairwise(fragments):
        end = source.read(one.start + max(0, one.length - 3), 3).rstrip(b"\0")
        if end.endswith(_END) and source.read(other.start, 4).startswith(_STARTS):
            return True
    return False
