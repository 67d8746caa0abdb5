"""nnU-Net's own functions on a case, or on scores alone; runs in nnU-Net's environment.

    python peer_nnunet.py case SCAN BUNDLE OUT RUNS SMALL
    python peer_nnunet.py restore SCORES SHAPE OUT

Prints JSON. Nothing of nnU-Net is changed: its reader, preprocessor, predictor, restoring and
writer are called as its `predict_from_files_sequential` calls them, without mirroring. The scan
SMALL warms up.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from meter import Stages, versions
from model import HIGH, LOW, OVERLAP, SPACING, WINDOW
from torch import nn

for name in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
    os.environ.setdefault(name, "unused")  # it warns otherwise


class Comparer(nn.Module):
    """The bundle's network (a SegResNet without blocks) without MONAI; same state dict."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        first = nn.Conv3d(1, 16, 3, padding=1, bias=False)
        last = nn.Conv3d(16, classes, 1)
        self.convInit = nn.Sequential(OrderedDict(conv=first))
        last = nn.Sequential(OrderedDict(conv=last))
        self.conv_final = nn.Sequential(nn.BatchNorm3d(16), nn.ReLU(inplace=True), last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        return self.conv_final(self.convInit(x))


def managers(classes: int) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return nnU-Net's plans, configuration and labels, as its planner writes them for CT."""
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    def resampling(order: int, is_seg: bool) -> dict[str, Any]:
        return {"is_seg": is_seg, "order": order, "order_z": 0, "force_separate_z": None}

    function = "resample_data_or_seg_to_shape"
    density = {"mean": LOW, "std": HIGH - LOW, "percentile_00_5": LOW, "percentile_99_5": HIGH}
    configuration = {
        "data_identifier": "3d_fullres",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "patch_size": list(WINDOW),
        "median_image_size_in_voxels": [200, 239, 239],
        "spacing": list(SPACING),
        "normalization_schemes": ["CTNormalization"],
        "use_mask_for_norm": [False],
        "resampling_fn_data": function,
        "resampling_fn_seg": function,
        "resampling_fn_probabilities": function,
        "resampling_fn_data_kwargs": resampling(3, False),
        "resampling_fn_seg_kwargs": resampling(1, True),
        "resampling_fn_probabilities_kwargs": resampling(1, False),
        "architecture": {"network_class_name": "none", "arch_kwargs": {}},
        "batch_dice": False,
    }
    plans = PlansManager(
        {
            "dataset_name": "Dataset001_Ellipsoids",
            "plans_name": "nnUNetPlans",
            "image_reader_writer": "SimpleITKIO",
            "transpose_forward": [0, 1, 2],
            "transpose_backward": [0, 1, 2],
            "label_manager": "LabelManager",
            "foreground_intensity_properties_per_channel": {"0": density},
            "configurations": {"3d_fullres": configuration},
        }
    )
    names = {"background": 0, **{f"part {n}": n for n in range(1, classes)}}
    dataset = {"channel_names": {"0": "CT"}, "labels": names, "file_ending": ".nii.gz"}
    chosen = plans.get_configuration("3d_fullres")
    return plans, chosen, plans.get_label_manager(dataset), dataset


def case(scan: Path, bundle: Path, out: Path, runs: int, small: Path) -> dict[str, Any]:
    """Label one NIfTI scan, several times."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    state = torch.load(bundle / "models" / "model.pt", weights_only=True)
    classes = len(state["conv_final.2.conv.bias"])
    network = Comparer(classes).eval()
    plans, configuration, _, dataset = managers(classes)
    predictor = nnUNetPredictor(OVERLAP, True, False, False, torch.device("cpu"), allow_tqdm=False)
    predictor.manual_initialization(network, plans, configuration, [state], dataset, "none", None)
    out.parent.mkdir(parents=True, exist_ok=True)
    once(predictor, small, out)
    warm = [once(predictor, scan, out) for _ in range(runs)]
    return {"warm": warm, "versions": versions("nnunetv2", "torch", "numpy")}


def once(predictor: Any, scan: Path, out: Path) -> dict[str, Any]:
    """Label one NIfTI scan."""
    from nnunetv2.inference.export_prediction import (
        convert_predicted_logits_to_segmentation_with_correct_shape as restore,
    )

    plans, configuration = predictor.plans_manager, predictor.configuration_manager
    labels, dataset = predictor.label_manager, predictor.dataset_json
    stages = Stages()
    io = plans.image_reader_writer_class()
    data, properties = stages.timed("load", io.read_images)([str(scan)])
    prepare = configuration.preprocessor_class(verbose=False).run_case_npy
    data, _, properties = stages.timed("resample", prepare)(
        data, None, properties, plans, configuration, dataset
    )
    predict = stages.timed("network", predictor.predict_logits_from_preprocessed_data)
    logits = predict(torch.from_numpy(data))
    del data
    threads = torch.get_num_threads()
    segmentation = stages.timed("restore", restore)(
        logits, plans, configuration, labels, properties, num_threads_torch=threads
    )
    stages.timed("write", io.write_seg)(segmentation, str(out), properties)
    return {"steps": stages.spent, "labels": str(out)}


def restore_alone(scores: Path, shape: str, out: Path) -> dict[str, Any]:
    """Bring scores (Z, C, X, Y) back to `shape` "X,Y,Z"; save labels (Z, X, Y)."""
    from nnunetv2.inference.export_prediction import (
        convert_predicted_logits_to_segmentation_with_correct_shape as restore,
    )

    logits = np.ascontiguousarray(np.load(scores, mmap_mode="r").transpose(1, 0, 2, 3))
    x, y, z = (int(n) for n in shape.split(","))
    target = (z, x, y)
    plans, configuration, labels, _ = managers(len(logits))
    spacing = [s * n / t for s, n, t in zip(SPACING, logits.shape[1:], target, strict=True)]
    properties = {
        "spacing": spacing,
        "shape_before_cropping": target,
        "shape_after_cropping_and_before_resampling": target,
        "bbox_used_for_cropping": [[0, n] for n in target],
    }
    stages = Stages()
    segmentation = stages.timed("restore", restore)(
        torch.from_numpy(logits), plans, configuration, labels, properties, False, 2
    )
    np.save(out, segmentation)
    return {"steps": stages.spent, "labels": str(out)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    whats = parser.add_subparsers(dest="what", required=True)
    a_case, alone = whats.add_parser("case"), whats.add_parser("restore")
    for name in ("scan", "bundle", "out"):
        a_case.add_argument(name, type=Path)
    a_case.add_argument("runs", type=int)
    a_case.add_argument("small", type=Path)
    alone.add_argument("scores", type=Path)
    alone.add_argument("shape")
    alone.add_argument("out", type=Path)
    options = vars(parser.parse_args())
    work = {"case": case, "restore": restore_alone}[options.pop("what")]
    print(json.dumps(work(**options)))
