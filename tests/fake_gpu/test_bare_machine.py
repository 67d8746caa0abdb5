"""A start from the sources, with the packages of a machine for measurements on a GPU only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABSENT = (
    "dask",
    "distributed",
    "highdicom",
    "openvino",
    "SimpleITK",
    "imagecodecs",
    "cryptography",
    "pylibjpeg",
    "openjpeg",
    "libjpeg",
    "rle",
    "jpegls",
    "nrrd",
    "starlette",
    "uvicorn",
)
"""Packages that such a machine lacks, by the names of their modules."""

START = f"""
import importlib.metadata, sys, tempfile
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
find = importlib.metadata.Distribution.from_name

def not_installed(name):
    if name == "scanloom":
        raise importlib.metadata.PackageNotFoundError(name)
    return find(name)

importlib.metadata.Distribution.from_name = not_installed

import numpy as np
from support import model_cards
from support.fake_cuda import stand_in
import scanloom.engine.segment
from scanloom.core import Volume
from scanloom.inference.predictor import TorchPredictor

assert scanloom.__file__.startswith({str(ROOT / "pipeline")!r})
card = model_cards.card(model_cards.small_weights(Path(tempfile.mkdtemp())))
grid = model_cards.grid((24, 24, 12), (2.0, 2.0, 2.0))
volume = Volume(model_cards.smooth_scan(grid.shape), grid, "HU", "CT")
with stand_in():
    segmentation = TorchPredictor(card, device="cuda").predict(volume)
print(segmentation.device, segmentation.layers[0].labels.shape)
"""


@pytest.mark.thorough
def test_a_scan_is_labelled_with_the_default_engine(tmp_path: Path) -> None:
    paths = os.pathsep.join(str(ROOT / name) for name in ("pipeline", "tests"))
    env = {**os.environ, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path)}
    script = [sys.executable, "-c", START]

    done = subprocess.run(script, capture_output=True, text=True, env=env, check=False)

    assert done.stdout == "cuda:0 (24, 24, 12)\n", done.stderr
