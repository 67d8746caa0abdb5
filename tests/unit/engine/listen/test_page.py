"""The page of `listen`: what came, waits and went back, without a patient or a UID."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scanloom.engine.listen.outbox import Outbox, outbox_folder
from scanloom.engine.listen.page import ListenPage
from scanloom.engine.listen.site import Site
from scanloom.engine.listen.spool import Arrival, Spool
from scanloom.engine.listen.studies import Queue, StudyState
from scanloom.io.identity import study_id
from support.commands import scanloom
from support.targets import site_of, target_keys, write_case

KEY = b"k" * 32
DONE, FAILED, WAITS = "1.2.3.4.5001", "1.2.3.4.5002", "1.2.3.4.5003"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return site_of(tmp_path, [target_keys(104)], metrics="scanloom.prom", reserve="1 MB")


@pytest.fixture
def page(site: Site, tmp_path: Path) -> ListenPage:
    """A page, and a study that is done, one that failed and one that waits."""
    out, spool = tmp_path / "out", tmp_path / "spool"
    with Spool(spool) as held:
        page = ListenPage(site, spool, out, KEY)
        for study in (DONE, FAILED, WAITS):
            (spool / "studies" / study / "1.2").mkdir(parents=True)
            held.journal.append(Arrival(time.time(), "new", study, "1.2", "1.3", "CT<1>"))
    queue = Queue(spool)
    queue.write(DONE, StudyState("x", time.time(), "done"))
    queue.write(FAILED, StudyState("x", time.time(), "failed", "SLICE_GAP"))
    (out / "private").mkdir(parents=True)
    return page


def html_of(page: ListenPage, tmp_path: Path) -> str:
    page.write()
    return (tmp_path / "out" / "listen" / "index.html").read_text()


def test_each_study_is_called_by_a_hash_with_its_state(page: ListenPage, tmp_path: Path) -> None:
    html = html_of(page, tmp_path)

    rows = [re.sub(r"<[^>]*>", " ", row).split() for row in re.findall(r"<tr>.*?</tr>", html)]
    by_label = {row[0]: row for row in rows}
    assert "done" in by_label[study_id(DONE, KEY)[:8]]
    assert {"failed", "SLICE_GAP:"} <= set(by_label[study_id(FAILED, KEY)[:8]])
    assert "waits" in by_label[study_id(WAITS, KEY)[:8]]
    assert "CT&lt;1&gt;" in html
    assert not re.search(r"1\.2\.3\.4", html)
    assert "<script" not in html


def test_what_goes_back_is_counted_by_target(page: ListenPage, site: Site, tmp_path: Path) -> None:
    outbox = Outbox(outbox_folder(tmp_path / "out"))
    outbox.add(write_case(tmp_path / "out", "case1"), "pacs")

    html = html_of(page, tmp_path)
    families = text_string_to_metric_families((tmp_path / "scanloom.prom").read_text())
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }

    assert html.count("<td>dicom/") == 3
    assert html.count("a case named by its source") == 3
    assert "case1" not in html
    assert samples["scanloom_listen_results", "pacs", "waiting"] == 3
    assert samples["scanloom_listen_objects_total",] == 3
    assert samples["scanloom_listen_studies", "failed"] == 1
    assert samples["scanloom_listen_free_bytes",] > 0


def test_a_page_of_nothing(site: Site, tmp_path: Path) -> None:
    (tmp_path / "out" / "private").mkdir(parents=True)
    page = ListenPage(site, tmp_path / "spool", tmp_path / "out", KEY)

    assert "None has come yet." in html_of(page, tmp_path)


def test_a_process_that_does_nothing_is_named(page: ListenPage, tmp_path: Path) -> None:
    page.write({"receiver": "no sign of life", "worker": "", "delivery": "ended (DISK_FULL)"})

    sentence = "Listen: the receiver: no sign of life; the delivery: ended (DISK_FULL)."
    assert told(tmp_path) == sentence
    html = (tmp_path / "out" / "listen" / "index.html").read_text()
    assert "The receiver: no sign of life." in html
    assert "The delivery: ended (DISK_FULL)." in html
    assert "The worker" not in html
    text = (tmp_path / "scanloom.prom").read_text()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    up = {each.labels["part"]: each.value for each in families["scanloom_listen_part_up"].samples}
    assert up == {"receiver": 0, "worker": 1, "delivery": 0}


def test_the_last_page_says_that_nothing_is_received(page: ListenPage, tmp_path: Path) -> None:
    assert "nothing is received" not in html_of(page, tmp_path)
    assert told(tmp_path) == "Listen: starts."

    page.write(has_ended=True)

    html = (tmp_path / "out" / "listen" / "index.html").read_text()
    assert "<code>listen</code> ended at" in html
    assert re.fullmatch(r"Listen: ended [0-9:]+ ago\.", told(tmp_path))


@pytest.mark.parametrize(
    ("kept", "sentence"),
    [
        ({"written": 1000.0, "due": 1000.0}, r".* nothing was heard for .*: it was killed, or .*"),
        ({"written": 1000.0}, "Listen: all processes run."),  # a page of many studies takes long
        ({"written": 1e12, "has_ended": True}, "Listen: ended 0:00:00 ago."),  # another's clock
        ({"written": None}, ""),
        ({"parts": 1}, ""),
    ],
)
def test_status_judges_by_what_was_written(
    kept: dict[str, object], sentence: str, page: ListenPage, tmp_path: Path
) -> None:
    page.write({"receiver": ""})
    status = tmp_path / "out" / "listen" / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | kept))

    assert re.fullmatch(sentence, told(tmp_path))


def told(tmp_path: Path) -> str:
    """Return what `status` tells of `listen`."""
    ended = scanloom("status", tmp_path / "out")
    assert "INTERNAL" not in ended.err
    return next((line for line in ended.out.splitlines() if line.startswith("Listen")), "")
