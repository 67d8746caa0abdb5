"""Scores that are noise, as of a poor model: 26 classes in some 41,000 connected parts.

    python benchmarks/noise.py [--runs 3] [--slices 300]  # the yardstick; one_scan.py runs the scan

Random scores on every eighth voxel of the network's grid are interpolated linearly to the grid. The
same seed gives the same scores on every machine. They take the place of the network's scores;
everything before and after the network is scanloom's own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from meter import parse
from model import SPACING as NETWORK_SPACING
from study import SHAPE, SPACING

STEP = 8  # voxels of the network's grid between random scores
AT_ONCE = 16  # planes that are handed over together
SEED = 9


def noise_planes(
    shape: tuple[int, int, int], classes: int, axis: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first, scores) with scores (N, C, ., .) float32 of planes across `axis`."""
    random = torch.Generator().manual_seed(SEED)
    knots = [-(-n // STEP) + 1 for n in shape]
    coarse = torch.randn(classes, *knots, generator=random).movedim(axis + 1, 1)
    rest = tuple(n for x, n in enumerate(shape) if x != axis)
    for first in range(0, shape[axis], AT_ONCE):
        numbers = torch.arange(first, min(first + AT_ONCE, shape[axis]))
        below, weight = numbers // STEP, (numbers % STEP / STEP)[None, :, None, None]
        planes = torch.lerp(coarse[:, below], coarse[:, below + 1], weight).movedim(1, 0)
        size = [STEP * (n - 1) + 1 for n in planes.shape[2:]]
        fine = torch.nn.functional.interpolate(
            planes, size=size, mode="bilinear", align_corners=True
        )
        yield first, fine[:, :, : rest[0], : rest[1]].contiguous()


def instead_of_network(classes: int) -> AbstractContextManager[Any]:
    """Return a context in which noise takes the place of all windows and their scores."""
    from scanloom.inference.sliding_window import ScorePlanes, SlidingWindow

    def slide(_: Any, image: torch.Tensor, axis: int, seen: Any = None) -> Iterator[ScorePlanes]:
        shape = (image.shape[1], image.shape[2], image.shape[3])
        for first, scores in noise_planes(shape, classes, axis):
            yield ScorePlanes(first, scores)

    return patch.object(SlidingWindow, "slide", slide)


def yardstick(slices: int) -> float:
    """Return cpu seconds of scikit-image for one class, resized to the scan as in nnU-Net."""
    import numpy as np
    from skimage.transform import resize

    source = (*SHAPE[:2], slices)
    pairs = zip(source, SPACING, NETWORK_SPACING, strict=True)
    small = np.random.default_rng(SEED).random([round(n * mm / to) for n, mm, to in pairs])
    start = time.process_time()
    resize(small, source, order=1, mode="edge", anti_aliasing=False)
    return time.process_time() - start


def main() -> None:
    """Print the seconds of the yardstick."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--slices", type=int, default=SHAPE[2])
    options = parse(parser, runs=1, slices=20)
    print(json.dumps([yardstick(options.slices) for _ in range(options.runs)]))


if __name__ == "__main__":
    main()
