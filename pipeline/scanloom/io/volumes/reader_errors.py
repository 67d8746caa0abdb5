"""Errors of libraries and the operating system while a volume file is read, as `ScanError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from scanloom.core import Reason, ScanError
from scanloom.io.system.compressed_streams import decompression_errors


@contextmanager
def foreign_errors(subject: str) -> Iterator[None]:
    """Convert errors of libraries and the system to ScanError; `subject` begins its detail.

    Raises
    ------
    ScanError
        TRUNCATED, DAMAGED, UNREADABLE or OUT_OF_MEMORY.
    """
    try:
        yield
    except EOFError as exc:
        raise ScanError(Reason.TRUNCATED, f"{subject} ends too early") from exc
    except decompression_errors() as exc:
        detail = f"{subject} cannot be decompressed ({type(exc).__name__})"
        raise ScanError(Reason.DAMAGED, detail) from exc
    except OSError as exc:  # BadGzipFile is one, without a number
        reason = Reason.UNREADABLE if exc.errno else Reason.DAMAGED
        raise ScanError(reason, f"{subject} cannot be read ({type(exc).__name__})") from exc
    except MemoryError as exc:
        raise ScanError(Reason.OUT_OF_MEMORY, f"{subject} does not fit into memory") from exc
