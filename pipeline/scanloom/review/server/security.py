"""Checks of all requests to the review server, and headers of all answers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
    app : ASGI application
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
            await _refuse(refused, send_with_headers)
            return
        await self.app(scope, _once(body, receive), send_with_headers)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        hosts = {origin.partition("://")[2] for origin in self.origins}
        if headers.get("host") not in hosts:
            raise RefusedError(403, "HOST", "The address is not this server's.")
        if scope["method"] in ("GET", "HEAD"):
            return
        if scope["method"] != "POST":
            raise RefusedError(405, "METHOD", "Only GET and POST are known.")
        if headers.get("origin") not in self.origins:
            raise RefusedError(403, "ORIGIN", "The request is from another site.")
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise RefusedError(415, "CONTENT_TYPE", "The body must be JSON.")

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Return the whole body of a request."""
        if scope["method"] != "POST":
            return b""
        length = Headers(scope=scope).get("content-length", "0")
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
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay


async def _refuse(refused: RefusedError, send: Send) -> None:
    body = json.dumps({"reason": refused.reason, "text": refused.text}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
