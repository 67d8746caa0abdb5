"""Cases that the ledger knows are taken many at a time, as if each folder were read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scanloom.core import CaseRecord, Reason, ScanError, Series
from scanloom.engine.prepare import Request
from scanloom.engine.results import run_cases
from scanloom.engine.results.run_cases import RunCases
from scanloom.engine.workflow.schema import make_workflow
from scanloom.engine.workflow.selection import Scope
from scanloom.io.identity import case_id, key_fingerprint, source_stamp
from scanloom.io.index.build import build_index
from scanloom.io.index.inspection import SeriesInfo
from scanloom.io.index.storage import IndexedSeries
from scanloom.io.output.case_folder import CaseFolder
from scanloom.io.output.crosswalk import SourceRecord, add_sources
from scanloom.io.output.failures import write_failure
from scanloom.io.output.json_file import write_document
from scanloom.io.output.ledger import Ledger
from scanloom.io.output.private import private_folder
from scanloom.io.output.work_folder import open_output

KEY, COUNT = bytes(32), 50
SELECTED = SeriesInfo(modality="CT", shape=(8, 8, 8), spacing=(1.0, 1.0, 1.0), plane="axial")
ONE = {"models": ["ct_tissue"], "select": {"modality": "CT"}, "policy": {"phases": "first"}}
TWO = {"models": ["m"], "channels": {"a": {"modality": "CT"}, "b": {"modality": "PT"}}}


@pytest.mark.parametrize(
    ("reason", "told"),
    [(Reason.OUTPUT_UNWRITABLE, None), (Reason.RESULT_DAMAGED, "RESULT_DAMAGED")],
)
def test_a_result_that_cannot_be_read_now_is_left_to_a_worker(
    reason: Reason, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tries again, as for any case; a damaged one is not touched."""

    def state(*_: object, **__: object) -> None:
        raise ScanError(reason, "a share is away")

    monkeypatch.setattr(run_cases, "explained_result_state", state)
    request: Any = SimpleNamespace(cards=())
    cases: Any = SimpleNamespace(_out=Path(), _scope=Scope(), _ledger=None, _request=request)
    case: Any = SimpleNamespace(id="one")
    outcome = RunCases._earlier_outcome(cases, case)
    assert (outcome and outcome.code) == told


def drawn_series(draw: random.Random, n: int) -> IndexedSeries:
    """Return a series, two to a study, which may be refused, or have several volumes."""
    uid = f"1.2.{n}"
    source = Series("dicom", (), "1", uid)
    reason = draw.choice([""] * 6 + [Reason.PHASES.code, Reason.SLICE_GAP.code])
    modality = draw.choice(["CT"] * 5 + ["MR"] if n % 2 else ["PT"] * 5 + ["CT"])
    info = SELECTED._replace(reason=reason, modality=modality)
    stamp = draw.choice(["", *["stamp"] * 9]) and f"stamp of {uid}"
    number = case_id(source, KEY)
    return IndexedSeries(number, f"study{n // 2}", "dicom", "1", uid, (), True, info, stamp=stamp)


def publish(
    out: Path, draw: random.Random, case: str, recipe: str, stamp: str
) -> Iterator[SourceRecord]:
    """Write a result as it is requested or another one, or a failure, or nothing."""
    if draw.random() < 0.2:
        if draw.random() < 0.5:
            write_failure(out, CaseRecord(case, Reason.DAMAGED, "cut", (), None), recipe, stamp)
        return
    name = f"named_{case}" if draw.random() < 0.2 else case
    recipe, stamp = draw.choice([recipe] * 5 + ["other"]), draw.choice([stamp] * 5 + ["other"])
    with CaseFolder(out, name, key_fingerprint(KEY)) as folder:
        document = {"case": case, "recipe": recipe, "source": {"hash": "content"}}
        write_document(folder.path / "case.json", document)
        write_document(folder.path / "timing.json", {"source_stamp": stamp})
        folder.publish()
    yield SourceRecord(case, "dicom", f"/{case}", 1, name)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("workflow", [ONE, TWO], ids=["one channel", "two channels"])
def test_the_ledger_gives_the_cases_that_folders_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workflow: dict[str, Any], seed: int
) -> None:
    monkeypatch.setattr(run_cases, "COMPARED_AT_ONCE", 7)
    monkeypatch.setattr("os.fsync", lambda _: None)
    draw, out = random.Random(seed), tmp_path / "out"
    made_workflow = make_workflow(name="w", **workflow)
    request = Request(made_workflow, ()) if workflow is TWO else Request.of(made_workflow)
    series = [drawn_series(draw, n) for n in range(COUNT)]
    series += draw.sample(series, COUNT // 5)  # copies have the same id
    (tmp_path / "scans").mkdir()
    (tmp_path / "scans" / "note.txt").write_text("none of the series")
    open_output(out, key_fingerprint(KEY))
    index = build_index([tmp_path / "scans"], KEY, out)

    def cases(scope: Scope, ledger: Ledger | None) -> RunCases:
        of_series = RunCases(index, request, KEY, out, scope, series, ledger=ledger)
        of_series.compare()
        return of_series

    selected = list(cases(Scope(), None).pending)
    results = {case.id: case.stamp for case in selected}
    # Series of several volumes also have results of when they had one
    results |= {each.id: source_stamp([each.stamp], KEY) for each in series if each.reason}
    sources = [
        source
        for name, stamp in results.items()
        for source in publish(out, draw, name, request.recipe, stamp)
    ]
    with private_folder(out, key_fingerprint(KEY)) as private:
        add_sources(private, sources)
    for scope in (Scope(), Scope(shard=(1, 2))):
        known, read = cases(scope, Ledger(out)), cases(scope, None)
        assert said(known) == said(read)
        known.note_other_shards()
        read.note_other_shards()
        assert said(known) == said(read)
        assert known.ended or scope.shard
        assert known.left_out


def said(cases: RunCases) -> list[object]:
    """Return all that is said of cases."""
    return [
        *(list(each) for each in (cases.endings, cases.left_out, cases.records, cases.pending)),
        (cases.selected, cases.total, cases.refused, cases.work, cases.copies),
        (cases.entries, cases.other_results(), cases.unstated),
    ]
