"""`fetch` is killed again and again: nothing half is taken for whole, and it ends complete."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from scanloom.io.identity import read_key
from scanloom.io.output.audit import read_trail
from support.commands import scanloom
from support.dicom_source import (
    kept,
    objects_of,
    same_data,
    serving,
    write_page,
    write_studies,
)
from support.receivers import DEADLINE, data_set
from support.targets import free_port
from support.web_source import serving_web

pytest.importorskip("dicomweb_client")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*unclosed", "ignore:Exception ignored in"),
]
KILLS = 10


def killed(arguments: list[str], out: Path, more: int) -> None:
    """Kill a command once it has fetched some more objects, at the latest after a deadline."""
    before, until = len(kept(out)), time.monotonic() + DEADLINE
    process = subprocess.Popen(
        [sys.executable, "-m", "scanloom", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while len(kept(out)) < before + more and process.poll() is None:
            assert time.monotonic() < until, "nothing came"
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE)


@pytest.mark.parametrize("how", ["get", "move", "web"])
def test_ten_kills(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    files = write_studies(tmp_path / "studies", "A1", "A2", "A3", slices=20)
    sources = objects_of(files)
    out, port = tmp_path / "out", free_port()
    serve = serving_web(files) if how == "web" else serving(files, destinations={"MOVED": port})
    with serve as archive:
        source = {**archive.place, "per_second": 200}
        if how != "web":
            source |= {"retrieve": how, "destination": {"title": "MOVED", "port": port}}
        page = write_page(tmp_path, source)
        options = ["fetch", "--from", "pacs", "--site", page, "--date", "2026-01-02", "-o", out]
        arguments = [*map(str, options)]
        for n in range(KILLS):
            killed(arguments, out, 1 + n % 5)
            for uid, path in kept(out).items():
                assert data_set(path) == data_set(sources[uid])
        there = len(kept(out))
        assert there < len(files)
        ended = scanloom(*arguments, "--json")

    assert ended.code == 0, ended.err
    assert ended.document["new"] == len(files) - there
    assert same_data(files, kept(out))
    assert not list((out / "private/fetched/incoming").iterdir())
    told = Counter(line["event"] for line in read_trail(out, read_key()))
    assert told["asked"] >= KILLS  # one may have been killed before
    assert told["fetched"] >= 3


@pytest.mark.parametrize("how", ["get", "move", "web"])
def test_ctrl_c_ends_it_soon(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a series, whose objects are taken slowly."""
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))
    files = write_studies(tmp_path / "studies", "A1", slices=20)
    out, port = tmp_path / "out", free_port()
    serve = serving_web(files) if how == "web" else serving(files, destinations={"MOVED": port})
    with serve as archive:
        source = {**archive.place, "per_second": 1}
        if how != "web":
            source |= {"retrieve": how, "destination": {"title": "MOVED", "port": port}}
        page = write_page(tmp_path, source)
        options = ["fetch", "--from", "pacs", "--site", page, "--date", "2026-01-02", "-o", out]
        process = subprocess.Popen(
            [sys.executable, "-m", "scanloom", *map(str, options)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            until = time.monotonic() + DEADLINE
            while not kept(out) and time.monotonic() < until:
                time.sleep(0.05)
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
            process.wait(DEADLINE)

    assert process.returncode == 130, err
    assert time.monotonic() - began < 12
    assert "To resume:" in err
    assert 0 < len(kept(out)) < 20
    assert (out / "private/fetched/fetched.csv").exists()
