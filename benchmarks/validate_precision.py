"""Compare labels in half precision with those in float32, and advise on a card's precisions.

    python validate_precision.py MODEL SCAN... [--device cpu]

A precision is valid where the Dice of every structure above 1 ml is at least 0.998 in every scan; a
scan that can't be used is not passed over.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from meter import SAMPLE, parse, table, unavailable

import scanloom
from scanloom.convert.store import find_model
from scanloom.core import ComputeOptions, Reason, ScanError, Segmentation, StepTimer
from scanloom.inference.predictor import TorchPredictor

LEAST = 0.998
SMALLEST = 1.0  # ml


def dices(exact: Segmentation, rounded: Segmentation) -> dict[str, tuple[float, float]]:
    """Return ml and Dice of each structure that has at least `SMALLEST` ml in `exact`."""
    ml = abs(float(np.linalg.det(exact.grid.affine[:3, :3]))) / 1000
    dice_by_label = {}
    for exact_layer, rounded_layer in zip(exact.layers, rounded.layers, strict=True):
        for structure in exact_layer.structures:
            a, b = exact_layer.labels == structure.number, rounded_layer.labels == structure.number
            if a.sum() * ml >= SMALLEST:
                both = 2.0 * np.count_nonzero(a & b)
                dice_by_label[structure.label] = (
                    float(a.sum() * ml),
                    both / float(a.sum() + b.sum()),
                )
    return dice_by_label


def main() -> int:
    """Print a table, and the line for the card."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="ct_tissue")
    parser.add_argument("scans", nargs="*", type=Path, default=[SAMPLE])
    parser.add_argument("--device", default="auto")
    options = parse(parser, device="cpu")
    card = find_model(options.model)
    full = TorchPredictor(card, device=options.device, compute=ComputeOptions(precision="float32"))
    try:
        half = TorchPredictor(card, device=options.device, compute=ComputeOptions(precision="half"))
    except ScanError as exc:
        if exc.reason is Reason.DEVICE_UNAVAILABLE:
            unavailable(exc.detail)
        raise
    rows, worst, unused = [], 1.0, 0
    for number, path in enumerate(options.scans, start=1):
        try:
            volume = scanloom.load_volume(path, series="best")
        except ScanError as exc:
            print(f"scan {number} can't be used: {exc.reason.name}")
            unused += 1
            continue
        clocks = StepTimer(), StepTimer()
        labels = [p.predict(volume, c) for p, c in zip((full, half), clocks, strict=True)]
        seconds = [clock.steps["network"] for clock in clocks]
        print(
            f"scan {number}: network {seconds[0].cpu:.1f} cpu s in float32, "
            f"{seconds[1].cpu:.1f} in {half.precision_name}: "
            f"{seconds[0].cpu / seconds[1].cpu:.2f} times as fast"
        )
        for label, (ml, dice) in dices(labels[0], labels[1]).items():
            rows.append((number, label, ml, f"{dice:.5f}"))
            worst = min(worst, dice)
    print(table(("scan", "structure", "ml", "Dice"), rows))
    valid = worst >= LEAST and bool(rows) and not unused  # one left out might be the worst
    print(
        f'card: add "{half.precision_name}" to "precisions" of metadata.json'
        if valid
        else f"card: {half.precision_name} is not valid (worst Dice {worst:.5f}, {unused} unused)"
    )
    return 0 if valid else 1


if __name__ == "__main__":
    sys.exit(main())
