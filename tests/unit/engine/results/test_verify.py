"""verify names each file that is not as it was published."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scanloom.core import ScanError
from scanloom.engine.results.verify import Discrepancy, verify
from scanloom.io.output.case_folder import CaseFolder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    for case in ("aa", "bb"):
        with CaseFolder(tmp_path, case) as folder:
            (folder.path / "dicom").mkdir()
            (folder.path / "dicom" / "segmentation.dcm").write_bytes(b"D" * 1000)
            (folder.path / "case.json").write_text("{}\n")
            (folder.path / "timing.json").write_text("{}\n")
            folder.publish()
    return tmp_path


def test_unchanged_results_have_no_discrepancy(out: Path) -> None:
    assert list(verify(out)) == []


def test_one_flipped_bit_one_missing_one_extra(out: Path) -> None:
    seg = out / "cases" / "aa" / "dicom" / "segmentation.dcm"
    data = bytearray(seg.read_bytes())
    data[500] ^= 1
    seg.write_bytes(data)
    (out / "cases" / "bb" / "case.json").unlink()
    (out / "cases" / "bb" / "dicom" / "more.txt").write_text("")

    assert set(verify(out)) == {
        Discrepancy("changed", "cases/aa/dicom/segmentation.dcm"),
        Discrepancy("missing", "cases/bb/case.json"),
        Discrepancy("extra", "cases/bb/dicom/more.txt"),
    }
    check = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=out / "cases" / "aa", capture_output=True).returncode == 1


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


def test_a_folder_without_results(tmp_path: Path) -> None:
    with pytest.raises(ScanError, match="NO_RESULTS"):
        list(verify(tmp_path))
