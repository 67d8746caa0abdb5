"""Cases of each reviewer: read once, twice without knowing of each other, or again.

The settings are kept in `review/readers.json` from the first start of a review on: who reads which
case must not change half-way.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from scanloom.core import Reason, ScanError, read_error
from scanloom.io.output.json_file import read_json, write_document
from scanloom.io.system.atomic_write import atomic_write
from scanloom.io.system.disk_errors import output_error
from scanloom.review.verdicts.log import REVIEW, VerdictLog, folded, reviewer_names
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
        # ranked by hash: a further reviewer takes only the cases in which it ranks first
        if not self.is_double(case):
            return tuple(ranked[:1])
        decisions = {verdicts[each].decision for each in ranked[:2] if each in verdicts}
        return tuple(ranked[: 3 if len(decisions - {None}) > 1 else 2])

    def is_double(self, case: str) -> bool:
        """Return whether two reviewers read a case."""
        return bool(self.double) and _share(case, "double") < self.double

    def is_blind(self, case: str, reviewer: str, verdicts: ByReviewer) -> bool:
        """Return whether a reviewer must not see what others decided: a reader has not finished."""
        if not self.is_double(case):
            return False
        return any(each not in verdicts for each in {*self.assigned(case, verdicts), reviewer})

    def may_have_seen_others(self, case: str, reviewer: str, lines: Iterable[Verdict]) -> bool:
        """Return whether a reviewer was shown another's verdict on a case.

        One on a result that was replaced since counts too: after both readers of a result saw each
        other's verdict, a verdict of theirs on its correction is not independent any more. So does
        one that was undone since.

        Parameters
        ----------
        lines : iterable of Verdict
            All lines about the case in their order, undone and undoing ones too.
        """
        kept = list[Verdict]()
        for line in lines:
            kept = [each for each in kept if each.number != line.undoes]
            kept += [line] if line.undoes is None else []
            for foreign in kept:
                about_it = {each.reviewer: each for each in kept if each.seen == foreign.seen}
                if foreign.reviewer != reviewer and not self.is_blind(case, reviewer, about_it):
                    return True
        return False

    def visible(
        self, case: str, reviewer: str, verdicts: ByReviewer, seen: Seen
    ) -> dict[str, Verdict]:
        """Return the verdicts about a case that a reviewer may see.

        Parameters
        ----------
        verdicts : mapping
            Those about results that were replaced too.
        """
        if self.is_blind(case, reviewer, about(seen, verdicts)):
            return {each: v for each, v in verdicts.items() if each == reviewer}
        return dict(verdicts)

    def reads(self, case: str, reviewer: str, verdicts: ByReviewer) -> bool:
        """Return whether a reviewer reads a case, or has read it."""
        return not self.double or reviewer in verdicts or reviewer in self.assigned(case, verdicts)

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
        # a case comes back once the reviewer has decided on others since, so as not to remember it
        last = numbers[-REPEAT_AFTER - 1] if len(numbers) > REPEAT_AFTER else 0
        return {
            case
            for case, verdicts in own.items()
            if all(verdict.reading == 1 for verdict in verdicts)
            and verdicts[-1].number <= last
            and _share(case, f"repeat {reviewer}") < self.repeat
        }


def _number(case: str, purpose: str) -> int:
    """Return a number that a case has for a purpose, evenly distributed over 64 bits."""
    text = f"{purpose}\0{case}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def _share(case: str, purpose: str) -> float:
    return float(_number(case, purpose) / 2**64)


READERS = "readers.json"


def kept_readers(out: Path) -> Readers:
    """Return how cases are shared since the last start; no reviewer before the first.

    Raises
    ------
    ScanError
        REVIEW_DAMAGED if the file can't be read.
    """
    path = out / REVIEW / READERS
    if not os.path.lexists(path):
        return Readers(())
    if path.is_symlink():
        raise ScanError(Reason.REVIEW_DAMAGED, f"{REVIEW}/{READERS} is a link")
    try:
        plain = read_json(path)
        shares = float(plain["double"]), float(plain["repeat"])
        former = tuple(map(str, plain.get("former", ())))
        return Readers(tuple(map(str, plain["reviewers"])), *shares, former)
    except (OSError, ValueError, LookupError, TypeError) as exc:
        raise read_error(exc, f"{REVIEW}/{READERS}", Reason.REVIEW_DAMAGED) from exc


def share_cases(
    out: Path,
    reviewers: Sequence[str],
    double: float | None = None,
    repeat: float | None = None,
    *,
    begun: bool = True,
) -> Readers:
    """Share the cases as since the first verdict, and keep how.

    Earlier reviewers keep their cases, also if they are not named; further ones take part.

    Parameters
    ----------
    out : Path
        The output folder, whose log of verdicts is held.
    double, repeat : float or None
        Shares as of `Readers`; None for the kept ones, or 0.
    begun : bool
        Whether there are verdicts: without them, nothing needs to stay.

    Raises
    ------
    ScanError
        READERS if a share differs from the kept one, or cases are to be read twice and there is one
        reviewer; REVIEW_DAMAGED; OUTPUT_UNWRITABLE or DISK_FULL.
    """
    kept = kept_readers(out)
    for name, requested, before in (
        ("double", double, kept.double),
        ("repeat", repeat, kept.repeat),
    ):
        if begun and kept.reviewers and requested is not None and requested != before:
            detail = f"the review began with --{name} {before:.4g}, not {requested:.4g}"
            raise ScanError(Reason.READERS, detail)
    # order does not matter for who reads what: codes are ranked by hash
    codes = (*kept.reviewers, *reviewers) if begun else reviewers
    former = tuple(code for code in kept.former if code not in codes)
    try:
        readers = Readers(
            tuple(dict.fromkeys(codes)),
            kept.double if double is None else double,
            kept.repeat if repeat is None else repeat,
            former,
        )
    except ValueError as exc:
        raise ScanError(Reason.READERS, str(exc)) from exc
    if readers != kept:
        _keep(out / REVIEW / READERS, readers)
    return readers


def remove_reviewer(out: Path, reviewer: str) -> str:
    """Take a reviewer off the list: the verdicts stay, and others read the cases that are open.

    Parameters
    ----------
    reviewer : str
        Code or name.

    Returns
    -------
    str
        The reviewer's code.

    Raises
    ------
    ScanError
        ID_UNKNOWN if the list has no such reviewer; READERS if cases are read twice and one
        reviewer would be left; REVIEW_OPEN while a server is open; as of `VerdictLog`.
    """
    with closing(VerdictLog(out)):
        kept, names = kept_readers(out), reviewer_names(out)
        of_name = {code for code, name in names.items() if folded(name) == folded(reviewer)}
        codes = [each for each in kept.reviewers if each == reviewer]
        codes += [each for each in kept.reviewers if each in of_name]
        if not codes:
            listed = ", ".join(kept.reviewers) or "nobody"
            raise ScanError(Reason.ID_UNKNOWN, f"there is no such reviewer: the list has {listed}")
        remaining = tuple(code for code in kept.reviewers if code != codes[0])
        try:
            readers = replace(kept, reviewers=remaining, former=(*kept.former, codes[0]))
        except ValueError as exc:
            raise ScanError(Reason.READERS, str(exc)) from exc
        _keep(out / REVIEW / READERS, readers)
    return codes[0]


def _keep(path: Path, readers: Readers) -> None:
    shares = {"double": readers.double, "repeat": readers.repeat}
    former = {"former": list(readers.former)} if readers.former else {}
    plain = {"reviewers": list(readers.reviewers), **shares, **former}
    try:
        atomic_write(path, lambda draft: write_document(draft, plain))
    except OSError as exc:
        raise output_error(exc, "the readers") from exc
