"""Cases that are open for review, within a limit of memory."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from scanloom.io.output.file_names import CASE
from scanloom.io.output.json_file import read_json
from scanloom.review.server.opened_case import OpenedCase, open_case

MAX_OPEN_BYTES = 704 << 20
"""Arrays of open cases that are kept; the case that was used longest ago is closed first."""
SHOWN_S = 1800.0
"""Time for which the case that a reviewer looks at stays open, from the last request."""
_BYTES_PER_VOXEL = 3
"""Of a case that is not open yet: an image of int16 and labels of uint8."""


class OpenCases:
    """Cases that are open, or being opened.

    The case that a reviewer looks at is not closed for another one, whatever the limit.

    Parameters
    ----------
    out : Path
        The output folder.
    key : Path or None
        File with the key of the case ids.
    limit : int
        Bytes of their arrays.
    """

    def __init__(self, out: Path, key: Path | None, limit: int = MAX_OPEN_BYTES) -> None:
        self.out, self.key, self.limit = out, key, limit
        self._guard = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "open")  # one at a time: memory
        self._open: OrderedDict[str, Future[OpenedCase]] = OrderedDict()
        self._shown: dict[str, tuple[str, float]] = {}
        for library in ("pyarrow.compute", "pyarrow.parquet"):  # while the list is looked at
            self._pool.submit(import_module, library)

    def show(self, name: str, reviewer: str) -> None:
        """Note which case a reviewer looks at."""
        with self._guard:
            self._shown[reviewer] = name, time.monotonic()

    def get(self, name: str) -> OpenedCase:
        """Return an open case.

        Raises
        ------
        ScanError
            As of `open_case`.
        """
        with self._guard:
            future = self._start(name)
        return future.result()

    def get_ahead(self, name: str) -> OpenedCase | None:
        """Return a case that is opened ahead of time; None if it has no room beside shown ones.

        Raises
        ------
        ScanError
            As of `open_case`.
        """
        expected = expected_bytes(self.out, name)
        with self._guard:
            shown = sum(self._bytes(each) for each in self._kept() - {name})
            if shown + expected > self.limit:
                return None
            future = self._start(name)
        return future.result()

    def forget(self, name: str) -> None:
        """Close a case."""
        with self._guard:
            self._open.pop(name, None)

    def _start(self, name: str) -> Future[OpenedCase]:
        """Open a case in the background, unless it is open."""
        future = self._open.get(name)
        if future is None or (future.done() and future.exception() is not None):
            future = self._pool.submit(self._opened, name)
            self._open[name] = future
        self._open.move_to_end(name)
        return future

    def _opened(self, name: str) -> OpenedCase:
        expected = expected_bytes(self.out, name)
        with self._guard:  # make room before it is read
            self._close_old(name, expected)
        case = open_case(self.out, name, self.key)
        with self._guard:
            self._close_old(name, case.nbytes)
        return case

    def _close_old(self, name: str, added: int) -> None:
        """Close cases that were used longest ago, and that nobody looks at, to make room."""
        held = added + sum(map(_arrays, self._open.values()))
        kept = self._kept() | {name}
        for oldest in list(self._open):
            if held <= self.limit:
                return
            if oldest not in kept:
                held -= _arrays(self._open.pop(oldest))

    def _kept(self) -> set[str]:
        """Return the cases that reviewers look at."""
        oldest = time.monotonic() - SHOWN_S
        return {name for name, at in self._shown.values() if at >= oldest}

    def _bytes(self, name: str) -> int:
        future = self._open.get(name)
        return (_arrays(future) if future else 0) or expected_bytes(self.out, name)


def expected_bytes(out: Path, name: str) -> int:
    """Return the bytes that the arrays of a case will have, about; 0 if that can't be known."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        shape = read_json(out / "cases" / name / CASE)["grid"]["shape"]
        return _BYTES_PER_VOXEL * math.prod(map(int, shape))
    return 0


def _arrays(future: Future[OpenedCase]) -> int:
    if not future.done() or future.exception() is not None:
        return 0
    return future.result().nbytes
