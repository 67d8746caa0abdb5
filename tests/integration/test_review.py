"""A review of DICOM from end to end: nobody is named, other programs read revisions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from contextlib import closing
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
from pydicom import dcmread
from pydicom.pixels import pack_bits
from pydicom.uid import generate_uid

from scanloom.core import Grid, Reason, ScanError
from scanloom.engine.results.verify import verify
from scanloom.engine.revisions import (
    Correction,
    changed_structures,
    publish_revision,
    take_file,
)
from scanloom.io import voxel_values
from scanloom.review.label_files import read_label_file
from scanloom.review.revisions import (
    latest_result,
    read_label_maps,
    revision_folders,
)
from scanloom.review.server.cases import open_case
from scanloom.review.verdicts.verdict import seen_of
from support.canaries import birds, contents, plain
from support.faults import on_small_disk
from support.layouts import both_layouts, case_folders, fan_by_hand
from support.processes import next_line
from support.review_cases import (
    Serving,
    change,
    judged,
    publish_scan,
    scan_array,
)
from support.seg_witnesses import (
    assert_same_places,
    complaints,
    dcmqi_points,
    highdicom_points,
    program,
    sorted_points,
)
from support.write_dicom import Words, write_series

FILE = "segmentation.nii.gz"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CT series whose every text is a canary, with its result."""
    folder = tmp_path_factory.mktemp("birds")
    plain(folder / "scans")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that are too long
        publish_scan(folder, folder / "scans")
    return folder


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CT series with blobs, with its result."""
    folder = tmp_path_factory.mktemp("blobs")
    array = scan_array(5, (24, 20, 9))
    write_series(folder / "scans", (array + 1024).astype(np.uint16), words=Words("CT", "blobs"))
    publish_scan(folder, folder / "scans")
    return folder


class OutputCopy:
    """A copy of an output folder, with its key."""

    def __init__(self, source: Path, target: Path, layout: str = "flat") -> None:
        self.out, self.key = target / "out", source / "key"
        shutil.copytree(source / "out", self.out, copy_function=shutil.copy2)
        if layout == "fanned":
            fan_by_hand(self.out)
        [self.case] = case_folders(self.out)

    def correct(self, box: tuple[slice, ...] = (slice(3, 9), slice(4, 12), slice(2, 6))) -> Path:
        latest = latest_result(self.out, self.case.name)
        labels = read_label_maps(latest)[FILE].copy()
        labels[box] = 2
        correction = Correction({FILE: labels}, "r1", "brush", seen_of(latest))
        return publish_revision(self.out, self.case.name, correction, self.key)

    def take(self, file: Path) -> Path | None:
        return take_file(self.out, file, self.case.name, "r1", key=self.key)


@pytest.fixture
def output(stored: Path, tmp_path: Path, layout: str) -> OutputCopy:
    return OutputCopy(stored, tmp_path, layout)


def points(folder: Path) -> dict[str, np.ndarray]:
    image = nib.load(folder / FILE)
    labels = np.asarray(image.dataobj)
    matches = {n: labels == n for n in (1, 2, 3)}
    return {f"part-{n}": sorted_points(m, image.affine) for n, m in matches.items() if m.any()}


# --- revisions ------------------------------------------------------------------------------------


def test_a_revision_is_what_foreign_programs_read(output: OutputCopy, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in output.case.rglob("*") if path.is_file()}

    revision = output.correct()

    seg = revision / "dicom" / "segmentation.dcm"
    assert complaints(seg) == []
    assert_same_places(points(revision), dcmqi_points(seg, tmp_path / "dcmqi"))
    assert_same_places(points(revision), highdicom_points(seg))
    new, old = dcmread(seg), dcmread(output.case / "dicom" / "segmentation.dcm")
    assert {s.SegmentAlgorithmType for s in new.SegmentSequence} == {"SEMIAUTOMATIC"}
    assert {s.SegmentAlgorithmType for s in old.SegmentSequence} == {"AUTOMATIC"}
    assert new.SOPInstanceUID != old.SOPInstanceUID
    assert new.SeriesInstanceUID != old.SeriesInstanceUID
    assert before == {path: path.read_bytes() for path in output.case.rglob("*") if path.is_file()}
    assert list(verify(output.out)) == []


def test_equal_corrections_give_equal_bytes(stored: Path, tmp_path: Path) -> None:
    contents = []
    for n in range(2):
        (tmp_path / str(n)).mkdir()
        revision = OutputCopy(stored, tmp_path / str(n)).correct()
        files = (p for p in revision.rglob("*") if p.is_file() and p.name != "timing.json")
        contents.append({p.relative_to(revision): p.read_bytes() for p in files})
    assert contents[0] == contents[1]


@both_layouts
def test_a_dicom_seg_comes_back_as_the_labels_it_was_made_of(
    output: OutputCopy, stored: Path, tmp_path: Path
) -> None:
    seg = output.correct() / "dicom" / "segmentation.dcm"
    (tmp_path / "other").mkdir()
    second = OutputCopy(stored, tmp_path / "other")

    taken = second.take(seg)

    assert taken is not None
    np.testing.assert_array_equal(
        read_label_maps(taken)[FILE], read_label_maps(output.out / seg.parent.parent)[FILE]
    )
    assert second.take(seg) is None
    assert output.take(output.case / FILE) is not None  # back to the first labels


def test_segments_of_a_dicom_seg_are_one_label_map_unless_they_overlap(
    output: OutputCopy, tmp_path: Path
) -> None:
    """A layer of each would be gigabytes of a hundred organs."""
    image = nib.load(output.case / FILE)
    grid, labels = Grid(image.shape, image.affine), np.asarray(image.dataobj)
    path = output.case / "dicom" / "segmentation.dcm"

    [layer] = read_label_file(path, grid).layers

    np.testing.assert_array_equal(layer, labels)
    dataset = dcmread(path)
    frames, masks = dataset.pixel_array, [labels == n for n in (1, 2, 3)]
    for frame, about in zip(frames, dataset.PerFrameFunctionalGroupsSequence, strict=True):
        if about.SegmentIdentificationSequence[0].ReferencedSegmentNumber == 3:
            frame |= 1
    dataset.PixelData = pack_bits(frames.ravel())
    dataset.save_as(tmp_path / "overlap.dcm")
    overlapping = read_label_file(tmp_path / "overlap.dcm", grid)
    assert overlapping.names == {f"part-{n}": (n - 1, 1) for n in (1, 2, 3)}
    masks[2] = np.broadcast_to(masks[2].any(axis=(0, 1)), labels.shape)
    np.testing.assert_array_equal(overlapping.layers, masks)


def write_by_dcmqi(labels: np.ndarray, affine: np.ndarray, scans: Path, folder: Path) -> Path:
    """Return a DICOM SEG that dcmqi wrote of label map with parts 1 to 3."""
    code = {"CodeValue": "85756007", "CodingSchemeDesignator": "SCT", "CodeMeaning": "Tissue"}
    segments = [
        {
            "labelID": n,
            "SegmentLabel": f"part-{n}",
            "SegmentDescription": f"part-{n}",
            "SegmentAlgorithmType": "MANUAL",
            "recommendedDisplayRGBValue": [10 * n, 200, 30],
            "SegmentedPropertyCategoryCodeSequence": code,
            "SegmentedPropertyTypeCodeSequence": code,
        }
        for n in range(1, 4)
    ]
    meta = {
        "ContentCreatorName": "Reader",
        "SeriesDescription": "Segmentation",
        "SeriesNumber": "300",
        "InstanceNumber": "1",
        "segmentAttributes": [segments],
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    nib.save(nib.Nifti1Image(labels.astype(np.int16), affine), folder / "labels.nii.gz")
    command = [program("itkimage2segimage"), "--inputImageList", str(folder / "labels.nii.gz")]
    command += ["--inputDICOMDirectory", str(scans), "--inputMetadata", str(folder / "meta.json")]
    target = folder / "dcmqi.dcm"
    subprocess.run([*command, "--outputDICOM", str(target)], check=True, capture_output=True)
    return target


@pytest.mark.parametrize("slices", [(4,), (3, 7), (0, 8), (1, 2, 3, 5)])
def test_a_dicom_seg_of_dcmqi_is_taken(
    output: OutputCopy, stored: Path, tmp_path: Path, slices: tuple[int, ...]
) -> None:
    """Also with few slices, where a SEG has no frames of the others."""
    image = nib.load(output.case / FILE)
    labels = np.zeros(image.shape, np.uint8)
    for k in slices:
        labels[2:9, 3:12, k] = 1
        labels[10:14, 3:12, k] = 2
        labels[15:18, 3 + k : 12, k] = 3
    [scans] = {path.parent for path in (stored / "scans").rglob("*") if path.is_file()}

    taken = output.take(write_by_dcmqi(labels, image.affine, scans, tmp_path))

    assert taken is not None
    np.testing.assert_array_equal(read_label_maps(taken)[FILE], labels)


@both_layouts
def test_one_of_several_corrections_of_one_result_is_published(output: OutputCopy) -> None:
    """The others would undo it: they are refused, and nothing is replaced."""
    before, seen = read_label_maps(output.case)[FILE], seen_of(output.case)
    start, published, refused = threading.Barrier(4), [], []

    def publish(n: int) -> None:
        labels = before.copy()
        labels[n] = 3
        start.wait()
        try:
            correction = Correction({FILE: labels}, "r1", "brush", seen)
            folder = publish_revision(output.out, output.case.name, correction, output.key)
            published.append((folder, labels))
        except ScanError as error:
            refused.append(error.reason)

    threads = [threading.Thread(target=publish, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    [(folder, labels)] = published
    assert (folder.name, refused) == ("1", [Reason.CORRECTED] * 3)
    np.testing.assert_array_equal(read_label_maps(folder)[FILE], labels)
    assert list(verify(output.out)) == []


@both_layouts
def test_a_damaged_revision_is_named_not_passed_over(output: OutputCopy) -> None:
    output.correct()
    second = output.correct((slice(0, 3), slice(0, 3), slice(0, 3)))
    (second / "case.json").write_text("{")
    with pytest.raises(ScanError) as caught:
        output.correct()
    assert caught.value.reason is Reason.RESULT_DAMAGED
    shutil.rmtree(second)
    assert latest_result(output.out, output.case.name).name == "1"


PUBLISHER = """
import sys
from pathlib import Path
from scanloom.engine.revisions import Correction, publish_revision
from scanloom.review.revisions import *
from scanloom.review.verdicts.verdict import seen_of
out, name, key = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
while True:
    latest = latest_result(out, name)
    labels = read_label_maps(latest)["segmentation.nii.gz"].copy()
    labels[revision_number(latest) % len(labels)] = 1 + revision_number(latest) % 3
    correction = Correction({"segmentation.nii.gz": labels}, "r1", "brush", seen_of(latest))
    print(publish_revision(out, name, correction, key).name, flush=True)
"""


@pytest.mark.slow
def test_kills_leave_whole_revisions_only(output: OutputCopy) -> None:
    rng, case = np.random.default_rng(4), output.case.name
    command = [sys.executable, "-c", PUBLISHER, str(output.out), case, str(output.key)]
    newest = 0
    for _ in range(12):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                newest = int(next_line(process))
                time.sleep(rng.uniform(0, 0.4))
            finally:
                process.kill()
            newest = max([newest, *map(int, process.stdout.read().split())])
        numbers = [int(folder.name) for folder in revision_folders(output.out, case)]
        assert numbers == [*range(1, len(numbers) + 1)]
        assert newest <= len(numbers)
        assert list(verify(output.out)) == []
    output.correct()
    assert list((output.out / ".work").iterdir()) == []


@pytest.mark.slow
def test_a_full_disk_leaves_no_revision(stored: Path, tmp_path: Path) -> None:
    """Of each size, until one is enough: a revision is whole or not there."""
    output = OutputCopy(stored, tmp_path)
    image = nib.load(output.case / FILE)
    labels = np.random.default_rng(2).integers(0, 4, image.shape).astype(np.uint8)
    nib.save(nib.Nifti1Image(labels, image.affine), tmp_path / "labels.nii.gz")
    script = """
for free in 0 60 120 240 4000; do
  mount -t tmpfs -o size=20m none "$1"
  cp -a "$2" "$1/out"
  mount -o remount,size=$(($(df --output=used "$1" | tail -1) + free))k "$1"
  scanloom review "$1/out" --take "$3" --case "$4" --key "$5"
  ls "$1/out/review/revisions/$4" 2> /dev/null
  ls "$1/out/.work"
  scanloom verify "$1/out" --key "$5" --quiet && echo whole
  umount "$1"
done
"""
    command = [
        tmp_path / "disk",
        output.out,
        tmp_path / "labels.nii.gz",
        output.case.name,
        output.key,
    ]
    *refused, written = on_small_disk(script, command).split("whole\n")[:-1]
    assert len(refused) == 4
    for answer in refused:
        assert "DISK_FULL" in answer
        assert len(answer.splitlines()) == 1  # nothing is listed
    first, *changes, last = written.splitlines()
    assert first.startswith("Revision 1: ")
    was, now = (np.bincount(np.ravel(each), minlength=4) for each in (image.dataobj, labels))
    assert changes == [f"part-{n}: {was[n]} voxels before, {now[n]} now" for n in (1, 2, 3)]
    assert last == "1"


def test_files_of_other_cases_are_refused(output: OutputCopy, published: Path) -> None:
    [foreign] = (published / "out" / "cases").iterdir()
    for file in (foreign / FILE, foreign / "dicom" / "segmentation.dcm"):
        with pytest.raises(ScanError) as caught:
            output.take(file)
        assert caught.value.reason is Reason.GRID_DIFFERS
    labels = nib.load(output.case / FILE)
    array = np.asarray(labels.dataobj).copy()
    array[0, 0, 0] = 9
    nib.save(nib.Nifti1Image(array, labels.affine), output.out.parent / "nine.nii.gz")
    with pytest.raises(ScanError, match="no structure 9"):
        output.take(output.out.parent / "nine.nii.gz")
    with pytest.raises(ScanError) as caught:
        take_file(output.out, output.case / FILE, "../cases/x", "r1", key=output.key)
    assert caught.value.reason is Reason.ID_UNKNOWN
    assert revision_folders(output.out, output.case.name) == []


def save_slicer(
    case: Path, path: Path, layers: list[np.ndarray], segments: dict[str, tuple[int, int]]
) -> Path:
    """Write layers (I, J, K) as 3D Slicer does; segments (layer, value) by name."""
    reference = sitk.ReadImage(str(case / FILE))
    images = [sitk.GetImageFromArray(layer.transpose(2, 1, 0)) for layer in layers]
    image = sitk.Compose(images) if len(images) > 1 else images[0]
    image.CopyInformation(reference)
    for n, (name, (layer, value)) in enumerate(segments.items()):
        texts = {"Name": name, "Layer": str(layer), "LabelValue": str(value)}
        for key, text in texts.items():
            image.SetMetaData(f"Segment{n}_{key}", text)
    sitk.WriteImage(image, str(path))
    return path


def test_segments_that_overlap_are_refused(output: OutputCopy, tmp_path: Path) -> None:
    """In a label map, a voxel can't have both."""
    first, second = (np.zeros(nib.load(output.case / FILE).shape, np.uint8) for _ in range(2))
    first[2:9, 2:9, 2:5], second[6:12, 2:9, 2:5] = 1, 1
    segments = {"Part 1": (0, 1), "Part 2": (1, 1)}
    with pytest.raises(ScanError, match="overlaps another") as caught:
        output.take(save_slicer(output.case, tmp_path / "a.seg.nrrd", [first, second], segments))
    assert caught.value.reason is Reason.LABELS_UNKNOWN
    second[first > 0] = 0

    revision = output.take(
        save_slicer(output.case, tmp_path / "b.seg.nrrd", [first, second], segments)
    )

    assert revision is not None
    before, labels = (read_label_maps(folder)[FILE] for folder in (output.case, revision))
    expected = np.where(first > 0, 1, np.where(second > 0, 2, np.where(before == 3, 3, 0)))
    np.testing.assert_array_equal(labels, expected)
    assert changed_structures(output.case, revision) == {
        f"part-{n}": ((before == n).sum(), (expected == n).sum()) for n in (1, 2, 3)
    }


def test_a_renamed_segment_is_refused(output: OutputCopy, tmp_path: Path) -> None:
    dataset = dcmread(output.case / "dicom" / "segmentation.dcm")
    dataset.SegmentSequence[0].SegmentLabel = "other"
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    dataset.save_as(tmp_path / "other.dcm")
    with pytest.raises(ScanError, match="no structure 'other'") as caught:
        output.take(tmp_path / "other.dcm")
    assert caught.value.reason is Reason.LABELS_UNKNOWN


@both_layouts
def test_a_revision_of_a_replaced_result_no_longer_counts(output: OutputCopy) -> None:
    revision = output.correct()
    assert latest_result(output.out, output.case.name) == revision
    document = json.loads((output.case / "case.json").read_text())
    (output.case / "case.json").write_text(json.dumps({**document, "recipe": "s" * 64}))
    assert latest_result(output.out, output.case.name) == output.case


@pytest.mark.parametrize("name", [FILE, "measurements.json", "case.json", "dicom/segmentation.dcm"])
def test_verify_names_a_flipped_byte(output: OutputCopy, name: str) -> None:
    file = output.correct() / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    [matches] = verify(output.out)

    assert (matches.fault, output.out / matches.file) == ("changed", file)


def test_without_the_key_or_the_scan_nothing_is_published(
    output: OutputCopy, stored: Path, tmp_path: Path
) -> None:
    second = tmp_path / "other-key"
    second.write_bytes(b"o" * 32)
    second.chmod(0o600)
    key, output.key = output.key, second
    with pytest.raises(ScanError) as caught:
        output.correct()
    assert caught.value.reason is Reason.KEY_MISMATCH
    output.key = key
    (stored / "scans").rename(stored / "gone")
    try:
        with pytest.raises(ScanError):
            output.correct()
    finally:
        (stored / "gone").rename(stored / "scans")
    assert revision_folders(output.out, output.case.name) == []
    assert list((output.out / ".work").iterdir()) == []


def test_a_scan_above_the_usual_limit_can_be_corrected(
    output: OutputCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was segmented with another `--max-size`, which its result does not tell."""
    monkeypatch.setattr(voxel_values, "VOXEL_LIMIT_BYTES", 10)
    assert output.correct().name == "1"


def test_a_scan_whose_files_were_changed_is_not_used(stored: Path, output: OutputCopy) -> None:
    """Same UIDs, other pixels: measurements and DICOM SEG would be of another scan."""
    file = next(path for path in sorted((stored / "scans").rglob("*")) if path.is_file())
    content = file.read_bytes()
    dataset = dcmread(file)
    dataset.PixelData = bytes(len(dataset.PixelData))
    dataset.save_as(file)
    try:
        with pytest.raises(ScanError) as caught:
            output.correct()
    finally:
        file.write_bytes(content)
    assert caught.value.reason is Reason.SERIES_DIFFERS
    assert revision_folders(output.out, output.case.name) == []
    assert output.correct().name == "1"


@pytest.mark.parametrize("altered", ["pixels", "a slice less", "a slice more", "another series"])
def test_only_the_scan_that_was_segmented_is_shown(
    stored: Path, output: OutputCopy, altered: str
) -> None:
    """Labels and preview are, and the page names the reason."""
    files = [path for path in sorted((stored / "scans").rglob("*")) if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    further = files[0].with_name("further.dcm")
    dataset = dcmread(files[0])
    if altered == "pixels":
        dataset.PixelData = bytes(len(dataset.PixelData))
        dataset.save_as(files[0])
    elif altered == "a slice less":
        files[0].unlink()
    elif altered == "a slice more":
        dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = generate_uid()
        dataset.ImagePositionPatient[2] = str(float(dataset.ImagePositionPatient[2]) - 500)
        dataset.save_as(further)
    else:
        series = generate_uid()
        for path in files:
            dataset = dcmread(path)
            dataset.SeriesInstanceUID = series
            dataset.save_as(path)
    try:
        case = open_case(output.out, output.case.name, output.key)
    finally:
        further.unlink(missing_ok=True)
        for path, content in before.items():
            path.write_bytes(content)

    assert case.image is None
    assert case.missing.startswith("The scan is not shown: ")
    assert case.missing.endswith("(SERIES_DIFFERS).")
    slices = {"a slice less": -1, "a slice more": 1}.get(altered)
    assert not slices or f"{len(files) + slices} files, {len(files)} when" in case.missing
    assert case.layers
    assert open_case(output.out, output.case.name, output.key).image is not None


def test_damaged_dicom_segs_are_refused_by_name(output: OutputCopy, tmp_path: Path) -> None:
    document = json.loads((output.case / "case.json").read_text())["grid"]
    grid, rng = Grid(tuple(document["shape"]), document["affine_ras_mm"]), np.random.default_rng(1)
    content = (output.case / "dicom" / "segmentation.dcm").read_bytes()
    refused = 0
    for n in range(60):
        damaged = bytearray(content)
        if n % 2:
            del damaged[rng.integers(len(damaged)) :]
        else:
            damaged[rng.integers(132, 6000)] ^= 1 << rng.integers(8)
        (tmp_path / "a.dcm").write_bytes(damaged)
        try:
            read_label_file(tmp_path / "a.dcm", grid)
        except ScanError:
            refused += 1
    assert refused >= 30


# --- nobody is named ------------------------------------------------------------------------------


@pytest.mark.thorough
def test_nobody_is_named(published: Path, tmp_path: Path) -> None:
    """Server, log, revisions and tables of a scan whose every text is a canary."""
    output = OutputCopy(published, tmp_path)
    with (
        closing(Serving(output.out, output.key, reviewer="CANARY")) as server,
        closing(server.client()) as client,
    ):
        name = output.case.name
        case = client.get(f"/api/case/{name}").json()
        assert case["image"] == "source"
        stroke = {"layer": 0, "plane": "axial", "index": 2, "points": [[3, 3]], "radius_mm": 9.0}
        body = judged(case, "edit", comment="CANARY")
        answers = [
            client.get("/r1/"),
            client.get("/api/worklist"),
            client.get(f"/api/case/{name}"),
            change(client, name, "stroke", **stroke, label=1),
            change(client, name, "draft/save"),
            client.post(f"/api/case/{name}/verdict", json=body),
        ]
        assert [each.status_code for each in answers] == [200] * 5 + [409]
        body = judged(client.get(f"/api/case/{name}").json(), "edit", comment="CANARY")
        assert client.post(f"/api/case/{name}/verdict", json=body).status_code == 200
    assert not birds(b"".join(each.content for each in answers))
    files = [path for path in (output.out / "review").rglob("*") if path.is_file()]
    assert {"verdicts.jsonl", "review.csv", "review.parquet"} <= {path.name for path in files}
    for path in files:
        assert not birds(os.fsencode(path.relative_to(output.out)))
        if path.parent.name != "dicom":  # which must name the patient
            assert not any(birds(content) for content in contents(path)), path
