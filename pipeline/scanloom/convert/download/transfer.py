"""Downloads that continue where an earlier attempt stopped, and are checked when complete.

Requests take certificates and proxies from the environment, and there is no way down to http.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from functools import cache
from http.client import HTTPResponse
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import urlsplit

from scanloom.convert.provenance import Digest
from scanloom.core import Reason, ScanError, format_bytes, printable
from scanloom.version import __version__

TIMEOUT_S: Final = 30.0
"""Longest wait for a connection, and between two pieces of a body."""
CERTIFICATE_VARIABLES: Final = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Variables that name a file or folder of trusted certificates; the first that is set counts."""
_CHUNK_BYTES: Final = 1 << 18

MAX_FILE_BYTES: Final = 16 << 30
"""Largest file that is downloaded; nnU-Net's five folds with large networks have some 5 GB."""
MAX_DOCUMENT_BYTES: Final = 8 << 20
"""Largest list of files or models that is downloaded; that of MONAI's model zoo has 0.1 MB."""
MAX_ATTEMPTS: Final = 100
"""Connections for one file; each must bring it further, except for `IDLE_ATTEMPTS` in sequence."""
IDLE_ATTEMPTS: Final = 4
PAUSE_S: Final = 1.0
"""Pause after a connection that brought nothing, doubled with each further one."""
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})", re.ASCII)
Report = Callable[[int, int | None], None]
"""Called with the bytes received so far and the total, None if unknown."""


class ConnectionLostError(ScanError):
    """A request failed in a manner that another attempt may overcome."""


class RangeRefusedError(ConnectionLostError):
    """The requested range lies behind the end of the file."""


_KINDS: Final[Mapping[int, type[ScanError]]] = {
    **dict.fromkeys((408, 429, 500, 502, 503, 504), ConnectionLostError),
    416: RangeRefusedError,
}
"""Errors of the status codes after which another attempt may succeed."""


@contextmanager
def request(address: str, headers: Mapping[str, str]) -> Iterator[HTTPResponse]:
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
    fields = {"User-Agent": f"scanloom/{__version__}", **headers}
    with _network_errors(host):
        outgoing = urllib.request.Request(address, headers=fields)  # noqa: S310 https only
        response = _opener().open(outgoing, timeout=TIMEOUT_S)
    with response:
        # ranges and checksums are those of the file itself
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise ScanError(Reason.DOWNLOAD, f"{host} compresses the file on the way")
        yield response


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
    """Return an opener with the environment's proxies and certificates; addresses are checked."""
    named = next((os.environ[v] for v in CERTIFICATE_VARIABLES if os.environ.get(v)), None)
    https = urllib.request.HTTPSHandler(context=_context(named))
    return urllib.request.build_opener(https, _HttpsRedirects())


# once: each file, and each attempt, is a connection of its own
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
    host = printable(host)
    if isinstance(cause, ssl.SSLCertVerificationError):
        detail = f"the certificate of {host} is not trusted; SSL_CERT_FILE names further ones"
        return ScanError(Reason.DOWNLOAD, detail)
    if isinstance(cause, TimeoutError):
        return ConnectionLostError(Reason.DOWNLOAD, f"{host} does not answer in {TIMEOUT_S:g} s")
    if isinstance(cause, socket.gaierror):
        detail = f"the address of {host} can't be found: there is no network, or no such host"
        return ScanError(Reason.DOWNLOAD, detail)
    proxy = urllib.request.getproxies().get("https") and not urllib.request.proxy_bypass(host)
    route = " through the proxy that HTTPS_PROXY names" if proxy else ""
    kind = type(cause).__name__ if isinstance(cause, Exception) else "error"
    return ConnectionLostError(Reason.DOWNLOAD, f"the connection to {host}{route} failed ({kind})")


@dataclass(frozen=True)
class Remote:
    """A file on the network.

    Parameters
    ----------
    address : str
        Address; https only.
    digest : Digest or None
        Published checksum.
    size : int or None
        Published size in bytes.
    """

    address: str
    digest: Digest | None = None
    size: int | None = None


def stated_size(remote: Remote) -> int | None:
    """Return the size of a file in bytes: as published, else as its server states it, if it does.

    The file is not downloaded. Errors as `request`.
    """
    if remote.size is not None:
        return remote.size
    with request(remote.address, {}) as reply:
        return reply.length


def fetch(
    remote: Remote,
    target: Path,
    limit_bytes: int = MAX_FILE_BYTES,
    report: Report = lambda received, total: None,
) -> None:
    """Download a file, continuing an earlier attempt at the same target.

    The bytes are collected next to `target`, which appears by a rename once they are complete.

    Parameters
    ----------
    target : Path
        Its place, in an existing folder. An existing file is kept if an earlier call completed it
        from the same address.
    limit_bytes : int
        Largest size that is accepted.

    Raises
    ------
    ScanError
        DOWNLOAD, or MODEL_HASH if the published checksum differs: the bytes are then discarded.
    OSError
        If the file can't be written.
    """
    pending = _Pending(target, remote.address)
    # a complete file without a published checksum is not asked for again
    if pending.is_complete() and (remote.digest is None or remote.digest.matches(target)):
        return
    # an earlier call was killed between the last byte and the rename: hashing takes seconds
    if remote.digest is not None and pending.is_whole() and remote.digest.matches(pending.file):
        pending.complete()
        return
    furthest = idle = 0
    for _ in range(MAX_ATTEMPTS):
        try:
            _receive(remote, pending, limit_bytes, report)
            break
        except ConnectionLostError:
            size = pending.size()
            furthest, idle = max(size, furthest), 0 if size > furthest else idle + 1
            if idle >= IDLE_ATTEMPTS:
                raise
            # no pause after progress
            time.sleep(PAUSE_S * (2**idle - 1))
    else:
        raise ScanError(Reason.DOWNLOAD, "the connection was lost too often")
    if remote.digest is not None and not remote.digest.matches(pending.file):
        pending.discard()
        detail = f"the downloaded file differs from the published {remote.digest.algorithm}"
        raise ScanError(Reason.MODEL_HASH, detail)
    pending.complete()


class _Pending:
    """The bytes received so far, and a record of the version of the file that they belong to."""

    def __init__(self, target: Path, address: str) -> None:
        self.target, self.address = target, address
        self.file = target.with_name(f"{target.name}.part")
        self._record = target.with_name(f"{target.name}.json")

    def size(self) -> int:
        """Return the number of bytes received so far."""
        return self.file.stat().st_size if self.file.is_file() else 0

    def is_whole(self) -> bool:
        """Return whether all bytes were received, as far as their number tells."""
        return self.file.is_file() and self.size() == self.version()[1]

    def version(self) -> tuple[str | None, int | None]:
        """Return validator and total size of the file that the bytes belong to, None if unknown."""
        record = self._read()
        return record.get("validator"), record.get("total")

    def begin(self, validator: str | None, total: int | None) -> None:
        """Discard all bytes, and record the version of the file that is about to arrive."""
        self.discard()
        record = {"address": self.address, "validator": validator, "total": total}
        self._record.write_text(json.dumps(record), encoding="utf-8")

    def discard(self) -> None:
        """Remove the bytes received so far."""
        for file in (self.file, self._record, self.target):
            file.unlink(missing_ok=True)

    def complete(self) -> None:
        """Move the bytes to the target; the record stays."""
        self.file.replace(self.target)

    def is_complete(self) -> bool:
        """Return whether an earlier call completed the target from this address."""
        return self.target.is_file() and self._read() != {}

    def _read(self) -> dict[str, Any]:
        """Return the record, empty if it is missing, damaged or of another address."""
        try:
            record = json.loads(self._record.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        same = isinstance(record, dict) and record.get("address") == self.address
        return record if same else {}


def _receive(remote: Remote, pending: _Pending, limit_bytes: int, report: Report) -> None:
    """Send one request, for the bytes that are missing, and append them."""
    start = pending.size()
    validator, _ = pending.version()
    headers = {}
    if start and validator is not None:
        # a server that has another version by now sends all of it, not a rest that does not fit
        headers = {"Range": f"bytes={start}-", "If-Range": validator}
    try:
        with request(remote.address, headers) as reply:
            start = _begin(reply, pending, bool(headers))
            _, total = pending.version()
            _check_total(remote, total, limit_bytes, pending, bool(reply.chunked))
            with pending.file.open("ab") as output:
                for chunk in _chunks(reply, remote.address):
                    output.write(chunk)
                    output.flush()  # a killed process leaves all bytes to the next attempt
                    start += len(chunk)
                    if start > min(limit_bytes, total or limit_bytes):
                        raise _too_large(pending, limit_bytes)
                    report(start, total)
                # before the rename: a name without its bytes would pass for a complete file
                os.fsync(output.fileno())
    except RangeRefusedError:  # the file has become shorter
        pending.discard()
        raise
    if total is not None and start < total:
        detail = f"{start} of {total} bytes arrived before the connection ended"
        raise ConnectionLostError(Reason.DOWNLOAD, detail)


def _chunks(reply: HTTPResponse, address: str) -> Iterator[bytes]:
    """Yield the body of a reply in pieces; ConnectionLostError if the connection ends or stalls."""
    host = check_address(address)
    while True:
        with _network_errors(host):
            chunk = reply.read1(_CHUNK_BYTES)
        if not chunk:
            return
        yield chunk


def _begin(reply: HTTPResponse, pending: _Pending, ranged: bool) -> int:
    """Return where the body of a reply begins: behind the bytes received so far, or at 0.

    A server that knows another version of the file replies with all of it, from its beginning.
    """
    validator = _validator(reply)
    if reply.status != 206:
        pending.begin(validator, reply.length)
        return 0
    start, (expected, total) = pending.size(), pending.version()
    stated = _CONTENT_RANGE.fullmatch(reply.headers.get("Content-Range", ""))
    first, last, size = map(int, stated.groups()) if stated else (-1, -1, -1)
    same = validator == expected and total in (None, size)
    if not ranged or not same or (first, last) != (start, size - 1):
        pending.discard()
        raise ConnectionLostError(Reason.DOWNLOAD, "the server sent another range than requested")
    return start


def _validator(reply: HTTPResponse) -> str | None:
    """Return a header that identifies the version of a file, or None.

    Weak entity tags do not promise equal bytes (RFC 9110, 13.1.5).
    """
    tag = reply.headers.get("ETag")
    return tag if tag and not tag.startswith("W/") else reply.headers.get("Last-Modified")


def _check_total(
    remote: Remote, total: int | None, limit_bytes: int, pending: _Pending, is_chunked: bool
) -> None:
    """Refuse a file before its body is read: too large, of another size, or without an end."""
    if total is None:
        if not is_chunked and remote.digest is None:
            raise ScanError(Reason.DOWNLOAD, "the server does not state the length of the file")
        return
    if total > limit_bytes:
        raise _too_large(pending, limit_bytes)
    if remote.size is not None and total != remote.size:
        raise ScanError(Reason.DOWNLOAD, f"the file has {total} bytes; {remote.size} are published")
    missing = total - pending.size()
    if missing > shutil.disk_usage(pending.file.parent).free:
        detail = f"the file needs {format_bytes(missing)} on the disk of the model store"
        raise ScanError(Reason.DISK_FULL, detail)


def _too_large(pending: _Pending, limit_bytes: int) -> ScanError:
    """Discard the bytes received so far, and return the error for a file above the limit."""
    pending.discard()
    detail = f"the file is larger than stated, or than {format_bytes(limit_bytes)}"
    return ScanError(Reason.DOWNLOAD, detail)
