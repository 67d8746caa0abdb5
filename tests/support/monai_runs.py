"""Bundles in the manner of MONAI's Model Zoo, scans for them, and MONAI's own runner."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid, Volume
from support import model_cards

GRIDS = {
    "axial": model_cards.grid((64, 60, 32), (1.1, 1.1, 2.5), "LPS"),
    "oblique": model_cards.grid((56, 64, 36), (1.2, 1.0, 2.2), "LAS", turn=9),
    "permuted": model_cards.grid((40, 60, 60), (2.0, 1.0, 1.3), "SPL", turn=2),
    "sagittal": model_cards.grid((60, 56, 24), (1.0, 1.2, 3.0), "PIL"),
    "tilted": model_cards.grid((56, 60, 24), (1.2, 1.1, 3.0), "LPS", tilt=14),
}
"""Scans as DICOM readers and NIfTI files bring them."""


def transforms(keys: str, *steps: Mapping[str, Any]) -> dict[str, Any]:
    return {"_target_": "Compose", "transforms": [{"keys": keys, **step} for step in steps]}


def config(
    network: Mapping[str, Any],
    before: list[dict[str, Any]],
    inferer: Mapping[str, Any],
    after: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return an inference config in the manner of the Model Zoo's bundles."""
    load = [{"_target_": "LoadImaged"}, {"_target_": "EnsureChannelFirstd"}]
    save = {
        "_target_": "SaveImaged",
        "output_dir": "@output_dir",
        "output_postfix": "trans",
        "separate_folder": False,
    }
    return {
        "imports": ["$import glob"],
        "bundle_root": ".",
        "output_dir": "$@bundle_root + '/eval'",
        "dataset_dir": ".",
        "datalist": "$list(sorted(glob.glob(@dataset_dir + '/imagesTs/*.nii.gz')))",
        "device": "$torch.device('cpu')",
        "network_def": dict(network),
        "network": "$@network_def.to(@device)",
        "preprocessing": transforms("image", *load, *before, {"_target_": "EnsureTyped"}),
        "dataset": {
            "_target_": "Dataset",
            "data": "$[{'image': i} for i in @datalist]",
            "transform": "@preprocessing",
        },
        "dataloader": {
            "_target_": "DataLoader",
            "dataset": "@dataset",
            "batch_size": 1,
            "num_workers": 0,
        },
        "inferer": dict(inferer),
        "postprocessing": transforms("pred", *after, save),
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
        },
        "checkpointloader": {
            "_target_": "CheckpointLoader",
            "load_path": "$@bundle_root + '/models/model.pt'",
            "load_dict": {"model": "@network"},
        },
        "initialize": ["$@checkpointloader(@evaluator)"],
        "run": ["$@evaluator.run()"],
    }


def invert(nearest: bool) -> dict[str, Any]:
    return {
        "_target_": "Invertd",
        "transform": "@preprocessing",
        "orig_keys": "image",
        "nearest_interp": nearest,
        "to_tensor": True,
    }


def orient(codes: str) -> dict[str, Any]:
    return {"_target_": "Orientationd", "axcodes": codes}


def space(*mm: float) -> dict[str, Any]:
    return {"_target_": "Spacingd", "pixdim": list(mm), "mode": "bilinear"}


ARGMAX = {"_target_": "AsDiscreted", "argmax": True}
SOFTMAX = {"_target_": "Activationsd", "softmax": True}
CT_RANGE = {
    "_target_": "ScaleIntensityRanged",
    "a_min": -57,
    "a_max": 164,
    "b_min": 0,
    "b_max": 1,
    "clip": True,
}
NORMALIZE = {"_target_": "NormalizeIntensityd", "nonzero": True}


def sliding(size: int, overlap: float, **more: Any) -> dict[str, Any]:
    return {
        "_target_": "SlidingWindowInferer",
        "roi_size": [size] * 3,
        "sw_batch_size": 1,
        "overlap": overlap,
        **more,
    }


def write_scans(
    folder: Path,
    grids: Mapping[str, Grid] = GRIDS,
    names: Collection[str] | None = None,
    air: int = 0,
) -> dict[str, Volume]:
    """Save scans of these names as NIfTI; return them as stored (affines in float32).

    `air` are voxels at -1000 before each axis of a scan; twice as many are after it.
    """
    folder.mkdir(parents=True)
    scans = {}
    for number, (name, grid) in enumerate(grids.items()):
        if names is not None and name not in names:
            continue
        array = model_cards.smooth_scan(grid.shape, number)
        inside = np.zeros(grid.shape, bool)
        inside[tuple(slice(air, n - 2 * air) for n in grid.shape)] = True
        array[~inside] = -1000
        path = folder / f"{name}.nii.gz"
        nib.save(nib.Nifti1Image(array, grid.affine), path)
        stored = nib.load(path)
        scans[name] = Volume(array, Grid(grid.shape, stored.affine), "HU", "CT")
    return scans


RUN_BUNDLES = """
import json, os, sys
from monai.bundle import run
overrides, scans, *bundles = sys.argv[1:]
for bundle in bundles:
    os.chdir(bundle)
    run(
        "run",
        config_file=os.path.join(bundle, "configs", "inference.json"),
        bundle_root=bundle,
        dataset_dir=scans,
        output_dir=os.path.join(bundle, "eval"),
        **json.loads(overrides),
    )
"""


def run_monai(scans: Path, *bundles: Path, **overrides: object) -> None:
    """Run bundles one after the other in MONAI's own runner; results go to `BUNDLE/eval`."""
    command = [sys.executable, "-c", RUN_BUNDLES, json.dumps(overrides), str(scans)]
    done = subprocess.run([*command, *map(str, bundles)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def assert_equal(ours: NDArray[Any], theirs: NDArray[Any], classes: int, name: str) -> None:
    """At least 99.95 % of voxels, Dice 0.999 a class, and each class fills at least 5 %."""
    assert ours.shape == theirs.shape
    equal = float(np.mean(ours == theirs))
    shares = [float(np.mean(theirs == n)) for n in range(classes)]
    report = f"{name}: {equal:.6%} equal, classes fill {[f'{s:.1%}' for s in shares]}"
    print(report)
    assert min(shares) >= 0.05, report
    assert equal >= 0.9995, report
    for n in range(classes):
        a, b = ours == n, theirs == n
        assert 2 * (a & b).sum() / (a.sum() + b.sum()) >= 0.999, report
