"""Results of earlier versions stay valid: commit f2802b4 published `tests/fixtures/out-1`."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.commands import Ended, scanloom

FIXTURE = Path(__file__).parents[1] / "fixtures" / "out-1"
OF_RUN, OF_SEGMENT = "2soihlxcagdllmhohb3xzfz5hy", "2scghii23ahvrfugqv44jzbksq"
FAILED = "j4nmmws7gz56a6qnigfbqu7twi"
OUTPUTS = ("--also", "image", "--also", "masks", "--seg", "labelmap", "--structures", "liver")
OPTIONS = ("--device", "cpu", "--modality", "CT", "--nan", "padding", "--no-skip-air")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Return a copy of the fixture: with other times of change, and other paths of sources."""
    shutil.copytree(FIXTURE, tmp_path / "old", copy_function=shutil.copyfile)
    (tmp_path / "old/key").chmod(0o600)
    return tmp_path / "old"


def state(case: Path) -> dict[str, Any]:
    """Return the bytes of each file of a case; of `timing.json` all but the stamps of files."""
    files = {p.relative_to(case).as_posix(): p for p in case.rglob("*") if p.is_file()}
    timing = json.loads(files.pop("timing.json").read_text())
    steps = {name: value for name, value in timing.items() if name not in ("files", "source_stamp")}
    return {**{name: path.read_bytes() for name, path in files.items()}, "timing.json": steps}


def failure_of(old: Path) -> dict[str, Any]:
    """Return the document of the failed case without its sentences, which may be reworded."""
    document: dict[str, Any] = json.loads((old / f"out/failed/{FAILED}.json").read_text())
    return {name: value for name, value in document.items() if name not in ("detail", "advice")}


def run(old: Path, *options: str) -> Ended:
    where = ("--out", old / "out", "--key", old / "key", "--cluster", "none", "--json")
    return scanloom("run", old / "workflow.yaml", old / "sources/archive", *where, *options)


def segment(old: Path) -> Ended:
    where = ("--model", old / "models/tiny", "--out", old / "out", "--key", old / "key", "--json")
    return scanloom("segment", old / "sources/scan.nii.gz", *where, *OPTIONS, *OUTPUTS)


def rows(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def test_run_and_segment_find_the_results_current(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(old)  # the workflow names the folder of its model
    cases = {name: state(old / "out/cases" / name) for name in (OF_RUN, OF_SEGMENT)}
    failure = failure_of(old)

    status = run(old).document["status"]  # the content of the sources is compared
    assert (status["done"], status["remade"], status["failed"]) == (1, 0, 1)
    status = run(old).document["status"]  # and their new stamps were kept
    assert (status["before"], status["remade"], status["failed"]) == (1, 0, 1)
    [record] = segment(old).document["cases"]
    assert (record["case"], record["recalled"], record["remade"]) == (OF_SEGMENT, True, False)
    assert [m["label"] for m in record["measurements"]] == ["liver"]
    assert [flag["code"] for flag in record["flags"]] == ["NAN_PADDED"]

    assert {name: state(old / "out/cases" / name) for name in cases} == cases
    assert failure_of(old) == failure
    measured = {row["case"] for row in rows(old / "out/measurements.csv")}
    assert measured == {OF_RUN, OF_SEGMENT}
    assert "NESTED_ARCHIVE" in {row["reason"] for row in rows(old / "out/manifest.csv")}
    assert scanloom("verify", old / "out").code == 0


def test_another_recipe_is_not_current(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(old)
    text = (old / "workflow.yaml").read_text()
    (old / "workflow.yaml").write_text(f"{text}outputs: {{seg: labelmap}}\n")
    assert run(old).document["status"]["reasons"] == {"STALE": 1, "SLICE_GAP": 1}


def test_verify_status_and_where_know_them(old: Path) -> None:
    ended = scanloom("verify", old / "out", "--json")
    assert ended.document["findings"] == []
    status = scanloom("status", old / "out", "--json").document["status"]
    assert (status["state"], status["done"], status["reasons"]) == ("done", 1, {"SLICE_GAP": 1})
    ended = scanloom("where", OF_RUN, FAILED, "--out", old / "out", "--key", old / "key", "--json")
    assert [source["id"] for source in ended.document["sources"]] == [OF_RUN, FAILED]


def test_report_shows_them_with_the_codes_of_today(old: Path) -> None:
    # Of what a former version called LOST, as its workers were
    path = old / f"out/failed/{FAILED}.json"
    path.write_text(path.read_text().replace("SLICE_GAP", "LOST"))
    assert "PACKED" in {row["reason"] for row in rows(old / "out/manifest.csv")}
    assert scanloom("report", old / "out").code == 0
    page = (old / "out/report/index.html").read_text()
    assert all(name in page for name in (OF_RUN, OF_SEGMENT, "WORKER_LOST", "NESTED_ARCHIVE"))
    assert "PACKED" not in page


def test_tables_are_whole_after_report(old: Path) -> None:
    for table in (old / "out").glob("m*.*"):
        table.unlink()
    next((old / "out/runs").glob("*/totals.json")).unlink()  # killed before it wrote its tables
    assert scanloom("report", old / "out", "--key", old / "key").code == 0
    assert {row["case"] for row in rows(old / "out/measurements.csv")} == {OF_RUN, OF_SEGMENT}


@pytest.mark.parametrize("file", ["case.json", "timing.json", "measurements.json"])
def test_a_result_of_a_newer_version_is_named_so(
    old: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.chdir(old)
    path = old / "out/cases" / OF_SEGMENT / file
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2'))
    timing = old / "out/cases" / OF_SEGMENT / "timing.json"
    reported = json.loads(timing.read_text())
    timing.write_text(json.dumps({**reported, "files": {}}))
    [record] = segment(old).document["cases"]
    assert record["reason"]["code"] == "NEWER_VERSION"
    ended = scanloom("report", old / "out")
    assert "NEWER_VERSION" in ended.err
    assert "damaged" not in ended.err


def test_fields_that_are_not_known_are_ignored(old: Path) -> None:
    folder = old / "out/cases" / OF_SEGMENT
    for file in folder.glob("*.json"):
        reported = json.loads(file.read_text())
        reported["later"] = {"a": 1}
        for row in reported.get("measurements", ()):
            row["skewness"] = 0.5
            row["flags"].append("A_LATER_FLAG")
        if file.name == "timing.json":
            reported["files"] = {}
        file.write_text(json.dumps(reported))
    status = next((old / "out/runs").glob("*/status.json"))
    status.write_text(json.dumps({**json.loads(status.read_text()), "later": 1}))
    assert scanloom("status", old / "out").code == 0
    [record] = segment(old).document["cases"]
    assert record["recalled"]
    assert record["measurements"][0]["flags"] == ["TOUCHES_BORDER", "NAN_PADDED"]
    ended = scanloom("report", old / "out")
    assert (ended.code, "damaged" in ended.err) == (0, False)
