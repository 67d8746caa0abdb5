"""A server that is killed under two reviewers: verdicts that were answered are kept."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from scanloom.review.verdicts.log import read_verdicts
from support.processes import next_line
from support.review_cases import enter, judged, origin_of

KILLS = 40
SERVER = """
import json, sys
from pathlib import Path
from scanloom.review.server.serve import ServerOptions, serve
options = ServerOptions(("anna", "ben"))
serve(Path(sys.argv[1]), options, lambda links: print(json.dumps(links), flush=True))
"""
Answered = list[tuple[int, str, str]]


def decide(link: str, reviewer: str, answered: Answered, refused: list[int]) -> None:
    """Give verdicts about both cases in turn until the server is gone."""
    origin = origin_of(link)
    with httpx.Client(base_url=origin, headers={"origin": origin}, timeout=20) as client:
        enter(client, link)
        names = [row["id"] for row in client.get("/api/worklist").json()["cases"]]
        cases = [client.get(f"/api/case/{name}").json() for name in names]
        try:
            for n in range(10**6):
                case = cases[n % 2]
                body = judged(case, comment="why" if n % 3 else "")
                answer = client.post(f"/api/case/{case['id']}/verdict", json=body)
                if answer.status_code != 200:
                    refused.append(answer.status_code)
                else:
                    answered.append((answer.json()["number"], case["id"], reviewer))
                    case["last"] = answer.json()["last"]
        except httpx.TransportError:
            return  # killed


def killed(out: Path, seconds: float) -> tuple[Answered, list[int]]:
    """Start a server, let two reviewers decide, and kill it."""
    answered: Answered = []
    refused: list[int] = []
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(out)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        threads = []
        try:
            links: dict[str, Any] = json.loads(next_line(server))
            for n, link in enumerate(links.values(), 1):
                reviewer = (link, f"r{n}", answered, refused)
                threads.append(threading.Thread(target=decide, args=reviewer))
                threads[-1].start()
            deadline = time.monotonic() + 30
            while len(answered) < 4 and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(seconds)
        finally:
            server.kill()
        for thread in threads:
            thread.join()
    return answered, refused


@pytest.mark.slow
def test_answered_verdicts_survive_kills_of_the_server(published: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(published / "out", out, copy_function=shutil.copy2)
    answered: Answered = []
    for n in range(KILLS):
        accepted, refused = killed(out, 0.011 * (n % 7))
        answered += accepted
        kept = read_verdicts(out)
        assert refused == []
        assert [each.number for each in kept] == list(range(1, len(kept) + 1))

    by_number = {each.number: (each.number, each.case, each.reviewer) for each in kept}
    assert len(answered) >= 4 * KILLS
    assert len({number for number, _, _ in answered}) == len(answered)
    assert all(by_number[each[0]] == each for each in answered)
