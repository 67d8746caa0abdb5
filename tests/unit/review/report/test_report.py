"""The report's page: its content, content that can't get into it, and its requests."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from scanloom.core import Flag, Reason
from scanloom.io.output.json_file import write_json
from scanloom.review.report.page import write_report
from scanloom.review.report.parts import ROWS
from support.commands import scanloom
from support.layouts import both_layouts, fan_by_hand
from support.make_report import (
    add_case,
    add_failure,
    draw_noise,
    id_of,
    make_out,
    measured,
    usual,
    write_manifest,
)

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Page(HTMLParser):
    """The elements of a page, as a browser's parser would find them."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.scripts: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self._open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        tag = self._open[-1] if self._open else ""
        self.texts.append((tag, data))
        if tag == "script":
            self.scripts[-1] += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def words(self) -> str:
        return " ".join(text for tag, text in self.texts if tag not in ("script", "style"))

    @property
    def data(self) -> dict[str, Any]:
        """The data of the script, with the rows as "cases"."""
        data = json.loads(self.scripts[0])
        parts = [data["parts"][f"rows-{n}"] for n in range(-(-data["count"] // ROWS))]
        return {**data, "cases": [row for part in parts for row in part]}


def page_of(out: Path) -> Page:
    return Page(write_report(out))


@pytest.fixture(scope="module")
def thirty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_out(tmp_path_factory.mktemp("report") / "out", 30)


def test_it_is_sorted_by_risk(thirty: Path) -> None:
    cases = page_of(thirty).data["cases"]

    assert [c["risk"] for c in cases] == sorted((c["risk"] for c in cases), reverse=True)
    assert cases[0]["id"] == id_of(3)
    assert "liver" in cases[0]["findings"][0]["text"]
    assert cases[1]["status"] == "failed"
    assert [c["review"] for c in cases] == [True] + 29 * [False]
    assert sum(c["status"] == "done" for c in cases) == 29


def test_what_was_left_out_stands_there_by_reason(thirty: Path) -> None:
    page = page_of(thirty)

    assert "NOT_AN_IMAGE" in page.words
    assert Reason.NOT_AN_IMAGE.advice in page.words
    cells = " ".join(page.words.split())
    assert re.search(r"NOT_AN_IMAGE skipped +30 ", cells)
    assert re.search(r"SLICE_GAP \w+ 1 4 ", cells)
    assert re.search(r"116 files used, \d+ files skipped", cells)


def test_what_failed_in_an_earlier_run_stands_there_apart(tmp_path: Path) -> None:
    """Its scan is not among the files of the latest one: the counts of both places agree."""
    out = make_out(tmp_path / "out", 26)
    add_failure(out, id_of(100), Reason.TOO_FEW_SLICES)

    page = page_of(out)

    cells = " ".join(page.words.split())
    assert re.search(r"series 27 done 25 failed 2 ", cells)
    listed = re.findall(r"([A-Z]\w+) (failed\b[a-z, ]*) (\d+) (\d*)", cells)
    assert listed == [
        ("SLICE_GAP", "failed", "1", "4"),
        ("TOO_FEW_SLICES", "failed, not in the manifest", "1", ""),
    ]
    assert "by an earlier run over other files" in cells
    assert {"class": "id", "data-case": id_of(100), "href": f"#case={id_of(100)}"} in page.all("a")


def test_a_doubtful_result_stays_so_if_a_later_attempt_failed(tmp_path: Path) -> None:
    out = make_out(tmp_path / "out", 9)
    before = page_of(out).data["cases"][0]
    add_failure(out, before["id"], Reason.TOO_FEW_SLICES)
    add_failure(out, id_of(1), Reason.TOO_FEW_SLICES)

    after = page_of(out).data["cases"]

    risks = [(each["id"], each["risk"]) for each in after if each["status"] == "outdated"]
    assert risks == [(before["id"], before["risk"]), (id_of(1), 1.0)]
    assert before["risk"] > 1
    assert all(each["review"] for each in after[:2])


def test_failures_without_a_run_have_their_reasons_too(tmp_path: Path) -> None:
    """As of `segment`, which writes no manifest."""
    add_failure(tmp_path, id_of(0), Reason.SLICE_GAP)

    cells = " ".join(page_of(tmp_path).words.split())

    assert re.search(r"SLICE_GAP failed 1 \D", cells)
    assert "not in the manifest" not in cells.lower()


@both_layouts
def test_its_links_lead_somewhere(thirty: Path, tmp_path: Path, layout: str) -> None:
    out = tmp_path / "out"
    shutil.copytree(thirty, out)
    if layout == "fanned":
        fan_by_hand(out)
    page = page_of(out)
    report = out / "report"

    charts = [image["src"] for image in page.all("img")]
    assert charts == ["volumes.svg", "times.svg"]
    assert all((report / src).is_file() for src in charts)
    assert all(image["alt"] for image in page.all("img"))
    for case in page.data["cases"]:
        if case["status"] == "done":
            subfolder = case.get("subfolder", ".")
            assert (report / "../cases" / subfolder / case["id"] / "preview.png").is_file()


def test_a_box_of_the_chart_spans_the_quartiles(tmp_path: Path) -> None:
    """Positions are read back by the ticks of the logarithmic axis."""
    volumes = [1.0, 20.0, 22.0, 25.0, 30.0, 34.0, 900.0]
    for n, ml in enumerate(volumes):
        add_case(tmp_path, id_of(n), [measured("organs", "liver", ml)])
    write_report(tmp_path)

    svg = ET.parse(tmp_path / "report" / "volumes.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    ticks = {
        float(text.text or ""): float(text.attrib["x"])
        for text in svg.iter(f"{name}text")
        if (text.text or "").replace(".", "").isdigit()
    }
    slope, first = np.polyfit([*ticks.values()], np.log10([*ticks]), 1)
    [box] = svg.iter(f"{name}rect")
    remaining, width = float(box.attrib["x"]), float(box.attrib["width"])
    low, high = 10 ** (first + slope * np.array([remaining, remaining + width]))
    np.testing.assert_allclose((low, high), np.percentile(volumes, (25, 75)), rtol=0.01)
    beyond = [10 ** (first + slope * float(dot.attrib["cx"])) for dot in svg.iter(f"{name}circle")]
    np.testing.assert_allclose(sorted(beyond), (1.0, 900.0), rtol=0.01)


def test_it_asks_for_nothing_outside(thirty: Path) -> None:
    page = page_of(thirty)
    for chart in ("volumes.svg", "times.svg"):
        text = (thirty / "report" / chart).read_text(encoding="utf-8")
        assert set(re.findall(r"[a-z]+://[^\s\"'<>]*", text)) == {"http://www.w3.org/2000/svg"}
    named = re.findall(r"[a-z]+://[^\s\"'<>]*", (thirty / "report" / "index.html").read_text())
    assert set(named) == {"http://www.w3.org/2000/svg"}  # the name of SVG, which nobody fetches
    assert not page.all("link")
    assert not page.all("iframe")
    assert not any(name.startswith("on") for _, a in page.elements for name in a)
    assert not any("style" in attributes for _, attributes in page.elements)


def test_its_policy_lets_only_its_own_script_run(thirty: Path) -> None:
    page = page_of(thirty)
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv"))
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))

    assert rules["default-src"] == "'none'"
    assert set(rules) == {
        *("default-src", "img-src", "base-uri", "form-action", "script-src", "style-src")
    }
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    # and what this script adds: parts of the report
    assert rules["script-src"] == f"'sha256-{digest}' 'strict-dynamic'"
    assert "unsafe" not in policy


def test_names_of_its_modules_differ(thirty: Path) -> None:
    """They are joined into one module: a name that stands twice would be a syntax error."""
    script = page_of(thirty).scripts[1]
    names = re.findall(
        r"^(?:async )?(?:const|let|class|function) (?:\{.*\} = )?(\w+)", script, re.MULTILINE
    )

    assert len(names) > 10
    assert len(set(names)) == len(names)
    assert not re.search(r"^(?:import|export)\b", script, re.MULTILINE)


def test_nothing_hostile_gets_out_of_its_place(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    preview = draw_noise(tmp_path / "page.png")
    odd = [measured(HOSTILE, HOSTILE, 5.0), *usual(rng)]
    add_case(tmp_path, id_of(1), odd, preview=preview)
    add_failure(tmp_path, id_of(2), Reason.DAMAGED, HOSTILE)
    write_manifest(tmp_path, [(HOSTILE, HOSTILE, HOSTILE)])
    run = tmp_path / "runs" / "20260101T000000-000000"
    run.mkdir(parents=True)
    write_json(run / "workflow.json", {"name": HOSTILE})
    write_json(run / "status.json", {"run": HOSTILE, "state": HOSTILE, "elapsed_s": 1.0})

    page = page_of(tmp_path)

    assert len(page.all("script")) == 2
    assert [image["src"] for image in page.all("img")] == ["volumes.svg", "times.svg"]
    assert HOSTILE in page.words
    assert any(HOSTILE in name for name in page.data["structures"])
    html = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "<img src=x" not in html
    svg = (tmp_path / "report" / "volumes.svg").read_text(encoding="utf-8")
    assert "<script" not in svg
    assert "<img" not in svg


def test_runs_are_summed_up(tmp_path: Path) -> None:
    add_failure(tmp_path, id_of(1), Reason.DAMAGED)
    for n in range(60):
        run = tmp_path / "runs" / f"20260101T0000{n:02}-000000"
        run.mkdir(parents=True)
        device = {"workers": 1, "busy_s": 30.0, "span_s": 40.0} if n % 2 else None
        reported = {
            "run": run.name,
            "state": "done",
            "cases": {"done": 3, "failed": 1, "before": 0},
        }
        reported |= {"elapsed_s": 60.0, "device": device and {**device, "busy_share": 0.75}}
        reported |= {"joules_a_scan": 8.0, "cost": {"amount": 0.5}}
        write_json(run / "totals.json", reported)

    page = page_of(tmp_path)

    assert "All 60 runs 180 1 1:00:00 75% 30.00" in " ".join(page.words.split())
    assert "20260101T000059-000000" in page.words  # the newest
    assert "20260101T000009-000000" not in page.words
    headings = {text for tag, text in page.texts if tag == "h2"}
    regions = {a["aria-label"] for _, a in page.elements if a.get("role") == "region"}
    assert "Table of runs" in regions
    assert headings.isdisjoint(regions), "a screen reader tells both by their name alone"


def test_no_results(tmp_path: Path) -> None:
    (tmp_path / "cases").mkdir()

    page = page_of(tmp_path)

    assert (page.data["cases"], page.data["count"], page.data["structures"]) == ([], 0, [])
    assert not any(page.data["values"].values())
    assert not page.all("img")


def test_only_failed_cases(tmp_path: Path) -> None:
    for n, reason in enumerate((Reason.CRASHED, Reason.DAMAGED)):
        add_failure(tmp_path, id_of(n), reason)

    data = page_of(tmp_path).data

    assert {c["reason"] for c in data["cases"]} == {"CRASHED", "DAMAGED"}
    assert data["advice"] == {r.code: r.advice for r in (Reason.CRASHED, Reason.DAMAGED)}


def test_series_of_the_manifest_without_a_result_are_rows(tmp_path: Path) -> None:
    add_case(tmp_path, id_of(1), usual(np.random.default_rng(0)))
    add_failure(tmp_path, id_of(2), Reason.DAMAGED, "a slice can't be decoded")
    rows = [(id_of(n), "failed", "SPACING") for n in (3, 3, 4)]
    rows += [(id_of(2), "failed", "DAMAGED"), (id_of(5), "skipped", "LOCALIZER")]
    write_manifest(tmp_path, rows)

    page = page_of(tmp_path)

    shown = {c["id"]: (c["status"], c["reason"], c["detail"]) for c in page.data["cases"]}
    assert shown == {
        id_of(1): ("done", "", ""),
        id_of(2): ("failed", "DAMAGED", "a slice can't be decoded"),
        id_of(3): ("failed", "SPACING", ""),
        id_of(4): ("failed", "SPACING", ""),
        id_of(5): ("skipped", "LOCALIZER", ""),
    }
    assert page.data["cases"][-1]["id"] == id_of(5)
    listed = [link["data-case"] for link in page.all("a") if "data-case" in link]
    assert sorted(listed) == sorted(id_of(n) for n in (2, 3, 4, 5))
    assert "series 5 done 1 failed 3 skipped 1 to review 0" in " ".join(page.words.split())
    assert "#status=failed" in [link["href"] for link in page.all("a")]


def test_the_criterion_that_left_series_out_is_named(tmp_path: Path) -> None:
    """In the row of each, and with its count in the table of reasons."""
    add_case(tmp_path, id_of(1), usual(np.random.default_rng(0)))
    by = {2: "by select.modality", 3: "by select.kernel", 4: "by select.modality"}
    rows = [(id_of(n), "skipped", "NOT_SELECTED", by[n]) for n in (2, 2, 3, 4)]
    write_manifest(tmp_path, [*rows, (id_of(5), "skipped", "LOCALIZER", "a detail")])

    page = page_of(tmp_path)

    details = {c["id"]: c["detail"] for c in page.data["cases"]}
    assert details == {id_of(1): "", **{id_of(n): by[n] for n in by}, id_of(5): "a detail"}
    words = " ".join(page.words.split())
    assert "if its files state none 2 by select.modality 1 by select.kernel 3 series" in words
    assert "a detail" not in words


def test_one_case_is_no_cohort(tmp_path: Path) -> None:
    add_case(tmp_path, id_of(1), usual(np.random.default_rng(0)), flags=(Flag.SHEARED,))

    page = page_of(tmp_path)

    assert page.data["cases"][0]["risk"] == 0
    assert page.data["cases"][0]["preview"] is None
    assert "the usual values are unknown" in page.words
    assert [o for o in page.all("select") if o["id"] == "flag"]


def test_structures_of_several_models_are_told_apart(tmp_path: Path) -> None:
    both = [measured("a", "liver", 10.0), measured("b", "liver", 20.0), measured("b", "rib_2", 1.0)]
    add_case(tmp_path, id_of(1), both)

    data = page_of(tmp_path).data

    assert data["structures"] == ["liver (a)", "liver (b)", "rib 2"]
    assert data["cases"][0]["volumes"] == [10.0, 20.0, 1.0]
    assert data["cases"][0]["models"] == ["a", "b"]


def test_what_is_usual_at_the_border_raises_no_doubt(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for n in range(10):
        fat = measured("organs", "fat", 500.0, flags=(Flag.TOUCHES_BORDER,))
        heart = measured("organs", "heart", 80.0, flags=(Flag.TOUCHES_BORDER,) if n == 4 else ())
        add_case(tmp_path, id_of(n), [*usual(rng), fat, heart])

    cases = page_of(tmp_path).data["cases"]

    reported = {c["id"]: c["findings"] for c in cases if c["findings"]}
    assert reported == {id_of(4): [{"text": "heart: reaches the border of the scan"}]}


def test_equal_input_gives_an_equal_page(tmp_path: Path) -> None:
    out = make_out(tmp_path / "out", 9)

    def files() -> dict[str, bytes]:
        report = write_report(out).parent
        return {str(p): p.read_bytes() for p in report.rglob("*") if p.is_file()}

    assert files() == files()


def test_the_command(tmp_path: Path) -> None:
    out = make_out(tmp_path / "out", 2)

    assert scanloom("report", out, "--json").document["report"] == str(out / "report/index.html")
    assert scanloom("report", tmp_path / "elsewhere").code != 0
