"""Streams that are packed as a whole: by gzip, zlib, bzip2, xz or zstd; read forward alone."""

from __future__ import annotations

import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from scanloom.core import Reason, ScanError
from scanloom.io.regular import open_regular

Packing = Literal["gzip", "zlib", "bzip2", "xz", "zstd"]

MOST_DICTIONARY = 128 << 20
"""Bytes that unpacking may keep of what came before: xz -9 and zstd --ultra keep 64 and 128 MiB."""

_MAGIC: dict[bytes, Packing] = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
_PIECE = 1 << 20


def packing_of(path: Path, start: int = 0) -> Packing | None:
    """Return what packed a file, by the magic number at byte `start`; None where nothing did.

    Raises
    ------
    OSError
        If it can't be read, or is no regular file.
    """
    with open_regular(path) as file:
        file.seek(start)
        return packing_of_start(file.read(6))


def packing_of_start(start: bytes) -> Packing | None:
    """Return what packed a file that starts with these bytes; None where nothing did."""
    return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)


@contextmanager
def opened_packed(
    file: BinaryIO, packing: Packing, length: int | None = None
) -> Iterator[BinaryIO]:
    """Open what follows in a file for reading forward, unpacked; gzip is inflated in a thread.

    Parameters
    ----------
    file : binary file
    packing : Packing
    length : int or None
        Bytes of the packed data, zlib alone; None: to the end of the file.
    """
    if packing == "gzip":
        from isal import igzip_threaded

        with igzip_threaded.open(file, "rb", threads=1, block_size=_PIECE) as stream:
            yield cast(BinaryIO, stream)
    elif packing == "zstd":
        with io.BufferedReader(_Zstd(file), _PIECE) as stream:
            yield cast(BinaryIO, stream)
    else:
        with io.BufferedReader(_Unpacked(file, packing, length), _PIECE) as stream:
            yield cast(BinaryIO, stream)


def unpacked_start(path: Path, size: int) -> bytes:
    """Return the first `size` bytes of a file, unpacked if it is packed; fewer if it has no more.

    Raises
    ------
    OSError
        If it can't be read, or is no regular file.
    """
    with open_regular(path) as file:
        packing = packing_of_start(file.peek(6)[:6])
        if packing is None:
            return file.read(size)
        with opened_packed(cast(BinaryIO, file), packing) as stream:
            return stream.read(size)


def _decompressor(packing: Packing) -> Any:
    """Return a decompressor as those of the standard library are, for one stream."""
    if packing == "bzip2":
        import bz2

        return bz2.BZ2Decompressor()
    if packing == "xz":
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MOST_DICTIONARY)
    from isal import igzip_lib

    return igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_ZLIB)


class _Unpacked(io.RawIOBase):
    """Streams of zlib (one), bzip2 or xz (one behind the other), which no library opens so."""

    def __init__(self, file: BinaryIO, packing: Packing, length: int | None) -> None:
        self._file, self._packing, self._left = file, packing, length
        self._state, self._rest = _decompressor(packing), b""

    def readable(self) -> bool:
        """Whether it can be read: yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Unpack into `buffer`; 0 at the end of the last stream."""
        while not self._state.eof or self._goes_on():
            piece = self._next() if self._state.needs_input else b""
            if self._state.needs_input and not piece:
                raise EOFError
            unpacked = self._state.decompress(piece, len(buffer))
            if unpacked:
                buffer[: len(unpacked)] = unpacked
                return len(unpacked)
        return 0

    def _goes_on(self) -> bool:
        """Whether another stream follows; zeros between those of xz fill up four bytes."""
        if self._packing == "zlib":
            return False
        rest = self._state.unused_data
        rest = rest.lstrip(b"\0") if self._packing == "xz" else rest
        while not rest and (piece := self._next()):
            rest = piece.lstrip(b"\0") if self._packing == "xz" else piece
        if not rest:
            return False
        self._state, self._rest = _decompressor(self._packing), rest
        return True

    def _next(self) -> bytes:
        if self._rest:  # read already, with the stream before
            piece, self._rest = self._rest, b""
            return piece
        piece = self._file.read(_PIECE if self._left is None else min(_PIECE, self._left))
        if self._left is not None:
            self._left -= len(piece)
        return piece


class _Zstd(io.RawIOBase):
    """Frames of zstd, which pyarrow unpacks: Python has it from 3.14 on."""

    def __init__(self, file: BinaryIO) -> None:
        import pyarrow as pa

        if not pa.Codec.is_available("zstd"):
            raise ScanError(Reason.DECODER, "this machine's pyarrow unpacks no zstd")
        self._stream = pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")

    def readable(self) -> bool:
        """Whether it can be read: yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Unpack into `buffer`; 0 at the end."""
        try:
            piece: bytes = self._stream.read(len(buffer))
        except OSError as exc:
            if "Truncated" in str(exc):
                raise EOFError from exc
            raise
        buffer[: len(piece)] = piece
        return len(piece)


def unpacking_errors() -> tuple[type[Exception], ...]:
    """Return what decompressors raise for damage, beside EOFError and OSError."""
    from isal import isal_zlib

    isal_error = cast(type[Exception], isal_zlib.error)  # its stub calls it a value
    return (zlib.error, lzma.LZMAError, isal_error)
