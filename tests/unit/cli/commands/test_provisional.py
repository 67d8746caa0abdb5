"""Provisional results are told, and in no table, report or copy until they are final."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from scanloom.core import CaseRecord, Reason, ScanError
from scanloom.engine.listen.send import send
from scanloom.engine.listen.site import Site
from scanloom.engine.results.tables import write_case_tables
from scanloom.io.output import ledger
from scanloom.io.output.early_list import EARLY, EarlyCase, add_early
from scanloom.io.output.failures import write_failure
from scanloom.io.output.layout import published_cases
from scanloom.io.output.published import read_provenance
from scanloom.review.server.state import Worklist
from support.commands import scanloom
from support.review_cases import affine_of, publish, scan_array

TOLD = "2 cases that began before the index of a run was complete, provisional and left out"


def line_of(case: Path) -> EarlyCase:
    made_by = read_provenance(case)
    return EarlyCase(case.name, case.name, made_by.recipe, made_by.stamp, "digest")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("published")
    cases = [publish(folder, scan_array(n), affine_of("LAS"), name) for n, name in enumerate("ab")]
    return folder, [case.name for case in cases]


@pytest.fixture
def cases(published: tuple[Path, list[str]], tmp_path: Path) -> tuple[Path, Path]:
    """A final result and a provisional one, in `tmp_path/out`."""
    shutil.copytree(published[0], tmp_path, dirs_exist_ok=True)
    final, waits = (tmp_path / "out" / "cases" / name for name in published[1])
    run = tmp_path / "out" / "runs" / "20260101T000000-abcdef"
    run.mkdir(parents=True)
    add_early(run / EARLY, line_of(waits))
    return final, waits


def tabled(out: Path) -> set[str]:
    with (out / "measurements.csv").open(newline="") as file:
        return {row["case"] for row in csv.DictReader(file)}


def test_commands_leave_them_out_and_say_so(
    cases: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (final, waits), out = cases, tmp_path / "out"
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    fails = line_of(waits)._replace(case="f" * 26, folder="f" * 26)
    add_early(next(out.glob(f"runs/*/{EARLY}")), fails)
    write_failure(out, CaseRecord(fails.case, Reason.SLICE_GAP, "", (), None), fails.recipe)
    assert list(published_cases(out)) == [final]

    reported = scanloom("report", out)

    assert TOLD in reported.err
    page = (out / "report" / "index.html").read_text()
    assert TOLD in page
    assert [name in page for name in (final.name, waits.name, fails.case)] == [True, False, False]
    assert tabled(out) == {final.name}

    exported = scanloom("export", out, tmp_path / "copy", "--json")
    assert (exported.code, exported.document["cases"]) == (0, 1)
    assert TOLD in exported.err
    assert not list((tmp_path / "copy").rglob(waits.name))
    checked = scanloom("verify", tmp_path / "copy", "--json")
    assert checked.document["provisional"] == 0
    assert (
        "a copy by `scanloom export`" in scanloom("where", final.name, "-o", tmp_path / "copy").err
    )

    whole = scanloom("verify", out, "--json")
    assert whole.document["provisional"] == 2
    assert not any("cases/" in finding["file"] for finding in whole.document["findings"])
    (waits / "segments.json").write_text("{}")
    damaged = scanloom("verify", out, "--json").document["findings"]
    assert f"cases/{waits.name}/segments.json" in {finding["file"] for finding in damaged}


def test_where_tells_which_are_provisional(
    cases: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (final, waits), out = cases, tmp_path / "out"
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))

    where = scanloom("where", waits.name, final.name, "-o", out, "--json")

    assert where.document["provisional"] == [waits.name]
    assert f"provisional: {waits.name}." in where.err


def test_they_come_when_their_list_is_gone(
    cases: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (final, waits), out = cases, tmp_path / "out"
    monkeypatch.setattr(ledger, "CHECKED", 0)  # so that rows are copied
    monkeypatch.setattr("scanloom.review.server.state.LEAST_INTERVAL_S", 0.0)
    worklist = Worklist(out)
    worklist.refresh()
    worklist.update(waits.name)  # by its address
    assert list(worklist.cases) == [final.name]
    write_case_tables(out, set())
    assert tabled(out) == {final.name}

    next(out.glob(f"runs/*/{EARLY}")).unlink()

    write_case_tables(out, set())
    assert tabled(out) == {final.name, waits.name}
    worklist._next_look = 0.0
    worklist.refresh()
    assert set(worklist.cases) == {final.name, waits.name}


def test_a_copy_is_no_case_of_a_dataset(
    cases: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (final, waits), out = cases, tmp_path / "out"
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    next(out.glob(f"runs/*/{EARLY}")).unlink()
    shutil.copytree(final, final.with_name("backup"))

    made = scanloom(
        *("dataset", out, "-o", tmp_path / "data", "--verdict", "unreviewed", "--json")
    ).document
    assert {case["case"] for case in made["cases"]} == {final.name, waits.name}
    assert [each["reason"] for each in made["left_out"]] == ["RESULT_DAMAGED"]


def test_they_are_not_sent(cases: tuple[Path, Path], tmp_path: Path) -> None:
    site = Site.model_validate(
        {"targets": [{"name": "pacs", "url": "http://127.0.0.1:9/"}], "title": "HERE"}
    )

    with pytest.raises(ScanError, match=f"no final result of {cases[1].name}") as caught:
        send(site, tmp_path / "out", "pacs", [cases[1].name], 0.0)

    assert caught.value.reason is Reason.ID_UNKNOWN
