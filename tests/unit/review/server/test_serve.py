"""A review server at an address: TLS, and what keeps it from starting."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from scanloom.core import ScanError
from scanloom.review.server.serve import ServerOptions, serve
from support.https_server import write_certificate

SERVER = """
import json, sys
from pathlib import Path
from scanloom.review.server.serve import ServerOptions, serve
out, certificate, key = map(Path, sys.argv[1:])
options = ServerOptions(("anna",), certificate=certificate, certificate_key=key)
serve(out, options, lambda links: print(json.dumps(links), flush=True))
"""


@pytest.fixture
def out(published: Path, tmp_path: Path) -> Path:
    shutil.copytree(published / "out", tmp_path / "out", copy_function=shutil.copy2)
    return tmp_path / "out"


@contextmanager
def running(*arguments: Path) -> Iterator[str]:
    """Run a server with TLS; yield the link of its reviewer."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            yield json.loads(server.stdout.readline())["anna"]
        finally:
            server.kill()


def test_tls(out: Path, tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    context = ssl.create_default_context(cafile=str(certificate))
    with running(out, certificate, key) as link, httpx.Client(verify=context) as client:
        assert link.startswith("https://127.0.0.1:")
        cookie = client.get(link).headers["set-cookie"]
        origin = link.split("/login")[0]
        assert "Secure" in cookie
        assert client.get(f"{origin}/api/me").json()["name"] == "anna"
        with pytest.raises(httpx.TransportError):
            httpx.get(origin.replace("https", "http") + "/api/me")


@pytest.mark.parametrize("missing", ["certificate", "key"])
def test_without_its_certificate_no_link_is_told(out: Path, tmp_path: Path, missing: str) -> None:
    certificate, key = write_certificate(tmp_path)
    (certificate if missing == "certificate" else key).write_text("not a certificate")
    told: list[dict[str, str]] = []
    options = ServerOptions(("anna",), certificate=certificate, certificate_key=key)

    with pytest.raises(ScanError, match="certificate"):
        serve(out, options, told.append)

    assert told == []
