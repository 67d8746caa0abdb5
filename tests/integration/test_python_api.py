"""What the README shows of Python works as it stands there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import scanloom
from scanloom.cards.store import shipped

SAMPLE = shipped("data") / "torso_ct"


def test_a_model_labels_a_volume_in_memory() -> None:
    """The label map lies on the volume's grid; its volumes are those drawn, within 5 %."""
    volume = scanloom.load_volume(SAMPLE)
    found = scanloom.load_model("ct_tissue", device="cpu").predict(volume)
    assert found.grid is volume.grid
    truth = json.loads((shipped("data") / "torso_truth.json").read_text())["tissues_ml"]
    counts = np.bincount(found.layers[0].labels.ravel(order="K"))
    lung = next(s.number for s in found.structures if s.label == "lung")
    assert abs(counts[lung] * volume.grid.voxel_volume / 1000 / truth["lung"] - 1) < 0.05


def test_segment_publishes_and_goes_on_after_a_bad_path(tmp_path: Path) -> None:
    """One record a path, in order; a path without a scan does not stop the next."""
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    bad, good = scanloom.segment(
        [tmp_path / "nowhere", SAMPLE],
        model="ct_tissue",
        out=tmp_path / "out",
        key=key,
        device="cpu",
    )
    assert bad.reason is scanloom.Reason.NOT_FOUND
    assert good.reason is None
    assert good.folder is not None
    assert (good.folder / "preview.png").is_file()
