"""The list follows changes of an output folder, and a page of it is what a look at all gives."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra review is not installed")

from scanloom.core import Reason
from scanloom.engine.results.tables import write_case_tables
from scanloom.engine.revisions import Correction, publish_revision
from scanloom.io.output import ledger
from scanloom.io.output.case_folder import _write_checksums
from scanloom.io.output.measurements import read_measurements
from scanloom.io.output.published import store_file_stamps
from scanloom.review.outliers import Finding
from scanloom.review.revisions import latest_result, read_label_maps
from scanloom.review.server import state as state_module
from scanloom.review.server import stored_list
from scanloom.review.server.cases import OpenCases
from scanloom.review.server.requests import read_query, read_rows
from scanloom.review.server.rows import STATES, CaseRows, ListedCase, ListRow, Query
from scanloom.review.server.security import RefusedError
from scanloom.review.server.state import ReviewState, Worklist
from scanloom.review.verdicts.log import VerdictLog
from scanloom.review.verdicts.readers import Readers
from scanloom.review.verdicts.verdict import Decision, Seen, Verdict
from support.listed_cases import add_revision, publish_drawn
from support.make_report import add_failure
from support.review_cases import affine_of, publish, scan_array, seen


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    for n in range(3):
        publish(folder, scan_array(n), affine_of(), str(n))
    return folder


@pytest.fixture
def out(three: Path, tmp_path: Path) -> Path:
    shutil.copytree(three / "out", tmp_path / "out", copy_function=shutil.copy2)
    return tmp_path / "out"


def listed(worklist: Worklist) -> list[str]:
    """Return the names of the cases in the order of review."""
    return [row.name for row in worklist.rows]


def correct(out: Path, name: str, key: Path) -> Path:
    latest = latest_result(out, name)
    [(file, before)] = read_label_maps(latest).items()
    labels: Any = before.copy()
    labels[:2, :2, :2] = np.where(labels[:2, :2, :2] == 1, 2, 1)
    correction = Correction({file: labels}, "r1", "file", seen(latest))
    return publish_revision(out, name, correction, key)


def test_a_correction_is_listed_and_no_other_case_is_read(out: Path, three: Path) -> None:
    worklist = Worklist(out)
    worklist.refresh()
    first, name, third = worklist.rows.names
    before = {**worklist.cases}
    revision = correct(out, name, three / "key")

    worklist.update(name)

    assert listed(worklist) == [first, name, third]
    assert worklist.read(name).seen == seen(revision)
    assert worklist.read(name).revision == 1
    assert all(worklist.cases[each] == before[each] for each in (first, third))
    version = worklist.version
    worklist.update(name)
    assert worklist.version == version


def test_a_look_after_corrections_reads_the_corrected_cases_only(out: Path, three: Path) -> None:
    worklist = Worklist(out)
    worklist.refresh()
    names, before = listed(worklist), {**worklist.cases}
    for name in names[:2]:
        correct(out, name, three / "key")

    worklist._read_changes()

    assert [worklist.read(name).revision for name in names] == [1, 1, 0]
    assert worklist.cases[names[2]] == before[names[2]]


def test_damaged_removed_and_new_cases_are_noticed_by_name(out: Path, tmp_path: Path) -> None:
    worklist = Worklist(out)
    worklist.refresh()
    damaged, removed, kept = worklist.rows.names
    (out / "cases" / damaged / "segments.json").write_text("{}")
    (out / "cases" / removed).rename(tmp_path / removed)

    worklist.update(damaged)
    worklist.update(removed)
    worklist.update("a" * 26)

    assert (listed(worklist), worklist.damaged) == ([kept], {damaged})
    (tmp_path / removed).rename(out / "cases" / removed)
    worklist.update(removed)
    assert listed(worklist) == [removed, kept]  # in its place


def test_a_look_for_a_new_case_reads_what_changed_and_others_in_turn(
    out: Path, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "CHECKED", 1)
    worklist = Worklist(out)
    worklist.refresh()
    first, second, third = sorted(worklist.cases)
    correct(out, second, three / "key")
    shutil.copytree(out / "cases" / third, out / "cases" / "new", copy_function=shutil.copy2)
    read, current = list[str](), worklist._current

    def noted(folder: Path) -> ListedCase | None:
        read.append(folder.name)
        return current(folder)

    monkeypatch.setattr(worklist, "_current", noted)
    worklist._read_changes()
    assert {second, "new"} <= {*read}
    assert len(read) <= 3
    assert worklist.read(second).revision == 1
    version = worklist.version
    for n in range(4):  # one of four each time: all are looked at in turn
        (out / "cases" / f"{n}.other").mkdir()
        worklist._read_changes()

    assert {*read} == {*worklist.cases} == {first, second, third, "new"}
    assert len(read) <= 7
    assert worklist.version == version


def listed_case(name: str, n: int = 0, **changes: Any) -> ListedCase:
    """Return a case as after a look, without files."""
    fields: dict[str, Any] = {
        "name": name,
        "stamp": n,
        "modality": ("CT", "MR")[n % 2],
        "shape": (4, 5, 6),
        "spacing": (1.0, 1.0, 1.0),
        "axes": "LPS",
        "models": (("a",), ("a", "b"))[n % 3 == 0],
        "measurements": (),
        "references": {},
        "seen": Seen("r", {"file": str(n)}),
        "revision": 0,
    }
    return ListedCase(**{**fields, **changes})


def findings_of(n: int) -> list[Finding]:
    return [Finding("empty", "Liver", 2.0, "not found")] if n % 4 == 0 else []


def names_of(count: int) -> list[str]:
    return [f"{n:026}" for n in range(count)]


@dataclass
class Listing:
    """A list of cases without files."""

    state: ReviewState
    names: list[str]

    def ask(self, reviewer: str = "r1", rows: str = "0-99", since: str = "", **fields: str) -> Any:
        """Ask as a page does; cases are returned by name."""
        answer = self.state.listed(reviewer, read_query(fields), *read_rows(rows), since)
        if answer is not None:
            answer["cases"] = {row["id"]: row for row in answer["cases"]}
        return answer

    def near(self, name: str, reviewer: str = "r1", **fields: str) -> tuple[Any, Any, Any]:
        answer = self.state.near(reviewer, read_query(fields), name)
        return answer["before"], answer["after"], answer["next"]

    def decide(self, n: int, decision: Decision = "accept", reviewer: str = "r1") -> None:
        case = self.state.worklist.read(self.names[n])
        assert case is not None
        self.state.log.append(Verdict(case.name, reviewer, case.seen, decision=decision))


Listed = Callable[..., Listing]


@pytest.fixture
def listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listed]:
    """Return a function that makes a list of some cases."""
    with ExitStack() as stack:

        def make(count: int = 250, **sharing: float) -> Listing:
            (tmp_path / "cases").mkdir()
            log = stack.enter_context(closing(VerdictLog(tmp_path)))
            readers = Readers(("r1", "r2"), **sharing)
            state = ReviewState(tmp_path, log, readers, OpenCases(tmp_path, None))
            names = names_of(count)
            cases = {name: listed_case(name, n) for n, name in enumerate(names)}
            findings = {name: findings_of(n) for n, name in enumerate(names)}
            worklist = state.worklist
            for case in cases.values():
                worklist.cases.put(case)
            worklist.rows = CaseRows(
                ListRow.of(case, findings[case.name]) for case in cases.values()
            )
            monkeypatch.setattr(worklist, "findings", findings.get)
            monkeypatch.setattr(worklist, "refresh", lambda: None)
            return Listing(state, names)

        yield make


def plainly_chosen(listing: Listing, reviewer: str, **fields: str) -> list[str]:
    """Return the names that a list shows, by going through all cases."""
    chosen = []
    for n, name in enumerate(listing.names):
        case = listing.state.worklist.cases[name]
        verdicts = listing.state.verdicts(name, reviewer)
        state = fields.get("filter", "all")
        text = " ".join([name, case.modality, *case.models, *["Liver: not found"][: n % 4 == 0]])
        if (
            (state in ("all", verdicts["state"]) or (state == "mine" and verdicts["verdict"]))
            and fields.get("model", "a") in case.models
            and fields.get("modality", case.modality) == case.modality
            and not (fields.get("doubtful") and n % 4)
            and all(word in text.lower() for word in fields.get("q", "").lower().split())
        ):
            chosen.append(name)
    return chosen


QUERIES: list[dict[str, str]] = [
    {},
    {"filter": "open"},
    {"filter": "accept"},
    {"filter": "reject", "q": "mr"},
    {"filter": "mine"},
    {"filter": "disagreed"},
    {"filter": "nothing known"},
    {"model": "b"},
    {"model": "unknown"},
    {"modality": "MR", "doubtful": "1"},
    {"q": "LIVER  not"},
    {"q": "liver absent"},
    {"q": "0012", "model": "a", "modality": "CT"},
]


@pytest.mark.parametrize("sharing", [{}, {"double": 0.5}, {"double": 1.0}])
def test_filters_choose_what_a_look_at_every_case_does(listing: Listed, sharing: Any) -> None:
    """Before and after verdicts, for each reviewer, with blind readers too."""
    made = listing(60, **sharing)
    for n, (decision, reviewer) in enumerate(
        [("accept", "r1"), ("reject", "r2"), ("edit", "r1"), ("accept", "r2")] * 8
    ):
        if n == 5:
            made.ask()  # later verdicts change rows that are kept
        made.decide(n * 7 % 30, decision, reviewer)
    for reviewer in ("r1", "r2"):
        # all verdicts are about the results that there are
        of_case, reads = made.state.log.stack.of_case, made.state.readers.reads
        theirs = [name for name in made.names if reads(name, reviewer, of_case(name))]
        for fields in QUERIES:
            known = {k: v for k, v in fields.items() if v != "nothing known"}
            expected = [n for n in plainly_chosen(made, reviewer, **known) if n in theirs]
            answer = made.ask(reviewer, **fields)
            assert answer["names"] == expected
            assert (answer["found"], list(answer["cases"])) == (len(expected), expected)
            for name, row in answer["cases"].items():
                assert row["state"] == made.state.verdicts(name, reviewer)["state"]
        counts = made.ask(reviewer)["counts"]
        assert counts["all"] == len(theirs)
        assert sum(counts[state] for state in STATES) == len(theirs)


def test_a_page_is_sent_and_then_what_changed(listing: Listed) -> None:
    made = listing(250)
    first = made.ask(rows="100-199")
    assert (first["names"], first["found"]) == (made.names[100:200], 250)
    assert list(first["cases"]) == made.names[100:200]
    assert made.ask(rows="100-199", since=first["version"]) is None

    made.decide(120)
    made.decide(7)

    news = made.ask(rows="100-199", since=first["version"])
    assert (news["names"], list(news["cases"])) == (made.names[100:200], [made.names[120]])
    assert (news["counts"]["accept"], news["counts"]["open"]) == (2, 248)
    assert made.ask(rows="240-339")["names"] == made.names[240:]
    assert len(made.ask(since="of another server.1.1")["cases"]) == 100
    assert made.ask("r2", since=first["version"])["counts"]["mine"] == 0


@pytest.mark.parametrize("rows", ["", "5", "5-4", "-1-5", "0-1000", "a-b", "0-99-3", "1e2-200"])
def test_rows_are_a_page(rows: str) -> None:
    with pytest.raises(RefusedError):
        read_rows(rows)


def test_cases_beside_one_are_those_of_the_selection(listing: Listed) -> None:
    made = listing(12)
    names = made.names
    assert made.near(names[0]) == ([], names[1:3], names[1])
    assert made.near(names[11]) == ([names[10]], [], names[0])
    assert made.near(names[4], q="liver") == ([names[0]], [names[8]], names[8])
    assert made.near("unknown", q="liver") == ([], [names[0], names[4]], names[0])
    made.decide(4)
    # the case that was just decided on keeps its place
    assert made.near(names[4], filter="open") == ([names[3]], names[5:7], names[5])
    assert made.near(names[8], q="liver") == ([names[4]], [], names[0])
    for n in range(12):
        made.decide(n)
    assert made.near(names[4])[2] is None
    assert made.ask()["next"] is None


def test_rows_follow_cases_that_are_replaced_and_removed(listing: Listed) -> None:
    made = listing(6)
    worklist, names = made.state.worklist, made.names
    version = made.ask()["version"]
    made.ask(q="liver")
    other = listed_case(names[1], 1, models=("c",), revision=1)
    worklist.cases.put(other)
    worklist.rows.put(ListRow.of(other, findings_of(0)))
    worklist.cases.remove(names[4])
    worklist.rows.remove(names[4])

    news = made.ask(since=version)

    assert news["names"] == [name for name in names if name != names[4]]
    assert {name: row["models"] for name, row in news["cases"].items()} == {names[1]: ("c",)}
    assert news["models"] == ["a", "b", "c"]
    assert made.ask(q="liver")["names"] == names[:2]
    assert made.ask(model="c")["names"] == [names[1]]


def test_rows_are_found_by_name_and_word_in_the_order_of_review() -> None:
    drawn = [("c", 1.0, "liver"), ("a", 2.0, "\udc80 é"), ("d", 1.0, ""), ("b", 3.0, "liver")]
    rows = CaseRows(
        (ListRow(name, "CT", (), risk, text) for name, risk, text in drawn), by_risk=True
    )
    assert [*rows.names] == ["b", "a", "c", "d"]
    assert [rows.names.first_row(name) for name in "abcde"] == [1, 0, 2, 3, None]

    def found(*words: str) -> list[int]:
        return np.flatnonzero(rows.chosen(Query(words))).tolist()

    assert (found("liver"), found("\udc80"), found("é")) == ([0, 2], [1], [1])
    assert rows.put(ListRow("d", "MR", ("m",), 4.0, "liver"))
    assert not rows.put(ListRow("e", "MR", (), 4.0, "liver"))
    rows.remove("b")
    assert found("liver") == [2, 3]
    assert [row.text for row in rows] == ["\udc80 é", "liver", "liver"]
    rows.name_patients(["", "", "DOE", ""])
    assert (found("doe"), found("liver", "doe")) == ([2], [2])


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an output folder of drawn cases with tables."""
    monkeypatch.setattr(ledger, "CHECKED", 2)
    monkeypatch.setattr(state_module, "CHECKED", 2)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # for speed
    out = tmp_path / "out"
    for n, name in enumerate(names_of(30)):
        publish_drawn(out, name, n)
    write_case_tables(out, set())
    return out


def first_look(out: Path, judged: Set[str] = frozenset()) -> tuple[Worklist, set[str]]:
    """Return a list after its first look, and the cases whose folders were read."""
    worklist = Worklist(out, judged)
    worklist.refresh()
    cases = worklist.cases.items()
    return worklist, {name for name, case in cases if isinstance(case, ListedCase)}


def shown(worklist: Worklist) -> list[object]:
    """Return all that is known of the cases, in the order of review."""
    findings = [worklist.findings(name) for name in worklist.rows.names]
    cases = list(map(worklist.read, worklist.rows.names))
    return [list(worklist.rows), findings, cases, sorted(worklist.damaged)]


def test_a_list_from_tables_is_that_from_folders(drawn: Path) -> None:
    names = names_of(32)
    folders = [drawn / "cases" / name for name in names]
    publish_drawn(drawn, names[3], 103)
    publish_drawn(drawn, names[31], 31)
    revision = add_revision(drawn, folders[7], 107)
    add_failure(drawn, names[9], Reason.CRASHED)  # its rows are flagged
    shutil.rmtree(folders[11])
    (folders[13] / "segmentation.nii.gz").unlink()
    (folders[17] / "another").write_text("")

    from_tables, read = first_look(drawn, {names[19]})

    changed = {names[n] for n in (3, 7, 17, 19, 31)}
    assert changed <= read
    assert len(read - changed) <= 2  # those that are read by chance
    (drawn / "private" / "tabled.parquet").unlink()
    (drawn / "private" / "list.parquet").unlink()
    from_folders, all_read = first_look(drawn)
    assert all_read == set(names) - {names[n] for n in (11, 13, 30)}
    assert shown(from_tables) == shown(from_folders)
    assert from_tables.damaged == {names[13]}
    assert from_tables.rows.risk.max() > 1
    case = from_tables.read(names[7])
    assert case is not None
    assert case.measurements == read_measurements(revision)


def test_tables_that_were_replaced_since_are_not_taken(drawn: Path) -> None:
    table = drawn / "measurements.parquet"
    shutil.copy2(table, drawn / "copy")
    (drawn / "copy").replace(table)
    assert len(first_look(drawn)[1]) == 30


def test_no_case_is_taken_from_tables_if_a_folder_differs(
    drawn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an edit that changed no time of a folder."""
    monkeypatch.setattr(state_module, "CHECKED", 29)
    for name in names_of(30)[:2]:
        folder = drawn / "cases" / name
        path, time = folder / "measurements.json", folder.stat().st_mtime_ns
        path.write_text(path.read_text().replace("kidney_left", "kidney_lost"))
        _write_checksums(folder)
        store_file_stamps(folder)
        os.utime(folder, ns=(time, time))
    worklist, read = first_look(drawn)
    assert read == set(names_of(30))
    assert "kidney_lost" in {m.label for case in worklist.cases.values() for m in case.measurements}


def test_a_case_from_tables_that_changed_is_read_when_it_is_shown(drawn: Path) -> None:
    worklist, read = first_look(drawn)
    replaced, gone, same = [name for name in names_of(30) if name not in read][:3]
    version = worklist.version
    assert worklist.read(same) is not None
    assert worklist.version == version
    folder = publish_drawn(drawn, replaced, 200)
    case = worklist.read(replaced)
    assert case is not None
    assert case.measurements == read_measurements(folder)
    shutil.rmtree(drawn / "cases" / gone)
    assert worklist.read(gone) is None
    assert gone not in listed(worklist)
    assert worklist.version == version + 2


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold the comparison of stored lists with folders until the event is set."""
    event, check = threading.Event(), Worklist._check
    monkeypatch.setattr(Worklist, "_check", lambda *args: event.wait() and check(*args))
    yield event
    event.set()


def checked(worklist: Worklist) -> Worklist:
    """Return a list after its stored rows were compared with the folders."""
    worklist.refresh()
    assert worklist._look is not None
    worklist._look.join()
    assert worklist.checking is None
    return worklist


def judge(out: Path, *names: str) -> set[str]:
    """Store a list whose server knew of verdicts about some cases."""
    first_look(out, set(names))
    return set(names)


def test_a_stored_list_is_shown_before_folders_are_read(drawn: Path, held: threading.Event) -> None:
    first, _ = first_look(drawn)
    again = Worklist(drawn)
    again.refresh()
    assert (again.checking, len(again.cases)) == (0, 0)
    assert list(again.rows) == list(first.rows)
    version, name = again.version, again.rows.names[3]
    case = again.read(name)
    assert isinstance(case, ListedCase)
    assert again.findings(name) == first.findings(name)
    assert again.version == version
    held.set()
    checked(again)
    assert len(again.cases) < 30
    assert shown(again) == shown(first)


def replace(out: Path, name: str) -> None:
    publish_drawn(out, name, 103)


def add(out: Path, name: str) -> None:
    publish_drawn(out, names_of(31)[30], 30)


def take_away(out: Path, name: str) -> None:
    shutil.rmtree(out / "cases" / name)


def damage(out: Path, name: str) -> None:
    (out / "cases" / name / "segmentation.nii.gz").unlink()


def edit_in_place(out: Path, name: str) -> None:
    folder = out / "cases" / name
    path, time = folder / "measurements.json", folder.stat().st_mtime_ns
    path.write_text(path.read_text().replace("kidney_left", "kidney_lost"))
    _write_checksums(folder)
    store_file_stamps(folder)
    os.utime(folder, ns=(time, time))


@pytest.mark.parametrize("change", [replace, add, take_away, damage, edit_in_place])
def test_a_list_that_was_stored_before_a_change_is_made_anew(
    drawn: Path, change: Callable[[Path, str], None]
) -> None:
    judged = judge(drawn, names_of(30)[4])
    change(drawn, *judged)
    again = checked(Worklist(drawn, judged))
    (drawn / "private" / "tabled.parquet").unlink()
    (drawn / "private" / "list.parquet").unlink()
    assert shown(again) == shown(first_look(drawn)[0])
    assert shown(checked(Worklist(drawn))) == shown(again)  # as stored since


def test_a_case_that_changed_is_read_when_it_is_asked_for(
    drawn: Path, held: threading.Event
) -> None:
    replaced, gone, damaged = names_of(30)[:3]
    judged = judge(drawn, replaced, gone)
    replace(drawn, replaced)
    take_away(drawn, gone)
    damage(drawn, damaged)
    again = Worklist(drawn, judged)
    again.refresh()
    known = again.seen(replaced)
    assert known != seen(drawn / "cases" / replaced)  # as last listed
    assert {replaced, gone, damaged} <= set(listed(again))
    version = again.version
    case = again.read(replaced)
    assert case is not None
    assert case.seen == again.seen(replaced) == seen(drawn / "cases" / replaced)
    assert (again.read(gone), again.read(damaged)) == (None, None)
    assert again.seen(gone) is None
    assert not {gone, damaged} & set(listed(again))
    assert again.damaged == {damaged}
    assert (again.version, again.checking) == (version + 3, 0)


def test_corrections_since_a_list_was_stored_are_read_alone(
    drawn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = first_look(drawn)
    name = names_of(30)[7]
    revision = add_revision(drawn, drawn / "cases" / name, 107)
    anew = list[object]()
    monkeypatch.setattr(Worklist, "_make_anew", anew.append)
    for _ in range(2):  # the second time as stored by the first
        again = checked(Worklist(drawn, {name}))
        assert listed(again) == listed(first)
        assert again.seen(name) == seen(revision)
        assert list(again.rows) != list(first.rows)
    assert not anew


def test_a_correction_is_not_lost_to_a_list_that_was_made_anew_meanwhile(
    drawn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, make = names_of(30)[7], Worklist._make
    judged = judge(drawn, name)
    add(drawn, name)
    again, revisions = Worklist(drawn, judged), list[Path]()

    def make_slowly(anew: Worklist) -> None:
        make(anew)
        revisions.append(add_revision(drawn, drawn / "cases" / name, 107))
        again.update(name)

    monkeypatch.setattr(Worklist, "_make", make_slowly)
    checked(again)
    assert again._is_measured
    assert again.seen(name) == seen(revisions[0])


def test_a_list_that_became_short_is_not_stored(
    drawn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_look(drawn)
    take_away(drawn, names_of(30)[0])
    monkeypatch.setattr(state_module, "CHECKED", 29)
    checked(Worklist(drawn))
    assert not (drawn / "private" / "list.parquet").exists()


def test_a_list_that_was_checked_is_not_taken_again_while_it_is_stored(
    drawn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_look(drawn)
    begun, end = threading.Event(), threading.Event()
    monkeypatch.setattr(state_module, "MAX_WAIT_S", 0)
    monkeypatch.setattr(Worklist, "_store", lambda *_: begun.set() or end.wait())
    again = Worklist(drawn, {names_of(30)[4]})  # whose result was not stored
    again.refresh()
    rows = again.rows
    begun.wait()
    again.refresh()
    assert again.checking is None
    assert again.rows is rows
    end.set()
    checked(again)


def other_version(out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stored_list, "__version__", "another")
    return out


def flip(out: Path, _: pytest.MonkeyPatch) -> Path:
    file = out / "private" / "list.parquet"
    data = bytearray(file.read_bytes())
    data[data.index(b"kidney right: ")] ^= 1
    file.write_bytes(data)
    return out


def other_sum(out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if what the rows were compared with was damaged: a part of the file without checksums."""
    monkeypatch.setattr(stored_list, "crc32", lambda _: 0)
    return out


def copy(out: Path, _: pytest.MonkeyPatch) -> Path:
    return Path(shutil.copytree(out, out.with_name("copy"), copy_function=shutil.copy2))


def link(out: Path, _: pytest.MonkeyPatch) -> Path:
    file = out / "private" / "list.parquet"
    file.rename(out / "elsewhere")
    file.symlink_to(out / "elsewhere")
    return out


@pytest.mark.parametrize("change", [other_version, flip, other_sum, copy, link])
def test_a_list_that_is_not_of_this_folder_is_not_shown(
    drawn: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[..., Path]
) -> None:
    first, _ = first_look(drawn)
    out = change(drawn, monkeypatch)
    again, _ = first_look(out)
    assert again._look is None  # made before it was shown
    assert list(again.rows) == list(first.rows)


def test_a_list_that_cannot_be_stored_is_shown_all_the_same(
    drawn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stored_list, "write_private", full)
    assert len(listed(first_look(drawn)[0])) == 30
    assert not (drawn / "private" / "list.parquet").exists()


def test_a_page_says_how_much_of_its_list_was_checked(drawn: Path, held: threading.Event) -> None:
    name = names_of(30)[4]
    with closing(VerdictLog(drawn)) as log:
        log.append(Verdict(name, "r1", seen(drawn / "cases" / name), decision="accept"))
        judge(drawn, name)
        replace(drawn, name)
        state = ReviewState(drawn, log, Readers(("r1",)), OpenCases(drawn, None), {"r1": "anna"})
        query = read_query({"filter": "accept"})
        answer = state.listed("r1", query, 0, 99)
        assert answer is not None
        assert (answer["checking"], answer["counts"]["all"]) == (0, 30)
        assert answer["names"] == [name]
        assert answer["counts"]["stale"] == 1  # its row was read to be shown
        held.set()
        checked(state.worklist)
        answer = state.listed("r1", query, 0, 99, answer["version"])
        assert answer is not None
        assert (answer["checking"], answer["names"]) == (None, [])
        assert answer["counts"]["stale"] == 1
        assert state.listed("r1", query, 0, 99, answer["version"]) is None
