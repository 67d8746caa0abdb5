"""Whole cases in processes of their own: estimated and real peak; limits that are really hit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]

CASE = """
import json, resource, sys, tempfile
from pathlib import Path
import numpy as np, torch
from support import model_cards
from scanloom.cards.card import NetworkGrid, NetworkSpec, Window
from scanloom.core import Case, StepTimer, ComputeOptions, Outputs, ScanError, Series, Volume
from scanloom.engine import steps
from scanloom.engine.case.types import LoadedCase
from scanloom.engine.machine.devices import EnergyMeter
from scanloom.engine.prepare import estimate_case
from scanloom.inference.predictor import TorchPredictor
from scanloom.io.scan import GridOnlySource, Scan

asked = json.loads(sys.argv[1])
side, slices, classes = asked["side"], asked["slices"], asked["classes"]
torch.set_num_threads(1)
args = {**model_cards.SMALL_UNET, "out_channels": classes}
folder = Path(sys.argv[2])
card = model_cards.card(
    model_cards.small_weights(folder, args),
    network=NetworkSpec("UNet", args),
    grid=NetworkGrid("RAS", (asked["spacing"],) * 3),
    window=Window((96, 96, 96), 0.25),
    structures=model_cards.structures(classes - 1),
)
grid = model_cards.grid((side, side, slices), (0.7, 0.7, 1.0), "LPS")
predictor = TorchPredictor(card, device="cpu", compute=ComputeOptions(precision="float32"))
estimate = estimate_case(grid, np.int16, [card], Outputs())
rng = np.random.default_rng(0)
plane = model_cards.smooth_scan((side, side, 1))
array = np.asfortranarray(np.repeat(plane, slices, axis=2))
volume = Volume(array, grid, "HU", "CT")
clock = StepTimer()
if asked["headroom"] is not None:  # bytes beyond what the process holds as data now
    lines = Path("/proc/self/status").read_text().splitlines()
    held = int(next(l for l in lines if l.startswith("VmData")).split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + asked["headroom"],) * 2)
result = {"estimate": estimate.peak}
try:
    case = Case("a" * 26, Series("itk", ()), Outputs(), "h", "r")
    loaded = LoadedCase(case, Scan(volume, GridOnlySource()), clock, EnergyMeter())
    segmented = steps.segment(loaded, [predictor])
    if asked["headroom"] is None:
        (folder / "case").mkdir()
        steps.write(segmented, folder / "case", estimate)
    result["labels"] = int(segmented.segmentations[0].layers[0].labels.max())
except ScanError as error:
    result["reason"] = error.reason.code
result["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
result["ladder"] = clock.notes.get("ladder", [])
print(json.dumps(result))
"""


def run_case(folder: Path, **options: Any) -> dict[str, Any]:
    """Segment a drawn scan in a process of its own; return its report."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    arguments = json.dumps({"spacing": 3.0, "headroom": None, **options})
    command = [sys.executable, "-c", CASE, arguments, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.parametrize("classes", [3, 26])
@pytest.mark.parametrize(("side", "slices"), [(256, 100), (384, 200), (512, 300)])
def test_the_estimate_holds_the_peak_and_not_much_more(
    side: int, slices: int, classes: int, tmp_path: Path
) -> None:
    result = run_case(tmp_path, side=side, slices=slices, classes=classes)
    ratio = result["estimate"] / result["peak"]
    print(f"peak {result['peak'] >> 20} MiB, estimate {result['estimate'] >> 20} MiB: {ratio:.2f}")
    assert 1.0 <= ratio <= 1.5


@pytest.mark.slow
def test_memory_grows_by_what_is_added_and_little_more(tmp_path: Path) -> None:
    peaks = []
    for slices in (300, 1000):
        folder = tmp_path / str(slices)
        folder.mkdir()
        peaks.append(run_case(folder, side=512, slices=slices, classes=3)["peak"])
    added = 700 * 512 * 512 * 3 + 4 * round(700 / 3) * 119 * 119
    print(f"{(peaks[1] - peaks[0]) / added:.2f} x the bytes added")
    assert peaks[1] - peaks[0] <= 1.3 * added  # each peak varies by some 30 MiB


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA binds on Linux")
def test_a_limit_that_is_hit_ends_in_a_named_reason(tmp_path: Path) -> None:
    result = run_case(tmp_path, side=256, slices=60, classes=3, headroom=24 * 2**20)
    assert result["reason"] == "OUT_OF_MEMORY"
    assert result["ladder"] == ["slab 16 MiB", "slab 4 MiB"]
