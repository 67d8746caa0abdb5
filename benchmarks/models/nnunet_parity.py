"""Labels of nnU-Net models, compared with nnU-Net's own: voxels that are equal, and Dice.

    python nnunet_parity.py FOLDER [MODEL...] [--env PYTHON] [--threads N]

FOLDER is what `nnunet_home.py` wrote; with --env, the Python of nnU-Net's environment, missing
models are made first. Prints a line for each model, scan and mirroring; the exit status is 1 if
fewer than 99.95 % of voxels are equal, or a class of 1,000 voxels has a Dice below 0.999.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import nibabel
import numpy as np
import torch

from scanloom.cards.readers import read_model
from scanloom.core import ComputeOptions
from scanloom.core.options import Mirror
from scanloom.inference.predictor import TorchPredictor
from scanloom.io.read import load_volume

LEAST_VOXELS = 1000
"""Classes of fewer voxels have no Dice."""
LEAST_EQUAL, LEAST_DICE = 0.9995, 0.999


def labels_of(predictor: TorchPredictor, files: list[Path], modality: str) -> np.ndarray:
    """Return the label map of a scan."""
    volumes = [load_volume(file, modality=modality) for file in files]
    result = predictor.predict(volumes[0], further_channels=volumes[1:])
    (layer,) = result.layers
    return np.asarray(layer.labels)


def worst_dice(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the smallest Dice of the classes of at least `LEAST_VOXELS` voxels."""
    scores = [1.0]
    for number in range(1, int(max(ours.max(), theirs.max())) + 1):
        a, b = ours == number, theirs == number
        if b.sum() >= LEAST_VOXELS:
            scores.append(2 * int((a & b).sum()) / int(a.sum() + b.sum()))
    return min(scores)


def compare(folder: Path) -> bool:
    """Compare all scans of a model; return whether all agree."""
    from_folder = sorted(folder.glob("nnUNet*__*__*"))
    cascade = [model for model in from_folder if "cascade" in model.name]
    card = read_model((cascade or from_folder)[0])
    agreed = True
    for name in ("plain", "mirror"):
        mirror: Mirror = "auto" if name == "mirror" else "no"
        predictor = TorchPredictor(card, ComputeOptions(mirror=mirror), device="cpu")
        for file in sorted((folder / "labels" / name).glob("*.nii.gz")):
            scan = file.name.removesuffix(".nii.gz")
            theirs = np.asarray(nibabel.load(file).dataobj)
            start = time.process_time()
            inputs = sorted((folder / "scans").glob(f"{scan}_0*.nii.gz"))
            ours = labels_of(predictor, inputs, card.channels[0].modality)
            equal, dice = float((ours == theirs).mean()), worst_dice(ours, theirs)
            smallest = min(float((theirs == n).mean()) for n in range(int(theirs.max()) + 1))
            print(
                f"{folder.name:18} {scan:12} {name:7} {equal:9.4%}  Dice {dice:.4f}  "
                f"smallest class {smallest:4.0%}  {time.process_time() - start:5.1f} CPU s",
                flush=True,
            )
            agreed &= equal >= LEAST_EQUAL and dice >= LEAST_DICE
    return agreed


def main() -> int:
    """Compare the requested models."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--env", help="Python of nnU-Net's environment")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.env:
        home = Path(__file__).with_name("nnunet_home.py")
        subprocess.run([given.env, str(home), str(given.folder), *given.models], check=True)
    models = given.models or sorted(entry.name for entry in given.folder.iterdir())
    agreed = [compare(given.folder / name) for name in models]
    return 0 if all(agreed) else 1


if __name__ == "__main__":
    sys.exit(main())
