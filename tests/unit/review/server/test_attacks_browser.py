"""Attacks on the review in a real browser, and a server that is killed while she paints.

Needs playwright and a Chromium (SCANLOOM_CHROMIUM, or on the path).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scanloom.review.verdicts.log import read_verdicts
from support.processes import next_line
from support.review_browser import Running, asked, chromium, opened, until
from support.review_cases import affine_of, judged, origin_of, publish, scan_array

pytestmark = pytest.mark.reference

__all__ = ["chromium"]

NOBODY = 65_534
KILLS = 20
LISTENER = """
import http.server, json, os, sys, urllib.request
import email.parser, encodings.idna, html, mimetypes  # the other user may not read Python's folder
if os.getuid() == 0:
    os.setuid(int(sys.argv[1]))
heard = []
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/heard":
            body = json.dumps([os.getuid(), heard]).encode()
        else:
            heard.append(dict(self.headers))
            body = b"<title>bait</title>"
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attacked")
    publish(folder, scan_array(1), affine_of("LAS", 20.0), "one", also=("image",))
    publish(folder, scan_array(3, (9, 17, 12)), affine_of("SPL"), "three")
    return folder


@pytest.fixture
def out(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder / "out", tmp_path / "out", copy_function=shutil.copy2)
    return tmp_path / "out"


@pytest.fixture
def bait() -> Iterator[str]:
    """A server of another user at another port of 127.0.0.1; it notes the requests of browsers."""
    command = [sys.executable, "-c", LISTENER, str(NOBODY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{next_line(process).strip()}"
        finally:
            process.kill()


def test_a_server_of_another_user_gets_nothing_and_can_do_nothing(
    chromium: Any, folder: Path, out: Path, bait: str
) -> None:
    """She follows a link to it; it replays all that her browser sent, and its page tries too."""
    server = Running(out, folder / "key", "--reviewers", "anna")
    try:
        tab, _ = opened(chromium, server.links["anna"])
        origin, name = origin_of(tab.url), tab.inner_text("#rows a.id >> nth=0")
        verdict = judged(asked(tab, f"/api/case/{name}").json(), "reject")
        second_tab = tab.context.new_page()
        second_tab.goto(bait)
        tried = second_tab.evaluate(
            """async ([origin, path, body]) => {
              const sent = { method: "POST", credentials: "include", mode: "cors",
                headers: { "Content-Type": "application/json" }, body };
              const plain = { method: "POST", credentials: "include", mode: "no-cors", body };
              const said = [];
              for (const options of [sent, plain, { credentials: "include" }]) {
                try { said.push((await fetch(origin + path, options)).status); }
                catch { said.push("refused"); }
              }
              said.push(Object.keys(localStorage).length, document.cookie);
              return said;
            }""",
            [origin, f"/api/case/{name}/verdict", json.dumps(verdict)],
        )
        uid, heard = json.loads(second_tab.request.get(f"{bait}/heard").text())
        assert heard
        assert uid == (NOBODY if os.getuid() == 0 else os.getuid())
        session = tab.evaluate("localStorage.getItem('scanloom session r1')")
        assert not any(session in value for each in heard for value in each.values())
        for each in heard:
            stolen = {k: v for k, v in each.items() if k.lower() in ("cookie", "authorization")}
            for path in ("/api/me", "/api/worklist", f"/api/case/{name}"):
                answer = second_tab.request.get(f"{origin}{path}", headers=stolen)
                assert answer.status == 403
        assert tried == ["refused", "refused", "refused", 0, ""]
        assert read_verdicts(out) == []
        tab.reload()
        tab.wait_for_selector("#filters button")
    finally:
        server.stop()


def test_two_servers_and_two_reviewers_share_a_browser(
    chromium: Any, folder: Path, out: Path, tmp_path: Path
) -> None:
    """Reload, further tabs, another port, another reviewer: each page keeps its session."""
    second = tmp_path / "second"
    shutil.copytree(folder / "out", second, copy_function=shutil.copy2)
    servers = [Running(each, folder / "key", "--reviewers", "anna,ben") for each in (out, second)]
    try:
        tab, _ = opened(chromium, servers[0].links["anna"])
        pages = [tab]
        for link in (servers[0].links["ben"], *servers[1].links.values()):
            page = tab.context.new_page()
            page.goto(link)
            page.wait_for_selector("#filters button")
            pages.append(page)
        twin = tab.context.new_page()
        twin.goto(tab.url)
        pages.append(twin)
        for page in pages:
            page.reload()
            page.wait_for_selector("#filters button")
        names = [page.inner_text("#reviewer") for page in pages]
        assert names == [f"Reviewer: {n}" for n in ("anna", "ben", "anna", "ben", "anna")]
        tab.goto(servers[0].links["anna"])  # used, in the browser that has its session
        tab.wait_for_selector("#filters button")
        assert "#" not in tab.url
        for n, (page, decision) in enumerate(zip(pages[:4], "aree", strict=True), 1):
            page.bring_to_front()
            page.locator("#rows a").first.click()
            page.wait_for_selector("body[data-opened]")
            page.keyboard.press(decision)
            page.click("#save")
            until(page, lambda n=n: sum(len(read_verdicts(o)) for o in (out, second)) == n)
        kept = {
            each: [(v.reviewer, v.decision) for v in read_verdicts(each)] for each in (out, second)
        }
        assert kept == {
            out: [("r1", "accept"), ("r2", "reject")],
            second: [("r1", "edit"), ("r2", "edit")],
        }
    finally:
        for server in servers:
            server.stop()


def test_strokes_that_were_answered_survive_kills(chromium: Any, folder: Path, out: Path) -> None:
    """`kill -9` while she paints, 20 times: each stroke that the page was told of is there."""
    answered = 0
    for n in range(KILLS):
        server = Running(out, folder / "key", "--reviewers", "anna")
        tab, _ = opened(chromium, server.links["anna"])
        tab.locator("#rows a").first.click()
        tab.wait_for_selector("body[data-opened]")
        name, statuses = tab.inner_text("#name"), list[int]()
        assert asked(tab, f"/api/case/{name}/draft").json()["undo"] >= answered

        def hear(response: Any, statuses: list[int] = statuses) -> None:
            if response.url.endswith("/stroke") and response.status == 200:
                statuses.append(json.loads(response.body())["undo"])

        tab.on("response", hear)
        if tab.get_attribute("#correct", "aria-pressed") != "true":
            tab.keyboard.press("b")
        tab.fill("#radius", "2.5")
        box = tab.locator("#axial canvas").first.bounding_box()
        rng = np.random.default_rng(n)
        for k in range(6):
            if k % 2:
                tab.keyboard.press("x")
            x, y = rng.uniform(0.1, 0.9, 2)
            tab.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])
            if k == 3:
                tab.wait_for_timeout(int(rng.integers(20, 250)))
        server.process.send_signal(signal.SIGKILL)
        server.process.communicate(timeout=30)
        tab.wait_for_timeout(100)
        answered = max([answered, *statuses])
        tab.context.close()
    server = Running(out, folder / "key", "--reviewers", "anna")
    try:
        tab, _ = opened(chromium, server.links["anna"])
        undo_count = asked(tab, f"/api/case/{name}/draft").json()["undo"]
        assert undo_count >= answered >= KILLS
        print(f"{answered} strokes answered, {undo_count} there after {KILLS} kills")
    finally:
        messages = server.stop()
    assert f"{undo_count} strokes of anna on case {name}" in messages
