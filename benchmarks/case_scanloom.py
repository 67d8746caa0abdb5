"""Segment one study with scanloom, several times in one process; prints JSON.

    python case_scanloom.py whole|labels SCAN BUNDLE OUT RUNS

"whole" works as the command line; "labels" reads a scan and writes its label map, no more.
The first run warms up: imports, the network, compiled code. It is reported apart. `peaks` are the
most resident bytes of each stage; between stages they count for the one before.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

from meter import Watch


def once(scan: Path, bundle: Path, out: Path) -> dict[str, Any]:
    """Segment the scan as the command line does, into a new folder."""
    from scanloom.engine.segment import iter_segment
    from scanloom.options import segment_options

    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)  # a key is made in an existing folder only
    options = segment_options(
        models=(str(bundle),), out=out, device="cpu", precision="float32", key=out.parent / "key"
    )
    with Watch() as watch:
        wall, cpu = time.perf_counter(), time.process_time()
        records = iter_segment([scan], options, lambda _, step: setattr(watch, "stage", step))
        [(_, record)] = records
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if record.folder is None:
        raise SystemExit(f"not segmented: {record.reason} {record.detail}")
    timing = json.loads((record.folder / "timing.json").read_text())
    steps = {name: [s["wall_s"], s["cpu_s"]] for name, s in timing["steps"].items()}
    rest = [total - sum(s[n] for s in steps.values()) for n, total in enumerate((wall, cpu))]
    steps["publish and the rest"] = rest
    return {
        "wall": wall,
        "cpu": cpu,
        "steps": steps,
        "peaks": watch.stages,
        "labels": str(record.folder / "segmentation.nii.gz"),
        "estimate": timing["estimated_memory_bytes"],
    }


def labels_only(scan: Path, bundle: Path, out: Path) -> dict[str, Any]:
    """Read the scan, label it, write the label map; nothing else that a case folder has."""
    from scanloom.convert.store import find_model
    from scanloom.core import ComputeOptions, StepTimer
    from scanloom.inference.predictor import TorchPredictor
    from scanloom.io.index.ranking import select_series
    from scanloom.io.index.series import find_series
    from scanloom.io.read import read_scan
    from scanloom.io.write.nifti import write_nifti

    predictor = TorchPredictor(
        find_model(str(bundle)), device="cpu", compute=ComputeOptions(precision="float32")
    )
    out.mkdir(parents=True, exist_ok=True)
    target = out / "labels.nii.gz"
    with Watch() as watch:
        clock = StepTimer(lambda step: setattr(watch, "stage", step))
        with clock.step("load"):
            [series] = select_series(find_series(scan))
            read = read_scan(series)
        segmentation = predictor.predict(read.volume, clock)
        with clock.step("write"):
            write_nifti(segmentation.layers[0].labels, segmentation.grid, read.source, target)
    steps = {name: [s.wall, s.cpu] for name, s in clock.steps.items()}
    wall, cpu = (sum(s[n] for s in steps.values()) for n in (0, 1))
    peaks = watch.stages
    return {"wall": wall, "cpu": cpu, "steps": steps, "peaks": peaks, "labels": str(target)}


def main() -> None:
    """Warm up once, then run and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ways = {"whole": once, "labels": labels_only}
    parser.add_argument("way", choices=ways)
    for name in ("scan", "bundle", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("runs", type=int)
    options = parser.parse_args()
    work = ways[options.way]
    results = [work(options.scan, options.bundle, options.out) for _ in range(options.runs + 1)]
    print(json.dumps({"first": results[0], "warm": results[1:]}))


if __name__ == "__main__":
    main()
