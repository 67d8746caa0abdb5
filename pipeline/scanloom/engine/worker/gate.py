"""`AdmissionGate`: admits cases up to a capacity, or one case exclusively."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class AdmissionGate:
    """Admits cases while capacity lasts, in the order of their arrival.

    A large case is therefore not overtaken by small ones. An exclusive holder waits until the
    gate is empty and blocks new entries meanwhile.

    Parameters
    ----------
    places : int
        Maximum number of concurrent holders.
    capacity : float
        Limit for the sum of their needs, for instance in bytes. A case that needs more than that
        is admitted when the gate is empty.
    """

    def __init__(self, places: int, capacity: float = float("inf")) -> None:
        self._places, self._capacity = places, capacity
        self._inside, self._needed = 0, 0.0
        self._is_exclusive, self._exclusive_waiting = False, 0
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def shared(self, need: float = 0.0) -> Iterator[None]:
        """Hold a shared place that takes `need` of the capacity."""
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                self._changed.wait_for(lambda: self._queue[0] is ticket and self._has_room(need))
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()  # the next in the queue may fit too
            self._inside += 1
            self._needed += need
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._needed -= need
                self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the whole gate; takes precedence over waiting shared holders."""
        with self._changed:
            self._exclusive_waiting += 1
            self._changed.wait_for(lambda: not self._inside and not self._is_exclusive)
            self._exclusive_waiting -= 1
            self._is_exclusive = True
        try:
            yield
        finally:
            with self._changed:
                self._is_exclusive = False
                self._changed.notify_all()

    def _has_room(self, need: float) -> bool:
        if self._is_exclusive or self._exclusive_waiting:
            return False
        fits = self._needed + need <= self._capacity or self._inside == 0
        return fits and self._inside < self._places
