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

from scanloom.engine.revisions import Correction, publish_revision
from scanloom.review.revisions import read_label_maps
from scanloom.review.verdicts.verdict import seen_of
from scanloom.training.dataset import DatasetOptions, Form, write_dataset
from support.commands import scanloom
from support.review_cases import affine_of, publish, scan_array

pytestmark = pytest.mark.reference
SHAPE = (40, 36, 30)
NAME = "Dataset501_Parts"
MODEL = "nnUNetTrainer_1epoch__nnUNetPlans__3d_fullres"
VERDICTS = ("corrected", "unreviewed")


class Loop:
    """Six results, one of them corrected, and the folders of nnU-Net.

    Parameters
    ----------
    folder : Path
    cases : list of str
        Ids of the results; the first one is corrected.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for n in range(6):
            publish(folder, scan_array(n, SHAPE), affine_of("LPS", 12.0 * (n % 2)), f"scan{n}")
        self.out, self.key = folder / "out", folder / "key"
        self.cases = sorted(path.name for path in (self.out / "cases").iterdir())
        case = self.out / "cases" / self.cases[0]
        [(file, labels)] = read_label_maps(case).items()
        labels = labels.copy()
        labels[2:7, 3:9, 4:8] = 3
        correction = Correction({file: labels}, "r1", "brush", seen_of(case))
        publish_revision(self.out, self.cases[0], correction, self.key)
        self.corrected = labels
        self.raw, self.prepared = folder / "raw" / NAME, folder / "preprocessed" / NAME

    def write(self, form: Form, folder: Path) -> None:
        options = DatasetOptions(form, VERDICTS, folds=3)
        dataset = write_dataset(self.out, folder, options, self.key)
        assert [case.case for case in dataset.cases] == self.cases

    def nnunet(self, program: str, *arguments: str | Path) -> None:
        """Run a program of nnU-Net, in few processes."""
        programs = Path(os.environ["SCANLOOM_NNUNET"]).parent
        folders = {
            f"nnUNet_{name}": str(self.folder / name) for name in ("raw", "preprocessed", "results")
        }
        few = {"nnUNet_n_proc_DA": "1", "nnUNet_compile": "f", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [programs / f"nnUNetv2_{program}", *arguments],
            env={**os.environ, **folders, **few},
            capture_output=True,
            text=True,
            check=False,
            timeout=1500,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    """A dataset that nnU-Net has preprocessed, after checking all of it."""
    if "SCANLOOM_NNUNET" not in os.environ:
        pytest.skip("SCANLOOM_NNUNET is not set")
    loop = Loop(tmp_path_factory.mktemp("loop"))
    loop.write("nnunet", loop.raw)
    plan = ["-d", "501", "--verify_dataset_integrity", "-c", "3d_fullres", "-npfp", "1", "-np", "1"]
    loop.nnunet("plan_and_preprocess", *plan)
    return loop


def voxels(file: Path) -> np.ndarray:
    return np.asarray(nib.load(file).dataobj)


def test_nnunet_prepares_all_cases_with_the_corrected_labels(loop: Loop) -> None:
    stored = {path.name for path in (loop.prepared / "nnUNetPlans_3d_fullres").glob("*_seg.b2nd")}
    assert stored == {f"{case}_seg.b2nd" for case in loop.cases}
    truth = loop.prepared / "gt_segmentations" / f"{loop.cases[0]}.nii.gz"
    np.testing.assert_array_equal(voxels(truth), loop.corrected)
    plans = json.loads((loop.prepared / "nnUNetPlans.json").read_text())
    normalization = plans["configurations"]["3d_fullres"]["normalization_schemes"]
    assert normalization == ["CTNormalization"]  # the channel is named CT


def test_nnunet_converts_the_dataset_of_the_decathlon(loop: Loop) -> None:
    task = loop.folder / "Task77_Parts"
    loop.write("msd", task)
    loop.nnunet("convert_MSD_dataset", "-i", task, "-np", "1")
    converted = loop.raw.with_name("Dataset077_Parts")
    for case in loop.cases:
        for name in (f"imagesTr/{case}_0000.nii.gz", f"labelsTr/{case}.nii.gz"):
            np.testing.assert_array_equal(voxels(converted / name), voxels(loop.raw / name))


@pytest.mark.slow
def test_nnunet_trains_on_the_dataset_and_its_model_runs_here(loop: Loop) -> None:
    shutil.copy(loop.raw / "splits_final.json", loop.prepared)
    loop.nnunet(
        *("train", "501", "3d_fullres", "0", "-tr", "nnUNetTrainer_1epoch", "-device", "cpu")
    )

    model = loop.folder / "results" / NAME / MODEL
    validated = {path.name for path in (model / "fold_0" / "validation").glob("*.nii.gz")}
    splits = json.loads((loop.raw / "splits_final.json").read_text())
    assert validated == {f"{case}.nii.gz" for case in splits[0]["val"]}
    case = splits[0]["val"][0]
    image = loop.raw / "imagesTr" / f"{case}_0000.nii.gz"
    command = ["segment", image, "--model", model, "--out", loop.folder / "again"]
    ended = scanloom(*command, "--modality", "CT", "--key", loop.key, "--device", "cpu")
    assert ended.code == 0, ended.err
    [labels] = (loop.folder / "again").glob("cases/*/segmentation.nii.gz")
    found = voxels(labels)
    theirs = voxels(model / "fold_0" / "validation" / f"{case}.nii.gz")
    assert (found == theirs).mean() > 0.999
    truth = voxels(loop.raw / "labelsTr" / f"{case}.nii.gz")
    overlap = 2 * ((found > 0) & (truth > 0)).sum() / ((found > 0).sum() + (truth > 0).sum())
    # 250 steps, unseeded, on bright blobs, a tenth of the voxels
    assert overlap > 0.5
