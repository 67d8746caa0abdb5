"""Parse headers by templates of previous files, which are cached in the reading session."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence

from scanloom.io.dicom.header.byte_order import STOP, ByteOrder
from scanloom.io.dicom.header.data_elements import pixel_data_location, read_element
from scanloom.io.dicom.header.elements import FLOAT_PIXELS, MODALITY_LUT_PRESENT, Elements
from scanloom.io.dicom.header.sequences import UnusualHeaderError
from scanloom.io.dicom.header.template import (
    PER_SERIES_TAG_SET,
    ElementSpan,
    HeaderTemplate,
    can_be_template,
)

_FILES_PER_TEMPLATE = 8
"""Files that fit no template until a new one is made: for mixed series, making a template of each
file would take longer than it saves."""


def _parse_by_template(data: bytes, template: HeaderTemplate) -> Elements | None:
    """Parse a file that is like previous ones; return None if it is not."""
    own: dict[int, bytes] = {}
    offset, number = template.begin, 0
    try:
        while True:
            segment = template.parts[number]
            if not segment.is_same(data, offset):
                if not template.fit(number, data, offset):
                    return None
                continue
            number += 1
            if segment.tags:
                own.update(zip(segment.tags, segment.unpack(data, offset), strict=True))
            offset += segment.size
            if not data.startswith(segment.next_name, offset):
                return None
            head = read_element(segment.order, data, offset, explicit=segment.explicit)
            if segment.next_tag == STOP:
                break
            if segment.next_tag in PER_SERIES_TAG_SET:
                template.learn({segment.next_tag: data[head.value_start : head.value_end]})
            elif segment.next_tag:
                own[segment.next_tag] = data[head.value_start : head.value_end]
            offset = head.value_end
    except (struct.error, UnusualHeaderError):  # no pixels, or more of the file has to be read
        return None
    lookup_table = bool(own.pop(MODALITY_LUT_PRESENT, b""))
    pixels = pixel_data_location(segment.order, data, head, explicit=segment.explicit)
    return Elements(
        template.common, own, lookup_table, pixels, faults=0 if pixels else FLOAT_PIXELS
    )


class TemplateCache:
    """Templates of the previous files, one for each encoding. Its lock is held during parsing."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._last: HeaderTemplate | None = None
        self._templates: dict[tuple[bool, bool], HeaderTemplate] = {}
        self._misses: dict[tuple[bool, bool], int] = {}

    def read(self, data: bytes) -> Elements | None:
        """Parse a file that is like the last one; return None if it is not."""
        return None if self._last is None else _parse_by_template(data, self._last)

    def read_other(self, data: bytes, little: bool, explicit: bool) -> Elements | None:
        """Parse a file that is like an earlier one with its encoding; return None if it is not."""
        template = self._templates.get((little, explicit))
        if template is None or template is self._last:
            return None
        elements = _parse_by_template(data, template)
        if elements is not None:
            self._last = template
        return elements

    def note(
        self,
        data: bytes,
        heads: Sequence[ElementSpan],
        order: ByteOrder,
        syntax: str,
        *,
        explicit: bool,
    ) -> None:
        """Make a template of a file that fits none, the first time and after several such files."""
        key = order.little, explicit
        self._misses[key] = self._misses.get(key, -1) + 1
        if self._misses[key] % _FILES_PER_TEMPLATE == 0 and can_be_template(heads):
            self._last = HeaderTemplate(data, heads, order, syntax, explicit=explicit)
            self._templates[key] = self._last
