"""State of a review server: the list, the open cases, the log, the readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.output.layout import is_case_name
from scanloom.review.server.drafts import Drafts
from scanloom.review.server.open_cases import OpenCases
from scanloom.review.server.opened_case import OpenedCase
from scanloom.review.server.security import RefusedError
from scanloom.review.server.worklist import COLUMNS, STATES, ListedCase, Worklist, doubts
from scanloom.review.verdicts.log import VerdictLog
from scanloom.review.verdicts.readers import Readers
from scanloom.review.verdicts.results import differ, state_of
from scanloom.review.verdicts.verdict import TAGS, Verdict, about

BLIND = (
    "Others read this case without knowing of each other: the strokes are kept until all have "
    "decided, save them then."
)
Publish = Callable[[str, int, Mapping[str, NDArray[Any]], str], Path]
"""Publishes corrected label maps: name of the case, number of the revision that was corrected (0
for the case's result), label maps (I, J, K) by file, and the reviewer's code. Returns the folder of
the revision."""


@dataclass(eq=False)
class Desk:
    """State of a review server.

    Parameters
    ----------
    out : Path
        The output folder.
    log : VerdictLog
    readers : Readers
    open_cases : OpenCases
    names : mapping
        Display name of each reviewer's code.
    publish : callable or None
        Publishes corrections; None if they are not accepted.
    """

    out: Path
    log: VerdictLog
    readers: Readers
    open_cases: OpenCases
    names: Mapping[str, str] = field(default_factory=dict)
    publish: Publish | None = None

    def __post_init__(self) -> None:
        self.worklist = Worklist(self.out)
        self.drafts = Drafts(self.out)

    def listed(self, reviewer: str) -> dict[str, Any]:
        """Return the list of a reviewer's cases."""
        version = self.version(reviewer)
        current, back = self.log.current(), self._coming_back(reviewer)
        names = self.readers.cases_of(reviewer, self.worklist.cases, self._valid(current))
        visible = {name: self._visible(name, reviewer, current, back) for name in names}
        apart = [name for name in names if differ(visible[name])]
        drafts = self.drafts.cases_of(reviewer)
        rows, counts = self.worklist.rows(names, reviewer, visible, apart, drafts)
        return {
            "columns": COLUMNS,
            "cases": rows,
            "counts": {"all": len(rows), **{each: counts[each] for each in (*STATES, "mine")}},
            "damaged": len(self.worklist.damaged),
            "version": version,
        }

    def version(self, reviewer: str) -> str:
        """Return what changes when a reviewer's list does, after a look for new cases."""
        self.worklist.refresh()
        drafts = crc32("/".join(sorted(self.drafts.cases_of(reviewer))).encode())
        return f"{self.worklist.version}.{self.log.count}.{drafts:08x}"

    def me(self, reviewer: str) -> dict[str, Any]:
        """Return the reviewer, and the words that a verdict may have."""
        tags = [{"id": key, "name": name} for key, name in TAGS.items()]
        blind = bool(self.readers.double)
        return {"reviewer": reviewer, "name": self.names[reviewer], "blind": blind, "tags": tags}

    def verdicts(self, name: str, reviewer: str) -> dict[str, Any]:
        """Return the verdicts about a case that a reviewer may see."""
        back = self._coming_back(reviewer)
        visible = self._visible(name, reviewer, {name: self.log.of_case(name)}, back)
        case = self.worklist.cases.get(name)
        state = state_of(case.seen, visible) if case else ""
        return {
            "state": state,
            "again": name in back,
            "verdict": self._shown(visible.get(reviewer)),
            "others": [self._shown(v) for code, v in visible.items() if code != reviewer],
        }

    def findings(self, case: OpenedCase) -> list[dict[str, Any]]:
        """Return the doubts about a case, each with the voxel (view) that it speaks of."""
        findings = sorted(self.worklist.findings.get(case.name, []), key=lambda each: -each.weight)
        shown: dict[str, dict[str, Any]] = {}
        for each in findings:
            [text] = doubts([each])
            box = next((m.box for m in each.subjects if m.box is not None), None)
            point = box and [
                (a + b) // 2
                for a, b in zip(*(case.view.index_of(corner) for corner in box), strict=True)
            ]
            shown.setdefault(text, {"text": text, "kind": each.kind, "point": point})
        return list(shown.values())

    def check(self, name: str, reviewer: str, *, anew: bool = False) -> None:
        """Refuse a case that is not there, or not for a reviewer.

        Parameters
        ----------
        name, reviewer : str
        anew : bool
            Whether to look if the case was replaced, corrected or removed.

        Raises
        ------
        ScanError
            ID_UNKNOWN; RESULT_DAMAGED.
        """
        known = is_case_name(name)
        if known and (anew or name not in self.worklist.cases):
            self.worklist.update(name)
        if known and name in self.worklist.damaged:
            raise ScanError(Reason.RESULT_DAMAGED, f"case {name} is damaged")
        known = known and name in self.worklist.cases
        if not known or not self.readers.cases_of(reviewer, [name], self._valid_of(name)):
            raise ScanError(Reason.ID_UNKNOWN, "there is no such case")

    def opened_ahead(self, name: str) -> OpenedCase | None:
        """Return a case that is opened ahead of time; None if it has no room.

        Raises
        ------
        ScanError
            As of `opened`.
        """
        return self.opened(name) if self.open_cases.get_ahead(name) else None

    def opened(self, name: str) -> OpenedCase:
        """Return an open case, opened again if its result was replaced.

        Raises
        ------
        ScanError
            As of `open_case`; RESULT_DAMAGED if label maps are not those of their checksums.
        """
        case = self.open_cases.get(name)
        if self._is_listed(case):
            return case
        self.worklist.update(name)
        self.open_cases.forget(name)
        case = self.open_cases.get(name)
        if not self._is_listed(case):
            self.open_cases.forget(name)
            raise ScanError(Reason.RESULT_DAMAGED, f"case {name} is damaged")
        return case

    def _is_listed(self, case: OpenedCase) -> bool:
        listed = self.worklist.cases.get(case.name)
        return listed is None or listed.seen == case.seen

    def listed_case(self, name: str) -> ListedCase:
        """Return a case of the list.

        Raises
        ------
        ScanError
            ID_UNKNOWN if it was removed.
        """
        case = self.worklist.cases.get(name)
        if case is None:
            raise ScanError(Reason.ID_UNKNOWN, "there is no such case")
        return case

    def keep(self, verdict: Verdict, comment: str) -> Verdict:
        """Keep a verdict about the result that there is now, with how it was given.

        Raises
        ------
        ScanError
            STALE if another result was seen; DISK_FULL or OUTPUT_UNWRITABLE.
        """
        self.worklist.update(verdict.case)
        case = self.listed_case(verdict.case)
        if verdict.seen != case.seen:
            raise ScanError(Reason.STALE, "the result was replaced since it was opened")
        name, reviewer = verdict.case, verdict.reviewer
        verdicts = self._valid_of(name).get(name, {})
        again = name in self._coming_back(reviewer)
        given = replace(
            verdict,
            reading=2 if again and reviewer in verdicts else 1,
            independent=not self._may_have_seen_others(name, reviewer),
        )
        return self.log.append(given, comment)

    def _may_have_seen_others(self, name: str, reviewer: str) -> bool:
        """Return whether a reviewer was shown another's verdict on a case.

        One on a result that was replaced since counts too: after both readers of a result saw each
        other's verdict, what they say of its correction is not independent any more.
        """
        kept = self.log.all_of_case(name)
        if not any(verdict.reviewer != reviewer for verdict in kept):
            return False
        if self.log.has_undone(name, reviewer):  # it may have been shown before that
            return True
        return any(
            each.reviewer != reviewer
            and not self.readers.is_blind(
                name, reviewer, {v.reviewer: v for v in kept if v.seen == each.seen}
            )
            for each in kept
        )

    def save_draft(self, name: str, reviewer: str, version: str) -> int:
        """Publish a correction as a revision, and return its number.

        Parameters
        ----------
        name, reviewer : str
        version : str
            The draft that was seen.

        Raises
        ------
        ScanError
            STALE if the result was replaced since the first stroke; what `Publish` raises.
        RefusedError
            If nothing was changed; DRAFT_CHANGED.
        """
        self.worklist.update(name)
        case = self.opened(name)
        held = self.drafts.of(case, reviewer)
        if self.readers.is_blind(name, reviewer, self._valid_of(name).get(name, {})):
            raise RefusedError(409, "BLIND", BLIND)
        with held.changing(case, version) as draft:
            layers = {case.layers[n].file: case.view.back(draft.layer(n)) for n in draft.changed}
            if not layers or self.publish is None:
                raise RefusedError(409, "NOTHING", "Nothing was changed.")
            revision = case.revision
            self.open_cases.forget(name)  # its arrays and the draft's: publishing needs the memory
            held.painted = None
            del case, draft
            folder = self.publish(name, revision, layers, reviewer)
            self.drafts.drop(held)
        self.open_cases.forget(name)
        self.worklist.update(name)
        return int(folder.name)

    def _visible(
        self,
        name: str,
        reviewer: str,
        current: Mapping[str, Mapping[str, Verdict]],
        back: set[str],
    ) -> dict[str, Verdict]:
        if name in back:
            return {}
        case, verdicts = self.worklist.cases.get(name), current.get(name)
        if case is None or not verdicts:
            return {}
        return self.readers.visible(name, reviewer, verdicts, case.seen)

    def _coming_back(self, reviewer: str) -> set[str]:
        """Return the cases that a reviewer is to read again."""
        if not self.readers.repeat:
            return set()
        return self.readers.coming_back(reviewer, self.log.history())

    def _valid(self, current: Mapping[str, Mapping[str, Verdict]]) -> dict[str, dict[str, Verdict]]:
        """Return the verdicts about the results that there are now."""
        cases = self.worklist.cases
        return {name: about(cases[name].seen, v) for name, v in current.items() if name in cases}

    def _valid_of(self, name: str) -> dict[str, dict[str, Verdict]]:
        """Return the verdicts about the result of a case that there is now."""
        return self._valid({name: self.log.of_case(name)})

    def _shown(self, verdict: Verdict | None) -> dict[str, Any] | None:
        if verdict is None:
            return None
        return {
            "number": verdict.number,
            "reviewer": self.names.get(verdict.reviewer, verdict.reviewer),
            "decision": verdict.decision,
            "structures": verdict.structures,
            "tags": verdict.tags,
            "comment": self.log.comment_of(verdict),
            "at": verdict.at,
        }
