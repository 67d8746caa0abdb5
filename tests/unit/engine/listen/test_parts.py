"""Processes of `listen` that give no sign of life: told about, and never killed."""

from __future__ import annotations

import json
import logging
import os
import runpy
import select
import selectors
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from scanloom.core import Reason, ScanError
from scanloom.engine.listen import parts
from scanloom.engine.listen.listen import listen
from scanloom.engine.listen.own_status import own_status
from scanloom.engine.listen.parts import SILENT_S, ListenPart, Setup
from scanloom.engine.listen.receive import OwnCertificates, _expiry, _trouble
from scanloom.engine.listen.site import Site
from scanloom.engine.listen.spool import Spool
from support.https_server import write_certificate

SETUP: Any = None


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Iterator[ListenPart]:
    """A process that says everything that it is told."""

    def start(*_: object, messages: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["cat"], bufsize=0, stdin=subprocess.PIPE, stdout=messages)

    monkeypatch.setattr(parts, "start_part", start)
    with selectors.DefaultSelector() as selector:
        part = ListenPart(parts.WORKER, SETUP, selector)
        yield part
        part.signal(9)
        while part.runs:
            part.read()


def hear(part: ListenPart, **document: Any) -> None:
    part.tell(document)
    part.read()


def test_a_process_that_is_silent_is_told_once(
    part: ListenPart, caplog: pytest.LogCaptureFixture
) -> None:
    hear(part, ready={})
    part.count_silence(SILENT_S - 1)
    assert part.state == ""
    hear(part, alive="")
    part.count_silence(SILENT_S - 1)
    assert part.state == ""
    assert not caplog.messages

    part.count_silence(1)
    part.count_silence(1)
    assert part.state == "no sign of life for more than 5 minutes"
    (message,) = caplog.messages
    assert message.startswith("the worker gives no sign of life")
    assert "kill -9 " in message

    with caplog.at_level(logging.WARNING):
        hear(part, alive="")
    assert part.state == ""
    assert part.runs
    assert caplog.messages[1:] == ["the worker gives signs of life again"]


def test_what_keeps_a_process_from_its_work_is_told(part: ListenPart, tmp_path: Path) -> None:
    """The reserve is twice the largest study, of which the page knows nothing."""
    hear(part, ready={})
    with Spool(tmp_path / "spool", reserve=1 << 60) as full:
        hear(part, alive=_trouble(full))
    assert part.state == "refuses all objects, since the disk has no room"
    certificate, key = write_certificate(tmp_path)  # for a day
    tls = {"certificate": str(certificate), "key": str(key), "clients": str(certificate)}
    expires = _expiry(tls["certificate"])
    assert expires == pytest.approx(time.time() + 24 * 3600, abs=600)
    with Spool(tmp_path / "spool") as spool:
        hear(part, alive=_trouble(spool, expires - 2 * 24 * 3600))
        assert part.state.startswith("its certificate has expired")
        hear(part, alive=_trouble(spool, expires))
    assert part.state == ""


def test_a_status_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, and written as soon as it can be."""
    place, status = tmp_path / "listen", tmp_path / "listen" / "status.json"
    place.write_text("in the way")
    with own_status(tmp_path, "receiver") as say:
        say("no room")
        say("")
        assert caplog.messages == ["the status can't be written (FileExistsError)"]
        place.unlink()
        say("no room")
        assert json.loads(status.read_text())["parts"] == {"receiver": "no room"}
        assert not json.loads(status.read_text())["has_ended"]
    assert json.loads(status.read_text())["has_ended"]


def test_the_end_of_each_own_certificate_is_told_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of those that we show to others; `None` stands for the receiver, without TLS."""
    certificate, key = map(str, write_certificate(tmp_path))  # for a day
    node = {"title": "PACS", "address": "10.0.0.1", "port": 104}
    node["tls"] = {"authorities": certificate, "certificate": certificate, "key": key}
    page = {"peers": [{"title": "CT", "ask": node}], "targets": [{"name": "pacs", **node}]}
    certificates = OwnCertificates(Site.model_validate(page), None)
    certificates.look()
    certificates.look()

    told = [message.partition(" expires on ")[0] for message in caplog.messages]
    assert told == ["the certificate of target pacs", "the certificate of `ask` of CT"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("limit", [{"LONGEST_LIFE_S": 0.0}, {"CLOCK_STEP_S": -1e9}])
def test_an_idle_worker_ends_before_the_certificate_of_its_cluster(
    limit: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started again, with another one; also after a clock was put back."""
    for name, seconds in limit.items():
        monkeypatch.setattr(parts, name, seconds)
    site = Site.model_validate({"peers": [{"title": "PACS"}]})
    read, write = os.pipe()
    parts._work(Setup(site, tmp_path / "out", tmp_path / "spool", None), parts._Lines(write))
    os.close(write)

    assert os.read(read, 1 << 16).startswith(b'{"ready": {}}')
    os.close(read)


def test_a_receiver_with_metrics_has_the_process_that_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were never written without rules and targets; alone, it would miss its certificate."""

    def start(*_: object, **__: object) -> None:
        raise ScanError(Reason.DISK_FULL, "no room to start anything")

    monkeypatch.setattr(parts, "start_part", start)
    tls = dict.fromkeys(("certificate", "key", "clients"), "missing.pem")
    page = {"peers": [{"title": "PACS"}], "tls": tls, "metrics": "scanloom.prom"}
    with pytest.raises(ScanError, match="DISK_FULL"):
        listen(Site.model_validate(page), tmp_path / "out", pytest.fail)


def test_studies_are_cleared_without_targets_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the process that delivers, which was not there."""

    def start(role: str, *_: object, **__: object) -> subprocess.Popen[bytes]:
        if role in (parts.DELIVERY, parts.PAGE):
            raise ScanError(Reason.DISK_FULL, f"no room to start the {role}")
        return subprocess.Popen(["true"], stdin=subprocess.PIPE)

    monkeypatch.setattr(parts, "start_part", start)
    page = {"peers": [{"title": "PACS"}], "rules": [{"workflow": "a"}], "clear_after": "168 h"}
    setup = Setup(Site.model_validate(page), tmp_path / "out", tmp_path / "spool", None)
    with pytest.raises(ScanError, match="the delivery"):
        parts.keep_parts(setup, pytest.fail, lambda: False)


def test_the_log_of_a_part_has_a_name_of_ours() -> None:
    """Others are not written, and a part is run as a program, which has another."""
    module = runpy.run_path(parts.__file__, run_name="a_program")
    assert module["LOG"].name.startswith(f"{parts.OURS}.")


def test_one_that_loads_its_networks_is_not_silent(
    part: ListenPart, caplog: pytest.LogCaptureFixture
) -> None:
    part.count_silence(10 * SILENT_S)

    assert part.state == "starts"
    assert not caplog.messages


@pytest.mark.parametrize(
    ("was_ready", "is_ending", "again"),
    [(False, False, False), (True, False, True), (True, True, False)],
)
def test_only_what_is_started_again_is_said_to_be(
    was_ready: bool,
    is_ending: bool,
    again: bool,
    part: ListenPart,
    caplog: pytest.LogCaptureFixture,
) -> None:
    part.is_ending = is_ending
    if was_ready:
        hear(part, ready={})
    hear(part, failed=["DISK_FULL", "no room", ""])
    part.signal(9)
    while part.runs:
        part.read()

    assert part.state == "ended (DISK_FULL); it starts again"
    assert any("started again" in message for message in caplog.messages) == again


def test_only_an_end_by_a_fault_is_an_error(
    part: ListenPart, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker ends in good order once a year, and is started again."""
    caplog.set_level(logging.INFO)
    hear(part, ready={})
    part._process.stdin.close()  # `cat` ends
    while part.runs:
        part.read()
    part._due = 0.0
    part.keep()
    part.signal(9)
    while part.runs:
        part.read()

    assert caplog.messages[0] == "the worker ended: exit code 0; started again in 1 s"
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.ERROR]


def test_one_that_reads_nothing_holds_up_nobody(part: ListenPart) -> None:
    part.signal(19)
    for _ in range(2000):
        part.tell({"receiver": "x" * 100})
    part.signal(18)


def test_a_keeper_that_reads_nothing_holds_up_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "KEEPER_S", 0)
    read, write = os.pipe()
    lines = parts._Lines(write)
    for _ in range(2000):
        lines.say({"text": "x" * 100})
    said = os.read(read, 1 << 20).splitlines()
    lines.sign()
    lines.sign()
    signs = os.read(read, 1 << 20).splitlines()
    os.close(read)
    os.close(write)

    assert {len(json.loads(line)["text"]) for line in said} == {100}
    assert signs == [b'{"alive": ""}']


def test_two_threads_say_something_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper reads nothing, so that both wait."""
    monkeypatch.setattr(parts, "KEEPER_S", 0.2)
    read, write = os.pipe()
    lines = parts._Lines(write)
    while select.select([], [write], [], 0)[1]:
        os.write(write, b"x" * 4096)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lines.say, [{}, {}]))
    os.close(read)
    os.close(write)


def test_the_page_knows_what_it_was_told_last(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_bytes(b'{"worker": "starts"}\n{"worker": ""}\n{"wor')
    stdin = os.dup(0)
    with lines.open("rb") as file:
        os.dup2(file.fileno(), 0)
    try:
        assert parts._told({}) == {"worker": ""}
        assert parts._told({"worker": ""}) == {"worker": ""}
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)
