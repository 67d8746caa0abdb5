"""What the worker of `listen` waits for has an end."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from scanloom.core import CaseRecord, Flag, Reason, ScanError
from scanloom.engine.listen import work
from scanloom.engine.listen.site import read_site
from scanloom.engine.listen.spool import last_arrival
from scanloom.engine.listen.studies import (
    Images,
    Queue,
    StudyState,
    Waiting,
    WaitingStudies,
    survey,
)
from support.targets import target_keys
from support.write_dicom import noise, write_series

pytest.importorskip("pynetdicom")
pytestmark = pytest.mark.filterwarnings("ignore:.*unclosed")


RECORD = CaseRecord("case", None, "", (), Path("case"))


@pytest.fixture
def page(tmp_path: Path) -> dict[str, Any]:
    return {"peers": [{"title": "PACS"}], "rules": [{"workflow": "ct_tissue"}]}


def worker_of(tmp_path: Path, page: dict[str, Any], published: Any = pytest.fail) -> work.Worker:
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(page))
    site, out = read_site(tmp_path / "site.yaml"), tmp_path / "out"
    return work.Worker(site, tmp_path / "spool", out, None, published, pytest.fail)


def test_a_workflow_that_does_not_exist_is_a_mistake_of_the_page(tmp_path: Path) -> None:
    page = {"peers": [{"title": "PACS"}], "rules": [{"workflow": "ct_tissu"}]}
    with pytest.raises(ScanError, match="did you mean ct_tissue") as refused:
        worker_of(tmp_path, page)
    assert refused.value.reason is Reason.SITE


@pytest.mark.parametrize("reason", [Reason.RESULT_DAMAGED, Reason.UNREADABLE])
def test_a_result_that_was_changed_fails_its_study_and_no_other(
    reason: Reason, tmp_path: Path, page: dict[str, Any]
) -> None:
    """It was raised, ended the worker, and did so at each new start."""

    def published(*arguments: object) -> None:
        raise ScanError(reason, "it differs")

    worker = worker_of(tmp_path, page, published)
    study = SimpleNamespace(rule=worker._site.rules[0], read=0.0, failed={})
    worker._note(study, RECORD)
    assert study.failed == {"case": reason}


def test_a_result_of_images_that_were_replaced_is_not_sent(
    tmp_path: Path, page: dict[str, Any]
) -> None:
    """Such as of a patient that has been corrected; what is no image does not matter."""
    sent = list[object]()
    page["targets"] = [target_keys(104)]
    page["rules"][0]["send"] = "pacs"
    worker = worker_of(tmp_path, page, lambda *what: sent.append(what))
    spool = tmp_path / "spool"
    files = write_series(spool / "studies" / "1.2" / "1.3", noise((8, 8, 2)))
    worker.waiting = WaitingStudies(spool, Queue(spool), "")
    folder = files[0].parent.parent
    state = StudyState(survey(folder).digest, last_arrival(folder), "begun")
    rule = worker._site.rules[0]
    study = SimpleNamespace(study="1.2", state=state, rule=rule, read=0.0, failed={})

    def come(name: str) -> None:
        (files[0].parent / "draft").write_bytes(name.encode())
        (files[0].parent / "draft").rename(files[0].parent / name)

    worker._note(study, RECORD)
    come("report.txt")
    worker._note(study, RECORD)
    assert len(sent) == 2
    files[0].write_bytes(files[0].read_bytes() + bytes(2))
    come("report.txt")
    worker._note(study, RECORD)
    assert len(sent) == 2


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (None, 3),
        (ScanError(Reason.DISK_FULL, ""), 3),
        (ScanError(Reason.OUTPUT_UNWRITABLE, ""), 3),
        (ScanError(Reason.INTERNAL, ""), 4),
        (RuntimeError(), 4),
    ],
)
def test_an_end_that_no_study_caused_is_no_attempt_at_it(
    error: Exception | None, attempts: int, tmp_path: Path, page: dict[str, Any]
) -> None:
    """Eight starts on a full disk were eight attempts: then the study was given up."""
    queue, worker = Queue(tmp_path / "spool"), worker_of(tmp_path, page)
    state = StudyState("digest", 1.0, "begun", attempts=4)
    queue.write("1.2", state)
    worker._begun["1.2"] = state

    worker.__exit__(None if error is None else type(error), error, None)

    assert queue.read("1.2") == replace(state, attempts=attempts)


def test_a_study_that_has_to_be_alone_does_not_wait_for_ever(
    tmp_path: Path, page: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While studies kept coming, others were in work at each look, and new ones were begun."""
    begun = list[str]()

    def index_of(folders: list[Path], key: bytes) -> None:
        begun.extend(folder.name for folder in folders)
        raise ScanError(Reason.UNREADABLE, "a share is away")

    monkeypatch.setattr(work, "index_of", index_of)
    worker, now = worker_of(tmp_path, page), time.monotonic()
    queue = Queue(tmp_path / "spool")
    worker.waiting = WaitingStudies(tmp_path / "spool", queue, "")
    images = Images("digest", {"1.2.1": 3}, ("PACS",))
    for study, came in (("1.2", now - 2000), ("1.3", now - 1000)):
        worker.waiting.by_study[study] = Waiting(came, came, images=images)
    queue.write("1.2", StudyState("digest", 1.0, "begun", attempts=work.SUSPECT - 1))
    state = StudyState("other", 1.0, "begun")
    worker._in_work["1.1"] = SimpleNamespace(state=state)

    worker.step()
    assert not begun
    worker._in_work.clear()
    worker.step()

    assert begun == ["1.2", "1.3"]


def test_tables_that_are_never_written_are_told_once(
    tmp_path: Path, page: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    worker = worker_of(tmp_path, page)
    running: Any = SimpleNamespace(poll=lambda: None, pid=4711)
    worker._tables = running
    worker._tables_began = time.monotonic() - work.TABLES_LONG_S + 60
    worker._keep_tables()
    assert not caplog.messages
    worker._tables_began -= 120
    worker._keep_tables()
    worker._keep_tables()
    assert caplog.messages == ["tables are not written for an hour: kill -9 4711 ends it"]


@dataclass
class PlainCase:
    id: str = "case"
    series: Any = None
    flags: tuple[Flag, ...] = ()


@pytest.mark.parametrize(
    ("before", "flags"),
    [
        ({"outcome": "cleared"}, (Flag.MAYBE_INCOMPLETE,)),
        ({"outcome": "begun"}, (Flag.MAYBE_INCOMPLETE,)),  # its process was killed
        ({"outcome": "done"}, (Flag.MAYBE_INCOMPLETE,)),  # late slices, for the second time
        ({"outcome": "no image"}, (Flag.MAYBE_INCOMPLETE,)),  # our SEG has come back
        ({"outcome": "done", "cleared": False}, ()),
    ],
)
def test_what_comes_after_the_study_was_cleared_stays_flagged(
    before: dict[str, Any],
    flags: tuple[Flag, ...],
    tmp_path: Path,
    page: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, queue = worker_of(tmp_path, page), Queue(tmp_path / "spool")
    worker.waiting = WaitingStudies(tmp_path / "spool", queue, "")
    images, waiting = Images("digest", {"1.2.1": 3}, ("PACS",)), Waiting(0.0, 0.0)
    worker.waiting.by_study["1.2"] = waiting
    queue.write("1.2", StudyState(**{"images": "other", "seen": 1.0, "cleared": True} | before))
    cases = SimpleNamespace(pending=[PlainCase()], left_out=[], records=[], compare=lambda: None)
    submitted = list[PlainCase]()
    steps = SimpleNamespace(enter=lambda cases: None)
    lane: Any = SimpleNamespace(submit=submitted.extend, steps=steps, request=None)
    lane.request = worker._requests[worker._site.rules[0].workflow]
    worker._lanes = dict.fromkeys(worker._requests, lane)
    monkeypatch.setattr(worker, "_rule_of", lambda *_: worker._site.rules[0])
    monkeypatch.setattr(work, "index_of", lambda *_: None)
    monkeypatch.setattr(work, "RunCases", lambda *_: cases)
    monkeypatch.setattr(work, "AuditTrail", lambda *_: SimpleNamespace(append=lambda *_: None))
    cases.pending[0].series = SimpleNamespace(series_uid="1.2.1")

    worker._begin("1.2", waiting, images, frozenset())

    assert [case.flags for case in submitted] == [flags]
    state = queue.read("1.2")
    assert state is not None
    assert state.cleared == bool(flags)


def test_a_study_that_cannot_be_read_now_is_tried_again(
    tmp_path: Path, page: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def index_of(*_: object) -> None:
        raise ScanError(Reason.UNREADABLE, "a share is away")

    monkeypatch.setattr(work, "index_of", index_of)
    worker, queue = worker_of(tmp_path, page), Queue(tmp_path / "spool")
    worker.waiting = WaitingStudies(tmp_path / "spool", queue, "")
    images, outcomes = Images("digest", {"1.2.1": 3}, ("PACS",)), list[str]()
    for _ in range(len(work.RETRY_PAUSES_S) + 1):
        waiting = worker.waiting.by_study["1.2"] = Waiting(0.0, 0.0)
        worker._begin("1.2", waiting, images, frozenset())
        state = queue.read("1.2")
        assert state is not None
        outcomes.append(state.outcome)
        assert ("1.2" in worker.waiting.by_study) == (state.outcome == "begun")

    assert outcomes == ["begun", "begun", "begun", "failed"]


def test_a_sender_that_does_not_answer_holds_up_no_study_that_is_overdue(
    tmp_path: Path, page: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "ASK_AGAIN_S", 600.0)
    images = Images("digest", {"1.2": 3}, ("PACS",))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ask = {"title": "ARCHIVE", "address": "127.0.0.1", "port": silent.getsockname()[1]}
        page["peers"][0]["ask"] = ask | {"patience": 60}
        worker = worker_of(tmp_path, page)
        worker._askers = ThreadPoolExecutor(1)
        try:
            assert worker._answer("1.1", images, is_overdue=True) is None  # it is asked just now
            monkeypatch.setattr(work, "ASK_AGAIN_S", 0.0)
            assert worker._answer("1.1", images, is_overdue=False) is None
            answer = worker._answer("1.1", images, is_overdue=True)
            assert answer is not None
            assert answer.result(0) is None
        finally:
            silent.close()
            worker._askers.shutdown(wait=True, cancel_futures=True)
