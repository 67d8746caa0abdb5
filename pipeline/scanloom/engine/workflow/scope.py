"""Scope of a run: the cases that it works on, and those that earlier runs completed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from scanloom.core import Case, CaseRecord, ScanError
from scanloom.engine.retries import policy_of
from scanloom.io.output.failures import previous_failure
from scanloom.io.output.published import ResultState, result_state


@dataclass(frozen=True)
class Scope:
    """Cases that a run repeats, and its share of a job array.

    Parameters
    ----------
    replace, retry_failed : bool
        Whether results of another recipe are replaced, and cases that failed are tried again.
    shard : (k, n) or None
        Only the k-th of n parts of the cases, from 1.
    """

    replace: bool = False
    retry_failed: bool = False
    shard: tuple[int, int] | None = None

    def holds(self, case_id: str) -> bool:
        """Return whether a case is in this run's shard."""
        if self.shard is None:
            return True
        index, count = self.shard
        digest = hashlib.blake2b(case_id.encode(), digest_size=8).digest()  # ids are not even
        return int.from_bytes(digest, "big") % count == index - 1

    def before(self, out: Path, case: Case) -> CaseRecord | None:
        """Return how a case ended before, None if it is to be worked on.

        A reason of None stands for a result; a reason with the subject "result" for one that is
        of another recipe or damaged, and may not be replaced. A case whose files may have changed
        is to be worked on: its worker compares their content.
        """
        folder = out / "cases" / case.folder_name
        try:
            if (
                result_state(out, case.folder_name, case, replace=self.replace)
                is ResultState.CURRENT
            ):
                return CaseRecord(case.id, None, "", (), folder)
        except ScanError as error:
            return CaseRecord(case.id, error.reason, error.detail, (), folder)
        old = previous_failure(out, case.id, case.recipe, case.stamp)
        if old is None or policy_of(old.reason).in_later_run or self.retry_failed:
            return None
        return CaseRecord(case.id, old.reason, old.detail, (), None)
