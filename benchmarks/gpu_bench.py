"""What a CUDA device gives: the way back, a study end to end, precisions, memory, energy.

Prints a table of what was asked and what was found, and writes it as JSON where --out says. Scans
and scores are drawn; weights are random but for the model that ships.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests"))

from meter import parse, unavailable
from phantom import draw_labels, draw_scan, draw_scores, phantom

from scanloom import load_volume
from scanloom.cards.card import Argmax, ModelCard, NetworkGrid, NetworkSpec, Window
from scanloom.convert.store import find_model
from scanloom.core import ComputeOptions, Grid, ScanError, StepTimer, Volume
from scanloom.engine.machine.devices import EnergyMeter
from scanloom.inference.device import choose_batch, deterministic
from scanloom.inference.geometry import plan_grid
from scanloom.inference.predictor import TorchPredictor
from scanloom.inference.resampling.resample import LinearWeights
from scanloom.inference.restore import cuda
from scanloom.inference.restore.restorers import decide_torch
from scanloom.inference.sliding_window import window_size, window_starts
from support import model_cards

ROOT = Path(__file__).resolve().parents[1]
SHAPE, SPACING = (512, 512, 300), (0.7, 0.7, 1.0)  # mm
NETWORK = (239, 239, 200)  # voxels of 1.5 mm
RUNS = 7


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    found: float | None
    unit: str
    target: float | None = None
    most: bool = True  # whether the target is the most it may be, or the least

    @property
    def verdict(self) -> str:
        """Whether the target was met."""
        if self.target is None or self.found is None:
            return ""
        met = self.found <= self.target if self.most else self.found >= self.target
        return "met" if met else "MISSED"

    def __str__(self) -> str:
        found = "-" if self.found is None else f"{self.found:.4g} {self.unit}"
        sign = "<=" if self.most else ">="
        target = "" if self.target is None else f"{sign} {self.target:g} {self.unit}"
        return f"| {self.what} | {found} | {target} | {self.verdict} |"


def on_device(work: Callable[[], Any]) -> float:
    """Return the median milliseconds the device takes, by its own events."""
    work()
    times = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def on_clock(work: Callable[[], Any]) -> float:
    """Return the median milliseconds until the device has finished."""
    work()
    times = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def restoring(classes: int, device: torch.device) -> Iterator[Row]:
    """Time the way back from a network's grid, with and without the copy to the host."""
    extent = tuple(n * s for n, s in zip(SHAPE, SPACING, strict=True))
    drawn = draw_scores(
        phantom((extent[0], extent[1], extent[2]), classes - 1), (1.5,) * 3, NETWORK
    )
    scores = torch.from_numpy(drawn).to(device)
    sizes, shape = (scores.shape[0], *scores.shape[2:]), (SHAPE[2], SHAPE[0], SHAPE[1])
    s, j, i = (np.linspace(0, n - 1, m) for n, m in zip(sizes, shape, strict=True))
    name = f"restore, {classes} classes to {SHAPE[0]}x{SHAPE[1]}x{SHAPE[2]}"
    host = torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
    if cuda.available(device).usable:
        where = cuda.taps((s, j, i), sizes, device)
        here = torch.empty(shape, dtype=torch.uint8, device=device)
        target = 20.0 if classes == 25 else None
        kernel = on_device(lambda: cuda.decide(scores, where, Argmax(), [here]))
        yield Row(f"{name}: kernels", kernel, "ms", target)
        whole = on_clock(lambda: cuda.label(scores, (s, j, i), Argmax(), [host]))
        yield Row(f"{name}: and labels on the host", whole, "ms", target)
    found = torch.empty(shape, dtype=torch.uint8, device=device)
    beside = [LinearWeights(j, sizes[1], device), LinearWeights(i, sizes[2], device)]

    def plain() -> None:
        for first in range(0, shape[0], 32):
            at = slice(first, first + 32)
            found[at] = decide_torch(
                scores, [LinearWeights(s[at], sizes[0], device), *beside], Argmax()
            )[0]

    yield Row(f"{name}: plain torch", on_device(plain), "ms")
    if cuda.available(device).usable:
        equal = 100 * float((found == here).float().mean(dtype=torch.float64))
        yield Row(f"{name}: kernels equal plain torch", equal, "%", 99.99, most=False)


def drawn_scan() -> Volume:
    """Return a drawn CT of the size that all figures are for."""
    extent = tuple(n * s for n, s in zip(SHAPE, SPACING, strict=True))
    drawn = phantom((extent[0], extent[1], extent[2]), 25)
    array = np.asfortranarray(draw_scan(drawn, draw_labels(drawn, SPACING, SHAPE)))
    return Volume(array, Grid(SHAPE, np.diag([*SPACING, 1.0])), "HU", "CT")


def cards(folder: Path) -> Iterator[tuple[str, ModelCard]]:
    """Yield the model that ships, and one of the size of a network for 24 structures."""
    try:
        yield "ct_tissue", find_model("ct_tissue")
    except ScanError:
        print("ct_tissue is not here", file=sys.stderr)
    from monai.networks.nets.segresnet import SegResNet
    from safetensors.torch import save_file

    args = {"spatial_dims": 3, "in_channels": 1, "out_channels": 25, "init_filters": 32}
    torch.manual_seed(0)
    weights = folder / "model.safetensors"
    save_file(SegResNet(**args).state_dict(), weights)
    yield (
        "SegResNet of 25 classes at 1.5 mm",
        model_cards.card(
            weights,
            network=NetworkSpec("SegResNet", args),
            grid=NetworkGrid("RAS", (1.5, 1.5, 1.5)),
            window=Window((96, 96, 96), 0.25),
            structures=model_cards.structures(24),
            activation=None,
        ),
    )


def bare_network(predictor: TorchPredictor, volume: Volume) -> float:
    """Return the milliseconds of the network alone, over as many windows as the scan has."""
    plan, window = plan_grid(volume.grid, predictor.card.grid), predictor.card.window
    size = window_size(window, plan.network.shape)
    shape = (max(n, m) for n, m in zip(plan.network.shape, size, strict=True))
    starts = [window_starts(n, m, window.overlap) for n, m in zip(shape, size, strict=True)]
    count = len(list(itertools.product(*starts)))
    device, dtype = predictor.device.device, predictor.precision.dtype
    at_once = choose_batch(size, device, dtype)
    network = predictor.networks.load(dtype).network
    batch = torch.randn((at_once, 1, *size), device=device, dtype=dtype)

    def work() -> None:
        for first in range(0, count, at_once):
            network(batch[: count - first])

    with deterministic(), torch.inference_mode():
        return on_clock(work)


def end_to_end(name: str, card: ModelCard, volume: Volume) -> Iterator[Row]:
    """Compare a study in memory with its network alone; say memory and energy of each precision."""
    for precision in ("half", "float32"):
        torch.cuda.empty_cache()
        predictor = TorchPredictor(card, device="cuda", compute=ComputeOptions(precision=precision))
        torch.cuda.reset_peak_memory_stats()
        whole = on_clock(lambda: predictor.predict(volume))  # noqa: B023 used at once
        peak = torch.cuda.max_memory_allocated() / 2**30
        meter, clock = EnergyMeter(), StepTimer()
        predictor.predict(volume, clock)
        joules = (meter.joules() or {}).get("gpu")
        bare = bare_network(predictor, volume)
        label = f"{name}, {precision}"
        yield Row(f"{label}: a study in memory", whole, "ms")
        yield Row(f"{label}: the network alone", bare, "ms")
        target = 1.5 if precision == "half" else None
        yield Row(f"{label}: study / network", whole / bare, "x", target)
        yield Row(f"{label}: device memory", peak, "GiB")
        yield Row(f"{label}: energy of the device", joules, "J")
        print(f"{label}: {clock.steps}", file=sys.stderr)


def agreement(sample: Path) -> Iterator[Row]:
    """Compare labels of the sample study: CUDA in both precisions with the CPU."""
    try:
        card = find_model("ct_tissue")
    except ScanError:
        return
    volume = load_volume(sample, modality="CT")
    theirs = (
        TorchPredictor(card, device="cpu", compute=ComputeOptions(precision="float32"))
        .predict(volume)
        .layers[0]
        .labels
    )
    least = 1000 / float(np.prod(volume.grid.spacing))
    for precision in ("half", "float32"):
        predictor = TorchPredictor(card, device="cuda", compute=ComputeOptions(precision=precision))
        ours = predictor.predict(volume).layers[0].labels
        equal = 100 * float(np.mean(ours == theirs))
        yield Row(f"sample study, {precision}: voxels as on the CPU", equal, "%", 99.9, most=False)
        dices = []
        for structure in card.structures:
            one, two = ours == structure.number, theirs == structure.number
            if two.sum() > least:
                dices.append(2 * float((one & two).sum()) / float(one.sum() + two.sum()))
        name = f"sample study, {precision}: least Dice above 1 ml"
        yield Row(name, min(dices, default=None), "", 0.998, most=False)


def rows(device: torch.device) -> Iterator[Row]:
    """Yield the whole table."""
    for classes in (25, 118):
        yield from restoring(classes, device)
    volume = drawn_scan()
    with tempfile.TemporaryDirectory() as folder:
        for name, card in cards(Path(folder)):
            yield from end_to_end(name, card, volume)
    yield from agreement(ROOT / "data" / "torso_ct.nii.gz")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file")
    out = parse(parser).out
    if not torch.cuda.is_available():
        unavailable("a CUDA device: nothing was measured")
    device = torch.device("cuda", 0)
    machine = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "kernels": cuda.available(device).why,
    }
    print(machine)
    print("| what | found | target | |\n|-|-|-|-|")
    table = []
    for row in rows(device):
        table.append(row)
        print(row, flush=True)
        if out:
            found = [{**asdict(row), "verdict": row.verdict} for row in table]
            out.write_text(json.dumps({"machine": machine, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
