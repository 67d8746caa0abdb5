"""Networks of TensorFlow and JAX, exported by their own programs, give the frameworks' labels.

The Python of an environment with tensorflow and tf2onnx is named by SCANLOOM_TENSORFLOW, of one
with jax and jax2onnx by SCANLOOM_JAX.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions, Volume
from scanloom.inference.predictor import TorchPredictor
from support import model_cards

PARITY = Path(__file__).parent / "parity"
SHAPE = (40, 36, 28)
CARD = """
channels: [{name: CT, modality: CT}]
layout: channels_last
grid: {}
after: [{class: ScaleRange, a_min: -200, a_max: 200, b_min: 0, b_max: 1, clip: true}]
structures: [one, two, three]
"""

pytestmark = pytest.mark.reference


@pytest.mark.parametrize(
    ("script", "variable", "window"),
    [
        ("onnx_keras.py", "SCANLOOM_TENSORFLOW", "{size: null}"),
        ("onnx_jax.py", "SCANLOOM_JAX", "{size: [40, 36, 1], plane: 2}"),
    ],
)
def test_labels_are_the_frameworks_own(
    script: str, variable: str, window: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All voxels, by OpenVINO and, where it is installed, by ONNX Runtime."""
    if variable not in os.environ:
        pytest.skip(f"{variable} is not set")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scan, folder = model_cards.smooth_scan(SHAPE), tmp_path / "model"
    folder.mkdir()
    np.save(tmp_path / "scan.npy", scan)
    command = [os.environ[variable], str(PARITY / script), str(tmp_path / "scan.npy"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (folder / "card.yaml").write_text(f"{CARD}window: {window}\n")
    grid = model_cards.grid(SHAPE, (1.5, 1.4, 2.2), "LPS", turn=5)

    expected = np.load(folder / "labels.npy")
    assert min(np.bincount(expected.ravel(), minlength=4)) > 0.01 * expected.size
    for engine in ("openvino", "onnxruntime"):
        if importlib.util.find_spec(engine) is None:
            continue
        compute = ComputeOptions(engine=engine)  # type: ignore[arg-type]  # a name
        predictor = TorchPredictor(load_card(folder), compute, device="cpu")
        labels = predictor.predict(Volume(scan, grid, "HU", "CT")).layers[0].labels
        assert predictor.engine.name == engine
        np.testing.assert_array_equal(labels, expected)
