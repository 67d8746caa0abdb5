"""Training data from results: what is taken, on which grid, with which values and in which set."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import SimpleITK as sitk
from monai.data.decathlon_datalist import load_decathlon_datalist

from scanloom.core import Reason, ScanError
from scanloom.engine.revisions import Correction, publish_revision
from scanloom.io.output.crosswalk import SourceRecord, add_sources, find_sources
from scanloom.io.output.private import locked_folder
from scanloom.review.revisions import latest_result, read_label_maps
from scanloom.review.verdicts.log import VerdictLog
from scanloom.review.verdicts.verdict import Verdict
from scanloom.training import dataset as module
from scanloom.training.dataset import Dataset, DatasetOptions, named_patient, write_dataset
from scanloom.training.label_sets import open_label_set
from support.canaries import birds, plain
from support.commands import scanloom
from support.faults import on_small_disk
from support.layouts import both_layouts, case_folders, fan_by_hand, folder_of
from support.review_cases import affine_of, publish, publish_scan, scan_array, seen
from support.write_dicom import Words, write_series

FILE = "segmentation.nii.gz"
UNREVIEWED = DatasetOptions(verdicts=("accepted", "corrected", "unreviewed"))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three NIfTI files, one with its image in the case folder, and two series of one patient."""
    folder = tmp_path_factory.mktemp("published")
    publish(folder, scan_array(1), affine_of("LAS", 20.0), "one", also=("image",))
    publish(folder, scan_array(2), affine_of("PIR"), "two")
    publish(folder, scan_array(3), affine_of("RAS"), "three")
    for n in (4, 5):
        array = (scan_array(n, (24, 20, 9)) + 1024).astype(np.uint16)
        write_series(folder / f"series{n}", array, words=Words("CT", f"series{n}"))
        publish_scan(folder, folder / f"series{n}")
    return folder


class Results:
    """A copy of an output folder, whose cases are reviewed as the server does it."""

    def __init__(self, source: Path, target: Path, layout: str = "flat") -> None:
        self.out, self.key, self.target = target / "out", source / "key", target
        shutil.copytree(source / "out", self.out, copy_function=shutil.copy2)
        if layout == "fanned":
            fan_by_hand(self.out)
        self.cases = [path.name for path in case_folders(self.out)]

    def decide(
        self,
        case: str,
        decision: str,
        reviewer: str = "r1",
        of_recipe: str | None = None,
        **more: Any,
    ) -> None:
        with closing(VerdictLog(self.out)) as log:
            shown = seen(latest_result(self.out, case))
            shown = replace(shown, recipe=of_recipe or shown.recipe)
            log.append(Verdict(case, reviewer, shown, decision, **more))

    def correct(self, case: str) -> np.ndarray:
        folder = folder_of(self.out, case)
        labels = read_label_maps(folder)[FILE].copy()
        labels[3:9, 4:8, 2:6] = 2
        correction = Correction({FILE: labels}, "r1", "brush", seen(folder))
        publish_revision(self.out, case, correction, self.key)
        return labels

    def write(self, options: DatasetOptions = UNREVIEWED, name: str = "data") -> Dataset:
        return write_dataset(self.out, self.target / name, options, self.key)


@pytest.fixture
def results(published: Path, tmp_path: Path, layout: str) -> Results:
    return Results(published, tmp_path, layout)


def taken(dataset: Dataset) -> dict[str, str]:
    return {case.case: case.status for case in dataset.cases}


def refusal(results: Results, options: DatasetOptions = UNREVIEWED, name: str = "data") -> Reason:
    with pytest.raises(ScanError) as caught:
        results.write(options, name)
    assert not list(results.target.glob(f".{name}.*"))
    return caught.value.reason


# --- which cases ----------------------------------------------------------------------------------


@both_layouts
def test_accepted_and_corrected_cases_are_taken(results: Results) -> None:
    accepted, corrected, edit, rejected, disputed = results.cases
    assert refusal(results, DatasetOptions()) is Reason.NOT_REVIEWED
    assert not (results.target / "data").exists()
    results.decide(accepted, "accept")
    labels = results.correct(corrected)
    results.decide(edit, "edit")
    results.decide(rejected, "reject")
    results.decide(disputed, "accept")
    results.decide(disputed, "reject", "r2")

    dataset = results.write(DatasetOptions())

    assert taken(dataset) == {accepted: "accepted", corrected: "corrected"}
    assert dataset.unselected == {"edit": 1, "rejected": 1, "disagreed": 1}
    stored = nib.load(results.target / "data" / "labelsTr" / f"{corrected}.nii.gz")
    assert stored.header.get_intent()[0] == "label"
    np.testing.assert_array_equal(np.asarray(stored.dataobj), labels)
    assert taken(results.write(DatasetOptions(verdicts=("edit",)), "edit")) == {edit: "edit"}


def test_a_result_that_replaced_a_judged_one_is_stale_until_it_is_judged(results: Results) -> None:
    first, second, *_ = results.cases
    results.decide(first, "accept")
    for case, reviewer in ((first, "r2"), (second, "r1")):  # about what a run made before
        results.decide(case, "reject", reviewer, of_recipe="0" * 64)

    dataset = results.write(DatasetOptions(verdicts=("accepted", "stale")))

    assert taken(dataset) == {first: "accepted", second: "stale"}
    assert results.write(DatasetOptions()).unselected == {"stale": 1, "unreviewed": 3}
    ended = scanloom("dataset", results.out, "-o", results.target / "data", "--key", results.key)
    assert "1 case: stale, replaced since its review: judge it again" in ended.out
    results.decide(second, "accept")
    assert taken(results.write(DatasetOptions())) == dict.fromkeys((first, second), "accepted")


def test_a_decision_about_a_structure_counts_before_that_about_the_case(results: Results) -> None:
    first, second, third, *_ = results.cases
    results.decide(first, "accept", structures={"threshold/part-2": "reject"})
    results.decide(second, "edit", structures={"threshold/part-1": "accept"})
    one = DatasetOptions(structures=("part-1",))

    assert taken(results.write(one)) == {first: "accepted", second: "accepted"}
    assert refusal(results, DatasetOptions(), "all") is Reason.NOT_REVIEWED
    results.decide(third, "accept")
    whole = results.write(DatasetOptions(), "all")
    assert taken(whole) == {third: "accepted"}
    assert whole.unselected == {"rejected": 1, "edit": 1, "unreviewed": 2}


def test_the_majority_of_reviewers_decides(results: Results) -> None:
    case = results.cases[0]
    results.decide(case, "accept")
    results.decide(case, "reject", "r2")
    assert refusal(results, DatasetOptions()) is Reason.NOT_REVIEWED
    results.decide(case, "accept", "r3")
    assert taken(results.write(DatasetOptions())) == {case: "accepted"}


def test_an_accepted_correction_is_both(results: Results) -> None:
    case = results.cases[0]
    results.correct(case)
    with closing(VerdictLog(results.out)) as log:
        log.append(Verdict(case, "r1", seen(latest_result(results.out, case)), "accept"))
    for verdict in ("accepted", "corrected"):
        written = results.write(DatasetOptions(verdicts=(verdict,)), verdict)
        assert taken(written) == {case: "accepted"}
        assert written.cases[0].revision == 1


def test_a_verdict_about_a_result_that_was_corrected_since_does_not_count(
    results: Results,
) -> None:
    case = results.cases[0]
    results.decide(case, "reject")
    results.correct(case)
    assert taken(results.write(DatasetOptions())) == {case: "corrected"}
    ended = scanloom("dataset", results.out, "-o", results.target / "again", "--key", results.key)
    assert "1 case, 1 of them judged by nobody since" in ended.out


def test_a_correction_of_a_replaced_result_counts_until_the_new_one_is_judged(
    tmp_path: Path,
) -> None:
    """The labels are a person's, and the scan is the same."""
    cases = [publish(tmp_path, scan_array(n), affine_of(), str(n)).name for n in range(4)]
    results = Results(tmp_path, tmp_path / "copy")
    corrected, accepted, rejected, smaller = cases
    labels = {case: results.correct(case) for case in cases}
    results.decide(accepted, "accept")
    results.decide(rejected, "reject")
    for n, case in enumerate(cases):  # another model, with other numbers, and with more structures
        layers, new = 2 if case == smaller else 1, "s" * 64
        array, affine = scan_array(n), affine_of()
        publish(results.target, array, affine, str(n), first=5, layers=layers, recipe=new)

    dataset = results.write(DatasetOptions())

    assert taken(dataset) == {corrected: "corrected", accepted: "accepted"}
    assert [case.revision for case in dataset.cases] == [1, 1]
    assert dataset.unselected == {"stale": 1, "unreviewed": 1}
    for case in (corrected, accepted):
        stored = nib.load(results.target / "data" / "labelsTr" / f"{case}.nii.gz")
        np.testing.assert_array_equal(np.asarray(stored.dataobj), labels[case])
    # of the structures that both have, the correction counts
    some = DatasetOptions(structures=("part-1", "part-2", "part-3"))
    assert taken(results.write(some, "some"))[smaller] == "corrected"
    results.decide(corrected, "reject")
    assert taken(results.write(DatasetOptions())) == {accepted: "accepted"}
    results.decide(accepted, "accept")
    assert [case.revision for case in results.write(DatasetOptions()).cases] == [0]


def test_sources_that_changed_or_are_gone_are_left_out(
    published: Path, tmp_path: Path, results: Results
) -> None:
    """The image in a case folder is the scan that was segmented: its source is not needed."""
    scans = published / "scans"
    shutil.copytree(scans, tmp_path / "before", copy_function=shutil.copy2)
    changed = nib.load(scans / "three.nii.gz")
    values = np.asarray(changed.dataobj).copy()
    values[5, 5, 5] += 1
    try:
        for name in ("one", "two"):
            (scans / f"{name}.nii.gz").unlink()
        nib.save(nib.Nifti1Image(values, changed.affine), scans / "three.nii.gz")

        dataset = results.write()
    finally:
        shutil.rmtree(scans)
        shutil.copytree(tmp_path / "before", scans, copy_function=shutil.copy2)

    assert len(dataset.cases) == 3
    reasons = sorted(reason.code for reason, _ in dataset.left_out.values())
    assert reasons == ["NOT_FOUND", "SERIES_DIFFERS"]
    stored = json.loads((results.target / "data" / "scanloom.json").read_text())
    assert stored["left_out"].keys() == dataset.left_out.keys()
    files = {p.name for p in (results.target / "data").rglob("*.nii.gz")}
    assert not any(case in name for case in dataset.left_out for name in files)


def test_a_damaged_result_is_left_out(results: Results) -> None:
    case = results.cases[0]
    file = results.out / "cases" / case / FILE
    file.write_bytes(file.read_bytes()[:-9] + bytes(9))
    dataset = results.write()
    assert dataset.left_out[case][0] is Reason.RESULT_DAMAGED
    assert len(dataset.cases) == len(results.cases) - 1


def test_details_do_not_name_the_folder_of_a_case(results: Results) -> None:
    """It may have the name of a patient."""
    for case in results.cases:
        (results.out / "cases" / case / "timing.json").unlink()
    dataset = results.write()
    assert dataset.left_out
    assert not [text for case, (_, text) in dataset.left_out.items() if case in text]


def test_a_copy_of_a_result_is_left_out(results: Results) -> None:
    folder = results.out / "cases" / results.cases[0]
    shutil.copytree(folder, folder.with_name("backup"))

    dataset = results.write()

    assert [reason for reason, _ in dataset.left_out.values()] == [Reason.RESULT_DAMAGED]
    assert len(dataset.cases) == len(results.cases)


def test_if_all_results_are_damaged_the_dataset_stays(results: Results) -> None:
    results.write()
    before = _contents(results.target / "data")
    for case in results.cases:
        (results.out / "cases" / case / FILE).unlink()
    dataset = results.write()
    assert dataset.cases == ()
    assert dataset.left_out.keys() == set(results.cases)
    assert _contents(results.target / "data") == before


# --- grids and values -----------------------------------------------------------------------------


def test_images_and_labels_lie_where_simpleitk_sees_source_and_result(
    results: Results, published: Path
) -> None:
    dataset = results.write()

    data = results.target / "data"
    assert len(dataset.cases) == 5
    for case in dataset.cases:
        image = sitk.ReadImage(str(data / "imagesTr" / f"{case.case}.nii.gz"))
        labels = sitk.ReadImage(str(data / "labelsTr" / f"{case.case}.nii.gz"))
        result = sitk.ReadImage(str(results.out / "cases" / case.case / FILE))
        for other in (image, result):
            np.testing.assert_allclose(other.GetOrigin(), labels.GetOrigin(), atol=1e-4)
            np.testing.assert_allclose(other.GetDirection(), labels.GetDirection(), atol=1e-6)
        voxels, values = sitk.GetArrayViewFromImage(image), sitk.GetArrayViewFromImage(labels)
        np.testing.assert_array_equal(values, sitk.GetArrayViewFromImage(result))
        # the model labels by intensity: image and labels belong together voxel by voxel
        np.testing.assert_array_equal(values, np.digitize(voxels, (300, 600, 900)))


def test_the_order_of_structures_is_that_of_their_values(results: Results) -> None:
    dataset = results.write(
        DatasetOptions(verdicts=("unreviewed",), structures=("part-3", "part-1"))
    )

    assert dataset.labels == {"part-3": 1, "part-1": 2}
    case = results.cases[0]
    stored = nib.load(results.target / "data" / "labelsTr" / f"{case}.nii.gz")
    before = read_label_maps(results.out / "cases" / case)[FILE]
    expected = np.select([before == 3, before == 1], [1, 2], 0)
    np.testing.assert_array_equal(np.asarray(stored.dataobj), expected)
    unknown = DatasetOptions(verdicts=("unreviewed",), structures=("part-9",))
    assert refusal(results, unknown, "other") is Reason.STRUCTURE_UNKNOWN


def test_a_sheared_scan_becomes_rectangular_with_its_labels(tmp_path: Path) -> None:
    """ITK reads no sheared image."""
    case = publish(tmp_path, scan_array(2), affine_of("PIR", shear=0.8), "two").name

    write_dataset(tmp_path / "out", tmp_path / "data", UNREVIEWED, tmp_path / "key")

    image = sitk.ReadImage(str(tmp_path / "data" / "imagesTr" / f"{case}.nii.gz"))
    labels = sitk.ReadImage(str(tmp_path / "data" / "labelsTr" / f"{case}.nii.gz"))
    assert image.GetDirection() == labels.GetDirection()
    assert image.GetOrigin() == labels.GetOrigin()
    values = sitk.GetArrayViewFromImage(labels)
    np.testing.assert_array_equal(
        values, np.digitize(sitk.GetArrayViewFromImage(image), (300, 600, 900))
    )
    own = nib.load(tmp_path / "out" / "cases" / case / FILE)
    for number in (1, 2, 3):
        at = np.argwhere(np.asarray(own.dataobj) == number).mean(0)
        world = nib.affines.apply_affine(own.affine, at) * (-1, -1, 1)
        index = np.argwhere(values == number).mean(0)[::-1]
        moved = labels.TransformContinuousIndexToPhysicalPoint(index.tolist())
        np.testing.assert_allclose(moved, world, atol=0.75)  # half a voxel


def test_results_of_one_and_two_inputs_are_refused(results: Results) -> None:
    timing = results.out / "cases" / results.cases[0] / "timing.json"
    document = json.loads(timing.read_text())
    timing.write_text(json.dumps(document | {"source_stamp": "a b"}))
    assert refusal(results) is Reason.CHANNELS


def test_overlaps_are_refused_unless_an_order_is_given(tmp_path: Path) -> None:
    case = publish(tmp_path, scan_array(2), affine_of(), "two", layers=2).name
    out, key = tmp_path / "out", tmp_path / "key"

    dataset = write_dataset(out, tmp_path / "data", UNREVIEWED, key)

    assert {each: reason for each, (reason, _) in dataset.left_out.items()} == {
        case: Reason.LABELS_OVERLAP
    }
    assert "overlap" in dataset.left_out[case][1]
    assert not (tmp_path / "data").exists()
    order = tuple(f"part-{n}" for n in (4, 5, 6, 1, 2, 3))
    options = DatasetOptions(verdicts=("unreviewed",), structures=order)
    write_dataset(out, tmp_path / "data", options, key)
    stored = np.asarray(nib.load(tmp_path / "data" / "labelsTr" / f"{case}.nii.gz").dataobj)
    maps = read_label_maps(out / "cases" / case)
    above, below = maps[FILE], maps["segmentation-2.nii.gz"]
    expected = np.where(above > 0, above + 3, np.where(below > 0, below - 3, 0))
    np.testing.assert_array_equal(stored, expected)


def test_a_covered_overlap_is_not_kept_for_a_dataset_without_an_order(tmp_path: Path) -> None:
    case = publish(tmp_path, scan_array(2), affine_of(), "two", layers=2).name
    out, key = tmp_path / "out", tmp_path / "key"
    order = tuple(f"part-{n}" for n in range(1, 7))  # the values are those without an order
    options = DatasetOptions(verdicts=("unreviewed",), structures=order)
    write_dataset(out, tmp_path / "data", options, key)
    again = write_dataset(out, tmp_path / "data", UNREVIEWED, key)
    assert again.left_out[case][0] is Reason.LABELS_OVERLAP


def test_structures_that_only_some_results_have_are_to_be_chosen(tmp_path: Path) -> None:
    cases = {
        publish(tmp_path, scan_array(n), affine_of(), f"scan{n}", layers=n).name for n in (1, 2)
    }
    arguments = tmp_path / "out", tmp_path / "data"

    with pytest.raises(ScanError, match="only some results have part-4, part-5, part-6") as caught:
        write_dataset(*arguments, UNREVIEWED, tmp_path / "key")

    assert caught.value.reason is Reason.STRUCTURE_UNKNOWN
    shared = replace(UNREVIEWED, structures=("part-2", "part-1"))
    assert taken(write_dataset(*arguments, shared, tmp_path / "key")).keys() == cases
    few = replace(UNREVIEWED, structures=("part-4", "part-1"))
    dataset = write_dataset(*arguments, few, tmp_path / "key")
    assert len(dataset.cases) == 1
    assert [detail for _, detail in dataset.left_out.values()] == ["the result has no part-4"]


def test_structures_of_models_with_other_numbers_are_the_same_by_code(tmp_path: Path) -> None:
    publish(tmp_path, scan_array(2), affine_of(), "two", first=5)
    publish(tmp_path, scan_array(3), affine_of(), "three")
    entries = [
        json.loads(file.read_text())["files"][0]["structures"][0]
        for file in tmp_path.glob("out/cases/*/segments.json")
    ]
    assert {entry["number"] for entry in entries} == {1, 5}

    dataset = write_dataset(tmp_path / "out", tmp_path / "data", UNREVIEWED, tmp_path / "key")

    assert sorted(dataset.labels.values()) == [1, 2, 3]
    for case in dataset.cases:
        image, labels = (
            np.asarray(nib.load(tmp_path / "data" / f"{kind}Tr" / f"{case.case}.nii.gz").dataobj)
            for kind in ("images", "labels")
        )
        np.testing.assert_array_equal(labels, np.digitize(image, (300, 600, 900)))


# --- folders --------------------------------------------------------------------------------------


def test_images_are_linked_and_label_maps_copied(results: Results) -> None:
    """Programs that correct labels write files in their place."""
    results.write()
    data = results.target / "data"
    for case in results.cases:
        label, stored = data / "labelsTr" / f"{case}.nii.gz", results.out / "cases" / case / FILE
        assert label.read_bytes() == stored.read_bytes()
        assert label.stat().st_nlink == 1
    [image] = results.out.glob("cases/*/image.nii.gz")
    assert (data / "imagesTr" / f"{image.parent.name}.nii.gz").samefile(image)


def test_a_label_map_that_was_drawn_in_the_dataset_is_not_lost(results: Results) -> None:
    results.write()
    case = results.cases[1]
    label = results.target / "data" / "labelsTr" / f"{case}.nii.gz"
    content = label.read_bytes()
    shutil.copyfile(label, results.target / "copy")
    drawn = nib.load(label)
    array = np.asarray(drawn.dataobj).copy()
    array[3:9, 4:8, 2:6] = 2
    nib.save(nib.Nifti1Image(array, drawn.affine), label)
    changed = label.read_bytes()
    results.decide(case, "reject")

    assert refusal(results) is Reason.OUTPUT_UNWRITABLE

    assert label.read_bytes() == changed
    label.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # of the same size
    assert refusal(results) is Reason.OUTPUT_UNWRITABLE
    shutil.copyfile(results.target / "copy", label)  # has another time
    results.decide(case, "accept")
    results.write()
    label.unlink()
    results.write()
    assert label.read_bytes() == content


def test_a_result_that_is_replaced_meanwhile_is_left_out(results: Results) -> None:
    """Nobody saw the new one."""
    judged, replaced, corrected, *_ = results.cases
    for case in (judged, replaced):
        results.decide(case, "accept")
    results.correct(corrected)

    def run_again(done: int, total: int) -> None:
        if done == 1:
            for case in (replaced, corrected):
                file = folder_of(results.out, case) / "case.json"
                file.write_text(file.read_text().replace("r" * 64, "s" * 64))

    data = results.target / "data"
    dataset = write_dataset(results.out, data, DatasetOptions(), results.key, run_again)

    assert taken(dataset) == {judged: "accepted"}
    assert {case: reason for case, (reason, _) in dataset.left_out.items()} == {
        replaced: Reason.NOT_REVIEWED,
        corrected: Reason.NOT_REVIEWED,
    }
    assert [p.name for p in (data / "labelsTr").iterdir()] == [f"{judged}.nii.gz"]


def test_without_hard_links_files_are_copied(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(18, "another file system")

    monkeypatch.setattr(module.os, "link", refuse)
    results.write()
    for case in results.cases:
        label = results.target / "data" / "labelsTr" / f"{case}.nii.gz"
        assert label.read_bytes() == (results.out / "cases" / case / FILE).read_bytes()
        assert label.stat().st_nlink == 1


def test_a_second_run_adds_updates_and_removes(results: Results) -> None:
    first, second, third, *_ = results.cases
    for case in (first, second):
        results.decide(case, "accept")
    results.write(DatasetOptions())
    images = {p.name: p.stat() for p in (results.target / "data" / "imagesTr").iterdir()}
    results.decide(third, "accept")
    results.decide(second, "reject")
    labels = results.correct(first)

    dataset = results.write(DatasetOptions())

    assert taken(dataset) == {first: "corrected", third: "accepted"}
    data = results.target / "data"
    names = {f"{case}.nii.gz" for case in (first, third)}
    for folder in ("imagesTr", "labelsTr"):
        assert {p.name for p in (data / folder).iterdir()} == names
    kept = data / "imagesTr" / f"{first}.nii.gz"
    assert kept.stat().st_ino == images[kept.name].st_ino  # the scan is not read again
    stored = nib.load(data / "labelsTr" / f"{first}.nii.gz")
    np.testing.assert_array_equal(np.asarray(stored.dataobj), labels)
    assert not list(results.target.glob(".data.*"))


def test_a_file_that_was_changed_in_the_dataset_is_made_again(results: Results) -> None:
    results.write()
    image = results.target / "data" / "imagesTr" / f"{results.cases[-1]}.nii.gz"
    content = image.read_bytes()
    image.unlink()
    image.write_bytes(content[:-50])

    results.write()

    assert nib.load(image).get_fdata().any()
    assert image.stat().st_size == len(content)


def test_a_folder_that_is_not_ours_is_refused(results: Results, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "diary.txt").write_text("Tuesday")
    assert refusal(results) is Reason.OUTPUT_UNWRITABLE
    assert (tmp_path / "data" / "diary.txt").read_text() == "Tuesday"
    results.write(name="ours")
    (tmp_path / "ours" / "diary.txt").write_text("Wednesday")
    assert refusal(results, name="ours") is Reason.OUTPUT_UNWRITABLE
    assert refusal(results, name="out/data") is Reason.OUTPUT_UNWRITABLE
    (tmp_path / "ours" / "diary.txt").unlink()
    nnunet = DatasetOptions("nnunet", UNREVIEWED.verdicts)
    assert refusal(results, nnunet, "ours") is Reason.OUTPUT_UNWRITABLE
    other = DatasetOptions("monai", UNREVIEWED.verdicts)
    assert refusal(results, other, "ours") is Reason.OUTPUT_UNWRITABLE
    (tmp_path / "empty").mkdir()
    results.write(name="empty")


def test_a_record_that_names_files_elsewhere_is_refused(results: Results) -> None:
    """Who can write to the dataset's folder gets no file of its user by a link."""
    results.write()
    secret, record = results.target / "secret", results.target / "data" / "scanloom.json"
    secret.write_text("the diary")
    document = json.loads(record.read_text())
    files = document["cases"][0]["files"]
    state = secret.stat()
    *_, labels = files.items()
    stamp = [state.st_size, state.st_mtime_ns]
    document["cases"][0]["files"] = {"../secret": stamp, labels[0]: labels[1]}
    [image] = files.keys() - {labels[0]}
    (results.target / "data" / image).unlink()
    record.write_text(json.dumps(document))
    assert refusal(results) is Reason.OUTPUT_UNWRITABLE
    assert secret.stat().st_nlink == 1


def test_a_file_in_the_place_of_the_folder_stays(results: Results, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("Tuesday")
    assert refusal(results) is Reason.OUTPUT_UNWRITABLE
    assert (tmp_path / "data").read_text() == "Tuesday"


def test_a_file_that_comes_while_a_dataset_is_written_is_not_lost(results: Results) -> None:
    results.write()
    data = results.target / "data"
    before = {p.relative_to(data): p.read_bytes() for p in data.rglob("*") if p.is_file()}

    def save(done: int, total: int) -> None:
        (data / "predictions").mkdir(exist_ok=True)
        (data / "predictions" / "model.pt").write_text("weights")

    with pytest.raises(ScanError) as caught:
        write_dataset(results.out, data, UNREVIEWED, results.key, save)

    assert caught.value.reason is Reason.OUTPUT_UNWRITABLE
    after = {p.relative_to(data): p.read_bytes() for p in data.rglob("*") if p.is_file()}
    assert after == {**before, Path("predictions/model.pt"): b"weights"}
    assert not list(results.target.glob(".data.*"))


def test_a_dataset_whose_replacing_was_killed_is_put_back(results: Results) -> None:
    """Its files are not made again; the draft of a process that lives is left alone."""
    results.write()
    data, draft = results.target / "data", results.target / ".data.0123abcd"
    data.chmod(0o750)
    inode = (data / "imagesTr" / f"{results.cases[-1]}.nii.gz").stat().st_ino
    (draft / "0123456789abcdef").mkdir(parents=True)
    data.rename(draft / "before")
    alive = results.target / ".data.4567abcd"
    (alive / "0123456789abcdef").mkdir(parents=True)
    descriptor = os.open(alive, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)

        results.write()

        assert not draft.exists()
        assert alive.exists()
    finally:
        os.close(descriptor)
    assert (data / "imagesTr" / f"{results.cases[-1]}.nii.gz").stat().st_ino == inode
    assert stat.S_IMODE(data.stat().st_mode) == 0o750
    results.write()
    assert not alive.exists()


def test_two_processes_may_write_one_dataset(results: Results) -> None:
    """Neither removes the draft of the other; the first whole dataset is not lost."""

    def also(done: int, total: int) -> None:
        if done == 1:
            results.write()

    with pytest.raises(ScanError) as caught:
        write_dataset(results.out, results.target / "data", UNREVIEWED, results.key, also)
    assert caught.value.reason is Reason.OUTPUT_UNWRITABLE
    assert len(_contents(results.target / "data")) == 2 * len(results.cases) + 2
    write_dataset(results.out, results.target / "data", UNREVIEWED, results.key, also)
    assert not list(results.target.glob(".data.*"))


def test_a_folder_that_is_only_named_like_a_draft_stays(results: Results) -> None:
    for inside in ("before/diary.txt", "0123456789abcdef/diary.txt"):
        backup = results.target / ".data.20261124" / inside
        backup.parent.mkdir(parents=True)
        backup.with_name("diary.txt").write_text("Tuesday")
    (results.target / ".data.20261124" / "diary.txt").write_text("Wednesday")
    results.write()
    assert len([*results.target.glob(".data.20261124/**/diary.txt")]) == 3


def test_a_failure_leaves_the_dataset_as_it_was(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    results.write()
    before = {p: p.read_bytes() for p in results.target.glob("data/**/*") if p.is_file()}
    results.correct(results.cases[0])

    def full(path: Path) -> None:
        if path.name == "scanloom.json":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "fsync_path", full)

    assert refusal(results) is Reason.DISK_FULL
    after = {p: p.read_bytes() for p in results.target.glob("data/**/*") if p.is_file()}
    assert after == before


KILLED = Path(__file__).parents[2] / "support" / "killed_command.py"


@pytest.mark.slow
def test_killed_at_any_moment_the_dataset_is_the_old_one_or_the_new_one(results: Results) -> None:
    for case in results.cases[:3]:
        results.decide(case, "accept")
    watched = results.target / "watched"
    write_dataset(results.out, watched / "data", DatasetOptions(), results.key)
    old = _contents(watched / "data")
    results.decide(results.cases[1], "reject")
    results.decide(results.cases[3], "accept")
    results.correct(results.cases[0])
    command = ["dataset", results.out, "-o", watched / "data", "--key", results.key]

    def kill(*moments: int) -> list[str]:
        call = [sys.executable, KILLED, watched, ",".join(map(str, moments)), *command]
        done = subprocess.run([*map(str, call)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [line.partition(" ")[2] for line in done.stdout.splitlines()]

    [count] = kill(-1)
    new = _contents(results.target / "watched--1" / "data")
    assert new.keys() != old.keys()
    shutil.rmtree(results.target / "watched-before")
    moments = range(int(count))
    assert set(kill(*moments)) == {"killed"}

    gone = 0
    for moment in moments:
        left = results.target / f"watched-{moment}"
        now = _contents(left / "data")
        gone += not now
        assert now in ({}, old, new), moment
        write_dataset(results.out, left / "data", DatasetOptions(), results.key)
        assert _contents(left / "data") == new
        # a draft that its process had not yet filled may be that of another one
        assert not any(any(draft.iterdir()) for draft in left.glob(".data.*")), moment
    assert gone < 3  # between two renames


def _contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a dataset, without the record's times of change."""
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    record = files.pop("scanloom.json", None)
    contents = {name: path.read_bytes() for name, path in files.items()}
    if record is not None:
        document = json.loads(record.read_text())
        for case in document["cases"]:
            case["files"] = [*case["files"]]
        contents["scanloom.json"] = json.dumps(document).encode()
    return contents


FULL = """
mount -t tmpfs -o size=16k none "$1"; disk=$1; shift
scanloom "$@"; echo "code $?"
ls -A "$disk"
"""


@pytest.mark.thorough
def test_on_a_full_disk_nothing_stays(results: Results) -> None:
    disk = results.target / "disk"
    command = ["dataset", results.out, "-o", disk / "data", "--key", results.key]
    output = on_small_disk(FULL, [disk, *command, "--verdict", "unreviewed"])
    assert "DISK_FULL" in output
    assert output.endswith("code 74\n"), output


# --- patients -------------------------------------------------------------------------------------


def test_nobody_is_on_both_sides_and_nobody_changes_sides(published: Path, tmp_path: Path) -> None:
    """The two series are of one patient; results that are added move nobody."""
    results = Results(published, tmp_path)
    options = DatasetOptions(verdicts=UNREVIEWED.verdicts, test_share=0.5)
    whole = results.write(options)

    series = [case for case in whole.cases if case.case in _dicom(results)]
    assert len(series) == 2
    assert len({(case.test, case.fold) for case in series}) == 1
    assert sum(whole.patients) == 4
    assert whole.unidentified == 3
    sides = {case.case: case.test for case in whole.cases}
    for case in results.cases[:2]:
        shutil.rmtree(results.out / "cases" / case)
    fewer = {case.case: case.test for case in results.write(options).cases}
    assert fewer == {case: sides[case] for case in fewer}


def _dicom(results: Results) -> set[str]:
    files = results.out.glob("cases/*/case.json")
    documents = [json.loads(file.read_text()) for file in files]
    return {each["case"] for each in documents if each["source"]["kind"] == "dicom"}


@pytest.mark.parametrize("names", [True, False])
def test_subjects_of_bids_are_patients(tmp_path: Path, names: bool) -> None:
    for n, name in enumerate(("sub-01_T1w", "sub-01_run-2_T1w", "sub-02_T1w")):
        publish(tmp_path, scan_array(n), affine_of(), name if names else f"scan{n}")
    dataset = write_dataset(tmp_path / "out", tmp_path / "data", UNREVIEWED, tmp_path / "key")
    assert dataset.patients == ((2, 0) if names else (3, 0))
    assert dataset.unidentified == (0 if names else 3)
    assert dataset.folds == (2 if names else 3)
    out = open_label_set(tmp_path / "out", tmp_path / "key")  # for an evaluation, as here
    patients = {case.patient for case in out.cases}
    assert len(patients) == 2 and "" not in patients if names else patients == {""}
    for folder in ("data", "data/labelsTr"):
        labels = open_label_set(tmp_path / folder)
        assert len({case.patient for case in labels.cases} - {""}) == (2 if names else 3)


def test_empty_ends_of_a_name_make_no_other_patient(tmp_path: Path) -> None:
    names = ("DOE^JANE", "DOE^JANE^^", "Doe^Jane ^ =^=", "DOE^JANE^^DR", "^^")
    for n, name in enumerate(names):
        more = {"PatientID": "", "PatientName": name}
        array = (scan_array(n, (24, 20, 9)) + 1024).astype(np.uint16)
        words = Words("CT", f"series{n}", f"study{n}", more)
        write_series(tmp_path / f"series{n}", array, words=words)
        publish_scan(tmp_path, tmp_path / f"series{n}")

    dataset = write_dataset(tmp_path / "out", tmp_path / "data", UNREVIEWED, tmp_path / "key")

    assert dataset.patients == (3, 0)
    assert dataset.unidentified == 0
    [jane] = {each.patient for each in dataset.cases if _name(tmp_path, each.case) in names[:3]}
    assert [each.patient for each in dataset.cases].count(jane) == 3


def _name(folder: Path, case: str) -> str:
    [source] = find_sources(folder / "out", [case])
    return source.patient_name


@pytest.mark.parametrize("name", ["doe^jane", "^jane", "doe^^^dr", "doe =山田^花子"])
def test_other_names_keep_their_key(name: str) -> None:
    """Whoever is set aside for testing stays so with a later version."""
    record = SourceRecord("id", "dicom", "/scan", 1, patient_name=name)
    assert named_patient(record) == f"patient_name {name}"


def test_volumes_of_one_file_are_of_one_patient(tmp_path: Path) -> None:
    """Also if those were accepted first that now are not the first of their file."""
    publish(tmp_path, scan_array(1), affine_of(), "other")
    publish(tmp_path, scan_array(2), affine_of(), "first")
    case = publish(tmp_path, scan_array(3), affine_of(), "second").name
    table = tmp_path / "out" / "private" / "crosswalk.parquet"
    rows = pq.read_table(table).to_pylist()
    together = next(row["path"] for row in rows if row["id"] == case)
    for row in rows:
        row["path"] = row["path"].replace("first.nii", "second.nii")
    assert [row["path"] for row in rows].count(together) == 2
    pq.write_table(pa.Table.from_pylist(rows, pq.read_schema(table)), table)
    firsts = [row["id"] for row in rows if row["path"] == together]

    texts = [
        {each: patients[each] for each in firsts if each in patients}
        for cases in (firsts, firsts[:1], firsts[1:])
        for patients, _ in [module._patients(tmp_path / "out", cases)]
    ]

    assert len({text for each in texts for text in each.values()}) == 1


def test_splits_that_leave_a_set_empty_are_refused(results: Results) -> None:
    folds = DatasetOptions(verdicts=UNREVIEWED.verdicts, folds=5)
    assert refusal(results, folds) is Reason.TOO_FEW_PATIENTS
    share = DatasetOptions(verdicts=UNREVIEWED.verdicts, test_share=1e-6)
    assert refusal(results, share) is Reason.TOO_FEW_PATIENTS
    assert not (results.target / "data").exists()


# --- other programs -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["msd", "monai"])
def test_monai_reads_the_lists(form: str, results: Results) -> None:
    options = DatasetOptions(form, UNREVIEWED.verdicts, test_share=0.5)
    dataset = results.write(options)

    file = results.target / "data" / ("dataset.json" if form == "msd" else "datalist.json")
    keys = ("training", "test") if form == "msd" else ("training", "validation", "testing")
    lists = {
        key: load_decathlon_datalist(file, is_segmentation=True, data_list_key=key) for key in keys
    }
    names = [Path(entry["image"]).name[:26] for key in keys for entry in lists[key]]
    assert sorted(names) == results.cases
    test = {case.case for case in dataset.cases if case.test}
    assert {Path(entry["image"]).name[:26] for entry in lists[keys[-1]]} == test
    for key in keys:
        for entry in lists[key]:
            assert Path(entry["image"]).is_file()
            assert key == "test" or Path(entry["label"]).is_file()
    if form == "monai":
        assert {entry["fold"] for entry in lists["validation"]} == {0}
        assert 0 not in {entry["fold"] for entry in lists["training"]}


def test_the_folder_of_nnunet_has_its_names_and_splits(results: Results) -> None:
    options = DatasetOptions("nnunet", UNREVIEWED.verdicts, folds=3)
    dataset = results.write(options, "Dataset501_Parts")

    data = results.target / "Dataset501_Parts"
    document = json.loads((data / "dataset.json").read_text())
    assert document["channel_names"] == {"0": "CT"}
    assert document["labels"] == {"background": 0, "part-1": 1, "part-2": 2, "part-3": 3}
    assert document["numTraining"] == 5
    images = sorted(path.name for path in (data / "imagesTr").iterdir())
    assert images == [f"{case}_0000.nii.gz" for case in results.cases]
    splits = json.loads((data / "splits_final.json").read_text())
    assert sorted(case for split in splits for case in split["val"]) == results.cases
    for n, split in enumerate(splits):
        assert sorted(split["train"] + split["val"]) == results.cases
        assert set(split["val"]) == {case.case for case in dataset.cases if case.fold == n}


@pytest.mark.thorough
def test_nobody_is_named(tmp_path: Path) -> None:
    plain(tmp_path / "scans")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that are too long
        publish_scan(tmp_path, tmp_path / "scans")
    publish(tmp_path, scan_array(1), affine_of(), "CANARY")
    path = tmp_path / "scans" / "CANARY.nii.gz"
    image = nib.load(path)
    image.header["descrip"] = image.header["intent_name"] = b"CANARY"
    nib.save(image, tmp_path / "scans" / "CANARY2.nii.gz")
    publish_scan(tmp_path, tmp_path / "scans" / "CANARY2.nii.gz")

    for form in ("msd", "nnunet", "monai"):
        options = DatasetOptions(form, UNREVIEWED.verdicts)
        folder = tmp_path / form / "Dataset501_x"
        dataset = write_dataset(tmp_path / "out", folder, options, tmp_path / "key")
        assert len(dataset.cases) == 3
        for file in folder.rglob("*"):
            assert not birds(str(file.relative_to(folder)).encode())
            if file.suffix == ".gz":
                header = nib.load(file).header
                assert bytes(header["descrip"]).strip(b"\0") == b""
                assert bytes(header["intent_name"]).strip(b"\0") == b""
                assert not birds(header.binaryblock)
            elif file.is_file():
                assert not birds(file.read_bytes())


def test_names_of_case_folders_stay_behind(results: Results) -> None:
    """With `--names source` they are PatientIDs."""
    out, names = results.out, dict(zip(results.cases, ("CANARY-1", "CANARY-2"), strict=False))
    sources = [replace(each, folder=names[each.id]) for each in find_sources(out, [*names])]
    with locked_folder(out / "private"):
        add_sources(out / "private", sources)
    for case, name in names.items():
        (out / "cases" / case).rename(out / "cases" / name)
    (out / "cases" / "CANARY-2" / FILE).unlink()

    dataset = results.write()

    assert results.cases[0] in taken(dataset)
    assert len(dataset.left_out) == 1
    for file in (results.target / "data").rglob("*"):
        assert "CANARY" not in str(file.relative_to(results.target))
        assert file.suffix != ".json" or "CANARY" not in file.read_text()


# --- the command ----------------------------------------------------------------------------------


def test_the_command_for_nnunet_can_be_pasted(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(results.target)
    folder = "my data/Dataset001_X"
    taken = ("--verdict", "unreviewed", "--format", "nnunet", "--model", "threshold")
    ended = scanloom("dataset", results.out, "-o", folder, "--key", results.key, *taken)
    [line] = [line for line in ended.out.splitlines() if line.startswith("cp ")]
    assert shlex.split(line)[1] == f"{folder}/splits_final.json"


def test_the_command_says_what_it_took_and_left_out(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted, rejected, damaged, *_ = results.cases
    results.decide(accepted, "accept")
    results.decide(rejected, "reject")
    results.decide(damaged, "accept")
    (results.out / "cases" / damaged / FILE).unlink()
    monkeypatch.chdir(results.target)
    command = ["dataset", results.out, "-o", "data", "--key", results.key]

    ended = scanloom(*command)
    document = scanloom(*command, "--json").document

    assert ended.code == 1, ended.err
    assert "1 case of 1 patient" in ended.out
    assert f"{damaged}: a file of the result is damaged (RESULT_DAMAGED)" in ended.out
    assert "1 case: rejected" in ended.out
    assert "Dataset: data\n" in ended.out
    assert [case["case"] for case in document["cases"]] == [accepted]
    assert document["left_out"][0]["reason"] == "RESULT_DAMAGED"
    assert scanloom(*command, "--verdict", "perfect").code == 2
    assert scanloom(*command, "--structures", "part-1,part-1").code == 2
