"""The library that runs a network: what was used, and what all cases of an output folder share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class EngineChoice:
    """The library that ran a network.

    Parameters
    ----------
    name, version : str
        The library.
    why : str
        The reason for its choice, the same in all equal runs.
    measured : str
        What was measured for it, on one machine: speed and agreement with torch. Never part of a
        result's documents except `timing.json`.
    """

    name: str
    version: str
    why: str
    measured: str = ""


def all_engines(choices: Sequence[EngineChoice]) -> EngineChoice:
    """Return the engines of a result that several networks made, as one choice."""
    if len(dict.fromkeys(choice.name for choice in choices)) == 1:
        return choices[0]

    def joined(name: str) -> str:
        return " + ".join(dict.fromkeys(filter(None, (getattr(c, name) for c in choices))))

    return EngineChoice(joined("name"), joined("version"), joined("why"), joined("measured"))


@dataclass(frozen=True)
class EngineRecord:
    """The engine and the numeric precision with which all cases are to be made."""

    engine: str
    precision: str


class EngineRecords(Protocol):
    """What was decided for the networks of an output folder, by whichever process came first."""

    def recorded(self, network: str) -> EngineRecord | None:
        """Return what was decided for a network; None if nothing was yet."""

    def record(self, network: str, decision: EngineRecord) -> EngineRecord:
        """Record a decision unless there is one; return the one that is recorded now."""
