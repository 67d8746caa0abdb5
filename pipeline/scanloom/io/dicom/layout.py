"""Heads of elements as they stood in a file before, to be compared all at once with the next one's.

Slices of a series have the same elements; a few have values of other lengths. Equal heads at equal
distances mean that walking over them would go the same way.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MOST_PARTS = 64
"""Elements of changing length; a file with more is like no other."""


class Head(NamedTuple):
    """An element of the file that was walked over.

    Parameters
    ----------
    place, start, end : int
        Where its head and value begin, and where its value ends.
    kept : int
        Its tag, where the value is kept; 0 for others.
    steady : bool
        Whether it may be passed over by its length.
    """

    place: int
    start: int
    end: int
    kept: int
    steady: bool


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Elements one behind the other.

    Parameters
    ----------
    unpack : function of (bytes, place)
        Gives the bytes of all heads.
    heads : tuple of bytes
        What they must be.
    size : int
        From the first head to the end of the last value.
    tags : tuple of int
        Of the values that are kept.
    take : function of (bytes, place)
        Gives these values.
    """

    unpack: Any
    heads: tuple[bytes, ...]
    size: int
    tags: tuple[int, ...]
    take: Any


class Layout:
    """Parts, with one changing element between two of them and behind the last one.

    Parameters
    ----------
    data : bytes
        The file that was walked over.
    heads : sequence of Head
        Its elements; the last one holds the pixels.
    size : int
        Bytes of a head that name the element: tag, and VR where there is one.
    """

    def __init__(self, data: bytes, heads: Sequence[Head], size: int) -> None:
        self._heads = heads
        self._bytes = [data[head.place : head.start] for head in heads]
        self._size = size
        ends = [n for n, head in enumerate(heads) if not head.steady]
        firsts = [0, *(n + 1 for n in ends[:-1])]
        self._spans = tuple(zip(firsts, ends, strict=True))
        self.parts = tuple(self._part(*span) for span in self._spans)

    def split(self, number: int, data: bytes, place: int) -> tuple[Part, ...]:
        """Take the first head that differs as that of a changing value, and return the new parts.

        Parameters
        ----------
        number : int
            Of the part that does not stand at `place` of `data`.

        Returns
        -------
        tuple of Part
            Empty if it is another element, or if too many values change.
        """
        part, (first, end) = self.parts[number], self._spans[number]
        both = zip(part.unpack(data, place), part.heads, strict=True)
        differs, (here, before) = next((n, p) for n, p in enumerate(both) if p[0] != p[1])
        if here[: self._size] != before[: self._size] or len(self.parts) >= MOST_PARTS:
            return ()
        middle = first + differs
        spans = ((first, middle), (middle + 1, end))
        self._spans = (*self._spans[:number], *spans, *self._spans[number + 1 :])
        made = tuple(self._part(*span) for span in spans)
        self.parts = (*self.parts[:number], *made, *self.parts[number + 1 :])
        return self.parts

    def _part(self, first: int, end: int) -> Part:
        heads = self._heads[first:end]
        if not heads:
            return Part(_nothing, (), 0, (), _nothing)
        begin = heads[0].place
        form = "".join(f"{h.start - h.place}s{h.end - h.start}x" for h in heads[:-1])
        form += f"{heads[-1].start - heads[-1].place}s"
        return Part(
            unpack=struct.Struct(form).unpack_from,
            heads=tuple(self._bytes[first:end]),
            size=heads[-1].end - begin,
            tags=tuple(h.kept for h in heads if h.kept),
            take=_taker([(h.start - begin, h.end - begin) for h in heads if h.kept]),
        )


def _taker(spans: Sequence[tuple[int, int]]) -> Any:
    """Return a function of (bytes, place) that gives what stands at all spans, in one go."""
    form, place = "", 0
    for start, end in spans:
        form += f"{start - place}x{end - start}s"
        place = end
    return struct.Struct(form).unpack_from


def _nothing(data: bytes, place: int) -> tuple[bytes, ...]:
    return ()
