from __future__ import annotations

from collections.abc import Iterator

import pytest

from scanloom.convert.download import transfer
from support.https_server import Server, serve


@pytest.fixture(scope="session")
def https(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("certificate")) as server:
        yield server


@pytest.fixture
def server(https: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Return a trusted server without pages; lost connections are retried without a pause."""
    https.pages.clear()
    https.log.clear()
    for name in ("HTTPS_PROXY", "https_proxy", "REQUESTS_CA_BUNDLE", "SCANLOOM_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(https.certificate))
    monkeypatch.setattr(transfer, "PAUSE_S", 0.0)
    return https
