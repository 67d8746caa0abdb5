"""Three models of one network grid on one scan, compared with three runs of one model.

    python together.py [--shape I J K] [--repeats N] [--device DEVICE] [--threads N]

Writes three cards of a small UNet, for 1.5 mm, and a CT as a DICOM series. Networks are loaded and
warm. Prints the median seconds of all three together, of three runs of one model, and the ratio to
the latter without two decodes, resamplings and transfers. The exit status is 1 if the ratio is
above 1.15, or if a label differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.append(str(Path(__file__).parents[1]))

from meter import parse

from scanloom.cards.card import ModelCard, NetworkGrid, Window
from scanloom.core import DICOM, Case, Outputs, Series, StepTimer
from scanloom.engine import steps
from scanloom.engine.case.types import SegmentedCase
from scanloom.inference.predictor import TorchPredictor
from support import model_cards
from support.write_dicom import Geometry, write_series

LIMIT = 1.15
SAVED = ("load", "resample")
"""Steps that models share: reading and decoding; transfer and resampling."""


def make_cards(folder: Path) -> list[ModelCard]:
    """Return the cards of three models with weights of their own."""
    cards = []
    for seed in range(3):
        (place := folder / f"model-{seed}").mkdir()
        weights = model_cards.small_weights(place, seed=seed)
        grid, window = NetworkGrid("RAS", (1.5, 1.5, 1.5)), Window((96, 96, 96), 0.25)
        cards.append(model_cards.card(weights, name=f"model-{seed}", grid=grid, window=window))
    return cards


def make_case(folder: Path, shape: tuple[int, int, int]) -> Case:
    """Write a CT and return its case."""
    stored = (model_cards.smooth_scan(shape) + 1024).astype(np.int16)
    files = write_series(folder / "ct", stored, Geometry(spacing=(0.9, 0.9), step=2.0))
    return Case("a" * 26, Series(DICOM, tuple(files)), Outputs(), "source", "recipe")


def timed(
    case: Case, predictors: Sequence[TorchPredictor], folder: Path
) -> tuple[float, StepTimer, SegmentedCase]:
    """Read, segment and write the case; return seconds, steps and labels."""
    clock, start = StepTimer(), time.perf_counter()
    segmented = steps.segment(steps.load(case, clock), predictors)
    with tempfile.TemporaryDirectory(dir=folder) as out:
        steps.write(segmented, Path(out))
    return time.perf_counter() - start, clock, segmented


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=3, default=(256, 256, 120))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    arguments = parse(parser, shape=(48, 48, 24), repeats=1)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case = make_case(folder, tuple(arguments.shape))
        predictors = [TorchPredictor(card, device=arguments.device) for card in make_cards(folder)]
        timed(case, predictors, folder)  # warm
        together, alone, bounds, equal = [], [], [], True
        for _ in range(arguments.repeats):
            seconds, _, joint = timed(case, predictors, folder)
            singles = [timed(case, [predictor], folder) for predictor in predictors]
            saved = [sum(clock.steps[step].wall for step in SAVED) for _, clock, _ in singles]
            together.append(seconds)
            alone.append(sum(single for single, _, _ in singles))
            bounds.append(alone[-1] - 2 * statistics.mean(saved))
            for made, (_, _, single) in zip(joint.segmentations, singles, strict=True):
                labels = single.segmentations[0].layers[0].labels
                equal &= np.array_equal(made.layers[0].labels, labels)
    ratio = statistics.median(t / b for t, b in zip(together, bounds, strict=True))
    print(f"together                       {statistics.median(together):7.2f} s")
    print(f"three runs of one model        {statistics.median(alone):7.2f} s")
    print(f"  less what two of them repeat {statistics.median(bounds):7.2f} s")
    print(f"ratio to the latter            {ratio:7.3f}   (at most {LIMIT})")
    print(f"labels equal                   {'yes' if equal else 'no':>7}")
    return 0 if equal and ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
