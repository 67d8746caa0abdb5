"""`Room`: how many cases fit into a process at once, by what they are estimated to take."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import DTypeLike

from scanloom.core import Case, Grid, Outputs
from scanloom.engine.case_types import Labeller
from scanloom.engine.estimate import Placement, base_bytes, check_memory, estimate_case
from scanloom.engine.gate import Gate
from scanloom.io.outline import read_outline

SHARE = 0.9
"""Of the machine's memory that cases may take; the rest is for the system and its file cache."""


class Room:
    """The memory of an engine child, shared out among cases before they are read.

    Parameters
    ----------
    labellers : sequence of Labeller
        The models; their devices decide what is held on the host.
    limit : int or None
        Bytes that the process may take; None for its share of what the machine has.
    places : int
        Cases at once, at most.
    neighbours : int
        How many such processes share the machine.
    """

    def __init__(
        self, labellers: Sequence[Labeller], limit: int | None, places: int, neighbours: int = 1
    ) -> None:
        from scanloom.inference.ladder import machine_memory  # torch comes in here

        self._cards = [labeller.card for labeller in labellers]
        first = labellers[0]
        self._placement = Placement(first.device_name, first.precision_name)
        self._limit = limit
        total = machine_memory()
        most = limit if limit is not None else float("inf") if total is None else SHARE * total
        held = base_bytes(self._cards)
        self._estimated(Grid((8, 8, 8), np.eye(4)), np.int16, Outputs())  # networks are looked at
        self._gate = Gate(places, most / (1 if limit is not None else neighbours) - held)

    def need(self, case: Case) -> float:
        """Return the bytes that a case takes beside what the process holds anyway.

        Nothing is read but headers; where they can't be read it needs nothing: reading says why.

        Raises
        ------
        ScanError
            OUT_OF_MEMORY if it would not fit alone.
        """
        try:
            outline = read_outline(case.series, case.phase, case.read.orientation, case.read.gaps)
        except Exception:  # noqa: BLE001  # of whatever kind: it is judged when the scan is read
            return 0.0
        if self._limit is not None:
            check_memory(estimate_case(*outline, self._cards, case.outputs), self._limit)
        return self._estimated(*outline, case.outputs)

    def _estimated(self, grid: Grid, dtype: DTypeLike, outputs: Outputs) -> float:
        estimate = estimate_case(grid, dtype, self._cards, outputs, self._placement)
        return float(estimate.peak - estimate.base)

    def hold(self, need: float) -> AbstractContextManager[None]:
        """Wait until so many bytes are free, and hold them; who needs most waits for its turn."""
        return self._gate.among_others(need)
