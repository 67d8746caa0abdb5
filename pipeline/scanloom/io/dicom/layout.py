"""Elements as they stood in a file before, to be compared all at once with the next one's.

Slices of a series have the same elements; a few have values of other lengths. Equal heads at equal
distances mean that walking over them would go the same way. Most values are equal too: they are
compared with the heads, and only the others are taken out.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from scanloom.io.dicom.elements import MEDIA_CLASS, STEADY, Common, common_of

MOST_PARTS = 64
"""Elements of changing length; a file with more is like no other."""

STEADY_TAGS = frozenset(STEADY)
_WORD = 8


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


class _Bytes:
    """Bytes of files at given places, taken out as a number of words with zeros elsewhere."""

    def __init__(self, places: Sequence[int]) -> None:
        self._count = -(-(max(places) + 1) // _WORD)
        mask = np.zeros(self._count * _WORD, np.uint8)
        mask[list(places)] = 0xFF
        self._mask = mask.view(np.uint64)

    def of(self, data: bytes, place: int) -> bytes:
        """Return them, counted from `place`; struct.error if `data` ends before."""
        if len(data) < place + self._count * _WORD:
            raise struct.error
        return (np.frombuffer(data, np.uint64, self._count, place) & self._mask).tobytes()


class Part:
    """Elements one behind the other.

    Parameters
    ----------
    heads : sequence of Head
        With their places in the file that was walked over.
    data : bytes
        That file.
    follows : int
        What is kept of the element behind them, as in `Head`.

    Attributes
    ----------
    size : int
        Bytes from the first head to the end of the last value.
    tags : tuple of int
        Of the values that are kept and differ from file to file.
    take : function of (bytes, place)
        Gives these values.
    """

    def __init__(self, heads: Sequence[Head], data: bytes, follows: int) -> None:
        self.follows = follows
        self.size = heads[-1].end - heads[0].place if heads else 0
        begin = heads[0].place if heads else 0
        own = [head for head in heads if head.kept and head.kept not in STEADY_TAGS]
        steady = [head for head in heads if head.kept in STEADY_TAGS]
        self.tags, self.take = _taker(own, begin)
        self._steady, self._take_steady = _taker(steady, begin)
        if heads:
            places = [n - begin for head in heads for n in range(head.place, head.start)]
            values = [n - begin for head in steady for n in range(head.start, head.end)]
            self._heads, self._all = _Bytes(places), _Bytes(places + values)
            self._wanted_heads = self._heads.of(data, begin)
        self._wanted = b""

    def is_same(self, data: bytes, place: int) -> bool:
        """Whether the same heads and steady values stand there; struct.error if `data` ends."""
        return not self.size or self._all.of(data, place) == self._wanted

    def stands_at(self, data: bytes, place: int) -> bool:
        """Whether the same heads stand there."""
        return self._heads.of(data, place) == self._wanted_heads

    def learn(self, data: bytes, place: int) -> dict[int, bytes]:
        """Take the steady values that stand there for those of the next files too."""
        self._wanted = self._all.of(data, place)
        return dict(zip(self._steady, self._take_steady(data, place), strict=True))


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
        self._data, self._heads, self._size = data, heads, size
        ends = [n for n, head in enumerate(heads) if not head.steady]
        firsts = [0, *(n + 1 for n in ends[:-1])]
        self._spans = tuple(zip(firsts, ends, strict=True))
        self.parts = tuple(self._part(*span) for span in self._spans)
        self._steady: dict[int, bytes] = {}
        self._common: Common | None = None

    def common(self, syntax: str, little: bool, media_class: bytes | None) -> Common:
        """Return what the last file shares with others, including what its meta header says."""
        now = self._common
        if now is None or now.syntax != syntax or now.values.get(MEDIA_CLASS) != media_class:
            values = {**self._steady, MEDIA_CLASS: media_class}
            now = self._common = common_of(syntax, little, tuple(map(values.get, STEADY)))
        return now

    def learn(self, values: dict[int, bytes]) -> None:
        """Take steady values of a file for those of the next ones too."""
        if any(self._steady.get(tag) != value for tag, value in values.items()):
            self._common = None
        self._steady.update(values)

    def fit(self, number: int, data: bytes, place: int) -> bool:
        """Make a part fit that does not stand at `place` of `data`; False if nothing would."""
        part = self.parts[number]
        if part.stands_at(data, place):
            self.learn(part.learn(data, place))
            return True
        return self._split(number, data, place)

    def _split(self, number: int, data: bytes, place: int) -> bool:
        """Take the first head that differs as that of a changing value.

        False if it is another element, or if too many values change.
        """
        first, end = self._spans[number]
        moved = place - self._heads[first].place
        for differs in range(first, end):
            head = self._heads[differs]
            before = self._data[head.place : head.start]
            here = data[head.place + moved : head.start + moved]
            if here != before:
                break
        if here[: self._size] != before[: self._size] or len(self.parts) >= MOST_PARTS:
            return False
        spans = ((first, differs), (differs + 1, end))
        self._spans = (*self._spans[:number], *spans, *self._spans[number + 1 :])
        made = tuple(self._part(*span) for span in spans)
        self.parts = (*self.parts[:number], *made, *self.parts[number + 1 :])
        return True

    def _part(self, first: int, end: int) -> Part:
        return Part(self._heads[first:end], self._data, self._heads[end].kept)


def _taker(heads: Sequence[Head], begin: int) -> tuple[tuple[int, ...], Any]:
    """Return the tags, and a function of (bytes, place) that gives all values in one go."""
    form, place = "", begin
    for head in heads:
        form += f"{head.start - place}x{head.end - head.start}s"
        place = head.end
    return tuple(head.kept for head in heads), struct.Struct(form).unpack_from
