"""Six networks in each engine: whether it builds, time, preparation, memory and labels.

    python benchmarks/engines.py [--networks UNet SwinUNETR ...] [--engines openvino ...]
        [--precision float32 bfloat16] [--runs 3] [--window 96]

Each network has random weights and 26 outputs, and is given a window of a drawn CT. A process of
its own prepares it with an engine, runs it once to warm up, and then the timed runs. Prints the
medians of processor and wall seconds of a window, the seconds of the preparation, the peak of
memory, and the labels compared with those of torch in float32. Scores of random weights are close
to each other, so that labels differ more than a trained network's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from agree import agreement
from meter import Failed, machine, median, parse, run, table

OUTPUTS, GRID_MM = 26, 1.5
TORCH, FLOAT32 = "torch", "float32"
NAMES = ("UNet", "SegResNet", "SwinUNETR", "UNETR", "DynUNet", "ResEnc UNet")
CHANNELS = (32, 64, 128, 256, 320)
HEAD = (
    *("network", "precision", "engine", "cpu s", "x torch", "wall s", "x torch", "prepared s"),
    *("GiB", "voxels equal", "Dice"),
)


def network(name: str, window: int) -> Any:
    """Return a network with random weights, which are the same each time."""
    import torch
    from monai.networks import nets

    builders: dict[str, Callable[[], torch.nn.Module]] = {
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
        "ResEnc UNet": _residual,
    }
    torch.manual_seed(0)
    return builders[name]().eval()


def _residual() -> Any:
    """Return nnU-Net's network with residual blocks in its encoder."""
    from real_network import Size, network_args

    from scanloom.inference.nets.unet import ResidualEncoderUNet

    arguments = network_args(OUTPUTS, Size(CHANNELS))
    arguments["plan"] |= {"encoder": [1, 3, 4, 6, 6], "decoder": [1] * 4}
    return ResidualEncoderUNet(**arguments)


def image(window: int) -> Any:
    """Return a window of a drawn CT (1, 1, x, y, z), from 0 to 1."""
    import torch
    from phantom import draw_labels, draw_scan, phantom
    from real_network import HIGH, LOW

    drawn = phantom((window * GRID_MM,) * 3, OUTPUTS - 1)
    scan = draw_scan(drawn, draw_labels(drawn, (GRID_MM,) * 3, (window,) * 3)).astype(np.float32)
    scaled = (scan.clip(LOW, HIGH) - LOW) / (HIGH - LOW)
    return torch.from_numpy(np.ascontiguousarray(scaled))[None, None]


def prepared(name: str, engine: str, precision: str, window: int) -> tuple[Any, float]:
    """Return what runs a network, and the seconds of its preparation."""
    import torch

    from scanloom.inference.engines.protocol import NetworkRequest
    from scanloom.inference.engines.selection import find_engine
    from scanloom.inference.network.layers import MixedBfloat16

    shape, began = (1, 1, window, window, window), time.perf_counter()
    if engine != TORCH:
        dtype, threads = getattr(torch, precision), torch.get_num_threads()
        device = torch.device("cpu")
        request = NetworkRequest(
            lambda: network(name, window), (name,), shape, dtype, device, threads
        )
        if not find_engine(engine).supports(device, dtype):
            raise NotImplementedError(f"no {precision} on a CPU")
        return find_engine(engine).prepare(request).run, time.perf_counter() - began
    built = network(name, window)
    if precision != FLOAT32:
        built = MixedBfloat16(built, 1, shape[2:])
    return built, time.perf_counter() - began


def child(given: argparse.Namespace) -> None:
    """Prepare and run one network with one engine; print the figures, save the labels."""
    import torch

    from scanloom.core import ScanError
    from scanloom.inference.engines.protocol import EngineUnfitError

    name, engine, precision, labels = given.child
    try:
        runner, seconds = prepared(name, engine, precision, given.window)
    except (EngineUnfitError, NotImplementedError, ScanError) as exc:
        print(json.dumps({"refused": str(exc)}))
        return
    values, wall, cpu = image(given.window), [], []
    with torch.inference_mode():
        scores = runner(values)
        for _ in range(given.runs):
            began, spent = time.perf_counter(), time.process_time()
            runner(values)
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - spent)
    np.save(labels, scores[0].float().argmax(0).numpy().astype(np.uint8))
    print(json.dumps({"prepared": seconds, "wall": median(wall), "cpu": median(cpu)}))


def compare(name: str, given: argparse.Namespace, folder: Path) -> list[list[Any]]:
    """Return a row for each engine and precision of a network."""
    rows: list[list[Any]] = []
    reference: Any = None
    for precision in dict.fromkeys((FLOAT32, *given.precision)):
        torch_took: dict[str, float] = {}
        for engine in (TORCH, *given.engines):
            labels = folder / f"{name}-{engine}-{precision}.npy"
            options = ["--window", str(given.window), "--runs", str(given.runs)]
            command = [sys.executable, __file__, *options, "--child", name, engine, precision]
            try:
                spent = run([*command, labels], {"XDG_CACHE_HOME": str(folder / "cache")})
            except Failed as exc:
                rows.append([name, precision, engine, str(exc).splitlines()[-1], *[""] * 7])
                continue
            found = spent.answer
            if "refused" in found:
                rows.append([name, precision, engine, found["refused"], *[""] * 7])
                continue
            torch_took = torch_took or found
            map_ = np.load(labels)
            reference = map_ if reference is None else reference
            same = agreement(reference, map_, GRID_MM**3 / 1000)
            row: list[Any] = [name, precision, engine]
            for kind in ("cpu", "wall"):
                row += [found[kind], torch_took[kind] / found[kind]]
            row += [found["prepared"], spent.peak / 2**30]
            rows.append([*row, f"{same.voxels:.4%}", f"{same.dice_least:.4f}"])
            print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--engines", nargs="*", default=["openvino", "onnxruntime", "compile"])
    parser.add_argument("--precision", nargs="+", default=[FLOAT32, "bfloat16"])
    parser.add_argument("--runs", type=int, default=3, help="timed runs of a window")
    parser.add_argument("--window", type=int, default=96, help="its length in voxels")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    return parse(
        parser, networks=["UNet"], engines=["openvino"], precision=[FLOAT32], runs=1, window=32
    )


def main() -> None:
    """Print a row for each network, engine and precision."""
    given = arguments()
    if given.child:
        child(given)
        return
    print(machine("scanloom", "torch", "monai", "openvino"), "\n")
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.networks:
            print(name, file=sys.stderr, flush=True)
            rows += compare(name, given, Path(folder))
    print(table(HEAD, rows))


if __name__ == "__main__":
    sys.path.insert(0, os.fspath(Path(__file__).parent))
    main()
