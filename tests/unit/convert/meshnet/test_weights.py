"""Weights of other names, or of none, become those of the network when a MeshNet is converted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scanloom.convert.conversion import load_card
from scanloom.core import ScanError
from scanloom.inference.network.loading import load_network
from support.meshnets import (
    DILATIONS,
    Weights,
    random_weights,
    write_layers_model,
    write_safetensors,
)

NESTED = {f"layers.{n}": f"model.{n}.0" for n in range(len(DILATIONS))}
NESTED["classifier"] = f"model.{len(DILATIONS)}"


def converted(folder: Path) -> Weights:
    """Return the weights of a model's card, which its network takes."""
    import torch

    card = load_card(folder)
    load_network(card, torch.float32)
    return load_file(card.weights.file)


def equal(weights: Weights, others: Weights) -> bool:
    return weights.keys() == others.keys() and all(
        np.array_equal(weights[name], others[name]) for name in weights
    )


def rename(folder: Path, weights: Weights) -> None:
    """Write weights in the form of brainchop's checkpoints."""
    parts = {name: name.rpartition(".") for name in weights}
    named = {f"{NESTED[p]}.{leaf}": weights[name] for name, (p, _, leaf) in parts.items()}
    save_file(named, folder / "model.safetensors")


def test_both_forms_and_other_names_have_the_weights_of_the_network(tmp_path: Path) -> None:
    weights = random_weights()
    nested = write_safetensors(tmp_path / "nested", weights)
    rename(nested, weights)

    assert equal(converted(write_layers_model(tmp_path / "layers", weights)), weights)
    assert equal(converted(write_safetensors(tmp_path / "numbered", weights)), weights)
    assert equal(converted(nested), weights)


def test_a_bias_that_is_not_applied_is_dropped(tmp_path: Path) -> None:
    weights = random_weights()
    folder = write_safetensors(tmp_path / "net", weights, classifier_bias=False)
    del weights["classifier.bias"]

    assert equal(converted(folder), weights)


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    layers = write_layers_model(tmp_path / "layers", random_weights())
    with (layers / "model.bin").open("ab") as file:
        file.write(bytes(4))
    changes = {"dilations": DILATIONS[1:], "bias": [True] * len(DILATIONS)}
    fewer = write_safetensors(tmp_path / "fewer", random_weights(), **changes)

    for folder in (layers, fewer):
        with pytest.raises(ScanError) as caught:
            converted(folder)
        assert caught.value.code == "MODEL_WEIGHTS"
