"""Scans are refused by their headers, and planned, before torch is imported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from support.write_dicom import Words, noise, write_series

PROGRAM = """
import json, sys
from scanloom.cli.main import main
for command in json.loads(sys.argv[1]):
    try:
        main(command)
    except SystemExit as end:
        print("ended with", end.code, file=sys.stderr)
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


def run_program(*commands: list[str]) -> subprocess.CompletedProcess[str]:
    """Run commands one after the other in a process of their own."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        capture_output=True,
        text=True,
        env=os.environ.copy(),
        check=False,
    )


REFUSED: list[tuple[Callable[[Path], Path], list[str], str]] = [
    (mr_series, [], "MODALITY"),
    (two_series, [], "SERIES_AMBIGUOUS"),
    (ct_series, ["--max-size", "1kB"], "TOO_LARGE"),
    (time_series, [], "FOUR_D"),
    (colours, [], "PIXEL_TYPE"),
    (turned, [], "ORIENTATION_UNKNOWN"),
]


def test_scans_are_refused_by_their_headers_without_torch(tmp_path: Path) -> None:
    commands = []
    for make, options, reason in REFUSED:
        (tmp_path / reason).mkdir()
        scan, out = make(tmp_path / reason), tmp_path / reason / "out"
        command = ["segment", str(scan), "--model", "ct_tissue", "--out", str(out), *options]
        commands.append(command)
    done = run_program(*commands)

    *ended, modules = re.split(r"ended with (\d+)\n", done.stderr)
    assert ended[1::2] == ["65"] * len(REFUSED), done.stderr
    for text, (_, _, reason) in zip(ended[::2], REFUSED, strict=True):
        assert f"({reason})" in text
    assert modules == "[]\n"
    assert not list(tmp_path.glob("*/out/cases/*"))


def test_a_dry_run_plans_a_scan_without_torch(tmp_path: Path) -> None:
    scan, out = ct_series(tmp_path), tmp_path / "out"
    done = run_program(["segment", str(scan), "-m", "ct_tissue", "-o", str(out), "--dry-run"])

    assert "1 would be segmented" in done.stdout
    assert done.stderr.splitlines()[-2:] == ["ended with 0", "[]"]
