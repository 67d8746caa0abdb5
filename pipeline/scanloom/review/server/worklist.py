"""The cases to be reviewed: doubtful ones first, each with what was decided about it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scanloom.core import Measurement, ScanError
from scanloom.io.output.file_names import CASE
from scanloom.io.output.layout import published_cases, read_case
from scanloom.io.output.measurements import read_measurements
from scanloom.io.output.published import check_files
from scanloom.io.system.disk_errors import is_passing
from scanloom.review.cohort import Cohort
from scanloom.review.corrections.revisions import REVISIONS, latest_result, revision_number
from scanloom.review.outliers import REVIEW_THRESHOLD, Finding, find_outliers, risk_score
from scanloom.review.report.data import references_of
from scanloom.review.verdicts.results import seen_of, state_of
from scanloom.review.verdicts.verdict import Seen, Verdict

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
