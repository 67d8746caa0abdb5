"""Libraries that run networks: those used, and those that an output folder's cases share."""

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
        Measurements of it on one machine: speed and agreement with torch. Never part of a
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
    """Engines of an output folder's networks, as the first process decided."""

    def recorded(self, network: str) -> EngineRecord | None:
        """Return the decision for a network; None before there is one."""

    def record(self, network: str, decision: EngineRecord) -> EngineRecord:
        """Record a decision unless there is one; return the one that is recorded now."""
