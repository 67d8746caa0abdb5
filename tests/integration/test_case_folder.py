"""One command from a study on disk to a published case folder, also with faults on the way."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pydicom
import pytest

import scanloom
from scanloom.convert.store import shipped
from scanloom.core import CaseRecord, ComputeOptions, Flag, Outputs, Reason
from scanloom.engine.run import RunOptions, run
from scanloom.engine.segment import iter_segment, segment_workflow
from scanloom.io.output.crosswalk import find_sources
from scanloom.options import SegmentOptions, segment_options
from scanloom.review.report.page import write_report
from support.commands import scanloom as scanloom_command

SAMPLE = shipped("data") / "torso_ct"
PART = sorted(SAMPLE.iterdir())[:20]
"""The uppermost third of the sample, for tests of files around the labels."""


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return path


def options(out: Path, key: Path, **more: object) -> SegmentOptions:
    return segment_options(models=("ct_tissue",), out=out, key=key, device="cpu", **more)


def segment_paths(paths: list[Path], options: SegmentOptions) -> list[CaseRecord]:
    return [record for _, record in iter_segment(paths, options)]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, key: Path) -> Path:
    out = tmp_path_factory.mktemp("run") / "out"
    (record,) = segment_paths([SAMPLE], options(out, key))
    assert record.reason is None, record.detail
    assert record.folder == out / "cases" / record.id
    return record.folder


def copy_of(published: Path, folder: Path) -> Path:
    """Copy the output folder of a published case to `folder/out`, for a test that writes to it."""
    return shutil.copytree(published.parents[1], folder / "out", copy_function=shutil.copy2)


def digests(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def left_behind(out: Path) -> list[str]:
    """Return whatever of results stands in an output folder, beside the engine that was decided."""
    files = [p for p in out.rglob("*") if p.is_file()] if out.exists() else []
    return [str(p) for p in files if p.name != "engine.json"]


def test_result_lies_on_the_scan(published: Path) -> None:
    """The label map has the source's shape and, in world space, its affine."""
    volume = scanloom.load_volume(SAMPLE)
    image = nib.load(published / "segmentation.nii.gz")
    assert image.shape == volume.grid.shape
    np.testing.assert_allclose(image.affine, volume.grid.affine, atol=1e-3)


def test_volumes_are_those_of_the_phantom(published: Path) -> None:
    """Lung, fat, soft tissue and bone within 5 % of the drawn volumes."""
    truth = json.loads((shipped("data") / "torso_truth.json").read_text())["tissues_ml"]
    measured = {
        m["label"]: m["volume_ml"]
        for m in json.loads((published / "measurements.json").read_text())["measurements"]
    }
    for label in ("lung", "fat", "soft_tissue", "bone"):
        assert measured[label] == pytest.approx(truth[label], rel=0.05), label


@pytest.mark.thorough
def test_two_runs_are_byte_identical_but_for_timing(
    published: Path, tmp_path: Path, key: Path
) -> None:
    """Same scan, model, key and machine: the same bytes."""
    (again,) = segment_paths([SAMPLE], options(tmp_path / "again", key))
    assert again.folder is not None
    first, second = digests(published), digests(again.folder)
    assert first.pop("timing.json") != second.pop("timing.json")
    assert first == second


def test_sums_hold(published: Path) -> None:
    """A foreign sha256sum agrees with SHA256SUMS, which names every file but the timing."""
    sums = (published / "SHA256SUMS").read_text().splitlines()
    named = {line.split("  ", 1)[1] for line in sums}
    assert named == set(digests(published)) - {"SHA256SUMS", "timing.json"}
    subprocess.run(
        ["sha256sum", "--check", "--quiet", "--strict", "SHA256SUMS"], cwd=published, check=True
    )


def test_no_identity_outside_dicom(tmp_path: Path, key: Path) -> None:
    """Patient data of the headers is in `dicom/` only."""
    import pydicom

    source = tmp_path / "CANARY^study"
    source.mkdir()
    for number, path in enumerate(PART):
        header = pydicom.dcmread(path)
        header.PatientName = "CANARY^NAME"
        header.PatientID = "CANARY-1"
        header.StudyDescription = header.SeriesDescription = "CANARY study"
        header.InstitutionName = "CANARY clinic"
        header.save_as(source / f"CANARY_{number}.dcm")
    (record,) = segment_paths([source], options(tmp_path / "out", key))
    assert record.folder is not None, record.detail
    for path in (tmp_path / "out").rglob("*"):
        inside = path.relative_to(tmp_path / "out").parts
        if path.is_file() and "dicom" not in inside and "private" not in inside:
            assert b"CANARY" not in path.read_bytes(), path
            assert header.StudyInstanceUID.encode() not in path.read_bytes(), path


def test_second_run_finds_it_done(published: Path, key: Path) -> None:
    """A result of the same recipe is kept; another recipe requires --replace."""
    out = published.parents[1]
    before = digests(published)
    (record,) = segment_paths([SAMPLE], options(out, key))
    assert record.reason is None
    assert record.folder == published
    assert [m.label for m in record.measurements]
    assert digests(published) == before
    (stale,) = segment_paths([SAMPLE], options(out, key, outputs=Outputs(also=("masks",))))
    assert stale.reason is Reason.STALE
    assert digests(published) == before


@pytest.mark.thorough
def test_replace_brings_the_new_recipe(tmp_path: Path, key: Path, published: Path) -> None:
    """--replace puts the new folder in the place of the old one."""
    out = copy_of(published, tmp_path)
    (record,) = segment_paths(
        [SAMPLE], options(out, key, outputs=Outputs(also=("masks",)), replace=True)
    )
    assert record.reason is None, record.detail
    assert record.folder is not None
    assert (record.folder / "split" / "lung.nii.gz").is_file()
    assert len(list((out / "cases").iterdir())) == 1


@pytest.mark.thorough
def test_less_overlap_is_named_on_every_result(tmp_path: Path, key: Path) -> None:
    """A later request of another overlap names the overlap, not a changed model."""
    out, change = tmp_path / "out", "overlap 0.1 instead of 0.25"
    (record,) = segment_paths([SAMPLE], options(out, key, compute=ComputeOptions(overlap=0.1)))
    assert record.folder is not None, record.detail
    document = json.loads((record.folder / "case.json").read_text())
    [segmentation] = (record.folder / "dicom").glob("*.dcm")
    [algorithm] = (
        pydicom.dcmread(segmentation).SegmentSequence[0].SegmentationAlgorithmIdentificationSequence
    )
    assert document["models"][0]["changes"] == change
    assert algorithm.AlgorithmParameters == f"changes={change}"
    assert change in write_report(out).read_text()

    (stale,) = segment_paths([SAMPLE], options(out, key, compute=ComputeOptions(fast=True)))
    assert stale.reason is Reason.STALE
    assert "overlap was 0.1, and is none now; fast was off, and is on now" in stale.detail
    assert "card" not in stale.detail


def test_two_models_in_one_case(tmp_path: Path, key: Path) -> None:
    """Each model has its files, and all are listed in one table."""
    twin = tmp_path / "ct_tissue_twin"
    shutil.copytree(shipped("models") / "ct_tissue", twin)
    metadata = json.loads((twin / "configs" / "metadata.json").read_text())
    metadata["name"] = "ct_tissue_twin"
    usual = {"structure": "fat", "quantity": "volume_ml", "range": [0, 1], "source": "A test."}
    metadata["scanloom"]["reference_ranges"] = [usual]
    (twin / "configs" / "metadata.json").write_text(json.dumps(metadata))
    both = SegmentOptions(
        models=("ct_tissue", str(twin)), out=tmp_path / "out", key=key, device="cpu"
    )
    source = tmp_path / "part"
    source.mkdir()
    for path in PART:
        shutil.copy2(path, source)
    (record,) = segment_paths([source], both)
    assert record.reason is None, record.detail
    assert record.folder is not None
    for model in ("ct_tissue", "ct_tissue_twin"):
        assert (record.folder / f"{model}-segmentation.nii.gz").is_file()
        assert (record.folder / "dicom" / f"{model}-segmentation.dcm").is_file()
    assert {m.model for m in record.measurements} == {"ct_tissue", "ct_tissue_twin"}
    unusual = {(m.model, m.label) for m in record.measurements if Flag.OUT_OF_RANGE in m.flags}
    assert unusual == {("ct_tissue_twin", "fat")}


def test_another_key_is_refused(published: Path, tmp_path: Path) -> None:
    """Ids of two keys in one folder could not be told apart."""
    second_key = tmp_path / "other"
    second_key.write_bytes(b"x" * 32)
    second_key.chmod(0o600)
    with pytest.raises(scanloom.ScanError) as caught:
        segment_paths([SAMPLE], options(published.parents[1], second_key))
    assert caught.value.code == "KEY_MISMATCH"


COMMAND = ("segment", "--model", "ct_tissue", "--device", "cpu")


@pytest.mark.slow
def test_killed_at_any_moment_leaves_no_partial_folder(tmp_path: Path, key: Path) -> None:
    """20 times SIGKILL at a random moment: a case folder is whole or not there."""
    out = tmp_path / "out"
    arguments = [sys.executable, "-m", "scanloom", *COMMAND, str(SAMPLE)]
    arguments += ["--out", str(out), "--key", str(key)]
    begin = time.monotonic()
    subprocess.run(arguments, check=True, capture_output=True)
    whole = time.monotonic() - begin
    expected = set(digests(next((out / "cases").iterdir())))
    chance = random.Random(20)
    seen = {"whole": 0, "none": 0}
    for _ in range(20):
        shutil.rmtree(out, ignore_errors=True)
        child = subprocess.Popen(
            arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(chance.uniform(0.3, 1.0) * whole)  # most of the time before is imports
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        folders = list((out / "cases").iterdir()) if (out / "cases").is_dir() else []
        for folder in folders:
            assert set(digests(folder)) == expected
        seen["whole" if folders else "none"] += 1
    assert seen["none"] > 0
    subprocess.run(arguments, check=True, capture_output=True)
    assert not list((out / ".work").iterdir())


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 600 kB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no small file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_ends_with_74_and_nothing_half(small_disk: Path, key: Path) -> None:
    """The message names the full disk, and unfinished files are removed."""
    where = ("--out", small_disk / "out", "--key", key)
    ended = scanloom_command(*COMMAND, SAMPLE, *where, "--also", "image")
    assert ended.code == 74, ended.err
    assert "DISK_FULL" in ended.err
    assert not left_behind(small_disk / "out")


def test_a_scan_too_large_for_memory_is_refused_before_it_is_read(
    tmp_path: Path, key: Path
) -> None:
    scan = tmp_path / "scan"
    shutil.copytree(SAMPLE, scan)
    for path in scan.iterdir():  # headers are whole: reading would say TRUNCATED
        os.truncate(path, path.stat().st_size - 10)

    (record,) = segment_paths([scan], options(tmp_path / "out", key, memory_limit=200_000_000))

    assert record.reason is Reason.OUT_OF_MEMORY
    assert "limit 190.7 MiB by `segment --memory-limit`" in record.detail
    assert not left_behind(tmp_path / "out")


@pytest.mark.thorough
def test_each_volume_of_a_scan_is_a_case_of_its_own(tmp_path: Path, key: Path) -> None:
    array = np.full((20, 21, 22, 2), -1000, np.int16)
    array[5:15, 5:15, 5:15] = (40, 60)
    scan = tmp_path / "two.nii.gz"
    nib.save(nib.Nifti1Image(array, np.diag((3.0, 3.0, 3.0, 1.0))), scan)

    (first,), (second,) = (
        segment_paths([scan], options(tmp_path / "out", key, modality="CT", phase=phase))
        for phase in (0, 1)
    )

    assert first.reason is second.reason is None
    assert first.folder != second.folder
    documents = [json.loads((each.folder / "case.json").read_text()) for each in (first, second)]
    assert [document["source"]["phase"] for document in documents] == [0, 1]
    sources = find_sources(tmp_path / "out", [first.id, second.id])
    assert [source.phase for source in sources] == ["0", "1"]


def test_a_run_does_not_do_again_what_segment_did(
    published: Path, tmp_path: Path, key: Path
) -> None:
    out = copy_of(published, tmp_path)
    workflow = segment_workflow(options(out, key))

    result = run(workflow, [SAMPLE], RunOptions(out, key, cluster="none"))

    assert (result.status.before, result.status.done, result.status.failed) == (1, 0, 0)


@pytest.mark.parametrize(
    ("wrong", "message"), [({"orientation": "ABC"}, "orientation"), ({"precision": "hlf"}, "half")]
)
def test_an_option_that_can_not_be_is_named(
    wrong: dict[str, str], message: str, tmp_path: Path, key: Path
) -> None:
    with pytest.raises(scanloom.ScanError, match=message) as caught:
        segment_paths([SAMPLE], options(tmp_path / "out", key, **wrong))
    assert caught.value.code == "WORKFLOW"


def no_images(folder: Path) -> Path:
    (folder / "notes.txt").write_text("nothing here")
    return folder


def text_named_dcm(folder: Path) -> Path:
    path = folder / "scan.dcm"
    path.write_text("this is no DICOM file, whatever its name says")
    return path


def missing_slice(folder: Path) -> Path:
    files = sorted(p for p in SAMPLE.rglob("*") if p.is_file())
    for path in files[: len(files) // 2] + files[len(files) // 2 + 1 :]:
        shutil.copy2(path, folder)
    return folder


def truncated_slice(folder: Path) -> Path:
    for path in sorted(p for p in SAMPLE.rglob("*") if p.is_file()):
        shutil.copy2(path, folder)
    victim = sorted(folder.iterdir())[5]
    victim.write_bytes(victim.read_bytes()[:-200])
    return folder


def nifti_without_orientation(folder: Path) -> Path:
    image = nib.Nifti1Image(np.zeros((20, 20, 20), np.int16), None)
    image.header.set_sform(None, code=0)
    image.header.set_qform(None, code=0)
    nib.save(image, folder / "scan.nii.gz")
    return folder / "scan.nii.gz"


@pytest.mark.parametrize(
    ("make", "codes"),
    [
        (no_images, {"NO_IMAGES"}),
        (text_named_dcm, {"NO_IMAGES", "DAMAGED", "NOT_AN_IMAGE"}),
        (missing_slice, {"SLICE_GAP"}),
        (truncated_slice, {"TRUNCATED", "DAMAGED"}),
        (nifti_without_orientation, {"ORIENTATION_UNKNOWN"}),
    ],
)
def test_bad_input_is_refused_by_its_code(make, codes, tmp_path: Path, key: Path) -> None:
    """One message with the reason code, exit 65, and nothing left behind."""
    source = tmp_path / "in"
    source.mkdir()
    out = tmp_path / "out"
    ended = scanloom_command(*COMMAND, make(source), "--out", out, "--key", key)
    assert ended.code == 65, ended.err
    assert any(code in ended.err for code in codes), ended.err
    assert "Traceback" not in ended.err
    assert not out.exists()


def hostile(bundle: Path, change: str) -> None:
    config = bundle / "configs" / "inference.json"
    text = json.loads(config.read_text())
    match change:
        case "import":
            text["network_def"]["args"] = "$import os"
        case "network":
            text["network_def"]["_target_"] = "TotallyNewNet"
        case "hash":
            weights = next((bundle / "models").glob("model.*"))
            weights.write_bytes(weights.read_bytes() + b"\0")
    config.write_text(json.dumps(text))


@pytest.mark.parametrize(
    ("change", "code"),
    [("import", "MODEL_UNSAFE"), ("network", "MODEL_NETWORK"), ("hash", "MODEL_HASH")],
)
def test_bad_model_is_refused_by_its_code(
    change: str, code: str, tmp_path: Path, key: Path
) -> None:
    """A bundle with an import, another hash or an unknown network is refused before any scan."""
    bundle = tmp_path / "bundle"
    shutil.copytree(shipped("models") / "ct_tissue", bundle)
    hostile(bundle, change)
    out = tmp_path / "out"
    ended = scanloom_command("segment", SAMPLE, "--model", bundle, "--out", out, "--key", key)
    assert ended.code == 65, ended.err
    assert code in ended.err
    assert not out.exists()
