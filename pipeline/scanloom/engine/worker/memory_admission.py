"""`AdmissionGate`: admits cases to a process by the memory they may need."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from scanloom.core import Grid
from scanloom.core.process import worker_count
from scanloom.engine.prepare import estimate_case, placement_of
from scanloom.inference.graph import Predictor


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


MEMORY_SHARE = 0.9
"""Fraction of the machine's memory for cases; the system and its file cache need the rest."""


def memory_gate(predictors: Sequence[Predictor], limit: int | None, places: int) -> AdmissionGate:
    """Return the gate that distributes a process's memory among cases before they are read.

    `places` cases at most take the memory that they need in addition to the models, up to the bytes
    of `limit`; None for an equal share of the machine's memory with the run's other workers on it.
    """
    from scanloom.inference.memory import base_bytes, machine_memory  # torch comes in here

    cards = [predictor.card for predictor in predictors]
    smallest = Grid((8, 8, 8), np.eye(4))
    estimate_case(smallest, np.int16, cards, placement=placement_of(predictors))  # caches sizes
    capacity = float("inf") if limit is None else float(limit)
    if limit is None and (total := machine_memory()) is not None:
        capacity = MEMORY_SHARE * total / worker_count("cpu")
    return AdmissionGate(places, capacity - base_bytes(cards))
