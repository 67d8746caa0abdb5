"""Growth of time and memory with slices and with structures; a table and a picture.

    python benchmarks/growth.py [--picture growth.svg] [--slices 100 300 ...] [--classes 8 25 ...]
        [--points 1000x118 ...]

Each point is a case from DICOM to results in a new process: one run warms up, one counts. Memory
is the peak of the whole process, beside it the estimate from header and card alone, and the
bytes that must be there: scan, network-grid copy and label map. The picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from meter import machine, parse, run, table
from model import SPACING as NETWORK_SPACING
from study import SHAPE, SPACING, STRUCTURES, study

HERE = Path(__file__).parent


def needed(slices: int) -> int:
    """Return bytes of the scan (int16), its copy on the network's grid (float32) and labels."""
    voxels = SHAPE[0] * SHAPE[1] * slices
    finer = 1.0
    for own, network in zip(SPACING, NETWORK_SPACING, strict=True):
        finer *= own / network
    return int(voxels * (2 + 1 + 4 * finer))


def point(slices: int, structures: int) -> dict[str, Any]:
    """Run one case; return seconds around the network and peak bytes."""
    case = study(slices, structures)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        script = HERE / "case_scanloom.py"
        command = [sys.executable, script, "whole", case.dicom, case.bundle("scores"), out, "1"]
        spent = run(command)
    warm = spent.answer["warm"][0]
    network = warm["steps"]["network"]
    return {
        "slices": slices,
        "structures": structures,
        "wall": warm["wall"] - network[0],
        "cpu": warm["cpu"] - network[1],
        "network": network[1],
        "peak": spent.peak,
        "estimate": warm["estimate"],
        "needed": needed(slices),
    }


def draw(by_slices: list[dict[str, Any]], by_classes: list[dict[str, Any]], path: Path) -> None:
    """Draw cpu seconds and memory against slices and structures."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(9, 6), constrained_layout=True)
    for row, (points, key) in enumerate(((by_slices, "slices"), (by_classes, "structures"))):
        x = [p[key] for p in points]
        axes[row, 0].plot(x, [p["cpu"] for p in points], "o-")
        axes[row, 0].set(xlabel=key, ylabel="cpu s outside the network", ylim=(0, None))
        axes[row, 1].plot(x, [p["peak"] / 2**30 for p in points], "o-", label="peak")
        need = [p["needed"] / 2**30 for p in points]
        axes[row, 1].plot(x, [p["estimate"] / 2**30 for p in points], ":", label="estimate")
        axes[row, 1].plot(x, need, "--", label="scan, network grid, labels")
        axes[row, 1].set(xlabel=key, ylabel="GiB", ylim=(0, None))
        axes[row, 1].legend()
    figure.savefig(path)


def _pair(text: str) -> tuple[int, int]:
    slices, structures = text.split("x")
    return int(slices), int(structures)


def main() -> None:
    """Run all points, print, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slices", type=int, nargs="*", default=[100, 300, 600, 1000])
    parser.add_argument("--classes", type=int, nargs="*", default=[8, 25, 60, 118])
    parser.add_argument("--points", type=_pair, nargs="*", default=[(100, 118), (1000, 118)])
    parser.add_argument("--picture", type=Path)
    options = parse(parser, slices=[20], classes=[], points=[])
    print(machine("scanloom", "torch", "numpy", "numba"), "\n")
    by_slices = [point(n, STRUCTURES) for n in options.slices]
    by_classes = [point(SHAPE[2], n) for n in options.classes]
    further = [point(n, m) for n, m in options.points]
    keys = ("slices", "structures", "wall", "cpu", "network")
    bytes_ = ("peak", "estimate", "needed")
    rows = [
        [*(p[k] for k in keys), *(p[k] / 2**30 for k in bytes_), p["estimate"] / p["peak"]]
        for p in by_slices + by_classes + further
    ]
    head = ["slices", "structures", "wall s", "cpu s", "network, cpu s"]
    head += ["peak GiB", "estimate GiB", "needed GiB", "estimate / peak"]
    print(table(head, rows))
    if len(by_slices) > 1:
        first, last = by_slices[0], by_slices[-1]
        grown = (last["peak"] - first["peak"]) / (last["needed"] - first["needed"])
        print(f"\nPeak grows by {grown:.2f} x the needed bytes from ", end="")
        print(f"{first['slices']} to {last['slices']} slices")
    if options.picture:
        draw(by_slices, by_classes, options.picture)


if __name__ == "__main__":
    main()
