"""Cases of each reviewer: read once, twice without knowing of each other, or again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scanloom.review.verdicts.verdict import Seen, Verdict, about

REPEAT_AFTER = 10
"""Further verdicts of a reviewer after which a case comes back."""

ByReviewer = Mapping[str, Verdict]
History = Mapping[tuple[str, str], Sequence[Verdict]]
"""Verdicts that were not undone, by case and reviewer, in the order in which they were given."""


@dataclass(frozen=True)
class Readers:
    """Settings that share cases among reviewers.

    The readers of a case depend on its name and on the codes of the reviewers, not on their order,
    other cases or chance. A further reviewer takes cases from all others and moves no other case.

    "Verdicts" are those about the result that there is now, by reviewer.

    Parameters
    ----------
    reviewers : tuple of str
        Codes of the reviewers.
    double : float
        Share of the cases that two read without knowing of each other, 0 to 1. Above 0, every case
        belongs to some reviewers; at 0 all cases are for all.
    repeat : float
        Share of a reviewer's cases that come back later, 0 to 1.
    former : tuple of str
        Codes of reviewers who read no further case: they stay readers of cases that they decided
        on.

    Raises
    ------
    ValueError
        If a case is to be read twice, and there is one reviewer; if a share is not within 0 and 1.
    """

    reviewers: tuple[str, ...]
    double: float = 0.0
    repeat: float = 0.0
    former: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (0 <= self.double <= 1 and 0 <= self.repeat <= 1):
            raise ValueError("a share of cases is not within 0 and 1")
        if self.double and len(self.reviewers) < 2:
            raise ValueError("double reading needs at least two reviewers")

    def assigned(self, case: str, verdicts: ByReviewer) -> tuple[str, ...]:
        """Return the readers of a case; a third one if the first two disagree."""
        if not self.double:
            return self.reviewers
        former = (each for each in self.former if each in verdicts)
        ranked = sorted(
            (*self.reviewers, *former), key=lambda each: _number(case, f"reader {each}")
        )
        if not self.is_double(case):
            return tuple(ranked[:1])
        first, second = ranked[:2]
        return tuple(ranked[: 3 if _differ(verdicts.get(first), verdicts.get(second)) else 2])

    def is_double(self, case: str) -> bool:
        """Return whether two reviewers read a case."""
        return bool(self.double) and _share(case, "double") < self.double

    def is_blind(self, case: str, reviewer: str, verdicts: ByReviewer) -> bool:
        """Return whether a reviewer must not see what others decided: a reader has not finished."""
        if not self.is_double(case):
            return False
        return any(each not in verdicts for each in {*self.assigned(case, verdicts), reviewer})

    def visible(
        self, case: str, reviewer: str, verdicts: ByReviewer, seen: Seen
    ) -> dict[str, Verdict]:
        """Return the verdicts about a case that a reviewer may see.

        Parameters
        ----------
        case, reviewer : str
        verdicts : mapping
            Those about results that were replaced too.
        seen : Seen
            The result that there is now.
        """
        if self.is_blind(case, reviewer, about(seen, verdicts)):
            return {each: v for each, v in verdicts.items() if each == reviewer}
        return dict(verdicts)

    def cases_of(
        self, reviewer: str, cases: Iterable[str], current: Mapping[str, ByReviewer]
    ) -> list[str]:
        """Return the cases that a reviewer reads, or has read, in the given order."""
        if not self.double:
            return list(cases)
        nothing: ByReviewer = {}
        return [
            case
            for case in cases
            if reviewer in current.get(case, nothing)
            or reviewer in self.assigned(case, current.get(case, nothing))
        ]

    def coming_back(self, reviewer: str, history: History) -> set[str]:
        """Return the cases that a reviewer is to read again, without seeing the own verdict."""
        if not self.repeat:
            return set()
        own = {
            case: verdicts
            for (case, reader), verdicts in history.items()
            if reader == reviewer and verdicts
        }
        numbers = sorted(verdict.number for verdicts in own.values() for verdict in verdicts)
        last = numbers[-REPEAT_AFTER - 1] if len(numbers) > REPEAT_AFTER else 0
        return {
            case
            for case, verdicts in own.items()
            if all(verdict.reading == 1 for verdict in verdicts)
            and verdicts[-1].number <= last
            and _share(case, f"repeat {reviewer}") < self.repeat
        }


def _differ(first: Verdict | None, second: Verdict | None) -> bool:
    """Return whether two verdicts decide differently about the case."""
    decided = {each.decision for each in (first, second) if each is not None and each.decision}
    return len(decided) > 1


def _number(case: str, purpose: str) -> int:
    """Return a number that a case has for a purpose, evenly distributed over 64 bits."""
    text = f"{purpose}\0{case}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def _share(case: str, purpose: str) -> float:
    return float(_number(case, purpose) / 2**64)
