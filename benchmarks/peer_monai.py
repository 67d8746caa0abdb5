"""MONAI's bundle runner on one scan, its transforms timed; runs in MONAI's environment.

    python peer_monai.py SCAN BUNDLE OUT

Prints JSON. The bundle says whether scores or labels are brought back.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import monai.transforms as mt
from meter import Stages
from monai.bundle import ConfigWorkflow
from monai.inferers import SlidingWindowInferer

STAGES: dict[str, tuple[Any, ...]] = {
    "load": (mt.LoadImaged, mt.EnsureChannelFirstd),
    "resample": (mt.Orientationd, mt.Spacingd, mt.ScaleIntensityRanged, mt.EnsureTyped),
    "network": (SlidingWindowInferer,),
    "restore": (mt.Invertd, mt.AsDiscreted),
    "write": (mt.SaveImaged,),
}


def main(scan: Path, bundle: Path, out: Path) -> dict[str, Any]:
    """Run the bundle on the one scan in the folder of `scan`."""
    stages = Stages()
    for stage, kinds in STAGES.items():
        for kind in kinds:
            kind.__call__ = stages.timed(stage, kind.__call__)
    out.mkdir(parents=True, exist_ok=True)
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
    spent = stages.spent
    whole = spent.pop("all")
    spent["the rest"] = [whole[n] - sum(s[n] for s in spent.values()) for n in (0, 1)]
    (labels,) = out.glob("*.nii.gz")
    return {"steps": spent, "labels": str(labels)}


if __name__ == "__main__":
    print(json.dumps(main(*(Path(p) for p in sys.argv[1:4]))))
