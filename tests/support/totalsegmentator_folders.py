"""Small folders with random weights, in the layout of TotalSegmentator's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scanloom.convert.totalsegmentator import Mode, TaskNetwork, modes
from support.nnunet_folders import PLANS, plans, write_model

SPACING = (6.0, 6.0, 6.0)
"""Spacing in plans of tasks that leave resampling to nnU-Net."""


def write_task(folder: Path, name: str, **entries: Any) -> Path:
    """Write the weights of a task and of the one that crops for it; return `folder`."""
    mode = modes()[name]
    for submodel in mode.parts:
        write_part(folder, mode, submodel, **entries)
    if mode.crop is not None:
        write_task(folder, mode.crop.mode)
    return folder


def write_part(
    folder: Path,
    mode: Mode,
    submodel: TaskNetwork,
    *,
    further_labels: tuple[str, ...] = (),
    spacing: tuple[float, ...] | None = None,
    **configuration: Any,
) -> Path:
    """Write one dataset of a task, unless it is there; return its folder."""
    target = folder / submodel.dataset.folder
    if target.is_dir():
        return target
    x, y, z = spacing or mode.spacing or SPACING
    changed = plans(spacing=[z, y, x], patch_size=[8, 16, 16], **configuration)
    settings = changed["configurations"].pop("3d_fullres")
    if mode.modality == "MR":
        settings["normalization_schemes"] = ["ZScoreNormalization"]
    changed["configurations"][mode.configuration] = settings
    changed["dataset_name"] = submodel.dataset.folder
    names = [*submodel.classes.values(), *further_labels]
    dataset = {
        "channel_names": {"0": mode.modality},
        "labels": {"background": 0, **{name: n for n, name in enumerate(names, 1)}},
        "file_ending": ".nii.gz",
    }
    folds = tuple(str(fold) for fold in mode.folds or (0, 1))
    model = write_model(target, changed, dataset, configuration=mode.configuration, folds=folds)
    model.rename(target / f"{mode.trainer}__nnUNetPlans__{mode.configuration}")
    return target


__all__ = ["PLANS", "write_part", "write_task"]
