"""The review in Chromium without a GPU: opening, steps, the 3-D view, prefetched cases, memory.

    python benchmarks/review.py [--slices 300] [--across 512] [--structures 25] [--cases 3]

Cases are DICOM series with label maps of balls. Needs playwright and Chromium (SCANLOOM_CHROMIUM).
Prints the time until a case is shown, the time of a step of each plane until it is painted, at once
and when the next cases are there, the time until the 3-D view is drawn and of a step of turning it,
and the largest memory of the server.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from meter import chromium, machine, median, parse, peak_memory, table
from real_run import copy
from study import study

from scanloom.core import (
    Case,
    Code,
    Layer,
    Outputs,
    ReadOptions,
    Segmentation,
    Series,
    Structure,
)
from scanloom.engine.case.documents import VERSIONED_PACKAGES
from scanloom.engine.case.writers import WRITERS, write_files
from scanloom.io.identity import case_id, key_fingerprint, source_hash, source_stamp
from scanloom.io.index.series import find_series
from scanloom.io.output.case_folder import CaseContent, CaseFolder
from scanloom.io.output.crosswalk import source_from_series
from scanloom.io.output.file_names import CASE, TIMING
from scanloom.io.output.json_file import write_document
from scanloom.io.output.published import SOURCE_STAMP
from scanloom.io.read import read_scan
from scanloom.ops.measure import measure

KEY = b"k" * 32
TISSUE = Code("85756007", "SCT", "Tissue")
STEP = """([name, by]) => new Promise((done) => {
  const canvas = document.querySelector(`#${name} canvas`);
  const range = document.querySelector(`#${name} input`);
  const wanted = String(Number(range.value) + by), began = performance.now();
  new MutationObserver((_, observer) => {
    if (canvas.dataset.index !== wanted) return;
    observer.disconnect();
    requestAnimationFrame(() => done(performance.now() - began));
  }).observe(canvas, { attributes: true });
  range.value = wanted;
  range.dispatchEvent(new Event("input"));
})"""
TURN = """() => new Promise((done) => {
  const figure = document.querySelector("#solid"), began = performance.now();
  figure.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
})"""


def balls(shape: tuple[int, ...], count: int) -> np.ndarray:
    """Return a label map of balls."""
    labels = np.zeros(shape, np.uint8, order="F")
    rng = np.random.default_rng(0)
    radius = min(shape) // 6
    offsets = np.indices((2 * radius + 1,) * 3) - radius
    ball = (offsets**2).sum(axis=0) <= radius**2
    for number in range(1, count + 1):
        low = [int(rng.integers(0, n - 2 * radius - 1)) for n in shape]
        box = tuple(slice(a, a + 2 * radius + 1) for a in low)
        labels[box][ball] = number
    return labels


def publish(out: Path, folder: Path, structures: int) -> str:
    """Publish a case of a series with labels of balls; return its name."""
    [series] = find_series(folder)
    number = case_id(series, KEY)
    scan = read_scan(Series(series.kind, series.files), ReadOptions())
    kinds = tuple(
        Structure(f"part-{n}", n, f"Part {n}", TISSUE, TISSUE, (n * 37 % 256, n * 91 % 256, 120))
        for n in range(1, structures + 1)
    )
    layer = Layer(balls(scan.volume.grid.shape, structures), kinds)
    segmentation = Segmentation("balls", (layer,), scan.volume.grid, "1")
    case = Case(number, series, Outputs(), source_hash(series, KEY), "r" * 64)
    measurements = measure(segmentation, scan.volume, ())
    content = CaseContent(case, scan, (segmentation,), measurements)
    writers = [each for each in WRITERS if each.name in ("label_maps", "measurements", "preview")]
    with CaseFolder(out, number, key_fingerprint(KEY)) as draft:
        write_files(draft.path, content, writers)
        write_document(draft.path / CASE, _document(case, scan.volume))
        stamp = {SOURCE_STAMP: source_stamp([series.stamp], KEY)}
        write_document(draft.path / TIMING, {"steps": {}, **stamp})
        draft.publish(source=source_from_series(series, number))
    return number


def _document(case: Case, volume: Any) -> dict[str, Any]:
    grid = volume.grid
    plain = {"shape": list(grid.shape), "spacing_mm": list(grid.spacing), "axes": grid.axis_codes}
    return {
        "case": case.id,
        "source": {
            "kind": "dicom",
            "files": len(case.series.files),
            "modality": "CT",
            "unit": "HU",
            "hash": case.source_hash,
        },
        "grid": {**plain, "sheared": False, "affine_ras_mm": grid.affine.tolist()},
        "flags": [],
        "recipe": case.recipe,
        "outputs": {"seg": "binary", "dates": "source"},
        "options": {"gaps": "refuse", "nan": "refuse", "orientation": None, "modality": None},
        "models": [{"name": "balls", "version": "1"}],
        "versions": dict.fromkeys(VERSIONED_PACKAGES, ""),
    }


def browse(link: str, names: list[str], steps: int, program: str) -> dict[str, Any]:
    """Open the cases, step through their planes, and return times."""
    from playwright.sync_api import sync_playwright

    timings: dict[str, Any] = {"step": {}}
    with sync_playwright() as play:
        options = ["--no-sandbox", "--disable-gpu"]
        tab = play.chromium.launch(executable_path=program, args=options).new_page()
        tab.goto(link)
        tab.wait_for_selector("#rows tr")
        began = time.perf_counter()
        tab.click(f"text={names[0]}")
        tab.wait_for_selector(f"body[data-opened='{names[0]}']")
        timings["opened"] = time.perf_counter() - began
        for when, wait in (("while others open", 0), ("later", 6000)):
            tab.wait_for_timeout(wait)
            for plane in ("axial", "coronal", "sagittal"):
                times = [tab.evaluate(STEP, [plane, 1]) for _ in range(steps)]
                timings["step"][f"{plane} step {when}"] = times
        began = time.perf_counter()
        tab.keyboard.press("4")
        tab.wait_for_selector(f"#solid[data-drawn='{names[0]}']")
        timings["solid"] = time.perf_counter() - began
        timings["step"]["turn in 3-D"] = [tab.evaluate(TURN) for _ in range(steps)]
        tab.keyboard.press("1")
        tab.click("#turn")
        timings["prefetched"] = []
        for name in names[1:]:
            began = time.perf_counter()
            tab.keyboard.press("n")
            tab.wait_for_selector(f"body[data-opened='{name}']")
            timings["prefetched"].append(time.perf_counter() - began)
            tab.wait_for_timeout(4000)
    return timings


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slices", type=int, default=300)
    parser.add_argument("--across", type=int, default=512)
    parser.add_argument("--structures", type=int, default=25)
    parser.add_argument("--cases", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parse(parser, slices=24, across=64, structures=3, cases=2, steps=4)
    program = chromium()
    print(machine("scanloom", "numpy"), "\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        key = folder / "key"
        key.write_bytes(KEY)
        key.chmod(0o600)
        series = study(arguments.slices, arguments.structures, arguments.across).dicom
        names = []
        for n in range(arguments.cases):
            copy(series, folder / str(n), n)
            names.append(publish(folder / "out", folder / str(n), arguments.structures))
        command = [
            sys.executable,
            "-m",
            "scanloom",
            "review",
            str(folder / "out"),
            "--key",
            str(key),
        ]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            link = next(line.split()[1] for line in server.stdout or () if "/#" in line)
            timings = browse(link, sorted(names), arguments.steps, program)
            peak = peak_memory(server.pid) / 2**30
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()
    rows: list[list[Any]] = [["open, s", timings["opened"], ""], ["3-D, s", timings["solid"], ""]]
    rows += [["open after prefetching, s", each, ""] for each in timings["prefetched"]]
    rows += [[f"{p}, ms", median(t), max(t)] for p, t in timings["step"].items()]
    rows.append(["server, GiB", peak, ""])
    print(table(("", "median", "worst"), rows))


if __name__ == "__main__":
    main()
