"""Tables of reviews, the report's column, totals and checks, over published cases."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from scanloom.core import ScanError
from scanloom.engine.results.verify import verify
from scanloom.engine.revisions import Correction, publish_revision
from scanloom.review.report.page import write_report
from scanloom.review.revisions import latest_result, read_label_maps
from scanloom.review.verdicts.log import VerdictLog, reviewer_codes
from scanloom.review.verdicts.tables import COLUMNS, review_states, write_review_tables
from scanloom.review.verdicts.verdict import Verdict, seen_of
from support.commands import scanloom
from support.review_cases import affine_of, publish, scan_array

CANARY = "CANARY-Zoe"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cases, from files that are named after a patient."""
    folder = tmp_path_factory.mktemp("tables")
    publish(folder, scan_array(1), affine_of(), f"{CANARY}-1")
    publish(folder, scan_array(2), affine_of(), f"{CANARY}-2")
    return folder


@pytest.fixture
def out(published: Path, tmp_path: Path) -> Path:
    shutil.copytree(published / "out", tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def log(out: Path) -> Iterator[VerdictLog]:
    with closing(VerdictLog(out)) as log:
        yield log


def cases(out: Path) -> list[str]:
    return sorted(folder.name for folder in (out / "cases").iterdir())


def give(log: VerdictLog, case: str, reviewer: str, decision: Any, **more: Any) -> None:
    seen = seen_of(latest_result(log.out, case))
    log.append(Verdict(case, reviewer, seen, decision, **more), f"{CANARY} was here")


def revise(out: Path, key: Path, case: str) -> None:
    latest = latest_result(out, case)
    [(file, labels)] = read_label_maps(latest).items()
    publish_revision(out, case, Correction({file: labels * 0}, "r1", "brush", seen_of(latest)), key)


def test_a_row_for_each_decision_that_counts(log: VerdictLog) -> None:
    first, second = cases(log.out)
    give(log, first, "r1", "reject")
    give(log, first, "r1", "edit", structures={"m/liver": "reject"}, tags=("leak", "cut-off"))
    give(log, first, "r2", "accept", independent=False)
    give(log, second, "r2", "accept", seconds=12.5)
    give(log, second, "r2", "edit", reading=2)

    write_review_tables(log.out)

    table = pd.read_parquet(log.out / "review" / "review.parquet")
    assert tuple(table.columns) == COLUMNS
    keys = ["case", "reviewer", "reading", "subject", "decision"]
    assert table[keys].values.tolist() == [
        [first, "r1", 1, "case", "edit"],
        [first, "r1", 1, "m/liver", "reject"],
        [first, "r2", 1, "case", "accept"],
        [second, "r2", 1, "case", "accept"],
        [second, "r2", 2, "case", "edit"],
    ]
    assert table["tags"][0] == "leak cut-off"
    assert table["seconds"][3] == 12.5
    assert table["independent"].tolist() == [True, True, False, True, True]
    text = pd.read_csv(log.out / "review" / "review.csv", keep_default_na=False)
    pd.testing.assert_frame_equal(text, table, check_dtype=False)


def test_no_cell_is_a_formula(log: VerdictLog) -> None:
    give(log, cases(log.out)[0], "r1", "accept", structures={"=1+1/@liver": "accept"})

    write_review_tables(log.out)

    with (log.out / "review" / "review.csv").open(newline="") as file:
        _, row = csv.DictReader(file)
    assert row["subject"] == "'=1+1/@liver"


def test_tables_follow_an_undo_and_are_not_written_without_verdicts(log: VerdictLog) -> None:
    write_review_tables(log.out)
    assert not (log.out / "review" / "review.csv").exists()
    give(log, cases(log.out)[0], "r1", "accept")
    write_review_tables(log.out)
    log.undo("r1", cases(log.out)[0])
    write_review_tables(log.out)

    assert pd.read_parquet(log.out / "review" / "review.parquet").empty
    assert pd.read_csv(log.out / "review" / "agreement.csv").empty


def test_agreement_of_reviewers_is_written(log: VerdictLog) -> None:
    for case in cases(log.out):
        give(log, case, "r1", "accept")
        give(log, case, "r2", "accept" if case == cases(log.out)[0] else "reject")

    write_review_tables(log.out)

    table = pd.read_csv(log.out / "review" / "agreement.csv").set_index("measure")
    assert table.loc["alpha", "value"] == pytest.approx(0)
    assert table.loc["kappa r1 r2", ["value", "cases"]].tolist() == [0, 2]


def test_states_of_cases(log: VerdictLog, published: Path) -> None:
    first, second = cases(log.out)
    give(log, first, "r1", "accept")
    assert review_states(log.out) == {first: "accept"}
    give(log, first, "r2", "reject")
    give(log, second, "r1", "reject")
    assert review_states(log.out) == {first: "disagreed", second: "reject"}
    give(log, first, "r3", "reject")
    assert review_states(log.out)[first] == "reject"

    revise(log.out, published / "key", first)
    write_review_tables(log.out)

    assert review_states(log.out) == {first: "stale", second: "reject"}
    table = pd.read_parquet(log.out / "review" / "review.parquet")
    assert table.groupby("case")["current"].all().to_dict() == {first: False, second: True}


def test_verdicts_are_in_the_report_and_its_filter(log: VerdictLog) -> None:
    first, second = cases(log.out)
    without = write_report(log.out).read_text()
    give(log, first, "r1", "edit")

    page = write_report(log.out).read_text()

    assert ">Verdict<" not in without
    options = re.findall(r"<option>([^<]*)", page.split('id="verdict"')[1].split("</select>")[0])
    assert options == ["needs edit", "not reviewed"]
    data = page.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    rows = {row["id"]: row["verdict"] for row in json.loads(data)["parts"]["rows-0"]}
    assert rows == {first: "needs edit", second: "not reviewed"}


def test_totals_are_in_the_status(log: VerdictLog) -> None:
    first, second = cases(log.out)
    give(log, first, "r1", "accept")
    give(log, second, "r1", "edit")

    assert "Reviewed: 1 accepted, 1 needs edit." in scanloom("status", log.out).out
    assert scanloom("status", log.out, "--json").document["reviewed"] == {"accept": 1, "edit": 1}


def test_a_damaged_log_is_told_and_nothing_else_fails(log: VerdictLog) -> None:
    give(log, cases(log.out)[0], "r1", "accept")
    file = log.out / "review" / "verdicts.jsonl"
    file.write_bytes(file.read_bytes().replace(b"accept", b"reject"))

    reported, checked = scanloom("report", log.out), scanloom("verify", log.out)

    message = "review/verdicts.jsonl: line 1 was changed"
    assert (reported.code, message in reported.err) == (1, True)
    assert message in scanloom("status", log.out).err
    assert (checked.code, "line 1 was changed" in checked.out + checked.err) == (1, True)
    with pytest.raises(ScanError, match=message):
        write_review_tables(log.out)


def test_a_flipped_byte_of_a_revision_is_named(out: Path, published: Path) -> None:
    first = cases(out)[0]
    revise(out, published / "key", first)
    assert [each for each in verify(out) if "review" in each.file] == []
    revision = out / "review" / "revisions" / first / "1"
    for file in sorted(revision.iterdir()):
        if file.name in ("SHA256SUMS", "timing.json"):  # no checksum, as in a case
            continue
        whole = file.read_bytes()
        file.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
        named = {each.file for each in verify(out) if "review" in each.file}
        assert named == {f"review/revisions/{first}/1/{file.name}"}
        file.write_bytes(whole)


def test_nothing_in_review_names_a_person_or_a_path(log: VerdictLog, published: Path) -> None:
    codes = reviewer_codes(log.out, [f"Dr {CANARY}"])
    for case in cases(log.out):
        give(log, case, codes[f"Dr {CANARY}"], "edit", tags=("leak",))
        revise(log.out, published / "key", case)
    write_review_tables(log.out)
    private = [path for path in (log.out / "private").rglob("*") if path.is_file()]
    written = [path for path in (log.out / "review").rglob("*") if path.is_file()]
    page = write_report(log.out)

    secrets = [CANARY.encode(), str(published).encode(), str(log.out).encode()]
    assert len(written) > 10
    for path in [*written, page]:
        assert not any(secret in path.read_bytes() for secret in secrets), path
        assert not any(secret.decode() in str(path.relative_to(log.out)) for secret in secrets[:1])
    assert any(CANARY.encode() in path.read_bytes() for path in private)
    assert all(path.stat().st_mode & 0o077 == 0 for path in private)
