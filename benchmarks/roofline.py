"""The roofline of a network on this device: rates of its layers beside the device's peaks.

    python benchmarks/roofline.py [--network UNet] [--window 96] [--precision float32 bfloat16]
        [--device cpu|cuda] [--picture roofline.png]

A layer can reach the device's peak of operations only if it does enough of them for each byte that
it moves. The peaks are measured first: a product of large matrices, and a copy. Each layer of torch
is then timed alone, within a pass of the network (Williams et al., "Roofline", CACM 52(4), 2009,
10.1145/1498765.1498785). Prints for each kind of layer its share of the time, its rate, and that
rate's share of the lower peak; draws a dot for each layer.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from meter import machine, median, parse, table
from phantom import draw_labels, draw_scan, phantom
from real_network import HIGH, LOW, Size, network_args
from torch import nn

OUTPUTS, GRID_MM = 26, 1.5
NAMES = ("UNet", "SegResNet", "SwinUNETR", "UNETR", "DynUNet", "ResEnc UNet")
CHANNELS = (32, 64, 128, 256, 320)
COLOURS = ("#0b6e8a", "#d1495b", "#6a4c93", "#edae49", "#2e7d32", "#9aa3ab")
UNCHANGED = (nn.Identity, nn.Sequential, nn.Dropout, nn.Dropout2d, nn.Dropout3d)
"""Layers that return their input when a network is not trained."""


@dataclass(frozen=True)
class Peaks:
    """Peaks of a device: operations and bytes a second."""

    operations: float
    bytes: float

    def at(self, intensity: float) -> float:
        """Return the most operations a second for so many operations a byte."""
        return min(self.operations, intensity * self.bytes)


@dataclass(frozen=True)
class Layer:
    """A layer in one pass: its kind, its operations, the bytes that it moves, and its seconds."""

    kind: str
    operations: int
    bytes: int
    seconds: float

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.operations / self.bytes


def clock(device: torch.device) -> float:
    """Return the seconds of a clock, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def fastest(work: Callable[[], Any], device: torch.device, runs: int = 5) -> float:
    """Return the least seconds of several runs, after one to warm up."""
    work()
    seconds = []
    for _ in range(runs):
        start = clock(device)
        work()
        seconds.append(clock(device) - start)
    return min(seconds)


def network(name: str, window: int) -> nn.Module:
    """Return a network with random weights, which are the same each time."""
    from monai.networks import nets

    builders: dict[str, Callable[[], nn.Module]] = {
        "UNet": lambda: nets.UNet(3, 1, OUTPUTS, (16, 32, 64, 128, 256), (2,) * 4, num_res_units=2),
        "SegResNet": lambda: nets.SegResNet(3, 16, 1, OUTPUTS),
        "SwinUNETR": lambda: nets.SwinUNETR(1, OUTPUTS, feature_size=24),
        "UNETR": lambda: nets.UNETR(1, OUTPUTS, (window,) * 3, feature_size=16),
        "DynUNet": lambda: nets.DynUNet(
            *(3, 1, OUTPUTS, [3] * 5, [1] + [2] * 4, [2] * 4),
            filters=CHANNELS,
            norm_name=("INSTANCE", {"affine": True}),
            deep_supervision=True,
        ),
        "ResEnc UNet": _residual_encoder,
    }
    torch.manual_seed(0)
    return builders[name]().eval()


def _residual_encoder() -> nn.Module:
    """Return nnU-Net's network with residual blocks in its encoder."""
    from scanloom.inference.nets.unet import ResidualEncoderUNet

    arguments = network_args(OUTPUTS, Size(CHANNELS))
    arguments["plan"] |= {"encoder": [1, 3, 4, 6, 6], "decoder": [1] * 4}
    return ResidualEncoderUNet(**arguments)


def image(window: int) -> torch.Tensor:
    """Return a window of a drawn CT (1, 1, x, y, z), from 0 to 1."""
    drawn = phantom((window * GRID_MM,) * 3, OUTPUTS - 1)
    scan = draw_scan(drawn, draw_labels(drawn, (GRID_MM,) * 3, (window,) * 3)).astype(np.float32)
    scaled = (scan.clip(LOW, HIGH) - LOW) / (HIGH - LOW)
    return torch.from_numpy(np.ascontiguousarray(scaled))[None, None]


def measure_peaks(device: torch.device, dtype: torch.dtype, side: int) -> Peaks:
    """Measure the peaks by a product of square matrices of a side, and by a copy."""
    first, second = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    source = torch.zeros(16 * side * side, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return Peaks(
        2 * side**3 / fastest(lambda: first @ second, device),
        2 * source.nbytes / fastest(lambda: target.copy_(source), device),
    )


def operations(layer: nn.Module, source: torch.Tensor, output: torch.Tensor) -> int:
    """Return the operations of a layer; for other layers than products, one for each value."""
    weight = getattr(layer, "weight", None)
    if isinstance(layer, nn.ConvTranspose2d | nn.ConvTranspose3d):
        return 2 * source.numel() * weight.numel() // weight.shape[0]
    if isinstance(layer, nn.Conv2d | nn.Conv3d | nn.Linear):
        return 2 * output.numel() * weight.numel() // weight.shape[0]
    return output.numel()


@contextmanager
def timed_layers(net: nn.Module, recorded: list[Layer]) -> Iterator[None]:
    """Add each call of a layer in the block, in order."""
    starts: dict[nn.Module, float] = {}

    def begin(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        starts[layer] = clock(inputs[0].device)

    def end(layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seconds = clock(output.device) - starts[layer]
        moved = sum(tensor.nbytes for tensor in (*inputs, output, *layer.parameters()))
        count = operations(layer, inputs[0], output)
        recorded.append(Layer(type(layer).__name__, count, moved, seconds))

    layers = [m for m in net.modules() if not any(m.children()) and not isinstance(m, UNCHANGED)]
    hooks = [layer.register_forward_pre_hook(begin) for layer in layers]
    hooks += [layer.register_forward_hook(end) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def measure_layers(net: nn.Module, window: torch.Tensor, runs: int) -> list[Layer]:
    """Return each call of a layer, with the median of its seconds over several passes."""
    net(window)
    passes: list[list[Layer]] = [[] for _ in range(runs)]
    for recorded in passes:
        with timed_layers(net, recorded):
            net(window)
    return [
        replace(calls[0], seconds=median([call.seconds for call in calls]))
        for calls in zip(*passes, strict=True)
    ]


def kinds_of(layers: list[Layer]) -> dict[str, list[Layer]]:
    """Return the layers of each kind, the kind that takes longest first."""
    kinds: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        kinds[layer.kind].append(layer)
    return dict(sorted(kinds.items(), key=lambda item: -sum(x.seconds for x in item[1])))


def kind_table(layers: list[Layer], peaks: Peaks) -> str:
    """Return a table of the kinds of layers."""
    total, rows = sum(layer.seconds for layer in layers), []
    for kind, members in kinds_of(layers).items():
        seconds = sum(layer.seconds for layer in members)
        operations = sum(layer.operations for layer in members)
        moved = sum(layer.bytes for layer in members)
        ideal = sum(layer.operations / peaks.at(layer.intensity) for layer in members)
        rows.append(
            (
                *(
                    kind,
                    len(members),
                    f"{seconds / total:.0%}",
                    f"{operations / seconds / 1e9:.1f}",
                ),
                *(f"{moved / seconds / 1e9:.1f}", f"{operations / moved:.1f}"),
                f"{ideal / seconds:.0%}",
            )
        )
    head = ("layers", "number", "of the time", "GFLOP/s", "GB/s", "FLOP/byte", "of the roof")
    return table(head, rows)


def draw(panels: dict[str, tuple[list[Layer], Peaks]], title: str, path: Path) -> None:
    """Draw a roofline for each precision: a dot a layer, its area by its share of the time."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(6.2 * len(panels), 4.6), squeeze=False)
    for axis, (precision, (layers, peaks)) in zip(axes[0], panels.items(), strict=True):
        total = sum(layer.seconds for layer in layers)
        for (kind, members), colour in zip(kinds_of(layers).items(), COLOURS, strict=False):
            axis.scatter(
                [layer.intensity for layer in members],
                [layer.operations / layer.seconds / 1e9 for layer in members],
                s=[20 + 1500 * layer.seconds / total for layer in members],
                color=colour,
                alpha=0.6,
                label=kind,
            )
        ends = (0.05, 2000.0)
        ridge = peaks.operations / peaks.bytes
        along = [ends[0], ridge, ends[1]]
        axis.plot(along, [peaks.at(x) / 1e9 for x in along], color="#333333", linewidth=1.5)
        axis.set(xscale="log", yscale="log", xlim=ends, xlabel="FLOP per byte", ylabel="GFLOP/s")
        axis.set_title(
            f"{precision}: {peaks.operations / 1e9:.0f} GFLOP/s, {peaks.bytes / 1e9:.0f} GB/s"
        )
        axis.grid(which="major", color="#dddddd", linewidth=0.5)
        for handle in axis.legend(fontsize=8, loc="lower right").legend_handles:
            handle.set_sizes([40])
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", choices=NAMES, default="UNet")
    parser.add_argument("--window", type=int, default=96)
    parser.add_argument("--precision", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--side", type=int, default=4096, help="of the matrices, for the peak")
    parser.add_argument("--picture", type=Path)
    return parse(parser, runs=1, window=32, side=256)


def main() -> None:
    """Print a table for each precision, and draw the picture."""
    options = arguments()
    device = torch.device(options.device)
    title = f"{options.network}, a window of {options.window} x {options.window} x {options.window}"
    print(f"{machine('torch', 'monai')}\n{title}, {device}\n")
    panels = {}
    for precision in options.precision:
        dtype = getattr(torch, precision)
        with torch.inference_mode():
            peaks = measure_peaks(device, dtype, options.side)
            net = network(options.network, options.window).to(device, dtype)
            window = torch.as_tensor(image(options.window)).to(device, dtype)
            try:
                layers = measure_layers(net, window, options.runs)
            except NotImplementedError as exc:
                print(f"{precision}: {exc}\n")
                continue
        panels[precision] = layers, peaks
        rates = f"{peaks.operations / 1e9:.0f} GFLOP/s, {peaks.bytes / 1e9:.0f} GB/s"
        print(f"{precision}, peaks: {rates}\n{kind_table(layers, peaks)}\n")
    if options.picture and panels:
        if find_spec("matplotlib") is None:
            print("No picture: matplotlib is not installed")
        else:
            draw(panels, title, options.picture)


if __name__ == "__main__":
    main()
