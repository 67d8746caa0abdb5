"""The cases of a run: shards, outcomes of earlier runs, and outcomes by series."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scanloom.core import Case, CaseRecord, Outputs, Reason, Series
from scanloom.engine.monitor import StatusWriter
from scanloom.engine.outcomes import Outcome
from scanloom.engine.prepare import Request
from scanloom.engine.results import run_cases
from scanloom.engine.results.run_cases import RunCases
from scanloom.engine.run import RunOptions, RunSteps
from scanloom.engine.worker.messages import CaseFile
from scanloom.engine.workflow.schema import make_workflow
from scanloom.engine.workflow.selection import Inputs, Scope
from scanloom.io.index.inspection import SeriesInfo
from scanloom.io.index.storage import IndexedSeries, Run
from scanloom.io.output.case_folder import CaseFolder
from scanloom.io.output.failures import write_failure
from scanloom.io.output.json_file import write_document
from scanloom.io.output.ledger import Ledger

NAMES = [f"case{n}" for n in range(8)]
WHOLE = Scope()
REQUEST = Request(make_workflow(name="w", models=["m"]), ())


def case(name: str) -> Case:
    return Case(name, Series("nifti", (Path("scan.nii"),)), Outputs(), "", "recipe")


def inputs(name: str) -> Inputs:
    """Return two channels, the second of which is the same series for all cases."""
    return tuple(
        IndexedSeries(series, "", "nifti", "", "", (Run(0, 0, 1),), True, SeriesInfo())
        for series in (name, "shared")
    )


Candidates = Callable[[], Iterator[tuple[Inputs, Case]]]


def candidates() -> Iterator[tuple[Inputs, Case]]:
    return ((inputs(name), case(name)) for name in NAMES)


class CasesOf(RunCases):
    """Cases of a function, in the place of those that a request selects of an index."""

    def __init__(self, make: Candidates, out: Path, scope: Scope = WHOLE, **more: Any) -> None:
        index: Any = SimpleNamespace(series=())
        super().__init__(index, REQUEST, bytes(32), out, scope, **more)
        self._make = make

    def _candidates(self, *_: object) -> Iterator[tuple[Inputs, Case]]:
        return self._make()


def fail(out: Path, name: str) -> None:
    write_failure(out, CaseRecord(name, Reason.DAMAGED, "truncated", (), None), "recipe")


def test_cases_are_divided_by_the_outcomes_of_earlier_runs(tmp_path: Path) -> None:
    fail(tmp_path, "case3")
    blocked = tmp_path / "cases" / "case5"
    blocked.mkdir(parents=True)  # a result without its documents

    cases = CasesOf(candidates, tmp_path)
    cases.compare()

    assert [c.id for c in cases.pending] == [n for n in NAMES if n not in ("case3", "case5")]
    lacking = [("case3", Reason.DAMAGED), ("case5", Reason.RESULT_DAMAGED)]
    assert [(r.id, r.reason) for r in cases.without_result] == lacking

    folder = tmp_path / "runs" / "again"
    folder.mkdir(parents=True)
    status_writer = StatusWriter("again", folder, period=10.0)
    RunSteps(REQUEST, RunOptions(tmp_path), bytes(32), "again", status_writer).enter(cases)
    now = status_writer.now()
    status_writer.close("done")
    assert (now.cases, now.before, now.work, now.failed) == (len(NAMES), 0, len(NAMES) - 2, 2)
    assert now.reasons == {"DAMAGED": 1, "RESULT_DAMAGED": 1}


def test_results_of_earlier_runs_are_not_looked_for_to_be_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a million cases on a share, that takes as long as the run."""
    cases = CasesOf(candidates, tmp_path)
    cases._ended.append(Outcome("case1", "", ""))
    monkeypatch.setattr(run_cases, "case_folder", pytest.fail)

    assert (cases.ended, cases.without_result) == (1, [])


def test_outcomes_are_noted_for_each_series_in_order(tmp_path: Path) -> None:
    cases = CasesOf(candidates, tmp_path)
    fail(tmp_path, "case2")

    cases.compare()
    cases.note(CaseRecord("case1", None, "", (), None))

    failed, published = ("DAMAGED", "truncated"), ("", "")
    expected = [("case2", *failed), ("shared", *failed), ("case1", *published)]
    assert list(cases.endings) == [*expected, ("shared", *published)]
    assert cases.endings.finder()("shared") == [("shared", *failed), ("shared", *published)]


def test_outcomes_of_other_shards_are_read_at_the_end(tmp_path: Path) -> None:
    cases = CasesOf(candidates, tmp_path, Scope(shard=(1, 2)))
    cases.compare()
    foreign_ids = sorted(set(NAMES) - {c.id for c in cases.pending})
    assert cases.pending
    assert foreign_ids
    fail(tmp_path, foreign_ids[0])

    assert list(cases.endings) == []
    cases.note_other_shards()

    assert [outcome.id for outcome in cases.endings] == [foreign_ids[0], "shared"]
    assert (cases.selected, cases.total) == (len(cases.pending), len(NAMES))


def test_a_copy_of_another_shard_leaves_the_row_of_its_result(tmp_path: Path) -> None:
    """The files of a copy have other times than those that the result was made of."""
    with CaseFolder(tmp_path, "case1", "fingerprint") as folder:
        document = {"case": "case1", "recipe": "recipe", "source": {"hash": "content"}}
        write_document(folder.path / "case.json", document)
        write_document(folder.path / "timing.json", {"source_stamp": "stamp"})
        folder.publish()
    published, copy = (replace(case("case1"), stamp=stamp) for stamp in ("stamp", "of the copy"))
    scope = next(scope for k in (1, 2) if not (scope := Scope(shard=(k, 2))).holds("case1"))

    def of_both() -> Iterator[tuple[Inputs, Case]]:
        return ((inputs(one.id)[:1], one) for one in (published, copy))

    ledger = Ledger(tmp_path)
    cases = CasesOf(of_both, tmp_path, scope, ledger=ledger)
    cases.compare()
    cases.note_other_shards()
    ledger.gather()

    later = Ledger(tmp_path)
    assert [later.holds(one) for one in (published, copy)] == [True, False]
    assert [outcome.code for outcome in cases.endings] == [""]


def test_cases_are_not_kept(tmp_path: Path) -> None:
    """Of 2,000 cases, a third of which are done, few are in memory at a time."""
    count, alive, most, passes = 2000, 0, 0, 0

    def ended() -> None:
        nonlocal alive
        alive -= 1

    def made() -> Iterator[tuple[Inputs, Case]]:
        nonlocal alive, most, passes
        passes += 1
        for n in range(count):
            one = case(f"case{n}")
            weakref.finalize(one, ended)
            alive += 1
            most = max(most, alive)
            yield inputs(one.id)[:1], one
            del one

    for n in range(0, count, 3):
        fail(tmp_path, f"case{n}")
    waiting = CaseFile(tmp_path / "cases.jsonl")
    cases = CasesOf(made, tmp_path, pending=waiting)

    cases.compare()

    assert (len(waiting), cases.ended, len(cases.endings)) == (1333, 667, 667)
    assert (passes, alive) == (1, 0)
    assert most < 5
    assert [c.id for c in waiting] == [f"case{n}" for n in range(count) if n % 3]


def test_equal_ids_are_one_case_and_different_content_is_told(tmp_path: Path) -> None:
    """The copies of a case that is to be worked on are named too; it runs where it came first."""
    for name, text in (("a", "equal"), ("b", "other"), ("c", "equal"), ("d", "one"), ("e", "two")):
        (tmp_path / name).write_text(text)

    def made() -> Iterator[tuple[Inputs, Case]]:
        for name, path in (("x", "a"), ("y", "b"), ("z", "d"), ("x", "c"), ("z", "e")):
            series = Series("nifti", (tmp_path / path,))
            yield inputs(name)[:1], Case(name, series, Outputs(), "", "recipe")
        for path, phase in itertools.product("de", (0, 1)):  # of a file with several volumes
            series = Series("nifti", (tmp_path / path,))
            yield inputs("w")[:1], Case(f"w{phase}", series, Outputs(), "", "recipe", phase=phase)

    cases = CasesOf(made, tmp_path, series=[inputs(name)[0] for name in "xyzxzww"])
    cases.compare()

    assert [(entry.id, entry.reason) for entry in cases.left_out] == [
        (name, Reason.ID_TAKEN) for name in "zzww"
    ]
    assert [(c.id, bool(c.source_hash)) for c in cases.pending] == [("x", True), ("y", False)]
    assert [c.series.files[0].name for c in cases.copies] == ["c"]
    assert (cases.selected, cases.total) == (5, 5)
