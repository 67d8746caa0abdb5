"""What a run would take: rates that are learnt, cases that are chosen, a plan that is kept."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from scanloom.cli.commands.plan import excluded_lines, table
from scanloom.core import Case, CaseRecord, Outputs, Reason, Series
from scanloom.core.resources import shipped
from scanloom.engine.case.memory_estimate import Placement
from scanloom.engine.planning import plan as planning
from scanloom.engine.planning.calibrate import MAX_TOTAL_VOXELS, choose_samples
from scanloom.engine.planning.cost_model import CostCurve, CostModel, MeasuredCost, cost_model_file
from scanloom.engine.planning.gpu_break_even import gpu_advice
from scanloom.engine.planning.history import RunTimeline, compare_with_plan
from scanloom.engine.planning.model import ExecutionSite, Plan, PlannedCase
from scanloom.engine.planning.plan import make_plan, save_plan, summarize
from scanloom.engine.worker.supervisor import CaseOutcome
from scanloom.engine.workflow.schema import Workflow, make_workflow
from scanloom.engine.workflow.scope import Scope
from scanloom.io.identity import load_key, source_stamp
from scanloom.io.index.series import find_series
from scanloom.io.output.failures import write_failure
from support.write_dicom import Words, noise, write_series


def test_between_and_beyond_what_was_measured() -> None:
    """Of a cost that is a constant and a slope, two sizes are enough."""
    curve = CostCurve()
    for size in (1000.0, 50_000.0):
        curve.add(size, 2.0 + 0.001 * size)

    for size in (1000.0, 7000.0, 50_000.0, 1e6):
        assert curve.at(size) == pytest.approx(2.0 + 0.001 * size)
    assert curve.at(10.0) == pytest.approx(2.01)
    assert CostCurve().at(5.0) is None


def test_a_run_is_shared_out_among_its_cases() -> None:
    """Steps that overlapped count once: what cases are expected to take is what the run took."""
    rng = np.random.default_rng(0)
    cases = [
        MeasuredCost(size, size, 3e-5 * size, 1.0 + 1e-5 * size, 100 + size)
        for size in rng.uniform(1e4, 1e6, 300)
    ]
    rates = CostModel()
    rates.learn(cases, seconds=500.0, start=3.0)

    expected = [rates.seconds(one.values, one.voxels) for one in cases]

    assert sum(e or 0.0 for e in expected) == pytest.approx(500.0, rel=0.1)
    assert rates.start == 3.0


def test_rates_are_written_through_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may add links to the folder; no draft has a name to be foreseen."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mine, folder = tmp_path / "mine", cost_model_file("one").parent
    mine.write_text("mine")
    folder.mkdir(parents=True)
    (folder / f".one.json.{os.getpid()}").symlink_to(mine)

    CostModel(start=1.0).save("one")

    assert mine.read_text() == "mine"
    assert CostModel.load("one") == CostModel(start=1.0)
    assert not cost_model_file("one").is_symlink()


def test_rates_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rates = CostModel()
    rates.learn([MeasuredCost(1e6, 1e5, 2.0, 1.0, 5e4)], 3.0, 1.0)
    rates.save("one")

    assert CostModel.load("one") == rates
    assert not CostModel.load("other").known
    cost_model_file("one").write_text('{"form": 1, "network": 3}')
    assert not CostModel.load("one").known


def test_small_and_large_cases_are_tried_within_bounds() -> None:
    case = Case("", Series("nifti", (Path("a"),)), Outputs(), "", "")
    sizes = [round(MAX_TOTAL_VOXELS / 50) * n for n in range(1, 101)]

    chosen = choose_samples([(size, replace(case, id=str(size))) for size in sizes])

    some = [int(c.id) for c in chosen]
    assert 2 <= len(some) <= 12
    assert min(some) <= sizes[15]
    assert max(some) >= sizes[85]
    assert choose_samples([(5, case)]) == [case]


def test_a_run_is_compared_with_its_plan_if_folders_are_named_by_source(
    tmp_path: Path, workflow: Workflow
) -> None:
    case, folder = "a" * 26, tmp_path / "cases" / "A-1"
    folder.mkdir(parents=True)
    steps = {"network": {"wall_s": 3.0}, "write": {"wall_s": 1.0}}
    timing = {"steps": steps, "window_values": 10, "peak_memory_bytes": 2000}
    (folder / "timing.json").write_text(json.dumps(timing))
    (folder / "case.json").write_text(json.dumps({"grid": {"shape": [2, 3, 4]}}))
    (tmp_path / "runs").mkdir()
    plan = {
        "recipe": "r",
        "cases": [{"case": case, "seconds": 5.0, "written": 9.0}],
        "totals": {"seconds": 5.0, "host": 1000},
    }
    (tmp_path / "runs" / "plan.json").write_text(json.dumps(plan))
    course = RunTimeline(0.0)
    course.note(CaseOutcome(CaseRecord(case, None, "", (), folder), ()))

    compared = compare_with_plan(tmp_path, course, workflow, [], "r")

    assert compared is not None
    assert compared["cases"] == 1
    assert compared["happened"]["host"] == 2000


@pytest.fixture
def workflow() -> Workflow:
    return make_workflow(name="tissues", models=["ct_tissue"], select={"modality": "CT"})


def test_a_plan_names_each_case_and_why_others_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workflow: Workflow
) -> None:
    """The sample study, a small MR and a CT that is too large for the limit: no voxel is read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    monkeypatch.setattr(planning.CostModel, "load", lambda _: known())
    write_series(tmp_path / "in" / "mr", noise(), words=Words(modality="MR"))
    out = tmp_path / "out"

    made = make_plan(workflow, [shipped("data") / "torso_ct", tmp_path / "in"], out)
    save_plan(made, out)

    assert made.left_out == {"NOT_SELECTED": 1}
    assert made.files == {"found": 66, "used": 66, "skipped": 0, "ambiguous": 0, "failed": 0}
    [one] = made.cases
    assert one.voxels == 144 * 192 * 60 or one.voxels == 192 * 144 * 60
    assert one.values > 0
    assert one.seconds == pytest.approx(10.0)
    assert one.seconds is not None
    assert made.totals.seconds == made.totals.archive_seconds == pytest.approx(one.seconds + 2.0)
    assert excluded_lines(made)[1:] == [
        "Not processed: 1 series",
        f"      1 NOT_SELECTED: {Reason.NOT_SELECTED.advice}.",
        "        1 by select.modality",
    ]
    assert made.totals.host == one.host
    kept = json.loads((out / "runs" / "plan.json").read_text())
    assert kept["cases"][0]["case"] == one.case
    assert str(tmp_path) not in json.dumps(kept)


def test_another_overlap_is_planned_as_it_would_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workflow: Workflow
) -> None:
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    monkeypatch.setattr(planning.CostModel, "load", lambda _: known())
    other = workflow.execution.model_copy(update={"overlap": 0.75})
    scans = [shipped("data") / "torso_ct"]

    [usual] = make_plan(workflow, scans, tmp_path / "out").cases
    made = make_plan(workflow.model_copy(update={"execution": other}), scans, tmp_path / "out")

    assert made.cases[0].values > usual.values
    assert "ct_tissue: overlap 0.75 instead of 0.25" in made.notes


def test_what_does_not_fit_is_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workflow: Workflow
) -> None:
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    small = workflow.execution.model_copy(update={"memory_limit": 200_000_000})
    tight = workflow.model_copy(update={"execution": small})

    made = make_plan(tight, [shipped("data") / "torso_ct"], tmp_path / "out")

    assert [one.reason for one in made.cases] == ["OUT_OF_MEMORY"]
    assert made.todo == []
    assert excluded_lines(made)[1:] == [
        "Not processed: 1 case",
        f"      1 OUT_OF_MEMORY: {Reason.OUT_OF_MEMORY.advice}.",
    ]


def test_the_time_of_a_run_is_not_that_of_its_archive() -> None:
    """A run over 2 of 10 cases, such as a shard; both times stand in the table under own names."""
    cases = tuple(PlannedCase(str(n), seconds=60.0, written=1.0) for n in range(2))
    site = ExecutionSite(
        Placement("cpu", "float32"), workers=1, in_flight=1, host=None, device=None
    )
    totals = summarize(cases, known(), site, 10)
    made = Plan(
        *("w", "r", "cpu", "float32", 1, 1, {"found": 10}),
        *(0, 10, {}, (), cases, totals),
    )
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table(made))
    lines = {
        line.split("  ")[0]: line.split("  ", 1)[1] for line in console.export_text().splitlines()
    }

    assert totals.seconds == 122.0
    assert totals.archive_seconds == 602.0
    assert "2 min on this machine: 2 cases, 61 s a case" in lines["this run"]
    assert "10 min on this machine, if none were done yet: 10 cases" in lines["whole archive"]


def known() -> CostModel:
    """Return rates by which every case takes ten seconds."""
    rates = CostModel()
    rates.learn([MeasuredCost(1.0, 1.0, 5.0, 5.0, 1e6)], 10.0, 2.0)
    for curve in (rates.network, rates.rest, rates.written):
        curve.add(1e12, next(iter(curve.points.values())).amount)
    return rates


def test_whether_a_gpu_pays_is_told_by_what_was_measured() -> None:
    """A GPU of a hundred times the speed, with half a second more around each case."""
    gpu, cpu = CostModel(), CostModel()
    for size in (1e5, 1e9):
        gpu.learn([MeasuredCost(size, size, 1e-8 * size, 1.5, 1.0)], 1e-8 * size + 1.5, 1.0)
        cpu.learn([MeasuredCost(size, size, 1e-6 * size, 1.0, 1.0)], 1e-6 * size + 1.0, 1.0)
    small, large = (planning.PlannedCase("c", int(size), int(size)) for size in (1e5, 1e9))

    assert gpu_advice([large], gpu, cpu).startswith("a GPU pays: 12 s on it, 17 min on the CPU")
    assert gpu_advice([small] * 3, gpu, cpu).startswith("a GPU does not pay: ")
    assert "1 small cases are done sooner on the CPU" in gpu_advice([small, large], gpu, cpu)
    assert "could not be measured" in gpu_advice([large], CostModel(), cpu)


@pytest.mark.slow
def test_a_plan_measures_the_other_device_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workflow: Workflow
) -> None:
    """Here another precision stands for the other device: the flow is the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    slow = workflow.execution.model_copy(update={"precision": "float32", "compiled_restore": False})
    other = workflow.model_copy(update={"execution": slow})
    monkeypatch.setattr(planning, "on_other_device", lambda *_: other)
    asked: list[str] = []
    load = CostModel.load
    monkeypatch.setattr(
        planning.CostModel, "load", lambda name: [asked.append(name), load(name)][1]
    )

    made = make_plan(workflow, [shipped("data") / "torso_ct"], tmp_path / "out")

    assert len(set(asked)) == 2
    assert any("on it" in note and "on the CPU" in note for note in made.notes)


def test_a_plan_counts_what_a_run_with_its_options_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workflow: Workflow
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    monkeypatch.setattr(planning.CostModel, "load", lambda _: known())
    out, scans = tmp_path / "out", [shipped("data") / "torso_ct"]

    def planned(**how: object) -> tuple[int, int, list[str]]:
        made = make_plan(workflow, scans, out, scope=Scope(**how))  # type: ignore[arg-type]
        return len(made.todo), made.before, [one.reason for one in made.cases if one.reason]

    assert planned() == (1, 0, [])
    assert sorted(planned(shard=(k, 2))[0] for k in (1, 2)) == [0, 1]
    [case] = make_plan(workflow, scans, out).cases
    recipe = make_plan(workflow, scans, out).recipe
    damaged = CaseRecord(case.case, Reason.DAMAGED, "", (), None)
    write_failure(out, damaged, recipe, "of files as they were before")
    assert planned() == (1, 0, [])
    stamp = source_stamp([find_series(scans[0])[0].stamp], load_key(tmp_path / "key"))
    write_failure(out, damaged, recipe, stamp)
    assert planned() == (0, 0, ["DAMAGED"])
    assert planned(retry_failed=True) == (1, 0, [])
    folder = out / "cases" / case.case
    folder.mkdir(parents=True)
    (folder / "case.json").write_text('{"recipe": "another", "source": {"hash": "x"}}')
    (folder / "timing.json").write_text("{}")
    assert planned() == (0, 0, ["STALE"])
    assert planned(replace=True, retry_failed=True) == (1, 0, [])


def test_another_device_that_can_not_do_it_stops_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workflow: Workflow
) -> None:
    """Such as half precision, asked for on a GPU, on a CPU that has none."""
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    monkeypatch.setattr(planning.CostModel, "load", lambda _: known())
    absent = workflow.execution.model_copy(update={"device": "cuda:99"})
    other = workflow.model_copy(update={"execution": absent})
    monkeypatch.setattr(planning, "on_other_device", lambda *_: other)

    made = make_plan(workflow, [shipped("data") / "torso_ct"], tmp_path / "out")

    assert len(made.todo) == 1
    assert any(note.startswith("whether a GPU pays is not known") for note in made.notes)
