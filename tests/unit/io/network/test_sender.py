"""An association ends, whatever its threads do at that moment."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from pathlib import Path

import pytest
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

from support.dicom_target import SEG
from support.listeners import wait_for
from support.targets import running_target

pytest.importorskip("pynetdicom")

from scanloom.io.network import peer as peer_module
from scanloom.io.network.commitment import Report
from scanloom.io.network.peer import DicomAddress
from scanloom.io.network.sender import DicomPeer, Reference

pytestmark = pytest.mark.filterwarnings("ignore:.*unclosed")
REFERENCE = Reference(
    SEG, "1.2.826.0.1.7", "1.2.826.0.1.8", "1.2.826.0.1.9", ExplicitVRLittleEndian, 10
)


def test_a_report_that_is_being_answered_does_not_stop_the_release(tmp_path: Path) -> None:
    """The report's thread ends between the pause of pynetdicom's reactor and the look for it."""
    noted, paused, ended = (threading.Event() for _ in range(3))

    def note(report: Report) -> bool:
        noted.set()
        paused.wait(0.5)
        time.sleep(0.05)  # until the reactor waits
        return True

    def talk(port: int) -> None:
        address = DicomAddress("SCANLOOM", "TARGET", "127.0.0.1", port, patience=30)
        with DicomPeer(address, [REFERENCE], note) as peer:
            checkpoint = peer._made._reactor_checkpoint
            clear = checkpoint.clear

            def late() -> None:
                clear()
                if noted.is_set():
                    paused.set()
                    time.sleep(0.3)

            checkpoint.clear = late
            peer.request_commitment(generate_uid(), [REFERENCE])
            noted.wait(60)
        ended.set()

    with running_target(tmp_path, commit="same association") as target:
        threading.Thread(target=talk, args=(target.port,), daemon=True).start()
        assert ended.wait(120)
        wait_for(lambda: target.told("report"))
        assert target.told("report") == {"0": 1}  # it has got its answer


def test_a_request_begins_once_the_reactor_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have looked at the checkpoint just before that was cleared."""
    monkeypatch.setattr(peer_module, "PAUSE_S", 60.0)
    checkpoint, goes, steps = peer_module.ReactorCheckpoint(), threading.Event(), list[str]()

    def react() -> None:
        checkpoint.wait()
        goes.set()
        wait_for(lambda: not checkpoint._is_open)
        time.sleep(0.1)
        steps.append("looked for messages")
        checkpoint.wait()
        steps.append("goes on")

    thread = threading.Thread(target=react, daemon=True)
    thread.start()
    assert goes.wait(60)
    checkpoint.clear()
    steps.append("request")
    checkpoint.set()
    thread.join(60)
    assert steps == ["looked for messages", "request", "goes on"]


def test_an_answer_without_end_is_cut_off() -> None:
    """Its PDU says that it has a gigabyte: none of it is read."""
    sent = [0]

    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.settimeout(60)
            connection.recv(1 << 16)
            connection.sendall(b"\2\0" + (1 << 30).to_bytes(4, "big"))
            while True:
                sent[0] += connection.send(bytes(1 << 16))

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        port = server.getsockname()[1]
        address = DicomAddress("SCANLOOM", "TARGET", "127.0.0.1", port, patience=5)
        with pytest.raises(peer_module.UnreachableError):
            DicomPeer(address, [REFERENCE], lambda report: True).__enter__()
    assert sent[0] < 1 << 26


def test_a_connection_that_the_peer_ends_is_closed() -> None:
    def end(server: socket.socket) -> None:
        connection, _ = server.accept()
        connection.recv(1)  # of the request: earlier, the connection may not even be made
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()  # with a reset

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=end, args=(server,), daemon=True).start()
        port = server.getsockname()[1]
        address = DicomAddress("SCANLOOM", "TARGET", "127.0.0.1", port, patience=5)
        peer = DicomPeer(address, [REFERENCE], lambda report: True)
        with pytest.raises(peer_module.UnreachableError, match="answers no request"), peer:
            pass
    assert [connection.fileno() for connection in peer._connections] == [-1]


def test_a_connection_whose_tls_fails_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = peer_module._Tls(ssl.create_default_context()).wrap_socket(
            socket.socket(), server_hostname="localhost"
        )
        made.settimeout(0.2)  # the server says nothing
        with pytest.raises(OSError, match="timed out"):
            made.connect(server.getsockname())
        assert made.fileno() == -1


def test_a_request_ends_although_its_reactor_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_module, "GRACE_S", 0.2)
    monkeypatch.setattr(peer_module, "PAUSE_S", 0.1)
    errors, connections = list[Exception](), list[socket.socket]()

    def talk(port: int) -> None:
        address = DicomAddress("SCANLOOM", "TARGET", "127.0.0.1", port, patience=0.5)
        try:
            with DicomPeer(address, [REFERENCE], lambda report: True) as peer:
                connections.extend(peer._connections)
                peer._made._kill = True  # as its other thread does for a broken PDU
                peer._made.join(5)
                peer._made._is_paused = False
                peer.echo()
        except peer_module.UnreachableError as exc:
            errors.append(exc)

    with running_target(tmp_path) as target:
        thread = threading.Thread(target=talk, args=(target.port,), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    assert errors
    assert [connection.fileno() for connection in connections] == [-1]  # it is closed
