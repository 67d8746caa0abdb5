"""Known errors of a model are told where it is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray

from scanloom.cli.commands.segment import limitation_lines
from support.bundles import transform
from support.commands import scanloom, write_tiny_bundle
from support.review_phantoms import trunk

SENTENCES = ["Misses ribs.", "Takes metal for bone."]


def test_models_show_prints_each(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path / "bundles")
    path = bundle / "configs" / "metadata.json"
    metadata = json.loads(path.read_text())
    metadata.setdefault("scanloom", {})["limitations"] = SENTENCES
    path.write_text(json.dumps(metadata))
    printed = scanloom("models", "show", bundle).out
    assert all(f"! {sentence}" in printed for sentence in SENTENCES)
    assert (
        scanloom("models", "show", bundle, "--json").document["model"]["limitations"] == SENTENCES
    )


def test_a_line_for_each_model_with_the_first_limitation() -> None:
    models = [{"name": "a", "limitations": SENTENCES}, {"name": "b"}]
    single = {"name": "c", "limitations": SENTENCES[:1]}
    assert limitation_lines([*models, *models, single]) == [
        "! a: Misses ribs. 1 more: scanloom models show a",
        "! c: Misses ribs.",
    ]


@pytest.mark.parametrize(
    ("skull", "where", "expected"),
    [(True, "head", True), (False, "head", False), (True, "contrast", False)],
)
def test_a_head_for_which_a_model_was_not_made_is_flagged_in_all_tables(
    skull: bool, where: str, expected: bool, tmp_path: Path
) -> None:
    bundle = write_tiny_bundle(tmp_path / "bundles")
    path = bundle / "configs" / "metadata.json"
    metadata = json.loads(path.read_text())
    limitation = {"text": "Not trained on such scans.", "where": where}
    metadata.setdefault("scanloom", {})["limitations"] = [limitation]
    path.write_text(json.dumps(metadata))
    config = json.loads((path := path.with_name("inference.json")).read_text())
    transform(config, "Spacingd")["pixdim"] = [6.0, 6.0, 6.0]  # 8 windows instead of 567
    path.write_text(json.dumps(config))
    scan, out = tmp_path / "head.nii.gz", tmp_path / "out"
    save(scan, np.asarray(trunk(skull=skull).array))

    ended = scanloom("segment", scan, "--modality", "CT", "-m", bundle, "-o", out, "--json")

    [case] = ended.document["cases"]
    assert ("HEAD_IN_VIEW" in [flag["code"] for flag in case["flags"]]) is expected
    rows = (Path(case["folder"]) / "measurements.csv").read_text().splitlines()[1:]
    assert ["HEAD_IN_VIEW" in row for row in rows] == [expected] * len(rows)


def save(path: Path, array: NDArray[Any]) -> None:
    image = nibabel.Nifti1Image(array, np.diag([3.0, 3.0, 3.0, 1.0]))
    image.set_sform(image.affine, 1)
    image.to_filename(path)
