"""Write the table of device memory in `gpu.md` from the estimate that runs use too.

python docs/write_gpu.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

from scanloom.cards.card import ModelCard, NetworkGrid, NetworkSpec, Window
from scanloom.convert.store import find_model
from scanloom.core import Grid, ScanError
from scanloom.inference.device import choose_batch
from scanloom.inference.geometry import plan_grid
from scanloom.inference.memory import (
    Budget,
    MemoryLimits,
    estimate_network,
    fallback_plans,
    first_fitting,
)

PAGE = Path(__file__).with_name("gpu.md")
BEGIN, END = "<!-- memory: written by docs/write_gpu.py -->\n", "<!-- end of memory -->\n"
GIB = 1 << 30
CARDS_GIB = (8, 12, 24, 80)
CUDA, HALF = torch.device("cuda", 0), torch.float16
FILTERS = [32, 64, 128, 256, 320, 320]
SCANS = {"512 x 512 x 300": (512, 512, 300), "512 x 512 x 1000": (512, 512, 1000)}


def unet(classes: int, sums: str) -> ModelCard:
    """Return the card of a network of nnU-Net's size; weights are not read."""
    args = {
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": classes,
        "kernel_size": [3] * 6,
        "strides": [1, 2, 2, 2, 2, 2],
        "upsample_kernel_size": [2] * 5,
        "filters": FILTERS,
        "norm_name": ["INSTANCE", {"affine": True}],
    }
    shipped = find_model("ct_tissue")
    structures = (
        replace(shipped.structures[0], label=f"part-{n}", number=n) for n in range(1, classes)
    )
    card = replace(
        shipped,
        network=NetworkSpec("DynUNet", args),
        grid=NetworkGrid("RAS", (1.5, 1.5, 1.5)),
        window=Window((128, 128, 128), 0.5),
        structures=tuple(structures),
        limitations=(),  # these, too, are of structures that it lacks
        reference_ranges=(),
    )
    if sums == "float32":
        return card
    grid = replace(card.grid, mode="cubic", alignment="edges")
    return replace(card, grid=grid, window=replace(card.window, sums="float16", starts="even"))


def models() -> dict[str, ModelCard]:
    """Return the models of the table."""
    return {
        "`ct_tissue`": find_model("ct_tissue"),
        "MONAI, 26 classes": unet(26, "float32"),
        "nnU-Net, 26 classes": unet(26, "float16"),
        "MONAI, 118 classes": unet(118, "float32"),
        "nnU-Net, 118 classes": unet(118, "float16"),
    }


def cell(card: ModelCard, shape: tuple[int, int, int], total: int) -> str:
    """Return the first memory plan that fits a device, and its memory."""
    plan = plan_grid(Grid(shape, np.diag((0.7, 0.7, 1.0, 1.0))), card.grid)
    size = card.window.size or plan.network.shape
    properties = SimpleNamespace(total_memory=total)
    with (
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        mock.patch("torch.cuda.get_per_process_memory_fraction", return_value=1.0),
    ):
        windows = choose_batch(size, CUDA, HALF)
    plans = fallback_plans(CUDA, HALF, Budget(windows))
    try:
        [first, *_], _ = first_fitting(plans, card, plan, 2, MemoryLimits(device=total))
    except ScanError:
        return "no"
    need = estimate_network(card, plan, CUDA, HALF, first.budget).device_peak
    note = ", scores on the host" if first.budget.scores == "host" else ""
    return f"{first.budget.windows}, {need / GIB:.1f} GiB{note}"


def table() -> str:
    """Return the table."""
    head = " | ".join(f"{gib} GB" for gib in CARDS_GIB)
    lines = [f"| model | scan | {head} |", "|-|-|" + "-|" * len(CARDS_GIB)]
    for name, card in models().items():
        for scan, shape in SCANS.items():
            cells = " | ".join(cell(card, shape, gib * GIB) for gib in CARDS_GIB)
            lines.append(f"| {name} | {scan} | {cells} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the page with the table anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE.name)
