"""The report with names and paths: only for the holder of the key, and only in `private/`."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest

from scanloom.core import Reason
from scanloom.io.identity import key_fingerprint, load_key
from scanloom.io.output.crosswalk import SourceRecord, add_sources
from scanloom.io.output.private import private_folder
from support.commands import scanloom
from support.make_report import add_case, add_failure, id_of, usual

NAMES = ("Roe^Jane", "PAT-77", "/archive/ward 7/scan.nii")


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output folder with a case, a failure, and the sources of both."""
    key = tmp_path / "key"
    monkeypatch.setenv("SCANLOOM_KEY", str(key))
    out = tmp_path / "out"
    add_case(out, id_of(1), usual(np.random.default_rng(0)))
    add_failure(out, id_of(2), Reason.DAMAGED)
    sources = [
        SourceRecord(id_of(n), "dicom", NAMES[2], 3, patient_id=NAMES[1], patient_name=NAMES[0])
        for n in (1, 2)
    ]
    with private_folder(out, key_fingerprint(load_key(key))) as folder:
        add_sources(folder, sources)
    return out


def texts(out: Path) -> dict[str, bytes]:
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def test_it_names_the_sources_and_is_readable_by_its_owner_only(out: Path) -> None:
    document = scanloom("report", out, "--private", "--json").document

    page = out / "private" / "report.html"
    assert document["private_report"] == str(page)
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert all(page.read_text().count(name) >= 2 for name in NAMES)


def test_nothing_of_it_is_elsewhere(out: Path) -> None:
    scanloom("report", out, "--private")

    named = {
        path for path, data in texts(out).items() if any(name.encode() in data for name in NAMES)
    }
    assert named
    assert all(path.startswith("private/") for path in named)


def test_it_is_not_written_unless_requested(out: Path) -> None:
    assert "private_report" not in scanloom("report", out, "--json").document
    assert not (out / "private" / "report.html").exists()


def test_it_needs_the_key(out: Path, tmp_path: Path) -> None:
    second_out = tmp_path / "other"
    load_key(second_out)

    refused = scanloom("report", out, "--private", "--key", second_out, "--json")

    assert refused.document["error"]["code"] == "KEY_MISMATCH"
    assert not (out / "private" / "report.html").exists()


def test_a_folder_without_crosswalk_has_none(tmp_path: Path) -> None:
    add_case(tmp_path / "out", id_of(1), usual(np.random.default_rng(0)))

    refused = scanloom("report", tmp_path / "out", "--private", "--json")

    assert refused.document["error"]["code"] == "NO_RESULTS"
