"""A plan of a run: measured costs, cases that are tried, the plan that is kept."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from rich.console import Console

from scanloom.cli.commands.plan import compared_rows, excluded_lines, table
from scanloom.convert.store import find_model
from scanloom.core import CaseRecord, Reason
from scanloom.core.paths import shipped
from scanloom.engine.costs import (
    CaseCost,
    Costs,
    RunTimeline,
    compare_with_plan,
    costs_file,
    costs_key,
    states_something,
)
from scanloom.engine.plan import ExecutionSite, PlannedCase, RunPlan
from scanloom.engine.planning import (
    choose_cases,
    compare_devices,
    find_site,
    make_plan,
    save_plan,
    summarize,
)
from scanloom.engine.prepare import Request
from scanloom.engine.worker.supervisor import CaseOutcome
from scanloom.engine.workflow.schema import Workflow, make_workflow
from scanloom.engine.workflow.selection import Scope
from scanloom.inference.memory import Placement
from scanloom.io.identity import load_key, source_stamp
from scanloom.io.index.series import find_series
from scanloom.io.output.failures import write_failure
from support.commands import scanloom, write_tiny_bundle
from support.write_dicom import Words, noise, write_series

TINY = 1280.0
"""Voxels of a scan of 16 x 10 x 8."""
WINDOW = 96.0**3
CPU = ExecutionSite(Placement("cpu", "float32"), workers=1, in_flight=1, host=None, device=None)


class Machine:
    """A machine whose cases cost a constant and two slopes, with some noise.

    Parameters
    ----------
    rng : Generator
        Draws the noise.
    network, rest : float
        Seconds of a window, and of a million voxels.
    """

    def __init__(self, rng: np.random.Generator, network: float, rest: float) -> None:
        self.rng, self.network, self.rest = rng, network, rest

    def measured(self, voxels: float, *, alone: bool = False) -> CaseCost:
        """Return the cost of a case with the windows of half a million voxels each."""
        values = windows(voxels) * WINDOW
        noise = self.rng.lognormal(0.0, 0.1, 2)
        seconds = 0.05 + self.network * windows(voxels), 0.5 + self.rest * voxels / 1e6
        network, rest = noise * seconds
        return CaseCost(values, voxels, network, rest, 1e3 + 0.1 * voxels, alone)


def windows(voxels: float) -> int:
    return int(np.ceil(voxels / 5e5))


def planned(voxels: float) -> PlannedCase:
    return PlannedCase(str(voxels), round(voxels), round(windows(voxels) * WINDOW))


MACHINES = {"network dominates": (3.0, 0.05), "loading dominates": (0.01, 2.0), "even": (0.3, 0.3)}
ARCHIVES: dict[str, Callable[[np.random.Generator], list[float]]] = {
    "tiny and large": lambda rng: [TINY] * 30 + list(rng.uniform(5e6, 8e7, 20)),
    "alike": lambda rng: list(rng.uniform(2e6, 3e6, 40)),
    "all sizes": lambda rng: list(10 ** rng.uniform(3, 8, 50)),
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("archive", ARCHIVES)
@pytest.mark.parametrize("seed", range(5))
def test_a_run_takes_what_was_planned_from_scans_of_the_same_kind(
    machine: str, archive: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    here, costs = Machine(rng, *MACHINES[machine]), Costs()
    costs.learn([here.measured(size) for size in ARCHIVES[archive](rng)], 3.0)
    sizes = ARCHIVES[archive](rng)
    taken = [here.measured(size) for size in sizes]

    totals = summarize([planned(size) for size in sizes], costs, CPU, len(sizes))

    assert totals.seconds is not None
    low, high = totals.seconds
    assert low <= 3.0 + sum(case.network + case.rest for case in taken) <= high
    assert totals.written is not None
    assert totals.written[0] <= sum(case.written for case in taken) <= totals.written[1]
    assert totals.known_share > 0.9


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("count", [1, 20])
def test_tiny_scans_say_little_of_large_ones(machine: str, count: int) -> None:
    """The range holds the truth, and is stated only where the network's windows decide it."""
    rng = np.random.default_rng(count)
    here, costs = Machine(rng, *MACHINES[machine]), Costs()
    costs.learn([here.measured(TINY) for _ in range(count)], 3.0)
    sizes = list(rng.uniform(5e6, 8e7, 20))
    taken = 3.0 + sum(c.network + c.rest for c in map(here.measured, sizes))
    cases = [planned(size) for size in sizes]

    low, high = costs.run_time(cases, CPU)
    totals = summarize(cases, costs, CPU, len(sizes))

    assert low <= taken <= high
    assert totals.known_share == 0.0
    assert (totals.seconds is None) == (not states_something((low, high)))
    if totals.seconds is None:
        scans = "1 case that were" if count == 1 else "20 cases that were"
        assert f"the {scans} tried have up to 1,280 voxels" in totals.unknown


def test_the_network_is_planned_by_its_windows() -> None:
    """Scans with one window predict scans with a hundred; another overlap means more windows."""
    costs = Costs()
    costs.learn([CaseCost(WINDOW, 5e5, 2.0, 0.1, 1e4)] * 3, 1.0)

    [(low, high)] = costs.network([PlannedCase("large", values=round(100 * WINDOW))])

    assert low <= 100.0 <= 200.0 <= high <= 300.0


def test_a_plan_without_measurements_states_why(tmp_path: Path) -> None:
    totals = summarize([planned(1e6)], Costs(), CPU, 1)
    tried = summarize([planned(1e6)], Costs(), CPU, 1, "cases were tried without a result: X")

    assert (totals.seconds, totals.written) == (None, None)
    assert totals.unknown == "this machine has not processed such cases yet"
    assert tried.unknown == "cases were tried without a result: X"
    assert "time unknown: this machine has not processed such cases yet" in shown(totals)


def test_a_run_is_shared_out_among_its_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workflow: Workflow
) -> None:
    """Steps that overlapped count once: network and other steps add up to the time of the run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    course = RunTimeline(100.0)
    for n in range(4):
        folder = published(tmp_path, f"case{n}", network=30.0, write=10.0, engine=5.0)
        course.note_result(CaseOutcome(CaseRecord(f"case{n}", None, "", (), folder), ()))
    course.first_on_device, course.last_end = 103.0, 203.0

    assert compare_with_plan(tmp_path, course, Request(workflow, ())) is None

    costs = Costs.load(costs_key(Request(workflow, ()), "cpu", "float32"))
    assert sum(case.network + case.rest for case in costs.cases) == pytest.approx(100 - 4 * 5)
    assert costs.cases[0].network == pytest.approx(3 * costs.cases[0].rest)
    assert costs.starts == [3.0]


def published(out: Path, name: str, **seconds: float) -> Path:
    """Write the documents of a published case that took some seconds a step."""
    folder = out / "cases" / name
    folder.mkdir(parents=True)
    timing = {
        "steps": {step: {"wall_s": wall} for step, wall in seconds.items()},
        "window_values": 10,
        "peak_memory_bytes": 2000,
        "device": ["cpu"],
        "precision": ["float32"],
    }
    (folder / "timing.json").write_text(json.dumps(timing))
    (folder / "case.json").write_text(json.dumps({"grid": {"shape": [2, 3, 4]}}))
    return folder


def test_cases_of_runs_take_the_place_of_cases_tried_alone() -> None:
    costs = Costs()
    costs.learn([CaseCost(1.0, 1.0, 1.0, 1.0, 1.0, alone=True)], 9.0)
    costs.learn([CaseCost(2.0, 2.0, 2.0, 2.0, 2.0)], 3.0)

    assert [case.alone for case in costs.cases] == [False]
    assert costs.starts == [3.0]


def test_costs_depend_on_device_and_engine_but_not_on_the_number_of_windows(
    workflow: Workflow,
) -> None:
    cards = (find_model("ct_tissue"),)

    def key(device: str = "cpu", **execution: object) -> str:
        changed = workflow.execution.model_copy(update=execution)
        changed_workflow = workflow.model_copy(update={"execution": changed})
        return costs_key(Request(changed_workflow, cards), device, "float32")

    assert key() == key(overlap=0.75) == key(mirror="no")
    assert key("cuda:0") == key("cuda:1")
    assert len({key(), key("cuda:0"), key(engine="torch"), key(threads=1)}) == 4


def test_costs_are_written_through_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may add links to the folder; no draft has a name to be foreseen."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mine, folder = tmp_path / "mine", costs_file("one").parent
    mine.write_text("mine")
    folder.mkdir(parents=True)
    (folder / f".one.json.{os.getpid()}").symlink_to(mine)

    Costs(starts=[1.0]).save("one")

    assert mine.read_text() == "mine"
    assert Costs.load("one") == Costs(starts=[1.0])
    assert not costs_file("one").is_symlink()


def test_costs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    costs = Costs()
    costs.learn([CaseCost(1e6, 1e5, 2.0, 1.0, 5e4)], 3.0)
    costs.save("one")

    assert Costs.load("one") == costs
    assert not Costs.load("other").cases
    whole = costs_file("one").read_text()
    for damaged in ('{"schema": 2, "cases": 3}', whole.replace("2.0", "NaN"), whole[:-9], "[]"):
        costs_file("one").write_text(damaged)
        assert not Costs.load("one").cases


def candidate(size: int) -> PlannedCase:
    return PlannedCase(str(size), size, size)


def test_the_smallest_case_is_tried_and_cases_in_which_the_cost_lies() -> None:
    """Half of the voxels are in scans of up to 7 million, whatever the number of tiny ones."""
    archive = [candidate(n) for n in range(1000, 1300)]
    archive += [candidate(n * 1_000_000) for n in range(1, 11)]

    sizes = [each.voxels for each in choose_cases(archive)]

    assert sizes[0] == 1000
    assert sizes[1:3] == [7_000_000, 10_000_000]
    assert len(sizes) == 5
    assert choose_cases([archive[0]]) == [archive[0]]
    assert choose_cases([]) == []


def test_a_run_is_compared_with_its_plan_if_folders_are_named_by_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workflow: Workflow
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    case, folder = "a" * 26, published(tmp_path, "A-1", network=3.0, write=1.0)
    (tmp_path / "runs").mkdir()
    plan = {
        "recipe": Request(workflow, ()).recipe,
        "cases": [
            {"case": case, "seconds": [5.0, 6.0], "written": [9.0, 10.0]},
            {"case": "b" * 26, "seconds": [5.0, 6.0], "written": [9.0, 10.0]},
        ],
        "totals": {"seconds": [10.0, 12.0], "written": [18.0, 20.0], "host": 1000},
    }
    (tmp_path / "runs" / "plan.json").write_text(json.dumps(plan))
    course = RunTimeline(0.0)
    course.note_result(CaseOutcome(CaseRecord(case, None, "", (), folder), ()))
    course.began, course.last_end = 0.0, 24.0

    compared = compare_with_plan(tmp_path, course, Request(workflow, ()))

    assert compared is not None
    assert compared["cases"] == 1
    assert compared["happened"]["host"] == 2000
    assert compared["planned"]["seconds"] == (5.0, 6.0)
    assert compared["ratio"]["seconds"] == 0.25
    assert compared["ratio"]["host"] == 0.5
    assert ("time", "24 s, 5.0 s to 6.0 s planned") in compared_rows(compared)
    cards = (find_model("ct_tissue"),)
    assert compare_with_plan(tmp_path, course, Request(workflow, cards)) is None


def test_a_worker_of_two_has_half_of_the_memory() -> None:
    """As the workers of the run take it."""
    one, two = (
        find_site(
            Request(
                make_workflow(name="w", models=["m"], execution={"workers": n, "device": "cpu"}),
                (find_model("ct_tissue"),),
            )
        ).host
        for n in (1, 2)
    )
    assert one
    assert two == one // 2


@pytest.fixture
def workflow() -> Workflow:
    return make_workflow(name="tissues", models=["ct_tissue"], select={"modality": "CT"})


def test_a_plan_names_each_case_and_why_others_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workflow: Workflow
) -> None:
    """The sample study, a small MR and a CT that is too large for the limit: no voxel is read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    monkeypatch.setattr(Costs, "load", lambda _: known())
    write_series(tmp_path / "in" / "mr", noise(), words=Words(modality="MR"))
    out = tmp_path / "out"

    plan = make_plan(workflow, [shipped("data") / "torso_ct", tmp_path / "in"], out)
    save_plan(plan, out)

    assert plan.left_out == {"NOT_SELECTED": 1}
    assert plan.files == {"found": 66, "used": 66, "skipped": 0, "ambiguous": 0, "failed": 0}
    [case] = plan.cases
    assert case.voxels == 144 * 192 * 60 or case.voxels == 192 * 144 * 60
    assert case.values > 0
    assert case.seconds == pytest.approx((8.0, 12.5))
    assert (
        plan.totals.seconds
        == plan.totals.archive_seconds
        == pytest.approx((8 + 2 / 1.25, 12.5 + 2 * 1.25))
    )
    assert excluded_lines(plan)[1:] == [
        "Not processed: 1 series",
        f"      1 NOT_SELECTED: {Reason.NOT_SELECTED.advice}.",
        "        1 by select.modality",
    ]
    assert plan.totals.host == case.host
    kept = json.loads((out / "runs" / "plan.json").read_text())
    assert kept["cases"][0]["case"] == case.case
    assert str(tmp_path) not in json.dumps(kept)


def test_another_overlap_is_planned_as_it_would_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workflow: Workflow
) -> None:
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    monkeypatch.setattr(Costs, "load", lambda _: known())
    overlapping = workflow.execution.model_copy(update={"overlap": 0.75})
    scans = [shipped("data") / "torso_ct"]

    [usual] = make_plan(workflow, scans, tmp_path / "out").cases
    plan = make_plan(
        workflow.model_copy(update={"execution": overlapping}), scans, tmp_path / "out"
    )

    assert plan.cases[0].values > usual.values
    assert "ct_tissue: overlap 0.75 instead of 0.25" in plan.notes


def test_cases_that_do_not_fit_are_named_in_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workflow: Workflow
) -> None:
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    small = workflow.execution.model_copy(update={"memory_limit": 200_000_000})
    tight = workflow.model_copy(update={"execution": small})

    plan = make_plan(tight, [shipped("data") / "torso_ct"], tmp_path / "out")

    assert [case.reason for case in plan.cases] == ["OUT_OF_MEMORY"]
    assert plan.todo == []
    assert excluded_lines(plan)[1:] == [
        "Not processed: 1 case",
        f"      1 OUT_OF_MEMORY: {Reason.OUT_OF_MEMORY.advice}.",
    ]


def shown(totals: object, selected: int = 10) -> str:
    """Return the table of a plan of two cases as text."""
    cases = tuple(PlannedCase(str(n)) for n in range(2))
    plan = RunPlan(
        workflow="w",
        recipe="r",
        device="cpu",
        precision="float32",
        workers=1,
        in_flight=1,
        files={"found": 10},
        before=0,
        selected=selected,
        left_out={},
        left=(),
        cases=cases,
        totals=totals,
    )
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(plan))
    return console.export_text()


def test_the_time_of_a_run_is_not_that_of_its_archive() -> None:
    """A run over 2 of 10 cases, such as a shard; both times stand in the table under own names."""
    cases = [PlannedCase(str(n), 1, 1) for n in range(2)]

    totals = summarize(cases, known(), CPU, 10)

    assert totals.seconds == pytest.approx((2 * 8 + 1.6, 2 * 12.5 + 2.5))
    assert totals.archive_seconds == pytest.approx((10 * 8 + 1.6, 10 * 12.5 + 2.5))
    text = " ".join(shown(totals).split())
    assert "this run 18 s to 28 s on this machine: 2 cases, 8.8 s to 14 s a case" in text
    assert "from 9 cases that this machine has processed; all of the voxels are in scans" in text
    assert "whole archive 82 s to 2 min on this machine, if none were done yet: 10 cases" in text


def test_several_workers_share_the_cases_but_the_longest_is_not_divided() -> None:
    site = replace(CPU, placement=Placement("cuda:0", "half"), workers=4)

    def seconds(count: int) -> tuple[float, float] | None:
        return summarize([PlannedCase("c", 1, 1)] * count, known(), site, count).seconds

    assert seconds(8) == pytest.approx((2 * 8 + 1.6, 2 * 12.5 + 2.5))
    assert seconds(1) == pytest.approx((8 + 1.6, 12.5 + 2.5))


def known() -> Costs:
    """Return costs by which every case takes ten seconds, a quarter more or less."""
    costs = Costs()
    for size in (1.0, 1e4, 1e12):
        costs.learn([CaseCost(size, size, 5.0, 5.0, 1e6)] * 3, 2.0)
    return costs


def test_whether_a_gpu_pays_is_told_by_what_was_measured() -> None:
    """A GPU of a hundred times the speed, with half a second more around each case."""
    gpu, cpu = Costs(), Costs()
    for size in (1e5, 1e9):
        gpu.learn([CaseCost(size, size, 1e-8 * size, 1.5, 1.0)] * 3, 1.0)
        cpu.learn([CaseCost(size, size, 1e-6 * size, 1.0, 1.0)] * 3, 1.0)
    on_gpu = (gpu, replace(CPU, placement=Placement("cuda:0", "half")))
    small, large = (PlannedCase("c", int(size), int(size)) for size in (1e5, 1e9))

    def comparison(*cases: PlannedCase) -> str:
        return compare_devices(cases, on_gpu, (cpu, CPU))

    assert comparison(large).startswith("a GPU pays: ")
    assert comparison(*[small] * 3).startswith("a GPU may pay: ")
    assert comparison(small, large).endswith("; 1 small case sooner on the CPU")
    assert "not known: such cases have not run on the GPU" in compare_devices(
        [large], (Costs(), CPU), (cpu, CPU)
    )


@pytest.mark.thorough
def test_a_plan_tries_cases_where_it_knows_too_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only case that was run here is tiny: its time is not scaled to that of a larger scan."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    bundle = write_tiny_bundle(tmp_path / "bundles")
    write_series(tmp_path / "in", noise((64, 60, 40)))
    page = tmp_path / "w.yaml"
    page.write_text(f"name: w\nmodels: [{bundle}]\nselect: {{modality: CT}}\n")
    execution = {"device": "cpu", "precision": "float32"}
    page.write_text(page.read_text() + f"execution: {json.dumps(execution)}\n")
    workflow = make_workflow(
        name="w", models=[str(bundle)], select={"modality": "CT"}, execution=execution
    )
    name = costs_key(Request.of(workflow), "cpu", "float32")
    costs = Costs()
    costs.learn([CaseCost(32 * 32 * 16.0, TINY, 0.1, 0.5, 1e4)], 2.0)
    costs.save(name)
    killed = tmp_path / "out" / "private" / "trial-killed"  # of a plan before
    killed.mkdir(parents=True)
    (killed / "lock").touch()

    ended = scanloom("plan", page, tmp_path / "in", "--out", tmp_path / "out", "--json")

    totals = ended.document["plan"]["totals"]
    assert totals["tried"] >= 2
    assert totals["known_share"] == 1.0
    assert totals["seconds"] is not None or "took too different times" in totals["unknown"]
    assert max(case.voxels for case in Costs.load(name).cases) == 64 * 60 * 40
    assert not list((tmp_path / "out" / "private").glob("trial-*"))
    assert not (tmp_path / "out" / "cases").exists()


@pytest.mark.thorough
def test_a_plan_says_why_it_knows_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    labels = (np.indices((24, 20, 6)).sum(0) // 10).astype(np.uint8)
    nib.save(nib.Nifti1Image(labels, np.diag([2.0, 2.0, 3.0, 1.0])), tmp_path / "labels.nii")
    page = tmp_path / "w.yaml"
    page.write_text("name: w\nmodels: [ct_tissue]\npolicy: {modality: CT}\n")

    ended = scanloom("plan", page, tmp_path / "labels.nii", "--out", tmp_path / "out")

    assert ended.code == 0
    assert "time unknown: cases were tried without a result: IMPLAUSIBLE" in " ".join(
        ended.out.split()
    )


def test_a_plan_counts_what_a_run_with_its_options_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workflow: Workflow
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    monkeypatch.setattr(Costs, "load", lambda _: known())
    out, scans = tmp_path / "out", [shipped("data") / "torso_ct"]

    def planned(**how: object) -> tuple[int, int, list[str]]:
        plan = make_plan(workflow, scans, out, scope=Scope(**how))
        return len(plan.todo), plan.before, [case.reason for case in plan.cases if case.reason]

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
