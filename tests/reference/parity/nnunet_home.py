"""nnU-Net models with balanced random weights, scans, and nnU-Net's own labels of them.

    python nnunet_home.py FOLDER MODEL...

Runs in nnU-Net's environment (nnunetv2 2.8.1, batchgenerators 0.25.5), on the CPU. Writes model
folders as nnU-Net does, `scans/*.nii.gz` (one file a channel), and `labels/mirror|plain/*.nii.gz`
to FOLDER/MODEL. All classes have about the same share of a scan, so that scores are close and each
rounding shows: a network that is trained forgives more.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

for name in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
    os.environ.setdefault(name, "unused")  # it warns otherwise

ARCHITECTURES = "dynamic_network_architectures.architectures.unet"
FOUR = {"background": 0, "one": 1, "two": 2, "three": 3}
REGIONS = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "active": 3}


@dataclass(frozen=True)
class Model:
    """A model to make; `scans` are (spacing, shape) in the order x, y, z."""

    configuration: str = "3d_fullres"
    patch: tuple[int, ...] = (16, 32, 32)
    spacing: tuple[float, ...] = (2.0, 1.0, 1.0)
    network: str = "PlainConvUNet"
    kernels: tuple[tuple[int, ...], ...] = ((1, 3, 3), (3, 3, 3), (3, 3, 3))
    strides: tuple[tuple[int, ...], ...] = ((1, 1, 1), (1, 2, 2), (2, 2, 2))
    folds: tuple[str, ...] = ("0",)
    channels: tuple[str, ...] = ("CT",)
    labels: Any = None
    transpose: tuple[int, int, int] = (0, 1, 2)
    mirror: tuple[int, ...] = (0, 1, 2)
    masked: bool = False
    reader: str = "SimpleITKIO"
    previous: str | None = None
    scans: tuple[Any, ...] = (
        ((1.0, 1.0, 2.0), (45, 50, 23), "LPS"),
        ((0.8, 0.8, 2.5), (60, 55, 20), "RAS"),
        ((1.4, 1.4, 1.4), (36, 40, 34), "PIR"),
    )


FLAT = Model(
    configuration="2d",
    patch=(32, 40),
    spacing=(1.0, 1.0),
    kernels=((3, 3),) * 3,
    strides=((1, 1), (2, 2), (2, 2)),
    mirror=(0, 1),
)
MR = Model(
    channels=("T1", "FLAIR"),
    labels=REGIONS,
    masked=True,
    spacing=(5.0, 1.0, 1.0),
    patch=(8, 32, 32),
    strides=((1, 1, 1), (1, 2, 2), (1, 2, 2)),
    scans=(
        ((1.0, 1.0, 5.0), (50, 44, 14), "LPS"),
        ((0.7, 0.7, 6.0), (70, 64, 11), "LPI"),
        ((0.9, 0.9, 1.2), (48, 44, 40), "RSA"),
    ),
)
TURNED = tuple(
    ((1.2, 0.9, 2.2), (40, 46, 24), codes)
    for codes in ("RAS", "LPS", "LAS", "RPI", "ASR", "PIL", "SRA", "ILP", "SAL", "AIR")
)
LOW = Model(configuration="3d_lowres", spacing=(3.0, 2.0, 2.0), patch=(16, 24, 24))
MODELS = {
    "ct_2d": FLAT,
    "ct_3d": Model(),
    "ct_two_folds": Model(folds=("0", "1")),
    "ct_resenc": Model(network="ResidualEncoderUNet"),
    "mr_regions": MR,
    "mr_regions_2d": replace(
        FLAT, channels=MR.channels, labels=REGIONS, masked=True, scans=MR.scans
    ),
    "sagittal": Model(
        transpose=(2, 0, 1),
        labels={**FOUR, "ignore": 4},
        folds=("all",),
        spacing=(1.5, 1.2, 1.2),
        patch=(24, 32, 24),
        channels=("T2",),
    ),
    "reoriented": Model(reader="NibabelIOWithReorient", channels=("T2",), scans=TURNED),
    "as_stored": Model(reader="SimpleITKIO", scans=TURNED),
    "lowres": LOW,
    "cascade": Model(configuration="3d_cascade_fullres", previous="3d_lowres"),
    "cascade_separate": Model(
        configuration="3d_cascade_fullres",
        previous="3d_lowres",
        spacing=(5.0, 1.0, 1.0),
        patch=(8, 32, 32),
        scans=MR.scans,
    ),
    "cascade_regions": replace(MR, configuration="3d_cascade_fullres", previous="3d_lowres"),
}


def resampling(order: int, is_seg: bool) -> dict[str, Any]:
    """Return the arguments that nnU-Net's planner writes."""
    return {"is_seg": is_seg, "order": order, "order_z": 0, "force_separate_z": None}


def configuration(model: Model) -> dict[str, Any]:
    """Return a configuration of plans."""
    dims = len(model.patch)
    stages = len(model.kernels)
    blocks = "n_conv_per_stage" if model.network == "PlainConvUNet" else "n_blocks_per_stage"
    function = "resample_data_or_seg_to_shape"
    return {
        "data_identifier": f"nnUNetPlans_{model.configuration}",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "patch_size": list(model.patch),
        "median_image_size_in_voxels": list(model.patch),
        "spacing": list(model.spacing),
        "normalization_schemes": [
            "CTNormalization" if name == "CT" else "ZScoreNormalization" for name in model.channels
        ],
        "use_mask_for_norm": [model.masked] * len(model.channels),
        "resampling_fn_data": function,
        "resampling_fn_seg": function,
        "resampling_fn_probabilities": function,
        "resampling_fn_data_kwargs": resampling(3, False),
        "resampling_fn_seg_kwargs": resampling(1, True),
        "resampling_fn_probabilities_kwargs": resampling(1, False),
        "architecture": {
            "network_class_name": f"{ARCHITECTURES}.{model.network}",
            "arch_kwargs": {
                "n_stages": stages,
                "features_per_stage": [8, 16, 24][:stages],
                "conv_op": f"torch.nn.modules.conv.Conv{dims}d",
                "kernel_sizes": model.kernels,
                "strides": model.strides,
                blocks: [2] * stages,
                "n_conv_per_stage_decoder": [2] * (stages - 1),
                "conv_bias": True,
                "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{dims}d",
                "norm_op_kwargs": {"eps": 1e-5, "affine": True},
                "dropout_op": None,
                "dropout_op_kwargs": None,
                "nonlin": "torch.nn.LeakyReLU",
                "nonlin_kwargs": {"inplace": True},
            },
            "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
        },
        "batch_dice": False,
        **({"previous_stage": model.previous} if model.previous else {}),
    }


def plans_of(*models: Model) -> dict[str, Any]:
    """Return plans with the configurations of models that share all else."""
    density = {"mean": 40.0, "std": 180.0, "percentile_00_5": -500.0, "percentile_99_5": 600.0}
    model = models[0]
    return {
        "dataset_name": "Dataset021_Random",
        "plans_name": "nnUNetPlans",
        "image_reader_writer": model.reader,
        "transpose_forward": list(model.transpose),
        "transpose_backward": [model.transpose.index(n) for n in range(3)],
        "label_manager": "LabelManager",
        "experiment_planner_used": "ExperimentPlanner",
        "foreground_intensity_properties_per_channel": {
            str(n): density for n in range(len(model.channels))
        },
        "configurations": {each.configuration: configuration(each) for each in models},
    }


def dataset_of(model: Model) -> dict[str, Any]:
    """Return the content of `dataset.json`."""
    dataset = {
        "channel_names": {str(n): name for n, name in enumerate(model.channels)},
        "labels": model.labels or FOUR,
        "file_ending": ".nii.gz",
        "numTraining": 0,
    }
    if model.labels is REGIONS:
        dataset["regions_class_order"] = [1, 2, 3]
    return dataset


def write_model(folder: Path, model: Model, seed: int = 0) -> Path:
    """Write a model folder; return it."""
    plans, dataset = plans_of(model), dataset_of(model)
    model_folder = folder / f"nnUNetTrainer__nnUNetPlans__{model.configuration}"
    model_folder.mkdir(parents=True, exist_ok=True)
    (model_folder / "plans.json").write_text(json.dumps(plans))
    (model_folder / "dataset.json").write_text(json.dumps(dataset))
    for n, fold in enumerate(model.folds):
        target = model_folder / f"fold_{fold}" / "checkpoint_final.pth"
        target.parent.mkdir(exist_ok=True)
        torch.save(checkpoint(plans, dataset, model, seed + n, fold), target)
    return model_folder


def checkpoint(
    plans: dict[str, Any], dataset: dict[str, Any], model: Model, seed: int, fold: str
) -> dict[str, Any]:
    """Return a checkpoint as of `nnUNetTrainer.save_checkpoint`, with balanced random weights."""
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
    from nnunetv2.utilities.label_handling.label_handling import determine_num_input_channels
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    manager = PlansManager(plans)
    chosen = manager.get_configuration(model.configuration)
    inputs = determine_num_input_channels(manager, chosen, dataset)
    outputs = manager.get_label_manager(dataset).num_segmentation_heads
    torch.manual_seed(seed)
    network = nnUNetTrainer.build_network_architecture(manager, chosen, inputs, outputs, True)
    balance(network, inputs, model)
    optimizer = torch.optim.SGD(network.parameters(), 1e-2, momentum=0.99)
    return {
        "network_weights": network.state_dict(),
        "optimizer_state": optimizer.state_dict(),
        "grad_scaler_state": None,
        "logging": {"mean_fg_dice": [np.float64(0.5)], "lrs": [0.01], "dice": [[np.float32(0.1)]]},
        "_best_ema": np.float64(0.5),
        "current_epoch": 1,
        "init_args": {
            "plans": plans,
            "configuration": model.configuration,
            "fold": fold if fold == "all" else int(fold),
            "dataset_json": dataset,
            "device": torch.device("cuda"),
        },
        "trainer_name": "nnUNetTrainer",
        "inference_allowed_mirroring_axes": model.mirror or None,
    }


@torch.no_grad()
def balance(network: nn.Module, inputs: int, model: Model) -> None:
    """Give a network random weights, and scores of equal mean and spread for all classes."""
    for module in network.modules():
        if isinstance(module, nn.InstanceNorm2d | nn.InstanceNorm3d):
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias, 0.0, 0.3)
    image = torch.nn.functional.avg_pool3d(torch.randn(1, inputs, *[48] * 3), 5, 1, 2) * 5
    image = image if len(model.patch) == 3 else image[..., 24]
    image = image[(slice(None), slice(None), *(slice(0, n) for n in model.patch))]
    network.decoder.deep_supervision = False
    network.eval()
    last = network.decoder.seg_layers[-1]
    for _ in range(2):
        scores = network(image).transpose(0, 1).flatten(1)
        spread = scores.std(1)
        last.weight /= spread.view(-1, *[1] * (last.weight.ndim - 1))
        last.bias.copy_((last.bias - scores.mean(1)) / spread)


def scan(spacing: Any, shape: Any, codes: str, seed: int, channels: int) -> list[Any]:
    """Return smooth noise in a body of whole numbers, in air or in zeros."""
    import nibabel
    from scipy import ndimage

    rng = np.random.default_rng(seed)
    affine = np.diag([*spacing, 1.0])
    turn = nibabel.orientations.axcodes2ornt(codes)
    world = np.zeros((4, 4))
    world[3, 3] = 1.0
    for axis, (row, sign) in enumerate(turn):
        world[int(row), axis] = sign
    angle = 0.1 if seed % 2 else 0.0
    oblique = np.eye(4)
    oblique[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    affine = oblique @ world @ affine
    grid = np.stack(np.meshgrid(*(np.linspace(-1, 1, n) for n in shape), indexing="ij"))
    body = (grid**2).sum(0) < 0.9
    body[tuple(n // 2 for n in shape)] = True
    images = []
    for n in range(channels):
        noise = sum(
            ndimage.gaussian_filter(rng.standard_normal(shape), sigma) * sigma**1.5 * 200
            for sigma in (0.7, 2.0, 4.0)
        )
        values = np.where(body, np.round(noise + 50 + 100 * n), 0).astype(np.int16)
        image = nibabel.Nifti1Image(values, affine)
        image.header.set_xyzt_units("mm")
        images.append(image)
    return images


def write_scans(folder: Path, model: Model) -> list[str]:
    """Write the scans of a model; return their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for n, (spacing, shape, codes) in enumerate(model.scans):
        names.append(f"case{n}_{codes}")
        for c, image in enumerate(scan(spacing, shape, codes, n, len(model.channels))):
            image.to_filename(folder / f"{names[-1]}_{c:04d}.nii.gz")
    return names


def predict(model: Path, scans: Path, out: Path, mirror: bool, previous: Path | None) -> None:
    """Label all scans with nnU-Net's predictor."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    predictor = nnUNetPredictor(
        0.5, True, mirror, False, torch.device("cpu"), allow_tqdm=False, verbose=False
    )
    folds = ("all",) if (model / "fold_all").is_dir() else None
    predictor.initialize_from_trained_model_folder(str(model), folds)
    out.mkdir(parents=True, exist_ok=True)
    predictor.predict_from_files_sequential(
        str(scans), str(out), folder_with_segs_from_prev_stage=previous and str(previous)
    )


def predict_all(folder: Path, model_folder: Path, first: Path | None) -> None:
    """Label the scans of a model's folder with and without mirroring; `first` as first stage."""
    for name, mirror in (("mirror", True), ("plain", False)):
        previous = None
        if first is not None:
            previous = folder / f"previous-{name}"
            predict(first, folder / "scans", previous, mirror, None)
        predict(model_folder, folder / "scans", folder / "labels" / name, mirror, previous)


def make(folder: Path, model: Model) -> None:
    """Make one model, its scans, and labels with and without mirroring."""
    model_folder = write_model(folder, model, seed=3)
    names = write_scans(folder / "scans", model)
    first = None
    if model.previous:
        same = ("scans", "channels", "labels", "masked")
        low = replace(LOW, **{name: getattr(model, name) for name in same})
        first = write_model(folder, low, seed=7)
    predict_all(folder, model_folder, first)
    print(folder.name, len(names), "scans", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", help="default: all")
    arguments = parser.parse_args()
    for chosen in arguments.models or list(MODELS):
        make(arguments.folder / chosen, MODELS[chosen])
