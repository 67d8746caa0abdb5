"""Cases that begin while the index grows leave the output folder as if it had been there before."""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from scanloom.cli.commands.run import status_line
from scanloom.engine import early_cases
from scanloom.engine import run as running
from scanloom.engine.clusters.contact import WorkerQuestion, answer
from scanloom.engine.early_cases import EarlyOutcomes, may_begin_early
from scanloom.engine.monitor import StatusWriter
from scanloom.engine.run_files import CASES_FILE
from scanloom.engine.workflow.schema import make_workflow
from scanloom.inference.engines.selection import LEAST_WINDOWS
from scanloom.io.index import parts
from scanloom.io.index.build import Index, build_index
from scanloom.io.output import crosswalk
from scanloom.io.output.audit import read_trail
from scanloom.io.output.case_folder import staged_folder, staged_results
from scanloom.io.output.layout import published_cases
from support import engine_models as em
from support.commands import scanloom
from support.early_pace import Pace
from support.make_run import Runs
from support.write_dicom import Words, noise, write_series

WHOLE, GOES_ON, BESIDE, DOUBTED, OTHER, SEVERAL = range(3000, 3006)
TWICE, ELSEWHERE, LAST = range(3010, 3013)
WAIT_S = 300
"""Longest wait for the first results: a worker process starts slowly on a busy machine."""
BEGIN_EARLY = {WHOLE, GOES_ON, BESIDE, DOUBTED, OTHER, SEVERAL, TWICE, em.RAISE}
"""Brightest voxels of the scans that begin before the index is complete: more than those that
are whole."""


def draw(
    folder: Path, brightest: int, *, name: str = "", study: str = "", slices: int = 4
) -> list[Path]:
    stored = noise((12, 10, slices), brightest) % 900
    stored[3:6, 3:6, 1:3] = brightest + 1024
    seed = name or str(brightest)
    words = Words("MR" if brightest == LAST else "CT", seed, study or f"study {seed}")
    return write_series(folder, stored, words=words)


def draw_volume(path: Path, brightest: int) -> None:
    values = np.full((12, 10, 4), -1000, np.int16)
    values[3:6, 3:6, 1:3] = brightest
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(values, np.eye(4)), path)


def move(files: list[Path], folder: Path) -> None:
    folder.mkdir(parents=True)
    for file in files:
        file.rename(folder / file.name)


def draw_archive(root: Path) -> None:
    """Each folder is a part of its own."""
    draw(root / "a" / "whole", WHOLE)
    draw(root / "b" / "fails", em.RAISE)
    move(draw(root / "c" / "goes on", GOES_ON, slices=6)[3:], root / "z" / "goes on")
    # A file of the first folder's study that can't be read, so that its result has a flag
    damaged = draw(root / "d" / "2", DOUBTED, name="damaged", study="study doubted")
    draw(root / "d" / "1", DOUBTED, study="study doubted")
    for file in damaged[1:]:
        file.unlink()
    damaged[0].write_bytes(damaged[0].read_bytes()[:700])
    # One between the two folders of a series, which is refused for it
    slices = draw(root / "e" / "1", BESIDE, slices=6)
    move(slices[3:], root / "e" / "3")
    (root / "e" / "2").mkdir()
    (root / "e" / "2" / slices[0].name).write_bytes(slices[0].read_bytes()[:700])
    draw(root / "f" / "uid", OTHER)
    draw(root / "y" / "uid", ELSEWHERE, name=str(OTHER), study="another study")
    draw(root / "g" / "uid", SEVERAL)
    draw(root / "y" / "same uid", ELSEWHERE, name=str(SEVERAL))
    draw_volume(root / "h" / "one.nii", TWICE)
    draw_volume(root / "x" / "copy.nii", TWICE)
    draw_volume(root / "x" / "other" / "scan.nii", WHOLE + 500)
    draw(root / "y" / "gap", WHOLE + 501)[1].unlink()
    draw(root / "z" / "mr", LAST)


def in_small_parts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(parts, "PART_FILES", 1)
    for module in (early_cases, running):
        patch.setattr(module, "ENOUGH_CASES", 1)


def content(out: Path) -> dict[str, bytes]:
    """Return all files of results, failures and tables."""
    folders = ("cases", "failed")
    files = [path for name in folders for path in (out / name).rglob("*") if path.is_file()]
    files += [path for path in out.iterdir() if path.suffix in (".csv", ".parquet")]
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in files
        if path.name != "timing.json"
    }


def accounts(runs: Runs) -> dict[str, Any]:
    """Return what the last run says of itself, without times."""
    folder = max((runs.out / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    status = json.loads((folder / "status.json").read_text())
    totals = json.loads((folder / "totals.json").read_text())
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    counts = ("cases", "before", "work", "worked", "done", "skipped", "ambiguous", "failed")
    return {
        "status": {name: status[name] for name in (*counts, "remade", "reasons", "state")},
        "totals": {name: totals[name] for name in ("cases", "reasons", "files", "state")},
        "steps": set(totals["steps"]),
        "log": sorted((line["case"], line["reason"], line["remade"]) for line in log),
    }


def sources(out: Path) -> list[str]:
    """Return what the crosswalk has of each case and series."""
    rows = crosswalk.latest_by_id(crosswalk._rows(crosswalk._read(out))).values()
    return sorted(map(str, rows))


def trail(runs: Runs) -> Counter[str]:
    """Return how often the audit trail tells of each case, which checks each of its lines."""
    key = Path(runs.environment["SCANLOOM_KEY"]).read_bytes()
    return Counter(line["case"] for line in read_trail(runs.out, key))


def index_first(runs: Runs, patch: pytest.MonkeyPatch) -> tuple[Any, dict[str, bytes], Any, Any]:
    """Run in another output folder that is indexed first; return all that can be compared."""
    out, runs.out = runs.out, runs.folder / "first"
    with patch.context() as context:
        context.setattr(running, "may_begin_early", lambda _: False)
        ended = runs()
    result = (ended.code, content(runs.out), accounts(runs), sources(runs.out))
    runs.out = out
    return result


@pytest.fixture
def small(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Runs:
    draw_archive(runs.archive)
    runs.write("modality: CT, choose: all", "policy: {modality: CT}\n")
    in_small_parts(monkeypatch)
    return runs


def test_the_output_is_that_of_a_run_that_indexes_first(
    small: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, files, counted, origins = index_first(small, monkeypatch)
    (small.notes / "starts").unlink()
    removed = []
    remove = early_cases.remove_staged
    monkeypatch.setattr(
        early_cases, "remove_staged", lambda *told: (removed.append(told[1]), remove(*told))
    )
    Pace(monkeypatch)

    ended = small()

    assert ended.code == code == 1, ended.err
    assert content(small.out) == files
    assert accounts(small) == counted
    assert sources(small.out) == origins
    assert set(small.started) == BEGIN_EARLY | {ELSEWHERE, WHOLE + 500}
    assert len(removed) == len({GOES_ON, BESIDE, DOUBTED, SEVERAL, TWICE})
    assert small.started[TWICE] == small.started[GOES_ON] == 2
    assert not list((small.out / ".work").iterdir())
    assert trail(small) == dict.fromkeys(small.cases(), 1)
    assert scanloom("verify", small.out).code == 0

    begun = small.started
    again = small()

    assert (again.code, again.document["status"]["done"]) == (1, 0)
    assert small.started - begun == {em.RAISE: 1}  # a fault that another try may not have
    assert content(small.out) == files


def test_the_first_case_ends_before_the_last_part_is_read(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(runs.archive / "1", WHOLE)
    draw(runs.archive / "2", GOES_ON)
    runs.write("modality: CT, choose: all")
    in_small_parts(monkeypatch)
    ended, lines = threading.Event(), []
    set_aside = StatusWriter.set_aside

    def note(status_writer: StatusWriter, case: str) -> None:
        set_aside(status_writer, case)
        lines.append(status_line(status_writer.now()))
        assert case in {staged for staged, _ in staged_results(runs.out)}
        ended.set()

    def build(*arguments: Any, on_part: Any, **more: Any) -> Index:
        def add(part: Any, files: int) -> None:
            if part[1].endswith("2"):
                assert ended.wait(WAIT_S)
            on_part(part, files)

        return build_index(*arguments, on_part=add, **more)

    setups, answers = [], []
    setup = running.ChildSetup

    def set_up(*arguments: Any, **more: Any) -> Any:
        setups.append(arguments)
        [file] = runs.out.glob(f"private/runs/*/{CASES_FILE}")
        answers.append(answer(WorkerQuestion(str(runs.out / ".work" / "token"), (), str(file))))
        return setup(*arguments, **more)

    monkeypatch.setattr(StatusWriter, "set_aside", note)
    monkeypatch.setattr(running, "build_index", build)
    monkeypatch.setattr(running, "ChildSetup", set_up)

    done = runs()

    assert done.code == 0, done.err
    assert lines[0] == "indexing: 4 files so far; 1 case begun"
    [(_, load)] = setups
    assert load.args == (1,)  # of several cases, an engine would be measured
    # Workers are asked for the files of the first case, and need not see more than this process
    assert [(reply.sees_scans, reply.reads_scans) for reply in answers] == [(True, True)]
    assert len(runs.cases()) == 2


def run_until_index_fails(runs: Runs, patch: pytest.MonkeyPatch, *options: str) -> Any:
    """Run up to the last part of the index, on which it fails when the cases so far have ended."""
    ended = threading.Event()
    note = EarlyOutcomes.note

    def noted(outcomes: EarlyOutcomes, *of_case: Any) -> None:
        note(outcomes, *of_case)
        if len(outcomes.cases()) == 2:
            ended.set()

    def build(*arguments: Any, on_part: Any, **more: Any) -> Index:
        def add(part: Any, files: int) -> None:
            if part[1].endswith("3"):
                assert ended.wait(WAIT_S)
                raise OSError(28, "no space")
            on_part(part, files)

        return build_index(*arguments, on_part=add, **more)

    with patch.context() as context:
        context.setattr(EarlyOutcomes, "note", noted)
        context.setattr(running, "build_index", build)
        return runs(*options)


@pytest.fixture
def halved(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Runs of which the first one ended before its index, with results of a scan and of a half."""
    draw(runs.archive / "1", WHOLE)
    move(draw(runs.archive / "2", GOES_ON, slices=6)[3:], runs.archive / "3")
    runs.write("modality: CT, choose: all")
    in_small_parts(monkeypatch)
    failed = run_until_index_fails(runs, monkeypatch)
    assert failed.code == 74, failed.err
    assert failed.document["error"]["code"] == "DISK_FULL"
    assert len(list(staged_results(runs.out))) == 2
    return runs


@pytest.mark.thorough
def test_the_next_run_takes_the_results_that_hold(halved: Runs) -> None:
    done = halved()

    assert done.code == 0, done.err
    status = done.document["status"]
    assert [status[name] for name in ("before", "recalled", "done", "remade")] == [1, 1, 1, 0]
    assert (status["work"], status["worked"]) == (2, 2)
    assert halved.started == {WHOLE: 1, GOES_ON: 2}
    assert not list(staged_results(halved.out))
    assert len(halved.rows("measurements")) == len(halved.cases()) == 2
    assert trail(halved) == dict.fromkeys(halved.cases(), 1)
    assert scanloom("verify", halved.out).code == 0


@pytest.mark.thorough
@pytest.mark.parametrize("change", ["another option", "a damaged result", "a changed scan"])
def test_no_run_takes_results_that_it_would_not_make(halved: Runs, change: str) -> None:
    if change == "another option":
        halved.write("modality: CT, choose: all", "outputs: {also: [masks]}\n")
    elif change == "a damaged result":
        for _, name in staged_results(halved.out):
            (staged_folder(halved.out, name) / "segments.json").write_text("{}")
    else:
        draw(halved.archive / "1", WHOLE + 1, name=str(WHOLE))

    done = halved()

    assert done.code == 0, done.err
    assert done.document["status"]["done"] == 2
    assert halved.started.total() == 4
    assert not list(staged_results(halved.out))
    assert trail(halved) == dict.fromkeys(halved.cases(), 1)
    assert scanloom("verify", halved.out).code == 0


@pytest.mark.thorough
def test_results_of_a_killed_run_are_in_no_command(halved: Runs) -> None:
    assert not published_cases(halved.out)
    for command in (["export", halved.out, "-o", "copy"], ["dataset", halved.out, "-o", "data"]):
        ended = scanloom(*command)
        assert ended.code == 65
        assert "there are no results in this output folder" in ended.err
    assert "2 cases ended" in scanloom("status", halved.out).out


@pytest.mark.thorough
def test_a_shard_leaves_the_results_of_another_one(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = Path(runs.environment["SCANLOOM_KEY"])
    key.parent.mkdir(parents=True, exist_ok=True)
    key.write_bytes(bytes(range(32)))  # so that each shard has some
    key.chmod(0o600)
    for name, brightest in enumerate(range(WHOLE, WHOLE + 8)):
        draw(runs.archive / f"{name}-1", brightest)
    draw(runs.archive / "9-3", WHOLE + 9)
    runs.write("modality: CT, choose: all")
    in_small_parts(monkeypatch)
    assert run_until_index_fails(runs, monkeypatch, "--shard", "1/2").code == 74
    begun = {case for case, _ in staged_results(runs.out)}
    assert len(begun) >= 2

    ended = runs("--shard", "2/2")

    assert ended.code == 0, ended.err
    assert {case for case, _ in staged_results(runs.out)} == begun
    others = set(runs.cases())
    assert not others & begun
    assert {row["case"] for row in runs.rows("measurements")} == others
    used = {row["case"] for row in runs.rows("manifest") if row["outcome"] == "used"}
    assert used == others

    before = runs.started.total()
    assert runs("--shard", "1/2").code == 0

    assert not list(staged_results(runs.out))
    assert {row["case"] for row in runs.rows("measurements")} == set(runs.cases())
    assert {row["outcome"] for row in runs.rows("manifest")} == {"used"}
    assert len(runs.cases()) == 9
    # none that had ended, but those that were in work when the first run ended
    assert runs.started.total() - before == len(set(runs.cases()) - others - begun)


@pytest.mark.slow
def test_shards_begin_their_own_cases_early(small: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    _, files, _, origins = index_first(small, monkeypatch)

    for shard in ("1/2", "2/2"):
        with monkeypatch.context() as patch:
            Pace(patch)
            shutil.rmtree(small.out / "private" / "index", ignore_errors=True)
            assert small("--shard", shard).code in (0, 1)
    small()

    assert content(small.out) == files
    assert sources(small.out) == origins


@pytest.mark.parametrize(
    ("more", "early"),
    [
        ({"select": {"modality": "CT", "choose": "all"}}, True),
        ({"select": {"modality": "CT", "choose": "best"}}, False),
        ({"select": {"choose": "newest"}}, False),
        ({"select": {"choose": "all"}, "channels": {"T1": {"description": ["t1"]}}}, False),
    ],
)
def test_a_choice_among_the_series_of_a_study_waits_for_the_index(
    more: dict[str, Any], early: bool
) -> None:
    assert may_begin_early(make_workflow(name="test", models=["ct_tissue"], **more)) is early


def test_a_choice_of_engines_has_enough_windows_early() -> None:
    assert early_cases.ENOUGH_CASES >= 2 * LEAST_WINDOWS
