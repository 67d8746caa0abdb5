"""`scanloom listen` with rules: each study is segmented once, late slices make it anew."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydicom import dcmread

from scanloom.engine.listen.studies import Queue
from support import steady_sender
from support.commands import scanloom
from support.layouts import case_folders
from support.listeners import (
    PATIENT,
    processes,
    states,
    wait_for,
    write_study,
    write_workflow,
)
from support.receivers import DEADLINE, Receiver, listening, send
from support.steady_sender import SYNTAXES
from support.targets import free_port
from support.write_dicom import uid

pytest.importorskip("pynetdicom")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*unclosed")]

SR = "1.2.840.10008.5.1.4.1.1.88.33"


def study_of(files: list[Path]) -> str:
    return str(dcmread(files[0], stop_before_pixels=True).StudyInstanceUID)


def cases(receiver: Receiver) -> dict[str, dict[str, Any]]:
    """Return the documents of published cases by id."""
    found = case_folders(receiver.folder / "out")
    return {path.name: json.loads((path / "case.json").read_text()) for path in found}


def outcomes(receiver: Receiver) -> dict[str, str]:
    return {study: state.outcome for study, state in states(receiver.spool).items()}


def structured_report(image: Path, target: Path) -> Path:
    """Write an SR of the study of an image."""
    report = dcmread(image)
    del report.PixelData
    report.SOPClassUID = report.file_meta.MediaStorageSOPClassUID = SR
    report.Modality = "SR"
    for name in ("SOPInstanceUID", "SeriesInstanceUID"):
        setattr(report, name, uid("report", name))
    report.file_meta.MediaStorageSOPInstanceUID = report.SOPInstanceUID
    report.save_as(target)
    return target


def send_by_dcmtk(port: int, files: list[Path]) -> None:
    """Send by storescu of DCMTK; by pynetdicom under its name where that is absent."""
    if shutil.which("storescu") is None:
        assert set(send(port, files, title="STORESCU").values()) == {0}
        return
    command = ["storescu", "-R", "-aet", "STORESCU", "-aec", "SCANLOOM", "127.0.0.1", str(port)]
    subprocess.run([*command, *map(str, files)], check=True, capture_output=True, timeout=60)


def test_studies_of_two_senders_are_segmented_once(tmp_path: Path) -> None:
    """Shuffled; late slices, a study sent twice, an SR, our own SEG, a gap, an MR."""
    late, twice, reported = (write_study(tmp_path, name) for name in ("late", "twice", "reported"))
    broken, other = write_study(tmp_path, "broken"), write_study(tmp_path, "other", modality="MR")
    del broken[9]
    report = structured_report(reported[0], tmp_path / "report.dcm")
    workflow = write_workflow(tmp_path / "workflow")
    rules = [{"from": ["PYNETDICOM", "STORESCU"], "select": {"modality": "CT"}}]
    rules[0]["workflow"] = str(workflow)
    early = late[:14] + twice + broken
    random.Random(5).shuffle(early)
    keys = {"rules": rules, "quiet": "8 s", "cluster": "none"}
    with listening(tmp_path / "site", **keys) as receiver:
        answers: dict[Path, int | None] = {}
        sender = threading.Thread(
            target=lambda: answers.update(send(receiver.port, early)), daemon=True
        )
        sender.start()
        send_by_dcmtk(receiver.port, [*twice, report, *reported, *other])
        sender.join(DEADLINE)
        assert set(answers.values()) == {0}
        expected = {
            **dict.fromkeys(map(study_of, (late, twice, reported)), "done"),
            study_of(broken): "failed",
            study_of(other): "no rule",
        }
        wait_for(lambda: outcomes(receiver) == expected)
        assert states(receiver.spool)[study_of(broken)].reason == "SLICE_GAP"
        before = cases(receiver)
        assert sorted(case["grid"]["shape"][2] for case in before.values()) == [14, 20, 20]
        begun = receiver.log.count(" to segment by ")

        # what we made ourselves, and the same again, start nothing; late slices do
        segs = (receiver.folder / "out" / "cases").glob("_*/*/dicom/segmentation.dcm")
        send_by_dcmtk(receiver.port, [*segs, report, *twice])
        assert set(send(receiver.port, late[14:]).values()) == {0}
        wait_for(lambda: {c["grid"]["shape"][2] for c in cases(receiver).values()} == {20})
        wait_for(lambda: outcomes(receiver) == expected)
        assert receiver.log.count(" to segment by ") == begun + 1
        assert receiver.stop() == 0

    out = receiver.folder / "out"
    assert scanloom("verify", out).code == 0
    logs = (path.read_text() for path in out.glob("runs/*/log.jsonl"))
    lines = [json.loads(line) for log in logs for line in log.splitlines()]
    assert sorted(line["remade"] for line in lines) == [False, False, False, True]
    assert "MAYBE_INCOMPLETE" not in str(cases(receiver))
    for text in (PATIENT, "CANARY-ID", study_of(late)):
        assert text not in receiver.log
    # a lost queue costs time only; what no process survived is not tried for ever
    gap = states(receiver.spool)[study_of(broken)]
    shutil.rmtree(receiver.spool / "queue")
    Queue(receiver.spool).write(study_of(broken), replace(gap, outcome="begun", attempts=8))
    published = {path: path.stat().st_ino for path in case_folders(out)}
    with listening(tmp_path / "site", **keys) as receiver:
        wait_for(lambda: outcomes(receiver) == expected)
        assert states(receiver.spool)[study_of(broken)].reason == "WORKER_LOST"
        receiver.stop()
    assert {path: path.stat().st_ino for path in case_folders(out)} == published
    # the last page shows how it ended, however soon after the last study
    page = (out / "listen" / "index.html").read_text()
    assert "<code>listen</code> ended at" in page
    assert ("WORKER_LOST" in page, ">in work</td>" in page) == (True, False)


def test_a_study_waits_for_what_its_sender_has_until_the_longest_wait(tmp_path: Path) -> None:
    """Told at once what is there; too few are flagged, and the flag goes with the late slices."""
    held, short = write_study(tmp_path, "held"), write_study(tmp_path, "short")
    workflow = write_workflow(tmp_path / "workflow")
    with query_service({study_of(held): 20, study_of(short): 20}) as port:
        ask = {"title": "PACS", "address": "127.0.0.1", "port": port}
        keys = {
            "peers": [{"title": "PYNETDICOM", "ask": ask}],
            "rules": [{"workflow": str(workflow)}],
            "quiet": "1 s",
            "longest_wait": "25 s",
            "cluster": "none",
        }
        with listening(tmp_path / "site", **keys) as receiver:
            send(receiver.port, held[:12])
            time.sleep(5)
            assert not outcomes(receiver)
            send(receiver.port, held[12:] + short[:12])
            wait_for(lambda: list(outcomes(receiver).values()) == ["done"] * 2)
            flags = {c["grid"]["shape"][2]: str(c["flags"]) for c in cases(receiver).values()}
            assert {size: "MAYBE_INCOMPLETE" in f for size, f in flags.items()} == {
                20: False,
                12: True,
            }
            send(receiver.port, short[12:])
            wait_for(lambda: {c["grid"]["shape"][2] for c in cases(receiver).values()} == {20})
            assert "MAYBE_INCOMPLETE" not in str(cases(receiver))
            assert receiver.stop() == 0


@contextmanager
def query_service(studies: dict[str, int]) -> Iterator[int]:
    """Yield the port of a C-FIND service of pynetdicom that has so many CT images of studies."""
    from pydicom import Dataset
    from pynetdicom import AE, evt

    def find(event: evt.Event) -> Iterator[tuple[int, Dataset]]:
        answer = Dataset()
        answer.QueryRetrieveLevel, answer.Modality = "SERIES", "CT"
        answer.StudyInstanceUID = event.identifier.StudyInstanceUID
        answer.SeriesInstanceUID = answer.StudyInstanceUID  # as `write_study` makes them
        answer.NumberOfSeriesRelatedInstances = studies[str(answer.StudyInstanceUID)]
        yield 0xFF00, answer

    entity = AE("PACS")
    entity.add_supported_context("1.2.840.10008.5.1.4.1.2.2.1")
    handlers = [(evt.EVT_C_FIND, find)]
    server = entity.start_server(("127.0.0.1", 0), block=False, evt_handlers=handlers)
    assert server is not None
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.thorough
def test_every_study_is_segmented_whatever_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receiver, worker, network, Dask's process and keeper, in turn, while studies are sent."""
    mark, chance = f"LISTENS={tmp_path}", random.Random(41)
    monkeypatch.setenv("LISTENS", str(tmp_path))
    scans, told = tmp_path / "scans", tmp_path / "told"
    for n, syntax in enumerate(SYNTAXES):
        (scans / syntax).mkdir(parents=True)
        for m in range(2):
            for path in write_study(tmp_path / "written", f"{syntax}{m}"):
                shutil.copy(path, scans / syntax / f"{n}{m}{path.name}")
    workflow = write_workflow(tmp_path / "workflow")
    port = free_port()
    keys = {"rules": [{"workflow": str(workflow)}], "quiet": "3 s", "port": port}
    command = [sys.executable, steady_sender.__file__, str(port), str(scans), "1", str(told)]
    parts = ["parts receiver", "parts worker", "worker.child_main", "spawn_main"]
    killed = Counter[str]()
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as sender:
        try:
            for _ in range(2):
                with listening(tmp_path / "site", **keys) as receiver:
                    for part in chance.sample(parts, len(parts)):
                        [process, *_] = wait_for(lambda part=part: running(mark, part))
                        time.sleep(chance.uniform(0, 4))
                        with suppress(ProcessLookupError):
                            os.kill(process, signal.SIGKILL)
                        killed[part] += 1
                    receiver.process.kill()
                    wait_for(lambda: not of_listen(mark))  # no orphan, by itself
            with listening(tmp_path / "site", **keys) as receiver:
                assert sender.wait(300) == 0
                wait_for(lambda: list(outcomes(receiver).values()) == ["done"] * 4, 300)
                assert receiver.stop() == 0
        finally:
            sender.kill()  # its end is waited for
    assert sorted(case["grid"]["shape"][2] for case in cases(receiver).values()) == [20] * 4
    assert scanloom("verify", receiver.folder / "out").code == 0
    assert not of_listen(mark)
    assert killed == dict.fromkeys(parts, 2)


def running(mark: str, part: str) -> list[int]:
    return [process for process, name in processes(mark).items() if part in name]


def of_listen(mark: str) -> list[str]:
    return [name for name in processes(mark).values() if "steady_sender" not in name]
