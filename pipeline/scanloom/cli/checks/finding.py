"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor.

    Parameters
    ----------
    topic, name : str
        Under which heading it stands, and what was looked at.
    level : "ok", "warn" or "bad"
        Fine; works but must be known; something that scanloom needs does not work.
    seen : str
        What was found.
    advice : str
        What to do; never empty where something is wrong.
    """

    topic: str
    name: str
    level: Level
    seen: str
    advice: str = ""

    def __post_init__(self) -> None:
        if self.level != "ok" and not self.advice:
            raise ValueError(f"{self.name}: say what to do")
