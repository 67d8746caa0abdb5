"""Overhead of the engine over the serial loop, and its growth with cases and workers."""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from engine_sleep import draw, sleepers
from meter import machine, parse, table

from scanloom.core import Case
from scanloom.engine.clusters.connect import local_cluster
from scanloom.engine.clusters.contact import hold_handshake
from scanloom.engine.clusters.dask_pool import DaskPool, SupervisorSetup
from scanloom.engine.prepare import OutputTarget, prepare
from scanloom.engine.steps import run_case
from scanloom.engine.worker.messages import CaseFile, ChildSetup
from scanloom.engine.worker.pool import dispatch_cases
from scanloom.io.output.layout import case_folder
from scanloom.io.output.published import ResultState, result_state

IN_FLIGHT = 3


def resident() -> float:
    """Return MiB that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def serial(cases: Sequence[Case], out: Path, weights: Path, seconds: float) -> float:
    """Return the seconds of a plain loop over the doors."""
    models = sleepers(weights, seconds)
    cards = [model.card for model in models]
    warm, target = (OutputTarget(each, bytes(32)) for each in (out.with_name("warm"), out))
    run_case(prepare(cases[0], cards, warm), lambda: models, warm)
    start = time.perf_counter()
    for case in cases:
        record = run_case(prepare(case, cards, target), lambda: models, target)
        assert record.reason is None, record
    return time.perf_counter() - start


@contextmanager
def engine(
    cases: Sequence[Case], out: Path, weights: Path, seconds: float, workers: int
) -> Iterator[Callable[..., float]]:
    """Give a function that works on some cases through Dask and returns its seconds."""
    child = ChildSetup(OutputTarget(out, bytes(32)), partial(sleepers, weights, seconds), IN_FLIGHT)
    private = out.parent
    private.mkdir(parents=True, exist_ok=True)
    case_file = CaseFile(private / "case_file")
    for case in cases:
        case_file.append(case)
    list(case_file)  # from now on it knows where each of them is
    with (
        local_cluster([""] * workers, IN_FLIGHT, private) as client,
        hold_handshake(out) as handshake,
    ):
        setup = SupervisorSetup("run", child, 600.0, private, handshake)
        pool = DaskPool(client, case_file, setup)

        def go(batch: Sequence[Case]) -> float:
            ends: list[bool] = []
            start = time.perf_counter()
            dispatch_cases(
                batch, pool, lambda _, o: ends.append(bool(o.record and o.record.folder))
            )
            assert all(ends)
            assert len(ends) == len(batch)
            return time.perf_counter() - start

        yield go
        pool.stop(1.0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="for the overhead")
    parser.add_argument("--grow", type=int, nargs=2, default=[100, 20_000])
    parser.add_argument("--sleep", type=float, default=1.0, help="s a case, for two workers")
    parser.add_argument("--folder", type=Path, help="where scans and results go for a while")
    options = parse(parser, cases=4, grow=[2, 6], sleep=0.05)
    print(machine("scanloom", "distributed"), "\n")
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        weights = root / "weights"
        weights.write_bytes(b"none")
        few, many = options.grow
        cases = draw(root / "in", max(options.cases, many) + 50)
        warm, cases = cases[:50], cases[50:]
        loop = serial(cases[: options.cases], root / "serial" / "out", weights, 0.0)
        with engine([*warm, *cases], root / "a" / "out", weights, 0.0, 1) as go:
            go(warm)
            spent = go(cases[: options.cases])
            shutil.rmtree(root / "a" / "out" / "cases")
            over = 1000 * (spent - loop) / options.cases
            rows.append(["ms a case over the serial loop", over, "at most 10"])
            rows.append(["ms a case of the serial loop", 1000 * loop / options.cases, ""])
            before = resident()
            small = go(cases[:few]) / few
            shutil.rmtree(root / "a" / "out" / "cases")
            large = go(cases[:many]) / many
            rows.append([f"time a case, {many} beside {few}", large / small, "at most 1.25"])
            rows.append(["client memory, MiB more", resident() - before, "at most 100"])
            start = time.perf_counter()
            done = sum(
                result_state(case_folder(root / "a" / "out", c.id), c, replace=False)
                is ResultState.CURRENT
                for c in cases[:many]
            )
            each = 1000 * (time.perf_counter() - start) / done
            rows.append([f"ms a case to see that {done} are done", each, "at most 1"])
        batch = cases[:40]
        spent_by = []
        for workers in (1, 2):
            out = root / f"w{workers}" / "out"
            with engine([*warm, *cases], out, weights, options.sleep, workers) as go:
                go(warm[:12])
                spent_by.append(go(batch))
        rows.append(
            ["two workers beside one, bound by a sleep", spent_by[0] / spent_by[1], ">= 1.8"]
        )
    print(table(["what", "measured", "aim"], rows))


if __name__ == "__main__":
    main()
