"""A DICOMweb server over files: QIDO-RS and WADO-RS, which misbehaves on request."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pydicom import Dataset, dcmread

BOUNDARY = "part of an answer"


@dataclass
class WebArchive:
    """What a server has, and how it misbehaves.

    Parameters
    ----------
    files : list of Path
    page : int
        Answers of QIDO-RS at a time.
    ignores_offset : bool
    status : int
        Of WADO-RS.
    cuts : list of int
        Bytes at the end of an answer of WADO-RS that are left out, one for each request.
    framing : str
        How an answer ends: "length", "chunks" or "close".
    drips : bool
        Whether it sends a byte now and then.
    plain : bool
        Whether it answers by a page of text.
    endless : bool
        Whether its answers of QIDO-RS have no end.
    swaps : dict
        What it sends in place of an object, by SOPInstanceUID.
    """

    files: list[Path]
    page: int = 1000
    ignores_offset: bool = False
    status: int = 200
    cuts: list[int] = field(default_factory=list)
    framing: str = "length"
    drips: bool = False
    plain: bool = False
    endless: bool = False
    swaps: dict[str, bytes] = field(default_factory=dict)
    url: str = ""
    accepted: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)

    @property
    def place(self) -> dict[str, Any]:
        """The keys of a source in a page, with short waits."""
        return {"name": "pacs", "url": self.url, "patience": 20, "retry": 0.1}

    def matching(self, parts: Sequence[str], keys: dict[str, str]) -> list[tuple[Path, Dataset]]:
        places = dict(zip(parts[::2], parts[1::2], strict=False))
        wanted = {
            "StudyInstanceUID": places.get("studies", ""),
            "SeriesInstanceUID": places.get("series", ""),
            "SOPInstanceUID": places.get("instances", ""),
            **keys,
        }
        found = []
        for path in self.files:
            header = dcmread(path, stop_before_pixels=True)
            dates = wanted.get("StudyDate", "").partition("-")
            last = dates[2] if dates[1] else dates[0]
            date = str(header.get("StudyDate", ""))
            fits = (dates[0] or date) <= date <= (last or date)
            names = [name for name in wanted if name in header and name != "StudyDate"]
            if fits and all(str(header[n].value) == wanted[n] for n in names if wanted[n]):
                found.append((path, header))
        return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        archive: WebArchive = self.server.archive
        address = urlsplit(self.path)
        archive.asked.append(address.path)
        parts = address.path.strip("/").split("/")[1:]  # after /web
        if "json" in (self.headers["Accept"] or ""):
            query = {name: values[-1] for name, values in parse_qs(address.query).items()}
            self.search(archive, parts, query)
        else:
            archive.accepted.append(self.headers["Accept"])
            self.give(archive, parts)

    def go_on(self, archive: WebArchive) -> None:
        """Send spaces until the connection ends."""
        self.send_response(200)
        self.send_header("Content-Type", "application/dicom+json")
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()
        try:
            while not archive.over.is_set():
                self.wfile.write(b" " * (1 << 16))
        except OSError:
            archive.left.set()

    def search(self, archive: WebArchive, parts: list[str], query: dict[str, str]) -> None:
        if archive.endless:
            self.go_on(archive)
            return
        level = {1: "StudyInstanceUID", 3: "SeriesInstanceUID", 5: "SOPInstanceUID"}[len(parts)]
        if parts == ["series"]:
            level = "SeriesInstanceUID"
        offset = 0 if archive.ignores_offset else int(query.pop("offset", 0))
        query.pop("offset", None)
        query.pop("includefield", None)
        limit = min(int(query.pop("limit", 1000)), archive.page)
        found: dict[str, Dataset] = {}
        for _, header in archive.matching(parts, query):
            answer = found.setdefault(str(header[level].value), Dataset())
            names = "StudyInstanceUID SeriesInstanceUID SOPInstanceUID SOPClassUID PatientID"
            more = "StudyDescription SeriesDescription Modality StudyDate AccessionNumber"
            for name in (*names.split(), *more.split()):
                if name in header:
                    answer[name] = header[name]
            answer.NumberOfSeriesRelatedInstances = (
                int(answer.get("NumberOfSeriesRelatedInstances") or 0) + 1
            )
        documents = [each.to_json_dict() for each in found.values()][offset : offset + limit]
        self.answer(200, json.dumps(documents).encode(), "application/dicom+json")

    def give(self, archive: WebArchive, parts: list[str]) -> None:
        if archive.plain or archive.status != 200:
            self.answer(archive.status, b"CANARY sign in, please", "text/html")
            return
        body = b""
        for path, header in archive.matching(parts, {}):
            content = archive.swaps.get(str(header.SOPInstanceUID), path.read_bytes())
            head = f"--{BOUNDARY}\r\nContent-Type: application/dicom\r\n\r\n"
            body += head.encode() + content + b"\r\n"
        body += f"--{BOUNDARY}--\r\n".encode()
        cut = archive.cuts.pop(0) if archive.cuts else 0
        kind = f'multipart/related; type="application/dicom"; boundary="{BOUNDARY}"'
        self.answer(200, body, kind, cut=cut)

    def answer(self, status: int, body: bytes, kind: str, cut: int = 0) -> None:
        archive: WebArchive = self.server.archive
        self.send_response(status)
        self.send_header("Content-Type", kind)
        framing = archive.framing if kind.startswith("multipart") else "length"
        if framing == "length":
            self.send_header("Content-Length", str(len(body)))
        elif framing == "chunks":
            self.send_header("Transfer-Encoding", "chunked")
        if framing == "close" or cut:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        rest = body[: len(body) - cut]
        with contextlib.suppress(OSError):
            if archive.drips and kind.startswith("multipart"):
                for n in range(len(rest)):
                    self.wfile.write(rest[n : n + 1])
                    if archive.over.wait(0.2):
                        return
            if framing == "chunks":
                for n in range(0, len(rest), 1000):
                    part = rest[n : n + 1000]
                    self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                if not cut:
                    self.wfile.write(b"0\r\n\r\n")
            else:
                self.wfile.write(rest)

    def log_message(self, *words: object) -> None: ...


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None: ...


@contextlib.contextmanager
def serving_web(
    files: Sequence[Path], tls: ssl.SSLContext | None = None, **how: Any
) -> Iterator[WebArchive]:
    """Yield a server in threads of this process."""
    archive = WebArchive(list(files), **how)
    server = _Server(("127.0.0.1", 0), _Handler)
    server.archive = archive
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    scheme = "http" if tls is None else "https"
    archive.url = f"{scheme}://127.0.0.1:{server.server_address[1]}/web"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield archive
    finally:
        archive.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
        time.sleep(0.01)
