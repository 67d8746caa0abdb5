"""`MemoryAdmission`, `AdmissionGate`: admit cases to a process by the memory they may need."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
from numpy.typing import DTypeLike

from scanloom.core import Case, Grid, Outputs
from scanloom.core.relations import NO_RELATIONS, Relations
from scanloom.engine.case.memory_estimate import Placement, base_bytes, check_memory, estimate_case
from scanloom.engine.case.types import Predictor
from scanloom.io.probe import probe


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


class MemoryAdmission:
    """Distributes the memory of an engine child among cases before they are read.

    Parameters
    ----------
    predictors : sequence of Predictor
        The models; their devices decide which data are kept in host memory.
    limit : int or None
        Bytes that the process may use; None for its share of the machine's memory.
    places : int
        Maximum number of concurrent cases.
    neighbours : int
        Number of such processes on the machine.
    """

    def __init__(
        self, predictors: Sequence[Predictor], limit: int | None, places: int, neighbours: int = 1
    ) -> None:
        from scanloom.inference.memory import machine_memory  # torch comes in here

        self._cards = [predictor.card for predictor in predictors]
        first = predictors[0]
        self._placement = Placement(first.device_name, first.precision_name)
        self._limit = limit
        total = machine_memory()
        most = (
            limit if limit is not None else float("inf") if total is None else MEMORY_SHARE * total
        )
        held = base_bytes(self._cards)
        self._estimated(Grid((8, 8, 8), np.eye(4)), np.int16, Outputs())  # caches network sizes
        self._gate = AdmissionGate(places, most / (1 if limit is not None else neighbours) - held)

    def need(self, case: Case) -> float:
        """Return the bytes that a case needs in addition to the models.

        Only headers are read. If that fails the result is 0: reading the scan reports the error.

        Raises
        ------
        ScanError
            OUT_OF_MEMORY if the case exceeds the limit even when run alone.
        """
        try:
            outline = probe(case.series, case.phase, case.read.orientation, case.read.gaps)
        except Exception:  # noqa: BLE001  # reported when the scan is read
            return 0.0
        if self._limit is not None:
            check_memory(
                estimate_case(*outline, self._cards, case.outputs, None, case.relations),
                self._limit,
            )
        return self._estimated(*outline, case.outputs, case.relations)

    def _estimated(
        self,
        grid: Grid,
        dtype: DTypeLike,
        outputs: Outputs,
        relations: Relations = NO_RELATIONS,
    ) -> float:
        estimate = estimate_case(grid, dtype, self._cards, outputs, self._placement, relations)
        return float(estimate.peak - estimate.base)

    def hold(self, need: float) -> AbstractContextManager[None]:
        """Wait until `need` bytes are free, in order of arrival, and hold them."""
        return self._gate.shared(need)
