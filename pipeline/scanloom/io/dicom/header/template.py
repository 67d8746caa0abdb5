"""Template of the previous header, against which the next one is compared all at once.

Slices of a series have the same elements; a few have values of other lengths. If the heads of all
elements are equal at equal distances, walking over them would take the same steps. Most values are
equal too: they are compared together with the heads, and only the others are extracted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from scanloom.io.dicom import tags
from scanloom.io.dicom.header.byte_order import LITTLE, ByteOrder
from scanloom.io.dicom.header.elements import PER_SERIES_TAGS, SharedElements, intern_shared

MAX_SEGMENTS = 64
"""Segments of a template, at most: files that differ in more elements are not alike."""
LONG_VALUE_BYTES = 4096
"""Longer values are stepped over one by one, rather than masked."""

PER_SERIES_TAG_SET = frozenset(PER_SERIES_TAGS)
_MASK_WORD_BYTES = 8
_TAG_BYTES, _TAG_AND_VR_BYTES = 4, 6
_META_GROUP = b"\x02\0"


class ElementSpan(NamedTuple):
    """Location of an element in the file that was walked over.

    Parameters
    ----------
    offset, value_start, value_end : int
        Start of the head, start and end of the value.
    kept_tag : int
        Its tag if the value is kept, else 0; or a stand-in as in `ByteOrder.kept`.
    has_length : bool
        Whether the length in the head is enough to step over the value.
    """

    offset: int
    value_start: int
    value_end: int
    kept_tag: int
    has_length: bool

    @property
    def fixed_end(self) -> int:
        """End of the bytes that all files share: the transfer syntax itself is among them."""
        return self.value_end if self.kept_tag == tags.TRANSFER_SYNTAX_UID else self.value_start


class _ByteMask:
    """Selection of bytes of a file at given distances from an offset.

    They are read as 64-bit words in which all other bytes are zero.
    """

    def __init__(self, distances: Sequence[int]) -> None:
        self._count = -(-(max(distances) + 1) // _MASK_WORD_BYTES)
        mask = np.zeros(self._count * _MASK_WORD_BYTES, np.uint8)
        mask[list(distances)] = 0xFF
        self._mask = mask.view(np.uint64)

    def extract(self, data: bytes, offset: int) -> bytes:
        """Return the selected bytes, counted from `offset`; struct.error if `data` is too short."""
        if len(data) < offset + self._count * _MASK_WORD_BYTES:
            raise struct.error
        return (np.frombuffer(data, np.uint64, self._count, offset) & self._mask).tobytes()


def can_be_template(heads: Sequence[ElementSpan]) -> bool:
    """Return whether a template may be made: no value is kept twice, and none of them is long.

    Of two elements with one tag the last one counts, which a comparison by segments would miss.
    """
    kept = [head for head in heads if head.kept_tag]
    if any(
        head.kept_tag > 0 and head.value_end - head.value_start > LONG_VALUE_BYTES for head in kept
    ):
        return False
    return len({head.kept_tag for head in kept}) == len(kept)


class TemplateSegment:
    """Segment of a template: consecutive elements, and the single element that follows them.

    Parameters
    ----------
    heads : sequence of ElementSpan
        Elements of the segment, in the file that was walked over.
    data : bytes
        That file.
    following : ElementSpan
        The element after the segment.
    order : ByteOrder
        Byte order of the following element.
    explicit : bool
        Whether the following element has a VR.

    Attributes
    ----------
    size : int
        Bytes from the first head to the end of the last value.
    tags : tuple of int
        Tags of the kept values that differ from file to file.
    unpack : function of (bytes, offset)
        Returns these values.
    next_name : bytes
        Tag of the following element, with its VR if it has one.
    next_tag : int
        `kept_tag` of the following element.
    """

    def __init__(
        self,
        heads: Sequence[ElementSpan],
        data: bytes,
        following: ElementSpan,
        order: ByteOrder,
        *,
        explicit: bool,
    ) -> None:
        self.next_tag, self.order, self.explicit = following.kept_tag, order, explicit
        name_size = _TAG_AND_VR_BYTES if explicit else _TAG_BYTES
        self.next_name = data[following.offset : following.offset + name_size]
        self.size = sum(head.value_end - head.offset for head in heads)
        begin = following.offset - self.size
        steady = [head for head in heads if head.kept_tag in PER_SERIES_TAG_SET]
        not_own = PER_SERIES_TAG_SET | {0, tags.TRANSFER_SYNTAX_UID}
        own = [head for head in heads if head.kept_tag not in not_own]
        self.tags, self.unpack = _unpacker(own, begin)
        self._steady_tags, self._unpack_steady = _unpacker(steady, begin)
        if heads:
            fixed = [n - begin for h in heads for n in range(h.offset, h.fixed_end)]
            values = [n - begin for h in steady for n in range(h.value_start, h.value_end)]
            self._heads_mask, self._mask = _ByteMask(fixed), _ByteMask(fixed + values)
            self._expected_heads = self._heads_mask.extract(data, begin)
        self._expected = b""

    def is_same(self, data: bytes, offset: int) -> bool:
        """Return whether heads and shared values are equal; struct.error if `data` is too short."""
        return not self.size or self._mask.extract(data, offset) == self._expected

    def has_same_heads(self, data: bytes, offset: int) -> bool:
        """Return whether the heads of all elements are equal."""
        return self._heads_mask.extract(data, offset) == self._expected_heads

    def learn(self, data: bytes, offset: int) -> dict[int, bytes]:
        """Expect the shared values at `offset` of the next files too, and return them by tag."""
        self._expected = self._mask.extract(data, offset)
        values = self._unpack_steady(data, offset)
        return dict(zip(self._steady_tags, values, strict=True))


class HeaderTemplate:
    """Template of a header: segments, each followed by one element of changing or great length.

    Parameters
    ----------
    data : bytes
        The file that was walked over.
    heads : sequence of ElementSpan
        Its elements, with those of the meta header; the last one holds the pixels.
    order : ByteOrder
        Byte order after the meta header.
    syntax : str
        Transfer syntax UID.
    explicit : bool
        Whether elements after the meta header have VRs.

    Attributes
    ----------
    begin : int
        Offset of the first element.
    parts : tuple of TemplateSegment
        The segments.
    """

    def __init__(
        self,
        data: bytes,
        heads: Sequence[ElementSpan],
        order: ByteOrder,
        syntax: str,
        *,
        explicit: bool,
    ) -> None:
        self._data, self._heads = data, heads
        self._order, self._syntax, self._explicit = order, syntax, explicit
        self.begin = heads[0].offset
        ends = [
            n
            for n, head in enumerate(heads)
            if not head.has_length or head.value_end - head.value_start > LONG_VALUE_BYTES
        ]
        firsts = [0, *(n + 1 for n in ends[:-1])]
        self._spans = tuple(zip(firsts, ends, strict=True))
        self.parts = tuple(self._make_segment(*span) for span in self._spans)
        self._steady_values: dict[int, bytes] = {}
        self._common: SharedElements | None = None

    @property
    def common(self) -> SharedElements:
        """Values that the last file shares with others."""
        if self._common is None:
            values = tuple(map(self._steady_values.get, PER_SERIES_TAGS))
            self._common = intern_shared(self._syntax, self._order.little, values)
        return self._common

    def learn(self, values: dict[int, bytes]) -> None:
        """Expect the shared values of a file, by tag, in the next ones too."""
        if any(self._steady_values.get(tag) != value for tag, value in values.items()):
            self._common = None
        self._steady_values.update(values)

    def fit(self, number: int, data: bytes, offset: int) -> bool:
        """Adapt the segment with this number to a file in which it is not the same.

        Parameters
        ----------
        number : int
            Index of the segment.
        data : bytes
            The file.
        offset : int
            Start of the segment in the file.

        Returns
        -------
        bool
            False if the segment cannot be adapted.
        """
        segment = self.parts[number]
        if segment.has_same_heads(data, offset):
            self.learn(segment.learn(data, offset))
            return True
        return self._split(number, data, offset)

    def _split(self, number: int, data: bytes, offset: int) -> bool:
        """Split a segment at the first head that differs, as that of a value of changing length.

        Return False if it is another element, or if there are too many segments.
        """
        first, end = self._spans[number]
        shift = offset - self._heads[first].offset
        for differing in range(first, end):
            head = self._heads[differing]
            expected = self._data[head.offset : head.fixed_end]
            actual = data[head.offset + shift : head.fixed_end + shift]
            if actual != expected:
                break
        name_size = _TAG_AND_VR_BYTES if self._is_explicit(differing) else _TAG_BYTES
        if (
            actual[:name_size] != expected[:name_size]
            or head.kept_tag == tags.TRANSFER_SYNTAX_UID
            or len(self.parts) >= MAX_SEGMENTS
        ):
            return False
        spans = ((first, differing), (differing + 1, end))
        self._spans = (*self._spans[:number], *spans, *self._spans[number + 1 :])
        segments = tuple(self._make_segment(*span) for span in spans)
        self.parts = (*self.parts[:number], *segments, *self.parts[number + 1 :])
        return True

    def _make_segment(self, first: int, end: int) -> TemplateSegment:
        explicit, order = self._is_explicit(end), LITTLE if self._is_meta(end) else self._order
        return TemplateSegment(
            self._heads[first:end], self._data, self._heads[end], order, explicit=explicit
        )

    def _is_explicit(self, number: int) -> bool:
        return self._explicit or self._is_meta(number)

    def _is_meta(self, number: int) -> bool:
        """Return whether an element is in the meta header, which is explicit little endian."""
        offset = self._heads[number].offset
        return self._data[offset : offset + 2] == _META_GROUP


def _unpacker(heads: Sequence[ElementSpan], begin: int) -> tuple[tuple[int, ...], Any]:
    """Return the tags, and a function of (bytes, offset) that returns all values at once."""
    form, offset = "", begin
    for head in heads:
        form += f"{head.value_start - offset}x{head.value_end - head.value_start}s"
        offset = head.value_end
    return tuple(head.kept_tag for head in heads), struct.Struct(form).unpack_from
