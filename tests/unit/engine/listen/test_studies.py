"""Studies of a spool: their images, what a sender says of them, and which of them wait."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace as Told
from typing import Any

import pytest

from scanloom.engine.listen.spool import (
    MOST_DAYS,
    Arrival,
    Journal,
    JournalFollower,
    Spool,
    last_arrival,
)
from scanloom.engine.listen.studies import (
    Images,
    Queue,
    StudyState,
    WaitingStudies,
    survey,
)
from support.write_dicom import noise, uid, write_series

SEG = "1.2.840.10008.5.1.4.1.1.66.4"
STUDY = str(uid("study"))


def spool_with(tmp_path: Path, slices: int = 3) -> Path:
    """Return the folder of a spool with a series of `STUDY`."""
    folder = tmp_path / "studies" / STUDY
    write_series(folder / str(uid("series")), noise((8, 8, slices)))
    (tmp_path / "journal").mkdir()
    return tmp_path


def set_class(path: Path, sop_class: str) -> None:
    from pydicom import dcmread

    dataset = dcmread(path)
    dataset.SOPClassUID = dataset.file_meta.MediaStorageSOPClassUID = sop_class
    dataset.file_meta.SendingApplicationEntityTitle = "PACS"
    dataset.save_as(path)


def test_images_are_counted_and_other_objects_are_not(tmp_path: Path) -> None:
    study = spool_with(tmp_path) / "studies" / STUDY
    files = sorted(study.glob("*/*"))
    before = survey(study)
    set_class(files[0], SEG)
    set_class(files[1], "1.2.840.10008.5.1.4.1.1.2")
    after = survey(study)

    assert list(before.counts.values()) == [3]
    assert list(after.counts.values()) == [2]
    assert (before.senders, after.senders) == ((), ("PACS",))
    for path in files[1:]:
        set_class(path, SEG)
    assert survey(study).digest == ""


def test_a_file_that_is_no_dicom_counts_as_an_image(tmp_path: Path) -> None:
    study = spool_with(tmp_path, slices=1) / "studies" / STUDY
    [path] = study.glob("*/*")
    path.write_bytes(b"not DICOM")

    assert list(survey(study).counts.values()) == [1]


def test_the_digest_follows_images_alone(tmp_path: Path) -> None:
    study = spool_with(tmp_path) / "studies" / STUDY
    before = survey(study)
    first, *_ = sorted(study.glob("*/*"))
    seg = study / "1.2.3" / "1.2.3.4.dcm"
    seg.parent.mkdir()
    seg.write_bytes(first.read_bytes())
    set_class(seg, SEG)
    assert survey(study).digest == before.digest

    os.utime(first, (1, 1))
    assert survey(study).digest != before.digest


@pytest.mark.parametrize(
    ("sent", "received_only", "short"),
    [
        ([("1", "CT", 3)], False, set()),
        ([("1", "CT", 2)], False, set()),
        ([("1", "CT", 4)], False, {"1"}),
        ([("1", "CT", 3), ("2", "MR", 1)], False, {"2"}),
        ([("1", "CT", 3), ("2", "MR", 1)], True, set()),
        ([("1", "CT", 3), ("3", "SEG", 1), ("4", "SR", 2)], False, set()),
        ([("1", "CT", None)], False, None),
        ([("3", "SEG", 1)], False, None),
        ([], False, None),
    ],
    ids=["all", "fewer", "more", "a series more", "of a part", "no images", "no number", "SEG", ""],
)
def test_what_a_sender_has_more_of(
    sent: list[tuple[str, str, Any]], received_only: bool, short: set[str] | None
) -> None:
    told = [Told(series=s, modality=m, instances=n) for s, m, n in sent]
    found = Images("x", {"1": 3}, ()).short_of(told, received_only=received_only)

    assert found == short


def test_what_is_done_does_not_wait_until_something_comes(tmp_path: Path) -> None:
    spool = spool_with(tmp_path)
    queue, study = Queue(spool), spool / "studies" / STUDY
    assert [*WaitingStudies(spool, queue, "").by_study] == [STUDY]

    queue.write(STUDY, StudyState(survey(study).digest, last_arrival(study), "done"))
    waiting = WaitingStudies(spool, queue, "")
    assert not waiting.by_study

    journal = Journal(spool / "journal")
    for outcome in ("ignored", "new"):
        journal.append(Arrival(time.time(), outcome, STUDY, "1.2", "1.3", "PACS"))
        waiting.look()
        assert bool(waiting.by_study) == (outcome == "new")
    journal.close()


def test_the_first_arrival_stays_and_the_last_moves(tmp_path: Path) -> None:
    spool = spool_with(tmp_path)
    queue, study = Queue(spool), spool / "studies" / STUDY
    queue.write(STUDY, StudyState(survey(study).digest, last_arrival(study), "done"))
    waiting, journal = WaitingStudies(spool, queue, ""), Journal(spool / "journal")
    for age in (3000, 1000):
        journal.append(Arrival(time.time() - age, "new", STUDY, "1.2", "1.3", "PACS"))
        waiting._looked -= 4000  # busy for so long
        waiting.look()
    journal.close()

    now, found = time.monotonic(), waiting.by_study[STUDY]
    assert now - found.first == pytest.approx(3000, abs=300)
    assert now - found.last == pytest.approx(1000, abs=300)


@pytest.mark.parametrize(
    ("state", "waits"),
    [
        ({"outcome": "begun"}, True),
        ({"outcome": "failed"}, False),
        ({"outcome": "no image"}, False),
        ({"outcome": "no rule", "rules": "now"}, False),
        ({"outcome": "no rule", "rules": "before"}, True),
        ({"outcome": "done", "seen": 0.0}, True),
    ],
)
def test_what_a_killed_process_or_other_rules_left_waits(
    state: dict[str, Any], waits: bool, tmp_path: Path
) -> None:
    spool = spool_with(tmp_path)
    queue, seen = Queue(spool), last_arrival(spool / "studies" / STUDY)
    queue.write(STUDY, StudyState(**{"images": "x", "seen": seen} | state))

    assert bool(WaitingStudies(spool, queue, "now").by_study) == waits


TYPED = '{"schema": 2, "images": "", "seen": 1.0, "outcome": "done", "attempts": "1"}'


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 9}', '{"schema": 2}', TYPED])
def test_a_damaged_state_costs_time_only(text: str, tmp_path: Path) -> None:
    spool = spool_with(tmp_path)
    (spool / "queue").mkdir()
    (spool / "queue" / f"{STUDY}.json").write_text(text)

    assert Queue(spool).read(STUDY) is None
    assert not Queue(spool).states()
    assert WaitingStudies(spool, Queue(spool), "").by_study


def test_a_clock_that_is_put_forward_makes_no_study_whole(tmp_path: Path) -> None:
    """Its next slices are to come, whatever the clock says since the last look."""
    spool = spool_with(tmp_path)
    waiting, journal = WaitingStudies(spool, Queue(spool), ""), Journal(spool / "journal")
    waiting.look()
    waiting.by_study.clear()
    journal.append(Arrival(time.time() - 9000, "new", STUDY, "1.2", "1.3", "PACS"))
    journal.close()
    waiting.look()

    assert waiting.by_study[STUDY].first == pytest.approx(time.monotonic(), abs=5)


def test_a_moment_in_the_future_is_now(tmp_path: Path) -> None:
    """A clock that was set back delays a study by `quiet`, not until the clock is there again."""
    spool = spool_with(tmp_path)
    later = time.time() + 9000
    for folder in (spool / "studies" / STUDY, *(spool / "studies" / STUDY).iterdir()):
        os.utime(folder, (later, later))

    [found] = WaitingStudies(spool, Queue(spool), "").by_study.values()
    assert found.last == pytest.approx(time.monotonic(), abs=300)


def test_the_journal_is_followed_over_midnight_and_half_lines(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    journal = Journal(tmp_path / "journal")

    def arrive(moment: float, instance: str) -> None:
        journal.append(Arrival(moment, "new", "1.1", "1.2", instance, "PACS"))

    arrive(86400.0, "1.0")
    follower = JournalFollower(tmp_path)
    arrive(86401.0, "1.1")
    assert [arrival.instance for arrival in follower.new()] == ["1.1"]
    arrive(86402.0, "1.2")
    arrive(2 * 86400.0, "1.3")
    journal.close()
    newest = max((tmp_path / "journal").iterdir())
    whole = newest.read_bytes()
    newest.write_bytes(whole + whole[:20])
    assert [arrival.instance for arrival in follower.new()] == ["1.2", "1.3"]
    newest.write_bytes(whole + whole)
    assert [arrival.instance for arrival in follower.new()] == ["1.3"]
    assert not list(follower.new())


def test_a_clock_that_is_put_back_loses_no_arrival(tmp_path: Path) -> None:
    """Neither to the journal of an earlier day, nor in a folder that looks older at the start."""
    with Spool(tmp_path) as spool:
        spool.journal.append(Arrival(9 * 86400.0, "new", STUDY, "1.2", "1.3", "PACS"))
        follower = JournalFollower(tmp_path)
        spool.journal.append(Arrival(3 * 86400.0, "new", STUDY, "1.2", "1.4", "PACS"))
        assert [arrival.instance for arrival in follower.new()] == ["1.4"]
    series = tmp_path / "studies" / STUDY / "1.2"
    series.mkdir(parents=True)
    queue, came = Queue(tmp_path), last_arrival(series.parent)
    queue.write(STUDY, StudyState("digest", came, "done"))
    assert not WaitingStudies(tmp_path, queue, "").by_study
    for folder in (series.parent, series):
        os.utime(folder, (came - 3600, came - 3600))
    assert [*WaitingStudies(tmp_path, queue, "").by_study] == [STUDY]


def test_the_journal_of_a_listener_that_runs_for_years_stays_short(tmp_path: Path) -> None:
    """A follower goes on; the day that is written stays, also after a clock was put back."""
    (tmp_path / "journal").mkdir()
    journal, follower = Journal(tmp_path / "journal"), JournalFollower(tmp_path)

    def arrive(day: int) -> str:
        journal.append(Arrival(day * 86400.0 + 1, "new", "1.1", "1.2", f"1.{day}", "PACS"))
        return f"1.{day}"

    sent = [arrive(day) for day in range(10, 2 * MOST_DAYS)]
    assert [arrival.instance for arrival in follower.new()] == sent[-MOST_DAYS:]
    assert len(list((tmp_path / "journal").iterdir())) == MOST_DAYS
    sent = [arrive(2 * MOST_DAYS), arrive(3), arrive(3)]
    assert sorted(arrival.instance for arrival in follower.new()) == sorted(sent)
    journal.close()
    assert len(follower._read) == MOST_DAYS + 1


def test_a_spool_that_does_not_exist_yet_is_followed(tmp_path: Path) -> None:
    waiting = WaitingStudies(tmp_path, Queue(tmp_path), "")
    assert not waiting.by_study

    (tmp_path / "journal").mkdir()
    journal = Journal(tmp_path / "journal")
    journal.append(Arrival(time.time(), "new", STUDY, "1.2", "1.3", "PACS"))
    journal.close()
    waiting.look()
    assert [*waiting.by_study] == [STUDY]
