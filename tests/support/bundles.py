"""Bundles written by hand, in the manner of MONAI's model zoo."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import torch
import yaml


def saved(value: float, count: int = 1) -> bytes:
    """Return weights of no network, as PyTorch saves them: they can be converted, not loaded."""
    content = io.BytesIO()
    torch.save({"model": {"weight": torch.full((count,), value)}}, content)
    return content.getvalue()


WEIGHTS = saved(0.0)

CONFIG: dict[str, Any] = {
    "imports": ["$import glob", "$import os"],
    "bundle_root": ".",
    "image_key": "image",
    "output_dir": "$@bundle_root + '/eval'",
    "dataset_dir": "/data",
    "datalist": "$list(sorted(glob.glob(@dataset_dir + '/*.nii.gz')))",
    "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
    "network_def": {
        "_target_": "UNet",
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 2,
        "channels": [16, 32, 64, 128, 256],
        "strides": [2, 2, 2, 2],
        "num_res_units": 2,
        "norm": "batch",
    },
    "network": "$@network_def.to(@device)",
    "preprocessing": {
        "_target_": "Compose",
        "transforms": [
            {"_target_": "LoadImaged", "keys": "@image_key"},
            {"_target_": "EnsureChannelFirstd", "keys": "@image_key"},
            {"_target_": "Orientationd", "keys": "@image_key", "axcodes": "RAS"},
            {
                "_target_": "Spacingd",
                "keys": "@image_key",
                "pixdim": [1.5, 1.5, 2.0],
                "mode": "bilinear",
            },
            {
                "_target_": "ScaleIntensityRanged",
                "keys": "@image_key",
                "a_min": -57,
                "a_max": 164,
                "b_min": 0,
                "b_max": 1,
                "clip": True,
            },
            {"_target_": "EnsureTyped", "keys": "@image_key", "device": "@device"},
        ],
    },
    "dataset": {
        "_target_": "Dataset",
        "data": "$[{'image': i} for i in @datalist]",
        "transform": "@preprocessing",
    },
    "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1},
    "inferer": {
        "_target_": "SlidingWindowInferer",
        "roi_size": [96, 96, 96],
        "sw_batch_size": 4,
        "overlap": 0.5,
    },
    "postprocessing": {
        "_target_": "Compose",
        "transforms": [
            {"_target_": "Activationsd", "keys": "pred", "softmax": True},
            {
                "_target_": "Invertd",
                "keys": "pred",
                "transform": "@preprocessing",
                "orig_keys": "@image_key",
                "nearest_interp": False,
                "to_tensor": True,
            },
            {"_target_": "AsDiscreted", "keys": "pred", "argmax": True},
            {"_target_": "SaveImaged", "keys": "pred", "output_dir": "$os.environ['OUT']"},
        ],
    },
    "evaluator": {
        "_target_": "SupervisedEvaluator",
        "device": "@device",
        "val_data_loader": "@dataloader",
        "network": "@network",
        "inferer": "@inferer",
        "postprocessing": "@postprocessing",
        "amp": True,
    },
    "checkpointloader": {
        "_target_": "CheckpointLoader",
        "load_path": "$@bundle_root + '/models/model.pt'",
        "load_dict": {"model": "@network"},
    },
    "initialize": ["$monai.utils.set_determinism(seed=123)", "$@checkpointloader(@evaluator)"],
    "run": ["$@evaluator.run()"],
}
"""The inference config of a spleen model, by hand: the forms that real bundles use."""

METADATA: dict[str, Any] = {
    "version": "1.2.3",
    "monai_version": "1.6.1",
    "pytorch_version": "2.13.0",
    "numpy_version": "2.1.0",
    "optional_packages_version": {},
    "name": "Spleen by hand",
    "task": "Spleen in CT",
    "description": "Finds the spleen",
    "authors": "Nobody",
    "copyright": "Copyright (c) Nobody.",
    "data_source": "None",
    "intended_use": "Tests only",
    "network_data_format": {
        "inputs": {
            "image": {
                "type": "image",
                "format": "hounsfield",
                "modality": "CT",
                "num_channels": 1,
                "spatial_shape": [96, 96, 96],
                "dtype": "float32",
                "value_range": [0, 1],
                "is_patch_data": True,
                "channel_def": {"0": "image"},
            }
        },
        "outputs": {
            "pred": {
                "type": "image",
                "format": "segmentation",
                "num_channels": 2,
                "spatial_shape": [96, 96, 96],
                "dtype": "float32",
                "value_range": [0, 1],
                "is_patch_data": True,
                "channel_def": {"0": "background", "1": "spleen"},
            }
        },
    },
}


def spleen_config() -> dict[str, Any]:
    """Return a copy of the config, to be changed."""
    return copy.deepcopy(CONFIG)


def spleen_metadata() -> dict[str, Any]:
    """Return a copy of the metadata, to be changed."""
    return copy.deepcopy(METADATA)


def transform(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the transform of that name in a config, to be changed."""
    steps = config["preprocessing"]["transforms"] + config["postprocessing"]["transforms"]
    entry: dict[str, Any] = next(step for step in steps if step["_target_"] == name)
    return entry


def write_bundle(
    folder: Path,
    config: dict[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
    weights: bytes = WEIGHTS,
    suffix: str = ".json",
) -> Path:
    """Write a bundle and return its folder; the spleen's config and metadata by default."""
    config = CONFIG if config is None else config
    (folder / "configs").mkdir(parents=True)
    (folder / "models").mkdir()
    text = json.dumps(config) if suffix == ".json" else yaml.safe_dump(config, sort_keys=False)
    (folder / "configs" / f"inference{suffix}").write_text(text)
    entries = METADATA if metadata is None else metadata
    (folder / "configs" / "metadata.json").write_text(json.dumps(entries))
    (folder / "models" / "model.pt").write_bytes(weights)
    return folder
