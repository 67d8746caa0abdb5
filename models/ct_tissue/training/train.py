"""Train the model `ct_tissue` again and write its weights into the bundle beside this file.

    python models/ct_tissue/training/train.py [WEIGHTS]

Needs scanloom installed and the data that `ct_tissue_training.data` names: in SCANLOOM_TRAIN,
or in ../shared/data beside the checkout. Also draws torsos with other seeds than that of the sample
study, which is in no training set. With WEIGHTS of version 0.4.0, only the phases since then run.
`evaluate.py` judges the result.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ct_tissue_training.data import (
    GRID_SPACING_MM,
    TRAINING_SCANS,
    Example,
    data_folder,
    make_example,
)
from ct_tissue_training.phases import (
    CUT_PHASES,
    MARROW_PHASES,
    NOISE_PHASES,
    ORGAN_PHASES,
    PHASES,
)
from ct_tissue_training.rules import NAMES, resample_fine
from ct_tissue_training.training import (
    SyntheticTorso,
    average_weights,
    calibrate,
    round_to_bfloat16,
    train,
)
from scanloom.convert.conversion import convert_job

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "data"))

import draw_torso as drawing
from torso_anatomy import M, torso

ROOT = Path(__file__).resolve().parents[3]
SEEDS = (101, 102, 103, 104)
AVERAGED = (2, 3, 7, 8)
"""Of ORGAN_PHASES and MARROW_PHASES, from 1, those after which weights are averaged: the first find
more marrow, the last fewer kidneys."""
ENHANCED_HU = {
    M.KIDNEY: 215.0,
    M.BLOOD: 170.0,
    M.LUNG_VESSEL: 170.0,
    M.HEART: 155.0,
    M.LIVER: 112.0,
    M.SPLEEN: 125.0,
    M.PANCREAS: 95.0,
    M.BOWEL_WALL: 85.0,
    M.MUSCLE: 64.0,
}
"""HU in the portal venous phase, of materials that take up contrast agent."""


def drawn(seed: int) -> tuple[SyntheticTorso, Example]:
    """Draw a torso, and label each voxel of the network's grid with what fills most of it.

    Returns also the same torso with contrast agent.
    """
    if seed == drawing.SEED:
        raise ValueError("the sample study is in no training set")
    body = torso(seed)
    hu, varies = (np.array([drawing.MATERIALS[m][n] for m in M], float) for n in (0, 1))
    enhanced = np.array([ENHANCED_HU.get(m, drawing.MATERIALS[m][0]) for m in M], float)
    tissue = np.array([NAMES.index(drawing.MATERIALS[m][2]) for m in M])
    clean, bright, spread = (np.zeros(drawing.SHAPE) for _ in range(3))
    shares = np.zeros((len(NAMES), *drawing.SHAPE), np.float32)
    for k in range(drawing.SHAPE[2]):
        material = drawing.draw_slab(body, k).material
        clean[..., k] = drawing.average(hu[material])
        bright[..., k] = drawing.average(enhanced[material])
        spread[..., k] = drawing.average(varies[material])
        for n in range(len(NAMES)):
            shares[n, ..., k] = drawing.average((tissue[material] == n).astype(float))
    scans = [drawing.scanner(i, spread, seed).astype(np.float32) for i in (clean, bright)]
    labels = np.argmax([on_grid(share) for share in shares], axis=0).astype(np.uint8)
    voxel_ml = float(np.prod(drawing.SPACING)) / 1000
    ml = shares.sum((1, 2, 3), dtype=float) * voxel_ml
    weights = (1.5, 0.75)
    plain, contrast = (
        Example(on_grid(scan), labels, weight) for scan, weight in zip(scans, weights, strict=True)
    )
    return SyntheticTorso(plain, drawing.SHAPE, ml, voxel_ml), contrast


def on_grid(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Turn a drawing (LPS) to RAS and bring it to the network's grid."""
    turned = np.ascontiguousarray(array[::-1, ::-1])
    return np.asarray(resample_fine(turned, drawing.SPACING, GRID_SPACING_MM, 1))


def write(state: dict[str, torch.Tensor], bundle: Path) -> None:
    """Write the weights, their SHA-256 into the metadata, and the card that scanloom reads."""
    weights = bundle / "models" / "model.pt"
    torch.save(state, weights)
    path = bundle / "configs" / "metadata.json"
    text = path.read_text()
    old = json.loads(text)["scanloom"]["weights_sha256"]
    path.write_text(text.replace(old, hashlib.sha256(weights.read_bytes()).hexdigest()))
    shutil.rmtree(bundle / "weights")
    convert_job(bundle, {}, bundle)


def told(line: str) -> None:
    """Say how far it is."""
    print(line, flush=True)


def gather(data: Path) -> tuple[list[Example], list[SyntheticTorso]]:
    """Return all examples, and the synthetic torsos whose volumes calibrate the network."""
    examples = []
    for source in TRAINING_SCANS:
        told(source.path)
        examples.append(make_example(source, data))
    torsos = []
    for seed in SEEDS:
        plain, enhanced = drawn(seed)
        torsos.append(plain)
        examples += [plain.example, enhanced]
    return examples, torsos


def main(start: Path | None) -> None:
    """Gather, train, write."""
    examples, torsos = gather(data_folder(ROOT))
    if start is None:
        states = [train(examples, PHASES, told)]
        for phase in NOISE_PHASES:
            states.append(train(examples, [phase], told, states[-1]))
        state = round_to_bfloat16(average_weights(states[-2:]))
        states = [state]
        for phase in CUT_PHASES:
            states.append(train(examples, [phase], told, states[-1]))
        state = calibrate(round_to_bfloat16(average_weights(states[-2:])), torsos)
    else:
        state = torch.load(start, map_location="cpu", weights_only=True)
    states = [state]
    for phase in (*ORGAN_PHASES, *MARROW_PHASES):
        states.append(train(examples, [phase], told, states[-1]))
    averaged = [states[n] for n in AVERAGED]
    state = calibrate(round_to_bfloat16(average_weights(averaged)), torsos)
    write(state, ROOT / "models" / "ct_tissue")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
