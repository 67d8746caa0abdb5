"""What `scanloom listen` acknowledged is there after any kill, and after the disk was full."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import psutil
import pytest
from pydicom import dcmread

from support import full_spool, steady_sender
from support.faults import on_small_disk
from support.listeners import wait_for
from support.real_scans import ROOT
from support.receivers import DEADLINE, data_set, listening, read_journal
from support.steady_sender import SYNTAXES
from support.targets import free_port
from support.write_dicom import Coding, Words, noise, write_series

pytest.importorskip("pynetdicom")
pytestmark = pytest.mark.slow

KILLS = 20
SENDERS = 4


def stop_in_a_data_set(receiver: int, incoming: Path) -> None:
    """Stop a process while it has a data set; let it go on after a time without any."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if any(incoming.iterdir()):
            os.kill(receiver, signal.SIGSTOP)
            wait_for(lambda: psutil.Process(receiver).status() == psutil.STATUS_STOPPED)
            if any(incoming.iterdir()):
                return
            os.kill(receiver, signal.SIGCONT)


def test_what_was_acknowledged_survives_20_kills(tmp_path: Path) -> None:
    """Four senders at once; the spool then holds the bytes of all files, and nothing else."""
    scans, chance = tmp_path / "scans", random.Random(41)
    for name, syntax in SYNTAXES.items():
        words = Words(name=name, study="kills")
        pixels = noise((256, 256, 40), seed=len(name))
        write_series(scans / name, pixels, coding=Coding(syntax=syntax), words=words)
    sent = {str(dcmread(path).SOPInstanceUID): path for path in scans.glob("*/*")}
    port = free_port()
    told = [tmp_path / f"told {n}" for n in range(SENDERS)]
    arguments = [[str(port), str(scans), str(n), str(file)] for n, file in enumerate(told)]
    command = [sys.executable, steady_sender.__file__]
    senders = [subprocess.Popen([*command, *each], stderr=subprocess.DEVNULL) for each in arguments]
    moments = Counter[str]()
    try:
        for kill in range(KILLS + 1):
            with listening(tmp_path / "site", port=port) as receiver:
                assert not list((receiver.spool / "incoming").iterdir())
                if kill == KILLS:  # the rest
                    assert [sender.wait(400) for sender in senders] == [0] * SENDERS
                    break
                count = sum(len(acknowledged(file)) for file in told)
                wait_for(partial(takes_two_more, told, count, senders))
                time.sleep(chance.uniform(0.0, 0.8))
                incoming = receiver.spool / "incoming"
                if kill % 2:  # every second one in a data set
                    stop_in_a_data_set(receiver.process.pid, incoming)
                receiver.process.kill()
                receiver.process.wait(60)
                half = any(incoming.iterdir())
                moments["in a data set" if half else "between two"] += 1
                time.sleep(0.1)  # an answer may be on its way
                stored = receiver.stored()
                moments["stored"] += sum(len(acknowledged(file)) for file in told) - count
                for path in set().union(*map(acknowledged, told)):
                    kept = stored[
                        str(dcmread(path, specific_tags=["SOPInstanceUID"]).SOPInstanceUID)
                    ]
                    assert kept.stat().st_size > path.stat().st_size - 300
                for uid, path in stored.items():
                    assert data_set(path) == data_set(sent[uid]), "half a file"
    finally:
        for sender in senders:
            sender.kill()
            sender.wait(DEADLINE)
    stored = receiver.stored()
    assert stored.keys() == sent.keys()
    for uid, path in stored.items():
        assert data_set(path) == data_set(sent[uid])
    # each file has its line, whenever the kill came
    assert stored.keys() == {arrival.instance for arrival in read_journal(receiver.spool)}
    assert moments["in a data set"] > 3, moments
    assert moments["stored"] > KILLS, moments


def takes_two_more(told: list[Path], count: int, senders: list[subprocess.Popen[bytes]]) -> bool:
    """Return whether two more files than `count` were acknowledged, or all were sent."""
    now = sum(len(acknowledged(file)) for file in told)
    return now > count + 1 or all(sender.poll() is not None for sender in senders)


def acknowledged(file: Path) -> set[Path]:
    """Return the files that a sender was told are stored; half a line at the end is none."""
    lines = file.read_text().split("\n") if file.exists() else [""]
    return set(map(Path, lines[:-1]))


FULL = """
mount -t tmpfs -o size=6m none "$1"
head -c $2 /dev/zero > "$1/filler"
PYTHONPATH="$3" "$4" "$5" "$1" "$6" "$7" 2>&1
"""


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path) -> None:
    """One that is larger than the disk, and many until the reserve is met; the rest later."""
    python = [str(ROOT / "tests"), sys.executable, full_spool.__file__]
    arguments = [tmp_path / "disk", str(4 << 20), *python, "1 MB", tmp_path / "series"]
    told = json.loads(on_small_disk(FULL, arguments).strip().splitlines()[-1])

    first = told["first"]
    assert told["larger"] == [0xA700]
    assert set(first) == {0, 0xA700}
    assert first == sorted(first)  # once there is no room, each one gets the answer
    assert told["stored"] == first.count(0)
    assert (told["whole"], told["incoming"], told["log"]) == (True, 0, False)
    assert (told["echoed"], told["rejected"]) == (False, 2)  # transient
    assert (set(told["again"]), told["code"]) == ({0}, 0)
