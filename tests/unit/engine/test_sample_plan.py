"""A plan from a sample of an archive's folders: what it estimates, and what it leaves alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from pydicom import Dataset

from scanloom.cli.commands.plan import format_estimate
from scanloom.engine.costs import CaseCost, Costs
from scanloom.engine.plan import SamplePlan
from scanloom.engine.planning import make_plan, plan_sample
from scanloom.engine.workflow.schema import Workflow, make_workflow
from scanloom.io.identity import load_key, source_stamp
from scanloom.io.index.build import index_of
from scanloom.io.index.sample import Estimate
from scanloom.io.output.json_file import write_json
from support.commands import scanloom
from support.write_dicom import Words, noise, write_series

ALL = 1000.0
"""More folders than there are."""


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 patients of a series each: every fourth is an MR; two patients lack a slice."""
    root = tmp_path_factory.mktemp("scans")
    for n in range(40):

        def edit(_: int, dataset: Dataset, n: int = n) -> None:
            dataset.StudyInstanceUID, dataset.SeriesInstanceUID = f"1.3.{n}", f"1.2.{n}"

        words = Words(modality="CT" if n % 4 else "MR")
        files = write_series(root / f"{n:02d}", noise((8, 8, 4 + n % 2)), words=words, edit=edit)
        if n in (5, 6):
            files[1].unlink()
    return root


@pytest.fixture
def workflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workflow:
    """Every case takes ten seconds, a quarter more or less."""
    costs = Costs()
    for size in (1.0, 1e4, 1e12):
        costs.learn([CaseCost(size, size, 5.0, 5.0, 1e6)] * 3, 2.0)
    monkeypatch.setattr(Costs, "load", lambda _: costs)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    return make_workflow(name="tissues", models=["ct_tissue"], select={"modality": "CT"})


def published(out: Path, plan: SamplePlan, scans: Path, key: bytes, count: int) -> None:
    """Publish results of the first cases, as far as a plan looks at them."""
    series = {each.id: each for each in index_of([scans], key).series}
    for case in plan.plan.todo[:count]:
        folder = out / "cases" / case.case
        folder.mkdir(parents=True)
        stamp = source_stamp([series[case.case].stamp], key)
        write_json(folder / "case.json", {"recipe": plan.plan.recipe, "source": {"hash": "x"}})
        write_json(folder / "timing.json", {"source_stamp": stamp})


def test_a_sample_of_all_folders_is_the_plan(
    tmp_path: Path, scans: Path, workflow: Workflow
) -> None:
    whole = make_plan(workflow, [scans], tmp_path / "indexed")

    estimated = plan_sample(workflow, [scans], tmp_path / "out", ALL)

    assert {name: each.total for name, each in estimated.files.items()} == whole.files
    assert {name: each.total for name, each in estimated.left_out.items()} == whole.left_out
    assert estimated.cases["todo"] == (28, 28, 28, 28)
    assert estimated.seconds == pytest.approx(whole.totals.seconds)
    assert estimated.written == pytest.approx(whole.totals.written)
    assert estimated.plan.totals == whole.totals


def test_half_of_the_folders_tell_of_all(tmp_path: Path, scans: Path, workflow: Workflow) -> None:
    out = tmp_path / "out"

    estimated = plan_sample(workflow, [scans], out, 0.5)

    assert (estimated.sampled, estimated.found, estimated.opened) == (
        20,
        40,
        estimated.plan.files["found"],
    )
    sampled, total, low, high = estimated.cases["todo"]
    assert sampled == len(estimated.plan.todo)
    assert total == 2 * sampled
    assert sampled <= low < 28 < high < 60
    assert estimated.files["found"].total == pytest.approx(178, rel=0.05)
    assert estimated.seconds is not None
    assert estimated.plan.totals.seconds is not None
    assert estimated.seconds[0] > 1.2 * estimated.plan.totals.seconds[0]
    assert estimated.seconds[1] > 2 * estimated.plan.totals.seconds[1]
    assert [path.name for path in out.rglob("*")] == []
    again = plan_sample(workflow, [scans], out, 0.5)
    assert (again.cases, again.opened) == (estimated.cases, 0)


def test_a_large_folder_that_was_missed_is_a_note(
    tmp_path: Path, scans: Path, workflow: Workflow
) -> None:
    shutil.copytree(scans, tmp_path / "in")
    large = tmp_path / "in" / "dump"
    large.mkdir()
    for n in range(200):
        (large / f"{n}.txt").touch()
    drawn = set[bool]()
    for seed in range(4):
        estimated = plan_sample(workflow, [tmp_path / "in"], tmp_path / "out", 0.5, seed=seed)
        notes = [note for note in estimated.notes if "outside the sample" in note]
        assert bool(notes) == (estimated.files["skipped"].sampled == 0)
        drawn.add(bool(notes))
    assert drawn == {True, False}


def test_results_that_are_there_are_scaled_too(
    tmp_path: Path, scans: Path, workflow: Workflow
) -> None:
    out = tmp_path / "out"
    first = plan_sample(workflow, [scans], out, 0.5)
    published(out, first, scans, load_key(tmp_path / "key"), 6)

    estimated = plan_sample(workflow, [scans], out, 0.5)

    assert estimated.cases["before"][:2] == (6, 12)
    assert estimated.cases["todo"].sampled == first.cases["todo"].sampled - 6


def test_the_estimate_is_shown_with_ranges_and_is_not_kept(
    tmp_path: Path, scans: Path, workflow: Workflow
) -> None:
    out = tmp_path / "out"

    ended = scanloom("plan", "ct_tissue", scans, "-o", out, "--sample", "50%")
    plain = scanloom("plan", "ct_tissue", scans, "-o", out, "--sample", "0.5", "--json")

    text = " ".join(ended.out.split())
    assert ended.code == plain.code == 0
    assert "from 20 of 40 folders" in text
    assert "about 95 of 100 samples" in text
    assert "NOT_SELECTED" in text
    assert "of the 40 folders may be missing here." in text
    assert not (out / "runs").exists()
    todo = plain.document["estimate"]["cases"]["todo"]
    assert todo["total"] == 2 * todo["sampled"] == 2 * plain.document["sample"]["todo"]
    assert plain.document["estimate"]["confidence"] == 0.95
    assert str(scans) not in json.dumps(plain.document)


@pytest.mark.parametrize("text", ["0", "100%", "1", "2.5", "-1%", "half"])
def test_a_share_is_below_the_whole(text: str) -> None:
    ended = scanloom("plan", "ct_tissue", "x", "--sample", text)
    assert ended.code == 2
    assert "a share below" in " ".join(ended.err.split())


def test_counts_are_shown_with_two_digits() -> None:
    assert format_estimate(Estimate(12, 1234.0, 987.0, 1567.0)) == "1,200 (990 to 1,600)"
    assert format_estimate(Estimate(7, 7.0, 7.0, 7.0)) == "7"
