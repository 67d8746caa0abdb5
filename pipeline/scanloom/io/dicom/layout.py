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

from scanloom.io.dicom import tags
from scanloom.io.dicom.byte_order import LITTLE, ByteOrder
from scanloom.io.dicom.elements import STEADY, Common, common_of

MOST_PARTS = 64
"""Elements of changing length; a file with more is like no other."""

LONG = 4096
"""Bytes of a value that is rather stepped over than masked."""

STEADY_TAGS = frozenset(STEADY)
_WORD = 8
_TAG, _NAME = 4, 6  # bytes of a head that name the element: tag, and VR if there is one
_META_GROUP = b"\x02\0"


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

    @property
    def fixed(self) -> int:
        """Where what all files have in common ends: the syntax tells how they are to be read."""
        return self.end if self.kept == tags.TRANSFER_SYNTAX_UID else self.start


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


def is_plain(heads: Sequence[Head]) -> bool:
    """Whether a layout may be made of them: no value is kept twice, and none is long.

    Of two the last one counts, which parts that are compared one by one would not know.
    """
    kept = [head for head in heads if head.kept]
    if any(head.kept > 0 and head.end - head.start > LONG for head in kept):
        return False
    return len({head.kept for head in kept}) == len(kept)


class Part:
    """Elements one behind the other.

    Parameters
    ----------
    heads : sequence of Head
        With their places in the file that was walked over.
    data : bytes
        That file.
    behind : Head
        The element behind them.
    order : ByteOrder
    explicit : bool
        How that one is written.

    Attributes
    ----------
    size : int
        Bytes from the first head to the end of the last value.
    tags : tuple of int
        Of the values that are kept and differ from file to file.
    take : function of (bytes, place)
        Gives these values.
    follows : bytes
        The name of the element behind them.
    kept : int
        What is kept of it, as in `Head`.
    """

    def __init__(
        self, heads: Sequence[Head], data: bytes, behind: Head, order: ByteOrder, *, explicit: bool
    ) -> None:
        self.kept, self.order, self.explicit = behind.kept, order, explicit
        self.follows = data[behind.place : behind.place + (_NAME if explicit else _TAG)]
        begin = behind.place - sum(head.end - head.place for head in heads)
        self.size = behind.place - begin
        steady = [head for head in heads if head.kept in STEADY_TAGS]
        own = [
            h
            for h in heads
            if h.kept not in (0, tags.TRANSFER_SYNTAX_UID) and h.kept not in STEADY_TAGS
        ]
        self.tags, self.take = _taker(own, begin)
        self._steady, self._take_steady = _taker(steady, begin)
        if heads:
            fixed = [n - begin for h in heads for n in range(h.place, h.fixed)]
            values = [n - begin for head in steady for n in range(head.start, head.end)]
            self._heads, self._all = _Bytes(fixed), _Bytes(fixed + values)
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
    """Parts, with one changing or long element between two of them and behind the last one.

    Parameters
    ----------
    data : bytes
        The file that was walked over.
    heads : sequence of Head
        Its elements, those of the meta header too; the last one holds the pixels.
    order : ByteOrder
    syntax : str
        Transfer syntax UID.
    explicit : bool
        How elements behind the meta header are written.

    Attributes
    ----------
    begin : int
        Where the first element is.
    parts : tuple of Part
    """

    def __init__(
        self, data: bytes, heads: Sequence[Head], order: ByteOrder, syntax: str, *, explicit: bool
    ) -> None:
        self._data, self._heads = data, heads
        self._order, self._syntax, self._explicit = order, syntax, explicit
        self.begin = heads[0].place
        ends = [n for n, h in enumerate(heads) if not h.steady or h.end - h.start > LONG]
        firsts = [0, *(n + 1 for n in ends[:-1])]
        self._spans = tuple(zip(firsts, ends, strict=True))
        self.parts = tuple(self._part(*span) for span in self._spans)
        self._steady: dict[int, bytes] = {}
        self._common: Common | None = None

    @property
    def common(self) -> Common:
        """What the last file shares with others."""
        if self._common is None:
            found = tuple(map(self._steady.get, STEADY))
            self._common = common_of(self._syntax, self._order.little, found)
        return self._common

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
            before = self._data[head.place : head.fixed]
            here = data[head.place + moved : head.fixed + moved]
            if here != before:
                break
        name = _NAME if self._is_explicit(differs) else _TAG
        if (
            here[:name] != before[:name]
            or head.kept == tags.TRANSFER_SYNTAX_UID
            or len(self.parts) >= MOST_PARTS
        ):
            return False
        spans = ((first, differs), (differs + 1, end))
        self._spans = (*self._spans[:number], *spans, *self._spans[number + 1 :])
        made = tuple(self._part(*span) for span in spans)
        self.parts = (*self.parts[:number], *made, *self.parts[number + 1 :])
        return True

    def _part(self, first: int, end: int) -> Part:
        explicit, order = self._is_explicit(end), LITTLE if self._is_meta(end) else self._order
        return Part(self._heads[first:end], self._data, self._heads[end], order, explicit=explicit)

    def _is_explicit(self, number: int) -> bool:
        return self._explicit or self._is_meta(number)

    def _is_meta(self, number: int) -> bool:
        """Whether an element is of the meta header, which is explicit little endian."""
        place = self._heads[number].place
        return self._data[place : place + 2] == _META_GROUP


def _taker(heads: Sequence[Head], begin: int) -> tuple[tuple[int, ...], Any]:
    """Return the tags, and a function of (bytes, place) that gives all values in one go."""
    form, place = "", begin
    for head in heads:
        form += f"{head.start - place}x{head.end - head.start}s"
        place = head.end
    return tuple(head.kept for head in heads), struct.Struct(form).unpack_from
