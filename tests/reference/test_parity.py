"""Labels equal those of the programs that models come from, on models with random weights.

`tests/reference/parity` has a script for each program. The Python of an environment with nnunetv2
2.8.1, TotalSegmentator or MONAI 1.6.1 is named by SCANLOOM_NNUNET, SCANLOOM_TOTALSEGMENTATOR or
SCANLOOM_MONAI; SCANLOOM_ZOO names a checkout of github.com/Project-MONAI/model-zoo.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PARITY = Path(__file__).parent / "parity"
pytestmark = pytest.mark.reference


def named_by(variable: str) -> str:
    """Return the value of an environment variable; skip the test if it is not set."""
    if variable not in os.environ:
        pytest.skip(f"{variable} is not set")
    return os.environ[variable]


def compared_by(script: str, *arguments: str) -> str:
    """Return the output of a parity script that ended well."""
    completed = subprocess.run(
        [sys.executable, str(PARITY / script), *arguments],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


@pytest.mark.parametrize("model", ["ct_3d", "ct_resenc", "mr_regions_2d", "sagittal", "cascade"])
def test_labels_are_those_of_nnunets_predictor(model: str, tmp_path: Path) -> None:
    output = compared_by(
        "nnunet_parity.py", str(tmp_path), model, "--env", named_by("SCANLOOM_NNUNET")
    )

    equal = [float(share) for share in re.findall(r"([\d.]+)%  Dice", output)]
    assert equal
    assert min(equal) >= 99.99  # 100 on most processors; oneDNN rounds mirrored windows by kernel


@pytest.mark.parametrize("task", ["body", "total", "total_fast"])
def test_labels_are_those_of_totalsegmentator(task: str, tmp_path: Path) -> None:
    output = compared_by(
        "totalsegmentator_parity.py",
        str(tmp_path),
        task,
        "--env",
        named_by("SCANLOOM_TOTALSEGMENTATOR"),
    )

    equal = [float(share) for share in re.findall(r"([\d.]+)%  Dice", output)]
    assert equal
    assert min(equal) >= 99.95


@pytest.mark.parametrize("bundle", ["spleen_ct_segmentation", "wholeBody_ct_segmentation"])
def test_labels_are_those_of_monais_bundle_runner(bundle: str, tmp_path: Path) -> None:
    python, zoo = named_by("SCANLOOM_MONAI"), named_by("SCANLOOM_ZOO")
    scan = Path(__file__).parents[2] / "data" / "torso_ct.nii.gz"

    output = compared_by(
        "zoo_parity.py",
        zoo,
        str(scan),
        f"--home={python}",
        f"--bundle={bundle}",
        f"--work={tmp_path}",
    )

    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["case"] for row in rows] == ["twice", "oblique"]
    assert all(row["equal"] >= 0.9995 for row in rows)
