"""No array of classes x source voxels exists: measured, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import json, sys, time
from pathlib import Path
import numpy as np, torch
from scanloom.cards.card import Argmax, NetworkGrid
from scanloom.core import Grid
from scanloom.inference.geometry import plan_grid
from scanloom.inference.restore.restorers import ScoreRestorer
from scanloom.inference.sliding_window import ScorePlanes

def status(name):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if name in l)
    return int(line.split()[1]) / 1024

plan = plan_grid(Grid((512, 512, 300), np.diag([0.7, 0.7, 1.0, 1.0])),
                 NetworkGrid("RAS", (1.5, 1.5, 1.5)))
assert plan.network.shape == (239, 239, 200), plan.network.shape
generator = torch.Generator().manual_seed(0)
scores = torch.empty((200, 25, 239, 239), dtype=torch.float16)
for plane in scores:
    coarse = torch.randn((1, 25, 12, 12), generator=generator)
    plane.copy_(torch.nn.functional.interpolate(coarse, (239, 239), mode="bilinear")[0])
warm = ScoreRestorer(plan, Argmax(), 25)
warm.add(ScorePlanes(0, scores[:3]))
del warm
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before, start = status("VmRSS"), time.process_time()
restorer = ScoreRestorer(plan, Argmax(), 25)
for first in range(0, 200, 16):
    restorer.add(ScorePlanes(first, scores[first : first + 16]))
labels = restorer.labels[0]
print(json.dumps({
    "peak": status("VmHWM") - before, "labels": labels.nbytes / 2**20,
    "cpu": time.process_time() - start, "classes": len(np.unique(labels)),
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_restoring_25_classes_of_a_ct_takes_little_memory() -> None:
    """512 x 512 x 300 from 239 x 239 x 200: under 400 MiB above scan, scores and labels."""
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # waiting threads count as busy
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(command, capture_output=True, text=True, env=one_thread)

    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    print(f"{seen['peak'] - seen['labels']:.0f} MiB, {seen['cpu']:.1f} cpu s")
    assert seen["classes"] == 25
    assert seen["peak"] - seen["labels"] < 400
