"""HTTPS requests: certificates and proxies from the environment, and no way down to http."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from functools import cache
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import urlsplit

from scanloom.core import Reason, ScanError, printable
from scanloom.version import __version__

TIMEOUT_S: Final = 30.0
"""Longest wait for a connection, and between two pieces of a body."""
CERTIFICATE_VARIABLES: Final = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Variables that name a file or folder of trusted certificates; the first that is set counts."""
_CHUNK_BYTES: Final = 1 << 18


class ConnectionLostError(ScanError):
    """A request failed in a manner that another attempt may overcome."""


class RangeRefusedError(ConnectionLostError):
    """The requested range lies behind the end of the file."""


class Reply:
    """A successful reply to a request.

    Parameters
    ----------
    response : http.client.HTTPResponse
        Open response.
    host : str
        Host of the request, for messages.
    """

    def __init__(self, response: Any, host: str) -> None:
        self._response, self._host = response, host
        self.status: int = response.status
        self.chunked: bool = bool(response.chunked)

    def header(self, name: str) -> str | None:
        """Return a header of the reply, None if absent."""
        value: str | None = self._response.headers.get(name)
        return value

    @property
    def length(self) -> int | None:
        """Size of the body in bytes, None if not stated."""
        text = self.header("Content-Length")
        return int(text) if text is not None and text.isascii() and text.isdigit() else None

    def chunks(self) -> Iterator[bytes]:
        """Yield the body in pieces.

        Raises
        ------
        ConnectionLostError
            If the connection ends or stalls.
        """
        while True:
            with _network_errors(self._host):
                chunk = self._response.read1(_CHUNK_BYTES)
            if not chunk:
                return
            yield chunk


_KINDS: Final[Mapping[int, type[ScanError]]] = {
    **dict.fromkeys((408, 429, 500, 502, 503, 504), ConnectionLostError),
    416: RangeRefusedError,
}
"""Errors of the status codes after which another attempt may succeed."""


@contextmanager
def request(address: str, headers: Mapping[str, str] | None = None) -> Iterator[Reply]:
    """Open an https address; redirects are followed, to https only.

    Raises
    ------
    ScanError
        DOWNLOAD if the address is not https, a redirect leaves https, the certificate is not
        trusted, or the server refuses.
    ConnectionLostError
        If the server can't be reached or answers that it is busy.
    """
    host = check_address(address)
    fields = {"User-Agent": f"scanloom/{__version__}", **(headers or {})}
    with _network_errors(host):
        outgoing = urllib.request.Request(address, headers=fields)  # noqa: S310 https only
        response = _opener().open(outgoing, timeout=TIMEOUT_S)
    with response:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise ScanError(Reason.DOWNLOAD, f"{host} compresses the file on the way")
        yield Reply(response, host)


def check_address(address: str) -> str:
    """Return the host of an https address.

    Raises
    ------
    ScanError
        DOWNLOAD if it is not https, is malformed, or contains a password.
    """
    try:
        url = urlsplit(address)
        host, _ = url.hostname, url.port
    except ValueError:
        host = None
    if host is None or not address.isascii() or not address.isprintable() or " " in address:
        raise ScanError(Reason.DOWNLOAD, "the address is malformed")
    if url.scheme != "https":
        raise ScanError(Reason.DOWNLOAD, f"the address begins with {url.scheme}:, not https:")
    if url.username is not None or url.password is not None:
        raise ScanError(Reason.DOWNLOAD, "the address contains a user name or password")
    return host


class _HttpsRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to https addresses; the range of a request is kept."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        try:
            check_address(newurl)
        except ScanError as exc:
            fp.close()
            detail = f"{req.host} redirects to an address that is refused: {exc.detail}"
            raise ScanError(Reason.DOWNLOAD, detail) from exc
        # typeshed narrows the type of the response that urllib passes on
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener for https alone, with the environment's proxies and certificates."""
    opener = urllib.request.OpenerDirector()
    named = next((os.environ[v] for v in CERTIFICATE_VARIABLES if os.environ.get(v)), None)
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPSHandler(context=_context(named)),
        _HttpsRedirects(),
    ):
        opener.add_handler(handler)
    return opener


@cache
def _context(certificates: str | None) -> ssl.SSLContext:
    """Return a TLS context that trusts the named certificates, else those of the system."""
    if certificates is None:
        return ssl.create_default_context()
    folder = Path(certificates).is_dir()
    try:
        return ssl.create_default_context(
            cafile=None if folder else certificates, capath=certificates if folder else None
        )
    except OSError as exc:  # ssl.SSLError included
        names = ", ".join(CERTIFICATE_VARIABLES)
        detail = f"the certificates that one of {names} names can't be read"
        raise ScanError(Reason.DOWNLOAD, detail) from exc


@contextmanager
def _network_errors(host: str) -> Iterator[None]:
    """Convert errors of requests to ScanError, without their text."""
    try:
        yield
    except ScanError:
        raise
    except urllib.error.HTTPError as exc:
        exc.close()
        kind = _KINDS.get(exc.code, ScanError)
        meaning = {404: " (no such file)", 401: " (a login is needed)", 403: " (forbidden)"}
        detail = f"{printable(host)} answers with status {exc.code}{meaning.get(exc.code, '')}"
        raise kind(Reason.DOWNLOAD, detail) from exc
    except (OSError, http.client.HTTPException, ValueError) as exc:
        raise _connection_error(host, getattr(exc, "reason", exc)) from exc


def _connection_error(host: str, cause: object) -> ScanError:
    """Return the error for a failed connection."""
    host = printable(host)
    if isinstance(cause, ssl.SSLCertVerificationError):
        detail = f"the certificate of {host} is not trusted; SSL_CERT_FILE names further ones"
        return ScanError(Reason.DOWNLOAD, detail)
    if isinstance(cause, TimeoutError):
        return ConnectionLostError(Reason.DOWNLOAD, f"{host} does not answer in {TIMEOUT_S:g} s")
    if isinstance(cause, socket.gaierror):
        return ScanError(Reason.DOWNLOAD, f"the address of {host} can't be found")
    proxy = urllib.request.getproxies().get("https") and not urllib.request.proxy_bypass(host)
    route = " through the proxy that HTTPS_PROXY names" if proxy else ""
    kind = type(cause).__name__ if isinstance(cause, Exception) else "error"
    return ConnectionLostError(Reason.DOWNLOAD, f"the connection to {host}{route} failed ({kind})")
