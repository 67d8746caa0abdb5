"""A small network that knows the phantom, as a MONAI bundle that every peer can run.

Its weights are set by formula, not learnt: it compares the mean density around a voxel with that
of each structure. All programs have the network in common; its own time is taken out of every
comparison. Its scores have the shape of trained ones: sure inside structures, in doubt at edges.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from phantom import AIR, phantom

SPACING = (1.5, 1.5, 1.5)  # mm, the network's grid
WINDOW = (128, 128, 128)
OVERLAP = 0.5
LOW, HIGH = AIR, 1000.0  # HU that become 0 and 1
SHARP = 400.0  # score lost for a distance of 1 in density, squared
KNOTS = 8  # of the broken line that stands for the square of the density
GRAIN = 0.004  # differences between neighbours below it are noise
THIN = 0.1  # densities below it are air


def network_args(classes: int) -> dict[str, Any]:
    """Return the arguments of MONAI's SegResNet: its first and last layer, no block between."""
    return {
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": classes,
        "init_filters": 16,
        "blocks_down": [0],
        "blocks_up": [],
        "norm": "batch",
    }


def knowing_weights(structures: int) -> dict[str, torch.Tensor]:
    """Return a state dict that labels the phantom of so many structures.

    Score of class c at density x: -SHARP * (x - density of c)^2, without the terms of all classes;
    the background gains in air and where density changes, or edges would pass through all
    structures of a density in between.
    """
    from monai.networks.nets.segresnet import SegResNet

    state = SegResNet(**network_args(structures + 1)).state_dict()
    first = torch.zeros(16, 1, 3, 3, 3)
    first[: KNOTS + 1] = 1 / 27  # the mean: for KNOTS hinges, and once more for air
    first[KNOTS] *= -1
    for axis in range(3):
        change = torch.zeros(3, 3, 3)
        change.movedim(axis, 0)[0], change.movedim(axis, 0)[2] = -1 / 18, 1 / 18
        first[KNOTS + 1 + 2 * axis, 0], first[KNOTS + 2 + 2 * axis, 0] = change, -change
    state["convInit.conv.weight"] = first
    hinges = torch.full((16,), GRAIN)
    hinges[:KNOTS] = torch.arange(KNOTS) / KNOTS
    hinges[KNOTS] = -THIN
    state["conv_final.0.running_mean"] = hinges
    density = torch.from_numpy((phantom((1, 1, 1), structures).hounsfield - LOW) / (HIGH - LOW))
    last = torch.zeros(structures + 1, 16)
    last[:, 0] = SHARP * (2 * density - 1 / KNOTS)
    last[:, 1:KNOTS] = -SHARP * 2 / KNOTS
    last[0, KNOTS] = 3 * SHARP
    last[0, KNOTS + 1 :] = SHARP
    state["conv_final.2.conv.weight"] = last[:, :, None, None, None]
    state["conv_final.2.conv.bias"] = -SHARP * density**2
    return state


def save_bundle(folder: Path, structures: int, back: str) -> Path:
    """Write the bundle; `back` is "scores" (inverted linearly) or "labels" (argmax first)."""
    (folder / "configs").mkdir(parents=True, exist_ok=True)
    (folder / "models").mkdir(exist_ok=True)
    torch.save(knowing_weights(structures), folder / "models" / "model.pt")
    (folder / "configs" / "inference.json").write_text(json.dumps(config(structures, back)))
    (folder / "configs" / "metadata.json").write_text(json.dumps(metadata(structures)))
    return folder


def config(structures: int, back: str) -> dict[str, Any]:
    """Return an inference config in the manner of MONAI's model zoo."""
    argmax = {"_target_": "AsDiscreted", "keys": "pred", "argmax": True}
    invert = {
        "_target_": "Invertd",
        "keys": "pred",
        "transform": "@preprocessing",
        "orig_keys": "image",
        "nearest_interp": back == "labels",
        "to_tensor": True,
    }
    save = {
        "_target_": "SaveImaged",
        "keys": "pred",
        "output_dir": "@output_dir",
        "output_postfix": "seg",
        "separate_folder": False,
        "output_dtype": "$np.uint8",
    }
    scale = {"a_min": LOW, "a_max": HIGH, "b_min": 0.0, "b_max": 1.0, "clip": True}
    pixdim = {"pixdim": list(SPACING), "mode": "bilinear"}
    before: list[dict[str, Any]] = [
        {"_target_": "LoadImaged"},
        {"_target_": "EnsureChannelFirstd"},
        {"_target_": "Orientationd", "axcodes": "RAS"},
        {"_target_": "Spacingd", **pixdim},
        {"_target_": "ScaleIntensityRanged", **scale},
        {"_target_": "EnsureTyped"},
    ]
    return {
        "imports": ["$import glob", "$import numpy as np"],
        "bundle_root": ".",
        "output_dir": "$@bundle_root + '/eval'",
        "dataset_dir": ".",
        "datalist": "$list(sorted(glob.glob(@dataset_dir + '/*.nii.gz')))",
        "device": "$torch.device('cpu')",
        "network_def": {"_target_": "SegResNet", **network_args(structures + 1)},
        "network": "$@network_def.to(@device)",
        "preprocessing": {
            "_target_": "Compose",
            "transforms": [{**step, "keys": "image"} for step in before],
        },
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
        "inferer": {
            "_target_": "SlidingWindowInferer",
            "roi_size": list(WINDOW),
            "sw_batch_size": 1,
            "overlap": OVERLAP,
            "mode": "gaussian",
        },
        "postprocessing": {
            "_target_": "Compose",
            "transforms": [*([argmax, invert] if back == "labels" else [invert, argmax]), save],
        },
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


def metadata(structures: int) -> dict[str, Any]:
    """Return the metadata that MONAI requires."""
    names = {str(n): f"part {n}" if n else "background" for n in range(structures + 1)}
    common = {"type": "image", "spatial_shape": [128, 128, 128], "dtype": "float32"}
    image = {"format": "hounsfield", "modality": "CT", "num_channels": 1, "is_patch_data": True}
    pred = {"format": "segmentation", "num_channels": structures + 1, "is_patch_data": True}
    return {
        "version": "1.0.0",
        "monai_version": "1.6.1",
        "pytorch_version": "2.13.0",
        "numpy_version": "2.4.6",
        "optional_packages_version": {},
        "name": "Ellipsoids",
        "task": "Benchmark",
        "description": "Finds ellipsoids that were drawn",
        "authors": "The scanloom authors",
        "copyright": "Copyright (c) The scanloom authors",
        "intended_use": "Benchmarks only",
        "network_data_format": {
            "inputs": {
                "image": {**common, **image, "value_range": [0, 1], "channel_def": {"0": "image"}}
            },
            "outputs": {
                "pred": {**common, **pred, "value_range": [0, 1], "channel_def": names},
            },
        },
    }
