"""A scan is compared with the scans that its model was trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from scanloom.cards.card import (
    ANY_MODALITY,
    Channel,
    Checks,
    ModelCard,
    ReferenceDirection,
)
from scanloom.cards.check import (
    MAX_SAMPLES,
    check_assumed_modality,
    check_directions,
    check_measurement,
    check_scan,
    percentiles,
)
from scanloom.convert.monai.bundle import read_bundle
from scanloom.core import MODALITIES, Flag, Grid, Measurement, ScanError, Volume
from scanloom.core.measurement import Range, ReferenceRange
from support.bundles import write_bundle


@pytest.fixture
def card(tmp_path: Path) -> ModelCard:
    return read_bundle(write_bundle(tmp_path / "spleen"))


def scan(
    array: NDArray[np.generic] | None = None,
    modality: str | None = "CT",
    spacing: tuple[float, float, float] = (1.0, 1.0, 2.0),
    padding: float | None = None,
) -> Volume:
    if array is None:
        array = np.linspace(-1000, 1000, 20 * 30 * 40).reshape(20, 30, 40).astype(np.int16)
    i, j, k = array.shape
    grid = Grid((i, j, k), np.diag([*spacing, 1.0]))
    return Volume(array, grid, "HU" if modality == "CT" else "unknown", modality, padding)


@pytest.mark.parametrize(
    ("ml", "mean", "change", "flagged"),
    [
        (200.0, 50.0, {}, False),
        (200.0, None, {}, False),
        (99.0, 50.0, {}, True),
        (401.0, 50.0, {}, True),
        (200.0, 91.0, {}, True),
        (200.0, 91.0, {"unit": "a.u."}, False),
        (99.0, 50.0, {"flags": (Flag.TOUCHES_BORDER,)}, False),
        (401.0, 50.0, {"flags": (Flag.TOUCHES_BORDER,)}, True),
        (200.0, 9.0, {"flags": (Flag.TOUCHES_BORDER,)}, True),
        (0.0, None, {"voxels": 0}, False),
        (99.0, 50.0, {"label": "liver"}, False),
        (99.0, 50.0, {"label": "spleen_left"}, True),
    ],
)
def test_a_value_outside_the_ranges_of_the_model_is_flagged(
    ml: float, mean: float | None, change: dict[str, object], flagged: bool, card: ModelCard
) -> None:
    ranges = (
        ReferenceRange("spleen", "volume_ml", Range(100.0, 400.0), "A page."),
        ReferenceRange("spleen", "mean_hu", Range(10.0, 90.0), "A page."),
    )
    none = dict.fromkeys(("sd", "p05", "p25", "median", "p75", "p95", "box"))
    of = {"model": card.name, "label": "spleen", "number": 1, "voxels": 9, "components": 1}
    values = {**none, **of, "volume_ml": ml, "mean": mean, "unit": "HU", **change}

    flags = check_measurement(Measurement(**values), ranges, ["spleen"])

    assert flags == ((Flag.OUT_OF_RANGE,) if flagged else ())


def direction(*of: float, within: float = 30.0) -> ReferenceDirection:
    return ReferenceDirection(
        ("low_left", "low_right"), ("high",), (of[0], of[1], of[2]), within, ""
    )


@pytest.mark.parametrize(
    ("directions", "change", "flagged"),
    [
        ([direction(0, 0, 2)], {}, False),
        ([direction(0, 0, -2)], {}, True),
        ([direction(0, 1, 1.8)], {}, False),  # 29 degrees
        ([direction(0, 1, 1.7)], {}, True),  # 30.5
        ([direction(0, 1, 1.7, within=31)], {}, False),
        ([direction(0, 0, 1), direction(1, 0, 0)], {}, True),
        ([], {}, False),
        ([direction(0, 0, -1)], {"high": (0.9, (0, 0, 30))}, False),  # too small to tell
        ([direction(0, 0, -1)], {"low_left": None}, False),
        ([direction(0, 0, 1)], {"low_left": (2.0, (-80, 0, 0))}, True),  # no longer in the middle
        ([direction(0, 0, 1)], {"low_left": (200.0, (0, 0, 0))}, False),  # where most of it is
        ([direction(0, 0, 1)], {"high": (5.0, (0, 0, 0))}, True),  # no direction at all
    ],
)
def test_structures_in_another_direction_than_usual_are_flagged(
    directions: list[ReferenceDirection], change: dict[str, Any], flagged: bool
) -> None:
    lie = {
        "low_left": (2.0, (-20, 0, 0)),
        "low_right": (2.0, (20, 0, 0)),
        "high": (5.0, (0, 0, 30)),
    }
    found = {
        label: (each[0], np.array(each[1], float))
        for label, each in {**lie, **change}.items()
        if each
    }
    expected = (Flag.DIRECTION_IMPLAUSIBLE,) if flagged else ()
    assert check_directions(found, directions) == expected


def test_scan_of_the_right_kind_has_no_flags(card: ModelCard) -> None:
    checks = Checks(Range(-1024, -900), Range(900, 3000), Range(0.5, 5), Range(10, 2000))

    assert check_scan(scan(), replace(card, checks=checks)) == ()
    assert check_scan(scan(), card) == ()


def test_another_modality_is_skipped(card: ModelCard) -> None:
    with pytest.raises(ScanError) as caught:
        check_scan(scan(modality="MR"), card)
    assert (caught.value.code, caught.value.reason.outcome) == ("MODALITY", "skipped")


def test_unknown_modality_is_flagged(card: ModelCard) -> None:
    assert check_scan(scan(modality=None), card) == (Flag.MODALITY_UNKNOWN,)


def test_model_for_any_modality_takes_every_scan_with_a_flag(card: ModelCard) -> None:
    any_modality = replace(card, channels=(Channel("image", ANY_MODALITY),))

    for modality in (*MODALITIES, None):
        assert check_scan(scan(modality=modality), any_modality) == (Flag.MODALITY_UNKNOWN,)


def test_several_channels_are_refused(card: ModelCard) -> None:
    two = replace(card, channels=(Channel("a", "CT"), Channel("b", "CT")))

    with pytest.raises(ScanError) as caught:
        check_scan(scan(), two)
    assert caught.value.code == "CHANNELS"


@pytest.mark.parametrize(
    ("checks", "flag", "name"),
    [
        (Checks(low=Range(-900, 0)), Flag.HU_IMPLAUSIBLE, "intensity"),
        (Checks(high=Range(0, 900)), Flag.HU_IMPLAUSIBLE, "intensity"),
        (Checks(spacing=Range(0.5, 1.9)), Flag.SPACING_IMPLAUSIBLE, "spacing"),
        (Checks(spacing=Range(1.1, 5)), Flag.SPACING_IMPLAUSIBLE, "spacing"),
        (Checks(extent=Range(21, 500)), Flag.FOV_IMPLAUSIBLE, "extent"),
        (Checks(extent=Range(1, 79)), Flag.FOV_IMPLAUSIBLE, "extent"),
    ],
)
def test_implausible_scan_is_flagged_or_refused(
    checks: Checks, flag: Flag, name: str, card: ModelCard
) -> None:
    assert check_scan(scan(), replace(card, checks=checks)) == (flag,)

    remaining = tuple(n for n in ("intensity", "spacing", "extent") if n != name)
    assert check_scan(scan(), replace(card, checks=replace(checks, refuse=remaining))) == (flag,)
    with pytest.raises(ScanError) as caught:
        check_scan(scan(), replace(card, checks=replace(checks, refuse=(name,))))
    assert caught.value.code == "IMPLAUSIBLE"
    assert name in caught.value.detail


def test_a_tilted_scan_is_flagged_or_refused(card: ModelCard) -> None:
    affine = np.diag([-1.0, -1.0, 2.0, 1.0])
    affine[:3, :3] = Rotation.from_euler("xz", [20, 9], degrees=True).as_matrix() @ affine[:3, :3]
    tilted = replace(scan(), grid=Grid((20, 30, 40), affine))

    def flags(**checks: Any) -> tuple[Flag, ...]:
        return check_scan(tilted, replace(card, checks=Checks(**checks)))

    assert flags() == flags(tilt=22.0) == ()
    assert flags(tilt=21.0) == (Flag.TILT_IMPLAUSIBLE,)
    with pytest.raises(ScanError, match="axes tilted by 22 degrees, not at most 21") as caught:
        flags(tilt=21.0, refuse=("tilt",))
    assert caught.value.code == "IMPLAUSIBLE"


def test_length_on_the_limit_is_inside_though_stored_with_rounding(card: ModelCard) -> None:
    limit = replace(card, checks=Checks(spacing=Range(0.7, 5)))

    assert check_scan(scan(spacing=(0.69999999, 0.7, 5.0000001)), limit) == ()


def test_a_scan_longer_than_any_body_is_refused(card: ModelCard) -> None:
    """Centimetres as millimetres: a network would run for hours on a grid of metres."""
    card = replace(card, checks=Checks())
    assert check_scan(scan(spacing=(20.0, 20.0, 50.0)), card) == ()
    with pytest.raises(ScanError, match="m long, as if its spacing were not in mm"):
        check_scan(scan(spacing=(10.0, 10.0, 80.0)), card)


def test_padding_and_nan_are_left_out() -> None:
    array = np.linspace(0, 100, 1000, dtype=np.float32).reshape(10, 10, 10)
    padded = np.full((10, 10, 20), -2000, np.float32)
    padded[..., :10] = array
    padded[0, 0, 0] = np.nan

    assert percentiles(scan(padded, padding=-2000)) == pytest.approx((1, 99), abs=0.2)
    low, _ = percentiles(scan(padded)) or (0, 0)
    assert low == -2000


@pytest.mark.parametrize(
    ("array", "padding"),
    [
        (np.zeros((5, 5, 5), np.int16), None),
        (np.full((300, 300, 30), 7.5, np.float32), None),
        (np.full((5, 5, 5), -2000, np.int16), -2000),  # nothing but padding
    ],
)
def test_a_scan_of_one_value_is_refused(
    array: NDArray[np.generic], padding: float | None, card: ModelCard
) -> None:
    any_modality = replace(card, channels=(Channel("image", ANY_MODALITY),))
    with pytest.raises(ScanError, match="one value") as caught:
        check_scan(scan(array, modality="MR", padding=padding), any_modality)
    assert caught.value.code == "IMPLAUSIBLE"

    one_differs = array.copy()
    one_differs[2, 3, 1] += 1
    assert check_scan(scan(one_differs, modality="MR", padding=padding), any_modality)


@pytest.mark.parametrize("shape", [(256, 256, 100), (200, 300, 97), (512, 512, 17)])
def test_sampled_percentiles_are_those_of_all_voxels(shape: tuple[int, int, int]) -> None:
    """A ramp across columns, where a step that met only some of them would be far off."""
    i, j, _ = np.indices(shape, dtype=np.float32)
    array = i * 3 + j
    assert array.size > 2 * MAX_SAMPLES

    low, high = percentiles(scan(array)) or (0, 0)

    assert (low, high) == pytest.approx(np.percentile(array, (1, 99)), rel=0.01)


def test_models_of_several_modalities_need_a_modality(card: ModelCard) -> None:
    mr = replace(card, name="of-mr", channels=(Channel("image", "MR"),))
    any_modality = replace(card, name="of-any", channels=(Channel("image", ANY_MODALITY),))

    check_assumed_modality("CT", [card, mr])
    check_assumed_modality(None, [card, card, any_modality])
    with pytest.raises(ScanError, match="of-mr is for MR") as caught:
        check_assumed_modality(None, [card, mr])
    assert caught.value.code == "MODALITY"
