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
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from meter import SAMPLE, parse, run, table

PROGRAM = "from scanloom.cli.main import main; main()"
REST = "start, imports, loading the model, publishing"
HEAVIEST = 12  # packages that are listed

Spent = tuple[float, float]
"""Wall and processor seconds."""


def command(arguments: argparse.Namespace, out: Path, *options: str) -> list[str]:
    """Return the command of one cold run."""
    program = [arguments.python, *options, "-c", PROGRAM]
    segment = [
        "segment",
        str(arguments.scan),
        "--model",
        arguments.model,
        "--out",
        str(out),
        "--quiet",
    ]
    return [*program, *segment, "--precision", arguments.precision, "--device", "cpu"]


def once(arguments: argparse.Namespace) -> dict[str, Spent]:
    """Segment in a new process; return the time of each step, and of all."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        used = run(command(arguments, out))
        (timing,) = out.glob("cases/*/timing.json")
        timings = json.loads(timing.read_text())["steps"]
    spent = {name: (step["wall_s"], step["cpu_s"]) for name, step in timings.items()}
    whole = used.wall, used.cpu
    outside, steps = less(whole, [spent["network"]]), list(spent.values())
    spent[REST] = less(whole, steps)
    spent["outside the network"] = outside
    spent["all"] = whole
    return spent


def less(whole: Spent, shares: Iterable[Spent]) -> Spent:
    """Return the whole without the parts."""
    wall, cpu = zip(*shares, strict=True)
    return whole[0] - sum(wall), whole[1] - sum(cpu)


def imports(arguments: argparse.Namespace) -> Counter[str]:
    """Return microseconds that imports of each package took themselves, under -X importtime."""
    microseconds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        program = command(arguments, Path(folder) / "out", "-X", "importtime")
        messages = subprocess.run(program, capture_output=True, text=True, check=True).stderr
    for line in messages.splitlines():
        own, _, module = line.removeprefix("import time:").partition("|")
        if line.startswith("import time:") and own.strip().isdecimal():
            name = module.rpartition("|")[2].strip().partition(".")[0]
            microseconds[name] += int(own)
    return microseconds


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scan", nargs="?", type=Path, default=SAMPLE)
    parser.add_argument("--model", default="ct_tissue")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--python", default=sys.executable, help="of another environment")
    arguments = parse(parser, runs=1)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's modules are compiled once and kept
    runs = [once(arguments) for _ in range(arguments.runs + 1)][1:]
    rows = [
        (name, *(f"{statistics.median(each[name][n] for each in runs):.2f}" for n in (0, 1)))
        for name in runs[0]
    ]
    print(f"median of {arguments.runs} runs")
    print(table(("part", "wall s", "cpu s"), rows))
    print("\nimports, slower than usual since each is timed")
    heaviest = imports(arguments).most_common(HEAVIEST)
    print(table(("package", "ms"), [(name, us // 1000) for name, us in heaviest]))


if __name__ == "__main__":
    main()
