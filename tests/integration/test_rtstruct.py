"""RTSTRUCT of whole runs, and what dciodvfy says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scanloom.convert.store import shipped
from scanloom.core import Layer, Outputs
from scanloom.engine.segment import iter_segment
from scanloom.io.index.series import find_series
from scanloom.io.read import read_scan
from scanloom.options import segment_options
from support import case_folders
from support.commands import scanloom as scanloom_command
from support.rt_witnesses import dciodvfy_says, difficult, rtstruct_of
from support.write_dicom import PLANES, Geometry, write_series


@pytest.mark.parametrize("plane", ["axial", "coronal", "sagittal", "doubly oblique"])
def test_dciodvfy_is_silent(plane: str, tmp_path: Path) -> None:
    stored = np.random.default_rng(0).integers(0, 200, (21, 17, 8))
    across, down = PLANES[plane]
    write_series(tmp_path / "scan", stored, Geometry(across, down))
    [series] = find_series(tmp_path / "scan")
    scan = read_scan(series)
    assert dciodvfy_says(rtstruct_of(tmp_path, scan, difficult(scan))) == ""


def test_dciodvfy_is_silent_of_empty_and_corrected_structures(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    segmentation = case_folders.segmentation_of(scan)
    layer = Layer(np.zeros_like(segmentation.layers[0].labels), case_folders.STRUCTURES)
    empty = replace(segmentation, layers=(layer,), corrected=True, changes="overlap 0.1")
    assert dciodvfy_says(rtstruct_of(tmp_path, scan, empty)) == ""


@pytest.mark.thorough
def test_a_run_publishes_it_and_verify_knows_it(tmp_path: Path) -> None:
    key, out = tmp_path / "key", tmp_path / "out"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    options = segment_options(
        models=("ct_tissue",), out=out, key=key, device="cpu", outputs=Outputs(also=("rtstruct",))
    )
    [(_, record)] = iter_segment([shipped("data") / "torso_ct"], options)
    assert record.reason is None, record.detail
    assert record.flags == ()
    path = record.folder / "dicom" / "rtstruct.dcm"
    assert "dicom/rtstruct.dcm" in (record.folder / "SHA256SUMS").read_text()
    assert dciodvfy_says(path) == ""
    assert scanloom_command("verify", out).code == 0
    path.write_bytes(path.read_bytes()[:-2] + b"  ")
    assert scanloom_command("verify", out).code == 1
