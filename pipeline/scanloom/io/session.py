"""Caches of a reading session: parsed headers and unpacked files.

Scans are read in steps: they are found, probed and read. The caches let each step use the work of
the previous one. They belong to a session, which frees them when it ends:

    with read_session():
        [series] = find_series(path)
        scan = read_scan(series)

Outside such a block, a default session is used. It lasts as long as the process and is shared by
its threads: that of worker processes and of header workers.

A session is active in the thread that entered it. Threads that are started within the block use
the default session, unless they enter `ReadSession.active`. This never changes a result, but a file
may be parsed or unpacked a second time. Decoder processes receive paths and use no session.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Cache = TypeVar("Cache")


class ReadSession:
    """Caches that are freed together: one of each class, created when it is first needed."""

    def __init__(self) -> None:
        self._caches: dict[type[Any], Any] = {}
        self._lock = threading.Lock()

    def cache(self, kind: type[Cache]) -> Cache:
        """Return the session's cache of a class, such as `HeaderCache` or `UnpackedFiles`."""
        cache: Cache | None = self._caches.get(kind)
        if cache is None:
            with self._lock:
                cache = self._caches.setdefault(kind, self._caches.get(kind) or kind())
        return cache

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use this session in the current thread for the duration of a `with` block."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def close(self) -> None:
        """Close the caches that hold files; the others are freed with the session."""
        for cache in self._caches.values():
            if hasattr(cache, "close"):
                cache.close()


_active: ContextVar[ReadSession | None] = ContextVar("read_session", default=None)
_default = ReadSession()


@contextmanager
def read_session() -> Iterator[ReadSession]:
    """Open a session for the duration of a `with` block or, as a decorator, of a call."""
    session = ReadSession()
    try:
        with session.active():
            yield session
    finally:
        session.close()


def current_session() -> ReadSession:
    """Return the session of the current thread, or the default session of the process."""
    return _active.get() or _default
