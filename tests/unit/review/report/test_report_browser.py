"""The report in a real browser: from disk, by keyboard, on a phone, and judged by axe-core.

Needs playwright and a Chromium (SCANLOOM_CHROMIUM, or on the path); axe-core's file by SCANLOOM_AXE
(`npm pack axe-core`, then `package/axe.min.js` of it). Skipped by name where they are not there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scanloom.core import Reason
from scanloom.review.report.page import write_report
from support.make_report import add_failure, id_of, make_out, measured

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not here")
    program = os.environ.get("SCANLOOM_CHROMIUM") or shutil.which("chromium")
    if program is None:
        pytest.skip("Chromium is not here (SCANLOOM_CHROMIUM)")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_out(tmp_path_factory.mktemp("browser") / "out", 80))


def opened(browser: Any, page: Path, width: int = 1280, scheme: str = "light") -> tuple[Any, Any]:
    """Open a page; return the tab, and what it complained of and asked for."""
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme, bypass_csp=False
    )
    tab, said = context.new_page(), []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda r: r.url.startswith("file:") or said.append(r.url))
    tab.goto(page.as_uri())
    return tab, said


@pytest.mark.parametrize("width", [1280, 768, 390, 320])
def test_nothing_is_wider_than_the_screen(chromium: Any, page: Path, width: int) -> None:
    tab, said = opened(chromium, page, width)

    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.locator("#rows tr").count() == 30
    assert said == []


def test_cases_are_filtered_and_sorted(chromium: Any, page: Path) -> None:
    tab, said = opened(chromium, page)
    count = tab.locator("#count")

    assert count.inner_text() == "80 of 80 cases"
    tab.locator("#status").select_option("failed")
    assert count.inner_text() == "3 of 80 cases"
    tab.locator("#status").select_option("")
    tab.locator("#search").fill("liver LARGE")
    assert count.inner_text() == "1 of 80 cases"
    assert id_of(3) in tab.locator("#rows").inner_text()
    tab.locator("#search").fill("")
    tab.get_by_role("button", name="Case").click()
    first = tab.locator("#rows th").first.inner_text()
    assert first == min(id_of(n) for n in range(80))
    assert tab.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    assert said == []


def test_it_is_used_by_keyboard(chromium: Any, page: Path) -> None:
    tab, _ = opened(chromium, page)

    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the cases"
    tab.keyboard.press("Enter")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "search"
    tab.locator("th[data-key=id] button").focus()
    tab.keyboard.press("Enter")
    assert tab.locator("th[aria-sort]").get_attribute("data-key") == "id"
    tab.locator("#next").focus()
    tab.keyboard.press("Enter")
    assert tab.locator("#page").inner_text() == "Page 2 of 3"
    summary = tab.locator("#rows summary").first
    summary.focus()
    tab.keyboard.press("Enter")
    tab.locator("#rows .volumes dd").first.wait_for()  # filled by an event
    assert "ml" in tab.locator("#rows .volumes").first.inner_text()


def test_pictures_load(chromium: Any, page: Path) -> None:
    tab, _ = opened(chromium, page)
    tab.evaluate("document.querySelectorAll('img').forEach((i) => { i.loading = 'eager'; })")
    tab.wait_for_function("[...document.images].every((image) => image.complete)")

    assert tab.evaluate("[...document.images].every((image) => image.naturalWidth > 0)")


def test_a_hostile_word_stays_a_word(chromium: Any, tmp_path: Path) -> None:
    from support.make_report import add_case

    word = "<img src=x onerror=\"document.title='taken'\">"
    add_case(tmp_path, id_of(1), [measured(word, word, 5.0)])
    add_failure(tmp_path, id_of(2), Reason.DAMAGED, word)
    tab, said = opened(chromium, write_report(tmp_path))

    tab.locator("#rows summary").click()

    assert word in tab.locator("#rows").inner_text()
    assert tab.title() == "scanloom: report"
    assert tab.locator("#rows img").count() == 0
    assert said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("cases", [80, 0])
def test_axe_has_nothing_against_it(
    chromium: Any, page: Path, tmp_path: Path, scheme: str, width: int, cases: int
) -> None:
    axe = Path(os.environ.get("SCANLOOM_AXE", "axe"))
    if not axe.is_file():
        pytest.skip("axe-core is not here (SCANLOOM_AXE)")
    if not cases:
        (tmp_path / "cases").mkdir()
        page = write_report(tmp_path)
    tab, _ = opened(chromium, page, width, scheme)

    tab.evaluate(axe.read_text(encoding="utf-8"))
    found = tab.evaluate("axe.run()")

    assert [f"{v['id']}: {v['nodes'][0]['html'][:200]}" for v in found["violations"]] == []
    assert len(found["passes"]) > 15
