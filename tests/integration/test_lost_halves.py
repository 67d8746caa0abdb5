"""A run tells which results are of scans that may have been longer."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from support import engine_models as em
from support.commands import write_tiny_bundle
from support.make_run import GOOD, Runs
from support.write_dicom import Words, noise, write_series

HALF = 4


def write_scan(folder: Path, brightest: int) -> list[Path]:
    stored = noise((12, 10, 2 * HALF), brightest) % 900
    stored[3:6, 3:6, 1:3] = brightest + 1024
    attributes = Words(name=f"scan {brightest}", study=f"study {brightest}")
    return write_series(folder, stored, words=attributes)


def write_folders(folder: Path, files: list[Path], size: int) -> None:
    """Write both halves, the files of the second one cut."""
    for number, half in enumerate((files[:HALF], files[HALF:])):
        subfolder = folder / "DICOM" / f"0000000{number}"
        subfolder.mkdir(parents=True)
        for file in half:
            (subfolder / file.name).write_bytes(file.read_bytes()[: size if number else None])


def write_archives(folder: Path, files: list[Path]) -> None:
    folder.mkdir(parents=True)
    for number, half in enumerate((files[:HALF], files[HALF:])):
        with zipfile.ZipFile(folder / f"export{number}.zip", "w") as pack:
            for file in half:
                pack.write(file, file.name)
    last = folder / "export1.zip"
    last.write_bytes(last.read_bytes()[:-1000])


@pytest.mark.thorough
def test_half_a_scan_is_published_with_a_flag(
    tmp_path: Path, warm_workers: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "archive"
    write_scan(archive / "whole", GOOD[0])
    write_archives(archive / "packed", write_scan(tmp_path / "1", GOOD[1]))
    write_folders(archive / "cut", write_scan(tmp_path / "2", GOOD[2]), 400)
    write_folders(archive / "empty", write_scan(tmp_path / "3", GOOD[3]), 0)
    runs = Runs(tmp_path, archive, write_tiny_bundle(tmp_path / "bundles"))
    for name in ("FORMULA", "FORMULA_SECONDS", "SCANLOOM_KEY"):
        monkeypatch.setenv(name, runs.environment[name])
    monkeypatch.setattr("scanloom.engine.worker.supervisor.subprocess", warm_workers)
    monkeypatch.setattr("scanloom.engine.run.model_loader", em.formula_loader)

    runs("--archives")

    cases = [json.loads(file.read_text()) for file in runs.out.glob("cases/*/case.json")]
    flagged = [any(flag["code"] == "FILES_LOST" for flag in case["flags"]) for case in cases]
    assert sorted(flagged) == [False, True, True, True]
    rows = {row["case"]: row["flags"] for row in runs.rows("measurements")}
    assert sorted("FILES_LOST" in flags for flags in rows.values()) == sorted(flagged)
