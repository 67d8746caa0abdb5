"""The report and the list of the review at 10,000, 100,000 and 1,000,000 cases, in Chromium.

    python benchmarks/pages.py [--rows 10000 100000] [--pages list report]

Cases are generated in memory, without their folders: 1,000 different ones that repeat. Needs
playwright (`pip install playwright`) and a Chromium. Prints for the list the time and size of a
server's answers: the first, a page, one after a verdict, a search; for the report the time to write
it, its files and size; for both the time until the page shows its rows, that of a filter until the
frame that shows its result, and the largest memory of the process so far. Aims at a million: 2 s,
and 1 s for a filter.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from meter import machine, parse, table, unavailable

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests")]

DIFFERENT = 1000
SEARCH = "liver: large"  # no id has a colon
FILES = ("SHA256SUMS", "case.json", "dicom/segmentation.dcm", "measurements.csv", "preview.png")
SHOWN = "({ length }) => document.querySelectorAll('#rows tr').length >= length"
CHANGE = """([id, value, count]) => new Promise((done) => {
  const field = document.getElementById(id), shown = document.getElementById("count");
  const began = performance.now();
  new MutationObserver((_, observer) => {
    if (!shown.textContent.startsWith(`${count} of`)) return;
    observer.disconnect();
    requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
  }).observe(shown, { childList: true, characterData: true, subtree: true });
  field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
})"""


def memory() -> float:
    """Return the largest resident memory of this process so far, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measurements() -> list[tuple[Any, ...]]:
    """Return the measurements of different cases: one in 100 has a large liver."""
    from support.make_report import measured, usual

    rng = np.random.default_rng(1)
    cases = []
    for n in range(DIFFERENT):
        found = usual(rng)
        if n % 100 == 3:
            found[0] = measured("organs", "liver", 2000.0, components=30)
        cases.append(tuple(found))
    return cases


@contextmanager
def tab_of(chromium: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        browser.close()


def browsed(tab: Any, address: str, found: int) -> Iterator[tuple[str, float]]:
    """Yield seconds until a page shows its rows, and of a search and its end."""
    began = time.perf_counter()
    tab.goto(address, timeout=600_000)
    tab.wait_for_selector("#rows tr", timeout=600_000)
    yield "until rows are shown", time.perf_counter() - began
    whole = int(tab.inner_text("#count").split()[2])
    for name, text, count in (("search", SEARCH, found), ("end of the search", "", whole)):
        yield f"{name} in the page", tab.evaluate(CHANGE, ["search", text, str(count)]) / 1000


def measure_list(out: Path, count: int, chromium: str) -> list[tuple[str, object]]:
    """Measure the list of a review of some cases."""
    import uvicorn

    from scanloom.review import outliers
    from scanloom.review.server.app import make_app
    from scanloom.review.server.cases import OpenCases
    from scanloom.review.server.requests import read_query
    from scanloom.review.server.rows import CaseRows, ListedCase
    from scanloom.review.server.security import Sessions
    from scanloom.review.server.state import ReviewState
    from scanloom.review.verdicts.log import VerdictLog
    from scanloom.review.verdicts.readers import Readers
    from scanloom.review.verdicts.verdict import Seen, Verdict
    from support.make_report import id_of

    (out / "cases").mkdir(parents=True)
    found = measurements()
    cohort = outliers.Cohort((m for case in found for m in case), {})
    doubts = outliers.find_outliers(
        {str(n): case for n, case in enumerate(found)},
        cohort,
        dict.fromkeys(map(str, range(DIFFERENT)), "LPS"),
    )
    seen = Seen("r", {"segmentation.nii.gz": "0" * 64})
    order = sorted(
        range(count), key=lambda n: (-outliers.risk_score(doubts[str(n % DIFFERENT)]), n)
    )
    names = {n: id_of(n) for n in order}
    scan = ((512, 512, 300), (0.7, 0.7, 1.0), "LPS", ("organs",))
    cases = {
        names[n]: ListedCase(names[n], n, "CT", *scan, found[n % DIFFERENT], {}, seen, 0)
        for n in order
    }
    findings = {names[n]: doubts[str(n % DIFFERENT)] for n in order}
    large = sum(n % 100 == 3 for n in range(count))
    rows: list[tuple[str, object]] = []

    def timed(name: str, work: Any) -> Any:
        began = time.perf_counter()
        answer = work()
        size = len(json.dumps(answer)) / 1000 if isinstance(answer, dict) else ""
        rows.append((f"{name}, s", time.perf_counter() - began))
        if size:
            rows.append((f"{name}, kB", size))
        return answer

    with closing(VerdictLog(out)) as log:
        state = ReviewState(out, log, Readers(("r1",)), OpenCases(out, None), {"r1": "anna"})
        rows.append(("memory of the cases, GiB", memory()))
        worklist = state.worklist
        worklist.cases, worklist.findings = cases, findings
        worklist.rows = timed("rows of a look", lambda: CaseRows(cases, findings))
        worklist.refresh = lambda: None  # type: ignore[method-assign]  # there are no folders
        plain = read_query({})
        first = timed("first answer", lambda: state.listed("r1", plain, 0, 99))
        timed("a page", lambda: state.listed("r1", plain, 9900, 9999))
        name = next(iter(cases))
        log.append(Verdict(name, "r1", seen, decision="accept"))
        timed("after a verdict", lambda: state.listed("r1", plain, 0, 99, first["version"]))
        timed("a search", lambda: state.listed("r1", read_query({"q": SEARCH}), 0, 99))
        timed("the next case", lambda: state.near("r1", read_query({"q": SEARCH}), name))

        sessions = Sessions(["r1"])
        config = uvicorn.Config(None, port=0, log_config=None, lifespan="off")  # type: ignore[arg-type]
        socket = config.bind_socket()
        origin = f"http://127.0.0.1:{socket.getsockname()[1]}"
        config.app = make_app(state, sessions, [origin])
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
        thread.start()
        try:
            with tab_of(chromium) as tab:
                link = f"{origin}/r1/#{sessions.tokens['r1']}"
                rows += [(f"{name}, s", took) for name, took in browsed(tab, link, large)]
        finally:
            server.should_exit = True
            thread.join()
    return [*rows, ("memory, GiB", memory())]


def measure_report(out: Path, count: int, chromium: str) -> list[tuple[str, object]]:
    """Measure the report of some cases, each with a row of the manifest, and skipped files."""
    from scanloom.review.report import data
    from scanloom.review.report.data import ReportCase
    from scanloom.review.report.page import write_report
    from support.make_report import id_of

    found = measurements()
    scan: dict[str, Any] = {"models": ("organs",), "axes": "LPS", "shape": (512, 512, 300)}
    scan |= {"seconds": {"load": 0.5, "network": 3.0}, "files": FILES}

    def published(*_: object) -> Iterator[tuple[ReportCase, dict[str, Any], dict[str, str]]]:
        for n in range(count):
            id_ = id_of(n)
            measured = found[n % DIFFERENT]
            yield ReportCase(id_, id_, "done", measurements=measured, **scan), {}, {}

    data.iter_cases = published
    out.mkdir()
    with (out / "manifest.csv").open("w", encoding="utf-8") as manifest:
        manifest.write("file,copy,case,outcome,reason,detail\n")
        manifest.writelines(f"{n:026},1,{n:026},used,,\n" for n in range(count))
        manifest.writelines(f"{n:026},1,,skipped,NOT_AN_IMAGE,\n" for n in range(count // 10))
    rows: list[tuple[str, object]] = [("memory before, GiB", memory())]
    for name, changed in (("written", True), ("written, nothing changed", False)):
        began, cpu = time.perf_counter(), time.process_time()
        written = write_report(out, changed=changed)
        rows.append((f"{name}, s", time.perf_counter() - began))
        rows.append((f"{name}, processor s", time.process_time() - cpu))
    rows.append(("memory of the writer, GiB", memory()))
    files = [path for path in written.parent.rglob("*") if path.is_file()]
    rows.append(("files", len(files)))
    rows.append(("all, MB", sum(path.stat().st_size for path in files) / 1e6))
    rows.append(("index.html, MB", written.stat().st_size / 1e6))
    large = sum(n % 100 == 3 for n in range(count))
    with tab_of(chromium) as tab:
        rows += [(f"{name}, s", took) for name, took in browsed(tab, written.as_uri(), large)]
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument(
        "--pages", nargs="+", choices=("list", "report"), default=["list", "report"]
    )
    parser.add_argument("--chromium", default=shutil.which("chromium") or "chromium")
    options = parse(parser, rows=[300])
    if importlib.util.find_spec("playwright") is None:
        unavailable("playwright (pip install playwright), and Chromium")
    if shutil.which(options.chromium) is None:
        unavailable("Chromium: name it with --chromium")
    print(machine("scanloom", "numpy"))
    measures = {"list": measure_list, "report": measure_report}
    for name in options.pages:
        for count in options.rows:
            with tempfile.TemporaryDirectory() as folder:
                rows = measures[name](Path(folder) / "out", count, options.chromium)
            print(f"\n{table((f'{name} of {count:,}', ''), rows)}", flush=True)


if __name__ == "__main__":
    main()
