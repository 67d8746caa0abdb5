"""The crosswalk brings back the source of an id, and loses nothing."""

from __future__ import annotations

import gzip
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from scanloom.core import ScanError, Series
from scanloom.io.identity import key_fingerprint
from scanloom.io.index.build import build_index, record_series, source_from_index
from scanloom.io.index.series import find_series
from scanloom.io.output.crosswalk import (
    SourceRecord,
    add_sources,
    case_folders,
    find_sources,
    latest_by_id,
    source_from_series,
)
from scanloom.io.output.private import private_folder
from support.write_dicom import Words, noise, uid, write_series

KEY = "abc"


def add(out: Path, *sources: SourceRecord) -> None:
    with private_folder(out, KEY) as private:
        add_sources(private, sources)


def row(case_id: str, path: str = "/scans/a", folder: str = "") -> SourceRecord:
    return SourceRecord(case_id, "nifti", path, 1, folder)


def test_what_was_added_is_found_again(tmp_path: Path) -> None:
    first = SourceRecord(
        "a", "dicom", "/å/Müller^José", 300, "a", "1.2", "3.4", "P 1", "Müller^José"
    )
    add(tmp_path, first, row("b"))
    add(tmp_path, row("c"))

    assert find_sources(tmp_path, ["a"]) == (first,)
    assert [s.id for s in find_sources(tmp_path, ["c", "b", "nobody"])] == ["b", "c"]
    assert find_sources(tmp_path / "elsewhere", ["a"]) == ()


def test_pandas_and_others_can_read_it(tmp_path: Path) -> None:
    """Plain Parquet: columns of text and one number."""
    add(tmp_path, row("a"), row("b"))
    file = tmp_path / "private" / "crosswalk.parquet"

    table = pq.read_table(file)
    assert table.column("id").to_pylist() == ["a", "b"]
    assert table.column("files").to_pylist() == [1, 1]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_each_place_has_one_row_and_the_newest_counts(tmp_path: Path) -> None:
    add(tmp_path, row("a", "/one"), row("b"), row("a", "/two"))
    add(tmp_path, row("a", "/one"))

    assert [s.path for s in find_sources(tmp_path, ["a"])] == ["/two", "/one"]
    assert latest_by_id(find_sources(tmp_path, ["a", "b"]))["a"].path == "/one"


def test_a_case_keeps_its_folder(tmp_path: Path) -> None:
    """A later failure, or the same scan at another place, does not take it away."""
    add(tmp_path, row("a", "/one", "Name"), row("b"))
    add(tmp_path, row("a", "/one"), row("a", "/two"))

    assert case_folders(tmp_path) == {"a": "Name"}
    assert {s.folder for s in find_sources(tmp_path, ["a"])} == {"Name"}


@pytest.mark.parametrize("pack", ["none", "gzip", "zip"])
def test_a_series_of_an_index_is_told_packed_or_not(pack: str, tmp_path: Path) -> None:
    attributes = Words(more={"PatientID": "4711", "AccessionNumber": "A1"})
    scans = tmp_path / "scans"
    for file in write_series(scans, noise(), words=attributes):
        if pack == "gzip":
            file.write_bytes(gzip.compress(file.read_bytes()))
    if pack == "zip":
        scans = Path(shutil.make_archive(str(scans), "zip", scans))
    index = build_index([scans], b"k" * 32, tmp_path / "out")
    [indexed] = index.series
    source = source_from_index(index, indexed)

    assert (source.path, source.files, source.series_uid) == (
        str(scans),
        indexed.n_files,
        uid("series"),
    )
    assert (source.patient_id, source.accession_number) == ("4711", "A1")


def test_series_of_an_index_are_remembered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many at once as fit; those that are known are not read again."""
    for name in "abc":
        write_series(tmp_path / "scans" / name, noise(), words=Words(name=name))
    key, out = b"k" * 32, tmp_path / "out"
    index = build_index([tmp_path / "scans"], key, out)
    ids = [series.id for series in index.series]
    monkeypatch.setattr("scanloom.io.index.build.BATCH_ROWS", 2)

    record_series(out, key_fingerprint(key), index, ids[:1])
    assert [s.id for s in find_sources(out, ids)] == ids[:1]
    record_series(out, key_fingerprint(key), index, ids)
    shutil.rmtree(tmp_path / "scans")
    record_series(out, key_fingerprint(key), index, ids)

    sources = find_sources(out, ids)
    assert [s.id for s in sources] == ids
    assert {Path(s.path).name for s in sources} == set("abc")


def test_nothing_new_writes_nothing(tmp_path: Path) -> None:
    add(tmp_path, row("a"), row("b"))
    before = (tmp_path / "private" / "crosswalk.parquet").stat()
    add(tmp_path, row("b"))
    after = (tmp_path / "private" / "crosswalk.parquet").stat()

    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


ADDS_MANY = """
import sys
from pathlib import Path
from scanloom.io.output.crosswalk import SourceRecord, add_sources
from scanloom.io.index.series import find_series
from scanloom.io.output.private import private_folder

for n in range(20):
    with private_folder(Path(sys.argv[1]), "abc") as private:
        add_sources(private, [SourceRecord(f"{sys.argv[2]}-{n}", "nifti", "/scans/a", 1)])
"""


def test_two_who_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """The first claim of the folder is part of the race."""
    command = [sys.executable, "-c", ADDS_MANY, str(tmp_path)]
    workers = [subprocess.Popen([*command, str(writer)]) for writer in range(2)]
    assert [worker.wait(120) for worker in workers] == [0, 0]

    expected = [f"{writer}-{n}" for writer in range(2) for n in range(20)]
    assert sorted(s.id for s in find_sources(tmp_path, expected)) == sorted(expected)
    assert {p.name for p in (tmp_path / "private").iterdir()} == {
        ".lock",
        "key.fingerprint",
        "crosswalk.parquet",
    }


@pytest.mark.parametrize("content", [b"", b"PAR1 no more", os.urandom(500)])
def test_a_damaged_crosswalk_is_never_written_over(content: bytes, tmp_path: Path) -> None:
    add(tmp_path, row("a"))
    file = tmp_path / "private" / "crosswalk.parquet"
    file.write_bytes(content)

    for attempt in (lambda: add(tmp_path, row("b")), lambda: find_sources(tmp_path, ["a"])):
        with pytest.raises(ScanError) as caught:
            attempt()
        assert caught.value.code == "OUTPUT_UNWRITABLE"
    assert file.read_bytes() == content


def test_a_foreign_parquet_is_refused(tmp_path: Path) -> None:
    add(tmp_path, row("a"))
    file = tmp_path / "private" / "crosswalk.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["path"]), file)

    with pytest.raises(ScanError) as caught:
        find_sources(tmp_path, ["a"])
    assert caught.value.code == "OUTPUT_UNWRITABLE"


MORE = {
    "PatientName": "Müller^José",
    "PatientID": "4711 ",
    "AccessionNumber": "A1",
    "SeriesDescription": "Thorax",
    "SpecificCharacterSet": "ISO_IR 100",
    "SeriesNumber": 7,
}


def test_a_dicom_series_is_named_by_its_headers(tmp_path: Path) -> None:
    files = write_series(tmp_path / "study", noise(), words=Words(more=MORE))
    series = Series("dicom", tuple(files), uid("study"), uid("series"))

    source = source_from_series(series, "id")
    assert source == SourceRecord(
        id="id",
        kind="dicom",
        path=str(tmp_path / "study"),
        files=6,
        study_uid=uid("study"),
        series_uid=uid("series"),
        patient_id="4711",
        patient_name="Müller^José",
        accession_number="A1",
        study_date="20250102",
        series_number="7",
        series_description="Thorax",
    )


def test_damaged_files_have_a_path_at_least(tmp_path: Path) -> None:
    """The first file that can be read tells; where none can, words stay empty."""
    files = write_series(tmp_path / "study", noise(), words=Words(more=MORE))
    files[0].write_bytes(b"\0" * 128 + b"DICM" + b"\xff" * 100)
    files[1].unlink()
    assert source_from_series(Series("dicom", tuple(files)), "id").patient_id == "4711"

    source = source_from_series(Series("dicom", tuple(files[:2])), "id")
    assert (source.path, source.patient_id) == (str(tmp_path / "study"), "")


@pytest.mark.parametrize("packed", ["zip", "gz"])
def test_what_was_unpacked_is_known_by_what_it_was_packed_in(packed: str, tmp_path: Path) -> None:
    """Not by the scratch folder, which goes away."""
    files = write_series(tmp_path / "study", noise(), words=Words(more=MORE))
    scan = tmp_path / "study"
    if packed == "zip":
        scan = Path(shutil.make_archive(str(tmp_path / "pack"), "zip", tmp_path / "study"))
    for file in files:
        if packed == "gz":
            file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()

    [series] = find_series(scan)
    source = source_from_series(series, "id")
    assert (source.path, source.files, source.patient_id) == (str(scan), 6, "4711")


def test_paths_are_absolute_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one file the file, of several the folder that holds all; bytes that are no UTF-8 too."""
    monkeypatch.chdir(tmp_path)
    series = Series("nifti", (Path("a.nii"),))
    several = Series("dicom", (tmp_path / "x" / "1" / "a", tmp_path / "x" / "2" / "b"))
    odd = Series("nifti", (tmp_path / os.fsdecode(b"odd\xff.nii"),))

    assert source_from_series(series, "id").path == str(tmp_path / "a.nii")
    assert source_from_series(several, "id").path == str(tmp_path / "x")
    assert source_from_series(odd, "id").path == str(tmp_path / r"odd\xff.nii")
    add(tmp_path, source_from_series(odd, "id"))
    assert find_sources(tmp_path, ["id"])[0].path.endswith(r"odd\xff.nii")
