"""Scans are refused by their headers, and planned, before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray

from support.write_dicom import Words, noise, write_series

PROGRAM = """
import sys
from scanloom.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(sorted({"torch", "monai", "highdicom"}.intersection(sys.modules)), file=sys.stderr)
"""


def nifti(path: Path, array: NDArray[Any], code: int = 1) -> Path:
    image = nib.Nifti1Image(array, np.diag([2.0, 2.0, 3.0, 1.0]))
    image.set_sform(image.affine, code)
    image.set_qform(image.affine, code)
    nib.save(image, path)
    return path


def mr_series(folder: Path) -> Path:
    write_series(folder / "scan", noise(), words=Words(modality="MR"))
    return folder / "scan"


def two_series(folder: Path) -> Path:
    for name in ("a", "b"):
        write_series(folder / "scan" / name, noise(), words=Words(name=name))
    return folder / "scan"


def ct_series(folder: Path) -> Path:
    write_series(folder / "scan", noise())
    return folder / "scan"


def time_series(folder: Path) -> Path:
    return nifti(folder / "scan.nii", np.zeros((8, 8, 6, 3), np.int16))


def colours(folder: Path) -> Path:
    dtype = np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")])
    return nifti(folder / "scan.nii", np.zeros((8, 8, 6), dtype))


def turned(folder: Path) -> Path:
    return nifti(folder / "scan.nii", noise(), code=0)


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        env=os.environ.copy(),
        check=False,
    )


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (mr_series, [], "MODALITY"),
        (two_series, [], "SERIES_AMBIGUOUS"),
        (ct_series, ["--max-size", "1kB"], "TOO_LARGE"),
        (time_series, [], "FOUR_D"),
        (colours, [], "PIXEL_TYPE"),
        (turned, [], "ORIENTATION_UNKNOWN"),
    ],
)
def test_a_scan_is_refused_by_its_headers_without_torch(
    make: Callable[[Path], Path], options: list[str], reason: str, tmp_path: Path
) -> None:
    scan = make(tmp_path)
    command = ["segment", str(scan), "--model", "ct_tissue", "--out", str(tmp_path / "out")]
    done = run_program(*command, *options)

    assert done.returncode == 65, done.stderr
    assert f"({reason})" in done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
    assert not list((tmp_path / "out").glob("cases/*"))


def test_a_dry_run_plans_a_scan_without_torch(tmp_path: Path) -> None:
    scan, out = ct_series(tmp_path), tmp_path / "out"
    done = run_program("segment", str(scan), "-m", "ct_tissue", "-o", str(out), "--dry-run")

    assert done.returncode == 0, done.stderr
    assert "1 would be segmented" in done.stdout
    assert done.stderr.splitlines()[-1] == "[]"
