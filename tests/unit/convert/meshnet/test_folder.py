"""Cards of MeshNets from both forms in which they are stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scanloom.cards.card import (
    ANY_MODALITY,
    Crop,
    ModelCard,
    Round,
    ScaleHistogram,
    ScaleMinMax,
    ScaleQuantiles,
)
from scanloom.convert.readers import read_model
from scanloom.convert.store import is_model
from scanloom.core import Reason, ScanError
from support.meshnets import layers_model, random_weights, write_layers_model, write_safetensors

ARGUMENTS = {
    "in_channels": 1,
    "channels": 5,
    "classes": 4,
    "dilations": [1, 2, 4, 1],
    "activation": "elu",
    "norm": None,
    "bias": True,
    "classifier_bias": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a layer model."""
    return write_layers_model(tmp_path / "my net", random_weights())


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the layer model."""
    document = layers_model(random_weights())
    edit(document)
    (folder / "model.json").write_text(json.dumps(document))


def layer(document: dict[str, Any], number: int) -> Any:
    """Return the configuration of a layer."""
    return document["modelTopology"]["model_config"]["config"]["layers"][number]["config"]


def layers(document: dict[str, Any]) -> list[Any]:
    """Return the layers."""
    return document["modelTopology"]["model_config"]["config"]["layers"]


def refused(folder: Path, reason: Reason) -> str:
    """Return the message with which a folder is refused."""
    with pytest.raises(ScanError) as caught:
        read_model(folder)
    assert caught.value.reason is reason
    return str(caught.value)


def test_layer_model_becomes_a_card(folder: Path) -> None:
    card = read_model(folder)

    assert (card.name, card.channels[0].modality) == ("my_net", "MR")
    assert card.network.name == "MeshNet"
    assert dict(card.network.args) == ARGUMENTS
    assert card.grid.shape == (256, 256, 256)
    assert (card.grid.orientation, card.grid.alignment) == ("LIA", "centre")
    assert card.grid.crop == Crop("positive", "network")
    assert (card.before, card.after) == ((ScaleHistogram(),), (Round(), ScaleMinMax()))
    assert [s.label for s in card.structures] == [
        "cerebral_white_matter",
        "cerebral_cortex",
        "brain_stem",
    ]
    assert [s.type.value for s in card.structures] == ["68523003", "40146001", "119238007"]


def test_names_of_normalised_layers_end_in_gn(tmp_path: Path) -> None:
    weights = random_weights(bias=False)
    folder = write_layers_model(tmp_path / "net", weights, activation="gelu", suffix="_gn")

    arguments = read_model(folder).network.args

    assert (arguments["norm"], arguments["activation"]) == ("instance", "gelu")
    assert (arguments["bias"], arguments["classifier_bias"]) == (False, True)


def test_both_forms_describe_the_same_network(tmp_path: Path, folder: Path) -> None:
    card = read_model(write_safetensors(tmp_path / "other", random_weights()))

    assert dict(card.network.args) == ARGUMENTS
    assert card.structures == read_model(folder).structures


def test_config_states_normalisation_and_crop(tmp_path: Path) -> None:
    def read(**changes: Any) -> ModelCard:
        return read_model(write_safetensors(tmp_path / "net", random_weights(), **changes))

    assert read().grid.crop is None
    assert read(crop={"above": 0.2, "margin": 4}).grid.crop == Crop(
        "positive", "network", margin=4, above=0.2
    )
    assert read(modality="any").channels[0].modality == ANY_MODALITY
    assert not read(classifier_bias=False).network.args["classifier_bias"]
    normalise = {"kind": "quantile", "low": 0.05, "high": 0.95, "eps": 0, "clip": None}
    assert read(normalise=normalise).after[1] == ScaleQuantiles(0.05, 0.95)
    normalise |= {"eps": 0.001, "clip": [0, 1], "mode": "linear over a histogram"}
    assert read(normalise=normalise).after[1] == ScaleQuantiles(
        0.05, 0.95, 0.001, clip=True, interpolated=True
    )


@pytest.mark.parametrize(
    ("edit", "subject"),
    [
        (lambda d: layers(d)[1].update(class_name="Lambda"), "Lambda"),
        (lambda d: layers(d)[1].update(class_name="BatchNormalization"), "BatchNormalization"),
        (lambda d: layer(d, 1).update(strides=[2, 2, 2]), "strides"),
        (lambda d: layer(d, 1).update(padding="valid"), "padding"),
        (lambda d: layer(d, 1).update(filters=10**9), "filters"),
        (lambda d: layer(d, 2).update(activation="softmax"), "activation"),
        (lambda d: layer(d, 2).update(activation="relu"), "different activations"),
        (lambda d: layer(d, 3).update(dilation_rate=[1, 2, 2]), "convolutions"),
        (lambda d: layers(d)[3].update(inbound_nodes=[[["input", 0, 0, {}]]]), "follow"),
        (lambda d: layers(d).extend([layers(d)[-1]] * 300), "layers"),
        (lambda d: d["weightsManifest"].append({}), "groups"),
        (lambda d: d["weightsManifest"][0].update(paths=["a.bin", "b.bin"]), "paths"),
        (
            lambda d: d["weightsManifest"][0]["weights"][0].update(quantization={"scale": 1}),
            "quantization",
        ),
        (lambda d: d["weightsManifest"][0]["weights"][0].update(dtype="float16"), "dtype"),
    ],
)
def test_other_networks_are_refused_by_name(folder: Path, edit: Any, subject: str) -> None:
    change(folder, edit)

    assert subject in refused(folder, Reason.MODEL_UNSUPPORTED)


def test_damaged_files_are_refused(folder: Path) -> None:
    change(folder, lambda d: d["weightsManifest"][0]["weights"].reverse())
    assert "weightsManifest" in refused(folder, Reason.MODEL_DAMAGED)
    change(folder, lambda d: d.pop("modelTopology"))
    assert "layers" in refused(folder, Reason.MODEL_DAMAGED)
    change(folder, lambda d: d["weightsManifest"][0].update(paths=["gone.bin"]))
    assert "gone.bin" in refused(folder, Reason.MODEL_DAMAGED)
    (folder / "model.json").write_text("[1")
    assert "JSON" in refused(folder, Reason.MODEL_DAMAGED)


@pytest.mark.parametrize("path", ["../model.bin", "/etc/passwd", "..", "a/b.bin"])
def test_weights_outside_the_folder_are_refused(folder: Path, path: str) -> None:
    change(folder, lambda d: d["weightsManifest"][0].update(paths=[path]))

    refused(folder, Reason.MODEL_UNSAFE)


def test_names_must_fit_the_classes(folder: Path, tmp_path: Path) -> None:
    (folder / "colormap.json").write_text('{"R": [0], "G": [0], "B": [0], "labels": ["a"]}')
    assert "4 classes" in refused(folder, Reason.MODEL_DAMAGED)
    unnormalised = write_safetensors(tmp_path / "other", random_weights())
    labels = json.loads((unnormalised / "labels.json").read_text())
    (unnormalised / "labels.json").write_text(json.dumps(labels[::-1]))
    assert is_model(unnormalised)
    assert read_model(unnormalised).structures[0].number == 1
    (unnormalised / "labels.json").write_text(json.dumps([*labels[:3], {**labels[3], "number": 7}]))
    assert "4 classes" in refused(unnormalised, Reason.MODEL_DAMAGED)
    (unnormalised / "labels.json").write_text(
        json.dumps([*labels[:3], {**labels[3], "name": "///"}])
    )
    assert "invalid name" in refused(unnormalised, Reason.MODEL_DAMAGED)


def test_a_colormap_that_fits_is_chosen(folder: Path) -> None:
    (folder / "colormap.json").rename(folder / "colormap3.json")
    (folder / "colormap.json").write_text('{"R": [0], "G": [0], "B": [0], "labels": ["a"]}')

    assert len(read_model(folder).structures) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"network": "UNet"},
        {"channels": 0},
        {"dilations": []},
        {"kernel": 5},
        {"activation": "tanh"},
        {"norm": "batch"},
        {"normalise": {"kind": "zscore"}},
        {"crop": {"above": 2}},
        {"classes": 3},
    ],
)
def test_invalid_config_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write_safetensors(tmp_path / "net", random_weights(), **changes)

    refused(folder, Reason.MODEL_DAMAGED)
