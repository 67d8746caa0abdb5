"""The report in a real browser: from disk, by keyboard, on a phone, and judged by axe-core.

Needs playwright and a Chromium (SCANLOOM_CHROMIUM, or on the path). axe-core is that of the package
axe-playwright-python, or the file that SCANLOOM_AXE names. Skipped by name where they are missing.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scanloom.core import Flag, Reason
from scanloom.review.preview.page import draw_preview
from scanloom.review.report import page as page_module
from scanloom.review.report import parts as parts_module
from scanloom.review.report.page import write_report
from support.axe import axe_core, violations
from support.layouts import fan_by_hand
from support.make_report import add_case, add_failure, id_of, make_out, measured, usual
from support.review_browser import chromium
from support.review_phantoms import case, torso

__all__ = ["chromium"]
pytestmark = pytest.mark.reference

REFERENCE = {
    "structure": "liver",
    "quantity": "mean_hu",
    "range": {"low": 0.0, "high": 40.0},
    "source": "A page of a book.",
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighty cases; of one, a structure of the preview is unusual and at the border."""
    out = make_out(tmp_path_factory.mktemp("browser") / "out", 80)
    scan = case(*torso())
    page = out / "phantom.png"
    draw_preview(*scan, [], page)
    left_structure = next(m for m in scan[2] if m.label == "s2")
    seen = measured("organs", "liver", 4000.0, box=left_structure.box, flags=(Flag.TOUCHES_BORDER,))
    rest = usual(np.random.default_rng(5))[1:]
    add_case(out, id_of(500), [seen, *rest], flags=(Flag.SHEARED,), preview=page)
    return out


@pytest.fixture(scope="module")
def page(out: Path) -> Path:
    return write_report(out)


@pytest.fixture(scope="module")
def parts_page(out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same report in parts of seven rows, and the words of sixteen."""
    copied = tmp_path_factory.mktemp("parts") / "out"
    shutil.copytree(out, copied, ignore=shutil.ignore_patterns("report"))
    with pytest.MonkeyPatch.context() as patch:
        for module in (page_module, parts_module):
            patch.setattr(module, "ROWS", 7)
            patch.setattr(module, "TEXTS", 16)
        patch.setattr(page_module, "WHOLE", 20)
        return write_report(copied)


def wait_until(tab: Any, condition: str) -> None:
    """Wait for a condition; the page's policy forbids `wait_for_function`, which polls by eval."""
    for _ in range(500):
        if tab.evaluate(condition):
            return
        tab.wait_for_timeout(20)
    raise AssertionError(f"never true: {condition}")


def opened(
    browser: Any, page: Path, width: int = 1400, scheme: str = "light", hash_: str = ""
) -> tuple[Any, Any]:
    """Open a page; return the tab, and its console messages and its requests elsewhere."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=False
    )
    tab, messages = context.new_page(), []
    tab.on("console", lambda message: messages.append(message.text))
    tab.on("pageerror", lambda error: messages.append(str(error)))
    tab.on("request", lambda r: r.url.startswith("file:") or messages.append(r.url))
    tab.goto(page.as_uri() + hash_)
    return tab, messages


def overflow(tab: Any) -> int:
    """Return by how many pixels the page is wider than the screen."""
    return tab.evaluate("document.documentElement.scrollWidth - innerWidth")


@pytest.mark.parametrize("width", [1400, 768, 390, 320])
def test_nothing_is_wider_than_the_screen(chromium: Any, page: Path, width: int) -> None:
    tab, messages = opened(chromium, page, width)

    assert overflow(tab) <= 0
    assert tab.locator("#rows tr").count() == 30
    tab.locator("#reasons summary").first.click()
    tab.locator("#rows tr:first-child th a").click()
    assert overflow(tab) <= 0
    body = tab.locator("#case-body")
    assert body.evaluate("e => e.scrollWidth - e.clientWidth") <= 0
    assert messages == []


def test_cases_are_filtered_and_sorted(chromium: Any, page: Path) -> None:
    tab, messages = opened(chromium, page)
    count = tab.locator("#count")

    assert count.inner_text() == "81 of 81 series"
    tab.locator("#status").select_option("failed")
    assert count.inner_text() == "3 of 81 series"
    tab.locator("#status").select_option("")
    tab.locator("#search").fill("liver LARGE")
    assert count.inner_text() == "2 of 81 series"
    assert id_of(3) in tab.locator("#rows").inner_text()
    tab.locator("#search").fill("")
    tab.get_by_role("button", name="Case", exact=True).click()
    first = tab.locator("#rows th").first.inner_text()
    assert first == min(id_of(n) for n in (*range(80), 500))
    assert tab.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    assert messages == []


ACTS: tuple[tuple[str, str], ...] = (
    ("#search", "liver LARGE"),
    ("#search", "slice_gap"),
    ("#search", id_of(3)[4:9]),
    ("#search", "kidney"),
    ("volume", ""),
    ("volume", ""),
    ("#structure", "3"),
    ("#search", ""),
    ("#flag", "SHEARED"),
    ("id", ""),
    ("id", ""),
    ("#flag", ""),
    ("seconds", ""),
    ("status", ""),
    ("#next", ""),
    ("#status", "failed"),
    ("#status", ""),
    ("risk", ""),
    ("risk", ""),
    ("#review", ""),
)


def test_a_report_in_parts_shows_what_a_whole_one_does(
    chromium: Any, page: Path, parts_page: Path
) -> None:
    """The same rows in the same order, whatever is searched, chosen, sorted and turned to."""
    assert "data/" in parts_page.read_text()
    tabs = [opened(chromium, each) for each in (page, parts_page)]
    for field, value in ACTS:
        shown = []
        for tab, _ in tabs:
            if not field.startswith("#"):
                tab.locator(f"th[data-key={field}] button").click()
            elif field in ("#next", "#review"):
                tab.locator(field).click()
            elif field == "#search":
                tab.locator(field).fill(value)
            else:
                tab.locator(field).select_option(value)
            for _ in range(100):  # the whole report is there at once
                if not shown or table_of(tab) == shown[0]:
                    break
                tab.wait_for_timeout(50)
            shown.append(table_of(tab))
        assert shown[0] == shown[1], (field, value)
    assert [messages for _, messages in tabs] == [[], []]


def table_of(tab: Any) -> list[str]:
    """Return the count, page and rows that a page shows."""
    return [
        *tab.locator("#count, #page").all_inner_texts(),
        *tab.locator("#rows tr").all_inner_texts(),
    ]


def test_a_case_of_a_report_in_parts_has_an_address(chromium: Any, parts_page: Path) -> None:
    tab, messages = opened(chromium, parts_page, hash_=f"#case={id_of(44)}&sort=id-up&page=2")
    title, place = tab.locator("#case-title"), tab.locator("#case-place")
    wait_until(tab, "document.getElementById('case').open")

    assert title.inner_text() == f"Case {id_of(44)}"
    ids = sorted(id_of(n) for n in (*range(80), 500))
    assert place.inner_text() == f"{ids.index(id_of(44)) + 1} of 81"
    tab.keyboard.press("ArrowRight")
    following = ids[ids.index(id_of(44)) + 1]
    wait_until(tab, f"document.getElementById('case-title').textContent.includes('{following}')")
    tab.keyboard.press("Escape")
    wait_until(tab, "!document.getElementById('case').open")
    assert tab.locator("#page").inner_text() == "Page 2 of 3"
    assert tab.locator("#rows th a").all_inner_texts() == ids[30:60]
    assert messages == []


def test_a_page_whose_parts_are_gone_says_so(
    chromium: Any, parts_page: Path, tmp_path: Path
) -> None:
    alone = shutil.copy(parts_page, tmp_path / "alone.html")

    tab, _ = opened(chromium, Path(alone))

    wait_until(tab, "document.getElementById('count').textContent.includes('not here')")


def test_failed_series_are_found_by_their_reason(chromium: Any, page: Path) -> None:
    tab, _ = opened(chromium, page)

    tab.locator("#search").fill("crashed")
    rows = tab.locator("#rows tr")
    assert rows.count() == 0
    tab.locator("#search").fill("slice_gap")

    assert rows.count() == 1
    assert "failed" in rows.inner_text()


def test_the_count_of_failures_leads_to_their_rows(chromium: Any, page: Path) -> None:
    tab, messages = opened(chromium, page)
    count = tab.locator(".figures div", has_text="failed").locator("a")
    failed = int(count.inner_text())

    count.click()

    wait_until(tab, "document.getElementById('status').value === 'failed'")
    assert tab.locator("#rows tr").count() == failed == 3
    assert tab.locator("#rows td.failed").count() == failed
    assert messages == []


def test_reasons_unfold_to_their_series(chromium: Any, page: Path) -> None:
    tab, messages = opened(chromium, page)
    reason = tab.locator("#reasons tr", has_text="SLICE_GAP")
    reason.locator("summary").click()
    case_id = reason.locator("a.id").inner_text()

    reason.locator("a.id").click()

    assert tab.locator("#case-title").inner_text() == f"Case {case_id}"
    assert f"scanloom where {case_id}" in tab.locator("#case-body").inner_text()
    assert messages == []


def test_back_keeps_filter_and_order(chromium: Any, page: Path) -> None:
    tab, messages = opened(chromium, page)
    tab.locator("#search").fill("kidney")
    tab.locator("th[data-key=volume] button").click()
    first = tab.locator("#rows th a").first.inner_text()

    tab.locator("#rows th a").first.click()
    assert f"case={first}" in tab.url
    tab.go_back()
    wait_until(tab, "!document.getElementById('case').open")
    assert "case=" not in tab.url
    tab.go_forward()
    wait_until(tab, "document.getElementById('case').open")
    assert f"case={first}" in tab.url
    tab.go_back()
    wait_until(tab, "!document.getElementById('case').open")
    assert "case=" not in tab.url

    assert tab.locator("#search").input_value() == "kidney"
    assert tab.locator("th[aria-sort]").get_attribute("data-key") == "volume"
    tab.locator("#rows th a").first.click()
    tab.locator("#case-close").click()
    wait_until(tab, "!location.hash.includes('case=')")
    assert "search=kidney" in tab.url
    tab.locator("#rows th a").first.click()
    tab.locator(".files a", has_text="case.json").click()
    tab.wait_for_url("**/case.json")
    tab.go_back()
    wait_until(tab, "document.getElementById('case').open")
    assert tab.locator("#case-title").inner_text() == f"Case {first}"
    assert tab.locator("#search").input_value() == "kidney"
    assert messages == []


def test_the_viewer_goes_to_the_next_and_the_previous_case(chromium: Any, page: Path) -> None:
    tab, messages = opened(chromium, page)
    ids = tab.locator("#rows th a").all_inner_texts()[:3]
    title = tab.locator("#case-title")
    tab.locator("#rows th a").first.click()

    assert tab.locator("#case-back").is_disabled()
    tab.locator("#case-next").click()
    tab.keyboard.press("ArrowRight")
    assert title.inner_text() == f"Case {ids[2]}"
    assert tab.locator("#case-place").inner_text() == "3 of 81"
    tab.keyboard.press("ArrowLeft")
    assert title.inner_text() == f"Case {ids[1]}"
    tab.keyboard.press("Escape")
    wait_until(tab, "!location.hash.includes('case=')")
    assert not tab.locator("#case").is_visible()
    assert messages == []


def test_a_case_has_an_address(chromium: Any, page: Path) -> None:
    """Its page lists findings, measurements, flags, files and the way to the source."""
    tab, messages = opened(chromium, page, hash_=f"#case={id_of(500)}")
    body = tab.locator("#case-body")

    assert tab.locator("#case").is_visible()
    text = body.inner_text()
    for heading in ("Measurements", "Flags", "Files", "Source", "SHEARED", "4000", "case.json"):
        assert heading in text
    assert Flag.SHEARED.text in text
    links = body.locator(".files a").evaluate_all("links => links.map((link) => link.href)")
    assert links
    assert all(Path(link.removeprefix("file://")).is_file() for link in links)
    assert messages == []


def test_a_finding_shows_its_place_in_the_cohort(chromium: Any, page: Path) -> None:
    tab, _ = opened(chromium, page, hash_=f"#case={id_of(500)}")
    finding = tab.locator(".cards li", has_text="4000 ml is large")

    assert "78 cases, median" in finding.locator("figcaption").inner_text()
    dot, band = (
        finding.locator(f"svg.strip {mark}").bounding_box() for mark in (".unusual", ".usual")
    )
    assert dot["x"] > band["x"] + band["width"]
    for row in (tab.locator("#rows tr", has_text=id_of(500)),):
        assert row.locator("svg.strip .unusual").count() == 1


def test_a_finding_shows_its_slice(chromium: Any, page: Path) -> None:
    """The pixels of the slice are drawn, and the outline surrounds the marked structure."""
    from io import BytesIO

    from PIL import Image

    tab, _ = opened(chromium, page, hash_=f"#case={id_of(500)}")
    tab.wait_for_load_state("networkidle")
    slice_ = tab.locator(".cards li", has_text="4000 ml is large").locator("svg.slice")
    box, outline = slice_.bounding_box(), slice_.locator("rect").bounding_box()

    picture = Image.open(BytesIO(slice_.screenshot())).convert("RGB")
    pixels = np.asarray(picture).astype(int)
    red = np.argwhere((pixels[..., 0] - pixels[..., 1:].max(axis=-1)) > 60)
    assert len(red) > 20
    middle = red.mean(axis=0)
    assert abs(middle[1] - (outline["x"] - box["x"] + outline["width"] / 2)) < 4
    assert abs(middle[0] - (outline["y"] - box["y"] + outline["height"] / 2)) < 4


def test_a_few_cases_are_compared_with_the_card(chromium: Any, tmp_path: Path) -> None:
    add_case(tmp_path, id_of(1), [measured("organs", "liver", 900.0)], references=[REFERENCE])
    tab, messages = opened(chromium, write_report(tmp_path), hash_=f"#case={id_of(1)}")
    finding = tab.locator(".cards li")

    assert "mean 50 HU is high (reference range 0 to 40 HU)" in finding.inner_text()
    assert "A page of a book." in finding.inner_text()
    assert finding.locator("svg.strip .unusual").count() == 1
    assert messages == []


def test_without_cohort_and_reference_ranges_the_page_tells_it(
    chromium: Any, tmp_path: Path
) -> None:
    add_case(tmp_path, id_of(1), [measured("organs", "liver", 900.0)])
    tab, _ = opened(chromium, write_report(tmp_path))

    assert "The cards of the models state no reference ranges" in tab.locator("main").inner_text()
    assert tab.locator("svg").count() == 0


def test_it_is_used_by_keyboard(chromium: Any, page: Path) -> None:
    tab, _ = opened(chromium, page)

    tab.locator("body").press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the cases"
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
    wait_until(tab, "[...document.images].every((image) => image.complete)")

    assert tab.evaluate("[...document.images].every((image) => image.naturalWidth > 0)")


def test_the_picture_of_a_case_in_a_subfolder_loads(
    chromium: Any, out: Path, tmp_path: Path
) -> None:
    shutil.copytree(out, tmp_path / "out", ignore=shutil.ignore_patterns("report"))
    fan_by_hand(tmp_path / "out")
    tab, messages = opened(chromium, write_report(tmp_path / "out"), hash_=f"#case={id_of(500)}")
    picture = tab.locator(f"#case-body img[alt='Preview of case {id_of(500)}']").first

    picture.wait_for()
    wait_until(tab, "[...document.querySelectorAll('#case-body img')].every((i) => i.complete)")
    assert picture.evaluate("image => image.naturalWidth") > 0
    assert f"/cases/_{id_of(500)[-2:]}/{id_of(500)}/" in picture.evaluate("image => image.src")
    assert messages == []


def test_a_hostile_word_stays_a_word(chromium: Any, tmp_path: Path) -> None:
    payload = "<img src=x onerror=\"document.title='taken'\">"
    add_case(tmp_path, id_of(1), [measured(payload, payload, 5.0)])
    add_failure(tmp_path, id_of(2), Reason.DAMAGED, payload)
    tab, messages = opened(chromium, write_report(tmp_path))

    tab.locator("#rows summary").click()

    assert payload in tab.locator("#rows").inner_text()
    assert tab.title() == "scanloom: report"
    assert tab.locator("#rows img").count() == 0
    assert messages == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_axe_finds_no_violation(chromium: Any, page: Path, scheme: str, width: int) -> None:
    """Table, unfolded reasons, and the page of a case."""
    script = axe_core()
    tab, _ = opened(chromium, page, width, scheme)
    tab.evaluate(script)

    assert violations(tab) == []
    for summary in tab.locator("#reasons summary, #provenance summary, #rows summary").all():
        summary.click()
    assert violations(tab) == []
    tab.locator("#rows th a").first.click()
    tab.locator("#case-body svg.strip").first.wait_for()
    assert violations(tab) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation_without_cases(chromium: Any, tmp_path: Path, scheme: str) -> None:
    script = axe_core()
    (tmp_path / "cases").mkdir()
    tab, _ = opened(chromium, write_report(tmp_path), 390, scheme)
    tab.evaluate(script)

    assert violations(tab) == []
