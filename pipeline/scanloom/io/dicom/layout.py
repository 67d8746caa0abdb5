"""Heads of elements as they stood in a file before, to be compared all at once with the next one's.

Slices of a series have the same elements; a few have values of other lengths. Equal heads at equal
distances mean that walking over them would go the same way.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    reach, size : int
        Bytes from the first head to the end of the last head, and of the last value.
    places : (N,) array
        Of all bytes of heads, from the first head.
    heads : bytes
        What they must be.
    tags : tuple of int
        Of the values that are kept.
    take : function of (bytes, place)
        Gives these values.
    """

    reach: int
    size: int
    places: NDArray[np.intp]
    heads: bytes
    tags: tuple[int, ...]
    take: Any

    def stands_at(self, data: bytes, place: int) -> bool:
        """Whether the same heads stand there; struct.error if `data` ends before."""
        if not self.reach:
            return True
        if len(data) < place + self.reach:
            raise struct.error
        found = np.frombuffer(data, np.uint8, self.reach, place).take(self.places)
        return found.tobytes() == self.heads


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
        first, end = self._spans[number]
        moved = place - self._heads[first].place
        for differs in range(first, end):
            head, before = self._heads[differs], self._bytes[differs]
            here = data[head.place + moved : head.start + moved]
            if here != before:
                break
        if here[: self._size] != before[: self._size] or len(self.parts) >= MOST_PARTS:
            return ()
        spans = ((first, differs), (differs + 1, end))
        self._spans = (*self._spans[:number], *spans, *self._spans[number + 1 :])
        made = tuple(self._part(*span) for span in spans)
        self.parts = (*self.parts[:number], *made, *self.parts[number + 1 :])
        return self.parts

    def _part(self, first: int, end: int) -> Part:
        heads = self._heads[first:end]
        begin = heads[0].place if heads else 0
        places = [n - begin for head in heads for n in range(head.place, head.start)]
        kept = [head for head in heads if head.kept]
        return Part(
            reach=heads[-1].start - begin if heads else 0,
            size=heads[-1].end - begin if heads else 0,
            places=np.array(places, np.intp),
            heads=b"".join(self._bytes[first:end]),
            tags=tuple(head.kept for head in kept),
            take=_taker([(head.start - begin, head.end - begin) for head in kept]),
        )


def _taker(spans: Sequence[tuple[int, int]]) -> Any:
    """Return a function of (bytes, place) that gives what stands at all spans, in one go."""
    form, place = "", 0
    for start, end in spans:
        form += f"{start - place}x{end - start}s"
        place = end
    return struct.Struct(form).unpack_from
