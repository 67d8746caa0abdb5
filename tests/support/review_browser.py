"""The review as a program, in a real Chromium."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from support.review_cases import origin_of


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = os.environ.get("SCANLOOM_CHROMIUM") or shutil.which("chromium")
    if program is None:
        pytest.skip("Chromium is not installed (SCANLOOM_CHROMIUM)")
    with sync_api.sync_playwright() as play:
        options = ["--no-sandbox", "--disable-gpu"]
        browser = play.chromium.launch(executable_path=program, args=options)
        yield browser
        browser.close()


class Running:
    """`scanloom review` as a program."""

    def __init__(self, out: Path, key: Path, *options: str) -> None:
        command = [
            sys.executable,
            "-m",
            "scanloom",
            "review",
            str(out),
            "--key",
            str(key),
            *options,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.links: dict[str, str] = {}
        for line in self.process.stdout:
            if match := re.match(r"(\w+): (http\S+)", line):
                self.links[match[1]] = match[2]
            if line.startswith("Each link"):
                break

    def stop(self) -> str:
        """Stop it as Ctrl-C does; return its output."""
        self.process.send_signal(signal.SIGINT)
        try:
            messages, _ = self.process.communicate(timeout=30)
        finally:
            self.process.kill()
        return str(messages)


def opened(browser: Any, link: str, width: int = 1280, scheme: str = "light") -> tuple[Any, Any]:
    """Follow a reviewer's link; return the tab, and its messages and requests elsewhere."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, has_touch=width < 500
    )
    tab, messages = context.new_page(), []
    tab.on("console", lambda message: messages.append(message.text))
    tab.on("pageerror", lambda error: messages.append(str(error)))
    origin = origin_of(link)
    tab.on("request", lambda r: r.url.startswith((origin, "blob:")) or messages.append(r.url))
    tab.goto(link)
    tab.wait_for_url(link.partition("#")[0])
    tab.wait_for_selector("#filters button", state="attached")
    return tab, messages


def asked(tab: Any, path: str) -> Any:
    """Ask the server for something as a page does, with its session; return the body."""
    reviewer = tab.url.split("/")[3]
    session = tab.evaluate(f"localStorage.getItem('scanloom session {reviewer}')")
    headers = {"Authorization": f"Bearer {session}"}
    return tab.request.get(f"{origin_of(tab.url)}{path}", headers=headers)


def until(tab: Any, holds: Callable[[], object]) -> None:
    """Wait until something holds; fail after 15 s."""
    for _ in range(300):
        if holds():
            return
        tab.wait_for_timeout(50)  # events of the page arrive meanwhile
    pytest.fail("what was waited for did not happen")


def wait_for_frames(tab: Any) -> None:
    """Wait until the page was drawn with what is in memory."""
    tab.evaluate("() => new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)))")


def picture_of(tab: Any, plane: str) -> NDArray[np.uint8]:
    """Return the pixels of a plane without its frame and caption."""
    wait_for_frames(tab)
    box = tab.locator(f"#{plane}").bounding_box()
    frame, caption = 2, 60
    clip = {
        "x": box["x"] + frame,
        "y": box["y"] + frame,
        "width": box["width"] - 2 * frame,
        "height": box["height"] - caption,
    }
    with Image.open(io.BytesIO(tab.screenshot(clip=clip))) as image:
        return np.asarray(image.convert("RGB"))
