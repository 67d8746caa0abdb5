"""Real series come from Orthanc and DCMTK's archive as their files are, and a run follows."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydicom import Dataset, dcmread

from support.commands import scanloom, scanloom_forked
from support.dicom_source import kept, objects_of, syntax, write_page
from support.listeners import wait_for
from support.orthanc import running_orthanc
from support.real_scans import scans
from support.receivers import DEADLINE, dcmtk
from support.targets import free_port

pytest.importorskip("dicomweb_client")
pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("ignore:.*unclosed", "ignore:Exception ignored in", "ignore:The va"),
]
SERIES = (
    "ct/crlm1004_abdomen_dicom",
    "compressed_series/sts002_jpegls",
    "compressed_series/d2n_j2k_a",
    "enhanced/siemens_multiframe_t1",
)
SHORT = {"patience": 20, "retry": 0.2}


def files_of(name: str) -> list[Path]:
    """Return the DICOM files of a real series."""
    paths = [path for path in scans(name).rglob("*") if path.is_file()]
    return [path for path in paths if path.read_bytes()[128:132] == b"DICM"]


def plain(path: Path) -> Dataset:
    """Return a data set without the lengths of groups and the padding, which DCMTK leaves out."""
    ds = dcmread(path)
    for element in list(ds):
        if element.tag.element == 0 or element.tag == 0xFFFCFFFC:
            del ds[element.tag]
    return ds


def values(ds: Dataset) -> dict[int, Any]:
    """Return all values; the VR of encapsulated pixels may be corrected on the way."""
    return {int(element.tag): element.value for element in ds}


def assert_same(files: list[Path], out: Path) -> None:
    """Every element of each file is there, in the syntax of the file; pixels byte by byte."""
    sources, fetched = objects_of(files), kept(out)
    assert sources.keys() == fetched.keys()
    for uid, path in sources.items():
        ours, theirs = plain(fetched[uid]), plain(path)
        assert syntax(fetched[uid]) == syntax(path)
        assert values(ours) == values(theirs)
        assert ours.get("PixelData") == theirs.get("PixelData")


@pytest.fixture(autouse=True)
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))


def test_real_series_from_orthanc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By C-GET, C-MOVE and WADO-RS; a second call asks for nothing."""
    # some series are one, compressed in several ways: an object once
    files = list(objects_of([path for name in SERIES for path in files_of(name)]).values())
    assert len({syntax(path) for path in files}) == 3
    port = free_port()
    with running_orthanc(tmp_path / "o", SCANLOOM=("SCANLOOM", "127.0.0.1", port)) as server:
        for path in files:
            server.get("instances", path.read_bytes())
        monkeypatch.setenv("LAB", f"{server.user}:{server.password}")
        node = {"title": "ORTHANC", "address": "127.0.0.1", "port": server.port, **SHORT}
        web = {"url": server.web, "credentials": {"variable": "LAB"}, **SHORT}
        sources = {"get": node | {"retrieve": "get"}, "move": node | {"retrieve": "move"}}
        for how, source in (sources | {"web": web}).items():
            page = write_page(tmp_path, {"name": how, **source}, port=port)
            command = ["fetch", "--from", how, "--site", page, "-o", tmp_path / how]
            began = time.monotonic()
            first = scanloom(*command, "--date", "1990-01-01..")
            print(f"{how}: {len(files)} objects in {time.monotonic() - began:.1f} s")
            assert first.code == 0, first.err
            assert_same(files, tmp_path / how)
            again = scanloom(*command, "--date", "1990-01-01..", "--json")
            assert (again.code, again.document["new"]) == (0, 0)
    for uid, path in objects_of(files).items():  # of DICOMweb the very file
        assert kept(tmp_path / "web")[uid].read_bytes() == path.read_bytes()


def test_a_run_fetches_first(tmp_path: Path) -> None:
    """One row is there, the other is not: exit code 1, and one result."""
    files = files_of("ct/crlm1004_abdomen_dicom")
    table = tmp_path / "wanted.csv"
    table.write_text(f"study_uid\n{dcmread(files[0]).StudyInstanceUID}\n1.2.3\n")
    known = {"SCANLOOM": ("SCANLOOM", "127.0.0.1", free_port())}
    with running_orthanc(tmp_path / "o", **known) as server:
        for path in files:
            server.get("instances", path.read_bytes())
        node = {"title": "ORTHANC", "address": "127.0.0.1", "port": server.port, **SHORT}
        page = write_page(tmp_path, {"name": "pacs", **node})
        source = ("--from", "pacs", "--site", page, "--table", table)
        out = ("-o", tmp_path / "out", "--cluster", "none")
        ended = scanloom_forked("run", "ct_tissue", *source, *out, deadline=400)

    assert ended.code == 1, ended.err
    assert "row 2: the source has nothing that matches (NO_MATCH)" in ended.err
    assert len(list((tmp_path / "out" / "cases").iterdir())) == 1
    assert "CRLM" not in ended.out + ended.err


@contextlib.contextmanager
def dcmtk_archive(folder: Path, port: int, files: list[Path]) -> Iterator[int]:
    """Yield the port of DCMTK's archive with files, which may send to SCANLOOM."""
    program, indexer = dcmtk("dcmqrscp"), shutil.which("dcmqridx")
    if indexer is None:
        pytest.skip("dcmqridx of DCMTK is not installed")
    place, own = folder / "archive", free_port()
    place.mkdir(parents=True)
    for n, path in enumerate(files):
        shutil.copy(path, place / f"{n}.dcm")
    config = folder / "dcmqrscp.cfg"
    config.write_text(
        f"NetworkTCPPort = {own}\nMaxPDUSize = 16384\nMaxAssociations = 16\n"
        f"HostTable BEGIN\nus = (SCANLOOM, localhost, {port})\nHostTable END\n"
        "VendorTable BEGIN\nVendorTable END\n"
        f"AETable BEGIN\nARCHIVE {place} RW (200, 1024mb) ANY\nAETable END\n"
    )
    names = [str(place / f"{n}.dcm") for n in range(len(files))]
    subprocess.run([indexer, str(place), *names], check=True, capture_output=True, timeout=60)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [program, "-c", str(config)], stdout=log, stderr=log, env=dict(os.environ)
        )
    try:
        wait_for(partial(listens, own))
        yield own
    finally:
        process.kill()
        process.wait(DEADLINE)


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@pytest.mark.parametrize("how", ["get", "move"])
def test_real_series_from_another_archive(how: str, tmp_path: Path) -> None:
    files, port = files_of("ct/crlm1004_abdomen_dicom"), free_port()
    with dcmtk_archive(tmp_path / "dcmtk", port, files) as own:
        node = {"title": "ARCHIVE", "address": "127.0.0.1", "port": own, **SHORT}
        page = write_page(tmp_path, {"name": "pacs", "retrieve": how, **node}, port=port)
        command = ("fetch", "--from", "pacs", "--site", page, "-o", tmp_path / "out")
        ended = scanloom(*command, "--date", "1990-01-01..", "-v")

    assert ended.code == 0, ended.err
    assert_same(files, tmp_path / "out")
