"""Retries: the table from reason to policy, and the limits of layers that retry cases.

A case can be retried in four layers; docs/retries.md describes them.

1. In its worker process, by the supervisor of the child process (`engine.worker.supervisor`).
2. On another worker, by the pool of a cluster (`engine.clusters.dask_pool`).
3. After the loss of its worker, by the dispatcher (`engine.worker.pool`). Lost workers are
   replaced by the module that started them, within its own limits (`engine.clusters.launchers`).
4. In a later run (`engine.results.run_cases`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from scanloom.core import Reason

OtherWorker = Literal["none", "other machine", "any"]


@dataclass(frozen=True)
class RetryPolicy:
    """Retries of a case that ended with a certain reason.

    Parameters
    ----------
    pauses_s : tuple of float
        Layer 1: seconds before each further attempt.
    alone_in_new_process : bool
        Layer 1: whether other cases in the process may have caused the failure. Then the case is
        retried once, alone, in a new process.
    other_worker : "none", "other machine" or "any"
        Layer 2: the workers on which the case is retried once.
    new_child : bool
        Layer 1: whether another child process is started if a child ends with this reason before
        it is ready, see `MAX_CHILD_STARTS`.
    in_later_run : bool
        Layer 4: whether a later run retries the case without `--retry-failed`.
    """

    pauses_s: tuple[float, ...] = ()
    alone_in_new_process: bool = False
    other_worker: OtherWorker = "none"
    new_child: bool = False
    in_later_run: bool = False

    def on_other_worker(self, *, same_machine: bool) -> bool:
        """Return whether the case is retried on another worker, all on one machine or not."""
        return self.other_worker == "any" or (
            self.other_worker == "other machine" and not same_machine
        )


STORAGE_PAUSES_S = (1.0, 4.0, 15.0)
"""Pauses if the disk or the network may have caused the failure."""

PROCESS_LOST = RetryPolicy(alone_in_new_process=True)
"""Policy of a case whose process died, or was killed because of the time limit."""

MAX_CHILD_STARTS = 3
"""Consecutive children that never became ready, after which no other is started."""

MAX_WORKER_LOSSES = 10
"""Times that a case may lose its worker before it fails with WORKER_LOST."""

MAX_OUTDONE_CASES = 3
"""Cases that fail on one worker and succeed on another, after which the first is dismissed."""

_IN_THIS_RUN = {
    Reason.UNREADABLE: RetryPolicy(pauses_s=STORAGE_PAUSES_S, other_worker="other machine"),
    Reason.OUTPUT_UNWRITABLE: RetryPolicy(pauses_s=STORAGE_PAUSES_S, other_worker="other machine"),
    Reason.SCRATCH_FULL: RetryPolicy(other_worker="other machine"),
    Reason.OUT_OF_MEMORY: RetryPolicy(alone_in_new_process=True),
    Reason.DEVICE_UNAVAILABLE: RetryPolicy(alone_in_new_process=True, other_worker="any"),
    Reason.ENVIRONMENT: RetryPolicy(alone_in_new_process=True, other_worker="other machine"),
}


def policy_of(reason: Reason | None) -> RetryPolicy:
    """Return the policy of a reason; no retries for None, the reason of a success."""
    if reason is None:
        return RetryPolicy()
    # A changed model is as changed for the next child; a later run takes the new one
    return replace(
        _IN_THIS_RUN.get(reason, RetryPolicy()),
        new_child=reason.retry and reason is not Reason.MODEL_CHANGED,
        in_later_run=reason.retry,
    )
