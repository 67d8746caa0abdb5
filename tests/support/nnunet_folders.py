"""Small nnU-Net model folders with random weights, written as nnU-Net writes them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scanloom.convert.nnunet import describe_network, read_configuration, read_dataset, read_plans
from scanloom.inference.network.architectures import build_network

ARCHITECTURE: dict[str, Any] = {
    "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
    "arch_kwargs": {
        "n_stages": 2,
        "features_per_stage": [4, 8],
        "conv_op": "torch.nn.modules.conv.Conv3d",
        "kernel_sizes": [[1, 3, 3], [3, 3, 3]],
        "strides": [[1, 1, 1], [1, 2, 2]],
        "n_conv_per_stage": [2, 2],
        "n_conv_per_stage_decoder": [1],
        "conv_bias": True,
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    },
    "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
}
CONFIGURATION: dict[str, Any] = {
    "data_identifier": "nnUNetPlans_3d_fullres",
    "preprocessor_name": "DefaultPreprocessor",
    "batch_size": 2,
    "patch_size": [8, 16, 16],
    "spacing": [2.0, 1.0, 1.0],
    "normalization_schemes": ["CTNormalization"],
    "use_mask_for_norm": [False],
    "resampling_fn_data": "resample_data_or_seg_to_shape",
    "resampling_fn_seg": "resample_data_or_seg_to_shape",
    "resampling_fn_data_kwargs": {
        "is_seg": False,
        "order": 3,
        "order_z": 0,
        "force_separate_z": None,
    },
    "resampling_fn_seg_kwargs": {
        "is_seg": True,
        "order": 1,
        "order_z": 0,
        "force_separate_z": None,
    },
    "resampling_fn_probabilities": "resample_data_or_seg_to_shape",
    "resampling_fn_probabilities_kwargs": {
        "is_seg": False,
        "order": 1,
        "order_z": 0,
        "force_separate_z": None,
    },
    "architecture": ARCHITECTURE,
    "batch_dice": False,
}
PLANS: dict[str, Any] = {
    "dataset_name": "Dataset042_Organs",
    "plans_name": "nnUNetPlans",
    "image_reader_writer": "SimpleITKIO",
    "transpose_forward": [0, 1, 2],
    "transpose_backward": [0, 1, 2],
    "label_manager": "LabelManager",
    "foreground_intensity_properties_per_channel": {
        "0": {"mean": 40.0, "std": 180.0, "percentile_00_5": -500.0, "percentile_99_5": 600.0}
    },
    "configurations": {"3d_fullres": CONFIGURATION},
}
DATASET: dict[str, Any] = {
    "channel_names": {"0": "CT"},
    "labels": {"background": 0, "liver": 1, "left kidney": 2},
    "file_ending": ".nii.gz",
    "numTraining": 3,
}
REGIONS: dict[str, Any] = {
    "labels": {"background": 0, "whole tumor": [1, 2, 3], "core": [2, 3], "enhancing tumor": 3},
    "regions_class_order": [1, 2, 3],
}


def plans(**configuration: Any) -> dict[str, Any]:
    """Return plans with changed entries of the only configuration; None removes an entry."""
    changed = copy.deepcopy(PLANS)
    entries = changed["configurations"]["3d_fullres"]
    entries.update(configuration)
    for name in [name for name, value in entries.items() if value is None]:
        del entries[name]
    return changed


def write_model(
    folder: Path,
    plans: dict[str, Any] = PLANS,
    dataset: dict[str, Any] = DATASET,
    *,
    configuration: str = "3d_fullres",
    folds: tuple[str, ...] = ("0",),
    **entries: Any,
) -> Path:
    """Write a model folder with random weights; return it. `entries` change the checkpoint."""
    model = folder / f"nnUNetTrainer__nnUNetPlans__{configuration}"
    model.mkdir(parents=True)
    (model / "plans.json").write_text(json.dumps(plans))
    (model / "dataset.json").write_text(json.dumps(dataset))
    for n, fold in enumerate(folds):
        (model / f"fold_{fold}").mkdir()
        content = checkpoint(state_dict(model, configuration, n), configuration, **entries)
        torch.save(content, model / f"fold_{fold}" / "checkpoint_final.pth")
    return model


def state_dict(model: Path, configuration: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random weights of a model folder's network."""
    settings, dataset = read_configuration(read_plans(model), configuration), read_dataset(model)
    previous = len(dataset.foreground) if settings.previous_stage else 0
    spec = describe_network(settings, len(dataset.channels) + previous, dataset.outputs)
    torch.manual_seed(seed)
    return build_network(spec).state_dict()


def checkpoint(
    state: dict[str, torch.Tensor], configuration: str = "3d_fullres", **entries: Any
) -> dict[str, Any]:
    """Return the entries of a checkpoint as nnU-Net saves them."""
    content = {
        "network_weights": state,
        "optimizer_state": {"state": {0: {"momentum_buffer": torch.zeros(3)}}, "param_groups": []},
        "grad_scaler_state": {"scale": 65536.0, "growth_factor": 2.0},
        "logging": {
            "ema": [np.float64(0.5)],
            "dice": [[np.float32(0.25)]],
            "epochs": [np.int64(3)],
        },
        "_best_ema": np.float64(0.5),
        "current_epoch": 1000,
        "init_args": {
            "plans": {},
            "configuration": configuration,
            "fold": 0,
            "device": torch.device("cuda", 0),
        },
        "trainer_name": "nnUNetTrainer",
        "inference_allowed_mirroring_axes": (0, 1, 2),
    }
    return {**content, **entries}
