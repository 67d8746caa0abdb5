"""Output folders of other versions: unknown fields are ignored, another schema is named."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from scanloom.core import Reason, ScanError
from support.commands import Ended, scanloom, write_tiny_bundle


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a scan, a model, and an output folder with the scan's result."""
    folder = tmp_path_factory.mktemp("versions")
    voxels = np.random.default_rng(5).normal(0, 100, (32, 32, 16)).astype(np.int16)
    nib.save(nib.Nifti1Image(voxels, np.diag([1.5, 1.5, 2, 1])), folder / "scan.nii.gz")
    write_tiny_bundle(folder / "models")
    assert segment(folder).code == 0
    return folder


def segment(folder: Path) -> Ended:
    where = ("--out", folder / "out", "--key", folder / "key", "--json", "--device", "cpu")
    scan, model = folder / "scan.nii.gz", folder / "models/tiny"
    return scanloom("segment", scan, "--model", model, "--modality", "CT", *where)


def rewrite(case: Path, **fields: object) -> None:
    """Set fields of all documents of a case, whose stamps are not compared then."""
    for file in case.glob("*.json"):
        document = {**json.loads(file.read_text()), **fields}
        if file.name == "timing.json":
            document["files"] = {}
        file.write_text(json.dumps(document))


@pytest.fixture
def case(result: Path) -> Path:
    [folder] = (result / "out/cases").iterdir()
    return folder


def test_fields_that_are_not_known_are_ignored(result: Path, case: Path) -> None:
    rewrite(case, later={"a": 1})

    [record] = segment(result).document["cases"]
    assert record["recalled"]
    ended = scanloom("report", result / "out")
    assert (ended.code, "damaged" in ended.err) == (0, False)


@pytest.mark.parametrize(("schema", "code"), [(1, "OLDER_VERSION"), (9, "NEWER_VERSION")])
def test_another_schema_is_named(result: Path, case: Path, schema: int, code: str) -> None:
    current = json.loads((case / "case.json").read_text())["schema"]
    rewrite(case, schema=schema)
    try:
        [record] = segment(result).document["cases"]
        ended = scanloom("report", result / "out")
    finally:
        rewrite(case, schema=current)

    assert record["reason"]["code"] == code
    assert code in ended.err
    assert "damaged" not in ended.err


def test_the_review_names_another_schema(result: Path, case: Path) -> None:
    pytest.importorskip("starlette", reason="the extra review is not installed")
    from scanloom.review.server.cases import open_case

    current = json.loads((case / "case.json").read_text())["schema"]
    rewrite(case, schema=1)
    try:
        with pytest.raises(ScanError) as caught:
            open_case(result / "out", case.name, result / "key")
    finally:
        rewrite(case, schema=current)
    assert caught.value.reason is Reason.OLDER_VERSION
