"""Clients that send slowly, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial

import httpx
import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scanloom.review.server.security import BACKLOG, Connection, Guard, Listener

SOON_S, LONG_S = 0.4, 60.0
BODY = b"x" * (8 << 20)
HEAD = b"POST /%d HTTP/1.1\r\nHost: %s\r\nOrigin: http://%s\r\nContent-Type: application/json\r\n"


LIMIT, LIMIT_PER_PEER = 40, 30
LOST, ASKED, ANSWERS = threading.Event(), threading.Event(), threading.Event()
"""A connection was lost; something was asked that is answered later, and is to be answered."""


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/later":
        ASKED.set()
        while not ANSWERS.is_set():
            await asyncio.sleep(0.01)
    await Response(BODY)(scope, receive, send)


@pytest.fixture
def address(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """A server with the guard and the connections of the review server; answers are large.

    It waits for a short time, or as long as a test says.
    """
    waits = getattr(request, "param", SOON_S)

    class Waiting(Connection):
        idle_seconds = waits

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            LOST.set()

    for event in (LOST, ASKED, ANSWERS):
        event.clear()
    listening = Listener(socket.AF_INET, LIMIT, LIMIT_PER_PEER)
    listening.bind(("127.0.0.1", 0))
    listening.listen(BACKLOG)
    host, port = listening.getsockname()
    guard = Guard(answer, (f"http://{host}:{port}",), body_seconds=waits)
    options = {"log_config": None, "lifespan": "off", "access_log": False, "backlog": BACKLOG}
    config = uvicorn.Config(guard, http=Waiting, loop="asyncio", **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=partial(server.run, sockets=[listening]))
    thread.start()
    try:
        yield host, port
    finally:
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()


def answered(client: socket.socket, pieces: Iterator[bytes]) -> bytes:
    """Send pieces in turn until the server closes the connection; return its answer."""
    client.settimeout(SOON_S / 10)
    received = bytearray()
    for piece in pieces:
        with contextlib.suppress(TimeoutError):
            try:
                client.sendall(piece)
                while chunk := client.recv(1 << 16):
                    received += chunk
            except ConnectionError:
                return bytes(received)
            return bytes(received)
    raise AssertionError("the connection stays open")


def trickle(begin: bytes, pieces: int = 2000) -> Iterator[bytes]:
    """Yield a text, then single bytes of a header field or a body."""
    yield begin
    for _ in range(pieces):
        yield b"x"


def head(address: tuple[str, int], length: int) -> bytes:
    host = b"%s:%d" % (address[0].encode(), address[1])
    return HEAD % (1, host, host) + b"Content-Length: %d\r\n\r\n" % length


@pytest.mark.parametrize("begin", [b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: "])
def test_a_head_in_single_bytes_is_not_waited_for(address: tuple[str, int], begin: bytes) -> None:
    with socket.create_connection(address) as client:
        assert answered(client, trickle(begin)) == b""


def test_a_body_in_single_bytes_is_not_waited_for(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as client:
        answer = answered(client, trickle(head(address, 1000)))
    assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("address", [2.0], indirect=True)
def test_a_body_after_the_answer_is_not_waited_for(address: tuple[str, int]) -> None:
    """The body of a GET is not read, nor taken as the next request."""
    host = b"%s:%d" % (address[0].encode(), address[1])
    begin = b"GET / HTTP/1.1\r\nHost: %s\r\nContent-Length: 100000\r\n\r\n" % host
    with socket.create_connection(address) as client:
        answer = answered(client, trickle(begin))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(BODY)


patiently = pytest.mark.parametrize("address", [LONG_S], indirect=True)


@patiently
def test_slow_clients_do_not_hold_up_others(address: tuple[str, int]) -> None:
    with contextlib.ExitStack() as stack:
        for n in range(50):
            client = stack.enter_context(socket.create_connection(address))
            client.sendall(head(address, 1000) + b"x" if n % 2 else b"GET / HT")
        host, port = address
        answer = httpx.get(f"http://{host}:{port}/", timeout=LONG_S)
        assert (answer.status_code, answer.content) == (200, BODY)


@pytest.mark.parametrize("address", [3.0], indirect=True)
def test_an_answer_that_is_read_slowly_comes_whole(address: tuple[str, int]) -> None:
    """By and by, in more time than the server waits for any of it."""
    host = b"%s:%d" % (address[0].encode(), address[1])
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.connect(address)
        client.sendall(b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n" % host)
        client.settimeout(LONG_S)
        received = bytearray()
        while len(received) < len(BODY) or not received.endswith(b"\r\n\r\n" + BODY):
            chunk = client.recv(1 << 16)
            assert chunk
            if len(received) >> 18 < (len(received) + len(chunk)) >> 18:
                time.sleep(0.11)
            received += chunk


def test_an_answer_that_is_not_read_is_dropped(address: tuple[str, int]) -> None:
    host = b"%s:%d" % (address[0].encode(), address[1])
    with socket.create_connection(address) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n" % host)
        assert LOST.wait(LONG_S)
        received = bytearray()
        with contextlib.suppress(ConnectionError):
            while chunk := client.recv(1 << 16):
                received += chunk
    assert len(received) < len(BODY)


@patiently
def test_of_too_many_connections_those_that_waited_longest_are_closed(
    address: tuple[str, int],
) -> None:
    host, port = address
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(address))
            for _ in range(LIMIT_PER_PEER + 5)
        ]
        answer = httpx.get(f"http://{host}:{port}/", timeout=LONG_S)
        assert (answer.status_code, answer.content) == (200, BODY)
        open_ones = 0
        for client in clients:
            client.settimeout(SOON_S / 20)
            try:
                open_ones += bool(client.recv(1))
            except TimeoutError:
                open_ones += 1
        assert open_ones < LIMIT_PER_PEER


@patiently
def test_connections_that_are_answered_are_not_closed_for_others(address: tuple[str, int]) -> None:
    with contextlib.ExitStack() as stack:
        host = b"%s:%d" % (address[0].encode(), address[1])
        waiting = stack.enter_context(socket.create_connection(address))
        waiting.sendall(b"GET /later HTTP/1.1\r\nHost: %s\r\n\r\n" % host)
        assert ASKED.wait(LONG_S)
        for _ in range(LIMIT_PER_PEER + 3):
            stack.enter_context(socket.create_connection(address))
        assert LOST.wait(LONG_S)
        ANSWERS.set()
        waiting.settimeout(LONG_S)
        assert waiting.recv(1 << 10).startswith(b"HTTP/1.1 200 ")


@patiently
def test_connections_whose_bodies_are_not_complete_bar_nobody(address: tuple[str, int]) -> None:
    """They are closed for others at once, before the time for a body is over."""
    host, port = address
    with contextlib.ExitStack() as stack:
        for _ in range(LIMIT_PER_PEER):
            client = stack.enter_context(socket.create_connection(address))
            client.sendall(head(address, 100) + b"x")
        for _ in range(3):
            answer = httpx.get(f"http://{host}:{port}/", timeout=LONG_S)
            assert (answer.status_code, answer.content) == (200, BODY)
