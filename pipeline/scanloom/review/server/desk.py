"""State of a review server: the list of cases, doubtful ones first, and the verdicts on them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from numpy.typing import NDArray

from scanloom.core import Measurement, Reason, ScanError
from scanloom.io.output.file_names import CASE
from scanloom.io.output.layout import is_case_name, published_cases, read_case
from scanloom.io.output.measurements import read_measurements
from scanloom.io.output.published import check_files
from scanloom.io.system.disk_errors import is_passing
from scanloom.review.outliers import REVIEW_THRESHOLD, Cohort, Finding, find_outliers, risk_score
from scanloom.review.report.data import references_of
from scanloom.review.revisions import REVISIONS, latest_result, revision_number
from scanloom.review.server.cases import OpenCases, OpenedCase
from scanloom.review.server.drafts import Drafts
from scanloom.review.server.security import RefusedError
from scanloom.review.verdicts.log import VerdictLog
from scanloom.review.verdicts.readers import Readers
from scanloom.review.verdicts.verdict import TAGS, Seen, Verdict, about, differ, seen_of, state_of

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


COLUMNS = (
    *("id", "modality", "slices", "spacing", "models", "doubts", "risk", "review"),
    *("state", "mine", "disagreed", "readers", "revision", "draft"),
)
"""Columns of the list; `state` is a decision, "disagreed", "stale" or "open"."""
STATES = ("open", "accept", "edit", "reject", "disagreed", "stale")
LEAST_INTERVAL_S = 2.0
"""Time between two looks for new cases; with many cases, some times as long as a look takes."""
_INTERVALS_PER_LOOK = 10
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Exceptions when reading a file that was changed after its publication."""
MAX_WAIT_S = 1.0
"""Time that a request waits for a look; then it is answered from the look before."""


@dataclass(frozen=True, eq=False)
class ListedCase:
    """A published case, as far as the list needs it."""

    name: str
    modality: str
    shape: tuple[int, ...]
    spacing: tuple[float, ...]
    axes: str
    models: tuple[str, ...]
    measurements: tuple[Measurement, ...]
    references: Mapping[str, Any]
    seen: Seen
    revision: int


class Worklist:
    """The published cases of an output folder, in the order of review; new ones appear.

    Parameters
    ----------
    out : Path
        The output folder.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.damaged: set[str] = set()
        """Names of cases that can't be read, which are left out."""
        self.cases: dict[str, ListedCase] = {}
        """Cases by name, those with the highest risk first."""
        self.findings: dict[str, list[Finding]] = {}
        self.version = 0
        self._guard = threading.Lock()
        self._swap = threading.Lock()
        self._known: dict[str, tuple[object, ListedCase]] = {}
        self._cohort = Cohort((), {})
        self._stamps: tuple[object, dict[str, object]] | None = None
        self._next_look = 0.0
        self._look: threading.Thread | None = None

    def refresh(self, *, at_once: bool = False) -> None:
        """Look for cases that were added, replaced or removed, unless that was done just now.

        Parameters
        ----------
        at_once : bool
            Whether to look in any case, and to wait until that is done.
        """
        at_once = at_once or self._stamps is None
        with self._guard:
            if at_once:
                if self._look is not None:
                    self._look.join()  # it may have begun too early
                self._read_changes()
                return
            if self._look is None or not self._look.is_alive():
                if time.monotonic() < self._next_look:
                    return
                self._look = threading.Thread(target=self._read_changes, daemon=True)
                self._look.start()
            look = self._look
        look.join(MAX_WAIT_S)

    def update(self, name: str) -> None:
        """Read a case again if it was replaced, corrected or removed.

        Its findings are made anew; its place in the list, and what other cases are compared with,
        stay until the next look that finds another case in `cases/`.

        Raises
        ------
        OSError
            If it can't be read for the moment: then it stays as it was.
        """
        folder, damaged = self.out / "cases" / name, set[str]()
        before = self._known.get(name)
        found = self._look_at(folder, damaged)
        if found is not None and found is before:
            return
        with self._swap:
            without = {key: value for key, value in self._known.items() if key != name}
            self._known = without if found is None else {**without, name: found}
            self.damaged = self.damaged - {name} | (damaged if folder.is_dir() else set())
            if found is None:
                self.cases = {key: case for key, case in self.cases.items() if key != name}
            else:
                case = found[1]
                findings = find_outliers({name: case.measurements}, self._cohort, {name: case.axes})
                self.findings = {**self.findings, **findings}
                self.cases = {**self.cases, name: case}
            self.version += 1

    def _read_changes(self) -> None:
        began = time.monotonic()
        whole = True
        with suppress(OSError):  # the folder is gone or can't be read now: the list stays
            stamps = _stamp(self.out / "cases"), revision_stamps(self.out)
            cases, revisions = self._stamps or (None, {})
            if stamps[0] != cases or self._stamps is None:
                whole = self._read()
            else:
                for name in {name for name, _ in stamps[1].items() ^ revisions.items()}:
                    self.update(name)
            self._stamps = stamps if whole else (None, stamps[1])  # look again soon
        now = time.monotonic()
        self._next_look = now + max(LEAST_INTERVAL_S, _INTERVALS_PER_LOOK * (now - began))

    def _read(self) -> bool:
        """Read all cases; return whether each could be read, or is damaged.

        One that can't be read for the moment stays as it was.
        """
        damaged: set[str] = set()
        found, whole = dict[str, tuple[object, ListedCase]](), True
        for folder in published_cases(self.out):
            try:
                case = self._look_at(folder, damaged)
            except OSError:
                case, whole = self._known.get(folder.name), False
                if case is None:
                    damaged.add(folder.name)
            if case is not None:
                found[folder.name] = case
        cases = {name: case for name, (_, case) in found.items()}
        references = {m: r for case in cases.values() for m, r in case.references.items()}
        cohort = Cohort((m for case in cases.values() for m in case.measurements), references)
        measured = {name: case.measurements for name, case in cases.items()}
        axes = {name: case.axes for name, case in cases.items()}
        findings = find_outliers(measured, cohort, axes)
        risks = {name: -risk_score(findings[name]) for name in cases}
        with self._swap:
            self._known, self._cohort, self.findings, self.damaged = (
                found,
                cohort,
                findings,
                damaged,
            )
            self.cases = {name: cases[name] for name in sorted(cases, key=lambda n: (risks[n], n))}
            self.version += 1
        return whole

    def _look_at(self, folder: Path, damaged: set[str]) -> tuple[object, ListedCase] | None:
        """Return a case, and what changes when it does; None if it is damaged or gone.

        Raises
        ------
        OSError
            If it can't be read for the moment, such as with too many open files.
        """
        try:
            check_files(folder)
            latest = latest_result(self.out, folder.name)
            stamp = _stamp(folder / CASE), _stamp(latest / CASE)
            known = self._known.get(folder.name)
            return known if known and known[0] == stamp else (stamp, _listed(folder, latest))
        except (*_DAMAGE, ScanError) as exc:
            if is_passing(exc):
                raise
            damaged.add(folder.name)
            return None

    def rows(
        self,
        names: Iterable[str],
        reviewer: str,
        visible: Mapping[str, Mapping[str, Verdict]],
        disagreed: Iterable[str],
        drafts: Container[str] = (),
    ) -> tuple[list[list[Any]], Counter[str]]:
        """Return the rows of some cases, and the number of cases in each state.

        Parameters
        ----------
        names : iterable of str
            Names of cases.
        reviewer : str
            Code of the reviewer.
        visible : mapping
            Verdicts that the reviewer may see, by case and reviewer.
        disagreed : iterable of str
            Cases about which readers disagree, as far as the reviewer may know.
        drafts : container of str
            Cases that the reviewer is correcting.
        """
        apart, rows, counts = set(disagreed), list[list[Any]](), Counter[str]()
        for name in names:
            case = self.cases.get(name)
            if case is None:
                continue
            verdicts = visible.get(name, {})
            state = state_of(case.seen, verdicts, disagreed=name in apart)
            own = verdicts.get(reviewer)
            counts[state] += 1
            counts["mine"] += own is not None
            rows.append([*self._row(case, state, own, verdicts), name in drafts])
        return rows, counts

    def _row(
        self, case: ListedCase, state: str, own: Verdict | None, verdicts: Mapping[str, Verdict]
    ) -> list[Any]:
        findings = self.findings.get(case.name, [])
        risk = risk_score(findings)
        return [
            *(case.name, case.modality, case.shape, [round(s, 3) for s in case.spacing]),
            *(case.models, doubts(findings), round(risk, 2), risk >= REVIEW_THRESHOLD, state),
            *(own.decision if own else None, state == "disagreed", len(verdicts)),
            case.revision,
        ]


def doubts(findings: Sequence[Finding]) -> list[str]:
    """Return the findings of a case as sentences, the heaviest first."""
    ordered = sorted(findings, key=lambda each: -each.weight)
    return list(dict.fromkeys(f"{each.structure}: {each.text}" for each in ordered))


def revision_stamps(out: Path) -> dict[str, object]:
    """Return what changes when a revision is added, by the name of its case.

    Raises
    ------
    OSError
        If the folder can't be read for the moment.
    """
    try:
        return {path.name: _stamp(path) for path in Path(out, *REVISIONS).iterdir()}
    except OSError as exc:
        if is_passing(exc):
            raise
        return {}


def _listed(folder: Path, latest: Path) -> ListedCase:
    """Return a case; `latest` is the folder of its latest revision, or `folder`."""
    document = read_case(folder)
    grid = document["grid"]
    return ListedCase(
        folder.name,
        document["source"]["modality"] or "",
        tuple(grid["shape"]),
        tuple(grid["spacing_mm"]),
        grid["axes"],
        tuple(each["name"] for each in document["models"]),
        read_measurements(latest),
        {m["name"]: references_of(m) for m in document["models"]},
        seen_of(latest),
        revision_number(latest),
    )


def _stamp(path: Path) -> object:
    """Return what changes when a file or folder is replaced; None if it is missing."""
    with suppress(OSError):
        stat = path.stat()
        return stat.st_mtime_ns, stat.st_ino
    return None
