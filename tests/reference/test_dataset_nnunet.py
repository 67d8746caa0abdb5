"""A dataset of results is planned, preprocessed and trained by nnU-Net; its model runs here.

The Python of an environment with nnunetv2 is named by SCANLOOM_NNUNET.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from scanloom.training.dataset import DatasetOptions, write_dataset
from support.commands import scanloom
from support.review_cases import affine_of, publish, scan_array

pytestmark = pytest.mark.reference
SHAPE = (40, 36, 30)
NAME = "Dataset501_Parts"
MODEL = "nnUNetTrainer_1epoch__nnUNetPlans__3d_fullres"


def test_nnunet_trains_on_a_dataset_and_its_model_runs(tmp_path: Path) -> None:
    if "SCANLOOM_NNUNET" not in os.environ:
        pytest.skip("SCANLOOM_NNUNET is not set")
    programs = Path(os.environ["SCANLOOM_NNUNET"]).parent
    for n in range(6):
        publish(tmp_path, scan_array(n, SHAPE), affine_of("LPS"), f"scan{n}")
    options = DatasetOptions("nnunet", ("unreviewed",), folds=3)
    dataset = write_dataset(tmp_path / "out", tmp_path / "raw" / NAME, options, tmp_path / "key")
    assert len(dataset.cases) == 6
    folders = {
        "nnUNet_raw": str(tmp_path / "raw"),
        "nnUNet_preprocessed": str(tmp_path / "preprocessed"),
        "nnUNet_results": str(tmp_path / "results"),
    }
    # one process: the machine of a test has few cores
    quiet = {"nnUNet_n_proc_DA": "1", "nnUNet_compile": "f", "OMP_NUM_THREADS": "1"}

    def run(program: str, *arguments: str) -> None:
        done = subprocess.run(
            [programs / program, *arguments],
            env={**os.environ, **folders, **quiet},
            capture_output=True,
            text=True,
            check=False,
            timeout=1500,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    one = ["-np", "1"]
    configuration = ["-c", "3d_fullres"]
    integrity = "--verify_dataset_integrity"
    run("nnUNetv2_plan_and_preprocess", "-d", "501", integrity, *configuration, "-npfp", "1", *one)
    prepared = tmp_path / "preprocessed" / NAME
    shutil.copy(tmp_path / "raw" / NAME / "splits_final.json", prepared)
    train = ["501", "3d_fullres", "0", "-tr", "nnUNetTrainer_1epoch", "-device", "cpu"]
    run("nnUNetv2_train", *train)

    model = tmp_path / "results" / NAME / MODEL
    validated = {path.name for path in (model / "fold_0" / "validation").glob("*.nii.gz")}
    splits = json.loads((tmp_path / "raw" / NAME / "splits_final.json").read_text())
    assert validated == {f"{case}.nii.gz" for case in splits[0]["val"]}
    case = dataset.cases[0].case
    image = tmp_path / "raw" / NAME / "imagesTr" / f"{case}_0000.nii.gz"
    command = ["segment", image, "--model", model, "--out", tmp_path / "again", "--modality", "CT"]
    ended = scanloom(*command, "--key", tmp_path / "key", "--device", "cpu")
    assert ended.code == 0, ended.err
    [labels] = (tmp_path / "again").glob("cases/*/segmentation.nii.gz")
    found = np.asarray(nib.load(labels).dataobj)
    truth = np.asarray(nib.load(tmp_path / "raw" / NAME / "labelsTr" / f"{case}.nii.gz").dataobj)
    overlap = 2 * ((found > 0) & (truth > 0)).sum() / ((found > 0).sum() + (truth > 0).sum())
    # 250 steps on bright blobs
    assert overlap > 0.8
