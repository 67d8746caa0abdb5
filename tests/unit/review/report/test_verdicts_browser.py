"""Verdicts in the report, in a browser: column, filter, order, the page of a case, axe-core."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from scanloom.review.report.page import write_report
from scanloom.review.verdicts.log import VerdictLog
from scanloom.review.verdicts.verdict import Verdict, seen_of
from support.axe import axe_core, violations
from support.review_browser import chromium
from support.review_cases import affine_of, publish, scan_array

__all__ = ["chromium"]
pytestmark = pytest.mark.reference

DECISIONS = ("accept", "edit", None)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three cases: accepted, to be edited, not reviewed."""
    folder = tmp_path_factory.mktemp("verdicts")
    published = [publish(folder, scan_array(n), affine_of(), str(n)) for n in range(len(DECISIONS))]
    with closing(VerdictLog(folder / "out")) as log:
        for case, decision in zip(published, DECISIONS, strict=True):
            if decision is not None:
                log.append(Verdict(case.name, "r1", seen_of(case), decision))
    return write_report(folder / "out")


@pytest.mark.parametrize("width", [1280, 390])
def test_verdicts_are_filtered_sorted_and_shown(chromium: Any, page: Path, width: int) -> None:
    tab = chromium.new_context(viewport={"width": width, "height": 900}).new_page()
    tab.goto(page.as_uri())
    rows, count = tab.locator("#rows tr"), tab.locator("#count")

    assert "not reviewed" in tab.locator("#rows").inner_text()
    if width > 800:
        tab.get_by_role("button", name="Verdict", exact=True).click()
    else:
        tab.locator("#sort").select_option("verdict")
    shown = [cell.inner_text() for cell in tab.locator("#rows td[data-name=Verdict]").all()]
    assert shown == sorted(shown, reverse=shown[0] > shown[-1])
    assert {"accepted", "needs edit", "not reviewed"} == set(shown)
    assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    tab.evaluate(axe_core())
    assert violations(tab) == []
    if folder := os.environ.get("SCANLOOM_PICTURES"):
        tab.screenshot(path=Path(folder) / f"report-verdicts-{width}.png", full_page=True)
    tab.locator("#verdict").select_option("needs edit")
    assert (count.inner_text(), rows.count()) == ("1 of 3 series", 1)
    assert "needs edit" in rows.first.inner_text()
    rows.first.locator("th a").click()
    assert "Verdict of the reviewers: needs edit" in tab.locator("#case-body").inner_text()
