"""Read folders with a MeshNet of brainchop: a TensorFlow.js layer model, or safetensors.

A layer model is as brainchop publishes it: `model.json`, its file of weights and `colormap.json`.
The other form has `config.json`, `labels.json` and `model.safetensors`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from scanloom.cards.card import ANY_MODALITY, ModelCard, NetworkSpec
from scanloom.cards.intensity import IntensityStep, ScaleMinMax, ScaleQuantiles
from scanloom.cards.meshnet.layers_model import FLOAT32_KEY, MODEL_FILE, read_layers_model
from scanloom.cards.meshnet.make_card import find_weights, make_card
from scanloom.cards.meshnet.recipes import DEFAULT, RECIPES, Recipe, name_of_weights
from scanloom.cards.meshnet.structures import Colormap, LabelFields, make_structures
from scanloom.cards.monai.files import read_json
from scanloom.core import Reason, ScanError, Structure

_CONFIG, _LABELS, _SAFETENSORS = "config.json", "labels.json", "model.safetensors"
_COLORMAPS: Final = "colormap*.json"
_LABEL_LIST: Final = TypeAdapter(list[LabelFields])

Document = TypeVar("Document", bound=BaseModel)


class _Normalise(BaseModel, frozen=True):
    kind: Literal["minmax", "quantile"]
    low: float = Field(default=0.0, ge=0, le=1)
    high: float = Field(default=1.0, ge=0, le=1)
    eps: float = Field(default=0.0, ge=0)
    clip: tuple[Literal[0], Literal[1]] | None = None
    mode: str = "rank"

    def step(self) -> IntensityStep:
        """Return the intensity step."""
        if self.kind == "minmax":
            return ScaleMinMax()
        interpolated = self.mode.startswith("linear")
        return ScaleQuantiles(self.low, self.high, self.eps, self.clip is not None, interpolated)


class _Crop(BaseModel, frozen=True):
    above: float = Field(default=0.0, ge=0, lt=1)
    margin: int = Field(default=0, ge=0, le=255)


class _Config(BaseModel, frozen=True):
    """`config.json`; keys that describe what is always done are not read."""

    name: str = ""
    title: str = ""
    network: Literal["MeshNet"]
    in_channels: Literal[1] = 1
    channels: int = Field(ge=1, le=1024)
    classes: int = Field(ge=2, le=1024)
    dilations: list[int] = Field(min_length=1, max_length=100)
    kernel: Literal[3] = 3
    activation: Literal["elu", "relu", "gelu"]
    norm: Literal["instance"] | None = None
    norm_eps: float = Field(default=1e-5, ge=1e-5, le=1e-5)
    bias: list[bool]
    classifier_bias: bool = True
    normalise: _Normalise
    modality: str = "MR"
    crop: _Crop | None = None


def is_layers_model(folder: Path) -> bool:
    """Return whether a folder has the files of brainchop's layer models."""
    return (folder / MODEL_FILE).is_file() and any(folder.glob(_COLORMAPS))


def is_meshnet_folder(folder: Path) -> bool:
    """Return whether a folder has the files of a MeshNet with safetensors."""
    return all((folder / name).is_file() for name in (_CONFIG, _LABELS, _SAFETENSORS))


def read_layers_folder(folder: Path) -> ModelCard:
    """Read a layer model, with the recipe of brainchop if its weights are brainchop's.

    Raises
    ------
    ScanError
        As `read_layers_model`; MODEL_DAMAGED if a file is missing or malformed.
    """
    network, file = read_layers_model(folder)
    weights = find_weights(folder, file, FLOAT32_KEY)
    recipe = RECIPES.get(name_of_weights(weights.sha256) or "", DEFAULT)
    if not recipe.classifier_bias:
        network = NetworkSpec(network.name, {**network.args, "classifier_bias": False})
    return make_card(folder, network, weights, recipe, _read_colormap(folder, network))


def read_meshnet_folder(folder: Path) -> ModelCard:
    """Read a MeshNet with safetensors; the crop is that of brainchop's network of this name.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if a file is missing or malformed.
    """
    config = _validated(_Config, read_json(folder, _CONFIG), _CONFIG)
    labels = _validated_list(read_json(folder, _LABELS))
    if len(config.bias) != len(config.dilations) + 1 or len(set(config.bias[:-1])) != 1:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{_CONFIG} has a bias in some layers only")
    known = RECIPES.get(config.name)
    recipe = Recipe(
        title=config.title or (known or DEFAULT).title,
        normalize=config.normalise.step(),
        above=known.above if known else None,
        margin=known.margin if known else 0,
        modality=ANY_MODALITY if config.modality == "any" else config.modality.partition(" ")[0],
        classifier_bias=config.classifier_bias,
    )
    if config.crop is not None:
        recipe = replace(recipe, above=config.crop.above, margin=config.crop.margin)
    network = {
        "in_channels": config.in_channels,
        "channels": config.channels,
        "classes": config.classes,
        "dilations": config.dilations,
        "activation": config.activation,
        "norm": config.norm,
        "bias": config.bias[0],
        "classifier_bias": config.bias[-1] and config.classifier_bias,
    }
    structures = make_structures(labels, config.classes)
    weights = find_weights(folder, _SAFETENSORS, None)
    return make_card(folder, NetworkSpec("MeshNet", network), weights, recipe, structures)


def _read_colormap(folder: Path, network: NetworkSpec) -> tuple[Structure, ...]:
    """Return the structures of the colormap that names all classes of the network."""
    classes = int(network.args["classes"])
    names = sorted(path.name for path in folder.glob(_COLORMAPS))
    colormaps = [_validated(Colormap, read_json(folder, name), name) for name in names[:10]]
    fitting = [each for each in colormaps if len(each.labels) == classes]
    if not fitting:
        detail = f"no colormap names the network's {classes} classes"
        raise ScanError(Reason.MODEL_DAMAGED, detail)
    try:
        return make_structures(fitting[0].fields(), classes)
    except ValueError as exc:
        raise ScanError(Reason.MODEL_DAMAGED, "the colormap's lists differ in length") from exc


def _validated(kind: type[Document], value: Any, name: str) -> Document:
    """Return a parsed document; MODEL_DAMAGED, with the first key, if it has another form."""
    try:
        return kind.model_validate(value)
    except ValidationError as exc:
        key = ".".join(str(part) for part in exc.errors()[0]["loc"])
        raise ScanError(Reason.MODEL_DAMAGED, f"{name}: {key} is missing or invalid") from exc


def _validated_list(value: Any) -> list[LabelFields]:
    try:
        return _LABEL_LIST.validate_python(value)
    except ValidationError as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{_LABELS} is malformed") from exc
