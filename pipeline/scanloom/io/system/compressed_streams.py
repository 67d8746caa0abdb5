"""Streams compressed as a whole by gzip, zlib, bzip2, xz or zstd, for sequential reading."""

from __future__ import annotations

import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from scanloom.core import Reason, ScanError
from scanloom.io.system.regular_files import open_regular_file

Compression = Literal["gzip", "zlib", "bzip2", "xz", "zstd"]

MAX_DICTIONARY_BYTES = 128 << 20
"""Maximal size of a dictionary in bytes: xz -9 and zstd --ultra use 64 and 128 MiB."""

_MAGIC: dict[bytes, Compression] = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
_CHUNK_BYTES = 1 << 20


def compression_of(path: Path, start: int = 0) -> Compression | None:
    """Return the compression of a file, by the magic number at byte `start`, or None.

    Raises
    ------
    OSError
        If the file can't be read, or is not a regular file.
    """
    with open_regular_file(path) as file:
        file.seek(start)
        return compression_of_start(file.read(6))


def compression_of_start(start: bytes) -> Compression | None:
    """Return the compression of a file with these first bytes, or None."""
    return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)


@contextmanager
def open_decompressed(
    file: BinaryIO, packing: Compression, length: int | None = None
) -> Iterator[BinaryIO]:
    """Decompress the rest of a file as a sequential stream; gzip is inflated in a thread.

    Parameters
    ----------
    file : binary file
    packing : Compression
    length : int or None
        Compressed bytes, for zlib only; None up to the end of the file.
    """
    if packing == "gzip":
        from isal import igzip_threaded

        start = file.tell()
        try:
            with igzip_threaded.open(file, "rb", threads=1, block_size=_CHUNK_BYTES) as stream:
                yield cast(BinaryIO, stream)
        except EOFError:
            file.seek(start)
            _check_what_follows(file)
            raise
    else:
        raw = _Zstd(file) if packing == "zstd" else _Decompressed(file, packing, length)
        with io.BufferedReader(raw, _CHUNK_BYTES) as stream:
            yield cast(BinaryIO, stream)


def _check_what_follows(file: BinaryIO) -> None:
    """Raise OSError if other data follow gzip streams; igzip takes a few bytes for a cut header."""
    with suppress(EOFError), io.BufferedReader(_Decompressed(file, "gzip", None)) as stream:
        while stream.read(_CHUNK_BYTES):
            pass


def decompressed_start(path: Path, size: int) -> bytes:
    """Return the first `size` bytes of a file, decompressed; fewer if it is shorter.

    Raises
    ------
    OSError
        If the file can't be read, or is not a regular file.
    """
    with open_regular_file(path) as file:
        packing = compression_of_start(file.peek(6)[:6])
        if packing is None:
            return file.read(size)
        with open_decompressed(cast(BinaryIO, file), packing) as stream:
            return stream.read(size)


def _decompressor(packing: Compression) -> Any:
    """Return a decompressor for one stream, with the interface of `bz2.BZ2Decompressor`."""
    if packing == "bzip2":
        import bz2

        return bz2.BZ2Decompressor()
    if packing == "xz":
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_DICTIONARY_BYTES)
    from isal import igzip_lib

    is_gzip = packing == "gzip"
    return igzip_lib.IgzipDecompressor(
        flag=igzip_lib.DECOMP_GZIP if is_gzip else igzip_lib.DECOMP_ZLIB
    )


class _Decompressed(io.RawIOBase):
    """One zlib stream, or concatenated gzip, bzip2 or xz streams, with a memory limit for xz."""

    def __init__(self, file: BinaryIO, packing: Compression, length: int | None) -> None:
        self._file, self._packing, self._remaining = file, packing, length
        self._state, self._buffered = _decompressor(packing), b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Decompress into `buffer`; return 0 at the end of the last stream."""
        while not self._state.eof or self._next_stream():
            chunk = self._read_chunk() if self._state.needs_input else b""
            if self._state.needs_input and not chunk:
                raise EOFError
            data = self._state.decompress(chunk, len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)
        return 0

    def _next_stream(self) -> bool:
        """Start the next stream, if any; zeros may pad gzip and xz streams.

        Raises
        ------
        OSError
            If other data follow.
        """
        if self._packing == "zlib":
            return False
        padding = b"" if self._packing == "bzip2" else b"\0"
        magic = next(magic for magic, kind in _MAGIC.items() if kind == self._packing)
        unused = self._state.unused_data.lstrip(padding)
        while len(unused) < len(magic) and (chunk := self._read_chunk()):
            unused = (unused + chunk).lstrip(padding)
        if not unused:
            return False
        if unused[: len(magic)] != magic[: len(unused)]:
            raise OSError(f"other data follow a {self._packing} stream")
        self._state, self._buffered = _decompressor(self._packing), unused
        return True

    def _read_chunk(self) -> bytes:
        if self._buffered:  # read already, behind the previous stream
            chunk, self._buffered = self._buffered, b""
            return chunk
        chunk = self._file.read(
            _CHUNK_BYTES if self._remaining is None else min(_CHUNK_BYTES, self._remaining)
        )
        if self._remaining is not None:
            self._remaining -= len(chunk)
        return chunk


class _Zstd(io.RawIOBase):
    """Frames of zstd, decompressed by pyarrow; Python's standard library has zstd from 3.14 on."""

    def __init__(self, file: BinaryIO) -> None:
        import pyarrow as pa

        if not pa.Codec.is_available("zstd"):
            raise ScanError(Reason.DECODER, "the installed pyarrow can't decompress zstd")
        self._stream = pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Decompress into `buffer`; return 0 at the end."""
        try:
            chunk: bytes = self._stream.read(len(buffer))
        except OSError as exc:
            if "Truncated" in str(exc):
                raise EOFError from exc
            raise
        buffer[: len(chunk)] = chunk
        return len(chunk)


def decompression_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of decompressors for damaged data, besides EOFError and OSError."""
    from isal import isal_zlib

    isal_error = cast(type[Exception], isal_zlib.error)  # its stub declares a value
    return (zlib.error, lzma.LZMAError, isal_error)
