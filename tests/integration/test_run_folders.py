"""Runs over folders as they are in the field: results among the scans, strays, damage, no disk."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import compute, parquet

from support import engine_models as em
from support.commands import Ended, scanloom, write_tiny_bundle
from support.formula_run import formula_environment
from support.write_dicom import Words, noise, write_series

SLICES = 4
GOOD = (3000, 3001)
"""The brightest voxels of the scans."""


class Field:
    """An archive of two CTs, and runs by formula over it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.archive, self.workflow = folder / "archive", folder / "workflow.yaml"
        self.out = folder / "out"
        self.workflow.write_text(f"name: test\nmodels: [{model}]\n")
        for brightest in GOOD:
            stored = noise((12, 10, SLICES), brightest) % 900
            stored[3:6, 3:6, 1:3] = brightest + 1024
            name = f"study {brightest}"
            write_series(self.archive / name, stored, words=Words(name=name, study=name))

    def run(self, *options: str | Path) -> Ended:
        where = ("--out", self.out, "--cluster", "none", "--json")
        return scanloom("run", self.workflow, self.archive, *where, *options)

    def rows(self, table: str) -> list[dict[str, str]]:
        with (self.out / f"{table}.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def cases(self) -> list[Path]:
        return sorted((self.out / "cases").iterdir())


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, warm_workers: SimpleNamespace) -> Path:
    """A folder with an archive and the results of a run over it."""
    folder = tmp_path_factory.mktemp("field")
    field = Field(folder, write_tiny_bundle(folder / "bundles"))
    with pytest.MonkeyPatch.context() as patch:
        by_formula(patch, folder, warm_workers)
        ended = field.run()
    assert ended.code == 0, ended.out
    return folder


def by_formula(patch: pytest.MonkeyPatch, folder: Path, workers: SimpleNamespace) -> None:
    environment = formula_environment(folder / "notes")
    for name in ("FORMULA", "FORMULA_SECONDS", "SCANLOOM_KEY"):
        patch.setenv(name, environment[name])
    patch.setattr("scanloom.engine.worker.supervisor.subprocess", workers)
    patch.setattr("scanloom.engine.run.model_loader", em.formula_loader)


@pytest.fixture
def field(
    begun: Path,
    tmp_path: Path,
    warm_workers: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> Field:
    """A copy of that folder."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    by_formula(monkeypatch, tmp_path, warm_workers)
    return Field(tmp_path, tmp_path / "bundles" / "tiny")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("subfolder", ["results", "."])
def test_results_among_the_scans_are_no_scans(field: Field, subfolder: str) -> None:
    field.out = field.archive / subfolder
    field.workflow.write_text(field.workflow.read_text() + "outputs: {also: [image]}\n")

    first = field.run()
    tables = [field.rows(table) for table in ("manifest", "measurements")]
    again = field.run()

    assert (first.code, again.code) == (0, 0), again.out
    assert first.document["files"]["found"] == again.document["files"]["found"] == 2 * SLICES
    assert [field.rows(table) for table in ("manifest", "measurements")] == tables
    assert len(field.cases()) == len(GOOD)


def test_a_disk_that_is_not_mounted_changes_nothing(field: Field) -> None:
    def files() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in field.out.rglob("*") if p.is_file()}

    before = files()
    shutil.rmtree(field.archive)
    (field.archive / "empty").mkdir(parents=True)
    run, plan = field.run(), scanloom("plan", field.workflow, field.archive, "--out", field.out)

    assert (run.code, plan.code) == (65, 65)
    assert run.document["error"]["code"] == "NO_IMAGES"
    assert "NO_IMAGES" in plan.err
    assert files() == before


@pytest.mark.thorough
def test_status_says_why_a_run_failed(field: Field) -> None:
    (field.out / "manifest.csv").unlink()
    (field.out / "manifest.csv").mkdir()

    ended = field.run()

    assert ended.code != 0
    reported = scanloom("status", field.out, "--json").document["status"]
    assert (reported["state"], reported["reason"]) == ("failed", ended.document["error"]["code"])
    assert reported["reason"] in scanloom("status", field.out).out


@pytest.mark.thorough
def test_stray_files_among_the_cases_are_ignored(field: Field) -> None:
    (field.out / "cases" / "@eaDir").mkdir()
    (field.out / "cases" / ".DS_Store").touch()
    (field.out / "failed").mkdir(exist_ok=True)
    (field.out / "failed" / "._a.json").write_bytes(b"\0\5\x16\7")
    tables = [field.rows(table) for table in ("manifest", "measurements")]

    ended = field.run("--bids")

    assert (ended.code, ended.document["damaged"]) == (0, []), ended.out
    assert [field.rows(table) for table in ("manifest", "measurements")] == tables
    assert [scanloom(command, field.out).code for command in ("report", "verify")] == [0, 0]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "file",
    [
        "case.json",
        pytest.param("measurements.json", marks=SLOW),
        pytest.param("preview.png", marks=SLOW),
    ],
)
def test_a_damaged_case_is_named_and_stops_neither_run_nor_report(field: Field, file: str) -> None:
    bad, good = field.cases()
    path = bad / file
    path.write_bytes(path.read_bytes()[:100])

    ended = field.run("--bids")
    report = scanloom("report", field.out)

    assert (ended.code, ended.document["damaged"]) == (1, [bad.name]), ended.out
    assert report.code == 1
    for messages in (ended.err, report.err):
        assert bad.name in messages
        assert "scanloom verify" in messages
    assert good.name not in report.err
    if file != "preview.png":
        assert {row["case"] for row in field.rows("measurements")} == {good.name}
        page = (field.out / "report" / "index.html").read_text()
        assert good.name in page
        assert f"cases/{bad.name}" not in page  # a row without a picture or files
    assert len(field.rows("manifest")) == 2 * SLICES
    assert any(f"cases/{bad.name}/{file}" in line for line in verified(field.out))
    shutil.rmtree(bad)
    assert field.run().code == 0


def verified(out: Path) -> list[str]:
    """Return the findings of `verify`."""
    findings = scanloom("verify", out, "--json").document["findings"]
    return [f"{finding['fault']}: {finding['file']}" for finding in findings]


def test_verify_notices_whole_cases_that_are_gone(field: Field) -> None:
    gone, _ = field.cases()
    shutil.rmtree(gone)
    assert verified(field.out) == [f"missing: cases/{gone.name}"]

    shutil.rmtree(field.out / "cases")
    assert len(verified(field.out)) == 2


@pytest.mark.parametrize("name", ["measurements.csv", "manifest.csv"])
def test_verify_notices_a_csv_that_was_altered(field: Field, name: str) -> None:
    table = field.out / name
    lines = table.read_text().splitlines(keepends=True)
    changed = [*lines[:-1], lines[-1].replace("1", "2").replace("used", "open")]
    for altered in (changed, lines[:-1], [*lines, lines[-1]], [lines[0]]):
        table.write_text("".join(altered))
        assert verified(field.out) == [f"changed: {name}"]
    table.write_bytes(b"\xff\0")
    assert verified(field.out) == [f"unreadable: {name}"]
    table.unlink()
    assert verified(field.out) == [f"missing: {name}"]


def test_verify_notices_a_parquet_table_that_was_altered(field: Field) -> None:
    table = field.out / "measurements.parquet"
    whole = parquet.read_table(table)
    number = whole.schema.get_field_index("volume_ml")
    larger = compute.add(whole["volume_ml"], 0.001)
    reordered = pa.concat_tables([whole.slice(1), whole.slice(0, 1)])
    for altered in (whole.set_column(number, "volume_ml", larger), whole.slice(1), reordered):
        parquet.write_table(altered, table)
        assert verified(field.out) == ["changed: measurements.parquet"]
    table.write_bytes(table.read_bytes()[:-9])
    assert verified(field.out) == ["unreadable: measurements.parquet"]


def test_verify_does_not_blame_tables_for_a_case(field: Field) -> None:
    bad, _ = field.cases()
    path = bad / "measurements.json"
    path.write_text(path.read_text().replace("1", "2"))
    assert verified(field.out) == [f"changed: cases/{bad.name}/measurements.json"]
