"""Features of structures through whole commands: `segment`, `run` with its table, and `verify`."""

from __future__ import annotations

import csv
import json
import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import nibabel as nib
import numpy as np
import pytest
from pyarrow import parquet

from scanloom.engine.case import writers
from support import engine_models as em
from support.commands import scanloom
from support.make_run import GOOD, THORAX, Runs, write_study

needs_mirp = pytest.mark.skipif(find_spec("mirp") is None, reason="mirp is not installed")

SETTINGS = """outputs:
  also: [radiomics]
  radiomics: {families: %s, spacing: null, min_voxels: 8}
"""


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A block of soft tissue with noise, in air."""
    path = tmp_path_factory.mktemp("scan") / "ct.nii.gz"
    noise = np.random.default_rng(0).normal(0, 12, (48, 48, 32))
    array = np.full((48, 48, 32), -1000) + noise
    array[8:40, 8:40, 4:28] += 1040
    affine = np.diag((-2.0, -2.0, 2.5, 1.0))
    nib.save(nib.Nifti1Image(array.astype(np.int16), affine), path)
    return path


@pytest.fixture(scope="module")
def case(scan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of its case, by the command."""
    out = tmp_path_factory.mktemp("out") / "out"
    options = ("--modality", "CT", "-m", "ct_tissue", "--device", "cpu", "--json")
    ended = scanloom("segment", scan, *options, "--also", "image,radiomics", "-o", out)
    assert ended.code == 0, ended.out + ended.err
    assert len(ended.document["cases"]) == 1  # nothing else on stdout
    [folder] = (out / "cases").iterdir()
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@needs_mirp
def test_segment_writes_features(case: Path) -> None:
    by_label = {row["label"]: row for row in rows(case / "radiomics.csv")}
    measured = {row["label"]: row for row in rows(case / "measurements.csv")}
    assert by_label.keys() == measured.keys()
    for label, row in by_label.items():
        assert row["voxels"] == measured[label]["voxels"]
        assert row["flags"] == measured[label]["flags"]
    soft = by_label["soft_tissue"]
    assert soft["reason"] == ""
    ml = float(measured["soft_tissue"]["volume_ml"])
    assert float(soft["morph_vol_approx"]) / 1000 == pytest.approx(ml, rel=0.05)
    assert by_label["gas"]["reason"] in ("no voxels", "experimental")
    document = json.loads((case / "case.json").read_text())
    assert document["outputs"]["radiomics"]["spacing"] == 2.0
    for name in ("radiomics.csv", "radiomics.json"):
        assert name in (case / "SHA256SUMS").read_text()
    out = case.parents[1]
    assert scanloom("verify", out).code == 0


@needs_mirp
@pytest.mark.thorough  # mirp loads ITK for files: 20 s
def test_mirp_computes_the_same_from_the_files_of_the_case(case: Path) -> None:
    import mirp

    labels = json.loads((case / "segments.json").read_text())["files"][0]["structures"]
    for row in rows(case / "radiomics.csv"):
        if row["reason"]:
            continue
        [number] = [each["number"] for each in labels if each["label"] == row["label"]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            [table] = mirp.extract_features(
                image=str(case / "image.nii.gz"),
                image_modality="ct",
                mask=str(case / "segmentation.nii.gz"),
                roi_name=str(number),
                new_spacing=2.0,
                base_discretisation_method="fixed_bin_size",
                base_discretisation_bin_width=25.0,
                base_feature_families=["morphology", "statistics", "glcm", "glszm", "ngtdm"],
            )
        expected = table.iloc[0]
        compared = [name for name in row if name in expected.index]
        assert len(compared) > 80
        for name in compared:
            assert float(row[name]) == pytest.approx(float(expected[name]), rel=1e-6), name


@pytest.fixture
def runs(
    tmp_path: Path, model: Path, warm_workers: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> Runs:
    for brightest in GOOD[:2]:
        write_study(tmp_path / "archive", f"good {brightest}", brightest)
    by_formula = Runs(tmp_path, tmp_path / "archive", model)
    for name in ("FORMULA", "FORMULA_SECONDS", "SCANLOOM_KEY"):
        monkeypatch.setenv(name, by_formula.environment[name])
    monkeypatch.setattr("scanloom.engine.worker.supervisor.subprocess", warm_workers)
    monkeypatch.setattr("scanloom.engine.run.model_loader", em.formula_loader)
    return by_formula


@needs_mirp
def test_a_run_has_a_table_of_them(runs: Runs) -> None:
    runs.write(THORAX, SETTINGS % "[statistics]")
    ended = runs()
    assert ended.code == 0, ended.out + ended.err

    table = runs.rows("radiomics")
    assert [row["case"] for row in table] == sorted(runs.cases())
    assert {row["reason"] for row in table} == {""}
    assert {row["recipe"] for row in table} == {row["recipe"] for row in runs.rows("measurements")}
    typed = parquet.read_table(runs.out / "radiomics.parquet").to_pylist()
    assert [row["stat_mean"] for row in typed] == [float(row["stat_mean"]) for row in table]
    for row in table:
        [own] = rows(runs.out / "cases" / row["case"] / "radiomics.csv")
        assert {**own, "case": row["case"], "recipe": row["recipe"]} == row
    assert scanloom("verify", runs.out).code == 0
    joined = scanloom("join", runs.out / "radiomics.csv", "--out", runs.out)
    assert "source_patient_id" in joined.out

    text = (runs.out / "radiomics.csv").read_text()
    mean = table[0]["stat_mean"]
    (runs.out / "radiomics.csv").write_text(text.replace(mean, f"1{mean}"))
    assert "radiomics.csv" in scanloom("verify", runs.out).out
    (runs.out / "radiomics.csv").unlink()
    assert "radiomics.csv" in scanloom("verify", runs.out).out
    assert scanloom("report", runs.out).code == 0
    assert (runs.out / "radiomics.csv").read_text() == text
    assert scanloom("verify", runs.out).code == 0


@needs_mirp
@pytest.mark.thorough
def test_other_settings_make_cases_anew(runs: Runs) -> None:
    runs.write(THORAX, SETTINGS % "[statistics]")
    assert runs().code == 0
    first = runs.cases()
    assert runs().code == 0
    assert runs.cases() == first

    runs.write(THORAX, SETTINGS % "[statistics, intensity_histogram]")
    runs()
    assert runs.cases() == first
    assert "radiomics.families was statistics" in (runs.out / "manifest.csv").read_text()
    shutil.rmtree(runs.out / "cases" / min(first))
    assert runs().code in (0, 1)  # one case is made anew, the other kept as it was
    both = runs.rows("radiomics")
    assert [row["ih_mean_fbs_w25.0"] != "" for row in both] == [True, False]
    assert len({row["settings"] for row in both}) == 2
    assert "OUTDATED" in both[1]["flags"]
    assert scanloom("verify", runs.out).code == 0

    assert runs("--replace").code == 0
    both = runs.rows("radiomics")
    assert all(row["ih_mean_fbs_w25.0"] for row in both)
    assert len({row["settings"] for row in both}) == 1

    runs.write(THORAX)
    assert runs("--replace").code == 0
    assert not [*runs.out.glob("radiomics.*")]
    assert scanloom("verify", runs.out).code == 0


def test_without_mirp_nothing_is_read(
    tmp_path: Path, scan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "find_spec", lambda _: None)
    workflow = tmp_path / "workflow.yaml"
    workflow.write_text("name: a\nmodels: [ct_tissue]\n" + SETTINGS % "[glcm]")
    out = tmp_path / "out"
    for command in (
        ("segment", scan, "-m", "ct_tissue", "--also", "radiomics"),
        ("plan", workflow, scan),
        ("run", workflow, scan),
    ):
        ended = scanloom(*command, "-o", out)
        assert ended.code != 0
        assert "pip install 'scanloom[radiomics]'" in ended.err
        assert not out.exists()
