"""The log of a run, `OUT/runs/<run id>/log.jsonl`: one JSON line for each case that ended."""

from __future__ import annotations

import json
import time
from pathlib import Path

from scanloom.core import Case
from scanloom.engine.worker.supervisor import CaseOutcome

LOG = "log.jsonl"


class RunLog:
    """Append the ends of cases to the log of a run.

    Parameters
    ----------
    folder : Path
        `OUT/runs/<run id>`, which exists.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG

    def write(self, case: Case, outcome: CaseOutcome) -> None:
        """Append a line with the outcome of a case, its attempts, and its time on the device."""
        record = outcome.record
        entry = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "case": case.id,
            "reason": record.reason.code if record and record.reason else None,
            "recalled": bool(record and record.reused),
            "remade": bool(record and record.updated),
            "tries": [
                {
                    "end": attempt.end,
                    "alone": attempt.alone,
                    "seconds": round(attempt.seconds, 3),
                }
                for attempt in outcome.tries
            ],
            "device": [round(t, 4) for t in outcome.device] if outcome.device else None,
            "engine": outcome.engine,
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
