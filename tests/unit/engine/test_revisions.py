"""Corrections: labels that come back from another program, and the revision they make."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from scanloom.core import Flag, Grid, Layer, Reason, Relations, ScanError, Segmentation, Structure
from scanloom.core.measurement import Range, ReferenceRange
from scanloom.core.relations import Asymmetry, Share
from scanloom.engine.revisions import Correction, _by_name, publish_revision, take_file
from scanloom.io.extras.segnrrd import write_seg_nrrd
from scanloom.io.output.measurements import read_measurements
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


@pytest.mark.parametrize("document", ["segments.json", "case.json", "case.json of the case"])
def test_no_correction_of_a_damaged_result_is_taken(tmp_path: Path, document: str) -> None:
    case = review_cases.publish(tmp_path, review_cases.scan_array(), review_cases.affine_of())
    [(file, labels)] = read_label_maps(case).items()
    damaged = case
    if "of the case" not in document:
        correction = Correction({file: labels * 0}, "r1", "brush", seen_of(case))
        damaged = publish_revision(tmp_path / "out", case.name, correction, tmp_path / "key")
    (damaged / document.split()[0]).write_text("{")

    with pytest.raises(ScanError) as caught:
        take_file(tmp_path / "out", case / file, case.name, "r1", key=tmp_path / "key")

    assert caught.value.reason is Reason.RESULT_DAMAGED


class WithRanges(review_cases.Bands):
    """Its first structure is usually larger than any scan, and was cut off by a crop."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        large = Range(1e6, 2e6)
        usual = ReferenceRange(self.card.structures[0].label, "volume_ml", large, "A test.")
        self.card = replace(self.card, reference_ranges=(usual,))

    def predict(self, *arguments: Any, **more: Any) -> Segmentation:
        found = super().predict(*arguments, **more)
        cut = (Flag.CROP_CUT,)
        by_label = dict.fromkeys(found.labels, ()) | {found.labels[0]: cut}
        return replace(found, flags=cut, flags_by_label=by_label)


def test_flags_of_a_revision_are_those_of_its_own_labels(tmp_path: Path) -> None:
    """Of a result in which nothing was found, too."""
    scan = tmp_path / "scan.nii.gz"
    array = np.full(review_cases.SHAPE, -900, np.int16)
    array[0, 0, 0] = -800  # a scan of one value is refused
    nib.save(nib.Nifti1Image(array, review_cases.affine_of()), scan)
    case = review_cases.publish_scan(tmp_path, scan, kind=WithRanges)
    assert "EMPTY" in flags_in(case)
    [(file, labels)] = read_label_maps(case).items()
    drawn = labels.copy()
    drawn[4:7, 4:7, 4:7] = 1

    correction = Correction({file: drawn}, "r1", "brush", seen_of(case))
    revision = publish_revision(tmp_path / "out", case.name, correction, tmp_path / "key")

    assert "EMPTY" not in flags_in(revision)
    measured = {m.number: {flag.code for flag in m.flags} for m in read_measurements(revision)}
    assert "OUT_OF_RANGE" in measured[1]
    assert "EMPTY" not in measured[1]
    assert "EMPTY" in measured[2]
    assert [n for n, flags in measured.items() if "CROP_CUT" in flags] == [1]
    correction = Correction({file: labels}, "r1", "brush", seen_of(revision))
    again = publish_revision(tmp_path / "out", case.name, correction, tmp_path / "key")
    assert flags_in(again) == flags_in(case)


def test_shares_and_asymmetries_of_a_revision_are_those_of_its_own_labels(tmp_path: Path) -> None:
    scan = tmp_path / "scan.nii.gz"
    nib.save(nib.Nifti1Image(review_cases.scan_array(), review_cases.affine_of()), scan)
    relations = Relations(
        shares=(Share(("part-1", "part-2"), ("part-1",)),),
        asymmetries=(Asymmetry(("part-2",), ("part-3",)),),
    )
    case = review_cases.publish_scan(tmp_path, scan, relations=relations)
    [(file, labels)] = read_label_maps(case).items()
    drawn = labels.copy()
    drawn[:3, :3, :3] = 1

    correction = Correction({file: drawn}, "r1", "brush", seen_of(case))
    revision = publish_revision(tmp_path / "out", case.name, correction, tmp_path / "key")

    before, after = (read_measurements(each) for each in (case, revision))
    one, two, three = (int((drawn == n).sum()) for n in (1, 2, 3))
    assert after[0].share == pytest.approx(one / (one + two))
    assert after[0].share_of == before[0].share_of == "threshold/part-1 + threshold/part-2"
    assert after[1].asymmetry == pytest.approx(200 * (two - three) / (two + three))
    assert [m.share is None for m in after] == [m.share is None for m in before]


def flags_in(folder: Path) -> list[str]:
    return [each["code"] for each in json.loads((folder / "case.json").read_text())["flags"]]


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
