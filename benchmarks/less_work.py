"""Less work on one scan: `--fast`, and windows of air that share scores, beside the plain run.

    python benchmarks/less_work.py [SCAN] [--runs 1] [--engine auto] [--window 64 64 64]
        [--structures 8] [--folds 2] [--mirror] [--models shipped network] [--forms plain fast]

The scan is the sample study, or any CT. It is segmented by the model that ships with scanloom, and
by an nnU-Net folder of several folds with a network of nnU-Net's size: plain, without shared
windows, and with --fast; through the command line, each in a process of its own, after a run that
fills caches. Prints wall and processor seconds of the whole command and of the step "network", how
many windows shared scores, and the labels compared with the plain run's: voxels, the least Dice of
a structure above 1 ml, and the largest change of such a structure's volume. Scores of random
weights are close to each other, and folds unlike: labels of the network differ more than those of
a trained one. A table of all structures follows for the model that ships.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from agree import agreement, load_labels
from meter import SAMPLE, Failed, machine, median, parse, run, table
from real_network import SMALL, Size, save_nnunet
from study import study

SHIPPED, NETWORK = "shipped", "network"
FORMS: dict[str, Sequence[str]] = {
    "plain": (),
    "each window by itself": ("--no-skip-air",),
    "fast": ("--fast",),
    "fast, each window by itself": ("--fast", "--no-skip-air"),
}
HEAD = (
    *("model", "form", "wall s", "cpu s", "network cpu s", "x plain", "GiB", "windows"),
    *("voxels equal", "Dice", "volume"),
)
STRUCTURES = ("structure", "ml", "ml, fast", "Dice")


def model(name: str, given: argparse.Namespace, folder: Path) -> str:
    """Return the name or folder of a model, which is written first if it is not shipped."""
    if name == SHIPPED:
        return "ct_tissue"
    size = Size(tuple(given.features), tuple(given.window))
    place = save_nnunet(folder / "model", given.structures, size, mirror=given.mirror)
    for fold in range(1, given.folds):
        _write_fold(place, fold)
    return str(place)


def _write_fold(place: Path, fold: int) -> None:
    """Write a further fold: the first one's weights, each changed by some 10 %."""
    import torch

    checkpoint = torch.load(place / "fold_0" / "checkpoint_final.pth", weights_only=True)
    torch.manual_seed(fold)
    weights = checkpoint["network_weights"]
    checkpoint["network_weights"] = {
        key: value * (1 + 0.1 * torch.randn_like(value)) for key, value in weights.items()
    }
    (place / f"fold_{fold}").mkdir(exist_ok=True)
    torch.save(checkpoint, place / f"fold_{fold}" / "checkpoint_final.pth")


class Case:
    """A case folder of one form, and what it took."""

    def __init__(self, folder: Path, walls: list[float], cpus: list[float], peak: int) -> None:
        [case] = (folder / "cases").iterdir()
        self.labels, self.voxel_ml = load_labels(case / "segmentation.nii.gz")
        [file] = _read(case / "segments.json")["files"]
        self.names = {s["number"]: s["label"] for s in file["structures"]}
        self.timing = _read(case / "timing.json")
        self.wall, self.cpu, self.peak = median(walls), median(cpus), peak

    @property
    def network(self) -> float:
        """Processor seconds of the step "network"."""
        return float(self.timing["steps"]["network"]["cpu_s"])

    @property
    def windows(self) -> str:
        """How many windows shared scores."""
        return ", ".join(self.timing["body_box"])

    def volumes(self) -> Any:
        """Return the ml of each number."""
        return np.bincount(self.labels.ravel(), minlength=256) * self.voxel_ml


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def segment(given: argparse.Namespace, which: str, form: str, folder: Path) -> Case:
    """Return the case that a form of the command makes."""
    command = [sys.executable, "-m", "scanloom", "segment", given.scan, "--model", which]
    command += ["--device", "cpu", "--engine", given.engine, "--quiet", "--out", folder]
    modality = ("--modality", "CT") if given.scan.is_file() else ()
    command += [*modality, *FORMS[form]]
    threads = str(len(os.sched_getaffinity(0)))
    environment = {"OMP_NUM_THREADS": threads, "SCANLOOM_KEY": str(folder.parent / "key")}
    walls, cpus, peak = list[float](), list[float](), 0
    for _ in range(given.runs):
        shutil.rmtree(folder, ignore_errors=True)
        spent = run(command, environment)
        walls.append(spent.wall)
        cpus.append(spent.cpu)
        peak = max(peak, spent.peak)
    return Case(folder, walls, cpus, peak)


def volume_change(one: Case, other: Case) -> str:
    """Return the largest relative change of a structure above 1 ml, with its name."""
    before, after = one.volumes(), other.volumes()
    large = [n for n in one.names if before[n] > 1]
    if not large:
        return "-"
    most = max(large, key=lambda n: abs(after[n] / before[n] - 1))
    return f"{after[most] / before[most] - 1:+.2%} {one.names[most]}"


def rows_of(name: str, given: argparse.Namespace, folder: Path) -> list[list[Any]]:
    """Return a row for each form of a model; print the structures of the one that ships."""
    folder.mkdir()
    which, rows, plain = model(name, given, folder), list[list[Any]](), None
    for form in given.forms:
        print(f"{name}, {form}", file=sys.stderr, flush=True)
        if plain is None and not given.smallest:  # engines are measured and exported once
            segment(given, which, form, folder / "out")
        case = segment(given, which, form, folder / "out")
        plain = plain or case
        same = agreement(plain.labels, case.labels, case.voxel_ml)
        row: list[Any] = [name, form, case.wall, case.cpu, case.network, plain.cpu / case.cpu]
        row += [case.peak / 2**30, case.windows or "-"]
        rows.append([*row, f"{same.voxels:.4%}", same.dice_least, volume_change(plain, case)])
        print(f"  {rows[-1]}", file=sys.stderr, flush=True)
        if form == "fast" and name == SHIPPED:
            print(table(STRUCTURES, structures(plain, case)), "\n")
    return rows


def structures(plain: Case, fast: Case) -> list[list[Any]]:
    """Return a row for each structure: ml of both runs, and Dice."""
    before, after = plain.volumes(), fast.volumes()
    both = np.bincount(plain.labels[plain.labels == fast.labels].ravel(), minlength=256)
    return [
        [label, before[n], after[n], 2 * both[n] * plain.voxel_ml / (before[n] + after[n])]
        for n, label in plain.names.items()
        if before[n] + after[n] > 0
    ]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scan", type=Path, nargs="?", default=SAMPLE, help="a CT")
    parser.add_argument(
        "--models", nargs="+", choices=(SHIPPED, NETWORK), default=(SHIPPED, NETWORK)
    )
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--runs", type=int, default=1, help="of each form; medians are printed")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--structures", type=int, default=8)
    parser.add_argument("--features", type=int, nargs="+", default=Size().features)
    parser.add_argument("--window", type=int, nargs=3, default=(64, 64, 64))
    parser.add_argument("--folds", type=int, default=2)
    parser.add_argument("--mirror", action="store_true", help="mirrored too: 8 times the work")
    return parse(
        parser,
        features=SMALL.features,
        window=SMALL.window,
        engine="torch",
        forms=["plain", "fast"],
    )


def main() -> None:
    """Measure and print."""
    given = arguments()
    if given.smallest:
        given.scan = study(32, given.structures, 64).nifti
    print(machine("scanloom", "torch", "openvino"), "\n")
    rows, failed = list[list[Any]](), list[str]()
    with tempfile.TemporaryDirectory() as name:
        for which in given.models:
            try:
                rows += rows_of(which, given, Path(name) / which)
            except Failed as exc:
                failed.append(f"{which}: {exc}")
    print(table(HEAD, rows))
    for line in failed:
        print(f"\nnot measured: {line}", file=sys.stderr)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
