"""Read folders with a MeshNet of brainchop: a TensorFlow.js layer model, or safetensors.

A layer model is as brainchop publishes it: `model.json`, its file of weights and `colormap.json`.
The other form has `config.json`, `labels.json` and `model.safetensors`.

The layers of a layer model are data, and so are the weights: float32, little-endian, in the order
of the manifest, kernels with the axes depth, height, width, input, output. Layers that a MeshNet
does not have are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from scanloom.cards.card import (
    ANY_MODALITY,
    IntensityStep,
    ModelCard,
    NetworkSpec,
    ScaleMinMax,
    ScaleQuantiles,
)
from scanloom.convert.files import read_json
from scanloom.convert.meshnet.published import (
    DEFAULT,
    RECIPES,
    Colormap,
    LabelFields,
    Recipe,
    make_card,
    make_structures,
    name_of_weights,
    weights_of,
)
from scanloom.convert.weights import FLOAT32_KEY
from scanloom.core import Reason, ScanError, Structure, printable

MODEL_FILE: Final = "model.json"
_NORM_SUFFIX: Final = "_gn"
"""End of the name of a convolution that is followed by an instance norm (brainchop)."""
_MAX_LAYERS: Final = 200

PerAxis = tuple[int, int, int]

_CONFIG, _LABELS, _SAFETENSORS = "config.json", "labels.json", "model.safetensors"
_COLORMAPS: Final = "colormap*.json"
_LABEL_LIST: Final = TypeAdapter(list[LabelFields])
Document = TypeVar("Document", bound=BaseModel)


class _Convolution(BaseModel, frozen=True):
    """Configuration of a layer of the class Conv3D; other keys concern training only."""

    name: str
    filters: int = Field(ge=1, le=1024)
    kernel_size: PerAxis
    dilation_rate: PerAxis = (1, 1, 1)
    strides: Literal[1] | tuple[Literal[1], Literal[1], Literal[1]] = 1
    groups: Literal[1] = 1
    padding: Literal["same"]
    data_format: Literal["channels_last"] = "channels_last"
    activation: Literal["linear"] = "linear"
    use_bias: bool = True


class _Activation(BaseModel, frozen=True):
    activation: Literal["elu", "relu", "gelu"]


class _Input(BaseModel, frozen=True):
    batch_input_shape: tuple[None, int | None, int | None, int | None, int]


class _Layer(BaseModel, frozen=True):
    class_name: str
    config: dict[str, Any]
    name: str
    inbound_nodes: list[Any] = []


class _Tensor(BaseModel, frozen=True, extra="forbid"):
    """A tensor of the manifest; one that is quantized has a further key."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32"]


class _Group(BaseModel, frozen=True):
    paths: tuple[str]
    weights: list[_Tensor]


def read_layers_model(folder: Path) -> tuple[NetworkSpec, str]:
    """Return the network of a layer model, and the name of the file with its weights.

    Parameters
    ----------
    folder : Path
        Contains `model.json`.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if `model.json` is malformed; MODEL_UNSUPPORTED if it is not a MeshNet;
        MODEL_UNSAFE if it names a file outside the folder.
    """
    document = read_json(folder, MODEL_FILE)
    try:
        topology = document["modelTopology"]
        layers = topology.get("model_config", topology)["config"]["layers"]
        groups = document["weightsManifest"]
    except (KeyError, TypeError, AttributeError) as exc:
        detail = f"{MODEL_FILE} has no layers or no weightsManifest"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc
    if not isinstance(layers, list) or not isinstance(groups, list) or len(groups) != 1:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{MODEL_FILE} has several groups of weights")
    if not 3 <= len(layers) <= _MAX_LAYERS:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{MODEL_FILE} has {len(layers)} layers")
    chain = [_parse(_Layer, layer, "a layer") for layer in layers]
    group = _parse(_Group, groups[0], "weightsManifest")
    image, convolutions, activation = _read_chain(chain)
    network = _network(image, convolutions, activation)
    _check_manifest(group.weights, convolutions, image)
    network["classifier_bias"] = convolutions[-1].use_bias
    return NetworkSpec("MeshNet", network), _file_name(group.paths[0])


def _parse(model: type[Document], value: object, subject: str) -> Document:
    """Return a part of the document; MODEL_UNSUPPORTED, with the key, if it has another form."""
    try:
        return model.model_validate(value)
    except ValidationError as exc:
        error = exc.errors()[0]
        key = ".".join(printable(str(part))[:60] for part in error["loc"])
        detail = f"{subject} of {MODEL_FILE} has {key or 'a value'} of another kind"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail) from exc


def _read_chain(chain: Sequence[_Layer]) -> tuple[int, list[_Convolution], str]:
    """Return the image's channels, the convolutions in their order, and their activation."""
    for first, second in pairwise(chain):
        if second.inbound_nodes != [[[first.name, 0, 0, {}]]]:
            detail = f"layer {printable(second.name[:60])!r} does not follow the one before it"
            raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
    kinds = [layer.class_name for layer in chain]
    pairs = (len(chain) - 2) // 2
    expected = ["InputLayer", *["Conv3D", "Activation"] * pairs, "Conv3D"]
    if kinds != expected:
        other = sorted({*kinds} - {*expected}) or ["an order of layers"]
        detail = f"{printable(other[0][:60])} is not part of a MeshNet"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
    image = _parse(_Input, chain[0].config, "the input").batch_input_shape[-1]
    convolutions = [_parse(_Convolution, layer.config, "a convolution") for layer in chain[1::2]]
    activations = {_parse(_Activation, layer.config, "an activation") for layer in chain[2::2]}
    if len(activations) != 1:
        raise ScanError(Reason.MODEL_UNSUPPORTED, "the layers have different activations")
    return image, convolutions, activations.pop().activation


def _network(image: int, convolutions: Sequence[_Convolution], activation: str) -> dict[str, Any]:
    """Return the arguments of the network."""
    *hidden, last = convolutions
    norms = {layer.name.endswith(_NORM_SUFFIX) for layer in hidden}
    sizes = {(layer.filters, layer.kernel_size, layer.use_bias) for layer in hidden}
    dilated = all(len(set(layer.dilation_rate)) == 1 for layer in hidden)
    regular = len(norms) == len(sizes) == 1 and hidden[0].kernel_size == (3, 3, 3) and dilated
    if not regular or last.kernel_size != (1, 1, 1) or last.name.endswith(_NORM_SUFFIX):
        raise ScanError(Reason.MODEL_UNSUPPORTED, "the convolutions are not those of a MeshNet")
    return {
        "in_channels": image,
        "channels": hidden[0].filters,
        "classes": last.filters,
        "dilations": [layer.dilation_rate[0] for layer in hidden],
        "activation": activation,
        "norm": "instance" if norms == {True} else None,
        "bias": hidden[0].use_bias,
    }


def _check_manifest(
    tensors: Sequence[_Tensor], convolutions: Sequence[_Convolution], image: int
) -> None:
    """Refuse a manifest (MODEL_DAMAGED) whose tensors are not those of the layers, in order."""
    expected: list[tuple[str, tuple[int, ...]]] = []
    channels = image
    for layer in convolutions:
        expected.append((f"{layer.name}/kernel", (*layer.kernel_size, channels, layer.filters)))
        if layer.use_bias:
            expected.append((f"{layer.name}/bias", (layer.filters,)))
        channels = layer.filters
    if [(tensor.name, tensor.shape) for tensor in tensors] != expected:
        detail = "the weightsManifest does not fit the layers"
        raise ScanError(Reason.MODEL_DAMAGED, detail)


def _file_name(path: str) -> str:
    """Return the name of a file in the model's folder; MODEL_UNSAFE for any other path."""
    if PurePosixPath(path).name != path or path in (".", ".."):
        detail = f"{MODEL_FILE} names weights outside its folder"
        raise ScanError(Reason.MODEL_UNSAFE, detail)
    return path


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
    weights = weights_of(folder, file, FLOAT32_KEY)
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
    weights = weights_of(folder, _SAFETENSORS, None)
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
