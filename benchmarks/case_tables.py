"""Ledger and tables of cases at 10,000, 100,000 and 1,000,000 cases: time and memory of each step.

    python benchmarks/case_tables.py [--cases 10000 100000] [--structures 5] [--folder DIR]

Case folders are real, in subfolders, but empty; of more than 100,000, only their list is generated,
as are ledger, crosswalk and tables. No folder is checked by chance, which takes as long for a
million cases as for 10,000: `check` does it for 5,000. Everything else is as in a run. Each step
has a process of its own.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from meter import machine, parse, peak_memory, table

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests")]

KEY = "abc"
LISTED = "listed.parquet"
REAL = 100_000
"""Number of cases up to which folders are made; of more, their list is generated."""
STEPS = ("open", "look up", "gather", "again", "one new", "one failed", "crosswalk", "check")
TEXTS = ("r" * 64, "s" * 26, "t" * 26)


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


def make(out: Path, count: int, structures: int) -> None:
    """Make the folders of all cases, and what is recorded of them."""
    import pyarrow as pa
    from pyarrow import parquet

    from scanloom.engine.results import tables
    from scanloom.io.output import ledger, tabled_cases
    from scanloom.io.output.growing_table import write_groups
    from scanloom.io.output.layout import case_folder, fan_out
    from scanloom.io.output.tabled_cases import Copied, TabledCases, write_rows

    model = model_case(out, structures)
    tables.write_case_tables(out, set())
    rows = parquet.read_table(out / "measurements.parquet")
    lines = (out / "measurements.csv").read_bytes().splitlines(keepends=True)[1:]
    shutil.copytree(model, out.parent / "model")
    fan_out(out)
    ledger.CHECKED = 0
    for name in map(name_of, range(count if count <= REAL else 0)):
        parent = out / "cases" / f"_{name[-2:]}"
        parent.mkdir(exist_ok=True)
        (parent / name).mkdir()
    if count > REAL:
        every = pa.array(sorted(map(name_of, range(count))))
        inodes = pa.array(range(1 << 40, (1 << 40) + count), pa.uint64())
        parquet.write_table(pa.table({"name": every, "inode": inodes}), out.parent / LISTED)
    shutil.copytree(model, case_folder(out, name_of(count // 2)), dirs_exist_ok=True)
    shutil.rmtree(model)
    generate_list(out)
    listed = ledger.list_folders(out)
    names = listed["name"]

    def known(**columns: object) -> pa.Table:
        constant = {name: pa.repeat(value, count) for name, value in columns.items()}
        return pa.table({"name": names, "inode": listed["inode"], "case": names} | constant)

    texts = dict(zip(("recipe", "source", "stamp"), TEXTS, strict=True))
    schema = ledger._schema()
    of_ledger = known(**texts).select(schema.names).cast(schema)
    write_groups(out / "private" / "ledger.parquet", schema, [of_ledger])

    def pieces() -> Iterator[Copied]:
        every = names.to_pylist()
        for start in range(0, count, 2000):
            some = every[start : start + 2000]
            cases = pa.array([name for name in some for _ in lines])
            each = rows.take(list(range(len(lines))) * len(some)).set_column(0, "case", cases)
            yield Copied(each, [name.encode() + line[5:] for name in some for line in lines])

    _, written = write_rows(out / "measurements", rows.schema, pieces())
    record = TabledCases(out, (), ("measurements", "radiomics"))
    record._read = [
        known(outdated=False, columns="[]", time=0, described="").cast(tabled_cases._schema())
    ]
    record.save((), written)


def step_open(out: Path, _: int) -> Callable[[], object]:
    """List the folders and read the ledger."""
    from scanloom.io.output.ledger import Ledger

    return lambda: Ledger(out)


def step_look_up(out: Path, count: int) -> Callable[[], object]:
    """Ask for each case whether its result is current."""
    from scanloom.core import Case, Outputs, Series
    from scanloom.io.output.ledger import Ledger

    ledger, series, outputs = Ledger(out), Series("nifti", ()), Outputs()

    def run() -> None:
        for number in range(count):
            case = Case(name_of(number), series, outputs, "", TEXTS[0], stamp=TEXTS[2])
            if not ledger.holds(case):
                sys.exit("a case is not held")

    return run


def step_gather(out: Path, count: int) -> Callable[[], object]:
    """Append rows of 5,000 cases, and make them part of the table."""
    from scanloom.io.output import ledger

    rows = [
        ledger.PublishedCase(name, name, *TEXTS, n + 1)
        for n, name in enumerate(map(name_of, range(min(count, 5000))))
    ]
    private = out.parent / "private"  # a copy, so that the rows stay right
    shutil.copytree(out / "private", private)

    def run() -> None:
        ledger._append(private, rows)
        ledger.gather_published(private)

    return run


def step_check(out: Path, _: int) -> Callable[[], object]:
    """Read 5,000 folders, as is done each time."""
    from scanloom.io.output.published import read_provenance

    folder = out.parent / "model"

    def run() -> None:
        for _ in range(5000):
            read_provenance(folder)

    return run


def generate_list(out: Path) -> None:
    """Let the folders that were not made be listed all the same."""
    import pyarrow as pa
    from pyarrow import compute, parquet

    from scanloom.io.output import ledger

    if not (out.parent / LISTED).exists():
        return
    original = ledger.list_folders

    def list_folders(out: Path) -> pa.Table:
        made, every = original(out), parquet.read_table(out.parent / LISTED, use_threads=False)
        others = every.filter(compute.invert(compute.is_in(every["name"], made["name"])))
        return ledger._sorted(pa.concat_tables([made, others])).combine_chunks()

    ledger.list_folders = list_folders


def with_own_ids() -> None:
    """Let each case have the name of its folder as its id."""
    from scanloom.io.output import layout

    original = layout.read_case
    layout.read_case = lambda folder: {**original(folder), "case": folder.name}


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
    from scanloom.io.output import ledger

    ledger.CHECKED = 0
    generate_list(out)
    step: Callable[[], object] = globals()[f"step_{name.replace(' ', '_')}"](out, count)
    start = time.perf_counter()
    step()
    took = time.perf_counter() - start
    print(took, peak_memory() / 2**20)


def measure(out: Path, count: int, structures: int) -> list[tuple[str, object, object]]:
    """Return seconds and MiB of each step."""
    start = time.perf_counter()
    make(out, count, structures)
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
