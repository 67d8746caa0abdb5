"""`scanloom segment -o labels.nii.gz`: a result that is one file, without an output folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pydicom
import pytest
import SimpleITK as sitk

import scanloom as package
from scanloom import ScanError
from scanloom.core import Reason
from scanloom.engine.segment import iter_segment
from scanloom.io.index.ranking import select_series
from scanloom.io.index.series import find_series
from scanloom.io.output.json_file import write_document
from scanloom.options import SegmentOptions
from support.archives import nifti
from support.commands import Ended, limited_files, scanloom
from support.write_dicom import noise, write_series

KILLED = Path(__file__).parents[3] / "support" / "killed_command.py"


@pytest.fixture
def study(tmp_path: Path) -> Path:
    write_series(tmp_path / "study", noise())
    return tmp_path / "study"


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def segment(scan: Path, model: Path, out: Path, *more: str | Path) -> Ended:
    return scanloom("segment", scan, "--model", model, "--out", out, *more)


def test_the_file_is_the_label_map_of_an_output_folder_on_the_grid_of_the_scan(
    study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    place = tmp_path / "new" / "place"
    ended = segment(study, tiny_model, place / "labels.nii.gz")
    segment(study, tiny_model, tmp_path / "out")

    assert ended.code == 0, ended.err
    assert str(place / "labels.nii.gz") in ended.out
    assert entries(place) == {"labels.nii.gz", "labels.json"}
    [case] = (tmp_path / "out" / "cases").iterdir()
    written = (place / "labels.nii.gz").read_bytes()
    assert written == (case / "segmentation.nii.gz").read_bytes()
    labels = sitk.ReadImage(place / "labels.nii.gz")
    scan = sitk.ReadImage(sitk.ImageSeriesReader.GetGDCMSeriesFileNames(str(study)))
    assert labels.GetSize() == scan.GetSize()
    np.testing.assert_allclose(labels.GetOrigin(), scan.GetOrigin(), atol=1e-4)
    np.testing.assert_allclose(labels.GetDirection(), scan.GetDirection(), atol=1e-6)


def test_its_document_has_structures_measurements_and_checksum(
    study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    segment(study, tiny_model, tmp_path / "labels.nii.gz")

    document = json.loads((tmp_path / "labels.json").read_text())
    array = sitk.GetArrayFromImage(sitk.ReadImage(tmp_path / "labels.nii.gz"))
    numbers = {s["label"]: s["number"] for s in document["structures"]}
    voxels = {m["label"]: m["voxels"] for m in document["measurements"]}
    assert voxels == {label: int((array == number).sum()) for label, number in numbers.items()}
    assert voxels.keys() == {"spleen", "liver"}
    content = (tmp_path / "labels.nii.gz").read_bytes()
    assert document["sha256"] == hashlib.sha256(content).hexdigest()
    assert [model["name"] for model in document["models"]] == ["tiny"]


def test_a_dicom_seg_is_that_of_an_output_folder(
    study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    both = [segment(study, tiny_model, tmp_path / f"labels{end}") for end in (".dcm", ".nii.gz")]
    segment(study, tiny_model, tmp_path / "out")

    assert [ended.code for ended in both] == [0, 0]
    [case] = (tmp_path / "out" / "cases").iterdir()
    written = (tmp_path / "labels.dcm").read_bytes()
    assert written == (case / "dicom" / "segmentation.dcm").read_bytes()
    assert pydicom.dcmread(tmp_path / "labels.dcm").Modality == "SEG"
    assert {"labels.dcm.json", "labels.json"} < entries(tmp_path)


def test_the_same_command_again_finds_the_file_and_another_does_not_replace_it(
    study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "labels.nii.gz"
    first = segment(study, tiny_model, file, "--json")
    before = file.stat().st_mtime_ns, file.read_bytes()
    again = segment(study, tiny_model, file, "--json")

    [made], [recalled] = first.document["cases"], again.document["cases"]
    assert (again.code, recalled["recalled"], made["recalled"]) == (0, True, False)
    assert recalled["measurements"] == made["measurements"]
    assert recalled["file"] == str(file)
    other = segment(study, tiny_model, file, "--structures", "liver")
    assert other.code == 65
    assert "labels.nii.gz exists already (STALE)" in other.err
    assert (file.stat().st_mtime_ns, file.read_bytes()) == before

    replaced = segment(study, tiny_model, file, "--structures", "liver", "--replace")

    assert replaced.code == 0, replaced.err
    assert set(np.unique(sitk.GetArrayFromImage(sitk.ReadImage(file)))) == {0, 2}
    assert entries(tmp_path) == {"study", "labels.nii.gz", "labels.json"}

    file.unlink()  # as if the command had been killed between the two
    other = segment(study, tiny_model, file)
    again = segment(study, tiny_model, file, "--structures", "liver")

    assert (other.code, again.code) == (65, 0), again.err
    assert "labels.json exists already (STALE)" in other.err
    assert file.exists()


def test_a_segmentation_of_3d_slicer(study: Path, tiny_model: Path, tmp_path: Path) -> None:
    ended = segment(study, tiny_model, tmp_path / "labels.seg.nrrd")
    again = segment(study, tiny_model, tmp_path / "labels.seg.nrrd")
    segment(study, tiny_model, tmp_path / "labels.nii.gz")

    assert (ended.code, again.code) == (0, 0), ended.err
    assert "from before" in again.out + again.err
    written = {"labels.seg.nrrd", "labels.seg.nrrd.json", "labels.nii.gz", "labels.json"}
    assert entries(tmp_path) == {"study", *written}
    slicer, nifti_file = (
        sitk.GetArrayFromImage(sitk.ReadImage(tmp_path / name))
        for name in ("labels.seg.nrrd", "labels.nii.gz")
    )
    np.testing.assert_array_equal(slicer, nifti_file)


def test_a_file_that_was_changed_since_is_no_result(
    study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    segment(study, tiny_model, tmp_path / "labels.nii.gz")
    (tmp_path / "labels.nii.gz").write_bytes(b"somebody's own")

    ended = segment(study, tiny_model, tmp_path / "labels.nii.gz")

    assert ended.code == 65
    assert (tmp_path / "labels.nii.gz").read_bytes() == b"somebody's own"


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("labels.nrrd", [], ".nrrd files can't be written, but .nii.gz, .dcm and .seg.nrrd"),
        ("labels.nii", [], ".nii files can't be written"),
        (".nii.gz", [], "the file has no name before .nii.gz"),
        ("labels.nii.gz", ["--series", "all"], "several scans"),
        ("labels.nii.gz", ["other"], "several scans"),
        ("labels.nii.gz", ["--also", "masks"], "masks of `--also`"),
        ("labels.nii.gz", ["--model", "ct_tissue"], "several models"),
        ("labels.nii.gz", ["--names", "source"], "`--names` is for the folders"),
    ],
)
def test_one_file_is_refused_where_it_can_not_hold_the_result(
    name: str, more: list[str], expected: str, study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    ended = segment(study, tiny_model, tmp_path / name, *more)

    assert ended.code == 65
    assert expected in ended.err
    assert "(RESULT_FILE)" in ended.err
    assert entries(tmp_path) == {"study"}


def test_structures_that_may_overlap_are_refused_but_one_of_them(
    study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "regions")
    configs = model / "configs"
    text = (configs / "inference.json").read_text()
    text = text.replace('"softmax": true', '"sigmoid": true')
    text = text.replace('"argmax": true', '"threshold": 0.5')
    (configs / "inference.json").write_text(text)
    text = (configs / "metadata.json").read_text()
    (configs / "metadata.json").write_text(text.replace('"background"', '"stomach"'))
    file = tmp_path / "labels.nii.gz"

    refused = segment(study, model, file)
    ended = segment(study, model, file, "--structures", "liver")

    assert refused.code == 65
    assert "may overlap, which one label map can't hold: name one with --structures" in refused.err
    assert ended.code == 0, ended.err


def test_files_of_the_scan_are_never_replaced(tiny_model: Path, tmp_path: Path) -> None:
    scan = tmp_path / "scan.nii.gz"
    nifti(scan)
    (tmp_path / "link.nii.gz").hardlink_to(scan)
    before = scan.read_bytes()
    for name in ("scan.nii.gz", "link.nii.gz"):
        ended = segment(scan, tiny_model, tmp_path / name, "--modality", "CT", "--replace")

        assert ended.code == 65
        assert "would replace a file of the scan" in ended.err
    assert scan.read_bytes() == before
    seg = segment(scan, tiny_model, tmp_path / "labels.dcm", "--modality", "CT")
    assert (seg.code, "refers to a DICOM series" in seg.err) == (65, True)
    assert entries(tmp_path) == {"scan.nii.gz", "link.nii.gz"}


def test_a_dicom_seg_without_uids_to_refer_to_is_refused_before_the_scan_is_read(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Frame of reference: an anonymiser removed it."""
    study, steps = tmp_path / "study", list[str]()
    write_series(study, noise(), edit=lambda _, dataset: dataset.pop("FrameOfReferenceUID"))
    options = SegmentOptions(models=(str(tiny_model),), out=tmp_path / "labels.dcm")

    planned = segment(study, tiny_model, options.out, "--dry-run")
    [(_, record)] = iter_segment([study], options, on_step=lambda _, step: steps.append(step))

    assert (record.reason, steps) == (Reason.RESULT_FILE, ["find", "find"])
    assert record.detail.endswith("that a DICOM SEG must refer to: FrameOfReferenceUID")
    assert record.detail in " ".join(planned.err.split())
    assert entries(tmp_path) == {"study"}


def test_a_dry_run_says_what_would_become_of_the_file(
    study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "labels.nii.gz"
    absent = segment(study, tiny_model, file, "--dry-run", "--json")
    assert entries(tmp_path) == {"study"}
    segment(study, tiny_model, file)
    same = segment(study, tiny_model, file, "--dry-run")
    other = segment(study, tiny_model, file, "--dry-run", "--structures", "liver")
    replaced = segment(study, tiny_model, file, "-n", "--structures", "liver", "--replace")

    assert absent.document["planned"][0]["result"] == str(file)
    assert "(exists already: nothing would be done)" in " ".join(same.out.split())
    assert other.code == 65
    assert "(would be replaced)" in " ".join(replaced.out.split())


def test_a_result_beside_its_scan_is_no_other_scan(study: Path) -> None:
    file = study / "labels.nii.gz"
    nifti(file)
    assert not any(series.derived for series in find_series(study))
    write_document(study / "labels.json", {"file": file.name, "sha256": "a", "recipe": "b"})
    found = find_series(study)

    for selection in (None, "all", "best"):
        assert [series.kind for series in select_series(found, selection)] == ["dicom"]
    assert select_series(found, "labels.nii.gz")[0].files == (file,)
    assert not find_series(file)[0].derived


def test_a_folder_of_that_name_is_an_output_folder(
    study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "old.nii.gz").mkdir()
    ended = segment(study, tiny_model, tmp_path / "old.nii.gz")

    assert ended.code == 0, ended.err
    assert "cases" in entries(tmp_path / "old.nii.gz")


@pytest.mark.parametrize(
    "words",
    ["run ct_tissue study", "index study", "demo", "train recipe.yaml", "dataset a", "export a"],
)
def test_other_commands_write_folders(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    refused = scanloom(*words.split(), "-o", "new.csv")

    assert (refused.code, entries(tmp_path)) == (2, set())
    assert "an output folder is expected here, not a .csv file" in refused.err


def test_python_takes_a_file_too(study: Path, tiny_model: Path, tmp_path: Path) -> None:
    [record] = package.segment(study, model=str(tiny_model), out=tmp_path / "labels.nii.gz")

    assert record.folder is None
    assert record.file == tmp_path / "labels.nii.gz"
    assert repr(record).endswith(f"{record.file})")
    with pytest.raises(ScanError, match="several scans"):
        package.segment([study, study], model=str(tiny_model), out=tmp_path / "labels.nii.gz")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("labels.nii.gz", {"segmentation.nii.gz"}), ("labels.dcm", {"segmentation.dcm"})],
)
def test_neither_preview_nor_another_form_is_made_in_vain(
    name: str, expected: set[str], study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Looked at when all is written, before it is read back."""
    written = set[str]()

    def look(path: Path, step: str) -> None:
        if step == "readback":
            written.update(p.name for p in tmp_path.glob(".scanloom-*/**/*") if p.is_file())

    options = SegmentOptions(models=(str(tiny_model),), out=tmp_path / name)
    [(_, record)] = iter_segment([study], options, look)

    assert record.file == tmp_path / name
    assert expected | {"measurements.json"} <= written
    forms = {"segmentation.nii.gz", "segmentation.dcm"}
    assert written & forms <= expected | {"segmentation.nii.gz"}  # measurements are read from it
    assert not any(each.endswith(".png") for each in written)


@pytest.mark.parametrize("limit", [300, 1200])
@pytest.mark.parametrize("name", ["labels.nii.gz", "labels.dcm"])
def test_without_space_there_is_no_half_file(
    name: str, limit: int, study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """A limit of the size of files (EFBIG) stands for a full disk; an earlier result stays."""
    file = tmp_path / "place" / name
    segment(study, tiny_model, file, "--structures", "liver")
    before = {path.name: path.read_bytes() for path in file.parent.iterdir()}

    with limited_files(limit):
        ended = segment(study, tiny_model, file, "--replace")

    assert ended.code == 74, ended.err
    assert "(OUTPUT_UNWRITABLE)" in ended.err
    assert {path.name: path.read_bytes() for path in file.parent.iterdir()} == before


def killed(folder: Path, moments: list[int], command: list[str | Path]) -> list[str]:
    """Run a command once for each moment; return what became of it."""
    call = [sys.executable, KILLED, folder, ",".join(map(str, moments)), *command]
    done = subprocess.run([str(c) for c in call], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [line.partition(" ")[2] for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_killed_at_any_moment_it_leaves_no_half_file(
    study: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Also the four last moments: the document and the file are renamed, and the folder removed."""
    place = tmp_path / "place"
    place.mkdir()
    command: list[str | Path] = ["segment", study, "--model", tiny_model, "--device", "cpu"]
    command += ["--out", place / "labels.nii.gz"]
    [count] = killed(place, [-1], command)
    last = int(count)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "place--1").iterdir()}
    assert whole.keys() == {"labels.nii.gz", "labels.json"}
    (tmp_path / "place-before").rmdir()

    moments = sorted({*range(0, last, last // 8), *range(max(0, last - 60), last - 1, 7), last - 1})
    assert set(killed(place, moments, command)) == {"killed"}

    for moment in moments:
        left = tmp_path / f"place-{moment}"
        files = {p.name: p.read_bytes() for p in left.iterdir() if p.is_file()}
        assert files.items() <= whole.items(), moment
        assert files.keys() in (set(), {"labels.json"}, whole.keys()), moment
        assert all(p.name.startswith(".scanloom-") for p in left.iterdir() if p.is_dir())
        again = segment(study, tiny_model, left / "labels.nii.gz")
        assert again.code == 0, again.err
        assert entries(left) == {"labels.nii.gz", "labels.json"}, moment
