"""Parts of a large report: rows, columns and words as another reader finds them, and files."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import stat
import time
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from scanloom.core import Reason
from scanloom.io.identity import key_fingerprint, load_key
from scanloom.io.output.crosswalk import SourceRecord, add_sources
from scanloom.io.output.private import private_folder
from scanloom.review.report import page as page_module
from scanloom.review.report import parts as parts_module
from scanloom.review.report.page import write_private_report, write_report
from scanloom.review.report.parts import RowTable, remove_others, write_parts
from support.make_report import add_failure, id_of, make_out

HOSTILE = "</script><script>alert(1)</script>\u2028\n\"'&"
LINE = re.compile(r'reportPart\("([\w-]+)",(.*)\)\n')


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a report of more than 20 rows be in parts of 7 rows, with the words of 16."""
    for module in (page_module, parts_module):
        monkeypatch.setattr(module, "ROWS", 7)
        monkeypatch.setattr(module, "TEXTS", 16)
    monkeypatch.setattr(page_module, "WHOLE", 20)


def read_parts(folder: Path) -> dict[str, Any]:
    """Return the content of each file, as a browser would find it."""
    read = {}
    for path in folder.iterdir():
        match = LINE.fullmatch(path.read_text(encoding="ascii"))
        assert match is not None
        assert match[1] == path.stem
        read[path.stem] = json.loads(match[2])
    return read


def numbers(text: str, kind: type) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind)


def data_of(page: Path) -> dict[str, Any]:
    """Return the data in a page."""
    text = page.read_text().split('<script type="application/json" id="data">')[1]
    return dict(json.loads(text.split("</script>")[0]))


def test_columns_and_words_are_those_of_the_rows(tmp_path: Path, small_parts: None) -> None:
    out = make_out(tmp_path / "out", 50)
    page = write_report(out)

    data = data_of(page)
    parts = read_parts(page.parent / data["folder"])
    rows = [row for n in range(8) for row in parts[f"rows-{n}"]]
    assert (data["parts"], data["count"], len(rows)) == (None, 50, 50)
    assert [len(parts[f"rows-{n}"]) for n in range(8)] == [7] * 7 + [1]
    order = [(-row["risk"], row["id"]) for row in rows]
    assert order == sorted(order)
    assert len(page.read_bytes()) < 70_000  # none of the rows
    assert id_of(3) not in page.read_text()

    for name in ("status", "reason", "flags", "models", "review"):
        values = data["values"][name]
        assert values == sorted(values)
        codes = numbers(parts[f"codes-{name}"], np.uint8)
        assert [values[code] for code in codes] == [row[name] for row in rows]
    for name in ("risk", "seconds"):
        column = numbers(parts[f"values-{name}"], np.float32)
        np.testing.assert_allclose(column, [row[name] for row in rows], rtol=1e-6)
    for n in range(len(data["structures"])):
        column = numbers(parts[f"values-volume-{n}"], np.float32)
        volumes = [row["volumes"][n] if row["volumes"] else -1 for row in rows]
        np.testing.assert_allclose(column, volumes, rtol=1e-6)
        bits = np.unpackbits(numbers(parts[f"has-{n}"], np.uint8), bitorder="little")[:50]
        assert (bits == (column > 0)).all()
    by_id = numbers(parts["order-id"], np.uint32)
    assert [rows[place]["id"] for place in by_id] == sorted(row["id"] for row in rows)
    assert list(numbers(parts["hash-id"], np.uint32)) == [crc32(r["id"].encode()) for r in rows]

    lines = [line for n in range(4) for line in parts[f"words-{n}"].split("\n")]
    assert [len(parts[f"words-{n}"].split("\n")) for n in range(4)] == [16, 16, 16, 2]
    for line, row in zip(lines, rows, strict=True):
        texts = [row["id"], row["detail"], *(finding["text"] for finding in row["findings"])]
        assert line == " ".join(texts).lower()


def test_equal_input_gives_equal_parts_and_older_ones_go(tmp_path: Path, small_parts: None) -> None:
    """Not at once: another process may be about to write a page that needs them."""
    out = make_out(tmp_path / "out", 30)
    page = write_report(out)
    first = data_of(page)["folder"]
    before = {path.name: path.read_bytes() for path in (page.parent / first).iterdir()}
    assert data_of(write_report(out))["folder"] == first
    assert {path.name: path.read_bytes() for path in (page.parent / first).iterdir()} == before

    add_failure(out, id_of(99), Reason.DAMAGED)
    second = data_of(write_report(out))["folder"]
    folders = {path.name for path in (page.parent / "data").iterdir()}
    assert folders == {Path(first).name, Path(second).name}
    long_ago = time.time() - 10_000
    os.utime(page.parent / first, (long_ago, long_ago))
    (page.parent / "data" / "notes").mkdir()
    os.utime(page.parent / "data" / "notes", (long_ago, long_ago))
    write_report(out)

    assert {p.name for p in (page.parent / "data").iterdir()} == {Path(second).name, "notes"}


def test_nothing_hostile_gets_out_of_a_part(tmp_path: Path) -> None:
    table = RowTable(1)
    row = {"id": HOSTILE, "detail": HOSTILE, "risk": 1.0, "seconds": 0.0, "volumes": [None]}
    table.add({**row, "findings": [{"text": HOSTILE}], "flags": [HOSTILE], "models": []})

    name = write_parts(tmp_path / "data", table.parts(), 0o666)

    parts = read_parts(tmp_path / "data" / name)
    assert parts["rows-0"][0]["id"] == HOSTILE
    assert len(parts["words-0"].split("\n")) == 1
    for path in (tmp_path / "data" / name).iterdir():
        assert not set(path.read_text()) & set("<>&\u2028")
    remove_others(tmp_path / "elsewhere", "")


def test_parts_with_names_are_in_the_private_folder_only(
    tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    out = make_out(tmp_path / "out", 30)
    fingerprint = key_fingerprint(load_key(tmp_path / "key"))
    record = SourceRecord(id_of(7), "dicom", "/archive/x", 3, patient_name="Roe^Jane")
    with private_folder(out, fingerprint) as folder:
        add_sources(folder, [record])

    write_report(out)
    page = write_private_report(out, fingerprint)

    named = {path for path in out.rglob("*") if path.is_file() and b"Roe^Jane" in path.read_bytes()}
    assert named
    assert all(path.is_relative_to(out / "private") for path in named)
    folder = page.parent / data_of(page)["folder"]
    [row] = [r for n in range(5) for r in read_parts(folder)[f"rows-{n}"] if r["id"] == id_of(7)]
    assert "Roe^Jane" in row["source"]
    assert any("roe^jane" in words for words in read_parts(folder).values())
    for path in (page, *folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_only_the_summary_is_made_anew_if_nothing_changed(
    tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all of it if a table, a record or a verdict did, whatever the caller says."""
    out = make_out(tmp_path / "out", 30)
    before = write_report(out).read_text()
    run = out / "runs" / "20260101T000000-000000"
    run.mkdir(parents=True)
    totals = {"run": run.name, "state": "done", "elapsed_s": 1.0, "cases": {}}
    (run / "totals.json").write_text(json.dumps(totals))
    collected = page_module.collect_report_data
    monkeypatch.setattr(page_module, "collect_report_data", None)

    page = write_report(out, changed=False)

    assert run.name in page.read_text()
    assert page.read_text().split("<script")[1:] == before.split("<script")[1:]
    shutil.rmtree(run)
    assert write_report(out, changed=False).read_text() == before

    monkeypatch.setattr(page_module, "collect_report_data", collected)
    folder = data_of(page)["folder"]
    add_failure(out, id_of(99), Reason.DAMAGED)
    assert data_of(write_report(out, changed=False))["count"] == 31
    (page.parent / "volumes.svg").unlink()
    write_report(out, changed=False)
    assert (page.parent / "volumes.svg").is_file()
    assert data_of(page)["folder"] != folder
