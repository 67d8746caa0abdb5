"""What the README shows of Python works as it stands there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import scanloom
from scanloom.cards.store import shipped

SAMPLE = shipped("data") / "torso_ct"


def test_a_model_labels_a_volume_in_memory() -> None:
    """The label map lies on the volume's grid; its volumes are those drawn, within 5 %."""
    volume = scanloom.load_volume(SAMPLE)
    found = scanloom.load_model("ct_tissue", device="cpu").predict(volume)
    assert found.grid is volume.grid
    truth = json.loads((shipped("data") / "torso_truth.json").read_text())["tissues_ml"]
    lung = found["lung"].sum() * volume.grid.voxel_volume / 1000
    assert abs(lung / truth["lung"] - 1) < 0.05


def test_segment_publishes_and_goes_on_after_a_bad_path(tmp_path: Path) -> None:
    """One record a path, in order; a path without a scan does not stop the next."""
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    stages: list[tuple[str, int, int]] = []
    bad, good = scanloom.segment(
        [tmp_path / "nowhere", SAMPLE],  # the shipped model is the only one
        out=tmp_path / "out",
        key=key,
        device="cpu",
        series=1,
        structures="bone",
        progress=lambda stage, done, total: stages.append((stage, done, total)),
    )
    assert bad.reason is scanloom.Reason.NOT_FOUND
    assert good.reason is None
    assert good.folder is not None
    assert (good.folder / "preview.png").is_file()
    assert [m.label for m in good.measurements] == ["bone"]
    assert [s for s in stages if s[0] == "scans"] == [("scans", n, 2) for n in range(3)]
    assert ("network", 0, 1) in stages
    windows = [s for s in stages if s[0] == "network" and s[1]]
    assert windows[-1][1] == windows[-1][2]
    _check_table(tmp_path / "out", good)


def _check_table(out: Path, record: scanloom.CaseRecord) -> None:
    """The table of pandas has the record's measurements, and the columns of the CSV file."""
    pd = pytest.importorskip("pandas")
    assert record.folder is not None
    table = scanloom.measurements(out)
    written = pd.read_csv(record.folder / "measurements.csv")
    assert list(table.columns) == ["case", *written.columns]
    assert table["case"].tolist() == [record.folder.name]
    assert table["volume_ml"].tolist() == written["volume_ml"].tolist()
    assert table["voxels"].tolist() == [record.measurements[0].voxels]
