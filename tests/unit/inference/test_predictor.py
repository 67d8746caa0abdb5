"""A predictor labels a scan on the scan's own grid, the same way each time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from scanloom.cards.card import (
    Argmax,
    Crop,
    KeepLargest,
    ModelCard,
    NetworkGrid,
    NetworkSpec,
    RemoveSmall,
    Threshold,
    Weights,
    Window,
)
from scanloom.core import ComputeOptions, Reason, ScanError, StepTimer, Volume
from scanloom.inference.device import bfloat16_units
from scanloom.inference.network.architectures import build_network
from scanloom.inference.predictor import TorchPredictor
from support import model_cards


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return model_cards.card(model_cards.small_weights(tmp_path_factory.mktemp("model"), seed=1))


def scan(shape: tuple[int, int, int] = (33, 30, 18), **how: Any) -> Volume:
    grid = model_cards.grid(shape, (1.3, 1.2, 2.6), **how)
    return Volume(model_cards.smooth_scan(shape), grid, "HU", "CT")


@pytest.mark.parametrize("tilt", [0.0, 12.0])
def test_labels_lie_on_the_scan(card: ModelCard, tilt: float) -> None:
    volume, clock = scan(codes="LPS", tilt=tilt), StepTimer()
    predictor = TorchPredictor(card, device="cpu")

    result = predictor.predict(volume, clock)

    (layer,) = result.layers
    assert result.model == predictor.name == "by-hand"
    assert result.grid is volume.grid
    assert layer.labels.dtype == np.uint8
    assert set(np.unique(layer.labels)) == {0, 1, 2}
    assert set(clock.steps) == {"resample", "network", "restore", "clean"}


def test_equal_runs_give_equal_bytes(card: ModelCard) -> None:
    """The same predictor twice, and another of the same card."""
    volume = scan(turn=6)
    predictor = TorchPredictor(card)

    first, second, third = (
        p.predict(volume).layers[0].labels.tobytes()
        for p in (predictor, predictor, TorchPredictor(card))
    )

    assert first == second == third


def test_the_device_is_held_neither_while_a_scan_is_cropped_nor_while_it_is_cleaned(
    card: ModelCard,
) -> None:
    card = replace(card, grid=replace(card.grid, crop=Crop("nonzero")))
    seen: list[str] = []

    @contextmanager
    def turn() -> Iterator[None]:
        seen.append("taken")
        yield
        seen.append("given back")

    TorchPredictor(card).predict(scan(), StepTimer(seen.append, device_turn=turn))

    taken, back = seen.index("taken"), seen.index("given back")
    assert seen[:taken] == ["resample"]
    assert {"resample", "network", "restore"} <= set(seen[taken:back])
    assert seen[back + 1 :] == ["clean"]


def test_labels_do_not_depend_on_how_the_scan_is_stored(card: ModelCard) -> None:
    """The same patient, axes flipped and permuted: the same labels at the same places."""
    volume = scan((32, 28, 20), codes="RAS")
    flipped = volume.grid.affine @ np.array(
        [[0, 0, -1, 31], [1, 0, 0, 0], [0, -1, 0, 19], [0, 0, 0, 1]]
    )
    array = np.asfortranarray(volume.array[::-1, :, ::-1].transpose(1, 2, 0))
    turned_volume = Volume(
        array, replace(volume.grid, shape=array.shape, affine=flipped), "HU", "CT"
    )
    predictor = TorchPredictor(card)

    labels = predictor.predict(volume).layers[0].labels
    turned = predictor.predict(turned_volume).layers[0].labels

    same = labels[::-1, :, ::-1].transpose(1, 2, 0) == turned
    assert same.mean() > 0.9999


@pytest.mark.parametrize(
    "dtype", ["int16", "uint16", "int32", "uint8", "float32", "float64", ">i2"]
)
def test_number_types_of_scans(card: ModelCard, dtype: str) -> None:
    """Values that two types can hold give the same labels, and the scan stays as it was."""
    volume = scan()
    values = np.clip(volume.array, 0, 250)
    array = np.asfortranarray(values.astype(dtype))
    before = array.copy()
    predictor = TorchPredictor(card)

    got = predictor.predict(replace(volume, array=array)).layers[0].labels

    np.testing.assert_array_equal(
        got, predictor.predict(replace(volume, array=values)).layers[0].labels
    )
    np.testing.assert_array_equal(array, before)


def test_overlapping_structures_stand_in_layers_of_their_own(card: ModelCard) -> None:
    overlapping = replace(
        card,
        activation="sigmoid",
        decision=Threshold(0.5),
        structures=model_cards.structures(3),
    )

    result = TorchPredictor(overlapping).predict(scan())

    assert [[s.number for s in layer.structures] for layer in result.layers] == [[1], [2], [3]]
    for number, layer in enumerate(result.layers, start=1):
        assert set(np.unique(layer.labels)) <= {0, number}


def test_channels_without_a_structure_leave_no_label(card: ModelCard) -> None:
    volume = scan()
    whole = TorchPredictor(card).predict(volume).layers[0].labels
    for kept in (0, 1):
        reduced = replace(card, structures=(card.structures[kept],))
        labels = TorchPredictor(reduced).predict(volume).layers[0].labels
        number = card.structures[kept].number
        if kept == 1:
            np.testing.assert_array_equal(labels, np.where(whole == number, number, 0))
        assert set(np.unique(labels)) == {0, number}


@pytest.mark.parametrize("restore", ["scores", "labels"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_only_the_largest_part_is_kept(card: ModelCard, restore: Any, when: Any) -> None:
    from scipy import ndimage

    cleaned = replace(card, restore=restore, cleaning=(KeepLargest((1,), when=when),))
    if restore == "scores" and when == "before":
        with pytest.raises(ScanError) as error:
            TorchPredictor(cleaned)
        assert error.value.reason is Reason.MODEL_UNSUPPORTED
        return
    volume = scan()
    plain = TorchPredictor(replace(card, restore=restore)).predict(volume).layers[0].labels

    labels = TorchPredictor(cleaned).predict(volume).layers[0].labels

    assert ndimage.label(plain == 1, np.ones((3, 3, 3)))[1] > 1
    assert ndimage.label(labels == 1, np.ones((3, 3, 3)))[1] == 1
    np.testing.assert_array_equal(labels == 2, plain == 2)


def test_a_volume_to_remove_is_that_of_the_voxels_of_a_tilted_scan(card: ModelCard) -> None:
    """A voxel of a sheared grid is smaller than the product of its spacing."""
    from scipy import ndimage

    volume = scan(tilt=30.0)
    plain = TorchPredictor(card).predict(volume).layers[0].labels
    parts, _ = ndimage.label(plain == 1)
    sizes = np.bincount(parts.ravel())
    smallest = int(sizes[1:].min())
    limit = 1.001 * smallest * volume.grid.voxel_volume

    cleaned = replace(card, cleaning=(RemoveSmall((1,), limit, connectivity=6, when="after"),))
    labels = TorchPredictor(cleaned).predict(volume).layers[0].labels

    assert volume.grid.sheared
    np.testing.assert_array_equal(labels == 1, (plain == 1) & (sizes > smallest)[parts])


def test_a_scan_smaller_than_the_window(card: ModelCard) -> None:
    volume = scan((5, 3, 3))

    labels = TorchPredictor(card).predict(volume).layers[0].labels

    assert labels.shape == (5, 3, 3)


def test_unsupported_cards_are_refused(card: ModelCard) -> None:
    cases = [
        (replace(card, cleaning=(KeepLargest(when="before"),)), Reason.MODEL_UNSUPPORTED),
        (replace(card, network=NetworkSpec("Nothing", {})), Reason.MODEL_NETWORK),
    ]
    for wrong, reason in cases:
        with pytest.raises(ScanError) as error:
            TorchPredictor(wrong)
        assert error.value.reason is reason


def test_a_network_of_too_few_channels_is_refused(card: ModelCard) -> None:
    predictor = TorchPredictor(replace(card, structures=model_cards.structures(3)))

    with pytest.raises(ScanError, match="3 output channels, the card 4") as error:
        predictor.predict(scan())

    assert error.value.reason is Reason.MODEL_NETWORK


@pytest.mark.parametrize("name", ["UNet", "SegResNet"])
def test_a_scan_that_the_network_cannot_take_whole(
    card: ModelCard, name: str, tmp_path: Path
) -> None:
    """One that fails, and one that gives another shape: neither gives labels."""
    whole = replace(card, grid=NetworkGrid("RAS", None), window=Window(None))
    if name == "SegResNet":
        spec = NetworkSpec(name, {"init_filters": 8, "in_channels": 1, "out_channels": 3})
        save_file(build_network(spec).state_dict(), tmp_path / "model.pt")
        digest = hashlib.sha256((tmp_path / "model.pt").read_bytes()).hexdigest()
        whole = replace(whole, network=spec, weights=Weights(tmp_path / "model.pt", digest))

    with pytest.raises(ScanError) as error:
        TorchPredictor(whole).predict(scan())

    assert error.value.reason is Reason.MODEL_NETWORK


def test_settings_of_torch_stay_as_they_were(card: ModelCard) -> None:
    before = (torch.is_grad_enabled(), torch.backends.cudnn.deterministic)

    TorchPredictor(card).predict(scan())

    assert before == (torch.is_grad_enabled(), torch.backends.cudnn.deterministic)
    assert isinstance(card.decision, Argmax)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "settings",
    [
        partial(default_dtype, torch.bfloat16),
        partial(default_dtype, torch.float64),
        partial(torch.device, "meta"),
        partial(torch.autocast, "cpu", torch.bfloat16),
    ],
    ids=["bfloat16", "float64", "meta", "autocast"],
)
def test_settings_of_a_caller_change_no_label(card: ModelCard, settings: Any) -> None:
    """Such as those of a notebook with a language model in half precision."""
    volume, compute = scan((64, 60, 40)), ComputeOptions(precision="float32", engine="torch")
    expected = TorchPredictor(card, compute).predict(volume, uncertainty=True)

    with settings():
        found = TorchPredictor(card, compute).predict(volume, uncertainty=True)

    np.testing.assert_array_equal(found.layers[0].labels, expected.layers[0].labels)
    assert found.uncertainty is not None
    assert expected.uncertainty is not None
    np.testing.assert_array_equal(found.uncertainty.entropy, expected.uncertainty.entropy)


def test_windows_of_air_are_passed_over_where_the_card_allows_it(
    card: ModelCard,
) -> None:
    """A body in much air: the labels, where windows see it, are those without the shortcut."""
    volume = scan((64, 60, 40))
    array = np.full_like(volume.array, -1000)
    array[20:34, 22:38, 14:26] = volume.array[20:34, 22:38, 14:26].clip(-200)
    volume = replace(volume, array=array)
    reported = replace(card, air_below=-500.0, restore="scores")

    clock = StepTimer()
    fast = TorchPredictor(reported).predict(volume, clock).layers[0].labels
    whole = (
        TorchPredictor(reported, ComputeOptions(skip_air=False)).predict(volume).layers[0].labels
    )
    without = TorchPredictor(card).predict(volume).layers[0].labels

    (note,) = clock.notes["skip air"]
    skipped, windows = (int(token) for token in note.split() if token.isdecimal())
    body = array > -500
    differ = int((fast != whole)[body].sum())
    print(f"{note}; {differ} of {body.sum()} voxels of the body differ")
    assert 0 < skipped < windows
    assert differ == 0
    np.testing.assert_array_equal(whole, without)


@pytest.mark.skipif(bfloat16_units() is None, reason="the CPU does not multiply bfloat16")
def test_bfloat16_labels_nearly_as_float32_does(card: ModelCard) -> None:
    """It is taken by itself only where the card lists it; the difference is printed."""
    volume = scan((64, 60, 40))
    listed = replace(card, precisions=("float32", "bfloat16"))
    assert TorchPredictor(card, device="cpu").precision_name == "float32"
    half = TorchPredictor(listed, device="cpu")
    assert half.precision_name == "bfloat16"

    half_labels = half.predict(volume).layers[0].labels
    full_labels = (
        TorchPredictor(listed, device="cpu", compute=ComputeOptions(precision="float32"))
        .predict(volume)
        .layers[0]
        .labels
    )

    print(f"{100 * (half_labels != full_labels).mean():.3f} % of voxels differ")
    assert (half_labels == full_labels).mean() > 0.98
    assert (half_labels != full_labels).any()  # it did calculate in another precision
