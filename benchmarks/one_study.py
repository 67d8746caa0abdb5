"""A study in memory beside its network, in the time of a GPU, on a stand-in device.

No GPU is needed: a clock counts the time that each operation takes on an H100 by `GPU` and
`WINDOW_S`, and what the host does beside it takes the time that it takes here. Convolutions aren't
computed, so the labels mean nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from gpu_bench import FULL, SMALLEST, monai_card, nnunet_card
from meter import machine, parse, table

from scanloom.cards.card import ModelCard
from scanloom.core import ComputeOptions, StepTimer, Volume
from scanloom.inference.predictor import TorchPredictor
from support.fake_cuda import CONVOLUTIONS, StandIn, Timeline, stand_in

WINDOW_S = 0.154 / 27
"""Seconds of a 128^3 window of nnU-Net's 3d_fullres on an H100: 30 % of its peak in half."""
MEMORY_BYTES_PER_S, BUS_BYTES_PER_S = 2.4e12, 50e9
"""Of an H100: its memory, and the bus from page-locked memory, as the product copies."""
LEAST_S = 4e-6
"""Seconds of the smallest kernel."""


M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1


def seconds(name: str, size: int, *, convolution: float) -> float:
    """Return the seconds of an operation on the device."""
    if name in CONVOLUTIONS:
        return convolution
    rate = BUS_BYTES_PER_S if name.startswith("copy to") else MEMORY_BYTES_PER_S
    return max(size / rate, LEAST_S)


class Counter:
    """Counts the convolutions of a study."""

    count = 0

    def __call__(self, name: str, _: int) -> float:
        """Take an operation."""
        self.count += name in CONVOLUTIONS
        return 0.0


def study(fake: StandIn, card: ModelCard, volume: Volume, runs: int) -> list[object]:
    """Return a row: the seconds of a study, and of its steps, beside those of its network."""
    predictor = TorchPredictor(card, ComputeOptions(engine="torch"))
    fake.timeline = Timeline(Counter())
    predictor.predict(SMALLEST.volume())  # loads the network, and compares the precisions
    counter = Counter()
    fake.timeline = Timeline(counter)
    predictor.predict(volume)
    network = WINDOW_S * 27
    results = []
    for _ in range(runs):
        timeline = Timeline(partial(seconds, convolution=network / counter.count))
        fake.timeline = timeline
        spent: dict[str, float] = defaultdict(float)

        @contextmanager
        def mark(name: str, timeline: Timeline = timeline, spent: Any = spent) -> Iterator[None]:
            start = timeline.now()
            yield
            spent[name] += timeline.now() - start

        start = timeline.now()
        predictor.predict(volume, StepTimer(mark=mark))
        timeline.wait()
        results.append((timeline.now() - start, timeline.busy, spent))
    whole, busy, spent = min(results, key=lambda each: each[0])
    steps = ", ".join(f"{name} {each:.3f}" for name, each in spent.items())
    return [card.name, f"{whole:.3f}", f"{busy:.3f}", f"{whole / network:.2f}", "<= 1.15", steps]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=2)
    options = parse(parser, runs=1)
    size = SMALLEST if options.smallest else replace(FULL, filters=(4, 8, 8), classes=(26,))
    print(machine("scanloom", "torch"), "\n")
    # A device keeps the memory that it frees; without this, the host would spend time to return it
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)
    with ExitStack() as stack:
        fake = stack.enter_context(stand_in())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        volume = size.volume()
        cards = [
            nnunet_card(folder / "nnunet", size.classes[0], size, ()),
            monai_card(folder, size.classes[0], size),
        ]
        rows = [study(fake, card, volume, options.runs) for card in cards]
    head = ["model", "study, s", "device busy, s", "study / network", "aim", "steps, s"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
