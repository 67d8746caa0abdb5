"""The ledger never says of a folder what it does not say itself, whoever dies when."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from scanloom.core import Case, Outputs, ScanError, Series
from scanloom.engine.results.verify import Discrepancy, verify
from scanloom.io.output import ledger as ledger_module
from scanloom.io.output.case_folder import CaseFolder
from scanloom.io.output.json_file import write_document
from scanloom.io.output.ledger import Ledger, gather_published, list_folders
from scanloom.io.output.private import locked_folder, private_folder
from scanloom.io.output.published import read_provenance, store_source_stamp
from scanloom.io.output.work_folder import open_output

KEY = "abc"


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def case(name: str, recipe: str = "one", stamp: str = "t", source: str = "") -> Case:
    return Case(name, Series("nifti", ()), Outputs(), source, recipe, stamp=stamp)


def publish(out: Path, name: str, recipe: str = "one", stamp: str = "t") -> Path:
    with CaseFolder(out, name, KEY) as folder:
        document = {"case": name, "recipe": recipe, "source": {"hash": f"hash of {stamp}"}}
        write_document(folder.path / "case.json", document)
        write_document(folder.path / "timing.json", {"source_stamp": stamp})
        return folder.publish(replace=True)


def lines(out: Path) -> Path:
    return out / "private" / "ledger.jsonl"


def table(out: Path) -> Path:
    return out / "private" / "ledger.parquet"


def gather(out: Path) -> None:
    with locked_folder(out / "private"):
        gather_published(out / "private")


@pytest.fixture(params=["appended", "gathered"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An output folder of three cases, whose rows are lines, or a table."""
    for name in "cab":
        publish(tmp_path, name)
    if request.param == "gathered":
        gather(tmp_path)
    return tmp_path


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder is read: what is held follows from the ledger and the list alone."""
    monkeypatch.setattr(ledger_module, "CHECKED", 0)


def test_a_result_is_held_by_its_recipe_and_source(out: Path) -> None:
    ledger = Ledger(out)

    assert all(ledger.holds(case(name)) for name in "abc")
    assert ledger.holds(case("a", stamp="", source="hash of t"))
    assert not ledger.holds(case("a", stamp="t", source="another"))
    assert not ledger.holds(case("a", recipe="two"))
    assert not ledger.holds(case("a", stamp="u"))
    assert not ledger.holds(case("a", stamp=""))
    assert not ledger.holds(case("d"))
    assert not ledger.holds(case("a", recipe=""))


def test_whoever_may_not_read_the_scan_may_not_read_the_ledger_either(out: Path) -> None:
    gather(out)
    assert stat.S_IMODE(table(out).stat().st_mode) == 0o600
    rows = pq.read_table(table(out)).to_pylist()
    assert [row["name"] for row in rows] == ["a", "b", "c"]
    assert set(rows[0]) == {"name", "case", "recipe", "source", "stamp", "inode"}


@pytest.mark.usefixtures("unchecked")
def test_the_last_result_counts(out: Path) -> None:
    publish(out, "a", "two")
    publish(out, "b", "one", "u")
    for _ in range(2):  # as lines, and as a table
        ledger = Ledger(out)
        assert [ledger.holds(case("a", recipe)) for recipe in ("one", "two")] == [False, True]
        assert [ledger.holds(case("b", stamp=stamp)) for stamp in "tu"] == [False, True]
        gather(out)
        assert not lines(out).exists()


@pytest.mark.usefixtures("unchecked")
def test_a_removed_folder_is_noticed(out: Path) -> None:
    shutil.rmtree(out / "cases" / "b")
    ledger = Ledger(out)
    assert [ledger.holds(case(name)) for name in "abc"] == [True, False, True]


@pytest.mark.usefixtures("unchecked")
def test_a_note_of_a_folder_that_was_replaced_since_is_dropped(out: Path) -> None:
    """As by another shard, which was at work when this one looked."""
    ledger = Ledger(out)
    for name in "ab":
        ledger.note(case(name), whole=False)
    publish(out, "a", "two")

    ledger.gather()

    later = Ledger(out)
    assert [later.holds(each) for each in (case("a", "two"), case("b"))] == [True, False]


@pytest.mark.usefixtures("unchecked")
def test_a_folder_that_was_put_there_by_hand_is_looked_at(out: Path, tmp_path: Path) -> None:
    """As from a backup, beside the one that is there: it has another inode."""
    shutil.copytree(out / "cases" / "b", tmp_path / "copy")
    (out / "cases" / "b").rename(tmp_path / "old")
    (tmp_path / "copy").rename(out / "cases" / "b")
    ledger = Ledger(out)
    assert [ledger.holds(case(name)) for name in "abc"] == [True, False, True]


def test_one_that_differs_in_the_sample_makes_all_be_read(out: Path) -> None:
    (out / "cases" / "b" / "case.json").write_text("{}")
    ledger = Ledger(out)
    assert not any(ledger.holds(case(name)) for name in "abc")

    ledger.note(case("b"), whole=False)  # what the run then finds
    ledger.gather()
    assert [Ledger(out).holds(case(name)) for name in "abc"] == [True, False, True]


def test_the_sample_is_another_each_time(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()
    monkeypatch.setattr(ledger_module, "CHECKED", 1)
    monkeypatch.setattr(
        ledger_module,
        "read_provenance",
        lambda folder: read.append(folder.name) or read_provenance(folder),
    )
    for n in range(60):
        Ledger(out)
        assert len(read) == n + 1
    assert set(read) == {"a", "b", "c"}


def test_a_new_stamp_of_the_same_content_is_noted(out: Path) -> None:
    store_source_stamp(out / "cases" / "a", "u")
    ledger = Ledger(out)
    assert not ledger.holds(case("b"))  # the sample differs
    for name, stamp in (("a", "u"), ("b", "t"), ("c", "t")):
        ledger.note(case(name, stamp=stamp), whole=True)
    ledger.gather()
    assert Ledger(out).holds(case("a", stamp="u"))
    assert not Ledger(out).holds(case("a", stamp="t"))
    assert not lines(out).exists()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("loss", ["older version", "copy", "no table", "damaged", "other columns"])
def test_without_its_rows_it_is_made_anew_from_the_folders(
    loss: str, out: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if loss == "older version":
        lines(out).unlink(missing_ok=True)
        table(out).unlink(missing_ok=True)
    elif loss == "copy":
        copy = tmp_path_factory.mktemp("copy") / "out"
        shutil.copytree(out, copy)
        out = copy
    else:
        gather(out)
        if loss == "damaged":
            content = bytearray(table(out).read_bytes())
            content[4:200] = bytes(196)
            table(out).write_bytes(content)
        elif loss == "other columns":
            pq.write_table(pq.read_table(table(out)).drop_columns(["stamp"]), table(out))
        else:
            table(out).unlink()

    ledger = Ledger(out)
    assert not any(ledger.holds(case(name)) for name in "abc")
    for name in "abc":
        ledger.note(case(name), whole=True)
    ledger.gather()
    assert all(Ledger(out).holds(case(name)) for name in "abc")


@pytest.mark.usefixtures("unchecked")
def test_damaged_lines_cost_a_look_and_no_more(tmp_path: Path) -> None:
    for name in "abc":
        publish(tmp_path, name)
    written = lines(tmp_path).read_text().splitlines(keepends=True)
    assert len(written) == 3
    wrong = {**json.loads(written[0]), "inode": "x"}
    text = "".join([written[0], "no row\n", written[1], "[]\n{}\n", json.dumps(wrong), "\n"])
    lines(tmp_path).write_text(text + written[2][:40])

    def held() -> list[bool]:
        ledger = Ledger(tmp_path)
        return [ledger.holds(case(name)) for name in "abcd"]

    assert held() == [True, True, False, False]
    publish(tmp_path, "d")
    assert held() == [True, True, False, True]
    gather(tmp_path)
    assert held() == [True, True, False, True]


def test_many_rows_are_gathered_in_groups(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows replace older ones in each group, and come before, between and behind them."""
    monkeypatch.setattr("scanloom.io.output.growing_table.GROUP_ROWS", 2)
    monkeypatch.setattr(ledger_module, "MIN_LINES_BYTES", 300)  # gathered now and then
    random = np.random.default_rng(0)
    names = [f"{n:x}x" for n in random.permutation(60).tolist()]
    recipes = dict.fromkeys("abc", "one")
    for n, name in enumerate(names + names[:20]):
        recipes[name] = f"{n}"
        publish(out, name, recipes[name])
        appended = lines(out).stat().st_size if lines(out).exists() else 0
        assert appended <= max(300, table(out).stat().st_size)
    gather(out)

    assert pq.ParquetFile(table(out)).num_row_groups == 32
    rows = pq.read_table(table(out)).to_pylist()
    assert {row["name"]: row["recipe"] for row in rows} == recipes
    assert [row["name"] for row in rows] == sorted(recipes)
    ledger = Ledger(out)
    assert all(ledger.holds(case(name, recipe)) for name, recipe in recipes.items())


def test_a_case_that_did_not_get_there_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(ScanError):
        publish(tmp_path / "out", "a")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("unchecked")
def test_on_a_full_disk_the_case_is_published_without_a_row(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ledger_module, "append_lines", fail)
        publish(out, "a", "two")
        Ledger(out).gather()
    assert [Ledger(out).holds(case("a", recipe)) for recipe in ("one", "two")] == [False, False]
    assert read_provenance(out / "cases" / "a").recipe == "two"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_where_nothing_may_be_written_it_is_read(out: Path) -> None:
    (out / "private").chmod(0o500)
    try:
        ledger = Ledger(out)
        ledger.note(case("a"), whole=False)
        ledger.gather()
        assert ledger.holds(case("a"))
    finally:
        (out / "private").chmod(0o700)


def ledger_faults(out: Path) -> list[Discrepancy]:
    return [each for each in verify(out) if "ledger" in each.file]


def test_verify_names_what_the_ledger_says_wrongly(out: Path) -> None:
    """Someone put another result into a folder, with sums and stamps that fit."""
    assert ledger_faults(out) == []
    publish(out, "d", "two")
    shutil.copytree(out / "cases" / "d", out / "cases" / "b", dirs_exist_ok=True)
    store_source_stamp(out / "cases" / "a", "u")  # its source was touched, no more
    assert ledger_faults(out) == [Discrepancy("changed", "private/ledger.parquet, case b")]

    ledger = Ledger(out)
    ledger.rebuild()
    assert ledger_faults(out) == []
    assert Ledger(out).holds(case("b", "two"))


def test_verify_names_a_ledger_that_can_not_be_read(out: Path) -> None:
    gather(out)
    table(out).write_bytes(b"PAR1")
    assert ledger_faults(out) == [Discrepancy("unreadable", "private/ledger.parquet")]
    Ledger(out).rebuild()
    assert ledger_faults(out) == []
    assert all(Ledger(out).holds(case(name)) for name in "abc")


def test_a_damaged_case_is_not_in_a_new_ledger(out: Path) -> None:
    (out / "cases" / "b" / "case.json").write_text("{}")
    Ledger(out).rebuild()
    assert pq.read_table(table(out))["name"].to_pylist() == ["a", "c"]
    assert not lines(out).exists()
    assert [Ledger(out).holds(case(name)) for name in "abc"] == [True, False, True]


def test_an_unclaimed_folder_stays_unclaimed(tmp_path: Path) -> None:
    """As results that were put together by hand, without a key."""
    with CaseFolder(tmp_path, "a") as folder:
        write_document(folder.path / "case.json", {"recipe": "one", "source": {"hash": "s"}})
        write_document(folder.path / "timing.json", {"source_stamp": "t"})
        folder.publish()
    ledger = Ledger(tmp_path)
    ledger.note(case("a"), whole=True)
    ledger.gather()
    assert not (tmp_path / "private").exists()
    assert not ledger.holds(case("a"))


def test_an_empty_or_missing_folder_holds_nothing(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        ledger = Ledger(folder)
        assert not ledger.holds(case("a"))
        ledger.note(case("a"), whole=True)
        ledger.gather()
    assert not (tmp_path / "none").exists()


def test_listed_are_the_folders_of_cases(tmp_path: Path) -> None:
    for name in ("b", "a", "é", ".hidden", "_ab", "x.y"):
        (tmp_path / "cases" / name).mkdir(parents=True)
    (tmp_path / "cases" / "file").touch()
    (tmp_path / "cases" / "link").symlink_to(tmp_path / "cases" / "a")
    listed = list_folders(tmp_path).to_pylist()
    assert [row["name"] for row in listed] == ["a", "b", "é"]
    assert listed[0]["inode"] == (tmp_path / "cases" / "a").stat().st_ino


DIES = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {paths!r}
from unit.io.output import test_ledger as tests
from scanloom.io.output import ledger

os.fsync = lambda descriptor: None  # a kill takes nothing out of the page cache
folder = Path({folder!r})
ledger.MIN_LINES_BYTES = {limit}
CHANGES = {{"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
warm = folder.with_name(folder.name + "-warm")  # everything is imported before the forks
tests.publish(warm, "a")
tests.gather(warm)
for moment in range(1000):
    out = folder / str(moment)
    child = os.fork()
    if not child:
        count = 0
        def hook(event, arguments):
            global count
            if event in CHANGES or event == "open" and arguments[2] & WRITES:
                if count == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
        for name in "ab":
            tests.publish(out, name)
        sys.addaudithook(hook)
        try:
            {command}
        finally:
            os._exit(0)
    if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
        break
"""
COMMANDS = {
    "publish": "tests.publish(out, 'c')",
    "replace": "tests.publish(out, 'a', 'two')",
    "gather": "tests.gather(out)",
}


@dataclass
class Held:
    """What the ledger says, and what the folders say, of two recipes of three cases."""

    says: set[tuple[str, str]]
    true: set[tuple[str, str]]

    @classmethod
    def of(cls, out: Path) -> Held:
        ledger, pairs = Ledger(out), [(name, recipe) for name in "abc" for recipe in ("one", "two")]
        folders = {p.name: read_provenance(p).recipe for p in (out / "cases").iterdir()}
        says = {(name, recipe) for name, recipe in pairs if ledger.holds(case(name, recipe))}
        return cls(says, set(folders.items()))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("command", "limit"),
    [
        pytest.param("publish", 1 << 20, marks=pytest.mark.slow),
        ("replace", 1 << 20),
        pytest.param("replace", 0, marks=pytest.mark.slow),
        ("gather", 1 << 20),
    ],
)
def test_killed_at_any_moment_it_says_nothing_wrong(
    command: str, limit: int, tmp_path: Path
) -> None:
    """Before each change of files, a process dies that publishes, replaces or gathers.

    With the `limit` 0, rows are gathered whenever one is appended.
    """
    paths = [str(Path(__file__).parents[3])]
    code = DIES.format(folder=str(tmp_path), limit=limit, paths=paths, command=COMMANDS[command])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
    outs = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert len(outs) > 6
    for out in outs:
        died = Held.of(out)
        assert died.says <= died.true, out.name
        open_output(out, KEY)  # recovers as the next start does
        recovered = Held.of(out)
        assert recovered.says <= recovered.true, out.name
        assert {"a", "b"} <= {name for name, _ in recovered.true}
        assert ("b", "one") in recovered.says, "no row of an untouched case is lost"
        assert not list((out / ".work").iterdir())
        publish(out, "c", "two")
        gather(out)
        after = Held.of(out)
        assert after.says <= after.true
        assert {("b", "one"), ("c", "two")} <= after.says
    whole = Held.of(outs[-1])
    assert whole.says == whole.true


ADDS_MANY = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from unit.io.output import test_ledger as tests
from scanloom.io.output import ledger
ledger.MIN_LINES_BYTES = 500
for n in range(15):
    tests.publish(Path({out!r}), f"{writer}x{{n}}")
    tests.publish(Path({out!r}), "both", {writer!r})
"""


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_several_who_publish_at_once_lose_no_row(tmp_path: Path) -> None:
    """Also of one case, which each replaces again and again; who reads meanwhile is not misled."""
    paths = [str(Path(__file__).parents[3])]
    codes = [
        ADDS_MANY.format(paths=paths, out=str(tmp_path), writer=f"{writer}") for writer in range(2)
    ]
    workers = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    while any(worker.poll() is None for worker in workers):
        ledger = Ledger(tmp_path)
        assert not ledger.holds(case("both", "none"))
    ended = [worker.returncode for worker in workers]
    assert ended.count(0) >= 1  # of two replacements at the same moment, one may be refused

    with private_folder(tmp_path, KEY) as private:
        gather_published(private)
    ledger = Ledger(tmp_path)
    names = [name for name in list_folders(tmp_path)["name"].to_pylist() if name != "both"]
    assert all(ledger.holds(case(name)) for name in names)
    assert sum(ledger.holds(case("both", f"{writer}")) for writer in range(2)) <= 1
