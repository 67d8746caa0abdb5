"""The share of time in which the device is busy: a sleep for the network, beside CPU work."""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

from engine_sleep import draw, sleepers
from meter import machine, parse, table

from scanloom.core import Case
from scanloom.engine.prepare import OutputTarget
from scanloom.engine.worker.messages import WorkerSetup
from scanloom.engine.worker.pool import LocalPool, dispatch_cases
from scanloom.engine.worker.supervisor import CaseOutcome, WorkerSupervisor


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--sleep", type=float, default=0.5, help="s at the device a case")
    options = parse(parser, cases=4, sleep=0.05)
    print(machine("scanloom"), "\n")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        weights = root / "weights"
        weights.write_bytes(b"none")
        setup = WorkerSetup(
            OutputTarget(root / "out", "print"), partial(sleepers, weights, options.sleep), 3
        )
        pool = LocalPool(WorkerSupervisor(setup, 600.0), 3)
        spans: list[tuple[float, float]] = []

        def note(_: Case, outcome: CaseOutcome) -> None:
            assert outcome.record is not None
            assert outcome.record.reason is None, outcome.record
            spans.extend(outcome.device)

        dispatch_cases(draw(root / "in", options.cases), pool, note)
        pool.stop(5.0)
    first, last = min(a for a, _ in spans), max(b for _, b in spans)
    busy = sum(b - a for a, b in spans) / (last - first)
    print(table(["what", "measured", "aim"], [["the door is busy, %", 100 * busy, ">= 97"]]))


if __name__ == "__main__":
    main()
