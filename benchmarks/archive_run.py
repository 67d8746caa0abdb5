"""A run with nothing to do, as its archive grows: time and peak memory of each step.

    python benchmarks/archive_run.py [--cases 1000 10000 100000] [--choose all best]
        [--sparse] [--folder DIR [--keep]]

The index is made of parts without files, as in `archive_index.py`, and each series has a published
case: small documents with the checksums, stamps and rows of the crosswalk that a run gives them. A
list of the archive would find none of its files, so that the run begins with the stored index: all
steps after `build_index` are those of `scanloom run`. Two runs follow one another, each in a
process of its own: one that finds the results of processes that were killed before their tables,
and one with nothing at all to do. Memory is the peak of the resident set within a step, and what it
is at its end, MiB; a million cases take 17 GB of disk and many hours, since the tables and the
report of the first run read all of them.

With `--sparse`, all cases have folders, and each 32nd has its files; samples are taken from these.
Tables are made as if all cases were equal and had one structure each, without a report, and only
the run with nothing to do is measured: a million cases take 6 GB of disk.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from archive_index import KEY, SLICES, GeneratedWalk, store_of, unread_parts
from meter import Stages, Watch, machine, parse, table

STEPS = {
    "ledger": ("Ledger",),
    "select and compare": ("RunCases", "compare"),
    "enter": ("_Run", "enter"),
    "leave": ("_Run", "leave"),
    "tables": ("write_tables",),
    "totals": ("write_totals",),
    "report": ("write_report",),
}
"""Functions of `scanloom.engine.run`, by the step for which they count."""
CASES_AT_ONCE = 100_000
"""Cases whose rows are in memory while they are made."""
FILLED, OF_FILLED = "2", 40
"""First character of the ids that have files, and the share of all ids that surely begin so."""
LABELS = ("liver", "spleen", "kidney_left", "kidney_right", "lung")


def request_of(choose: str) -> Any:
    """Return the request of a workflow that selects every series, or one of each study."""
    from scanloom.engine.prepare import Request
    from scanloom.engine.workflow.schema import make_workflow

    select = {"modality": "CT", "choose": choose}
    return Request.of(make_workflow(name="tissues", models=["ct_tissue"], select=select))


def make_out(out: Path, count: int, processes: int | None, *, is_sparse: bool) -> None:
    """Write an output folder with the index of that many series and the case of each."""
    import pyarrow as pa

    from scanloom.io.identity import key_fingerprint
    from scanloom.io.index import build
    from scanloom.io.output import crosswalk, ledger
    from scanloom.io.output.growing_table import write_groups
    from scanloom.io.output.layout import fan_out
    from scanloom.io.output.private import LEDGER, PRIVATE, private_folder, write_private

    fingerprint = key_fingerprint(KEY)
    if build.stored_index(out, fingerprint) is None:
        with private_folder(out, fingerprint) as private:
            unread_parts(private, count)
            build._built(store_of(str(private)), GeneratedWalk(str(private), count), KEY, 1)
            shutil.rmtree(private / "one")
    index = build.stored_index(out, fingerprint)
    if index is None:
        raise SystemExit("the index can't be read")
    fan_out(out, count)
    whole, cases = (series for series in index.series if series.reason is None), []
    with ProcessPoolExecutor(processes, None, prepare_cases, (out, is_sparse)) as pool:
        while batch := list(itertools.islice(whole, CASES_AT_ONCE)):
            sources = []
            for series in batch:
                source = crosswalk.SourceRecord(series.id, series.kind, series.path, series.n_files)
                uids = {"study_uid": series.study_uid, "series_uid": series.series_uid}
                sources.append(
                    crosswalk.SourceRecord(**{**vars(source), **uids, "folder": series.id})
                )
            rows = map(vars, pool.map(make_case, batch, chunksize=1000))
            cases.append(pa.Table.from_pylist(list(rows), ledger._schema()))
            with private_folder(out, fingerprint) as private:
                crosswalk.gather_sources(private, sources)
    rows = ledger._sorted(pa.concat_tables(cases).unify_dictionaries())
    with private_folder(out, fingerprint) as private:
        write_private(private / LEDGER, lambda draft: write_groups(draft, ledger._schema(), [rows]))
    shutil.rmtree(out / ".work")
    if is_sparse:
        write_alike(out, index)
    print(f"{len(rows)} cases in {out / PRIVATE}", file=sys.stderr)


def write_alike(out: Path, index: Any) -> None:
    """Write the tables of cases that all have the first structure of the first case."""
    import pyarrow as pa
    from pyarrow import parquet

    from scanloom.engine.outcomes import Outcome, Outcomes
    from scanloom.engine.results import tables
    from scanloom.io.output.layout import read_case
    from scanloom.io.output.published import check_files

    def like_first(_: Path, read: Any, __: set[str], folders: Iterator[Path]) -> Iterator[Any]:
        first = None
        for folder in folders:
            first = first or read(folder, read_case(folder), check_files(folder))
            case, measured, columns = first
            rows = [{**row, "case": folder.name} for row in measured[:1]]
            yield case._replace(name=folder.name, case=folder.name), rows, columns

    def write_manifest(stem: Path, columns: Any, _: Any, written: Any) -> None:
        stem.with_suffix(".csv").write_text("")
        schema = tables._schema(columns)
        metadata = {tables._WRITTEN: json.dumps({**written(0), "counts": {"used": 1}})}
        with parquet.ParquetWriter(stem.with_suffix(".parquet"), schema) as writer:
            ids = index.series.ids()
            while batch := list(itertools.islice(ids, 20_000)):
                names = [name for name in batch for _ in range(SLICES)]
                texts = {"file": names, "case": names, "outcome": ["used"] * len(names)}
                for name in set(schema.names) - set(texts):
                    texts[name] = [1 if name == "copy" else ""] * len(names)
                writer.write_table(pa.table({name: texts[name] for name in schema.names}, schema))
            writer.add_key_value_metadata(metadata)

    tables.iter_cases, tables.write_table = like_first, write_manifest
    endings = Outcomes(Outcome(name, "", "") for name in index.series.ids())
    tables.write_tables(out, index, Outcomes(), endings, KEY)


def prepare_cases(out: Path, is_sparse: bool) -> None:
    """Prepare a process that makes cases."""
    recipe = request_of("all").recipe
    write = case_writer(out / ".work" / str(os.getpid()), recipe)
    _maker[:] = out, recipe, write, is_sparse


_maker: list[Any] = []


def make_case(series: Any) -> Any:
    """Write the case of a series; return its row of the ledger."""
    from scanloom.io.identity import source_stamp
    from scanloom.io.output.layout import case_folder
    from scanloom.io.output.ledger import PublishedCase

    out, recipe, write, is_sparse = _maker
    folder, stamp = case_folder(out, series.id), source_stamp([series.stamp], KEY)
    if is_sparse and series.id[0] != FILLED:
        folder.mkdir(parents=True)
    else:
        write(folder, stamp)
    return PublishedCase(series.id, series.id, recipe, "h", stamp, folder.stat().st_ino)


def case_writer(folder: Path, recipe: str) -> Any:
    """Return a function that writes a case folder like one that product functions write here."""
    from scanloom.io.output.case_folder import _write_checksums
    from scanloom.io.output.file_names import CASE, TIMING
    from scanloom.io.output.json_file import write_document
    from scanloom.io.output.measurements import write_measurements
    from scanloom.io.output.published import read_provenance, store_file_stamps, store_source_stamp

    sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]
    from support.make_report import measured

    mark, stamp = "i" * 26, "s" * 26
    folder.mkdir(parents=True)
    model = {"name": "ct_tissue", "version": "1", "license": "MIT", "engine": {"name": "torch"}}
    digests = {"weights_sha256": "5" * 64, "card_sha256": "6" * 64, "reference_ranges": []}
    document = {
        "case": mark,
        "source": {"kind": "dicom", "files": 3, "hash": "h", "modality": "CT", "unit": "HU"},
        "grid": {"axes": "LPS", "shape": [8, 8, 3]},
        "flags": [],
        "recipe": recipe,
        "models": [{**model, **digests, "device": "cpu", "precision": "float32"}],
        "versions": {"scanloom": "0.1.0"},
    }
    write_document(folder / CASE, document)
    write_document(folder / TIMING, {"steps": {"load": {"wall_s": 0.1, "cpu_s": 0.1}}})
    write_measurements(folder, [measured("ct_tissue", label, 10.0) for label in LABELS])
    _write_checksums(folder)
    store_file_stamps(folder)
    store_source_stamp(folder, stamp)
    read_provenance(folder)
    texts = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    times = {name: str((folder / name).stat().st_mtime_ns).encode() for name in texts}
    timing, sums = texts.pop(TIMING), texts.pop("SHA256SUMS")
    old_sum = hashlib.sha256(texts[CASE]).hexdigest().encode()

    def write(case: Path, own_stamp: str) -> None:
        case.mkdir(parents=True)
        own = {
            name: text.replace(mark.encode(), case.name.encode()) for name, text in texts.items()
        }
        new_sum = hashlib.sha256(own[CASE]).hexdigest().encode()
        own_timing = timing.replace(stamp.encode(), own_stamp.encode())
        for name, text in {**own, "SHA256SUMS": sums.replace(old_sum, new_sum)}.items():
            with (case / name).open("wb") as file:
                file.write(text)
            own_timing = own_timing.replace(
                times[name], str((case / name).stat().st_mtime_ns).encode()
            )
        (case / TIMING).write_bytes(own_timing)

    return write


def measure_run(out: Path, choose: str, *, is_sparse: bool) -> None:
    """Run with the stored index, and print a row for each step as JSON."""
    from scanloom.engine import run as module
    from scanloom.io.identity import key_fingerprint
    from scanloom.io.index.build import stored_index
    from scanloom.io.output import ledger

    if is_sparse:
        sample = ledger.sample
        ledger.sample = lambda places: sample(places[: len(places) // OF_FILLED])
        module.write_report = lambda *_, **__: None
    stages, rows = Stages(), []
    key_file = out.parent / "key"
    key_file.write_bytes(KEY)
    with Watch() as watch:

        def timed(name: str, work: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                watch._take()
                watch.stage = name
                try:
                    return stages.timed(name, work)(*args, **kwargs)
                finally:
                    watch._take()
                    rows.append([name, watch._now() / 2**20])
                    watch.stage = "other"

            return wrapped

        for name, (target, *method) in STEPS.items():
            owner, attribute = (getattr(module, target), *method) if method else (module, target)
            setattr(owner, attribute, timed(name, getattr(owner, attribute)))
        module.build_index = timed(
            "stored index", lambda *_, **__: stored_index(out, key_fingerprint(KEY))
        )
        options = module.RunOptions(out, key_file, module.NO_CLUSTER)
        start, cpu = time.perf_counter(), time.process_time()
        some_path = [Path(__file__)]  # which nobody lists
        result = module.run(request_of(choose).workflow, some_path, options)
        seconds = time.perf_counter() - start
    status = result.status
    if status.work or result.files["open"]:
        raise SystemExit(f"there was something to do: {status}, {result.files}")
    found = [[name, *stages.spent[name], watch.stages[name] / 2**20, end] for name, end in rows]
    peak, end = watch.peak / 2**20, watch._now() / 2**20
    found.append(["whole run", seconds, time.process_time() - cpu, peak, end])
    print(json.dumps([status.before, found]))


def points(folder: Path, count: int, options: argparse.Namespace) -> Iterator[list[Any]]:
    """Yield a row for each step of the runs over an output folder."""
    out = folder / "out"
    script = [sys.executable, __file__, "--out", str(out), *["--sparse"] * options.sparse]
    if not out.exists():
        more = ["--processes", str(options.processes)] if options.processes else []
        subprocess.run([*script, "--make", str(count), *more], check=True)
    for choose in options.choose:
        for name in ("again",) if options.sparse else ("first", "again"):
            done = subprocess.run(
                [*script, "--run", choose], check=True, stdout=subprocess.PIPE, text=True
            )
            before, steps = json.loads(done.stdout.splitlines()[-1])
            for step in steps:
                yield [before, choose, name, *step, 1e6 * step[2] / before]
    if not options.keep:
        shutil.rmtree(folder)


def main() -> None:
    """Make output folders, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--choose", nargs="+", default=["all"], help="all, best or both")
    parser.add_argument("--folder", type=Path, help="Where to write; default a temporary one.")
    parser.add_argument("--processes", type=int, help="That make the cases; default one a core.")
    parser.add_argument("--sparse", action="store_true", help="Few cases have files.")
    parser.add_argument("--keep", action="store_true", help="Use and keep what is in --folder.")
    for hidden in ("--out", "--make", "--run"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parse(parser, cases=[6])
    if options.make:
        make_out(Path(options.out), int(options.make), options.processes, is_sparse=options.sparse)
    elif options.run:
        measure_run(Path(options.out), options.run, is_sparse=options.sparse)
    else:
        print(machine(), "\n")
        keeps = options.keep and options.folder is not None
        base = options.folder if keeps else Path(tempfile.mkdtemp(dir=options.folder))
        try:
            for count in options.cases:
                rows = list(points(base / str(count), count, options))
                head = [
                    "cases",
                    "choose",
                    "run",
                    "step",
                    "s",
                    "cpu s",
                    "peak MiB",
                    "then",
                    "cpu us",
                ]
                print(table(head, rows), flush=True)
        finally:
            if not keeps:
                shutil.rmtree(base)


if __name__ == "__main__":
    main()
