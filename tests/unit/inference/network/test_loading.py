"""Several weights give several networks; two-dimensional ones take windows of one plane."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scanloom.cards.card import ModelCard, NetworkSpec, Weights, Window
from scanloom.core import Reason, ScanError
from scanloom.inference.network.architectures import build_network, check_network
from scanloom.inference.network.loading import TakingTurns, load_network
from support import model_cards

BASIC = {"spatial_dims": 2, "in_channels": 1, "features": [4, 4, 8, 8, 8, 4], "norm": "batch"}
PLANE = Window((1, 32, 32), 0.5, plane=0)


def saved(path: Path, spec: NetworkSpec, seed: int = 0, factor: float = 1.0) -> Weights:
    """Save random weights of a network."""
    torch.manual_seed(seed)
    state = {k: v * factor if v.is_floating_point() else v for k, v in _state(spec).items()}
    save_file(state, path)
    return Weights(path, hashlib.sha256(path.read_bytes()).hexdigest())


def _state(spec: NetworkSpec) -> Mapping[str, torch.Tensor]:
    return build_network(spec).state_dict()


def of_folds(folder: Path, count: int, **changes: Any) -> ModelCard:
    """Return a card with so many weights, each random."""
    card = model_cards.card(model_cards.small_weights(folder), **changes)
    files = [saved(folder / f"{n}.pt", card.network, n) for n in range(count)]
    return replace(card, weights=files[0], folds=tuple(files[1:]))


def test_each_fold_has_its_own_weights(tmp_path: Path) -> None:
    card = of_folds(tmp_path, 3)

    loaded = load_network(card, torch.float32)

    networks = [loaded, *loaded.folds]
    assert len(networks) == 3
    for each, weights in zip(networks, (card.weights, *card.folds), strict=True):
        state = load_file(weights.file)
        assert all(torch.equal(v, state[k]) for k, v in each.network.state_dict().items())


def test_all_folds_calculate_in_one_type(tmp_path: Path) -> None:
    """A single value that overflows half precision decides for all of them."""
    card = of_folds(tmp_path, 2)
    large = saved(tmp_path / "large.pt", card.network, factor=1e6)

    loaded = load_network(replace(card, folds=(*card.folds, large)), torch.float16)

    assert {each.dtype for each in (loaded, *loaded.folds)} == {torch.float32}


@pytest.mark.parametrize("fault", ["absent", "damaged", "changed"])
def test_a_fold_that_cannot_be_read_is_refused(fault: str, tmp_path: Path) -> None:
    card = of_folds(tmp_path, 2)
    file = card.folds[0].file
    if fault == "absent":
        file.unlink()
    else:
        file.write_bytes(b"no weights" if fault == "damaged" else card.weights.file.read_bytes())

    with pytest.raises(ScanError) as error:
        load_network(card, torch.float32)

    assert error.value.reason in (Reason.MODEL_DAMAGED, Reason.MODEL_HASH)
    if fault != "changed":
        with pytest.raises(ScanError):
            check_network(card)


@pytest.mark.parametrize("sums", ["float32", "float16"])
@pytest.mark.parametrize("dimensions", [2, 3])
def test_the_final_layer_stays_where_scores_are_rounded(
    sums: Any, dimensions: int, tmp_path: Path
) -> None:
    spec = NetworkSpec("BasicUNet", {**BASIC, "spatial_dims": dimensions, "out_channels": 9})
    window = PLANE if dimensions == 2 else Window((32, 32, 32))
    weights = saved(tmp_path / "weights.pt", spec)
    card = model_cards.card(weights.file, network=spec, window=replace(window, sums=sums))

    loaded = load_network(card, torch.float32)

    size = card.window.size or ()
    with torch.inference_mode():
        output = loaded.network(torch.zeros(2, 1, *size))
    assert (loaded.head is None) == (sums == "float16")
    assert output.shape == (2, 4 if loaded.head else 9, *size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_network_of_planes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Its scores are those of the slice alone, in bfloat16 nearly."""
    spec = NetworkSpec("BasicUNet", {**BASIC, "out_channels": 3})
    card = model_cards.card(saved(tmp_path / "w.pt", spec).file, network=spec, window=PLANE)
    slices = torch.randn(3, 1, 32, 32)
    plain = build_network(spec)
    plain.load_state_dict(load_file(card.weights.file))

    with torch.inference_mode():
        scores = load_network(card, dtype).network(slices[:, :, None])
        expected = plain(slices)

    assert scores.shape == (3, 3, 1, 32, 32)
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(scores[:, :, 0], expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("dimensions", "window"), [(2, Window((32, 32, 32))), (3, PLANE), (2, Window(None))]
)
def test_windows_of_other_dimensions_are_refused(
    dimensions: int, window: Window, tmp_path: Path
) -> None:
    spec = NetworkSpec("BasicUNet", {**BASIC, "spatial_dims": dimensions, "out_channels": 3})
    card = model_cards.card(saved(tmp_path / "w.pt", spec).file, network=spec, window=window)

    for check in (check_network, lambda card: load_network(card, torch.float32)):
        with pytest.raises(ScanError) as error:
            check(card)
        assert error.value.reason is Reason.MODEL_UNSUPPORTED


def test_networks_that_take_turns_are_on_the_device_one_at_a_time() -> None:
    device = torch.device("meta")  # a copy there has no values, which a second move would need
    first, second = torch.nn.Conv3d(1, 2, 1), torch.nn.Conv3d(1, 2, 1)
    turns = TakingTurns(device)
    run = turns.wrap(first)
    turns.wrap(second)

    scores = run(torch.zeros(1, 1, 4, 4, 4, device=device))

    assert scores.device == first.weight.device == device
    assert second.weight.device.type == "cpu"


def test_a_network_of_the_scan_before_leaves_the_device_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, moves = torch.device("meta"), list[str]()
    first, second = torch.nn.Conv3d(1, 2, 1), torch.nn.Conv3d(1, 2, 1, device=device)
    monkeypatch.setattr(second, "to", moves.append)  # without values it can't be moved
    turns = TakingTurns(device)
    run = turns.wrap(first)
    turns.wrap(second)

    run(torch.zeros(1, 1, 4, 4, 4, device=device))

    assert moves == ["cpu"]
