"""MONAI's bundle runner on one scan, its transforms timed; runs in MONAI's environment.

    python peer_monai.py SCAN BUNDLE OUT RUNS SMALL

Prints JSON. The bundle says whether scores or labels are brought back. The scan SMALL warms up.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import monai.transforms as mt
from meter import Stages, versions
from monai.bundle import ConfigWorkflow
from monai.inferers import SlidingWindowInferer

STAGES: dict[str, tuple[Any, ...]] = {
    "load": (mt.LoadImaged, mt.EnsureChannelFirstd),
    "resample": (mt.Orientationd, mt.Spacingd, mt.ScaleIntensityRanged, mt.EnsureTyped),
    "network": (SlidingWindowInferer,),
    "restore": (mt.Invertd, mt.AsDiscreted),
    "write": (mt.SaveImaged,),
}
stages = Stages()


def once(scan: Path, bundle: Path, out: Path) -> dict[str, Any]:
    """Run the bundle on the one scan in the folder of `scan`."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    stages.spent.clear()
    workflow = ConfigWorkflow(
        workflow_type="infer",
        config_file=str(bundle / "configs" / "inference.json"),
        meta_file=str(bundle / "configs" / "metadata.json"),
        logging_file=False,
        bundle_root=str(bundle),
        dataset_dir=str(scan.parent),
        output_dir=str(out),
    )
    workflow.initialize()
    stages.timed("all", workflow.run)()
    workflow.finalize()
    spent = dict(stages.spent)
    whole = spent.pop("all")
    spent["the rest"] = [whole[n] - sum(s[n] for s in spent.values()) for n in (0, 1)]
    (labels,) = out.glob("*.nii.gz")
    return {"steps": spent, "labels": str(labels)}


def main(scan: Path, bundle: Path, out: Path, runs: int, small: Path) -> dict[str, Any]:
    """Warm up on the small scan, then run and report."""
    for stage, kinds in STAGES.items():
        for kind in kinds:
            kind.__call__ = stages.timed(stage, kind.__call__)
    once(small, bundle, out / "small")
    warm = [once(scan, bundle, out / str(n)) for n in range(runs)]
    return {"warm": warm, "versions": versions("monai", "torch", "numpy")}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("scan", "bundle", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("runs", type=int)
    parser.add_argument("small", type=Path)
    print(json.dumps(main(**vars(parser.parse_args()))))
