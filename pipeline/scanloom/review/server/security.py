"""Access to the review server: checks of requests, sessions of reviewers, limits of connections.

A link for each reviewer works once, and becomes a session: a secret that the page keeps and sends
in a header with each request. It is not a cookie: browsers send a cookie of 127.0.0.1 to every port
of it, so to servers of other users too.

All processes of the machine can connect to the loopback address, whoever they belong to.
Connections are limited in number, and closed if they send too slowly. Where the limit is reached,
the connection that has waited longest for a request is closed for the new one: a program that only
holds connections open bars nobody, and a browser whose idle connection is closed opens another.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import resource
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy: the page loads nothing from elsewhere, and no inline script."""
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
MAX_BODY_BYTES = 1 << 20
BODY_SECONDS = 15.0
"""Time in which a request's body must be complete."""


class RefusedError(Exception):
    """A request that is not served: status and reason."""

    def __init__(self, status: int, reason: str, text: str) -> None:
        super().__init__(text)
        self.status, self.reason, self.text = status, reason, text


@dataclass(frozen=True)
class Guard:
    """ASGI middleware: checks Host and Origin, limits bodies, and sets the headers of answers.

    Parameters
    ----------
    origins : tuple of str
        Addresses of the server, such as "http://127.0.0.1:8000".
    body_seconds : float
        Time in which a request's body must be complete.
    """

    app: ASGIApp
    origins: tuple[str, ...]
    body_seconds: float = BODY_SECONDS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        try:
            self._check(scope)
            body = await self._body(scope, receive)
        except RefusedError as refused:
            plain = {"reason": refused.reason, "text": refused.text}
            answer = JSONResponse(plain, refused.status, {"connection": "close"})
            await answer(scope, receive, send_with_headers)
            return
        await self.app(scope, _once(body, receive), send_with_headers)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        hosts = {origin.partition("://")[2] for origin in self.origins}
        # a page elsewhere can make its own name resolve to this address (DNS rebinding)
        if headers.get("host") not in hosts:
            raise RefusedError(403, "HOST", "The address is not this server's.")
        # browsers send no Origin with these, and they change nothing
        if scope["method"] in ("GET", "HEAD"):
            return
        if scope["method"] != "POST":
            raise RefusedError(405, "METHOD", "Only GET and POST are known.")
        if headers.get("origin") not in self.origins:
            raise RefusedError(403, "ORIGIN", "The request is from another site.")
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise RefusedError(415, "CONTENT_TYPE", "The body must be JSON.")

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        if scope["method"] != "POST":
            return b""
        length = Headers(scope=scope).get("content-length", "0")
        # before a byte is read; nine digits, since int() of a million is slow
        if not length.isdecimal() or len(length) > 9 or int(length) > MAX_BODY_BYTES:
            raise RefusedError(413, "TOO_LARGE", f"The body exceeds {MAX_BODY_BYTES >> 20} MiB.")
        try:
            async with asyncio.timeout(self.body_seconds):
                return await _read(receive)
        except TimeoutError:
            raise RefusedError(408, "TIMEOUT", "The body did not arrive in time.") from None


async def _read(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RefusedError(400, "DISCONNECTED", "The connection was closed.")
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise RefusedError(413, "TOO_LARGE", f"The body exceeds {MAX_BODY_BYTES >> 20} MiB.")
        if not message.get("more_body"):
            return bytes(body)


def _once(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body, then what the server gives."""
    # a further call waits for the end of the connection, which the server reports
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay


SCHEME = "Bearer "
_BYTES = 32


class Sessions:
    """Tokens of links that were not used yet, and sessions of reviewers; kept as hashes."""

    def __init__(self, reviewers: Sequence[str]) -> None:
        self._guard = threading.Lock()
        self._sessions: dict[bytes, str] = {}
        self._tokens: dict[bytes, str] = {}
        self.tokens = {reviewer: self._new(self._tokens, reviewer) for reviewer in reviewers}
        """The token of each reviewer's link."""

    def enter(self, token: str, reviewer: str) -> str | None:
        """Use the token of a reviewer's link: return a new session; None if it is not that."""
        with self._guard:
            # hashes are compared: the time of a look-up tells nothing of the token
            if self._tokens.get(_hashed(token)) != reviewer:
                return None
            del self._tokens[_hashed(token)]
            return self._new(self._sessions, reviewer)

    def reviewer(self, authorization: str) -> str | None:
        """Return the code of the reviewer with a session, as of the header; None without one."""
        with self._guard:
            session = authorization.removeprefix(SCHEME)
            return self._sessions.get(_hashed(session)) if session != authorization else None

    @staticmethod
    def _new(known: dict[bytes, str], reviewer: str) -> str:
        value = secrets.token_urlsafe(_BYTES)
        known[_hashed(value)] = reviewer
        return value


def _hashed(value: str) -> bytes:
    return hashlib.sha256(value.encode("utf-8", "surrogatepass")).digest()


MAX_CONNECTIONS = 256
"""Open connections; fewer if the process may have few open files."""
MAX_PER_PEER = 128
"""Of these, from one address: all of 127.0.0.1, or of a tunnel, count as one."""
BACKLOG = 64
"""Connections that wait to be accepted, and that are accepted at once."""
_FILES_PER_CONNECTION = 4
"""Share of the open files, of which reading cases needs some too."""
IDLE_SECONDS = 30.0
"""Time in which the head of a request must be complete, from the connection or the last answer."""


def max_connections() -> int:
    """Return the number of connections that may be open: `MAX_CONNECTIONS`, or fewer."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # a browser opens six connections
    return min(MAX_CONNECTIONS, max(8, files // _FILES_PER_CONNECTION))


class Listener(socket.socket):
    """A listening socket that limits the connections that are open.

    They count from the moment at which they are accepted: with TLS, before its handshake.

    Parameters
    ----------
    limit, limit_per_peer : int
        Connections in all, and from one address.
    """

    def __init__(
        self,
        family: socket.AddressFamily,
        limit: int = MAX_CONNECTIONS,
        limit_per_peer: int = MAX_PER_PEER,
    ) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self.limit, self.limit_per_peer = limit, limit_per_peer
        self.open = dict[int, Accepted]()
        """Connections by their descriptor."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, for which another may be closed.

        Raises
        ------
        BlockingIOError
            If none waits, or all others are being answered: then this one is closed.
        """
        descriptor, address = self._accept()  # type: ignore[attr-defined]  # as `socket.accept` does
        accepted = Accepted(self, descriptor, str(address[0]))
        # first the client's own share: one client must not close the connections of another
        for peer, limit in ((accepted.peer, self.limit_per_peer), (None, self.limit)):
            connections = [each for each in self.open.values() if peer in (None, each.peer)]
            if len(connections) < limit:
                continue
            # the longest without a whole request; a connection that is answered is never closed
            idle = min(connections, key=lambda each: each.waits_since)
            if idle.waits_since == math.inf:
                accepted.close()
                raise BlockingIOError
            idle.end()
        self.open[descriptor] = accepted
        return accepted, address


class Accepted(socket.socket):
    """A connection of a `Listener`.

    Parameters
    ----------
    peer : str
        Address of the client.
    """

    def __init__(self, listener: Listener, descriptor: int, peer: str) -> None:
        super().__init__(listener.family, listener.type, listener.proto, fileno=descriptor)
        self.peer, self.waits_since = peer, time.monotonic()
        """Address, and moment since which no whole request is there; infinite during an answer."""
        self._listener, self._number = listener, descriptor

    def end(self) -> None:
        """End the connection: the server reads that it was closed."""
        self._forget()
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._forget()
        super().close()

    def _forget(self) -> None:
        if self._listener.open.get(self._number) is self:
            del self._listener.open[self._number]


class Connection(H11Protocol):
    """HTTP/1.1 connection that is closed if the head of a request does not arrive in time.

    uvicorn limits the time between two requests only, up to the first byte of the second. The time
    of a body is limited by `Guard`. Until it is complete, the connection may be closed for another
    one: else a few bytes of each of 128 bodies would bar everybody.
    """

    idle_seconds = IDLE_SECONDS
    _timer: asyncio.TimerHandle | None = None
    _unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as of uvicorn
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Stop the clock once the head of a request is there, and note when its body is."""
        super().data_received(data)
        self._stop_if_answering()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._wait()
        super().on_response_complete()  # which may begin with a request that is here already
        self._stop_if_answering()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._stop()
        self._note(time.monotonic())
        self._unsent = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(self.idle_seconds, self._late)

    def _stop_if_answering(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
            if not self.cycle.more_body:
                self._note(math.inf)

    def _note(self, waits_since: float) -> None:
        """Note on the socket since when the client's next request is waited for."""
        wrapped = self.transport.get_extra_info("socket")
        accepted = getattr(wrapped, "_sock", wrapped)  # asyncio hands out a wrapper
        if isinstance(accepted, Accepted):
            accepted.waits_since = waits_since

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if not unsent:
            self.transport.close()
        elif unsent < self._unsent:
            self._wait()  # the client still reads the answer
        else:
            self.transport.abort()
