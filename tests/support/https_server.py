"""An https server on loopback with a certificate of its own, that misbehaves on request."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass
class Page:
    """A file that the server has.

    Parameters
    ----------
    content : bytes
        Its bytes.
    tag : str or None
        Entity tag.
    ranges : bool
        Whether ranges are served.
    length : int or None
        Content-Length, if not the true one.
    ends : list of int
        Positions at which the connection is broken, one for each request; then none is.
    reply : callable
        Replaces the whole reply.
    """

    content: bytes = b""
    tag: str | None = '"1"'
    ranges: bool = True
    length: int | None = None
    ends: list[int] = field(default_factory=list)
    reply: Callable[[BaseHTTPRequestHandler], None] | None = None


class Server(ThreadingHTTPServer):
    """The server: `pages` by path, and a log of the requests' paths and ranges."""

    daemon_threads = True

    def __init__(self, context: ssl.SSLContext, certificate: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.certificate = certificate
        self.pages: dict[str, Page] = {}
        self.log: list[tuple[str, str | None]] = []

    @property
    def address(self) -> str:
        """Address of the server, without a slash at its end."""
        return f"https://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Stay silent about clients that go away."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *arguments: object) -> None:
        """Stay silent."""

    def do_GET(self) -> None:
        """Serve a page, from the requested position if it is the requested version."""
        requested = self.headers.get("Range")
        self.server.log.append((self.path, requested))
        page = self.server.pages.get(self.path)
        if page is None:
            self.send_error(404)
        elif page.reply is not None:
            page.reply(self)
        else:
            self._serve(page, requested)
        self.close_connection = True

    def _serve(self, page: Page, requested: str | None) -> None:
        content, start = page.content, 0
        same = self.headers.get("If-Range") in (None, page.tag)
        if requested and page.ranges and same:
            start = int(requested.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        if page.tag:
            self.send_header("ETag", page.tag)
        length = len(content) - start if page.length is None else page.length
        self.send_header("Content-Length", str(length))
        self.end_headers()
        end = page.ends.pop(0) if page.ends else len(content)
        self.wfile.write(content[start:end])


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """Run a server; its certificate is written into `folder`."""
    certificate, key = write_certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = Server(context, certificate)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.UTC)
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(alternative, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "server.pem").write_bytes(certificate.public_bytes(pem))
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.key").write_bytes(private)
    return folder / "server.pem", folder / "server.key"
