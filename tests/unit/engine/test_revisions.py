"""Corrections: labels that come back from another program, and the revision they make."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scanloom.core import Grid, Layer, Reason, ScanError, Segmentation, Structure
from scanloom.engine.revisions import Correction, _by_name, publish_revision, take_file
from scanloom.io.extras.segnrrd import write_seg_nrrd
from scanloom.review.label_files import read_label_file
from scanloom.review.revisions import latest_result, read_label_maps
from scanloom.review.verdicts.verdict import seen_of
from support import review_cases
from support.model_cards import TISSUE


def test_our_own_file_comes_back_whatever_its_names(tmp_path: Path) -> None:
    names = ("T1 ~ T2 | left", "a\\nb^2", "Left_kidney  ")
    structures = tuple(
        Structure(f"s{n}", n, name, TISSUE, TISSUE, (n, n, n)) for n, name in enumerate(names, 1)
    )
    labels = np.asfortranarray(np.arange(24).reshape(4, 3, 2) % 4, np.uint8)
    grid = Grid((4, 3, 2), np.eye(4))
    path = tmp_path / "a.seg.nrrd"
    write_seg_nrrd(Segmentation("model", (Layer(labels, structures),), grid), path)
    entry = {
        "file": "a.nii.gz",
        "structures": [{"number": s.number, "name": s.name, "label": s.label} for s in structures],
    }

    before = {"a.nii.gz": np.zeros_like(labels)}
    after = _by_name(read_label_file(path, grid), [entry], before)

    np.testing.assert_array_equal(after["a.nii.gz"], labels)


def test_labels_of_a_result_that_a_run_replaced_are_no_correction_of_the_new_one(
    tmp_path: Path,
) -> None:
    """Neither of them has a revision, and the numbers of their structures may differ."""
    array, affine = review_cases.scan_array(), review_cases.affine_of()
    case = review_cases.publish(tmp_path, array, affine)
    [(file, labels)] = read_label_maps(case).items()
    correction = Correction({file: labels * 0}, "r1", "brush", seen_of(case))
    review_cases.publish(tmp_path, array, affine, recipe="s" * 64)

    with pytest.raises(ScanError) as caught:
        publish_revision(tmp_path / "out", case.name, correction, tmp_path / "key")

    assert caught.value.reason is Reason.CORRECTED
    assert latest_result(tmp_path / "out", case.name) == case


@pytest.mark.parametrize("document", ["segments.json", "case.json"])
def test_no_correction_of_a_damaged_revision_is_taken(tmp_path: Path, document: str) -> None:
    case = review_cases.publish(tmp_path, review_cases.scan_array(), review_cases.affine_of())
    [(file, labels)] = read_label_maps(case).items()
    correction = Correction({file: labels * 0}, "r1", "brush", seen_of(case))
    revision = publish_revision(tmp_path / "out", case.name, correction, tmp_path / "key")
    (revision / document).write_text("{")

    with pytest.raises(ScanError) as caught:
        take_file(tmp_path / "out", case / file, case.name, "r1", key=tmp_path / "key")

    assert caught.value.reason is Reason.RESULT_DAMAGED


def test_a_revision_names_no_files_that_only_the_result_has(tmp_path: Path) -> None:
    array, affine = review_cases.scan_array(), review_cases.affine_of()
    case = review_cases.publish(tmp_path, array, affine, also=("masks", "segnrrd"))
    [(file, labels)] = read_label_maps(case).items()
    other = labels.copy()
    other[3:9, 4:8, 2:6] = 0

    correction = Correction({file: other}, "r1", "brush", seen_of(case))
    revision = publish_revision(tmp_path / "out", case.name, correction, tmp_path / "key")

    outputs = [json.loads((each / "case.json").read_text())["outputs"] for each in (case, revision)]
    assert outputs[0]["also"] == ["masks", "segnrrd"]
    assert outputs[1] == {**outputs[0], "also": []}
    assert not [*revision.rglob("*.nrrd")]
