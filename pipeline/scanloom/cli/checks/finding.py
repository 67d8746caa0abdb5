"""`Finding`: a result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Finding:
    """A line of the doctor's output.

    Parameters
    ----------
    topic, name : str
        Heading and subject of the check.
    level : "ok", "warn" or "bad"
        No action; works, but read the note; must be fixed.
    seen : str
        Observation.
    advice : str
        Action to take; required unless `level` is "ok".
    """

    topic: str
    name: str
    level: Level
    seen: str
    advice: str = ""

    def __post_init__(self) -> None:
        if self.level != "ok" and not self.advice:
            raise ValueError(f"{self.name}: advice is required")
