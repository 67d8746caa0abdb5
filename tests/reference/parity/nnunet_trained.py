"""nnU-Net models that nnU-Net's own trainer trains on drawn scans, and its labels of other scans.

    python nnunet_trained.py FOLDER MODEL...

Runs in nnU-Net's environment (nnunetv2 2.8.1, batchgenerators 0.25.5), on the CPU, a minute or two
a training. Writes the files of `nnunet_home.py`, and the true labels, `truth/*.nii.gz`, to
FOLDER/MODEL. A scan has three nested ellipsoids of their own intensities in smooth noise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from nnunet_home import (
    LOW,
    MODELS,
    TURNED,
    Model,
    dataset_of,
    plans_of,
    predict_all,
    scan,
)

EPOCHS, STEPS, STEPS_2D = 5, 80, 300
"""Epochs of a training, and steps of an epoch: 400 leave a 2-D network at a Dice of 0.47."""
CASES = 8
RADII = (0.7, 0.5, 0.3)
"""Of the ellipsoids, as parts of half the scan's lengths."""
CONTRAST = 150
"""Step of intensities from an ellipsoid to the next; the noise has a deviation of about 50."""
TRAINED = {
    **{name: MODELS[name] for name in ("ct_2d", "ct_two_folds", "ct_resenc", "mr_regions")},
    "ct_3d": replace(MODELS["ct_3d"], scans=(*MODELS["ct_3d"].scans, *TURNED)),
    "sagittal": MODELS["sagittal"],
    "cascade": replace(MODELS["cascade"], folds=("all",)),
}
LOW_ALL = replace(LOW, folds=("all",))
"""Trained on all cases, so that the next stage has labels of all."""


def draw(geometry: Any, seed: int, channels: int) -> tuple[list[Any], Any]:
    """Return the images of a scan, one a channel, and its label map."""
    spacing, shape, codes = geometry
    centre = np.random.default_rng(seed).uniform(-0.15, 0.15, (3, 1, 1, 1))
    grid = np.stack(np.meshgrid(*(np.linspace(-1, 1, n) for n in shape), indexing="ij"))
    distance = np.sqrt(((grid - centre) ** 2).sum(0))
    labels = np.sum([distance < radius for radius in RADII], axis=0).astype(np.uint8)
    images = []
    for n, noise in enumerate(scan(spacing, shape, codes, seed, channels)):
        values = np.asanyarray(noise.dataobj)
        step = CONTRAST if n % 2 == 0 else -CONTRAST // 2
        images.append(nibabel.Nifti1Image(values + step * labels.astype(np.int16), noise.affine))
    return images, nibabel.Nifti1Image(labels, images[0].affine)


def nnunet_folder(kind: str) -> Path:
    """Return nnU-Net's folder for raw or preprocessed data, or for results."""
    return Path(os.environ[f"nnUNet_{kind}"])


def write_dataset(model: Model) -> str:
    """Write the training data of a model where nnU-Net looks for it; return the name."""
    name = f"Dataset{101 + list(TRAINED.values()).index(model)}_Drawn"
    raw, preprocessed = (nnunet_folder(kind) / name for kind in ("raw", "preprocessed"))
    for folder in (raw / "imagesTr", raw / "labelsTr", preprocessed):
        folder.mkdir(parents=True, exist_ok=True)
    for n in range(CASES):
        images, labels = draw(model.scans[n % len(model.scans)], 100 + n, len(model.channels))
        for c, image in enumerate(images):
            image.to_filename(raw / "imagesTr" / f"case{n}_{c:04d}.nii.gz")
        if model.labels and "ignore" in model.labels:
            values = np.asanyarray(labels.dataobj)
            values[: values.shape[0] // 4] = model.labels["ignore"]
            labels = nibabel.Nifti1Image(values, labels.affine)
        labels.to_filename(raw / "labelsTr" / f"case{n}.nii.gz")
    (raw / "dataset.json").write_text(json.dumps({**dataset_of(model), "numTraining": CASES}))
    shutil.copy(raw / "dataset.json", preprocessed)
    cases = [f"case{n}" for n in range(CASES)]
    splits = [{"train": cases[2:], "val": cases[:2]}, {"train": cases[:-2], "val": cases[-2:]}]
    (preprocessed / "splits_final.json").write_text(json.dumps(splits))
    return name


def train(plans: dict[str, Any], model: Model) -> Path:
    """Train all folds of a configuration; return the model folder."""
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    preprocessed = nnunet_folder("preprocessed") / plans["dataset_name"]
    dataset = json.loads((preprocessed / "dataset.json").read_text())
    for n, fold in enumerate(model.folds):
        torch.manual_seed(n)
        np.random.seed(n)  # noqa: NPY002 nnU-Net draws from it
        trainer = nnUNetTrainer(
            {**plans, "continue_training": False},
            model.configuration,
            fold if fold == "all" else int(fold),
            dataset,
            torch.device("cpu"),
        )
        trainer.num_epochs = EPOCHS
        trainer.num_iterations_per_epoch = STEPS_2D if len(model.patch) == 2 else STEPS
        trainer.num_val_iterations_per_epoch = 2
        trainer.run_training()
        if model is LOW_ALL:
            trainer.perform_actual_validation()  # writes the labels that the next stage learns from
    return Path(trainer.output_folder_base)


def make(folder: Path, model: Model) -> None:
    """Train one model; write its folder, scans, their true labels and nnU-Net's."""
    from nnunetv2.experiment_planning.plan_and_preprocess_api import (
        extract_fingerprint_dataset,
        preprocess_dataset,
    )

    stages = [LOW_ALL, model] if model.previous else [model]
    plans = {**plans_of(*stages), "dataset_name": write_dataset(model)}
    if model.previous:
        plans["configurations"][model.previous]["next_stage"] = model.configuration
    preprocessed = nnunet_folder("preprocessed") / plans["dataset_name"]
    (preprocessed / "nnUNetPlans.json").write_text(json.dumps(plans))
    names = [stage.configuration for stage in stages]
    number = int(plans["dataset_name"][7:10])
    extract_fingerprint_dataset(number, num_processes=1)  # the trainer copies it
    preprocess_dataset(number, configurations=names, num_processes=[1], show_progress_bar=False)
    places = []
    for stage in stages:
        trained = train(plans, stage)
        places.append(folder / trained.name)
        shutil.copytree(trained, places[-1], dirs_exist_ok=True)
    write_scans(folder, model)
    predict_all(folder, places[-1], places[0] if model.previous else None)


def write_scans(folder: Path, model: Model) -> None:
    """Write scans that no model has seen, and their true labels."""
    for name in ("scans", "truth"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for n, geometry in enumerate(model.scans):
        images, labels = draw(geometry, n, len(model.channels))
        name = f"case{n}_{geometry[2]}"
        for c, image in enumerate(images):
            image.to_filename(folder / "scans" / f"{name}_{c:04d}.nii.gz")
        labels.to_filename(folder / "truth" / f"{name}.nii.gz")


def main(folder: Path, names: list[str]) -> None:
    """Make the models that are named, or all."""
    own = folder.resolve().with_name(f"{folder.name}-nnunet")
    for kind in ("raw", "preprocessed", "results"):
        os.environ[f"nnUNet_{kind}"] = str(own / kind)
    os.environ.update(nnUNet_n_proc_DA="0", nnUNet_def_n_proc="1", nnUNet_compile="f")
    torch.set_num_threads(1)
    for name in names or TRAINED:
        make(folder / name, TRAINED[name])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", help="default: all")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.models)
