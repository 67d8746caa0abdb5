"""Labels of nnU-Net models, compared with nnU-Net's own: voxels that are equal, and Dice.

    python nnunet_parity.py FOLDER [MODEL...] [--env PYTHON] [--trained] [--threads N]

FOLDER is the output of `nnunet_home.py` (random weights) or, with --trained, `nnunet_trained.py`;
with --env, the Python of nnU-Net's environment, it is made first. Prints a line for each model,
scan and mirroring. The exit status is 1 if fewer than 99.95 % of voxels are equal, a class of 1,000
voxels has a Dice below 0.999, or a trained model finds a class with a Dice of 0.5 or less.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nibabel
import numpy as np
from agreement import agreement, compare_all, dice
from numpy.typing import NDArray

from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions
from scanloom.inference.combined import make_predictor
from scanloom.inference.graph import Predictor
from scanloom.io.read import load_volume
from scanloom.options import Mirror

LEAST_TRUE_DICE = 0.5
"""A trained model finds each class with a larger Dice."""


def labels_of(predictor: Predictor, files: list[Path], modality: str) -> NDArray[np.uint8]:
    """Return the label map of a scan."""
    volumes = [load_volume(file, modality=modality) for file in files]
    result = predictor.predict(volumes[0], further_channels=volumes[1:])
    (layer,) = result.layers
    return np.asarray(layer.labels)


def true_dice(theirs: NDArray[np.uint8], truth: Path) -> float:
    """Return the smallest Dice of nnU-Net's labels with the true ones; nan if they are unknown."""
    if not truth.is_file():
        return float("nan")
    labels = np.asarray(nibabel.load(truth).dataobj)
    return min(dice(theirs, labels, n) for n in range(1, int(labels.max()) + 1))


def compare(root: Path, model: str) -> bool:
    """Compare all scans of a model; return whether all agree."""
    folder = root / model
    from_folder = sorted(folder.glob("nnUNet*__*__*"))
    cascade = [model_folder for model_folder in from_folder if "cascade" in model_folder.name]
    card = load_card((cascade or from_folder)[0])
    agreed = True
    for name in ("plain", "mirror"):
        mirror: Mirror = "auto" if name == "mirror" else "no"
        compute = ComputeOptions(mirror=mirror, engine="torch")
        predictor = make_predictor(card, compute, device="cpu")
        for file in sorted((folder / "labels" / name).glob("*.nii.gz")):
            scan = file.name.removesuffix(".nii.gz")
            theirs = np.asarray(nibabel.load(file).dataobj)
            start = time.process_time()
            inputs = sorted((folder / "scans").glob(f"{scan}_0*.nii.gz"))
            ours = labels_of(predictor, inputs, card.channels[0].modality)
            result, true = agreement(ours, theirs), true_dice(theirs, folder / "truth" / file.name)
            smallest = min(float((theirs == n).mean()) for n in range(int(theirs.max()) + 1))
            print(
                f"{folder.name:18} {scan:12} {name:7} {result}  smallest class {smallest:4.0%}  "
                f"with the truth {true:.2f}  {time.process_time() - start:5.1f} CPU s",
                flush=True,
            )
            agreed &= result.enough and not true <= LEAST_TRUE_DICE
    return agreed


if __name__ == "__main__":
    home = Path(__file__).with_name("nnunet_home.py")
    scripts = {"random": home, "trained": home.with_name("nnunet_trained.py")}
    sys.exit(compare_all(compare, scripts, smallest="ct_2d"))
