"""The share of time in which the device is busy: a sleep for the network, beside CPU work."""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path

from engine_sleep import draw, sleepers
from meter import machine, parse, table

from scanloom.core import Case
from scanloom.engine.prepare import OutputTarget
from scanloom.engine.worker.messages import ChildSetup
from scanloom.engine.worker.pool import LocalPool, dispatch_cases
from scanloom.engine.worker.supervisor import CaseOutcome, WorkerSupervisor


def run(
    folder: Path, cases: list[Case], sleep: float, in_flight: int
) -> tuple[float, float, float]:
    """Return the seconds a case, those on the device, and the share in which the device is busy.

    The first case, in which the worker imports its modules, does not count.
    """
    folder.mkdir()
    weights = folder / "weights"
    weights.write_bytes(b"none")
    setup = ChildSetup(
        OutputTarget(folder / "out", bytes(32)), partial(sleepers, weights, sleep), in_flight
    )
    pool = LocalPool(WorkerSupervisor(setup, 600.0), in_flight)
    spans: list[tuple[float, float]] = []
    ends: list[float] = []

    def note(_: Case, outcome: CaseOutcome) -> None:
        assert outcome.record is not None
        assert outcome.record.reason is None, outcome.record
        ends.append(time.perf_counter())
        spans.extend(outcome.device)

    dispatch_cases(cases, pool, note)
    pool.stop(5.0)
    spans = sorted(spans)[1:]
    device = sum(end - begin for begin, end in spans)
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
    count = len(cases) - 1
    return (ends[-1] - ends[0]) / count, device / count, device / whole


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=21, help="the first does not count")
    parser.add_argument("--side", type=int, default=160, help="voxels of a scan along an axis")
    parser.add_argument("--sleep", type=float, help="s at the device; else as much as the host's")
    options = parse(parser, cases=4, side=32)
    print(machine("scanloom"), "\n")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        cases = draw(root / "in", options.cases, (options.side,) * 3)
        alone, slept, _ = run(root / "alone", cases[:6], 0.01, 1)
        host = alone - slept
        whole, device, busy = run(root / "batch", cases, options.sleep or host, 3)
    rows = [
        ["the host's work a case, one after another, s", f"{host:.3f}", ""],
        ["the device's work a case, s", f"{device:.3f}", ""],
        ["a case of the batch, s", f"{whole:.3f}", ""],
        ["the device is busy, %", f"{100 * busy:.1f}", ">= 95"],
    ]
    print(table(["what", "measured", "aim"], rows))


if __name__ == "__main__":
    main()
