"""Train the model `ct_tissue` again and write its weights into the bundle beside this file.

    python models/train_ct_tissue.py

Needs scanloom installed and the data that `scanloom.training.tissue_data` names: in SCANLOOM_TRAIN,
or in ../shared/data beside the checkout. Also draws torsos with other seeds than that of the sample
study, which is in no training set. Prints Dice on an unseen scan.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import affine_transform

from scanloom.cards.monai.bundle import read_bundle
from scanloom.inference.predictor import TorchPredictor
from scanloom.io.read import load_volume
from scanloom.training.tissue import (
    NOISE_PHASES,
    PHASES,
    SyntheticTorso,
    average_weights,
    calibrate,
    round_to_bfloat16,
    train,
)
from scanloom.training.tissue_data import (
    GRID_SPACING_MM,
    HELD_OUT_SCANS,
    TRAINING_SCANS,
    Example,
    TrainingScan,
    data_folder,
    make_example,
    to_ras,
)
from scanloom.training.tissue_rules import NAMES, resample_fine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))

import draw_torso as drawing
from torso_anatomy import M, torso

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (101, 102, 103, 104)


def drawn(seed: int) -> SyntheticTorso:
    """Draw a torso, and label each voxel of the network's grid with what fills most of it."""
    if seed == drawing.SEED:
        raise ValueError("the sample study is in no training set")
    body = torso(seed)
    hu, varies = (np.array([drawing.MATERIALS[m][n] for m in M], float) for n in (0, 1))
    tissue = np.array([NAMES.index(drawing.MATERIALS[m][2]) for m in M])
    clean, spread = np.zeros(drawing.SHAPE), np.zeros(drawing.SHAPE)
    shares = np.zeros((len(NAMES), *drawing.SHAPE), np.float32)
    for k in range(drawing.SHAPE[2]):
        material = drawing.draw_slab(body, k).material
        clean[..., k] = drawing.average(hu[material])
        spread[..., k] = drawing.average(varies[material])
        for n in range(len(NAMES)):
            shares[n, ..., k] = drawing.average((tissue[material] == n).astype(float))
    scan = drawing.scanner(clean, spread, seed).astype(np.float32)
    labels = np.argmax([on_grid(share) for share in shares], axis=0).astype(np.uint8)
    voxel_ml = float(np.prod(drawing.SPACING)) / 1000
    ml = shares.sum((1, 2, 3), dtype=float) * voxel_ml
    return SyntheticTorso(Example(on_grid(scan), labels, weight=1.5), drawing.SHAPE, ml, voxel_ml)


def on_grid(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Turn a drawing (LPS) to RAS and bring it to the network's grid."""
    turned = np.ascontiguousarray(array[::-1, ::-1])
    return np.asarray(resample_fine(turned, drawing.SPACING, GRID_SPACING_MM, 1))


def write(state: dict[str, torch.Tensor], bundle: Path) -> None:
    """Write the weights, and their SHA-256 into the metadata."""
    weights = bundle / "models" / "model.pt"
    torch.save(state, weights)
    path = bundle / "configs" / "metadata.json"
    text = path.read_text()
    old = json.loads(text)["scanloom"]["weights_sha256"]
    path.write_text(text.replace(old, hashlib.sha256(weights.read_bytes()).hexdigest()))


def dice(bundle: Path, source: TrainingScan, data: Path) -> dict[str, float]:
    """Return Dice of each tissue against the rules' labels, on the network's grid."""
    volume = load_volume(data / source.path, modality="CT")
    found = TorchPredictor(read_bundle(bundle), device="cpu", precision="float32").predict(volume)
    truth = make_example(source, data).labels
    labels, spacing = to_ras(replace(volume, array=found.layers[0].labels))
    at = [GRID_SPACING_MM / s for s in spacing]
    coarse = affine_transform(labels, at, output_shape=truth.shape, order=0, mode="nearest")
    values = {}
    for n, name in enumerate(NAMES[1:], start=1):
        ours, theirs = coarse == n, truth == n
        values[name] = 2 * (ours & theirs).sum() / max(int(ours.sum() + theirs.sum()), 1)
    return values


def told(line: str) -> None:
    """Say how far it is."""
    print(line, flush=True)


def main() -> None:
    """Gather, train, write."""
    data = data_folder(ROOT)
    examples = []
    for source in TRAINING_SCANS:
        print(source.path, flush=True)
        examples.append(make_example(source, data))
    torsos = [drawn(seed) for seed in SEEDS]
    examples += [one.example for one in torsos]
    states = [train(examples, PHASES, told)]
    for phase in NOISE_PHASES:
        states.append(train(examples, [phase], told, states[-1]))
    state = calibrate(round_to_bfloat16(average_weights(states[-2:])), torsos)
    bundle = ROOT / "models" / "ct_tissue"
    write(state, bundle)
    for source in HELD_OUT_SCANS:
        for name, value in dice(bundle, source, data).items():
            print(f"{source.path}: {name} Dice {value:.3f}")


if __name__ == "__main__":
    main()
