"""Which reviewer reads which case: once, twice without knowing of each other, or again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scanloom.review.verdicts.verdict import Verdict

REPEAT_AFTER = 10
"""Further verdicts of a reviewer after which a case comes back."""

ByReviewer = Mapping[str, Verdict]
History = Mapping[tuple[str, str], Sequence[Verdict]]
"""Verdicts that were not undone, by case and reviewer, in the order in which they were given."""


@dataclass(frozen=True)
class Readers:
    """How cases are shared among reviewers. It depends on the case's name alone.

    Parameters
    ----------
    reviewers : tuple of str
        Codes of the reviewers.
    double : float
        Share of the cases that two read without knowing of each other, 0 to 1. Above 0, every case
        belongs to some reviewers; at 0 all cases are for all.
    repeat : float
        Share of a reviewer's cases that come back later, 0 to 1.

    Raises
    ------
    ValueError
        If a case is to be read twice, and there is one reviewer.
    """

    reviewers: tuple[str, ...]
    double: float = 0.0
    repeat: float = 0.0

    def __post_init__(self) -> None:
        if self.double and len(self.reviewers) < 2:
            raise ValueError("double reading needs at least two reviewers")

    def assigned(self, case: str, verdicts: ByReviewer) -> tuple[str, ...]:
        """Return the readers of a case; a third one if the first two disagree."""
        if not self.double:
            return self.reviewers
        count = len(self.reviewers)
        first = _number(case, "first") % count
        readers = [self.reviewers[first]]
        if self.is_double(case):
            second = (first + 1 + _number(case, "second") % (count - 1)) % count
            readers.append(self.reviewers[second])
            if count > 2 and self._differ(readers, verdicts):
                others = [each for each in self.reviewers if each not in readers]
                readers.append(others[_number(case, "third") % len(others)])
        return tuple(readers)

    def is_double(self, case: str) -> bool:
        """Return whether two reviewers read a case."""
        return bool(self.double) and _share(case, "double") < self.double

    def is_blind(self, case: str, reviewer: str, verdicts: ByReviewer) -> bool:
        """Return whether a reviewer must not see what others decided: a reader has not finished."""
        if not self.is_double(case):
            return False
        return any(each not in verdicts for each in {*self.assigned(case, verdicts), reviewer})

    def visible(self, case: str, reviewer: str, verdicts: ByReviewer) -> dict[str, Verdict]:
        """Return the verdicts about a case that a reviewer may see."""
        if self.is_blind(case, reviewer, verdicts):
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
        own = {case: given for (case, who), given in history.items() if who == reviewer and given}
        numbers = sorted(verdict.number for given in own.values() for verdict in given)
        last = numbers[-REPEAT_AFTER - 1] if len(numbers) > REPEAT_AFTER else 0
        return {
            case
            for case, given in own.items()
            if len(given) == 1
            and given[0].number <= last
            and _share(case, f"repeat {reviewer}") < self.repeat
        }

    def _differ(self, readers: Sequence[str], verdicts: ByReviewer) -> bool:
        decided = {verdicts[each].decision for each in readers if each in verdicts}
        return all(each in verdicts for each in readers) and len(decided) > 1


def _number(case: str, purpose: str) -> int:
    """Return a number that a case has for a purpose, evenly distributed over 64 bits."""
    text = f"{purpose}\0{case}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def _share(case: str, purpose: str) -> float:
    return float(_number(case, purpose) / 2**64)
