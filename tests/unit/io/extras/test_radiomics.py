"""`radiomics.csv`: its rows, its settings, and what its read-back refuses."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scanloom.core import Flag, Layer, ScanError, Segmentation
from scanloom.engine.case.writers import WRITERS, read_back, write_files
from scanloom.io.extras.radiomics import COLUMNS, RADIOMICS, feature_columns, read_features
from scanloom.io.output.case_folder import CaseContent
from scanloom.ops.measure import measure
from scanloom.ops.radiomics import settings_hash
from scanloom.options import Outputs, Radiomics
from support import case_folders, model_cards

pytest.importorskip("mirp")

QUICK = Radiomics(families=("statistics",), spacing=None, min_voxels=20)
USED = [w for w in WRITERS if w.name in ("label_maps", "radiomics")]


def written(folder: Path, *segmentations: Segmentation, settings: Radiomics = QUICK) -> CaseContent:
    scan = case_folders.dicom_scan()
    shown = segmentations or (case_folders.segmentation_of(scan),)
    measurements = [m for s in shown for m in measure(s, scan.volume, (Flag.SHEARED,))]
    case = case_folders.case_with(also=("radiomics",), radiomics=settings)
    content = CaseContent(case, scan, shown, measurements)
    write_files(folder, content, USED)
    return content


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "radiomics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_for_each_structure(tmp_path: Path) -> None:
    content = written(tmp_path)
    read_back(tmp_path, content, USED)

    rows = rows_of(tmp_path)
    document = json.loads((tmp_path / "radiomics.json").read_text())
    array, [layer] = content.scan.volume.array, content.segmentations[0].layers
    assert [row["label"] for row in rows] == ["liver", "kidney_left", "spleen"]
    for row, structure in zip(rows, layer.structures, strict=True):
        inside = array[layer.labels == structure.number]
        assert int(row["voxels"]) == inside.size
        assert float(row["stat_mean"]) == pytest.approx(inside.mean(), rel=1e-6)
        assert float(row["stat_var"]) == pytest.approx(inside.var(), rel=1e-6)
        assert float(row["stat_p90"]) == pytest.approx(np.percentile(inside, 90), abs=30)
        assert row["settings"] == document["sha256"] == settings_hash(document["settings"])
        assert row["flags"].split()[-1] == "SHEARED"
        assert row["reason"] == ""
    assert document["settings"]["families"] == ["statistics"]
    assert feature_columns(tmp_path)[: len(COLUMNS)] == list(COLUMNS)
    assert [row["voxels"] for row in read_features(tmp_path)] == [int(r["voxels"]) for r in rows]


def test_equal_content_has_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        written(tmp_path / name, settings=replace(QUICK, families=("morphology", "glcm")))
    for file in ("radiomics.csv", "radiomics.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_models_layers_and_structures_without_features_are_rows_too(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    organs = case_folders.segmentation_of(scan)
    labels = np.where(organs.layers[0].labels == 2, 2, 0).astype(np.uint8, order="F")
    labels[0, 0, 0] = 1
    partly = replace(organs, layers=(Layer(labels, organs.layers[0].structures),))
    content = written(tmp_path, partly, case_folders.overlapping(scan))
    read_back(tmp_path, content, USED)

    rows = rows_of(tmp_path)
    assert [(row["model"], row["label"], row["reason"]) for row in rows] == [
        ("organs", "liver", "smaller than 20 voxels"),
        ("organs", "kidney_left", ""),
        ("organs", "spleen", "no voxels"),
        *(("regions", s.label, "") for s in case_folders.STRUCTURES),
    ]
    assert [row["stat_mean"] == "" for row in rows] == [True, False, True, False, False, False]


def test_without_any_features_there_are_reasons_alone(tmp_path: Path) -> None:
    content = written(tmp_path, settings=replace(QUICK, min_voxels=100_000))
    read_back(tmp_path, content, USED)
    assert feature_columns(tmp_path) == list(COLUMNS)
    assert {row["reason"] for row in rows_of(tmp_path)} == {"smaller than 100000 voxels"}


def test_two_hundred_structures(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    labels = np.zeros(scan.volume.grid.shape, np.uint8, order="F")
    labels.reshape(-1, order="F")[:2200] = np.repeat(np.arange(1, 201), 11)
    structures = tuple(
        replace(case_folders.LIVER, label=f"s{n}", number=n, name=f'Leber, "{n}" äöü')
        for n in range(1, 201)
    )
    many = Segmentation("many", (Layer(labels, structures),), scan.volume.grid, "1")
    content = written(tmp_path, many, settings=replace(QUICK, min_voxels=8))
    read_back(tmp_path, content, USED)
    rows = rows_of(tmp_path)
    assert [row["label"] for row in rows] == [f"s{n}" for n in range(1, 201)]
    assert {row["reason"] for row in rows} <= {"", "one voxel thick"}


def change(column: str, value: str) -> Callable[[list[dict[str, str]]], None]:
    return lambda rows: rows[1].update({column: value})


@pytest.mark.parametrize(
    "edit",
    [
        change("stat_mean", "17.5"),
        change("stat_mean", ""),
        change("stat_mean", "much"),
        change("voxels", "7"),
        change("label", "liver"),
        change("number", "5"),
        change("settings", "0" * 64),
        change("reason", "no voxels"),
        lambda rows: rows.pop(),
        lambda rows: rows.append(rows[0]),
        lambda rows: rows.reverse(),
    ],
)
def test_read_back_refuses_other_content(
    tmp_path: Path, edit: Callable[[list[dict[str, str]]], Any]
) -> None:
    content = written(tmp_path)
    rows = rows_of(tmp_path)
    edit(rows)
    with (tmp_path / "radiomics.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, rows[0].keys())
        table.writeheader()
        table.writerows(rows)
    with pytest.raises(ScanError, match="WRITE_MISMATCH"):
        read_back(tmp_path, content, USED)


def test_read_back_refuses_other_settings(tmp_path: Path) -> None:
    content = written(tmp_path)
    path = tmp_path / "radiomics.json"
    path.write_text(path.read_text().replace("HU", "hu"))
    with pytest.raises(ScanError, match="WRITE_MISMATCH"):
        read_back(tmp_path, content, USED)
    path.unlink()
    with pytest.raises(ScanError, match="WRITE_MISMATCH"):
        read_back(tmp_path, content, USED)


def test_the_estimate_is_that_of_its_settings() -> None:
    grid = model_cards.grid((100, 80, 60), (1.0, 1.0, 1.0))
    half, whole = (Outputs(also=("radiomics",), radiomics=Radiomics(spacing=s)) for s in (2.0, 1.0))
    estimates = [RADIOMICS.memory(grid, [], outputs) for outputs in (half, whole)]
    assert 0 < estimates[0] * 8 == estimates[1]
