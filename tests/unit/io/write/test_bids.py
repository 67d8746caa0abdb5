"""The BIDS derivative: laid out as BIDS says, nothing of anybody in it, written whole."""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from scanloom.core import ScanError
from scanloom.engine.run import RunOptions, run
from scanloom.engine.workflow.schema import Workflow
from scanloom.io.output.layout import fan_out
from scanloom.io.write.bids import write_bids
from support.case_folders import (
    case_with,
    grid_of,
    nifti_scan,
    overlapping,
    segmentation_of,
    write_results,
)
from support.commands import write_tiny_bundle
from support.layouts import both_layouts, folder_of
from support.make_report import add_case, id_of, measured


@pytest.fixture
def out(tmp_path: Path, layout: str) -> Path:
    """A case of one model, and one of two models of which one has three layers."""
    out = tmp_path / "out"
    if layout == "fanned":
        fan_out(out)
    scan = nifti_scan(grid_of(np.diag((-1.0, -1.0, 1.0))))
    for n, structures in enumerate(
        ([segmentation_of(scan)], [segmentation_of(scan), overlapping(scan, "the-regions_2")])
    ):
        rows = [measured(s.model, "liver", 5.0) for s in structures]
        folder = add_case(out, id_of(n), rows)
        write_results(folder, structures, scan, case_with(), ())
    return out


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@both_layouts
def test_files_are_called_as_bids_says(out: Path) -> None:
    bids = write_bids(out, "1.2.3")
    subject = f"sub-{id_of(1)}"
    stem = f"{subject}/anat/{subject}_seg-"

    names = files(bids)
    for seg in ("organs", "theregions2", "theregions2layer2", "theregions2layer3"):
        assert {f"{stem}{seg}_dseg{end}" for end in (".json", ".tsv", ".nii.gz")} <= set(names)
    assert len(names) == 4 + 3 * 5
    reported = json.loads((bids / "dataset_description.json").read_text())
    assert reported["DatasetType"] == "derivative"
    assert reported["GeneratedBy"] == [{"Name": "scanloom", "Version": "1.2.3"}]


def test_label_maps_and_their_tables_agree(out: Path) -> None:
    for image in write_bids(out, "1").rglob("*_dseg.nii.gz"):
        with Path(str(image).replace(".nii.gz", ".tsv")).open(newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        numbers = set(np.unique(np.asanyarray(nib.load(image).dataobj)))

        assert numbers <= {int(row["index"]) for row in rows}
        assert rows[0]["name"] == "background"
        assert all(len(row["color"]) == 7 for row in rows)


@both_layouts
def test_it_is_written_anew_or_stays(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bids(out, "1")
    shutil.rmtree(folder_of(out, id_of(0)))
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if target.name == "bids" and not path.name.endswith("-old"):
            raise OSError(errno.EIO, "no")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no"):
        write_bids(out, "1")
    monkeypatch.undo()
    assert len(list((out / "bids").glob("sub-*"))) == 2

    bids = write_bids(out, "1")

    assert [p.name for p in bids.glob("sub-*")] == [f"sub-{id_of(1)}"]
    assert not list((out / ".work").iterdir())


def test_subjects_are_ids_where_folders_have_names_of_sources(out: Path) -> None:
    """Names may hold PatientIDs, and differ in characters that a subject can't have."""
    for n, name in enumerate(("MAIER-1", "MAIER_1")):
        folder_of(out, id_of(n)).rename(out / "cases" / name)

    bids = write_bids(out, "1")

    assert {p.name for p in bids.glob("sub-*")} == {f"sub-{id_of(n)}" for n in range(2)}


def test_files_that_are_no_label_maps_of_the_case_stay_where_they_are(
    out: Path, tmp_path: Path
) -> None:
    """Whoever can write to the output folder may name any file of its reader."""
    secret = tmp_path / "secret.nii.gz"
    folder = folder_of(out, id_of(0))
    (folder / "split").symlink_to(tmp_path)
    for path in (secret, folder / "preview.png"):
        path.write_text("secret")
    for name in (str(secret), "preview.png", f"split/{secret.name}"):
        document = json.loads((folder / "segments.json").read_text())
        document["files"][0]["file"] = name
        (folder / "segments.json").write_text(json.dumps(document))
        damaged = set[str]()
        assert len(list(write_bids(out, "1", damaged).glob("sub-*"))) == 1
        assert damaged == {id_of(0)}


def test_without_links_files_are_copied(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr(os, "link", refuse)
    image = next(write_bids(out, "1").rglob("*_dseg.nii.gz"))

    assert image.stat().st_nlink == 1
    assert nib.load(image).shape == (19, 14, 9)


@pytest.mark.reference
def test_the_validator_accepts_it(out: Path) -> None:
    """Of bids-validator-deno (SCANLOOM_BIDS_VALIDATOR, or on the path)."""
    named = os.environ.get("SCANLOOM_BIDS_VALIDATOR")
    program = named or shutil.which("bids-validator-deno")
    if program is None:
        pytest.skip("bids-validator-deno is not here (SCANLOOM_BIDS_VALIDATOR)")
    path = os.pathsep.join((str(Path(program).parent), os.environ["PATH"]))

    done = subprocess.run(
        [program, "--json", write_bids(out, "1")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": path},
    )

    issues = json.loads(done.stdout)["issues"]["issues"]
    assert [i for i in issues if i.get("severity") == "error"] == []
    assert done.returncode == 0


@pytest.mark.parametrize("description", [None, '{"Name": "my study"}', "[]", "no JSON"])
def test_a_data_set_of_the_users_own_is_left_as_it_is(out: Path, description: str | None) -> None:
    mine = out / "bids"
    mine.mkdir()
    (mine / "scan.nii.gz").write_text("mine")
    if description is not None:
        (mine / "dataset_description.json").write_text(description)
    before = files(out)

    with pytest.raises(ScanError, match="was not written by scanloom") as caught:
        write_bids(out, "1")

    assert caught.value.code == "OUTPUT_UNWRITABLE"
    assert files(out) == before


@pytest.mark.thorough
def test_a_run_refuses_such_a_data_set_before_it_begins(tmp_path: Path) -> None:
    model = write_tiny_bundle(tmp_path / "model")
    mine = tmp_path / "study" / "bids" / "scan.nii.gz"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    options = RunOptions(tmp_path / "study", tmp_path / "key", "none", bids=True)

    with pytest.raises(ScanError, match="was not written by scanloom"):
        run(Workflow(name="any", models=[str(model)]), [mine.parent], options)

    assert files(tmp_path / "study") == ["bids/scan.nii.gz"]
