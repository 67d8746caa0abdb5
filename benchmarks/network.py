"""A network of nnU-Net's size on one CT: scanloom compared with nnU-Net, MONAI, TotalSegmentator.

    python benchmarks/network.py [--nnunet-env FOLDER] [--totalsegmentator-env FOLDER] [--mirror]
        [--precision float32 half] [--engine auto torch] [--runs 3] [--peer-runs 1] [--scale] ...

A CT of 512 x 512 x 300 voxels (0.7 x 0.7 x 1.0 mm), a network grid of 1.5 mm, 25 classes and the
background. All programs take the same weights, each in its own format, through its own command
line, in a process of its own: imports and reading of weights count. Prints a table: medians of wall
and processor seconds, peak memory with children, ratios to scanloom on the same model files, and
labels. With --scale, how scanloom's figures grow with voxels, classes and cores instead.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import real_network
from agree import agreement, load_labels
from meter import UNAVAILABLE, Failed, machine, median, parse, run, table
from real_network import SMALL, TASK, TASK_CLASSES, Size
from study import SHAPE, Study, study

PEERS = ("nnunet", "monai", "totalsegmentator")
PLAIN, MIRRORED, BUNDLE, TOTAL = "nnU-Net folder", "mirrored", "MONAI bundle", "TotalSegmentator"
SCALE_SLICES, SCALE_CLASSES = (100, 300, 600), (8, 25, 60, 118)


@dataclass(frozen=True)
class Program:
    """A program to run on a model: its command, where its labels are, and its environment."""

    name: str
    model: str
    command: Sequence[Any]
    labels: str  # a pattern below the output folder
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """Medians of a program's runs."""

    name: str
    model: str
    wall: float  # s
    cpu: float  # s, children included
    peak: int  # bytes, children included
    walls: tuple[float, ...]
    labels: Path


class Inputs:
    """The scan and the models, written to a folder.

    Parameters
    ----------
    folder : Path
        Where they are written.
    case : Study
        The scan.
    structures : int
        Classes without the background.
    size : Size
        Size of the network.
    """

    def __init__(self, folder: Path, case: Study, structures: int, size: Size) -> None:
        self.folder, self.structures, self.size = folder, structures, size
        self.scans = folder / "scans"
        self.scans.mkdir(parents=True, exist_ok=True)
        self.scan = self.scans / "case_0000.nii.gz"  # as nnU-Net names the first channel
        shutil.copy(case.nifti, self.scan)

    def model(self, name: str) -> Path:
        """Write the model in a program's format; return its folder."""
        model_folder = self.folder / name.replace(" ", "-")
        save = {
            PLAIN: lambda: real_network.save_nnunet(
                model_folder, self.structures, self.size, mirror=True
            ),
            BUNDLE: lambda: real_network.save_bundle(model_folder, self.structures, self.size),
            TOTAL: lambda: real_network.save_totalsegmentator(
                model_folder, self.structures, self.size
            ),
        }
        return save[name]()


def by_scanloom(inputs: Inputs, model: str, precision: str, engine: str) -> Program:
    """Return scanloom on a model."""
    folder = inputs.model(PLAIN if model == MIRRORED else model)
    folder = f"{folder}:task={TASK}" if model == TOTAL else folder
    modality = "mr" if model == TOTAL else "ct"
    command = [sys.executable, "-m", "scanloom", "segment", inputs.scan, "--model", folder]
    command += ["--modality", modality, "--device", "cpu", "--precision", precision, "--quiet"]
    command += ["--mirror", "auto" if model == MIRRORED else "no", "--out", "OUT"]
    command += ["--engine", engine]
    settings = [] if engine == "auto" else [engine]
    settings += [] if precision == "float32" else [precision]
    name = ", ".join(["scanloom", *settings])
    key = {"SCANLOOM_KEY": str(inputs.folder / "key")}
    return Program(name, model, command, "cases/*/segmentation.nii.gz", key)


def by_nnunet(inputs: Inputs, environment: Path, model: str) -> Program:
    """Return nnU-Net's command line on the model folder."""
    program = environment / "bin" / "nnUNetv2_predict_from_modelfolder"
    command = [program, "-i", inputs.scans, "-o", "OUT", "-m", inputs.model(PLAIN), "-f", "0"]
    command += ["-device", "cpu", "-npp", "1", "-nps", "1", "--disable_progress_bar"]
    command += [] if model == MIRRORED else ["--disable_tta"]
    unused = dict.fromkeys(("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"), "unused")
    return Program("nnU-Net", model, command, "case.nii.gz", unused)


def by_monai(inputs: Inputs, environment: Path | None) -> Program:
    """Return MONAI's bundle runner, in scanloom's environment if none is given."""
    bundle = inputs.model(BUNDLE)
    options = {
        "config_file": bundle / "configs" / "inference.json",
        "meta_file": bundle / "configs" / "metadata.json",
        "logging_file": False,
        "bundle_root": bundle,
        "dataset_dir": inputs.scans,
        "output_dir": "OUT",
    }
    flags = [argument for name, value in options.items() for argument in (f"--{name}", value)]
    python = environment / "bin" / "python" if environment else sys.executable
    return Program("MONAI", BUNDLE, [python, "-m", "monai.bundle", "run", *flags], "*.nii.gz")


def by_totalsegmentator(inputs: Inputs, environment: Path) -> Program:
    """Return TotalSegmentator on weights of its own layout, without downloads or telemetry."""
    weights, home = inputs.model(TOTAL), inputs.folder / "totalsegmentator-home"
    home.mkdir(exist_ok=True)
    config = {"totalseg_id": "none", "send_usage_stats": False, "prediction_counter": 0}
    (home / "config.json").write_text(json.dumps({**config, "statistics_disclaimer_shown": True}))
    command = [environment / "bin" / "TotalSegmentator", "-i", inputs.scan, "-o", "OUT/case.nii.gz"]
    command += ["--ml", "--task", TASK, "--device", "cpu", "--quiet"]
    names = {"TOTALSEG_WEIGHTS_PATH": weights, "TOTALSEG_HOME_DIR": home}
    names |= dict.fromkeys(("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"), weights)
    variables = {name: str(path) for name, path in names.items()}
    return Program("TotalSegmentator", TOTAL, command, "case.nii.gz", variables)


def programs(inputs: Inputs, options: argparse.Namespace) -> tuple[list[Program], list[str]]:
    """Return the programs to run, and the reasons why other peers are left out."""
    nnunet = [PLAIN, *([MIRRORED] if options.mirror else [])]
    peers, missing, models = list[Program](), list[str](), list(nnunet)
    if "nnunet" in options.peers:
        if options.nnunet_env:
            peers += [by_nnunet(inputs, options.nnunet_env, model) for model in nnunet]
        else:
            missing.append("nnU-Net: name its environment with --nnunet-env")
    if "monai" in options.peers:
        models.append(BUNDLE)
        own = importlib.util.find_spec("ignite") and importlib.util.find_spec("fire")
        if own or options.monai_env:
            peers.append(by_monai(inputs, options.monai_env))
        else:
            missing.append("MONAI's runner: name its environment with --monai-env")
    if "totalsegmentator" in options.peers:
        models.append(TOTAL)
        if options.totalsegmentator_env:
            peers.append(by_totalsegmentator(inputs, options.totalsegmentator_env))
        else:
            missing.append("TotalSegmentator: name its environment with --totalsegmentator-env")
    ours = [
        by_scanloom(inputs, model, precision, engine)
        for precision in options.precision
        for engine in options.engine
        for model in models
    ]
    return ours + peers, missing


def measure(program: Program, out: Path, runs: int, limit: float) -> Result:
    """Run a program several times; return medians.

    Raises
    ------
    Failed
        If it fails, or writes no labels.
    """
    spent = []
    threads = str(len(os.sched_getaffinity(0)))
    environment = {"OMP_NUM_THREADS": threads, **program.environment}
    for _ in range(runs):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        command = [str(argument).replace("OUT", str(out)) for argument in program.command]
        spent.append(run(command, environment, limit))
    labels = sorted(out.glob(program.labels))
    if len(labels) != 1:
        raise Failed(f"it wrote {len(labels)} label maps")
    walls = tuple(each.wall for each in spent)
    cpu, peak = median([each.cpu for each in spent]), max(each.peak for each in spent)
    return Result(program.name, program.model, median(walls), cpu, peak, walls, labels[0])


def measure_all(
    todo: Sequence[Program], folder: Path, options: argparse.Namespace
) -> tuple[list[Result], list[str]]:
    """Measure all programs; return results, and why others have none."""
    results, failed = list[Result](), list[str]()
    for n, program in enumerate(todo):
        name = f"{program.name} ({program.model})"
        print(f"[{n + 1}/{len(todo)}] {name}", file=sys.stderr, flush=True)
        try:
            runs = options.runs if program.name.startswith("scanloom") else options.peer_runs
            results.append(measure(program, folder / str(n), runs, options.limit))
        except Failed as exc:
            failed.append(f"{name}: {exc}")
            continue
        latest = results[-1]
        print(f"  {latest.wall:.1f} s, {latest.cpu:.1f} cpu s", file=sys.stderr, flush=True)
    return results, failed


def compared(results: Sequence[Result]) -> list[list[Any]]:
    """Return a row for each result; ratios are to scanloom's first result of the same model."""
    rows, first, held = list[list[Any]](), dict[str, Result](), dict[str, Any]()
    for result in results:
        ours = first.setdefault(result.model, result)
        labels, voxel = load_labels(result.labels)
        same = agreement(held.setdefault(result.model, labels), labels, voxel)
        ratios: list[Any] = [result.wall / ours.wall, result.cpu / ours.cpu]
        row = [result.model, result.name, result.wall, result.cpu, result.peak / 2**30]
        equal, least = f"{same.voxels:.4%}", f"{same.dice_least:.4f}"
        itself = result is ours
        rows.append([*row, *([1, 1, "", ""] if itself else [*ratios, equal, least])])
    return rows


HEAD = ("model", "program", "wall s", "cpu s", "GiB", "wall x", "cpu x", "voxels equal", "Dice")


def scale(options: argparse.Namespace, size: Size, folder: Path) -> list[list[Any]]:
    """Return rows of scanloom's figures against slices, classes and cores."""
    cores = sorted(os.sched_getaffinity(0))
    core_counts = sorted({1, *(2**n for n in range(1, 7) if 2**n <= len(cores)), len(cores)})
    middle = options.structures
    points = [(n, middle, len(cores)) for n in options.scale_slices]
    points += [(options.slices, n, len(cores)) for n in options.scale_classes]
    points += [(options.slices, middle, n) for n in core_counts]
    rows = []
    for slices, structures, count in dict.fromkeys(points):
        case = study(slices, structures, options.across)
        point_folder = folder / f"{slices}-{structures}-{count}"
        inputs = Inputs(point_folder, case, structures, size)
        program = by_scanloom(inputs, PLAIN, options.precision[0], options.engine[0])
        os.sched_setaffinity(0, cores[:count])
        try:
            result = measure(program, point_folder / "out", options.runs, options.limit)
        finally:
            os.sched_setaffinity(0, cores)
        voxels = options.across**2 * slices / 1e6
        row = [voxels, structures, count, result.wall, result.cpu, result.peak / 2**30]
        rows.append([*row, result.wall * count, result.cpu / voxels])
        print(f"  {rows[-1]}", file=sys.stderr, flush=True)
        shutil.rmtree(point_folder)
    return rows


SCALE_HEAD = (
    *("million voxels", "classes", "cores", "wall s", "cpu s", "GiB"),
    *("core seconds held", "cpu s a million voxels"),
)


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="of scanloom in each form")
    parser.add_argument("--peer-runs", type=int, default=3, help="of each other program")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--nnunet-env", type=Path, help="environment with nnU-Net")
    parser.add_argument("--monai-env", type=Path, help="environment with MONAI's runner")
    parser.add_argument("--totalsegmentator-env", type=Path, help="environment with that program")
    parser.add_argument("--mirror", action="store_true", help="mirrored too: 8 times the work")
    parser.add_argument("--precision", nargs="+", default=["float32"], help="of scanloom")
    parser.add_argument("--engine", nargs="+", default=["auto"], help="of scanloom")
    parser.add_argument("--slices", type=int, default=SHAPE[2])
    parser.add_argument("--across", type=int, default=SHAPE[0], help="pixels of a row")
    parser.add_argument("--structures", type=int, default=TASK_CLASSES)
    parser.add_argument("--features", type=int, nargs="+", default=Size().features)
    parser.add_argument("--window", type=int, nargs=3, default=Size().window)
    parser.add_argument("--scale", action="store_true", help="growth with voxels, classes, cores")
    parser.add_argument("--scale-slices", type=int, nargs="*", default=SCALE_SLICES)
    parser.add_argument("--scale-classes", type=int, nargs="*", default=SCALE_CLASSES)
    parser.add_argument("--limit", type=float, default=4 * 3600, help="seconds of a process")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    return parse(
        parser,
        runs=1,
        peer_runs=1,
        peers=("monai",),
        slices=32,
        across=64,
        features=SMALL.features,
        window=SMALL.window,
        scale_slices=(32,),
        scale_classes=(8,),
    )


def main() -> None:
    """Measure and print."""
    options = arguments()
    size = Size(tuple(options.features), tuple(options.window))
    print(machine("scanloom", "torch", "numpy"), "\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.scale:
            print(table(SCALE_HEAD, scale(options, size, folder)))
            return
        case = study(options.slices, options.structures, options.across)
        todo, missing = programs(Inputs(folder / "in", case, options.structures, size), options)
        results, failed = measure_all(todo, folder / "out", options)
        print(table(HEAD, compared(results)))
    for line in [*failed, *missing]:
        print(f"\nnot measured: {line}", file=sys.stderr)
    if options.json:
        held = [{**asdict(each), "labels": each.labels.name} for each in results]
        options.json.write_text(json.dumps({"results": held, "failed": failed}, indent=1) + "\n")
    raise SystemExit(1 if failed else UNAVAILABLE if missing else 0)


if __name__ == "__main__":
    main()
