"""`scanloom demo`: the shipped models work, and their volumes are those of the drawn studies."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pydicom

from scanloom.cli.commands.demo import HEAD, TORSO, compare, known_volumes
from scanloom.core import CaseRecord, Measurement
from scanloom.core.paths import shipped
from support.commands import scanloom
from support.empty_share import empty_share


def record_of(**volumes: float) -> CaseRecord:
    """Return the record of a case with these volumes in ml."""
    none = dict.fromkeys(("mean", "sd", "p05", "p25", "median", "p75", "p95", "box"))
    measured = tuple(
        Measurement(
            model=TORSO.model,
            label=label,
            number=n,
            voxels=int(ml),
            volume_ml=ml,
            unit="HU",
            components=1,
            **none,
        )
        for n, (label, ml) in enumerate(volumes.items(), 1)
    )
    return CaseRecord("id", None, "", (), None, measured)


def test_volumes_found_are_those_drawn(tmp_path: Path) -> None:
    ended = scanloom("demo", "--out", tmp_path / "demo", "--json")

    assert ended.code == 0, ended.err
    studies = ended.document["studies"]
    for sample, study in zip((TORSO, HEAD), studies, strict=True):
        rows = {row["structure"]: row for row in study["volumes"]}
        for label in sample.judged:
            print(f"{label}: {rows[label]['difference_percent']:+.2f} %")
            assert abs(rows[label]["difference_percent"]) <= sample.within
        folder = Path(study["folder"])
        measured = json.loads((folder / "measurements.json").read_text())["measurements"]
        found = {m["label"]: round(m["volume_ml"], 1) for m in measured}
        assert {k: row["ml"] for k, row in rows.items() if row["ml"]} == {
            k: ml for k, ml in found.items() if ml
        }
        assert empty_share(folder / "preview.png") <= 0.15
    again = scanloom("demo", "--out", tmp_path / "demo")
    assert again.code == 0
    assert all(f"Preview: {Path(s['folder']) / 'preview.png'}" in again.out for s in studies)


def test_volumes_far_off_are_not_within() -> None:
    rows = compare(
        record_of(lung=4000.0, fat=104.0, bone=0.0), {"lung": 4000, "fat": 100, "bone": 7}, TORSO
    )

    assert [(r["structure"], r["difference_percent"], r["within"]) for r in rows] == [
        ("lung", 0.0, True),
        ("fat", 4.0, True),
        ("bone", -100.0, False),
    ]
    assert all(row["judged"] for row in rows)


def test_known_volumes_lie_within_the_study() -> None:
    """All tissues together are smaller than the field of view of the DICOM series, and judged."""
    study = shipped("data") / TORSO.study
    slices = [pydicom.dcmread(f, stop_before_pixels=True) for f in study.iterdir()]
    first = slices[0]
    area = first.Rows * first.Columns * first.PixelSpacing[0] * first.PixelSpacing[1]
    torso = area * float(first.SliceThickness) * len(slices) / 1000
    image = nib.load(shipped("data") / HEAD.study)
    head = np.prod(image.shape) * np.prod(image.header.get_zooms()) / 1000

    for sample, ml in ((TORSO, torso), (HEAD, head)):
        known = known_volumes(shipped("data") / sample.truth, sample.volumes)
        assert set(sample.judged) <= set(known)
        assert 0.1 * ml < sum(known.values()) < ml
