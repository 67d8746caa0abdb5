"""verify names each file that is not as it was published."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest

from scanloom.core import ScanError
from scanloom.engine.results.tables import write_case_tables
from scanloom.engine.results.verify import Discrepancy, unchecked_trail, verify
from scanloom.io.identity import key_fingerprint
from scanloom.io.output.audit import AUDIT, AuditTrail
from scanloom.io.output.case_folder import CaseFolder
from scanloom.io.output.crosswalk import SourceRecord, add_sources
from scanloom.io.output.json_file import write_document
from scanloom.io.output.layout import case_folder, fan_out, published_cases
from scanloom.io.output.parquet_file import write_parquet
from scanloom.io.output.private import private_folder
from support.layouts import both_layouts, case_folders


@pytest.fixture
def out(tmp_path: Path, layout: str) -> Path:
    if layout == "fanned":
        fan_out(tmp_path)
    for case in ("aa", "bb"):
        with CaseFolder(tmp_path, case) as folder:
            (folder.path / "dicom").mkdir()
            (folder.path / "dicom" / "segmentation.dcm").write_bytes(b"D" * 1000)
            (folder.path / "case.json").write_text("{}\n")
            (folder.path / "timing.json").write_text("{}\n")
            folder.publish()
    return tmp_path


@both_layouts
def test_unchanged_results_have_no_discrepancy(out: Path) -> None:
    assert list(verify(out)) == []

    # `report` wrote tables of results of `segment`; `plan` was asked before, and no run followed
    write_case_tables(out, set())
    (out / "runs").mkdir()
    (out / "runs" / "plan.json").write_text("{}")
    assert list(verify(out)) == []


@both_layouts
def test_one_flipped_bit_one_missing_one_extra(out: Path) -> None:
    first, second = case_folders(out)
    seg = first / "dicom" / "segmentation.dcm"
    data = bytearray(seg.read_bytes())
    data[500] ^= 1
    seg.write_bytes(data)
    (second / "case.json").unlink()
    (second / "dicom" / "more.txt").write_text("")

    assert set(verify(out)) == {
        Discrepancy("changed", str(seg.relative_to(out))),
        Discrepancy("missing", str((second / "case.json").relative_to(out))),
        Discrepancy("extra", str((second / "dicom" / "more.txt").relative_to(out))),
    }
    check = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=first, capture_output=True).returncode == 1


@pytest.mark.parametrize("head", ["case;model", "\ufeffcase,model"])
def test_a_table_that_a_spreadsheet_has_saved_is_named(head: str, out: Path) -> None:
    (out / "measurements.csv").write_text(f"{head}\naa,tiny\n", encoding="utf-8")

    assert set(verify(out)) == {
        Discrepancy("unreadable", "measurements.csv"),
        Discrepancy("missing", "measurements.parquet"),
    }


def test_a_flipped_bit_of_the_crosswalk_is_found(out: Path) -> None:
    with private_folder(out, "f" * 26) as private:
        add_sources(private, [SourceRecord(f"id{n}", "nifti", f"/scan{n}", 1) for n in range(30)])
    file = out / "private" / "crosswalk.parquet"
    assert list(verify(out)) == []
    content = bytearray(file.read_bytes())
    content[content.index(b"/scan")] ^= 1
    file.write_bytes(content)

    assert list(verify(out)) == [Discrepancy("unreadable", "private/crosswalk.parquet")]


def test_a_case_in_both_layouts_is_named_and_the_older_place_counts(out: Path) -> None:
    """Somebody copied it by hand; a copy in another subfolder is foreign, and ignored."""
    fan_out(out)
    for subfolder in ("_aa", "_zz"):
        shutil.copytree(out / "cases" / "aa", out / "cases" / subfolder / "aa")
    (out / "cases" / "_aa" / "aa" / "case.json").write_text("changed")

    assert list(published_cases(out)) == [out / "cases" / "aa", out / "cases" / "bb"]
    assert len(published_cases(out)) == 2
    assert case_folder(out, "aa") == out / "cases" / "aa"
    assert list(verify(out)) == [Discrepancy("extra", "cases/_aa/aa")]


def test_missing_and_malformed_sums_are_reported(out: Path) -> None:
    (out / "cases" / "aa" / "SHA256SUMS").unlink()
    (out / "cases" / "bb" / "SHA256SUMS").write_text("nonsense\n")

    assert list(verify(out)) == [
        Discrepancy("missing", "cases/aa/SHA256SUMS"),
        Discrepancy("unreadable", "cases/bb/SHA256SUMS"),
    ]


def test_timing_may_change_but_not_go(out: Path) -> None:
    (out / "cases" / "aa" / "timing.json").write_text("{1}")
    (out / "cases" / "bb" / "timing.json").unlink()

    assert list(verify(out)) == [Discrepancy("missing", "cases/bb/timing.json")]


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """Two cases in an output folder with an audit trail."""
    (tmp_path / "key").write_bytes(KEY)
    for case in ("aa", "bb"):
        publish_told(tmp_path / "out", case, b"labels")
    return tmp_path / "out"


KEY = b"k" * 32


def publish_told(out: Path, case: str, labels: bytes) -> None:
    audit = AuditTrail(out, KEY)
    with CaseFolder(out, case, key_fingerprint(KEY), audit=audit) as folder:
        (folder.path / "segmentation.nii.gz").write_bytes(labels)
        models = [{"name": "tiny", "weights_sha256": "0" * 64}]
        plain = {"case": case, "models": models, "recipe": "r", "source": {"hash": str(labels)}}
        write_document(folder.path / "case.json", plain)
        write_document(folder.path / "timing.json", {"steps": {}})
        folder.publish(replace=True)


def test_the_audit_trail_tells_the_results(told: Path) -> None:
    publish_told(told, "bb", b"labels made anew")

    assert list(verify(told, told.parent / "key")) == []
    assert unchecked_trail(told, told.parent / "nothing")
    assert not unchecked_trail(told, told.parent / "key")


def test_a_result_with_sums_of_its_own_is_found_by_the_audit_trail(told: Path) -> None:
    """Whoever can write a file can write its checksum too."""
    folder = told / "cases" / "aa"
    (folder / "segmentation.nii.gz").write_bytes(b"other")
    names = ("case.json", "segmentation.nii.gz")
    sums = subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, check=True)
    (folder / "SHA256SUMS").write_bytes(sums.stdout)

    assert list(verify(told, told.parent / "nothing")) == []
    assert list(verify(told, told.parent / "key")) == [
        Discrepancy("changed", "cases/aa: not the result that private/audit.jsonl tells")
    ]


@pytest.mark.parametrize("lines", [slice(0, 1), slice(1, 2), slice(0, 0)])
def test_lines_that_were_cut_off_are_missed(told: Path, lines: slice) -> None:
    trail = told / "private" / AUDIT
    trail.write_bytes(b"".join(trail.read_bytes().splitlines(keepends=True)[lines]))

    assert list(verify(told, told.parent / "key"))


def test_a_trail_that_was_removed_is_missed(told: Path) -> None:
    (told / "private" / AUDIT).unlink()

    found = list(verify(told, told.parent / "key"))
    assert found == [Discrepancy("missing", "private/audit.jsonl")]


def test_what_can_not_be_read_beside_the_cases_is_named(told: Path) -> None:
    damaged = (
        "engines/net/engine.json",
        "failed/aa.json",
        "private/crosswalk.jsonl",
        "private/crosswalk.parquet",
        "private/index/part.parquet",
        "runs/one/status.json",
    )
    for name in damaged:
        (told / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("parquet"):
            write_parquet(pa.table({"patient": ["ZORB1", "ZORB2"]}), told / name, compression=None)
            content = bytearray((told / name).read_bytes())
            content[content.index(b"ZORB2") + 4] ^= 3
            (told / name).write_bytes(content)
        else:
            (told / name).write_text('{"a": 1\n')
    shutil.copytree(case_folder(told, "aa"), told / "cases" / "aa.bak")
    (told / "cases" / ".DS_Store").touch()

    assert list(verify(told, told.parent / "key")) == [
        Discrepancy("extra", "cases/aa.bak"),
        *(Discrepancy("unreadable", name) for name in damaged),
    ]


@pytest.mark.parametrize("content", ["a" * 26, "?", None])
def test_a_changed_fingerprint_is_named_with_the_key_that_was_given(
    told: Path, content: str | None
) -> None:
    fingerprint = told / "private" / "key.fingerprint"
    fingerprint.unlink() if content is None else fingerprint.write_text(content)
    fault = {None: "missing", "?": "unreadable"}.get(content, "changed")

    assert Discrepancy(fault, "private/key.fingerprint") in set(verify(told, told.parent / "key"))
    assert not unchecked_trail(told, told.parent / "key")
    (told.parent / "key").write_bytes(b"x" * 32)
    assert unchecked_trail(told, told.parent / "key")


def test_a_folder_without_results(tmp_path: Path) -> None:
    with pytest.raises(ScanError, match="NO_RESULTS"):
        list(verify(tmp_path))
