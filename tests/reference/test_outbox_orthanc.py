"""Results of a real CT are sent to Orthanc: committed, found, or by DICOMweb; the same bytes."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from pydicom import dcmread
from pydicom.filebase import DicomBytesIO

from scanloom.engine.listen.outbox import Outbox, outbox_folder
from support.commands import scanloom, scanloom_forked
from support.listeners import wait_for
from support.orthanc import Orthanc, running_orthanc
from support.real_scans import scans
from support.receivers import listening
from support.targets import free_port, objects_of, site_of, wait_until_settled, write_case

pytest.importorskip("dicomweb_client")
pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore:.*unclosed")]
SHORT = {"patience": 20, "retry": 0.2, "report_within": 10}


@pytest.fixture(scope="module")
def segmented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of a real CT: SEG, SR and RTSTRUCT, and a Label Map."""
    out = tmp_path_factory.mktemp("segmented") / "out"
    scan = scans("ct/crlm1004_abdomen_dicom")
    extra = ["--also", "sr,rtstruct", "--seg", "labelmap"]
    ended = scanloom_forked("segment", scan, "-m", "ct_tissue", "-o", out, *extra)
    assert ended.code == 0, ended.err
    return out


def send(out: Path, page: Path) -> tuple[int, str]:
    ended = scanloom("send", out, "--to", "pacs", "--site", page / "site.yaml", "-v")
    return ended.code, ended.out + ended.err


def assert_same_bytes(server: Orthanc, out: Path) -> None:
    """Each object is there once, with the data set of its file."""
    sent, kept = objects_of(*(out / "cases").iterdir()), server.stored()
    assert sent.keys() == kept.keys()
    assert len(sent) == 3
    for uid, path in sent.items():
        ours, theirs = dcmread(path), dcmread(DicomBytesIO(kept[uid]))
        assert theirs.file_meta.TransferSyntaxUID == ours.file_meta.TransferSyntaxUID
        assert theirs == ours


def test_orthanc_commits(segmented: Path, tmp_path: Path) -> None:
    """Reports come to the port of the command; sending twice changes nothing."""
    port = free_port()
    with running_orthanc(tmp_path / "o", SCANLOOM=("SCANLOOM", "127.0.0.1", port)) as server:
        place = {"name": "pacs", "title": "ORTHANC", "address": "127.0.0.1", "port": server.port}
        site_of(tmp_path, [{**place, **SHORT, "commitment": "yes"}], port=port)
        first, second = send(segmented, tmp_path), send(segmented, tmp_path)
        assert_same_bytes(server, segmented)
    assert (first[0], second[0]) == (0, 0), first[1] + second[1]
    assert first[1].count("delivered (committed)") == 3


def test_orthanc_that_does_not_know_us_is_asked(segmented: Path, tmp_path: Path) -> None:
    """It ends an association in which an unknown title asks for commitment."""
    with running_orthanc(tmp_path / "o") as server:
        place = {"name": "found", "title": "ORTHANC", "address": "127.0.0.1", "port": server.port}
        site_of(tmp_path, [{**place, **SHORT}])
        page = tmp_path / "site.yaml"
        ended = scanloom("send", segmented, "--to", "found", "--site", page)
        assert_same_bytes(server, segmented)
    assert ended.code == 0, ended.err
    assert ended.out.count("delivered (found when asked)") == 3


def test_orthanc_by_dicomweb(segmented: Path, tmp_path: Path) -> None:
    """With a wrong password nothing is sent; the log and the page hold none."""
    secret = tmp_path / "secret"
    secret.write_text("lab:wrong")
    secret.chmod(0o600)
    with running_orthanc(tmp_path / "o") as server:
        keys = {"name": "web", "url": server.web, "credentials": {"file": "secret"}}
        site_of(tmp_path, [{**keys, **SHORT, "retry": 300}])
        command = ["send", segmented, "--to", "web", "--site", tmp_path / "site.yaml", "-v"]
        wrong = scanloom(*command)
        assert not server.stored()
        secret.write_text(f"{server.user}:{server.password}\n")
        right = scanloom(*command)
        assert_same_bytes(server, segmented)
    assert (wrong.code, right.code) == (1, 0)
    assert "it does not take our credentials (HTTP 401)" in wrong.out
    assert right.out.count("delivered (found when asked)") == 3
    assert "lab" not in wrong.out + wrong.err + right.out + right.err


def test_orthanc_refuses_junk(tmp_path: Path) -> None:
    from scanloom.io.network.peer import RefusedError
    from scanloom.io.network.sender import Reference, WebPeer

    junk = tmp_path / "junk.dcm"
    junk.write_bytes(os.urandom(2000))
    with running_orthanc(tmp_path / "o") as server:
        with WebPeer(server.web, f"{server.user}:{server.password}", None, 10) as peer:
            reference = Reference("1.2", "1.2.3", "1.2.4", "1.2.5", "1.2", 2000)
            with pytest.raises(RefusedError, match="HTTP 400"):
                peer.store(reference, junk)
            assert not peer.find(reference)
        assert not server.stored()


def test_two_orthancs_one_of_which_comes_late(tmp_path: Path) -> None:
    """`listen` sends to both; the second is started while the first has everything."""
    port, folder = free_port(), tmp_path / "site"
    out = folder / "out"
    cases = [write_case(out, f"case{n}") for n in range(4)]
    known = {"SCANLOOM": ("SCANLOOM", "127.0.0.1", port)}
    with running_orthanc(tmp_path / "o", **known) as first:
        late = free_port()
        targets = [
            {"name": name, "title": "ORTHANC", "address": "127.0.0.1", "port": number, **SHORT}
            for name, number in (("first", first.port), ("late", late))
        ]
        outbox = Outbox(outbox_folder(out))
        for case in cases:
            for name in ("first", "late"):
                outbox.add(case, name)
        with listening(folder, port=port, targets=targets) as receiver:
            wait_until_settled(outbox, target="first")
            wait_for(lambda: outbox.trouble("late").tries)
            assert outbox.trouble("late").reason == "it can't be reached"
            assert first.stored().keys() == objects_of(*cases).keys()
            with running_orthanc(tmp_path / "late", at=late, **known) as second:
                wait_until_settled(outbox)
                assert second.stored().keys() == objects_of(*cases).keys()
            assert receiver.stop() == 0
    proofs = Counter((line.target, line.proof) for line in outbox.delivered_lines())
    assert proofs == {("first", "committed"): 12, ("late", "committed"): 12}
