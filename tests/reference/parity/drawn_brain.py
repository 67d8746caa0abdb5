"""Dice of a MeshNet of 18 classes on an image drawn from a label map of FreeSurfer's numbers.

    python tests/reference/parity/drawn_brain.py MODEL LABEL_MAP

LABEL_MAP such as SynthSeg's `data/training_label_maps/training_seg_08.nii.gz`. Each label gets the
mean of a T1-weighted image, then blur, a smooth bias and noise. Prints the Dice of each class.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import nibabel as nib
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from meter import parse, unavailable

from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions, Grid, Volume
from scanloom.inference.predictor import TorchPredictor

CLASSES = (
    (),
    (2, 41, 77, 251, 252, 253, 254, 255),
    (3, 42),
    (4, 43),
    (5, 44),
    (7, 46),
    (8, 47),
    (10, 49),
    (11, 50),
    (12, 51),
    (13, 52),
    (14,),
    (15,),
    (16,),
    (17, 53),
    (18, 54),
    (26, 58),
    (28, 60),
)
"""FreeSurfer's labels of each class of the network."""
MEANS = (0, 110, 72, 25, 25, 105, 70, 92, 78, 86, 100, 25, 25, 102, 72, 70, 78, 96)
"""Mean of each class in T1-weighted images, white matter as 110 (FreeSurfer)."""
AROUND = {24: 22, 25: 60, 57: 60, 507: 70, 511: 18, 514: 40, 515: 120, 516: 20}
"""Mean of cerebrospinal fluid, lesions, soft tissue, bone and fat; 55 for further labels."""


def draw(labels: NDArray[np.integer], seed: int = 0) -> NDArray[np.int16]:
    """Return the image of a label map."""
    random = np.random.default_rng(seed)
    image = np.where(labels > 0, np.float32(55), np.float32(2))
    for label, mean in AROUND.items():
        image[labels == label] = mean
    for mean, members in zip(MEANS, CLASSES, strict=True):
        image[np.isin(labels, members)] = mean
    coarse = random.normal(0.0, 0.15, (4, 4, 4))
    bias = np.exp(ndimage.zoom(coarse, [n / 4 for n in labels.shape], order=1))
    drawn = ndimage.gaussian_filter(image, 0.6) * bias + random.normal(0.0, 4.0, labels.shape)
    return np.asfortranarray(drawn.clip(0).astype(np.int16))


def main(model: Path, label_map: Path) -> None:
    """Draw, segment and compare."""
    stored = nib.load(label_map)
    labels = np.asanyarray(stored.dataobj)
    volume = Volume(draw(labels), Grid(labels.shape, stored.affine), "a.u.", "MR")
    card, started = load_card(model), time.process_time()
    predictor = TorchPredictor(card, ComputeOptions(precision="float32"), device="cpu")
    found = predictor.predict(volume).layers[0].labels
    scores = []
    for structure, members in zip(card.structures, CLASSES[1:], strict=True):
        expected, ours = np.isin(labels, members), found == structure.number
        scores.append(2 * (expected & ours).sum() / (expected.sum() + ours.sum()))
        print(f"{structure.label:28} {scores[-1]:.3f}")
    print(f"mean {np.mean(scores):.3f}; CPU {time.process_time() - started:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("label_map", type=Path, nargs="?")
    given = parse(parser)
    if given.label_map is None:
        unavailable("a MeshNet of 18 classes and a label map of SynthSeg: name both")
    main(given.model, given.label_map)
