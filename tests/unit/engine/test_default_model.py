"""The model of a scan for which none was named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import nibabel as nib
import numpy as np
import pytest

from scanloom.cards.card import ANY_MODALITY, Channel, Checks
from scanloom.core import Reason, ScanError, Series
from scanloom.core.paths import shipped
from scanloom.engine import default_model as module
from support.model_cards import card


@pytest.mark.parametrize(
    ("modalities", "named"),
    [
        (["CT"], "m0"),
        (["CT", ANY_MODALITY], "m0"),
        (["MR", ANY_MODALITY], "m1"),
        ([ANY_MODALITY], "m0"),
        (["CT", "CT", ANY_MODALITY], None),
        (["MR", "PT"], None),
        (["CT", "CT crop"], "m0"),
        (["CT crop"], None),
    ],
)
def test_a_model_for_the_modality_precedes_one_for_any_and_for_a_crop(
    modalities: list[str], named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _store(modalities, tmp_path, monkeypatch)
    scan = Series("nifti", (tmp_path / "scan.nii",), modality="CT")
    monkeypatch.setattr(module, "_scans", lambda *_, **__: [scan])
    if named is not None:
        assert module.default_model([tmp_path]) == named
        return
    with pytest.raises(ScanError) as caught:
        module.default_model([tmp_path])
    assert caught.value.reason is Reason.MODEL_UNKNOWN


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("CT", "m0"),
        ("MR", "m1"),
        ("no air", "m1"),
        ("soft tissue in CT", None),
        ("label map", "label map"),
        ("label map of floats", "label map"),
        ("CT without its intercept", None),
        ("4D", "m0"),
    ],
)
def test_values_tell_the_model_of_a_file_without_a_modality(
    kind: str, named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _store(["CT", "MR", "MR crop"], tmp_path, monkeypatch)
    torso = nib.load(shipped("data") / "torso_ct.nii.gz")
    array = np.asarray(torso.dataobj, dtype=np.int16)
    crop = np.random.default_rng(0).normal(40, 25, size=(40, 30, 20)).astype(np.int16)
    values = {
        "CT": array,
        "MR": np.asarray(nib.load(shipped("data") / "head_mr.nii.gz").dataobj),
        "no air": np.random.default_rng(0).integers(1, 900, size=(40, 30, 20), dtype=np.int16),
        "label map": np.digitize(array, (-500, -20, 300)).astype(np.int16),
        "label map of floats": np.digitize(array, (-500, -20, 300)).astype(np.float32),
        "CT without its intercept": (array + 1024).clip(0, 1500),
        "soft tissue in CT": crop,
        "4D": np.stack([array, array], axis=3),
    }
    file = tmp_path / "scan.nii.gz"
    nib.save(nib.Nifti1Image(values[kind], torso.affine), file)
    if named == "label map":
        with pytest.raises(ScanError, match="looks like a label map: if it is a scan") as told:
            module.default_model([file])
        assert (told.value.code, told.value.private) == ("MODEL_UNKNOWN", str(file))
        return
    if named is not None:
        assert module.default_model([file]) == named
        return
    with pytest.raises(ScanError, match="2 models fit scans of unknown modality: m0, m1"):
        module.default_model([file])


def _store(modalities: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a store of models m0, m1 and so on, for scans or crops of some modalities."""
    weights = tmp_path / "weights"
    weights.touch()
    cards = [
        replace(
            card(weights),
            name=f"m{n}",
            channels=(Channel("image", modality.removesuffix(" crop")),),
            checks=Checks(refuse=("extent",) if modality.endswith("crop") else ()),
        )
        for n, modality in enumerate(modalities)
    ]
    listed = tuple(SimpleNamespace(card=each) for each in cards)
    monkeypatch.setattr(module, "list_models", lambda: listed)


@pytest.mark.parametrize(("beside", "named"), [("MR", "m1"), ("CT", None)])
def test_a_file_without_a_modality_lies_beside_other_scans(
    beside: str, named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _store(["CT", "MR"], tmp_path, monkeypatch)
    scans = [
        Series("nifti", (shipped("data") / "head_mr.nii.gz",)),
        Series("dicom", (), modality=beside),
    ]
    monkeypatch.setattr(module, "_scans", lambda *_, **__: scans)
    if named is not None:
        assert module.default_model([tmp_path]) == named
        return
    with pytest.raises(
        ScanError, match=r"2 models fit CT and scans of unknown modality: .* one by one"
    ):
        module.default_model([tmp_path])


@pytest.mark.parametrize("beside", ["damaged", "colours", "labels", "slice"])
def test_files_that_tell_nothing_are_passed_over(
    beside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, a file that can't be read has its own reason, not a question of models."""
    _store(["CT", "MR"], tmp_path, monkeypatch)
    folder = tmp_path / "scans"
    folder.mkdir()
    scan, other = shipped("data") / "head_mr.nii.gz", folder / "a.nii.gz"
    rgb = np.zeros((9, 9, 9), dtype=[("R", "u1"), ("G", "u1"), ("B", "u1")])
    labels = np.repeat(np.arange(9, dtype=np.float32), 81).reshape((9, 9, 9), order="F")
    arrays = {"colours": rgb, "labels": labels, "slice": np.ones((9, 9, 1), np.int16)}
    if beside == "damaged":
        other.write_bytes(scan.read_bytes()[:9999])
    else:
        nib.save(nib.Nifti1Image(arrays[beside], np.eye(4)), other)

    reasons = {"damaged": "TRUNCATED", "colours": "PIXEL_TYPE", "slice": "TOO_FEW_SLICES"}
    with pytest.raises(ScanError) as caught:
        module.default_model([other])
    assert caught.value.code == reasons.get(beside, "MODEL_UNKNOWN")
    scans = [Series("nifti", (other,)), Series("dicom", (), modality="CT")]
    with monkeypatch.context() as context:
        context.setattr(module, "_scans", lambda *_, **__: scans)
        assert module.default_model([folder]) == "m0"
    (folder / "b.nii.gz").symlink_to(scan)
    assert module.default_model([folder]) == "m1"


def test_a_selected_series_alone_asks_for_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder with CT and MR, one scan can be segmented without naming the model."""
    _store(["CT", "MR"], tmp_path, monkeypatch)
    folder = tmp_path / "study"
    folder.mkdir()
    for name in ("head_mr.nii.gz", "torso_ct.nii.gz"):
        (folder / name).symlink_to(shipped("data") / name)
    named = {"head_mr.nii.gz": "m1", "torso": "m0"}
    found = {text: module.default_model([folder], selection=text) for text in named}
    assert found == named
    with pytest.raises(ScanError) as caught:
        module.default_model([folder], selection="knee")
    assert caught.value.code == "SERIES_UNKNOWN"
