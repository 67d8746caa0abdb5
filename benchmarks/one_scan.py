"""One CT of 512 x 512 x 300 and 25 structures: scanloom beside nnU-Net and MONAI, stage by stage.

    python benchmarks/one_scan.py [--runs 3] [--peers nnunet monai] [--slices 300] [--json FILE] ...

All run the same network with the same weights; each peer in an environment of its own, which pip
makes in the cache (or one that is given). Each way of labelling has a process of its own, is warmed
up in it, and then measured `--runs` times (peers: `--peer-runs`); medians count. Prints Markdown
tables: wall and processor seconds a stage, peak memory of the process tree, ratios without the
network, agreement of labels. A peer that can't be had, fails or hangs is named, the others go on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agree import Agreement, agreement, load_labels
from meter import Failed, Spent, machine, median, parse, peer_python, run, table
from model import save_bundle
from study import SHAPE, study

HERE = Path(__file__).parent
FEW = 7  # structures with which MONAI's way of inverting scores fits into memory
SMALL = 20  # slices of the scan on which peers warm up
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
DICOM, NIFTI = "scanloom, DICOM to all results", "scanloom, NIfTI to NIfTI"
NNUNET, ARGMAX = "nnU-Net", "MONAI, argmax first"
SCORES = f"MONAI bundle runner, scores back, {FEW + 1} channels"
LIKE_ARGMAX = "scanloom, NIfTI, argmax first"
LIKE_SCORES = f"scanloom, NIfTI, {FEW + 1} channels"
TWIN = {NNUNET: NIFTI, ARGMAX: LIKE_ARGMAX, SCORES: LIKE_SCORES}
"""What of scanloom does most nearly what a peer does: with MONAI, the same step for step."""
AIMS = {DICOM: (7.0, 2.5), NIFTI: (4.0, 2.5)}
"""Processor seconds around the network and GiB, at full size, that are the aim."""


@dataclass(frozen=True)
class Result:
    """Time and memory of one way of labelling the scan."""

    name: str
    steps: dict[str, list[float]]  # wall and cpu seconds by stage, medians
    runs: int
    cpu: list[float]  # of each run, all but the network
    peak: int  # bytes
    labels: str  # path of the label map
    peaks: dict[str, int] = field(default_factory=dict)  # bytes by stage
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, spent: Spent) -> Result:
        """Return medians of the runs that a script reports."""
        warm = spent.answer["warm"]
        steps = {
            stage: [median([w["steps"].get(stage, [0.0, 0.0])[n] for w in warm]) for n in (0, 1)]
            for stage in warm[0]["steps"]
        }
        cpu = [sum(s[1] for name, s in w["steps"].items() if name != "network") for w in warm]
        peaks = {stage: max(w["peaks"].get(stage, 0) for w in warm) for stage in _peaks(warm[0])}
        known = spent.answer.get("versions", {})
        return cls(name, steps, len(warm), cpu, spent.peak, warm[-1]["labels"], peaks, known)

    def around(self, which: int) -> float:
        """Return seconds (0 wall, 1 cpu) of all but the network."""
        return sum(s[which] for name, s in self.steps.items() if name != "network")


def _peaks(run: dict[str, Any]) -> list[str]:
    return [stage for stage in run.get("peaks", {}) if stage]


@dataclass(frozen=True)
class Way:
    """One way of labelling the scan, still to be run."""

    name: str
    seconds: float  # about how long a run takes, 300 slices, 2 quiet cores
    runs: int
    command: Callable[[], list[Any]]


def ways(options: argparse.Namespace, out: Path) -> list[Way]:
    """Return all ways to run, in their order."""
    case, small = study(options.slices), study(SMALL)
    bundle, few = case.bundle("scores"), save_bundle(case.folder / "few", FEW, "scores")
    runs, peer_runs = options.runs, options.peer_runs

    def ours(how: str, scan: Path, bundle: Path, folder: str, runs: int) -> list[Any]:
        script = HERE / "case_scanloom.py"
        return [sys.executable, script, how, scan, bundle, out / folder / "out", runs]

    def theirs(peer: str, environment: Path | None, *first: Any) -> list[Any]:
        python, script = peer_python(peer, environment), HERE / f"peer_{peer}.py"
        return [python, script, *first, peer_runs, small.nifti]

    def by_nnunet() -> list[Any]:
        target = out / "nnunet.nii.gz"
        return theirs("nnunet", options.nnunet_env, "case", case.nifti, bundle, target)

    def by_monai(bundle: Path, folder: str) -> list[Any]:
        return theirs("monai", options.monai_env, case.nifti, bundle, out / folder)

    labels = case.bundle("labels")
    all_ways = [
        Way(DICOM, 45, runs, lambda: ours("whole", case.dicom, bundle, "dicom", runs)),
        Way(NIFTI, 42, runs, lambda: ours("labels", case.nifti, bundle, "nifti", runs)),
    ]
    if "monai" in options.peers:
        all_ways += [
            Way(LIKE_ARGMAX, 42, 1, lambda: ours("labels", case.nifti, labels, "argmax", 1)),
            Way(LIKE_SCORES, 36, 1, lambda: ours("labels", case.nifti, few, "few", 1)),
            Way(ARGMAX, 60, peer_runs, lambda: by_monai(labels, "monai")),
            Way(SCORES, 70, peer_runs, lambda: by_monai(few, "monai-few")),
        ]
    if "nnunet" in options.peers:
        all_ways.append(Way(NNUNET, 180, peer_runs, by_nnunet))
    return all_ways


def run_all(todo: list[Way], slices: int, limit: float) -> tuple[list[Result], dict[str, str]]:
    """Run all ways; return results, and why others have none."""
    share, results, failed = slices / SHAPE[2], list[Result](), dict[str, str]()
    for n, way in enumerate(todo, 1):
        minutes = (way.runs + 1) * way.seconds * share / 60
        _say(f"[{n}/{len(todo)}] {way.name}: about {minutes:.1f} min where it is quiet")
        try:
            spent = run(way.command(), limit=limit)
            results.append(Result.of(way.name, spent))
        except (Failed, KeyError, TypeError) as exc:  # the last two: it answered something else
            failed[way.name] = str(exc)
            _say(f"  no result: {exc}")
            continue
        done = results[-1]
        _say(f"  {spent.wall / 60:.1f} min; around the network {done.around(1):.2f} cpu s a run")
    return results, failed


def stage_table(results: list[Result]) -> str:
    """Return seconds by stage, a column a result."""
    rows: list[list[Any]] = [
        [stage, *(_pair(r.steps.get(stage)) for r in results)]
        for stage in STAGES
        if any(stage in r.steps for r in results)
    ]
    rows.append(["**all but the network**", *(_pair([r.around(0), r.around(1)]) for r in results)])
    rows.append(["least and most of the runs, cpu s", *(_range(r.cpu) for r in results)])
    rows.append(["runs", *(r.runs for r in results)])
    rows.append(["**peak of the tree, GiB**", *(_gib(r.peak) for r in results)])
    return table(["wall / cpu s", *(r.name for r in results)], rows)


def peak_table(results: list[Result]) -> str:
    """Return scanloom's resident memory by stage."""
    ours = [r for r in results if r.peaks]
    rows = [
        [stage, *(_gib(r.peaks.get(stage)) for r in ours)]
        for stage in STAGES
        if any(stage in r.peaks for r in ours)
    ]
    return table(["most resident, GiB", *(r.name for r in ours)], rows)


def ratio_table(results: list[Result]) -> str:
    """Return the ratios of peers to scanloom, without the network."""
    by_name = {r.name: r for r in results}
    rows = []
    for peer in results:
        for name in dict.fromkeys((TWIN.get(peer.name), NIFTI)):
            ours = by_name.get(name or "")
            other_task = peer.name == SCORES and name == NIFTI  # of fewer channels
            if peer.name in TWIN and ours and not other_task:
                rows.append([peer.name, ours.name, *_ratios(peer, ours)])
    return table(["", "beside", "wall x", "cpu x", "restore, cpu x", "peak x"], rows)


def _ratios(peer: Result, ours: Result) -> list[float]:
    restore = peer.steps["restore"][1] / ours.steps["restore"][1]
    seconds = [peer.around(n) / ours.around(n) for n in (0, 1)]
    return [*seconds, restore, peer.peak / ours.peak]


def agreements(results: list[Result]) -> dict[str, dict[str, Agreement]]:
    """Return, by way, how its labels agree with others': scanloom's own, and those of its twin."""
    held = {r.name: load_labels(Path(r.labels)) for r in results}
    agreements_by_way: dict[str, dict[str, Agreement]] = {}
    for name, (labels, voxel) in held.items():
        beside = [TWIN.get(name), NIFTI if name not in (SCORES, LIKE_SCORES) else None]
        agreements_by_way[name] = {
            neighbor: agreement(held[neighbor][0], labels, voxel)
            for neighbor in dict.fromkeys(beside)
            if neighbor in held and neighbor != name
        }
    return agreements_by_way


def agreement_table(agreements_by_way: dict[str, dict[str, Agreement]]) -> str:
    """Return a row for each pair."""
    rows = [
        [name, neighbor, *str(a).split(" / ")]
        for name, all_ in agreements_by_way.items()
        for neighbor, a in all_.items()
    ]
    return table(
        ["labels of", "beside those of", "voxels alike", "Dice, mean", "Dice, least"], rows
    )


def aims(results: list[Result]) -> str:
    """Return a line for each of scanloom's ways that has an aim."""
    return "\n".join(
        f"{r.name}: {r.around(1):.2f} cpu s around the network (aim {AIMS[r.name][0]:g}), "
        f"peak {r.peak / 2**30:.2f} GiB (aim {AIMS[r.name][1]:g})"
        for r in results
        if r.name in AIMS
    )


def _pair(seconds: list[float] | None) -> str:
    return "" if seconds is None else f"{seconds[0]:.2f} / {seconds[1]:.2f}"


def _range(seconds: list[float]) -> str:
    return f"{min(seconds):.2f} to {max(seconds):.2f}"


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**30:.2f}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="warm runs of scanloom")
    parser.add_argument("--peer-runs", type=int, default=1, help="warm runs of each peer")
    parser.add_argument("--peers", nargs="*", default=["nnunet", "monai"])
    parser.add_argument("--nnunet-env", type=Path, help="an environment that has nnU-Net")
    parser.add_argument("--monai-env", type=Path, help="an environment that has MONAI")
    parser.add_argument("--slices", type=int, default=SHAPE[2], help="fewer for a trial")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for each process")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    return parse(parser, runs=1, slices=20, peers=[])


def main() -> None:
    """Run everybody, print."""
    options = arguments()
    where = machine("scanloom", "torch", "numpy", "numba", "pydicom")
    with tempfile.TemporaryDirectory() as folder:
        todo = ways(options, Path(folder))
        seconds = sum((w.runs + 1) * w.seconds for w in todo) * options.slices / SHAPE[2]
        _say(f"{len(todo)} processes, about {seconds / 60:.0f} min where it is quiet")
        results, failed = run_all(todo, options.slices, options.limit)
        agreements_by_way = agreements(results)
    known = {r.name: r.versions for r in results if r.versions}
    print(f"{where}, {options.slices} slices\n")
    print("\n".join(f"{name}: {versions}" for name, versions in known.items()), "\n")
    tables = [stage_table(results), ratio_table(results), agreement_table(agreements_by_way)]
    print("\n\n".join([*tables, peak_table(results), aims(results)]))
    for name, why in failed.items():
        print(f"\nNo result of {name}: {why}")
    if options.json:
        held = {n: {o: asdict(a) for o, a in all_.items()} for n, all_ in agreements_by_way.items()}
        whole = {"machine": where, "slices": options.slices, "agreement": held, "failed": failed}
        whole |= {"results": [{**asdict(r), "labels": Path(r.labels).name} for r in results]}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
