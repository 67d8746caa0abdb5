"""A review server at an address: TLS, and reasons that keep it from starting."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from scanloom.core import Reason, ScanError
from scanloom.io.output.private import private_folder
from scanloom.review.server.serve import ServerOptions, serve
from scanloom.review.verdicts.log import VerdictLog, read_verdicts
from scanloom.review.verdicts.readers import Readers, kept_readers, remove_reviewer
from scanloom.review.verdicts.verdict import Verdict
from support.commands import scanloom
from support.https_server import write_certificate
from support.processes import next_line
from support.review_cases import enter, origin_of, seen

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
            yield json.loads(next_line(server))["anna"]
        finally:
            server.kill()


def test_tls(out: Path, tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    context = ssl.create_default_context(cafile=str(certificate))
    with running(out, certificate, key) as link, httpx.Client(verify=context) as client:
        assert link.startswith("https://127.0.0.1:")
        origin = origin_of(link)
        client.base_url, client.headers["origin"] = httpx.URL(origin), origin
        enter(client, link)
        assert client.get("/api/me").json()["name"] == "anna"
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


class Stopped(Exception):
    """The server was about to run."""


def links(out: Path, options: ServerOptions) -> list[str]:
    """Return the names of those who get a link; the server does not run."""

    def stop(told: dict[str, str]) -> None:
        raise Stopped(*told)

    with pytest.raises(Stopped) as caught:
        serve(out, options, stop)
    return list(caught.value.args)


def test_a_restart_without_options_keeps_reviewers_and_shares(out: Path) -> None:
    assert links(out, ServerOptions(())) == ["reviewer"]
    assert links(out, ServerOptions(("anna", "ben"), double=0.5)) == ["anna", "ben"]
    [case, _] = sorted((out / "cases").iterdir())
    with closing(VerdictLog(out)) as log:
        log.append(Verdict(case.name, "r2", seen(case), "accept"))

    assert links(out, ServerOptions(())) == ["anna", "ben"]
    assert links(out, ServerOptions(("Ben",))) == ["ben"]
    with pytest.raises(ScanError, match=r"began with --double 0\.5, not 0\.2"):
        serve(out, ServerOptions((), double=0.2), lambda _: None)
    assert kept_readers(out) == Readers(("r2", "r3"), 0.5)


def test_a_folder_that_waits_for_its_first_result_is_served(tmp_path: Path) -> None:
    """As beside a `listen` that was just started."""
    out = tmp_path / "out"
    with private_folder(out, "fingerprint"):
        pass
    assert links(out, ServerOptions(("anna",))) == ["anna"]

    refused = scanloom("review", out, "--remove-reviewer", "r9")
    (out / "listen").mkdir()
    known = scanloom("review", out, "--remove-reviewer", "r9")

    assert "NO_RESULTS" in refused.err
    assert "no such reviewer" in known.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model spleen", "--model tells which results --take corrects"),
        ("--take a.nrrd --case b --remove-reviewer r1", "one after the other"),
        ("--json", "No such option: --json"),  # there is no document
    ],
)
def test_options_without_effect_are_refused(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    refused = scanloom("review", "out", *words.split())

    assert refused.code == 2
    assert message in refused.err


def test_a_second_server_is_told_where_the_first_one_is(out: Path) -> None:
    refused = list[ScanError]()

    def second(links: dict[str, str]) -> None:
        with pytest.raises(ScanError) as caught:
            serve(out, ServerOptions(()), lambda _: None)
        refused.append(caught.value)
        with pytest.raises(ScanError) as caught:
            remove_reviewer(out, "r1")
        refused.append(caught.value)
        raise Stopped(*links.values())

    with pytest.raises(Stopped) as stopped:
        serve(out, ServerOptions(("anna",)), second)

    [link] = stopped.value.args
    assert {error.reason for error in refused} == {Reason.REVIEW_OPEN}
    assert all(origin_of(link) in error.detail for error in refused)
    assert all(link.partition("#")[2] not in str(error) for error in refused)
    assert (out / "review" / ".lock").read_bytes() == b""


def test_a_reviewer_who_was_removed_gets_no_link(out: Path) -> None:
    assert links(out, ServerOptions(("anna", "ben", "cai"), double=0.5)) == ["anna", "ben", "cai"]
    [case, _] = sorted((out / "cases").iterdir())
    with closing(VerdictLog(out)) as log:
        log.append(Verdict(case.name, "r2", seen(case), "accept"))

    assert remove_reviewer(out, "BEN") == "r2"

    assert links(out, ServerOptions(())) == ["anna", "cai"]
    assert [each.reviewer for each in read_verdicts(out)] == ["r2"]
    assert kept_readers(out) == Readers(("r1", "r3"), 0.5, 0.0, ("r2",))
    with pytest.raises(ScanError, match="no such reviewer: the list has r1, r3") as caught:
        remove_reviewer(out, "r2")
    assert caught.value.reason is Reason.ID_UNKNOWN
    with pytest.raises(ScanError, match="two reviewers"):
        remove_reviewer(out, "r1")
    assert links(out, ServerOptions(("Ben",))) == ["ben"]
    assert kept_readers(out) == Readers(("r1", "r3", "r2"), 0.5)
