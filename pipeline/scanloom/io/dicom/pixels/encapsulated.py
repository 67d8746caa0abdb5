"""Locate the frames of encapsulated pixel data (DICOM PS3.5 A.4)."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scanloom.core import Reason, ScanError
from scanloom.io.dicom.pixels.byte_source import ByteSource
from scanloom.io.dicom.pixels.frame import FrameRef

MAX_OVERHEAD_BYTES = 1 << 20
"""Bytes by which a compressed frame may exceed twice the size of its samples."""

_ITEM_TAG = b"\xfe\xff\x00\xe0"
_START_MARKERS = (b"\xff\xd8", b"\xff\x4f\xff\x51")
"""First marker of JPEG and JPEG-LS, and first two markers of JPEG 2000."""
_END_MARKER = b"\xff\xd9"
"""Last marker of all three; a zero byte may pad it to an even length."""


@dataclass(frozen=True)
class Fragment:
    """A fragment of encapsulated pixel data: its position in the file, in bytes."""

    start: int
    length: int


FrameTable = tuple[tuple[Fragment, ...], ...]


def locate_frames(frame: FrameRef, source: ByteSource) -> FrameTable:
    """Return the fragments of every frame of a file.

    With one fragment per frame, as an extended offset table requires, each fragment is a frame.
    Otherwise the starts of the frames come from the basic offset table, else from JPEG's first
    marker.
    A file with several images, but one frame by its header, is refused.

    Raises
    ------
    ScanError
        TRUNCATED or DAMAGED.
    """
    table, fragments = _fragments(frame, source)
    if not fragments:
        raise ScanError(Reason.DAMAGED, "a slice has no pixels")
    if frame.frames == 1:
        if _has_second_image(source, fragments):
            raise ScanError(Reason.DAMAGED, "the file holds more pixels than its header describes")
        return (tuple(fragments),)
    if len(fragments) == frame.frames:
        return tuple((fragment,) for fragment in fragments)
    if len(fragments) < frame.frames:
        raise ScanError(Reason.TRUNCATED, "a file has fewer frames than its header describes")
    for starts in (
        _starts_by_table(table, fragments),
        _starts_by_marker(source, fragments),
    ):
        if len(starts) == frame.frames and starts[0] == 0:
            ends = [*starts[1:], len(fragments)]
            return tuple(tuple(fragments[a:b]) for a, b in zip(starts, ends, strict=True))
    raise ScanError(Reason.DAMAGED, "the frames of a file can't be distinguished")


def join_fragments(frame: FrameRef, source: ByteSource, fragments: Sequence[Fragment]) -> bytes:
    """Return the bytes of one compressed frame, from its joined fragments.

    Raises
    ------
    ScanError
        TRUNCATED or DAMAGED.
    """
    size = sum(fragment.length for fragment in fragments)
    if size > 2 * frame.count * frame.dtype.itemsize + MAX_OVERHEAD_BYTES:
        raise ScanError(Reason.DAMAGED, "a compressed slice is implausibly large")
    encoded = b"".join(source.read(fragment.start, fragment.length) for fragment in fragments)
    if len(encoded) < size:
        raise ScanError(Reason.TRUNCATED, "a slice ends in the middle of its pixels")
    return encoded


def _fragments(frame: FrameRef, source: ByteSource) -> tuple[bytes, list[Fragment]]:
    """Return the basic offset table, possibly empty, and the fragments after it."""
    if frame.length is not None:
        raise ScanError(Reason.DAMAGED, "compressed pixels are not encapsulated")
    items: list[Fragment] = []
    position = frame.offset
    while True:
        item_header = source.read(position, 8)
        if len(item_header) < 8 or item_header[:4] != _ITEM_TAG:
            break
        (length,) = struct.unpack("<I", item_header[4:])
        position += 8 + length
        if position > source.size:
            raise ScanError(Reason.TRUNCATED, "a slice ends in the middle of its pixels")
        items.append(Fragment(position - length, length))
    if not items:
        reason = Reason.TRUNCATED if len(item_header) < 8 else Reason.DAMAGED
        raise ScanError(reason, "the pixel data have no fragments")
    table = source.read(items[0].start, items[0].length)
    if table and (len(table) % 4 or any(table[:4])):  # some writers omit the item of the table
        return b"", items
    return table, [fragment for fragment in items[1:] if fragment.length]


def _starts_by_table(table: bytes, fragments: Sequence[Fragment]) -> list[int]:
    """Return each frame's first fragment by the basic offset table; empty if that is wrong."""
    origin = fragments[0].start
    numbers = {fragment.start - origin: n for n, fragment in enumerate(fragments)}
    offsets = np.frombuffer(table[: len(table) & ~3], "<u4").tolist()
    starts = [numbers.get(offset, -1) for offset in offsets]
    rising = all(a < b for a, b in itertools.pairwise(starts))
    return starts if rising and -1 not in starts else []


def _starts_by_marker(source: ByteSource, fragments: Sequence[Fragment]) -> list[int]:
    markers = [source.read(fragment.start, 4) for fragment in fragments]
    return [n for n, marker in enumerate(markers) if marker.startswith(_START_MARKERS)]


def _has_second_image(source: ByteSource, fragments: Sequence[Fragment]) -> bool:
    """Whether an image ends with a fragment and a second image begins with the next."""
    for fragment, following in itertools.pairwise(fragments):
        end = source.read(fragment.start + max(0, fragment.length - 3), 3).rstrip(b"\0")
        if end.endswith(_END_MARKER) and source.read(following.start, 4).startswith(_START_MARKERS):
            return True
    return False
