"""A review server over two published cases, and its clients."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra review is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # newer releases of starlette prefer another client
    from starlette.testclient import TestClient

from scanloom.engine.revisions import Correction, publish_revision
from scanloom.io.output.audit import audit_trail
from scanloom.review.server.app import make_app
from scanloom.review.server.cases import OpenCases
from scanloom.review.server.security import Sessions
from scanloom.review.server.state import ReviewState
from scanloom.review.verdicts.log import VerdictLog, reviewer_codes
from scanloom.review.verdicts.readers import Readers
from scanloom.review.verdicts.verdict import Seen
from support.layouts import fan_by_hand
from support.review_cases import affine_of, enter, publish, scan_array

ORIGIN = "http://127.0.0.1:8000"


@dataclass
class Server:
    """A server without a socket.

    Parameters
    ----------
    out : Path
    state : ReviewState
    sessions : Sessions
    app : ASGI application
    cases : names of its cases
    """

    out: Path
    state: ReviewState
    sessions: Sessions
    app: Any
    cases: list[str]

    def client(self, reviewer: str | None = "r1") -> TestClient:
        """Return a client, logged in as a reviewer."""
        client = TestClient(self.app, base_url=ORIGIN, raise_server_exceptions=False)
        client.headers["origin"] = ORIGIN
        if reviewer is not None:
            enter(client, f"{ORIGIN}/{reviewer}/#{self.sessions.tokens[reviewer]}")
        return client


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait for the end of a look at the folders, also on a busy machine."""
    monkeypatch.setattr("scanloom.review.server.state.MAX_WAIT_S", 60.0)


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cases: an oblique one with its image, and a sheared one in two layers above 255."""
    folder = tmp_path_factory.mktemp("review")
    publish(folder, scan_array(1), affine_of("LAS", 20.0), "one", also=("image",))
    publish(folder, scan_array(2), affine_of("PIR", shear=0.8), "two", first=300, layers=2)
    return folder


def _publish(out: Path, key: Path, name: str, seen: Seen, labels: Any, reviewer: str) -> Path:
    return publish_revision(out, name, Correction(labels, reviewer, "brush", seen), key)


Serve = Callable[..., Server]


@pytest.fixture
def serve(published: Path, tmp_path: Path, layout: str) -> Iterator[Serve]:
    """Return a function that starts a server over a copy of the cases."""
    logs = []

    def start(reviewers: tuple[str, ...] = ("anna", "ben"), **sharing: float) -> Server:
        out = tmp_path / "out"
        while logs:
            logs.pop().close()  # of the server before
        if not out.exists():
            shutil.copytree(published / "out", out, copy_function=shutil.copy2)
            if layout == "fanned":
                fan_by_hand(out)
        codes = reviewer_codes(out, reviewers)
        key = published / "key"
        log = VerdictLog(out, audit_trail(out, key))
        logs.append(log)
        names = {code: name for name, code in codes.items()}
        state = ReviewState(
            *(out, log, Readers(tuple(names), **sharing), OpenCases(out, key), names),
            partial(_publish, out, key),
        )
        state.worklist.refresh()
        sessions = Sessions(list(names))
        app = make_app(state, sessions, [ORIGIN])
        return Server(out, state, sessions, app, sorted(state.worklist.cases))

    yield start
    while logs:
        logs.pop().close()


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve()
