"""Speed of a CUDA device: copies, a network of nnU-Net's size, studies end to end, restoring.

Prints a table of measured values, beside those expected on paper for an H100 and the aims, and adds
them to the JSON file of --out. Scans and scores are drawn; weights are random but for the model
that ships.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests"))

from meter import parse, unavailable
from phantom import draw_labels, draw_scan, draw_scores, phantom

from scanloom import load_volume
from scanloom.cards.card import Argmax, ModelCard, NetworkGrid, NetworkSpec, Window
from scanloom.cards.check import check_scan
from scanloom.convert.conversion import load_card
from scanloom.convert.store import find_model
from scanloom.core import ComputeOptions, Grid, ScanError, StepTimer, Volume
from scanloom.engine.machine.devices import EnergyMeter
from scanloom.inference.device import own_settings
from scanloom.inference.engines.fused_engine import fuse
from scanloom.inference.engines.selection import ENGINES
from scanloom.inference.geometry import NetworkPlan, plan_grid
from scanloom.inference.predictor import TorchPredictor
from scanloom.inference.resampling.resample import LinearWeights
from scanloom.inference.restore import cuda
from scanloom.inference.restore.restorers import ScoreRestorer, decide_torch
from scanloom.inference.transfers import ArrivingTensor, LabelCopies, StagedArray
from support import model_cards, nnunet_folders

ROOT = Path(__file__).resolve().parents[1]
SPACING = (0.7, 0.7, 1.0)  # mm
GRID_MM = 1.5
CALM, PROMPT = 5e-3, 5e-4  # s: Python's interval between switches of threads, and a tenth of it


@dataclass(frozen=True)
class Size:
    """Sizes of the scan, of the networks and of the measurement."""

    scan: tuple[int, int, int]
    window: int
    filters: tuple[int, ...]
    classes: tuple[int, ...]
    batches: tuple[int, ...]
    runs: int

    @property
    def extent(self) -> tuple[float, float, float]:
        """Field of view in mm."""
        x, y, z = (n * mm for n, mm in zip(self.scan, SPACING, strict=True))
        return x, y, z

    @property
    def network(self) -> tuple[int, int, int]:
        """Shape of the scan at `GRID_MM`."""
        x, y, z = (round(mm / GRID_MM) for mm in self.extent)
        return x, y, z

    def volume(self) -> Volume:
        """Return a drawn CT."""
        drawn = phantom(self.extent, 25)
        array = np.asfortranarray(draw_scan(drawn, draw_labels(drawn, SPACING, self.scan)))
        return Volume(array, Grid(self.scan, np.diag([*SPACING, 1.0])), "HU", "CT")


FULL = Size((512, 512, 300), 128, (32, 64, 128, 256, 320, 320), (26, 118), (1, 2, 4, 8, 16), 5)
SMALLEST = Size((48, 48, 36), 16, (4, 8, 8), (4,), (1, 2), 1)


@dataclass(frozen=True)
class Row:
    """One line of the table; `expected` is on paper for an H100, `aim` the most it may be."""

    subject: str
    value: float | None
    unit: str = "ms"
    expected: str = ""
    aim: float | None = None
    least: bool = False  # whether the aim is the least it may be

    @property
    def verdict(self) -> str:
        """Whether the aim was met."""
        if self.aim is None or self.value is None:
            return ""
        met = self.value >= self.aim if self.least else self.value <= self.aim
        return "met" if met else "MISSED"

    def __str__(self) -> str:
        value = "-" if self.value is None else f"{self.value:.4g} {self.unit}"
        aim = "" if self.aim is None else f"{'>=' if self.least else '<='} {self.aim:g}"
        return f"| {self.subject} | {value} | {self.expected} | {aim} | {self.verdict} |"


@dataclass(frozen=True)
class Bench:
    """A CUDA device, or another for a trial, and the sizes of its measurement."""

    device: torch.device
    size: Size

    @property
    def half(self) -> torch.dtype:
        """The type in which networks calculate."""
        return torch.float16 if self.device.type == "cuda" else torch.float32

    @property
    def compiled_restore(self) -> bool:
        """Whether kernels restore labels; a trial does not compile them for a CPU."""
        return self.device.type == "cuda" or self.size is FULL

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def milliseconds(self, work: Callable[[], Any], most: int = 5) -> float:
        """Return the median milliseconds until the device has finished, after a run to warm up."""
        work()
        times = []
        for _ in range(min(most, self.size.runs)):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            times.append(1000 * (time.perf_counter() - start))
        return statistics.median(times)

    def predictor(self, card: ModelCard, precision: str, engine: str = "torch") -> TorchPredictor:
        """Return a model on the device."""
        compute = ComputeOptions(
            precision=precision, engine=engine, compiled_restore=self.compiled_restore
        )
        return TorchPredictor(card, compute, device=self.device.type)


def copies(bench: Bench) -> Iterator[Row]:
    """Time what crosses the bus, from and to the kinds of memory that a host has."""
    stored = np.zeros(bench.size.scan, np.int16, order="F").T
    stored += 1  # pages that exist
    scan = torch.from_numpy(stored)
    yield Row("the scan, copied on the host", bench.milliseconds(lambda: stored.copy()), "ms", "15")
    pageable = bench.milliseconds(lambda: scan.to(bench.device, copy=True))
    yield Row("the scan to the device, from pageable memory", pageable, "ms", "15")
    labels = torch.ones(stored.shape, dtype=torch.uint8, device=bench.device)

    def into_new_pages() -> None:  # as the product's restorers allocate label maps
        torch.from_numpy(np.zeros(bench.size.scan, np.uint8, order="F").T).copy_(labels)

    yield Row("labels to new pages", bench.milliseconds(into_new_pages), "ms", "15 to 25")
    used = torch.ones(stored.shape, dtype=torch.uint8)
    yield Row("labels to pages in use", bench.milliseconds(lambda: used.copy_(labels)))
    if bench.device.type != "cuda":
        return
    locked = scan.pin_memory()
    page_locked = bench.milliseconds(lambda: locked.to(bench.device, non_blocking=True))
    yield Row("the scan to the device, from page-locked memory", page_locked, "ms", "3")
    target = used.pin_memory()
    page_locked = bench.milliseconds(lambda: target.copy_(labels, non_blocking=True))
    yield Row("labels to page-locked memory", page_locked, "ms", "2")

    def sent() -> None:
        ArrivingTensor(StagedArray(stored), bench.device).until()

    yield Row("the scan to the device, by scanloom", bench.milliseconds(sent), "ms", "8 to 16")

    def returned() -> None:
        into, on_their_way = np.zeros(bench.size.scan, np.uint8, order="F").T, LabelCopies()
        on_their_way.prepare(into)
        on_their_way.add(into, labels)
        on_their_way.wait()

    yield Row("labels to new pages, by scanloom", bench.milliseconds(returned), "ms", "8 to 20")


def plain_unet(classes: int, filters: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments of a DynUNet of nnU-Net's size."""
    depth = len(filters)
    return {
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": classes,
        "kernel_size": [3] * depth,
        "strides": [1] + [2] * (depth - 1),
        "upsample_kernel_size": [2] * (depth - 1),
        "filters": list(filters),
        "norm_name": ["INSTANCE", {"affine": True}],
    }


def layouts(bench: Bench) -> Iterator[Row]:
    """Time a network of nnU-Net's size: memory layouts, cuDNN's search, batches, CUDA graphs."""
    from monai.networks.nets.dynunet import DynUNet

    side, half = bench.size.window, bench.half
    for classes in bench.size.classes:
        torch.manual_seed(0)
        network = DynUNet(**plain_unet(classes, bench.size.filters)).eval().to(bench.device, half)
        batches = bench.size.batches if classes < 100 else bench.size.batches[::2]
        for layout, name in (
            (torch.contiguous_format, "NCDHW"),
            (torch.channels_last_3d, "NDHWC"),
        ):
            network = network.to(memory_format=layout)
            for search in (False, True):
                for batch in batches:
                    shape = (batch, 1, side, side, side)
                    windows = torch.randn(shape, device=bench.device, dtype=half)
                    windows = windows.contiguous(memory_format=layout)
                    label = f"{classes} classes, {name}, cuDNN {'searches' if search else 'as is'}"
                    yield from _passes(
                        bench, network, windows, f"{label}, {batch} at once: a window", search
                    )
        del network


def _passes(
    bench: Bench, network: nn.Module, windows: torch.Tensor, label: str, search: bool
) -> Iterator[Row]:
    """Time a pass of a network by window, and as a CUDA graph."""
    batch = len(windows)
    flags = torch.backends.cudnn.flags(
        enabled=True, benchmark=search, deterministic=not search, allow_tf32=False
    )
    with torch.inference_mode(), flags:
        alone = bench.milliseconds(lambda: network(windows)) / batch
        yield Row(label, alone, "ms", "4.7 to 7.7")
        if bench.device.type == "cuda" and not search and batch in (1, 16):
            graph, replayed = torch.cuda.CUDAGraph(), None
            try:
                with torch.cuda.device(bench.device), torch.cuda.graph(graph):
                    network(windows)
                replayed = bench.milliseconds(graph.replay) / batch
            except RuntimeError as exc:
                print(f"{label}: no CUDA graph ({type(exc).__name__})", file=sys.stderr)
            yield Row(f"{label}, as a CUDA graph", replayed)


def nnunet_card(folder: Path, classes: int, size: Size, mirror: tuple[int, ...]) -> ModelCard:
    """Return a model of nnU-Net's 3d_fullres: crop, cubic resampling, sums in half precision."""
    depth = len(size.filters)
    architecture = json.loads(json.dumps(nnunet_folders.ARCHITECTURE))
    architecture["arch_kwargs"] |= {
        "n_stages": depth,
        "features_per_stage": list(size.filters),
        "kernel_sizes": [[3] * 3] * depth,
        "strides": [[1] * 3] + [[2] * 3] * (depth - 1),
        "n_conv_per_stage": [2] * depth,
        "n_conv_per_stage_decoder": [2] * (depth - 1),
    }
    plans = nnunet_folders.plans(
        patch_size=[size.window] * 3, spacing=[GRID_MM] * 3, architecture=architecture
    )
    labels = {"background": 0, **{f"part {n}": n for n in range(1, classes)}}
    dataset = {**nnunet_folders.DATASET, "labels": labels}
    model = nnunet_folders.write_model(
        folder, plans, dataset, inference_allowed_mirroring_axes=mirror
    )
    return load_card(model)


def monai_card(folder: Path, classes: int, size: Size) -> ModelCard:
    """Return a model of MONAI with a network of the same size: float32 sums, a detached layer."""
    from monai.networks.nets.dynunet import DynUNet

    args = plain_unet(classes, size.filters)
    torch.manual_seed(0)
    file = folder / "model.pt"
    torch.save(DynUNet(**args).state_dict(), file)
    card = model_cards.card(
        file,
        network=NetworkSpec("DynUNet", args),
        grid=NetworkGrid("RAS", (GRID_MM,) * 3),
        window=Window((size.window,) * 3, 0.5),
        structures=model_cards.structures(classes - 1),
        activation=None,
    )
    return replace(card, weights=model_cards.converted(file))


def studies(bench: Bench) -> Iterator[Row]:
    """Compare studies of 26 and 118 classes with their bare network, and tell the host's share."""
    volume, (few, most) = bench.size.volume(), (bench.size.classes[0], bench.size.classes[-1])
    with tempfile.TemporaryDirectory() as folder:
        card = nnunet_card(Path(folder) / "plain", few, bench.size, ())
        yield Row("host: the check of the scan", _once(partial(check_scan, volume, card)))
        yield from study(bench, f"nnU-Net, {few} classes", card, volume, "1.4 to 2.2")
        monai = monai_card(Path(folder), few, bench.size)
        yield from study(bench, f"MONAI, {few} classes", monai, volume, "1.4 to 1.6")
        if most != few:
            large = nnunet_card(Path(folder) / "large", most, bench.size, ())
            yield from study(bench, f"nnU-Net, {most} classes", large, volume, "1.4 to 2.2")
        axes = (0, 1, 2) if bench.size is FULL else (0,)
        flips = nnunet_card(Path(folder) / "flips", few, bench.size, axes)
        name = f"nnU-Net, {few} classes, {1 << len(axes)} flips"
        yield from study(bench, name, flips, volume, "1.3")
        yield from beside_python(bench, f"nnU-Net, {few} classes", card, volume)


def _once(work: Callable[[], Any]) -> float:
    """Return the milliseconds of the host."""
    start = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - start)


def study(
    bench: Bench, name: str, card: ModelCard, volume: Volume, ratio: str = ""
) -> Iterator[Row]:
    """Compare a study in memory with its network alone; memory, energy, other engines."""
    cuda_device = bench.device.type == "cuda"
    if cuda_device:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    predictor = bench.predictor(card, "half" if cuda_device else "float32")
    whole = bench.milliseconds(lambda: predictor.predict(volume), 3)
    yield Row(f"{name}: a study in memory", whole)
    if cuda_device:
        yield Row(f"{name}: device memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    bare = bare_network(bench, predictor, volume)
    yield Row(f"{name}: its network alone", bare)
    yield Row(f"{name}: study / network", whole / bare, "x", ratio, 1.15)
    meter, clock = EnergyMeter(), StepTimer()
    predictor.predict(volume, clock)
    yield Row(f"{name}: energy of the device", (meter.joules() or {}).get("gpu"), "J")
    for step, spent in clock.steps.items():
        yield Row(f"{name}: step {step}", 1000 * spent.wall)
    if cuda_device:
        used = device_use(lambda: predictor.predict(volume))
        if used is not None:
            yield Row(f"{name}: share in which the device is busy", 100 * used.busy / whole, "%")
            yield Row(f"{name}: the device waits for its first work", used.first)
            yield Row(f"{name}: the device waits later on", used.between)
            yield Row(f"{name}: the host after the device's last work", used.last)
        if ENGINES["fused"].version() is not None:
            yield from fused_network(bench, name, predictor)
        del predictor
        for engine in ("cudagraphs", "fused"):
            if ENGINES[engine].version() is None:
                continue
            other = bench.predictor(card, "half", engine)
            spent = bench.milliseconds(partial(other.predict, volume), 3)
            yield Row(f"{name}: a study with the engine {engine}", spent)
            print(f"{name}: {other.engine.why}; {other.engine.measured}", file=sys.stderr)
            del other


def bare_network(bench: Bench, predictor: TorchPredictor, volume: Volume) -> float:
    """Return the milliseconds of the network alone, over the very batches of a study."""
    network = predictor.networks.load(predictor.precision.dtype).network
    batches: list[torch.Size] = []
    hook = network.register_forward_pre_hook(lambda _, inputs: batches.append(inputs[0].shape))
    predictor.predict(volume)
    hook.remove()
    most = max(batches, key=lambda shape: shape[0])
    windows = torch.randn(most, device=bench.device, dtype=predictor.precision.dtype)

    def work() -> None:
        for shape in batches:
            network(windows[: shape[0]])

    with own_settings(), torch.inference_mode():
        return bench.milliseconds(work, 3)


def fused_network(bench: Bench, name: str, predictor: TorchPredictor) -> Iterator[Row]:
    """Time a network by window, as it is and with fused norms."""
    network = predictor.networks.load(predictor.precision.dtype).network
    fused = copy.deepcopy(network)
    fuse(fused)
    fused.to(bench.device)
    for batch in (1, 9):
        shape = (batch, 1, *(bench.size.window,) * 3)
        windows = torch.randn(shape, device=bench.device, dtype=predictor.precision.dtype)
        for kind, run in (("as it is", network), ("fused", fused)):
            with torch.inference_mode(), own_settings():
                spent = bench.milliseconds(partial(run, windows)) / batch
            yield Row(f"{name}: its network {kind}, {batch} at once: a window", spent)


@dataclass(frozen=True)
class DeviceUse:
    """Milliseconds of some work in which a device is busy, and in which it waits."""

    busy: float
    first: float
    between: float
    last: float


def device_use(work: Callable[[], Any]) -> DeviceUse | None:
    """Return how kernels and copies fill the time of some work; None without a profiler."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

    if ProfilerActivity.CUDA not in supported_activities():  # a build without CUPTI
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions warn of options that others lack
        try:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                with record_function("the work"):
                    work()
                torch.cuda.synchronize()
        except (AssertionError, RuntimeError) as exc:  # a container without CUPTI
            print(f"torch's profiler: {type(exc).__name__}: {exc}", file=sys.stderr)
            return None
    spans = [(each.time_range.start, each.time_range.end, each) for each in profiler.events()]
    whole = next(e for _, _, e in spans if e.name == "the work" and e.device_type == DeviceType.CPU)
    start, stop = whole.time_range.start, whole.time_range.end
    busy, end, first = 0.0, start, None
    for begun, ended, each in sorted(spans, key=lambda span: span[:2]):
        if each.device_type == DeviceType.CUDA and each.name != "the work":
            first = begun - start if first is None else first
            busy += max(0.0, ended - max(begun, end))
            end = max(end, ended)
    first = stop - start if first is None else first
    between = end - start - first - busy
    return DeviceUse(busy / 1000, first / 1000, between / 1000, (stop - end) / 1000)


def beside_python(bench: Bench, name: str, card: ModelCard, volume: Volume) -> Iterator[Row]:
    """Time a study beside a thread of pure Python, as readers and writers of other cases run."""
    cuda_device = bench.device.type == "cuda"
    for engine in ("torch", "cudagraphs") if cuda_device else ("torch",):
        predictor = bench.predictor(card, "half" if cuda_device else "float32", engine)
        predictor.predict(volume)
        for interval in (CALM, PROMPT, PROMPT / 10):
            with busy_thread(interval):
                beside = bench.milliseconds(partial(predictor.predict, volume), 3)
            each = f"switches each {1000 * interval:g} ms, {engine}"
            yield Row(f"{name}: beside a Python thread, {each}", beside)


@contextmanager
def busy_thread(interval: float) -> Iterator[None]:
    """Run a thread that never lets go of the interpreter by itself, in the block."""
    stop, before = threading.Event(), sys.getswitchinterval()

    def count() -> None:
        while not stop.is_set():
            # bytecodes, between which threads can change: `sum` of a range would be one of 0.3 ms
            x = 0
            for n in range(10_000):
                x = x * 3 % 7 + n

    thread = threading.Thread(target=count)
    sys.setswitchinterval(interval)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)


def restoring(bench: Bench) -> Iterator[Row]:
    """Time the restoring from a network's grid into the label maps that the product allocates."""
    grid = Grid(bench.size.scan, np.diag([*SPACING, 1.0]))
    plan = plan_grid(grid, NetworkGrid("RAS", (GRID_MM,) * 3))
    for classes in bench.size.classes:
        yield from restored(bench, plan, classes)


def restored(bench: Bench, plan: NetworkPlan, classes: int) -> Iterator[Row]:
    """Time the restoring of some classes, by the product, its kernels and plain torch."""
    scores = scores_on_device(bench, classes, plan.network.shape, plan.network_axis(plan.lead))
    name, few = f"restore, {classes} classes", classes < 100
    aim = 20.0 if few else None

    def restore() -> list[Any]:
        restorer = ScoreRestorer(plan, Argmax(), classes, fused=bench.compiled_restore)
        restorer.add_scores(scores, 0)
        return restorer.finish(lambda decided: decided)

    whole = bench.milliseconds(restore)
    yield Row(f"{name}: labels in a new array on the host", whole, "ms", "18 to 30", aim)
    sizes, shape = (scores.shape[0], *scores.shape[2:]), bench.size.scan[::-1]
    at = [np.linspace(0, n - 1, m) for n, m in zip(sizes, shape, strict=True)]
    labels = torch.empty(shape, dtype=torch.uint8, device=bench.device)
    usable = cuda.available(bench.device, classes)
    print(f"{name}: {usable.why}", file=sys.stderr)
    if usable.usable:
        where = cuda.taps((at[0], at[1], at[2]), sizes, bench.device)
        here = torch.empty_like(labels)
        kernels = bench.milliseconds(lambda: cuda.decide(scores, where, Argmax(), [here]))
        yield Row(f"{name}: kernels", kernels, "ms", "3 to 5" if few else "10 to 15", aim)
    rows, columns = (LinearWeights(at[n], sizes[n], bench.device) for n in (1, 2))

    def plain() -> None:
        for first in range(0, shape[0], 32):
            slab = slice(first, first + 32)
            along = LinearWeights(at[0][slab], sizes[0], bench.device)
            labels[slab] = decide_torch(scores, [along, rows, columns], Argmax())[0]

    yield Row(f"{name}: plain torch", bench.milliseconds(plain, 1))
    if usable.usable:
        equal = 100 * float((labels == here).float().mean(dtype=torch.float64))
        yield Row(f"{name}: kernels equal plain torch", equal, "%", "100", 99.99, least=True)


def scores_on_device(
    bench: Bench, classes: int, shape: tuple[int, int, int], axis: int
) -> torch.Tensor:
    """Return scores as planes across an axis, drawn at a quarter of the size and interpolated."""
    small = (max(2, shape[0] // 4), max(2, shape[1] // 4), max(2, shape[2] // 4))
    spacing = tuple(mm / n for mm, n in zip(bench.size.extent, small, strict=True))
    drawn = draw_scores(
        phantom(bench.size.extent, classes - 1), (spacing[0], spacing[1], spacing[2]), small
    )
    coarse = torch.from_numpy(drawn).to(bench.device, torch.float32)  # (Z, C, X, Y)
    planes = coarse.permute(1, 2, 3, 0)[:, None]  # class by class: all of them are gigabytes
    sizes = [shape[axis], classes, *(n for x, n in enumerate(shape) if x != axis)]
    scores = torch.empty(sizes, device=bench.device, dtype=torch.float16)
    for number, each in enumerate(planes):
        large = functional.interpolate(each[None], shape, mode="trilinear")[0, 0]
        scores[:, number] = large.movedim(axis, 0)
    return scores


def shipped(bench: Bench) -> Iterator[Row]:
    """Measure the model that ships: a drawn CT, and the labels of the sample study."""
    try:
        card = find_model("ct_tissue")
    except ScanError:
        print("ct_tissue is not here", file=sys.stderr)
        return
    if bench.size is FULL:
        yield from study(bench, "ct_tissue", card, bench.size.volume())
    sample = load_volume(ROOT / "data" / "torso_ct.nii.gz", modality="CT")
    if bench.size is not FULL:  # a window
        whole = sample.grid
        shape = (min(whole.shape[0], 64), min(whole.shape[1], 64), min(whole.shape[2], 32))
        array = sample.array[: shape[0], : shape[1], : shape[2]]
        sample = replace(sample, array=array, grid=Grid(shape, whole.affine))
    cpu = TorchPredictor(card, ComputeOptions(precision="float32", engine="torch"), device="cpu")
    theirs = cpu.predict(sample).layers[0].labels
    least = 1000 / float(np.prod(sample.grid.spacing))
    both = bench.device.type == "cuda" and bench.size is FULL  # half takes a CPU half a minute
    for precision in ("half", "float32") if both else ("float32",):
        ours = bench.predictor(card, precision).predict(sample).layers[0].labels
        equal = 100 * float(np.mean(ours == theirs))
        yield Row(f"sample study, {precision}: as on the CPU", equal, "%", "100", 99.9, least=True)
        dices = []
        for structure in card.structures:
            mask, expected = ours == structure.number, theirs == structure.number
            if expected.sum() > least:
                dices.append(
                    2 * float((mask & expected).sum()) / float(mask.sum() + expected.sum())
                )
        name = f"sample study, {precision}: least Dice above 1 ml"
        yield Row(name, min(dices, default=None), "", "1", 0.998, least=True)


TOPICS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "copies": copies,
    "studies": studies,
    "network": layouts,
    "restore": restoring,
    "shipped": shipped,
}
"""The topics in the order of their importance. Each can run in a process of its own: after some
errors of CUDA a process can use no device any more."""


def measure(bench: Bench, topics: list[str], out: Path | None) -> bool:
    """Print the rows of some topics, add each to the file at once; return whether none failed."""
    torch_line = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    name = "the CPU, a trial of the script in small"
    if bench.device.type == "cuda":
        name = torch.cuda.get_device_name(bench.device)
    print(
        f"{name}, {torch_line}\n\n| what | measured | expected | aim | |\n|-|-|-|-|-|", flush=True
    )
    good = True
    for topic in topics:
        try:
            for measured in TOPICS[topic](bench):
                # A trial in small is compared with nothing
                row = measured if bench.size is FULL else replace(measured, expected="", aim=None)
                print(row, flush=True)
                if out:
                    _add(out, {"device": name, "torch": torch_line, "topic": topic, **asdict(row)})
        except Exception as exc:  # noqa: BLE001 - the other topics are worth measuring all the same
            good = False
            text = " ".join(str(exc).split())[:160]
            print(f"| {topic} | FAILED: {type(exc).__name__}: {text} | | | |", flush=True)
            traceback.print_exc()
    return good


def _add(out: Path, row: dict[str, Any]) -> None:
    """Add a row to a JSON file, which is complete at any time."""
    rows = json.loads(out.read_text()) if out.is_file() else []
    new = out.with_suffix(".new")
    new.write_text(json.dumps([*rows, row], indent=1))
    new.replace(out)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topic", choices=TOPICS, action="append", help="all, if left out")
    parser.add_argument("--out", type=Path, help="JSON file, to which rows are added")
    options = parse(parser)
    with ExitStack() as stack:
        if os.environ.get("SCANLOOM_STAND_IN") == "1":  # as for tests/gpu
            fake_cuda = importlib.import_module("support.fake_cuda")
            stack.enter_context(fake_cuda.stand_in())
        if not (options.smallest or torch.cuda.is_available()):
            unavailable("a CUDA device: nothing was measured")
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        bench = Bench(device, SMALLEST if options.smallest else FULL)
        return 0 if measure(bench, options.topic or list(TOPICS), options.out) else 1


if __name__ == "__main__":
    sys.exit(main())
