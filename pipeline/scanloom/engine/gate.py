"""A gate that many may be behind at once, within what they need, or one alone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Lets cases in while there is room; who must be alone waits for all others and holds them off.

    They come in one after another, in the order in which they came to the gate: who needs much is
    not passed by those who need little, and its turn comes.

    Parameters
    ----------
    places : int
        How many may be inside at once.
    capacity : float
        What all inside may need together, for instance bytes. Who needs more than all of it comes
        in when nobody else is there.
    """

    def __init__(self, places: int, capacity: float = float("inf")) -> None:
        self._places, self._capacity = places, capacity
        self._inside, self._needed = 0, 0.0
        self._alone, self._want_alone = False, 0
        self._line: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def among_others(self, need: float = 0.0) -> Iterator[None]:
        """Hold a place that needs `need` of the capacity."""
        mark = object()
        with self._changed:
            self._line.append(mark)
            try:
                self._changed.wait_for(lambda: self._line[0] is mark and self._has_room(need))
            finally:
                self._line.remove(mark)
                self._changed.notify_all()  # whoever is next may fit too
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
    def alone(self) -> Iterator[None]:
        """Hold the whole gate; comes before all who wait for a place among others."""
        with self._changed:
            self._want_alone += 1
            self._changed.wait_for(lambda: not self._inside and not self._alone)
            self._want_alone -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()

    def _has_room(self, need: float) -> bool:
        if self._alone or self._want_alone:
            return False
        fits = self._needed + need <= self._capacity or self._inside == 0
        return fits and self._inside < self._places
