"""A run over all real scans: each file accounted for, and exactly the right CTs segmented."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import nibabel as nib
import pytest

from scanloom.io.output.crosswalk import SourceRecord, find_sources
from support.commands import Ended, scanloom_process
from support.real_scans import scans, scans_folder

pytestmark = pytest.mark.reference

SEGMENTED = {
    # The same series lies there six times, in as many transfer syntaxes: one case
    "": ("3", 108, (161, 143, 48)),
    "ct/crlm1004_abdomen_dicom/dicom": ("2", 20, (512, 512, 20)),
    "ct/totalseg_example_dicom/dicom": ("", 20, (512, 512, 20)),
    "enhanced/legacy_converted_ct_23x38x3/image": ("123456", 3, (23, 38, 3)),
    "enhanced/legacy_converted_ct_23x38x3/multiframe/mf.dcm": ("123456", 1, (23, 38, 3)),
    "enhanced/legacy_converted_ct_24x38x3/image": ("123456", 3, (24, 38, 3)),
    "enhanced/legacy_converted_ct_24x38x3/multiframe/mf.dcm": ("123456", 1, (24, 38, 3)),
    "mixed/messy_tree/cd_export/98892001/CT5N": ("5", 5, (16, 16, 5)),
    "nrrd_mha/dcmqi/ct-3slice": ("2", 3, (512, 512, 3)),
}
"""Folder or file: SeriesNumber, files, shape: the CT series that can be read right."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scans("ct")
    return tmp_path_factory.mktemp("all") / "out"


@pytest.fixture(scope="module")
def ended(out: Path) -> Ended:
    key = {"SCANLOOM_KEY": str(out.parent / "key")}
    root = scans_folder()
    assert root is not None
    return scanloom_process("run", "ct_tissue", root, "--out", out, "--json", environment=key)


@pytest.fixture(scope="module")
def manifest(out: Path, ended: Ended) -> list[dict[str, str]]:
    assert ended.code == 0, ended.err  # all that were selected are done
    with (out / "manifest.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def files_of(folder: Path) -> int:
    """Count files, those in packed ones too."""
    return sum(path.is_file() or path.is_symlink() for path in folder.rglob("*"))


def test_every_file_stands_in_the_manifest_once(manifest, ended):
    assert len({(row["file"], row["copy"]) for row in manifest}) == len(manifest)
    assert len(manifest) == files_of(scans_folder())
    files = ended.document["files"]
    assert files["found"] == len(manifest)
    assert files["found"] == sum(count for name, count in files.items() if name != "found")
    assert files["open"] == 0


def test_segmented_are_exactly_the_cts_that_can_be_read_right(out, manifest):
    cases = [path.name for path in (out / "cases").iterdir()]
    root = scans_folder()
    sources = {relative(source, root): source for source in find_sources(out, cases)}
    assert sources.keys() == SEGMENTED.keys()
    for folder, (number, files, shape) in SEGMENTED.items():
        source = sources[folder]
        assert (source.series_number, source.files) == (number, files)
        label = nib.load(out / "cases" / source.id / "segmentation.nii.gz")
        assert label.shape == shape
        assert {r["outcome"] for r in manifest if r["case"] == source.id} == {"used"}
    assert {r["case"] for r in manifest if r["outcome"] == "used"} == set(cases)


def test_every_mr_is_skipped(out, manifest):
    outcomes = {row["case"]: row["outcome"] for row in manifest}
    from pyarrow import parquet

    rows = parquet.read_table(out / "private" / "index.parquet").to_pylist()
    magnetic = {row["id"] for row in rows if row["modality"] == "MR"}
    assert len(magnetic) > 15
    assert {outcomes[case] for case in magnetic} == {"skipped"}


def test_failures_are_on_the_page_and_verified(out, manifest):
    page = (out / "report" / "index.html").read_text(encoding="utf-8")
    assert all(row["reason"] in page for row in manifest if row["outcome"] == "failed")
    done = scanloom_process("verify", out, "--json")
    assert done.code == 0, done.out
    status = json.loads(scanloom_process("status", out, "--json").out)
    assert status["status"]["state"] == "done"


def relative(source: SourceRecord, root: Path) -> str:
    path = Path(source.path).resolve().relative_to(root.resolve())
    return "" if path == Path() else path.as_posix()
