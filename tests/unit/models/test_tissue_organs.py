"""Organs are drawn into soft tissue and fat only, with labels that fit their HU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import prepare
from prepare import Part, Scan, add_contrast, cut, draw, draw_bowel, draw_organs, drawing, vary
from rules import BONE, FAT, GAS, LUNG, OUTSIDE, SOFT_TISSUE, ScanHints
from scanloom.core import Volume

HU_OF_TISSUE = [-1000, -860, -990, -104, 40, 600]


def torso() -> tuple[np.ndarray, np.ndarray]:
    """Return HU and labels of a block of fat and soft tissue between air, bone and lung."""
    labels = np.full((60, 60, 40), SOFT_TISSUE, np.uint8)
    labels[:, 30:] = FAT
    labels[:4], labels[50:54], labels[56:] = OUTSIDE, BONE, LUNG
    return np.choose(labels, HU_OF_TISSUE).astype(np.float32), labels


@pytest.fixture(scope="module")
def drawn() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return six drawings into the same block."""
    hu, labels = torso()
    rng = np.random.default_rng(3)
    return [draw_organs(hu, labels, rng) for _ in range(6)]


def test_air_lung_and_bone_and_what_is_beside_them_stay(drawn) -> None:
    hu, labels = torso()
    kept = np.isin(labels, (OUTSIDE, LUNG, BONE))
    beside = np.zeros_like(kept)
    beside[:5], beside[49:] = True, True
    for image, tissues in drawn:
        np.testing.assert_array_equal(tissues[kept | beside], labels[kept | beside])
        np.testing.assert_array_equal(image[kept | beside], hu[kept | beside])


def test_organs_brighter_than_muscle_are_soft_tissue_and_gas_is_gas(drawn) -> None:
    _, labels = torso()
    inner = np.isin(labels, (FAT, SOFT_TISSUE))
    bright = gas = 0
    for image, tissues in drawn:
        contrast = inner & (image > 110)
        assert set(np.unique(tissues[contrast])) <= {SOFT_TISSUE}
        assert (tissues[inner & (image < -900)] == GAS).all()
        assert image[tissues == GAS].max(initial=-1000) < -300
        bright, gas = bright + int(contrast.sum()), gas + int((tissues == GAS).sum())
    assert bright > 1000
    assert gas > 1000


def test_gas_is_in_front_of_fluid() -> None:
    """The patient lies on the back; the second axis of RAS points to the front."""
    shape = (40, 40, 40)
    rng = np.random.default_rng(8)
    compared = 0
    for _ in range(40):
        part = Part(
            np.full(shape, 40, np.float32),
            np.full(shape, SOFT_TISSUE, np.uint8),
            np.ones(shape, bool),
        )
        draw_bowel(part, np.full(3, 20.0), rng)
        gas, fluid = np.argwhere(part.tissues == GAS), np.argwhere(part.hu > 99)
        if len(gas) and len(fluid):  # fluid with oral contrast agent
            assert gas[:, 1].mean() > fluid[:, 1].mean()
            compared += 1
    assert compared > 1


def test_where_there_is_no_soft_tissue_nothing_is_drawn() -> None:
    hu, labels = np.full((20, 20, 20), -1000, np.float32), np.zeros((20, 20, 20), np.uint8)
    image, tissues = draw_organs(hu, labels, np.random.default_rng(0))
    np.testing.assert_array_equal(image, hu)
    np.testing.assert_array_equal(tissues, labels)


def test_contrast_agent_brightens_soft_tissue_of_organs_only() -> None:
    hu, labels = torso()
    organs = np.zeros_like(labels)
    organs[4:30, 10:40, 10:30] = 1  # a kidney that reaches into fat and air
    image = add_contrast(hu, labels, organs, np.random.default_rng(2))
    change = image - hu
    assert change[15, 15, 15] > 30
    assert np.abs(change[:, 34:]).max() < 1


def test_a_cut_scan_has_few_slices_or_is_smaller() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        part = np.empty((200, 200, 100))[cut((200, 200, 100), rng)]
        assert 10 <= part.shape[2] < 64
        assert all(50 <= n < 120 or n == 200 for n in part.shape[:2])


def test_a_varied_scan_has_a_tissue_for_each_voxel_and_the_original_stays() -> None:
    hu, labels = torso()
    before = hu.copy(), labels.copy()
    for seed in range(4):
        image, tissues = vary(hu, labels, None, np.random.default_rng(seed))
        assert image.shape == tissues.shape
    np.testing.assert_array_equal(hu, before[0])
    np.testing.assert_array_equal(labels, before[1])


def test_the_sample_study_is_not_drawn() -> None:
    with pytest.raises(ValueError, match="no training set"):
        draw(drawing.SEED)


@pytest.mark.parametrize(
    ("hints", "inside"),
    [(ScanHints(lung=False), OUTSIDE), (ScanHints(cut=True), GAS)],
    ids=["between thighs", "bronchus"],
)
def test_air_that_the_rules_mistake(monkeypatch, hints: ScanHints, inside: int) -> None:
    """Air between the thighs is not gas; that at the border of a view within the chest is."""
    hu = np.full((50, 50, 8), 40, np.float32)
    hu[:, 44:] = -1000  # the room, in front
    if hints.cut:
        hu[:14, 10:24] = -1000  # up to the border
    else:
        hu[18:32, 10:24] = -1000
    volume = Volume.from_array(hu, np.diag((3.0, 3.0, 3.0, 1.0)), modality="CT")
    monkeypatch.setattr(prepare, "load_volume", lambda *_, **__: volume)
    _, tissues, _ = prepare.read_scan(Scan("any", 1, hints), Path())
    at = 5 if hints.cut else 25
    assert (tissues[at, 15:20, 2:6] == inside).all()
    assert (tissues[20:30, 47:, 2:6] == OUTSIDE).all()
