"""Stand-in weights for TotalSegmentator's tasks, scans, and TotalSegmentator's own labels of them.

    python totalsegmentator_home.py FOLDER [TASK...]

Runs in TotalSegmentator's environment (TotalSegmentator 2.18.0, nnunetv2 2.8.1), on the CPU, with
neither downloads nor telemetry. Writes `weights/DatasetNNN_NAME/...`, `scans/*.nii.gz` and
`labels/TASK/*.nii.gz` to FOLDER. Networks are small and random; all classes have about the same
share of a scan, except those of a rough model that crop it: they have a few voxels.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("folder", type=Path)
parser.add_argument("tasks", nargs="*", help="default: all")
arguments = parser.parse_args()
HOME = arguments.folder.resolve()
os.environ["TOTALSEG_WEIGHTS_PATH"] = str(HOME / "weights")
os.environ["TOTALSEG_HOME_DIR"] = str(HOME / "home")
for unused in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
    os.environ.setdefault(unused, str(HOME / "weights"))

import nnunet_home  # noqa: E402  # nnU-Net reads the variables when it is imported

TASKS = ("total", "total_fast", "total_mr", "liver_segments", "liver_vessels", "body")
SCANS = (
    ((3.0, 3.0, 3.0), (56, 48, 40), "RAS"),
    ((2.2, 1.7, 4.0), (60, 64, 30), "LPI"),
)
ROUGH = {298: ("liver",)}
"""Classes of a rough model that are to be rare."""
RARE_VOXELS = 2
PATCH = (32, 40, 32)


def settings(name: str) -> tuple[str, bool, dict[str, Any]]:
    """Return the task of a mode, whether it is the fast one, and its configuration."""
    from totalsegmentator.map_tasks_config import TASK_CONFIGS

    task = name.removesuffix("_fast")
    configs = TASK_CONFIGS[task]
    fast = task != name
    chosen = configs.get("sub_modes", {}).get("fast" if fast else "default", configs)
    return task, fast, chosen


def classes_of(task: str, number: int) -> list[str]:
    """Return the classes of a dataset."""
    from totalsegmentator import map_to_binary as tables

    if task == "total" and 291 <= number <= 295:
        return list(tables.class_map_5_parts[tables.map_taskid_to_partname_ct[number]].values())
    if task == "total_mr" and number in (850, 851):
        return list(tables.class_map_parts_mr[tables.map_taskid_to_partname_mr[number]].values())
    return list(tables.class_map[task].values())


def write_weights(number: int, task: str, config: dict[str, Any], scans: list[Path]) -> None:
    """Write the weights of a dataset as TotalSegmentator downloads them, once."""
    from totalsegmentator.map_tasks_config import TASK_ID_WEIGHTS_CONFIGS

    spacing = config.get("resample") or [1.3, 1.3, 2.5]
    spacing = [spacing] * 3 if isinstance(spacing, float) else spacing
    classes = classes_of(task, number)
    name = config.get("model", "3d_fullres")
    model = nnunet_home.Model(
        configuration=name,
        patch=PATCH,
        spacing=tuple(reversed(spacing)),
        kernels=((3, 3, 3),) * 2,
        strides=((1, 1, 1), (2, 2, 2)),
        channels=("MR",) if task.endswith("_mr") else ("CT",),
        labels={"background": 0, **{label: n for n, label in enumerate(classes, 1)}},
        reader="NibabelIOWithReorient",
    )
    folder = HOME / "weights" / TASK_ID_WEIGHTS_CONFIGS[number]["foldername"]
    target = folder / f"{config['trainer']}__nnUNetPlans__{name}"
    if target.is_dir():
        return
    written = nnunet_home.write_model(folder, model, seed=number)
    written.rename(target)
    file = target / "fold_0" / "checkpoint_final.pth"
    content = torch.load(file, weights_only=False)
    content["trainer_name"] = config["trainer"]
    if number in ROUGH:
        rare = [1 + classes.index(label) for label in ROUGH[number]]
        make_rare(content, model, rare, scans, spacing)
    torch.save(content, file)


@torch.no_grad()
def make_rare(
    content: dict[str, Any], model: Any, rare: list[int], scans: list[Path], spacing: list[float]
) -> None:
    """Lower the scores of classes until they win in a few voxels of each scan only."""
    import nibabel
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager
    from totalsegmentator.resampling import change_spacing

    manager = PlansManager(content["init_args"]["plans"])
    chosen = manager.get_configuration(model.configuration)
    outputs = len(model.labels)
    network = nnUNetTrainer.build_network_architecture(manager, chosen, 1, outputs, False)
    network.load_state_dict(content["network_weights"])
    network.eval()
    lowered = dict.fromkeys(rare, np.inf)
    for file in scans:
        image = change_spacing(
            nibabel.as_closest_canonical(nibabel.load(file)), list(spacing), order=1, dtype=np.int32
        )
        values = np.asarray(image.dataobj, np.float32).transpose(2, 1, 0)
        body = np.argwhere(values != 0)  # nnU-Net crops to it
        values = values[
            tuple(slice(a, b + 1) for a, b in zip(body.min(0), body.max(0), strict=True))
        ]
        values = (np.clip(values, -500, 600) - 40) / 180
        padded = [(p - n) // 2 for p, n in zip(PATCH, values.shape, strict=True)]
        sides = [(a, p - n - a) for a, p, n in zip(padded, PATCH, values.shape, strict=True)]
        scores = network(torch.from_numpy(np.pad(values, sides))[None, None])[0]
        inside = tuple(slice(a, a + n) for a, n in zip(padded, values.shape, strict=True))
        scores = scores[(slice(None), *inside)].flatten(1)
        highest = scores[[n for n in range(outputs) if n not in rare]].amax(0)
        for label in rare:
            leads = (scores[label] - highest).sort(descending=True).values
            edge = float(leads[RARE_VOXELS - 1 : RARE_VOXELS + 1].mean())
            lowered[label] = min(lowered[label], edge)
    for key, value in content["network_weights"].items():
        if key.endswith("seg_layers.0.bias"):
            for label in rare:
                value[label] -= lowered[label]


def prepare(name: str, scans: list[Path]) -> None:
    """Write the weights of a task, and of the rough model that crops for it."""
    from totalsegmentator.map_tasks_config import TASK_CONFIGS

    task, _, config = settings(name)
    numbers = config["task_id"]
    for number in numbers if isinstance(numbers, list) else [numbers]:
        write_weights(number, task, config, scans)
    if config.get("crop"):
        write_weights(298, "total", TASK_CONFIGS["total"]["sub_modes"]["fastest"], scans)


def predict(name: str, scans: list[Path]) -> None:
    """Label all scans with TotalSegmentator."""
    from totalsegmentator.python_api import totalsegmentator

    task, fast, _ = settings(name)
    out = HOME / "labels" / name
    out.mkdir(parents=True, exist_ok=True)
    for scan in scans:
        totalsegmentator(
            *(scan, out / scan.name),
            ml=True,
            task=task,
            fast=fast,
            device="cpu",
            quiet=True,
            nr_thr_resamp=1,
            nr_thr_saving=1,
        )


def main() -> None:
    """Make weights, scans and labels."""
    (HOME / "home").mkdir(parents=True, exist_ok=True)
    (HOME / "weights").mkdir(exist_ok=True)
    config = {"totalseg_id": "none", "send_usage_stats": False, "prediction_counter": 0}
    config["statistics_disclaimer_shown"] = True
    (HOME / "home" / "config.json").write_text(json.dumps(config))
    model = replace(nnunet_home.Model(), channels=("CT",), scans=SCANS)
    names = nnunet_home.write_scans(HOME / "scans", model)
    scans = [HOME / "scans" / f"{name}_0000.nii.gz" for name in names]
    for name in arguments.tasks or TASKS:
        prepare(name, scans)
        predict(name, scans)
        print(name, flush=True)


if __name__ == "__main__":
    main()
