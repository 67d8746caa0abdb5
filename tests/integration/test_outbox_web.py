"""Results are sent by STOW-RS: what a server answers is never taken for more than it says."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from scanloom.engine.listen.delivery import deliver
from scanloom.engine.listen.outbox import Line, Outbox, outbox_folder
from scanloom.io.network.peer import (
    NotOfferedError,
    PeerError,
    RefusedError,
    UnreachableError,
)
from scanloom.io.network.sender import Reference, WebPeer
from support.commands import scanloom
from support.dicom_target import SEG
from support.receivers import DEADLINE
from support.targets import objects_of, site_of, wait_until_settled, write_case

pytest.importorskip("dicomweb_client")
UID = "1.2.826.0.1.3680043.8.498.7"
REFERENCE = Reference(SEG, UID, UID + ".1", UID + ".2", "1.2.840.10008.1.2.1", 2000)


def items(sequence: str, uid: str = UID, reason: int | None = None) -> dict[str, Any]:
    """Return a response of STOW-RS that names one object."""
    item: dict[str, Any] = {"00081155": {"vr": "UI", "Value": [uid]}}
    if reason is not None:
        item["00081197"] = {"vr": "US", "Value": [reason]}
    return {sequence: {"vr": "SQ", "Value": [item]}}


REFERENCED, FAILED = "00081199", "00081198"
STORED = items(REFERENCED)
NOTHING = {FAILED: {"vr": "SQ"}}
"""What Orthanc says with status 200 to a request without any object."""


class Server(ThreadingHTTPServer):
    """Answers each POST and GET with a status and a document; the bodies it got are kept."""

    post: tuple[int, Any] = (200, STORED)
    get: tuple[int, Any] = (200, [])
    drips = 0.0
    kind = "application/dicom+json"
    headers: dict[str, str]
    bodies: list[bytes]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def answer(self, status: int, document: Any) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", self.server.kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            for n in range(len(content) if self.server.drips else 0):
                self.wfile.write(content[n : n + 1])
                time.sleep(self.server.drips)
            self.wfile.write(b"" if self.server.drips else content)

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        self.server.headers_got = self.headers
        self.answer(*self.server.post)

    def do_GET(self) -> None:
        self.answer(*self.server.get)

    def log_message(self, *words: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), Handler)
    made.headers, made.bodies = {}, []
    thread = threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join(DEADLINE)


def peer_of(server: Server, credentials: str | None = None, patience: float = 5) -> WebPeer:
    return WebPeer(f"http://127.0.0.1:{server.server_address[1]}/web", credentials, None, patience)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "object.dcm"
    path.write_bytes(bytes(range(256)) * 8)
    return path


def test_the_bytes_of_the_file_are_sent_with_credentials(server: Server, file: Path) -> None:
    with peer_of(server, "user:pass:word") as peer:
        peer.store(REFERENCE, file)
    assert server.bodies[0].count(file.read_bytes()) == 1
    headers = server.headers_got
    assert headers["Authorization"] == "Basic dXNlcjpwYXNzOndvcmQ="
    assert headers["Host"] == f"127.0.0.1:{server.server_address[1]}"
    with peer_of(server, "Bearer abc") as peer:
        peer.store(REFERENCE, file)
    assert server.headers_got["Authorization"] == "Bearer abc"


@pytest.mark.parametrize(
    ("answer", "error", "reason", "final"),
    [
        ((200, {}), RefusedError, "did not say that it stored", False),
        ((200, NOTHING), RefusedError, "did not say that it stored", False),
        ((200, items(REFERENCED, "1.2.3")), RefusedError, "did not say that it stored", False),
        ((200, items(FAILED, reason=0x0110)), RefusedError, "processing failed", False),
        ((202, items(FAILED, reason=0x0122)), RefusedError, "does not keep objects of", True),
        ((409, items(FAILED, reason=0x0122)), RefusedError, "does not keep objects of", True),
        ((400, {}), RefusedError, "HTTP 400", False),
        ((500, "PATIENT^NAME"), RefusedError, "HTTP 500", False),
        ((413, {}), RefusedError, "HTTP 413", True),
        ((401, {}), UnreachableError, "does not take our credentials", False),
        ((404, {}), UnreachableError, "takes no objects at this address", False),
        ((503, {}), UnreachableError, "too much to do", False),
        ((409, items(FAILED, reason=0xA700)), RefusedError, "no room (reason A700)", False),
        ((200, "[not a data set"), RefusedError, "can't be read", False),
        ((200, "endless" * 1000), RefusedError, "its answer has no end", False),
    ],
)
def test_answers_to_an_object(
    answer: tuple[int, Any],
    error: type[PeerError],
    reason: str,
    final: bool,
    server: Server,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scanloom.io.network.sender.WebPeer.max_answer_bytes", 5000)
    server.post = answer
    with peer_of(server) as peer, pytest.raises(error) as refused:
        peer.store(REFERENCE, file)
    assert reason in refused.value.reason
    assert refused.value.final is final
    assert refused.value.busy == (error is UnreachableError or "no room" in reason)
    assert "PATIENT" not in refused.value.reason


@pytest.mark.parametrize("kind", ["application/dicom+json; charset=utf-8", "Application/JSON"])
def test_an_answer_may_name_its_character_set(kind: str, server: Server, file: Path) -> None:
    server.kind, server.get = kind, (200, [{"00080018": {"vr": "UI", "Value": [UID]}}])
    with peer_of(server) as peer:
        peer.store(REFERENCE, file)
        assert peer.find(REFERENCE)


def test_an_object_that_is_there_already_is_no_failure(server: Server, file: Path) -> None:
    server.post = (200, items(FAILED, reason=0x0111))
    with peer_of(server) as peer:
        peer.store(REFERENCE, file)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ((200, [{"00080018": {"vr": "UI", "Value": [UID]}}]), True),
        ((200, [{"00080018": {"vr": "UI", "Value": ["1.2.3"]}}]), False),
        ((200, []), False),
        ((204, []), False),
        ((404, {}), False),
        ((405, {}), NotOfferedError),
        ((502, {}), UnreachableError),
        ((200, ["x"]), RefusedError),
    ],
)
def test_answers_to_a_question(
    answer: tuple[int, Any], found: bool | type[PeerError], server: Server
) -> None:
    server.get = answer
    with peer_of(server) as peer:
        if isinstance(found, bool):
            assert peer.find(REFERENCE) is found
        else:
            with pytest.raises(found):
                peer.find(REFERENCE)


def test_objects_go_to_no_other_address(server: Server, file: Path) -> None:
    server.headers, server.post = {"Location": "http://127.0.0.1:1/"}, (307, {})
    with peer_of(server) as peer, pytest.raises(UnreachableError, match="redirects"):
        peer.store(REFERENCE, file)


@pytest.mark.parametrize(("pause", "patience"), [(0.2, 1.0), (1.0, 0.3)], ids=["all", "a byte"])
def test_a_server_that_drips_is_left(
    pause: float, patience: float, server: Server, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole answer takes too long, or one byte of it."""
    monkeypatch.setattr("scanloom.io.network.peer.GRACE_S", 0.5)
    server.drips, begun = pause, time.monotonic()
    with (
        peer_of(server, patience=patience) as peer,
        pytest.raises(UnreachableError, match="did not answer within"),
    ):
        peer.store(REFERENCE, file)
    assert time.monotonic() - begun < 20  # the whole takes longer


@pytest.mark.parametrize(("queries", "proof"), [(200, "found"), (501, "acknowledged")])
def test_objects_of_a_case_are_delivered(
    queries: int, proof: str, server: Server, tmp_path: Path
) -> None:
    case = write_case(tmp_path / "out", "caseone", {"segmentation": SEG})
    (uid,) = objects_of(case)
    server.post = (200, items(REFERENCED, uid))
    server.get = (queries, [{"00080018": {"vr": "UI", "Value": [uid]}}])
    url = f"http://127.0.0.1:{server.server_address[1]}/web"
    site = site_of(tmp_path, [{"name": "web", "url": url, "patience": 30, "retry": 0.2}])
    outbox, end = Outbox(outbox_folder(tmp_path / "out")), threading.Event()
    outbox.add(case, "web")
    thread = threading.Thread(target=deliver, args=(site, outbox, end), daemon=True)
    thread.start()
    try:
        wait_until_settled(outbox)
    finally:
        end.set()
        thread.join(DEADLINE)
    (line,) = outbox.delivered_lines()
    assert isinstance(line, Line)
    assert line.proof == proof


def test_a_wrong_address_is_no_fault_of_the_objects(server: Server, tmp_path: Path) -> None:
    """All results of a night were given up after 15 minutes."""
    server.post = server.get = (404, {})
    case = write_case(tmp_path / "out", "caseone", {"segmentation": SEG})
    url = f"http://127.0.0.1:{server.server_address[1]}/wrong"
    site = site_of(tmp_path, [{"name": "web", "url": url, "patience": 5, "retry": 0.01}])
    outbox, tries = Outbox(outbox_folder(tmp_path / "out")), 0
    (line,) = outbox.add(case, "web")

    def is_done() -> bool:
        nonlocal tries
        tries += 1
        return tries > 12 or not outbox.open_lines()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("scanloom.engine.listen.delivery.TICK_S", 0.2)
        deliver(site, outbox, threading.Event(), is_done)

    now = Outbox(outbox.folder).current(line)
    assert now is not None
    assert (now.state, now.refusals) == ("waiting", 0)
    assert now.awaited > 0
    assert now.reason == "it takes no objects at this address (HTTP 404)"


# --- what the page names has to be there ---------------------------------------------------------


def send(tmp_path: Path, credentials: dict[str, str] | None = None, **keys: str) -> tuple[int, str]:
    write_case(tmp_path / "out", "caseone", {"segmentation": SEG})
    keys = {"name": "web", "url": "http://127.0.0.1:1/web"} | keys
    site_of(tmp_path, [keys | ({"credentials": credentials} if credentials else {})])
    page = tmp_path / "site.yaml"
    ended = scanloom("send", tmp_path / "out", "--to", "web", "--site", page, "--wait", "1")
    return ended.code, ended.err


def test_without_dicomweb_client_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dicomweb_client", None)
    code, err = send(tmp_path)
    assert code == 1
    assert "pip install 'scanloom[hospital]'" in err
    assert not list((outbox_folder(tmp_path / "out") / "waiting").iterdir())


@pytest.mark.parametrize(
    ("mode", "content", "message"),
    [
        (0o644, "u:p", "can be read by others: chmod 600"),
        (0o600, "nothing", "the file of a peer's credentials holds no `user:password`"),
        (0o600, "u:p\nu:q", "the file of a peer's credentials holds no `user:password`"),
        (None, "", "the file of a peer's credentials can't be read (FileNotFoundError)"),
    ],
)
def test_credentials_of_a_file(
    mode: int | None, content: str, message: str, tmp_path: Path
) -> None:
    if mode is not None:
        (tmp_path / "secret").write_text(content)
        (tmp_path / "secret").chmod(mode)
    code, err = send(tmp_path, {"file": "secret"})
    assert code == 1
    assert message in err
    assert "u:p" not in err


def test_authorities_that_cannot_be_read(tmp_path: Path) -> None:
    code, err = send(tmp_path, authorities="nope.pem")
    assert code == 1
    assert "a certificate of a peer, or its key, can't be read (FileNotFoundError)" in err


def test_credentials_of_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACS_SECRET", raising=False)
    code, err = send(tmp_path, {"variable": "PACS_SECRET"})
    assert code == 1
    assert "the variable PACS_SECRET of a peer's credentials holds no `user:password`" in err
