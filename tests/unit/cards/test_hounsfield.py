"""Scales that no CT in Hounsfield units has are told from every CT that a scanner may give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from scanloom.cards.card import ANY_MODALITY, Channel, ModelCard
from scanloom.cards.check import check_scan
from scanloom.convert.monai.bundle import read_bundle
from scanloom.core import Flag, Grid, ScanError, Volume
from scanloom.core.volume import Unit
from support.bundles import spleen_metadata, write_bundle

RANDOM = np.random.default_rng(1)
Array = NDArray[np.generic]


def torso(shape: tuple[int, int, int] = (60, 50, 20), noise: float = 12.0) -> NDArray[np.float32]:
    """Return air around an ellipse of fat, soft tissue and bone, with the noise of a scanner."""
    x, y, _ = np.meshgrid(*(np.linspace(-1, 1, n) for n in shape), indexing="ij")
    radius = np.hypot(x / 0.8, y / 0.7)
    clean = np.select([radius < 0.2, radius < 0.7, radius < 0.9], [1200.0, 50.0, -90.0], -1000.0)
    return (clean + RANDOM.normal(0, noise, shape)).clip(-1024, 3071).round().astype(np.float32)


def padded(value: float) -> NDArray[np.float32]:
    """Return a scan in a circle, with padding outside that no header declares."""
    array = torso()
    x, y = np.ogrid[-1:1:60j, -1:1:50j]
    array[np.hypot(x, y) > 1] = value
    return array


def with_metal() -> NDArray[np.float32]:
    array = torso()
    array[20:24, 20:24] = 30000
    array[18:20, 20:24] = -1024
    return array


def with_voxel(value: float) -> NDArray[np.float32]:
    array = torso()
    array[3, 4, 5] = value
    return array


def airless(mean: float, noise: float, shape: tuple[int, int, int] = (40, 40, 20)) -> Array:
    return RANDOM.normal(mean, noise, shape).round().astype(np.int16)


LABELS = np.digitize(torso(), (-500, -20, 300))

REAL: dict[str, Callable[[], Array]] = {
    "torso": torso,
    "without noise in air": lambda: torso(noise=3),
    "few slices": lambda: torso((23, 38, 3)),
    "padding -2000": lambda: padded(-2000),
    "padding -3024": lambda: padded(-3024),
    "padding -8192": lambda: padded(-8192),
    "padding -32768": lambda: padded(-32768),
    "padding 0 in HU": lambda: padded(0),
    "metal on an extended scale": with_metal,
    "liver without air": lambda: airless(60, 12),
    "aorta with contrast agent, nothing below 0": lambda: airless(350, 25),
    "little noise, tiny": lambda: airless(60, 3, (23, 38, 3)),
    "bone without air": lambda: airless(700, 120),
    "shaft of a femur without air": lambda: np.concatenate(
        [airless(1300, 350, (20, 10, 40)), airless(20, 60, (20, 10, 40))]
    ),
    "heart with contrast agent and ribs": lambda: np.concatenate(
        [airless(350, 60), airless(60, 15), airless(1000, 250, (6, 40, 20))]
    ),
    "lung only": lambda: airless(-860, 60),
    "air only": lambda: airless(-1000, 25),
    "dense lung and muscle without air": lambda: np.concatenate(
        [airless(-450, 130), airless(50, 15)]
    ),
    "few voxels without air": lambda: airless(60, 12, (4, 5, 4)),
}
ALTERED: dict[str, Callable[[], Array]] = {
    "clipped at -200": lambda: torso().clip(-200, None),
    "clipped to a window": lambda: torso().clip(-160, 240),
    "clipped at -20": lambda: torso().clip(-20, None),
    "halved": lambda: (torso() / 2).round(),
    "halved, not rounded": lambda: torso() / 2,
    "doubled": lambda: torso() * 2,
    "a few voxels below -1024, wrapped around": lambda: with_voxel(65535 - 1024),
}
FOREIGN: dict[str, tuple[Callable[[], Array], str]] = {
    "label map": (lambda: LABELS, "lie between 1 and 3"),
    "label map of 117 structures": (lambda: LABELS * 39, "have the lowest, 0"),
    "mask": (lambda: LABELS == 2, "lie between"),
    "constant": (lambda: np.zeros((9, 9, 9)), "all voxels have the value 0"),
    "0 to 255": (lambda: ((torso() + 160) / 400).clip(0, 1) * 255, "no value is below 0"),
    "0 to 1": (lambda: (torso() + 1024) / 4095, "lie between"),
    "-1 to 1": (lambda: torso().clip(-1000, 1000) / 1000, "lie between"),
    "without RescaleIntercept": (lambda: torso() + 1024, "lie between 900 and 1200"),
    "without RescaleIntercept, with artefacts below -1024": (
        lambda: torso() + 1000,
        "lie between 900 and 1200",
    ),
    "without RescaleIntercept, few slices": (
        lambda: torso((23, 38, 3)) + 1024,
        "lie between 900 and 1200",
    ),
    "RescaleIntercept subtracted twice": (lambda: torso() - 1024, "90 % of the values lie"),
    "negative values wrapped around": (
        lambda: torso().astype(np.int16).astype(np.uint16).astype(np.int32),
        "above",
    ),
    "one voxel of 1e30": (lambda: with_voxel(1e30), "the largest value is 1e+30"),
    "RescaleSlope of 10": (lambda: torso() * 10, "are below"),
}


def volume(array: Array, unit: Unit = "HU", modality: str | None = "CT") -> Volume:
    i, j, k = array.shape
    voxels = array.astype(np.uint8) if array.dtype == bool else array
    return Volume(voxels, Grid((i, j, k), np.eye(4)), unit, modality)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return read_bundle(write_bundle(tmp_path_factory.mktemp("models") / "spleen"))


@pytest.mark.parametrize("name", REAL)
def test_ct_of_any_anatomy_and_padding_is_accepted(name: str, card: ModelCard) -> None:
    assert check_scan(volume(REAL[name]()), card) == ()


@pytest.mark.parametrize("name", FOREIGN)
def test_other_scales_are_refused_by_a_model_for_ct(name: str, card: ModelCard) -> None:
    make, message = FOREIGN[name]

    for modality in ("CT", None):
        with pytest.raises(ScanError) as caught:
            check_scan(volume(make(), "unknown", modality), card)
        assert caught.value.code == "IMPLAUSIBLE"
        assert message in caught.value.detail


@pytest.mark.parametrize("name", ALTERED)
def test_altered_hounsfield_units_have_a_flag(name: str, card: ModelCard) -> None:
    for modality in ("CT", None):
        flags = check_scan(volume(ALTERED[name](), "unknown", modality), card)
        assert Flag.HU_IMPLAUSIBLE in flags


RAMP = RANDOM.uniform(-1024, 1023, (40, 40, 20))
NOT_CT: dict[str, Callable[[], Array]] = {
    "MR": lambda: abs(torso()),
    "phase": lambda: RAMP,
    "phase of a head": lambda: np.where(
        torso() > -500,
        RANDOM.normal(0, 80, (60, 50, 20)),
        RANDOM.uniform(-1024, 1023, (60, 50, 20)),
    ),
    "standard scores": lambda: RANDOM.normal(0, 1, (40, 40, 20)),
    "difference": lambda: RANDOM.normal(0, 500, (40, 40, 20)),
}


@pytest.mark.parametrize("modality", ["MR", "PT", "NM"])
def test_ct_without_a_modality_is_refused_by_other_models(modality: str, card: ModelCard) -> None:
    """The scan is accepted if its modality is given, or if it has no negative values."""
    foreign_card = replace(card, channels=(Channel("image", modality),))
    with pytest.raises(ScanError) as caught:
        check_scan(volume(torso(), "unknown", None), foreign_card)
    assert caught.value.code == "MODALITY"
    assert f"`segment --modality {modality}`" in caught.value.detail
    assert check_scan(volume(torso(), "a.u.", modality), foreign_card) == ()
    any_modality = replace(card, channels=(Channel("image", ANY_MODALITY),))
    assert check_scan(volume(torso(), "unknown", None), any_modality)[0] is Flag.MODALITY_UNKNOWN


@pytest.mark.parametrize("name", NOT_CT)
def test_scans_of_other_modalities_are_not_taken_for_ct(name: str, card: ModelCard) -> None:
    mr = replace(card, channels=(Channel("image", "MR"),))
    flags = check_scan(volume(NOT_CT[name](), "unknown", None), mr)
    assert flags == (Flag.MODALITY_UNKNOWN,)


def test_each_ct_among_the_channels_is_checked(card: ModelCard) -> None:
    both = replace(card, channels=(Channel("pet", "PT"), Channel("ct", "CT")))
    pet = volume(abs(torso()), "a.u.", "PT")

    assert check_scan(pet, both, [volume(torso())]) == ()
    with pytest.raises(ScanError, match="IMPLAUSIBLE"):
        check_scan(pet, both, [volume(LABELS)])


def test_models_of_other_modalities_take_any_scale(card: ModelCard) -> None:
    mr = replace(card, channels=(Channel("image", "MR"),))

    assert check_scan(volume(RANDOM.uniform(0, 1e5, (20, 20, 20)), "a.u.", "MR"), mr) == ()


@pytest.mark.parametrize("labels", [LABELS, LABELS.astype(np.float32), LABELS == 2])
@pytest.mark.parametrize("modality", ["MR", None])
def test_a_label_map_is_flagged_by_models_of_other_modalities(
    labels: Array, modality: str | None, card: ModelCard
) -> None:
    mr = replace(card, channels=(Channel("image", "MR"),))

    assert Flag.HU_IMPLAUSIBLE in check_scan(volume(labels, "a.u.", modality), mr)


def test_ct_whose_header_states_another_unit_is_accepted(card: ModelCard) -> None:
    """It has the flag NOT_HOUNSFIELD since it was read."""
    assert check_scan(volume(LABELS * 0.5, "a.u."), card) == ()


@pytest.mark.parametrize(("field", "refused"), [(False, False), (True, True), (None, True)])
def test_a_bundle_may_accept_any_scale(field: bool | None, refused: bool, tmp_path: Path) -> None:
    metadata = spleen_metadata()
    metadata.setdefault("scanloom", {})["checks"] = {"hounsfield": field}
    card = read_bundle(write_bundle(tmp_path / "any", metadata=metadata))

    if refused:
        with pytest.raises(ScanError, match="IMPLAUSIBLE"):
            check_scan(volume(LABELS), card)
    else:
        assert check_scan(volume(LABELS), card) == ()
