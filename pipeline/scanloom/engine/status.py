"""What a run is doing now: a small file, written whole each second, that anybody may read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from scanloom.io.living import DIED, state_seen
from scanloom.io.regular import open_regular

STATUS = "status.json"


@dataclass(frozen=True)
class Status:
    """A run as it stands.

    Parameters
    ----------
    run : str
        Its id.
    state : str
        "indexing", "running", "collecting", "done", "stopped" or "failed"; "died" where it ended
        without a last word, as `seen` finds.
    cases : int
        All that were planned.
    before : int
        Those that were done by earlier runs.
    done, skipped, ambiguous, failed : int
        What this run has finished; series that failed by their headers count as failed, those of
        which one of several volumes has to be chosen as ambiguous.
    remade : int
        How many of `done` replaced a result because their scan had changed since.
    reasons : dict
        How many of each reason.
    in_flight : dict
        Case id to the seconds since it was handed over.
    elapsed_s, left_s : float or None
        Since the start, and until the end by the rate of the last minutes.
    per_hour : float or None
        Cases an hour, by that rate.
    devices : list of dict
        Busy share, memory, temperature and power of each GPU.
    moment : float
        When this was written (seconds since 1970).
    sent_away : dict
        Workers that could not do the work: how many, by why.
    reason : str
        The code of why the run failed as a whole; empty where it did not.
    host, process, start : str, int, str
        Who wrote this: to know whether it still runs.
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
        """Return what the run of a folder last said of itself.

        Raises
        ------
        OSError, ValueError
            If it said nothing, or something else.
        """
        with open_regular(folder / STATUS) as file:
            told = json.load(file)
        try:
            return cls(**told)
        except TypeError as exc:
            raise ValueError("status.json has another form") from exc

    @property
    def over(self) -> int:
        """How many cases have ended, those of earlier runs too."""
        return self.before + self.done + self.skipped + self.ambiguous + self.failed

    def seen(self) -> Self:
        """Return it as it is now, when the run may have died since."""
        if state_seen(asdict(self)) != DIED:
            return self
        return replace(self, state=DIED, left_s=None, per_hour=None, devices=[])
