"""What a compressed frame says of its own size, before a decoder believes it.

A size that was damaged makes decoders allocate gigabytes, or count for hours.
"""

from __future__ import annotations

import struct

_J2K = b"\xff\x4f\xff\x51"  # SOC and SIZ, which must follow it (ISO 15444-1 A.5.1)
_SIZ = struct.Struct(">2x2x8IH")
_SOF = struct.Struct(">xHHB")  # precision, lines, samples of a line, components (ISO 10918-1 B.2.2)
_MOST_TILES = 65535
_NO_LENGTH = (0x01, *range(0xD0, 0xD9))  # markers that stand alone
_FRAMES = {0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF, 0xF7}
"""Start of frame; 0xF7 is that of JPEG-LS."""


def says_other_size(frame: bytes, rows: int, columns: int) -> bool:
    """Whether a JPEG, JPEG-LS or JPEG 2000 frame names another size or several components.

    What names none is left to its decoder.
    """
    start = frame.find(_J2K, 0, 1 << 12)  # a JP2 container may be around it
    try:
        if start >= 0:
            return _j2k_differs(frame, start + len(_J2K), rows, columns)
        if frame[:2] == b"\xff\xd8":
            return _jpeg_differs(frame, rows, columns)
    except (struct.error, IndexError):  # cut off: its decoder will say so
        pass
    return False


def _j2k_differs(frame: bytes, at: int, rows: int, columns: int) -> bool:
    right, bottom, left, top, width, height, tile_left, tile_top, components = _SIZ.unpack_from(
        frame, at
    )
    if (bottom - top, right - left, components) != (rows, columns, 1):
        return True
    if not (width and height) or tile_left > left or tile_top > top:
        return True
    tiles = -(-(right - tile_left) // width) * -(-(bottom - tile_top) // height)
    return bool(tiles > _MOST_TILES)


def _jpeg_differs(frame: bytes, rows: int, columns: int) -> bool:
    at = 2
    while True:
        if frame[at] != 0xFF:
            return False
        marker = frame[at + 1]
        if marker == 0xFF:  # fill
            at += 1
        elif marker in _NO_LENGTH:
            at += 2
        elif marker in _FRAMES:
            lines, samples, components = _SOF.unpack_from(frame, at + 4)
            return samples != columns or lines not in (rows, 0) or components != 1
        else:
            at += 2 + struct.unpack_from(">H", frame, at + 2)[0]
