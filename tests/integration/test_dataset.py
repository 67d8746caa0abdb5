"""From an archive to training data: segmented, reviewed by the server, corrected, and written."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
import yaml

from scanloom.io.output.crosswalk import find_sources, latest_by_id
from support.canaries import birds
from support.commands import scanloom, write_tiny_bundle
from support.model_cards import smooth_scan
from support.review_cases import Serving, change, judged
from support.write_dicom import Geometry, Words, write_series

FILE = "segmentation.nii.gz"
SCANS = {"one": "CANARY1", "two": "CANARY2", "again": "CANARY2", "bad": "CANARY3", "new": "CANARY4"}
"""Patient of each study; the second one was scanned twice."""


def write_study(archive: Path, n: int, study: str, patient: str) -> None:
    words = Words("CT", study, study, {"PatientID": patient, "PatientName": f"{patient}^Zoë"})
    oblique = Geometry(across=(0.8, 0.6, 0.0), down=(-0.6, 0.8, 0.0))
    stored = (smooth_scan((36, 32, 18), seed=n) + 1024).astype(np.uint16)
    write_series(archive / study, stored, oblique, words=words)


def judge(client: Any, name: str, decision: str) -> None:
    body = judged(client.get(f"/api/case/{name}").json(), decision)
    assert client.post(f"/api/case/{name}/verdict", json=body).status_code == 200


def correct(client: Any, name: str) -> None:
    stroke = {"layer": 0, "plane": "axial", "index": 9, "points": [[9, 9]], "radius_mm": 9.0}
    assert change(client, name, "stroke", **stroke, label=1).json()["changed"] > 0
    assert change(client, name, "draft/save").json() == {"revision": 1}


@pytest.mark.thorough
def test_reviewed_results_of_an_archive_become_training_data(tmp_path: Path) -> None:
    archive, out, key, data = (tmp_path / name for name in ("scans", "out", "key", "data"))
    for n, (study, patient) in enumerate(SCANS.items()):
        write_study(archive, n, study, patient)
    model = write_tiny_bundle(tmp_path / "models")
    workflow = tmp_path / "workflow.yaml"
    execution = {"device": "cpu", "precision": "float32"}
    page = {"name": "test", "models": [str(model)], "execution": execution}
    workflow.write_text(yaml.safe_dump(page))
    command = ["run", workflow, archive, "--out", out, "--cluster", "none", "--key", key]
    ended = scanloom(*command)
    assert ended.code == 0, ended.err
    ids = [folder.name for folder in (out / "cases").iterdir()]
    sources = latest_by_id(find_sources(out, ids))
    cases = {Path(source.path).name: case for case, source in sources.items()}
    assert cases.keys() == SCANS.keys()

    with closing(Serving(out, key)) as server, closing(server.client()) as client:
        for study in ("one", "two"):
            judge(client, cases[study], "accept")
        judge(client, cases["bad"], "reject")
        correct(client, cases["again"])
    assert f"Verdicts: {out / 'review' / 'review.csv'}" in server.said
    ended = scanloom("dataset", out, "-o", data, "--key", key, "--json")

    assert ended.code == 0, ended.err
    taken = {case["case"]: case for case in ended.document["cases"]}
    verdicts = {study: taken[cases[study]]["verdict"] for study in ("one", "two", "again")}
    assert verdicts == {"one": "accepted", "two": "accepted", "again": "corrected"}
    assert ended.document["unselected"] == {"rejected": 1, "unreviewed": 1}
    assert ended.document["patients"] == {"training": 2, "test": 0}
    folds = [taken[cases[study]]["fold"] for study in ("one", "two", "again")]
    assert folds[1] == folds[2] != folds[0]

    document = json.loads((data / "dataset.json").read_text())
    assert document["labels"] == {"0": "background", "1": "spleen", "2": "liver"}
    for study in verdicts:
        image, labels = (
            sitk.ReadImage(str(data / folder / f"{cases[study]}.nii.gz"))
            for folder in ("imagesTr", "labelsTr")
        )
        slices = sitk.ImageSeriesReader.GetGDCMSeriesFileNames(str(archive / study))
        source = sitk.ReadImage(slices)
        for other in (labels, source):
            assert image.GetSize() == other.GetSize()
            np.testing.assert_allclose(image.GetSpacing(), other.GetSpacing(), atol=1e-5)
            np.testing.assert_allclose(image.GetOrigin(), other.GetOrigin(), atol=1e-3)
            np.testing.assert_allclose(image.GetDirection(), other.GetDirection(), atol=1e-5)
        np.testing.assert_array_equal(
            sitk.GetArrayViewFromImage(image), sitk.GetArrayViewFromImage(source)
        )
    stored = np.asarray(nib.load(data / "labelsTr" / f"{cases['again']}.nii.gz").dataobj)
    first = np.asarray(nib.load(out / "cases" / cases["again"] / FILE).dataobj)
    ball = stored != first
    assert ball.any()
    assert set(np.unique(stored[ball])) == {1}
    for file in data.rglob("*"):
        assert not birds(str(file.relative_to(data)).encode())
        if file.is_file():
            content = nib.load(file).header.binaryblock if file.suffix == ".gz" else None
            assert not birds(content or file.read_bytes())

    references = tmp_path / "references"  # by the names of the scans, which case folders don't have
    references.mkdir()
    for study, case in cases.items():
        shutil.copy(out / "cases" / case / FILE, references / f"{study}.nii.gz")
    evaluation = tmp_path / "evaluation"
    ended = scanloom("evaluate", out, "-r", references, "-o", evaluation, "--key", key, "--json")
    assert ended.code == 0, ended.err
    assert ended.document["cases"] == {"first": len(SCANS)}
    assert not ended.document["left_out"]

    (out / "cases" / cases["one"] / FILE).unlink()
    ended = scanloom("dataset", out, "-o", data, "--key", key, "--json")
    assert ended.code == 1, ended.err
    [left_out] = ended.document["left_out"]
    assert (left_out["case"], left_out["reason"]) == (cases["one"], "RESULT_DAMAGED")
    assert {path.name for path in (data / "labelsTr").iterdir()} == {
        f"{cases[study]}.nii.gz" for study in ("two", "again")
    }
