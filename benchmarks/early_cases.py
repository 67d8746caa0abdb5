"""A run over a new archive: when its first case has ended, and when its index is complete.

    python benchmarks/early_cases.py [--series 1000] [--files 30] [--folder DIR] [--archive DIR]

The archive is that of `archive_index.py`, of tiny files; cases are worked on by the tests' formula
in place of a network, one at a time, in one process beside those that read headers. The second run
is made to index first. A run is stopped after its index is complete, and its first case has ended.
Memory is the peak resident set of the run's own process, and of the largest that it started.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import archive_index
import numpy as np
from meter import machine, parse, peak_memory, table, tree

POLL_S = 0.1
PROGRAM = """
import sys
from scanloom.cli.main import main
from scanloom.engine import run
from support import engine_models
run.model_loader = engine_models.formula_loader
if sys.argv.pop(1) == "index":
    run.may_begin_early = lambda _: False
main()
"""


def draw(folder: Path, series: int, files: int) -> None:
    """Write the archive with a bright structure in each scan, which the formula finds."""
    voxels = np.zeros((8, 8), "<i2")
    voxels[2:6, 2:6] = 3000
    empty = archive_index.template().removesuffix(bytes(voxels.nbytes))
    archive_index.template = lambda: empty + voxels.tobytes()
    archive_index.draw(folder, 0, series, files)


def count_ended(out: Path) -> int:
    """Return the number of cases of a run that have ended."""
    for path in out.glob("runs/*/status.json"):
        status = json.loads(path.read_text())
        return int(status["early"] + status["worked"])
    return 0


def measure(base: Path, archive: Path, first: str) -> list[Any]:
    """Return when the first case ended and the index was complete, s, cases by then, and memory."""
    sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]
    from support.commands import write_tiny_bundle
    from support.formula_run import formula_environment

    folder = base / first
    model = write_tiny_bundle(folder / "bundles")
    workflow, out, notes = folder / "workflow.yaml", folder / "out", folder / "notes"
    workflow.write_text(
        f"name: early\nmodels: [{model}]\nselect: {{modality: CT, choose: all}}\n"
        "execution: {in_flight: 1}\n"
    )
    environment = formula_environment(notes)
    (notes / "key").write_bytes(archive_index.KEY)
    command = [sys.executable, "-c", PROGRAM, first, "run", str(workflow), str(archive)]
    command += ["--out", str(out), "--cluster", "none", "-q"]
    began, ended, indexed, by_then, looked = time.monotonic(), None, None, 0, 0.0
    peaks: dict[int, int] = {}
    process = subprocess.Popen(command, env=environment)
    while process.poll() is None and not (ended and indexed):
        time.sleep(POLL_S)
        passed = time.monotonic() - began
        if passed - looked > 1:
            looked = passed
            for pid in tree(process.pid):
                peaks[pid] = max(peaks.get(pid, 0), peak_memory(pid) >> 20)
        if ended is None and count_ended(out):
            ended = passed
        if indexed is None and (out / "private" / "index.parquet").exists():
            indexed = passed
            by_then = count_ended(out)
    process.send_signal(signal.SIGINT)
    process.wait()
    own = peaks.pop(process.pid, 0)
    return [first, ended, indexed, by_then, own, max(peaks.values(), default=0)]


def main() -> None:
    """Draw the archive, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--series", type=int, default=1000)
    parser.add_argument("--files", type=int, default=30, help="of each series")
    parser.add_argument("--folder", type=Path, help="Where to write; default a temporary one.")
    parser.add_argument(
        "--archive", type=Path, help="An archive that is there; drawn if it is not."
    )
    options = parse(parser, series=6, files=3)
    print(machine(), "\n")
    base = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        archive = options.archive or base / "archive"
        if not archive.exists():
            draw(archive, options.series, options.files)
        rows = [
            [options.series * options.files, *measure(base, archive, first)]
            for first in ("cases", "index")
        ]
        head = [
            "files",
            "first",
            "first case s",
            "index complete s",
            "cases by then",
            "run MiB",
            "largest other MiB",
        ]
        print(table(head, rows))
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
