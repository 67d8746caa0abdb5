"""A file arrives whole and as published, or not at all, whatever the server does."""

from __future__ import annotations

import hashlib
import random
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from scanloom.convert.download import transfer
from scanloom.convert.download.transfer import Remote, fetch
from scanloom.convert.provenance import Digest
from scanloom.core import Reason, ScanError
from support.https_server import Page, Server

CONTENT = random.Random(0).randbytes(1_000_003)
SHA256 = Digest("sha256", hashlib.sha256(CONTENT).hexdigest())


def refusal(remote: Remote, target: Path, limit_bytes: int = 1 << 30) -> ScanError:
    with pytest.raises(ScanError) as caught:
        fetch(remote, target, limit_bytes)
    assert not target.exists()
    return caught.value


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def test_a_connection_broken_at_each_tenth_is_resumed(server: Server, target: Path) -> None:
    ends = [len(CONTENT) * n // 10 for n in range(1, 10)]
    server.pages["/w"] = Page(CONTENT, ends=ends.copy())

    fetch(Remote(f"{server.address}/w", SHA256), target)

    assert target.read_bytes() == CONTENT
    assert [requested for _, requested in server.log] == [None, *(f"bytes={end}-" for end in ends)]


def test_a_later_attempt_continues(
    server: Server, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten processes that lose their connection at one tenth each yield the file."""
    monkeypatch.setattr(transfer, "MAX_ATTEMPTS", 1)
    for n in range(1, 10):
        server.pages["/w"] = Page(CONTENT, ends=[len(CONTENT) * n // 10])
        assert refusal(Remote(f"{server.address}/w", SHA256), target).reason is Reason.DOWNLOAD

    fetch(Remote(f"{server.address}/w", SHA256), target)

    assert target.read_bytes() == CONTENT
    assert server.log[-1][1] == f"bytes={len(CONTENT) * 9 // 10}-"


def test_a_whole_file_whose_process_was_killed_is_not_requested_again(
    server: Server, target: Path
) -> None:
    """As while its checksum is compared, before it has its name."""
    server.pages["/w"] = Page(CONTENT)

    def kill(received: int, total: int | None) -> None:
        if received == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(Remote(f"{server.address}/w", SHA256), target, report=kill)
    assert not target.exists()

    fetch(Remote(f"{server.address}/w", SHA256), target)

    assert target.read_bytes() == CONTENT
    assert len(server.log) == 1


@pytest.mark.parametrize("digest", [SHA256, None])
@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_that_changes_meanwhile_starts_anew(
    server: Server, target: Path, ranges: bool, digest: Digest | None
) -> None:
    server.pages["/w"] = Page(bytes(2_000_000), tag='"0"', ends=[700_000])

    def changed(received: int, total: int | None) -> None:
        server.pages["/w"] = Page(CONTENT, ranges=ranges)

    fetch(Remote(f"{server.address}/w", digest), target, report=changed)

    assert target.read_bytes() == CONTENT


def test_a_server_that_ignores_if_range_is_not_trusted(server: Server, target: Path) -> None:
    """It sends the end of another version of the file."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        start = int((handler.headers.get("Range") or "bytes=0-")[6:-1])
        handler.send_response(206 if start else 200)
        handler.send_header("ETag", f'"{start}"')
        handler.send_header("Content-Length", str(len(CONTENT) - start))
        size = len(CONTENT)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        handler.end_headers()
        handler.wfile.write(CONTENT[start : None if len(server.log) > 2 else 1000])

    server.pages["/w"] = Page(reply=reply)

    fetch(Remote(f"{server.address}/w"), target)

    assert target.read_bytes() == CONTENT
    assert [requested for _, requested in server.log] == [None, "bytes=1000-", None]


def test_without_a_version_no_attempt_is_continued(server: Server, target: Path) -> None:
    server.pages["/w"] = Page(CONTENT, tag=None, ends=[500_000])

    fetch(Remote(f"{server.address}/w"), target)

    assert target.read_bytes() == CONTENT
    assert [requested for _, requested in server.log] == [None, None]


def test_a_file_that_became_shorter_starts_anew(server: Server, target: Path) -> None:
    server.pages["/w"] = Page(bytes(2_000_000), ends=[1_500_000])

    def changed(received: int, total: int | None) -> None:
        server.pages["/w"] = Page(CONTENT)  # of the same tag

    fetch(Remote(f"{server.address}/w", SHA256), target, report=changed)

    assert target.read_bytes() == CONTENT


def test_wrong_bytes_are_refused_and_discarded(server: Server, target: Path) -> None:
    server.pages["/w"] = Page(CONTENT[:-1] + b"?")

    assert refusal(Remote(f"{server.address}/w", SHA256), target).reason is Reason.MODEL_HASH
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("difference", [-1000, 1000])
def test_a_wrong_length_is_refused(server: Server, target: Path, difference: int) -> None:
    server.pages["/w"] = Page(CONTENT, length=len(CONTENT) + difference)

    error = refusal(Remote(f"{server.address}/w", SHA256), target)

    assert error.reason is (Reason.MODEL_HASH if difference < 0 else Reason.DOWNLOAD)


def test_another_size_than_the_published_one_is_refused(server: Server, target: Path) -> None:
    server.pages["/w"] = Page(CONTENT)

    error = refusal(Remote(f"{server.address}/w", size=17), target)

    assert error.detail == "the file has 1000003 bytes; 17 are published"


def test_a_missing_file_is_not_requested_again(server: Server, target: Path) -> None:
    error = refusal(Remote(f"{server.address}/none"), target)

    assert error.detail == "127.0.0.1 answers with status 404 (no such file)"
    assert len(server.log) == 1


def test_a_busy_server_is_asked_again(server: Server, target: Path) -> None:
    def busy(handler: BaseHTTPRequestHandler) -> None:
        server.pages["/w"] = Page(CONTENT)
        handler.send_error(503)

    server.pages["/w"] = Page(reply=busy)

    fetch(Remote(f"{server.address}/w"), target)

    assert target.read_bytes() == CONTENT


def redirect(goal: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", goal)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return reply


def test_a_redirect_to_https_is_followed_with_the_range(server: Server, target: Path) -> None:
    server.pages["/w"] = Page(reply=redirect("/elsewhere"))
    server.pages["/elsewhere"] = Page(CONTENT, ends=[500_000])

    fetch(Remote(f"{server.address}/w", SHA256), target)

    assert target.read_bytes() == CONTENT
    assert server.log[-1] == ("/elsewhere", "bytes=500000-")


@pytest.mark.parametrize(
    "goal", ["http://127.0.0.1/w", "file:///etc/passwd", "ftp://127.0.0.1/w", "https://u:p@h/w"]
)
def test_a_redirect_that_leaves_https_is_refused(server: Server, target: Path, goal: str) -> None:
    server.pages["/w"] = Page(reply=redirect(goal))

    assert refusal(Remote(f"{server.address}/w"), target).reason is Reason.DOWNLOAD


def test_redirects_in_a_circle_end(server: Server, target: Path) -> None:
    server.pages["/w"] = Page(reply=redirect("/w"))

    assert refusal(Remote(f"{server.address}/w"), target).reason is Reason.DOWNLOAD
    assert len(server.log) < 15


@pytest.mark.parametrize(
    "address",
    ["http://127.0.0.1/w", "file:///etc/passwd", "https://", "https://h/a b", "https://h:x/"],
)
def test_other_addresses_are_refused(target: Path, address: str) -> None:
    assert refusal(Remote(address), target).reason is Reason.DOWNLOAD


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
    for _ in range(1 << 14):
        handler.wfile.write(chunk)


def test_an_endless_body_is_cut(server: Server, target: Path) -> None:
    server.pages["/w"] = Page(reply=endless)

    error = refusal(Remote(f"{server.address}/w"), target, limit_bytes=3_000_000)

    assert error.reason is Reason.DOWNLOAD
    assert list(target.parent.iterdir()) == []


def test_a_body_without_a_length_is_refused(server: Server, target: Path) -> None:
    """Its end could not be told from a lost connection."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(CONTENT)

    server.pages["/w"] = Page(reply=reply)

    assert "length" in refusal(Remote(f"{server.address}/w"), target).detail
    fetch(Remote(f"{server.address}/w", SHA256), target)
    assert target.read_bytes() == CONTENT


def test_a_file_above_the_limit_is_refused_before_its_body(server: Server, target: Path) -> None:
    server.pages["/w"] = Page(CONTENT)
    received = []

    with pytest.raises(ScanError):
        fetch(Remote(f"{server.address}/w"), target, 1000, lambda *r: received.append(r))

    assert received == []


def test_a_server_that_stalls_is_given_up(
    server: Server, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "TIMEOUT_S", 0.2)
    server.pages["/w"] = Page(reply=lambda handler: time.sleep(5))

    assert "does not answer" in refusal(Remote(f"{server.address}/w"), target).detail


def test_an_unknown_certificate_is_not_trusted(
    server: Server, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    server.pages["/w"] = Page(CONTENT)

    assert "is not trusted" in refusal(Remote(f"{server.address}/w"), target).detail
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(server.certificate))
    fetch(Remote(f"{server.address}/w"), target)
    assert target.read_bytes() == CONTENT


def test_a_certificate_file_that_is_missing_is_named(
    server: Server, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(target))

    assert "SSL_CERT_FILE" in refusal(Remote(f"{server.address}/w"), target).detail


def test_a_proxy_of_the_environment_is_used(
    server: Server, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees the host alone: the connection through it is TLS from end to end."""
    seen = []
    listener = socket.create_server(("127.0.0.1", 0))

    def proxy() -> None:
        client, _ = listener.accept()
        with client, client.makefile("rb") as lines:
            seen.append(lines.readline().decode())
            while lines.readline().strip():
                pass
            client.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")

    threading.Thread(target=proxy, daemon=True).start()
    monkeypatch.setattr(transfer, "IDLE_ATTEMPTS", 1)
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setenv("NO_PROXY", "")

    error = refusal(Remote(f"{server.address}/secret"), target)

    listener.close()
    assert seen[0].startswith(f"CONNECT {server.address.removeprefix('https://')} ")
    assert "HTTPS_PROXY" in error.detail
    assert server.log == []


def test_a_full_disk_is_noticed_before_the_body(
    server: Server, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.pages["/w"] = Page(CONTENT)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda folder: usage)

    assert refusal(Remote(f"{server.address}/w"), target).reason is Reason.DISK_FULL
