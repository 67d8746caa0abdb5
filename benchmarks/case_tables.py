"""Ledger and tables of cases at 10,000, 100,000 and 1,000,000 cases: time and memory of each step.

    python benchmarks/case_tables.py [--cases 10000 100000] [--structures 5] [--folder DIR]

Case folders are real, in subfolders, but their files are hard links to a few: what is read is right
by size and time, and a million take 5 GB. Rows of the first tables are generated, everything else
is read as in a run. Each step has a process of its own.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meter import machine, parse, table

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests")]

MAX_LINKS = 30_000
KEY = "abc"
STEPS = ("append", "open", "look up", "write", "again", "one new", "one failed", "crosswalk")


def name_of(number: int) -> str:
    from support.make_report import id_of

    return id_of(number)


def model_case(out: Path, structures: int) -> Path:
    """Publish the case whose files all others have."""
    from scanloom.io.output.case_folder import CaseFolder
    from scanloom.io.output.json_file import write_document
    from scanloom.io.output.measurements import write_measurements
    from support.make_report import measured

    with CaseFolder(out, "model", KEY) as folder:
        document = {"case": "model", "recipe": "r" * 64, "source": {"hash": "s" * 26}}
        write_document(folder.path / "case.json", document)
        write_document(folder.path / "timing.json", {"source_stamp": "t" * 26})
        rows = [measured("m", f"structure {n}", 10.0 * n) for n in range(structures)]
        write_measurements(folder.path, rows)
        return folder.publish()


def make_folders(out: Path, count: int, structures: int) -> None:
    """Make the folders of all cases."""
    from scanloom.io.output.layout import case_folder, fan_out

    model = model_case(out, structures)
    fan_out(out)
    files = [path.name for path in model.iterdir()]
    for number in range(count):
        if number % MAX_LINKS == 0:  # a file system allows so many
            source = out.parent / f"model{number}"
            shutil.copytree(model, source)
        name = name_of(number)
        folder = out / "cases" / f"_{name[-2:]}" / name
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir()
        for file in files:
            os.link(source / file, folder / file)
    shutil.rmtree(case_folder(out, "model"))


def step_append(out: Path, _: int) -> Callable[[], object]:
    """Append a row for each case, as publishing does, and gather them when they are many."""
    from scanloom.io.output import ledger
    from scanloom.io.output.private import locked_folder

    listed = ledger.list_folders(out)
    private = out / "private"

    def rows() -> Iterator[ledger.PublishedCase]:
        for row in listed.to_batches(max_chunksize=1000):
            for each in row.to_pylist():
                texts = ("r" * 64, "s" * 26, "t" * 26)
                yield ledger.PublishedCase(each["name"], each["name"], *texts, each["inode"])

    def run() -> None:
        waiting = list[ledger.PublishedCase]()
        for row in rows():
            waiting.append(row)
            if len(waiting) == 5000:
                ledger._append(private, waiting)
                waiting.clear()
        ledger._append(private, waiting)
        ledger.gather_published(private)

    with locked_folder(private):
        return run


def step_open(out: Path, _: int) -> Callable[[], object]:
    """List the folders, read the ledger and check some folders."""
    from scanloom.io.output.ledger import Ledger

    return lambda: Ledger(out)


def step_look_up(out: Path, count: int) -> Callable[[], object]:
    """Ask for each case whether its result is current."""
    from scanloom.core import Case, Outputs, Series
    from scanloom.io.output.ledger import Ledger

    ledger, series, outputs = Ledger(out), Series("nifti", ()), Outputs()

    def run() -> None:
        for number in range(count):
            case = Case(name_of(number), series, outputs, "", "r" * 64, stamp="t" * 26)
            if not ledger.holds(case):
                raise SystemExit("a case is not held")

    return run


def step_write(out: Path, _: int) -> Callable[[], object]:
    """Write the tables; all cases have the rows of one, which are not read again."""
    from scanloom.engine.results import tables

    original, known = tables._measured, list[Any]()

    def measured(folder: Path, outdated: Any) -> Any:
        known[:] = known or original(folder, outdated)
        rows = [{**row, "case": folder.name} for row in known[2]]
        return folder.name, folder.name, rows, []

    tables._measured = measured
    tables.iter_cases = lambda _, read, __, folders: map(read, folders)
    return lambda: tables.write_case_tables(out, set())


def with_own_ids() -> None:
    """Let each case have the name of its folder as its id."""
    from scanloom.engine.results import tables

    original = tables.read_case
    tables.read_case = lambda folder: {**original(folder), "case": folder.name}


def step_again(out: Path, _: int) -> Callable[[], object]:
    """Write them when nothing has changed."""
    from scanloom.engine.results import tables

    with_own_ids()
    return lambda: None if not tables.write_case_tables(out, set()) else sys.exit("it changed")


def step_one_new(out: Path, _: int) -> Callable[[], object]:
    """Write them when one case is new."""
    from scanloom.engine.results import tables

    with_own_ids()
    model_case(out, 5)
    return lambda: None if tables.write_case_tables(out, set()) else sys.exit("nothing changed")


def step_one_failed(out: Path, count: int) -> Callable[[], object]:
    """Write them when one case failed later."""
    from scanloom.core import Reason
    from scanloom.engine.results import tables
    from support.make_report import add_failure

    with_own_ids()
    add_failure(out, name_of(count // 2), Reason.CRASHED)
    return lambda: None if tables.write_case_tables(out, set()) else sys.exit("nothing changed")


def step_crosswalk(out: Path, count: int) -> Callable[[], object]:
    """Write the crosswalk of all cases, some at a time; then read all ids and folders."""
    from scanloom.io.output import crosswalk
    from scanloom.io.output.private import private_folder

    def run() -> None:
        with private_folder(out, KEY) as private:
            for first in range(0, count, 10_000):
                rows = [
                    crosswalk.SourceRecord(name, "nifti", f"/archive/{n:07d}/scan.nii.gz", 1, name)
                    for n in range(first, min(first + 10_000, count))
                    for name in (name_of(n),)
                ]
                crosswalk.add_sources(private, rows)
            crosswalk.gather_sources(private)
        ids, folders = crosswalk.known_ids(out), crosswalk.case_folders(out)
        paths = crosswalk.ids_by_volume_file(out)
        first = name_of(0)
        if first not in ids or folders[first] != first or not paths["/archive/0000000/scan.nii.gz"]:
            sys.exit("a case is missing")

    return run


def run_step(name: str, out: Path, count: int) -> None:
    """Run a step in this process; print its seconds, and the largest memory in MiB."""
    step: Callable[[], object] = globals()[f"step_{name.replace(' ', '_')}"](out, count)
    start = time.perf_counter()
    step()
    took = time.perf_counter() - start
    print(took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def measure(out: Path, count: int, structures: int) -> list[tuple[str, object, object]]:
    """Return seconds and MiB of each step."""
    start = time.perf_counter()
    make_folders(out, count, structures)
    print(f"{count:,} folders made in {time.perf_counter() - start:.0f} s", flush=True)
    rows = list[tuple[str, object, object]]()
    for name in STEPS:
        command = [sys.executable, __file__, "--step", name, "--at", str(out), "--cases"]
        done = subprocess.run([*command, str(count)], stdout=subprocess.PIPE, text=True, check=True)
        took, peak = map(float, done.stdout.split())
        rows.append((name, took, peak))
        print(f"  {name}: {took:.2f} s, {peak:.0f} MiB", flush=True)
    return rows


def main() -> None:
    """Make folders, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--structures", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="Where to make them; default a temporary one.")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    options = parse(parser, cases=[30], structures=2)
    if options.step:
        run_step(options.step, options.at, options.cases[0])
        return
    print(machine("scanloom", "pyarrow"))
    for count in options.cases:
        base = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            rows = measure(base / "out", count, options.structures)
        finally:
            shutil.rmtree(base)
        print(f"\n{table((f'{count:,} cases', 's', 'MiB'), rows)}\n", flush=True)


if __name__ == "__main__":
    main()
