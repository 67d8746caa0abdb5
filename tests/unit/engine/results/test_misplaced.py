"""A folder that holds the result of another case counts as damaged: numbers keep their patient."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from scanloom.engine.results.tables import write_case_tables
from scanloom.engine.results.verify import verify
from scanloom.io.identity import key_fingerprint
from scanloom.io.output.case_folder import CaseFolder
from scanloom.io.output.crosswalk import SourceRecord, add_sources
from scanloom.io.output.json_file import write_document
from scanloom.io.output.measurements import write_measurements
from scanloom.io.output.private import private_folder
from scanloom.review.report.page import write_report
from support.make_report import measured

A, B, NAMED = "a" * 26, "b" * 26, "c" * 26


def publish(out: Path, case: str, name: str, volume_ml: float) -> Path:
    with CaseFolder(out, name) as draft:
        model = {"name": "m", "card_sha256": "", "device": "cpu", "precision": "float32"}
        models = [{**model, "version": "1", "license": "MIT", "weights_sha256": ""}]
        document = {"case": case, "recipe": "r", "models": models, "flags": [], "versions": {}}
        source, grid = {"hash": case, "modality": "CT"}, {"axes": "LPS", "shape": [4, 4, 4]}
        write_document(draft.path / "case.json", {**document, "source": source, "grid": grid})
        write_document(draft.path / "timing.json", {"steps": {}})
        write_measurements(draft.path, [measured("m", "liver", volume_ml)])
        return draft.publish()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Two cases that are named by their ids, and one by its source."""
    for case, name, volume in ((A, A, 1.0), (B, B, 2.0), (NAMED, "mueller", 3.0)):
        publish(tmp_path, case, name, volume)
    sources = [SourceRecord(A, "dicom", "/a", 4), SourceRecord(B, "dicom", "/b", 4)]
    sources.append(SourceRecord(NAMED, "dicom", "/c", 4, folder="mueller"))
    with private_folder(tmp_path, key_fingerprint(bytes(32))) as private:
        add_sources(private, sources)
    return tmp_path


def volumes(out: Path) -> dict[str, float]:
    with (out / "measurements.csv").open(newline="") as file:
        return {row["case"]: float(row["volume_ml"]) for row in csv.DictReader(file)}


def told(out: Path) -> set[str]:
    return {finding.file for finding in verify(out) if finding.file.startswith("cases/")}


def test_where_all_lie_where_they_belong_all_count(out: Path) -> None:
    damaged = set[str]()

    write_case_tables(out, damaged)

    assert volumes(out) == {A: 1.0, B: 2.0, "mueller": 3.0}
    assert not damaged
    assert not told(out)


@pytest.mark.parametrize("copied", [A, "mueller"])
def test_a_copy_counts_once(out: Path, copied: str) -> None:
    shutil.copytree(out / "cases" / copied, out / "cases" / "mueller_old")
    damaged = set[str]()

    write_case_tables(out, damaged)

    assert volumes(out) == {A: 1.0, B: 2.0, "mueller": 3.0}
    assert damaged == {"mueller_old"}
    case = NAMED if copied == "mueller" else A
    assert told(out) == {f"cases/mueller_old: it holds the result of {case}"}


def test_exchanged_folders_do_not_exchange_numbers(out: Path) -> None:
    write_case_tables(out, set())
    cases = out / "cases"
    (cases / A).rename(cases / "t")
    (cases / B).rename(cases / A)
    (cases / "t").rename(cases / B)

    findings = list(verify(out))
    assert [finding.file for finding in findings] == [
        f"cases/{A}: it holds the result of {B}",
        f"cases/{B}: it holds the result of {A}",
    ]

    damaged = set[str]()
    write_case_tables(out, damaged)

    assert volumes(out) == {"mueller": 3.0}
    assert damaged == {A, B}
    write_report(out, damaged)
    page = (out / "report" / "index.html").read_text()
    assert not {A, B} & {name for name in (A, B) if name in page}


def test_without_the_crosswalk_only_ids_are_judged(out: Path) -> None:
    (out / "cases" / A).rename(out / "cases" / NAMED)
    shutil.rmtree(out / "private")

    assert told(out) == {f"cases/{NAMED}: it holds the result of {A}"}
