"""Shards of one archive: side by side, and together the same as one run."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from support.commands import scanloom, write_tiny_bundle
from support.engine_models import RAISE
from support.formula_run import formula_environment, start
from support.write_dicom import Words, noise, write_series

GOOD = range(3000, 3006)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six good CTs, one whose model fails, an MR, and a text file."""
    folder = tmp_path_factory.mktemp("archive")
    for brightest in (*GOOD, RAISE, 3900):
        stored = noise((12, 10, 4), brightest) % 900
        stored[3:6, 3:6, 1:3] = brightest + 1024
        name = f"study {brightest}"
        modality = "MR" if brightest == 3900 else "CT"
        attributes = Words(modality=modality, name=name, study=name)
        write_series(folder / name, stored, words=attributes)
    (folder / "notes.txt").write_text("no image")
    return folder


def rows(out: Path, table: str) -> list[dict[str, str]]:
    with (out / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_two_shards_are_one_run(tmp_path: Path, archive: Path) -> None:
    workflow, notes = tmp_path / "workflow.yaml", tmp_path / "notes"
    model = write_tiny_bundle(tmp_path / "bundles")
    workflow.write_text(f"name: test\nmodels: [{model}]\nselect: {{modality: CT}}\n")
    environment = formula_environment(notes)
    Path(environment["SCANLOOM_KEY"]).write_bytes(bytes(range(32)))  # with it both have cases
    whole, sharded = tmp_path / "whole", tmp_path / "parts"

    def begin(out: Path, *options: str):
        command = ["run", workflow, archive, "--out", out, "--cluster", "none", *options]
        return start(command, environment, tmp_path / f"log {len(list(tmp_path.iterdir()))}")

    shards = [begin(sharded, "--shard", f"{k}/2") for k in (1, 2)]
    assert [shard.wait(240) for shard in shards] == [1, 1] or {s.wait() for s in shards} == {0, 1}
    assert begin(whole).wait(240) == 1
    assert scanloom("report", sharded).code == 0

    assert rows(sharded, "manifest") == rows(whole, "manifest")
    assert rows(sharded, "measurements") == rows(whole, "measurements")
    assert "open" not in {row["outcome"] for row in rows(sharded, "manifest")}
    assert len(list((sharded / "runs").iterdir())) == 2
    assert {p.name for p in (sharded / "cases").iterdir()} == {
        p.name for p in (whole / "cases").iterdir()
    }
    own = [rows(run, "manifest") for run in (sharded / "runs").iterdir()]
    # The one that ends last may know what the other one did
    assert any("open" in {row["outcome"] for row in table} for table in own)
    page = (sharded / "report" / "index.html").read_text()
    assert all(run.name in page for run in (sharded / "runs").iterdir())
