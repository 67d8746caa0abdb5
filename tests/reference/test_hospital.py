"""Orthanc sends studies, `listen` segments them, another Orthanc gets and commits the results."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from pathlib import Path

import pytest
from pydicom import dcmread
from pydicom.filebase import DicomBytesIO

from scanloom.engine.listen.outbox import Outbox, outbox_folder
from scanloom.io.identity import read_key
from scanloom.io.output.audit import read_trail
from stress.kill_listen import kill_all
from support.commands import scanloom
from support.listeners import states, wait_for, write_study, write_workflow
from support.orthanc import Orthanc, running_orthanc
from support.receivers import DEADLINE, dcmtk, listening, send
from support.targets import free_port, objects_of

pytest.importorskip("pynetdicom")
pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore:.*unclosed")]

STUDIES = 6


def upload(server: Orthanc, files: list[Path]) -> str:
    """Store a study; return Orthanc's name of it."""
    answers = [json.loads(server.get("instances", path.read_bytes())) for path in files]
    return str(answers[0]["ParentStudy"])


def test_studies_go_in_and_results_come_back(tmp_path: Path) -> None:
    """By two senders at once, shuffled and doubled; each result is there once, and committed."""
    studies = [write_study(tmp_path, f"study {number}") for number in range(STUDIES)]
    workflow = write_workflow(tmp_path / "workflow", outputs={"also": ["sr", "rtstruct"]})
    port = free_port()
    us = {"SCANLOOM": ("SCANLOOM", "127.0.0.1", port)}
    with (
        running_orthanc(tmp_path / "pacs", **us) as pacs,
        running_orthanc(tmp_path / "archive", **us) as archive,
    ):
        target = {"name": "archive", "title": "ORTHANC", "address": "127.0.0.1"}
        asked = {"title": "ORTHANC", "address": "127.0.0.1", "port": pacs.port}
        keys = {
            "port": port,
            "peers": [{"title": "ORTHANC", "ask": asked}, {"title": "PYNETDICOM"}],
            "rules": [{"workflow": str(workflow), "send": "archive"}],
            "targets": [{**target, "port": archive.port, "commitment": "yes", "retry": 0.2}],
            "quiet": "8 s",
            "cluster": "none",
        }
        names = [upload(pacs, files) for files in studies[1:]]
        with listening(tmp_path / "site", **keys) as receiver:
            other = threading.Thread(
                target=send, args=(port, studies[0][::-1] + studies[1]), daemon=True
            )
            other.start()
            for name in (*names, names[0]):  # the first one twice
                pacs.get("modalities/SCANLOOM/store", name.encode())
            other.join(DEADLINE)
            out = receiver.folder / "out"
            done = ["done"] * STUDIES
            wait_for(lambda: [each.outcome for each in states(receiver.spool).values()] == done)
            wait_for(lambda: len(archive.stored()) == 3 * STUDIES)
            wait_for(lambda: not Outbox(outbox_folder(out)).open_lines())
            assert receiver.stop() == 0
        kept = archive.stored()

    sent = objects_of(*(out / "cases").iterdir())
    assert sent.keys() == kept.keys()
    assert all(dcmread(DicomBytesIO(kept[uid])) == dcmread(path) for uid, path in sent.items())
    lines = list(Outbox(outbox_folder(out)).delivered_lines())
    assert Counter(line.proof for line in lines) == {"committed": 3 * STUDIES}
    assert "archive" in (out / "listen" / "index.html").read_text()
    open_files = [
        path
        for path in (*out.rglob("*"), receiver.folder / "log", receiver.folder / "errors")
        if path.is_file()
        and not {"private", "dicom"} & set(path.relative_to(receiver.folder).parts)
    ]
    assert len(open_files) > 10 * STUDIES
    for path in open_files:
        assert not re.search(b"CANARY|2\\.25\\.\\d{9}|1\\.2\\.826\\.0", path.read_bytes()), path
    told = Counter(line["event"] for line in read_trail(out, read_key()))
    assert told == {"received": STUDIES, "segmented": STUDIES, "sent": 3 * STUDIES}
    ended = scanloom("verify", out)
    assert ended.code == 0, ended.out


def test_nothing_is_lost_whatever_is_killed(tmp_path: Path) -> None:
    """The smallest form of `stress/kill_listen.py`: each process is killed once."""
    dcmtk("storescu")
    counts = kill_all(tmp_path / "proof", count=4, kills=1, seed=41, cluster="none")
    victims = ("receiver", "worker", "sender", "archive", "delivery", "network", "keeper")
    assert {counts[name] for name in victims} == {1}
    assert counts["in B"] >= 3 * 4
    assert counts["journal: changed"]
