"""Cases and structures of an evaluation are matched by name, and none is dropped in silence."""

from __future__ import annotations

import base64
import csv
import json
import os
import re
import shutil
import unicodedata
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import highdicom as hd
import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
from pyarrow import parquet
from pydicom import Dataset, dcmread
from pydicom.dataset import FileMetaDataset
from pydicom.sr.codedict import codes
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian

from scanloom.core import Grid, Reason, ScanError
from scanloom.engine.revisions import take_file
from scanloom.review.label_files import read_label_file
from scanloom.review.revisions import read_label_map
from scanloom.review.verdicts.log import VerdictLog
from scanloom.review.verdicts.verdict import Verdict
from scanloom.training.evaluate import Evaluation, evaluate
from scanloom.training.evaluation_page import _volume_plot, render_page
from scanloom.training.label_sets import LabelSet, open_label_set
from support.commands import Ended, scanloom
from support.review_cases import KEY, affine_of, publish, scan_array, seen

SHAPE = (20, 18, 12)
AFFINE = affine_of("LAS")
DATASET = {"labels": {"0": "background", "1": "Anterior", "2": "Posterior"}}


def two_boxes(shift: int = 0) -> np.ndarray:
    """Return labels 1 and 2: boxes side by side, moved along the first axis."""
    array = np.zeros(SHAPE, np.uint8)
    array[3 + shift : 9 + shift, 4:12, 3:9] = 1
    array[9 + shift : 15 + shift, 4:12, 3:9] = 2
    return array


def save(path: Path, array: np.ndarray, affine: np.ndarray = AFFINE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, affine), path)
    return path


def write(path: Path, document: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def run(folder: Path, predictions: str, references: str, *more: str | Path) -> Ended:
    paths = (folder / predictions, "--reference", folder / references)
    return scanloom("evaluate", *paths, "--out", folder / "evaluation", *more)


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "evaluation" / "evaluation.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def evaluated(predictions: Path, references: Path, **more: object) -> Evaluation:
    return evaluate(open_label_set(predictions), open_label_set(references), **more)  # type: ignore[arg-type]  # any keywords


def test_known_errors_are_in_the_table_and_the_same_in_parquet(tmp_path: Path) -> None:
    for name in "abc":
        save(tmp_path / f"references/{name}.nii.gz", two_boxes())
    save(tmp_path / "predictions/a.nii.gz", two_boxes())
    save(tmp_path / "predictions/b.nii.gz", np.where(two_boxes() == 2, 0, two_boxes()))
    save(tmp_path / "predictions/c.nii.gz", two_boxes(shift=1))
    assert run(tmp_path, "predictions", "references").code == 0
    rows = table(tmp_path)
    ml = 6 * 8 * 6 * float(np.prod(np.linalg.norm(AFFINE[:3, :3], axis=0))) / 1000
    by_key = {(r["case"], r["structure"]): r for r in rows}
    assert len(rows) == len(by_key) == 6
    assert [float(r["reference_ml"]) for r in rows] == [pytest.approx(ml, rel=1e-6)] * 6
    perfect, missed, moved = by_key["a", "1"], by_key["b", "2"], by_key["c", "2"]
    assert (perfect["dice"], perfect["nsd"], perfect["hd95_mm"]) == ("1.0", "1.0", "0.0")
    assert (missed["outcome"], missed["dice"], missed["hd95_mm"]) == ("missed", "0.0", "")
    assert float(missed["volume_error_percent"]) == -100
    assert float(moved["dice"]) == pytest.approx(5 / 6, rel=1e-6)
    assert float(moved["hd95_mm"]) == pytest.approx(1.25)
    columns = parquet.read_table(tmp_path / "evaluation/evaluation.parquet").to_pylist()
    assert [{k: "" if v is None else str(v) for k, v in row.items()} for row in columns] == rows
    document = json.loads((tmp_path / "evaluation/evaluation.json").read_text())
    [_, second] = document["structures"]
    assert (second["found"], second["missed"], second["invented"]) == (2, 1, 0)


def test_cases_without_a_partner_or_on_another_grid_are_named_and_counted(tmp_path: Path) -> None:
    for name in ("good", "unpredicted", "resampled", "moved", "damaged", "fractions"):
        save(tmp_path / f"references/{name}.nii.gz", two_boxes())
    save(tmp_path / "predictions/good.nii.gz", two_boxes())
    save(tmp_path / "predictions/unreferenced.nii.gz", two_boxes())
    save(tmp_path / "predictions/resampled.nii.gz", two_boxes()[::2])
    moved = AFFINE.copy()
    moved[0, 3] += 3
    save(tmp_path / "predictions/moved.nii.gz", two_boxes(), moved)
    (tmp_path / "predictions/damaged.nii.gz").write_bytes(b"\x1f\x8b no gzip")
    save(tmp_path / "predictions/fractions.nii.gz", two_boxes() * np.float32(0.5))
    ended = run(tmp_path, "predictions", "references")
    assert ended.code == 1
    reasons = {row["case"]: row["reason"] for row in table(tmp_path) if row["reason"]}
    damaged = reasons.pop("damaged")
    assert reasons == {
        "unpredicted": "NO_PREDICTION",
        "unreferenced": "NO_REFERENCE",
        "resampled": "GRID_DIFFERS",
        "moved": "GRID_DIFFERS",
        "fractions": "LABELS_UNKNOWN",
    }
    assert damaged in {"DAMAGED", "TRUNCATED"}
    assert {row["case"] for row in table(tmp_path) if not row["reason"]} == {"good"}
    for name in (*reasons, "damaged"):
        assert f"{name}.nii.gz" in ended.err
    page = (tmp_path / "evaluation/evaluation.html").read_text()
    assert all(name in page for name in reasons)


def test_an_umlaut_of_two_characters_is_that_of_one(tmp_path: Path) -> None:
    """As macOS names files."""
    for folder, form in (("references", "NFC"), ("predictions", "NFD")):
        save(tmp_path / folder / unicodedata.normalize(form, "Ümlaut.nii.gz"), two_boxes())
    assert run(tmp_path, "predictions", "references").code == 0
    assert {row["case"] for row in table(tmp_path)} == {"Ümlaut"}


def test_a_name_that_is_not_utf_8_is_a_name(tmp_path: Path) -> None:
    for folder in ("references", "predictions"):
        saved = save(tmp_path / folder / "case.nii.gz", two_boxes())
        saved.rename(saved.with_name(os.fsdecode(b"a\xff.nii.gz")))
    assert run(tmp_path, "predictions", "references").code == 0
    assert {row["case"] for row in table(tmp_path)} == {"a\\xff"}


def test_axes_in_another_order_are_the_same_grid(tmp_path: Path) -> None:
    image = nib.Nifti1Image(two_boxes(), AFFINE)
    codes = nib.orientations.axcodes2ornt("SPR")
    change = nib.orientations.ornt_transform(nib.io_orientation(AFFINE), codes)
    turned = image.as_reoriented(change)
    save(tmp_path / "references/a.nii.gz", two_boxes())
    save(tmp_path / "predictions/a.nii.gz", np.asarray(turned.dataobj), turned.affine)
    assert run(tmp_path, "predictions", "references").code == 0
    assert {row["dice"] for row in table(tmp_path)} == {"1.0"}


def test_structures_are_matched_by_name_where_both_sides_have_names(tmp_path: Path) -> None:
    """The predictions have other values; the reference's are those of the decathlon."""
    write(tmp_path / "dataset/dataset.json", DATASET)
    save(tmp_path / "dataset/labelsTr/a.nii.gz", two_boxes())
    names = {"background": 0, "posterior": 7, "anterior": 3, "tail": 4}
    write(tmp_path / "predictions/dataset.json", {"labels": names, "file_ending": ".nii.gz"})
    values = np.array((0, 3, 7), np.uint8)[two_boxes()]
    save(tmp_path / "predictions/a.nii.gz", values)
    ended = run(tmp_path, "predictions", "dataset")
    assert ended.code == 0, ended.err
    rows = {row["structure"]: row["dice"] for row in table(tmp_path)}
    assert rows == {"anterior": "1.0", "posterior": "1.0"}
    assert "Only in predictions: tail" in ended.out


def test_values_are_matched_where_one_side_has_no_names(tmp_path: Path) -> None:
    write(tmp_path / "dataset/dataset.json", DATASET)
    save(tmp_path / "dataset/labelsTr/a.nii.gz", two_boxes())
    save(tmp_path / "predictions/a.nii.gz", two_boxes(1))
    # a folder of labels of a dataset has the names of the dataset
    for references in ("dataset", "dataset/labelsTr"):
        assert run(tmp_path, "predictions", references).code == 0
        assert {row["structure"] for row in table(tmp_path)} == {"anterior", "posterior"}


def test_no_common_name_is_refused_and_the_option_names_the_values(tmp_path: Path) -> None:
    write(tmp_path / "dataset/dataset.json", DATASET)
    save(tmp_path / "dataset/labelsTr/a.nii.gz", two_boxes())
    write(tmp_path / "predictions/dataset.json", {"labels": {"front": 2, "whole": [1, 2]}})
    save(tmp_path / "predictions/a.nii.gz", np.array((0, 2, 1), np.uint8)[two_boxes()])
    ended = run(tmp_path, "predictions", "dataset")
    assert ended.code == 65
    assert "LABELS_UNKNOWN" in ended.err
    assert not (tmp_path / "evaluation").exists()
    ended = run(tmp_path, "predictions", "dataset", "--labels", "Front=1, whole=1+2")
    assert ended.code == 0, ended.err
    rows = {row["structure"]: row["dice"] for row in table(tmp_path)}
    assert rows == {"front": "1.0", "whole": "1.0"}
    assert run(tmp_path, "predictions", "dataset", "--labels", "rear=2").code == 65
    for wrong in ("front", "front=0", "front=1,front=2", "front=65536", "front=one", "=1"):
        assert run(tmp_path, "predictions", "dataset", "--labels", wrong).code == 2


def test_regions_and_ignored_voxels_of_nnunet(tmp_path: Path) -> None:
    labels = {"background": 0, "whole": [1, 2], "core": 2, "ignore": 3}
    write(tmp_path / "dataset/dataset.json", {"labels": labels})
    reference, prediction = two_boxes(), two_boxes()
    reference[3:9, 4:12, :6] = 3  # unknown: the prediction may have anything there
    prediction[3:9, 4:12, :6] = 2
    save(tmp_path / "dataset/labelsTr/a.nii.gz", reference)
    save(tmp_path / "predictions/a.nii.gz", prediction)
    assert run(tmp_path, "predictions", "dataset").code == 0
    rows = {row["structure"]: (row["dice"], row["outcome"]) for row in table(tmp_path)}
    assert rows == {"whole": ("1.0", "found"), "core": ("1.0", "found")}


def test_a_value_that_only_the_prediction_has_is_invented(tmp_path: Path) -> None:
    save(tmp_path / "references/a.nii.gz", np.where(two_boxes() == 1, 1, 0).astype(np.uint8))
    save(tmp_path / "predictions/a.nii.gz", two_boxes())
    assert run(tmp_path, "predictions", "references").code == 0
    assert {r["structure"]: r["outcome"] for r in table(tmp_path)} == {
        "1": "found",
        "2": "invented",
    }


def test_a_case_without_any_structure_is_in_the_table(tmp_path: Path) -> None:
    for side, shift in (("references", 0), ("predictions", 1)):
        save(tmp_path / side / "empty.nii.gz", np.zeros(SHAPE, np.uint8))
        save(tmp_path / side / "full.nii.gz", two_boxes(shift))
    ended = run(tmp_path, "predictions", "references")
    assert ended.code == 0
    assert re.search(r"^1 +1 +0\.", ended.out, re.MULTILINE)  # the mean Dice is that of one case
    outcomes = {(r["case"], r["structure"]): r["outcome"] for r in table(tmp_path)}
    assert outcomes == {
        ("empty", "1"): "absent",
        ("empty", "2"): "absent",
        ("full", "1"): "found",
        ("full", "2"): "found",
    }
    ended = run(tmp_path, "predictions/empty.nii.gz", "references/empty.nii.gz")
    assert (ended.code, "LABELS_UNKNOWN" in ended.err) == (65, True)


def test_the_cases_that_a_dataset_sets_aside_are_the_references(tmp_path: Path) -> None:
    write(tmp_path / "dataset/dataset.json", DATASET)
    save(tmp_path / "dataset/labelsTr/trained.nii.gz", two_boxes())
    save(tmp_path / "dataset/labelsTs/tested.nii.gz", two_boxes())
    assert [c.name for c in open_label_set(tmp_path / "dataset").cases] == ["tested"]
    for name in ("a.nii.gz", "a.nrrd"):  # of which one is wrong
        save(tmp_path / "dataset/labelsTs/b.nii.gz", two_boxes()).with_name(name).touch()
    names = [case.name for case in open_label_set(tmp_path / "dataset").cases]
    assert names == ["a", "a", "b", "tested"]
    items = [{"image": f"{n}/image.nii.gz", "label": f"{n}/label.nii.gz"} for n in ("p1", "p2")]
    for item in items:
        save(tmp_path / "list" / item["label"], two_boxes())
    lists = {"training": items[:1], "validation": items[1:], "test": []}
    write(tmp_path / "list/datalist.json", lists)
    # files of one name have the names of their folders
    assert [case.name for case in open_label_set(tmp_path / "list").cases] == ["p1", "p2"]
    write(tmp_path / "list/datalist.json", {"training": items[:1], "test": items[1:]})
    assert [case.name for case in open_label_set(tmp_path / "list").cases] == ["label"]


def test_cases_of_a_list_have_the_names_of_its_images_too(tmp_path: Path) -> None:
    """As LiTS has them."""
    listed = []
    for n in range(3):
        save(tmp_path / f"list/segmentation-{n}.nii.gz", two_boxes(n))
        save(tmp_path / f"predictions/volume-{n}.nii.gz", two_boxes(n))
        listed.append({"image": f"volume-{n}.nii", "label": f"segmentation-{n}.nii.gz"})
    write(tmp_path / "list/datalist.json", {"testing": listed[1:], "training": listed[:1]})

    ended = run(tmp_path, "predictions", "list")

    assert (ended.code, "1 case for training" in ended.out) == (0, True)

    assert {row["dice"] for row in table(tmp_path)} == {"1.0"}


def test_a_name_that_images_of_a_list_share_tells_no_case(tmp_path: Path) -> None:
    """The prediction of a training case would be compared with the reference of another."""
    pairs = [{"image": f"{n}/image.nii.gz", "label": f"labels/{n}.nii.gz"} for n in ("a", "b")]
    save(tmp_path / "labels/a.nii.gz", two_boxes())
    write(tmp_path / "datalist.json", {"testing": pairs[:1], "training": pairs[1:]})

    references = open_label_set(tmp_path)

    assert [case.names for case in references.cases] == [("a",)]
    assert references.training == {"b"}


@pytest.mark.parametrize("references", ["dataset", "dataset/labelsTs"])
@pytest.mark.parametrize("listed", [True, False])
def test_training_cases_of_the_references_lack_none(
    tmp_path: Path, references: str, listed: bool
) -> None:
    """Another model's results of the whole archive, compared on the cases set aside."""
    subsets = {"training": "labelsTr/trained", "validation": "labelsTr/validated"}
    lists = {
        name: [{"image": f"{file}.nii.gz", "label": f"{file}.nii.gz"}]
        for name, file in {**subsets, "testing": "labelsTs/tested"}.items()
    }
    write(tmp_path / "dataset/dataset.json", {**DATASET, **(lists if listed else {})})
    for name in ("labelsTr/trained", "labelsTr/validated", "labelsTs/tested"):
        save(tmp_path / f"dataset/{name}.nii.gz", two_boxes())
    for name in ("trained", "validated", "tested"):
        save(tmp_path / f"old/{name}.nii.gz", two_boxes(1))
    save(tmp_path / "new/tested.nii.gz", two_boxes())

    ended = run(tmp_path, "new", references, "--against", tmp_path / "old")

    assert (ended.code, ended.err) == (0, "")
    assert "Not compared: 2 cases of --against for training in the references" in ended.out
    document = json.loads((tmp_path / "evaluation/evaluation.json").read_text())
    assert document["for_training"] == {"first": 0, "second": 2}
    assert document["left_out"] == []
    page = (tmp_path / "evaluation/evaluation.html").read_text()
    assert "Not compared: 2 cases of --against for training in the references." in page
    save(tmp_path / "old/foreign.nii.gz", two_boxes())
    assert run(tmp_path, "old", references).code == 1
    reasons = {row["case"]: row["reason"] for row in table(tmp_path) if row["reason"]}
    assert reasons == {"foreign": "NO_REFERENCE"}


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ("[]", Reason.DAMAGED),
        ("{", Reason.DAMAGED),
        ('{"labels": {"a": "b"}}', Reason.LABELS_UNKNOWN),
        ('{"labels": {"a": 1, "A": 2}}', Reason.LABELS_UNKNOWN),
        ('{"labels": 3, "training": 4, "test": [5, {"label": 6}]}', None),
        ('{"labels": {"a": null}}', Reason.LABELS_UNKNOWN),
        ('{"labels": {"a": 1.5}}', Reason.LABELS_UNKNOWN),
        ('{"labels": {"a": -1}}', Reason.LABELS_UNKNOWN),
        ('{"labels": {"a": 65536}}', Reason.LABELS_UNKNOWN),
        ('{"labels": {"肝": 1, "脾臓": [2, 3], "背景": 0}}', None),
    ],
)
def test_a_wrong_description_of_a_dataset(
    tmp_path: Path, document: str, reason: Reason | None
) -> None:
    save(tmp_path / "a.nii.gz", two_boxes())
    (tmp_path / "dataset.json").write_text(document)
    if reason is None:
        assert len(open_label_set(tmp_path).cases) == 1
        return
    with pytest.raises(ScanError) as caught:
        open_label_set(tmp_path)
    assert caught.value.reason is reason


def test_two_files_need_no_common_name(tmp_path: Path) -> None:
    save(tmp_path / "mine.nii.gz", two_boxes(1))
    save(tmp_path / "truth.nii.gz", two_boxes())
    assert run(tmp_path, "mine.nii.gz", "truth.nii.gz").code == 0
    assert len(table(tmp_path)) == 2
    # the structures that `segment` writes beside its file
    structures = [{"label": "front", "number": 1}, {"label": "rear", "number": 2}]
    write(tmp_path / "mine.json", {"schema": 2, "structures": structures})
    assert run(tmp_path, "mine.nii.gz", "truth.nii.gz").code == 0
    assert {row["structure"] for row in table(tmp_path)} == {"front", "rear"}
    assert run(tmp_path, "mine.nii.gz", "missing.nii.gz").code == 65


def test_label_map_of_a_case_has_the_names_in_its_folder(tmp_path: Path) -> None:
    publish(tmp_path, scan_array(1), affine_of("LAS"))
    [case] = (tmp_path / "out/cases").iterdir()
    truth = nib.load(case / "segmentation.nii.gz").get_fdata().astype(np.uint8)
    [file] = json.loads((case / "segments.json").read_text())["files"]
    last = file["structures"][-1]
    # the reference has another number for the structure: only its name says which one it is
    save(tmp_path / "truth.nii.gz", (truth == last["number"]).astype(np.uint8), affine_of("LAS"))
    label = last["label"].replace("-", "_")

    ended = run(
        tmp_path,
        f"out/cases/{case.name}/segmentation.nii.gz",
        "truth.nii.gz",
        "--labels",
        f"{label}=1",
    )

    assert ended.code == 0, ended.err
    assert [(row["structure"], row["dice"]) for row in table(tmp_path)] == [(label, "1.0")]


def test_segments_of_slicer_may_lack_slices_of_the_scan(tmp_path: Path) -> None:
    save(tmp_path / "references/a.nii.gz", two_boxes())
    write(tmp_path / "references/dataset.json", DATASET)
    image = sitk.ReadImage(str(tmp_path / "references/a.nii.gz"))[:, :, 2:10]
    for n, name in enumerate(("Anterior", "Posterior")):
        image.SetMetaData(f"Segment{n}_Name", name)
        image.SetMetaData(f"Segment{n}_LabelValue", str(n + 1))
    (tmp_path / "predictions").mkdir()
    sitk.WriteImage(image, str(tmp_path / "predictions/a.seg.nrrd"))
    # also the other way round, where the prediction states the grid
    for sides in (("predictions", "references"), ("references", "predictions")):
        assert run(tmp_path, *sides).code == 0
        assert {row["structure"] for row in table(tmp_path)} == {"anterior", "posterior"}
        assert {row["dice"] for row in table(tmp_path)} == {"1.0"}


def save_segments(path: Path, array: np.ndarray, slices: slice, *, flipped: bool = False) -> None:
    image = sitk.ReadImage(str(save(path.parent.parent / "whole.nii.gz", array)))[:, :, slices]
    if flipped:
        image = sitk.DICOMOrient(image, "RAI")
    for n, name in enumerate(("Anterior", "Posterior")):
        image.SetMetaData(f"Segment{n}_Name", name)
        image.SetMetaData(f"Segment{n}_LabelValue", str(n + 1))
    path.parent.mkdir(exist_ok=True)
    sitk.WriteImage(image, str(path))


def test_both_sides_may_be_segments_that_lack_slices(tmp_path: Path) -> None:
    """Neither states the grid of the scan: figures are those of whole label maps."""
    cut = two_boxes(shift=1)
    cut[..., :5] = 0
    for kind, array in (("predictions", cut), ("references", two_boxes())):
        save(tmp_path / f"whole/{kind}/a.nii.gz", array)
        write(tmp_path / f"whole/{kind}/dataset.json", DATASET)
    assert run(tmp_path, "whole/predictions", "whole/references").code == 0
    expected = table(tmp_path)
    save_segments(tmp_path / "predictions/a.seg.nrrd", cut, slice(4, 12), flipped=True)
    save_segments(tmp_path / "references/a.seg.nrrd", two_boxes(), slice(2, 10))

    save_segments(tmp_path / "others/a.seg.nrrd", two_boxes(), slice(3, 9))

    ended = run(tmp_path, "predictions", "references", "--against", tmp_path / "others")

    assert ended.code == 0, ended.err
    assert [row for row in table(tmp_path) if row["predictions"] == "first"] == expected
    page = (tmp_path / "evaluation/evaluation.html").read_text()
    assert page.count("data:image/webp") == 3  # of the worst case: reference and both others
    apart = two_boxes()[..., 3:9]
    half = AFFINE.copy()
    half[:3, 3] += AFFINE[:3, 2] / 2
    save(tmp_path / "half.nii.gz", apart, half)
    image = sitk.ReadImage(str(tmp_path / "half.nii.gz"))
    image.SetMetaData("Segment0_Name", "Anterior")
    image.SetMetaData("Segment0_LabelValue", "1")
    image.SetMetaData("Segment1_Name", "Posterior")
    image.SetMetaData("Segment1_LabelValue", "2")
    sitk.WriteImage(image, str(tmp_path / "predictions/a.seg.nrrd"))
    assert "GRID_DIFFERS" in run(tmp_path, "predictions", "references").err


def dicom_seg(path: Path, mask: np.ndarray, series: str) -> None:
    """Write a segment of a CT of 6 slices, only the slices that have voxels; slices (K, J, I)."""
    slices = []
    for k in range(6):
        image = Dataset()
        image.file_meta = FileMetaDataset()
        image.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        image.SOPClassUID, image.SOPInstanceUID = CTImageStorage, f"{series}.{k + 1}"
        image.StudyInstanceUID, image.SeriesInstanceUID = "1.2.3", series
        image.FrameOfReferenceUID, image.Modality = "1.2.4", "CT"
        image.PatientName = image.PatientID = image.AccessionNumber = image.StudyID = ""
        image.PatientBirthDate = image.PatientSex = image.StudyDate = image.StudyTime = ""
        image.Rows, image.Columns, image.PixelSpacing = *mask.shape[1:], [1.5, 1.25]
        image.ImageOrientationPatient, image.SliceThickness = [1, 0, 0, 0, 1, 0], 2.5
        image.ImagePositionPatient = [-20, 5, 100 + 2.5 * k]
        slices.append(image)
    liver = codes.SCT.Liver
    description = hd.seg.SegmentDescription(
        1, "Liver", codes.SCT.Organ, liver, hd.seg.SegmentAlgorithmTypeValues.MANUAL
    )
    seg = hd.seg.Segmentation(
        source_images=slices,
        pixel_array=mask.astype(np.uint8),
        segmentation_type=hd.seg.SegmentationTypeValues.BINARY,
        segment_descriptions=[description],
        series_instance_uid=hd.UID(),
        series_number=1,
        sop_instance_uid=hd.UID(),
        instance_number=1,
        manufacturer="x",
        manufacturer_model_name="x",
        software_versions="1",
        device_serial_number="1",
    )
    path.parent.mkdir(exist_ok=True)
    seg.save_as(path)


@pytest.mark.parametrize("names", [("8b", "7b"), ("2a", "1a")], ids=["others", "exchanged"])
def test_archives_of_dicom_seg_are_paired_by_the_series_that_they_refer_to(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    """Files of archives have UUIDs or numbers for names; a file has only slices with voxels."""
    overlaps = {}
    for n in (1, 2):
        reference, prediction = np.zeros((2, 6, 9, 8), bool)
        reference[1:4, 2:6, 2:6] = True
        prediction[2:5, 2:6, 2 : 6 + n] = True
        dicom_seg(tmp_path / f"references/{n}a.dcm", reference, f"1.2.3.{n}")
        dicom_seg(tmp_path / f"predictions/{names[n - 1]}.dcm", prediction, f"1.2.3.{n}")
        dice = 2 * (reference & prediction).sum() / (reference.sum() + prediction.sum())
        overlaps[f"{n}a"] = pytest.approx(dice)

    ended = run(tmp_path, "predictions", "references")

    assert ended.code == 0, ended.err
    rows = table(tmp_path)
    assert {row["case"]: float(row["dice"]) for row in rows} == overlaps
    assert {row["structure"] for row in rows} == {"liver"}
    one = (f"predictions/{names[0]}.dcm", "references/1a.dcm")
    assert run(tmp_path, *one).code == 0
    assert float(table(tmp_path)[0]["dice"]) == overlaps["1a"]


@pytest.mark.parametrize("slices", [(2,), (1, 4), (1, 3), (1, 2, 3)])
def test_a_dicom_seg_that_does_not_state_the_spacing_of_slices(
    tmp_path: Path, slices: tuple[int, ...]
) -> None:
    """Positions of the slices that have voxels do not tell it either."""
    whole = np.zeros((6, 9, 8), bool)
    whole[:, 2:6, 2:6] = True
    mask = np.zeros_like(whole)
    mask[list(slices)] = whole[list(slices)]
    dicom_seg(tmp_path / "predictions/a.dcm", mask, "1.2.3.1")
    dicom_seg(tmp_path / "references/a.dcm", whole, "1.2.3.1")
    dataset = dcmread(tmp_path / "predictions/a.dcm")
    del dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].SpacingBetweenSlices
    dataset.save_as(tmp_path / "predictions/a.dcm")
    ml = 16 * 1.25 * 1.5 * 2.5 / 1000

    assert run(tmp_path, "predictions", "references").code == 0
    [row] = table(tmp_path)
    assert float(row["dice"]) == pytest.approx(2 * len(slices) / (6 + len(slices)))
    assert float(row["prediction_ml"]) == pytest.approx(ml * len(slices))
    assert run(tmp_path, "predictions", "predictions").code == 0
    [row] = table(tmp_path)
    assert float(row["reference_ml"]) == pytest.approx(ml * len(slices))
    affine = np.diag([-1.25, -1.5, 2.5, 1.0])
    affine[:3, 3] = 20, -5, 100
    grid = Grid((8, 9, 6), affine)
    measures = dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    for thickness in ("2.5", None):  # the grid tells it too
        measures.SliceThickness = thickness
        dataset.save_as(tmp_path / "predictions/a.dcm")
        [layer] = read_label_file(tmp_path / "predictions/a.dcm", grid).layers
        np.testing.assert_array_equal(layer, mask.transpose(2, 1, 0))


def test_a_segment_that_one_file_lacks_is_missed_if_the_others_have_it(tmp_path: Path) -> None:
    write(tmp_path / "references/dataset.json", {"labels": {"front": 1, "rear": 2, "tail": 3}})
    (tmp_path / "predictions").mkdir()
    for case, found in (("a", ("front", "rear")), ("b", ("front",))):
        array = two_boxes()
        array[0, 0, 0] = 3
        save(tmp_path / f"references/{case}.nii.gz", array)
        array[array > len(found)] = 0
        image = sitk.ReadImage(str(save(tmp_path / f"{case}.nii.gz", array)))
        for n, name in enumerate(found):
            image.SetMetaData(f"Segment{n}_Name", name)
            image.SetMetaData(f"Segment{n}_LabelValue", str(n + 1))
        sitk.WriteImage(image, str(tmp_path / f"predictions/{case}.seg.nrrd"))
    ended = run(tmp_path, "predictions", "references")
    assert ended.code == 0
    outcomes = {(r["case"], r["structure"]): r["outcome"] for r in table(tmp_path)}
    assert outcomes == {
        ("a", "front"): "found",
        ("a", "rear"): "found",
        ("b", "front"): "found",
        ("b", "rear"): "missed",
    }
    # no prediction has it: it was not looked for
    assert "Only in references: tail" in ended.out


def test_values_of_segments_mean_nothing_in_a_label_map(tmp_path: Path) -> None:
    """Each segment of a DICOM SEG has the value 1, in a layer of its own."""
    save(tmp_path / "references/a.nii.gz", two_boxes())
    image = sitk.ReadImage(str(tmp_path / "references/a.nii.gz"))
    for n in (1, 2):
        image.SetMetaData(f"Segment{n}_Name", f"segment {n}")
        image.SetMetaData(f"Segment{n}_LabelValue", str(n))
    (tmp_path / "predictions").mkdir()
    sitk.WriteImage(image, str(tmp_path / "predictions/a.seg.nrrd"))
    ended = run(tmp_path, "predictions", "references")
    assert (ended.code, "LABELS_UNKNOWN" in ended.err) == (65, True)
    labels = "segment 1=1,segment 2=2"
    assert run(tmp_path, "predictions", "references", "--labels", labels).code == 0
    assert {r["structure"]: r["dice"] for r in table(tmp_path)} == {
        "segment_1": "1.0",
        "segment_2": "1.0",
    }


def test_values_without_a_structure_are_listed(tmp_path: Path) -> None:
    write(tmp_path / "dataset/dataset.json", {"labels": {"background": 0, "front": 1}})
    save(tmp_path / "dataset/labelsTr/a.nii.gz", two_boxes())
    other = two_boxes()
    other[0, 0, 0] = 7
    save(tmp_path / "predictions/a.nii.gz", other)
    ended = run(tmp_path, "predictions", "dataset")
    assert ended.code == 0
    assert [row["structure"] for row in table(tmp_path)] == ["front"]
    document = json.loads((tmp_path / "evaluation/evaluation.json").read_text())
    assert document["not_compared"] == {"reference": ["2"], "first": ["2", "7"]}


def test_several_cases_of_one_name_are_not_guessed(tmp_path: Path) -> None:
    save(tmp_path / "references/a.nii.gz", two_boxes())
    save(tmp_path / "references/b.nii.gz", two_boxes())
    for name in ("a.nii.gz", "a.nii", "b.nii.gz"):
        save(tmp_path / "predictions" / name, two_boxes())
    assert run(tmp_path, "predictions", "references").code == 1
    assert [r["reason"] for r in table(tmp_path)] == ["", "", *["PAIR_AMBIGUOUS"] * 2]
    assert {r["case"] for r in table(tmp_path) if not r["reason"]} == {"b"}


def test_a_folder_for_each_patient_is_a_folder_of_label_maps(tmp_path: Path) -> None:
    """Their files have one name, or paths alone tell them apart; masks of one scan are no cases."""
    for n, patient in enumerate(("P1", "P2", "P3")):
        save(tmp_path / f"references/{patient}/seg.nii.gz", two_boxes())
        save(tmp_path / f"predictions/{patient}.nii.gz", two_boxes(n))
    for scan in ("P1/1", "P2/1", "P2/2"):
        save(tmp_path / f"deep/{scan}/anat/seg.nii.gz", two_boxes())
    assert run(tmp_path, "predictions", "references").code == 0
    dice = {row["case"]: row["dice"] for row in table(tmp_path) if row["structure"] == "1"}
    assert list(dice) == ["P1", "P2", "P3"]
    assert dice["P1"] == "1.0" > dice["P2"] > dice["P3"]
    assert run(tmp_path, "deep", "deep").code == 0
    cases = {row["case"] for row in table(tmp_path)}
    assert cases == {"P1/1/anat/seg", "P2/1/anat/seg", "P2/2/anat/seg"}

    save(tmp_path / "references/P2/liver.nii.gz", two_boxes())
    ended = run(tmp_path, "predictions", "references")
    assert (ended.code, "several label maps" in ended.err) == (65, True)
    assert str(tmp_path / "references/P2") in ended.err.replace("\n", "")
    (tmp_path / "references/P2/cases").mkdir()
    assert "output folder" in run(tmp_path, "predictions", "references").err


def test_dicom_seg_lie_in_a_folder_for_each_series_beside_their_scans(tmp_path: Path) -> None:
    mask = np.zeros((6, 9, 8), bool)
    for n in (1, 2):
        mask[n : n + 3, 2:6, 2:6] = True
        for place in (f"references/P{n}/1/SEG/1-1.dcm", f"predictions/{n}/1-1.dcm"):
            (tmp_path / place).parent.mkdir(parents=True)
            dicom_seg(tmp_path / place, mask, f"1.2.3.{n}")
        scan = dcmread(tmp_path / f"predictions/{n}/1-1.dcm")
        scan.SOPClassUID = CTImageStorage
        (tmp_path / f"references/P{n}/1/CT").mkdir()
        for k in (1, 2):
            scan.save_as(tmp_path / f"references/P{n}/1/CT/1-{k}.dcm")
    assert run(tmp_path, "predictions", "references").code == 0
    assert [(row["case"], row["dice"]) for row in table(tmp_path)] == [("P1", "1.0"), ("P2", "1.0")]


# --- output folders -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an output folder of two cases, and references of these and a third."""
    folder = tmp_path_factory.mktemp("results")
    for n, name in enumerate(("MUELLER", "meier_0000")):
        array = scan_array(n)
        publish(folder, array, affine_of(), name)
        reference = np.digitize(array, (300, 600, 900)).astype(np.uint8)
        reference[reference == 3] = 0 if n else 3
        save(folder / f"references/{name.removesuffix('_0000')}.nii.gz", reference, affine_of())
    save(folder / "references/schulze.nii.gz", reference, affine_of())
    return folder


def test_cases_of_an_output_folder_are_found_by_the_names_of_their_scans(results: Path) -> None:
    ended = run(results, "out", "references", "--key", results / "key")
    assert ended.code == 1
    rows = [row for row in table(results) if not row["reason"]]
    ids = {folder.name for folder in (results / "out/cases").iterdir()}
    assert {row["case"] for row in rows} == ids
    assert len(rows) == 6
    assert sorted(row["outcome"] for row in rows) == [*["found"] * 5, "invented"]
    assert {row["dice"] for row in rows if row["outcome"] == "found"} == {"1.0"}
    [left_out] = [row for row in table(results) if row["reason"]]
    assert (left_out["reason"], left_out["case"]) == ("NO_PREDICTION", "reference 3")
    assert "schulze.nii.gz" in ended.err


def test_scans_of_one_folder_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """A result of a scan that the references lack bars no other one."""
    arrays = [scan_array(n) for n in range(3)]
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
    for n, array in enumerate(arrays):
        publish(tmp_path / "new", array, affine_of(), f"scan{n}")
        if n < 2:
            publish(tmp_path / "old", array, affine_of(), f"scan{n}")
    key = ("--key", tmp_path / "new/key")

    assert run(tmp_path, "new/out", "old/out", *key).code == 1

    shared = {case.name for case in (tmp_path / "old/out/cases").iterdir()}
    rows = table(tmp_path)
    assert {row["case"] for row in rows if not row["reason"]} == shared
    assert [row["reason"] for row in rows if row["reason"]] == ["NO_REFERENCE"]


def test_files_and_json_do_not_name_the_files_of_pseudonymous_cases(results: Path) -> None:
    # the third case is in a folder of label maps only
    against = results / "references"
    ended = run(
        results, "out", "references", "--key", results / "key", "--json", "--against", against
    )
    assert {row["case"] for row in table(results) if row["predictions"] == "second"} == {
        *(folder.name for folder in (results / "out/cases").iterdir()),
        "reference 3",
    }
    names = re.compile("mueller|meier|schulze", re.IGNORECASE)
    assert not names.search(ended.out)
    for file in (results / "evaluation").iterdir():
        assert not names.search(file.read_bytes().decode("latin-1")), file.name


def test_a_single_case_needs_no_name(tmp_path: Path) -> None:
    case = publish(tmp_path, scan_array(), affine_of())
    truth = save(tmp_path / "truth.nii.gz", np.ones((14, 11, 9), np.uint8), affine_of())
    ended = run(tmp_path, "out", truth.name, "--key", tmp_path / "key")
    assert ended.code == 0, ended.err
    assert {row["case"] for row in table(tmp_path)} == {case.name}


def test_another_key_is_refused(results: Path, tmp_path: Path) -> None:
    other = tmp_path / "key"
    other.write_bytes(bytes(reversed(KEY[:-1])) + b"x")
    other.chmod(0o600)
    ended = run(results, "out", "references", "--key", other)
    assert (ended.code, "KEY_MISMATCH" in ended.err) == (65, True)


def test_an_output_folder_that_nobody_reviewed_is_no_reference_for_itself(results: Path) -> None:
    """A Dice of 1 would say nothing; a copy, such as the results of another run, is compared."""
    ended = run(results, "out", "out", "--key", results / "key")
    assert (ended.code, "NOT_REVIEWED" in ended.err) == (65, True)
    shutil.copytree(results / "out", results / "copy")
    against = ("--against", results / "out", "--key", results / "key")
    assert "NOT_REVIEWED" in run(results, "copy", "out", *against).err
    assert run(results, "out", "copy", "--key", results / "key").code == 0
    assert {row["dice"] for row in table(results)} == {"1.0"}


def test_a_model_is_compared_with_the_corrections_of_its_results(tmp_path: Path) -> None:
    case = publish(tmp_path, scan_array(), affine_of())
    corrected = read_label_map(case / "segmentation.nii.gz").copy()
    corrected[corrected == 2] = 0
    file = save(tmp_path / "corrected.nii.gz", corrected, affine_of())
    revision = take_file(tmp_path / "out", file, case.name, "anna", key=tmp_path / "key")
    assert revision is not None
    assert run(tmp_path, "out", "out", "--key", tmp_path / "key").code == 0
    assert [row["outcome"] for row in table(tmp_path)] == ["found", "invented", "found"]


def test_what_a_review_did_not_approve_is_no_reference(tmp_path: Path) -> None:
    """A model would agree with itself."""
    names = [publish(tmp_path, scan_array(n), affine_of(), f"scan{n}").name for n in range(4)]
    with closing(VerdictLog(tmp_path / "out")) as log:
        for name, decision, structures in zip(
            names,
            ("accept", "reject", "accept"),
            ({}, {}, {"threshold/part-2": "reject"}),
            strict=False,
        ):
            shown = seen(tmp_path / "out/cases" / name)
            log.append(Verdict(name, "r1", shown, decision, structures))  # type: ignore[arg-type]  # str

    ended = run(tmp_path, "out", "out", "--key", tmp_path / "key")

    assert ended.code == 1
    rows = table(tmp_path)
    assert {row["case"]: row["reason"] for row in rows if row["reason"]} == {
        names[1]: "NOT_REVIEWED",
        names[3]: "NOT_REVIEWED",
    }
    found = [row["structure"] for row in rows if row["case"] == names[2]]
    assert found == ["part_1", "part_3"]
    assert len([row for row in rows if row["case"] == names[0]]) == 3


def test_a_new_model_is_compared_with_the_corrections_of_the_results_that_it_replaced(
    tmp_path: Path,
) -> None:
    """With the new results as references, the new model would agree with itself."""
    arrays = {name: scan_array(n) for n, name in enumerate(("corrected", "accepted", "open"))}
    cases = {name: publish(tmp_path, each, affine_of(), name) for name, each in arrays.items()}
    labels = read_label_map(cases["corrected"] / "segmentation.nii.gz").copy()
    labels[labels == 2] = 0
    file = save(tmp_path / "correction.nii.gz", labels, affine_of())
    case, out, key = cases["corrected"].name, tmp_path / "out", ("--key", tmp_path / "key")
    assert take_file(out, file, case, "anna", key=tmp_path / "key") is not None
    # another model, which numbers the same structures from 5
    for name, array in arrays.items():
        publish(tmp_path, array, affine_of(), name, first=5, recipe="s" * 64)

    assert run(tmp_path, "out", "out", *key).code == 1

    def compared() -> dict[str, list[str]]:
        rows = table(tmp_path)
        return {
            each.name: [row["reason"] or row["outcome"] for row in rows if row["case"] == each.name]
            for each in cases.values()
        }

    left_out = {cases[name].name: ["NOT_REVIEWED"] for name in ("accepted", "open")}
    assert compared() == {case: ["found", "invented", "found"], **left_out}

    with closing(VerdictLog(out)) as log:
        accepted = replace(seen(cases["accepted"]), recipe="r" * 64)
        log.append(Verdict(cases["accepted"].name, "r1", accepted, "accept"))
    ended = run(tmp_path, "out", "out", *key)
    assert "the reference is replaced since its review" in ended.err
    assert compared() == {case: ["found", "invented", "found"], **left_out}

    with closing(VerdictLog(out)) as log:  # who accepts the new result takes it for the truth
        log.append(Verdict(case, "r1", seen(cases["corrected"]), "accept"))
    run(tmp_path, "out", "out", *key)
    assert compared() == {case: ["found"] * 3, **left_out}


def test_damaged_results_are_left_out(results: Path, tmp_path: Path) -> None:
    shutil.copytree(results / "out", tmp_path / "out")
    shutil.copy(results / "key", tmp_path / "key")
    first = sorted((tmp_path / "out/cases").iterdir())[0]
    with (first / "segmentation.nii.gz").open("ab") as file:
        file.write(b"x")
    ended = run(tmp_path, "out", str(results / "references"), "--key", tmp_path / "key")
    assert ended.code == 1
    reasons = {row["case"]: row["reason"] for row in table(tmp_path) if row["reason"]}
    assert reasons[first.name] == "RESULT_DAMAGED"


def test_structures_that_overlap_are_compared_with_a_label_map_by_value(tmp_path: Path) -> None:
    array = scan_array()
    publish(tmp_path, array, affine_of(), "scan", layers=2)
    band = np.digitize(array, (300, 600, 900)).astype(np.uint8)
    save(tmp_path / "references/scan.nii.gz", band, affine_of())
    assert run(tmp_path, "out", "references", "--key", tmp_path / "key").code == 0
    outcomes = [row["outcome"] for row in table(tmp_path)]
    # structures 4 to 6 of the second layer are in no label map of the references
    assert (outcomes.count("found"), outcomes.count("invented")) == (3, 3)
    assert {row["dice"] for row in table(tmp_path)} == {"1.0", "0.0"}
    # two label maps have no values that --labels could mean
    ended = run(tmp_path, "references", "out", "--key", tmp_path / "key", "--labels", "a=1")
    assert (ended.code, "LABELS_UNKNOWN" in ended.err) == (65, True)


def test_an_evaluation_is_not_written_into_results(results: Path) -> None:
    before = sorted((results / "out").rglob("*"))
    ended = scanloom(
        *("evaluate", results / "out", "-r", results / "references", "-o", results / "out")
    )
    assert (ended.code, "OUTPUT_UNWRITABLE" in ended.err) == (74, True)
    assert sorted((results / "out").rglob("*")) == before


@pytest.mark.parametrize("tolerance", ["nan", "-1", "inf", "two"])
def test_a_tolerance_that_is_no_distance_is_refused(results: Path, tolerance: str) -> None:
    assert run(results, "out", "references", f"--tolerance={tolerance}").code == 2


# --- two predictions ------------------------------------------------------------------------------


def test_a_difference_is_one_line_of_at_most_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = ["hippocampus_anterior", "hippocampus_posterior"]
    for folder, shift in (("references", 0), ("first", 1), ("second", 2)):
        write(tmp_path / folder / "dataset.json", {"labels": {names[0]: 1, names[1]: 2}})
        for n in range(6):
            save(tmp_path / folder / f"{n}.nii.gz", two_boxes(shift))
    shown = run(tmp_path, "first", "references", "--against", tmp_path / "second").out
    interval = r" +6 +[+-]\d+\.\d+ \([+-]\d+\.\d+ to [+-]\d+\.\d+\)$"
    assert "(quartiles)" in shown  # the brackets of the differences are an interval
    agreement = (
        r"^hippo\w+ +6 +0\.\d{3} \(0\.\d{3} to 0\.\d{3}\) +[\d.]+ +[\d.]+ +[+-][\d.]+ +0, 0$"
    )
    assert len(re.findall(agreement, shown, re.MULTILINE)) == 4
    for structure in (*names, "mean of structures"):
        for figure in ("Dice", "HD95 mm", "NSD"):
            line = rf"^{structure} +{figure}{interval}"
            [found] = re.findall(line, shown, re.MULTILINE)
            assert len(found) <= 80
    (tmp_path / "references/0.nii.gz").unlink()
    shown = run(tmp_path, "first", "references", "--against", tmp_path / "second").out
    assert "mean, no interval (5 patients, it takes 6)" in shown
    assert re.search(r"^mean of structures +Dice +5 +[+]0\.\d+$", shown, re.MULTILINE)


def test_a_page_of_few_cases_shows_what_there_is(tmp_path: Path) -> None:
    """No interval of three patients, and limits of agreement whose names don't lie on another."""
    for n in range(3):
        for folder, shift in (("references", 0), ("first", 1), ("second", 2)):
            array = two_boxes(shift)
            if folder != "references":
                array[0].flat[: 100 + n] = 1  # nearly the same error of the volume in all cases
            save(tmp_path / folder / f"{n}.nii.gz", array)
    sets = [open_label_set(tmp_path / name) for name in ("first", "references", "second")]
    result = evaluate(*sets)
    page = render_page(result)
    assert not re.search(r"to \W\)", page)
    title, picture = _volume_plot(result.summaries[0], result.agreements["first", "1"])
    assert title == "1"
    svg = base64.b64decode(picture.data.partition(",")[2]).decode()
    names = re.findall(r'y="([\d.]+)"[^>]*>(?:mean )?[+]\d', svg)
    heights = sorted(map(float, names))
    assert len(heights) == 3
    assert min(np.diff(heights)) >= 12


@pytest.mark.thorough
def test_the_better_of_two_predictions_has_an_interval_above_zero(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for n in range(8):
        save(tmp_path / f"references/{n}.nii.gz", two_boxes())
        for side, share in (("worse", 0.3), ("better", 0.1)):
            array = two_boxes()
            array[rng.random(SHAPE) < share] = 0
            if n or side == "worse":
                save(tmp_path / f"{side}/{n}.nii.gz", array)
    ended = run(tmp_path, "better", "references", "--against", tmp_path / "worse")
    assert ended.code == 1  # case 0 has no prediction in the better ones
    document = json.loads((tmp_path / "evaluation/evaluation.json").read_text())
    assert document["cases"] == {"first": 7, "second": 8}
    assert document["patients"] == 7  # those that were drawn
    dice = [each for each in document["differences"] if each["figure"] == "dice"]
    assert [each["structure"] for each in dice] == ["1", "2", None]
    means = {
        (side, structure): np.mean(
            [
                float(row["dice"])
                for row in table(tmp_path)
                if (row["predictions"], row["structure"]) == (side, structure)
                and row["case"] != "0"
            ]
        )
        for side in ("first", "second")
        for structure in ("1", "2")
    }
    for each in dice[:2]:
        expected = means["first", each["structure"]] - means["second", each["structure"]]
        assert each["mean"] == pytest.approx(expected, abs=1e-6)
    for each in dice:
        assert each["pairs"] == 7
        assert 0 < each["low"] < each["mean"] < each["high"]


def test_a_structure_that_only_one_prediction_invents_counts_against_it(tmp_path: Path) -> None:
    nothing = two_boxes()
    nothing[nothing == 2] = 0
    for n, reference in enumerate((two_boxes(), nothing)):
        save(tmp_path / f"references/{n}.nii.gz", reference)
        save(tmp_path / f"right/{n}.nii.gz", reference)
        save(tmp_path / f"inventing/{n}.nii.gz", two_boxes())
    sets = {name: open_label_set(tmp_path / name) for name in ("right", "inventing", "references")}
    for names, sign in ((("right", "inventing"), 1), (("inventing", "right"), -1)):
        result = evaluate(sets[names[0]], sets["references"], sets[names[1]])
        found = {(d.structure, d.figure): d.difference for d in result.differences}
        for figure in ("dice", "nsd"):
            assert (found["2", figure].pairs, found["2", figure].mean) == (2, sign * 0.5)
        assert found["2", "hd95_mm"].pairs == 1
    # a case in which nobody has it is no pair
    result = evaluate(sets["right"], sets["references"], sets["right"])
    pairs = {(d.structure, d.figure): d.difference.pairs for d in result.differences}
    assert pairs["2", "dice"] == 1


def test_a_prediction_against_itself_has_no_difference(tmp_path: Path) -> None:
    for n in range(3):
        save(tmp_path / f"references/{n}.nii.gz", two_boxes())
        save(tmp_path / f"predictions/{n}.nii.gz", two_boxes(n))
    sets = [open_label_set(tmp_path / name) for name in ("predictions", "references")]
    result = evaluate(sets[0], sets[1], sets[0])
    assert {d.difference.mean for d in result.differences} == {0.0}


def test_scans_of_one_patient_count_as_one(tmp_path: Path) -> None:
    for n in range(4):
        save(tmp_path / f"references/{n}.nii.gz", two_boxes())
        save(tmp_path / f"predictions/{n}.nii.gz", two_boxes(n))
    sets = [open_label_set(tmp_path / name) for name in ("predictions", "references")]
    first = evaluate(sets[0], sets[1], sets[1])
    assert first.patients == 4
    # known to one of the sides, as that of an output folder
    cases = [replace(c, patient="ab"[int(c.name) % 2]) for c in sets[0].cases]
    known = LabelSet(tuple(cases))
    assert evaluate(known, sets[1], sets[1]).patients == 2
    assert evaluate(sets[1], sets[1], known).patients == 2


def test_predictions_without_names_are_compared_under_the_names_of_the_others(
    tmp_path: Path,
) -> None:
    save(tmp_path / "references/a.nii.gz", two_boxes())
    save(tmp_path / "plain/a.nii.gz", two_boxes(1))
    save(tmp_path / "named/a.nii.gz", two_boxes())
    write(tmp_path / "named/dataset.json", DATASET)
    for first, second in (("plain", "named"), ("named", "plain")):
        assert run(tmp_path, first, "references", "--against", tmp_path / second).code == 0
        assert {row["structure"] for row in table(tmp_path)} == {"anterior", "posterior"}
        document = json.loads((tmp_path / "evaluation/evaluation.json").read_text())
        assert {each["pairs"] for each in document["differences"]} == {1}


# --- page -----------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The elements of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def test_the_page_needs_no_other_file(tmp_path: Path) -> None:
    write(tmp_path / "dataset/dataset.json", {"labels": {"<b>&": 1, "rear": 2}})
    for n in range(6):
        name = f"{n}<i>.nii.gz"
        save(tmp_path / "dataset/labelsTr" / name, two_boxes())
        save(tmp_path / "dataset/imagesTr" / name.replace(".", "_0000.", 1), two_boxes() * 100)
        save(tmp_path / "predictions" / name, two_boxes(n % 3))
    assert run(tmp_path, "predictions", "dataset").code == 0
    text = (tmp_path / "evaluation/evaluation.html").read_text()
    page = Page(text)
    tags = [tag for tag, _ in page.elements]
    assert not {"script", "link", "iframe", "object", "i", "b"} & set(tags)
    sources = [a.get("src") or "" for tag, a in page.elements if tag == "img"]
    # three distributions, a plot for each structure, two pictures for each case
    assert len(sources) == 3 + 2 + 2 * 6
    assert all(source.startswith("data:image/") for source in sources)
    [policy] = [a["content"] for _, a in page.elements if "http-equiv" in a]
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text)


def test_the_picture_shows_labels_over_the_scan_where_they_are(tmp_path: Path) -> None:
    import base64
    from io import BytesIO

    from PIL import Image

    from scanloom.training.evaluation_page import _worst_cases

    write(tmp_path / "dataset/dataset.json", DATASET)
    save(tmp_path / "dataset/labelsTr/a.nii.gz", two_boxes())
    i = np.indices(SHAPE)[0]
    save(tmp_path / "dataset/imagesTr/a.nii.gz", (i * 10).astype(np.int16))
    half = two_boxes()
    half[:, :, 6:] = 0
    half[half == 1] = 0
    save(tmp_path / "predictions/a.nii.gz", half)
    result = evaluated(tmp_path / "predictions", tmp_path / "dataset")
    [(row, pictures)] = _worst_cases(result, None)
    assert row.structure == "anterior"
    shown = {}
    for title, picture in pictures:
        data = base64.b64decode(picture.data.partition(",")[2])
        shown[title] = np.asarray(Image.open(BytesIO(data)).convert("RGB")).astype(int)
    assert list(shown) == ["reference", "predictions"]
    colored = {n: (np.ptp(pixels, axis=2) > 40).sum() for n, pixels in shown.items()}
    assert colored["reference"] > colored["predictions"]
    # the scan below: from LAS, the first index grows to the left of the patient, right in a picture
    gray = shown["predictions"].mean(axis=(0, 2))
    assert np.corrcoef(gray, np.arange(gray.size))[0, 1] > 0.5
