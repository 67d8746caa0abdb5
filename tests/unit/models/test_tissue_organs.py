"""Organs are drawn into soft tissue and fat only, with labels that fit their HU."""

from __future__ import annotations

import numpy as np
import pytest

from ct_tissue_training.organs import Drawing, add_organs, draw_bowel, vary_marrow
from ct_tissue_training.rules import BONE, FAT, GAS, LUNG, OUTSIDE, SOFT_TISSUE

HU_OF_TISSUE = [-1000, -860, -990, -104, 40, 600]


def torso() -> tuple[np.ndarray, np.ndarray]:
    """Return HU and labels of a block of fat and soft tissue between air, bone and lung."""
    labels = np.full((60, 60, 40), SOFT_TISSUE, np.uint8)
    labels[:, 30:] = FAT
    labels[:4], labels[50:54], labels[56:] = OUTSIDE, BONE, LUNG
    return np.choose(labels, HU_OF_TISSUE).astype(np.float32), labels


@pytest.fixture(scope="module")
def drawn() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return twelve drawings into the same block."""
    hu, labels = torso()
    rng = np.random.default_rng(3)
    return [add_organs(hu, labels, rng) for _ in range(12)]


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
    empty = Drawing(
        np.full((60, 60, 60), 40, np.float32),
        np.full((60, 60, 60), SOFT_TISSUE, np.uint8),
        np.ones((60, 60, 60), bool),
    )
    rng = np.random.default_rng(8)
    compared = 0
    for _ in range(40):
        bowel = draw_bowel(empty, np.full(3, 30.0), rng)
        gas, fluid = np.argwhere(bowel.labels == GAS), np.argwhere(bowel.hu > 99)
        if len(gas) and len(fluid):  # fluid with oral contrast agent
            assert gas[:, 1].mean() > fluid[:, 1].mean()
            compared += 1
    assert compared > 3


def test_where_there_is_no_soft_tissue_nothing_is_drawn() -> None:
    hu, labels = np.full((20, 20, 20), -1000, np.float32), np.zeros((20, 20, 20), np.uint8)
    image, tissues = add_organs(hu, labels, np.random.default_rng(0))
    np.testing.assert_array_equal(image, hu)
    np.testing.assert_array_equal(tissues, labels)


def test_marrow_changes_and_hard_bone_and_other_tissue_do_not() -> None:
    labels = np.full((30, 30, 30), SOFT_TISSUE, np.uint8)
    labels[8:22, 8:22] = BONE
    hu = np.where(labels == BONE, 700, 40).astype(np.float32)
    hu[12:18, 12:18] = 180  # marrow within hard bone
    rng = np.random.default_rng(4)
    changes = [vary_marrow(hu, labels, rng) - hu for _ in range(20)]
    assert max(change[15, 15, 15] for change in changes) > 60
    assert min(change[15, 15, 15] for change in changes) < -20
    assert max(np.abs(change[:7]).max() for change in changes) == 0
    assert max(np.abs(change[9]).max() for change in changes) < 1
