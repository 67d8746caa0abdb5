"""The report and the list of the review at 10,000, 100,000 and 1,000,000 cases, in Chromium.

    python benchmarks/pages.py [--rows 10000 100000] [--pages list report tables] [--keep FOLDER]

Cases are 1,000 different ones that repeat: for the list with folders, of which a million take 5 GB;
for the report in memory. Needs playwright (`pip install playwright`) and a Chromium. Prints for the
list the first look, and the time and size of a server's answers: the first, a page, one after a
verdict, a search; and of a server that is started after it, in a process of its own, the time until
its first answer, and until all folders were compared with the stored list; for the report the time
to write it, its files and size; for both the time until the page shows its rows, that of a filter
until the frame that shows its result, and the largest memory of the process so far. Aims at a
million: 2 s, and 1 s for a filter; 5 s for the first answer of a server that is started again.
`tables` gives `where` and `join` with a crosswalk of so many rows; aim: 5 s. `--keep` keeps the
cases of the list, and uses those that are there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from meter import chromium, machine, parse, peak_memory, table

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests")]

DIFFERENT = 1000
SEARCH = "liver: large"  # no id has a colon
PAUSE_S = 5.0
"""Time that a person looks at a page before typing."""
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
    return peak_memory() / 2**30


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
    """Yield seconds until a page shows its rows, and of a search: at once, and some time later."""
    for when, pause_s in (("at once", 0.0), ("later", PAUSE_S)):
        began = time.perf_counter()
        tab.goto("about:blank")
        tab.goto(address, timeout=600_000)
        tab.wait_for_selector("#rows tr", timeout=600_000)
        yield "until rows are shown", time.perf_counter() - began
        time.sleep(pause_s)
        whole = int(tab.inner_text("#count").split()[2])
        for name, text, count in (("search", SEARCH, found), ("end of the search", "", whole)):
            took = tab.evaluate(CHANGE, ["search", text, str(count)]) / 1000
            yield f"{name} in the page, {when}", took


def make_cases(out: Path, count: int) -> None:
    """Make the folders of cases and their tables, as a run leaves them."""
    import pyarrow as pa
    from pyarrow import parquet

    from scanloom.engine.results.tables import write_case_tables
    from scanloom.io.output import ledger, tabled_cases
    from scanloom.io.output.case_folder import CaseFolder
    from scanloom.io.output.layout import case_folder, fan_out
    from scanloom.io.output.measurements import write_measurements
    from support.make_report import id_of

    ledger.CHECKED = 0
    fan_out(out, count)
    made = []
    for n, found in zip(range(count), measurements(), strict=False):
        document = {
            "case": id_of(n),
            "recipe": "r",
            "source": {"hash": "h", "modality": "CT"},
            "grid": {"axes": "LPS", "shape": [512, 512, 300], "spacing_mm": [0.7, 0.7, 1.0]},
            "models": [{"name": "organs", "reference_ranges": []}],
        }
        with CaseFolder(out, id_of(n), "abc") as folder:
            (folder.path / "case.json").write_text(json.dumps(document))
            (folder.path / "timing.json").write_text("{}")
            (folder.path / "segments.json").write_text(
                '{"files": [{"file": "segmentation.nii.gz"}]}'
            )
            (folder.path / "segmentation.nii.gz").write_text(str(n))
            write_measurements(folder.path, found)
            made.append(folder.publish())
    write_case_tables(out, set())
    # all others have the same files
    for n in range(len(made), count):
        folder = case_folder(out, id_of(n))
        folder.mkdir(parents=True)
        for entry in os.scandir(made[n % DIFFERENT]):
            os.link(entry.path, folder / entry.name)
    ids = sorted((id_of(n), n % DIFFERENT) for n in range(count))
    like = pa.array([made[n].name for _, n in ids])

    def rows_like(rows: pa.Table, column: str) -> pa.Table:
        places = pa.table({"name": like, "place": pa.array(range(count), pa.int32())})
        own = rows.append_column("row", pa.array(range(len(rows)), pa.int32()))
        joined = places.join(own.select([column, "row"]), "name", column).sort_by(
            [("place", "ascending"), ("row", "ascending")]
        )
        names = pa.array([name for name, _ in ids]).take(joined["place"].combine_chunks())
        whole = rows.take(joined["row"].combine_chunks())
        return whole.set_column(rows.schema.get_field_index(column), column, names)

    table, tabled = out / "measurements.parquet", out / "private" / tabled_cases.TABLED
    parquet.write_table(rows_like(parquet.read_table(table), "case"), table)
    states = [case_folder(out, name).stat() for name, _ in ids]
    rows = rows_like(parquet.read_table(tabled), "name").to_pydict()
    rows |= {"time": [s.st_mtime_ns for s in states], "inode": [s.st_ino for s in states]}
    files = {table.name: tabled_cases._state(table.stat())}
    metadata = parquet.read_schema(tabled).metadata | {tabled_cases._FILES: json.dumps(files)}
    schema = tabled_cases._schema().with_metadata(metadata)
    parquet.write_table(pa.table(rows, schema), tabled, row_group_size=100_000)


def measure_restart(out: Path) -> list[tuple[str, object]]:
    """Measure the start of a server whose list was stored by the one before."""
    from scanloom.review.server.cases import OpenCases
    from scanloom.review.server.requests import read_query
    from scanloom.review.server.state import ReviewState
    from scanloom.review.verdicts.log import VerdictLog
    from scanloom.review.verdicts.readers import Readers

    rows: list[tuple[str, object]] = []
    began, cpu = time.perf_counter(), time.process_time()

    def note(what: str) -> None:
        rows.append((f"started again: {what}, s", time.perf_counter() - began))
        rows.append((f"started again: {what}, processor s", time.process_time() - cpu))
        rows.append((f"started again: {what}, GiB", memory()))

    with closing(VerdictLog(out)) as log:
        state = ReviewState(out, log, Readers(("r1",)), OpenCases(out, None), {"r1": "anna"})
        state.worklist.refresh()
        note("stored list")
        state.listed("r1", read_query({}), 0, 99)
        note("first answer")
        while state.worklist.checking is not None:
            time.sleep(0.05)
        note("all checked")
    return rows


def measure_list(out: Path, count: int, chromium: str) -> list[tuple[str, object]]:
    """Measure the list of a review of some cases."""
    import uvicorn

    from scanloom.review.server.app import make_app
    from scanloom.review.server.cases import OpenCases
    from scanloom.review.server.requests import read_query
    from scanloom.review.server.security import Sessions
    from scanloom.review.server.state import ReviewState
    from scanloom.review.verdicts.log import VerdictLog
    from scanloom.review.verdicts.readers import Readers
    from scanloom.review.verdicts.verdict import Verdict

    if not out.exists():
        maker = multiprocessing.get_context("spawn").Process(target=make_cases, args=(out, count))
        maker.start()  # whose memory does not count
        maker.join()
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
        rows.append(("memory before, GiB", memory()))
        cpu = time.process_time()
        timed("first look", state.worklist.refresh)
        rows.append(("first look, processor s", time.process_time() - cpu))
        rows.append(("memory of the first look, GiB", memory()))
        plain = read_query({})
        first = timed("first answer", lambda: state.listed("r1", plain, 0, 99))
        timed("a page", lambda: state.listed("r1", plain, 9900, 9999))
        name = first["names"][0]
        case = state.worklist.read(name)
        log.append(Verdict(name, "r1", case.seen, decision="accept"))
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
    rows.append(("memory, GiB", memory()))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        rows += pool.submit(measure_restart, out).result()
    return rows


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


def measure_tables(out: Path, count: int, _: str) -> list[tuple[str, object]]:
    """Measure `where` of a case, and `join` of a table with a row a case."""
    import pyarrow as pa
    from pyarrow import parquet

    from scanloom.io.identity import key_fingerprint, load_key
    from scanloom.io.output.crosswalk import COLUMNS, GROUP_ROWS
    from scanloom.io.output.private import CROSSWALK, private_folder
    from support.make_report import id_of

    key, cases = out.parent / "key", out.parent / "cases.csv"
    ids = [id_of(n) for n in range(count)]
    cases.write_text("case,age\n" + "".join(f"{id_},{n % 90}\n" for n, id_ in enumerate(ids)))
    rows: list[tuple[str, object]] = []
    work = ("where", [ids[-1]]), ("join", [cases, "--to", out.parent / "joined.csv"])
    # with a comma, join quotes six cells of each row
    for text, what in (("{}/{}", ""), ("{}, {}", ", all cells quoted")):
        columns: dict[str, Any] = {
            name: [text.format(name, n // 3) for n in range(count)] for name in COLUMNS
        }
        columns |= {"id": ids, "folder": ids, "kind": ["dicom"] * count, "files": [300] * count}
        with private_folder(out, key_fingerprint(load_key(key))) as folder:
            parquet.write_table(pa.table(columns), folder / CROSSWALK, row_group_size=GROUP_ROWS)
        for name, more in work:
            command = [sys.executable, "-m", "scanloom", name, *more, "--out", out, "--key", key]
            began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            rows.append((f"{name}{what}, s", time.perf_counter() - began))
            rows.append((f"{name}{what}, processor s", spent))
    return rows


MEASURES = {"list": measure_list, "report": measure_report, "tables": measure_tables}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--pages", nargs="+", choices=tuple(MEASURES), default=list(MEASURES))
    parser.add_argument("--chromium")
    parser.add_argument("--keep", type=Path, help="Folder that keeps the cases of the list.")
    options = parse(parser, rows=[300])
    program = chromium(options.chromium)
    print(machine("scanloom", "numpy"))
    for name in options.pages:
        for count in options.rows:
            with tempfile.TemporaryDirectory() as folder:
                keeps = options.keep and name == "list"
                out = options.keep / str(count) if keeps else Path(folder) / "out"
                rows = MEASURES[name](out, count, program)
                print(f"\n{table((f'{name} of {count:,}', ''), rows)}", flush=True)


if __name__ == "__main__":
    main()
