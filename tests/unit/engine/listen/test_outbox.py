"""The outbox: lines are lasting, added once, and known from reports; delivered studies go."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydicom.uid import generate_uid

from scanloom.core import Reason, ScanError
from scanloom.engine.listen import delivery
from scanloom.engine.listen import outbox as outbox_module
from scanloom.engine.listen.delivery import KEPT_S, QUIET_S, _look, clear_studies, deliver
from scanloom.engine.listen.outbox import Line, Outbox, Trouble, open_outbox, outbox_folder
from scanloom.engine.listen.site import Site, Target
from scanloom.engine.listen.spool import Spool, last_arrival
from scanloom.engine.listen.studies import Queue, StudyState, survey
from scanloom.engine.results import verify
from scanloom.io.network.commitment import Report
from support.targets import sign, site_of, target_keys, write_case

pytest.importorskip("pynetdicom")
from scanloom.io.network.peer import NotOfferedError


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(outbox_folder(tmp_path / "out"))


@pytest.fixture
def case(tmp_path: Path) -> Path:
    return write_case(tmp_path / "out", "caseone")


def again(outbox: Outbox) -> Outbox:
    """Return the outbox as another process sees it."""
    return Outbox(outbox.folder)


# --- lines ---------------------------------------------------------------------------------------


def test_a_case_is_added_once_for_each_target(outbox: Outbox, case: Path) -> None:
    first = outbox.add(case, "pacs")
    assert outbox.add(case, "pacs") == first
    outbox.add(case, "other")

    assert [line.file for line in first] == [
        f"dicom/{name}.dcm" for name in ("measurements", "rtstruct", "segmentation")
    ]
    lines = again(outbox).open_lines()
    assert len(lines) == 6
    assert {line.state for line in lines} == {"waiting"}
    assert all(line.begun < line.added for line in lines)


def test_only_the_owner_can_read_it(outbox: Outbox, case: Path) -> None:
    outbox.add(case, "pacs")
    paths = [outbox.folder, *outbox.folder.rglob("*")]
    assert {path.stat().st_mode & 0o077 for path in paths} == {0}


def test_what_a_read_only_disk_holds_can_be_told(
    outbox: Outbox, case: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    outbox.add(case, "pacs")
    monkeypatch.setattr(Path, "chmod", refuse)
    found = open_outbox(outbox.out)
    assert found is not None
    assert found.state().counts == {"pacs": {"waiting": 3}}


def test_other_bytes_are_other_lines(outbox: Outbox, case: Path) -> None:
    first = outbox.add(case, "pacs")
    path = case / "dicom" / "rtstruct.dcm"
    path.write_bytes(path.read_bytes() + b"\xfc\xff\xfc\xff\x4f\x42\0\0\0\0\0\0")
    sign(case)

    second = outbox.add(case, "pacs")

    assert [a.id == b.id for a, b in zip(first, second, strict=True)] == [True, False, True]
    assert len(outbox.open_lines()) == 4


@pytest.mark.parametrize("fault", ["changed", "extra", "missing"])
def test_what_verify_would_refuse_is_not_added(fault: str, outbox: Outbox, case: Path) -> None:
    path = case / "dicom" / ("new.dcm" if fault == "extra" else "rtstruct.dcm")
    if fault == "missing":
        path.unlink()
    else:
        path.write_bytes((case / "dicom" / "segmentation.dcm").read_bytes())

    with pytest.raises(ScanError) as refused:
        outbox.add(case, "pacs")

    assert refused.value.reason is Reason.RESULT_DAMAGED
    assert case.name not in refused.value.detail  # which may be a patient's
    assert not outbox.open_lines()


def test_what_cannot_be_read_for_a_while_is_not_called_damaged(
    outbox: Outbox, case: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study that failed so is worked on again."""

    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(verify, "sha256_of", stale)
        with pytest.raises(ScanError) as refused:
            outbox.add(case, "pacs")
    assert refused.value.reason is Reason.UNREADABLE
    assert refused.value.reason.retry
    assert case.name not in refused.value.detail
    assert outbox.add(case, "pacs")


@pytest.mark.parametrize(
    ("due", "begins"), [(-60.0, True), (60.0, False), (3599.0, False), (30 * 86400.0, True)]
)
@pytest.mark.parametrize("what", ["line", "target"])
def test_nothing_waits_for_a_clock_that_was_put_back(
    what: str, due: float, begins: bool, outbox: Outbox, case: Path
) -> None:
    """A line was to be sent again in a minute, by a clock that was a month ahead."""
    target = Target.model_validate(target_keys(104))
    lines = outbox.add(case, target.name)
    moment = time.time() + due
    if what == "line":
        lines = [outbox.update(replace(line, due=moment)) for line in lines]
    else:
        outbox.set_trouble(target.name, Trouble("away", 1, 0.0, moment - 60, moment))
    begun = list[Line]()
    idle = SimpleNamespace(target=target, is_busy=False, begin=begun.extend)

    _look(outbox, [idle])

    assert begun == (lines if begins else [])


@pytest.mark.parametrize(("commitment", "end"), [("yes", "failed"), ("auto", "delivered")])
def test_a_clock_that_was_put_forward_ends_no_wait_for_a_report(
    commitment: str, end: str, outbox: Outbox, case: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A month at once, after the first of two requests that `give_up` leaves time for."""
    page = target_keys(104, commitment=commitment, report_within=1800, give_up=3600)
    target, peer = Target.model_validate(page), SimpleNamespace(asked=0)

    def request_commitment(transaction: str, references: object) -> None:
        peer.asked += 1

    def find(reference: object) -> bool:
        raise NotOfferedError("no queries")

    peer.request_commitment, peer.find = request_commitment, find
    monkeypatch.setattr(delivery, "SAME_ASSOCIATION_S", 0)
    outbox.add(case, target.name)
    month = 30 * 86400.0
    for n in range(3):  # each time another process
        now = time.time() + month
        monkeypatch.setattr(time, "time", partial(float, now))
        lines = [line for line in again(outbox).open_lines() if line.due < now]
        site = Site(targets=(target,))
        sending = delivery._Delivery(site, target, outbox, threading.Event())
        sending._confirm(peer, lines)
        assert peer.asked == min(n + 1, 2)

    ended = {line.state for line in (*outbox.failed_lines(), *outbox.delivered_lines())}
    assert ended == {end}
    assert not outbox.open_lines()


def test_a_target_without_room_is_tried_for_as_long_as_one_that_is_away(
    outbox: Outbox, case: Path
) -> None:
    """A PACS whose disk was full for an hour: each result was refused five times in 15 minutes."""
    page = target_keys(104, retry=60, give_up=72 * 3600)
    target, [line, *_] = Target.model_validate(page), outbox.add(case, "pacs")
    waits = list[float]()
    while (now := outbox.current(line)) is not None and now.is_open:
        began = time.time()
        delivery._refuse(outbox, target, now, "it has no room (status A700)", busy=True)
        waits.append((outbox.current(line) or line).due - began)

    assert waits[:3] == pytest.approx([60, 60, 120], abs=1)
    assert max(waits) <= 3601
    assert sum(waits[:-1]) == pytest.approx(72 * 3600, abs=3700)
    assert now is not None
    assert (now.state, now.refusals) == ("failed", 0)


def test_a_line_of_an_earlier_version_is_read(outbox: Outbox, case: Path) -> None:
    lines = outbox.add(case, "pacs")
    for path in (outbox.folder / "waiting").iterdir():
        content = json.loads(path.read_text())
        del content["awaited"]
        path.write_text(json.dumps(content))

    assert again(outbox).open_lines() == lines


def test_a_line_is_on_the_disk_before_add_returns(
    outbox: Outbox, case: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line is synced under its draft's name, then its folder under its own."""
    synced = list[str]()
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    lines = outbox.add(case, "pacs")

    waiting = str(outbox.folder / "waiting")
    assert synced.count(waiting) == len(lines)
    for line in lines:
        assert any(f"/.{line.id}.json." in path for path in synced)


def test_the_later_state_counts_if_a_kill_left_both(outbox: Outbox, case: Path) -> None:
    line, *_ = outbox.add(case, "pacs")
    path = outbox.folder / "waiting" / f"{line.id}.json"
    content = path.read_bytes()
    outbox.update(replace(line, state="delivered", proof="found"))
    path.write_bytes(content)

    after = again(outbox)

    assert line.id not in {x.id for x in after.open_lines()}
    assert not path.exists()
    assert after.add(case, "pacs")[0].state == "delivered"


def test_half_a_line_is_none(outbox: Outbox, case: Path) -> None:
    line, *_ = outbox.add(case, "pacs")
    path = outbox.folder / "waiting" / f"{line.id}.json"
    path.write_bytes(path.read_bytes()[:100])

    assert len(again(outbox).open_lines()) == 2
    outbox.add(case, "pacs")
    assert len(again(outbox).open_lines()) == 3


def test_what_was_given_up_can_be_sent_again(outbox: Outbox, case: Path) -> None:
    line, other, _ = outbox.add(case, "pacs")
    outbox.update(replace(line, state="failed", refusals=5, reason="it has no room"))
    outbox.update(replace(other, state="delivered", proof="found"))

    fresh = outbox.retry(outbox.failed_lines()[0])

    assert (fresh.state, fresh.refusals, fresh.reason) == ("waiting", 0, "")
    assert not outbox.failed_lines()
    assert len(outbox.open_lines()) == 2
    (delivered,) = outbox.delivered_lines()
    assert outbox.retry(delivered) == delivered


def test_a_kill_while_it_is_given_back_loses_no_line(outbox: Outbox, case: Path) -> None:
    """It was moved, and not yet written anew: it waits."""
    line, *_ = outbox.add(case, "pacs")
    failed = outbox.update(replace(line, state="failed", refusals=5, reason="it has no room"))
    path = outbox.folder / "failed" / f"{line.id}.json"
    path.rename(outbox.folder / "waiting" / path.name)

    (again_there,) = (x for x in again(outbox).open_lines() if x.id == failed.id)

    assert (again_there.state, again_there.refusals, again_there.reason) == ("waiting", 0, "")


def test_the_state_counts_lines_and_names_troubles(outbox: Outbox, case: Path) -> None:
    line, other, _ = outbox.add(case, "pacs")
    outbox.update(replace(line, state="failed", reason="it has no room"))
    outbox.update(replace(other, state="delivered", proof="found"))
    outbox.set_trouble("pacs", Trouble("it can't be reached", 2, 1.0, 2.0, 3.0))

    state = outbox.state()

    assert state.counts == {"pacs": {"found": 1, "waiting": 1, "failed": 1}}
    assert state.troubles == {"pacs": Trouble("it can't be reached", 2, 1.0, 2.0, 3.0)}
    assert open_outbox(outbox.out / "nothing") is None


def test_what_was_delivered_is_read_once(
    outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is written each few seconds read 20,000 lines each time."""
    read = list[Path]()
    real = outbox_module._read_line

    def read_line(path: Path) -> Line | None:
        read.extend([path] if path.exists() else [])
        return real(path)

    monkeypatch.setattr(outbox_module, "_read_line", read_line)
    for name in ("caseone", "casetwo"):
        deliver_all(outbox, outbox.add(write_case(tmp_path / "out", name), "pacs"), time.time())
    for folder in (outbox.folder / "delivered").glob("??/*"):
        os.utime(folder, (1000, 1000))
    assert outbox.state().counts == {"pacs": {"committed": 6}}
    read.clear()
    assert outbox.state().counts == {"pacs": {"committed": 6}}
    assert not read

    line, *others = outbox.add(write_case(tmp_path / "out", "casethree"), "pacs")
    deliver_all(outbox, [line], time.time())
    read.clear()
    assert outbox.state().counts == {"pacs": {"committed": 7, "waiting": len(others)}}
    assert [path.stem for path in read if "delivered" in path.parts] == [line.id]


# --- reports -------------------------------------------------------------------------------------


def test_a_replaced_line_that_was_given_up_is_no_failure(outbox: Outbox, case: Path) -> None:
    """Its case was made again, and the newer result has a line of its own."""
    older = outbox.add(case, "pacs")
    other = outbox.add(case, "other")[0]
    for line in older:
        outbox.update(replace(line, state="failed", reason="the result was changed"))
    assert outbox.state().failed == outbox.failed_lines()
    shutil.rmtree(case)
    write_case(outbox.out, "caseone", study=older[0].study, size=6000)
    newer = outbox.add(case, "pacs")
    outbox.update(replace(newer[0], state="failed", reason="refused"))
    outbox.update(replace(other, state="failed", reason="refused"))  # nothing replaces it

    state = outbox.state()

    assert state.counts["pacs"] == {"waiting": 2, "failed": 1, "replaced": 3}
    assert {line.id for line in state.failed} == {newer[0].id, other.id}


def test_only_reports_of_known_requests_are_noted(outbox: Outbox, case: Path) -> None:
    lines = outbox.add(case, "pacs")
    known, unknown = str(generate_uid()), str(generate_uid())
    outbox.ask(known, "pacs", lines)
    kept = (lines[0].instance,)

    assert not outbox.note(Report(unknown, kept, {}), ["pacs"])
    assert not outbox.note(Report(known, kept, {}), ["other"])
    assert not outbox.note(Report("../../x", kept, {}), ["pacs"])
    assert not list(outbox.reports())
    assert again(outbox).note(Report(known, kept, {lines[1].instance: 0x0112}), ["pacs"])

    assert outbox.has_report(known)
    ((target, ids, report, _),) = outbox.reports()
    assert (target, ids) == ("pacs", [line.id for line in lines])
    assert report == Report(known, kept, {lines[1].instance: 0x0112})


def test_requests_are_forgotten_once_their_lines_have_ended(
    outbox: Outbox, case: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = outbox.add(case, "pacs")
    transaction = str(generate_uid())
    outbox.ask(transaction, "pacs", lines[:1])
    outbox.tidy()
    assert outbox.note(Report(transaction, (), {}), ["pacs"])
    monkeypatch.setattr(delivery, "TIDY_S", 0.0)
    looks = [True, False, False]

    def is_done() -> bool:  # it delivers for months
        if len(looks) == 2:
            outbox.update(replace(lines[0], state="delivered", proof="committed"))
        return looks.pop()

    deliver(site_of(outbox.out, []), outbox, threading.Event(), is_done)
    assert not outbox.note(Report(transaction, (), {}), ["pacs"])
    assert not list(outbox.reports())


# --- clearing ------------------------------------------------------------------------------------


@pytest.fixture
def spool(tmp_path: Path, outbox: Outbox) -> Path:
    with Spool(tmp_path / "spool"):
        pass
    return tmp_path / "spool"


def received(spool: Path, study: str, moment: float) -> Path:
    """Put a study into a spool, whose last object came at a time; it was quiet since."""
    folder = spool / "studies" / study / f"{study}.1"
    folder.mkdir(parents=True)
    (folder / f"{study}.1.1.dcm").write_bytes(b"pixels")
    for path in (folder.parent, folder):
        os.utime(path, (moment, moment))
    quiet(spool)
    return folder.parent


def quiet(spool: Path) -> None:
    long_ago = time.time() - QUIET_S - 60
    os.utime(spool / "incoming", (long_ago, long_ago))


def deliver_all(outbox: Outbox, lines: list[Line], ended: float) -> None:
    for line in lines:
        outbox.update(replace(line, state="delivered", proof="committed", ended=ended))


DAY = 86400.0


def test_a_delivered_study_goes_after_a_time(tmp_path: Path, outbox: Outbox, spool: Path) -> None:
    now = time.time()
    study, other = str(generate_uid()), str(generate_uid())
    case = write_case(tmp_path / "out", "caseone", study=study)
    folder, kept = received(spool, study, now - 3 * DAY), received(spool, other, now - 3 * DAY)
    lines = outbox.add(case, "pacs", begun=now - 2 * DAY)

    assert clear_studies(spool, outbox, DAY, "") == 0  # it waits
    deliver_all(outbox, lines, now - 0.5 * DAY)
    assert clear_studies(spool, outbox, DAY, "") == 0  # not long enough
    assert clear_studies(spool, outbox, 0.4 * DAY, "") == 1
    assert not folder.exists()
    assert kept.exists()
    assert not list((spool / "clearing").iterdir())


@pytest.mark.parametrize(
    "why",
    [
        *("arrival", "failed", "waiting", "draft", "recent", "other target"),
        *("another scan is in work", "an arrival of an earlier time"),
    ],
)
def test_a_study_stays(why: str, tmp_path: Path, outbox: Outbox, spool: Path) -> None:
    now = time.time()
    study = str(generate_uid())
    case = write_case(tmp_path / "out", "caseone", study=study)
    folder = received(spool, study, now - (1.5 if why == "arrival" else 3) * DAY)
    lines = outbox.add(case, "pacs", begun=now - 2 * DAY)
    deliver_all(outbox, lines[1:], now - DAY)
    if why in ("failed", "waiting"):
        outbox.update(replace(lines[0], state=why))
    else:
        deliver_all(outbox, lines[:1], now - DAY)
    if why == "other target":
        outbox.add(case, "other")
    state = StudyState(survey(folder).digest, now, "done")
    if why == "another scan is in work":
        Queue(spool).write(study, replace(state, outcome="begun"))
    if why == "an arrival of an earlier time":  # the clock was put back
        Queue(spool).write(study, state)
        (folder / f"{study}.1" / "1.2.dcm").write_bytes(b"more")
        os.utime(folder / f"{study}.1", (now - 3 * DAY, now - 3 * DAY))
    draft = spool / "incoming" / f"{'a' * 16}.part"
    if why in ("draft", "recent"):
        draft.write_bytes(b"half")
        if why == "draft":
            quiet(spool)
        else:
            draft.unlink()

    assert clear_studies(spool, outbox, 0.5 * DAY, "") == 0
    assert folder.exists()


@pytest.mark.parametrize(
    ("outcome", "goes"),
    [("done", 1), ("no image", 1), ("no rule", 1), ("other rules", 0), ("failed", 0), ("begun", 0)],
)
def test_a_study_without_results_to_deliver_goes_when_it_came_long_ago(
    outcome: Any, goes: int, outbox: Outbox, spool: Path
) -> None:
    now, study = time.time(), str(generate_uid())
    folder = received(spool, study, now - 3 * DAY)
    images = survey(folder).digest
    state = StudyState(images, last_arrival(folder), outcome, rules="these")
    if outcome == "other rules":  # by the present ones, it was not looked at
        state = replace(state, outcome="no rule", rules="those")
    Queue(spool).write(study, state)

    assert clear_studies(spool, outbox, 4 * DAY, "these") == 0
    assert clear_studies(spool, outbox, 2 * DAY, "these") == goes
    assert folder.exists() != goes


def test_a_study_whose_results_come_while_studies_are_cleared_stays(
    tmp_path: Path, outbox: Outbox, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for its work for longer than studies are kept."""
    now, study = time.time(), str(generate_uid())
    case = write_case(tmp_path / "out", "caseone", study=study)
    folder = received(spool, study, now - 3 * DAY)
    done = StudyState(survey(folder).digest, last_arrival(folder), "done")
    failed_lines = outbox.failed_lines

    def finish() -> list[Line]:
        lines = failed_lines()
        outbox.add(case, "pacs", begun=now)
        Queue(spool).write(study, done)
        return lines

    Queue(spool).write(study, replace(done, outcome="begun"))
    monkeypatch.setattr(outbox, "failed_lines", finish)
    assert clear_studies(spool, outbox, DAY, "") == 0
    assert folder.exists()


def test_what_became_of_studies_that_are_gone_is_forgotten(
    tmp_path: Path, outbox: Outbox, spool: Path
) -> None:
    """After 30 days; not of one in the spool, nor of one with a result that was given up."""
    now, queue = time.time(), Queue(spool)
    studies = {name: str(generate_uid()) for name in ("gone", "young", "here", "given up")}
    for name, study in studies.items():
        lines = outbox.add(write_case(tmp_path / "out", f"case{name}", study=study), "pacs")
        deliver_all(outbox, lines[1:] if name == "given up" else lines, now)
        queue.write(study, StudyState("", now, "cleared"))
    (given_up,) = outbox.open_lines()
    outbox.update(replace(given_up, state="failed"))
    received(spool, studies["here"], now)
    for name, study in studies.items():
        moment = now - KEPT_S + (60 if name == "young" else -60)
        (line, *_) = outbox.delivered_lines(study)
        for path in (outbox._path(line).parent, spool / "queue" / f"{study}.json"):
            os.utime(path, (moment, moment))

    clear_studies(spool, outbox, DAY, "")
    known = {name for name, study in studies.items() if any(outbox.delivered_lines(study))}
    assert known == {"young", "here", "given up"}
    assert queue.states().keys() == {studies["young"], studies["here"]}


def test_a_spool_that_is_not_there_yet_has_nothing_to_clear(tmp_path: Path, outbox: Outbox) -> None:
    assert clear_studies(tmp_path / "spool", outbox, 0, "") == 0


def test_what_was_cleared_is_known(tmp_path: Path, outbox: Outbox, spool: Path) -> None:
    """Of what comes later, it is not known whether it is whole."""
    now, study, queue = time.time(), str(generate_uid()), Queue(spool)
    case = write_case(tmp_path / "out", "caseone", study=study)
    folder = received(spool, study, now - 3 * DAY)
    queue.write(study, StudyState(survey(folder).digest, now - 2 * DAY, "done"))
    deliver_all(outbox, outbox.add(case, "pacs", begun=now - 2 * DAY), now - DAY)

    assert clear_studies(spool, outbox, 0.5 * DAY, "") == 1
    state = queue.read(study)
    assert state is not None
    assert state.outcome == "cleared"


def test_a_newer_result_counts_and_not_the_one_that_it_replaced(
    tmp_path: Path, outbox: Outbox, spool: Path
) -> None:
    """Objects came after the first delivery: the study was segmented anew, and delivered."""
    now = time.time()
    study = str(generate_uid())
    case = write_case(tmp_path / "out", "caseone", study=study)
    folder = received(spool, study, now - 3 * DAY)
    deliver_all(outbox, outbox.add(case, "pacs", begun=now - 4 * DAY), now - 3.5 * DAY)
    assert clear_studies(spool, outbox, DAY, "") == 0
    shutil.rmtree(case)
    case = write_case(tmp_path / "out", "caseone", study=study)
    deliver_all(outbox, outbox.add(case, "pacs", begun=now - 2 * DAY), now - 1.5 * DAY)
    assert clear_studies(spool, outbox, DAY, "") == 1
    assert not folder.exists()


def test_a_line_that_was_sent_by_hand_delays_nothing(
    tmp_path: Path, outbox: Outbox, spool: Path
) -> None:
    """It has the bytes of one that knows when the scan was read; alone, it keeps the study."""
    now = time.time()
    study = str(generate_uid())
    case = write_case(tmp_path / "out", "caseone", study=study)
    folder = received(spool, study, now - 60)
    deliver_all(outbox, outbox.add(case, "by hand"), now - 1)
    assert clear_studies(spool, outbox, 0, "") == 0
    deliver_all(outbox, outbox.add(case, "pacs", begun=now - 30), now - 1)
    assert clear_studies(spool, outbox, 0, "") == 1
    assert not folder.exists()


@pytest.mark.parametrize("seen", [True, False])
def test_our_own_results_that_come_back_keep_no_study(
    seen: bool, tmp_path: Path, outbox: Outbox, spool: Path
) -> None:
    """A PACS that routes a SEG to us: the worker looks at it, and leaves the study as it was."""
    now, study = time.time(), str(generate_uid())
    case = write_case(tmp_path / "out", "caseone", study=study)
    folder = received(spool, study, now - 3 * DAY)
    deliver_all(outbox, outbox.add(case, "pacs", begun=now - 2 * DAY), now - 1.5 * DAY)
    (folder / "1.2").mkdir()
    os.utime(folder / "1.2", (now - DAY, now - DAY))
    images = survey(folder).digest
    moment = last_arrival(folder) if seen else now - 3 * DAY
    Queue(spool).write(study, StudyState(images, moment, "done"))

    assert clear_studies(spool, outbox, 0.5 * DAY, "") == seen


def test_what_a_kill_left_is_cleared(tmp_path: Path, outbox: Outbox, spool: Path) -> None:
    """A study that was being removed is no study any more; the rest goes with the next one."""
    study = str(generate_uid())
    left = spool / "clearing" / str(generate_uid())
    left.mkdir(parents=True)
    now = time.time()
    received(spool, study, now - 3 * DAY)
    case = write_case(tmp_path / "out", "caseone", study=study)
    deliver_all(outbox, outbox.add(case, "pacs", begun=now - 2 * DAY), now - DAY)
    assert clear_studies(spool, outbox, 0.5 * DAY, "") == 1
    assert not left.exists()
