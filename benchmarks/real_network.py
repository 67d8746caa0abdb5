"""A network of the size that nnU-Net plans for CT, with balanced random weights, in three formats.

Its state dict has nnU-Net's names, so scanloom, nnU-Net, MONAI's bundle runner and TotalSegmentator
take the same weights. All classes have about the same share of a scan, and no two scores are far
apart: labels show each rounding, and consist of many small parts.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import HIGH, LOW, SPACING, config, metadata
from phantom import draw_labels, draw_scan, phantom
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "reference" / "parity"))

from nnunet_home import Model, dataset_of, plans_of

from scanloom.inference.nets.unet import PlainConvUNet

MODEL_FOLDER = "nnUNetTrainer__nnUNetPlans__3d_fullres"
TASK, TASK_CLASSES = "vertebrae_mr", 25
"""A task of TotalSegmentator with one network of 1.5 mm without mirroring, and its structures."""
TASK_FOLDER = "Dataset756_mri_vertebrae_1076subj"
TASK_PLACE = "nnUNetTrainer_DASegOrd0_NoMirroring__nnUNetPlans__3d_fullres"
BALANCE = 64  # voxels along each axis on which scores are balanced


@dataclass(frozen=True)
class Size:
    """Channels by stage, each of half the last one's resolution, and voxels of a window."""

    features: tuple[int, ...] = (32, 64, 128, 256, 320, 320)
    window: tuple[int, int, int] = (128, 128, 128)

    @property
    def kernels(self) -> list[list[int]]:
        """Voxels of the kernels of each stage."""
        return [[3, 3, 3] for _ in self.features]

    @property
    def strides(self) -> list[list[int]]:
        """Strides of each stage."""
        return [[1 if n == 0 else 2] * 3 for n in range(len(self.features))]


SMALL = Size((8, 16, 24), (32, 32, 32))


def network_args(classes: int, size: Size) -> dict[str, Any]:
    """Return the arguments of scanloom's PlainConvUNet."""
    stages = len(size.features)
    return {
        "in_channels": 1,
        "out_channels": classes,
        "plan": {
            "features": list(size.features),
            "kernels": size.kernels,
            "strides": size.strides,
            "encoder": [2] * stages,
            "decoder": [2] * (stages - 1),
        },
        "layers": {
            "bias": True,
            "norm": "instance",
            "norm_args": {"eps": 1e-5, "affine": True},
            "slope": 0.01,
        },
    }


@cache
@torch.no_grad()
def balanced_weights(structures: int, size: Size) -> dict[str, torch.Tensor]:
    """Return random weights whose scores have the same mean and spread for all classes."""
    torch.manual_seed(structures)
    network = PlainConvUNet(**network_args(structures + 1, size)).eval()
    for module in network.modules():
        if isinstance(module, nn.InstanceNorm3d):
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias, 0.0, 0.3)
    shape = (BALANCE,) * 3
    extent = tuple(n * s for n, s in zip(shape, SPACING, strict=True))
    drawn = phantom((extent[0], extent[1], extent[2]), structures)
    scan = draw_scan(drawn, draw_labels(drawn, SPACING, shape)).astype(np.float32)
    image = torch.from_numpy(np.ascontiguousarray((scan.clip(LOW, HIGH) - LOW) / (HIGH - LOW)))
    last = network.decoder.seg_layers[-1]
    for _ in range(2):
        scores = network(image[None, None]).transpose(0, 1).flatten(1)
        spread = scores.std(1)
        last.weight /= spread.view(-1, 1, 1, 1, 1)
        last.bias.copy_((last.bias - scores.mean(1)) / spread)
    return dict(network.state_dict())


def save_bundle(folder: Path, structures: int, size: Size) -> Path:
    """Write a MONAI bundle that maps labels back, with the same weights in MONAI's DynUNet."""
    network = monai_args(structures + 1, size)
    bundle_config = config(structures, "labels")
    bundle_config["network_def"] = {"_target_": "DynUNet", **network}
    bundle_config["inferer"]["roi_size"] = list(size.window)
    (folder / "configs").mkdir(parents=True, exist_ok=True)
    (folder / "models").mkdir(exist_ok=True)
    torch.save(monai_weights(structures, size), folder / "models" / "model.pt")
    (folder / "configs" / "inference.json").write_text(json.dumps(bundle_config))
    (folder / "configs" / "metadata.json").write_text(json.dumps(metadata(structures)))
    return folder


def monai_args(classes: int, size: Size) -> dict[str, Any]:
    """Return the arguments of MONAI's DynUNet for the same network."""
    return {
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": classes,
        "kernel_size": size.kernels,
        "strides": size.strides,
        "upsample_kernel_size": size.strides[1:],
        "filters": list(size.features),
        "norm_name": ["INSTANCE", {"affine": True}],
        "trans_bias": True,
    }


def monai_weights(structures: int, size: Size) -> dict[str, torch.Tensor]:
    """Return the weights by MONAI's names.

    MONAI's convolutions have no bias; before an instance normalisation it has no effect.
    """
    from monai.networks.nets.dynunet import DynUNet

    ours, weights = balanced_weights(structures, size), dict[str, torch.Tensor]()
    last = len(size.features) - 1
    middle = [f"downsamples.{n - 1}" for n in range(1, last)]
    names = {f"encoder.stages.{n}.0": name for n, name in enumerate(["input_block", *middle])}
    names[f"encoder.stages.{last}.0"] = "bottleneck"
    names |= {f"decoder.stages.{n}": f"upsamples.{n}.conv_block" for n in range(last)}
    for old, new in names.items():
        for n in (0, 1):
            weights[f"{new}.conv{n + 1}.conv.weight"] = ours[f"{old}.convs.{n}.conv.weight"]
            for kind in ("weight", "bias"):
                weights[f"{new}.norm{n + 1}.{kind}"] = ours[f"{old}.convs.{n}.norm.{kind}"]
    for kind in ("weight", "bias"):
        for n in range(last):
            upsampling = f"upsamples.{n}.transp_conv.conv.{kind}"
            weights[upsampling] = ours[f"decoder.transpconvs.{n}.{kind}"]
        weights[f"output_block.conv.conv.{kind}"] = ours[f"decoder.seg_layers.{last - 1}.{kind}"]
    network = DynUNet(**monai_args(structures + 1, size))
    missing, unknown = network.load_state_dict(weights, strict=False)
    if unknown or any(not name.startswith("skip_layers.") for name in missing):
        raise ValueError("the weights do not fit MONAI's DynUNet")
    return dict(network.state_dict())  # with the second names of layers


def save_nnunet(folder: Path, structures: int, size: Size, mirror: bool) -> Path:
    """Write a model folder as nnU-Net's trainer does; return it. `mirror` permits mirroring."""
    return _write_nnunet(folder / MODEL_FOLDER, structures, size, (0, 1, 2) if mirror else None)


def save_totalsegmentator(folder: Path, structures: int, size: Size) -> Path:
    """Write weights as TotalSegmentator downloads them; return their folder."""
    if structures != TASK_CLASSES:
        raise ValueError(f"TotalSegmentator's {TASK} has {TASK_CLASSES} structures")
    _write_nnunet(folder / TASK_FOLDER / TASK_PLACE, structures, size, None)
    return folder


def _write_nnunet(model_folder: Path, structures: int, size: Size, mirror: Any) -> Path:
    model = Model(
        patch=size.window,
        spacing=SPACING,
        kernels=tuple(tuple(kernel) for kernel in size.kernels),
        strides=tuple(tuple(stride) for stride in size.strides),
        labels={"background": 0, **{f"part_{n}": n for n in range(1, structures + 1)}},
        reader="NibabelIOWithReorient" if "Dataset" in model_folder.parent.name else "SimpleITKIO",
    )
    plans, dataset = plans_of(model), dataset_of(model)
    density = {"mean": LOW, "std": HIGH - LOW, "percentile_00_5": LOW, "percentile_99_5": HIGH}
    plans["foreground_intensity_properties_per_channel"] = {"0": density}
    chosen = plans["configurations"]["3d_fullres"]["architecture"]["arch_kwargs"]
    chosen["features_per_stage"] = list(size.features)
    (model_folder / "fold_0").mkdir(parents=True, exist_ok=True)
    (model_folder / "plans.json").write_text(json.dumps(plans))
    (model_folder / "dataset.json").write_text(json.dumps(dataset))
    checkpoint = {
        "network_weights": balanced_weights(structures, size),
        "init_args": {"configuration": "3d_fullres", "fold": 0, "plans": plans},
        "trainer_name": model_folder.name.partition("__")[0],
        "inference_allowed_mirroring_axes": mirror,
    }
    torch.save(checkpoint, model_folder / "fold_0" / "checkpoint_final.pth")
    return model_folder
