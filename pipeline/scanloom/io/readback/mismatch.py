"""WRITE_MISMATCH, the error of every check of a written file."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from scanloom.core import Reason, ScanError


def mismatch_error(detail: str) -> ScanError:
    """Return the error for a written file that differs from the content of its case."""
    return ScanError(Reason.WRITE_MISMATCH, detail)


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """Turn any exception of a decoder into WRITE_MISMATCH."""
    from pydicom.errors import BytesLengthException, InvalidDicomError

    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        BytesLengthException,
        EOFError,
        InvalidDicomError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
        gzip.BadGzipFile,
        struct.error,
        zlib.error,
    ) as exc:
        raise mismatch_error(f"{name} can't be decoded ({type(exc).__name__})") from exc
