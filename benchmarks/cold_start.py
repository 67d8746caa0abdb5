"""Time `scanloom segment` from a cold start: a process that has imported nothing yet.

    python cold_start.py [SCAN] [--model NAME] [--runs N] [--python INTERPRETER]

Files are warm in the page cache after the first run, which is left out. Prints the median of the
others: wall and processor seconds in all, those of the network, those outside it, and where they
went; then which packages imports went to, from one more run under -X importtime.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from meter import SAMPLE, parse, table

PROGRAM = "from scanloom.cli.main import main; main()"
REST = "start, imports, loading the model, publishing"
HEAVIEST = 12  # packages that are listed

Spent = tuple[float, float]
"""Wall and processor seconds."""


def command(given: argparse.Namespace, out: Path, *options: str) -> list[str]:
    """Return the command of one cold run."""
    program = [given.python, *options, "-c", PROGRAM]
    asked = ["segment", str(given.scan), "--model", given.model, "--out", str(out), "--quiet"]
    return [*program, *asked, "--precision", given.precision, "--device", "cpu"]


def once(given: argparse.Namespace) -> dict[str, Spent]:
    """Segment in a new process; return what each step took, and all."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        began = time.perf_counter()
        running = subprocess.Popen(command(given, out), env=with_bytecode())
        _, status, used = os.wait4(running.pid, 0)
        wall = time.perf_counter() - began
        running.returncode = os.waitstatus_to_exitcode(status)
        if running.returncode:
            raise SystemExit(f"scanloom segment ended with {running.returncode}")
        (timing,) = out.glob("cases/*/timing.json")
        told = json.loads(timing.read_text())["steps"]
    parts = {name: (step["wall_s"], step["cpu_s"]) for name, step in told.items()}
    whole = (wall, used.ru_utime + used.ru_stime)
    outside, steps = less(whole, [parts["network"]]), list(parts.values())
    parts[REST] = less(whole, steps)
    parts["outside the network"] = outside
    parts["all"] = whole
    return parts


def with_bytecode() -> dict[str, str]:
    """Return the environment of a user, whose modules are compiled once and kept."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def less(whole: Spent, parts: Iterable[Spent]) -> Spent:
    """Return what the parts leave of the whole."""
    wall, cpu = zip(*parts, strict=True)
    return whole[0] - sum(wall), whole[1] - sum(cpu)


def imports(given: argparse.Namespace) -> Counter[str]:
    """Return microseconds that imports of each package took themselves, under -X importtime."""
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        asked = command(given, Path(folder) / "out", "-X", "importtime")
        told = subprocess.run(
            asked, capture_output=True, text=True, check=True, env=with_bytecode()
        ).stderr
    for line in told.splitlines():
        own, _, module = line.removeprefix("import time:").partition("|")
        if line.startswith("import time:") and own.strip().isdecimal():
            name = module.rpartition("|")[2].strip().partition(".")[0]
            found[name] += int(own)
    return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scan", nargs="?", type=Path, default=SAMPLE)
    parser.add_argument("--model", default="ct_tissue")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--python", default=sys.executable, help="of another environment")
    given = parse(parser, runs=1)
    runs = [once(given) for _ in range(given.runs + 1)][1:]
    rows = [
        (name, *(f"{statistics.median(run[name][n] for run in runs):.2f}" for n in (0, 1)))
        for name in runs[0]
    ]
    print(f"median of {given.runs} runs")
    print(table(("part", "wall s", "cpu s"), rows))
    print("\nimports, slower than usual since each is timed")
    heaviest = imports(given).most_common(HEAVIEST)
    print(table(("package", "ms"), [(name, us // 1000) for name, us in heaviest]))


if __name__ == "__main__":
    main()
