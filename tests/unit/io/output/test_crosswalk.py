"""The crosswalk brings back the source of an id, and loses nothing."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pydicom import Dataset
from pydicom.dataelem import RawDataElement
from pydicom.tag import Tag

from scanloom.core import ScanError, Series
from scanloom.io.identity import key_fingerprint
from scanloom.io.index.build import build_index, record_series, source_from_index
from scanloom.io.index.listing import displayed_name
from scanloom.io.index.series import find_series
from scanloom.io.output.crosswalk import (
    SourceRecord,
    add_sources,
    case_folders,
    find_sources,
    gather_sources,
    known_ids,
    latest_by_id,
    renamed_folders,
    source_from_series,
    sources_by_folder,
    sources_of_study,
    stamp,
    unrecorded_ids,
)
from scanloom.io.output.private import private_folder
from support.archives import nifti
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


def test_only_folders_with_other_names_than_their_ids_are_looked_up(tmp_path: Path) -> None:
    add(tmp_path, row("a", folder="a"), row("b", folder="Name"), row("c"))
    add(tmp_path, row("d", "/one", "Old"), row("d", "/two", "d"))

    assert renamed_folders(tmp_path) == {"b": "Name", "d": "d"}  # as it was recorded last
    assert renamed_folders(tmp_path / "elsewhere") == {}


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


def test_a_volume_of_two_files_has_the_path_and_the_name_of_its_header(tmp_path: Path) -> None:
    """Not those of its folder, which other volumes share."""
    scans = tmp_path / "scans"
    scans.mkdir()
    headers = [scans / "a.hdr", scans / "b.hdr"]
    for seed, header in enumerate(headers):
        nifti(header, seed)
    index = build_index([scans], b"k" * 32, tmp_path / "out")

    for found in (find_series(scans), [index.as_series(each) for each in index.series]):
        sources = [source_from_series(series, "id") for series in found]
        assert sorted(source.path for source in sources) == [str(header) for header in headers]
        assert sorted(map(displayed_name, found)) == ["a.hdr", "b.hdr"]
    assert sorted(series.path for series in index.series) == [str(header) for header in headers]


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

    record_series(out, key_fingerprint(key), index, lambda name: name == ids[0])
    assert [s.id for s in find_sources(out, ids)] == ids[:1]
    record_series(out, key_fingerprint(key), index)
    shutil.rmtree(tmp_path / "scans")
    record_series(out, key_fingerprint(key), index)

    sources = find_sources(out, ids)
    assert [s.id for s in sources] == ids
    assert {Path(s.path).name for s in sources} == set("abc")


def test_nothing_new_writes_nothing(tmp_path: Path) -> None:
    add(tmp_path, row("a"), row("b"))
    before = (tmp_path / "private" / "crosswalk.parquet").stat()
    add(tmp_path, row("b"))
    after = (tmp_path / "private" / "crosswalk.parquet").stat()

    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The rows that are appended to a table, which is never cheap to write anew."""
    monkeypatch.setattr("scanloom.io.output.crosswalk.CHEAP_BYTES", 0)
    return tmp_path / "private" / "crosswalk.jsonl"


def gather(out: Path) -> None:
    with private_folder(out, KEY) as private:
        gather_sources(private)


def test_rows_are_appended_as_if_the_table_had_been_written_each_time(
    tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice, ids, appended = random.Random(4), "abcdefgh", 0
    for _ in range(40):
        batch = [
            row(choice.choice(ids), f"/{choice.randrange(3)}", choice.choice(["", "", "F"]))
            for _ in range(choice.randrange(1, 4))
        ]
        add(tmp_path, *batch)
        appended += lines.exists()
        if choice.random() < 0.1:
            gather(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr("scanloom.io.output.crosswalk.CHEAP_BYTES", 1 << 30)
            add(tmp_path / "plain", *batch)
        for each in ids:  # rows of one id keep their order
            assert find_sources(tmp_path, [each]) == find_sources(tmp_path / "plain", [each])
    assert appended > 20
    assert known_ids(tmp_path) == known_ids(tmp_path / "plain")
    assert case_folders(tmp_path) == case_folders(tmp_path / "plain")


def test_lines_do_not_grow_beyond_the_table(tmp_path: Path, lines: Path) -> None:
    add(tmp_path, *(row(str(n)) for n in range(100)))
    sizes = set[int]()
    for n in range(60):
        add(tmp_path, row(str(n), folder="F"))
        sizes.add(lines.stat().st_size if lines.exists() else 0)
    assert 0 in sizes
    assert max(sizes) < 2 * lines.with_suffix(".parquet").stat().st_size
    assert set(case_folders(tmp_path)) == {str(n) for n in range(60)}


def test_who_died_between_the_table_and_its_lines_left_no_row_twice(
    tmp_path: Path, lines: Path
) -> None:
    add(tmp_path, row("a"), row("b"))
    add(tmp_path, row("a", "/two", "F"))
    assert stat.S_IMODE(lines.stat().st_mode) == 0o600
    kept, before, seen = lines.read_bytes(), find_sources(tmp_path, ["a"]), stamp(tmp_path)
    gather(tmp_path)
    assert not lines.exists()
    assert stamp(tmp_path) != seen
    lines.write_bytes(kept)

    assert find_sources(tmp_path, ["a"]) == before
    gather(tmp_path)
    assert find_sources(tmp_path, ["a"]) == before
    assert not lines.exists()


def test_a_series_that_was_moved_is_recorded_where_it_is(tmp_path: Path) -> None:
    """Each of its volumes too; a copy that stays where it was is none, nor is what lies below."""
    key, out, scans = b"k" * 32, tmp_path / "out", tmp_path / "scans"
    fingerprint = key_fingerprint(key)
    for name in ("a", "b", "c"):
        write_series(scans / name, noise(), words=Words(name=name))

    def echoes(k: int, header: Dataset) -> None:
        header.EchoTime = k % 2
        header.ImagePositionPatient[2] = 5.0 * (k // 2)

    write_series(scans / "d", noise((12, 10, 8)), words=Words(name="d"), edit=echoes)
    shutil.copytree(scans / "c", scans / "copy")

    def record() -> dict[str, Path]:
        """Return the path of each scan by the name of its folder, and the number of a volume."""
        record_series(out, fingerprint, build_index([scans], key, out))
        rows = sources_by_folder(out).values()
        return {Path(row.path).name + row.phase: Path(row.path) for row in rows}

    record()
    index = build_index([scans], key, out)
    [several] = [series for series in index.series if series.path == str(scans / "d")]
    with private_folder(out, fingerprint) as private:
        add_sources(private, [source_from_series(index.as_series(several), "volume", 1)])
    before, table = record(), (out / "private" / "crosswalk.parquet").read_bytes()
    assert set(before) == {"a", "b", "scans", "d", "d1"}
    assert record() == before
    assert (out / "private" / "crosswalk.parquet").read_bytes() == table
    for name in ("a", "c", "d"):
        (scans / name).rename(scans / f"{name} moved")

    after = record()

    assert after["a moved"] == scans / "a moved"
    assert after["b"] == scans / "b"
    assert after["scans"] == scans
    assert after["d moved"] == after["d moved1"] == scans / "d moved"


def test_rows_are_found_in_each_group_of_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scanloom.io.output.growing_table.GROUP_ROWS", 2)
    rows = [replace(row(name), study_uid=name.upper()) for name in "abcdefg"]
    add(tmp_path, *rows)

    assert pq.ParquetFile(tmp_path / "private" / "crosswalk.parquet").num_row_groups == 4
    assert [s.id for s in find_sources(tmp_path, ["g", "b", "c"])] == ["b", "c", "g"]
    assert sources_of_study(tmp_path, "E") == (rows[4],)
    assert known_ids(tmp_path) == set("abcdefg")
    monkeypatch.setattr("scanloom.io.output.crosswalk._IDS_AT_ONCE", 2)
    places = [(name, row(name).path) for name in "hagbidc"]
    assert unrecorded_ids(tmp_path, lambda: places) == {"h", "i"}


def test_half_a_line_is_cut_off(tmp_path: Path, lines: Path) -> None:
    add(tmp_path, row("a"))
    add(tmp_path, row("b"))
    with lines.open("a") as file:
        file.write('{"id": "c", "ki')

    assert known_ids(tmp_path) == {"a", "b"}
    add(tmp_path, row("d"))
    assert known_ids(tmp_path) == {"a", "b", "d"}
    assert all(json.loads(line) for line in lines.read_text().splitlines())


@pytest.mark.parametrize("content", ["{}\n", "no row\n", '{"id": "a"}\n'])
def test_damaged_lines_are_never_removed(content: str, tmp_path: Path, lines: Path) -> None:
    add(tmp_path, row("a"))
    lines.write_text(content)

    for attempt in (lambda: gather(tmp_path), lambda: find_sources(tmp_path, ["a"])):
        with pytest.raises(ScanError, match=r"crosswalk\.jsonl can't be read") as caught:
            attempt()
        assert caught.value.code == "OUTPUT_UNWRITABLE"
    assert lines.read_text() == content


ADDS_MANY = """
import sys
from pathlib import Path
from scanloom.io.output import crosswalk
from scanloom.io.output.crosswalk import SourceRecord, add_sources
from scanloom.io.index.listing import displayed_name
from scanloom.io.index.series import find_series
from scanloom.io.output.private import private_folder

crosswalk.CHEAP_BYTES = int(sys.argv[3])
for n in range(20):
    with private_folder(Path(sys.argv[1]), "abc") as private:
        add_sources(private, [SourceRecord(f"{sys.argv[2]}-{n}", "nifti", "/scans/a", 1)])
"""


@pytest.mark.parametrize("cheap", [1 << 30, 0])
def test_two_who_write_at_once_lose_nothing(cheap: int, tmp_path: Path) -> None:
    """The first claim of the folder is part of the race; who reads meanwhile never sees less."""
    command = [sys.executable, "-c", ADDS_MANY, str(tmp_path)]
    workers = [subprocess.Popen([*command, str(writer), str(cheap)]) for writer in range(2)]
    seen, deadline = set[str](), time.monotonic() + 120
    while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
        now = known_ids(tmp_path)
        assert now >= seen
        seen = now
    assert [worker.wait(300) for worker in workers] == [0, 0]
    gather(tmp_path)

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


def test_no_flipped_bit_gives_another_source(tmp_path: Path) -> None:
    """A source that is told is that of the scan; all other damage is refused."""
    rows = [replace(row(f"id{n}"), patient_id=f"PID{n:03}") for n in range(30)]
    add(tmp_path, *rows)
    ids = [each.id for each in rows]
    file = tmp_path / "private" / "crosswalk.parquet"
    content, found = file.read_bytes(), list[tuple[SourceRecord, ...]]()
    places = range(0, len(content), 11)
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        with suppress(ScanError):
            found.append(find_sources(tmp_path, ids))

    assert 0 < len(found) < len(places) / 2
    assert set(found) == {tuple(rows)}


def test_a_table_of_a_version_before_has_no_phases(tmp_path: Path) -> None:
    add(tmp_path, row("a"))
    file = tmp_path / "private" / "crosswalk.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["phase"]), file)
    assert find_sources(tmp_path, ["a"]) == (row("a"),)

    second = source_from_series(Series("nifti", (Path("/scans/b"),)), "b", 1)
    add(tmp_path, second)
    assert find_sources(tmp_path, ["a", "b"]) == (row("a"), second)
    assert second.phase == "1"


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


def test_a_chinese_name_and_a_series_number_of_zero(tmp_path: Path) -> None:
    """In the encoding of ISO 2022 IR 58, of which pydicom leaves the escape sequences."""

    def edit(k: int, dataset: Dataset) -> None:
        for number, vr, value in (
            (0x00080005, "CS", b"\\ISO 2022 IR 58 "),
            (0x00100010, "PN", b"\x1b$)A\xd5\xc5^\x1b$)A\xd0\xa1\xb6\xab "),
            (0x00200011, "IS", b"0 "),
        ):
            dataset[number] = RawDataElement(Tag(number), vr, len(value), value, 0, False, True)

    files = write_series(tmp_path / "study", noise(), edit=edit)
    source = source_from_series(Series("dicom", tuple(files)), "id")
    assert (source.patient_name, source.series_number) == ("张^小东", "0")


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
