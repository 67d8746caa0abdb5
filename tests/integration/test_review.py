"""A review of DICOM from end to end: nobody is named, other programs read revisions."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import nibabel as nib
import numpy as np
import pytest
from pydicom import dcmread
from pydicom.uid import generate_uid

from scanloom.core import Grid, Reason, ScanError
from scanloom.engine.results.verify import verify
from scanloom.engine.revisions.export import export
from scanloom.engine.revisions.publish import Correction, publish_revision
from scanloom.engine.revisions.take import take_file
from scanloom.review.corrections.label_files import read_label_file
from scanloom.review.corrections.revisions import latest_result, read_label_maps, revision_folders
from scanloom.review.verdicts.log import VerdictLog
from scanloom.review.verdicts.verdict import Verdict
from support.canaries import birds, contents, plain
from support.review_cases import publish_scan, scan_array, seen
from support.seg_witnesses import (
    assert_same_places,
    complaints,
    dcmqi_points,
    highdicom_points,
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


class Place:
    """A copy of an output folder, with its key."""

    def __init__(self, source: Path, target: Path) -> None:
        self.out, self.key = target / "out", source / "key"
        shutil.copytree(source / "out", self.out, copy_function=shutil.copy2)
        [self.case] = (self.out / "cases").iterdir()

    def correct(self, box: tuple[slice, ...] = (slice(3, 9), slice(4, 12), slice(2, 6))) -> Path:
        labels = read_label_maps(latest_result(self.out, self.case.name))[FILE].copy()
        labels[box] = 2
        return publish_revision(
            self.out, self.case.name, Correction({FILE: labels}, "r1", "brush"), self.key
        )

    def take(self, file: Path) -> Path | None:
        return take_file(self.out, file, self.case.name, "r1", key=self.key)


@pytest.fixture
def place(stored: Path, tmp_path: Path) -> Place:
    return Place(stored, tmp_path)


def points(folder: Path) -> dict[str, np.ndarray]:
    image = nib.load(folder / FILE)
    labels = np.asarray(image.dataobj)
    found = {n: labels == n for n in (1, 2, 3)}
    return {f"part-{n}": sorted_points(m, image.affine) for n, m in found.items() if m.any()}


# --- revisions ------------------------------------------------------------------------------------


def test_a_revision_is_what_foreign_programs_read(place: Place, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in place.case.rglob("*") if path.is_file()}

    revision = place.correct()

    seg = revision / "dicom" / "segmentation.dcm"
    assert complaints(seg) == []
    assert_same_places(points(revision), dcmqi_points(seg, tmp_path / "dcmqi"))
    assert_same_places(points(revision), highdicom_points(seg))
    new, old = dcmread(seg), dcmread(place.case / "dicom" / "segmentation.dcm")
    assert {s.SegmentAlgorithmType for s in new.SegmentSequence} == {"SEMIAUTOMATIC"}
    assert {s.SegmentAlgorithmType for s in old.SegmentSequence} == {"AUTOMATIC"}
    assert new.SOPInstanceUID != old.SOPInstanceUID
    assert new.SeriesInstanceUID != old.SeriesInstanceUID
    assert before == {path: path.read_bytes() for path in place.case.rglob("*") if path.is_file()}
    assert list(verify(place.out)) == []


def test_equal_corrections_give_equal_bytes(stored: Path, tmp_path: Path) -> None:
    contents = []
    for n in range(2):
        (tmp_path / str(n)).mkdir()
        revision = Place(stored, tmp_path / str(n)).correct()
        files = (p for p in revision.rglob("*") if p.is_file() and p.name != "timing.json")
        contents.append({p.relative_to(revision): p.read_bytes() for p in files})
    assert contents[0] == contents[1]


def test_a_dicom_seg_comes_back_as_the_labels_it_was_made_of(
    place: Place, stored: Path, tmp_path: Path
) -> None:
    seg = place.correct() / "dicom" / "segmentation.dcm"
    (tmp_path / "other").mkdir()
    other = Place(stored, tmp_path / "other")

    taken = other.take(seg)

    assert taken is not None
    np.testing.assert_array_equal(
        read_label_maps(taken)[FILE], read_label_maps(place.out / seg.parent.parent)[FILE]
    )
    assert other.take(seg) is None
    assert place.take(place.case / FILE) is not None  # back to the first labels


def test_files_of_other_cases_are_refused(place: Place, published: Path) -> None:
    [foreign] = (published / "out" / "cases").iterdir()
    for file in (foreign / FILE, foreign / "dicom" / "segmentation.dcm"):
        with pytest.raises(ScanError) as caught:
            place.take(file)
        assert caught.value.reason is Reason.GRID_DIFFERS
    labels = nib.load(place.case / FILE)
    array = np.asarray(labels.dataobj).copy()
    array[0, 0, 0] = 9
    nib.save(nib.Nifti1Image(array, labels.affine), place.out.parent / "nine.nii.gz")
    with pytest.raises(ScanError, match="no structure 9"):
        place.take(place.out.parent / "nine.nii.gz")
    with pytest.raises(ScanError) as caught:
        take_file(place.out, place.case / FILE, "../cases/x", "r1", key=place.key)
    assert caught.value.reason is Reason.ID_UNKNOWN
    assert revision_folders(place.out, place.case.name) == []


def test_a_renamed_segment_is_refused(place: Place, tmp_path: Path) -> None:
    dataset = dcmread(place.case / "dicom" / "segmentation.dcm")
    dataset.SegmentSequence[0].SegmentLabel = "other"
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    dataset.save_as(tmp_path / "other.dcm")
    with pytest.raises(ScanError, match="no structure 'other'") as caught:
        place.take(tmp_path / "other.dcm")
    assert caught.value.reason is Reason.LABELS_UNKNOWN


def test_a_revision_of_a_replaced_result_no_longer_counts(place: Place) -> None:
    revision = place.correct()
    assert latest_result(place.out, place.case.name) == revision
    document = json.loads((place.case / "case.json").read_text())
    (place.case / "case.json").write_text(json.dumps({**document, "recipe": "s" * 64}))
    assert latest_result(place.out, place.case.name) == place.case


@pytest.mark.parametrize("name", [FILE, "measurements.json", "case.json", "dicom/segmentation.dcm"])
def test_verify_names_a_flipped_byte(place: Place, name: str) -> None:
    file = place.correct() / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    [found] = verify(place.out)

    assert (found.fault, place.out / found.file) == ("changed", file)


def test_without_the_key_or_the_scan_nothing_is_published(
    place: Place, stored: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other-key"
    other.write_bytes(b"o" * 32)
    other.chmod(0o600)
    key, place.key = place.key, other
    with pytest.raises(ScanError) as caught:
        place.correct()
    assert caught.value.reason is Reason.KEY_MISMATCH
    place.key = key
    (stored / "scans").rename(stored / "gone")
    try:
        with pytest.raises(ScanError):
            place.correct()
    finally:
        (stored / "gone").rename(stored / "scans")
    assert revision_folders(place.out, place.case.name) == []
    assert list((place.out / ".work").iterdir()) == []


def test_a_scan_whose_files_were_changed_is_not_used(stored: Path, place: Place) -> None:
    """Same UIDs, other pixels: measurements and DICOM SEG would be of another scan."""
    file = next(path for path in sorted((stored / "scans").rglob("*")) if path.is_file())
    content = file.read_bytes()
    dataset = dcmread(file)
    dataset.PixelData = bytes(len(dataset.PixelData))
    dataset.save_as(file)
    try:
        with pytest.raises(ScanError) as caught:
            place.correct()
    finally:
        file.write_bytes(content)
    assert caught.value.reason is Reason.SOURCE_CHANGED
    assert revision_folders(place.out, place.case.name) == []
    assert place.correct().name == "1"


def test_damaged_dicom_segs_are_refused_by_name(place: Place, tmp_path: Path) -> None:
    document = json.loads((place.case / "case.json").read_text())["grid"]
    grid, rng = Grid(tuple(document["shape"]), document["affine_ras_mm"]), np.random.default_rng(1)
    content = (place.case / "dicom" / "segmentation.dcm").read_bytes()
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


# --- export ---------------------------------------------------------------------------------------


def test_accepted_and_corrected_cases_are_exported(place: Place, tmp_path: Path) -> None:
    def decide(decision: str) -> None:
        with closing(VerdictLog(place.out)) as log:
            result = latest_result(place.out, place.case.name)
            log.append(Verdict(place.case.name, "r1", seen(result), decision))  # type: ignore[arg-type]

    with pytest.raises(ScanError) as caught:
        export(place.out, tmp_path / "none", place.key)
    assert caught.value.reason is Reason.NOT_FOUND
    decide("accept")
    assert export(place.out, tmp_path / "first", place.key) == {}
    label = tmp_path / "first" / "labels" / f"{place.case.name}.nii.gz"
    assert label.read_bytes() == (place.case / FILE).read_bytes()
    image = nib.load(tmp_path / "first" / "images" / f"{place.case.name}.nii.gz")
    np.testing.assert_array_equal(image.affine, nib.load(label).affine)
    revision = place.correct()
    assert export(place.out, tmp_path / "second", place.key) == {}
    label = tmp_path / "second" / "labels" / f"{place.case.name}.nii.gz"
    assert label.read_bytes() == (revision / FILE).read_bytes()
    decide("reject")
    with pytest.raises(ScanError):
        export(place.out, tmp_path / "third", place.key)
    assert not (tmp_path / "third").exists()


# --- nobody is named ------------------------------------------------------------------------------


def test_nobody_is_named(published: Path, tmp_path: Path) -> None:
    """Server, log, revisions and tables of a scan whose every text is a canary."""
    place = Place(published, tmp_path)
    with closing(Serving(place, reviewer="CANARY")) as server, closing(server.client()) as client:
        name = place.case.name
        case = client.get(f"/api/case/{name}").json()
        assert case["image"] == "source"
        stroke = {"layer": 0, "plane": "axial", "index": 2, "points": [[3, 3]], "radius_mm": 9.0}
        body = {"decision": "edit", "recipe": case["recipe"], "seen": case["seen"]}
        answers = [
            client.get("/"),
            client.get("/api/worklist"),
            client.get(f"/api/case/{name}"),
            client.post(f"/api/case/{name}/stroke", json={**stroke, "label": 1}),
            client.post(f"/api/case/{name}/draft/save", json={}),
            client.post(f"/api/case/{name}/verdict", json={**body, "comment": "CANARY"}),
        ]
        assert [each.status_code for each in answers] == [200] * 5 + [409]
        case = client.get(f"/api/case/{name}").json()
        body |= {"recipe": case["recipe"], "seen": case["seen"], "comment": "CANARY"}
        assert client.post(f"/api/case/{name}/verdict", json=body).status_code == 200
    assert not birds(b"".join(each.content for each in answers))
    files = [path for path in (place.out / "review").rglob("*") if path.is_file()]
    assert {"verdicts.jsonl", "review.csv", "review.parquet"} <= {path.name for path in files}
    for path in files:
        assert not birds(os.fsencode(path.relative_to(place.out)))
        if path.parent.name != "dicom":  # which must name the patient
            assert not any(birds(content) for content in contents(path)), path


class Serving:
    """`scanloom review` as a program."""

    def __init__(self, place: Place, reviewer: str = "anna") -> None:
        words = [sys.executable, "-m", "scanloom", "review", str(place.out), "--key"]
        words += [str(place.key), "--reviewers", f"{reviewer},ben"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.links = []
        for line in self.process.stdout:
            if "login?token=" in line:
                self.links.append(line.split()[-1])
            if line.startswith("Each link"):
                break

    def client(self, reviewer: int = 0) -> Any:
        origin = self.links[reviewer].split("/login", maxsplit=1)[0]
        client = httpx.Client(base_url=origin, headers={"origin": origin}, timeout=60)
        assert client.get(self.links[reviewer]).status_code == 200
        return client

    def close(self, by: signal.Signals = signal.SIGINT) -> None:
        self.process.send_signal(by)
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
