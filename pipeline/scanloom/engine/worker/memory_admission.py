"""`MemoryAdmission`: admits cases to a process by the memory that they are estimated to need."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import DTypeLike

from scanloom.core import Case, Grid, Outputs
from scanloom.core.relations import NO_RELATIONS, Relations
from scanloom.engine.case.memory_estimate import Placement, base_bytes, check_memory, estimate_case
from scanloom.engine.case.types import Predictor
from scanloom.engine.worker.gate import AdmissionGate
from scanloom.io.probe import probe

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
