"""`Status`: progress of a run, in a small file that the run replaces each second."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from scanloom.io.output.json_file import read_json
from scanloom.io.system.liveness import DIED, observed_state

STATUS_FILE = "status.json"


@dataclass(frozen=True)
class Status:
    """Progress of a run.

    Parameters
    ----------
    run : str
        Id of the run.
    state : str
        "indexing", "running", "collecting", "done", "stopped" or "failed"; "died" if the process
        ended without writing a final state, see `seen`.
    cases : int
        Number of planned cases.
    before : int
        Cases that were done by earlier runs.
    done, skipped, ambiguous, failed : int
        Cases that this run finished. Series with invalid headers count as failed, series with
        several volumes to choose from as ambiguous.
    remade : int
        Number of `done` that replaced a result because its scan had changed.
    reasons : dict
        Number of cases by reason code.
    in_flight : dict
        Seconds since a case was submitted, by case id.
    elapsed_s, left_s : float or None
        Seconds since the start, and until the end by the rate of the last minutes.
    per_hour : float or None
        Cases per hour, by that rate.
    devices : list of dict
        Load, memory, temperature and power of each GPU.
    moment : float
        Time of writing, in seconds since 1970.
    sent_away : dict
        Number of dismissed workers, by cause.
    reason : str
        Code of the reason for which the run as a whole failed; empty if it did not.
    host, process, start : str, int, str
        The process that wrote this, to check whether it still runs.
    """

    run: str
    state: str
    cases: int = 0
    before: int = 0
    done: int = 0
    skipped: int = 0
    ambiguous: int = 0
    failed: int = 0
    remade: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    in_flight: dict[str, float] = field(default_factory=dict)
    elapsed_s: float = 0.0
    left_s: float | None = None
    per_hour: float | None = None
    devices: list[dict[str, Any]] = field(default_factory=list)
    moment: float = 0.0
    sent_away: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    host: str = ""
    process: int = 0
    start: str = ""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the last status of the run of a folder.

        Raises
        ------
        OSError, ValueError
            If the status is missing or not valid.
        ScanError
            OLDER_VERSION or NEWER_VERSION if another version wrote it.
        """
        document = read_json(folder / STATUS_FILE)
        known = {f.name: document[f.name] for f in fields(cls) if f.name in document}
        try:
            return cls(**known)
        except (TypeError, AttributeError) as exc:
            raise ValueError("status.json has invalid fields") from exc

    @property
    def ended(self) -> int:
        """Number of cases that have ended, including those of earlier runs."""
        return self.before + self.done + self.skipped + self.ambiguous + self.failed

    def as_observed(self) -> Self:
        """Return the current status: the run may have died since it was written."""
        if observed_state(asdict(self)) != DIED:
            return self
        return replace(self, state=DIED, left_s=None, per_hour=None, devices=[])
