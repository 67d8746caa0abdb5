"""`where` and `join` resolve ids, for users who hold key and crosswalk."""

from __future__ import annotations

import csv
import io
import json
import stat
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from scanloom.io.output.layout import fan_out
from support.commands import Ended, scanloom
from support.layouts import both_layouts, case_folders
from support.write_dicom import Words, noise, uid, write_series

HEADER = Words(more={"PatientName": "Doe^Jane", "PatientID": "=4711", "AccessionNumber": "A1"})
NOBODY = "a" * 26


@pytest.fixture(scope="module")
def case(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A published case; it has a key of its own, since the tests' key is set for each test."""
    folder = tmp_path_factory.mktemp("where")
    write_series(folder / "study", noise(), words=HEADER)
    out, key = folder / "out", folder / "key"
    arguments = ["segment", folder / "study", "--model", tiny_model, "--out", out, "--key", key]
    ended = scanloom(*arguments, "--json")
    assert ended.code == 0, ended.err
    return out, ended.document["cases"][0]["case"]


def where(out: Path, *arguments: str | Path) -> Ended:
    return scanloom("where", *arguments, "--out", out, "--key", out.parent / "key")


def join(out: Path, *arguments: str | Path) -> Ended:
    return scanloom("join", *arguments, "--out", out, "--key", out.parent / "key")


def test_where_tells_path_uids_and_patient(case: tuple[Path, str]) -> None:
    out, case_id = case
    ended = where(out, case_id.upper())

    assert (ended.code, ended.err) == (0, "")
    for text in (case_id, out.parent / "study", uid("study"), uid("series"), "=4711", "Doe^Jane"):
        assert str(text) in ended.out
    [source] = where(out, case_id, "--json").document["sources"]
    assert source["path"] == str(out.parent / "study")
    assert source["patient_name"] == "Doe^Jane"
    assert source["folder"] == source["id"] == case_id


def test_ids_that_are_not_there_are_named(case: tuple[Path, str]) -> None:
    out, case_id = case
    ended = where(out, case_id, NOBODY, "--json")
    assert ended.code == 1
    assert ended.document["unknown"] == [NOBODY]
    assert NOBODY in ended.err
    ended = where(out, NOBODY)
    assert ended.code == 65
    assert "ID_UNKNOWN" in ended.err
    assert "mounted" not in ended.err


def test_another_key_is_refused(case: tuple[Path, str], tmp_path: Path) -> None:
    """The command creates no key."""
    out, case_id = case
    (tmp_path / "other").write_bytes(b"x" * 32)
    (tmp_path / "t.csv").write_text(f"case\n{case_id}\n")
    for key in ("other", "none"):
        for command in (["where", case_id], ["join", str(tmp_path / "t.csv")]):
            ended = scanloom(*command, "--out", out, "--key", tmp_path / key)
            assert ended.code == 65
            assert "KEY_MISMATCH" in ended.err
            assert "4711" not in ended.out + ended.err
    assert not (tmp_path / "none").exists()


def test_a_folder_without_a_crosswalk_says_so(tmp_path: Path) -> None:
    for command in (["where", NOBODY], ["join", str(tmp_path / "t.csv")]):
        ended = scanloom(*command, "--out", tmp_path)
        assert ended.code == 65
        assert "NO_RESULTS" in ended.err


def test_join_adds_the_source(case: tuple[Path, str], tmp_path: Path) -> None:
    out, case_id = case
    (tmp_path / "t.csv").write_text(f"case,ml\n{case_id},-1.5\n")
    ended = join(out, tmp_path / "t.csv")

    [row] = csv.DictReader(io.StringIO(ended.out))
    assert (ended.code, ended.err) == (0, "")
    assert row["ml"] == "-1.5"
    assert row["source_patient_id"] == "'=4711"
    assert row["source_series_uid"] == uid("series")
    assert row["source_path"] == str(out.parent / "study")


@pytest.mark.parametrize("name", ["joined.csv", "joined.parquet"])
def test_a_joined_file_is_for_its_owner_alone(
    name: str, case: tuple[Path, str], tmp_path: Path
) -> None:
    out, case_id = case
    (tmp_path / "t.csv").write_text(f"id\n{case_id}\n{NOBODY}\n")
    ended = join(out, tmp_path / "t.csv", "--to", tmp_path / name)

    assert ended.code == 1
    assert "crosswalk: 1." in ended.err
    assert ended.out == ""
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert b"4711" in (tmp_path / name).read_bytes()


def test_joined_tables_do_not_go_into_results(case: tuple[Path, str], tmp_path: Path) -> None:
    out, case_id = case
    (tmp_path / "t.csv").write_text(f"case\n{case_id}\n")
    for path in ("joined.csv", "cases/joined.csv", "private/../joined.csv"):
        assert join(out, tmp_path / "t.csv", "--to", out / path).code == 2
    assert join(out, tmp_path / "t.csv", "--to", out / "private" / "joined.csv").code == 0
    assert join(out, tmp_path / "t.csv", "--to", tmp_path / "joined.xlsx").code == 2
    # before the table is read
    ended = join(out, tmp_path / "none.csv", "--to", tmp_path / "no" / "joined.csv")
    assert ended.code == 74
    assert "the joined table can't be written (its folder is missing, ENOENT)" in ended.err


def test_a_joined_file_that_fails_leaves_the_old_one(
    case: tuple[Path, str], tmp_path: Path
) -> None:
    out, _ = case
    (tmp_path / "t.csv").write_text("case\na,b\n")
    (tmp_path / "joined.csv").write_text("old")
    assert join(out, tmp_path / "t.csv", "--to", tmp_path / "joined.csv").code == 65
    assert (tmp_path / "joined.csv").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.thorough
@both_layouts
def test_source_names_are_used_on_request_only(
    tiny_model: Path, tmp_path: Path, layout: str
) -> None:
    """A case keeps its folder's name, and is found done under it, whatever is asked for later."""
    write_series(tmp_path / "study", noise(), words=HEADER)
    write_series(tmp_path / "again", noise(), words=Words(name="b", more=HEADER.more))
    out = tmp_path / "out"
    if layout == "fanned":
        fan_out(out)
    command = ["segment", tmp_path / "study", "--model", tiny_model, "--out", out]
    assert scanloom(*command, "--names", "source", "--quiet").code == 0
    [folder] = case_folders(out)
    assert folder.name == "4711_1"
    reported = json.loads((folder / "case.json").read_text())["case"]
    assert len(reported) == 26

    before = (folder / "timing.json").read_bytes()
    again = scanloom(*command)  # by id: the same case, done
    assert again.code == 0
    assert "nothing was done" in again.out
    assert (folder / "timing.json").read_bytes() == before
    assert case_folders(out) == [folder]

    command[1] = tmp_path / "again"
    [record] = scanloom(*command, "--names", "source", "--json").document["cases"]
    assert Path(record["folder"]).name == f"4711_1-{record['case'][-6:]}"
    sources = scanloom("where", reported, record["case"], "--out", out, "--json").document[
        "sources"
    ]
    assert [s["folder"] for s in sources] == ["4711_1", Path(record["folder"]).name]
    # tables name these cases by their folders
    by_name = scanloom("where", "4711_1", record["case"], "--out", out, "--json").document
    assert by_name == {"schema": 1, "sources": sources, "unknown": []}
    (tmp_path / "t.csv").write_text('case\n4711_1\n""\nnobody\n')
    ended = scanloom("join", tmp_path / "t.csv", "--out", out)
    assert [row["source_path"] for row in csv.DictReader(io.StringIO(ended.out))] == [
        str(tmp_path / "study"),
        "",
        "",
    ]
    assert ended.code == 1

    command[1] = tmp_path / "study"
    assert "STALE" in scanloom(*command, "--seg", "labelmap").err
    assert scanloom(*command, "--seg", "labelmap", "--replace", "--quiet").code == 0
    assert len(case_folders(out)) == 2


def test_failures_are_recorded_where_there_are_results(tiny_model: Path, tmp_path: Path) -> None:
    """A run with a result records its failures in any order; a later result removes a failure."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    write_series(good, noise(), words=HEADER)
    slices = write_series(bad, noise(), words=Words(name="bad", more=HEADER.more))
    missing = slices[2].read_bytes()
    slices[2].unlink()
    write_series(tmp_path / "mr", noise(), words=Words("MR", name="mr"))
    out = tmp_path / "out"
    command = ["segment", "--model", tiny_model, "--out", out, "--json"]

    assert scanloom(*command, bad).code == 65
    assert not out.exists()
    cases = scanloom(*command, bad, tmp_path / "mr", good).document["cases"]
    [failed] = (out / "failed").iterdir()
    record = json.loads(failed.read_text())
    assert failed.stem == record["case"] == cases[0]["case"]
    assert record["reason"] == "SLICE_GAP"
    ids = [case["case"] for case in cases]
    sources = scanloom("where", *ids, "--out", out, "--json").document["sources"]
    assert {s["path"] for s in sources} == {str(bad), str(good), str(tmp_path / "mr")}

    slices[2].write_bytes(missing)
    assert scanloom(*command, bad).code == 0
    assert not list((out / "failed").iterdir())


def test_files_of_another_index_are_told_from_unknown_ones(
    case: tuple[Path, str],
) -> None:
    """A run's manifest has the file, but the index was made again from other paths."""
    out, _ = case
    table = {"file": ["f" * 26], "case": ["c" * 26]}
    parquet.write_table(pa.table(table), out / "manifest.parquet")
    ended = where(out, "f" * 26)
    (out / "manifest.parquet").unlink()

    assert ended.code == 65
    assert f"run `scanloom index` on the paths of the run with --out {out}" in ended.err
    assert "the crosswalk has none" in where(out, "f" * 26).err
