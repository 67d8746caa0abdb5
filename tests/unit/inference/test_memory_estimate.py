"""The estimated memory of the network step against the memory that torch and Linux report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scanloom.cards.card import Crop, Fit, NetworkGrid, NetworkSpec, Window
from scanloom.core import ComputeOptions, Reason, ScanError, StepTimer, Volume, format_bytes
from scanloom.inference.geometry import plan_grid
from scanloom.inference.memory import (
    Budget,
    MemoryLimits,
    estimate_network,
    fallback_plans,
    first_fitting,
    network_bytes,
    resident,
    window_values,
)
from scanloom.inference.predictor import TorchPredictor
from support import model_cards

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

UNET = {
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 8,
    "channels": [32, 64],
    "strides": [2],
    "norm": "instance",
}

FORWARD = """
import json, sys
from pathlib import Path
import torch
from scanloom.cards.card import NetworkSpec
from scanloom.inference.network.layers import MixedBfloat16
from scanloom.inference.network.architectures import build_network

def status(name):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if name in l)
    return int(line.split()[1]) * 1024

spec = NetworkSpec("UNet", json.loads(sys.argv[1]))
network = build_network(spec)
if sys.argv[2] == "bfloat16":
    network = MixedBfloat16(network, 1, (96, 96, 96))
window = torch.zeros(1, 1, 96, 96, 96)
with torch.inference_mode():
    network(window[..., :32])
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    network(window)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("float32", marks=pytest.mark.thorough),
        pytest.param("bfloat16", marks=pytest.mark.slow),
    ],
)
def test_memory_of_a_network_is_known_without_running_it(precision: str) -> None:
    """In bfloat16 the ends stay float32, and their output is kept until the last layer."""
    command = [sys.executable, "-c", FORWARD, json.dumps(UNET), precision]
    # A tensor's memory goes back to the system when it is freed: what malloc keeps isn't counted
    environ = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "131072"}
    measured = int(subprocess.check_output(command, text=True, env=environ))

    dtype = getattr(torch, precision)
    estimated = network_bytes(NetworkSpec("UNet", UNET), (96, 96, 96), dtype)

    print(f"measured {measured >> 20} MiB, estimated {estimated >> 20} MiB")
    assert 0.8 * measured <= estimated <= 1.5 * measured


def test_half_as_wide_numbers_and_fewer_windows_take_less() -> None:
    spec = NetworkSpec("UNet", UNET)
    whole = network_bytes(spec, (64, 64, 64), windows=4)
    assert network_bytes(spec, (64, 64, 64), torch.float16, 4) == whole // 2
    assert network_bytes(spec, (64, 64, 64), windows=1) == whole // 4


def test_scores_on_the_host_leave_the_device(tmp_path: Path) -> None:
    weights, many = model_cards.small_weights(tmp_path), model_cards.structures(60)
    card = model_cards.card(weights, window=Window((96, 96, 96)), structures=many)
    plan = plan_grid(model_cards.grid((400, 400, 400)), card.grid)
    on_device = estimate_network(card, plan, CUDA, budget=Budget(scores="device"))
    here = estimate_network(card, plan, CUDA, budget=Budget(scores="host"))
    assert here.device["network"] < on_device.device["network"]
    assert here.host["network"] > on_device.host["network"]


def test_the_ladder_goes_down_to_less_and_less(tmp_path: Path) -> None:
    card = model_cards.card(
        model_cards.small_weights(tmp_path),
        window=Window((96, 96, 96)),
        structures=model_cards.structures(60),
    )
    plan = plan_grid(model_cards.grid((400, 400, 400)), card.grid)
    ways = list(fallback_plans(CUDA, torch.float16, Budget(4), [CPU]))

    assert [way.change for way in ways] == [
        "",
        "windows 2",
        "windows 1",
        "scores on host",
        "slab 16 MiB",
        "slab 4 MiB",
        "device cpu",
        "slab 16 MiB",
        "slab 4 MiB",
    ]
    needs = [estimate_network(card, plan, w.device, w.dtype, w.budget) for w in ways]
    on_device = [need.device_peak for need in needs]
    assert on_device == sorted(on_device, reverse=True)


def test_a_fitting_plan_is_chosen_before_any_allocation(tmp_path: Path) -> None:
    card = model_cards.card(model_cards.small_weights(tmp_path))
    plan = plan_grid(model_cards.grid((200, 200, 200)), card.grid)
    ways = list(fallback_plans(CPU, torch.float32, Budget()))
    whole, _, least = (
        estimate_network(card, plan, w.device, w.dtype, w.budget).host_peak for w in ways
    )

    chosen, changes = first_fitting(iter(ways), card, plan, 2, MemoryLimits(host=whole - 1))
    assert chosen[0].budget.slab < ways[0].budget.slab
    assert changes == ["slab 16 MiB"]
    with pytest.raises(ScanError) as caught:
        first_fitting(iter(ways), card, plan, 2, MemoryLimits(host=least - 1))
    assert caught.value.reason is Reason.OUT_OF_MEMORY
    assert format_bytes(least) in caught.value.detail
    on_device = list(fallback_plans(CUDA, torch.float32, Budget()))
    with pytest.raises(ScanError, match="more on cuda, 1 MiB are left"):
        first_fitting(iter(on_device), card, plan, 2, MemoryLimits(2**40, 2**20))


@pytest.mark.thorough
def test_a_lower_rung_gives_the_same_labels_and_is_told_once(tmp_path: Path) -> None:
    card = model_cards.card(model_cards.small_weights(tmp_path))
    grid = model_cards.grid((90, 80, 70))
    volume = Volume(model_cards.smooth_scan(grid.shape), grid, "HU", "CT")
    free = TorchPredictor(card, device="cpu", compute=ComputeOptions(precision="float32"))
    ways, _ = free.memory_plans(volume, plan_grid(grid, card.grid))
    need = estimate_network(card, plan_grid(grid, card.grid), CPU, budget=ways[1].budget)
    tight, clock = (
        TorchPredictor(card, device="cpu", compute=ComputeOptions(precision="float32")),
        StepTimer(),
    )
    expected = free.predict(volume).layers[0].labels

    tight.memory_limit = resident() + need.host_peak + 2**20
    labels = tight.predict(volume, clock).layers[0].labels

    np.testing.assert_array_equal(labels, expected)
    assert len(np.unique(expected)) == 3
    assert clock.notes["ladder"][0] == "slab 16 MiB"
    assert len(set(clock.notes["ladder"])) == len(clock.notes["ladder"])


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"fits": (Fit((200, 200, 200)),)}, 200),
        ({"fits": (Fit((200, 200, 200)), Fit((60, 60, 60), crops=True))}, 60),
        ({"crop": Crop("positive", "network", 50, beyond=True)}, 200),
        ({"crop": Crop("positive", "network", multiple=(160, 160, 160))}, 160),
    ],
)
def test_a_padded_scan_is_as_large_as_what_the_network_sees(
    tmp_path: Path, changes: dict[str, Any], size: int
) -> None:
    weights = model_cards.small_weights(tmp_path)
    seen = model_cards.card(weights, grid=NetworkGrid("RAS", None), window=Window(None))
    card = model_cards.card(weights, grid=NetworkGrid("RAS", None, **changes), window=Window(None))
    small, large = (model_cards.grid((n, n, n)) for n in (100, size))

    padded = estimate_network(card, plan_grid(small, card.grid), CPU)
    expected = estimate_network(seen, plan_grid(large, seen.grid), CPU)

    assert padded.host["network"] == pytest.approx(expected.host["network"], rel=0.1)
    assert window_values(card, small) == window_values(seen, large)


def test_sums_of_half_precision_and_of_folds_are_counted(tmp_path: Path) -> None:
    """Sums take half the memory in half precision, and as often as there are folds."""
    card = model_cards.card(
        model_cards.small_weights(tmp_path),
        window=Window((96, 96, 96)),
        structures=model_cards.structures(60),
    )
    plan = plan_grid(model_cards.grid((300, 200, 100)), card.grid)

    def network(**changes: Any) -> int:
        changed = replace(card, **changes)
        return estimate_network(changed, plan, CPU).host["network"]

    half = replace(card.window, sums="float16")
    planes = 150 * 100 * 61 * 96
    assert network() - network(window=half) > 0.9 * 2 * planes
    more = network(folds=(card.weights, card.weights)) - network()
    assert 2 * 4 * planes < more < 1.2 * 2 * 4 * planes


def test_sums_of_all_planes_are_counted(tmp_path: Path) -> None:
    """Windows that are summed in nnU-Net's order along another axis than the planes'."""
    card = model_cards.card(
        model_cards.small_weights(tmp_path),
        grid=NetworkGrid(),
        window=Window((32, 32, 32), 0.5, sums="float16"),
        structures=model_cards.structures(60),
    )
    flat, deep = model_cards.grid((64, 64, 64)), model_cards.grid((64, 64, 320))

    needs = [
        estimate_network(card, plan_grid(grid, card.grid), CPU).host["network"]
        for grid in (flat, deep)
    ]

    more = 2 * 61 * 64 * 64 * (320 - 64)  # scores of 60 structures and background
    assert more < needs[1] - needs[0] < 1.5 * more


def test_flips_and_channels_are_counted(tmp_path: Path) -> None:
    card = model_cards.card(model_cards.small_weights(tmp_path), window=Window((64, 64, 64)))
    plan = plan_grid(model_cards.grid((200, 200, 200)), card.grid)
    mirrored = replace(card, window=replace(card.window, mirror=(0, 1)))
    four = replace(card, channels=card.channels * 4)

    plain, flips, channels = (estimate_network(c, plan, CPU).host for c in (card, mirrored, four))

    scores = 4 * 3 * 64**3
    assert 2 * scores < flips["network"] - plain["network"] < 4 * scores
    assert channels["network"] - plain["network"] > 3 * 4 * 100**3
    assert channels["resample"] > 2 * 4 * 4 * 100**3


PLANES = """
import json, sys
from pathlib import Path
import torch
from scanloom.cards.card import NetworkSpec
from scanloom.inference.network.architectures import build_network

def status(name):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if name in l)
    return int(line.split()[1]) * 1024

network = build_network(NetworkSpec("UNet", json.loads(sys.argv[1])))
window = torch.zeros(4, 1, 512, 512)
with torch.inference_mode():
    network(window[..., :64])
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    network(window)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.thorough
def test_memory_of_a_two_dimensional_network_is_known_without_running_it() -> None:
    args = {**UNET, "spatial_dims": 2}
    command = [sys.executable, "-c", PLANES, json.dumps(args)]
    measured = min(int(subprocess.check_output(command, text=True)) for _ in range(3))

    estimated = network_bytes(NetworkSpec("UNet", args), (512, 512), windows=4)

    print(f"measured {measured >> 20} MiB, estimated {estimated >> 20} MiB")
    assert 0.8 * measured <= estimated <= 1.5 * measured
