"""A study in memory beside its network, in the time of a GPU, on a stand-in device.

No GPU is needed: a clock counts the time that each operation takes on an H100 by `WINDOW_S` and the
rates below, and what the host does beside it takes the processor time that it takes here. Copies in
memory are those of one thread here, and are counted too as if threads had the rate of another host.
Network and kernels aren't computed, so the labels mean nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from gpu_bench import FULL, SMALLEST, monai_card, nnunet_card
from meter import machine, parse, table

from scanloom.cards.card import ModelCard
from scanloom.core import ComputeOptions, StepTimer, Volume
from scanloom.inference import transfers
from scanloom.inference.predictor import TorchPredictor
from support.fake_cuda import HostThreads, StandIn, Stream, Timeline, stand_in

WINDOW_S = 0.154 / 27
"""Seconds of a 128^3 window of nnU-Net's 3d_fullres on an H100: 30 % of its peak in half."""
MEMORY_BYTES_PER_S, BUS_BYTES_PER_S = 2.4e12, 50e9
"""Of an H100: its memory, and the bus from page-locked memory, as the product copies."""
LEAST_S = 4e-6
"""Seconds of the smallest kernel."""
NETWORK_LAUNCHES = 150
"""Kernels of such a network."""


M_MMAP_MAX, M_TRIM_THRESHOLD, MOST_MAPS = -4, -1, 65536


def seconds(name: str, size: int) -> float:
    """Return the seconds of an operation on the device; of the network, for `size` windows."""
    if name == "network":
        return WINDOW_S * size
    rate = BUS_BYTES_PER_S if name.startswith("copy to") else MEMORY_BYTES_PER_S
    return max(size / rate, LEAST_S)


class Clock(Timeline):
    """A timeline that tells the times before, in and after the network.

    Attributes
    ----------
    first, last : float
        When the network began, and when it ended.
    """

    def __init__(self, libc: Any) -> None:
        super().__init__(seconds)
        self._libc, self._in_network, self.first, self.last = libc, False, 0.0, 0.0
        self.windows = 0

    def charge(self, name: str, size: int, stream: Stream) -> None:
        """Let a stream take an operation."""
        if not self._in_network:
            super().charge(name, size, stream)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock; memory that the stand-in frees is kept, as a device keeps it.

        Otherwise the host would spend time to return it. Arrays of the host are made as ever.
        """
        with super().stopped():
            self._libc.mallopt(M_MMAP_MAX, 0)
            yield
            self._libc.mallopt(M_MMAP_MAX, MOST_MAPS)

    def network(self, channels: int, windows: torch.Tensor) -> torch.Tensor:
        """Return a network's scores of windows, all 0, after its time."""
        stream = torch.cuda.current_stream()
        with self.stopped():
            self.spend(NETWORK_LAUNCHES * self.LAUNCH)
            self.first = self.first or max(self.now(), stream.free_at)
            self._in_network = True
            scores = windows.new_zeros((len(windows), channels, *windows.shape[2:]))
            self._in_network = False
            super().charge("network", len(windows), stream)
            self.last, self.windows = stream.free_at, self.windows + len(windows)
        return scores


def entry_of(fake: StandIn, libc: Any) -> float:
    """Return the seconds that the stand-in adds to each call before it can stop the clock."""
    fake.start(clock := Clock(libc))
    values, calls, best = torch.zeros(8, device="cuda"), 100, 1.0
    for _ in range(40):
        start = clock.now()
        for _ in range(calls):
            values.add_(1)
        best = min(best, (clock.now() - start) / calls)
    return best - Clock.LAUNCH


def copy_rate() -> float:
    """Return the bytes a second at which a thread copies slabs in memory, as the product does."""
    slabs = [np.ones(transfers.SLAB_BYTES, np.uint8) for _ in range(2 * 16)]
    best = 0.0
    for _ in range(9):
        start = time.thread_time()
        for into, source in zip(slabs[::2], slabs[1::2], strict=True):
            np.copyto(into, source)
        best = max(best, 16 * transfers.SLAB_BYTES / (time.thread_time() - start))
    return best


def study(
    fake: StandIn, card: ModelCard, volume: Volume, paces: dict[str, float], options: Any
) -> Iterator[list[object]]:
    """Yield rows: the seconds of a study and of its parts, beside those of its network."""
    libc = ctypes.CDLL(None)
    Clock.entry = 0.0
    Clock.entry = entry_of(fake, libc)
    fake.start(Clock(libc))
    predictor = TorchPredictor(card, ComputeOptions(engine="torch"))
    loaded = predictor.networks.load(predictor.precision.dtype)
    channels = card.n_outputs if loaded.head is None else loaded.head.weight.shape[1]
    loaded.network.forward = lambda windows: fake.timeline.network(channels, windows)
    predictor.predict(volume)  # what is kept for later scans is made now
    network = WINDOW_S * 27
    for host, pace in paces.items():
        results = []
        for _ in range(options.runs):
            clock = Clock(libc)
            fake.start(clock)
            spent: dict[str, float] = defaultdict(float)

            @contextmanager
            def mark(name: str, clock: Clock = clock, spent: Any = spent) -> Iterator[None]:
                start = clock.now()
                yield
                spent[name] += clock.now() - start

            with pytest.MonkeyPatch.context() as patch:
                threads = partial(HostThreads, clock, pace)
                patch.setattr(transfers, "ThreadPoolExecutor", lambda *_, new=threads: new())
                start = clock.now()
                predictor.predict(volume, StepTimer(mark=mark))
                clock.wait()
                end = clock.now()
            parts = clock.first - start, clock.last - clock.first - network, end - clock.last
            results.append((end - start, clock.busy, parts, spent))
        whole, busy, parts, spent = min(results, key=lambda each: each[0])
        steps = ", ".join(f"{name} {1000 * each:.1f}" for name, each in spent.items())
        yield [
            card.name,
            host,
            f"{whole / network:.2f}",
            "<= 1.15",
            *(f"{1000 * each:.1f}" for each in (whole, busy, *parts)),
            steps,
        ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rate", type=float, default=20, help="GB/s of another host's copies")
    options = parse(parser, runs=1)
    # As wide as nnU-Net's where it meets the scores; what lies between is not computed
    size = SMALLEST if options.smallest else replace(FULL, filters=(32, 8, 8), classes=(26,))
    print(machine("scanloom", "torch"), "\n")
    libc = ctypes.CDLL(None)
    libc.mallopt(M_TRIM_THRESHOLD, -1)
    alone = copy_rate()
    paces = {
        f"a thread here, {alone / 1e9:.1f} GB/s": 1.0,
        f"{options.rate:g} GB/s": alone / (options.rate * 1e9),
    }
    with ExitStack() as stack:
        fake = stack.enter_context(stand_in())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        volume = size.volume()
        cards = [
            nnunet_card(folder / "nnunet", size.classes[0], size, ()),
            monai_card(folder, size.classes[0], size),
        ]
        rows = [row for card in cards for row in study(fake, card, volume, paces, options)]
    parts = ["before the network", "in it, beside it", "after it"]
    head = [
        "model",
        "copies in memory",
        "study / network",
        "aim",
        "study, ms",
        "device, ms",
        *parts,
    ]
    print(table([*head, "steps"], rows))


if __name__ == "__main__":
    main()
