"""Windows of air share their scores, whatever the intensity steps are: labels stay the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from scanloom.cards.card import Channel, Clip, Crop, ModelCard, Normalize, ScaleMinMax, Threshold
from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions, StepTimer, Volume
from scanloom.inference.predictor import TorchPredictor
from support import model_cards
from support.nnunet_folders import DATASET, plans, write_model

SHAPE = (72, 64, 40)


def body(background: NDArray[Any], least: float) -> Volume:
    """Return a scan whose values are above `least` in a box, and those of a background outside."""
    array = np.asfortranarray(background.astype(np.float32))
    inside = model_cards.smooth_scan((20, 22, 16)).astype(np.float32)
    array[24:44, 20:42, 12:28] = np.abs(inside) + least + 1
    grid = model_cards.grid(SHAPE, (2.0, 2.0, 2.0))
    return Volume(array, grid, "HU", "CT") if least < 0 else Volume(array, grid, "a.u.", "MR")


def noisy_air() -> Volume:
    return body(np.random.default_rng(0).normal(-1000, 20, SHAPE), -300)


def empty(*bright: tuple[int, int, int]) -> Volume:
    """Return a scan with a background of 0, and voxels that make its foreground larger."""
    background = np.zeros(SHAPE)
    for voxel in bright or ((0, 0, 0), (71, 63, 39)):
        background[voxel] = 1
    return body(background, 0)


def card_in(folder: Path, **changes: Any) -> ModelCard:
    card: ModelCard = model_cards.card(model_cards.small_weights(folder), **changes)
    return card


def of_nnunet(folder: Path, scheme: str, *, masked: bool = False) -> ModelCard:
    dataset = {**DATASET, "channel_names": {"0": "CT" if scheme == "CTNormalization" else "MR"}}
    entries = plans(
        normalization_schemes=[scheme], use_mask_for_norm=[masked], spacing=[2.0, 2.1, 2.1]
    )
    return load_card(write_model(folder, entries, dataset))


MR = (Channel("mr", "MR"),)
MODELS: dict[str, tuple[Callable[[Path], ModelCard], Callable[[], Volume]]] = {
    "clipped CT": (card_in, noisy_air),
    "clipped before": (lambda f: card_in(f, before=(Clip(-200.0, 300.0), Normalize())), noisy_air),
    "z-score": (lambda f: card_in(f, channels=MR, after=(Normalize(),)), empty),
    "z-score, nonzero": (
        lambda f: card_in(f, channels=MR, after=(Normalize(nonzero=True),)),
        empty,
    ),
    "nnU-Net's z-score": (lambda f: of_nnunet(f, "ZScoreNormalization"), empty),
    "nnU-Net's CT": (lambda f: of_nnunet(f, "CTNormalization"), noisy_air),
    "minimum to maximum": (lambda f: card_in(f, channels=MR, after=(ScaleMinMax(),)), empty),
    "overlapping structures": (
        lambda f: card_in(f, decision=Threshold(), activation="sigmoid"),
        noisy_air,
    ),
    "nnU-Net's masked z-score": (
        lambda f: of_nnunet(f, "ZScoreNormalization", masked=True),
        empty,
    ),
}


def compared(card: ModelCard, *volumes: Volume) -> tuple[int, int]:
    """Return the numbers of windows that share scores, and of all; labels must be the same."""
    layers = []
    for skip in (False, True):
        compute = ComputeOptions(precision="float32", skip_air=skip, engine="torch")
        clock = StepTimer()
        predictor = TorchPredictor(card, compute, device="cpu")
        segmentation = predictor.predict(volumes[0], clock, further_channels=volumes[1:])
        layers.append([layer.labels for layer in segmentation.layers])
    for whole, labels in zip(*layers, strict=True):
        assert whole.any()
        np.testing.assert_array_equal(whole, labels)
    (note,) = clock.notes["skip air"]
    shared, windows = (int(token) for token in note.split() if token.isdecimal())
    return shared, windows


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_labels_are_those_of_all_windows(name: str, tmp_path: Path) -> None:
    model, scan = MODELS[name]
    card = model(tmp_path)

    shared, windows = compared(card, scan())

    print(f"{name}: {shared} of {windows}")
    assert shared > windows / 4


def test_several_channels_and_a_crop(tmp_path: Path) -> None:
    """Both channels must be uniform; the box is larger than the second one's body."""
    args = {**model_cards.SMALL_UNET, "in_channels": 2}
    card = model_cards.card(
        *(model_cards.small_weights(tmp_path),),
        channels=(Channel("t1", "MR"), Channel("t2", "MR")),
        after=(Normalize(nonzero=True),),
    )
    card = replace(
        card,
        network=replace(card.network, args=args),
        weights=_two_channels(card, tmp_path / "two.pt"),
        grid=replace(card.grid, crop=Crop("nonzero", grid="network")),
    )

    shared, windows = compared(card, empty((4, 4, 4)), empty((66, 60, 36)))

    assert shared > windows / 4


def _two_channels(card: ModelCard, path: Path) -> Any:
    """Save the weights of a card's network for two channels; return their entry."""
    import hashlib

    from safetensors.torch import load_file, save_file

    state = load_file(card.weights.file)
    shapes = [name for name, value in state.items() if value.ndim == 5 and value.shape[1] == 1]
    for name in shapes:
        state[name] = state[name].repeat(1, 2, 1, 1, 1)
    save_file(state, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return replace(card.weights, file=path, sha256=digest)
