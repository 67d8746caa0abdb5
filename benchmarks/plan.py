"""Compare plans of `scanloom plan` for small archives with the runs.

    python plan.py [--seed N] [--times N] [--only KIND]

Each archive is drawn anew: sizes and numbers of scans depend on the seed, which is printed. A small
UNet of random weights stands for the network. The plan knows nothing of this machine but earlier
runs, if the kind of archive has some. The ratio is 1 if the run is within the planned range, else
that of the nearer end to the measured value.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from meter import machine, parse, table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.commands import write_tiny_bundle
from support.write_dicom import Words, noise, write_series

TINY = (16, 10, 8)
Shape = tuple[int, int, int]
Draw = Callable[[np.random.Generator], list[Shape]]


def scans(count: tuple[int, int], width: tuple[int, int], slices: tuple[int, int]) -> Draw:
    """Return a function that draws the shapes of scans."""

    def draw(rng: np.random.Generator) -> list[Shape]:
        shapes = []
        for _ in range(int(rng.integers(*count))):
            i, j = (int(rng.integers(*width)) for _ in range(2))
            shapes.append((i, j, int(rng.integers(*slices))))
        return shapes

    return draw


def tiny(rng: np.random.Generator) -> list[Shape]:
    """Return the shapes of 3 to 8 tiny scans."""
    return [TINY] * int(rng.integers(3, 9))


LARGE = scans((4, 9), (160, 260), (30, 60))


@dataclass(frozen=True)
class Kind:
    """Kind of archive: shapes of scans, earlier runs here, and the workflow's execution."""

    draw: Draw
    before: Draw | None = None
    execution: str = ""
    execution_before: str = ""


KINDS = {
    "tiny and large": Kind(lambda rng: tiny(rng) + LARGE(rng)),
    "alike": Kind(scans((10, 25), (60, 90), (15, 30))),
    "large, tiny ones before": Kind(LARGE, tiny),
    "another overlap before": Kind(LARGE, LARGE, "overlap: 0.6", "overlap: 0.1"),
    "another engine before": Kind(LARGE, LARGE, "engine: torch", "engine: auto"),
    "network dominates": Kind(scans((3, 5), (120, 160), (25, 40)), None, "overlap: 0.8"),
    "tiny": Kind(tiny),
}


def scanloom(folder: Path, *arguments: str) -> Any:
    """Run a command with a cache of its own; return its JSON document."""
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "SCANLOOM_KEY": str(folder / "key")}
    command = [sys.executable, "-m", "scanloom", *arguments, "--json"]
    done = subprocess.run(
        command, env={**os.environ, **own}, check=False, stdout=subprocess.PIPE, text=True
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"scanloom {arguments[0]} ended with {done.returncode}")
    return json.loads(done.stdout)


def write_archive(folder: Path, shapes: list[Shape]) -> None:
    """Write a CT of noise for each shape."""
    for n, shape in enumerate(shapes):
        stored = noise(shape, seed=n)
        write_series(folder / str(n), stored, words=Words(name=f"{folder.name}-{n}"))


def compare(kind: Kind, folder: Path, rng: np.random.Generator) -> list[Any]:
    """Plan and run an archive; return a row."""
    bundle = write_tiny_bundle(folder / "bundles")
    named = {"before": (kind.before, kind.execution_before), "now": (kind.draw, kind.execution)}
    row: list[Any] = []
    for name, (draw, execution) in named.items():
        if draw is None:
            continue
        shapes = draw(rng)
        write_archive(folder / name, shapes)
        workflow = folder / f"{name}.yaml"
        text = f"name: planned\nmodels: [{bundle}]\nselect: {{modality: CT}}\n"
        workflow.write_text(text + (f"execution: {{{execution}}}\n" if execution else ""))
        arguments = (str(workflow), str(folder / name), "--out", str(folder / f"out-{name}"))
        began = time.monotonic()
        plan = scanloom(folder, "plan", *arguments)["plan"] if name == "now" else None
        spent = time.monotonic() - began
        compared = scanloom(folder, "run", *arguments)["plan"]
        if plan is not None:
            low, high = plan["totals"]["seconds"] or (0.0, 0.0)
            happened = compared["happened"]["seconds"]
            ratio = compared["ratio"].get("seconds", 0.0)
            row = [len(shapes), spent, plan["totals"]["tried"], plan["totals"]["known_share"]]
            row += [low, high, happened, ratio]
    return row


def main() -> None:
    """Plan, run, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--only", choices=list(KINDS))
    options = parse(parser, times=1, only="tiny")
    print(machine("scanloom", "torch", "distributed"), f"seed {options.seed}", sep="\n", flush=True)
    rng, rows = np.random.default_rng(options.seed), []
    for name in [options.only] if options.only else KINDS:
        for _ in range(options.times):
            with tempfile.TemporaryDirectory() as folder:
                rows.append([name, *compare(KINDS[name], Path(folder), rng)])
                print(rows[-1], flush=True)
    columns = [
        "archive",
        "cases",
        "plan, s",
        "tried",
        "known",
        "from, s",
        "to, s",
        "took, s",
        "ratio",
    ]
    print(table(columns, rows))


if __name__ == "__main__":
    main()
