"""Tables made from those that are there equal, byte by byte, those made from all folders."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scanloom.core import Reason
from scanloom.engine.results import tables
from scanloom.engine.results.verify import verify
from scanloom.io.output import ledger, tabled_cases
from scanloom.io.output.case_folder import CaseFolder
from scanloom.io.output.layout import case_folder, iter_cases
from scanloom.io.output.measurements import write_measurements
from scanloom.io.system.atomic_write import atomic_write
from support.layouts import fan_by_hand, folder_of
from support.make_report import add_failure, measured

KEY = "abc"
TABLES = ("measurements", "radiomics")
FEATURES = ("model", "label", "number", "voxels", "flags", "settings", "reason")


def publish(out: Path, name: str, seed: int = 0, features: tuple[str, ...] = ()) -> Path:
    """Publish a case with random measurements, and such features as named."""
    rng = np.random.default_rng(seed)
    structures = ["liver", "spleen", 'a "quoted", label', "=1+1"][: 1 + seed % 4]
    with CaseFolder(out, name, KEY) as folder:
        document = {"case": f"id-{name}", "recipe": f"r{seed}", "source": {"hash": f"{seed}"}}
        (folder.path / "case.json").write_text(json.dumps(document))
        (folder.path / "timing.json").write_text('{"source_stamp": "s"}')
        rows = [measured("m", each, float(rng.random()) * seed) for each in structures]
        write_measurements(folder.path, rows)
        if features:
            with (folder.path / "radiomics.csv").open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow((*FEATURES, *features))
                for label in structures:
                    values = [rng.random() if rng.random() < 0.8 else "" for _ in features]
                    writer.writerow(("m", label, 1, 5, "", "s", "two\nlines", *values))
        return folder.publish(replace=True)


def write_from_folders(out: Path, folder: Path) -> set[str]:
    """Write the tables from all folders, by the function that writes rows alone."""
    damaged, columns = set[str](), dict[str, None]()
    outdated = tables.outdated_cases(out)
    per_case = iter_cases(out, lambda *case: tables.measurement_rows(*case[:2], outdated), damaged)
    rows = [row for each in per_case for row in each]
    tables.write_table(folder / "measurements", tables.MEASUREMENT_COLUMNS, rows)
    for names in iter_cases(out, lambda *case: tables.feature_columns(case[0]), damaged):
        columns |= dict.fromkeys(names)
    if columns:
        per_case = iter_cases(out, lambda *case: tables.feature_rows(*case[:2], outdated), damaged)
        rows = [row for each in per_case for row in each]
        tables.write_table(folder / "radiomics", ("case", *columns, "recipe"), rows)
    return damaged


def files(folder: Path) -> dict[str, bytes]:
    paths = [folder / f"{table}.{kind}" for table in TABLES for kind in ("csv", "parquet")]
    return {path.name: path.read_bytes() for path in paths if path.exists()}


class Tables:
    """Writes the tables of an output folder, and says which cases were read for it."""

    def __init__(self, out: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, self._scratch = out, scratch
        self.read = list[str]()
        original = tables.read_measurements_json

        def counted(folder: Path) -> list[dict[str, Any]]:
            self.read.append(folder.name)
            return original(folder)

        monkeypatch.setattr(tables, "read_measurements_json", counted)

    def write(self) -> tuple[bool, list[str]]:
        """Write the tables, check them, and return whether they changed and what was read."""
        before, damaged = files(self.out), set[str]()
        times = {path: (self.out / path).stat().st_mtime_ns for path in before}
        self.read.clear()
        changed = tables.write_case_tables(self.out, damaged)
        read = sorted(set(self.read))
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir()
        found = write_from_folders(self.out, self._scratch)
        assert files(self.out) == files(self._scratch)
        assert changed == (files(self.out) != before)
        if not changed:
            assert times == {path: (self.out / path).stat().st_mtime_ns for path in before}
        assert damaged == found
        return changed, read


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tables:
    """An output folder of eight cases whose tables were written."""
    monkeypatch.setattr(tables, "BATCH_ROWS", 4)
    monkeypatch.setattr(tabled_cases, "BATCH_ROWS", 4)
    monkeypatch.setattr(ledger, "CHECKED", 2)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # for speed
    out = tmp_path / "out"
    for seed, name in enumerate("bdfhjlnp"):
        publish(out, name, seed, ("f1", "f2") if name in "fl" else ())
    written = Tables(out, tmp_path / "scratch", monkeypatch)
    assert written.write() == (True, list("bdfhjlnp"))
    return written


def test_nothing_changed_reads_and_writes_nothing(written: Tables) -> None:
    assert written.write() == (False, [])


def test_tables_that_another_process_put_in_their_place_are_not_taken_for_these(
    written: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shards end together: one that lacks the last case of the other writes last."""
    older = files(written.out)
    publish(written.out, "z", 3)
    save = tabled_cases.TabledCases.save

    def replace_and_save(*arguments: Any) -> None:
        for name, content in older.items():
            atomic_write(written.out / name, partial(Path.write_bytes, data=content))
        save(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(tabled_cases.TabledCases, "save", replace_and_save)
        assert tables.write_case_tables(written.out, set())
    assert files(written.out) == older

    assert written.write() == (True, list("bdfhjlnpz"))


@pytest.mark.parametrize("name", ["a", "g", "z"])
def test_a_new_case_alone_is_read(name: str, written: Tables) -> None:
    publish(written.out, name, 3)
    assert written.write() == (True, [name])
    assert written.write() == (False, [])


@pytest.mark.parametrize("name", ["b", "h", "p"])
def test_a_case_that_was_replaced_alone_is_read(name: str, written: Tables) -> None:
    publish(written.out, name, 17)
    assert written.write() == (True, [name])
    assert written.write() == (False, [])


@pytest.mark.parametrize("names", ["b", "h", "p", "bdf", "bdfhjln"])
def test_rows_of_removed_cases_go(names: str, written: Tables) -> None:
    for name in names:
        shutil.rmtree(written.out / "cases" / name)
    few = len(names) > 5  # so few are left that all are read
    assert written.write() == (True, ["p"] if few else [])


def test_a_case_that_failed_later_is_flagged_and_unflagged(written: Tables) -> None:
    add_failure(written.out, "id-h", Reason.CRASHED)
    assert written.write() == (True, ["h"])
    assert written.write() == (False, [])
    (written.out / "failed" / "id-h.json").unlink()
    assert written.write() == (True, ["h"])


def test_stale_cases_of_the_manifest_are_flagged(written: Tables) -> None:
    rows = [{"case": "id-d", "reason": "STALE"}, {"case": "id-l", "reason": "STALE"}]
    pq.write_table(pa.Table.from_pylist(rows), written.out / "manifest.parquet")
    assert written.write() == (True, ["d", "l"])
    (written.out / "manifest.parquet").unlink()
    assert written.write() == (True, ["d", "l"])


def test_a_damaged_case_of_the_sample_makes_all_be_read(
    written: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "CHECKED", 7)  # of eight
    (written.out / "cases" / "h" / "measurements.json").write_text("{}")
    monkeypatch.setattr(ledger, "sample", lambda places: places.tolist())
    changed, _ = written.write()
    assert changed
    assert written.write() == (False, [])


def test_a_case_that_is_damaged_from_the_start_changes_nothing(written: Tables) -> None:
    folder = publish(written.out, "g", 2)
    (folder / "measurements.json").write_text("{}")
    assert written.write() == (False, [])
    publish(written.out, "g", 3)
    assert written.write() == (True, ["g"])


@pytest.mark.parametrize("harm", ["damage", "link"])
def test_damaged_features_are_read_each_time(harm: str, written: Tables, tmp_path: Path) -> None:
    folder = publish(written.out, "g", 2, ("f1", "f2"))
    timing = json.loads((folder / "timing.json").read_text())
    if harm == "damage":
        (folder / "radiomics.csv").write_text('"')
    else:  # what the file elsewhere holds would come into the table
        (folder / "radiomics.csv").rename(tmp_path / "patients.csv")
        (folder / "radiomics.csv").symlink_to(tmp_path / "patients.csv")
    del timing["files"]["radiomics.csv"]  # so that the stamps are no hint
    (folder / "timing.json").write_text(json.dumps(timing))
    assert written.write() == (True, ["g"])
    assert written.write() == (False, ["g"])


def test_other_features_give_other_columns(written: Tables) -> None:
    publish(written.out, "a", 2, ("f3",))  # its columns come first
    assert written.write()[0]
    header = (written.out / "radiomics.csv").read_text().splitlines()[0]
    assert header.split(",")[-4:] == ["f3", "f1", "f2", "recipe"]
    assert written.write() == (False, [])
    publish(written.out, "a", 3)
    assert written.write() == (True, ["a"])
    for name in "fl":
        publish(written.out, name, 3)
    assert written.write() == (True, ["f", "l"])
    assert not (written.out / "radiomics.csv").exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("harm", [cut, Path.touch, Path.unlink])
def test_a_table_that_is_not_the_one_that_was_written_is_made_from_all_cases(
    harm: Callable[[Path], None], kind: str, table: str, written: Tables
) -> None:
    harm(written.out / f"{table}.{kind}")
    changed, read = written.write()
    assert read == list("bdfhjlnp")
    assert changed == (harm is not Path.touch)
    assert written.write() == (False, [])


def test_a_parquet_file_that_can_not_be_read_is_not_copied(written: Tables) -> None:
    """Even if size and time of the file tell nothing."""
    for path in (written.out / "measurements.parquet", written.out / "radiomics.parquet"):
        head = pq.read_metadata(path).row_group(0).column(0)
        descriptor = os.open(path, os.O_WRONLY)
        state = path.stat()
        os.pwrite(descriptor, b"\xff" * 8, head.dictionary_page_offset or head.data_page_offset)
        os.close(descriptor)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    publish(written.out, "c", 5)
    assert written.write() == (True, list("bcdfhjlnp"))


def test_tables_of_an_earlier_version_are_made_from_all_cases(
    written: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tabled_cases, "__version__", "another")
    assert written.write() == (False, list("bdfhjlnp"))  # they are equal: this version's own
    assert written.write() == (False, [])


@pytest.mark.parametrize("loss", ["no file", "damaged", "links"])
def test_without_its_record_all_cases_are_read(loss: str, written: Tables) -> None:
    path = written.out / "private" / "tabled.parquet"
    content = path.read_bytes()
    path.unlink()
    if loss == "damaged":
        path.write_bytes(content[:-9])
    elif loss == "links":
        path.symlink_to("nowhere")
    assert written.write() == (False, list("bdfhjlnp"))
    assert written.write() == (False, [])


def test_a_copy_of_the_output_folder_is_read_once(
    written: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(written.out, tmp_path / "copy")
    copy = Tables(tmp_path / "copy", tmp_path / "scratch", monkeypatch)
    assert copy.write() == (False, list("bdfhjlnp"))
    assert copy.write() == (False, [])


def test_small_output_folders_are_read_whole(
    written: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "CHECKED", 8)
    assert written.write() == (False, list("bdfhjlnp"))
    (written.out / "cases" / "h" / "measurements.json").write_text("{}")
    assert written.write() == (True, list("bdfjlnp"))


def test_both_layouts_have_the_same_tables(written: Tables) -> None:
    before = files(written.out)
    fan_by_hand(written.out)
    assert written.write() == (False, [])
    publish(written.out, "xyz", 3)
    assert written.write() == (True, ["xyz"])
    assert folder_of(written.out, "xyz").parent.name == "_yz"
    assert files(written.out) != before


def test_subfolders_without_their_file_are_read(written: Tables) -> None:
    """As in a copy of `OUT/cases` that lacks it."""
    fan_by_hand(written.out)
    (written.out / "cases" / "_folders").unlink()
    assert written.write() == (False, [])
    assert ledger.list_folders(written.out)["name"].to_pylist() == list("bdfhjlnp")


@pytest.mark.parametrize("seed", range(3))
def test_after_any_changes_the_tables_are_those_of_all_folders(seed: int, written: Tables) -> None:
    """Several changes between two writings; the fixture's class compares."""
    rng, out = random.Random(seed), written.out
    for step in range(12):
        for _ in range(rng.randrange(4)):
            name = rng.choice("abcdefghijklmnopqrs")
            folder, failed = case_folder(out, name), out / "failed" / f"id-{name}.json"
            action = rng.randrange(6)
            if action == 0:
                shutil.rmtree(folder, ignore_errors=True)
            elif action == 1:
                add_failure(out, f"id-{name}", Reason.CRASHED)
            elif action == 2:
                failed.unlink(missing_ok=True)
            else:
                features = rng.choice([(), (), ("f1", "f2"), ("f2",), ("f3", "f1")])
                publish(out, name, rng.randrange(40), features)
        written.write()
        assert step < 11 or not [each for each in verify(out) if each.file.startswith(TABLES)]


@pytest.mark.parametrize("after", range(8))
def test_died_between_any_two_files_the_next_time_is_right(
    after: int, written: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two files of the two tables, and the record of them, are replaced one by one."""
    publish(written.out, "c", 5, ("f2",))
    publish(written.out, "f", 6, ("f1", "f2"))
    add_failure(written.out, "id-l", Reason.CRASHED)
    replace, count = os.replace, 0

    def dies(*arguments: Any, **places: Any) -> None:
        nonlocal count
        if count == after:
            raise KeyboardInterrupt
        count += 1
        replace(*arguments, **places)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dies)
        if after < 5:
            with pytest.raises(KeyboardInterrupt):
                tables.write_case_tables(written.out, set())
        else:
            tables.write_case_tables(written.out, set())
    (written.out / "failed" / "id-l.json").unlink()
    publish(written.out, "d", 7)
    written.write()
    assert written.write() == (False, [])


def test_a_full_disk_leaves_the_old_tables(
    written: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(written.out)
    publish(written.out, "c", 5)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tabled_cases, "write_both", full)
        with pytest.raises(OSError, match="space"):
            tables.write_case_tables(written.out, set())
    assert files(written.out) == before
    assert written.write() == (True, ["c"])


def test_results_of_a_newer_version_are_left_out_by_name(written: Tables) -> None:
    folder = publish(written.out, "c", 5)
    timing = json.loads((folder / "timing.json").read_text())
    (folder / "timing.json").write_text(json.dumps({**timing, "schema": 99}))
    damaged = set[str]()

    assert not tables.write_case_tables(written.out, damaged)

    assert damaged == {"c"}
    assert b"\nc," not in (written.out / "measurements.csv").read_bytes()
    assert written.write() == (False, [])  # until it is another one
    publish(written.out, "c", 6)
    assert written.write() == (True, ["c"])
