"""The README's Python examples work as they are printed."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

import scanloom
from scanloom.convert.store import shipped
from support.commands import write_tiny_bundle
from support.write_dicom import Words, noise, write_series

SAMPLE = shipped("data") / "torso_ct"


@pytest.mark.thorough
def test_a_model_labels_a_volume_in_memory() -> None:
    """The label map lies on the volume's grid; its volumes are those drawn, within 5 %."""
    volume = scanloom.load_volume(SAMPLE)
    labels = scanloom.load_model("ct_tissue", device="cpu").predict(volume)
    assert labels.grid is volume.grid
    truth = json.loads((shipped("data") / "torso_truth.json").read_text())["tissues_ml"]
    lung = labels["lung"].sum() * volume.grid.voxel_volume / 1000
    assert abs(lung / truth["lung"] - 1) < 0.05


@pytest.mark.thorough
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
    assert list(table.columns) == ["case", *written.columns, "recipe"]
    assert table["case"].tolist() == [record.folder.name]
    assert table["volume_ml"].tolist() == written["volume_ml"].tolist()
    assert table["voxels"].tolist() == [record.measurements[0].voxels]


def test_a_second_series_with_the_same_uids_does_not_replace_the_first(tmp_path: Path) -> None:
    """One command, two paths, one UID, other voxels: the second fails, the first stays."""
    model = write_tiny_bundle(tmp_path / "models")
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    array = noise()
    for name, stored in (("a", array), ("b", array[::-1])):
        write_series(tmp_path / name, np.ascontiguousarray(stored), words=Words("CT", "same"))
    paths = [tmp_path / "a", tmp_path / "b"]

    first, second = scanloom.segment(
        paths, model=model, out=tmp_path / "out", key=key, device="cpu"
    )

    assert (first.reason, second.reason) == (None, scanloom.Reason.ID_TAKEN)
    assert first.folder is not None
    table = published_voxels(first.folder)
    assert table == {m.label: m.voxels for m in first.measurements}


def test_a_scan_that_a_model_refuses_is_named_like_one_that_is_not_read(tmp_path: Path) -> None:
    """Of several series in a folder, `private` tells which it was."""
    model = write_tiny_bundle(tmp_path / "models")
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    (tmp_path / "in").mkdir()
    files = [tmp_path / "in" / name for name in ("labels.nii", "nan.nii")]
    for file, value in zip(files, (1.0, np.nan), strict=True):
        array = np.zeros((24, 20, 6), np.float32)
        array[4:9, 4:9, 1:4] = value
        nib.save(nib.Nifti1Image(array, np.diag([1.0, 1.0, 2.0, 1.0])), file)

    records = scanloom.segment(
        tmp_path / "in", model=str(model), out=tmp_path / "out", key=key, series="all"
    )

    assert {record.reason for record in records} == {
        scanloom.Reason.IMPLAUSIBLE,
        scanloom.Reason.PIXEL_TYPE,
    }
    assert sorted(record.private for record in records) == list(map(str, files))


def published_voxels(folder: Path) -> dict[str, int]:
    """Return the voxels of each structure in a published table."""
    document = json.loads((folder / "measurements.json").read_text())
    rows = document["measurements"] if isinstance(document, dict) else document
    return {row["label"]: row["voxels"] for row in rows}
