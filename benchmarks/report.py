"""The report of 5,000 cases: time to write it, and time in a browser.

    python benchmarks/report.py [--cases 5000] [--structures 5] [--chromium /usr/bin/chromium]

Needs playwright (`pip install playwright`) and a Chromium. Aims: 50 MB at most, first paint within
3 s, sorting and filtering within 200 ms. A sort or filter is timed from the event to the frame
that shows its result.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from meter import chromium, parse

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]

STEP = """async (act) => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
  await frame();
  const drawn = new Promise((done) => {
    const count = document.getElementById("count");
    new MutationObserver((_, observer) => {
      observer.disconnect();
      done();
    }).observe(count, { childList: true });
  });
  const start = performance.now();
  const press = (key) => document.querySelector(`th[data-key=${key}] button`).click();
  const fill = (id, value) => {
    const field = document.getElementById(id);
    if (!field) return false;  // nothing to filter by
    if (field.type === "checkbox") field.checked = value; else field.value = value;
    field.dispatchEvent(new Event("input", { bubbles: true }));
    return true;
  };
  if (act[0] === "sort") press(act[1]);
  else if (!fill(act[1], act[2])) return 0;
  await drawn;
  await frame();
  return performance.now() - start;
}"""
ACTS = (
    ("sort", "id"),
    ("sort", "seconds"),
    ("sort", "volume"),
    ("sort", "risk"),
    ("filter", "search", "liver"),
    ("filter", "search", "liver large"),
    ("filter", "search", ""),
    ("filter", "review", True),
    ("filter", "review", False),
    ("filter", "status", "failed"),
    ("filter", "status", ""),
    ("filter", "flag", "SHEARED"),
    ("filter", "flag", ""),
)


def look(page: Path, program: str, rounds: int) -> dict[str, float]:
    """Open a page from disk and use it; milliseconds, the medians of rounds."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        paints, took = [], {" ".join(map(str, act)): [] for act in ACTS}
        for _ in range(rounds):
            tab: Any = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
            tab.goto(page.as_uri())
            tab.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
            paints.append(
                tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            )
            for act in ACTS:
                took[" ".join(map(str, act))].append(tab.evaluate(STEP, list(act)))
            tab.context.close()
        browser.close()
    return {"first paint": statistics.median(paints)} | {
        name: statistics.median(each) for name, each in took.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--structures", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chromium")
    options = parse(parser, cases=20, structures=2, rounds=1)
    program = chromium(options.chromium)

    from scanloom.review.report.page import write_report
    from support.make_report import STRUCTURES, make_out

    structures = (*STRUCTURES, *(f"structure_{n}" for n in range(options.structures)))
    with tempfile.TemporaryDirectory() as folder:
        out = make_out(
            Path(folder) / "out", options.cases, structures[: options.structures], (1600, 1052)
        )
        for event in ("written", "written again"):
            wall, cpu = time.perf_counter(), time.process_time()
            page = write_report(out)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print(f"{event}: {wall:.1f} s, {cpu:.1f} processor seconds")
        size = sum(path.stat().st_size for path in page.parent.rglob("*") if path.is_file())
        print(f"folder: {size / 1e6:.1f} MB; index.html: {page.stat().st_size / 1e6:.2f} MB")
        for name, milliseconds in look(page, program, options.rounds).items():
            print(f"{name}: {milliseconds:.0f} ms")


if __name__ == "__main__":
    main()
