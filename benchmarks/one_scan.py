"""One CT of 512 x 512 x 300 and 25 structures: scanloom beside nnU-Net and MONAI, stage by stage.

    python benchmarks/one_scan.py [--runs 3] [--peers nnunet monai] [--nnunet-env FOLDER] ...

All run the same network with the same weights; each peer in an environment of its own, which pip
makes in the cache (or one that is given). Prints Markdown tables: wall and processor seconds a
stage, peak memory of the process tree, ratios without the network, agreement of labels.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from meter import Spent, machine, median, peer_python, run, table
from model import save_bundle
from study import SHAPE, STRUCTURES, Study, study

HERE = Path(__file__).parent
FEW = 7  # structures with which MONAI's way of inverting scores fits into memory
STAGES = (
    "find",
    "load",
    "resample",
    "network",
    "restore",
    "clean",
    "measure",
    "write",
    "readback",
    "publish and the rest",
    "the rest",
)

Steps = dict[str, list[float]]


@dataclass(frozen=True)
class Result:
    """What one way of labelling the scan took."""

    name: str
    steps: Steps  # wall and cpu seconds by stage
    peak: int  # bytes
    labels: str  # path of the label map

    def around(self, which: int) -> float:
        """Return seconds (0 wall, 1 cpu) of all but the network."""
        return sum(s[which] for name, s in self.steps.items() if name != "network")


def scanloom(how: str, scan: Path, bundle: Path, out: Path, runs: int) -> Result:
    """Return medians of warm runs, and the peak over them all; `how` as in case_scanloom.py."""
    script = HERE / "case_scanloom.py"
    spent = run([sys.executable, script, how, scan, bundle, out, str(runs)])
    name = "scanloom, NIfTI, labels only" if how == "labels" else "scanloom, DICOM, all results"
    warm = spent.answer["warm"]
    steps = {
        stage: [median([w["steps"].get(stage, [0.0, 0.0])[n] for w in warm]) for n in (0, 1)]
        for stage in warm[0]["steps"]
    }
    return _told(Result(name, steps, spent.peak, warm[-1]["labels"]))


def peer(name: str, spent: Spent) -> Result:
    """Return what a peer's script answered."""
    return _told(Result(name, spent.answer["steps"], spent.peak, spent.answer["labels"]))


def _told(result: Result) -> Result:
    """Print a result as soon as it is there: the whole run takes long."""
    print(f"{result.name}: {json.dumps(asdict(result))}", file=sys.stderr)
    return result


def stage_table(results: list[Result]) -> str:
    """Return seconds by stage, a column a result."""
    rows: list[list[Any]] = [
        [stage, *(_pair(r.steps.get(stage)) for r in results)]
        for stage in STAGES
        if any(stage in r.steps for r in results)
    ]
    rows.append(["all but the network", *(_pair([r.around(0), r.around(1)]) for r in results)])
    rows.append(["peak of the tree, GiB", *(f"{r.peak / 2**30:.2f}" for r in results)])
    return table(["wall / cpu s", *(r.name for r in results)], rows)


def _pair(seconds: list[float] | None) -> str:
    return "" if seconds is None else f"{seconds[0]:.2f} / {seconds[1]:.2f}"


def compare(ours: Result, other: Result) -> list[Any]:
    """Return ratios of a peer to ours, and how far labels agree."""
    import nibabel as nib

    one, two = (np.asanyarray(nib.load(r.labels).dataobj) for r in (ours, other))
    both = np.count_nonzero((one > 0) & (two > 0) & (one == two))
    dice = 2 * both / (np.count_nonzero(one) + np.count_nonzero(two))
    same = float((one == two).mean()) if one.shape == two.shape else 0.0
    return [
        other.name,
        other.around(0) / ours.around(0),
        other.around(1) / ours.around(1),
        other.steps["restore"][1] / ours.steps["restore"][1],
        other.peak / ours.peak,
        f"{100 * same:.3f} %",
        f"{dice:.4f}",
    ]


def cold(scan: Path, bundle: Path, out: Path) -> tuple[float, float]:
    """Return wall and cpu seconds outside the network of one `scanloom segment`."""
    command = [sys.executable, "-m", "scanloom", "segment", scan, "--model", bundle, "--out", out]
    spent = run([*command, "--device", "cpu", "--precision", "float32", "--quiet"])
    (timing,) = out.glob("cases/*/timing.json")
    network = json.loads(timing.read_text())["steps"]["network"]
    return spent.wall - network["wall_s"], spent.cpu - network["cpu_s"]


def monai(options: argparse.Namespace, case: Study, out: Path) -> tuple[list[Result], Result]:
    """Return MONAI's results, labels inverted; and scores inverted for few structures."""
    python = peer_python("monai", options.monai_env)
    script = HERE / "peer_monai.py"
    first = run([python, script, case.nifti, case.bundle("labels"), out / "monai"])
    few = save_bundle(case.folder / "few", FEW, "scores")
    second = run([python, script, case.nifti, few, out / "monai-few"])
    few_name = f"MONAI, scores back, {FEW + 1} channels only"
    return [peer("MONAI, argmax first", first)], peer(few_name, second)


def main() -> None:
    """Run everybody, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="warm runs of scanloom")
    parser.add_argument("--peers", nargs="*", default=["nnunet", "monai"])
    parser.add_argument("--nnunet-env", type=Path, help="an environment that has nnU-Net")
    parser.add_argument("--monai-env", type=Path, help="an environment that has MONAI")
    parser.add_argument("--no-cold", action="store_true", help="leave out the cold start")
    parser.add_argument("--slices", type=int, default=SHAPE[2], help="fewer for a trial")
    options = parser.parse_args()
    case = study(options.slices)
    print(machine("scanloom", "torch", "numpy", "numba", "pydicom"), "\n")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        bundle = case.bundle("scores")
        results = [
            scanloom("whole", case.dicom, bundle, out / "dicom" / "out", options.runs),
            scanloom("labels", case.nifti, bundle, out / "nifti", options.runs),
        ]
        few: Result | None = None
        if "nnunet" in options.peers:
            python = peer_python("nnunet", options.nnunet_env)
            target = out / "nnunet.nii.gz"
            spent = run([python, HERE / "peer_nnunet.py", "case", case.nifti, bundle, target])
            results.append(peer("nnU-Net", spent))
        if "monai" in options.peers:
            found, few = monai(options, case, out)
            results += found
        print(stage_table(results + ([few] if few else [])), "\n")
        head = [
            "beside scanloom, NIfTI, labels only",
            "wall",
            "cpu",
            "restore, cpu",
            "peak",
            "labels",
            "Dice",
        ]
        print(table(head, [compare(results[1], other) for other in results[2:]]), "\n")
        if few:
            share = (STRUCTURES + 1) / (FEW + 1)
            print(f"Scores back with {STRUCTURES + 1} channels, extrapolated: restore ", end="")
            print(f"{few.steps['restore'][1] * share:.0f} cpu s\n")
        if not options.no_cold:
            wall, cpu = cold(case.dicom, bundle, out / "cold")
            print(f"Cold `scanloom segment`, outside the network: {wall:.1f} s wall, {cpu:.1f} cpu")


if __name__ == "__main__":
    main()
