"""Check the size in a compressed frame against its header, before a decoder trusts it.

A damaged size makes decoders allocate gigabytes or loop for hours.
"""

from __future__ import annotations

import struct

_J2K_START = b"\xff\x4f\xff\x51"  # SOC, and SIZ which must follow (ISO 15444-1 A.5.1)
_SIZ_STRUCT = struct.Struct(">2x2x8IH")
_SOF_STRUCT = struct.Struct(">xHHB")
"""Lines, samples per line and components, after the precision (ISO 10918-1 B.2.2)."""
_MAX_TILES = 65535
_MARKERS_WITHOUT_LENGTH = (0x01, *range(0xD0, 0xD9))  # ISO 10918-1 B.1.1.3
_SOF_MARKERS = {0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF, 0xF7}
"""Start of frame (SOF) markers; 0xF7 is the one of JPEG-LS."""


def has_size_mismatch(frame: bytes, rows: int, columns: int) -> bool:
    """Whether a JPEG, JPEG-LS or JPEG 2000 frame has another size, or several components.

    A frame whose size can't be parsed is left to its decoder.
    """
    start = frame.find(_J2K_START, 0, 1 << 12)  # a JP2 container may precede it
    try:
        if start >= 0:
            return _j2k_contradicts(frame, start + len(_J2K_START), rows, columns)
        if frame[:2] == b"\xff\xd8":
            return _jpeg_contradicts(frame, rows, columns)
    except (struct.error, IndexError):  # truncated: the decoder will report it
        pass
    return False


def _j2k_contradicts(frame: bytes, position: int, rows: int, columns: int) -> bool:
    x_end, y_end, x_start, y_start, tile_width, tile_height, tile_x, tile_y, components = (
        _SIZ_STRUCT.unpack_from(frame, position)
    )
    if (y_end - y_start, x_end - x_start, components) != (rows, columns, 1):
        return True
    if not (tile_width and tile_height) or tile_x > x_start or tile_y > y_start:
        return True
    tiles = -(-(x_end - tile_x) // tile_width) * -(-(y_end - tile_y) // tile_height)
    return bool(tiles > _MAX_TILES)


def _jpeg_contradicts(frame: bytes, rows: int, columns: int) -> bool:
    position = 2
    while True:
        if frame[position] != 0xFF:
            return False
        marker = frame[position + 1]
        if marker == 0xFF:  # fill byte
            position += 1
        elif marker in _MARKERS_WITHOUT_LENGTH:
            position += 2
        elif marker in _SOF_MARKERS:
            lines, samples, components = _SOF_STRUCT.unpack_from(frame, position + 4)
            return samples != columns or lines not in (rows, 0) or components != 1
        else:
            position += 2 + struct.unpack_from(">H", frame, position + 2)[0]
